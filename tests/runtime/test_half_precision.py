"""Passes in bf16 and fp16 beside one process in fp64: within the rounding of the type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is an extra of hetplan")

from parity.asking import run_forked  # noqa: E402 (needs torch)
from parity.cases import Case  # noqa: E402
from parity.curves import PLANS  # noqa: E402
from parity.gradients import assembled, single  # noqa: E402
from parity.halves import CURVE, PRECISIONS, WORLDS, chosen  # noqa: E402

# Relative errors of the loss, of all gradients together, and of the losses of ten steps:
# docs/runtime.md has them.
LOSS = {"bf16": 5e-3, "fp16": 5e-4}
GRADIENTS = {"bf16": 2e-2, "fp16": 2.5e-3}
LOSSES = {"bf16": 5e-3, "fp16": 1e-3}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[Any, Any]]]:
    """World size -> [rank] -> (case, precision) -> (loss, fragments)."""
    folder: Path = tmp_path_factory.mktemp("halves")
    run_forked("parity.halves", folder)
    return {
        world: [torch.load(folder / f"found-{world}-{rank}.pt") for rank in range(world)]
        for world in WORLDS
    }


@pytest.mark.parametrize("case", chosen(), ids=[case.name for case in chosen()])
def test_loss_and_gradients_are_those_of_one_process(
    case: Case, found: dict[int, list[dict[Any, Any]]]
) -> None:
    loss, gradients = single(case)
    size = sum(float(g.norm()) ** 2 for g in gradients.values()) ** 0.5
    errors = {}
    for precision in PRECISIONS:
        ranks = [rank[case.name, precision] for rank in found[case.world]]
        assert ranks[0][0] == pytest.approx(loss, rel=LOSS[precision])
        whole = assembled(gradients, [fragment for rank in ranks for fragment in rank[1]])
        assert {g.dtype for g in whole.values()} == {next(iter(gradients.values())).dtype}
        errors[precision] = (
            sum(float((whole[n] - g).norm()) ** 2 for n, g in gradients.items()) ** 0.5 / size
        )
        assert errors[precision] <= GRADIENTS[precision]
    # it was rounded, as either type does
    assert errors["fp16"] < errors["bf16"] and errors["fp16"] > 1e-5


def test_training_has_the_curve_of_fp32(found: dict[int, list[dict[Any, Any]]]) -> None:
    curves = found[PLANS[CURVE].world_size][0]["curves"]
    assert curves["fp32"][-1] < 0.8 * curves["fp32"][0]
    for precision in PRECISIONS:
        assert curves[precision] == pytest.approx(curves["fp32"], rel=LOSSES[precision])
        assert curves[precision] != curves["fp32"]
