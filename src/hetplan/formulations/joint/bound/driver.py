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

Plans are divided into parts: by their homes, one replica or several, one chunk or several. Each
part has a floor, which is the larger of computing alone and the programme over nodes (nodes.py).
One T is asked of all parts whose floors are below it, by bisection; the part that failed last is
asked first. A part that fails is asked for the bound of the whole programme over nodes, once.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from hetplan.formulations.joint.bound.alone import computing_alone
from hetplan.formulations.joint.bound.nodes import NodeModel
from hetplan.formulations.joint.bound.replicas import STANDARD, Micro, Parameters
from hetplan.formulations.joint.bound.tables import Homes, Relaxation
from hetplan.formulations.joint.data import MOST_CHUNKS
from hetplan.replays.arrays import Floats
from hetplan.solvers.run import Run, Stopped


@dataclass
class Part:
    """Plans with such homes, with several replicas or one, and with several chunks or one.

    floor: seconds that none of them replays below. prices [2, Q] of a device by type, in homes and
    in other nodes; they add up to G. hard: micro-batch and numbers of samples that the last attempt
    failed with. whole: whether the whole programme over nodes was asked.
    """

    of: Relaxation
    homes: Homes
    several: bool
    chunks: bool
    tries: Parameters
    run: Run
    prices: Floats
    floor: float
    hard: tuple[int, int, int] = (0, 0, 0)
    whole: bool = False
    micros: dict[tuple[int, int], Micro] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether there are no such plans."""
        if self.several:
            return self.homes.replicas < 2 or self.of.data.global_batch < 2
        across = max(map(len, self.of.nodes)) > 1
        return not (sum(self.homes.home) or across) or (self.chunks and not self.depths)

    def micro(self, b: int, g: int) -> Micro:
        """Kept until prices change."""
        self.run.check()
        if (b, g) not in self.micros:
            self.micros[b, g] = Micro(self.of, self.homes, self.prices, b, g)
        return self.micros[b, g]

    def is_slower(self, seconds: float) -> bool:
        """Whether no plan of the part takes at most so many seconds. Prices in other nodes fall
        until then."""
        G, counts = self.of.data.global_batch, np.array((self.homes.home, self.homes.other))
        cases = [(b, G, G) for b in range(1, G + 1)]
        if self.several:
            cases = [(b, b, G - 1) for b in range(1, G)]
        begun = self.prices
        for _ in range(self.tries.prices if counts.any(axis=1).all() else 1):
            # The case that failed last is asked first.
            cases.sort(key=lambda case: case != self.hard)
            hard = next((case for case in cases if self.fails(seconds, *case)), None)
            if hard is None:
                return True
            self.hard, self.micros = hard, {}
            prices = self.prices * [[1.0], [self.tries.discount]]
            self.prices = prices * (G / (prices * counts).sum())
        self.prices = begun
        return False

    def fails(self, seconds: float, b: int, low: int, high: int) -> bool:
        """Whether some replica that takes so many samples, b at a time, may be as fast on devices
        of that price."""
        if all(self.replica_is_slower(seconds, b, low, high, S) for S in self.depths):
            return False
        middle = (low + high) // 2
        return low == high or any(
            self.fails(seconds, b, *half) for half in ((low, middle), (middle + 1, high))
        )

    @cached_property
    def depths(self) -> list[int]:
        """Numbers of stages with chunks; 1: any number without."""
        if not self.chunks:
            return [1]
        most = min(sum(self.of.counts), len(self.of.data.layers) // 2)
        return list(range(max(self.homes.total, 2), most + 1))

    def replica_is_slower(self, seconds: float, b: int, low: int, high: int, S: int) -> bool:
        """The same of replicas of S stages with chunks, or without. Seconds grow with the number of
        micro-batches, and with the last one: the least of both matter, in whole rounds."""
        rounds = -(-low // (b * S)) * S
        chunks = range(2, min(MOST_CHUNKS, len(self.of.data.layers) // S) + 1)
        for M in (rounds, rounds + S):
            g = max(low, b * (M - 1) + 1)
            if g > high or self.micro(b, g).work >= high * seconds:
                continue
            x, tries = self.micro(b, g), self.tries
            wide = low < high and high > tries.width * low
            if wide or (S == 1 and not x.chain_is_slower(seconds, high, tries)):
                return False
            if S > 1 and not all(x.chunks_are_slower(seconds, high, S, C, tries) for C in chunks):
                return False
        return True


def all_parts(of: Relaxation, run: Run, alone: float, tries: Parameters) -> list[Part]:
    """The parts that have plans, with computing alone as their floor."""
    work = np.array([of.least_work(q) for q in range(len(of.types))])
    worth = 1 / np.array([row.sum() for row in work])
    prices = np.stack([worth * of.data.global_batch / float(worth @ of.counts)] * 2)
    parts = [
        Part(of, homes, several, chunks, tries, run, prices, alone)
        for homes in of.patterns(tries.patterns)
        for several in (False, True)
        for chunks in (False, True)
    ]
    return [part for part in parts if not part.is_empty]


def lower_bound(
    of: Relaxation, run: Run, enough: float = math.inf, parameters: Parameters = STANDARD
) -> float:
    """Seconds that no plan replays below, at most `enough`. It rises until the run should stop."""
    data, tries = of.data, parameters
    work = np.array([of.least_work(q) for q in range(len(of.types))])
    alone = computing_alone(data.global_batch * work, of.counts, run.options)
    parts = all_parts(of, run, alone, tries)
    bisection = Bisection(parts, enough, run, tries)
    try:
        nodes = NodeModel(of, alone, run.options)
        for part in parts:
            run.check()
            part.floor = nodes.seconds(part.homes, part.several, part.chunks)
        bisection.go(nodes)
    except Stopped:
        pass
    return bisection.bound


class Bisection:
    """One T for all parts, between the least floor and the last T that failed.

    enough: seconds above which nothing is asked.
    """

    def __init__(self, parts: list[Part], enough: float, run: Run, tries: Parameters) -> None:
        self.parts, self.enough, self.run, self.tries = parts, enough, run, tries

    @property
    def bound(self) -> float:
        """The least floor, at most `enough`, rounded down."""
        least = min((part.floor for part in self.parts), default=0.0)
        return min(least, self.enough) * (1 - self.tries.rounding)

    def go(self, nodes: NodeModel) -> None:
        """Raise the floors until the interval is narrow."""
        high, rise = self.enough, self.tries.rise
        while True:
            low = min(part.floor for part in self.parts)
            self.run.report(bound=self.bound)
            if low >= high or high / low - 1 < self.tries.least_rise:
                return
            goal = min(low * (1 + rise), math.sqrt(low * high))
            failed = next((part for part in self.asked(goal) if not self.raised(part, goal)), None)
            if failed is None:
                rise *= 2
                continue
            # It is asked first from now on.
            self.parts.sort(key=lambda part: part is not failed)
            if not failed.whole:
                failed.whole = True
                case = failed.homes, failed.several, failed.chunks
                failed.floor = max(failed.floor, nodes.whole(*case, self.tries.nodes))
            if failed.floor < goal:
                high = goal

    def asked(self, goal: float) -> list[Part]:
        """Parts whose floors are below the goal, in order."""
        return [part for part in self.parts if part.floor < goal]

    def raised(self, part: Part, goal: float) -> bool:
        """Whether no plan of the part takes at most so many seconds, which is its floor then."""
        if not part.is_slower(goal):
            return False
        part.floor = goal
        return True
