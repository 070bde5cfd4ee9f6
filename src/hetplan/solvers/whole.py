"""A whole problem as one model of a general solver: build it, solve it, read it, within the run's
time.

What is known before the solver has said anything (a bound, a decision) is kept: it is the answer of
a run that ends while its model is still being built, and a floor for what the solver says.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from hetplan.solvers.general import CONTRADICTION, UNBUILT, Known
from hetplan.solvers.native import Answer, stopped
from hetplan.solvers.result import Outcome, Stop
from hetplan.solvers.run import Run, Stopped

A = TypeVar("A", bound=Answer)
D = TypeVar("D")
M = TypeVar("M")


@dataclass(frozen=True, kw_only=True)
class Whole(Generic[M, A, D]):
    """How a method poses its problem to a general solver.

    build: the model; it stops with `Stopped` when the run should stop (`LinearModel` and
    `cpsat.Model` see to that). ask: the solver's answer. read: the decision of an answer with a
    solution. infeasible: what to say where the solver proves that there is no decision. solver:
    name and version, should it never be asked.
    """

    build: Callable[[], M]
    ask: Callable[[M], A]
    read: Callable[[M, A], D]
    solver: str
    infeasible: str
    known: Known[D] = field(default_factory=Known)

    def solve(self, run: Run, begun: float) -> Outcome[D]:
        """Build, solve, read. begun: `time.perf_counter()` at the method's start; all since then
        counts as building."""
        known = self.known
        run.report(incumbent=known.objective, bound=known.bound)
        try:
            model = self.build()
        except Stopped:
            return Outcome(
                stop=stopped(run),
                decision=known.decision,
                bound=known.bound,
                build_seconds=time.perf_counter() - begun,
                solver=self.solver,
                message=UNBUILT,
            )
        built = time.perf_counter()
        answer = self.ask(model)
        stop, message = answer.stop, answer.message
        decision = self._better(model, answer)
        if stop is Stop.INFEASIBLE:
            stop, message = (
                (stop, message or self.infeasible)
                if decision is None
                else (Stop.ERROR, CONTRADICTION)
            )
        bounds = [bound for bound in (known.bound, answer.bound) if bound is not None]
        return Outcome(
            stop=stop,
            decision=decision,
            bound=None if stop is Stop.INFEASIBLE else max(bounds, default=None),
            build_seconds=built - begun,
            solve_seconds=time.perf_counter() - built,
            solver=answer.solver,
            message=message,
            details=answer.statistics,
        )

    def _better(self, model: M, answer: A) -> D | None:
        """The solver's decision, unless it has none or the one known before is better."""
        known = self.known
        if answer.objective is None or (
            known.objective is not None and known.objective < answer.objective
        ):
            return known.decision
        return self.read(model, answer)
