"""The six problems against enumeration and evaluators written from their prose alone.

`python -m play` runs the same over any number of instances. These tests hold the checker, too: it
has to complain of answers that are spoiled on purpose.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
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


@pytest.mark.parametrize("name", NAMES)
def test_the_own_exact_method_is_right(name: str, tmp_path: Path) -> None:
    for seed in QUICK[name]:
        played = play(name, drawn(name, seed), tmp_path, ["exact"])
        judgement = played.judged()
        assert judgement.complaints == []
        assert judgement.remarks == []


@pytest.mark.wide
@pytest.mark.parametrize("block", range(6))
@pytest.mark.parametrize("name", NAMES)
def test_all_methods_are_right(name: str, block: int, tmp_path: Path) -> None:
    for seed in range(100 + 6 * block, 106 + 6 * block):
        assert play(name, drawn(name, seed), tmp_path).judged().complaints == [], f"seed {seed}"


def respelled(played: Played, code: int | None = None, **changes: Any) -> Played:
    """With other fields in the first result."""
    answer = played.answers[0]
    document = deepcopy(present(answer.document))
    document["results"][0] |= changes
    code = answer.code if code is None else code
    changed = Answer(answer.exact, code, document, answer.errors)
    return Played(played.problem, played.data, played.best, [changed])


@pytest.mark.parametrize("name", NAMES)
def test_spoiled_answers_are_caught(name: str, tmp_path: Path) -> None:
    data = drawn(name, QUICK[name][0])
    played = play(name, data, tmp_path, ["exact"])
    result = present(played.answers[0].document)["results"][0]
    best, decision = present(played.best), result["decision"]

    def complaints(code: int | None = None, **changes: Any) -> str:
        return "\n".join(respelled(played, code, **changes).judged().complaints)

    assert complaints() == ""
    off = best * (1 + 1e-8)
    assert "the decision takes" in complaints(objective=off, bound=off, gap=0.0)
    high = best * (1 + 1e-5)
    assert "is above the optimum" in complaints(objective=high, bound=high, gap=0.0)
    assert "breaks a rule" in complaints(decision=played.problem.spoil(data, decision))
    assert "(objective - bound) / objective" in complaints(bound=best * (1 - 1e-7), gap=0.0)
    assert "with gap" in complaints(bound=best / 2, gap=0.5)
    assert "exit code 1" in complaints(code=1)
    nothing: dict[str, Any] = dict.fromkeys(("objective", "bound", "gap", "decision"))
    lost = complaints(code=1, status="infeasible", message="a reason", **nothing)
    assert "infeasible, a decision takes" in lost


@pytest.mark.parametrize("name", NAMES)
def test_what_enumeration_finds_better_or_lacks_is_told(name: str, tmp_path: Path) -> None:
    played = play(name, drawn(name, QUICK[name][0]), tmp_path, ["exact"])
    best = present(played.best)

    def against(other: float | None) -> str:
        return "\n".join(
            Played(played.problem, played.data, other, played.answers).judged().complaints
        )

    assert "called optimal" in against(best * (1 - 1e-5))
    assert "below the optimum" in against(best * (1 + 1e-5))
    assert "which enumeration lacks" in against(None)
