"""The packaged `astra` instances: every exact method finds the optimum on file, the paper's
enumeration none better."""

from __future__ import annotations

import pytest

from hetplan.formulations import family
from hetplan.instances.library import Entry, library
from hetplan.solvers.options import Options
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Run

ASTRA = family("astra")
ENTRIES = library("astra")
EXACT = [method.name for method in ASTRA.methods if method.exact and method.name != "auto"]
ONE_THREAD = Options(threads=1, time_limit=30)


def test_settings_of_the_paper_are_packaged_in_both_forms() -> None:
    names = {entry.name for entry in ENTRIES}
    for model in (
        "llama2-7b",
        "llama2-13b",
        "llama2-70b",
        "llama3-8b",
        "llama3-70b",
        "glm-67b",
        "glm-130b",
    ):
        free = [name for name in names if name.startswith(model) and not name.endswith("-equal")]
        assert len(free) == 1 and "a800" in free[0]
        assert f"{free[0]}-equal" in names


@pytest.mark.parametrize("method", EXACT)
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_every_exact_method_finds_the_optimum_on_file(entry: Entry, method: str) -> None:
    best, result = entry.best_known(), solve(ASTRA, entry.load().data, method, Run(ONE_THREAD))
    assert best is not None and best.status == "optimal"
    assert result.status == "optimal"
    assert result.objective == pytest.approx(best.objective, rel=1e-6)
