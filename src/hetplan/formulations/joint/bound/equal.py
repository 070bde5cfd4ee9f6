"""A number of seconds that no plan with equal replicas replays below.

The class is what frameworks with one data-parallel degree can run: R replicas that hold the same
runs of layers on the same device types, by the same tensor degrees, in the same micro-batches.
Every stage of a replica is one tensor group. Cuts, the order of types, the schedule, chunks, ZeRO
and recomputation are free.

R      number of replicas, a divisor of the G samples of an iteration
n[q]   devices of type q
(1) Every replica takes G / R samples, so its micro-batches need no guess but for their size.
(2) A tensor group of t devices of type q in every replica takes R t of them. So the stages of one
    replica have at most floor(n[q] / R) devices of the type, and no price has to choose a replica.
(3) Each weight has R holders, and each tensor rank of them is in a ring of R: 2 (R - 1) / R of the
    bytes leave it. R tensor groups of t devices lie on several nodes if no node has R t devices.
    Then the ring passes the cards.

The inequalities of single stages (driver.py) hold with these devices and rings, and nothing is said
of homes. One R, with several chunks or one, is a part of the class.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from hetplan.formulations.joint.bound.driver import (
    Bisection,
    Part,
    prices_by_speed,
    seconds_alone,
)
from hetplan.formulations.joint.bound.nodes import NodeModel
from hetplan.formulations.joint.bound.replicas import STANDARD, Lump, Parameters, intervals
from hetplan.formulations.joint.bound.tables import Homes, Relaxation
from hetplan.solvers.run import Run


class Shape(NamedTuple):
    """Plans of the class with so many replicas, whose micro-batches have so many samples; the last
    one of a replica may have fewer."""

    replicas: int
    micro_batch: int


@dataclass
class EqualPart(Part):
    """Plans of the class with so many replicas (`alike`), and with several chunks or one.

    micro_batch: samples of their micro-batches; None: any number.
    """

    micro_batch: int | None = None

    @cached_property
    def lumps(self) -> list[Lump]:
        """(1). Replicas by their micro-batches, from small ones to large ones."""
        samples, b = self.of.data.global_batch // self.alike, self.micro_batch
        sizes = intervals(1, samples, self.tries.lump) if b is None else [(b, b)]
        return [Lump(least, most, samples, samples) for least, most in sizes]

    @cached_property
    def depths(self) -> list[int]:
        """Numbers of stages with chunks; 1: any number without."""
        if not self.chunks:
            return [1]
        most = min(sum(self.homes.home), len(self.of.data.layers) // 2)
        return [*range(2, most + 1)]

    @property
    def is_empty(self) -> bool:
        """Whether there are no such plans."""
        return sum(self.homes.home) == 0 or not self.depths

    def most_worth(self, lump: Lump) -> float:
        """(2). The price of the devices that a replica may have."""
        return float(self.prices[0] @ self.homes.home)


def equal_parts(
    of: Relaxation,
    run: Run,
    floor: float,
    tries: Parameters,
    cases: Sequence[bool],
    shape: Shape | None = None,
) -> list[EqualPart]:
    """The parts of the class that have plans, each with the same floor. cases: whether stages have
    several chunks. shape: of all plans; None: they may have any."""
    G, none, prices = of.data.global_batch, (0,) * len(of.types), prices_by_speed(of)
    parts = []
    for alike in range(1, min(G, sum(of.counts)) + 1):
        if G % alike or (shape is not None and alike != shape.replicas):
            continue
        homes = Homes(none, tuple(count // alike for count in of.counts), none, alike)
        for chunks in cases:
            part = EqualPart(
                of, homes, alike > 1, chunks, tries, run, prices, floor, alike=alike,
                micro_batch=None if shape is None else shape.micro_batch,
            )  # fmt: skip
            if not part.is_empty:
                parts.append(part)
    return parts


def equal_bound(
    of: Relaxation,
    run: Run,
    enough: float = math.inf,
    parameters: Parameters = STANDARD,
    cases: Sequence[bool] = (False, True),
) -> float | None:
    """Seconds that no plan of the class replays below, at most `enough`; None where the class is
    empty. It rises until the run should stop. cases: whether stages have several chunks; (False,)
    leaves out interleaved plans."""
    alone = seconds_alone(of, run)
    parts = equal_parts(of, run, alone, parameters, cases)
    if not parts:
        return None
    bisection = Bisection(list(parts), enough, run, parameters)
    return bisection.bound_after_raising(NodeModel(of, alone, run))
