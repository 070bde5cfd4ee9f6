"""The packaged instances: records are reproduced, heuristics stay above, bounds below."""

from __future__ import annotations

import pytest

from hetplan.formulations.ditto.family import FAMILY
from hetplan.instances.library import Entry, library
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Options, Run

ENTRIES = [entry for entry in library() if entry.problem == "ditto"]
# More than a second: proven again with pytest -m wide. SLOW: of every fourth of the others.
LARGE = ("three-types", "a100", "layers-96", "layers-192")
SLOW = "ditto-ex3-nb32-memory"
# Those small enough for Oobleck's exhaustive table.
SMALL = ("ex1", "ex2", "tiny")


def cases(entries: list[Entry]) -> list[object]:
    """By name. By default every fourth of those that are not large."""
    small = [e for e in entries if not any(word in e.name for word in LARGE)]
    quick = [e for e in small[::4] if e.name != SLOW]
    return [
        pytest.param(e, id=e.name, marks=() if e in quick else pytest.mark.wide) for e in entries
    ]


def test_ex1_to_ex5_are_packaged_with_both_heads_and_batches() -> None:
    names = {entry.name for entry in ENTRIES}
    expected = {
        f"ditto-ex{i}-nb{n}-{head}"
        for i in range(1, 6)
        for n in (32, 128)
        for head in ("head", "flat")
    }
    assert expected <= names


@pytest.mark.parametrize("entry", cases(ENTRIES))
def test_exact_reproduces_the_record(entry: Entry) -> None:
    best = entry.best_known()
    assert best is not None
    result = solve(FAMILY, entry.load().data, "exact", Run(Options(threads=1)))
    assert result.status == "optimal"
    assert result.objective == pytest.approx(best.objective, rel=1e-6)


@pytest.mark.parametrize("entry", cases(ENTRIES))
def test_heuristics_stay_above_the_record(entry: Entry) -> None:
    best = entry.best_known()
    assert best is not None
    data, small = entry.load().data, any(w in entry.name for w in SMALL)
    methods = ("paper", "merge", "oobleck", "greedy-joined") if small else ("paper", "merge")
    found = {m: solve(FAMILY, data, m, Run(Options(threads=1))).objective for m in methods}
    assert all(o is None or o >= best.objective * (1 - 1e-6) for o in found.values())
    if found["paper"] is not None:
        assert found["merge"] is not None and found["merge"] <= found["paper"] * (1 + 1e-6)
    if "-ex" in entry.name and "a100" not in entry.name and "memory" not in entry.name:
        assert found["paper"] is not None, "the paper's own clusters"
