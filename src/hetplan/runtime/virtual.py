"""A mixed cluster rehearsed on one machine: ranks compute little, and sleep until their device
would be done.

Every pass ends at its begin plus the seconds that the plan's device is predicted to take, times a
scale. A pass begins when the rank is done with what it did before and its input is there; the input
is there when the transfer that carries it is predicted to end, network cards being shared as they
are on the cluster. What is measured is the wall clock: ranks that are late because real work,
messages or this machine's cores hold them up stay late.

Ranks meet in shared memory: `Shared` is made before they are forked.
"""

import mmap
import multiprocessing
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import numpy as np

from hetplan.formulations.joint.plan import Plan, Replica, Stage
from hetplan.formulations.joint.pose import costs_of
from hetplan.formulations.joint.replay import simulated
from hetplan.formulations.joint.sharding import ZeroCosts
from hetplan.profiling.simulator.pipeline import Collective, Replica as Pipeline, simulate_replicas
from hetplan.profiling.simulator.tasks import Ports, Traffic
from hetplan.profiling.workload import Workload
from hetplan.runtime.replay import Settings, check_same
from hetplan.runtime.watch import Watch

POLL = 2e-4  # seconds between looks at shared memory


@dataclass(frozen=True)
class Rehearsal:
    """Predicted seconds of everything, on the plan's devices; scale: seconds here per second
    there."""

    plan: Plan
    pipelines: tuple[Pipeline, ...]
    collectives: tuple[Collective, ...]
    scale: float

    @classmethod
    def of(
        cls, plan: Plan, workload: Workload, scale: float | None = None, cores: float = 1
    ) -> "Rehearsal":
        """A pipeline plan's (`spmd_virtual.rehearsal_of`: any plan's).

        scale: default such that an iteration takes a second, or as long as its messages need here.
        """
        check_same(plan, workload)
        zero = ZeroCosts.of(plan, costs_of(workload, plan.recomputation))
        pipelines, together = simulated(plan, zero, Settings())
        made = cls(plan, tuple(pipelines), tuple(together), 1.0)
        return replace(made, scale=scale or made.comfortable_scale(cores))

    @property
    def seconds(self) -> float:
        """Predicted seconds of an iteration here: the simulator's, scaled."""
        return self.scale * simulate_replicas(self.pipelines, self.collectives).seconds

    def comfortable_scale(self, cores: float) -> float:
        """Such that an iteration takes a second, or as long as the real work needs: all of it on
        the cores, and that of the busiest stage's ranks in the time of its passes."""
        predicted = self.seconds
        if predicted <= 0:
            return 1.0
        work = [
            (self._passes(i, j), real_seconds(replica, stage), len(stage.all_devices))
            for i, replica in enumerate(self.plan.replicas)
            for j, stage in enumerate(replica.stages)
        ]
        total = sum(real * ranks for _, real, ranks in work)
        passes, real, _ = max(work)
        return max(1.0 / predicted, total / cores / predicted, real / passes if passes else 0.0)

    def busy(self, rank: int) -> float:
        """Seconds of a rank's passes here."""
        place = self.plan.places[rank]
        return self.scale * self._passes(place.replica, place.stage)

    def _passes(self, replica: int, stage: int) -> float:
        """Seconds of a stage's passes there."""
        pipe = self.pipelines[replica]
        each = np.ndindex(2, pipe.chunks, pipe.micro_batches)
        reduces = (pipe.reduce(side, stage, c, m) for side, c, m in each)
        return float(pipe.pass_seconds[stage].sum()) + sum(t.seconds for t in reduces)

    @property
    def meetings(self) -> int:
        """How often ranks meet in an iteration, its beginning and its end aside."""
        return max(replica.steps for replica in self.plan.replicas)


# Seconds of a core that a narrow layer's pass takes, and a pass with its messages beside.
LAYER_SECONDS, PASS_SECONDS = 0.0015, 0.004


