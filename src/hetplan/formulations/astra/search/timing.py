"""Seconds of operators, of messages, and of whole blocks, for every strategy at once.

Efficiencies eta in (0, 1] are the share of the theoretical rate that an operator reaches (Astra,
eq. 25-26): seconds = theta / (phi eta), theta FLOPs of a matrix product or bytes of anything else,
phi the datasheet's peak or bandwidth. A learned model implements `EfficiencyModel`; `Stated` gives
the profiling layer's constants, so that the search then prices an operator exactly as
`hetplan.profiling.times` does.

Ranks are numbered tensor first, then expert and data, pipeline last, as Megatron-LM does; a node
holds consecutive ranks. A group with stride s and size n stays inside a node when s n <= devices
per node; else each of the min(s, devices) groups that meet in a node gets an equal share of its
network.

The operators of a block are the profiling layer's; sequence parallelism divides the ones that
tensor parallelism leaves whole (Korthikanti et al. 2022, Section 4.2.2). A measured profile
replaces the totals where it has a table; the part that selective recomputation repeats keeps its
analytical share.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hetplan.errors import InputError
from hetplan.formulations.astra.search.facts import ModelFacts
from hetplan.formulations.astra.search.pool import Offer
from hetplan.formulations.astra.search.space import Ints
from hetplan.profiling.catalogue import DeviceSpec
from hetplan.profiling.operators import ELEMENT_BYTES, Elementwise, Layer, Matmul, Operator, Shape
from hetplan.profiling.precision import Precision
from hetplan.profiling.profile import Profile
from hetplan.profiling.recomputation import CORE
from hetplan.profiling.times import DEFAULT_EFFICIENCY, Efficiency, tiled_flops

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Work:
    """Operators as arrays [n]: count products of m x k by k x n (all 0: memory-bound), flops, bytes
    moved."""

    device: str
    spec: DeviceSpec
    precision: Precision
    count: Floats
    m: Floats
    k: Floats
    n: Floats
    flops: Floats
    moved_bytes: Floats


@dataclass(frozen=True)
class Traffic:
    """Collectives or messages as arrays [n]: bytes per rank, ranks; `kind` names the collective."""

    device: str
    kind: str
    size: Floats
    ranks: Floats
    between_nodes: Floats


class EfficiencyModel(Protocol):
    """What the pricing asks. Both answers have the shape of the arrays given, values in (0, 1]."""

    @property
    def launch_seconds(self) -> float:
        """Floor of a kernel, seconds (0 where the efficiencies include it)."""
        ...

    def computation(self, work: Work) -> Floats:
        """Of the peak (matrix products) or of the memory bandwidth (the rest)."""
        ...

    def communication(self, traffic: Traffic) -> Floats:
        """Of the link's bandwidth."""
        ...


@dataclass(frozen=True)
class Stated:
    """The constants of `hetplan.profiling.times` and a stated share of the links' bandwidth.

    links: 1.0, since cluster files carry what links reach. launch_seconds: floor per kernel, as
    there.
    """

    efficiency: Efficiency = DEFAULT_EFFICIENCY
    links: float = 1.0

    @property
    def launch_seconds(self) -> float:
        """Seconds per kernel launch."""
        return self.efficiency.launch_seconds

    def computation(self, work: Work) -> Floats:
        """Tile quantisation and the roofline make a matrix product's share; elsewhere it is
        `memory`."""
        e = self.efficiency
        padded = np.array([
            tiled_flops(Shape(*(int(v) for v in shape)), e.tile)
            for shape in zip(work.count, work.m, work.k, work.n, strict=True)
        ])  # fmt: skip
        memory_seconds = work.moved_bytes / (work.spec.memory_bytes_per_s * e.memory)
        peak = work.spec.peak_flops(work.precision, name=work.device)
        seconds = np.maximum(padded / (peak * e.matmul(work.precision)), memory_seconds)
        share = work.flops / (peak * np.where(seconds > 0, seconds, 1.0))
        return np.where(work.flops > 0, share, e.memory)

    def communication(self, traffic: Traffic) -> Floats:
        """The same for every size."""
        return np.full(traffic.size.shape, self.links)


def checked(shares: Floats, what: str) -> Floats:
    """`shares`, or InputError where a model answers outside of (0, 1]."""
    if not ((shares > 0) & (shares <= 1 + 1e-12)).all():
        worst = shares[~((shares > 0) & (shares <= 1 + 1e-12))][0]
        raise InputError(f"efficiency of {what}", got=float(worst), expected="a share in (0, 1]")
    return shares


