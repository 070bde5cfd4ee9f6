"""The search: its table against a plain product, prices against a plain reading, segments against brute force."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.errors import InputError, UnsupportedError
from hetplan.formulations import family
from hetplan.formulations.astra.search.efficiency import Traffic, Work
from hetplan.formulations.astra.search.engine import Job, schema_of, search
from hetplan.formulations.astra.search.facts import ModelFacts, model_facts
from hetplan.formulations.astra.search.memory import offload_share, stage_peaks
from hetplan.formulations.astra.search.pareto import best_under, pareto, ranking
from hetplan.formulations.astra.search.pool import (
    Offer,
    cost,
    find_device,
    heterogeneous,
    homogeneous,
    offer_of,
)
from hetplan.formulations.astra.search.pricing import Assumptions, Priced, iteration_seconds
from hetplan.formulations.astra.search.rules import default_rules, rules_from_text
from hetplan.formulations.astra.search.segments import (
    SegmentFigures,
    segment_figures,
    segment_front,
    segment_space,
)
from hetplan.formulations.astra.search.space import NONE, Schema, Space
from hetplan.formulations.astra.search.table import Strategies, strategies
from hetplan.profiling.models import load_model
from hetplan.profiling.times import all_reduce_seconds, layer_time
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Run

SCHEMA = Schema(("A800-SXM4-80GB",))
GPT = model_facts(load_model("gpt2", precision="bf16"))
LLAMA = model_facts(load_model("llama2-7b", precision="bf16"))
SMALL = Space(pipeline=(1, 2, 3, 4), tensor=(1, 2, 4), micro_batch=(1, 2, 3))


def table_of(facts: ModelFacts = LLAMA, gpus: int = 64, space: Space | None = None) -> Strategies:
    """All strategies that the shipped rules leave."""
    rules = default_rules(SCHEMA.columns)
    return strategies(facts, space or Space(), rules, gpus=gpus, global_batch=256)


def rows_of(table: Strategies) -> set[tuple[int, ...]]:
    names = sorted(table.columns)
    return set(zip(*(table.columns[name].tolist() for name in names), strict=True))


# ------------------------------------------------------------------------------------------ table and rules


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


def test_pushing_rules_down_drops_the_same_rows() -> None:
    """Without rules first, all rules on the whole table afterwards."""
    rules = default_rules(SCHEMA.columns)
    pushed = strategies(GPT, SMALL, rules, gpus=24, global_batch=256)
    raw = strategies(GPT, SMALL, [], gpus=24, global_batch=256)
    assert raw.rows > pushed.rows
    late = rules_from_text("$gpu_type == None", SCHEMA.columns, where="test")  # a rule that is never met
    assert rows_of(strategies(GPT, SMALL, [*rules, *late], gpus=24, global_batch=256)) == rows_of(pushed)
    from hetplan.formulations.astra.search.space import CONSTANTS, constants_of
    from hetplan.formulations.astra.search.table import _values

    constants = constants_of(GPT, 256)
    table = {name: _values(name, column) for name, column in raw.columns.items()}
    table |= {name: _values(name, constants[name]) for name in CONSTANTS}
    keep = np.ones(raw.rows, dtype=bool)
    for rule in rules:
        keep &= ~rule.met(table, raw.rows)
    assert rows_of(raw.take(keep)) == rows_of(pushed)


def test_user_rules_only_drop() -> None:
    columns = SCHEMA.columns
    mine = rules_from_text("$tensor_model_parallel_size > 2 || $micro_batch_size == 1", columns, where="t")
    whole = table_of(LLAMA, 64)
    less = strategies(LLAMA, Space(), [*default_rules(columns), *mine], gpus=64, global_batch=256)
    assert rows_of(less) < rows_of(whole)
    assert less.columns["tensor_model_parallel_size"].max() == 2
    assert less.columns["micro_batch_size"].min() == 2
    assert less.generated == whole.generated


def test_flash_attention_rule_of_the_paper_bites() -> None:
    assert (table_of(LLAMA).columns["recompute_granularity"] != 0).all()  # fused attention: no selective
    assert (table_of(GPT, 24, SMALL).columns["recompute_granularity"] == 0).any()


def test_experts_bring_expert_parallelism() -> None:
    facts = model_facts(load_model("bert-moe"))
    assert (facts.experts, facts.experts_per_token) == (8, 2)
    table = strategies(facts, Space(), default_rules(SCHEMA.columns), gpus=16, global_batch=256)
    degrees = set(table.columns["expert_model_parallel_size"].tolist())
    assert degrees == {1, 2, 4, 8}
    dense = table_of(LLAMA)
    assert set(dense.columns["expert_model_parallel_size"].tolist()) == {1}


# ------------------------------------------------------------------------------------------ prices


def plain_seconds(facts: ModelFacts, row: dict[str, Any], offer: Offer, share: float) -> float:
    """One strategy priced by hand, for GPT-like models without experts: the formulas, not the code."""
    pp, tp, dp = (row[f"{k}_parallel_size"] for k in ("pipeline_model", "tensor_model", "data"))
    mbs, K, sp = row["micro_batch_size"], row["num_micro_batches"], row["sequence_parallel"]
    v, n = row["virtual_pipeline_model_parallel_size"] or 1, facts.layers // pp
    node = offer.node_devices

    def ring(stride: int, ranks: int) -> tuple[float, float]:
        if stride * ranks <= node:
            return offer.intra, offer.intra_latency
        return min(offer.intra, offer.network / min(stride, node)), offer.network_latency

    block = layer_time(facts.blocks[0], offer.spec, facts.precision, micro_batch=mbs, tensor=tp)
    ends = [
        sum(vars(layer_time(x, offer.spec, facts.precision, micro_batch=mbs, tensor=tp)).values())
        for x in (facts.first, facts.last)
    ]
    assert not sp  # the plain reading is for rows without sequence parallelism
    reduce = 2 * all_reduce_seconds(facts.boundary_bytes * mbs, tp, *ring(1, tp)) if tp > 1 else 0.0
    forward, backward = block.forward + reduce, block.backward + reduce
    again = {"full": {"uniform": n, "block": min((row["recompute_num_layers"] or 0) * v, n)}}.get(
        row["recompute_granularity"], {}
    ).get(row["recompute_method"], 0)
    work = n * (forward + backward) + again * forward
    crossing = 0.0
    if pp > 1:
        inside = tp * dp * pp <= node
        bandwidth = offer.intra if inside else min(offer.intra, offer.network / node)
        latency = offer.intra_latency if inside else offer.network_latency
        crossing = 2 * (facts.boundary_bytes * mbs / bandwidth + latency)
        if row["overlap_p2p_communication"]:
            crossing = max(0.0, crossing - work / v)
    stages = [work + v * crossing] * pp
    stages[0] += ends[0]
    stages[-1] += ends[1]
    pipeline = (sum(stages) - max(stages)) / v + K * max(stages)
    params = [n * facts.blocks[0].params / tp] * pp
    params[0] += facts.first.params / tp
    params[-1] += (facts.last.params + (facts.last.tied_params if pp > 1 else 0)) / tp
    most = max(params)
    gradients = all_reduce_seconds(most * 4, dp, *ring(tp, dp)) if dp > 1 else 0.0
    if row["use_distributed_optimizer"]:
        gather = all_reduce_seconds(most * 2, dp, *ring(tp, dp)) / 2 if dp > 1 else 0.0
        sync = max(0.0, gradients / 2 - n * backward) + max(0.0, gather - n * forward)
        most /= dp
    else:
        sync = max(0.0, gradients - n * backward)
    moved = share * most * 6 / 25e9
    if not row["no_overlap_offload_optimizer"]:
        moved = max(0.0, moved - n * backward)
    adam = most * 30 * ((1 - share) / (offer.spec.memory_bytes_per_s * 0.8) + share / 51e9)
    return float(pipeline + sync + adam + moved)


@pytest.mark.parametrize(("facts", "gpus"), [(LLAMA, 64), (LLAMA, 8), (GPT, 24)])
def test_prices_equal_a_plain_reading(facts: ModelFacts, gpus: int) -> None:
    offer = offer_of("A800", gpus)
    table = table_of(facts, gpus, SMALL if facts is GPT else None)
    priced = Priced(facts, table, offer, Assumptions())
    share = np.clip(offload_share(priced), 0, 1)
    seconds = iteration_seconds(priced, share)
    simple = (table.columns["sequence_parallel"] == 0) & (
        np.isin(table.columns["recompute_granularity"], (NONE, 1))
    )
    rows = random.Random(0).sample(np.flatnonzero(simple).tolist(), 150)
    for r in rows:
        assert seconds[r] == pytest.approx(plain_seconds(facts, table.row(r), offer, float(share[r]))), r


def plain_bytes(facts: ModelFacts, row: dict[str, Any], stage: int) -> tuple[float, float]:
    """(bytes, optimizer states) of a device of one stage, by hand, without experts and hybrid recomputation."""
    pp, tp, dp = (row[f"{k}_parallel_size"] for k in ("pipeline_model", "tensor_model", "data"))
    mbs, K, sp, r = (
        row["micro_batch_size"],
        row["num_micro_batches"],
        row["sequence_parallel"],
        row["recompute_num_layers"],
    )
    v, n = row["virtual_pipeline_model_parallel_size"] or 1, facts.layers // pp
    params = n * facts.blocks[0].params
    params += facts.first.params if stage == 0 else 0
    params += facts.last.params + (facts.last.tied_params if pp > 1 else 0) if stage == pp - 1 else 0
    states = 12 * params / tp / (dp if row["use_distributed_optimizer"] else 1)

    def kept(saved: Any) -> float:
        parts = (x.size(facts.precision) / (tp if x.split or sp else 1) for x in saved)
        return float(mbs * sum(parts))

    whole = kept(facts.blocks[0].saved)
    boundary = facts.boundary_bytes * mbs / (tp if sp else 1)
    layers, working = n * whole, 0.0
    if row["recompute_granularity"] == "selective":
        core = kept([x for x in facts.blocks[0].saved if x.name.startswith(("softmax", "scores"))])
        layers, working = n * (whole - core), core
    elif row["recompute_method"] == "uniform":
        layers, working = -(-n // r) * boundary, min(r, n) * whole
    elif row["recompute_method"] == "block":
        again = min(r * v, n)
        layers, working = again * boundary + (n - again) * whole, whole
    flight = min(K, pp - stage)
    if row["num_layers_per_virtual_pipeline_stage"] is not None:
        flight = min(K * v, 2 * (pp - stage - 1) + (v - 1) * pp + 1) / v
    ends = flight * kept(facts.first.saved) if stage == 0 else 0.0
    ends += kept(facts.last.saved) if stage == pp - 1 else 0.0
    return 6 * params / tp + states + flight * layers + working + ends + 1.5 * 2**30, states


@pytest.mark.parametrize(("facts", "gpus"), [(LLAMA, 64), (GPT, 24)])
def test_memory_equals_a_plain_reading(facts: ModelFacts, gpus: int) -> None:
    offer = offer_of("A800", gpus)
    table = table_of(facts, gpus, SMALL if facts is GPT else None)
    share = offload_share(Priced(facts, table, offer, Assumptions()))
    plain = np.flatnonzero(table.columns["recompute_granularity"] != 2)
    for r in random.Random(1).sample(plain.tolist(), 120):
        row = table.row(r)
        pp = int(row["pipeline_model_parallel_size"] or 0)
        by_hand = [plain_bytes(facts, row, j) for j in range(pp)]
        stages = [(offer, facts.layers // pp)] * pp
        assert stage_peaks(facts, table, r, stages, 0.0, Assumptions()) == pytest.approx(
            [b for b, _ in by_hand]
        )
        needed = max((b - offer.spec.memory_bytes) / s for b, s in by_hand)
        assert share[r] > 1 if needed > 1 else share[r] == pytest.approx(max(0.0, needed), abs=1e-12)


def test_one_stage_is_eq_22_without_bubbles() -> None:
    """K micro-batches on one stage take K times one."""
    table = table_of(LLAMA, 8, Space(pipeline=(1,), tensor=(8,), recompute=(None,)))
    priced = Priced(LLAMA, table, offer_of("H100", 8), Assumptions())
    figures = priced.blocks.table
    stage = 32 * (priced.forward + priced.backward) + priced.blocks.row(5) + priced.blocks.row(6)
    rest = iteration_seconds(priced, np.zeros(table.rows)) - priced.K * stage
    assert figures.shape[0] == 7 and (rest > 0).all() and (rest < 0.2).all()


def test_sequence_parallelism_saves_memory_and_recomputation_costs_time() -> None:
    table = table_of(LLAMA, 64, Space(pipeline=(2,), tensor=(4,), micro_batch=(1,), interleaving=False))
    priced = Priced(LLAMA, table, offer_of("A800", 64), Assumptions())
    share = offload_share(priced)
    offer = offer_of("A800", 64)
    peak = np.array(
        [stage_peaks(LLAMA, table, r, [(offer, 16)] * 2, 0.0, Assumptions())[0] for r in range(table.rows)]
    )
    seconds = iteration_seconds(priced, share)
    c = table.columns
    base = (c["use_distributed_optimizer"] == 1) & (c["no_overlap_offload_optimizer"] == 1)
    plain = base & (c["recompute_granularity"] == NONE)
    full = base & (c["recompute_method"] == 1) & (c["recompute_num_layers"] == 1)
    for sp in (0, 1):
        here, there = plain & (c["sequence_parallel"] == sp), full & (c["sequence_parallel"] == sp)
        assert peak[here][0] > 1.3 * peak[there][0] and seconds[here][0] < seconds[there][0]
    assert peak[plain & (c["sequence_parallel"] == 1)] < peak[plain & (c["sequence_parallel"] == 0)]
    tight = replace(offer_of("A800", 64), spec=offer_of("RTX-3060", 1).spec)
    assert (offload_share(Priced(LLAMA, table, tight, Assumptions())) > share).any()


class Half:
    """An efficiency model that reaches half of everything, without launch floors."""

    launch_seconds = 0.0

    def computation(self, work: Work) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Half."""
        return np.full(work.flops.shape, 0.5)

    def communication(self, traffic: Traffic) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Half."""
        return np.full(traffic.size.shape, 0.5)


class Full(Half):
    """All of it for computation."""

    def computation(self, work: Work) -> np.ndarray[Any, np.dtype[np.float64]]:
        """One."""
        return np.ones(work.flops.shape)


class Broken(Half):
    """A share that is none."""

    def computation(self, work: Work) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Too much."""
        return np.full(work.flops.shape, 1.5)


