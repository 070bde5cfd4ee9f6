"""Branch and bound against enumeration: the cheapest items that together weigh enough."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from hetplan.solvers.branch_and_bound import Expansion, Incumbent, Proof, SearchLimits, search
from hetplan.solvers.run import Options, Progress, Run, Stop, Stopped

Taken = tuple[bool, ...]
SEEDS = range(30)


@dataclass
class Cover:
    """Items of a weight and a cost each; those taken must weigh `needed` at least."""

    weights: list[int]
    costs: list[int]
    needed: int

    def cost(self, taken: Taken) -> float:
        return float(sum(c for c, t in zip(self.costs, taken, strict=False) if t))

    def weight(self, taken: Taken) -> int:
        return sum(w for w, t in zip(self.weights, taken, strict=False) if t)

    def bound(self, taken: Taken) -> float:
        """The rest at the best ratio of cost and weight among the items not yet decided."""
        rest = range(len(taken), len(self.costs))
        missing = self.needed - self.weight(taken)
        if missing <= 0:
            return self.cost(taken)
        if sum(self.weights[i] for i in rest) < missing:
            return math.inf
        return self.cost(taken) + missing * min(self.costs[i] / self.weights[i] for i in rest)

    def covers(self) -> list[Taken]:
        every = itertools.product([False, True], repeat=len(self.costs))
        return [taken for taken in every if self.weight(taken) >= self.needed]

    def optimum(self) -> float | None:
        return min(map(self.cost, self.covers()), default=None)


def cover(seed: int) -> Cover:
    rng = random.Random(seed)
    weights = [rng.randint(1, 9) for _ in range(9)]
    costs = [rng.randint(1, 30) for _ in weights]
    return Cover(weights, costs, rng.randint(5, sum(weights) * 5 // 4))  # some cannot be covered


@dataclass
class Solver:
    """Takes or leaves one item after the other."""

    problem: Cover
    run: Run = field(default_factory=lambda: Run(Options(gap=0.0)))
    cutoff: float = math.inf
    expanded: int = 0

    def __post_init__(self) -> None:
        self.incumbent = Incumbent[Taken](self.run, objective=self.cutoff)

    def expand(self, taken: Taken, threshold: float) -> Expansion[Taken]:
        assert threshold == self.incumbent.threshold
        self.expanded += 1
        if self.problem.weight(taken) >= self.problem.needed:
            self.incumbent.offer(self.problem.cost(taken), taken)
            return Expansion()
        children = [(*taken, True), (*taken, False)] if len(taken) < len(self.problem.costs) else []
        return Expansion([(self.problem.bound(child), child) for child in children])

    def solve(self, limits: SearchLimits | None = None) -> Proof:
        root: Taken = ()
        roots = [(self.problem.bound(root), root)]
        return search(roots, self.expand, self.incumbent, self.run, limits or SearchLimits())


@pytest.mark.parametrize("seed", SEEDS)
def test_equals_enumeration(seed: int) -> None:
    solver = Solver(cover(seed))
    proof, optimum = solver.solve(), solver.problem.optimum()
    assert proof.finished
    assert proof.proven
    assert proof.empty == (optimum is None)
    assert proof.bound == optimum
    assert proof.expanded == solver.expanded
    if optimum is not None:
        assert solver.incumbent.objective == optimum
        assert solver.incumbent.decision is not None
        assert solver.problem.cost(solver.incumbent.decision) == optimum


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_sought_that_does_not_beat_a_cutoff(seed: int) -> None:
    optimum = cover(seed).optimum() or 100.0
    solver = Solver(cover(seed), cutoff=optimum)
    proof = solver.solve()
    assert proof.proven
    assert not proof.empty
    assert solver.incumbent.decision is None
    assert proof.bound == optimum


@pytest.mark.parametrize("seed", SEEDS)
def test_a_gap_ends_the_search_earlier_with_a_bound_within_it(seed: int) -> None:
    exact, near = Solver(cover(seed)), Solver(cover(seed), Run(Options(gap=0.3)))
    optimum = exact.problem.optimum()
    if optimum is not None:  # the dearest cover that may be good enough
        good = [c for c in near.problem.covers() if near.problem.cost(c) <= optimum / 0.75]
        first = max(good, key=near.problem.cost)
        near.incumbent.offer(near.problem.cost(first), first)
    proof = near.solve()
    assert proof.expanded <= exact.solve().expanded
    assert proof.proven
    if optimum is not None:
        assert proof.bound is not None
        assert 0.7 * near.incumbent.objective <= proof.bound <= optimum
        assert near.incumbent.objective <= optimum / 0.7


class Stopping(Solver):
    """Cannot be finished after some expansions; its nodes say little more than their parents."""

    after = 0

    def expand(self, taken: Taken, threshold: float) -> Expansion[Taken]:
        if self.expanded == self.after:
            self.run.cancel.set()
            raise Stopped
        children = super().expand(taken, threshold).children
        return Expansion([(bound if bound == math.inf else 0.0, c) for bound, c in children])


@pytest.mark.parametrize("after", [0, 1, 3, 10])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_stopped_search_keeps_a_valid_bound(seed: int, after: int) -> None:
    solver = Stopping(cover(seed))
    solver.after = after
    proof, optimum = solver.solve(), solver.problem.optimum()
    root = solver.problem.bound(())
    if solver.run.cancelled:
        assert not proof.finished
        assert not proof.proven
        assert not proof.empty
        assert proof.expanded == after
    if optimum is not None:
        assert proof.bound is not None
        assert root <= proof.bound <= optimum


def test_children_made_one_by_one_may_be_stopped() -> None:
    """The node stays open, the incumbent is kept."""
    run = Run()
    incumbent = Incumbent[str](run)
    incumbent.offer(5.0, "first")

    def children() -> Iterator[tuple[float, str]]:
        yield 4.0, "child"
        raise Stopped

    proof = search([(1.0, "root")], lambda *_: Expansion(children()), incumbent, run)
    assert (proof.bound, proof.finished, incumbent.decision) == (1.0, False, "first")


class Dropping(Solver):
    """Gives up every node that leaves the first item."""

    def expand(self, taken: Taken, threshold: float) -> Expansion[Taken]:
        if taken == (False,):
            return Expansion(dropped_bound=self.problem.bound(taken))
        return super().expand(taken, threshold)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_dropped_undecided_lowers_the_bound(seed: int) -> None:
    solver = Dropping(cover(seed))
    proof, optimum = solver.solve(), solver.problem.optimum()
    dropped = solver.problem.bound((False,))
    assert proof.finished
    assert proof.proven == (dropped >= solver.incumbent.threshold)
    least = min(dropped, solver.incumbent.objective)
    assert proof.bound == (None if least == math.inf else least)
    if optimum is not None:
        assert proof.bound is not None
        assert proof.bound <= optimum


def hard() -> Cover:
    """Many equal items: the bound stays where it is for long."""
    return Cover([2] * 12, [5] * 12, 13)


def test_a_search_gives_up_by_its_limits() -> None:
    whole = Solver(hard()).solve()
    assert whole.proven
    few = Solver(hard()).solve(SearchLimits(most_nodes=5))
    assert few.expanded == 5 < whole.expanded
    assert not few.finished
    impatient = Solver(hard()).solve(SearchLimits(patience=2))
    assert impatient.expanded < whole.expanded
    assert not impatient.finished


def test_progress_is_reported_and_only_improves() -> None:
    told: list[Progress] = []
    solver = Solver(cover(3), Run(Options(gap=0.0), watch=told.append))
    proof = solver.solve(SearchLimits(rounding=1e-9))
    bounds = [p.bound for p in told if p.bound is not None]
    incumbents = [p.incumbent for p in told if p.incumbent is not None]
    assert bounds == sorted(bounds)
    assert incumbents == sorted(incumbents, reverse=True)
    assert proof.bound == bounds[-1] == solver.incumbent.objective * (1 - 1e-9)


@pytest.mark.parametrize(
    ("proven", "empty", "finished", "expected"),
    [
        (True, True, True, (Stop.INFEASIBLE, "there is none")),
        (True, False, True, (Stop.OPTIMAL, "")),
        (False, False, True, (Stop.LIMIT, "dropped too much")),
        (False, False, False, (Stop.LIMIT, "")),
    ],
)
def test_the_verdict_of_a_proof(
    proven: bool, empty: bool, finished: bool, expected: tuple[Stop, str]
) -> None:
    proof = Proof(bound=None, finished=finished, proven=proven, empty=empty, expanded=1)
    assert proof.verdict(Run(), "there is none", "dropped too much") == expected
