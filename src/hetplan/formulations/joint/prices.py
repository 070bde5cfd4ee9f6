"""Seconds and bytes of the parts of small plans, as tables for the constraint model (cp.py).

They are derived from the data and from docs/simulator.md alone; the replay is not asked. A group
is a set of devices that may form a stage; a run is a group with the layers that it computes. Every
table is exact where its docstring does not call it a lower bound.
"""

import math
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from itertools import combinations, pairwise, product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetplan.formulations.joint.data import JointData
from hetplan.plans.plan import Recomputation
from hetplan.plans.shares import split
from hetplan.profiling.models.operators import CONTENTION
from hetplan.replays.data import Table

Floats = NDArray[np.float64]
UPDATE_BYTES = 28  # that Adam reads and writes for each parameter
# How the holders of weights join them: gradients once; gradients before and weights behind the
# update; the same by the collectives of replicas that take every step together.
WHOLE, HALVES, STEPS = range(3)


class Group(NamedTuple):
    """Devices that may form a stage: [row group][tensor rank]; none for a stage not in use."""

    rows: tuple[tuple[int, ...], ...]

    @property
    def devices(self) -> tuple[int, ...]:
        """All devices."""
        return tuple(device for row in self.rows for device in row)

    @property
    def tensor(self) -> int:
        """The number of tensor ranks."""
        return len(self.rows[0])


class Run(NamedTuple):
    """The layers [first, last) on a group. Run 0 has no layers."""

    group: int  # number in `Prices.groups`; 0: none
    first: int
    last: int


class Message(NamedTuple):
    """Bytes that go from one device to another."""

    source: int
    target: int
    size: float