def compute_seconds(work: Work, model: EfficiencyModel) -> Floats:
    """theta / (phi eta) of every operator, one pass (eq. 25)."""
    eta = checked(model.computation(work), "computation")
    products = work.flops > 0
    rate = np.where(
        products,
        work.spec.peak_flops(work.precision, name=work.device),
        work.spec.memory_bytes_per_s,
    )
    return np.asarray(np.where(products, work.flops, work.moved_bytes) / (rate * eta))


def transfer_seconds(traffic: Traffic, bandwidth: Floats, model: EfficiencyModel) -> Floats:
    """size / (bandwidth eta) (eq. 26); the collective's own factor is already in `size`."""
    return np.asarray(
        traffic.size / (bandwidth * checked(model.communication(traffic), "communication"))
    )


def ring_bandwidth(offer: Offer, stride: Ints, size: Ints) -> Floats:
    """Bytes/s of a ring over groups of that stride and size."""
    shared = offer.network / np.minimum(stride, offer.node_devices)
    return np.where(
        stride * size <= offer.node_devices, offer.intra, np.minimum(offer.intra, shared)
    )


def sender_bandwidth(offer: Offer, stride: Ints, size: Ints) -> Floats:
    """Bytes/s when every device of a node sends out of its group's reach at once (all-to-all, stage
    to stage)."""
    shared = np.full(np.shape(stride), min(offer.intra, offer.network / offer.node_devices))
    return np.where(stride * size <= offer.node_devices, offer.intra, shared)


def latency(offer: Offer, stride: Ints, size: Ints) -> Floats:
    """Seconds per message of such a group."""
    return np.where(stride * size <= offer.node_devices, offer.intra_latency, offer.network_latency)


def ring_seconds(
    offer: Offer,
    kind: str,
    size: Floats,
    stride: Ints,
    ranks: Ints,
    rounds: int,
    model: EfficiencyModel,
) -> Floats:
    """Ring collective on `size` bytes per rank: rounds (n - 1) (size / (n b eta) + a); an
    all-reduce has two rounds."""
    moved = rounds * (ranks - 1) / ranks * size
    inside = stride * ranks <= offer.node_devices
    traffic = Traffic(
        offer.name, kind, np.asarray(moved, float), ranks.astype(float), (~inside).astype(float)
    )
    seconds = transfer_seconds(traffic, ring_bandwidth(offer, stride, ranks), model)
    return np.asarray(seconds + rounds * (ranks - 1) * latency(offer, stride, ranks))


def message_seconds(
    offer: Offer, kind: str, size: Floats, stride: Ints, ranks: Ints, model: EfficiencyModel
) -> Floats:
    """One message (or an all-to-all's slice) of `size` bytes from every rank at once; 0 for groups
    of one."""
    inside = stride * ranks <= offer.node_devices
    traffic = Traffic(
        offer.name, kind, np.asarray(size, float), ranks.astype(float), (~inside).astype(float)
    )
    seconds = transfer_seconds(traffic, sender_bandwidth(offer, stride, ranks), model)
    return np.where(ranks > 1, seconds + latency(offer, stride, ranks), 0.0)


# Rows of `BlockSeconds.table`.
FORWARD, BACKWARD, CORE_FORWARD, PRODUCTS_FORWARD, PRODUCTS_BACKWARD, EMBEDDING, HEAD = range(7)


@dataclass(frozen=True)
class BlockSeconds:
    """table [7, keys] seconds: an average block's forward, backward, attention core forward, matrix
    products forward
    and backward; embedding and head, forward and backward together. of [R]: each row's key."""

    table: Floats
    of: Ints

    def row(self, figure: int) -> Floats:
        """One figure for every row of the strategy table [R]."""
        return np.asarray(self.table[figure][self.of])


