"""An SPMD program rehearsed: every device sleeps what it is predicted to compute, and joins real,
narrow collectives.

A collective begins when the slowest device is there and ends its predicted seconds later, on every
rank. Nothing is trained: no program is narrow enough on every model to stand for it, and what is
rehearsed is the schedule.
"""

import time
from dataclasses import dataclass, field

from hetplan.formulations.joint.plan import Plan
from hetplan.profiling.workload import Workload
from hetplan.runtime.replay import SpmdCosts, check_same
from hetplan.runtime.virtual import Rehearsal, Shared, sleep_until
from hetplan.runtime.watch import Watch

COLLECTIVE_SECONDS = 0.002  # of a narrow collective here, where every rank has a core


@dataclass(frozen=True)
class SpmdRehearsal(Rehearsal):
    """Predicted seconds of a program's stages, on the plan's devices."""

    costs: SpmdCosts = field(compare=False)

    @classmethod
    def of_program(
        cls, plan: Plan, workload: Workload, scale: float | None, cores: float
    ) -> "SpmdRehearsal":
        """scale: default such that an iteration takes a second, or as long as its collectives need
        here."""
        costs = SpmdCosts.of(plan, workload)
        predicted = costs.timeline().seconds
        joined = [stage.seconds for _, stage in costs.each() if stage.seconds > 0]
        real = len(joined) * COLLECTIVE_SECONDS * max(1.0, len(costs.devices) / cores)
        needed = real / sum(joined) if joined else 0.0
        comfortable = max(1.0 / predicted, needed) if predicted > 0 else 1.0
        return cls(plan, (), (), scale or comfortable, costs)

    @property
    def seconds(self) -> float:
        """Predicted seconds of an iteration here: the simulator's, scaled."""
        return self.scale * self.costs.timeline().seconds

    def busy(self, rank: int) -> float:
        """Seconds of a rank's passes here."""
        place = self.place(rank)
        return self.scale * float(sum(stage.compute[place] for _, stage in self.costs.each()))

    def place(self, rank: int) -> int:
        """A rank's place among the devices of the program."""
        return self.costs.devices.index(self.plan.places[rank].device)

    @property
    def meetings(self) -> int:
        """How often all ranks meet in an iteration, its beginning aside."""
        return sum(stage.seconds > 0 for _, stage in self.costs.each())


@dataclass
class SpmdWatch(Watch):
    """A rank's watch in a rehearsal, and its clock: when its device would be where it is."""

    shared: Shared | None = None
    rank: int = 0
    clock: float = 0.0
    iteration: int = 0

    @property
    def rehearsal(self) -> SpmdRehearsal:
        """What is rehearsed."""
        assert self.shared is not None and isinstance(self.shared.rehearsal, SpmdRehearsal)
        return self.shared.rehearsal

    def begin(self) -> None:
        """All ranks begin an iteration together."""
        self.iteration += 1
        self.clock = self.meet(0, time.monotonic())

    def passes(self, seconds: float) -> None:
        """The device computes for so long."""
        self.clock += self.rehearsal.scale * seconds
        sleep_until(self.clock)

    def meet(self, slot: int, moment: float) -> float:
        """The latest of all ranks' moments."""
        assert self.shared is not None
        self.shared.post(self.rank, slot, self.iteration, moment)
        return max(self.shared.met(range(self.shared.ranks), slot, self.iteration))


def rehearsal_of(
    plan: Plan, workload: Workload, scale: float | None = None, cores: float = 1
) -> Rehearsal:
    """The rehearsal of any plan; scale: default such that an iteration takes a second, or as long
    as its messages need here."""
    if plan.program is None:
        return Rehearsal.of(plan, workload, scale, cores)
    check_same(plan, workload)
    return SpmdRehearsal.of_program(plan, workload, scale, cores)
