"""The search from pool to Pareto set: generate, filter by rules and memory, price, sort (Astra,
Figure 2); and mode 2, every strategy on all segments of the offered types (Section 3.4).

Beside the segments of mode 2 stands the whole space of modes 1 and 3 on each type that alone has
devices enough, so that a pool is never worse than a part of it of the same size.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from hetplan.errors import InputError
from hetplan.formulations.astra.data import AstraData
from hetplan.formulations.astra.search.facts import model_facts
from hetplan.formulations.astra.search.modes import (
    Rows,
    Task,
    price_rows,
    result_of,
    twins,
    uniform,
)
from hetplan.formulations.astra.search.pool import Offer, Pool
from hetplan.formulations.astra.search.pricing import Assumptions, Priced
from hetplan.formulations.astra.search.result import (
    Candidate,
    Job,
    SearchResult,
    ranking,
    tied,
)
from hetplan.formulations.astra.search.rules import Column, Rule, default_rules
from hetplan.formulations.astra.search.segment_figures import (
    SegmentFigures,
    after_layers,
    segment_figures,
    segment_instance,
    segment_space,
)
from hetplan.formulations.astra.search.segments import Point, SegmentSearch
from hetplan.formulations.astra.search.space import Space, Strategies, rule_columns, strategies
from hetplan.solvers.run import Run


def columns_of(pool: Pool) -> dict[str, Column]:
    """The columns that rules may name for this pool."""
    return rule_columns(tuple(offer.name for offer in pool.offers))


def check_precision(offer: Offer, precision: str) -> None:
    """Raises InputError where the type has no units for it, with the precisions that it has."""
    known = offer.spec.peak_tflops
    if precision not in known:
        expected = f"--precision {' or '.join(sorted(known))}"
        raise InputError(
            "has no units for this precision", where=offer.name, got=precision, expected=expected
        )


def search(
    job: Job,
    pool: Pool,
    *,
    space: Space | None = None,
    rules: Sequence[Rule] | None = None,
    assumed: Assumptions | None = None,
    run: Run | None = None,
    top: int = 10,
) -> SearchResult:
    """Search the pool.

    rules: compiled for `columns_of(pool)`; None: the shipped ones. top: how many to list.
    Raises UnsupportedError for a model that is no transformer, InputError for an unusable job.
    """
    space, assumed, run = space or Space(), assumed or Assumptions(), run or Run()
    rules = default_rules(columns_of(pool)) if rules is None else rules
    for offer in pool.offers:
        check_precision(offer, job.model.precision)
    task = Task(job, pool, model_facts(job.model), space, rules, assumed, top)
    return mixed(task, run) if pool.mode == "heterogeneous" else uniform(task)


def mixed(task: Task, run: Run) -> SearchResult:
    """The Pareto set over segments and single types."""
    job, pool, facts, clock = task.job, task.pool, task.facts, task.clock
    clock.begun = time.perf_counter()
    space, size = segment_space(task.space), pool.sizes[0]
    table = strategies(
        facts,
        space,
        task.rules,
        gpus=size,
        global_batch=job.global_batch,
        whole_stages=False,
    )
    clock.lap("generate")
    figures = segment_figures(facts, table, pool.offers, task.assumed, offload=space.offload)
    room = np.where(figures.cap.max(axis=0) >= 1, figures.most, 0).sum(axis=0)
    possible = room >= table.columns["pipeline_model_parallel_size"]
    kept = np.flatnonzero(possible & ~twins(table, figures.offloaded))
    segments = Segments(task, table.take(kept), figures.take(kept))
    clock.lap("price")
    front = SegmentSearch(facts.layers, segments.table, segments.figures, run, task.top)
    points = front.front.points
    clock.lap("segments")
    alone = price_rows(task, [(i, o, size) for i, o in enumerate(pool.offers) if o.most >= size])
    priceless = any(offer.price_per_second is None for offer in pool.offers)
    dollars = [np.nan if priceless else p.money * job.iterations for p in points]

    def candidate(f: int) -> Candidate:
        if f < len(points):
            return segments.candidate(points[f])
        return alone.candidate(task, f - len(points))

    result = result_of(
        task,
        np.concatenate([[p.seconds for p in points], alone.seconds]),
        np.concatenate([dollars, alone.money]),
        candidate,
        counts={
            "generated": table.generated + alone.table.generated,
            "after_rules": table.rows + alone.after_rules,
            "in_memory": int(possible.sum()) + alone.table.rows,
            "priced": int(possible.sum()) + alone.table.rows,
        },
        top=_top(task, segments, front.top(), alone),
        proven=front.finished,
        proof=_proof(front, segments.table, alone),
        left_out=_left_out(task, alone.table.rows > 0),
        instance=lambda f: segments.instance(points[f]) if f < len(points) else None,
        details={
            "explored": front.explored,
            "stage_counts_seen": front.seen,
            "stage_counts_solved": front.solved,
            "priced_on_one_type": alone.table.rows,
        },
    )
    clock.lap("sort")
    return result


class Segments:
    """The strategies that may become segments, and how a point of the front becomes a candidate."""

    def __init__(self, task: Task, table: Strategies, figures: SegmentFigures) -> None:
        self.task, self.table, self.figures = task, table, figures

    def candidate(self, point: Point) -> Candidate:
        """A point of the front."""
        task, r, offers = self.task, point.strategy, self.task.pool.offers
        share = float(self.figures.offloaded[r])
        priceless = any(offer.price_per_second is None for offer in offers)
        money = np.nan if priceless else point.money * task.job.iterations
        one, behind = self.table.take(np.array([r])), []
        for part in point.stages:
            priced = Priced(task.facts, one, offers[part.type], task.assumed)
            reduction, update = after_layers(priced, 0, share)
            behind += [
                (float(reduction[part.kind, n - 1]), float(update[part.kind, n - 1]))
                for n in set(part.each)
            ]
        # of the stage on which the two together take longest
        reduction_seconds, optimizer_seconds = max(behind, key=sum)
        pipeline = point.seconds - reduction_seconds - optimizer_seconds
        parts = (pipeline, reduction_seconds, optimizer_seconds)
        stages = tuple((offers[part.type].name, n) for part in point.stages for n in part.each)
        return task.candidate(self.table, r, parts, money, share, stages, segments=True)

    def instance(self, point: Point) -> AstraData:
        """A point as an instance, which the exact method of problem `astra` solves to the same."""
        offers = self.task.pool.offers
        return segment_instance(self.table, offers, self.figures, point.strategy, point.stages)


def _top(
    task: Task, segments: Segments, fastest: Sequence[Point], alone: Rows
) -> tuple[Candidate, ...]:
    """The fastest strategies, each on its fastest segments; one that is on both sides is listed
    once."""
    order = ranking(task.job.tokens_per_iteration / alone.seconds, alone.money)
    order = order[~twins(alone.table, alone.share)[order]][: 2 * task.top]
    listed = [segments.candidate(point) for point in fastest]
    listed += [alone.candidate(task, int(r)) for r in order]
    seconds, money = (
        np.array([c.seconds for c in listed]),
        np.array([c.money or 0.0 for c in listed]),
    )
    distinct: dict[object, Candidate] = {}
    for i in np.lexsort((tied(money), tied(seconds))):
        key = (listed[i].stages, *listed[i].strategy.values())
        distinct.setdefault(key, listed[i])
    return tuple(distinct.values())[: task.top]


def _proof(front: SegmentSearch, table: Strategies, alone: Rows) -> str:
    if not front.finished:
        return f"stopped after {front.explored} of {table.rows} strategies: nothing is proven"
    rows = alone.table.rows
    single = f"; all {rows} on one type alone were priced" if rows else ""
    return (
        f"{front.explored} of {table.rows} strategies explored, {front.solved} choices of ends and "
        f"stage counts solved exactly of {front.seen} vectors of stage counts; lower bounds show "
        f"that the rest is beaten in time and money{single}"
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
