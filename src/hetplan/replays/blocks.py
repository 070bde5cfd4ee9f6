"""Seconds that the blocks of a model compute on one type of device, of one micro-batch."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from hetplan.profiling.models.operators import Layer, Matmul
from hetplan.profiling.models.transformer import Cut
from hetplan.profiling.profiles.profile import Profile
from hetplan.profiling.rates.times import CORE, Rates, layer_time, operator_time
from hetplan.replays.arrays import Floats
from hetplan.replays.assumptions import Assumptions
from hetplan.replays.facts import ModelFacts
from hetplan.replays.offers import Offer


class BlockSeconds(NamedTuple):
    """Seconds of computation on one rank, for one micro-batch."""

    forward: float  # of an average block
    backward: float  # of an average block
    core_forward: float  # of its attention core
    products_forward: float  # of its matrix products
    products_backward: float  # of its matrix products
    embedding: float  # forward and backward together
    head: float  # forward and backward together


class Pass(NamedTuple):
    """A rank's passes of a micro-batch."""

    tensor: int  # tensor-parallel degree
    micro_batch: int  # samples
    sequence_parallel: bool  # whether tensor ranks divide tokens between matrix products
    cut: Cut  # the rank's part of the model


def block_times(facts: ModelFacts, offer: Offer, assumed: Assumptions, of: Pass) -> BlockSeconds:
    """Seconds of an average block, and of embedding and head.

    `hetplan.profiling.rates.times` gives the seconds of operators. A measured profile replaces the
    totals of an uncut model where it has a table; parts of a block keep their shares of the total.
    """
    on_rank = facts.divided(of.cut)
    parts = np.zeros(5)
    for block, share in on_rank.different_blocks:
        parts += share * layer_parts(block, on_rank, offer, assumed, of)
    embedding = layer_parts(on_rank.embedding, on_rank, offer, assumed, of)
    head = layer_parts(on_rank.head, on_rank, offer, assumed, of)
    forward, backward, core, products, products_back = parts.tolist()
    predicted = BlockSeconds(
        forward=forward,
        backward=backward,
        core_forward=core,
        products_forward=products,
        products_backward=products_back,
        embedding=float(embedding[:2].sum()),  # forward and backward
        head=float(head[:2].sum()),
    )
    if assumed.profile is None:
        return predicted
    return measured(predicted, facts, offer, assumed.profile, of)


def layer_parts(
    layer: Layer, facts: ModelFacts, offer: Offer, assumed: Assumptions, of: Pass
) -> Floats:
    """[5] forward, backward, core forward, products forward, products backward of one layer."""
    learned = assumed.learned.get(offer.name)
    stack = replace(assumed.stack, sequence_parallel=of.sequence_parallel)
    rates = Rates(offer.name, offer.spec, facts.precision, stack)
    whole = layer_time(layer, rates, micro_batch=of.micro_batch, tensor=of.tensor, learned=learned)
    core_forward = products_forward = products_backward = 0.0
    for op in layer.operators:
        if not isinstance(op, Matmul) and op.name not in CORE:
            continue
        time = operator_time(op, rates, of.micro_batch, of.tensor)
        factor = learned.factor(op, of.micro_batch, of.tensor) if learned else 1.0
        if op.name in CORE:
            core_forward += factor * time.forward
        if isinstance(op, Matmul):
            products_forward += factor * time.forward
            products_backward += factor * time.backward
    return np.array(
        [whole.forward, whole.backward, core_forward, products_forward, products_backward]
    )


def measured(
    predicted: BlockSeconds, facts: ModelFacts, offer: Offer, profile: Profile, of: Pass
) -> BlockSeconds:
    """The same with the totals of the profile's table, where it has one."""
    table = profile.table(offer.name, of.tensor, of.micro_batch)
    if table is None or of.cut != Cut():
        return predicted
    blocks = [i for i, layer in enumerate(facts.model.layers) if layer in facts.blocks]
    forward = mean_of(table.forward_seconds, blocks)
    backward = mean_of(table.backward_seconds, blocks)
    slower_forward, slower_backward = forward / predicted.forward, backward / predicted.backward
    seconds = table.layer_seconds()
    return BlockSeconds(
        forward=forward,
        backward=backward,
        core_forward=predicted.core_forward * slower_forward,
        products_forward=predicted.products_forward * slower_forward,
        products_backward=predicted.products_backward * slower_backward,
        embedding=float(seconds[0]),
        head=float(seconds[-1]),
    )


def mean_of(seconds: Sequence[float], layers: Sequence[int]) -> float:
    """The mean over some layers."""
    return float(np.mean([seconds[layer] for layer in layers]))
