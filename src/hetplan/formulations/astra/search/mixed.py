"""Mode 2: every strategy on all segments of the offered types, and on one type alone (Astra,
Section 3.4).

Beside the segments stands the whole space of modes 1 and 3 on each type that alone has devices
enough, so that a pool is never worse than a part of it of the same size.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from hetplan.formulations.astra.data import AstraData
from hetplan.formulations.astra.search.modes import (
    Rows,
    Task,
    points_of,
    price_rows,
    twins,
    why_nothing,
)
from hetplan.formulations.astra.search.pricing import Priced, after_pipeline
from hetplan.formulations.astra.search.result import (
    Candidate,
    Found,
    Parts,
    best_under,
    pareto,
    ranking,
    tied,
)
from hetplan.formulations.astra.search.segment_figures import (
    FIRST,
    LAST,
    SegmentFigures,
    Shape,
    confirm,
    segment_figures,
    segment_instance,
    segment_space,
    spread,
)
from hetplan.formulations.astra.search.segments import Point, SegmentSearch
from hetplan.formulations.astra.search.space import Strategies, strategies
from hetplan.solvers.run import Run


def mixed(task: Task, run: Run) -> Found:
    """The Pareto set over segments and single types."""
    job, pool, facts, clock = task.job, task.pool, task.facts, task.clock
    clock.begun = time.perf_counter()
    space = segment_space(task.space)
    table = strategies(
        facts,
        space,
        task.rules,
        gpus=pool.sizes[0],
        global_batch=job.global_batch,
        whole_stages=False,
    )
    clock.lap("generate")
    figures = segment_figures(facts, table, pool.offers, task.given, offload=space.offload)
    room = np.where(figures.cap.max(axis=0) >= 1, figures.most, 0).sum(axis=0)
    possible = room >= table.columns["pipeline_model_parallel_size"]
    kept = np.flatnonzero(possible & ~twins(table, figures.offloaded))
    part = Segments(task, table.take(kept), figures.take(kept))
    clock.lap("price")
    whole = SegmentSearch(facts.layers, part.table, part.figures, run)
    front = whole.front()
    again = SegmentSearch(facts.layers, part.table, part.figures, run)
    fastest = again.fastest(task.top)
    clock.lap("segments")
    alone = price_rows(
        task, [(i, o, pool.sizes[0]) for i, o in enumerate(pool.offers) if o.most >= pool.sizes[0]]
    )
    priceless = any(offer.price_per_second is None for offer in pool.offers)
    money = np.array([np.nan if priceless else p.money * job.iterations for p in front])
    seconds, split = np.array([p.seconds for p in front]), len(front)
    if alone is not None:
        seconds, money = (
            np.concatenate([seconds, alone.seconds]),
            np.concatenate([money, alone.money]),
        )
    throughput = job.tokens_per_iteration / seconds
    best = best_under(job.money_limit, throughput, money)

    def candidate(f: int) -> Candidate:
        if f >= split and alone is not None:
            return alone.candidate(task, f - split)
        return part.candidate(front[f])

    instance = part.instance(front[best]) if best is not None and best < split else None
    counts = {
        "generated": table.generated,
        "after_rules": table.rows + (0 if alone is None else alone.after_rules),
        "in_memory": int(possible.sum()) + (0 if alone is None else alone.table.rows),
        "priced": int(possible.sum()) + (0 if alone is None else alone.table.rows),
    }
    if alone is not None:
        counts["generated"] += alone.table.generated
    result = Found(
        mode=pool.mode,
        counts=counts,
        timings=clock.phases,
        best=None if best is None else candidate(best),
        top=_top(task, part, fastest, alone),
        pareto=tuple(candidate(int(f)) for f in pareto(throughput, money)),
        proven=whole.finished and again.finished,
        proof=_proof(whole, part.table, alone),
        reason="" if best is not None else _why_nothing(task, counts, money, whole.finished),
        points=points_of(throughput, money),
        instance=instance,
        details={
            "explored": whole.explored,
            "stage_counts_seen": whole.seen,
            "stage_counts_solved": whole.solved,
            "priced_on_one_type": 0 if alone is None else alone.table.rows,
        },
        left_out=_left_out(task, alone is not None),
    )
    clock.lap("sort")
    return result


class Segments:
    """The strategies that may become segments, and how a point of the front becomes a candidate."""

    def __init__(self, task: Task, table: Strategies, figures: SegmentFigures) -> None:
        self.task, self.table, self.figures = task, table, figures

    def candidate(self, point: Point) -> Candidate:
        """A point of the front."""
        task, r, shape = self.task, point.strategy, point.shape
        offers = task.pool.offers
        stages = tuple(
            (offers[i].name, n)
            for _, i, count, layers in shape.parts
            for n in spread(count, layers)
        )
        priceless = any(offer.price_per_second is None for offer in offers)
        money = np.nan if priceless else point.money * task.job.iterations
        share = float(self.figures.offloaded[r])
        parts = self.parts(r, shape, point.seconds)
        return task.candidate(self.table, r, parts, money, share, stages, segments=True)

    def parts(self, r: int, shape: Shape, seconds: float) -> Parts:
        """(pipeline, reduction, optimizer) seconds: the last two of the stage on which they take
        longest."""
        exposed = self.figures.exposed(r)
        stages = [
            (kind, i, n) for kind, i, count, layers in shape.parts for n in spread(count, layers)
        ]
        kind, i, n = max(stages, key=lambda stage: exposed[stage[0], stage[1], stage[2] - 1])
        rest = float(exposed[kind, i, n - 1])
        one = Priced(
            self.task.facts,
            self.table.take(np.array([r])),
            self.task.pool.offers[i],
            self.task.given,
        )
        ends = (kind == FIRST) * one.end_params[0] + (
            kind == LAST or shape.last < 0
        ) * one.end_params[1]
        dense, experts = n * one.stage_params + ends, n * one.expert_stage_params
        share = np.array([self.figures.offloaded[r]])
        reduction, _ = after_pipeline(one, dense, experts, n * one.forward, n * one.backward, share)
        return seconds - rest, float(reduction[0]), rest - float(reduction[0])

    def instance(self, point: Point) -> AstraData:
        """A point as an instance, which the exact method of problem `astra` must solve to the
        same."""
        facts, r = self.task.facts, point.strategy
        posed, rest = segment_instance(
            facts, self.table, self.task.pool.offers, self.figures, r, point.shape
        )
        confirm(posed, point.seconds - rest)
        return posed


def _top(
    task: Task, part: Segments, fastest: Sequence[Point], alone: Rows | None
) -> tuple[Candidate, ...]:
    """The fastest strategies, each on its fastest segments; one that is on both sides is listed
    once."""
    found = [part.candidate(point) for point in fastest]
    if alone is not None:
        order = ranking(task.job.tokens_per_iteration / alone.seconds, alone.money)
        order = order[~twins(alone.table, alone.share)[order]][: 2 * task.top]
        found += [alone.candidate(task, int(r)) for r in order]
    seconds, money = np.array([c.seconds for c in found]), np.array([c.money or 0.0 for c in found])
    found = [found[i] for i in np.lexsort((tied(money), tied(seconds)))]
    distinct: dict[object, Candidate] = {}
    for candidate in found:
        distinct.setdefault((candidate.stages, *candidate.strategy.values()), candidate)
    return tuple(distinct.values())[: task.top]


def _proof(search: SegmentSearch, table: Strategies, alone: Rows | None) -> str:
    if not search.finished:
        return f"stopped after {search.explored} of {table.rows} strategies: nothing is proven"
    single = "" if alone is None else f"; all {alone.table.rows} on one type alone were priced"
    return (
        f"{search.explored} of {table.rows} strategies explored, {search.solved} of "
        f"{search.seen} vectors of "
        "stage counts solved exactly; lower bounds show that the rest is beaten in time and "
        f"money{single}"
    )


def _left_out(task: Task, alone: bool) -> tuple[str, ...]:
    """What segments leave out of the space at hand, in words."""
    space = task.space
    parts = ["virtual stages"] if space.interleaving else []
    if "hybrid" in space.recompute:
        parts.append("hybrid recomputation")
    if "full" in space.recompute and "block" in space.recompute_method:
        parts.append("block-wise recomputation")
    if not parts:
        return ()
    where = (
        "tried on one type alone only"
        if alone
        else "no type alone has all these GPUs, so they are not tried"
    )
    return (f"on segments of several types, {', '.join(parts)} (they need equal stages): {where}",)


def _why_nothing(task: Task, counts: dict[str, int], money: np.ndarray, finished: bool) -> str:
    if counts["generated"] == 0 and not segment_space(task.space).recomputations(task.facts.layers):
        return "; ".join(("segments have nothing to try", *_left_out(task, False)))
    if counts["in_memory"] and not len(money) and finished:
        return (
            f"no segments of {counts['in_memory']} strategies hold all {task.facts.layers} "
            "layers in memory"
        )
    return why_nothing(counts, task.job, money)
