"""What the parts of a plan cost on the devices of `ReplayData`: passes, transfers, rings, updates;
seconds and bytes.

A stage with tensor ranks sends each activation once over the network (scatter-gather, Narayanan et
al. 2021 (SC), Section 4.1), in parts.
"""

import math
from collections.abc import Iterable, Sequence
from functools import cache, cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from hetplan.errors import require
from hetplan.plans.degrees import Degrees
from hetplan.plans.plan import Recomputation, Stage
from hetplan.plans.shares import split
from hetplan.profiling.rates.efficiency import LearnedLinks
from hetplan.profiling.rates.times import together
from hetplan.replays.arrays import Floats
from hetplan.replays.data import Kept, ReplayData
from hetplan.replays.links import MOST_KEPT, Links
from hetplan.replays.memory import Passes, on_a_rank
from hetplan.replays.overlap import uncovered
from hetplan.replays.simulator.tasks import Traffic
from hetplan.replays.updates import UPDATE_BYTES
from hetplan.schema import Range

# The forward pass's all-reduces in the backward pass: their scattered halves are kept by operator.
REPEATED_REDUCES = {"full": 2.0, "operators": 1.5}

Sizes = tuple[int, ...]


class StageSeconds(NamedTuple):
    """Of every chunk c and every size b of a micro-batch. passes [C][B]: (forward, backward)
    seconds without what tensor ranks reduce; reduces [2][C][B]: that, forward and backward;
    saved_bytes [C][B]: what the fullest device keeps."""

    passes: list[list[tuple[float, float]]]
    reduces: list[list[list[Traffic]]]
    saved_bytes: list[list[float]]


class StageBytes(NamedTuple):
    """passes: what a stage's passes keep. weights, largest: bytes of its weights, and of its
    largest layer."""

    passes: Passes[float]
    weights: float
    largest: float


