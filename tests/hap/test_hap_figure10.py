"""HAP's A* as Figure 10 prints it with the prunings of §4.5, and its alternation with the ratios
(§3.1), written again in plain Python for two devices of speeds 1 and 2, where every triple needs
one property at most. Nothing is shared with the package but the data classes.

Without its lines 9 to 14 the loop would meet every program, and return the cheapest of those that
keep to the prunings. So where it returns a dearer one, these lines have lost the cheapest."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import inf

import numpy as np
import pytest

from hap.hap_cases import paths, tight
from hetplan.formulations.hap.astar import Search
from hetplan.formulations.hap.astar_moves import moves_of
from hetplan.formulations.hap.astar_states import Transitions
from hetplan.formulations.hap.data import (
    Communication,
    Compute,
    Device,
    HapData,
    Memory,
    Triple,
)
from hetplan.formulations.hap.family import FAMILY
from hetplan.formulations.hap.outcomes import reduced_or_answered
from hetplan.formulations.hap.pricing import theory_of
from hetplan.formulations.hap.theory import ReducedTheory
from hetplan.profiling.models.transformer import transformer
from hetplan.programs.links import ring
from hetplan.programs.networks import vit
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Options, Run

Pair = tuple[float, float]


@dataclass
class Partial:
    """Q, P(Q) without redundant properties, all that it ever had, tensors communicated, cost(Q) up
    to the last synchronisation, and what the devices have computed since."""

    Q: tuple[int, ...]
    P: frozenset[str]
    ever: frozenset[str]
    communicated: frozenset[str]
    cost: float
    since: Pair
    score: float = 0.0


class Figure10:
    """The search for ratios B of the two devices."""

    def __init__(self, data: HapData, B: Pair, *, once: bool) -> None:
        self.data, self.B, self.once = data, B, once
        # Placeholders and parameters: what needs nothing and takes no time.
        sources = {
            t.post[0]: i for i, t in enumerate(data.triples) if not t.pre and self.work(i) == (0, 0)
        }
        self.sources = {*sources.values()}
        loaded = {p.split("|")[0] for p in sources}
        # In the file's order, which decides between programs of equal cost. First pruning: a source
        # is loaded with its consumers. It is costless, so that it counts as there at any time, and
        # its consumers need nothing more. Second pruning: a source's tensor is not communicated.
        self.T: list[tuple[tuple[int, ...], frozenset[str], frozenset[str]]] = []
        for i, t in enumerate(data.triples):
            if i in sources.values() or self.tensor((i,)) & loaded:
                continue
            self.T.append(((i,), frozenset(t.pre) - {*sources}, frozenset(t.post)))

    def work(self, i: int) -> Pair:
        """Seconds of computing on each device."""
        t = self.data.triples[i]
        if isinstance(t, Communication):
            return 0.0, 0.0
        slow, fast = (t.fixed_flops + t.shared_flops * b for b in self.B)
        return slow, fast / 2

    def tensor(self, Q: tuple[int, ...]) -> frozenset[str]:
        """Second pruning: the tensor that an instruction communicates."""
        t = self.data.triples[Q[-1]]
        named = self.once and isinstance(t, Communication)
        return frozenset([t.pre[0].split("|")[0]] if named else [])

    def least_from(self, p: str) -> float:
        """Least computing from a property to the goal with infinite bandwidth."""

        @cache
        def within(p: str, steps: int) -> float:
            if p == self.data.goal:
                return 0.0
            ways = [
                min(self.work(i)) + within(t.post[0], steps - 1)
                for i, t in enumerate(self.data.triples)
                if steps and p in t.pre
            ]
            return min(ways, default=inf)

        return within(p, 9)

    def score(self, q: Partial) -> float:
        """cost(Q) + ecost(Q)."""
        from_start = min(
            min(self.work(Q[-1])) + self.least_from(*post) for Q, pre, post in self.T if not pre
        )
        return q.cost + max(q.since) + min([from_start, *map(self.least_from, q.P)])

    def appended(self, q: Partial, Q: tuple[int, ...], post: frozenset[str]) -> Partial:
        """Line 8, with the third pruning."""
        cost, since = q.cost, q.since
        for i in Q:
            t, work = self.data.triples[i], self.work(i)
            if isinstance(t, Communication):
                cost += max(since) + t.fixed_seconds + t.shared_seconds * max(self.B)
                since = (0.0, 0.0)
            since = since[0] + work[0], since[1] + work[1]
        ever, done = q.ever | post, q.communicated | self.tensor(Q)
        needed = {
            p
            for other, pre, gives in self.T
            if not gives <= ever and not self.tensor(other) & done
            for p in pre
        }
        P = frozenset(p for p in q.P | post if p in needed or p == self.data.goal)
        return Partial(q.Q + Q, P, ever, done, cost, since)

    def search(self) -> tuple[int, ...] | None:
        """Lines 3 to 21."""
        empty = frozenset[str]()
        S = [Partial((), empty, empty, empty, 0.0, (0.0, 0.0))]
        best, least = None, inf
        while any(q.score < least for q in S):
            q = min(S, key=lambda q: q.score)
            S.remove(q)
            for Q, pre, post in self.T:
                if not pre <= q.P or post <= q.ever or self.tensor(Q) & q.communicated:
                    continue
                new = self.appended(q, Q, post)
                if any(s.P >= new.P and s.cost <= new.cost for s in S):
                    continue
                S = [s for s in S if not (new.P >= s.P and new.cost <= s.cost)]
                if self.data.goal in new.P:
                    if new.cost + max(new.since) < least:
                        best, least = new.Q, new.cost + max(new.since)
                else:
                    new.score = self.score(new)
                    S.append(new)
        return best


def seconds(data: HapData, Q: tuple[int, ...], slow: float) -> float:
    """t(Q, B), the slow device's ratio given."""
    at, since, total = Figure10(data, (slow, 1 - slow), once=False), (0.0, 0.0), 0.0
    for i in Q:
        t, work = data.triples[i], at.work(i)
        if isinstance(t, Communication):
            total += max(since) + t.fixed_seconds + t.shared_seconds * max(slow, 1 - slow)
            since = (0.0, 0.0)
        since = since[0] + work[0], since[1] + work[1]
    return total + max(since)


