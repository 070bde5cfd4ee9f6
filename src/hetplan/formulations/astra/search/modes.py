"""The modes that take one type of device at a time, from generated strategies to the ranked result
(Astra, Figure 2).

`Task` and the helpers serve mode 2 as well (`engine`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hetplan.formulations.astra.data import AstraData
from hetplan.formulations.astra.search.facts import ModelFacts
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
)
from hetplan.formulations.astra.search.rules import Rule
from hetplan.formulations.astra.search.space import Space, Strategies, joined, nothing, strategies
from hetplan.formulations.astra.search.timing import Floats

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
