"""The search from pool to Pareto set: generate, filter by rules and memory, price, sort (Astra,
Figure 2).

Modes 1 and 3 take one type of device at a time. Mode 2 (Section 3.4) takes every strategy on all
segments of the offered types; beside the segments stands the whole space of modes 1 and 3 on each
type that alone has devices enough, so that a pool is never worse than a part of it of the same
size.
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
from hetplan.formulations.astra.search.words import (
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
    if pool.mode == "heterogeneous":
        result = result_of_mixed(task, OnSegments(task, run), OnOneType(task))
    else:
        result = result_of_one_type(task, OnOneType(task))
    return replace(result, seconds=time.perf_counter() - begun)


def result_of_one_type(task: Task, alone: OnOneType) -> SearchResult:
    """The result of a search on one type of device at a time."""
    return ranked(
        task,
        alone,
        counts=alone.counts,
        listed=alone.fastest(2 * task.top),
        finished=True,
        proof=proof_on_one_type(alone.table.rows),
        left_out=uneven_left_out(task.space, task.pool.sizes, task.facts.layers),
    )


def result_of_mixed(task: Task, segments: OnSegments, alone: OnOneType) -> SearchResult:
    """The result of a search on segments of several types, beside all single types that have
    devices enough."""
    mixing, rows = segments.search, alone.table.rows
    proof = no_proof(mixing.explored, segments.table.rows)
    if mixing.finished:
        proof = proof_on_segments(mixing.explored, segments.table.rows, rows)
    result = ranked(
        task,
        Union([segments, alone]),
        counts=segments.counts + alone.counts,
        listed=[*segments.fastest(), *alone.fastest(2 * task.top)],
        finished=mixing.finished,
        proof=proof,
        left_out=equal_only_left_out(task.space, rows > 0),
    )
    return replace(
        result,
        details={
            "explored": mixing.explored,
            "stage_counts_seen": mixing.seen,
            "stage_counts_solved": mixing.solved,
            "priced_on_one_type": rows,
        },
    )


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
    """Best, list and Pareto set of priced strategies.

    counts: generated, after rules, in memory. listed: candidates for the list of the fastest.
    finished: whether every strategy was looked at.
    """
    throughput, money = task.job.tokens_per_iteration / priced.seconds, priced.money
    limit = task.job.money_limit
    named = dict(zip(("generated", "after_rules", "in_memory"), counts.tolist(), strict=True))
    named["priced"] = named["in_memory"]  # all that fit are
    best = best_under(limit, throughput, money)
    reason = ""
    if best is None:
        reason = why_nothing(named, money, limit, task.facts.layers, left_out, finished)
    return SearchResult(
        mode=task.pool.mode,
        counts=named,
        best=None if best is None else priced.candidate(best),
        top=distinct(listed)[: task.top],
        pareto=tuple(priced.candidate(number) for number in pareto(throughput, money).tolist()),
        proven=finished,
        proof=proof,
        reason=reason,
        points=tuple(
            (speed, None if math.isnan(dollars) else dollars)
            for speed, dollars in zip(throughput.tolist(), money.tolist(), strict=True)
        ),
        instance=None if best is None else instance_of(priced, best),
        left_out=left_out,
    )


def instance_of(priced: PricedSet, number: int) -> AstraData | None:
    """A strategy on segments as an instance of problem `astra`; None on one type."""
    if not isinstance(priced, Union):
        return None
    one, within = priced.located(number)
    return one.instance(within) if isinstance(one, OnSegments) else None


def distinct(listed: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Candidates by seconds, then money. A strategy on the same stages, found on segments and on
    one type, is listed once."""
    seconds = np.array([candidate.seconds for candidate in listed])
    money = np.array([candidate.money or 0.0 for candidate in listed])
    once: dict[object, Candidate] = {}
    for i in np.lexsort((tied(money), tied(seconds))):
        once.setdefault((listed[i].stages, *listed[i].strategy.values()), listed[i])
    return tuple(once.values())


def columns_of(pool: Pool) -> dict[str, Column]:
    """The columns that rules may name for this pool."""
    return rule_columns(tuple(offer.name for offer in pool.offers))