def block_seconds(
    facts: ModelFacts,
    offer: Offer,
    model: EfficiencyModel,
    tensor: Ints,
    micro_batch: Ints,
    sequence_parallel: Ints,
    profile: Profile | None = None,
) -> BlockSeconds:
    """The seconds of all rows [R], each distinct combination computed once."""
    combined = (tensor * 2**20 + micro_batch) * 2 + sequence_parallel
    distinct, of = np.unique(combined, return_inverse=True)
    keys = [(int(v) >> 21, (int(v) >> 1) & (2**20 - 1), bool(int(v) & 1)) for v in distinct]
    # Equal blocks are timed once and weighted by how many there are.
    kinds = list(dict.fromkeys(block.operators for block in facts.blocks))
    share = [sum(b.operators == kind for b in facts.blocks) / facts.layers for kind in kinds]
    examples = [next(b for b in facts.blocks if b.operators == kind) for kind in kinds]
    table = np.zeros((7, len(keys)))
    if not keys:
        return BlockSeconds(table, of)
    for weight, block in zip(share, examples, strict=True):
        forward, backward, core, products, products_back = _layer(block, facts, offer, model, keys)
        table[:5] += weight * np.stack([forward, backward, core, products, products_back])
    for figure, layer in ((EMBEDDING, facts.first), (HEAD, facts.last)):
        forward, backward, *_ = _layer(layer, facts, offer, model, keys)
        table[figure] = forward + backward
    if profile is not None:
        _overwrite(table, keys, facts, offer, profile)
    return BlockSeconds(table, of)


def _layer(
    layer: Layer,
    facts: ModelFacts,
    offer: Offer,
    model: EfficiencyModel,
    keys: list[tuple[int, int, bool]],
) -> tuple[Floats, ...]:
    """(forward, backward, core forward, products forward, products backward) of one layer for all
    keys."""
    rows: list[list[float]] = []
    passes: list[float] = []  # backward over forward
    where: list[tuple[int, bool, bool]] = []  # key, core, product
    for number, (tensor, micro_batch, sequence_parallel) in enumerate(keys):
        for op in layer.operators:
            shared = (
                replace(op, split=True) if sequence_parallel and isinstance(op, Elementwise) else op
            )
            row, ratio = _operator(shared, micro_batch, tensor, facts)
            rows.append(row)
            passes.append(ratio)
            where.append((number, op.name in CORE, isinstance(op, Matmul)))
    count, m, k, n, flops, moved = np.array(rows).T
    work = Work(offer.name, offer.spec, facts.precision, count, m, k, n, flops, moved)
    seconds = compute_seconds(work, model)
    key, core, product = (np.array(column) for column in zip(*where, strict=True))
    back = seconds * np.array(passes)

    def total(values: Floats) -> Floats:
        return np.bincount(key, weights=values, minlength=len(keys)).astype(float)

    launches = len(layer.operators) * model.launch_seconds
    back_launches = sum(
        op.backward_products if isinstance(op, Matmul) else 1 for op in layer.operators
    )
    return (
        np.maximum(total(seconds), launches),
        np.maximum(total(back), back_launches * model.launch_seconds),
        total(seconds * core),
        total(seconds * product),
        total(back * product),
    )


def _operator(
    op: Operator, micro_batch: int, tensor: int, facts: ModelFacts
) -> tuple[list[float], float]:
    """([count, m, k, n, flops, bytes moved] forward, backward seconds per forward second)."""
    size = ELEMENT_BYTES[facts.precision]
    moved = op.moved(micro_batch, tensor)
    if isinstance(op, Matmul):
        shape = op.shape(micro_batch, tensor)
        row = [shape.count, shape.m, shape.k, shape.n, shape.flops, moved * size]
        return [float(v) for v in row], float(op.backward_products)
    back = op.moved_back(micro_batch, tensor)
    return [0.0, 0.0, 0.0, 0.0, 0.0, moved * size], back / moved if moved else 0.0


def _overwrite(
    table: Floats,
    keys: list[tuple[int, int, bool]],
    facts: ModelFacts,
    offer: Offer,
    profile: Profile,
) -> None:
    """Take totals from the profile's tables; parts of a block keep their shares."""
    chain = facts.model.layers
    inside = [i for i, layer in enumerate(chain) if layer in facts.blocks]
    for number, (tensor, micro_batch, _) in enumerate(keys):
        measured = profile.table(offer.name, tensor, micro_batch)
        if measured is None:
            continue
        forward = float(np.mean([measured.forward_seconds[i] for i in inside]))
        backward = float(np.mean([measured.backward_seconds[i] for i in inside]))
        scale = forward / table[FORWARD, number]
        table[[CORE_FORWARD, PRODUCTS_FORWARD], number] *= scale
        table[PRODUCTS_BACKWARD, number] *= backward / table[BACKWARD, number]
        table[FORWARD, number], table[BACKWARD, number] = forward, backward
        seconds = measured.seconds()
        table[EMBEDDING, number], table[HEAD, number] = seconds[0], seconds[-1]
