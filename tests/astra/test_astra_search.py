"""The three modes of the search; segments against brute force."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from astra.cases import COLUMNS
from hetplan.formulations import family
from hetplan.formulations.astra.problem import Floats
from hetplan.formulations.astra.search.engine import columns_of, search
from hetplan.formulations.astra.search.memory import offload_share
from hetplan.formulations.astra.search.pool import cost, heterogeneous, homogeneous
from hetplan.formulations.astra.search.pricing import Priced, iteration_parts
from hetplan.formulations.astra.search.result import Job
from hetplan.formulations.astra.search.rules import default_rules
from hetplan.formulations.astra.search.segments import (
    SegmentData,
    SegmentSearch,
    segment_figures,
    segment_space,
)
from hetplan.formulations.astra.search.space import Space, strategies
from hetplan.formulations.astra.search.table import Strategies
from hetplan.profiling.models.model import load_model
from hetplan.replays.assumptions import Assumptions
from hetplan.replays.facts import model_facts
from hetplan.replays.offers import find_device, offer_of
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Run
from quick import rest_wide
from stopping import After, cancelled_after

JOB = Job(load_model("llama2-7b", precision="bf16"), 256)
SMALL_JOB = Job(load_model("gpt2", precision="bf16"), 64)


def test_homogeneous_best_is_the_best_of_all_rows() -> None:
    found = search(JOB, homogeneous(offer_of("A800", 64)))
    assert found.best is not None and found.proven
    assert len(found.points) == found.counts["priced"] == found.counts["in_memory"]
    assert found.best.tokens_per_second == max(speed for speed, _ in found.points)
    assert found.best.money == pytest.approx(
        found.best.seconds * 64 * 3.431 / 3600 * JOB.iterations, rel=1e-12
    )
    assert found.top[0] == found.best and len(found.top) == 10
    # Figure 2's order: generate, filter by rules, filter by memory, price
    space, rules = Space(), default_rules(columns_of(homogeneous(offer_of("A800", 64))))
    passed = strategies(model_facts(JOB.model), space, rules, gpus=64, global_batch=256)
    counts = [found.counts[name] for name in ("generated", "after_rules", "in_memory")]
    assert counts[:2] == [passed.generated, passed.rows]
    assert counts[0] > counts[1] > counts[2] > 0
    assert list(found.top) == sorted(found.top, key=lambda c: (-c.tokens_per_second, c.money or 0))
    assert all(max(c.stage_bytes) <= 80 * 2**30 for c in (*found.top, *found.pareto))


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (40, (2, 4, 8, 16, 32, 40)),
        pytest.param(
            4000,
            (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4000),
            marks=pytest.mark.wide,
        ),
    ],
)
def test_cost_mode_finds_the_curve_and_keeps_the_limit(most: int, sizes: tuple[int, ...]) -> None:
    pool = cost((offer_of("A800", 1), offer_of("H100", 1)), most)
    assert pool.sizes == sizes
    job = SMALL_JOB if most == 40 else JOB
    found = search(job, pool)
    assert found.best is not None and len(found.pareto) >= 2
    by_money = [c.money for c in found.pareto if c.money is not None]
    assert by_money == sorted(by_money, reverse=True)
    limit = by_money[-1] * (1 + 1e-9)
    cheap = search(replace(job, money_limit=limit), pool)
    assert cheap.best is not None and cheap.best.money is not None and cheap.best.money <= limit
    assert cheap.best.seconds == max(c.seconds for c in found.pareto)
    nothing = search(replace(job, money_limit=0.01), pool)
    assert nothing.best is None and "dollars" in nothing.reason


def segments_by_force(
    figures: SegmentData, table: Strategies, layers: int
) -> list[tuple[float, float, int]]:
    """(seconds, money, strategy) of every way to give the stages types and layers, in every order
    of ends."""
    found = []
    types = len(figures.c)
    for r in range(table.rows):
        P = int(table.columns["pipeline_model_parallel_size"][r])
        K = int(table.columns["num_micro_batches"][r])
        exposed = figures.exposed(r)
        shares = [x for x in product(range(1, layers + 1), repeat=P) if sum(x) == layers]
        for on in product(range(types), repeat=P):
            # Between the ends the order changes nothing.
            if list(on[1:-1]) != sorted(on[1:-1]) or any(
                on.count(t) > figures.most[t, r] for t in range(types)
            ):
                continue
            for share in shares:
                kinds = [0 if s == 0 else 2 if s == P - 1 else 1 for s in range(P)]
                stages = list(zip(kinds, on, share, strict=True))
                if any(x > figures.cap[kind, i, r] for kind, i, x in stages):
                    continue
                times = [x * figures.c[i, r] + figures.h[i, r] for _, i, x in stages]
                times[0] += figures.ends[0, on[0], r]
                times[-1] += figures.ends[1, on[-1], r]
                last = max(exposed[kind, i, x - 1] for kind, i, x in stages)
                seconds = sum(times) + (K - 1) * max(times) + last
                found.append((seconds, seconds * sum(figures.rate[i, r] for i in on), r))
    return found


def perturbed(figures: SegmentData, seed: int, layers: int) -> SegmentData:
    """The same shapes with other numbers: ties, zeros, tight caps, types ordered in nothing."""
    rng = np.random.default_rng(seed)
    shape = figures.c.shape
    slope = rng.choice([0.0, 0.5, 4.0], shape)
    hidden = rng.choice([0.0, 3.0, 9.0], (3, *shape))  # what few layers leave uncovered
    hidden[1] = 0.0  # g lies below a middle stage's r, which is the least of the three
    n = np.arange(1, layers + 1)

    def exposed(r: int) -> Floats:
        slopes, first = slope[None, :, r, None], hidden[:, :, r, None]
        return np.asarray(np.maximum(slopes * n, first - 2.0 * n))

    return SegmentData(
        c=rng.choice([0.5, 1.0, 1.5, 2.0], shape) * rng.choice([1.0, 1.1], shape),
        h=rng.choice([0.0, 0.2, 3.0], shape),
        ends=rng.choice([0.0, 0.7, 5.0], (2, *shape)),
        g=slope,
        cap=rng.integers(0, layers, (3, *shape)),
        most=np.minimum(figures.most, rng.integers(0, 4, shape)),
        rate=rng.choice([1.0, 2.0, 5.0], shape),
        offloaded=figures.offloaded,
        exposed=exposed,
    )


def distinct(front: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points that differ by rounding alone, in seconds or in money, are one point: the better in
    the other."""
    kept: list[tuple[float, float]] = []
    for point in front:
        if kept and point[1] > kept[-1][1] * (1 - 1e-9):
            continue
        if kept and point[0] < kept[-1][0] * (1 + 1e-9):
            kept.pop()
        kept.append(point)
    return kept