class Costs(Links):
    """Costs on the devices of one instance under one mode of recomputation; repeated questions are
    answered from memory. links: learned efficiency of messages and collectives; None: they reach
    the links' bandwidths.

    kind [D]: the type of each device.
    context: so many row groups of a stage take every sample together, each with its part of the
    tokens, of which bytes and seconds are then; 1: they share the samples.
    expert_sums [L + 1]: of `param_sums`, what belongs to experts that are spread over ranks.
    degrees: further ones that these costs are of.
    """

    context = 1
    degrees: Degrees | None = None

    def __init__(
        self,
        data: ReplayData,
        recomputation: Recomputation = "none",
        links: LearnedLinks | None = None,
    ) -> None:
        super().__init__(data, links)
        self.mode = recomputation
        self.kind = [kind for kind, _ in data.devices]
        self.layer_seconds = cache(self._layer_seconds)
        self._summed = cache(self._sums)
        self._table = cache(self._points)
        self.stage_seconds = lru_cache(MOST_KEPT)(self._stage_seconds)
        self.stage_bytes = lru_cache(MOST_KEPT)(self._stage_bytes)
        self.stage_update_seconds = lru_cache(MOST_KEPT)(self._stage_update_seconds)
        self.hop = lru_cache(MOST_KEPT)(self._hop)
        self._tensor_bytes = summed(layer.tensor_bytes for layer in data.layers)
        self.param_sums = summed(layer.param_bytes for layer in data.layers)
        self.expert_sums = [0.0] * len(self.param_sums)
        self.tied = [l for l, layer in enumerate(data.layers) if layer.tied_param_bytes]
        kept = [layer.kept[recomputation] for layer in data.layers]
        self._saved = kept_parts(kept, "saved_bytes", "replicated_saved_bytes", "gathered_bytes")
        self._working = kept_parts(
            kept, "working_bytes", "replicated_working_bytes", "gathered_working_bytes"
        )

    def gradient_bytes(self, param_bytes: float) -> float:
        """What replicas exchange of the gradients of so many bytes of weights."""
        return param_bytes / self.data.element_bytes * self.data.gradient_bytes

    def _layer_seconds(self, kind: str, tensor: int, rows: int) -> Floats:
        """[4, L] forward and backward seconds of `rows` samples on one device of a tensor group of
        that type, and what the host takes of them.

        Straight lines between the profile's micro-batches; below the first its time, beyond the
        last the last piece's slope.
        Recomputation is part of the backward pass. Without a table of the degree, an even part of
        one device's.
        """
        if rows == 0:
            return np.zeros((4, len(self.data.layers)))
        sizes, seconds = self._table(kind, tensor)
        after = int(np.searchsorted(sizes, rows))
        if after == len(sizes):
            beyond = (rows - sizes[-1]) * slope(sizes, seconds[:, :2])
            return np.asarray(seconds[-1] + np.concatenate([beyond, np.zeros_like(beyond)]))
        if sizes[after] == rows or after == 0:
            return np.asarray(seconds[after])
        share = (rows - sizes[after - 1]) / (sizes[after] - sizes[after - 1])
        return np.asarray(seconds[after - 1] + share * (seconds[after] - seconds[after - 1]))

    def _points(self, kind: str, tensor: int) -> tuple[Floats, Floats]:
        """(micro-batches [B], seconds [B, 4, L] as in `layer_seconds`)."""
        of_kind = [table for table in self.data.tables if table.type == kind]
        degree = tensor if any(table.tensor == tensor for table in of_kind) else 1
        tables = sorted(
            (table for table in of_kind if table.tensor == degree), key=lambda t: t.micro_batch
        )
        require(
            tables,
            f"no times of {kind} at tensor degree 1",
            where=f"tables of {self.data.model}",
        )
        rows = np.array(
            [
                (
                    t.forward_seconds,
                    t.backward_seconds,
                    t.forward_host_seconds,
                    t.backward_host_seconds,
                )
                for t in tables
            ]
        )
        if self.mode != "none":
            again = np.array([table.repeated[self.mode] for table in tables])
            rows[:, 1] += again * rows[:, 0]
            rows[:, 3] += again * rows[:, 2]
        return np.array([table.micro_batch for table in tables], float), rows / (tensor / degree)

    def passes(self, stage: Stage, layers: Range, samples: int) -> tuple[float, float]:
        """(forward, backward) seconds of one micro-batch on a stage: its slowest device's, without
        what tensor ranks do together."""
        forward, backward, _, _ = self._slowest(stage, layers, samples)
        return forward, backward

    def _slowest(self, stage: Stage, layers: Range, samples: int) -> list[float]:
        """Seconds as in `layer_seconds` of the row group that takes longest."""
        (first, last), even = layers, len(set(stage.tensor_shares)) == 1
        if len(stage.devices) == 1 and even:
            kinds = {self.kind[rank] for rank in stage.devices[0]}
            if len(kinds) == 1:
                of_kind = self._summed(kinds.pop(), len(stage.devices[0]), samples)
                return [column[last] - column[first] for column in of_kind]
        slowest = [0.0] * 4
        for group, rows in zip(stage.devices, self.rows(stage, samples), strict=True):
            of_group = [0.0] * 4
            for rank, share in zip(group, stage.tensor_shares, strict=True):
                sums = self._summed(self.kind[rank], len(group) if even else 1, rows)
                scale = 1.0 if even else share / sum(stage.tensor_shares)
                of_group = [
                    max(most, scale * (column[last] - column[first]))
                    for most, column in zip(of_group, sums, strict=True)
                ]
            slowest = max(slowest, of_group, key=lambda seconds: seconds[0] + seconds[1])
        return slowest

    def _sums(self, kind: str, tensor: int, rows: int) -> list[list[float]]:
        """`layer_seconds`, added up from the first layer on: [4][L + 1]."""
        return [summed(row) for row in self.layer_seconds(kind, tensor, rows).tolist()]

    def rows(self, stage: Stage, samples: int) -> list[int]:
        """Samples of a micro-batch on each row group of a stage."""
        return (
            [samples]
            if len(stage.devices) == 1
            else [end - begin for begin, end in split(samples * self.context, stage.row_shares)]
        )

    def reduces(self, stage: Stage, layers: Range, samples: int) -> tuple[Traffic, Traffic]:
        """What the all-reduces of the stage's tensor groups add to the forward and the backward
        pass of a micro-batch; a full recomputation repeats the forward pass's, and one by operator
        its gathers. They keep the device busy, not the host."""
        size = self._tensor_bytes[layers[1]] - self._tensor_bytes[layers[0]]
        if len(stage.tensor_shares) == 1 or size == 0:
            return Traffic(), Traffic()
        ring = self.ring(stage.devices, [size * rows for rows in self.rows(stage, samples)])
        forward, backward, forward_host, backward_host = self._slowest(stage, layers, samples)
        again = REPEATED_REDUCES.get(self.mode, 1.0)
        there = self._beside_reduces(forward, forward_host, ring.seconds / 2)
        back = self._beside_reduces(backward, backward_host, ring.seconds / 2 * again)
        return ring._replace(seconds=there), ring._replace(seconds=back)

    def _beside_reduces(self, seconds: float, host: float, reduces: float) -> float:
        """Seconds that all-reduces add to a pass of `seconds`, of which the host takes `host`."""
        device = math.sqrt(max(seconds * seconds - host * host, 0.0))
        window = device if self.data.hidden_reduces else 0.0
        busy = device + float(uncovered(reduces, window))
        whole = float(together(np.array(busy), np.array(host)))
        return max(whole - seconds, 0.0)

    def transfer(self, here: Stage, there: Stage, layer: int, samples: int) -> Traffic:
        """One micro-batch's activation after `layer` (or its gradient), in the order of rows."""
        size = self.data.layers[layer].activation_bytes
        sends, takes = (split(samples * self.context, s.row_shares) for s in (here, there))
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

    def update_seconds(self, device: int, param_bytes: float) -> float:
        """The optimizer's step on `param_bytes` of weights: memory-bound."""
        moved = param_bytes / self.data.element_bytes * UPDATE_BYTES
        return self.data.types[self.kind[device]].update.move_seconds(moved)

    @cached_property
    def inputs(self) -> tuple[float, ...]:
        """[L] bytes per sample of each layer's input (of the first: nothing that needs keeping)."""
        return (0.0, *(layer.activation_bytes for layer in self.data.layers[:-1]))

    def saved_bytes(self, layers: Range, tensor: int) -> float:
        """Bytes per sample that each device of a stage keeps from forward to backward."""
        return float(self._on_a_rank(self._saved, layers, tensor).sum())

    def working_bytes(self, layers: Range, tensor: int) -> float:
        """Bytes per sample that one layer needs beside while it is computed again."""
        return float(self._on_a_rank(self._working, layers, tensor).max())

    def _on_a_rank(self, parts: Floats, layers: Range, tensor: int) -> Floats:
        """[layers] bytes per sample on each tensor rank; parts: of `kept_parts`."""
        split, whole, gathered = parts[:, layers[0] : layers[1]]
        divided = self.data.framework.sequence_parallel
        return on_a_rank(split, whole, gathered, tensor, divided)

    def passes_bytes(self, layers: Sequence[Range], tensor: int) -> Passes[float]:
        """What the passes of a stage on a tensor group keep. layers: one range per model chunk."""
        data, framework = self.data, self.data.framework
        head = layers[-1][1] == len(data.layers)
        loss = framework.loss_bytes(data.logit_elements, data.logit_bytes, tensor)
        boundary = max(
            max(self.inputs[first], data.layers[end - 1].activation_bytes) for first, end in layers
        )
        return Passes(
            saved=sum(self.saved_bytes(chunk, tensor) for chunk in layers),
            working=max(self.working_bytes(chunk, tensor) for chunk in layers),
            logits=head * data.logit_bytes / tensor,
            loss=head * loss,
            boundary=boundary / (tensor if framework.sequence_parallel else 1),
        )

    def _stage_bytes(
        self, layers: tuple[Range, ...], tensor: int, copied: tuple[tuple[int, float], ...]
    ) -> StageBytes:
        """What a stage on a tensor group holds. copied: (layer, bytes) of weights that its layers
        copy from others."""
        copies = dict(copied)
        each = [
            self.data.layers[l].param_bytes + copies.get(l, 0.0)
            for first, last in layers
            for l in range(first, last)
        ]
        return StageBytes(self.passes_bytes(layers, tensor), sum(each), max(each))

    def _stage_update_seconds(
        self, stage: Stage, shares: tuple[float, ...], copied: tuple[tuple[int, float], ...]
    ) -> float:
        """The optimizer's step on the slowest device of a stage. shares: of the states of its part
        of the weights that each device has. copied: see `stage_bytes`."""
        sums = self.param_sums
        own = sum(sums[last] - sums[first] for first, last in stage.layers)
        held = own + sum(size for _, size in copied)
        each = zip(stage.all_devices, stage.parts, shares, strict=True)
        return max(self.update_seconds(device, held * part * share) for device, part, share in each)

    def _stage_seconds(self, stage: Stage, sizes: Sizes) -> StageSeconds:
        """Passes of a stage. sizes [B]: samples of micro-batches."""
        tensor = len(stage.tensor_shares)
        fullest = self.context * max(stage.row_shares) / sum(stage.row_shares)
        passes, forward, backward, saved = [], [], [], []
        for chunk in stage.layers:
            both = [self.reduces(stage, chunk, n) for n in sizes]
            forward.append([there for there, _ in both])
            backward.append([back for _, back in both])
            passes.append([self.passes(stage, chunk, n) for n in sizes])
            each = self.saved_bytes(chunk, tensor)
            saved.append([math.ceil(n * fullest) * each for n in sizes])
        return StageSeconds(passes, [forward, backward], saved)

    def _hop(
        self, here: Stage, there: Stage, chunk: int, sizes: Sizes
    ) -> tuple[list[Traffic], list[Traffic]]:
        """Transfers [B] behind a chunk of stage `here`: to stage `there`, and back."""
        layer = here.layers[chunk][1] - 1
        return (
            [self.transfer(here, there, layer, n) for n in sizes],
            [self.transfer(there, here, layer, n) for n in sizes],
        )


def kept_parts(kept: Sequence[Kept], everything: str, replicated: str, gathered: str) -> Floats:
    """[3, L] bytes per sample of each layer: that tensor ranks divide, that they divide only with
    tokens, and what of the latter they gather. The names are fields of `Kept`."""
    rows = [[getattr(layer, name) for layer in kept] for name in (everything, replicated, gathered)]
    all_of_it, whole, again = np.array(rows, dtype=np.float64)
    return np.stack([all_of_it - whole, whole, again])


def summed(values: Iterable[float]) -> list[float]:
    """Added up from the first on, beginning with 0."""
    return list(accumulate(values, initial=0.0))


def slope(sizes: Floats, seconds: Floats) -> Floats:
    """[2, L] seconds per further sample beyond the last of `sizes` [B], `seconds` [B, 2, L]; the
    last one's speed where times do not grow."""
    speed: Floats = seconds[-1] / sizes[-1]
    if len(sizes) == 1:
        return speed
    rise = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
    return np.asarray(np.where(rise > 0, rise, speed))
