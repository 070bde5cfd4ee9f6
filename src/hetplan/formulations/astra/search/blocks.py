"""Seconds of one block, embedding and head for every (tensor degree, micro-batch, sequence
parallelism) at hand.

The operators are the profiling layer's; sequence parallelism divides the ones that tensor
parallelism leaves whole (Korthikanti et al. 2022, Section 4.2.2). A measured profile replaces the
totals where it has a table; the part that selective recomputation repeats keeps its analytical
share.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hetplan.formulations.astra.search.efficiency import (
    EfficiencyModel,
    Floats,
    Work,
    compute_seconds,
)
from hetplan.formulations.astra.search.facts import ModelFacts
from hetplan.formulations.astra.search.pool import Offer
from hetplan.formulations.astra.search.table import Ints
from hetplan.profiling.operators import ELEMENT_BYTES, Elementwise, Layer, Matmul, Operator
from hetplan.profiling.profile import Profile
from hetplan.profiling.recomputation import CORE

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
