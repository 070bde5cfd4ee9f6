"""A number of seconds that no plan of an instance replays below.

evidence/speed/joint_bound.md proves it.

Sets   q device types, l layers, j ways to hold a run of layers: where (inside a home, inside
       another node, across nodes), type q, t tensor ranks, r row groups.
Data   F, B[j, l]  forward and backward seconds of a micro-batch of b samples; and of the last one
       p[j]        price of the stage's devices: prices of all devices add up to G samples
Decide whether some plan takes at most T seconds; the bound is the largest T known to be too short.
(1) Homes are the nodes that hold some layer alone. Every plan has one set of homes, and each of its
    replicas passes through all of them.
(2) Replicas take G samples together, so one that takes g has devices of price at most g.
(3) Every stage s of it says T >= E[s]: the first micro-batch's way in, the stage's own passes with
    the messages that they wait for, the way of one micro-batch through all later stages and back,
    the last gradient's way out, or what is joined behind it. No run of layers may take longer.
(4) Without chunks E[s] is the stage's own seconds and what one micro-batch takes through all
    stages. The latter is least on a shortest path over runs of layers that (3) leaves, with the
    devices that are left and the changes between nodes as its states. The longer that path, the
    less is left in (3) for a stage, until no path is left.
(5) With chunks a stage has several runs. The sum of (3) over stages with prices as weights is
    least on such a path.
(6) (3) to (5) are of GPipe, 1F1B and interleaved 1F1B. Whatever the order of passes, split or not,
    and on a V, a stage says T >= the first micro-batch's forward way in, its own passes with the
    messages that they wait for, and what is joined behind them. Without chunks the least price of a
    path over runs that (6) leaves must not exceed g; with chunks (6) takes the place of (3) in (5).

Plans are divided into parts: by their homes, one replica or several, one chunk or several. Each
part has a floor, which is the larger of computing alone and the programme over nodes (nodes.py).
One T is asked of all parts whose floors are below it, by bisection; the part that failed last is
asked first. A part that fails is asked for the bound of the whole programme over nodes, once.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from hetplan.formulations.joint.bound.alone import computing_alone
from hetplan.formulations.joint.bound.nodes import NodeModel
from hetplan.formulations.joint.bound.replicas import (
    ANY_ORDER,
    STANDARD,
    WARM_UP,
    Effort,
    Lump,
    Parameters,
    Replicas,
    TooLong,
    intervals,
)
from hetplan.formulations.joint.bound.tables import Homes, Relaxation
from hetplan.formulations.joint.data import MOST_CHUNKS
from hetplan.replays.arrays import Floats
from hetplan.solvers.run import Run, Stopped

# Seconds that a class of replicas and a sum of a shortest path count towards the budget.
CLASS_SECONDS = 2e-3
SUM_SECONDS = 2e-8


@dataclass
class Part:
    """Plans with such homes, with several replicas or one, and with several chunks or one.

    floor: seconds that none of them replays below. prices [2, Q] of a device by type, in homes and
    in other nodes; they add up to G. hard: the lump of replicas that the last attempt failed with.
    whole: whether the whole programme over nodes was asked. kept: classes of replicas at these
    prices. alike: how many equal replicas there are (equal.py), or 0 where they need not be equal.
    any_order: (6), whether passes may be in any order and split.
    """

    of: Relaxation
    homes: Homes
    several: bool
    chunks: bool
    tries: Parameters
    run: Run
    prices: Floats
    floor: float
    effort: Effort = field(default_factory=Effort)
    hard: Lump | None = None
    whole: bool = False
    kept: dict[tuple[Lump, int, bool], Replicas] = field(default_factory=dict)
    alike: int = 0
    any_order: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether there are no such plans."""
        if self.chunks and max(self.depths, default=1) == 1:
            return True
        if self.several:
            return self.homes.replicas < 2 or self.of.data.global_batch < 2
        return not sum(self.homes.home) and max(map(len, self.of.nodes)) == 1

    @property
    def case(self) -> tuple[Homes, bool, bool]:
        """The case of the programme over nodes. On a V all samples enter each home as often as
        without chunks, at least."""
        return self.homes, self.several, self.chunks and not self.any_order

    @cached_property
    def lumps(self) -> list[Lump]:
        """Replicas by their micro-batches, from small ones to large ones."""
        G = self.of.data.global_batch
        low, high = (1, G - 1) if self.several else (G, G)
        sizes = intervals(1, high, self.tries.lump)
        return [Lump(least, most, max(low, least), high) for least, most in sizes]

    @cached_property
    def depths(self) -> list[int]:
        """Numbers of stages with chunks; 1: any number without. Beside replicas of several stages
        with chunks there may be one of a single stage, which is as without."""
        if not self.chunks:
            return [1]
        most = min(sum(self.of.counts), len(self.of.data.layers) // 2)
        single = [1] * (self.several and self.homes.total < 2)
        return [*single, *range(max(self.homes.total, 2), most + 1)]

    def is_slower(self, seconds: float) -> bool:
        """Whether no plan of the part takes at most so many seconds. Prices in other nodes fall
        until then."""
        G, counts = self.of.data.global_batch, np.array((self.homes.home, self.homes.other))
        begun = self.prices
        for _ in range(self.tries.prices if counts.any(axis=1).all() else 1):
            # The lump that failed last is asked first.
            lumps = [*([] if self.hard is None else [self.hard]), *self.lumps]
            hard = next((each for lump in lumps if (each := self.fails(seconds, lump))), None)
            if hard is None:
                return True
            self.hard, self.kept = hard, {}
            prices = self.prices * [[1.0], [self.tries.discount]]
            self.prices = prices * (G / (prices * counts).sum())
        self.prices = begun
        return False

    def fails(self, seconds: float, lump: Lump) -> Lump | None:
        """The first lump of replicas that may be as fast on devices of that price, halved as often
        as possible; None where there is none."""
        wide = lump.high > self.tries.width * lump.low
        if not wide and all(self.replica_is_slower(seconds, lump, S) for S in self.depths):
            return None
        if lump.is_single:
            return lump
        return next((hard for half in lump.halves() if (hard := self.fails(seconds, half))), None)

    def replica_is_slower(self, seconds: float, lump: Lump, S: int) -> bool:
        """The same of replicas of S stages with chunks, or of any number without."""
        if not self.fewest_samples(lump, S):
            return True
        cut, P = self.replicas(lump, S, cut=True), self.most_worth(lump)
        if cut.work >= P * seconds:
            return True
        every = self.replicas(lump, S, cut=False)
        if every.work >= P * seconds:
            return True
        if S > 1:
            chunks = range(2, min(MOST_CHUNKS, len(self.of.data.layers) // S) + 1)
            return all(
                any(
                    each.chunks_are_slower(seconds, P, S, C, self.tries, any_order=self.any_order)
                    for each in (every, cut)
                )
                for C in chunks
            )
        exact = lump.high * lump.most <= self.tries.narrow * lump.low * lump.least
        slower = partial(
            Replicas.chain_is_slower, seconds=seconds, P=P, tries=self.tries, exact=exact
        )
        if self.any_order:
            return slower(cut, ANY_ORDER) or (exact and slower(every, ANY_ORDER))
        if slower(cut, "interleaved-1f1b"):
            return True  # under the others less is left for a stage, and no way is shorter
        if not exact:
            return False  # halves are asked next
        return all(
            (schedule != "interleaved-1f1b" and slower(cut, schedule)) or slower(every, schedule)
            for schedule in WARM_UP
        )

    def fewest_samples(self, lump: Lump, S: int) -> list[tuple[int, int]]:
        """As `Lump.fewest_samples`; in any order the number of micro-batches is free."""
        return lump.fewest_samples(1 if self.any_order else S)

    def most_worth(self, lump: Lump) -> float:
        """The price of a replica's devices, at most: some replica has no more than it takes
        samples."""
        return lump.high

    def replicas(self, lump: Lump, S: int, *, cut: bool) -> Replicas:
        """The class, kept until prices change."""
        self.run.check(CLASS_SECONDS)
        key = lump, S, cut
        if key not in self.kept:
            pairs = self.fewest_samples(lump, S)
            self.kept[key] = Replicas(
                self.of,
                self.homes,
                self.prices,
                pairs,
                whole=not self.several,
                cut=cut,
                chunks=S > 1,
                effort=self.effort,
                alike=self.alike,
            )
        return self.kept[key]


class Bounds(NamedTuple):
    """Seconds that no plan replays below, each at least the one before: by computing alone; with
    what nodes receive and join; with the filling and draining of pipelines and whole
    micro-batches, which is the bound of the whole method."""

    alone: float
    nodes: float
    every: float


def all_parts(
    of: Relaxation, run: Run, alone: float, tries: Parameters, *, any_order: bool = False
) -> list[Part]:
    """The parts that have plans, with computing alone as their floor. any_order: as in `Part`."""
    prices = prices_by_speed(of)
    parts = [
        Part(of, homes, several, chunks, tries, run, prices, alone, any_order=any_order)
        for homes in of.patterns(tries.patterns)
        for several in (False, True)
        for chunks in (False, True)
    ]
    return [part for part in parts if not part.is_empty]


def prices_by_speed(of: Relaxation) -> Floats:
    """[2, Q] prices of a device that grow with the speed of its type, alike in all nodes."""
    worth = 1 / of.least_works.sum(axis=1)
    return np.stack([worth * of.data.global_batch / float(worth @ of.counts)] * 2)


def seconds_alone(of: Relaxation, run: Run) -> float:
    """What computing alone takes."""
    return computing_alone(of.data.global_batch * of.least_works, of.counts, run.options)


def lower_bounds(
    of: Relaxation,
    run: Run,
    enough: float = math.inf,
    parameters: Parameters = STANDARD,
    *,
    any_order: bool = False,
) -> Bounds:
    """Three bounds of all plans, at most `enough`. The last one rises until the run should stop.

    any_order: also of plans whose passes are in any order and split; otherwise of GPipe, 1F1B and
    interleaved 1F1B.
    """
    alone = seconds_alone(of, run)
    parts = all_parts(of, run, alone, parameters, any_order=any_order)
    bisection = Bisection(parts, enough, run, parameters)
    every = bisection.bound_after_raising(NodeModel(of, alone, run))
    rounded = min(alone, enough) * (1 - parameters.rounding)
    return Bounds(rounded, bisection.by_nodes or rounded, every)


def lower_bound(
    of: Relaxation,
    run: Run,
    enough: float = math.inf,
    parameters: Parameters = STANDARD,
    *,
    any_order: bool = False,
) -> float:
    """Seconds that no plan replays below, at most `enough`. It rises until the run should stop.
    any_order: as for `lower_bounds`."""
    return lower_bounds(of, run, enough, parameters, any_order=any_order).every


class Bisection:
    """One T for all parts, between the least floor and the last T that failed.

    enough: seconds above which nothing is asked. failed: the least T that a part failed with at any
    effort, or `enough`. by_nodes: the bound by the linear programmes over nodes; 0 until all of
    them are solved.
    """

    def __init__(self, parts: list[Part], enough: float, run: Run, tries: Parameters) -> None:
        self.parts, self.enough, self.run, self.tries = parts, enough, run, tries
        self.failed, self.by_nodes = enough, 0.0

    @property
    def least(self) -> float:
        """The least floor, which no plan is below."""
        return min((part.floor for part in self.parts), default=0.0)

    @property
    def bound(self) -> float:
        """The same, at most `enough`, rounded down."""
        return min(self.least, self.enough) * (1 - self.tries.rounding)

    def bound_after_raising(self, nodes: NodeModel) -> float:
        """The bound once the floors have risen by nodes, and by paths until the run should stop."""
        try:
            for part in self.parts:
                self.run.check()
                part.floor = nodes.seconds(*part.case)
            self.by_nodes = self.bound
            self.go(nodes)
        except Stopped:
            pass
        return self.bound

    def go(self, nodes: NodeModel) -> None:
        """Raise the floors, each time with more effort for an attempt, until none is given up."""
        effort = self.tries.effort
        while self.rise(nodes, effort):
            effort *= self.tries.more_effort

    def rise(self, nodes: NodeModel, effort: float) -> bool:
        """Raise the floors until the interval is narrow. Whether an attempt was given up for its
        effort. Its part waits for more effort, because a lower T would cost as much again and raise
        its floor by less; meanwhile the others rise to its floor."""
        high, step, given_up = self.failed, self.tries.rise, False
        while True:
            low = self.least
            self.run.report(bound=self.bound)
            if low >= high or high / low - 1 < self.tries.least_rise:
                return given_up
            goal = min(low * (1 + step), math.sqrt(low * high))
            step *= 2
            for part in [part for part in self.parts if part.floor < goal]:
                too_long = self.attempt(part, goal, nodes, effort)
                if part.floor >= goal:
                    continue
                self.parts.sort(key=lambda each: each is not part)  # it is asked first from now on
                if too_long:
                    given_up, high = True, part.floor
                else:
                    self.failed = high = goal
                break

    def attempt(self, part: Part, goal: float, nodes: NodeModel, effort: float) -> bool:
        """Raise the floor of a part to the goal if its paths or its nodes allow it. Whether the
        paths were given up. The whole programme over nodes takes longer than the paths of the first
        effort, so it is asked only where these fail, or are given up with more effort."""
        part.effort.limit, part.effort.spent, given_up = effort, 0, False
        try:
            if part.is_slower(goal):
                part.floor = goal
                return False
        except TooLong:
            given_up = True
        finally:
            self.run.count(SUM_SECONDS * part.effort.spent)
        if not part.whole and not (given_up and effort <= self.tries.effort):
            part.whole = True
            part.floor = max(part.floor, nodes.whole(*part.case, self.tries.nodes))
        return given_up
