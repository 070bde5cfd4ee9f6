"""The six problems against enumeration and evaluators written from their prose alone.

`python -m play` runs the same over any number of instances. These tests hold the checker, too: it
has to complain of answers that are spoiled on purpose.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from play.families import NAMES, Answer, Played, drawn, play
from present import present

# Instances that enumeration is done with in a moment: two with a decision and one without.
QUICK = {
    "amp": (0, 7, 2),
    "astra": (6, 0, 2),
    "hap": (0, 8, 5),
    "poplar": (5, 0, 7),
    "ditto": (4, 2, 8),
    "joint": (8, 9, 12),
}


@cache
def played_once(name: str, seed: int) -> Played:
    """The instance of a seed and the answer of the family's own exact method."""
    with TemporaryDirectory() as folder:
        return play(name, drawn(name, seed), Path(folder), ["exact"])


@pytest.mark.parametrize("name", NAMES)
def test_the_own_exact_method_is_right(name: str) -> None:
    for seed in QUICK[name]:
        judgement = played_once(name, seed).judged()
        assert judgement.complaints == []
        assert judgement.remarks == []


@pytest.mark.wide
@pytest.mark.parametrize("block", range(6))
@pytest.mark.parametrize("name", NAMES)
def test_all_methods_are_right(name: str, block: int, tmp_path: Path) -> None:
    count = 2 if name == "joint" else 6  # its enumeration takes seconds
    for seed in range(100 + count * block, 100 + count * (block + 1)):
        data = drawn(name, seed, wild=seed % 3 == 0)
        assert play(name, data, tmp_path).judged().complaints == [], f"seed {seed}"


def respelled(played: Played, code: int | None = None, **changes: Any) -> Played:
    """With other fields in the first result."""
    answer = played.answers[0]
    document = deepcopy(present(answer.document))
    document["results"][0] |= changes
    code = answer.code if code is None else code
    changed = Answer(answer.exact, code, document, answer.errors)
    return Played(played.problem, played.data, played.best, [changed])


@pytest.mark.parametrize("name", NAMES)
def test_spoiled_answers_are_caught(name: str) -> None:
    played = played_once(name, QUICK[name][0])
    result = present(played.answers[0].document)["results"][0]
    best, decision = present(played.best), result["decision"]

    def complaints(code: int | None = None, **changes: Any) -> str:
        return "\n".join(respelled(played, code, **changes).judged().complaints)

    assert complaints() == ""
    off = best * (1 + 1e-8)
    assert "the decision takes" in complaints(objective=off, bound=off, gap=0.0)
    high = best * (1 + 1e-5)
    assert "is above the optimum" in complaints(objective=high, bound=high, gap=0.0)
    assert "breaks a rule" in complaints(decision=played.problem.spoil(played.data, decision))
    assert "(objective - bound) / objective" in complaints(bound=best * (1 - 1e-7), gap=0.0)
    assert "with gap" in complaints(bound=best / 2, gap=0.5)
    assert "exit code 1" in complaints(code=1)
    nothing: dict[str, Any] = dict.fromkeys(("objective", "bound", "gap", "decision"))
    lost = complaints(code=1, status="infeasible", message="a reason", **nothing)
    assert "infeasible, a decision takes" in lost


@pytest.mark.parametrize("name", NAMES)
def test_what_enumeration_finds_better_or_lacks_is_told(name: str) -> None:
    played = played_once(name, QUICK[name][0])
    best = present(played.best)

    def against(other: float | None) -> str:
        return "\n".join(
            Played(played.problem, played.data, other, played.answers).judged().complaints
        )

    assert "called optimal" in against(best * (1 - 1e-5))
    assert "below the optimum" in against(best * (1 + 1e-5))
    assert "which enumeration lacks" in against(None)