def real_seconds(replica: Replica, stage: Stage) -> float:
    """Of a core, for an iteration of one rank of a stage on narrow layers."""
    layers = sum(last - first for first, last in stage.layers)
    return 2 * replica.steps * (len(stage.layers) * PASS_SECONDS + layers * LAYER_SECONDS)


@dataclass
class Shared:
    """Memory of all ranks: when each was where, when messages arrive, and until when network cards
    are taken."""

    rehearsal: Rehearsal
    ranks: int

    def __post_init__(self) -> None:
        plan, pipelines = self.rehearsal.plan, self.rehearsal.pipelines
        chunks = max((p.stages * p.chunks for p in pipelines), default=1)
        # [rank, meeting]: (iteration, time)
        self.posts = _array((self.ranks, self.rehearsal.meetings + 2, 2))
        # likewise, when each message set may leave and is there, and what tensor ranks do together
        # in each pass is done
        shape = (len(plan.replicas), 2, chunks, self.rehearsal.meetings, 2)
        self.sent, self.hops, self.joint = (_array(shape) for _ in range(3))
        sets = [t for p in pipelines for side in p.hops for row in side for t in row]
        sets += [t for p in pipelines for side in p.reduces for c in side for row in c for t in row]
        ports = [ports for _, _, ports in sets] + [c.ports for c in self.rehearsal.collectives]
        self.free = _array((1 + max((port for held in ports for port, _ in held), default=-1),))
        self.lock = multiprocessing.get_context("fork").Lock()

    def first(self, entry: Any, iteration: int, traffic: Traffic, ready: float) -> float:
        """When something is done that several ranks do together: the first to come takes the
        ports. entry: theirs, (iteration, time)."""
        scale = self.rehearsal.scale
        with self.lock:
            if entry[0] != iteration:
                end = take(self.free, traffic.ports, ready, traffic.seconds * scale)
                entry[1] = end + traffic.latency * scale
                entry[0] = iteration
            return float(entry[1])

    def post(self, rank: int, slot: int, iteration: int, moment: float) -> None:
        """Tell the others when a rank came to a meeting."""
        entry = self.posts[rank, slot]
        entry[1] = moment
        entry[0] = iteration  # last: who sees it may read the time

    def met(self, ranks: Iterable[int], slot: int, iteration: int) -> list[float]:
        """When each rank came there, once all have."""
        moments = []
        for rank in ranks:
            entry = self.posts[rank, slot]
            while entry[0] < iteration:
                time.sleep(POLL)
            moments.append(float(entry[1]))
        return moments


def _array(shape: tuple[int, ...]) -> Any:
    """Zeros that forked processes share."""
    count = int(np.prod(shape))
    return np.frombuffer(mmap.mmap(-1, max(8 * count, 8)), np.float64, count).reshape(shape)


