"""Layers of users' models on several ranks: losses, every gradient, what a rank holds and computes,
and a checkpoint that another plan goes on from, beside one process."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is an extra of hetplan")
pytest.importorskip("transformers", reason="transformers is an extra of the tests")

from parity.asking import run_forked  # noqa: E402
from parity.divided import CASES, RATE, WORLDS, Case, alone  # noqa: E402

EXACT = 1e-10
alone = cache(alone)


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[Any, Any]]]:
    """World size -> [rank] what it left of all cases."""
    folder: Path = tmp_path_factory.mktemp("divided")
    run_forked("parity.divided", folder)
    return {
        world: [torch.load(folder / f"left-{world}-{rank}.pt") for rank in range(world)]
        for world in WORLDS
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}, {case.model}")
def test_ranks_train_as_one_process(case: Case, left: dict[int, list[dict[Any, Any]]]) -> None:
    """By plain steps of SGD, so that weights are equal only where all gradients are."""
    losses, weights, flops = alone(case.model)
    ranks = [rank[case.name, case.model] for rank in left[case.world]]
    assert all(rank["losses"] == pytest.approx(losses, rel=EXACT) for rank in ranks)
    for expected, ours in zip(weights, ranks[0]["weights"], strict=True):
        for name, value in expected.items():
            error = float((ours[name] - value).norm()) / RATE
            assert error <= EXACT * max(1.0, float(value.norm())), f"{name}: {error}"
    whole = sum(value.numel() for value in weights[0].values())
    if len(case.stages) == 1:
        assert all(rank["held"] <= case.share * whole for rank in ranks)
        print(case.name, [rank["held"] / whole for rank in ranks], [rank["flops"] / flops for rank in ranks])
