"""The joint search over several segments' ratios, from nothing and without the programme behind
it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from hap.hap_cases import known
from hetplan.formulations.hap.cells import Segments, coordinates, product
from hetplan.formulations.hap.common import pose
from hetplan.formulations.hap.data import HapData, Triple
from hetplan.formulations.hap.exact import segments, solve
from hetplan.formulations.hap.exact.arrays import Arrays
from hetplan.formulations.hap.exact.bounds import Incumbent
from hetplan.formulations.hap.exact.opened import Explorer
from hetplan.formulations.hap.exact.search import search
from hetplan.formulations.hap.exact.segment_means import Means, best_in_product, by_segment
from hetplan.formulations.hap.exact.segments import SegmentsCell, sums
from hetplan.formulations.hap.exact.staging import staged
from hetplan.formulations.hap.family import FAMILY
from hetplan.formulations.hap.ratios import best_ratios
from hetplan.formulations.hap.states import build, canonical
from hetplan.formulations.hap.theories import chain
from hetplan.formulations.hap.theory import Theory
from hetplan.solvers import registry
from hetplan.solvers.options import Options
from hetplan.solvers.result import Outcome
from hetplan.solvers.run import Run


def cases(seeds: range) -> list[tuple[Theory, float]]:
    """Enumerated theories of two or three segments, of few enough ratios."""
    found = []
    for seed in seeds:
        for count in (2, 3):
            data, best = known(seed, count)
            posed = pose(data, Run(Options(threads=1)))
            if best is None or isinstance(posed, Outcome) or best <= 0:
                continue
            if posed.problem.g * (posed.problem.K - 1) <= solve.MOST_DIMENSIONS:
                found.append((posed.theory, best))
    return found


@pytest.mark.parametrize("wide", [False, True])
def test_the_optimum_over_all_segments(wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As enumeration has it, on all orders and on those that sums leave open."""
    made: list[Arrays | None] = []

    def noted(*arguments: Any) -> Arrays | None:
        made.append(staged(*arguments))
        return made[-1]

    monkeypatch.setattr(segments, "staged", noted)
    kinds: Counter[tuple[int, int]] = Counter()
    for theory, best in cases(range(0, 90)):
        problem, run = theory.problem, Run(Options(threads=1))
        incumbent = Incumbent(theory, run, seconds=1.5 * best + 1e-6)  # of no program
        graph = canonical(theory, 5_000) if wide else build(theory, 5_000)
        assert graph is not None
        arrays = by_segment(problem, graph, ordered=not wide)
        evaluate = SegmentsCell(problem, arrays, incumbent, Explorer(problem, theory))
        ended = search(problem, evaluate, incumbent, run, shape=Segments())
        assert ended.finished
        assert incumbent.seconds == pytest.approx(best, rel=1e-6, abs=1e-9)
        assert best * (1 - 1e-6) - 1e-9 <= ended.bound <= best * (1 + 1e-9) + 1e-12
        kinds[problem.g, problem.K] += 1
    assert min(kinds[2, 2], kinds[2, 3], kinds[3, 2]) >= 3, kinds
    assert sum(one is not None and len(one.graph.head) > 0 for one in made) >= 5


def halved(layers: int, types: int, seed: int) -> HapData:
    """A chain whose second half of tensors has ratios of its own; the tensor between them is
    exchanged as it is."""
    data = chain(layers, types, seed)
    half = 5 * layers // 2

    def later(triple: Triple) -> bool:
        return (
            max((int(p.split("|")[0][1:]) for p in triple.post if p.startswith("e")), default=99)
            > half
        )

    triples = [triple.model_copy(update={"segment": int(later(triple))}) for triple in data.triples]
    return data.model_copy(update={"segments": 2, "triples": triples})


@pytest.mark.parametrize(("layers", "types", "seed"), [(1, 2, 0), (1, 3, 1), (2, 2, 2)])
def test_the_programme_finds_no_better(layers: int, types: int, seed: int) -> None:
    """Chains in two halves: both methods prove the same optimum, the search by itself."""
    data = halved(layers, types, seed)
    run = Run(Options(threads=1))
    one, other = (registry.solve(FAMILY, data, method, run) for method in ("exact", "milp"))
    assert one.status == other.status == "optimal"
    assert one.objective == pytest.approx(other.objective, rel=2e-6)
    assert "cells" in one.details and "nodes" not in one.details


def test_bounds_hold_for_every_program_in_the_cell() -> None:
    """Random cells and ratios in them: no program of a random walk costs less than the bound."""
    draw = np.random.default_rng(7)
    for theory, _ in cases(range(100, 130)):
        problem = theory.problem
        graph = build(theory, 5_000)
        assert graph is not None
        arrays = by_segment(problem, graph, ordered=True)
        cell = np.array([draw.dirichlet(np.ones(problem.K), problem.K) for _ in range(problem.g)])
        cell /= (cell @ problem.counts)[:, :, None]
        for _ in range(10):
            u, path = arrays.start, []
            while u < graph.n - 1:
                path.append(int(draw.integers(graph.first[u], graph.first[u + 1])))
                u = int(graph.head[path[-1]])
            stages = problem.stages(theory.program(arrays.program(reversed(path))))
            bound, _, _ = sums(arrays, Means(problem, cell, stages, None))
            point = np.array([draw.dirichlet(np.ones(problem.K)) @ simplex for simplex in cell])
            assert bound <= problem.seconds(stages, point) * (1 + 1e-9)


def test_best_ratios_in_all_cells() -> None:
    """Over all ratios the cutting planes find what the linear programme does, and their means prove
    it."""
    for theory, _ in cases(range(200, 220)):
        problem = theory.problem
        graph = build(theory, 5_000)
        assert graph is not None
        program = theory.program([step.index for step in theory.steps])
        stages = problem.stages(program)
        x = product(Segments().whole(problem))
        unit, slow = problem.speeds[-1], problem.speeds[-1] / problem.speeds
        F, S = stages.F / unit, stages.S / unit
        mu, blends, tops = best_in_product(F, S, stages.comm, x, slow)
        told = best_ratios(problem, stages).seconds
        assert problem.seconds(stages, np.tensordot(mu, x, 1)) == pytest.approx(
            told, rel=1e-8, abs=1e-12
        )
        rows = blends * slow
        proven = (F * rows.sum(axis=1)).sum() + np.einsum("sg,sd,vgd->v", S, rows, x)
        proven = proven + np.einsum("g,gd,vgd->v", stages.comm, tops, x) + stages.constant
        assert proven.min() == pytest.approx(told, rel=1e-8, abs=1e-12)


def test_parts_cover_a_product_of_simplices() -> None:
    """Points of the whole lie in one part or both."""
    draw, shape = np.random.default_rng(1), Segments()
    cell = np.array([np.diag([1.0, 0.5, 0.25])] * 2)
    weight = np.array([1.0, 2.0, 4.0])
    for _ in range(60):
        mu = draw.dirichlet(np.ones(3), 2)
        point = np.einsum("kv,kvd->kd", mu, cell)
        assert shape.holds(cell, point)
        assert all(
            coordinates(*pair) == pytest.approx(m) for *pair, m in zip(cell, point, mu, strict=True)
        )
        parts = shape.parts(cell, weight, point)
        inside = np.einsum("kv,kvd->kd", draw.dirichlet(np.ones(3), 2), cell)
        assert any(shape.holds(part, inside) for part in parts)
        cell = parts[int(draw.integers(2))] if draw.random() < 0.5 else cell