@dataclass(kw_only=True)
class Virtual(Watch):
    """A rank's watch in a rehearsal. stage_ranks: ranks of each (replica, stage). clock: when its
    device would be where it is."""

    shared: Shared
    rank: int
    replica: int
    stage: int
    stage_ranks: dict[tuple[int, int], list[int]]
    clock: float = 0.0
    iteration: int = 0

    def ends(self, what: str, chunk: int, batch: int) -> None:
        """A pass ends when the device would be done; an iteration when what follows the passes
        would be."""
        rehearsal, everyone = self.shared.rehearsal, range(self.shared.ranks)
        if what in ("forward", "backward"):
            pipe, side = rehearsal.pipelines[self.replica], int(what == "backward")
            end = self.clock + rehearsal.scale * float(
                pipe.pass_seconds[self.stage, side, chunk, batch]
            )
            met = pipe.reduce(side, self.stage, chunk, batch)
            if met.seconds:
                virtual_stage = chunk * pipe.stages + self.stage
                entry = self.shared.joint[self.replica, side, virtual_stage, batch]
                end = self.shared.first(entry, self.iteration, met, end)
            self._sleep(end)
        elif what == "prepare":
            self.iteration += 1
            self.clock = max(self._meet(0, time.monotonic(), everyone))
        elif what == "synchronise":  # gradients, updates and parameters
            moments = self._meet(self.shared.posts.shape[1] - 1, self.clock, everyone)
            units = {u: max(moments[rank] for rank in own) for u, own in self.stage_ranks.items()}
            done = finish(rehearsal, units, list(self.shared.free))
            self._sleep(done[self.replica, self.stage])
        super().ends(what, chunk, batch)

    def departs(self, hop: int, batch: int, *, forward: bool) -> None:
        """The message is ready to leave."""
        entry = self.shared.sent[self.replica, int(forward), hop, batch]
        entry[1] = self.clock
        entry[0] = self.iteration

    def arrives(self, hop: int, batch: int, *, forward: bool) -> None:
        """The transfer begins when its receiver waits for it: the first of a stage's ranks to come
        takes the ports, and all of its messages arrive together."""
        place = self.replica, int(forward), hop, batch
        sent = self.shared.rehearsal.pipelines[self.replica].hop(int(not forward), hop, batch)
        ready = max(self.clock, float(self.shared.sent[(*place, 1)]))
        there = self.shared.first(self.shared.hops[place], self.iteration, sent, ready)
        self.clock = max(self.clock, there)

    def stepped(self, batch: int) -> None:
        """Collectives of every step."""
        for collective in self.shared.rehearsal.collectives:
            if collective.when == "step":
                ranks = [rank for member in collective.members for rank in self.stage_ranks[member]]
                ready = max(self._meet(batch + 1, self.clock, ranks))
                self._sleep(ready + collective.seconds * self.shared.rehearsal.scale)

    def _meet(self, slot: int, moment: float, ranks: Iterable[int]) -> list[float]:
        """Come to a meeting; when each rank came there."""
        self.shared.post(self.rank, slot, self.iteration, moment)
        return self.shared.met(ranks, slot, self.iteration)

    def _sleep(self, moment: float) -> None:
        """The device is busy until then."""
        self.clock = moment
        sleep_until(moment)


def finish(
    rehearsal: Rehearsal, units: dict[tuple[int, int], float], free: list[float]
) -> dict[tuple[int, int], float]:
    """When each stage is done with its iteration, given when its passes are."""
    done = dict(units)
    _joint(rehearsal, "gradients", units, done, free)
    for i, pipe in enumerate(rehearsal.pipelines):
        for j, seconds in enumerate(np.broadcast_to(pipe.optimizer, (pipe.stages,))):
            done[i, j] += rehearsal.scale * float(seconds)
    _joint(rehearsal, "parameters", dict(done), done, free)
    return done


def _joint(
    rehearsal: Rehearsal,
    when: str,
    ready: dict[tuple[int, int], float],
    done: dict[tuple[int, int], float],
    free: list[float],
) -> None:
    """Collectives in the order in which their members are ready; `done` and `free` are moved on."""
    joint = [collective for collective in rehearsal.collectives if collective.when == when]
    begins = [max(ready[member] for member in collective.members) for collective in joint]
    for begin, collective in sorted(zip(begins, joint, strict=True), key=itemgetter(0)):
        end = take(free, collective.ports, begin, collective.seconds * rehearsal.scale)
        for member in collective.members:
            done[member] = max(done[member], end)


def take(free: Any, ports: Ports, ready: float, seconds: float) -> float:
    """Hold each port for its share of `seconds` as soon as all are free; returns the end."""
    begin = max([ready, *(float(free[port]) for port, _ in ports)])
    for port, share in ports:
        free[port] = begin + share * seconds
    return begin + seconds


def sleep_until(moment: float) -> None:
    """Until a moment of the monotonic clock."""
    left = moment - time.monotonic()
    if left > 0:
        time.sleep(left)