@pytest.mark.parametrize("seed", [0, 132, 190, 200, 394, 568, *range(1, 30)])
def test_segment_front_equals_brute_force(seed: int) -> None:
    small = load_model("gpt2", precision="bf16")
    facts = replace(model_facts(small), blocks=model_facts(small).blocks[:6])
    offers = (offer_of("A800", 8), offer_of("H100", 8), offer_of("A100-SXM4-40GB", 6))[
        : 2 + seed % 2
    ]
    space = segment_space(
        Space(pipeline=(1, 2, 4), tensor=(1, 2), micro_batch=(1,), recompute=(None,))
    )
    table = strategies(
        facts, space, default_rules(COLUMNS), gpus=8, global_batch=16, whole_stages=False
    )
    figures = segment_figures(facts, table, offers, Assumptions())
    if seed:
        figures = perturbed(figures, seed, facts.layers)
    segments = SegmentSearch(facts.layers, table, figures, Run(), count=5)
    forced = segments_by_force(figures, table, facts.layers)
    points = [(seconds, money) for seconds, money, _ in forced]
    expected = sorted(
        p for p in set(points) if not any(q[0] <= p[0] and q[1] <= p[1] and q != p for q in points)
    )
    got = distinct([(point.seconds, point.money) for point in segments.front.points])
    assert len(got) == len(distinct(expected))
    for a, b in zip(got, distinct(expected), strict=True):
        assert a == pytest.approx(b, rel=1e-9)
    # The fastest strategies, each on its fastest segments.
    least: dict[int, float] = {}
    for time, _, r in forced:
        least[r] = min(time, least.get(r, time))
    first = segments.top()
    assert [p.seconds for p in first] == pytest.approx(sorted(least.values())[:5], rel=1e-9)
    assert len({p.strategy for p in first}) == len(first)
    for point in first:
        assert point.seconds == pytest.approx(least[point.strategy], rel=1e-9)