def best_ratio(data: HapData, Q: tuple[int, ...]) -> float:
    """Of the slow device, by golden sections: t is convex in it."""
    low, high = 0.0, 1.0
    for _ in range(60):
        a, b = high - 0.618034 * (high - low), low + 0.618034 * (high - low)
        low, high = (low, b) if seconds(data, Q, a) <= seconds(data, Q, b) else (a, high)
    return low


def from_a_placeholder(data: HapData) -> HapData:
    """The theory with its first tensor loaded in one form, not computed; collectives make the other
    forms of it."""
    triples: list[Triple] = []
    for t in data.triples:
        if t.pre:
            triples.append(t)
        elif t.post == ["e0|0"]:
            free = {"fixed_flops": 0.0, "shared_flops": 0.0}
            triples.append(t.model_copy(update=free))
        else:
            triples.append(
                Communication(
                    kind="comm", instruction="comm e0", pre=["e0|0"], post=t.post,
                    fixed_seconds=0.05, shared_seconds=0.05,
                )
            )  # fmt: skip
    return data.model_copy(update={"triples": triples})


def cheapest(data: HapData, B: Pair, *, once: bool) -> tuple[int, ...] | None:
    """Of all programs without the same property twice that keep to the second pruning."""
    figure = Figure10(data, B, once=once)
    movable = {Q[0] for Q, _, _ in figure.T} | figure.sources

    def keeps(Q: tuple[int, ...]) -> bool:
        communicated = [tensor for i in Q for tensor in figure.tensor((i,))]
        return movable >= {*Q} and len(communicated) == len({*communicated})

    every = map(tuple, paths(data, data.goal, frozenset()))
    return min(filter(keeps, every), key=lambda Q: seconds(data, Q, B[0]), default=None)


def searched(data: HapData, B: Pair, *, once: bool) -> tuple[int, ...] | None:
    """The package's search."""
    reduced = reduced_or_answered(data, Run())
    assert isinstance(reduced, ReducedTheory)
    found = Search(Transitions(reduced, once=once), np.array([B])).run(Run())
    return None if found is None else tuple(reduced.program(found.triples()))


@pytest.mark.parametrize("placeholder", [False, True])
@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("seed", range(30))
def test_the_search_is_figure_10(seed: int, once: bool, placeholder: bool) -> None:
    """It finds what the printed loop finds, or something cheaper that lines 9 to 14 lose."""
    data, slow = tight(seed)[0], 1 / 3
    data = from_a_placeholder(data) if placeholder else data
    found = searched(data, (slow, 1 - slow), once=once)
    printed = Figure10(data, (slow, 1 - slow), once=once).search()
    best = cheapest(data, (slow, 1 - slow), once=once)
    if found is None:
        assert printed is None and best is None
        return
    assert printed is not None and best is not None
    cost = seconds(data, found, slow)
    assert cost == pytest.approx(seconds(data, best, slow), rel=1e-12)
    assert cost <= seconds(data, printed, slow) * (1 + 1e-12)


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("seed", range(30))
def test_what_each_type_has_computed_counts(seed: int, once: bool) -> None:
    """Where the fast device has more than its part, either may be the last one of a stage. A
    partial program that is later on one of them alone must not be dropped."""
    data = tight(seed)[0]
    for slow in (0.15, 0.2, 0.25):
        B = slow, 1 - slow
        found, best = searched(data, B, once=once), cheapest(data, B, once=once)
        assert (found is None) == (best is None)
        if found is not None and best is not None:
            cost = seconds(data, found, slow)
            assert cost == pytest.approx(seconds(data, best, slow), rel=1e-12)


