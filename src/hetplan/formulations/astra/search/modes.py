"""The search of each mode, from generated strategies to the ranked result (Astra, Figure 2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hetplan.formulations.astra.data import AstraData
from hetplan.formulations.astra.search.efficiency import Floats
from hetplan.formulations.astra.search.facts import ModelFacts
from hetplan.formulations.astra.search.job import Clock, Job
from hetplan.formulations.astra.search.memory import offload_share, stage_peaks
from hetplan.formulations.astra.search.pareto import best_under, pareto, ranking
from hetplan.formulations.astra.search.pool import Offer, Pool
from hetplan.formulations.astra.search.pricing import Assumptions, Priced, iteration_seconds
from hetplan.formulations.astra.search.result import Candidate, Found, Segment, stages_of
from hetplan.formulations.astra.search.rules import Rule
from hetplan.formulations.astra.search.segment_figures import (
    SegmentFigures,
    confirm,
    segment_figures,
    segment_instance,
    segment_space,
    slowest_reduction,
)
from hetplan.formulations.astra.search.segments import SegmentFront, segment_front
from hetplan.formulations.astra.search.space import Space
from hetplan.formulations.astra.search.table import Strategies, joined, strategies
from hetplan.solvers.run import Run


@dataclass(frozen=True)
class Task:
    """What both kinds of search share, and how they make a candidate of a row."""

    job: Job
    pool: Pool
    facts: ModelFacts
    space: Space
    rules: Sequence[Rule]
    given: Assumptions
    top: int
    clock: Clock = field(default_factory=Clock)

    def candidate(
        self,
        table: Strategies,
        r: int,
        seconds: float,
        money: float,
        share: float,
        segments: tuple[Segment, ...],
    ) -> Candidate:
        """Row r of the table; without segments every stage holds the same."""
        row = table.row(r)
        offers = {offer.name: offer for offer in self.pool.offers}
        if segments:
            stages = stages_of(segments)
        else:
            name = self.pool.offers[int(table.columns["gpu_type"][r])].name
            P = int(table.columns["pipeline_model_parallel_size"][r])
            stages = ((name, self.facts.layers // P),) * P
        group = int(table.columns["tensor_model_parallel_size"][r] * table.columns["data_parallel_size"][r])
        return Candidate(
            seconds=seconds,
            tokens_per_second=self.job.tokens_per_iteration / seconds,
            money=None if np.isnan(money) else money,
            devices={name: count * group for name, count in Counter(name for name, _ in stages).items()},
            strategy=row,
            offloaded=share,
            stages=stages,
            stage_bytes=stage_peaks(
                self.facts, table, r, [(offers[name], n) for name, n in stages], share, self.given
            ),
            segments=segments,
        )


def uniform(task: Task) -> Found:
    """Modes 1 and 3: one type of device at a time, every stage with the same number of layers."""
    job, pool, clock = task.job, task.pool, task.clock
    tables, seconds, money, shares = [], [], [], []
    rows = 0
    for number, offer in enumerate(pool.offers):
        for size in pool.sizes:
            table = strategies(
                task.facts, task.space, task.rules, gpus=size, global_batch=job.global_batch, gpu_type=number
            )
            rows += table.rows
            clock.lap("generate")
            share = offload_share(Priced(task.facts, table, offer, task.given))
            fits = np.flatnonzero(share <= (1.0 if task.space.offload else 0.0))
            table, share = table.take(fits), share[fits]
            clock.lap("memory")
            T = iteration_seconds(Priced(task.facts, table, offer, task.given), share)
            price = offer.price_per_second
            tables.append(table)
            seconds.append(T)
            money.append(T * size * job.iterations * (np.nan if price is None else price))
            shares.append(share)
            clock.lap("price")
    table, T, M, share = joined(tables), *(np.concatenate(part) for part in (seconds, money, shares))
    throughput = job.tokens_per_iteration / T
    order, front = ranking(throughput, M), pareto(throughput, M)
    best = best_under(job.money_limit, throughput, M)
    clock.lap("sort")

    def candidate(r: int) -> Candidate:
        return task.candidate(table, r, float(T[r]), float(M[r]), float(share[r]), ())

    counts = {
        "generated": table.generated,
        "after_rules": rows,
        "in_memory": table.rows,
        "priced": table.rows,
    }
    return Found(
        mode=pool.mode,
        counts=counts,
        timings=clock.phases,
        best=None if best is None else candidate(best),
        top=tuple(candidate(int(r)) for r in order[: task.top]),
        pareto=tuple(candidate(int(r)) for r in front),
        proven=True,
        proof=f"all {table.rows} strategies that pass the rules and fit in memory were priced",
        reason="" if best is not None else _why_nothing(counts, job),
        points=_points(throughput, M),
    )


def mixed(task: Task, run: Run) -> Found:
    """Mode 2: all strategies, on all segments of the offered types."""
    job, pool, facts, clock = task.job, task.pool, task.facts, task.clock
    space = segment_space(task.space)
    table = strategies(
        facts, space, task.rules, gpus=pool.sizes[0], global_batch=job.global_batch, whole_stages=False
    )
    clock.lap("generate")
    figures = segment_figures(facts, table, pool.offers, task.given, offload=space.offload)
    room = np.where(figures.cap >= 1, figures.most, 0).sum(axis=0)
    possible = room >= table.columns["pipeline_model_parallel_size"]
    # Without offloading, blocking or overlapping it makes no difference: one of the two rows is enough.
    twin = table.columns["no_overlap_offload_optimizer"] != int(space.no_overlap_offload[0])
    kept = np.flatnonzero(possible & ~(twin & (figures.offloaded == 0.0)))
    small, figures = table.take(kept), figures.take(kept)
    clock.lap("price")
    front = segment_front(facts, small, figures, run)
    clock.lap("segments")
    priceless = any(offer.price_per_second is None for offer in pool.offers)
    money = np.full(len(front.seconds), np.nan) if priceless else front.money * job.iterations
    throughput = job.tokens_per_iteration / front.seconds
    best = best_under(job.money_limit, throughput, money)
    instance = None if best is None else _best_instance(facts, small, pool.offers, figures, front, best)
    clock.lap("sort")

    def candidate(f: int) -> Candidate:
        stages, layers = front.stages[f], front.layers[f]
        segments = tuple(
            (offer.name, int(m), int(n)) for offer, m, n in zip(pool.offers, stages, layers, strict=True) if m
        )
        r = int(front.strategy[f])
        return task.candidate(
            small, r, float(front.seconds[f]), float(money[f]), float(figures.offloaded[r]), segments
        )

    counts = {
        "generated": table.generated,
        "after_rules": table.rows,
        "in_memory": int(possible.sum()),
        "priced": int(possible.sum()),
    }
    pool_front = tuple(candidate(int(f)) for f in pareto(throughput, money))
    return Found(
        mode=pool.mode,
        counts=counts,
        timings=clock.phases,
        best=None if best is None else candidate(best),
        top=pool_front[: task.top],
        pareto=pool_front,
        proven=front.finished,
        proof=_mixed_proof(front, small),
        reason="" if best is not None else _why_nothing(counts, job),
        points=_points(throughput, money),
        instance=instance,
        details={
            "explored": front.explored,
            "stage_counts_seen": front.seen,
            "stage_counts_solved": front.solved,
        },
    )


def _points(throughput: Floats, money: Floats) -> tuple[tuple[float, float | None], ...]:
    return tuple(
        (float(x), None if np.isnan(y) else float(y)) for x, y in zip(throughput, money, strict=True)
    )


def _mixed_proof(front: SegmentFront, table: Strategies) -> str:
    if not front.finished:
        return f"stopped after {front.explored} of {table.rows} strategies: nothing is proven"
    return (
        f"{front.explored} of {table.rows} strategies explored, {front.solved} of {front.seen} vectors of "
        "stage counts solved exactly; lower bounds show that the rest is beaten in time and money"
    )


def _best_instance(
    facts: ModelFacts,
    table: Strategies,
    offers: Sequence[Offer],
    figures: SegmentFigures,
    front: SegmentFront,
    f: int,
) -> AstraData:
    """The segments of point f as an instance, which the exact method of problem `astra` must solve to the
    same.

    Where a money limit chose another point than the fastest, the instance offers no more devices than it
    uses.
    """
    r = int(front.strategy[f])
    stages = front.stages[f]
    group = int(table.columns["tensor_model_parallel_size"][r] * table.columns["data_parallel_size"][r])
    if front.seconds[f] > front.seconds.min():
        offers = [replace(offer, most=int(m) * group) for offer, m in zip(offers, stages, strict=True)]
    slowest = slowest_reduction(figures, r, stages, front.layers[f])
    instance = segment_instance(facts, table, offers, figures, r, slowest)
    confirm(instance, float(front.seconds[f]) - slowest)
    return instance


def _why_nothing(counts: dict[str, int], job: Job) -> str:
    if counts["after_rules"] == 0:
        return "every strategy meets a rule or has degrees that do not divide"
    if counts["in_memory"] == 0:
        return f"none of {counts['after_rules']} strategies fits in memory"
    return f"no strategy costs {job.money_limit} dollars or less, or prices are unknown"
