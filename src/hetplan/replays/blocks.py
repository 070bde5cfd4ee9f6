"""Seconds that one rank computes for one micro-batch: a block, the embedding and the head."""

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

    forward: float  # forward pass of an average block
    backward: float  # backward pass of an average block
    core_forward: float  # forward pass of its attention core
    products_forward: float  # forward pass of its matrix products
    products_backward: float  # backward pass of its matrix products
    embedding: float  # forward and backward together
    head: float  # forward and backward together


class Pass(NamedTuple):
    """The forward and backward pass of one micro-batch on one rank."""

    tensor: int  # tensor-parallel degree
    micro_batch: int  # samples
    sequence_parallel: bool  # whether tensor ranks divide tokens between matrix products
    cut: Cut  # the rank's part of the model


def block_times(
    facts: ModelFacts, offer: Offer, assumed: Assumptions, rank_pass: Pass
) -> BlockSeconds:
    """Seconds of an average block, of the embedding and of the head on a device of type `offer`.

    `hetplan.profiling.rates.times` predicts the seconds of operators. Where the assumed profile has
    a table of an uncut model, its seconds of layers replace the predicted ones. The parts of a
    block keep their shares of the block's seconds.
    """
    on_rank = facts.divided(rank_pass.cut)
    parts = np.zeros(5)  # those of `layer_parts`
    for block, share in on_rank.different_blocks:
        parts += share * layer_parts(block, on_rank, offer, assumed, rank_pass)
    embedding = layer_parts(on_rank.embedding, on_rank, offer, assumed, rank_pass)
    head = layer_parts(on_rank.head, on_rank, offer, assumed, rank_pass)
    forward, backward, core, products, products_back = parts.tolist()
    predicted = BlockSeconds(
        forward=forward,
        backward=backward,
        core_forward=core,
        products_forward=products,
        products_backward=products_back,
        embedding=float(embedding[:2].sum()),  # the first two parts: forward and backward
        head=float(head[:2].sum()),
    )
    if assumed.profile is None:
        return predicted
    return measured(predicted, facts, offer, assumed.profile, rank_pass)


def layer_parts(
    layer: Layer, facts: ModelFacts, offer: Offer, assumed: Assumptions, rank_pass: Pass
) -> Floats:
    """[5] predicted seconds of one layer: its forward and its backward pass, the forward pass of
    attention's core, and the matrix products of the forward and of the backward pass."""
    micro_batch, tensor = rank_pass.micro_batch, rank_pass.tensor
    learned = assumed.learned.get(offer.name)
    stack = replace(assumed.stack, sequence_parallel=rank_pass.sequence_parallel)
    rates = Rates(offer.name, offer.spec, facts.precision, stack)
    whole = layer_time(layer, rates, micro_batch=micro_batch, tensor=tensor, learned=learned)
    core_forward = products_forward = products_backward = 0.0
    for op in layer.operators:
        if not isinstance(op, Matmul) and op.name not in CORE:
            continue
        time = operator_time(op, rates, micro_batch, tensor)
        factor = learned.factor(op, micro_batch, tensor) if learned else 1.0
        if op.name in CORE:
            core_forward += factor * time.forward
        if isinstance(op, Matmul):
            products_forward += factor * time.forward
            products_backward += factor * time.backward
    return np.array(
        [whole.forward, whole.backward, core_forward, products_forward, products_backward]
    )


def measured(
    predicted: BlockSeconds, facts: ModelFacts, offer: Offer, profile: Profile, rank_pass: Pass
) -> BlockSeconds:
    """The seconds of the profile's table, with a block's parts in proportion to the predicted ones.

    Returns `predicted` where the profile has no table of the pass, and where the model is cut,
    because a profile's tables are of whole models.
    """
    table = profile.table(offer.name, rank_pass.tensor, rank_pass.micro_batch)
    if table is None or rank_pass.cut != Cut():
        return predicted
    block_layers = [l for l, layer in enumerate(facts.model.layers) if layer in facts.blocks]
    forward = mean_of(table.forward_seconds, block_layers)
    backward = mean_of(table.backward_seconds, block_layers)
    slower_forward = forward / predicted.forward
    slower_backward = backward / predicted.backward
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
    """The mean of the seconds [L] over the given layers."""
    return float(np.mean([seconds[layer] for layer in layers]))