def test_efficiencies_can_be_passed_in() -> None:
    table = table_of(LLAMA, 8, Space(pipeline=(1,), tensor=(1, 2)))
    offer = offer_of("A800", 8)
    half, full = (Priced(LLAMA, table, offer, Assumptions(efficiency=model)) for model in (Half(), Full()))
    assert half.blocks.table == pytest.approx(2 * full.blocks.table)
    exact = sum(block.forward_flops() for block in LLAMA.blocks[:1]) / 312e12
    products = full.blocks.row(3)[(table.columns["tensor_model_parallel_size"] == 1)]
    assert products == pytest.approx(exact * table.columns["micro_batch_size"][: len(products)])
    with pytest.raises(InputError, match="efficiency of computation"):
        Priced(LLAMA, table, offer, Assumptions(efficiency=Broken())).blocks  # noqa: B018


# ------------------------------------------------------------------------------------------ order and Pareto


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=25), st.integers(0, 7))
def test_pareto_set_and_choice(points: list[tuple[int, int]], limit: int) -> None:
    speed, money = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    front = [points[i] for i in pareto(speed, money)]
    better = {p for p in points if not any((q[0] >= p[0] and q[1] <= p[1] and q != p) for q in points)}
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


# ------------------------------------------------------------------------------------------ modes


