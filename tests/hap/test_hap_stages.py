"""Graphs whose arcs are whole stages: their paths are programs, and no better program is
missing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hap.hap_cases import known, tight
from hetplan.formulations.hap.cells import whole_cell
from hetplan.formulations.hap.common import pose
from hetplan.formulations.hap.data import HapData
from hetplan.formulations.hap.exact import bounds, kernels, staging
from hetplan.formulations.hap.exact.arrays import Arrays, priced_graph
from hetplan.formulations.hap.exact.bounds import Failed, Incumbent, LabelCell
from hetplan.formulations.hap.exact.duals import Duals
from hetplan.formulations.hap.exact.search import search
from hetplan.formulations.hap.exact.staging import staged
from hetplan.formulations.hap.problem import Floats
from hetplan.formulations.hap.states import build
from hetplan.formulations.hap.theories import chain, residual
from hetplan.formulations.hap.theory import Theory
from hetplan.solvers.options import Options
from hetplan.solvers.result import Outcome
from hetplan.solvers.run import Run


def posed(data: HapData) -> tuple[Theory, Arrays] | None:
    """The theory and the graph of all its states; None where there is nothing to search."""
    found = pose(data, Run(Options(threads=1)))
    if isinstance(found, Outcome):
        return None
    graph = build(found.theory, 60_000)
    assert graph is not None
    return found.theory, priced_graph(found.problem, graph)


def by_stages(
    theory: Theory, arrays: Arrays, cell: Floats, threshold: float
) -> tuple[Arrays | None, Duals]:
    """The graph of stages of programs below a threshold."""
    duals = Duals(theory.problem, cell, arrays.slow, None, None)
    found = bounds.sums(arrays, cell, duals)
    step = kernels.prices(*arrays.common[2:5], cell, arrays.slow, found.weights)
    extremes = np.array([[cell.min()], [cell.max()]])
    return staged(arrays, step, duals.inside, found.potential, threshold, extremes), duals


@pytest.mark.parametrize("listing", [True, False])
def test_the_optimum_is_found_on_stages_alone(
    listing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From nothing, on enumerated theories: with labels, and by division alone, where the bound has
    to rise."""
    monkeypatch.setattr(bounds, "ARCS", 0)
    if not listing:
        monkeypatch.setattr(LabelCell, "_listed", lambda *a, **k: (-np.inf, 0))
    cases = [known(seed, 1) for seed in range(0, 120, 1 if listing else 3)]
    cases += [tight(seed) for seed in range(60 if listing else 20)]
    made: list[Arrays | None] = []

    def noted(*arguments: Any) -> Arrays | None:
        made.append(staged(*arguments))
        return made[-1]

    monkeypatch.setattr(bounds, "staged", noted)
    for data, best in cases:
        found = posed(data)
        if best is None or found is None:
            continue
        theory, arrays = found
        run = Run(Options(threads=1, gap=1e-6 if listing else 1e-4))
        incumbent = Incumbent(theory, run, seconds=1.5 * best + 1e-6)  # of no program
        evaluate = LabelCell(theory.problem, arrays, incumbent, Failed(1e9, 1e9))
        ended = search(theory.problem, evaluate, incumbent, run)
        assert ended.finished
        assert incumbent.seconds == pytest.approx(best, rel=run.options.gap, abs=1e-9), data
        assert best * (1 - run.options.gap) - 1e-9 <= ended.bound <= best * (1 + 1e-9) + 1e-12, data
    assert sum(one is not None and len(one.graph.head) > 0 for one in made) >= 30


def test_paths_are_programs_of_their_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random walks over stages: each is a program whose stages have exactly the arcs' work."""
    monkeypatch.setattr(staging, "PER_ARC", 1000)
    draw, longest = np.random.default_rng(3), 0
    for data in (chain(2, 3, 1), chain(4, 2, 0), residual(1, 2, 0, operators=12)):
        found = posed(data)
        assert found is not None
        theory, arrays = found
        problem = theory.problem
        whole, _ = by_stages(theory, arrays, whole_cell(problem), np.inf)
        assert whole is not None and whole.chains is not None
        graph, speed = whole.graph, problem.speeds[-1]
        longest = max(longest, *(len(chain) for chain in whole.chains))
        for _ in range(40):
            u, path = whole.start, []
            while u < graph.n - 1:
                a = int(draw.integers(graph.first[u], graph.first[u + 1]))
                path.append(a)
                u = int(graph.head[a])
            labels = np.arange(len(path) + 1)
            program = whole.path(labels - 1, np.array([-1, *path]), len(path))
            if len(set(program)) < len(program) or theory.program(program) != program:
                continue  # a detour, which a program would leave out
            stages = problem.stages(program)
            work = (
                np.array([(whole.fixed[a], whole.shared[a]) for a in path if not whole.comm[a]])
                * speed
            )
            assert work[:, 0].sum() == pytest.approx(stages.F.sum())
            assert work[:, 1].sum() == pytest.approx(stages.S.sum())
            ratios = problem.proportional
            busy = ((work[:, :1] + work[:, 1:] * ratios) / problem.speeds).max(axis=1).sum()
            comm = sum(whole.fixed[a] + whole.shared[a] * ratios[-1] for a in path if whole.comm[a])
            assert busy + comm == pytest.approx(problem.seconds(stages, ratios[None]), rel=1e-12)
    assert longest > 3


def test_bounds_by_stages_are_exact_at_a_point_and_below_elsewhere() -> None:
    """Never above the least cost at ratios of the cell, told by labels; that cost where the cell is
    hardly more than a point."""
    for seed in range(4):
        found = posed(chain(8, 3, seed))
        assert found is not None
        theory, arrays = found
        problem = theory.problem
        middle = whole_cell(problem).mean(axis=0)
        for size in (1e-6, 0.05, 0.5):
            cell = middle + size * (whole_cell(problem) - middle)
            duals = Duals(problem, cell, arrays.slow, None, None)
            plain = bounds.sums(arrays, cell, duals)
            threshold = 1.2 * plain.bound
            whole, _ = by_stages(theory, arrays, cell, threshold)
            assert whole is not None
            own = kernels.lengths(*whole.common[:2], whole.common[5], duals.prices(whole))[
                whole.start
            ]
            for mu in np.random.default_rng(seed).dirichlet(np.ones(3), 4):
                point = mu @ cell
                least = _least_at(theory, arrays, point)
                assert (own @ mu).max() <= min(least, threshold) * (1 + 1e-9)
                if size < 1e-3:
                    assert (own @ mu).max() == pytest.approx(least, rel=1e-4)


def _least_at(theory: Theory, arrays: Arrays, point: Floats) -> float:
    """The least cost of any program at a point, by labels on single steps without a bound."""
    from hetplan.formulations.hap.exact.labels import labels

    n, K = arrays.graph.n, len(point)
    _, found = labels(
        arrays,
        point[None],
        point,
        np.zeros((n, 1, 1)),
        np.eye(K)[:1],
        np.inf,
        slack=0.0,
        room=10**6,
        per_node=500,
    )
    assert found is not None and len(found.last)
    stages = theory.problem.stages(theory.program(found.path(int(found.last[0]))))
    return theory.problem.seconds(stages, point[None])
