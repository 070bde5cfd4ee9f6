"""The strategy table against a plain product; order and Pareto set."""

from __future__ import annotations

import math
from itertools import product
from random import Random
from typing import Any

import numpy as np
from hypothesis import given, settings, strategies as st

from astra.cases import COLUMNS, GPT, LLAMA, SMALL, table_of
from hetplan.formulations.astra.search.result import best_under, pareto, ranking, tied
from hetplan.formulations.astra.search.rules import default_rules
from hetplan.formulations.astra.search.space import Space, strategies
from hetplan.profiling.models.model import load_model
from hetplan.replays.facts import model_facts
from present import present


def plain_product(space: Space, gpus: int, global_batch: int, layers: int) -> list[dict[str, Any]]:
    """Table 3's product for GPT-2 by nested loops, rules as Python conditions."""
    found = []
    for pp, tp, mbs in product(space.pipeline or (), space.tensor or (), space.micro_batch):
        if gpus % (pp * tp) or layers % pp or 12 % tp:
            continue
        dp = gpus // pp // tp
        if global_batch % (mbs * dp) or dp == 0:
            continue
        gas, stage = global_batch // mbs // dp, layers // pp
        kept: list[tuple[str | None, str | None, int | None]] = [
            (None, None, None)
        ]  # GPT-2 here has standard attention: selective stays
        kept += [("selective", None, None)]
        kept += [("full", m, r) for m in ("block", "uniform") for r in range(1, stage + 1)]
        kept += [("hybrid", "block", r) for r in range(1, stage + 1)]
        for v, (g, m, r), sp, do, off in product(
            [None, *range(1, pp + 1)], kept, (False, True), (False, True), (False, True)
        ):
            if r is not None and r > pp:
                continue
            if v is not None and (pp == 1 or v > stage or stage % v or stage // v < 2 or gas % pp):
                continue
            if v is not None and r is not None and r > v:
                continue
            if sp and tp == 1:
                continue
            found.append(
                {
                    "pp": pp,
                    "tp": tp,
                    "mbs": mbs,
                    "v": v,
                    "g": g,
                    "m": m,
                    "r": r,
                    "sp": sp,
                    "do": do,
                    "off": off,
                }
            )
    return found


def test_table_is_the_product_less_the_rules() -> None:
    table = table_of(GPT, 24, SMALL)
    expected = plain_product(SMALL, 24, 256, 12)
    keys = {
        "pp": "pipeline_model_parallel_size",
        "tp": "tensor_model_parallel_size",
        "mbs": "micro_batch_size",
        "v": "num_layers_per_virtual_pipeline_stage",
        "g": "recompute_granularity",
        "m": "recompute_method",
        "r": "recompute_num_layers",
        "sp": "sequence_parallel",
        "do": "use_distributed_optimizer",
        "off": "no_overlap_offload_optimizer",
    }
    rows = [table.row(i) for i in range(table.rows)]
    got = {tuple(str(row[name]) for name in keys.values()) for row in rows}
    assert got == {tuple(str(e[short]) for short in keys) for e in expected}
    assert len(got) == table.rows == len(expected) > 100


def test_overlap_of_gradients_and_of_weights_is_on_as_the_space_says() -> None:
    for reduces, gathers, overlap in product((False, True), repeat=3):
        space = Space(
            pipeline=(2,),
            tensor=(2,),
            micro_batch=(1,),
            overlap=overlap,
            overlap_grad_reduce=reduces,
            overlap_param_gather=gathers,
        )
        columns = table_of(GPT, space=space).columns
        assert len(columns["overlap_grad_reduce"])
        assert set(columns["overlap_grad_reduce"]) == {int(overlap and reduces)}
        sharded = columns["use_distributed_optimizer"]
        expected = sharded if overlap and gathers else np.zeros_like(sharded)
        assert np.array_equal(columns["overlap_param_gather"], expected)
        # what tensor ranks exchange is not changed by either
        assert columns["tp_comm_overlap"].any() == overlap


def test_flash_attention_rule_of_the_paper_bites() -> None:
    # fused attention: no selective
    assert (table_of(LLAMA).columns["recompute_granularity"] != 0).all()
    assert (table_of(GPT, 24, SMALL).columns["recompute_granularity"] == 0).any()


def test_experts_bring_expert_parallelism() -> None:
    facts = model_facts(load_model("bert-moe"))
    experts = present(facts.shape.experts)
    assert (experts.count, experts.active) == (8, 2)
    table = strategies(facts, Space(), default_rules(COLUMNS), gpus=16, global_batch=256)
    degrees = set(table.columns["expert_model_parallel_size"].tolist())
    assert degrees == {1, 2, 4, 8}
    dense = table_of(LLAMA)
    assert set(dense.columns["expert_model_parallel_size"].tolist()) == {1}


@settings(max_examples=80)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=25),
    st.integers(0, 7),
)
def test_pareto_set_and_choice(points: list[tuple[int, int]], limit: int) -> None:
    speed, money = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    front = [points[i] for i in pareto(speed, money)]
    better = {
        p for p in points if not any((q[0] >= p[0] and q[1] <= p[1] and q != p) for q in points)
    }
    assert set(front) == better and len(front) == len(better)
    assert front == sorted(front, key=lambda p: (-p[0], p[1]))
    order = [points[i] for i in ranking(speed, money)]
    assert order == sorted(points, key=lambda p: (-p[0], p[1]))
    chosen = best_under(float(limit), speed, money)
    affordable = [p for p in points if p[1] <= limit]
    if not affordable:
        assert chosen is None
    else:
        assert chosen is not None
        assert points[chosen] == min(affordable, key=lambda p: (-p[0], p[1]))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_what_differs_by_rounding_alone_keeps_its_order(steps: list[int], random: Random) -> None:
    """Sums whose last digits fall differently sort as the exact ones do: ties by place."""
    exact = np.array([0.1 * step for step in steps])
    shaken = exact * np.array([1.0 + random.choice((-2, -1, 0, 1, 2)) * 2.0**-52 for _ in steps])
    assert tied(shaken).tolist() == tied(exact).tolist()
    assert [sorted(set(steps)).index(step) for step in steps] == tied(exact).tolist()
    money = np.array([float(step % 2 + 1) for step in steps])
    assert (
        ranking(1.0 / shaken, money * (shaken / exact)).tolist()
        == ranking(1.0 / exact, money).tolist()
    )


def test_an_unknown_price_is_not_taken_for_nothing() -> None:
    speed, money = np.array([3.0, 2.0, 1.0]), np.array([math.nan, 5.0, 4.0])
    assert pareto(speed, money).tolist() == [1, 2]
    assert pareto(speed, np.full(3, math.nan)).tolist() == [0]
