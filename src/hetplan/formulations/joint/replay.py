"""A plan replayed on the simulator: seconds per iteration and memory per device. It is the
objective of the sixth problem, and what plans of all families compare by.

Beyond the families' closed forms it counts: every micro-batch's transfers in their order, network
cards that ranks of a node share, gradients joined where they belong (layer by layer when replicas
are cut differently, tied embeddings across stages), and the optimizer's step.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from hetplan.errors import UnsupportedError
from hetplan.formulations.joint.costs import Costs
from hetplan.formulations.joint.data import JointData
from hetplan.formulations.joint.memory import Held, Owner, memory, owners_of, saved_bytes
from hetplan.formulations.joint.plan import Plan, Recomputation, Replica
from hetplan.formulations.joint.sharding import ZeroCosts
from hetplan.profiling.simulator.pipeline import (
    Collective,
    Replica as Pipeline,
    Sends,
    simulate_replicas,
    tasks_of,
)
from hetplan.profiling.simulator.tasks import Tasks, Timeline, Traffic, simulate


@dataclass(frozen=True)
class Settings:
    """How a plan is run, where the plan does not say it. The defaults are what our runtime does.

    buckets: parts of the last backward pass that gradients leave in (1: no overlap). sends: see
    `Replica`; our runtime sends by isend and receives when it needs to, and both gloo and NCCL move
    a message when its receiver has asked for it. exchange_seconds: of the host, for each message at
    each of its ends, beside the link's latency. prefetch: layers that ZeRO 2 and 3 gather ahead
    while others compute, 0: nothing overlaps (see `sharding`; FSDP's default is 1).
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
    held: tuple[Held, ...] = ()

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

    @classmethod
    def of(cls, data: JointData, settings: Settings | None = None) -> "ChainReplayer":
        """Of an instance."""
        return cls(lambda mode: Costs(data, mode), settings)

    def seconds(self, plan: Plan) -> float:
        """Seconds per iteration of a plan. Raises what `replay` does."""
        return simulate(self.tasks(plan)).seconds

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
        self._check_sends(plan)
        return tasks_of(*simulated(plan, self.zero(plan), self.settings))

    def _check_sends(self, plan: Plan) -> None:
        """Stages that visit each other in a ring would wait for each other for ever."""
        if self.settings.sends == "rendezvous" and plan.schedule == "interleaved-1f1b":
            raise UnsupportedError(
                "stages of several chunks cannot all wait for both ends of their messages",
                where=plan.name, got="sends rendezvous", expected="another way of sending",
            )  # fmt: skip

    def zero(self, plan: Plan) -> ZeroCosts:
        """The plan's costs, with those of its sharded states."""
        return ZeroCosts.of(plan, self.costs(plan.recomputation), self.settings.prefetch)

    def replay(self, plan: Plan) -> Replay:
        """One iteration of a plan, with its timeline and memory."""
        self._check_sends(plan)
        zero = self.zero(plan)
        timeline = simulate_replicas(*simulated(plan, zero, self.settings))
        owners = [
            (i, j) for i, replica in enumerate(plan.replicas) for j in range(len(replica.stages))
        ]
        held = memory(plan, zero.costs, zero.divided, owners, timeline)
        limits = {name: kind.memory_bytes for name, kind in zero.costs.data.types.items()}
        return Replay(
            timeline,
            tuple(owners),
            tuple(tuple(plan.replicas[i].stages[j].all_devices) for i, j in owners),
            tuple(device.allocated for device in held),
            tuple(limits[device.type] for device in plan.devices),
            held,
        )


def simulated(
    plan: Plan, zero: ZeroCosts, settings: Settings
) -> tuple[list[Pipeline], list[Collective]]:
    """What the simulator takes: every replica, and what they do together."""
    pipelines = [pipeline(plan, replica, zero, settings) for replica in plan.replicas]
    joined = zero.collectives() if zero.rings else gradient_collectives(zero, settings)
    return pipelines, joined


def pipeline(plan: Plan, replica: Replica, zero: ZeroCosts, settings: Settings) -> Pipeline:
    """The replica's passes, transfers and updates as the simulator takes them."""
    costs = zero.costs
    S, C = len(replica.stages), len(replica.stages[0].layers)
    assert plan.schedule != "spmd", "programs are replayed apart"
    sizes = [b.samples for b in replica.micro_batches]
    kinds = np.repeat(np.arange(len(sizes)), [b.count for b in replica.micro_batches])
    passes = np.array(
        [
            [
                [zero.passes(stage, n) or costs.passes(stage, layers, n) for n in sizes]
                for layers in stage.layers
            ]
            for stage in replica.stages
        ]
    )
    reduces: list[Any] = []
    if any(len(stage.tensor_shares) > 1 for stage in replica.stages):
        both = [
            [[costs.reduces(stage, layers, n) for n in sizes] for layers in stage.layers]
            for stage in replica.stages
        ]
        reduces = [
            [[[pair[side] for pair in row] for row in rows] for rows in both] for side in (0, 1)
        ]
    return Pipeline(
        stages=S,
        micro_batches=len(kinds),
        chunks=C,
        schedule=plan.schedule,
        sends=settings.sends,
        exchange_seconds=settings.exchange_seconds,
        forward=passes[..., 0],
        backward=passes[..., 1],
        kinds=kinds,
        optimizer=[zero.update_seconds(stage) for stage in replica.stages],
        saved_bytes=[
            [saved_bytes(stage, c, np.array(sizes), costs) for c in range(C)]
            for stage in replica.stages
        ],
        hops=hops(replica, sizes, costs),
        reduces=reduces,
    )


def hops(replica: Replica, sizes: Sequence[int], costs: Costs) -> list[list[list[Traffic]]]:
    """Transfers between the replica's virtual stages: [2][hop][size], there and back."""
    S, C = len(replica.stages), len(replica.stages[0].layers)
    there, back = [], []
    for v in range(S * C - 1):
        here, after = replica.stages[v % S], replica.stages[(v + 1) % S]
        layer = here.layers[v // S][1] - 1
        there.append([costs.transfer(here, after, layer, n) for n in sizes])
        back.append([costs.transfer(after, here, layer, n) for n in sizes])
    return [there, back]


def gradient_collectives(zero: ZeroCosts, settings: Settings) -> list[Collective]:
    """All-reduces of the gradients of layers that several devices hold: ZeRO 0, and ZeRO 1 to 3 on
    pipelines.

    Layers with the same owners go together. ZeRO reduces and scatters first, and gathers after the
    update.
    """
    plan, costs = zero.plan, zero.costs
    by_owners: dict[tuple[Owner, ...], float] = {}
    for owners, size in shared_parts(zero):
        by_owners[owners] = by_owners.get(owners, 0.0) + size
    joined = []
    for owners, size in by_owners.items():
        traffic = ring_of(plan, owners, costs.gradient_bytes(size), costs)
        if traffic.seconds == 0:
            continue
        reduced = Collective(
            members=owners,
            seconds=traffic.seconds / (2 if plan.zero else 1),
            ports=traffic.ports,
            buckets=settings.buckets,
        )
        joined.append(reduced)
        if plan.zero:
            weights = ring_of(plan, owners, size, costs)
            half, ports = weights.seconds / 2, weights.ports
            joined.append(Collective(members=owners, seconds=half, ports=ports, when="parameters"))
    return joined


def shared_parts(zero: ZeroCosts) -> Iterator[tuple[tuple[Owner, ...], float]]:
    """(who holds them, bytes) of all weights; tied ones in two stages have the holders of both."""
    plan, sums = zero.plan, zero.costs.param_sums
    cuts = {first for r in plan.replicas for stage in r.stages for first, _ in stage.layers}
    for first, last in pairwise([*sorted(cuts), len(sums) - 1]):
        yield tuple(owners_of(plan, first)), sums[last] - sums[first]
    for layer, copied in zero.copies.items():
        if copied:
            holders = tuple(owners_of(plan, 0))
            yield holders, -copied  # the first layer's own, joined with the copies instead
            yield tuple(sorted({*holders, *owners_of(plan, layer)})), copied


def ring_of(plan: Plan, owners: Sequence[Owner], size: float, costs: Costs) -> Traffic:
    """Rings over the owners' row groups, one per tensor rank, each with its part of `size`
    bytes."""
    groups = [group for i, j in owners for group in plan.replicas[i].stages[j].devices]
    if len(groups) == 1:
        return Traffic()
    ranks = max(map(len, groups))
    rings = [[group[r * len(group) // ranks] for group in groups] for r in range(ranks)]
    return costs.ring(rings, size / ranks)
