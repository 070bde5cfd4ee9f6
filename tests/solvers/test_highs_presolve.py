"""HiGHS's presolve, which errs on small clean models, is off in every run; nothing that prunes or
proves rests on it, also where the user turns it on; and the user's options reach every run."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import highspy
import numpy as np
import pytest
from scipy.optimize import linprog

import hetplan
from hetplan.errors import UnsupportedError
from hetplan.formulations import FAMILIES, family
from hetplan.formulations.hap.matrix_game import game
from hetplan.formulations.joint.bound.alone import computing_alone
from hetplan.instances.library import load_from_library, parse_instance
from hetplan.solvers.general import minimise
from hetplan.solvers.model import Model, ModelAnswer
from hetplan.solvers.registry import solve
from hetplan.solvers.run import NativeValue, Options, Result, Run, Stop
from milps import small

FOLDER = Path(__file__).parent / "presolve"
# By exact methods, CP-SAT and enumeration.
OPTIMA = {
    "amp-optimum-cut-off": 0.027103052,
    "hap-optimum-cut-off": 0.235978827,
    "ditto-never-returns": 0.080525002,
}
ENDING = ("amp-optimum-cut-off", "hap-optimum-cut-off")
GENERAL = ("milp", "pyomo")


def options(**more: Any) -> Options:
    return Options(**{"threads": 1, "time_limit": 120.0, **more})


def answer(name: str, method: str, chosen: Options) -> Result[Any]:
    """Of a case of this folder, or of a packaged instance."""
    path = FOLDER / f"{name}.json"
    instance = (
        parse_instance(json.loads(path.read_text()), where=str(path))
        if path.exists()
        else load_from_library(name)
    )
    return solve(instance.family, instance.data, method, Run(chosen))


@pytest.mark.parametrize("method", GENERAL)
@pytest.mark.parametrize("name", OPTIMA)
def test_the_optimum_is_found_and_proven(name: str, method: str) -> None:
    result = answer(name, method, options())
    assert result.status == "optimal"
    assert result.objective == pytest.approx(OPTIMA[name], rel=1e-6)


@pytest.mark.parametrize("method", GENERAL)
@pytest.mark.parametrize("name", ENDING)
def test_nothing_false_is_proven_with_presolve(name: str, method: str) -> None:
    result = answer(name, method, options(native={"highs": {"presolve": "on"}}))
    assert result.status == "optimal"
    assert result.objective == pytest.approx(OPTIMA[name], rel=1e-6)


def test_the_time_limit_is_heard_where_presolve_does_not_end() -> None:
    """In a process of its own, for what was left behind goes on until the process ends."""
    name = "ditto-never-returns"
    words = ["solve", str(FOLDER / f"{name}.json"), "-m", "milp", "-t", "1", "--json", "--quiet"]
    ended = subprocess.run(
        [sys.executable, "-m", "hetplan", *words, "--native", "highs.presolve=on"],
        check=False, capture_output=True, text=True, timeout=600, env=os.environ,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")
    (result,) = json.loads(ended.stdout)["results"]
    assert (result["stop"], result["status"]) == ("limit", "feasible")
    assert result["bound"] <= OPTIMA[name] * (1 + 1e-6) <= result["objective"]


@pytest.mark.parametrize("limit", [0.05, 0.3, 1.0])
def test_the_time_limit_is_heard_without_presolve(limit: float) -> None:
    name = "ditto-never-returns"
    result = answer(name, "milp", options(time_limit=limit))
    assert str(result.stop) in ("limit", "optimal")
    assert result.bound is None or result.bound <= OPTIMA[name]


def test_a_bound_from_presolve_is_neither_taken_nor_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that proves too much with presolve, and whose time is up after it."""
    told: list[tuple[float | None, float | None]] = []
    run = Run(options(native={"highs": {"presolve": "on"}}))

    def claims(model: Model, run: Run, report: Any) -> ModelAnswer:
        report(20.0, 19.9)
        run.cancel.set()
        return ModelAnswer(stop=Stop.OPTIMAL, objective=20.0, bound=20.0, x=np.array([3.0, 5.0]))

    monkeypatch.setattr("hetplan.solvers.highs.solve", claims)
    result = minimise("milp", small(), run, lambda *values: told.append(values))
    assert (result.stop, result.objective, result.bound) == (Stop.INTERRUPTED, 20.0, None)
    assert told == [(20.0, None)]