JOB = Job(load_model("llama2-7b", precision="bf16"), 256)


def test_homogeneous_best_is_the_best_of_all_rows() -> None:
    found = search(JOB, homogeneous(offer_of("A800", 64)))
    assert found.best is not None and found.proven
    assert len(found.points) == found.counts["priced"] == found.counts["in_memory"]
    assert found.best.tokens_per_second == max(speed for speed, _ in found.points)
    assert found.best.money == pytest.approx(
        found.best.seconds * 64 * 3.431 / 3600 * JOB.iterations, rel=1e-12
    )
    assert found.top[0] == found.best and len(found.top) == 10
    assert list(found.top) == sorted(found.top, key=lambda c: (-c.tokens_per_second, c.money or 0))
    assert all(max(c.stage_bytes) <= 80 * 2**30 for c in (*found.top, *found.pareto))


def test_cost_mode_finds_the_curve_and_keeps_the_limit() -> None:
    pool = cost((offer_of("A800", 1), offer_of("H100", 1)), 4000)
    assert pool.sizes == (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4000)
    found = search(JOB, pool)
    assert found.best is not None and len(found.pareto) >= 2
    by_money = [c.money for c in found.pareto if c.money is not None]
    assert by_money == sorted(by_money, reverse=True)
    limit = by_money[-1] * 1.0001
    cheap = search(replace(JOB, money_limit=limit), pool)
    assert cheap.best is not None and cheap.best.money is not None and cheap.best.money <= limit
    assert cheap.best.seconds == max(c.seconds for c in found.pareto)
    nothing = search(replace(JOB, money_limit=0.01), pool)
    assert nothing.best is None and "dollars" in nothing.reason


