"""A plan replayed on the simulator: seconds per iteration and memory per device. It is the
objective of the sixth problem, and what plans of all families compare by.

Beyond the families' closed forms it counts: every micro-batch's transfers in their order, network
cards that ranks of a node share, gradients joined where they belong (layer by layer when replicas
are cut differently, tied embeddings across stages), and the optimizer's step.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import numpy as np

from hetplan.errors import UnsupportedError, require
from hetplan.plans.plan import Plan, Recomputation, Replica, Stage
from hetplan.replays.costs import Costs
from hetplan.replays.data import ReplayData
from hetplan.replays.memory import Held
from hetplan.replays.peaks import limits, memory
from hetplan.replays.simulator.pipeline import (
    Collective,
    Replica as Pipeline,
    Schedule,
    Sends,
    least_seconds,
    simulate_replicas,
    tasks_of,
)
from hetplan.replays.simulator.tasks import Tasks, Timeline, simulate
from hetplan.replays.zero import Owner, ZeroCosts

SHAPES = 256  # replicas that are remembered


@dataclass(frozen=True)
class Settings:
    """How a plan is run, where the plan does not say it. The defaults are what our runtime does.

    buckets: parts of the last backward pass that gradients leave in (1: no overlap). sends: see
    `Replica`; our runtime sends by isend and receives when it needs to, and both gloo and NCCL move
    a message when its receiver has asked for it. exchange_seconds: of the host, for each message at
    each of its ends, beside the link's latency. prefetch: layers that ZeRO 2 and 3 gather ahead
    while others compute, 0: nothing overlaps (see `zero`; FSDP's default is 1).
    """

    buckets: int = 1
    sends: Sends = "waiting"
    exchange_seconds: float = 0.0
    prefetch: int = 0


@dataclass(frozen=True)
class Noise:
    """Of a robust replay: every duration is multiplied by a number of its own between 1 - share and
    1 + share (uniform), `draws` times. An assumption, not a measurement: enough that no plan owes
    its place to moments that only just meet."""

    share: float = 0.02
    draws: int = 9
    seed: int = 0


@dataclass(frozen=True)
class Replay:
    """timeline: of units, the stages of the first replica, then those of the second, … owners [U]:
    which. devices [U].
    Of an SPMD program the units are the devices of its only stage.

    peak_bytes [D]: what the allocator counts, 0 on unused devices. limit_bytes [D]: what they may
    hold. held [D]: the peak by component; empty for SPMD programs.
    """

    timeline: Timeline
    owners: tuple[Owner, ...]
    devices: tuple[tuple[int, ...], ...]
    peak_bytes: tuple[float, ...]
    limit_bytes: tuple[float, ...]
    held: tuple[Held[float], ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds per iteration."""
        return self.timeline.seconds

    @property
    def by_device(self) -> bool:
        """Whether the units are devices of one stage that run one program, not stages."""
        return len(set(self.owners)) < len(self.owners)

    @property
    def fits(self) -> bool:
        """Whether every device holds what it must."""
        return all(
            held <= limit for held, limit in zip(self.peak_bytes, self.limit_bytes, strict=True)
        )


class ChainReplayer:
    """Replays plans of one instance, one after the other; what they have in common is kept.

    costs: of each mode of recomputation.
    """

    def __init__(
        self, costs: Callable[[Recomputation], Costs], settings: Settings | None = None
    ) -> None:
        self.costs = cache(costs)
        self.settings = settings or Settings()
        self._pipeline = lru_cache(SHAPES)(new_pipeline)

    @classmethod
    def of(cls, data: ReplayData, settings: Settings | None = None) -> "ChainReplayer":
        """Of an instance."""
        return cls(lambda mode: Costs(data, mode), settings)

    def seconds(self, plan: Plan, limit: float = math.inf) -> float:
        """Seconds per iteration of a plan; where they are surely more than `limit`, some number
        between both. Raises what `replay` does."""
        parts = self.parts(plan)
        least = least_seconds(*parts)
        return least if least > limit else simulate(tasks_of(*parts)).seconds

    def excess(self, plan: Plan) -> float:
        """By what share of its memory the fullest device holds too much."""
        zero, kept = self.zero(plan), [p.peak_bytes for p in self.parts(plan)[0]]
        each = zip(memory(zero, np.concatenate(kept)), limits(plan, zero.costs), strict=True)
        return max(max(device.allocated / max(limit, 1.0) - 1, 0.0) for device, limit in each)

    def robust_seconds(self, plan: Plan, noise: Noise | None = None) -> float:
        """The median of replays whose durations are noisy."""
        noise, tasks = noise or Noise(), self.tasks(plan)
        draw = np.random.default_rng(noise.seed).uniform
        low, high = 1 - noise.share, 1 + noise.share
        noisy = [
            simulate(
                replace(
                    tasks,
                    seconds=tasks.seconds * draw(low, high, len(tasks)),
                    delay=tasks.delay * draw(low, high, len(tasks)),
                )
            ).seconds
            for _ in range(noise.draws)
        ]
        return float(np.median(noisy))

    def tasks(self, plan: Plan) -> Tasks:
        """One iteration of a plan without a program as tasks."""
        return tasks_of(*self.parts(plan))

    def parts(self, plan: Plan) -> tuple[list[Pipeline], list[Collective]]:
        """What the simulator takes. Refused: stages that visit each other in a ring and would wait
        for each other for ever."""
        require(
            self.settings.sends != "rendezvous" or plan.schedule != "interleaved-1f1b",
            "stages of several chunks cannot all wait for both ends of their messages",
            where=plan.name,
            got="sends rendezvous",
            expected="another way of sending",
            kind=UnsupportedError,
        )
        settings, degrees = self.settings, plan.degrees
        if degrees and "messages" in degrees.overlap and settings.sends == "waiting":
            settings = replace(settings, sends="asynchronous")
        zero = self.zero(plan)
        pipelines = [self.pipeline(plan, replica, zero, settings) for replica in plan.replicas]
        joined = zero.collectives() if zero.rings else gradient_collectives(zero, settings)
        return pipelines, joined

    def pipeline(
        self, plan: Plan, replica: Replica, zero: ZeroCosts, settings: Settings
    ) -> Pipeline:
        """The replica's passes, transfers and updates as the simulator takes them."""
        made = self._pipeline(
            zero.costs,
            plan.pass_schedule,
            tuple(replica.stages),
            tuple((batch.count, batch.samples) for batch in replica.micro_batches),
            tuple(zero.update_seconds(stage) for stage in replica.stages),
            settings,
        )
        if not zero.overlaps:
            return made
        sizes = [batch.samples for batch in replica.micro_batches]
        passes = np.array([[zero.passes(stage, n) for n in sizes] for stage in replica.stages])
        return replace(made, forward=passes[:, None, :, 0], backward=passes[:, None, :, 1])

    def zero(self, plan: Plan) -> ZeroCosts:
        """The plan's costs, with those of its sharded states."""
        return ZeroCosts.of(plan, self.costs(plan.recomputation), self.settings.prefetch)

    def replay(self, plan: Plan) -> Replay:
        """One iteration of a plan, with its timeline and memory."""
        zero, timeline = self.zero(plan), simulate_replicas(*self.parts(plan))
        owners = [
            (i, j) for i, replica in enumerate(plan.replicas) for j in range(len(replica.stages))
        ]
        held = memory(zero, timeline.peak_bytes)
        return Replay(
            timeline,
            tuple(owners),
            tuple(tuple(plan.replicas[i].stages[j].all_devices) for i, j in owners),
            tuple(device.allocated for device in held),
            limits(plan, zero.costs),
            held,
        )


def new_pipeline(
    costs: Costs,
    schedule: Schedule,
    stages: tuple[Stage, ...],
    batches: tuple[tuple[int, int], ...],
    optimizer: tuple[float, ...],
    settings: Settings,
) -> Pipeline:
    """A replica with micro-batches (count, samples)."""
    sizes, S, C = tuple(size for _, size in batches), len(stages), len(stages[0].layers)
    each = [costs.stage_seconds(stage, sizes) for stage in stages]
    times = np.array([stage.passes for stage in each])
    hops = [
        costs.boundary_transfers(stages[v % S], stages[(v + 1) % S], v // S, sizes)
        for v in range(S * C - 1)
    ]
    divided = any(len(stage.tensor_shares) > 1 for stage in stages)
    return Pipeline(
        stages=S,
        micro_batches=sum(count for count, _ in batches),
        chunks=C,
        schedule=schedule,
        sends=settings.sends,
        exchange_seconds=settings.exchange_seconds,
        forward=times[..., 0],
        backward=times[..., 1],
        kinds=np.repeat(np.arange(len(sizes)), [count for count, _ in batches]),
        optimizer=optimizer,
        saved_bytes=[stage.saved_bytes for stage in each],
        hops=tuple(zip(*hops, strict=True)),
        reduces=tuple(zip(*(stage.reduces for stage in each), strict=True)) if divided else (),
    )


def gradient_collectives(zero: ZeroCosts, settings: Settings) -> list[Collective]:
    """What is joined of layers that several devices hold: ZeRO 0, and ZeRO 1 to 3 on pipelines."""
    joined = []
    for owners, gradients, weights, buckets in zero.joined():
        if gradients.seconds == 0:
            continue
        parts, ports = max(settings.buckets, buckets), gradients.ports
        joined.append(
            Collective(members=owners, seconds=gradients.seconds, ports=ports, buckets=parts)
        )
        if weights is not None:
            after, ports = weights.seconds, weights.ports
            joined.append(Collective(members=owners, seconds=after, ports=ports, when="parameters"))
    return joined
