"""General solvers: from a stated model to an `Outcome`, by the method's name.

A family's methods `cp-sat`, `milp` and `pyomo` name one function `formulate(data, run)`; it returns
a `Formulation`, or an `Outcome` where no model is needed to know the answer. `solve_with` builds
the model, has the solver minimise it, reads the decision, and keeps what is known when time runs
out. `minimise` is one model alone, for methods that ask for several.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic

from hetplan.clock import CLOCK
from hetplan.solvers.model import Model, ModelAnswer
from hetplan.solvers.native import UNCLEAR, Sink
from hetplan.solvers.run import (
    HIGHS,
    D,
    Options,
    Outcome,
    Run,
    Stop,
    Stopped,
    engine,
    stop_reason,
)

# Method -> the driver that minimises a `Model`, imported when it is used.
DRIVERS = {
    "cp-sat": "hetplan.solvers.cpsat",
    "milp": "hetplan.solvers.highs",
    "pyomo": "hetplan.solvers.pyomo_driver",
}
UNBUILT = "stopped before its model was built"
CONTRADICTION = "the solver calls infeasible what has a decision"


@dataclass(frozen=True, kw_only=True)
class Known(Generic[D]):
    """A bound and a decision that are known without a model. bound: proven; objective: of
    `decision`; both in the instance's unit."""

    bound: float | None = None
    decision: D | None = None
    objective: float | None = None


@dataclass(frozen=True, kw_only=True)
class Formulation(Generic[D]):
    """A method's problem as a general solver takes it.

    build: the model of the run; it stops with `Stopped` when the run should stop (`Model` sees to
    that). read: the decision of an answer with a solution. infeasible: what to say where the solver
    proves that there is no decision. known: a bound and a decision that stand before.
    """

    build: Callable[[], Model]
    read: Callable[[ModelAnswer], D]
    infeasible: str
    known: Known[D] = field(default_factory=Known)


Formulate = Callable[[Any, Run], Formulation[D] | Outcome[D]]
# A driver's function.
Solve = Callable[[Model, Run, Sink | None], ModelAnswer]


def minimise(method: str, model: Model, run: Run, report: Sink | None = None) -> ModelAnswer:
    """The answer of the solver behind `method` to a model, within the time that is left of `run`.

    report: where incumbents and bounds go, in seconds; default: `run.report`, right when the model
    is the whole problem.
    """
    if run.tap is not None and model.properties()["integer"].any():
        run.tap(model)
        return ModelAnswer(
            stop=stop_reason(run),
            solver=label(method, run.options),
            message="the model was handed over, not solved",
        )
    solve: Solve = importlib.import_module(DRIVERS[method]).solve
    if presolves(method, run.options):
        solve = partial(solve_with_presolve, solve)
    try:
        answer = solve(model, run, report)
        if answer.message != UNCLEAR:
            return answer
        again = solve(model.without_costs(), run, lambda incumbent, bound: None)
    except Stopped:
        return ModelAnswer(stop=stop_reason(run), solver=label(method, run.options))
    if again.stop is Stop.OPTIMAL:
        return replace(answer, message="found the model unbounded below")
    return replace(answer, stop=again.stop, message=again.message)


def presolves(method: str, options: Options) -> bool:
    """Whether the user's own options turn the presolve of HiGHS on behind `method`."""
    backends: dict[str, tuple[str, ...]] = {"milp": ("highs",)}
    if engine(options.pyomo_solver) == HIGHS:
        backends["pyomo"] = ("highs", "pyomo")
    entries = [options.native.get(backend, {}) for backend in backends.get(method, ())]
    return any(own.get("presolve", "off") != "off" for own in entries)


def without_presolve(options: Options) -> Options:
    """The options without the user's own one for presolve."""
    native = {
        backend: {name: value for name, value in own.items() if name != "presolve"}
        for backend, own in options.native.items()
    }
    return replace(options, native=native)


def solve_with_presolve(
    solve: Solve, model: Model, run: Run, report: Sink | None = None
) -> ModelAnswer:
    """HiGHS's answer where the user turns its presolve on, which errs (`solvers.highs` says how).

    A first run with presolve is asked for a solution alone; a second one without it proves.
    """
    tell = report or (lambda incumbent, bound: run.report(incumbent=incumbent, bound=bound))
    first = solve(model, run, lambda incumbent, bound: tell(incumbent, None))
    if run.should_stop:
        return replace(first, stop=stop_reason(run), bound=None)
    second = solve(model, replace(run, options=without_presolve(run.options)), tell)
    proven = second.stop in (Stop.OPTIMAL, Stop.INFEASIBLE)
    if proven or first.objective is None:
        return second
    if second.objective is not None and second.objective <= first.objective:
        return second
    return replace(second, objective=first.objective, x=first.x)


def label(method: str, options: Options) -> str:
    """Name and version of the solver behind `method`; raises what the solver would raise over its
    absence."""
    text: str = importlib.import_module(DRIVERS[method]).label(options)
    return text


def solve_with(method: str, formulate: Formulate[D], data: Any, run: Run) -> Outcome[D]:
    """Formulate, build, solve, read."""
    begun, solver = CLOCK.seconds(), label(method, run.options)
    posed = formulate(data, run)
    if isinstance(posed, Outcome):
        return replace(posed, build_seconds=CLOCK.seconds() - begun, solver=solver)
    known = posed.known
    run.report(incumbent=known.objective, bound=known.bound)
    try:
        model = posed.build()
    except Stopped:
        return Outcome(
            stop=stop_reason(run),
            decision=known.decision,
            bound=known.bound,
            build_seconds=CLOCK.seconds() - begun,
            solver=solver,
            message=UNBUILT,
        )
    built = CLOCK.seconds()
    answer = minimise(method, model, run)
    stop, message, decision = answer.stop, answer.message, known.decision
    if answer.objective is not None and not (
        known.objective is not None and known.objective < answer.objective
    ):
        decision = posed.read(answer)
    if stop is Stop.INFEASIBLE and decision is None:
        message = message or posed.infeasible
    elif stop is Stop.INFEASIBLE:
        stop, message = Stop.ERROR, CONTRADICTION
    bounds = [bound for bound in (known.bound, answer.bound) if bound is not None]
    return Outcome(
        stop=stop,
        decision=decision,
        bound=None if stop is Stop.INFEASIBLE else max(bounds, default=None),
        build_seconds=built - begun,
        solver=answer.solver,
        message=message,
        details=answer.statistics,
    )