def segments_by_force(figures: SegmentFigures, table: Strategies, layers: int) -> list[tuple[float, float]]:
    """(seconds, money) of every strategy and every way to give its stages types and layers."""
    found = []
    types = len(figures.c)
    for r in range(table.rows):
        P = int(table.columns["pipeline_model_parallel_size"][r])
        K = int(table.columns["num_micro_batches"][r])
        stack: list[tuple[list[tuple[int, int]], int]] = [([], layers)]
        kinds = [(i, x) for i in range(types) for x in range(1, int(figures.cap[i, r]) + 1)]
        while stack:
            chosen, left = stack.pop()
            if len(chosen) == P:
                if left == 0 and all(
                    sum(i == t for i, _ in chosen) <= figures.most[t, r] for t in range(types)
                ):
                    times = [x * figures.c[i, r] + figures.h[i, r] for i, x in chosen]
                    last = max(x * figures.g[i, r] for i, x in chosen)
                    seconds = sum(times) + (K - 1) * max(times) + last
                    found.append((seconds, seconds * sum(figures.rate[i, r] for i, _ in chosen)))
                continue
            for kind in kinds:
                if (not chosen or kind >= chosen[-1]) and kind[1] <= left:
                    stack.append(([*chosen, kind], left - kind[1]))
    return found


