"""Lower bounds on the seconds of all plans with a given replica, for the exact method.

A bound is the longest path through the replica's passes without waiting for ports (passes.py), and
behind it the gradient collectives and the updates of a stage. docs/method-joint.md, Section 5, says
how the exact method uses the bounds.

Letters, as in passes.py: a replica i has S stages of C chunks each, so V = S C virtual stages, and
M micro-batches; the model has L layers. Of the g samples of a replica a micro-batch has b. N counts
the ways to cut the layers into the virtual stages.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetplan.formulations.joint.bound.path import Ints
from hetplan.formulations.joint.bound.tables import Relaxation
from hetplan.formulations.joint.data import JointData
from hetplan.formulations.joint.design import Group
from hetplan.formulations.joint.layouts import Layout
from hetplan.formulations.joint.passes import all_cuts, in_flight, longest, sequence
from hetplan.formulations.joint.space import Space
from hetplan.plans.passes import WholeSchedule
from hetplan.plans.plan import Recomputation
from hetplan.replays.arrays import Floats
from hetplan.replays.data import DeviceType
from hetplan.replays.updates import UPDATE_BYTES
from hetplan.replays.zero import tensor_rings
from hetplan.solvers.run import Run

# Bytes of weights whose collective is timed to get seconds per byte. They are many, because a ring
# reaches more of a link's bandwidth with more bytes, and a lower bound needs the fastest ring.
PROBE_BYTES = 1e9
# Seconds that count towards a budget: of the times of a run of layers, of a call of `paths`, and of
# one way to cut the layers in it.
RUN_SECONDS = 2e-5
PATHS_SECONDS = 1.5e-3
CUT_SECONDS = 3e-6


class PartialPlan(NamedTuple):
    """A node of the branch and bound: all plans of a layout, schedule, number of chunks and mode.

    The batches are chosen after these, and the cuts after the batches. A node stands for all plans
    with everything that is chosen in it.
    """

    layout: Layout
    schedule: WholeSchedule
    chunks: int  # number of chunks of each stage
    mode: Recomputation
    # (samples, micro-batch) of every replica; empty: not chosen
    batches: tuple[tuple[int, int], ...] = ()
    # [replicas][V + 1] the first layer of each virtual stage, then L; empty: not chosen
    cuts: tuple[tuple[int, ...], ...] = ()

    @property
    def deepest(self) -> int:
        """The largest number of stages of a replica."""
        return max(map(len, self.layout))


class ReplicaBounds:
    """Computes bounds of the replicas of one instance, with a cache. run: counts the work."""

    def __init__(self, data: JointData, space: Space, relaxation: Relaxation, run: Run) -> None:
        self.data, self.space, self.relaxation, self.run = data, space, relaxation, run
        self.cached_seconds: dict[Any, Floats] = {}  # results of `pass_seconds`
        self.cached_speeds: dict[Any, float] = {}  # results of `replica_speed`

    def pass_seconds(self, row_groups: Group, mode: Recomputation, samples: int) -> Floats:
        """[2, L + 1, L + 1] seconds of a stage's forward and backward pass over layers [a, b).

        row_groups: the stage's devices [row groups][tensor ranks]. samples: samples of a
        micro-batch.
        """
        costs = self.space.replayer.costs(mode)
        L = len(self.data.layers)
        key = (self.places(row_groups), mode, samples)
        if key not in self.cached_seconds:
            self.run.count(RUN_SECONDS * math.comb(L + 1, 2))
            stage = self.space.stage(row_groups, (0, 1))
            seconds = np.zeros((2, L + 1, L + 1))
            for a, b in itertools.combinations(range(L + 1), 2):
                computed = costs.passes(stage, (a, b), samples)
                reduced = costs.reduces(stage, (a, b), samples)
                for direction in (0, 1):
                    together = computed[direction] + reduced[direction].seconds
                    seconds[direction, a, b] = together
            self.cached_seconds[key] = seconds
        return self.cached_seconds[key]

    def places(self, row_groups: Group) -> tuple[object, ...]:
        """What the seconds of a stage's passes depend on: the device type and the node of each row
        group, and the number of tensor ranks."""
        types, nodes = self.space.device_types, self.space.node
        return (len(row_groups[0]), *((types[row[0]], nodes[row[0]]) for row in row_groups))

    def hop(self, here: Group, there: Group, samples: int) -> tuple[float, float]:
        """(seconds per byte of one sample's activation, seconds of latency) of a message of
        `samples` samples from stage `here` to stage `there`."""
        # The layer with the largest activation: a larger message reaches no less of a link's
        # bandwidth, so this one takes the fewest seconds per byte.
        largest = int(np.argmax(self.relaxation.sent[0][1:]))
        size = self.data.layers[largest].activation_bytes
        sender, receiver = self.space.stage(here, (0, 1)), self.space.stage(there, (0, 1))
        message = self.space.replayer.costs("none").transfer(sender, receiver, largest, samples)
        seconds_per_byte = message.seconds / size if size else 0.0
        return seconds_per_byte, message.latency

    def hops(self, stages: Sequence[Group], chunks: int, sizes: Sequence[int]) -> Floats:
        """[V - 1, backward, size, 2] the `hop` of messages between virtual stages v and v + 1.

        sizes: samples of a micro-batch, and of the last one.
        """
        S = len(stages)
        V = S * chunks
        hops = np.zeros((max(V - 1, 1), 2, 2, 2))
        if S == 1:  # all virtual stages are on the same devices
            return hops
        for v in range(V - 1):
            here, there = stages[v % S], stages[(v + 1) % S]
            for k, size in enumerate(sizes):
                hops[v, 0, k] = self.hop(here, there, size)
                hops[v, 1, k] = self.hop(there, here, size)
        return hops

    def seconds_behind(self, plan: PartialPlan, i: int) -> Floats:
        """[S] seconds per byte of weights that gradient collectives and updates take at least
        behind the last passes of the stages of replica i."""
        others = [stages for k, stages in enumerate(plan.layout) if k != i]
        all_row_groups = sum(len(row_groups) for stages in plan.layout for row_groups in stages)
        rates = []
        for row_groups in plan.layout[i]:
            if len(row_groups) == 1 and not others:  # nothing to reduce
                rates.append(self.update_rate(row_groups))
            else:  # ZeRO may shard the updates over all row groups
                gradients = self.gradient_rate(row_groups, others)
                rates.append(gradients + self.update_rate(row_groups) / all_row_groups)
        return np.array(rates)

    def device_type(self, row_groups: Group) -> DeviceType:
        """The device type of a stage, which all its devices have."""
        any_device = row_groups[0][0]
        return self.data.types[self.space.device_types[any_device]]

    def update_rate(self, row_groups: Group) -> float:
        """Seconds per byte of weights that the optimizer takes on one row group, without its start
        time."""
        curve = self.device_type(row_groups).update
        # the optimizer reaches the largest share of the bandwidth at most
        moved = UPDATE_BYTES / self.data.element_bytes / len(row_groups[0])
        return moved / (curve.bytes_per_second * max(curve.share))

    def gradient_rate(self, row_groups: Group, others: Sequence[Sequence[Group]]) -> float:
        """Seconds per byte of weights for which the gradient collectives of a stage hold the
        busiest port at least. Collectives take turns at a port.

        The cuts of the other replicas decide which of their stages have the same layers. The least
        over all choices of such stages counts.
        others: the stages of each other replica.
        """
        loads = []  # port -> seconds per byte, for each choice of one stage of each other replica
        for partners in itertools.product(*others):
            reducing = [row for stage in (row_groups, *partners) for row in stage]
            loads.append(self.port_loads(reducing))
        # Any other port is idle in some choice, so that its least load is 0.
        common_ports = set(loads[0]).intersection(*loads[1:])
        least_loads = (min(load[port] for load in loads) for port in common_ports)
        # `grown` turns bytes of weights into bytes of gradients, or into those that ZeRO sends if
        # these are fewer
        return max(least_loads, default=0.0) * self.relaxation.grown

    def port_loads(self, groups: Sequence[tuple[int, ...]]) -> dict[int, float]:
        """Port -> seconds per byte of weights for which row groups hold it when they reduce
        gradients."""
        rings = tensor_rings(groups)
        ring = self.space.replayer.costs("none").ring(rings, PROBE_BYTES / len(rings))
        return {port: share * ring.seconds / PROBE_BYTES for port, share in ring.ports}

    def bounds_by_cut(self, plan: PartialPlan, i: int, g: int, b: int) -> tuple[Ints, Floats]:
        """(cuts [N, V + 1], bounds [N] in seconds) of replica i for all its cuts; the bound is +inf
        where memory is too small.

        g: samples of the replica. b: samples of a micro-batch.
        """
        stages = plan.layout[i]
        S, C = len(stages), plan.chunks
        M = -(-g // b)
        L = len(self.data.layers)
        sizes = (b, g - (M - 1) * b)  # samples of a micro-batch and of the last one
        of_stages = []  # [backward, size, a, b] of each stage, as `longest` takes them
        for row_groups in stages:
            of_sizes = [self.pass_seconds(row_groups, plan.mode, size) for size in sizes]
            of_stages.append(np.stack(of_sizes, axis=1))
        seconds = np.stack(of_stages)
        cuts = all_cuts(L, S * C)
        self.run.count(PATHS_SECONDS + CUT_SECONDS * len(cuts))
        passes = sequence(plan.schedule, S, C, M)
        hops = self.hops(stages, C, sizes)
        sent = self.relaxation.sent[0]
        ends = longest(passes, seconds, hops, sent, cuts, np.array([S, M]))
        params_before = np.array(self.space.replayer.costs("none").param_sums)[cuts]
        params_of_virtual_stages = np.diff(params_before, axis=1)  # [N, V] bytes
        weights = params_of_virtual_stages.reshape(len(cuts), C, S).sum(axis=1)  # [N, S] bytes
        update_starts = [self.device_type(row_groups).update.start_seconds for row_groups in stages]
        stage_ends = ends + weights * self.seconds_behind(plan, i) + update_starts
        bounds = stage_ends.max(axis=1)
        frozen_before = np.array(self.space.replayer.costs("none").frozen_sums)[cuts]
        frozen = np.diff(frozen_before, axis=1).reshape(len(cuts), C, S).sum(axis=1)
        bounds[self.lacks_memory(plan, i, g, b, cuts, weights, frozen)] = np.inf
        return cuts, np.asarray(bounds)

    def lacks_memory(
        self,
        plan: PartialPlan,
        i: int,
        g: int,
        b: int,
        cuts: Ints,
        weights: Floats,
        frozen: Floats,
    ) -> NDArray[np.bool_]:
        """[N] whether some stage needs more than its memory under every ZeRO level, for its states
        and for the activations that it keeps for backward passes.

        weights, frozen: [N, S] bytes of trained and of frozen weights.
        """
        data, stages, costs = self.data, plan.layout[i], self.space.replayer.costs(plan.mode)
        M = -(-g // b)
        states, frozen_states = self.least_states(plan)
        lacks = np.zeros(len(cuts), bool)
        for s, row_groups in enumerate(stages):
            width = len(row_groups[0])
            # samples of a micro-batch, and of the last one, on the row group with the most samples
            samples = -(-b // len(row_groups))
            last_samples = -(-(g - (M - 1) * b) // len(row_groups))
            kept_samples = in_flight(
                plan.schedule, len(stages), s, M, plan.chunks, samples, last_samples
            )
            saved_before = [costs.saved_bytes((0, l), width) for l in range(len(data.layers) + 1)]
            saved_of_virtual_stages = np.diff(np.array(saved_before)[cuts], axis=1)  # per sample
            saved = saved_of_virtual_stages[:, s :: len(stages)]  # [N, C]
            kept = (saved @ kept_samples.T).max(axis=1)
            is_last = s == len(stages) - 1
            if is_last:  # the replay may count the logits of one micro-batch with the loss
                kept = kept - b / len(row_groups) * data.logit_bytes / width
            room = self.device_type(row_groups).memory_bytes * (1 + 1e-9)  # sums of bytes round
            held = (weights[:, s] * states + frozen[:, s] * frozen_states) / width
            lacks |= held + np.maximum(kept, 0.0) > room
        return lacks

    def least_states(self, plan: PartialPlan) -> tuple[float, float]:
        """(bytes of states per byte of trained weights, bytes held per byte of frozen weights),
        each under the ZeRO level that needs the least memory for it."""
        # ZeRO shards states over at most all row groups of the plan
        share = 1 / sum(len(row_groups) for stages in plan.layout for row_groups in stages)
        framework, element = self.data.framework, self.data.element_bytes
        # a framework treats higher levels as its highest one for pipelines
        highest_level = 3 if plan.deepest == 1 else max(framework.pipeline_levels)
        least = math.inf
        for level in range(highest_level + 1):
            states = framework.held_bytes(1.0, 0.0, element, level, share)
            least = min(least, states.weights + states.gradients + states.optimizer)
        return least, share if highest_level == 3 else 1.0

    def computation_bound(self, plan: PartialPlan) -> float:
        """A lower bound in seconds by computation alone: every stage computes whole samples all the
        time, with the micro-batch size at which the replica is fastest."""
        # samples per second of all replicas
        speed = sum(self.replica_speed(stages, plan.mode) for stages in plan.layout)
        return float(self.data.global_batch / speed) if speed < np.inf else 0.0

    def replica_speed(self, stages: Sequence[Group], mode: Recomputation) -> float:
        """The most samples per second of a replica, over all micro-batch sizes: every stage
        computes whole samples all the time."""
        key = (*(self.places(row_groups) for row_groups in stages), mode)
        if key not in self.cached_speeds:
            best = 0.0
            for b in range(1, self.data.global_batch + 1):
                speed = 0.0
                for row_groups in stages:
                    # forward and backward pass through all layers, [0, L)
                    seconds = self.pass_seconds(row_groups, mode, b)[:, 0, -1].sum()
                    speed += b / seconds if seconds else np.inf
                best = max(best, speed)
            self.cached_speeds[key] = best
        return self.cached_speeds[key]

    def number_of_cuts(self, plan: PartialPlan) -> int:
        """The number of ways to cut the layers of the replica with the most virtual stages."""
        return math.comb(len(self.data.layers) - 1, plan.deepest * plan.chunks - 1)