def test_lines_9_to_14_as_printed_lose_programs() -> None:
    """By some percent on these theories, which is why the search compares more than they do."""
    losses = []
    for seed in range(8):
        data, slow = tight(seed)[0], 1 / 3
        printed = Figure10(data, (slow, 1 - slow), once=True).search()
        best = cheapest(data, (slow, 1 - slow), once=True)
        if printed is not None and best is not None:
            losses.append(seconds(data, printed, slow) / seconds(data, best, slow) - 1)
    assert min(losses) > -1e-12 and 0.01 < max(losses) < 0.1


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("holds_bytes", [True, False])
def test_placeholders_and_parameters_are_not_communicated(once: bool, holds_bytes: bool) -> None:
    """Second half of the second pruning. Gathering a loaded tensor would be cheaper here than
    computing on every device; a computed tensor may be gathered."""
    triples: list[Triple] = [
        Compute(
            kind="compute", instruction="load", pre=[], post=["x|0"], fixed_flops=0.0,
            shared_flops=0.0, shared_bytes=1.0 if holds_bytes else None,
        ),
        Communication(
            kind="comm", instruction="gather x", pre=["x|0"], post=["x|1"],
            fixed_seconds=0.25, shared_seconds=0.0,
        ),
        compute("from whole", "x|1", "y|0", 0.25),
        compute("from slice", "x|0", "y|0", 4.0),
        Communication(
            kind="comm", instruction="gather y", pre=["y|0"], post=["y|1"],
            fixed_seconds=0.25, shared_seconds=0.0,
        ),
        compute("goal", "y|1", "goal", 0.25),
    ]  # fmt: skip
    devices = [Device(name=str(i), flops_per_second=1.0 + i) for i in range(2)]
    memory = Memory(device_bytes=[10.0, 10.0]) if holds_bytes else None
    data = HapData(devices=devices, triples=triples, goal="goal", memory=memory)
    program = [data.triples[i].instruction for i in searched(data, (0.5, 0.5), once=once) or ()]
    if once:
        assert program == ["load", "from slice", "gather y", "goal"]
    else:
        assert program == ["load", "gather x", "from whole", "gather y", "goal"]


def compute(name: str, pre: str, post: str, flops: float) -> Compute:
    """A computation on every device."""
    return Compute(
        kind="compute", instruction=name, pre=[pre], post=[post],
        fixed_flops=flops, shared_flops=0.0,
    )  # fmt: skip


def test_operators_that_load_their_data_are_no_sources() -> None:
    """The first operator of a network needs no property and computes: the gradient of its weight
    may be summed up by a collective, without which it cannot be data-parallel."""
    program = vit(64, transformer(1, 768, 12, 3072, vocabulary=0), 196, 768, 10)
    devices = [Device(name=str(i), flops_per_second=1e12 * (i + 1)) for i in range(2)]
    data = theory_of(program, devices, ring(2, 1e9)).data
    reduced = reduced_or_answered(data, Run())
    assert isinstance(reduced, ReducedTheory)
    first = {step.index for step in reduced.steps if not step.pre and not step.comm}
    assert first and not any(reduced.problem.steps[i].costless for i in first)
    collectives = {step.index for step in reduced.steps if step.comm}
    moves = moves_of(reduced, forms=True, once=True).listed
    assert {i.index for move in moves for i in move.steps if i.comm} == collectives
    assert {move.steps[0].index for move in moves if not move.pre} >= first
    best = solve(FAMILY, data, "exact", Run(Options(threads=1))).objective
    assert solve(FAMILY, data, "paper").objective == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("seed", range(30))
def test_the_paper_is_the_alternation(seed: int) -> None:
    data, slow = tight(seed)[0], 1 / 3
    reduced = reduced_or_answered(data, Run())
    assert isinstance(reduced, ReducedTheory)
    seen, costs = set[tuple[int, ...]](), []
    while True:
        B = slow, 1 - slow
        Q = cheapest(data, B, once=True) or cheapest(data, B, once=False)
        assert Q is not None
        Q = tuple(reduced.program(Q))
        if Q in seen:
            break
        seen.add(Q)
        slow = best_ratio(data, Q)
        costs.append(seconds(data, Q, slow))
    result = solve(FAMILY, data, "paper")
    assert result.objective == pytest.approx(min(costs), rel=1e-7)
    assert result.details["rounds"] == len(seen)
