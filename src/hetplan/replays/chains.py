"""A plan of stages replayed on the event-driven simulator: seconds per iteration and memory per
device.

The replayed seconds are the objective of the problem `joint`, and the measure by which plans of all
families are compared. Beyond the families' closed forms the replay counts:

- the transfers of every micro-batch in their order, and network cards that ranks of a node share;
- the all-reduces of gradients between the stages that hold the same layers: layer by layer where
  replicas are cut differently, and across stages for tied embeddings;
- the optimizer's step.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import pairwise

import numpy as np

from hetplan.errors import UnsupportedError, require
from hetplan.plans.passes import Orders, virtual_stages
from hetplan.plans.plan import PassSchedule, Plan, Recomputation, Replica, Stage
from hetplan.replays.costs import Costs
from hetplan.replays.data import ReplayData
from hetplan.replays.memory import PeakBytes
from hetplan.replays.peaks import limits, memory
from hetplan.replays.simulator.pipeline import (
    Collective,
    Replica as Pipeline,
    Sends,
    lower_bound_seconds,
    simulate_replicas,
    tasks_of,
)
from hetplan.replays.simulator.tasks import Tasks, Timeline, Traffic, simulate
from hetplan.replays.zero import Owner, ZeroCosts

CACHED_PIPELINES = 256  # the number of replicas whose pipelines a replayer keeps


@dataclass(frozen=True)
class Settings:
    """The way in which a plan is run, as far as the plan does not say it. The defaults are those of
    hetplan's runtime.

    The runtime sends by isend and receives when it needs the message. Both gloo and NCCL move a
    message when its receiver has asked for it, hence the default of `sends`.
    """

    buckets: int = 1  # parts of the last backward pass, each with its gradients; 1: no overlap
    sends: Sends = "waiting"  # see `simulator.pipeline.Replica`
    # the host's seconds for each message at each of its ends, besides the link's latency
    exchange_seconds: float = 0.0
    # layers that ZeRO 2 and 3 gather ahead while others compute (`replays.zero`); 0: nothing
    # overlaps. FSDP's default is 1.
    prefetch: int = 0


@dataclass(frozen=True)
class Noise:
    """The random durations of a robust replay.

    The replay is repeated `draws` times. In each repetition every duration is multiplied by a
    factor of its own, uniform between 1 - share and 1 + share. The share is an assumption, not a
    measurement. It is large enough that no plan ranks high only because some events happen to end
    at the same moment.
    """

    share: float = 0.02  # the largest relative change of a duration
    draws: int = 9  # repetitions; odd, so that the median is one of them
    seed: int = 0  # seed of the random numbers


@dataclass(frozen=True)
class Replay:
    """The replay of a plan, for U units and D devices.

    The units are the stages of the first replica, then the stages of the second one, and so on. The
    units of an SPMD program are the devices of its only stage.
    """

    timeline: Timeline
    """Events of the units in one iteration."""
    owners: tuple[Owner, ...]
    """[U] (replica, stage) of each unit."""
    devices: tuple[tuple[int, ...], ...]
    """[U] devices of each unit."""
    peak_bytes: tuple[float, ...]
    """[D] bytes that the allocator counts at the peak of each device; 0 on unused devices."""
    limit_bytes: tuple[float, ...]
    """[D] bytes that training can use on each device."""
    held: tuple[PeakBytes[float], ...] = ()
    """[D] bytes at the peak of each device, by component; empty for SPMD programs."""

    @property
    def seconds(self) -> float:
        """Seconds per iteration."""
        return self.timeline.seconds

    @property
    def by_device(self) -> bool:
        """Whether the units are the devices of an SPMD program, and not stages."""
        return len(set(self.owners)) < len(self.owners)

    @property
    def fits(self) -> bool:
        """Whether the peak of every device is within its limit."""
        return all(
            held <= limit for held, limit in zip(self.peak_bytes, self.limit_bytes, strict=True)
        )


class ChainReplayer:
    """Replays plans of one instance, one after the other.

    It caches the costs of each mode of recomputation, and the pipelines of the last replicas,
    because plans that a search compares share many of them.
    """

    def __init__(
        self, costs: Callable[[Recomputation], Costs], settings: Settings | None = None
    ) -> None:
        """costs: gives the costs under a mode of recomputation. settings: the defaults unless
        given."""
        self.costs = cache(costs)
        self.settings = settings or Settings()
        self._pipeline = lru_cache(CACHED_PIPELINES)(new_pipeline)

    @classmethod
    def of(cls, data: ReplayData, settings: Settings | None = None) -> "ChainReplayer":
        """The replayer of an instance."""
        return cls(lambda mode: Costs(data, mode), settings)

    def seconds(self, plan: Plan, limit: float = math.inf) -> float:
        """Seconds per iteration of a plan.

        Where a lower bound of these seconds already exceeds `limit`, the bound is returned and
        nothing is simulated. Raises UnsupportedError where `parts` does.
        """
        parts = self.parts(plan)
        bound = lower_bound_seconds(*parts)
        if bound > limit:
            return bound
        return simulate(tasks_of(*parts)).seconds

    def excess(self, plan: Plan) -> float:
        """The largest share of its limit by which a device's peak exceeds that limit; 0 where the
        plan fits."""
        zero = self.zero(plan)
        pipelines, _ = self.parts(plan)
        kept = np.concatenate([pipeline.peak_bytes for pipeline in pipelines])
        excess = 0.0
        for held, limit in zip(memory(zero, kept), limits(plan, zero.costs), strict=True):
            # a limit may be 0: then one byte, so that the quotient exists
            excess = max(excess, held.allocated / max(limit, 1.0) - 1)
        return excess

    def robust_seconds(self, plan: Plan, noise: Noise | None = None) -> float:
        """The median of the seconds per iteration over replays with random durations (`Noise`)."""
        noise = noise or Noise()
        tasks = self.tasks(plan)
        draw = np.random.default_rng(noise.seed).uniform
        low, high = 1 - noise.share, 1 + noise.share
        drawn = []
        for _ in range(noise.draws):
            seconds = tasks.seconds * draw(low, high, len(tasks))
            delay = tasks.delay * draw(low, high, len(tasks))
            drawn.append(simulate(replace(tasks, seconds=seconds, delay=delay)).seconds)
        return float(np.median(drawn))

    def tasks(self, plan: Plan) -> Tasks:
        """The tasks of one iteration of a plan of stages."""
        return tasks_of(*self.parts(plan))

    def parts(self, plan: Plan) -> tuple[list[Pipeline], list[Collective]]:
        """(pipelines of the replicas, collectives between them) that the simulator runs.

        Raises UnsupportedError for rendezvous sends under other schedules than GPipe and 1F1B:
        stages may then send to each other at the same time, and would wait for ever.
        """
        require(
            self.settings.sends != "rendezvous" or plan.schedule in ("gpipe", "1f1b"),
            f"stages cannot all wait for both ends of their messages under {plan.schedule}",
            where=plan.name,
            got="sends rendezvous",
            expected="another way of sending",
            kind=UnsupportedError,
        )
        settings, degrees = self.settings, plan.degrees
        # Receives posted ahead replace the default of `sends` alone: any other value was chosen.
        if degrees and "messages" in degrees.overlap and settings.sends == "waiting":
            settings = replace(settings, sends="asynchronous")
        zero = self.zero(plan)
        pipelines = [
            self.pipeline(plan, replica, zero, settings, plan.explicit_orders(i))
            for i, replica in enumerate(plan.replicas)
        ]
        if zero.rings:
            return pipelines, zero.collectives()
        return pipelines, gradient_collectives(zero, settings)

    def pipeline(
        self,
        plan: Plan,
        replica: Replica,
        zero: ZeroCosts,
        settings: Settings,
        explicit: Orders | None,
    ) -> Pipeline:
        """The replica's passes, transfers and updates for the simulator; collectives of ZeRO that
        overlap the passes are part of them. explicit: the passes of an explicit schedule."""
        pipeline = self._pipeline(
            zero.costs,
            (plan.pass_schedule, explicit, replica.folded),
            tuple(replica.stages),
            tuple((batch.count, batch.samples) for batch in replica.micro_batches),
            tuple(zero.update_seconds(stage) for stage in replica.stages),
            settings,
        )
        if not zero.overlaps:
            return pipeline
        sizes = [batch.samples for batch in replica.micro_batches]
        # [S, B, 2] seconds of (forward, backward); the simulator wants [S, C, B] with C = 1 chunk
        passes = np.array([[zero.passes(stage, n) for n in sizes] for stage in replica.stages])
        return replace(pipeline, forward=passes[:, None, :, 0], backward=passes[:, None, :, 1])

    def zero(self, plan: Plan) -> ZeroCosts:
        """The plan's costs, with the collectives of its sharded model states."""
        return ZeroCosts.of(plan, self.costs(plan.recomputation), self.settings.prefetch)

    def replay(self, plan: Plan) -> Replay:
        """One iteration of a plan, with its timeline and memory."""
        zero = self.zero(plan)
        timeline = simulate_replicas(*self.parts(plan))
        owners = [
            (i, j) for i, replica in enumerate(plan.replicas) for j in range(len(replica.stages))
        ]
        held = memory(zero, timeline.peak_bytes)
        return Replay(
            timeline=timeline,
            owners=tuple(owners),
            devices=tuple(tuple(plan.replicas[i].stages[j].all_devices) for i, j in owners),
            peak_bytes=tuple(device.allocated for device in held),
            limit_bytes=limits(plan, zero.costs),
            held=held,
        )


