"""Seconds and bytes of the parts of a plan on the devices of `ReplayData`: passes, transfers of
activations, all-reduces of tensor groups and updates.

A stage's devices are divided into row groups, which divide the samples of a micro-batch. The
devices of a row group are the ranks of one tensor group, which divide every weight.

A stage with tensor ranks sends each activation once over the network: every rank sends its part
(scatter-gather, Narayanan et al. 2021 (SC), Section 4.1).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import accumulate
from typing import Generic, NamedTuple

import numpy as np

from hetplan.errors import require
from hetplan.plans.degrees import Degrees
from hetplan.plans.plan import Recomputation, Stage
from hetplan.plans.shares import split
from hetplan.profiling.frameworks import Size
from hetplan.profiling.rates.efficiency import LearnedLinks
from hetplan.profiling.rates.times import together
from hetplan.replays.arrays import Floats
from hetplan.replays.data import Kept, Layer, ReplayData, Table
from hetplan.replays.links import MOST_KEPT, Links
from hetplan.replays.memory import Passes, UnusedGradients, head_inputs, on_a_rank
from hetplan.replays.overlap import uncovered
from hetplan.replays.simulator.tasks import Traffic
from hetplan.replays.updates import UPDATE_BYTES
from hetplan.schema import Range

# Seconds of the all-reduces in a backward pass over those in a forward pass, by the mode of
# recomputation; 1 by all other modes, which repeat no all-reduce. Full recomputation repeats all of
# them. Recomputation by operator keeps the results of reduce-scatters and repeats only the
# all-gathers, which are half of an all-reduce.
REPEATED_REDUCES = {"full": 2.0, "operators": 1.5}

Sizes = tuple[int, ...]


class StageSeconds(NamedTuple):
    """Seconds and bytes of a stage's passes, for each of its C model chunks and of B sizes of a
    micro-batch."""

    passes: list[list[tuple[float, float]]]
    """[C][B] (forward, backward) seconds, without the all-reduces of tensor groups."""
    reduces: list[list[list[Traffic]]]
    """[2][C][B] all-reduces of the tensor groups in the forward and in the backward pass."""
    inputs_reduces: list[list[Traffic]]
    """[C][B] all-reduces of the tensor groups in a backward pass of inputs."""
    saved_bytes: list[list[float]]
    """[C][B] bytes that the fullest device keeps from the forward to the backward pass."""
    weights: list[list[float]]
    """[C][B] the part of the backward seconds that a pass of weights takes."""
    added: list[list[float]]
    """[C][B] seconds by which a backward pass takes longer where it is split."""
    held_bytes: list[list[float]]
    """[C][B] bytes that the fullest device keeps between a backward pass of inputs and its pass of
    weights: what the forward pass kept, and the gradients of the products' outputs."""


@dataclass(frozen=True)
class StageBytes(Generic[Size]):
    """Bytes of the passes and of the weights of a stage; arrays where it stands for several."""

    passes: Passes[Size]  # bytes per sample on each device of a tensor group
    # the others are bytes on all devices of a tensor group together, unless they say otherwise
    weights: Size  # bytes of all trained weights
    largest: Size  # bytes of the trained weights of its largest layer
    frozen: Size  # bytes of all frozen weights
    largest_frozen: Size  # bytes of the frozen weights of the layer with the most of them
    casts: Size  # bytes of the largest frozen weight that a product casts from fewer bits
    unused: Size  # bytes of the unused gradients of weights that the group divides
    unused_whole: Size  # bytes on each device of those of weights that each device has whole
    unused_head: Size  # bytes of the unused gradient of the head's weight

    def unused_on(self, part: float) -> UnusedGradients[Size]:
        """The unused gradients on a device with a part of the group's weights."""
        return UnusedGradients(part * self.unused + self.unused_whole, part * self.unused_head)


