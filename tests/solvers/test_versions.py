"""What `hetplan doctor` asks, and that the solvers can live in one process."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from itertools import permutations

import pytest

from hetplan.solvers import versions


def test_everything_that_hetplan_depends_on_is_found() -> None:
    assert all(package.version for package in versions.packages())
    assert versions.versions().keys() >= {"hetplan", "ortools"}


def test_missing_package_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(versions, "version", missing)
    assert {package.version for package in versions.packages()} == {None}


@pytest.mark.parametrize(
    ("highspy", "count"), [("1.14.0", 0), ("1.15.0", 1), ("2.0", 1), ("1.9.dev3", 0)]
)
def test_known_conflict_is_named(monkeypatch: pytest.MonkeyPatch, highspy: str, count: int) -> None:
    monkeypatch.setattr(versions, "_version", {"highspy": highspy, "ortools": "9.15.6755"}.get)
    assert len(versions.conflicts()) == count


def test_nothing_conflicts_here() -> None:
    assert versions.conflicts() == []


def test_pyomo_finds_highs_with_its_version() -> None:
    found = versions.pyomo_solvers()
    assert found["highs"] == versions.versions()["highspy"]


ONE_PROCESS = """
import {0}, {1}
from hetplan.solvers import cpsat, highs
from hetplan.solvers.options import Options
from hetplan.solvers.run import Run
from hetplan.solvers.model import Model
model = Model()
model.minimize(model.integer("y", lower=2.5, upper=9))
run = Run(Options(threads=1))
for _ in range(2):
    for driver in (cpsat, highs):
        assert abs(driver.solve(model, run).objective - 3.0) < 1e-9
"""


@pytest.mark.parametrize("order", [*permutations(("highspy", "ortools.sat.python.cp_model"))])
def test_both_solvers_work_in_one_process_whichever_comes_first(order: tuple[str, str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ONE_PROCESS.format(*order)],
        check=False, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")


def test_asking_for_versions_loads_no_solver() -> None:
    code = (
        "import sys; from hetplan.solvers import versions; versions.versions(); "
        "print(sorted(sys.modules))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout
    assert not any(f"'{name}'" in loaded for name in ("ortools", "highspy", "pyomo", "numba"))
