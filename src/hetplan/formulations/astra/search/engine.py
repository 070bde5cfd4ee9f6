"""The search of a pool for its best strategies: it generates strategies, filters them by rules and
memory, prices them and returns the Pareto set (Astra, Figure 2).

Modes 1 and 3 place a strategy on one type of device at a time. Mode 2 (Section 3.4) places each
strategy on segments of the offered types. It also searches the space of modes 1 and 3 on each type
that has enough devices by itself. So a pool of several types is never worse than one of its types
with the same number of devices.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hetplan.errors import require
from hetplan.formulations.astra.data import AstraData
from hetplan.formulations.astra.search.pool import Pool
from hetplan.formulations.astra.search.priced_sets import (
    OnOneType,
    OnSegments,
    PricedSet,
    Task,
    Union,
)
from hetplan.formulations.astra.search.result import (
    Candidate,
    Job,
    SearchResult,
    best_under,
    pareto,
    tied,
)
from hetplan.formulations.astra.search.rules import Column, Rule, default_rules
from hetplan.formulations.astra.search.space import Space, rule_columns
from hetplan.formulations.astra.search.texts import (
    equal_only_left_out,
    no_proof,
    proof_on_one_type,
    proof_on_segments,
    uneven_left_out,
    why_nothing,
)
from hetplan.replays.arrays import Ints
from hetplan.replays.assumptions import Assumptions
from hetplan.replays.facts import model_facts
from hetplan.solvers.run import Run


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
    """The result of a search of a pool for a training job.

    space: the degrees and options to try; None: all by default. rules: compiled for
    `columns_of(pool)`; None: `default_rules`. assumed: assumptions of pricing and memory. run:
    the time limit, for mode 2. top: how many of the fastest strategies the result lists.
    Raises UnsupportedError for a model that is no transformer, InputError for an unusable job.
    """
    space = space or Space()
    assumed = assumed or Assumptions()
    run = run or Run()
    rules = default_rules(columns_of(pool)) if rules is None else rules
    check_precision(job, pool)
    task = Task(job, pool, model_facts(job.model), space, rules, assumed, top)
    begun = time.perf_counter()
    if pool.mode == "heterogeneous":
        result = result_of_mixed(task, OnSegments(task, run), OnOneType(task))
    else:
        result = result_of_one_type(task, OnOneType(task))
    return replace(result, seconds=time.perf_counter() - begun)


def check_precision(job: Job, pool: Pool) -> None:
    """Raise InputError for a device type that cannot compute in the precision of the job."""
    for offer in pool.offers:
        precisions = offer.spec.peak_tflops
        require(
            job.model.precision in precisions,
            "has no units for this precision",
            where=offer.name,
            got=job.model.precision,
            expected=f"--precision {' or '.join(sorted(precisions))}",
        )


def result_of_one_type(task: Task, on_one_type: OnOneType) -> SearchResult:
    """The result of modes 1 and 3: strategies on one type of device at a time."""
    return ranked(
        task,
        on_one_type,
        counts=on_one_type.counts,
        listed=on_one_type.fastest(2 * task.top),  # more than `top`: `distinct` drops some
        finished=True,
        proof=proof_on_one_type(on_one_type.table.rows),
        left_out=uneven_left_out(task.space, task.pool.sizes, task.facts.layers),
    )


def result_of_mixed(task: Task, on_segments: OnSegments, on_one_type: OnOneType) -> SearchResult:
    """The result of mode 2: strategies on segments of several types, and strategies on each single
    type that has enough devices."""
    search = on_segments.search
    strategies = on_segments.table.rows
    priced_on_one_type = on_one_type.table.rows
    if search.finished:
        proof = proof_on_segments(search.explored, strategies, priced_on_one_type)
    else:
        proof = no_proof(search.explored, strategies)
    result = ranked(
        task,
        Union([on_segments, on_one_type]),
        counts=on_segments.counts + on_one_type.counts,
        # `distinct` drops the candidates on one type that are among those on segments as well. Of
        # 2 * top candidates on one type, at least `top` therefore remain.
        listed=[*on_segments.fastest(), *on_one_type.fastest(2 * task.top)],
        finished=search.finished,
        proof=proof,
        left_out=equal_only_left_out(task.space, priced_on_one_type > 0),
    )
    details = {
        "explored": search.explored,
        "stage_counts_seen": search.seen,
        "stage_counts_solved": search.solved,
        "priced_on_one_type": priced_on_one_type,
    }
    return replace(result, details=details)


def ranked(
    task: Task,
    priced: PricedSet,
    *,
    counts: Ints,
    listed: Sequence[Candidate],
    finished: bool,
    proof: str,
    left_out: tuple[str, ...],
) -> SearchResult:
    """The result of a search: the best of the priced strategies, the fastest ones and the Pareto
    set.

    counts: [3] strategies generated, after rules, in memory. listed: candidates for the list of the
    fastest strategies. finished: whether the search explored every strategy. proof, left_out: see
    `SearchResult`.
    """
    throughput = task.job.tokens_per_iteration / priced.seconds  # [n] tokens per second
    money = priced.money
    limit = task.job.money_limit
    generated, after_rules, in_memory = counts.tolist()
    named_counts = {
        "generated": generated,
        "after_rules": after_rules,
        "in_memory": in_memory,
        "priced": in_memory,  # every strategy that fits in memory is priced
    }
    best = instance = None
    reason = ""
    best_number = best_under(limit, throughput, money)
    if best_number is None:
        reason = why_nothing(named_counts, money, limit, task.facts.layers, left_out, finished)
    else:
        best = priced.candidate(best_number)
        instance = instance_of(priced, best_number)
    points = [
        (speed, None if math.isnan(dollars) else dollars)
        for speed, dollars in zip(throughput.tolist(), money.tolist(), strict=True)
    ]
    return SearchResult(
        mode=task.pool.mode,
        counts=named_counts,
        best=best,
        top=distinct(listed)[: task.top],
        pareto=tuple(priced.candidate(number) for number in pareto(throughput, money).tolist()),
        proven=finished,
        proof=proof,
        reason=reason,
        points=tuple(points),
        instance=instance,
        left_out=left_out,
    )


def instance_of(priced: PricedSet, number: int) -> AstraData | None:
    """A strategy on segments as an instance of problem `astra`; None for a strategy on one type."""
    if not isinstance(priced, Union):
        return None
    subset, number_in_subset = priced.located(number)
    if not isinstance(subset, OnSegments):
        return None
    return subset.instance(number_in_subset)


def distinct(listed: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The candidates in ascending order of seconds, then of money. Of candidates with the same
    strategy and stages, which both kinds of search may find, only the first remains."""
    seconds = np.array([candidate.seconds for candidate in listed])
    money = np.array([candidate.money or 0.0 for candidate in listed])
    first: dict[object, Candidate] = {}  # (stages, values of the strategy) -> candidate
    for number in np.lexsort((tied(money), tied(seconds))):
        candidate = listed[number]
        key = (candidate.stages, *candidate.strategy.values())
        first.setdefault(key, candidate)
    return tuple(first.values())


def columns_of(pool: Pool) -> dict[str, Column]:
    """The columns that rules may name for this pool."""
    return rule_columns(tuple(offer.name for offer in pool.offers))
