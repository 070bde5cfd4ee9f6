"""The collectives of ZeRO's sharded states, per step and per iteration, and how computation hides
them. A step is one micro-batch on every replica.

Replicas of one stage, with or without tensor ranks, take every step together. Their levels are the
ones of Rajbhandari et al. 2020 (ZeRO), Section 5. Level 1 reduce-scatters gradients and all-gathers
weights once per iteration. Level 2 reduce-scatters gradients in every step. Level 3 also
all-gathers each layer's weights before each of its passes.

Without prefetch a step's collectives follow its passes. For replicas of one device each their time
is that of Poplar's formula (`collectives.collective_seconds`). With prefetch (FSDP) one link works
beside the computation of a step (`overlap.prefetched_pass`), and hidden communication still takes
some time (`overlap.uncovered`). The forward pass ends when its last layer has computed.
Communication that is left when the backward pass has computed follows it as the step's collective.

Replicas of several stages do not take steps together: there ZeRO 2 and 3 reduce gradients and
gather weights once per iteration, as hetplan's runtime does, and take the time of ZeRO 1.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from hetplan.plans.passes import virtual_stages
from hetplan.plans.plan import Plan, Stage
from hetplan.replays.arrays import Floats
from hetplan.replays.collectives import collective_seconds
from hetplan.replays.costs import Costs
from hetplan.replays.overlap import prefetched_pass, uncovered
from hetplan.replays.simulator.pipeline import Collective
from hetplan.replays.simulator.tasks import Ports, Traffic

Owner = tuple[int, int]  # (replica, stage): the stage holds, or owns, some layers


class SharedCollectives(NamedTuple):
    """The collectives over weights that several stages hold."""

    owners: tuple[Owner, ...]  # the stages that hold the weights
    gradients: Traffic  # after the owners' last backward passes
    weights: Traffic | None  # all-gather after the owners' updates; None without ZeRO
    buckets: int = 1  # the least number of buckets in which the gradients leave


@dataclass(frozen=True)
class ZeroCosts:
    """ZeRO's collectives in a plan, and their costs."""

    plan: Plan
    costs: Costs
    prefetch: int  # layers whose weights are gathered ahead; 0: nothing overlaps
    # Devices of each ring of the steps' collectives: one ring per tensor rank, over the row groups
    # of all replicas. () for ZeRO 0, for pipelines and for ZeRO 1 with tensor ranks: their
    # collectives are those of `shared_collectives`.
    rings: tuple[tuple[int, ...], ...]
    # [D] each device's share of the states that its ring divides; None without rings
    divided: Floats | None

    @classmethod
    def of(cls, plan: Plan, costs: Costs, prefetch: int = 0) -> "ZeroCosts":
        """The costs of a plan's collectives.

        prefetch: layers whose weights are gathered ahead; 0: nothing overlaps.
        """
        # ZeRO 1 has collectives once per iteration only. For replicas of one device it is counted
        # here too, because Poplar's formula needs the shares.
        sharded_in_steps = plan.zero > 1 or (plan.zero == 1 and single_stage(plan))
        if not (plan.in_step and sharded_in_steps):
            return cls(plan, costs, prefetch, (), None)
        groups = [group for replica in plan.replicas for group in replica.stages[0].devices]
        rings = tuple(tuple(ring) for ring in tensor_rings(groups))
        weights = plan.zero_shares or [1.0] * len(plan.devices)
        divided = np.zeros(len(plan.devices))
        for ring in rings:
            total = sum(weights[device] for device in ring)
            divided[list(ring)] = [weights[device] / total for device in ring]
        return cls(plan, costs, prefetch, rings, divided)

    @cached_property
    def copies(self) -> dict[int, float]:
        """Layer -> bytes of its weights that are tied to the first layer's, for layers whose owners
        hold a copy of these weights because they do not own the first layer."""
        layers = self.costs.data.layers
        first_owners = self.owners(0)
        return {
            layer: layers[layer].tied_param_bytes
            for layer in self.costs.tied_layers
            if self.owners(layer) != first_owners
        }

    def copied_in(self, stage: Stage) -> tuple[tuple[int, float], ...]:
        """(layer, bytes) of each copy of tied weights that the stage holds (`copies`)."""
        return tuple(
            (layer, size)
            for layer, size in self.copies.items()
            if any(first <= layer < last for first, last in stage.layers)
        )

    @cached_property
    def firsts(self) -> list[list[int]]:
        """[replica] the first layer of each virtual stage (model chunk), ascending."""
        return [
            sorted(first for stage in replica.stages for first, _ in stage.layers)
            for replica in self.plan.replicas
        ]

    @cached_property
    def placed(self) -> list[list[tuple[int, int]]]:
        """[replica][virtual stage] (stage, chunk)."""
        return [
            virtual_stages(len(r.stages), len(r.stages[0].layers), folded=r.folded)
            for r in self.plan.replicas
        ]

    def owners(self, layer: int) -> tuple[Owner, ...]:
        """The stage of each replica that holds the layer."""
        owners = []
        for i, firsts in enumerate(self.firsts):
            stage, _ = self.placed[i][bisect_right(firsts, layer) - 1]
            owners.append((i, stage))
        return tuple(owners)

    @cached_property
    def _data_ranks(self) -> dict[int, int]:
        """First layer of a stage's first chunk -> number of row groups in all replicas that hold
        the layer."""
        replicas = self.plan.replicas
        first_layers = {stage.layers[0][0] for replica in replicas for stage in replica.stages}
        return {
            layer: sum(len(replicas[i].stages[stage].devices) for i, stage in self.owners(layer))
            for layer in first_layers
        }

    def shares(self, stage: Stage) -> tuple[float, ...]:
        """For each device of the stage, the share of its weights' model states that it holds. Where
        replicas are cut differently, the ranks of the stage's first layer stand for all layers."""
        if self.divided is not None:
            return tuple(self.divided[stage.all_devices].tolist())
        ranks = self._data_ranks[stage.layers[0][0]] if self.plan.zero else 1
        return (1 / ranks,) * len(stage.all_devices)

    @property
    def level(self) -> int:
        """The ZeRO level by which devices shard their states: the plan's level. On pipelines
        without further degrees it is at most the highest level that the framework offers there."""
        if self.divided is not None or self.costs.degrees is not None:
            return self.plan.zero
        return self.costs.data.acting_level(self.plan.zero, one_virtual_stage=False)

    def shared_parts(self) -> dict[tuple[Owner, ...], tuple[float, float]]:
        """Owners -> (bytes of the weights that they hold, without experts; bytes of experts).

        Tied weights in two stages of a replica are weights of both.
        """
        sums, experts, first = self.costs.param_sums, self.costs.expert_sums, self.owners(0)
        parts: dict[tuple[Owner, ...], tuple[float, float]] = {}

        def add(owners: tuple[Owner, ...], size: float, expert_size: float = 0.0) -> None:
            others_so_far, experts_so_far = parts.get(owners, (0.0, 0.0))
            parts[owners] = others_so_far + (size - expert_size), experts_so_far + expert_size

        # Between two cuts of any replica, all layers have the same owners.
        cuts = [*sorted({*chain(*self.firsts)}), len(sums) - 1]
        for begin, end in pairwise(cuts):
            add(self.owners(begin), sums[end] - sums[begin], experts[end] - experts[begin])
        for layer, copied in self.copies.items():
            add(first, -copied)  # the first layer's weights are joined with the copies instead
            add(tuple(sorted({*first, *self.owners(layer)})), copied)
        return parts

    def shared_collectives(self) -> Iterator[SharedCollectives]:
        """The collectives over all weights that several devices hold: rings over the owners' row
        groups, one per tensor rank, each with an equal part of the bytes.

        Without ZeRO gradients are all-reduced. ZeRO reduce-scatters them, and all-gathers weights
        after the update.
        """
        replicas = self.plan.replicas
        # Without further degrees no bytes count as experts' (`Costs.expert_sums` are 0).
        for owners, (size, _) in self.shared_parts().items():
            groups = [group for i, j in owners for group in replicas[i].stages[j].devices]
            rings = tensor_rings(groups)
            if len(groups) > 1:
                yield self.join(owners, rings, size / len(rings), divided=self.plan.zero > 0)

    def join(
        self,
        owners: tuple[Owner, ...],
        rings: Sequence[Sequence[int]],
        size: float,
        *,
        divided: bool,
    ) -> SharedCollectives:
        """The collectives over `size` bytes of weights on every rank of the rings.

        divided: whether each rank holds a shard of the states.
        """
        gradients = self.costs.ring(rings, self.costs.gradient_bytes(size))
        if not divided:
            return SharedCollectives(owners, gradients, None)
        weights = self.costs.ring(rings, size)
        # reduce-scatter and all-gather each take half of an all-reduce of the same bytes
        reduce_scatter = gradients._replace(seconds=gradients.seconds / 2)
        all_gather = weights._replace(seconds=weights.seconds / 2)
        return SharedCollectives(owners, reduce_scatter, all_gather)

    @cached_property
    def half_rings(self) -> dict[float, tuple[float, Ports]]:
        """Bytes -> (seconds, ports), as far as `half_ring` has computed them."""
        return {}

    def half_ring(self, size: float) -> tuple[float, Ports]:
        """(seconds, ports) of an all-gather, or of a reduce-scatter, of `size` bytes of a whole
        replica. Every round takes as long as the largest shard."""
        if size not in self.half_rings:
            assert self.divided is not None
            largest_share = max(float(self.divided[d]) for ring in self.rings for d in ring)
            ranks = len(self.rings[0])
            # the bytes of a ring when all its shards are as large as the largest
            padded = size / len(self.rings) * largest_share * ranks
            all_reduce = self.costs.ring(self.rings, padded)
            self.half_rings[size] = all_reduce.seconds / 2, all_reduce.ports
        return self.half_rings[size]

    def layers(self, *, weights: bool) -> list[float]:
        """[L] seconds of the all-gather of each layer's weights, frozen ones among them, or of the
        reduce-scatter of its gradients."""
        layers = self.costs.data.layers
        if weights:
            sizes = [layer.param_bytes + layer.frozen_bytes for layer in layers]
        else:
            sizes = [self.costs.gradient_bytes(layer.param_bytes) for layer in layers]
        # a layer without weights has no collective, and so not its latency
        return [self.half_ring(size)[0] if size else 0.0 for size in sizes]

    def step(self, stage: Stage, samples: int) -> tuple[float, float, float]:
        """(forward, backward, left) seconds of a micro-batch.

        forward, backward: a pass with the communication that its computation does not hide. left:
        communication that is left when the backward pass is computed.
        """
        layers = range(len(self.costs.data.layers))
        passes = [self.costs.passes(stage, (l, l + 1), samples) for l in layers]
        forwards = [forward for forward, _ in passes]
        backwards = [backward for _, backward in reversed(passes)]
        nothing = [0.0] * len(layers)
        gather = self.layers(weights=True) if self.plan.zero == 3 else nothing
        scatter = self.layers(weights=False)

        # nothing is left when the forward pass is computed: it scatters no gradients
        computed, _ = prefetched_pass(forwards, gather, nothing, self.prefetch)
        # hidden: the seconds one after the other, less those that they take beside each other
        hidden = sum(forwards) + sum(gather) - computed
        forward = sum(forwards) + float(uncovered(sum(gather), hidden))

        computed, left = prefetched_pass(backwards, gather[::-1], scatter[::-1], self.prefetch)
        exchanged = sum(gather) + sum(scatter)
        hidden = sum(backwards) + exchanged - computed - left
        backward = sum(backwards) + float(uncovered(exchanged, hidden)) - left
        return forward, backward, left

    def passes(self, stage: Stage, samples: int) -> tuple[float, float] | None:
        """(forward, backward) seconds of a micro-batch, with the collectives that overlap them;
        None where nothing overlaps."""
        return self.step(stage, samples)[:2] if self.overlaps else None

    @property
    def overlaps(self) -> bool:
        """Whether collectives of the steps overlap the passes."""
        return bool(self.rings) and self.plan.zero > 1 and self.prefetch > 0

    def seconds(self) -> tuple[float, float]:
        """(seconds of the collectives after a step's passes, seconds of the collectives once per
        iteration) of a plan with rings."""
        plan = self.plan
        if self.divided is not None and single_stage(plan) and not self.overlaps:
            return self._seconds_by_poplar(self.divided)
        scatter, gather = sum(self.layers(weights=False)), sum(self.layers(weights=True))
        if self.overlaps:
            step = max(
                self.step(replica.stages[0], batch.samples)[2]
                for replica in plan.replicas
                for batch in replica.micro_batches
            )
        elif plan.zero == 3:
            step = scatter + 2 * gather  # weights before the forward and the backward pass
        else:
            step = scatter
        iteration = 0.0
        if plan.zero == 2:
            # updated weights are gathered once, because passes find them whole
            iteration = self.half_ring(self.costs.param_sums[-1])[0]
        return step, iteration

    def _seconds_by_poplar(self, divided: Floats) -> tuple[float, float]:
        """`seconds` by Poplar's formula, for replicas of one device each."""
        costs, level = self.costs, self.plan.zero
        used, weights = sorted(self.plan.ranks), costs.param_sums[-1]
        links = [costs.link(a, b) for a, b in pairwise([*used, used[0]])]
        bandwidth = min(rate for rate, _ in links)
        latency = max(delay for _, delay in links)
        # level 3 gathers and scatters layer by layer, each with its own latencies
        calls = len(costs.data.layers) if level == 3 else 1
        gathered = weights
        if level == 3:  # shards of frozen weights are gathered for the passes, too
            gathered += costs.frozen_sums[-1]
        reduce_scatter, all_gather = (
            collective_seconds(size, divided[used], bandwidth, latency, messages=calls)
            for size in (costs.gradient_bytes(weights), gathered)
        )
        if level == 1:
            return 0.0, reduce_scatter + all_gather
        if level == 2:
            return reduce_scatter, all_gather
        return 2 * all_gather + reduce_scatter, 0.0

    def collectives(self) -> list[Collective]:
        """The collectives of every step, and the collectives before and after the update; none
        without rings, and on one device."""
        if not self.rings or self.plan.world_size == 1:
            return []
        members = [(i, 0) for i in range(len(self.plan.replicas))]
        per_step, per_iteration = self.seconds()
        ports = self.half_ring(self.costs.param_sums[-1])[1]
        if self.plan.zero == 1:
            # Reduce-scatter before and all-gather after the update. All devices take part in both,
            # so that only their sum counts and each may stand for half of it.
            half = Collective(members=members, seconds=per_iteration / 2, ports=ports)
            return [half, replace(half, when="parameters")]
        joined = [Collective(members=members, seconds=per_step, when="step", ports=ports)]
        if per_iteration:
            joined.append(replace(joined[0], seconds=per_iteration, when="parameters"))
        return joined

    def update_seconds(self, stage: Stage) -> float:
        """Seconds of the optimizer's step on the slowest device of a stage."""
        return self.costs.stage_update_seconds(stage, self.shares(stage), self.copied_in(stage))


def tensor_rings(groups: Sequence[Sequence[int]]) -> list[list[int]]:
    """Rings over row groups: one ring per tensor rank of the largest group, with one device of
    every group.

    A device of a smaller group is in several rings.
    """
    ranks = max(map(len, groups))
    return [[group[r * len(group) // ranks] for group in groups] for r in range(ranks)]


def single_stage(plan: Plan) -> bool:
    """Whether every replica is one stage on one device: plain data parallelism."""
    return all(
        len(replica.stages) == 1 and len(replica.stages[0].all_devices) == 1
        for replica in plan.replicas
    )
