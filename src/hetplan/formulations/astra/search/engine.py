"""The search from pool to Pareto set: generate, filter by rules and memory, price, sort (Astra,
Figure 2).

Modes 1 and 3 (`uniform`) take one type of device at a time. Mode 2 (`mixed`, Section 3.4) takes
every strategy on all segments of the offered types; beside the segments stands the whole space of
modes 1 and 3 on each type that alone has devices enough, so that a pool is never worse than a part
of it of the same size.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hetplan.errors import InputError
from hetplan.formulations.astra.data import AstraData
from hetplan.formulations.astra.search.facts import ModelFacts, model_facts
from hetplan.formulations.astra.search.pool import Offer, Pool
from hetplan.formulations.astra.search.pricing import (
    Assumptions,
    Priced,
    iteration_parts,
    offload_share,
    stage_peaks,
)
from hetplan.formulations.astra.search.result import (
    Candidate,
    Clock,
    Job,
    Parts,
    SearchResult,
    best_under,
    pareto,
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
from hetplan.formulations.astra.search.space import (
    Space,
    Strategies,
    joined,
    nothing,
    rule_columns,
    strategies,
)
from hetplan.formulations.astra.search.timing import Floats
from hetplan.solvers.run import Run

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Task:
    """What all searches share, and how they make a candidate of a row."""

    job: Job
    pool: Pool
    facts: ModelFacts
    space: Space
    rules: Sequence[Rule]
    assumed: Assumptions
    top: int
    clock: Clock = field(default_factory=Clock)

    def candidate(
        self,
        table: Strategies,
        r: int,
        parts: Parts,
        money: float,
        share: float,
        stages: tuple[tuple[str, int], ...],
        *,
        segments: bool,
    ) -> Candidate:
        """Row r of the table on those stages; segments: whether they were chosen."""
        offers = {offer.name: offer for offer in self.pool.offers}
        group = int(
            table.columns["tensor_model_parallel_size"][r] * table.columns["data_parallel_size"][r]
        )
        seconds, counts = sum(parts), Counter(name for name, _ in stages)
        layers = {name: sum(n for other, n in stages if other == name) for name in offers}
        return Candidate(
            seconds=seconds,
            parts=parts,
            tokens_per_second=self.job.tokens_per_iteration / seconds,
            money=None if np.isnan(money) else money,
            devices={name: count * group for name, count in counts.items()},
            strategy=table.row(r),
            offloaded=share,
            stages=stages,
            stage_bytes=stage_peaks(
                self.facts, table, r, [(offers[name], n) for name, n in stages], share, self.assumed
            ),
            segments=tuple((name, counts[name], layers[name]) for name in offers if counts[name])
            if segments
            else (),
        )


@dataclass(frozen=True)
class Rows:
    """Priced strategies of one type each. parts [3, R]: pipeline, reduction and optimizer seconds;
    money, share [R].

    after_rules: strategies before the memory filter.
    """

    table: Strategies
    parts: Floats
    money: Floats
    share: Floats
    after_rules: int

    @property
    def seconds(self) -> Floats:
        """T [R]."""
        return np.asarray(self.parts[0] + self.parts[1] + self.parts[2])

    def candidate(self, task: Task, r: int) -> Candidate:
        """Row r: every stage holds the same."""
        name = task.pool.offers[int(self.table.columns["gpu_type"][r])].name
        P = int(self.table.columns["pipeline_model_parallel_size"][r])
        pipeline, reduction, optimizer = (float(v) for v in self.parts[:, r])
        stages = ((name, task.facts.layers // P),) * P
        parts = (pipeline, reduction, optimizer)
        return task.candidate(
            self.table, r, parts, float(self.money[r]), float(self.share[r]), stages, segments=False
        )


def price_rows(task: Task, pairs: Sequence[tuple[int, Offer, int]]) -> Rows:
    """All strategies of every (number in the pool, type, GPUs) that fit in memory."""
    job, clock = task.job, task.clock
    tables, parts, money, shares = [nothing()], [np.zeros((3, 0))], [np.zeros(0)], [np.zeros(0)]
    after_rules = 0
    for number, offer, size in pairs:
        table = strategies(
            task.facts,
            task.space,
            task.rules,
            gpus=size,
            global_batch=job.global_batch,
            gpu_type=number,
        )
        after_rules += table.rows
        clock.lap("generate")
        share = offload_share(Priced(task.facts, table, offer, task.assumed))
        fits = np.flatnonzero(share <= (1.0 if task.space.offload else 0.0))
        table, share = table.take(fits), share[fits]
        clock.lap("memory")
        part = np.stack(iteration_parts(Priced(task.facts, table, offer, task.assumed), share))
        price = offer.price_per_second
        paid = size * job.iterations * (np.nan if price is None else price)
        tables.append(table)
        parts.append(part)
        money.append(part.sum(axis=0) * paid)
        shares.append(share)
        clock.lap("price")
    return Rows(
        joined(tables),
        np.concatenate(parts, axis=1),
        np.concatenate(money),
        np.concatenate(shares),
        after_rules,
    )


def uniform(task: Task) -> SearchResult:
    """Modes 1 and 3: one type of device at a time, every stage with the same number of layers."""
    pool = task.pool
    rows = price_rows(
        task, [(i, o, size) for i, o in enumerate(pool.offers) for size in pool.sizes]
    )
    order = ranking(task.job.tokens_per_iteration / rows.seconds, rows.money)
    order = order[~twins(rows.table, rows.share)[order]]
    result = result_of(
        task,
        rows.seconds,
        rows.money,
        lambda r: rows.candidate(task, r),
        counts={
            "generated": rows.table.generated,
            "after_rules": rows.after_rules,
            "in_memory": rows.table.rows,
            "priced": rows.table.rows,
        },
        top=tuple(rows.candidate(task, r) for r in order[: task.top].tolist()),
        proof=f"all {rows.table.rows} strategies that pass the rules and fit in memory were priced",
        left_out=uneven(task),
    )
    task.clock.lap("sort")
    return result


def result_of(
    task: Task,
    seconds: Floats,
    money: Floats,
    candidate: Callable[[int], Candidate],
    *,
    counts: Mapping[str, int],
    top: tuple[Candidate, ...],
    proof: str,
    left_out: tuple[str, ...],
    proven: bool = True,
    instance: Callable[[int], AstraData | None] = lambda _: None,
    details: Mapping[str, object] | None = None,
) -> SearchResult:
    """Best and Pareto set of what was priced; candidate, instance: of one of them, by number."""
    throughput = task.job.tokens_per_iteration / seconds
    best = best_under(task.job.money_limit, throughput, money)
    return SearchResult(
        mode=task.pool.mode,
        counts=counts,
        timings=task.clock.phases,
        best=None if best is None else candidate(best),
        top=top,
        pareto=tuple(candidate(f) for f in pareto(throughput, money).tolist()),
        proven=proven,
        proof=proof,
        reason="" if best is not None else why_nothing(task, counts, money, left_out, proven),
        points=tuple(
            (x, None if math.isnan(y) else y)
            for x, y in zip(throughput.tolist(), money.tolist(), strict=True)
        ),
        instance=None if best is None else instance(best),
        left_out=left_out,
        details=details or {},
    )


def twins(table: Strategies, share: Floats) -> Bools:
    """[R] whether a strategy differs from the one before in how it overlaps offloading alone, and
    neither offloads."""
    same = np.ones(table.rows, bool)
    same[:1] = False
    for name, column in table.columns.items():
        if name != "no_overlap_offload_optimizer":
            same[1:] &= column[1:] == column[:-1]
    same[1:] &= (share[1:] == 0.0) & (share[:-1] == 0.0)
    return same


def uneven(task: Task) -> tuple[str, ...]:
    """What equal stages leave out, in words."""
    N, sizes = task.facts.layers, task.pool.sizes
    tried = [p for p in task.space.pipeline or range(1, N + 1) if p <= min(max(sizes), N)]
    if all(N % p == 0 for p in tried):
        return ()
    return (f"pipeline degrees that do not divide the {N} layers: the heterogeneous mode has them",)


def why_nothing(
    task: Task,
    counts: Mapping[str, int],
    money: Floats,
    left_out: tuple[str, ...],
    finished: bool,
) -> str:
    """Why no strategy is best."""
    limit = task.job.money_limit
    if counts["generated"] == 0:
        return "; ".join(("there is nothing to try", *left_out))
    if counts["after_rules"] == 0:
        return "every strategy meets a rule or has degrees that do not divide"
    if counts["in_memory"] == 0:
        return f"none of {counts['after_rules']} strategies fits in memory"
    if len(money) == 0 and finished:
        return (
            f"no segments of {counts['in_memory']} strategies hold all {task.facts.layers} "
            "layers in memory"
        )
    if len(money) == 0:
        return "no strategy was explored in time"
    if np.isnan(money).all():
        return f"no price is known to keep within {limit} dollars"
    return f"no strategy costs {limit} dollars or less: the cheapest costs {np.nanmin(money):.6g}"


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
