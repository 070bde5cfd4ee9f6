"""Exchanges of a block: each collective against a value worked by hand on a link of one second per
byte, numbers against arrays, and all of them against the plain replay."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest

from hetplan.profiling.models.model import load_model
from hetplan.profiling.models.transformer import Experts
from hetplan.profiling.models.zoo import llama, text_model
from hetplan.replays.arrays import Floats, Numbers
from hetplan.replays.assumptions import Assumptions
from hetplan.replays.exchanges import (
    BlockExchanges,
    Shared,
    crossing_seconds,
    dispatched_copies,
    expert_seconds,
    heads_seconds,
    ring_seconds,
    shard_seconds,
    tensor_seconds,
)
from hetplan.replays.facts import model_facts
from hetplan.replays.groups import group_seconds
from hetplan.replays.offers import offer_of
from hetplan.replays.ranks import Ranks, own_shards

exactly = partial(pytest.approx, rel=1e-12)
FACTORS = {"send": 1.0, "all-gather": 10.0, "all-reduce": 100.0, "all-to-all": 1000.0}


def link(operation: str, size: Numbers, stride: Numbers, ranks: Numbers) -> Floats:
    """A byte takes a second in a message, ten in an all-gather, …; a stride costs a second for each
    of its ranks, and a group of one takes nothing."""
    seconds = size * FACTORS[operation] + stride
    return np.asarray(np.where(np.greater(ranks, 1), seconds, 0.0))


def test_each_collective_by_hand() -> None:
    # two all-to-alls of 3 bytes among 4 ranks that are 2 apart
    assert expert_seconds(link, 3.0, 4, 2) == exactly(2 * (3000 + 2))
    assert expert_seconds(link, 3.0, 1, 2) == 0.0
    # three messages of 5 bytes round 4 ranks
    assert ring_seconds(link, 5.0, 4, 2) == exactly(3 * (5 + 2))
    # queries, keys, values and outputs, a quarter of 8 bytes each
    assert heads_seconds(link, 8.0, 4, 2) == exactly(4 * (2000 + 2))
    assert tensor_seconds(link, 7.0, 2, 4, False) == exactly(2 * (700 + 1))
    assert tensor_seconds(link, 7.0, 2, 4, True) == exactly(4 * (70 + 1))
    # 6 dense parameters over ranks that are 2 apart, 5 of experts over ranks that are 4 apart
    shared = [Shared(6.0, 2, 8), Shared(5.0, 4, 4)]
    assert shard_seconds(link, shared, 2) == exactly(120 + 2 + 100 + 4)
    # there and back
    assert crossing_seconds(link, 9.0, 8, 2) == exactly(2 * (9 + 8))
    assert crossing_seconds(link, 9.0, 8, 1) == 0.0


def test_who_holds_the_same() -> None:
    """Of 2 x 4 x 3 ranks, in two groups of shards; experts over 2 x 2 ranks."""
    ranks = Ranks(tensor=2, context=4, data=3, expert=2, expert_tensor=2, shard_groups=2)
    assert (ranks.sharing, ranks.expert_ranks, ranks.expert_sharing) == (6, 4, 3)
    assert own_shards(12.0, 6.0, ranks.sharing, ranks.expert_sharing) == 2 + 2


def exchanges(ranks: Ranks[Any], rows: Any, **flags: Any) -> BlockExchanges[Any]:
    """Of a block with four experts, two of which every one of 8 tokens visits."""
    shape = llama(2, 16, 4, 32, kv_heads=2, experts=Experts(count=4, active=2))
    facts = model_facts(load_model(text_model("little", "test", 8, shape)))
    given = {"sequence_parallel": False, "all_to_all": False, "fully_sharded": False} | flags
    return BlockExchanges(facts, link, ranks, rows, **given)


def test_a_dispatcher_sends_one_copy_to_each_place() -> None:
    """Four experts are on four ranks, and a token visits two of them: 4 (1 - (3/4)^2) = 7/4 ranks
    of one node, or 2 (1 - (1/2)^2) = 3/2 of two nodes. DeepSeek's eight experts on four nodes: 3.6
    copies. On one rank there is one copy, and a token that visits one expert is sent once."""
    assert dispatched_copies(2, 4, 1, 8) == pytest.approx(7 / 4)
    assert dispatched_copies(2, 4, 2, 4) == pytest.approx(3 / 2)
    assert dispatched_copies(8, 32, 1, 8) == pytest.approx(3.6, abs=0.01)
    assert dispatched_copies(8, 1, 1, 8) == 1
    assert dispatched_copies(1, np.array([2, 64]), 1, 8) == pytest.approx([1, 1])


def test_one_copy_of_a_token_takes_its_part_of_the_seconds() -> None:
    ranks = Ranks(tensor=1, context=1, data=4, expert=4, expert_tensor=1, shard_groups=1)
    size = exchanges(ranks, 3.0).facts.dispatched_bytes * 3.0
    each, once = (exchanges(ranks, 3.0, one_copy_in=n).experts for n in (None, 4))
    assert each == exactly(2 * link("all-to-all", size, 1, 4))
    assert once == exactly(2 * link("all-to-all", size * 7 / 8, 1, 4))


def test_sizes_of_a_block_by_hand() -> None:
    """Three rows on a rank of 8 tokens, 16 wide in 16 bits; heads of 4."""
    ranks = Ranks(tensor=2, context=2, data=4, expert=4, expert_tensor=2, shard_groups=1)
    one = exchanges(ranks, 3.0)
    tokens = 3 * 8
    assert one.experts == exactly(2 * (1000 * tokens * 2 * 16 * 2 + 2))
    assert one.ring == exactly(tokens * 2 * (4 + 4) * 2 / 2 + 2)  # two key heads
    four = tokens * (4 + 2) * (4 + 4) * 2 / 2
    assert one.heads == exactly(4 * (1000 * four / 4 + 2))
    assert [float(seconds) for seconds in one.shards] == [0.0, 0.0]
    # ranks that divide tokens dispatch half of them each
    half = 2 * (1000 * tokens * 16 * 2 + 2)
    assert exchanges(ranks, 3.0, sequence_parallel=True).experts == exactly(half)
    whole = Ranks(tensor=2, context=2, data=4, expert=4, expert_tensor=1, shard_groups=1)
    assert exchanges(whole, 3.0).experts == exactly(half - 2)
    sharded = exchanges(ranks, 3.0, fully_sharded=True)
    experts = 4 * 3 * 16 * 32 / (4 * 2)
    dense = (sharded.facts.block_params - 4 * 3 * 16 * 32) / 2
    assert sharded.expert_params == experts and sharded.dense_params == dense
    # 8 ranks share dense weights of 2 bytes, 2 ranks those of experts, 8 apart
    gather, scatter = sharded.shards
    assert gather == scatter == exactly(20 * (dense + experts) + 2 + 8)


def test_what_a_block_waits_for_by_hand() -> None:
    """Half of what hides is spent: a ring behind attention's core, shards behind the pass."""
    ranks = Ranks(tensor=1, context=2, data=2, expert=2, expert_tensor=1, shard_groups=1)
    one = exchanges(ranks, 1.0)
    ring, experts = float(one.ring), float(one.experts)
    core = ring / 4
    there, back = one.waits(1.0, 2.0, core)
    assert there == exactly(experts + ring - core / 2)
    assert back == exactly(experts + 2 * ring - core)
    there, back = exchanges(ranks, 1.0, all_to_all=True).waits(1.0, 2.0, core)
    assert there == back == exactly(experts + float(one.heads))
    sharded = exchanges(ranks, 1.0, fully_sharded=True)
    gather, scatter = map(float, sharded.shards)
    longer = sharded.waits(gather / 2, 10 * (gather + scatter), core)
    assert longer[0] - one.waits(1.0, 2.0, core)[0] == exactly(gather - gather / 4)
    expected = (gather + scatter) / 2
    assert longer[1] - one.waits(1.0, 2.0, core)[1] == exactly(expected)


