"""General solvers: from a stated model to an `Outcome`, by the method's name.

A family's methods `cp-sat-linear`, `milp` and `pyomo` name one function `formulate(data, run)` that
states a linear model, and its method `cp-sat` names another one that states a constraint model.
Both return a `Formulation`, or an `Outcome` where the answer follows without a model. `solve_with`
builds the model, has the solver minimise it and reads the decision; when time runs out, it returns
the best bound and decision. Methods that solve several models call `minimise` for each of them.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic

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

if TYPE_CHECKING:  # importing it loads OR-Tools
    from hetplan.solvers.constraint_model import ConstraintModel

# Method -> the driver that minimises a `Model`, imported when it is used.
DRIVERS = {
    "cp-sat": "hetplan.solvers.cpsat",
    "cp-sat-linear": "hetplan.solvers.cpsat",
    "milp": "hetplan.solvers.highs",
    "pyomo": "hetplan.solvers.pyomo_driver",
}
# The message of an outcome where the run stopped before the model was complete.
UNBUILT = "stopped before its model was built"
# The message where the solver calls an instance infeasible that has a known decision.
CONTRADICTION = "the solver calls infeasible what has a decision"


@dataclass(frozen=True, kw_only=True)
class PriorResult(Generic[D]):
    """A lower bound and a decision of an instance before a model of it is solved. Fields are None
    where there is none."""

    bound: float | None = None  # proven, in the instance's unit
    decision: D | None = None
    objective: float | None = None  # of `decision`, in the instance's unit


@dataclass(frozen=True, kw_only=True)
class Formulation(Generic[D]):
    """An instance stated for a general solver."""

    # Builds the model. Raises Stopped when the run should stop: `Model` checks the run that it is
    # given.
    build: Callable[[], "Model | ConstraintModel"]
    read: Callable[[ModelAnswer], D]  # answer with a solution -> its decision
    infeasible: str  # the message where the solver proves that there is no decision
    prior: PriorResult[D] = field(default_factory=PriorResult)  # before the model is solved


# A proof of HiGHS that took no more seconds is asked for once more (`confirmed`); under a budget
# these are counted seconds.
CONFIRMED_SECONDS = 5.0

# Builds a constraint model; with it comes the function that reads a decision from an answer, since
# the model's variables do not exist before.
BuildConstraints = Callable[[], tuple["ConstraintModel", Callable[[ModelAnswer], D]]]
Formulate = Callable[[Any, Run], Formulation[D] | Outcome[D]]  # of data and a run
# The function `solve` of a driver. The sink receives incumbents and bounds; None: the run does.
Solve = Callable[[Any, Run, Sink | None], ModelAnswer]


def driver(method: str) -> ModuleType:
    """The driver behind `method`. It is imported here with its solver, of which Pyomo takes
    seconds."""
    return importlib.import_module(DRIVERS[method])


def minimise(
    method: str, model: "Model | ConstraintModel", run: Run, report: Sink | None = None
) -> ModelAnswer:
    """The answer of the solver behind `method` to a model, within the time that is left of `run`.

    report: receives incumbents and bounds, in the instance's unit. Default: `run.report`, which is
    right only where the model states the whole instance.

    Where `run` has a `tap`, it takes a model with integer columns in place of the solver. A model
    without them is solved all the same: it is an auxiliary linear programme of a method, and does
    not state the instance.

    Where the solver leaves open whether the model is infeasible or unbounded, it solves the model
    once more without costs, which tells the two apart.
    """
    if run.tap is not None and model.discrete:
        run.tap(model)
        return ModelAnswer(
            stop=stop_reason(run),
            solver=label(method, run.options),
            message="the model was handed over, not solved",
        )
    solve: Solve = driver(method).solve
    if presolves(method, run.options):
        solve = partial(solve_with_presolve, solve)
    try:
        begun, counted_before = CLOCK.seconds(), run.spent
        answer = solve(model, run, report)
        seconds = CLOCK.seconds() - begun
        if run.budget is not None:
            seconds = run.spent - counted_before
        if uses_highs(method, run.options) and seconds <= CONFIRMED_SECONDS:
            answer = confirmed(solve, model, run, answer)
        if answer.message != UNCLEAR:  # with UNCLEAR the answer's `stop` is Stop.ERROR
            return answer
        assert isinstance(model, Model), "CP-SAT always tells which of the two holds"
        # without costs, objectives and bounds say nothing of the instance: none is reported
        feasibility = solve(model.without_costs(), run, lambda incumbent, bound: None)
    except Stopped:
        return ModelAnswer(stop=stop_reason(run), solver=label(method, run.options))
    if feasibility.stop is Stop.OPTIMAL:
        # The rows have a solution, so the costs are unbounded. This stays an error.
        return replace(answer, message="found the model unbounded below")
    return replace(answer, stop=feasibility.stop, message=feasibility.message)


def constraint_formulation(
    build: BuildConstraints[D], *, infeasible: str, prior: PriorResult[D]
) -> Formulation[D]:
    """The formulation of a constraint model. infeasible, prior: see `Formulation`."""
    readers: list[Callable[[ModelAnswer], D]] = []  # readers of the models that were built

    def build_model() -> "ConstraintModel":
        model, read = build()
        readers.append(read)
        return model

    def read_answer(answer: ModelAnswer) -> D:
        return readers[-1](answer)

    return Formulation(build=build_model, read=read_answer, infeasible=infeasible, prior=prior)


def uses_highs(method: str, options: Options) -> bool:
    """Whether HiGHS is the solver behind `method`."""
    return method == "milp" or (method == "pyomo" and engine(options.pyomo_solver) == HIGHS)


def confirmed(solve: Solve, model: Any, run: Run, answer: ModelAnswer) -> ModelAnswer:
    """HiGHS's answer to a model, after a second run with another seed where it is a proof.

    HiGHS cuts off an optimum of about one in two thousand small models, and not the same one with
    every seed. The better solution of the two runs is taken, and the lower bound. Where the second
    run proves nothing in time, the first one's answer stands.
    """
    if answer.stop not in (Stop.OPTIMAL, Stop.INFEASIBLE) or not model.discrete:
        return answer
    part = run.part()
    options = replace(part.options, seed=part.options.seed + 1)
    try:
        again = solve(model, replace(part, options=options), lambda incumbent, bound: None)
    except Stopped:
        return answer
    if again.stop not in (Stop.OPTIMAL, Stop.INFEASIBLE):
        return answer
    if answer.stop is not again.stop:  # a solution refutes that there is none
        return answer if answer.stop is Stop.OPTIMAL else again
    if answer.objective is None or again.objective is None:
        return answer
    better = answer if answer.objective <= again.objective else again
    bounds = [each.bound for each in (answer, again) if each.bound is not None]
    return replace(better, bound=min(bounds, default=None))


def presolves(method: str, options: Options) -> bool:
    """Whether the user's native options turn the presolve of HiGHS on, where HiGHS is the solver
    behind `method`."""
    if not uses_highs(method, options):
        return False
    backends = ("highs",) if method == "milp" else ("highs", "pyomo")
    return any(
        options.native.get(backend, {}).get("presolve", "off") != "off" for backend in backends
    )


def without_presolve(options: Options) -> Options:
    """The options without the native option `presolve` of any backend."""
    native = {}
    for backend, entries in options.native.items():
        native[backend] = {name: value for name, value in entries.items() if name != "presolve"}
    return replace(options, native=native)


def solve_with_presolve(
    solve: Solve, model: Model, run: Run, report: Sink | None = None
) -> ModelAnswer:
    """HiGHS's answer where the user turns its presolve on, whose proofs can be wrong (see
    `solvers.highs`).

    A first run with presolve gives a solution; its bound is not used. A second run without presolve
    gives the bound and the proof. The answer has the better solution of the two.
    """
    sink = report or (lambda incumbent, bound: run.report(incumbent=incumbent, bound=bound))
    with_presolve = solve(model, run, lambda incumbent, bound: sink(incumbent, None))
    if run.should_stop:
        return replace(with_presolve, stop=stop_reason(run), bound=None)
    part = run.part()
    proof = solve(model, replace(part, options=without_presolve(part.options)), sink)
    if proof.stop in (Stop.OPTIMAL, Stop.INFEASIBLE) or with_presolve.objective is None:
        return proof
    if proof.objective is not None and proof.objective <= with_presolve.objective:
        return proof
    return replace(proof, objective=with_presolve.objective, x=with_presolve.x)


def label(method: str, options: Options) -> str:
    """Name and version of the solver behind `method`. Raises as the driver does where the solver is
    not installed."""
    text: str = driver(method).label(options)
    return text


def solve_with(method: str, formulate: Formulate[D], data: Any, run: Run) -> Outcome[D]:
    """The outcome of an instance by the solver behind `method`: formulate the instance, build the
    model, solve it and read the decision. Where the solver has no better solution, the outcome has
    the decision that was known before."""
    begun = CLOCK.seconds()
    solver = label(method, run.options)
    formulation = formulate(data, run)
    if isinstance(formulation, Outcome):
        return replace(formulation, build_seconds=CLOCK.seconds() - begun, solver=solver)
    prior = formulation.prior
    run.report(incumbent=prior.objective, bound=prior.bound)
    try:
        model = formulation.build()
    except Stopped:
        return Outcome(
            stop=stop_reason(run),
            decision=prior.decision,
            bound=prior.bound,
            build_seconds=CLOCK.seconds() - begun,
            solver=solver,
            message=UNBUILT,
        )
    built = CLOCK.seconds()
    answer = minimise(method, model, run)
    stop, message = answer.stop, answer.message
    decision = prior.decision
    if answer.objective is not None:
        prior_is_better = prior.objective is not None and prior.objective < answer.objective
        if not prior_is_better:
            decision = formulation.read(answer)
    if stop is Stop.INFEASIBLE and decision is None:
        message = message or formulation.infeasible
    elif stop is Stop.INFEASIBLE:
        stop, message = Stop.ERROR, CONTRADICTION
    bounds = [bound for bound in (prior.bound, answer.bound) if bound is not None]
    return Outcome(
        stop=stop,
        decision=decision,
        bound=None if stop is Stop.INFEASIBLE else max(bounds, default=None),
        build_seconds=built - begun,
        solver=answer.solver,
        message=message,
        details=answer.statistics,
    )
