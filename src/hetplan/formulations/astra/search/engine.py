"""The search from pool to Pareto set: generate, filter by rules and memory, price, sort (Astra,
Figure 2)."""

from __future__ import annotations

from collections.abc import Sequence

from hetplan.errors import InputError
from hetplan.formulations.astra.search.facts import model_facts
from hetplan.formulations.astra.search.mixed import mixed
from hetplan.formulations.astra.search.modes import Task, uniform
from hetplan.formulations.astra.search.pool import Offer, Pool
from hetplan.formulations.astra.search.pricing import Assumptions
from hetplan.formulations.astra.search.result import Found, Job
from hetplan.formulations.astra.search.rules import Rule, default_rules
from hetplan.formulations.astra.search.space import Schema, Space
from hetplan.solvers.run import Run


def schema_of(pool: Pool) -> Schema:
    """The columns that rules may name for this pool."""
    return Schema(tuple(offer.name for offer in pool.offers))


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
    given: Assumptions | None = None,
    run: Run | None = None,
    top: int = 10,
) -> Found:
    """Search the pool. rules: compiled for `schema_of(pool)`; None: the shipped ones. top: how many
    to list.

    Raises UnsupportedError for a model that is no transformer, InputError for an unusable job.
    """
    space, given, run = space or Space(), given or Assumptions(), run or Run()
    rules = default_rules(schema_of(pool).columns) if rules is None else rules
    for offer in pool.offers:
        check_precision(offer, job.model.precision)
    facts = model_facts(job.model)
    task = Task(job, pool, facts, space, rules, given, top)
    return mixed(task, run) if pool.mode == "heterogeneous" else uniform(task)
