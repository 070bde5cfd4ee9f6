"""The search from pool to Pareto set: generate, filter by rules and memory, price, sort (Astra,
Figure 2).

Modes 1 and 3 take one type of device at a time. Mode 2 (Section 3.4) takes every strategy on all
segments of the offered types; beside the segments stands the whole space of modes 1 and 3 on each
type that alone has devices enough, so that a pool is never worse than a part of it of the same
size.
"""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hetplan.errors import require
from hetplan.formulations.astra.data import AstraData
from hetplan.formulations.astra.search.memory import offload_share, stage_peaks
from hetplan.formulations.astra.search.pool import Pool
from hetplan.formulations.astra.search.pricing import Priced, iteration_parts
from hetplan.formulations.astra.search.result import (
    Candidate,
    Job,
    Parts,
    SearchResult,
    best_under,
    pareto,
    ranking,
    tied,
)
from hetplan.formulations.astra.search.rules import Column, Rule, default_rules
from hetplan.formulations.astra.search.segments import (
    Point,
    SegmentSearch,
    after_layers,
    segment_figures,
    segment_instance,
    segment_space,
)
from hetplan.formulations.astra.search.space import Space, rule_columns, strategies
from hetplan.formulations.astra.search.table import Strategies, joined, nothing
from hetplan.replays.arrays import Floats
from hetplan.replays.assumptions import Assumptions
from hetplan.replays.facts import ModelFacts, model_facts
from hetplan.solvers.run import Run


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
        group = math.prod(
            int(table.columns[f"{axis}_parallel_size"][r])
            for axis in ("tensor_model", "context", "data")
        )
        seconds, counts = sum(parts), Counter(name for name, _ in stages)
        layers = {name: sum(n for other, n in stages if other == name) for name in offers}
        cut = tuple((name, counts[name], layers[name]) for name in offers if counts[name])
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
            segments=cut if segments else (),
        )