def test_infeasible_by_presolve_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def claims(model: Model, run: Run, report: Any) -> ModelAnswer:
        asked.append(run.options.native["highs"].get("presolve"))
        return ModelAnswer(stop=Stop.LIMIT if asked[1:] else Stop.INFEASIBLE)

    monkeypatch.setattr("hetplan.solvers.highs.solve", claims)
    run = Run(options(native={"highs": {"presolve": "choose"}}))
    assert minimise("milp", small(), run).stop is Stop.LIMIT
    assert asked == ["choose", None]


RUNNING = [
    (name, method.name)
    for name in FAMILIES
    for method in family(name).methods
    if "highs" in method.backends
]
# Instances, with a time limit, on which every such method has HiGHS run.
WHERE_IT_RUNS = {
    "amp": [("amp-optimum-cut-off", 60.0)],
    "astra": [("tiny-two-types", 60.0)],
    "ditto": [("ditto-never-returns", 60.0)],
    "hap": [("hap-optimum-cut-off", 60.0), ("hap-ratios-64x100", 60.0), ("hap-chain-2x2", 1.0)],
    "joint": [("tiny-joint-gpt2-1", 60.0), ("joint-home", 0.4)],
    "poplar": [("tiles-5-zero0", 60.0)],
}


@pytest.mark.parametrize(("problem", "method"), RUNNING)
def test_every_run_has_the_users_options_and_no_presolve(
    problem: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[NativeValue, ...]] = []
    run_highs = highspy.Highs.run

    def recorded(highs: Any) -> Any:
        names = ("presolve", "simplex_update_limit")
        seen.append(tuple(highs.getOptionValue(name)[1] for name in names))
        return run_highs(highs)

    monkeypatch.setattr(highspy.Highs, "run", recorded)
    native = {"highs": {"simplex_update_limit": 4321}}
    for name, limit in WHERE_IT_RUNS[problem]:
        chosen = options(time_limit=limit, native=native)
        with contextlib.suppress(UnsupportedError):  # general solvers of `joint`: not small
            answer(name, method, chosen)
    assert seen and set(seen) == {("off", 4321)}


def test_highs_is_made_in_one_place() -> None:
    made = []
    for path in sorted(Path(hetplan.__file__).parent.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "highspy" not in text and "scipy" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            own = isinstance(node, ast.Call) and ast.unparse(node.func).endswith("highspy.Highs")
            others = isinstance(node, ast.ImportFrom) and node.module == "scipy.optimize"
            if own or others:
                made.append(f"{path.parent.name}/{path.name}")
    assert made == ["solvers/highs.py"]


@pytest.mark.parametrize("seed", range(30))
def test_a_game_is_bounded_from_below_by_whatever_highs_finds(seed: int) -> None:
    draw = np.random.default_rng(seed)
    P = draw.uniform(0.0, 1.0, tuple(draw.integers(2, 6, 2)))
    P[draw.random(P.shape) < 0.3] = 0.5
    value, mu, theta = game(P, Options())
    assert value == pytest.approx(float((P @ mu).max()), rel=1e-6)
    stopped, *shares = game(P, Options(native={"highs": {"simplex_iteration_limit": 0}}))
    assert stopped <= value + 1e-9
    assert [float(each.sum()) for each in (mu, theta, *shares)] == pytest.approx([1.0] * 4)


@pytest.mark.parametrize("seed", range(30))
def test_computing_alone_is_the_least_of_all_shares(seed: int) -> None:
    """The same programme from its other side, by another program."""
    draw = np.random.default_rng(seed)
    Q, L = int(draw.integers(1, 4)), int(draw.integers(1, 6))
    work, counts = draw.choice([0.0, 1.0, 1.0 + 1e-9, 3.0], (Q, L)), draw.integers(1, 5, Q)
    work[0, 0] = 2.0
    loads = np.hstack([np.repeat(np.eye(Q), L, axis=1) * work.ravel(), -counts[:, None]])
    whole = np.hstack([np.tile(np.eye(L), Q), np.zeros((L, 1))])
    cost = np.eye(Q * L + 1)[-1]
    least = linprog(cost, A_ub=loads, b_ub=np.zeros(Q), A_eq=whole, b_eq=np.ones(L)).fun
    found = computing_alone(work, counts.tolist(), Options())
    assert found == pytest.approx(least, rel=1e-6, abs=1e-9)
    hasty = Options(native={"highs": {"simplex_iteration_limit": 0}})
    assert computing_alone(work, counts.tolist(), hasty) <= found + 1e-9
    assert computing_alone(0.0 * work, counts.tolist(), Options()) == 0.0
