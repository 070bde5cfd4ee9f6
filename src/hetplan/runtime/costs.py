"""What the parts of a plan cost on a workload's cluster: passes, transfers, rings, updates; seconds
and bytes.

All ranks of a node share its network card: what crosses nodes is charged at the card's bandwidth
for all of them together. A stage with tensor ranks sends each activation once over the network
(scatter-gather, Narayanan et al. 2021
(SC), Section 4.1), in parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hetplan.errors import InputError
from hetplan.profiling.operators import ELEMENT_BYTES, REPEATED, Layer
from hetplan.profiling.rates.moves import move_seconds
from hetplan.profiling.times import Rates, Recomputation, kept_bytes, repeated_share, together
from hetplan.profiling.workload import Workload
from hetplan.runtime.plan import Stage, split
from hetplan.schema import Range

Floats = NDArray[np.float64]

# Inputs of the products that tensor ranks divide by columns, as described transformers name them.
GATHERED = frozenset(("qkv input", "up input", "head input"))
GATHERED_AGAIN = ("operators", "full")  # recomputation that does not keep them in blocks

# Adam in mixed precision reads gradient, fp32 weight and two moments and writes weight, fp32 weight
# and moments: 2 + 12 and 2 + 12 bytes; in fp32 16 and 12. Per parameter.
UPDATE_BYTES = 28


@dataclass(frozen=True)
class Traffic:
    """seconds of one message set, and the network cards' sides (2 n sends, 2 n + 1 receives of node
    n) it holds."""

    seconds: float
    latency: float
    cards: tuple[int, ...]


class Costs:
    """Costs on one workload's cluster and profile; repeated questions are answered from memory."""

    def __init__(self, workload: Workload, recomputation: Recomputation = "none") -> None:
        self.workload = workload
        self.mode = recomputation
        self.bandwidth = workload.cluster.bandwidth()
        self.delay = workload.cluster.latency()
        self._layers: dict[tuple[str, int, int], Floats] = {}
        self._points: dict[tuple[str, int], tuple[Floats, Floats]] = {}

    def node(self, device: int) -> int:
        """The node of a device."""
        return self.workload.cluster.devices[device].node

    def kind(self, device: int) -> str:
        """The type of a device."""
        return self.workload.cluster.devices[device].type

    def layer_seconds(self, kind: str, tensor: int, rows: int) -> Floats:
        """[4, L] forward and backward seconds of `rows` samples on one device of a tensor group of
        that type, and what the host takes of them.

        Straight lines between the profile's micro-batches; below the first its time, beyond the
        last the last piece's slope.
        Recomputation is part of the backward pass. Without a table of the degree, an even part of
        one device's.
        """
        key = (kind, tensor, rows)
        if key not in self._layers:
            seconds = self._interpolated(kind, tensor, rows)
            again = self._again(kind, tensor, max(rows, 1))
            self._layers[key] = seconds + np.outer((0, 1, 0, 1), again) * seconds[[0, 0, 2, 2]]
        return self._layers[key]

    def _interpolated(self, kind: str, tensor: int, rows: int) -> Floats:
        if rows == 0:
            return np.zeros((4, len(self.workload.profile.layers)))
        sizes, seconds = self._table(kind, tensor)
        after = int(np.searchsorted(sizes, rows))
        if after == len(sizes):
            beyond = (rows - sizes[-1]) * slope(sizes, seconds[:, :2])
            return np.asarray(seconds[-1] + np.concatenate([beyond, np.zeros_like(beyond)]))
        if sizes[after] == rows or after == 0:
            return np.asarray(seconds[after])
        share = (rows - sizes[after - 1]) / (sizes[after] - sizes[after - 1])
        return np.asarray(seconds[after - 1] + share * (seconds[after] - seconds[after - 1]))

    def _table(self, kind: str, tensor: int) -> tuple[Floats, Floats]:
        """(micro-batches [B], seconds [B, 4, L] as in `layer_seconds`)."""
        profile = self.workload.profile
        if (kind, tensor) not in self._points:
            degree = tensor if profile.micro_batches(kind, tensor) else 1
            sizes = profile.micro_batches(kind, degree)
            tables = [table for b in sizes if (table := profile.table(kind, degree, b)) is not None]
            if not tables:
                raise InputError(
                    f"no times of {kind} at tensor degree 1", where=f"profile of {profile.model}"
                )
            parts = tensor / degree
            none = [0.0] * len(profile.layers)
            rows = [
                (
                    table.forward_seconds,
                    table.backward_seconds,
                    table.forward_host_seconds or none,
                    table.backward_host_seconds or none,
                )
                for table in tables
            ]
            self._points[kind, tensor] = (np.array(sizes, float), np.array(rows) / parts)
        return self._points[kind, tensor]

    def _again(self, kind: str, tensor: int, rows: int) -> Floats:
        """[L] share of the forward pass that the backward pass repeats."""
        model = self.workload.model
        rates = Rates(kind, self.workload.cluster.specs[kind], model.precision, self.workload.stack)
        shares = {
            layer.operators: repeated_share(layer, self.mode, rates, rows, tensor)
            for layer in model.layers
        }
        return np.array([shares[layer.operators] for layer in model.layers])

    def passes(self, stage: Stage, layers: Range, samples: int) -> tuple[float, float]:
        """(forward, backward) seconds of one micro-batch on a stage: its slowest device, and tensor
        all-reduces."""
        first, last = layers
        slowest, even = (0.0, 0.0), len(set(stage.tensor_shares)) == 1
        layers_here = self.workload.profile.layers[first:last]
        per_sample = sum(layer.tensor_bytes for layer in layers_here)
        parts = split(samples, stage.row_shares)
        for group, (begin, end) in zip(stage.devices, parts, strict=True):
            rows = end - begin
            both = np.zeros(4)
            for rank, share in zip(group, stage.tensor_shares, strict=True):
                tables = self.layer_seconds(self.kind(rank), len(group) if even else 1, rows)
                scale = 1.0 if even else share / sum(stage.tensor_shares)
                both = np.maximum(both, scale * tables[:, first:last].sum(axis=1))
            reduce = self.ring([group], per_sample * rows).seconds / 2
            # a full recomputation repeats the forward pass's all-reduces, too
            times = np.array([1, 2 if self.mode == "full" else 1])
            device = np.sqrt(np.maximum(both[:2] ** 2 - both[2:] ** 2, 0.0))
            hidden = self.workload.stack.hidden_reduces
            device = np.maximum(device, reduce * times) if hidden else device + reduce * times
            forward, backward = together(device, both[2:])
            slowest = max(slowest, (float(forward), float(backward)), key=sum)
        return slowest

    def transfer(self, here: Stage, there: Stage, layer: int, samples: int) -> Traffic:
        """One micro-batch's activation after `layer` (or its gradient), in the order of rows."""
        size = self.workload.profile.layers[layer].activation_bytes
        sends, takes = split(samples, here.row_shares), split(samples, there.row_shares)
        pairs = []
        for g, (a, b) in zip(here.devices, sends, strict=True):
            for h, (c, d) in zip(there.devices, takes, strict=True):
                rows, width = min(b, d) - max(a, c), max(len(g), len(h))
                if rows > 0:
                    each = rows * size / width
                    pairs += [
                        (g[r * len(g) // width], h[r * len(h) // width], each) for r in range(width)
                    ]
        return self.messages(pairs)

    def _reached(self, operation: str, ranks: Sequence[int], size: float) -> float:
        """The share of its links' bandwidth that a message or collective reaches; latency is part
        of a learned one."""
        links = self.workload.links
        if links is None or size == 0:
            return 1.0
        inside = len({self.node(rank) for rank in ranks}) == 1
        return links.share(operation, "node" if inside else "between", len(ranks), size)

    def messages(self, pairs: Iterable[tuple[int, int, float]], *, ring: bool = False) -> Traffic:
        """Messages (from, to, bytes) at once: the slowest pair or the fullest card, whichever takes
        longer.

        ring: they are a collective's round, whose efficiency is not theirs.
        """
        loads: dict[int, float] = {}
        seconds = latency = 0.0
        for a, b, size in pairs:
            if a == b:
                continue
            share = 1.0 if ring else self._reached("send", (a, b), size)
            seconds = max(seconds, size / (self.bandwidth[a, b] * share))
            latency = max(latency, 0.0 if self.workload.links else float(self.delay[a, b]))
            if self.node(a) != self.node(b):
                for card in (2 * self.node(a), 2 * self.node(b) + 1):
                    loads[card] = loads.get(card, 0.0) + size
        nodes = self.workload.cluster.nodes
        for card, load in loads.items():
            seconds = max(seconds, load / nodes[card // 2].network_bandwidth)
        return Traffic(float(seconds), latency, tuple(sorted(loads)))

    def ring(self, groups: Sequence[Sequence[int]], size: float) -> Traffic:
        """Ring all-reduces of `size` bytes side by side, one per group: 2 (n - 1) rounds of size /
        n and a latency.

        Devices stand in the ring in their own order, so that a ring enters and leaves each node
        once.
        """
        rounds = 2 * (max(len(group) for group in groups) - 1)
        if rounds == 0:
            return Traffic(0.0, 0.0, ())
        pairs = []
        for group in groups:
            order = sorted(group)
            pairs += [
                (a, b, size / len(group))
                for a, b in zip(order, [*order[1:], order[0]], strict=True)
            ]
        once = self.messages(pairs, ring=True)
        reached = min(
            self._reached("all-reduce", group, size) for group in groups if len(group) > 1
        )
        return Traffic(rounds * (once.seconds / reached + once.latency), 0.0, once.cards)

    def update_seconds(self, device: int, param_bytes: float) -> float:
        """The optimizer's step on `param_bytes` of weights: memory-bound."""
        kind, workload = self.kind(device), self.workload
        params = param_bytes / ELEMENT_BYTES[workload.precision]
        spec = workload.cluster.specs[kind]
        return move_seconds("binary", params * UPDATE_BYTES, kind, spec).seconds

    @cached_property
    def inputs(self) -> tuple[float, ...]:
        """[L] bytes per sample of each layer's input (of the first: nothing that needs keeping)."""
        return (0.0, *(layer.activation_bytes for layer in self.workload.profile.layers[:-1]))

    def saved_bytes(self, layers: Range, tensor: int) -> float:
        """Bytes per sample that each device of a stage keeps from forward to backward."""
        first, last = layers
        profile, model = self.workload.profile.layers, self.workload.model.layers
        if self.workload.framework.sequence_parallel and tensor > 1:
            again = self.mode in GATHERED_AGAIN
            kept = [l for l in model[first:last] if not (again and l.kind in REPEATED)]
            whole = sum(self.gathered_bytes(layer, tensor) for layer in kept)
            return self.saved_bytes(layers, 1) / tensor + whole
        if self.mode == "none":
            return sum(
                layer.replicated_saved_bytes
                + (layer.saved_bytes - layer.replicated_saved_bytes) / tensor
                for layer in profile[first:last]
            )
        return sum(
            kept_bytes(model[l], self.mode, self.workload.precision, tensor, self.inputs[l])
            for l in range(first, last)
        )

    def gathered_bytes(self, layer: Layer, tensor: int) -> float:
        """Bytes per sample of the inputs of products that sequence-parallel ranks gather and keep
        whole, beyond their own part."""
        if not self.workload.framework.whole_inputs:
            return 0.0
        precision = self.workload.precision
        sizes = sum(t.size(precision) for t in layer.saved if t.name in GATHERED)
        return sizes * (1 - 1 / tensor)

    def working_bytes(self, layers: Range, tensor: int) -> float:
        """Bytes per sample that one layer needs beside while it is computed again."""
        first, last = layers
        if self.workload.framework.sequence_parallel and tensor > 1:
            again = [l for l in self.workload.model.layers[first:last] if l.kind in REPEATED]
            whole = max((self.gathered_bytes(layer, tensor) for layer in again), default=0.0)
            return self.working_bytes(layers, 1) / tensor + whole * (self.mode in GATHERED_AGAIN)
        if self.mode == "none":
            return 0.0
        precision = self.workload.precision
        return max(
            sum(
                tensor_.size(precision) / (tensor if tensor_.split else 1)
                for tensor_ in layer.saved
            )
            - kept_bytes(layer, self.mode, precision, tensor, self.inputs[first + i])
            if layer.kind in REPEATED
            else 0.0
            for i, layer in enumerate(self.workload.model.layers[first:last])
        )


def slope(sizes: Floats, seconds: Floats) -> Floats:
    """[2, L] seconds per further sample beyond the last of `sizes` [B], `seconds` [B, 2, L]; the
    last one's speed where times do not grow."""
    speed: Floats = seconds[-1] / sizes[-1]
    if len(sizes) == 1:
        return speed
    rise = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
    return np.asarray(np.where(rise > 0, rise, speed))