def test_stages_that_keep_gathered_weights_gather_once_per_iteration() -> None:
    """Over eight micro-batches: an eighth of the gather forward, none of it backward."""
    ranks = Ranks(1, 1, 8, 1, 1, 1)
    every = replace(exchanges(ranks, 2.0), fully_sharded=True)
    once = replace(every, kept_for=8)
    gather, scatter = (float(seconds) for seconds in every.shards)
    none = [float(wait) for wait in replace(every, fully_sharded=False).waits(0.0, 0.0, 0.0)]
    assert [float(wait) for wait in every.waits(0.0, 0.0, 0.0)] == exactly(
        [none[0] + gather, none[1] + gather + scatter]
    )
    assert [float(wait) for wait in once.waits(0.0, 0.0, 0.0)] == exactly(
        [none[0] + gather / 8, none[1] + scatter / 8]
    )
    both = replace(every, kept_for=np.array([0, 8])).waits(0.0, 0.0, 0.0)
    assert both[0].tolist() == exactly([none[0] + gather, none[0] + gather / 8])


def test_exchanges_with_experts_hide_behind_another_micro_batch() -> None:
    """Half of what fits behind the block's computation is spent after all."""
    shown = exchanges(Ranks(1, 1, 4, 4, 1, 1), 2.0)
    hidden = replace(shown, hidden_experts=True)
    experts = float(shown.experts)
    assert experts > 0
    forward, backward = hidden.waits(experts / 4, 2 * experts, 0.0)
    assert float(forward) == exactly(experts - experts / 8)
    assert float(backward) == exactly(experts / 2)
    assert [float(wait) for wait in shown.waits(experts / 4, 2 * experts, 0.0)] == [experts] * 2


def test_arrays_are_many_numbers_at_once() -> None:
    """A grid of degrees on real links, as one array and one after the other."""
    grid = np.array(list(product((1, 2, 4), (1, 2), (2, 8), (1, 2), (1, 2), (1, 2))))
    tensor, context, data, expert, flag, groups = grid.T
    ranks = Ranks(tensor, context, data, expert, np.where(flag == 2, tensor, 1), groups)
    offer = offer_of("A800", 64)

    def together(operation: str, size: Numbers, stride: Numbers, ranks: Numbers) -> Floats:
        return group_seconds(offer, Assumptions(), operation, size, stride, ranks)

    def waits(ranks: Ranks[Any], rows: Any, flag: Any) -> tuple[Floats, Floats]:
        facts = exchanges(ranks, rows).facts
        given = (flag == 1, flag == 2, flag == 1)
        return BlockExchanges(facts, together, ranks, rows, *given).waits(1e-4, 2e-4, 1e-5)

    many = waits(ranks, 3.0 / context, flag)
    for r, row in enumerate(grid.tolist()):
        t, c, d, e, f, g = row
        one = waits(Ranks(t, c, d, e, t if f == 2 else 1, g), 3.0 / c, f)
        assert [float(x) for x in one] == exactly([x[r] for x in many]), row
    assert len(np.unique(many[0])) > 30


@pytest.mark.parametrize("operation", FACTORS)
def test_a_group_of_one_takes_no_time(operation: str) -> None:
    assert group_seconds(offer_of("A800", 64), Assumptions(), operation, 1e9, 4, 1) == 0.0
