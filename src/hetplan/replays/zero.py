"""The collectives of ZeRO's sharded states, for replicas that take every step together (data
parallelism, tensor ranks too): of a step and of an iteration, and how they hide behind computation.

Levels as in Rajbhandari et al. 2020 (ZeRO), Section 5: 1 reduces and scatters gradients and gathers
weights once per iteration; 2 reduces and scatters in every step; 3 also gathers each layer's
weights before each of its passes. Without prefetch a step's collectives stand behind its passes,
priced by Poplar's formula for replicas of one device each. With prefetch (FSDP) a step has one link
beside its computation (`overlap.prefetched_pass`), and what hides there is not free
(`overlap.uncovered`). The forward pass ends with its last layer. What the link still does when the
backward pass has computed stands behind it as the step's collective. Between stages of pipelines
nothing is taken in steps: there ZeRO 2 and 3 join gradients and gather weights once per iteration,
as our runtime does, and take the time of ZeRO 1.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from hetplan.plans.plan import Plan, Stage
from hetplan.replays.arrays import Floats
from hetplan.replays.collectives import collective_seconds
from hetplan.replays.costs import Costs
from hetplan.replays.overlap import prefetched_pass, uncovered
from hetplan.replays.simulator.pipeline import Collective
from hetplan.replays.simulator.tasks import Ports, Traffic

Owner = tuple[int, int]  # replica, stage


class Joined(NamedTuple):
    """What `owners` join: gradients behind their last backward passes, in so many buckets at least;
    and with ZeRO the weights behind their updates."""

    owners: tuple[Owner, ...]
    gradients: Traffic
    weights: Traffic | None
    buckets: int = 1


@dataclass(frozen=True)
class ZeroCosts:
    """ZeRO's collectives in a plan. rings: over all row groups, one per tensor rank; () where
    `gradient_collectives` joins gradients (ZeRO 0, pipelines, ZeRO 1 with tensor ranks).
    divided [D]: each device's share of the states that it holds with its ring; None: undivided."""

    plan: Plan
    costs: Costs
    prefetch: int
    rings: tuple[tuple[int, ...], ...]
    divided: Floats | None

    @classmethod
    def of(cls, plan: Plan, costs: Costs, prefetch: int = 0) -> "ZeroCosts":
        """prefetch: layers whose weights are gathered ahead; 0: nothing overlaps."""
        if plan.zero == 0 or not (plan.in_step and (plan.zero > 1 or single_stage(plan))):
            return cls(plan, costs, prefetch, (), None)
        groups = [g for replica in plan.replicas for g in replica.stages[0].devices]
        ranks = max(map(len, groups))
        rings = tuple(tuple(g[r * len(g) // ranks] for g in groups) for r in range(ranks))
        parts = plan.zero_shares or [1.0] * len(plan.devices)
        divided = np.zeros(len(plan.devices))
        for ring in rings:
            whole = sum(parts[device] for device in ring)
            divided[list(ring)] = [parts[device] / whole for device in ring]
        return cls(plan, costs, prefetch, rings, divided)

    @cached_property
    def copies(self) -> dict[int, float]:
        """Bytes of weights tied to the first layer's that holders of another layer copy."""
        tied, layers, first = self.costs.tied_layers, self.costs.data.layers, self.owners(0)
        return {l: layers[l].tied_param_bytes for l in tied if self.owners(l) != first}

    def copied_in(self, stage: Stage) -> tuple[tuple[int, float], ...]:
        """(layer, bytes) of `copies` in the stage."""
        return tuple(
            (layer, size)
            for layer, size in self.copies.items()
            if any(first <= layer < last for first, last in stage.layers)
        )

    @cached_property
    def firsts(self) -> list[list[int]]:
        """The first layers of each replica's virtual stages."""
        return [
            sorted(first for stage in replica.stages for first, _ in stage.layers)
            for replica in self.plan.replicas
        ]

    def owners(self, layer: int) -> tuple[Owner, ...]:
        """The stage of every replica that holds the layer."""
        replicas = self.plan.replicas
        virtual = (bisect_right(firsts, layer) - 1 for firsts in self.firsts)
        return tuple((i, v % len(replicas[i].stages)) for i, v in enumerate(virtual))

    @cached_property
    def _data_ranks(self) -> dict[int, int]:
        """By the first layer of a stage, how many row groups of all replicas hold it."""
        heads = [
            firsts[: len(r.stages)]
            for firsts, r in zip(self.firsts, self.plan.replicas, strict=True)
        ]
        return {
            first: sum(
                len(replica.stages[bisect_right(head, first) - 1].devices)
                for head, replica in zip(heads, self.plan.replicas, strict=True)
            )
            for first in {*chain(*heads)}
        }

    def shares(self, stage: Stage) -> tuple[float, ...]:
        """Of the shards of its states that each device of the stage has."""
        if self.divided is not None:
            return tuple(self.divided[stage.all_devices].tolist())
        ranks = self._data_ranks[stage.layers[0][0]] if self.plan.zero else 1
        return (1 / ranks,) * len(stage.all_devices)

    @property
    def level(self) -> int:
        """The level by which states are held: on pipelines what the framework offers there, and
        full shards with further degrees."""
        as_said = self.divided is not None or self.costs.degrees is not None
        deepest = max(self.costs.data.framework.pipeline_levels)
        return self.plan.zero if as_said else min(self.plan.zero, deepest)

    def shared_parts(self) -> dict[tuple[Owner, ...], tuple[float, float]]:
        """Who holds them -> bytes of all weights, those of experts apart; tied ones in two stages
        have the holders of both."""
        sums, experts, first = self.costs.param_sums, self.costs.expert_sums, self.owners(0)
        parts: dict[tuple[Owner, ...], tuple[float, float]] = {}

        def add(owners: tuple[Owner, ...], size: float, apart: float = 0.0) -> None:
            before = parts.get(owners, (0.0, 0.0))
            parts[owners] = before[0] + (size - apart), before[1] + apart

        for begin, end in pairwise([*sorted({*chain(*self.firsts)}), len(sums) - 1]):
            add(self.owners(begin), sums[end] - sums[begin], experts[end] - experts[begin])
        for layer, copied in self.copies.items():
            add(first, -copied)  # the first layer's own, joined with the copies instead
            add(tuple(sorted({*first, *self.owners(layer)})), copied)
        return parts

    def joined(self) -> Iterator[Joined]:
        """All-reduces of what several devices hold: rings over the owners' row groups, one per
        tensor rank, each with its part of the bytes. ZeRO reduces and scatters first, and gathers
        after the update."""
        replicas = self.plan.replicas
        for owners, (size, _) in self.shared_parts().items():
            groups = [group for i, j in owners for group in replicas[i].stages[j].devices]
            ranks = max(map(len, groups))
            rings = [[group[r * len(group) // ranks] for group in groups] for r in range(ranks)]
            if len(groups) > 1:
                yield self.join(owners, rings, size / ranks, divided=self.plan.zero > 0)

    def join(
        self,
        owners: tuple[Owner, ...],
        rings: Sequence[Sequence[int]],
        size: float,
        *,
        divided: bool,
    ) -> Joined:
        """Of `size` bytes of weights on every rank of the rings. divided: whether each has a shard
        of the states."""
        gradients = self.costs.ring(rings, self.costs.gradient_bytes(size))
        if not divided:
            return Joined(owners, gradients, None)
        weights = self.costs.ring(rings, size)
        first, then = (x._replace(seconds=x.seconds / 2) for x in (gradients, weights))
        return Joined(owners, first, then)

    @cached_property
    def half_rings(self) -> dict[float, tuple[float, Ports]]:
        """Answers of `half_ring`."""
        return {}

    def half_ring(self, size: float) -> tuple[float, Ports]:
        """(seconds, ports) of gathering, or reducing and scattering, `size` bytes of every model
        replica: rounds of the largest shard."""
        if size not in self.half_rings:
            assert self.divided is not None
            largest = max(float(self.divided[d]) for ring in self.rings for d in ring)
            padded = size / len(self.rings) * largest * len(self.rings[0])
            both = self.costs.ring(self.rings, padded)
            self.half_rings[size] = both.seconds / 2, both.ports
        return self.half_rings[size]

    def layers(self, *, weights: bool) -> list[float]:
        """[L] seconds of gathering weights, or of reducing and scattering gradients."""
        sizes = [layer.param_bytes for layer in self.costs.data.layers]
        if not weights:
            sizes = [self.costs.gradient_bytes(size) for size in sizes]
        return [self.half_ring(size)[0] if size else 0.0 for size in sizes]

    def step(self, stage: Stage, samples: int) -> tuple[float, float, float]:
        """(forward, backward) seconds of a micro-batch with what they wait for, and the link's
        seconds after it."""
        layers = range(len(self.costs.data.layers))
        each = [self.costs.passes(stage, (l, l + 1), samples) for l in layers]
        ahead = [forward for forward, _ in each]
        back = [backward for _, backward in reversed(each)]
        none = [0.0] * len(layers)
        gather = self.layers(weights=True) if self.plan.zero == 3 else none
        scatter = self.layers(weights=False)
        computed, _ = prefetched_pass(ahead, gather, none, self.prefetch)
        hidden = sum(ahead) + sum(gather) - computed
        forward = sum(ahead) + float(uncovered(sum(gather), hidden))
        computed, left = prefetched_pass(back, gather[::-1], scatter[::-1], self.prefetch)
        exchanged = sum(gather) + sum(scatter)
        hidden = sum(back) + exchanged - computed - left
        backward = sum(back) + float(uncovered(exchanged, hidden)) - left
        return forward, backward, left

    def passes(self, stage: Stage, samples: int) -> tuple[float, float] | None:
        """(forward, backward) seconds of a micro-batch where collectives hide in them, else
        None."""
        return self.step(stage, samples)[:2] if self.overlaps else None

    @property
    def overlaps(self) -> bool:
        """Whether anything hides in passes."""
        return bool(self.rings) and self.plan.zero > 1 and self.prefetch > 0

    def seconds(self) -> tuple[float, float]:
        """Of the collectives behind a step's passes, and of those of an iteration."""
        plan, costs = self.plan, self.costs
        if self.divided is not None and single_stage(plan) and not self.overlaps:
            used, weights = sorted(plan.ranks), costs.param_sums[-1]
            links = [costs.link(a, b) for a, b in pairwise([*used, used[0]])]
            ring = min(speed for speed, _ in links), max(delay for _, delay in links)
            calls = len(costs.data.layers) if plan.zero == 3 else 1
            reduce, gather = (
                collective_seconds(size, self.divided[used], *ring, messages=calls)
                for size in (costs.gradient_bytes(weights), weights)
            )
            if plan.zero == 3:
                return 2 * gather + reduce, 0.0
            return (0.0, reduce + gather) if plan.zero == 1 else (reduce, gather)
        once = self.half_ring(self.costs.param_sums[-1])[0]
        scattered, gathered = (sum(self.layers(weights=weights)) for weights in (False, True))
        step = scattered + 2 * gathered if plan.zero == 3 else scattered
        if self.overlaps:
            step = max(
                self.step(replica.stages[0], batch.samples)[2]
                for replica in plan.replicas
                for batch in replica.micro_batches
            )
        return step, once if plan.zero == 2 else 0.0

    def collectives(self) -> list[Collective]:
        """Of every step, and once after the update."""
        if not self.rings or self.plan.world_size == 1:
            return []
        members = [(i, 0) for i in range(len(self.plan.replicas))]
        per_step, per_iteration = self.seconds()
        ports = self.half_ring(self.costs.param_sums[-1])[1]
        if self.plan.zero == 1:
            half = Collective(members=members, seconds=per_iteration / 2, ports=ports)
            return [half, replace(half, when="parameters")]
        joined = [Collective(members=members, seconds=per_step, when="step", ports=ports)]
        if per_iteration:
            joined.append(replace(joined[0], seconds=per_iteration, when="parameters"))
        return joined

    def update_seconds(self, stage: Stage) -> float:
        """The optimizer's step on the slowest device of a stage."""
        return self.costs.stage_update_seconds(stage, self.shares(stage), self.copied_in(stage))


def single_stage(plan: Plan) -> bool:
    """Whether every replica is one stage on one device: data parallelism."""
    return all(
        len(replica.stages) == 1 and len(replica.stages[0].all_devices) == 1
        for replica in plan.replicas
    )
