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
from typing import Any, TypeVar, cast

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
    """What is proven so far; one of its own for each problem where nothing is remembered."""

    proven: list[tuple[str, Any, Any]] = field(default_factory=list)  # what, its data, the answer
    decided: list[str] = field(default_factory=list)  # a line for each that was not solved


_KNOWN: ContextVar[Known | None] = ContextVar("known", default=None)


@contextmanager
def remembering(known: Known) -> Iterator[Known]:
    """While this lasts, proven results are kept in `known` and taken from it."""
    token = _KNOWN.set(known)
    try:
        yield known
    finally:
        _KNOWN.reset(token)


def solved(family: Family, data: Any, method: str, run: Run) -> Result[Any]:
    """The method's result; of the exact one (`auto`) not run where the answer is known."""
    known = (_KNOWN.get() if method == "auto" else None) or Known()
    for name, before, result in reversed(known.proven):
        now = carried(family, before, data, result) if name == family.name else None
        if now is not None:
            known.decided.append(f"{name}: {now.message}")
            return now
    result = solve(family, data, method, run)
    if result.status in ("optimal", "infeasible"):
        known.proven.append((family.name, data, result))
    return result


def computed(what: str, key: object, proven: Callable[[T], bool], compute: Callable[[], T]) -> T:
    """`compute()`, not run where it was proven for an equal key: theorem (1) for what is no
    family's problem."""
    known = _KNOWN.get() or Known()
    for name, before, value in known.proven:
        if (name, before) == (what, key):
            known.decided.append(f"{what}: {SAME}")
            return cast(T, value)
    value = compute()
    if proven(value):
        known.proven.append((what, key, value))
    return value


def carried(family: Family, before: Any, now: Any, result: Result[Any]) -> Result[Any] | None:
    """What a proven result says of changed data; None where that is not all."""
    if before == now:
        return restated(result, SAME)
    if isinstance(now, DittoData) and fewer_nodes(before, now):
        if result.decision is None:
            return restated(result, NONE_LEFT)
        return still_optimal(family, now, result, FEWER)
    # (3): nothing but bandwidths differs
    if isinstance(now, AmpData) and now == before.model_copy(update={"bandwidth": now.bandwidth}):
        if result.decision is None:
            return restated(result, MEMORY)
        if np.all(np.asarray(now.bandwidth) <= np.asarray(before.bandwidth)):
            return still_optimal(family, now, result, SLOWER)
    return None


def restated(result: Result[Any], why: str) -> Result[Any]:
    """The result, without the seconds that it took before."""
    return replace(result, build_seconds=0.0, solve_seconds=0.0, message=why)


def still_optimal(family: Family, now: Any, result: Result[Any], why: str) -> Result[Any] | None:
    """The result where its decision, priced on the changed data, still costs no more than the
    bound."""
    objective = evaluate(family, now, result.decision).objective
    if objective is None or result.bound is None or result.bound < objective * (1 - OPTIMAL_GAP):
        return None
    bound = min(result.bound, objective)
    return restated(replace(result, objective=objective, bound=bound), why)


def fewer_nodes(before: DittoData, now: DittoData) -> bool:
    """Whether `now` is `before` with fewer nodes of some types, or without them; layers hold the
    same, and devices of the types that are left have the same room."""
    nodes = {kind.name: kind.nodes for kind in now.device_types}
    if any(nodes.get(kind.name, 0) > kind.nodes for kind in before.device_types):
        return False
    left = [
        kind.model_copy(update={"nodes": nodes[kind.name]})
        for kind in before.device_types
        if kind.name in nodes
    ]
    memory = before.memory
    if memory is not None:
        rooms = {name: size for name, size in memory.device_bytes.items() if name in nodes}
        memory = memory.model_copy(update={"device_bytes": rooms})
    return now == before.model_copy(update={"device_types": left, "memory": memory})