@pytest.mark.wide
def test_one_strategys_segments_can_be_stopped() -> None:
    """The clock is looked at among the stage counts of one strategy; what was found is real, and
    nothing is proven."""
    pool = heterogeneous(64, (offer_of("A800", 48), offer_of("H100", 32)))
    whole = search(SMALL_JOB, pool)
    patient = After(10**9)
    again = search(SMALL_JOB, pool, run=Run(cancel=patient))
    assert again.proven and again.best == whole.best and again.pareto == whole.pareto
    assert patient.looked > 2 * int(str(again.details["explored"]))
    assert whole.best is not None
    for looks in (0, 1, patient.looked // 2, patient.looked - 1):
        stopped = search(SMALL_JOB, pool, run=cancelled_after(looks))
        assert not stopped.proven and "nothing is proven" in stopped.proof
        for found in stopped.pareto:
            assert found.seconds >= whole.best.seconds * (1 - 1e-12)


def test_segments_that_cannot_hold_the_layers_are_said_to() -> None:
    """Each stage has room for some layers, all of them together for too few; that is proven, not
    out of time."""
    found = search(
        Job(load_model("llama2-7b", precision="fp16"), 16),
        heterogeneous(3, (offer_of("RTX-3090", 2), offer_of("RTX-4090", 1))),
        space=Space(offload=False),
    )
    assert found.best is None and found.proven
    assert "hold all 32 layers in memory" in found.reason


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
    # What the instance prices is the pipeline; reduction and optimizer come on top.
    pipeline, reduction, optimizer = found.best.parts
    assert result.objective == pytest.approx(pipeline, rel=1e-9)
    assert pipeline + reduction + optimizer == pytest.approx(found.best.seconds, rel=1e-12)
    assert reduction >= 0 and optimizer > 0
    assert other.objective == pytest.approx(result.objective, rel=1e-6)
    limited = search(replace(JOB, money_limit=(found.best.money or 0) * 0.5), pool)
    least = min(c.money for c in found.pareto if c.money is not None)
    assert limited.best is None and f"{least:.6g}" in limited.reason


@pytest.mark.parametrize("model", rest_wide(["gpt2-medium", "llama3-8b"], 1))
def test_one_type_costs_the_same_in_both_modes(model: str) -> None:
    """Equal segments of one type, priced by the figures of mode 2, cost what mode 1 says."""
    facts = model_facts(load_model(model, precision="bf16"))
    space = replace(
        segment_space(Space(tensor=(2, 8), micro_batch=(1, 2))), sequence_parallel=(False, True)
    )
    offer = offer_of("A800", 64)
    table = strategies(facts, space, default_rules(COLUMNS), gpus=64, global_batch=256)
    figures = segment_figures(facts, table, (offer,), Assumptions())
    priced = Priced(facts, table, offer, Assumptions())
    share = offload_share(priced)
    expected = np.sum(iteration_parts(priced, share), axis=0)
    P, K = table.columns["pipeline_model_parallel_size"], table.columns["num_micro_batches"]
    compared = 0
    for r in np.flatnonzero(share <= 1.0):
        p, n = int(P[r]), facts.layers // int(P[r])
        before, behind = figures.end_seconds(int(r), 0, 0 if p > 1 else -1)
        times = np.full(p, n * figures.c[0, r] + figures.h[0, r])
        times[0] += before
        times[-1] += behind
        kinds = [0, 1, 2] if p > 2 else [0, 2][:p]
        seconds = (
            times.sum() + (K[r] - 1) * times.max() + figures.exposed(int(r))[kinds, 0, n - 1].max()
        )
        assert seconds == pytest.approx(expected[r], rel=1e-9), table.row(int(r))
        assert min(figures.cap[kind, 0, r] for kind in kinds) >= n
        compared += 1
    assert compared > 50 and len(set(P.tolist())) >= 4


def test_reductions_lie_above_their_line_and_fall_before_they_rise() -> None:
    """What the bounds and the compiled search take for granted, on real figures."""
    facts = model_facts(load_model("llama3-8b", precision="bf16"))
    offers = (offer_of("A800", 48), offer_of("H100", 32))
    space = segment_space(Space(tensor=(1, 8), micro_batch=(1,), recompute=(None,)))
    table = strategies(
        facts, space, default_rules(COLUMNS), gpus=64, global_batch=256, whole_stages=False
    )
    figures = segment_figures(facts, table, offers, Assumptions())
    falling = 0
    for r in range(table.rows):
        exposed = figures.exposed(r)
        assert (figures.g[None, :, r, None] * np.arange(1, facts.layers + 1) <= exposed).all()
        steps = np.sign(np.diff(exposed, axis=2).round(12))
        assert not ((steps[:, :, :-1] > 0) & (steps[:, :, 1:] < 0)).any()
        assert (exposed[1] <= exposed[0]).all() and (exposed[1] <= exposed[2]).all()
        falling += bool((steps < 0).any())
    assert table.rows > 50 and falling > 0


def test_a_pool_is_never_worse_than_one_of_its_types() -> None:
    """Interleaving and hybrid recomputation come back through the single types."""
    job = Job(load_model("llama2-7b", precision="bf16"), 64)
    for space in (Space(pipeline=(8,), tensor=(8,)), Space(recompute=("hybrid",), tensor=(8,))):
        one = search(job, homogeneous(offer_of("A800", 64)), space=space)
        two = search(
            job,
            heterogeneous(64, (offer_of("A800", 64), offer_of("A100-SXM4-40GB", 8))),
            space=space,
        )
        assert one.best is not None and two.best is not None and two.left_out
        assert two.best.seconds <= one.best.seconds * (1 + 1e-12)
    short = search(
        job,
        heterogeneous(64, (offer_of("A800", 48), offer_of("H100", 48))),
        space=Space(recompute=("hybrid",)),
    )
    assert short.best is None and "hybrid recomputation" in short.reason


@pytest.mark.parametrize("pool", ["one", pytest.param("cost", marks=pytest.mark.wide), "two"])
def test_top_lists_as_many_strategies_as_asked_for(pool: str) -> None:
    a, b = offer_of("A800", 48), offer_of("H100", 32)
    pools = {
        "one": homogeneous(offer_of("A800", 64)),
        "cost": cost((a, b), 32),
        "two": heterogeneous(64, (a, b)),
    }
    found = search(JOB, pools[pool], top=25)
    assert found.best is not None and len(found.top) == 25
    assert found.top[0].seconds == pytest.approx(found.best.seconds)
    assert list(found.top) == sorted(found.top, key=lambda c: c.seconds)
    rows = [{k: v for k, v in c.strategy.items() if k != "no_overlap_offload_optimizer"} | {
        "stages": c.stages, "offloaded": c.offloaded} for c in found.top]  # fmt: skip
    assert not any(row in rows[:i] for i, row in enumerate(rows) if row["offloaded"] == 0)


def test_what_cannot_be_searched_is_said() -> None:
    assert find_device("a800")[0] == "A800-SXM4-80GB"
    assert find_device("H100")[0] == "H100-SXM5-80GB"
    crowded = search(
        Job(load_model("glm-130b", precision="fp16"), 64), homogeneous(offer_of("T4", 2))
    )
    assert crowded.best is None and "fits in memory" in crowded.reason
