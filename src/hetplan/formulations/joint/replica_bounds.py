"""Bounds of one replica of a partial plan: seconds that no plan with that replica is below.

A bound is the longest path through the replica's passes without waiting for ports (`passes.py`),
and what the gradients and updates of a stage take behind it. docs/method-joint.md, Section 5, says
how the exact method uses them.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetplan.formulations.joint.bound import Ints, Relaxation
from hetplan.formulations.joint.data import JointData
from hetplan.formulations.joint.design import Group
from hetplan.formulations.joint.layouts import Layout
from hetplan.formulations.joint.passes import all_cuts, in_flight, longest, sequence
from hetplan.formulations.joint.space import Space
from hetplan.plans.plan import Recomputation
from hetplan.replays.arrays import Floats
from hetplan.replays.simulator.pipeline import Schedule
from hetplan.replays.updates import UPDATE_BYTES

PROBE_BYTES = 1e9  # of weights, with which seconds per byte are asked for


class PartialPlan(NamedTuple):
    """All plans of a layout; with these samples and micro-batches, and these cuts, once set."""

    layout: Layout
    schedule: Schedule
    chunks: int
    mode: Recomputation
    batches: tuple[tuple[int, int], ...] = ()  # samples and micro-batch of every replica
    cuts: tuple[tuple[int, ...], ...] = ()  # [replicas][V + 1]

    @property
    def deepest(self) -> int:
        """The most stages of a replica."""
        return max(map(len, self.layout))


class ReplicaBounds:
    """Bounds on one instance. What was computed once is remembered."""

    def __init__(self, data: JointData, space: Space, relaxation: Relaxation) -> None:
        self.data, self.space, self.relaxation = data, space, relaxation
        self.kept_seconds: dict[Any, Floats] = {}  # see `pass_seconds`

    def pass_seconds(self, rows: Group, mode: Recomputation, samples: int) -> Floats:
        """[2, L + 1, L + 1] of a stage's forward and backward pass over layers [a, b)."""
        costs, L = self.space.replayer.costs(mode), len(self.data.layers)
        kinds = tuple((costs.device_types[row[0]], costs.node[row[0]]) for row in rows)
        key = (kinds, len(rows[0]), mode, samples)
        if key not in self.kept_seconds:
            stage, seconds = self.space.stage(rows, (0, 1)), np.zeros((2, L + 1, L + 1))
            for a, b in itertools.combinations(range(L + 1), 2):
                computed = costs.passes(stage, (a, b), samples)
                reduced = costs.reduces(stage, (a, b), samples)
                for direction in (0, 1):
                    together = computed[direction] + reduced[direction].seconds
                    seconds[direction, a, b] = together
            self.kept_seconds[key] = seconds
        return self.kept_seconds[key]

    def hop(self, here: Group, there: Group, samples: int) -> tuple[float, float]:
        """Seconds per byte of one sample's activation between two stages, and in all."""
        largest = int(np.argmax(self.relaxation.sent[0][1:]))
        size = self.data.layers[largest].activation_bytes
        first, second = (self.space.stage(rows, (0, 1)) for rows in (here, there))
        message = self.space.replayer.costs("none").transfer(first, second, largest, samples)
        return (message.seconds / size if size else 0.0), message.latency

    def hops(self, stages: Sequence[Group], chunks: int, sizes: Sequence[int]) -> Floats:
        """[V - 1, 2, 2, 2] of messages between virtual stages, by direction and micro-batch size:
        seconds per byte and in all."""
        S, V = len(stages), len(stages) * chunks
        hops = np.zeros((max(V - 1, 1), 2, 2, 2))
        if S == 1:
            return hops
        for v in range(V - 1):
            here, there = stages[v % S], stages[(v + 1) % S]
            for k, size in enumerate(sizes):
                hops[v, 0, k] = self.hop(here, there, size)
                hops[v, 1, k] = self.hop(there, here, size)
        return hops

    def seconds_behind(self, plan: PartialPlan, i: int) -> Floats:
        """[S] seconds per byte of weights behind the last passes of a replica's stages."""
        others = [stages for k, stages in enumerate(plan.layout) if k != i]
        row_groups = sum(len(rows) for stages in plan.layout for rows in stages)
        return np.array([
            self.update_rate(rows)
            if len(rows) == 1 and not others
            else self.gradient_rate(rows, others) + self.update_rate(rows) / row_groups
            for rows in plan.layout[i]
        ])  # fmt: skip

    def update_rate(self, rows: Group) -> float:
        """Seconds per byte of weights that the optimizer takes on one row group."""
        curve = self.data.types[self.space.kind[rows[0][0]]].update
        moved = UPDATE_BYTES / self.data.element_bytes / len(rows[0])
        return moved / (curve.bytes_per_second * max(curve.share))

    def gradient_rate(self, rows: Group, others: Sequence[Sequence[Group]]) -> float:
        """Seconds per byte of weights that the gradients of a stage hold some port for.

        The stage's partners in other replicas depend on cuts: the least over all of them counts.
        Collectives take turns at a port.
        """
        loads = []
        for partners in itertools.product(*others):
            loads.append(self.port_loads([row for stage in (rows, *partners) for row in stage]))
        ports = set(loads[0]).intersection(*loads[1:])
        busiest = max((min(load[port] for load in loads) for port in ports), default=0.0)
        return busiest * self.relaxation.grown

    def port_loads(self, groups: Sequence[tuple[int, ...]]) -> dict[int, float]:
        """Seconds per byte of weights for which the row groups that reduce them hold each port."""
        costs, width = self.space.replayer.costs("none"), max(map(len, groups))
        rings = [[group[r * len(group) // width] for group in groups] for r in range(width)]
        ring = costs.ring(rings, PROBE_BYTES / width)
        return {port: share * ring.seconds / PROBE_BYTES for port, share in ring.ports}

    def paths(self, plan: PartialPlan, i: int, g: int, b: int) -> tuple[Ints, Floats]:
        """(cuts [N, V + 1], bounds [N]) of replica i with g samples, b at a time, for all cuts."""
        stages, C = plan.layout[i], plan.chunks
        S, M, L = len(stages), -(-g // b), len(self.data.layers)
        sizes = (b, g - (M - 1) * b)  # of a micro-batch and of the last one
        seconds = np.stack([
            np.stack([self.pass_seconds(rows, plan.mode, n) for n in sizes], axis=1)
            for rows in stages
        ])  # fmt: skip
        cuts, passes = all_cuts(L, S * C), sequence(plan.schedule, S, C, M)
        hops, sent = self.hops(stages, C, sizes), self.relaxation.sent[0]
        ends = longest(passes, seconds, hops, sent, cuts, np.array([S, M]))
        param_bytes = np.array(self.space.replayer.costs("none").param_sums)[cuts]
        held = np.diff(param_bytes, axis=1).reshape(len(cuts), C, S).sum(axis=1)  # [N, S]
        kinds = [self.data.types[self.space.kind[rows[0][0]]] for rows in stages]
        starts = [kind.update.start_seconds for kind in kinds]
        bounds = (ends + held * self.seconds_behind(plan, i) + starts).max(axis=1)
        bounds[self.lacks_memory(plan, i, g, b, cuts, held)] = np.inf
        return cuts, np.asarray(bounds)

    def lacks_memory(
        self, plan: PartialPlan, i: int, g: int, b: int, cuts: Ints, held: Floats
    ) -> NDArray[np.bool_]:
        """[N] whether some stage's states, and what it keeps from forward to backward passes, are
        more than its memory under every ZeRO level. held [N, S]: bytes of weights."""
        data, stages, costs = self.data, plan.layout[i], self.space.replayer.costs(plan.mode)
        M = -(-g // b)
        states = self.least_states(plan)
        lacks = np.zeros(len(cuts), bool)
        for s, rows in enumerate(stages):
            width = len(rows[0])
            fullest = [-(-size // len(rows)) for size in (b, g - (M - 1) * b)]
            flying = in_flight(plan.schedule, len(stages), s, M, plan.chunks, *fullest)
            sums = [costs.saved_bytes((0, l), width) for l in range(len(data.layers) + 1)]
            saved = np.diff(np.array(sums)[cuts], axis=1)[:, s :: len(stages)]  # [N, C]
            kept = (saved @ flying.T).max(axis=1)
            if s == len(stages) - 1:
                kept = kept - b / len(rows) * data.logit_bytes / width
            room = data.types[costs.device_types[rows[0][0]]].memory_bytes * (1 + 1e-9)
            lacks |= held[:, s] * states / width + np.maximum(kept, 0.0) > room
        return lacks

    def least_states(self, plan: PartialPlan) -> float:
        """Bytes of states per byte of weights under the ZeRO level that keeps the fewest."""
        share = 1 / sum(len(rows) for stages in plan.layout for rows in stages)
        framework, element = self.data.framework, self.data.element_bytes
        deepest = 3 if plan.deepest == 1 else max(framework.pipeline_levels)
        return min(
            sum(framework.held_bytes(1.0, 0.0, element, level, share)[:3])
            for level in range(deepest + 1)
        )

    def by_speed(self, plan: PartialPlan) -> float:
        """Seconds that no plan of the layout is below: all row groups compute at their best speeds
        all the time, by computing alone."""
        speed = 0.0
        for stages in plan.layout:
            best = 0.0
            for b in range(1, self.data.global_batch + 1):
                each = [self.pass_seconds(rows, plan.mode, b)[:, 0, -1].sum() for rows in stages]
                best = max(best, sum(b / seconds if seconds else np.inf for seconds in each))
            speed += best
        return float(self.data.global_batch / speed) if speed < np.inf else 0.0

    def number_of_cuts(self, plan: PartialPlan) -> int:
        """The number of ways to cut the layers of the replica with the most virtual stages."""
        return math.comb(len(self.data.layers) - 1, plan.deepest * plan.chunks - 1)