def new_pipeline(
    costs: Costs,
    schedule: tuple[PassSchedule, Orders | None, bool],
    stages: tuple[Stage, ...],
    batches: tuple[tuple[int, int], ...],
    optimizer: tuple[float, ...],
    settings: Settings,
) -> Pipeline:
    """The pipeline of a replica for the simulator, with S stages of C model chunks.

    schedule: its name, the passes of an explicit one, and whether the model lies on the stages as a
    V. batches: (count, samples) of each kind of micro-batch, in their order. optimizer [S]: seconds
    of each stage's update.
    """
    name, explicit, folded = schedule
    S, C = len(stages), len(stages[0].layers)
    counts = [count for count, _ in batches]
    sizes = tuple(samples for _, samples in batches)
    of_stages = [costs.stage_seconds(stage, sizes) for stage in stages]
    passes = np.array([seconds.passes for seconds in of_stages])  # [S, C, B, 2]
    hops = [
        costs.boundary_transfers(stages[sender], stages[receiver], chunk, sizes)
        for (sender, chunk), (receiver, _) in pairwise(virtual_stages(S, C, folded=folded))
    ]
    reduces: tuple[Sequence[Sequence[Sequence[Traffic]]], ...] = ()
    inputs_reduces: list[list[list[Traffic]]] = []
    if any(len(stage.tensor_shares) > 1 for stage in stages):
        reduces = tuple(zip(*(seconds.reduces for seconds in of_stages), strict=True))
        inputs_reduces = [seconds.inputs_reduces for seconds in of_stages]
    return Pipeline(
        stages=S,
        micro_batches=sum(counts),
        chunks=C,
        schedule=name,
        explicit=explicit,
        folded=folded,
        sends=settings.sends,
        exchange_seconds=settings.exchange_seconds,
        forward=passes[..., 0],
        backward=passes[..., 1],
        kinds=np.repeat(np.arange(len(sizes)), counts),
        optimizer=optimizer,
        weights=[seconds.weights for seconds in of_stages],
        added=[seconds.added for seconds in of_stages],
        saved_bytes=[seconds.saved_bytes for seconds in of_stages],
        held_bytes=[seconds.held_bytes for seconds in of_stages],
        hops=tuple(zip(*hops, strict=True)),
        reduces=reduces,
        inputs_reduces=inputs_reduces,
    )


def gradient_collectives(zero: ZeroCosts, settings: Settings) -> list[Collective]:
    """The collectives over weights that several stages hold (`ZeroCosts.shared_collectives`): the
    reduction of gradients, and with ZeRO the all-gather of updated weights."""
    collectives = []
    for shared in zero.shared_collectives():
        gradients, weights = shared.gradients, shared.weights
        if gradients.seconds == 0:  # no bytes, whose weights take no time either
            continue
        reduction = Collective(
            members=shared.owners,
            seconds=gradients.seconds,
            ports=gradients.ports,
            buckets=max(settings.buckets, shared.buckets),
        )
        collectives.append(reduction)
        if weights is not None:
            gathering = Collective(
                members=shared.owners,
                seconds=weights.seconds,
                ports=weights.ports,
                when="parameters",
            )
            collectives.append(gathering)
    return collectives