def perturbed(figures: SegmentFigures, seed: int, layers: int) -> SegmentFigures:
    """The same shapes with other numbers: ties, zeros, tight caps, types ordered in nothing."""
    rng = np.random.default_rng(seed)
    shape = figures.c.shape
    return SegmentFigures(
        c=rng.choice([0.5, 1.0, 1.5, 2.0], shape) * rng.choice([1.0, 1.1], shape),
        h=rng.choice([0.0, 0.2, 3.0], shape),
        g=rng.choice([0.0, 0.5, 4.0], shape),
        cap=rng.integers(0, layers, shape),
        most=np.minimum(figures.most, rng.integers(0, 4, shape)),
        rate=rng.choice([1.0, 2.0, 5.0], shape),
        offloaded=figures.offloaded,
    )


@pytest.mark.parametrize("seed", range(30))
def test_segment_front_equals_brute_force(seed: int) -> None:
    small = load_model("gpt2", precision="bf16")
    facts = replace(model_facts(small), blocks=model_facts(small).blocks[:6])
    offers = (offer_of("A800", 8), offer_of("H100", 8), offer_of("A100-SXM4-40GB", 6))[: 2 + seed % 2]
    space = segment_space(Space(pipeline=(1, 2, 4), tensor=(1, 2), micro_batch=(1,), recompute=(None,)))
    table = strategies(
        facts, space, default_rules(SCHEMA.columns), gpus=8, global_batch=16, whole_stages=False
    )
    figures = segment_figures(facts, table, offers, Assumptions())
    if seed:
        figures = perturbed(figures, seed, facts.layers)
    front = segment_front(facts, table, figures, Run())
    points = segments_by_force(figures, table, facts.layers)
    expected = sorted(
        p for p in set(points) if not any(q[0] <= p[0] and q[1] <= p[1] and q != p for q in points)
    )
    got = list(zip(front.seconds.tolist(), front.money.tolist(), strict=True))
    # Points that differ by rounding alone are one point.
    distinct: list[tuple[float, float]] = []
    for point in expected:
        if not distinct or not point[1] > distinct[-1][1] * (1 - 1e-9):
            distinct.append(point)
    assert len(got) == len(distinct)
    for a, b in zip(got, distinct, strict=True):
        assert a == pytest.approx(b, rel=1e-9)