class OnOneType:
    """All strategies of equal stages on one type of device at a time, those that fit in memory.

    table: the strategies. parts [3, R]: pipeline, reduction and optimizer seconds; seconds, money,
    share of the optimizer states on the host [R]. counts: of strategies generated,
    after rules, in memory.
    """

    def __init__(self, task: Task) -> None:
        self.task, after_rules = task, 0
        offers = task.pool.offers
        tables, parts, shares = [nothing()], [np.zeros((3, 0))], [np.zeros(0)]
        for number, offer in enumerate(offers):
            for size in (size for size in task.pool.sizes if size <= offer.most):
                table = strategies(
                    task.facts,
                    task.space,
                    task.rules,
                    gpus=size,
                    global_batch=task.job.global_batch,
                    gpu_type=number,
                    whole_stages=not task.space.uneven,
                )
                after_rules += table.rows
                share = offload_share(Priced(task.facts, table, offer, task.assumed))
                fits = np.flatnonzero(share <= float(task.space.offload))
                tables.append(table.take(fits))
                shares.append(share[fits])
                parts.append(
                    np.stack(
                        iteration_parts(
                            Priced(task.facts, tables[-1], offer, task.assumed), shares[-1]
                        )
                    )
                )
        self.table, self.parts = joined(tables), np.concatenate(parts, axis=1)
        self.share, self.seconds = np.concatenate(shares), self.parts.sum(axis=0)
        prices = np.array([o.price_per_second for o in offers], dtype=np.float64)  # None is NaN
        paid = self.table.columns["num_gpus"] * prices[self.table.columns["gpu_type"]]
        self.money = self.seconds * task.job.iterations * paid
        self.counts = np.array([self.table.generated, after_rules, self.table.rows])

    def candidate(self, r: int) -> Candidate:
        """Row r: every stage holds the same."""
        task, columns = self.task, self.table.columns
        name = task.pool.offers[int(columns["gpu_type"][r])].name
        P = int(columns["pipeline_model_parallel_size"][r])
        pipeline, reduction, optimizer = self.parts[:, r].tolist()
        return task.candidate(
            self.table,
            r,
            (pipeline, reduction, optimizer),
            float(self.money[r]),
            float(self.share[r]),
            tuple((name, (task.facts.layers + place) // P) for place in reversed(range(P))),
            segments=False,
        )

    def fastest(self, count: int) -> list[Candidate]:
        """The first by throughput, then money."""
        order = ranking(self.task.job.tokens_per_iteration / self.seconds, self.money)
        order = order[~twins(self.table, self.share)[order]]
        return [self.candidate(r) for r in order[:count].tolist()]


class OnSegments:
    """All strategies on segments of several types.

    table: the strategies that may have some. points: the Pareto set. counts: of strategies
    generated, after rules, in memory.
    """

    def __init__(self, task: Task, run: Run) -> None:
        self.task, offers, space = task, task.pool.offers, segment_space(task.space)
        table = strategies(
            task.facts,
            space,
            task.rules,
            gpus=task.pool.sizes[0],
            global_batch=task.job.global_batch,
            whole_stages=False,
        )
        figures = segment_figures(task.facts, table, offers, task.assumed, offload=space.offload)
        room = np.where(figures.cap.max(axis=0) >= 1, figures.most, 0).sum(axis=0)
        possible = room >= table.columns["pipeline_model_parallel_size"]
        kept = np.flatnonzero(possible & ~twins(table, figures.offloaded))
        self.counts = np.array([table.generated, table.rows, possible.sum()])
        self.table, self.figures = table.take(kept), figures.take(kept)
        self.search = SegmentSearch(task.facts.layers, self.table, self.figures, run, task.top)
        self.points = self.search.front.points

    def money(self, point: Point) -> float:
        """Dollars for the job; NaN where a type has no price."""
        priceless = any(offer.price_per_second is None for offer in self.task.pool.offers)
        return np.nan if priceless else point.money * self.task.job.iterations

    def candidate(self, point: Point) -> Candidate:
        """A strategy on segments."""
        task, r, offers = self.task, point.strategy, self.task.pool.offers
        share = float(self.figures.offloaded[r])
        one, behind = self.table.take(np.array([r])), []
        for part in point.stages:
            reduction, update = after_layers(
                Priced(task.facts, one, offers[part.type], task.assumed), 0, share
            )
            behind += [
                (float(reduction[part.kind, n - 1]), float(update[part.kind, n - 1]))
                for n in set(part.each)
            ]
        # of the stage on which the two together take longest
        reduction_seconds, optimizer_seconds = max(behind, key=sum)
        pipeline = point.seconds - reduction_seconds - optimizer_seconds
        parts = (pipeline, reduction_seconds, optimizer_seconds)
        stages = tuple((offers[part.type].name, n) for part in point.stages for n in part.each)
        return task.candidate(self.table, r, parts, self.money(point), share, stages, segments=True)

    def instance(self, point: Point) -> AstraData:
        """A point as an instance, which the exact method of problem `astra` solves to the same."""
        return segment_instance(
            self.table, self.task.pool.offers, self.figures, point.strategy, point.stages
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
        known = offer.spec.peak_tflops
        require(
            job.model.precision in known,
            "has no units for this precision",
            where=offer.name,
            got=job.model.precision,
            expected=f"--precision {' or '.join(sorted(known))}",
        )
    task = Task(job, pool, model_facts(job.model), space, rules, assumed, top)
    begun = time.perf_counter()
    segments = OnSegments(task, run) if pool.mode == "heterogeneous" else None
    return replace(result_of(task, OnOneType(task), segments), seconds=time.perf_counter() - begun)


def result_of(task: Task, alone: OnOneType, segments: OnSegments | None) -> SearchResult:
    """Best, list and Pareto set of what was priced."""
    points, dollars, listed, sums = [], [], alone.fastest(2 * task.top), alone.counts
    proven, left_out, details = True, uneven(task), dict[str, int]()
    if segments is not None:
        points, mixing = segments.points, segments.search
        dollars = [segments.money(point) for point in points]
        listed = [*map(segments.candidate, mixing.top()), *listed]
        sums = sums + segments.counts
        proven, left_out = mixing.finished, equal_only(task, alone.table.rows > 0)
        details = {
            "explored": mixing.explored,
            "stage_counts_seen": mixing.seen,
            "stage_counts_solved": mixing.solved,
            "priced_on_one_type": alone.table.rows,
        }
    money = np.concatenate([dollars, alone.money])
    seconds = np.concatenate([[point.seconds for point in points], alone.seconds])
    throughput = task.job.tokens_per_iteration / seconds
    counts = dict(zip(("generated", "after_rules", "in_memory"), sums.tolist(), strict=True))
    counts["priced"] = counts["in_memory"]  # all that fit are
    best, instance = best_under(task.job.money_limit, throughput, money), None
    if segments is not None and best is not None and best < len(points):
        instance = segments.instance(points[best])

    def candidate(number: int) -> Candidate:
        return (
            segments.candidate(points[number])
            if segments is not None and number < len(points)
            else alone.candidate(number - len(points))
        )

    return SearchResult(
        mode=task.pool.mode,
        counts=counts,
        best=None if best is None else candidate(best),
        top=distinct(listed)[: task.top],
        pareto=tuple(candidate(number) for number in pareto(throughput, money).tolist()),
        proven=proven,
        proof=proof_of(alone, segments),
        reason="" if best is not None else why_nothing(task, counts, money, left_out, proven),
        points=tuple(
            (x, None if math.isnan(y) else y)
            for x, y in zip(throughput.tolist(), money.tolist(), strict=True)
        ),
        instance=instance,
        left_out=left_out,
        details=details,
    )


def distinct(listed: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Candidates by seconds, then money; one that is on both sides is listed once."""
    seconds = np.array([c.seconds for c in listed])
    money = np.array([c.money or 0.0 for c in listed])
    once: dict[object, Candidate] = {}
    for i in np.lexsort((tied(money), tied(seconds))):
        once.setdefault((listed[i].stages, *listed[i].strategy.values()), listed[i])
    return tuple(once.values())


def proof_of(alone: OnOneType, segments: OnSegments | None) -> str:
    """What is proven, in words."""
    rows = alone.table.rows
    if segments is None:
        return f"all {rows} strategies that pass the rules and fit in memory were priced"
    search, strategies = segments.search, segments.table.rows
    if not search.finished:
        return f"stopped after {search.explored} of {strategies} strategies: nothing is proven"
    single = f"; all {rows} on one type alone were priced" if rows else ""
    return (
        f"{search.explored} of {strategies} strategies had to be solved; by their bounds no other "
        f"is faster or cheaper{single}"
    )


def twins(table: Strategies, share: Floats) -> NDArray[np.bool_]:
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
    text = f"pipeline degrees that do not divide the {N} layers: the heterogeneous mode has them"
    return () if task.space.uneven or all(N % p == 0 for p in tried) else (text,)


def equal_only(task: Task, alone: bool) -> tuple[str, ...]:
    """What segments of several types leave out, in words; alone: whether single types have it."""
    space = task.space
    parts = {
        "virtual stages": space.interleaving,
        "hybrid recomputation": "hybrid" in space.recompute,
        "block-wise recomputation": "full" in space.recompute and "block" in space.recompute_method,
    }
    named = ", ".join(name for name, tried in parts.items() if tried)
    where = (
        "tried on each type that has all these GPUs by itself"
        if alone
        else "not tried, no type has all these GPUs by itself"
    )
    text = f"on segments of several types, {named}, which need equal stages: {where}"
    return (text,) if named else ()


def why_nothing(
    task: Task,
    counts: Mapping[str, int],
    money: Floats,
    left_out: tuple[str, ...],
    finished: bool,
) -> str:
    """Why no strategy is best."""
    limit, cheapest = task.job.money_limit, np.fmin.reduce(money, initial=np.inf)
    rules, room, nothing_priced = counts["after_rules"], counts["in_memory"], len(money) == 0
    reasons = (
        (counts["generated"] == 0, "; ".join(("there is nothing to try", *left_out))),
        (rules == 0, "every strategy meets a rule or has degrees that do not divide"),
        (room == 0, f"none of {rules} strategies fits in memory"),
        (
            nothing_priced and finished,
            f"no segments of {room} strategies hold all {task.facts.layers} layers in memory",
        ),
        (nothing_priced, "no strategy was explored in time"),
        (np.isnan(money).all(), f"no price is known to keep within {limit} dollars"),
    )
    dear = f"no strategy costs {limit} dollars or less: the cheapest costs {cheapest:.6g}"
    return next((text for holds, text in reasons if holds), dear)


def columns_of(pool: Pool) -> dict[str, Column]:
    """The columns that rules may name for this pool."""
    return rule_columns(tuple(offer.name for offer in pool.offers))
