"""Optima that are known without solving: what is proven of one problem carries over to a changed
one.

Only theorems, and only of problems solved to the proof (or proven infeasible) while `remembering`:
(1) The same data have the same answer, whatever else of the cluster has changed.
(2) Ditto's price of a template does not depend on how many nodes there are. With fewer nodes of
    some types the templates are some of those before: a bound holds, no template before is none
    now, and an optimal template that fits in what is left stays optimal.
(3) AMP's price of a decision never falls as bandwidths fall, and memory does not depend on them:
    with no link faster, a bound holds, and an optimal decision whose price is still the bound (no
    slower link is on its way) stays optimal.
    Whether anything fits in memory is the same on any network.
Every decision that is carried over is priced by the independent evaluator on the changed data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from hetplan.formulations.amp.data import AmpData
from hetplan.formulations.ditto.data import DittoData
from hetplan.solvers.registry import Family, evaluate, solve
from hetplan.solvers.result import OPTIMAL_GAP, Result
from hetplan.solvers.run import Run

T = TypeVar("T")
SAME = "the same problem as before"
FEWER = "still optimal: fewer nodes leave fewer templates"
NONE_LEFT = "fewer nodes leave fewer templates, and there was none"
SLOWER = "still optimal: no slower link is on its way"
MEMORY = "memory does not depend on the network"


@dataclass
class Known:
    """Proven results so far, and what was decided by them: a line each."""

    results: list[tuple[str, Any, Result[Any]]] = field(default_factory=list)
    others: list[tuple[object, Any]] = field(default_factory=list)
    decided: list[str] = field(default_factory=list)

    def answer(self, family: Family, data: Any) -> Result[Any] | None:
        """The proven result of the family's exact method on `data`, None where no theorem gives
        it."""
        for name, before, result in reversed(self.results):
            if name != family.name:
                continue
            found = carried(family, before, data, result)
            if found is not None:
                self.decided.append(f"{name}: {found.message}")
                return found
        return None


_KNOWN: ContextVar[Known | None] = ContextVar("known", default=None)


@contextmanager
def remembering(known: Known) -> Iterator[Known]:
    """While this lasts, proven results are kept in `known` and taken from it."""
    token = _KNOWN.set(known)
    try:
        yield known
    finally:
        _KNOWN.reset(token)


def solve_unless_known(family: Family, data: Any, run: Run) -> Result[Any]:
    """The family's exact method (`auto`), not run where the answer is known."""
    known = _KNOWN.get()
    if known is None:
        return solve(family, data, "auto", run)
    found = known.answer(family, data)
    if found is not None:
        return found
    result = solve(family, data, "auto", run)
    if result.status in ("optimal", "infeasible"):
        known.results.append((family.name, data, result))
    return result


def compute_unless_known(
    what: str, key: object, proven: Callable[[T], bool], compute: Callable[[], T]
) -> T:
    """`compute()`, not run where it was proven for an equal key: theorem (1) for what is no
    family's problem."""
    known = _KNOWN.get()
    if known is None:
        return compute()
    for before, value in known.others:
        if before == key:
            known.decided.append(f"{what}: {SAME}")
            found: T = value
            return found
    result = compute()
    if proven(result):
        known.others.append((key, result))
    return result


def carried(family: Family, before: Any, now: Any, result: Result[Any]) -> Result[Any] | None:
    """What a proven result says of changed data; None where that is not all."""
    if before == now:
        return told(result, SAME)
    if isinstance(now, DittoData) and fewer_nodes(before, now):
        if result.decision is None:
            return told(result, NONE_LEFT)
        return still_optimal(family, now, result, FEWER)
    if isinstance(now, AmpData) and other_network(before, now):
        if result.decision is None:
            return told(result, MEMORY)
        if np.all(np.asarray(now.bandwidth) <= np.asarray(before.bandwidth)):
            return still_optimal(family, now, result, SLOWER)
    return None


def told(result: Result[Any], why: str) -> Result[Any]:
    """The result, without the seconds that it took before."""
    return replace(result, build_seconds=0.0, solve_seconds=0.0, message=why)


def still_optimal(family: Family, now: Any, result: Result[Any], why: str) -> Result[Any] | None:
    """The result where its decision, priced on the changed data, still costs no more than the
    bound."""
    objective = evaluate(family, now, result.decision).objective
    if objective is None or result.bound is None or result.bound < objective * (1 - OPTIMAL_GAP):
        return None
    return told(replace(result, objective=objective, bound=min(result.bound, objective)), why)


def fewer_nodes(before: DittoData, now: DittoData) -> bool:
    """Whether `now` is `before` with fewer nodes of some types, or without them."""
    known = {kind.name: kind for kind in before.device_types}
    if before.micro_batches != now.micro_batches or not same_memory(before, now):
        return False
    return all(
        kind.name in known
        and kind.nodes <= known[kind.name].nodes
        and kind == known[kind.name].model_copy(update={"nodes": kind.nodes})
        for kind in now.device_types
    )


def same_memory(before: DittoData, now: DittoData) -> bool:
    """Whether layers hold the same, and devices of the types that are left have the same room."""
    if before.memory is None or now.memory is None:
        return before.memory is now.memory
    rooms = {kind.name: before.memory.device_bytes.get(kind.name) for kind in now.device_types}
    return now.memory == before.memory.model_copy(update={"device_bytes": rooms})


def other_network(before: AmpData, now: AmpData) -> bool:
    """Whether nothing but bandwidths differs."""
    return now == before.model_copy(update={"bandwidth": now.bandwidth})