class UnusedShapes:
    """The shapes of unused gradients that layers on a device have in common."""

    def __init__(self, tensor: int, element_bytes: int) -> None:
        """tensor: devices of a tensor group. element_bytes: bytes of a number."""
        self.tensor, self.element_bytes = tensor, element_bytes
        self.shapes: set[tuple[float, float]] = set()  # rows and columns on a device
        self.divided_bytes = self.whole_bytes = 0.0

    def add(self, layer: Layer) -> tuple[float, float]:
        """Add the shapes of a layer. Returns the bytes so far: on all devices of the group together
        those of weights that they divide, and on each device those of weights that it has whole."""
        for of_weight in layer.unused_gradients:
            rows, columns = float(of_weight.rows), float(of_weight.columns)
            if of_weight.divided == "rows":
                rows /= self.tensor
            elif of_weight.divided == "columns":
                columns /= self.tensor
            if (rows, columns) in self.shapes:
                continue
            self.shapes.add((rows, columns))
            size = rows * columns * self.element_bytes
            if of_weight.divided == "nothing":
                self.whole_bytes += size
            else:
                self.divided_bytes += self.tensor * size
        return self.divided_bytes, self.whole_bytes


class Costs(Links):
    """Seconds and bytes on the devices of one instance, under one mode of recomputation. Results
    are cached."""

    context = 1
    """Context degree: the number of row groups of a stage that compute every sample together, each
    with an equal part of its tokens. Seconds and bytes "per sample" are then of such a part, and a
    row of a row group is such a part. With degree 1 a row is a sample."""
    degrees: Degrees | None = None
    """The plan's further degrees (context, expert ranks, …); None without any."""
    device_types: list[str]
    """[D] the type of each device."""
    param_sums: list[float]
    """[L + 1] bytes of the trained weights of all layers before layer l."""
    frozen_sums: list[float]
    """[L + 1] bytes of the frozen weights of all layers before layer l."""
    expert_sums: list[float]
    """[L + 1] the part of `param_sums` that belongs to experts which are spread over ranks."""
    frozen_expert_sums: list[float]
    """[L + 1] the part of `frozen_sums` that belongs to experts which are spread over ranks."""
    tied_layers: list[int]
    """Layers that share trained weights with the first layer."""

    def __init__(
        self,
        data: ReplayData,
        recomputation: Recomputation = "none",
        links: LearnedLinks | None = None,
    ) -> None:
        """links: learned efficiency of messages and collectives; None: they reach the links'
        bandwidths."""
        super().__init__(data, links)
        self.recomputation = recomputation
        self.device_types = [device_type for device_type, _ in data.devices]
        self.layer_seconds = cache(self._layer_seconds)
        self._layer_second_sums = cache(self._sum_layer_seconds)
        self._weight_second_sums = cache(self._layer_weight_seconds)
        self._profile_points = cache(self._read_profile_points)
        self.stage_seconds = lru_cache(MOST_KEPT)(self._stage_seconds)
        self.stage_bytes = lru_cache(MOST_KEPT)(self._stage_bytes)
        self.stage_update_seconds = lru_cache(MOST_KEPT)(self._stage_update_seconds)
        self.boundary_transfers = lru_cache(MOST_KEPT)(self._boundary_transfers)
        self._tensor_byte_sums = prefix_sums(layer.tensor_bytes for layer in data.layers)
        self.param_sums = prefix_sums(layer.param_bytes for layer in data.layers)
        self.frozen_sums = prefix_sums(layer.frozen_bytes for layer in data.layers)
        self.expert_sums = [0.0] * len(self.param_sums)
        self.frozen_expert_sums = [0.0] * len(self.param_sums)
        self.tied_layers = [l for l, layer in enumerate(data.layers) if layer.tied_param_bytes]
        kept = [layer.kept[recomputation] for layer in data.layers]
        # [3, L] each, of `bytes_by_division`
        self._saved = bytes_by_division(
            kept, "saved_bytes", "replicated_saved_bytes", "gathered_bytes"
        )
        self._working = bytes_by_division(
            kept, "working_bytes", "replicated_working_bytes", "gathered_working_bytes"
        )

    def gradient_bytes(self, param_bytes: float) -> float:
        """Bytes of the gradients that replicas exchange for `param_bytes` of weights."""
        return param_bytes / self.data.element_bytes * self.data.gradient_bytes

    def _layer_seconds(self, device_type: str, tensor: int, rows: int) -> Floats:
        """[4, L] seconds of `rows` rows on one device of a group of `tensor` ranks: the forward and
        the backward pass, then the seconds that the host spends on launching either.

        The seconds are interpolated linearly between the profile's micro-batches. Below the first
        micro-batch they are those of the first; beyond the last one the slope of the last piece
        continues. Recomputation is part of the backward pass.
        """
        if rows == 0:
            return np.zeros((4, len(self.data.layers)))
        sizes, seconds = self._profile_points(device_type, tensor)
        after = int(np.searchsorted(sizes, rows))  # the first measured size of at least `rows`
        if after == len(sizes):
            beyond = (rows - sizes[-1]) * slope(sizes, seconds[:, :2])
            host_beyond = np.zeros_like(beyond)  # launches do not depend on the number of samples
            return np.asarray(seconds[-1] + np.concatenate([beyond, host_beyond]))
        # sizes are whole numbers as floats, so that the comparison is exact
        if sizes[after] == rows or after == 0:
            return np.asarray(seconds[after])
        share = (rows - sizes[after - 1]) / (sizes[after] - sizes[after - 1])
        return np.asarray(seconds[after - 1] + share * (seconds[after] - seconds[after - 1]))

    def _read_profile_points(self, device_type: str, tensor: int) -> tuple[Floats, Floats]:
        """(micro-batches [B], seconds [B, 4, L] as in `layer_seconds`) of the profile.

        Where the profile has no table of the tensor degree, each rank takes an even part of the
        seconds of one device.
        """
        tables = self._tables_of(device_type, tensor)
        divisor = 1 if tables[0].tensor == tensor else tensor
        seconds = np.array(
            [
                (
                    table.forward_seconds,
                    table.backward_seconds,
                    table.forward_host_seconds,
                    table.backward_host_seconds,
                )
                for table in tables
            ]
        )
        if self.recomputation != "none":
            repeated = np.array([table.repeated[self.recomputation] for table in tables])
            seconds[:, 1] += repeated * seconds[:, 0]
            seconds[:, 3] += repeated * seconds[:, 2]
        sizes = np.array([table.micro_batch for table in tables], float)
        return sizes, seconds / divisor

    def _layer_weight_seconds(self, device_type: str, tensor: int, rows: int) -> list[float]:
        """[L + 1] prefix sums of the part of the layers' backward seconds that the gradients of
        their weights take. What the pass repeats of the forward pass is not divided."""
        shares, backward = self.weight_shares(device_type, tensor, rows)
        return prefix_sums((shares * backward).tolist())

    def weight_shares(self, device_type: str, tensor: int, rows: int) -> tuple[Floats, Floats]:
        """([L] share of each layer's backward pass that the gradients of its weights take, [L]
        seconds of the backward pass without what it repeats of the forward pass)."""
        tables = self._tables_of(device_type, tensor)
        table = next((t for t in tables if t.micro_batch >= rows), tables[-1])
        forward, backward = self.layer_seconds(device_type, tensor, rows)[:2]
        if self.recomputation != "none":
            backward = backward - np.array(table.repeated[self.recomputation]) * forward
        shares = table.weight_shares
        if not shares:
            shares = [0.5 if layer.param_bytes > 0 else 0.0 for layer in self.data.layers]
        return np.array(shares), np.asarray(backward)

    def _tables_of(self, device_type: str, tensor: int) -> list[Table]:
        """The tables of a device type, by micro-batch: of the tensor degree, else of degree 1."""
        of_type = [table for table in self.data.tables if table.type == device_type]
        tables = [table for table in of_type if table.tensor == tensor]
        if not tables:
            tables = [table for table in of_type if table.tensor == 1]
        require(
            tables,
            f"no times of {device_type} at tensor degree 1",
            where=f"tables of {self.data.model}",
        )
        return sorted(tables, key=lambda table: table.micro_batch)

    def weight_seconds(self, stage: Stage, layers: Range, samples: int) -> float:
        """Seconds of a pass of weights on the slowest device of a stage."""
        return self.computed_weight_seconds(stage, layers, samples)

    def added_seconds(self, stage: Stage, layers: Range, samples: int) -> float:
        """Seconds by which a backward pass takes longer where it is split."""
        return 0.0

    def computed_weight_seconds(self, stage: Stage, layers: Range, samples: int) -> float:
        """The part of the backward pass's computation that a pass of weights takes on the slowest
        device of a stage."""
        first, last = layers
        equal_shares = len(set(stage.tensor_shares)) == 1
        slowest = 0.0
        for group, rows in zip(stage.devices, self.rows(stage, samples), strict=True):
            for device, share in zip(group, stage.tensor_shares, strict=True):
                tensor = len(group) if equal_shares else 1
                part = 1.0 if equal_shares else share / sum(stage.tensor_shares)
                sums = self._weight_second_sums(self.device_types[device], tensor, rows)
                slowest = max(slowest, part * (sums[last] - sums[first]))
        _, backward, _, _ = self._slowest_group(stage, layers, samples)
        return min(slowest, backward)

    def passes(self, stage: Stage, layers: Range, samples: int) -> tuple[float, float]:
        """(forward, backward) seconds of one micro-batch on the slowest row group of a stage,
        without the all-reduces of tensor groups."""
        forward, backward, _, _ = self._slowest_group(stage, layers, samples)
        return forward, backward

    def _slowest_group(self, stage: Stage, layers: Range, samples: int) -> list[float]:
        """[4] seconds as in `layer_seconds`, of the row group whose forward and backward pass take
        longest together."""
        slowest = [0.0] * 4
        for group, rows in zip(stage.devices, self.rows(stage, samples), strict=True):
            seconds = self._group_seconds(tuple(group), stage.tensor_shares, layers, rows)
            slowest = max(slowest, seconds, key=lambda each: each[0] + each[1])
        return slowest

    def _group_seconds(
        self, group: tuple[int, ...], shares: Sequence[float], layers: Range, rows: int
    ) -> list[float]:
        """[4] seconds as in `layer_seconds`, each of the slowest device of one row group.

        shares: the share of the layers that each device computes. Equal shares take the profile's
        seconds of the tensor degree; other ones take their part of the seconds of one device.
        """
        equal_shares = len(set(shares)) == 1  # a plan states equal shares as equal numbers
        tensor = len(group) if equal_shares else 1
        # (type, part of the seconds of the type); devices that agree in both take equally long
        distinct = {
            (self.device_types[device], 1.0 if equal_shares else share / sum(shares))
            for device, share in zip(group, shares, strict=True)
        }
        first, last = layers
        slowest = [0.0] * 4
        for device_type, part in distinct:
            sums = self._layer_second_sums(device_type, tensor, rows)
            seconds = [part * (row[last] - row[first]) for row in sums]
            slowest = [max(pair) for pair in zip(slowest, seconds, strict=True)]
        return slowest

    def _sum_layer_seconds(self, device_type: str, tensor: int, rows: int) -> list[list[float]]:
        """[4][L + 1] prefix sums of `layer_seconds` over the layers."""
        seconds = self.layer_seconds(device_type, tensor, rows)
        return [prefix_sums(row) for row in seconds.tolist()]

    def rows(self, stage: Stage, samples: int) -> list[int]:
        """Rows of a micro-batch on each row group of a stage."""
        if len(stage.devices) == 1:  # so that the context degree is 1
            return [samples]
        return [end - begin for begin, end in split(samples * self.context, stage.row_shares)]

    def reduces(self, stage: Stage, layers: Range, samples: int) -> tuple[Traffic, Traffic]:
        """The all-reduces of the stage's tensor groups, with the seconds that they add to the
        forward and to the backward pass of a micro-batch; none without tensor ranks. They keep the
        device busy, not the host."""
        ring = self._ring_of_both_passes(stage, layers, samples)
        in_forward = ring.seconds / 2
        in_backward = in_forward * REPEATED_REDUCES.get(self.recomputation, 1.0)
        forward, backward, forward_host, backward_host = self._slowest_group(stage, layers, samples)
        return (
            ring._replace(seconds=self._longer_by(forward, forward_host, in_forward)),
            ring._replace(seconds=self._longer_by(backward, backward_host, in_backward)),
        )

    def reduces_of_inputs(self, stage: Stage, layers: Range, samples: int) -> Traffic:
        """The all-reduces of the stage's tensor groups in a backward pass of inputs, with the
        seconds that they add to it. A pass of weights has none.

        Beside them is less computation than in a whole backward pass. The two parts of a backward
        pass have the same parts of the host's seconds as of the device's.
        """
        ring = self._ring_of_both_passes(stage, layers, samples)
        _, backward, _, host = self._slowest_group(stage, layers, samples)
        if ring.seconds == 0 or backward == 0:
            return ring._replace(seconds=ring.seconds / 2)
        part = 1 - self.computed_weight_seconds(stage, layers, samples) / backward
        longer = self._longer_by(part * backward, part * host, ring.seconds / 2)
        return ring._replace(seconds=longer)

    def _ring_of_both_passes(self, stage: Stage, layers: Range, samples: int) -> Traffic:
        """The all-reduces of the stage's tensor groups in both passes of a micro-batch together,
        with the seconds that they take alone; none without tensor ranks."""
        size = self._tensor_byte_sums[layers[1]] - self._tensor_byte_sums[layers[0]]
        if len(stage.tensor_shares) == 1 or size == 0:
            return Traffic()
        return self.ring(stage.devices, [size * rows for rows in self.rows(stage, samples)])

    def _longer_by(self, seconds: float, host: float, reduces: float) -> float:
        """Seconds that all-reduces of `reduces` seconds add to a pass of `seconds`, in which the
        host is busy for `host` seconds."""
        # The inverse of `together`, which gives a pass's seconds from the device's and the host's.
        # Rounding, or a profile's file, may give the host more seconds than the pass.
        device = math.sqrt(max(seconds * seconds - host * host, 0.0))
        window = device if self.data.hidden_reduces else 0.0
        device_with_reduces = device + float(uncovered(reduces, window))
        whole = float(together(np.array(device_with_reduces), np.array(host)))
        return max(whole - seconds, 0.0)  # below 0 by rounding alone

    def transfer(self, sender: Stage, receiver: Stage, layer: int, samples: int) -> Traffic:
        """The messages by which one micro-batch's activation after `layer`, or its gradient, which
        is equally large, goes from one stage to another.

        Row groups take consecutive rows. Each pair of groups with rows in common exchanges these
        rows, in equal parts over the ranks of the larger tensor group.
        """
        row_bytes = self.data.layers[layer].activation_bytes
        sent = split(samples * self.context, sender.row_shares)
        received = split(samples * self.context, receiver.row_shares)
        messages = []
        for senders, (sent_first, sent_end) in zip(sender.devices, sent, strict=True):
            for receivers, (first, end) in zip(receiver.devices, received, strict=True):
                rows = min(sent_end, end) - max(sent_first, first)
                if rows <= 0:
                    continue
                parts = max(len(senders), len(receivers))
                part_bytes = rows * row_bytes / parts
                for part in range(parts):
                    # a rank of the smaller group sends or receives several parts
                    source = senders[part * len(senders) // parts]
                    target = receivers[part * len(receivers) // parts]
                    messages.append((source, target, part_bytes))
        return self.messages(messages)

    def update_seconds(self, device: int, param_bytes: float) -> float:
        """Seconds of the optimizer's step on `param_bytes` of weights, which is memory-bound."""
        moved = param_bytes / self.data.element_bytes * UPDATE_BYTES
        return self.data.types[self.device_types[device]].update.move_seconds(moved)

    @cached_property
    def input_bytes(self) -> tuple[float, ...]:
        """[L] bytes per sample of each layer's input; 0 for the first layer, whose input is data
        and not kept."""
        return (0.0, *(layer.activation_bytes for layer in self.data.layers[:-1]))

    def saved_bytes(self, layers: Range, tensor: int) -> float:
        """Bytes per sample that each device of a tensor group keeps from the forward to the
        backward pass."""
        return float(self._on_a_rank(self._saved, layers, tensor).sum())

    def product_gradient_bytes(self, layers: Range, tensor: int) -> float:
        """Bytes per sample of the gradients of the products' outputs on each device of a tensor
        group, which a pass of weights needs."""
        total = 0.0
        for l in range(*layers):
            layer = self.data.layers[l]
            if layer.product_bytes is None:
                total += self.saved_bytes((l, l + 1), tensor)
                continue
            whole = layer.replicated_product_bytes
            divided = layer.product_bytes - whole
            tokens_divided = self.data.framework.sequence_parallel
            total += float(on_a_rank(divided, whole, 0.0, tensor, tokens_divided))
        return total

    def working_bytes(self, layers: Range, tensor: int) -> float:
        """Bytes per sample that each device of a tensor group needs in addition in the backward
        pass of one of the layers; the largest over the layers."""
        return float(self._on_a_rank(self._working, layers, tensor).max())

    def _on_a_rank(self, by_division: Floats, layers: Range, tensor: int) -> Floats:
        """[number of layers] bytes per sample of each layer of the range on one tensor rank.
        by_division: the result of `bytes_by_division`."""
        divided, whole, gathered = by_division[:, layers[0] : layers[1]]
        tokens_divided = self.data.framework.sequence_parallel
        return on_a_rank(divided, whole, gathered, tensor, tokens_divided)

    def passes_bytes(self, layers: Sequence[Range], tensor: int) -> Passes[float]:
        """Bytes per sample that the passes of a stage need on each device of a tensor group.
        layers: one range per model chunk."""
        data, framework = self.data, self.data.framework
        boundary = 0.0
        for first, end in layers:
            boundary = max(boundary, self.input_bytes[first], data.layers[end - 1].activation_bytes)
        if framework.sequence_parallel:
            boundary /= tensor
        logits = loss = head = 0.0
        if layers[-1][1] == len(data.layers):
            logits = data.logit_bytes / tensor  # tensor ranks divide the vocabulary
            loss = framework.loss_bytes(data.logit_elements, data.logit_bytes, tensor)
            if data.unused_head_bytes:
                head = data.logit_elements * data.element_bytes / tensor
                head += float(
                    head_inputs(data.head_input_bytes, tensor, framework.sequence_parallel)
                )
        return Passes(
            saved=sum(self.saved_bytes(chunk, tensor) for chunk in layers),
            working=max(self.working_bytes(chunk, tensor) for chunk in layers),
            logits=logits,
            loss=loss,
            head=head,
            boundary=boundary,
        )

    def _stage_bytes(
        self, layers: tuple[Range, ...], tensor: int, copied: tuple[tuple[int, float], ...]
    ) -> StageBytes[float]:
        """The bytes of a stage. copied: (layer, bytes) of weights that the stage copies, because
        another stage owns the layer to which they are tied."""
        copied_bytes = dict(copied)
        numbers = [l for first, last in layers for l in range(first, last)]
        layer_bytes = [self.data.layers[l].param_bytes + copied_bytes.get(l, 0.0) for l in numbers]
        has_first = 0 in numbers
        frozen = []  # bytes of each layer
        for l in numbers:
            layer = self.data.layers[l]
            copied_frozen = 0.0 if has_first else layer.frozen_tied_bytes
            frozen.append(layer.frozen_bytes + copied_frozen)
        seen = UnusedShapes(tensor, self.data.element_bytes)
        unused = unused_whole = 0.0
        for first, last in layers:
            for layer in self.data.layers[first:last]:
                unused, unused_whole = seen.add(layer)
        with_head = layers[-1][1] == len(self.data.layers)
        return StageBytes(
            passes=self.passes_bytes(layers, tensor),
            weights=sum(layer_bytes),
            largest=max(layer_bytes),
            frozen=sum(frozen),
            largest_frozen=max(frozen),
            casts=max(self.data.layers[l].cast_bytes for l in numbers),
            unused=unused,
            unused_whole=unused_whole,
            unused_head=self.data.unused_head_bytes if with_head else 0.0,
        )

    def stages_from(self, first: int, tensor: int, copied: float) -> StageBytes[Floats]:
        """The bytes of stages of one chunk that begin with layer `first`: arrays over their number
        of layers, from one to all that follow. Equal to `stage_bytes` of each but for rounding.

        copied: bytes of weights that a stage with the last layer copies.
        """
        data, last = self.data, len(self.data.layers)
        layers = (first, last)
        sizes = np.array([layer.param_bytes for layer in data.layers[first:]])
        sizes[-1] += copied
        frozen = np.array([layer.frozen_bytes for layer in data.layers[first:]])
        if first:
            frozen += [layer.frozen_tied_bytes for layer in data.layers[first:]]
        casts = np.array([layer.cast_bytes for layer in data.layers[first:]])
        sent = np.array([layer.activation_bytes for layer in data.layers[first:]])
        boundary = np.maximum(self.input_bytes[first], sent)
        if data.framework.sequence_parallel:
            boundary = boundary / tensor
        at_end = np.zeros(last - first)
        at_end[-1] = 1.0
        head = self.passes_bytes([(last - 1, last)], tensor)
        seen = UnusedShapes(tensor, data.element_bytes)
        unused = np.array([seen.add(layer) for layer in data.layers[first:]])
        return StageBytes(
            passes=Passes(
                saved=np.cumsum(self._on_a_rank(self._saved, layers, tensor)),
                working=np.maximum.accumulate(self._on_a_rank(self._working, layers, tensor)),
                logits=at_end * head.logits,
                loss=at_end * head.loss,
                head=at_end * head.head,
                boundary=boundary,
            ),
            weights=np.cumsum(sizes),
            largest=np.maximum.accumulate(sizes),
            frozen=np.cumsum(frozen),
            largest_frozen=np.maximum.accumulate(frozen),
            casts=np.maximum.accumulate(casts),
            unused=unused[:, 0],
            unused_whole=unused[:, 1],
            unused_head=at_end * data.unused_head_bytes,
        )

    def _stage_update_seconds(
        self, stage: Stage, shares: tuple[float, ...], copied: tuple[tuple[int, float], ...]
    ) -> float:
        """Seconds of the optimizer's step on the slowest device of a stage.

        shares: for each device of the stage, its share of the optimizer states of its weights.
        copied: see `stage_bytes`.
        """
        sums = self.param_sums
        weights = sum(sums[last] - sums[first] for first, last in stage.layers)
        weights += sum(size for _, size in copied)
        slowest = 0.0
        for device, part, share in zip(stage.all_devices, stage.parts, shares, strict=True):
            slowest = max(slowest, self.update_seconds(device, weights * part * share))
        return slowest

    def _stage_seconds(self, stage: Stage, sizes: Sizes) -> StageSeconds:
        """The passes of a stage. sizes [B]: samples of each kind of micro-batch."""
        tensor = len(stage.tensor_shares)
        passes, forward_reduces, backward_reduces, saved = [], [], [], []
        inputs_reduces, weights, added, held = [], [], [], []
        for chunk in stage.layers:
            reduces = [self.reduces(stage, chunk, n) for n in sizes]
            forward_reduces.append([in_forward for in_forward, _ in reduces])
            backward_reduces.append([in_backward for _, in_backward in reduces])
            inputs_reduces.append([self.reduces_of_inputs(stage, chunk, n) for n in sizes])
            passes.append([self.passes(stage, chunk, n) for n in sizes])
            sample_bytes = self.saved_bytes(chunk, tensor)
            held_bytes = sample_bytes + self.product_gradient_bytes(chunk, tensor)
            rows = [max(self.rows(stage, n)) for n in sizes]  # of the largest row group
            saved.append([kept * sample_bytes for kept in rows])
            held.append([kept * held_bytes for kept in rows])
            weights.append([self.weight_seconds(stage, chunk, n) for n in sizes])
            added.append([self.added_seconds(stage, chunk, n) for n in sizes])
        return StageSeconds(
            passes=passes,
            reduces=[forward_reduces, backward_reduces],
            inputs_reduces=inputs_reduces,
            saved_bytes=saved,
            weights=weights,
            added=added,
            held_bytes=held,
        )

    def _boundary_transfers(
        self, before: Stage, after: Stage, chunk: int, sizes: Sizes
    ) -> tuple[list[Traffic], list[Traffic]]:
        """[B] transfers of the activation after a chunk of stage `before` to stage `after`, and [B]
        transfers of its gradient back."""
        layer = before.layers[chunk][1] - 1
        return (
            [self.transfer(before, after, layer, n) for n in sizes],
            [self.transfer(after, before, layer, n) for n in sizes],
        )


def bytes_by_division(kept: Sequence[Kept], total: str, replicated: str, gathered: str) -> Floats:
    """[3, L] bytes per sample of each layer, by how tensor ranks divide them.

    The three rows are the bytes that the ranks always divide, the bytes that they divide only where
    they divide tokens, and the part of the latter that they gather then.

    total, replicated, gathered: names of fields of `Kept`.
    """
    names = (total, replicated, gathered)
    rows = np.array([[getattr(layer, name) for layer in kept] for name in names], np.float64)
    total_bytes, replicated_bytes, gathered_bytes = rows
    return np.stack([total_bytes - replicated_bytes, replicated_bytes, gathered_bytes])


def prefix_sums(values: Iterable[float]) -> list[float]:
    """[n + 1] the sums of the first i of n values, for i from 0 to n."""
    return list(accumulate(values, initial=0.0))


def slope(sizes: Floats, seconds: Floats) -> Floats:
    """[2, L] seconds of each further sample beyond the largest of `sizes` [B].

    The slope of the last piece; where that is not positive, or there is one size only, the mean
    seconds of a sample at the largest size. seconds: [B, 2, L].
    """
    mean: Floats = seconds[-1] / sizes[-1]
    if len(sizes) == 1:
        return mean
    rise = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
    return np.asarray(np.where(rise > 0, rise, mean))