def test_mixed_pool_agrees_with_the_exact_method_of_astra() -> None:
    pool = heterogeneous(64, (offer_of("A800", 48), offer_of("H100", 32)))
    found = search(JOB, pool)
    assert found.best is not None and found.instance is not None and found.proven
    assert sum(found.best.devices.values()) == 64
    assert found.best.devices["A800-SXM4-80GB"] <= 48 and found.best.devices["H100-SXM5-80GB"] <= 32
    assert sum(n for _, n in found.best.stages) == 32
    assert all(size <= 80 * 2**30 for c in found.pareto for size in c.stage_bytes)
    result = solve(family("astra"), found.instance, "auto", Run())
    other = solve(family("astra"), found.instance, "milp", Run())
    assert result.status == other.status == "optimal"
    assert result.objective is not None and result.objective <= found.best.seconds
    assert other.objective == pytest.approx(result.objective, rel=1e-6)
    limited = search(replace(JOB, money_limit=(found.best.money or 0) * 0.5), pool)
    assert limited.best is None and limited.reason


def test_more_types_never_hurt() -> None:
    one = search(JOB, heterogeneous(32, (offer_of("A800", 32),)))
    two = search(JOB, heterogeneous(32, (offer_of("A800", 32), offer_of("H100", 8))))
    assert one.best is not None and two.best is not None
    assert two.best.seconds <= one.best.seconds * (1 + 1e-12)


def test_a_cancelled_search_claims_nothing() -> None:
    run = Run()
    run.cancel.set()
    found = search(JOB, heterogeneous(32, (offer_of("A800", 32), offer_of("H100", 8))), run=run)
    assert not found.proven and "nothing is proven" in found.proof


def test_what_cannot_be_searched_is_said() -> None:
    with pytest.raises(UnsupportedError, match="takes transformers"):
        model_facts(load_model("vgg19"))
    with pytest.raises(InputError, match="too few GPUs"):
        heterogeneous(64, (offer_of("A800", 8), offer_of("H100", 8)))
    with pytest.raises(InputError, match="several devices"):
        find_device("A100")
    assert find_device("a800")[0] == "A800-SXM4-80GB"
    crowded = search(Job(load_model("glm-130b", precision="fp16"), 64), homogeneous(offer_of("T4", 2)))
    assert crowded.best is None and "fits in memory" in crowded.reason
    odd = search(Job(load_model("llama2-7b", precision="bf16"), 7), homogeneous(offer_of("A800", 64)))
    assert odd.best is None or odd.counts["priced"] > 0
    assert schema_of(homogeneous(offer_of("A800", 2))).types == ("A800-SXM4-80GB",)
