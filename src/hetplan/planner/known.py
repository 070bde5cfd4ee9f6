"""Proven answers of one planning that serve the next one: where a problem has the same data, it has
the same answer, whatever else of the cluster has changed.

Answers are kept only while `remembering`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hetplan.solvers.registry import Family, solve
from hetplan.solvers.result import Result
from hetplan.solvers.run import Run

T = TypeVar("T")


@dataclass
class Known:
    """What is proven so far."""

    proven: list[tuple[str, Any, Any]] = field(default_factory=list)  # problem, data, answer
    decided: list[str] = field(default_factory=list)  # a line for each that was not solved again


_KNOWN: ContextVar[Known | None] = ContextVar("known", default=None)


@contextmanager
def remembering(known: Known) -> Iterator[Known]:
    """While this lasts, proven answers are kept in `known` and taken from it."""
    token = _KNOWN.set(known)
    try:
        yield known
    finally:
        _KNOWN.reset(token)


def solve_unless_known(family: Family, data: Any, method: str, run: Run) -> Result[Any]:
    """The method's result; the exact one (`auto`) is not run again on data that it has proven."""
    if method != "auto":
        return solve(family, data, method, run)
    return answer_unless_known(
        family.name,
        data,
        lambda result: result.status in ("optimal", "infeasible"),
        lambda: solve(family, data, method, run),
    )


def answer_unless_known(
    problem: str, data: object, proven: Callable[[T], bool], solve: Callable[[], T]
) -> T:
    """The answer to a problem on these data, solved only where it is not known."""
    known = _KNOWN.get() or Known()  # thrown away at the end where nothing is `remembering`
    for name, before, answer in known.proven:
        if (name, before) == (problem, data):
            known.decided.append(f"{problem}: the same problem as before")
            same: T = answer
            return same
    answer = solve()
    if proven(answer):
        known.proven.append((problem, data, answer))
    return answer