class Prices:
    """The tables of an instance without rails and uplinks."""

    def __init__(self, data: JointData) -> None:
        self.data = data
        self.kind = [kind for kind, _ in data.devices]  # [D] types
        self.node = [node for _, node in data.devices]  # [D]
        self.layers, self.samples = len(data.layers), data.global_batch
        self.layer_seconds = lru_cache(None)(self._layer_seconds)

    @cached_property
    def groups(self) -> list[Group]:
        """No group, then all sets of devices of one type, in the order of devices, with tensor
        groups that each lie on one node."""
        groups, devices = [Group(())], range(len(self.kind))
        for size in range(1, len(self.kind) + 1):
            for chosen in combinations(devices, size):
                if len({self.kind[d] for d in chosen}) > 1:
                    continue
                for tensor in self.data.tensor_degrees:
                    if not self.tables_of(self.kind[chosen[0]], tensor)[0]:
                        continue
                    rows = tuple(chosen[i : i + tensor] for i in range(0, size, tensor))
                    whole = all(len(row) == tensor for row in rows)
                    if whole and all(len({self.node[d] for d in row}) == 1 for row in rows):
                        groups.append(Group(rows))
        return groups

    @cached_property
    def runs(self) -> list[Run]:
        """No run, then all runs of all groups."""
        runs = [Run(0, 0, 0)]
        for q in range(1, len(self.groups)):
            for first, last in combinations(range(self.layers + 1), 2):
                runs.append(Run(q, first, last))
        return runs

    # passes

    def tables_of(self, kind: str, tensor: int) -> tuple[list[Table], int]:
        """(tables of a type at a tensor degree by micro-batch, 1), or those of degree 1, of which
        every rank takes an even part, and the degree."""
        of_type = [table for table in self.data.tables if table.type == kind]
        of_type.sort(key=lambda table: table.micro_batch)
        tables = [table for table in of_type if table.tensor == tensor]
        if tables:
            return tables, 1
        return [table for table in of_type if table.tensor == 1], tensor

    def _layer_seconds(self, mode: Recomputation, kind: str, tensor: int, rows: int) -> Floats:
        """[4, L] seconds of each layer's forward and backward pass, and the host's of both."""
        tables, divisor = self.tables_of(kind, tensor)
        points: dict[int, Floats] = {}
        for table in tables:
            forward, backward = np.array(table.forward_seconds), np.array(table.backward_seconds)
            host, host_back = (
                np.array(table.forward_host_seconds),
                np.array(table.backward_host_seconds),
            )
            if mode != "none":
                repeated = np.array(table.repeated[mode])
                backward, host_back = backward + repeated * forward, host_back + repeated * host
            points[table.micro_batch] = np.stack([forward, backward, host, host_back]) / divisor
        if rows in points:
            return points[rows]
        known = list(points)
        if rows < known[0]:
            return points[known[0]]
        for low, high in pairwise(known):
            if low < rows < high:
                share = (rows - low) / (high - low)
                return points[low] + share * (points[high] - points[low])
        last, slope = points[known[-1]], points[known[-1]][:2] / known[-1]
        if len(known) > 1:
            rise = (last - points[known[-2]])[:2] / (known[-1] - known[-2])
            slope = np.where(rise > 0, rise, slope)
        beyond = (rows - known[-1]) * slope
        return np.asarray(last + np.concatenate([beyond, np.zeros_like(beyond)]))

    def rows_of(self, group: Group, samples: int) -> list[int]:
        """Samples of each row group, which share a micro-batch evenly."""
        return [last - first for first, last in split(samples, [1.0] * len(group.rows))]

    def pass_seconds(self, mode: Recomputation, run: Run, samples: int) -> tuple[float, float]:
        """Forward and backward seconds of the slowest row group, with what tensor ranks reduce."""
        group = self.groups[run.group]
        rows, kind = self.rows_of(group, samples), self.kind[group.devices[0]]
        slowest = [0.0] * 4
        for count in set(rows) - {0}:
            layers = self.layer_seconds(mode, kind, group.tensor, count)
            seconds = layers[:, run.first : run.last].sum(axis=1).tolist()
            slowest = max(slowest, seconds, key=lambda each: each[0] + each[1])
        forward, backward, host, host_back = slowest
        size = sum(layer.tensor_bytes for layer in self.data.layers[run.first : run.last])
        if group.tensor == 1 or size == 0:
            return forward, backward
        half = self.all_reduce(group.rows, [size * count for count in rows]) / 2
        again = {"full": 2.0, "operators": 1.5}.get(mode, 1.0)
        return self.reduced(forward, host, half), self.reduced(backward, host_back, again * half)

    def reduced(self, seconds: float, host: float, reduces: float) -> float:
        """Seconds of a pass with all-reduces, which keep the device busy and not the host."""
        device = math.sqrt(max(seconds**2 - host**2, 0.0))
        hidden = min(reduces, device) if self.data.hidden_reduces else 0.0
        return max(seconds, math.hypot(device + reduces - (1 - CONTENTION) * hidden, host))

    @cached_property
    def passes(self) -> Floats:
        """[2, modes, runs, G + 1] seconds of forward and backward passes by samples."""
        table = np.zeros((2, len(self.data.modes), len(self.runs), self.samples + 1))
        for i, mode in enumerate(self.data.modes):
            for r, run in enumerate(self.runs[1:], start=1):
                for b in range(1, self.samples + 1):
                    table[:, i, r, b] = self.pass_seconds(mode, run, b)
        return table

    # links

    def link(self, a: int, b: int) -> tuple[float, float]:
        """(bytes/s, latency) between two devices."""
        m, n = self.data.nodes[self.node[a]], self.data.nodes[self.node[b]]
        if self.node[a] == self.node[b]:
            return m.intra_bandwidth, m.intra_latency
        flows = [flow for flow in (m.flow_bandwidth, n.flow_bandwidth) if flow is not None]
        bandwidth = min(m.network_bandwidth, n.network_bandwidth, *flows)
        return bandwidth, max(m.network_latency, n.network_latency)

    def together(self, messages: Iterable[Message]) -> tuple[float, float]:
        """(seconds, latency) of messages at once: of the slowest one or of the fullest port."""
        loads: dict[tuple[str, str, int], float] = {}
        seconds = latency = 0.0
        for a, b, size in messages:
            if a == b:
                continue
            bandwidth, delay = self.link(a, b)
            seconds, latency = max(seconds, size / bandwidth), max(latency, delay)
            inside = self.node[a] == self.node[b]
            for side, device in (("out", a), ("in", b)):
                node = self.data.nodes[self.node[device]]
                port = ("device", side, device) if inside else ("node", side, self.node[device])
                rate = node.intra_bandwidth if inside else node.network_bandwidth
                loads[port] = loads.get(port, 0.0) + size / rate
        return max([seconds, *loads.values()]), latency

    def message_seconds(self, sender: Group, receiver: Group, layer: int, samples: int) -> float:
        """Seconds and latency of the activation after a layer, and of its gradient back."""
        messages = []
        sent = split(samples, [1.0] * len(sender.rows))
        received = split(samples, [1.0] * len(receiver.rows))
        for (here, (a, b)), (there, (c, d)) in product(
            zip(sender.rows, sent, strict=True), zip(receiver.rows, received, strict=True)
        ):
            rows, parts = min(b, d) - max(a, c), max(len(here), len(there))
            for i in range(parts if rows > 0 else 0):
                size = rows * self.data.layers[layer].activation_bytes / parts
                source, target = here[i * len(here) // parts], there[i * len(there) // parts]
                messages.append(Message(source, target, size))
        return sum(self.together(messages))

    @cached_property
    def messages(self) -> Floats:
        """[groups, groups, L + 1, G + 1] seconds of a message before a layer, by samples."""
        count = len(self.groups)
        table = np.zeros((count, count, self.layers + 1, self.samples + 1))
        for q, p in combinations(range(1, count), 2):
            if set(self.groups[q].devices) & set(self.groups[p].devices):
                continue
            for l, b in product(range(1, self.layers), range(1, self.samples + 1)):
                seconds = self.message_seconds(self.groups[q], self.groups[p], l - 1, b)
                table[q, p, l, b] = table[p, q, l, b] = seconds
        return table

    def all_reduce(self, rings: Sequence[Sequence[int]], sizes: Sequence[float]) -> float:
        """Seconds of ring all-reduces side by side, by the measured curve of a node's fabric where
        it has one."""
        ranks = max(map(len, rings))
        if ranks == 1:
            return 0.0
        nodes = [{self.node[d] for d in ring} for ring in rings]
        first = self.data.nodes[min(nodes[0])]
        alike = {
            (self.data.nodes[n].device, self.data.nodes[n].intra_bandwidth)
            for of_ring in nodes
            for n in of_ring
        }
        inside = len(alike) == 1 and max(map(len, nodes)) == 1
        if inside and ranks in first.all_reduce and max(sizes) > 0:
            return first.all_reduce[ranks].at(max(sizes))
        return self.ring(rings, sizes, latencies=True)

    def ring(
        self, rings: Sequence[Sequence[int]], sizes: Sequence[float], *, latencies: bool
    ) -> float:
        """Seconds of ring all-reduces side by side by the links alone, latencies or not."""
        messages, latency = [], 0.0
        for ring, size in zip(rings, sizes, strict=True):
            hops = list(pairwise([*sorted(ring), min(ring)]))
            messages += [Message(a, b, size / len(ring)) for a, b in hops]
            if len(ring) > 1:
                delays = sorted(self.link(a, b)[1] for a, b in hops)
                latency = max(latency, 2 * sum(delays[:-1]))
        rounds = 2 * (max(map(len, rings)) - 1)
        return rounds * self.together(messages)[0] + latencies * latency

    # weights

    def weights(self, first: int, last: int) -> float:
        """Bytes of the trained weights of layers [first, last)."""
        return sum(layer.param_bytes for layer in self.data.layers[first:last])

    def frozen(self, first: int, last: int) -> float:
        """Bytes of the frozen weights of layers [first, last)."""
        return sum(layer.frozen_bytes for layer in self.data.layers[first:last])

    @property
    def tied(self) -> float:
        """Bytes of the last layer's weights that are the first layer's."""
        return self.data.layers[-1].tied_param_bytes

    def join_seconds(
        self, rows: Sequence[Sequence[int]], size: float, way: int, *, alone: bool
    ) -> tuple[float, float]:
        """(before, behind) the update: seconds of joining weights of `size` bytes over row groups,
        one ring for each tensor rank. For `STEPS` they are a lower bound.

        alone: whether every row group is a replica of one device. In steps these join as Poplar's
        formula says; of other replicas one step counts, by the links' bytes, and nothing where a
        measured curve may be faster.
        """
        if len(rows) == 1 or size == 0:
            return 0.0, 0.0
        gradients = size / self.data.element_bytes * self.data.gradient_bytes
        width, ranks = max(map(len, rows)), len(rows)
        rings = [[row[r * len(row) // width] for row in rows] for r in range(width)]
        both = (gradients / width, size / width)
        if way == WHOLE:
            return self.all_reduce(rings, [both[0]] * width), 0.0
        if way == HALVES:
            before, behind = (self.all_reduce(rings, [bytes_] * width) / 2 for bytes_ in both)
        elif alone:
            links = [self.link(a, b) for a, b in pairwise([*sorted(rings[0]), min(rings[0])])]
            rate, delay = min(rate for rate, _ in links), max(delay for _, delay in links)
            before, behind = (
                min(
                    (ranks - 1) * (bytes_ / ranks / rate + delay),
                    bytes_ / rate + ranks * (ranks - 1) * delay,
                )
                for bytes_ in both
            )
        elif any(node.all_reduce for node in self.data.nodes):
            return 0.0, 0.0
        else:
            before, behind = (
                self.ring(rings, [bytes_] * width, latencies=False) / 2 for bytes_ in both
            )
        return before, behind

    def joins(self, *, tied: bool) -> Floats:
        """[2, ways, groups, groups, L + 1, L + 1] seconds (before, behind) of joining the layers
        from one to another that two groups of different replicas hold, or, on the diagonal, the row
        groups of one. tied: whether only the tied weights count, whatever the layers."""
        count, L = len(self.groups), self.layers
        table = np.zeros((2, 3, count, count, L + 1, L + 1))
        for q, p in product(range(1, count), repeat=2):
            one, other = self.groups[q], self.groups[p]
            if p < q or (p > q and set(one.devices) & set(other.devices)):
                continue
            rows = one.rows if p == q else one.rows + other.rows
            alone = p != q and len(one.devices) == len(other.devices) == 1
            for way, (first, last) in product(range(3), combinations(range(L + 1), 2)):
                size = self.tied
                if not tied:
                    size = self.weights(first, last)
                    if first == 0 and last < L:  # what is tied may be joined apart
                        size -= self.tied
                seconds = self.join_seconds(rows, size, way, alone=alone)
                table[:, way, q, p, first, last] = table[:, way, p, q, first, last] = seconds
        return table

    @cached_property
    def updates(self) -> Floats:
        """[tied, run, n] seconds of updating a run's weights that n row groups divide. tied: 1 with
        a copy of the tied weights, where the run has the last layer and not the first; else 0."""
        table = np.zeros((2, len(self.runs), len(self.kind) + 1))
        for r, run in enumerate(self.runs[1:], start=1):
            group = self.groups[run.group]
            update = self.data.types[self.kind[group.devices[0]]].update
            copied = self.tied if run.first > 0 and run.last == self.layers else 0.0
            for with_copy, parts in product(range(2), range(1, len(self.kind) + 1)):
                size = self.weights(run.first, run.last) + with_copy * copied
                params = size / group.tensor / parts / self.data.element_bytes
                table[with_copy, r, parts] = update.move_seconds(params * UPDATE_BYTES)
        return table

    # memory

    @cached_property
    def limits(self) -> Floats:
        """[groups] bytes of a device of the group beside the framework's workspace."""
        table = np.zeros(len(self.groups))
        for q, group in enumerate(self.groups[1:], start=1):
            limit = self.data.types[self.kind[group.devices[0]]].memory_bytes
            table[q] = limit - self.data.framework.workspace_bytes
        return table

    @cached_property
    def states(self) -> Floats:
        """[4, runs, D + 1] bytes of a run's weights, gradients and optimizer states by ZeRO level
        and the row groups that divide them; a lower bound, without buffers and copies."""
        table = np.zeros((4, len(self.runs), len(self.kind) + 1))
        for r, run in enumerate(self.runs[1:], start=1):
            tensor = self.groups[run.group].tensor
            part = self.weights(run.first, run.last) / tensor
            frozen = self.frozen(run.first, run.last) / tensor
            for level, parts in product(range(4), range(1, len(self.kind) + 1)):
                held = self.data.framework.held_bytes(
                    part, 0.0, self.data.element_bytes, level, 1 / parts, frozen=frozen
                )
                table[level, r, parts] = held.weights + held.gradients + held.optimizer
        return table

    @cached_property
    def kept(self) -> Floats:
        """[modes, runs, G + 1] bytes that a device keeps of a micro-batch between its passes; a
        lower bound, since sequence parallelism divides all tensors and the logits do not count."""
        table = np.zeros((len(self.data.modes), len(self.runs), self.samples + 1))
        for i, mode in enumerate(self.data.modes):
            for r, run in enumerate(self.runs[1:], start=1):
                group = self.groups[run.group]
                layers = self.data.layers[run.first : run.last]
                saved = sum(layer.kept[mode].saved_bytes for layer in layers) / group.tensor
                for b in range(1, self.samples + 1):
                    table[i, r, b] = math.ceil(b / len(group.rows)) * saved
                    if run.last == self.layers:
                        logits = self.data.logit_bytes / group.tensor
                        table[i, r, b] = max(0.0, table[i, r, b] - b * logits)
        return table

    @cached_property
    def ample(self) -> bool:
        """Whether every group has room for the states of all layers and all samples at once."""
        for r, run in enumerate(self.runs[1:], start=1):
            if (run.first, run.last) == (0, self.layers):
                needed = self.states[0, r, 1] + self.samples * self.kept[0, r, 1]
                if needed > self.limits[run.group]:
                    return False
        return True


def computing_alone(data: JointData) -> float:
    """A lower bound on every plan's seconds: all devices together compute all layers of all
    samples, each layer at the fewest device-seconds per sample.

    Seconds are straight between a profile's micro-batches, so that the fewest seconds per sample
    are those of one of them, of one sample or of all samples.
    """
    prices = Prices(data)
    least = np.full(len(data.layers), np.inf)
    for kind, tensor in product(dict.fromkeys(prices.kind), data.tensor_degrees):
        sizes = {table.micro_batch for table in prices.tables_of(kind, tensor)[0]}
        if not sizes:
            continue
        for rows in sorted({1, data.global_batch} | {b for b in sizes if b < data.global_batch}):
            seconds = prices.layer_seconds("none", kind, tensor, rows)[:2].sum(axis=0)
            least = np.minimum(least, tensor * seconds / rows)
    return float(least.sum()) * data.global_batch / len(prices.kind)
