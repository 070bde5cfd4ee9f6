"""Every kind of plan of two ranks on T5, on Whisper, on learned biases and on noise: the loss and
every gradient of one process. Programs, and what a trace drops, are refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is an extra of hetplan")
pytest.importorskip("transformers", reason="transformers is an extra of the tests")

from hetplan.errors import UnsupportedError  # noqa: E402
from hetplan.runtime.tracing.program import trace_samples  # noqa: E402
from parity.asking import HUGGING, run_forked  # noqa: E402
from parity.kinds import KINDS, MODELS, REFUSED, alone, made  # noqa: E402

EXACT = 1e-10
TINY = 1e-14  # what rounding leaves of a gradient that is zero
Told = dict[Any, list[Any]]  # model and kind of a plan -> [rank] what it told


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What the ranks told."""
    folder: Path = tmp_path_factory.mktemp("kinds")
    run_forked("parity.kinds", folder, imports=HUGGING, PARITY_RANKS="2")
    told: Told = {}
    for file in sorted(folder.glob("told-*.pt")):
        for key, value in torch.load(file).items():
            told.setdefault(key, []).append(value)
    return told


def gathered(ranks: list[Any]) -> tuple[float, dict[str, Any]]:
    """Loss and flat gradients of all ranks; every element is of one rank. A refusal is a text, and
    fails."""
    assert not any(isinstance(of_rank, str) for of_rank in ranks), ranks
    (loss,) = {loss for loss, _ in ranks}
    pieces: dict[str, list[Any]] = {}
    for name, _, first, values in (part for _, parts in ranks for part in parts):
        pieces.setdefault(name, []).append((first, values))
    flat = {}
    for name, of_name in pieces.items():
        of_name.sort(key=lambda piece: piece[0])
        ends = [first + len(values) for first, values in of_name]
        assert [first for first, _ in of_name] == [0, *ends[:-1]], name
        flat[name] = torch.cat([values for _, values in of_name])
    return loss, flat


def dims(ranks: list[Any]) -> dict[str, int]:
    """Name -> the dimension of a gradient that comes first in its flat values."""
    return {name: dim for _, parts in ranks for name, dim, _, _ in parts}


@pytest.mark.engine
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", MODELS)
def test_each_kind_of_plan_trains_as_one_process(model: str, kind: str, told: Told) -> None:
    ranks = told[model, kind]
    loss, gradients = gathered(ranks)
    if model == "noise":  # one process draws other numbers
        expected, of_one = gathered(told[model, "one"])
    else:
        expected, of_one = alone(model)
        of_one = {
            name: of_one[name].movedim(dim, 0).reshape(-1) for name, dim in dims(ranks).items()
        }
    assert loss == pytest.approx(expected, rel=EXACT)
    assert gradients.keys() == of_one.keys()
    off = {}
    for name, gradient in of_one.items():
        largest = float(gradient.abs().max())
        error = float((gradients[name] - gradient).abs().max())
        if error > EXACT * largest + TINY:
            off[name] = error / largest
    assert not off


@pytest.mark.engine
@pytest.mark.parametrize("model", REFUSED)
def test_what_no_plan_trains_is_one_line(model: str, told: Told) -> None:
    _, words = REFUSED[model]
    assert all(words in line and "\n" not in line for line in told[model])


@pytest.mark.engine
@pytest.mark.parametrize("model", MODELS)
def test_programs_have_no_rule_for_them(model: str) -> None:
    with pytest.raises(UnsupportedError, match="without a rule: ") as caught:
        trace_samples(made(model), 2)
    assert "\n" not in str(caught.value)
