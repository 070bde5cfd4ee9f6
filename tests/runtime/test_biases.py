"""Biases of attention that are learned: the loss and every gradient where several ranks share a
layer, beside one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is an extra of hetplan")
pytest.importorskip("transformers", reason="transformers is an extra of the tests")

from parity.asking import HUGGING, run_forked  # noqa: E402
from parity.biases import CASES, QUICK, alone  # noqa: E402
from parity.divided import Case  # noqa: E402

EXACT = 1e-10
TINY = 1e-14  # what rounding leaves of a gradient that is zero
Told = dict[tuple[str, str], list[Any]]  # name and model of a case -> [rank] what it told


def told_by(target: str, folder: Path, largest: int) -> Told:
    """All cases of a target."""
    run_forked(target, folder, imports=HUGGING, PARITY_RANKS=str(largest))
    told: Told = {}
    for file in sorted(folder.glob("told-*.pt")):
        for key, value in torch.load(file).items():
            told.setdefault(key, []).append(value)
    return told


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What two ranks told of some cases."""
    return told_by("parity.biases:quick", tmp_path_factory.mktemp("quick"), 2)


@pytest.fixture(scope="module")
def all_told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What all ranks told of all cases."""
    return told_by("parity.biases", tmp_path_factory.mktemp("all"), 4)


def check(case: Case, told: Told) -> None:
    """Every element of every gradient, each once."""
    loss, gradients = alone(case.model)
    ranks = told[case.name, case.model]
    assert [own for own, _ in ranks] == pytest.approx([loss] * case.world, rel=EXACT)
    seen = dict.fromkeys(gradients, 0)
    off = {}
    for name, dim, first, values in (part for _, parts in ranks for part in parts):
        moved = gradients[name].movedim(dim, 0).reshape(-1)
        seen[name] += len(values)
        error = float((values - moved[first : first + len(values)]).abs().max())
        if error > EXACT * float(moved.abs().max()) + TINY:
            off[name] = error / float(moved.abs().max())
    assert not off
    assert seen == {name: whole.numel() for name, whole in gradients.items()}


@pytest.mark.engine
@pytest.mark.parametrize("case", QUICK, ids=lambda case: f"{case.name}, {case.model}")
def test_two_ranks_have_the_gradients_of_one_process(case: Case, quick: Told) -> None:
    check(case, quick)


@pytest.mark.wide
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}, {case.model}")
def test_ranks_have_the_gradients_of_one_process(case: Case, all_told: Told) -> None:
    check(case, all_told)
