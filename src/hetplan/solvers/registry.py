"""Describes families of problems and their methods, runs a method and has its outcome judged.

A description names modules and functions as text. They are imported when they are used, so that a
description imports no solver.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import permutations
from typing import Any, Protocol

from hetplan.clock import CLOCK
from hetplan.errors import (
    DisagreementError,
    HetplanError,
    InputError,
    kind_and_text,
    look_up,
    place_outside,
    require,
)
from hetplan.solvers.run import (
    HIGHS,
    OPTIMAL_GAP,
    Options,
    Outcome,
    Result,
    Run,
    Stop,
    Stopped,
    engine,
    stop_reason,
)
from hetplan.text import number_text

# Method that every family has -> the back ends whose native options it passes on.
BACKENDS = {
    "cp-sat": ("cp-sat",),
    "cp-sat-linear": ("cp-sat",),
    "milp": ("highs",),
    "pyomo": ("pyomo", "highs"),
}
# A bound may exceed the objective by rounding in the last digits, not by more.
BOUND_TOLERANCE = 1e-7


@dataclass(frozen=True)
class Method:
    """A method that solves a family's problem."""

    name: str
    # "module:function" of (data, run) -> Outcome, with two exceptions. A function `formulate`
    # states a model (`solvers.general`) for the general solver that the method is named after. A
    # function `solve_by` takes (name, data, run).
    target: str
    # whether the method proves optimality in enough time; else it is a heuristic without a bound
    exact: bool
    summary: str  # one line for tables of methods
    source: str = "hetplan"  # paper and algorithm, or hetplan
    baseline: bool = False  # whether it is a method with which the paper compares its own
    # the back ends whose native options it passes on; None: those of `BACKENDS` for its name
    uses: tuple[str, ...] | None = None
    # Raised when the method's code changes such that it gives other results. Rows of studies keep
    # it, so that a report tells which rows are of older code.
    version: int = 1
    of_plugin: bool = False  # whether a plugin adds it to its family

    @property
    def backends(self) -> tuple[str, ...]:
        """The back ends whose native options the method passes on."""
        return BACKENDS.get(self.name, ()) if self.uses is None else self.uses

    def takes(self, backend: str, options: Options) -> bool:
        """Whether the method, with these options, passes a back end's native options on.

        Unless `uses` says otherwise, the method `pyomo` passes on those of HiGHS only where HiGHS
        is the solver behind Pyomo.
        """
        if backend == HIGHS and self.name == "pyomo" and self.uses is None:
            return engine(options.pyomo_solver) == HIGHS
        return backend in self.backends

    def load(self) -> Callable[[Any, Run], Outcome[Any]]:
        """The function of the method, (data, run) -> Outcome. Its modules are imported here, and
        the driver of a general solver with them."""
        function: Callable[..., Any] = load(self.target)
        if self.name in BACKENDS:
            from hetplan.solvers.general import driver

            driver(self.name)
        if self.target.endswith(":formulate"):
            from hetplan.solvers.general import solve_with

            return partial(solve_with, self.name, function)
        if self.target.endswith(":solve_by"):
            return partial(function, self.name)
        return function


@dataclass(frozen=True)
class Evaluation:
    """The independent evaluator's verdict on a decision: its objective, or its violations."""

    objective: float | None  # in the problem's unit; None where the decision breaks a constraint
    # one line for each place at which the decision breaks a constraint
    violations: tuple[str, ...] = ()
    # named terms of the objective and figures beside it, for tables and explanations
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Certified:
    """What a certificate proves of an instance."""

    stated: float  # the bound that the certificate states, in the problem's unit
    proven: float  # the largest bound that it proves
    claimed: float | None  # the bound that a method had found; None: none

    @property
    def holds(self) -> bool:
        """Whether it proves what it states."""
        return self.stated <= self.proven


@dataclass(frozen=True)
class Family:
    """One decision problem: its schemas, its evaluator and its methods."""

    name: str
    title: str
    paper: str  # the paper that states the problem
    data: str  # "module:class" of the pydantic model of an instance's data
    decision: str  # "module:class" of the pydantic model of a decision
    # "module:function" of (data, decision) -> Evaluation; it shares no code with the solvers
    evaluate: str
    methods: tuple[Method, ...]
    # "module:function" of (data, feasible decision) -> list of hetplan.text.Table, the decision for
    # people; None: it is shown as JSON
    describe: str | None = None
    # "module:function" of (data, feasible decision) -> (tables, JSON types), the decision in full;
    # None: `describe` shows all of it
    show: str | None = None
    # names of parts of the evaluation that a result keeps among its details, and that tables show
    # beside the objective
    beside: tuple[str, ...] = ()
    # "module:function" of (data, name of the instance, bound of a method or None, run) -> document
    # that proves a bound (`hetplan.schema.Document`); None: bounds have no certificates
    certify: str | None = None
    # "module:function" of (data, parsed JSON of such a document, where) -> Certified
    verify: str | None = None

    def method(self, name: str) -> Method:
        """The method called `name`; raises InputError listing the family's methods."""
        known = {method.name: method for method in self.methods}
        return look_up("unknown method", name, known, where=f"problem {self.name}")

    def load_data(self) -> Any:
        """The pydantic model of the instance's `data`."""
        return load(self.data)

    def load_decision(self) -> Any:
        """The pydantic model of a `decision`."""
        return load(self.decision)


def load(target: str) -> Any:
    """The object named "module:attribute"."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def evaluate(family: Family, data: Any, decision: Any) -> Evaluation:
    """The independent evaluator's verdict on `decision` (models of `family.data` and
    `family.decision`)."""
    evaluation: Evaluation = load(family.evaluate)(data, decision)
    return evaluation


def solve(
    family: Family, data: Any, method: str, run: Run | None = None, **more: Any
) -> Result[Any]:
    """The result of `method` on `data`, judged by the family's evaluator.

    more: further arguments of the method.

    Raises InputError for an unknown method, UnsupportedError where the method cannot take this
    instance, and DisagreementError where `judged` refutes the outcome.

    The result's build and solve seconds add up to the time that the method ran. Seconds that the
    method does not report as building are solving. The time to load the method counts towards the
    time limit only. The times to compile kernels and to judge count nowhere.
    """
    run = run or Run()
    chosen = family.method(method)
    function = chosen.load()
    begun = CLOCK.seconds()
    outcome = outcome_of(chosen, function, data, run, more)
    spent = CLOCK.seconds() - begun
    evaluation = judged(family, method, data, outcome)
    objective, bound, details = None, outcome.bound, dict(outcome.details)
    if evaluation is not None:
        objective = evaluation.objective
        details |= {name: evaluation.parts[name] for name in family.beside}
    if bound is not None and objective is not None:
        bound = min(bound, objective)  # `judged` lets rounding put the bound a hair above
    return Result(
        method=method,
        stop=outcome.stop,
        decision=outcome.decision,
        objective=objective,
        bound=bound,
        build_seconds=outcome.build_seconds,
        solve_seconds=max(0.0, spent - outcome.build_seconds),
        solver=outcome.solver,
        options=run.options.as_dict(),
        seed=run.options.seed,
        message=outcome.message,
        details=details,
    )


def solve_loaded(family: Family, data: Any, method: str, run: Run) -> Result[Any]:
    """The result of `solve`, where the run begins once the method is loaded, so that its time limit
    does not count the import of a solver."""
    family.method(method).load()
    run.started = CLOCK.seconds()
    return solve(family, data, method, run)


def outcome_of(
    method: Method,
    function: Callable[..., Outcome[Any]],
    data: Any,
    run: Run,
    more: Mapping[str, Any],
) -> Outcome[Any]:
    """The outcome that a method's function returns, or one without a decision where the function
    lets `Stopped` pass or runs out of memory.

    function: function of the method. Raises InputError for any other exception of a plugin's
    method, and where it returns something else than an outcome: that is no fault of hetplan.
    """
    module, _, _ = method.target.partition(":")
    try:
        outcome = function(data, run, **more)
    except Stopped:
        return Outcome(stop=stop_reason(run), bound=run.bound)
    except MemoryError:
        return Outcome(stop=Stop.ERROR, message="out of memory")
    except Exception as error:
        if not method.of_plugin or isinstance(error, HetplanError):
            raise
        place = place_outside(error) or module
        raise InputError(f"method raises {kind_and_text(error)}", where=place) from error
    require(
        isinstance(outcome, Outcome) or not method.of_plugin,
        "method returns something else",
        where=module,
        got=type(outcome).__name__,
        expected="an Outcome",
    )
    return outcome


def judged(family: Family, method: str, data: Any, outcome: Outcome[Any]) -> Evaluation | None:
    """The independent evaluator's evaluation of the outcome's decision; None where the outcome has
    no decision.

    Raises DisagreementError where the outcome has a decision of an instance that it calls
    infeasible, where the evaluator rejects the decision, and where the outcome's bound exceeds the
    decision's objective.
    """
    if outcome.decision is None:
        return None
    where = f"{family.name}/{method}"
    if outcome.stop is Stop.INFEASIBLE:
        raise DisagreementError(f"{where}: calls infeasible what it has a decision for")
    evaluation = evaluate(family, data, outcome.decision)
    objective, bound = evaluation.objective, outcome.bound
    if objective is None:
        reason = evaluation.violations[0] if evaluation.violations else "no reason given"
        raise DisagreementError(f"{where}: decision rejected: {reason}")
    if bound is not None and bound > objective * (1 + BOUND_TOLERANCE):
        raise DisagreementError(f"{where}: bound {bound!r} exceeds objective {objective!r}")
    return evaluation


class Stated(Protocol):
    """What a method states of an instance: a result, or one that was read from a file."""

    @property
    def method(self) -> str: ...

    @property
    def status(self) -> str | None: ...

    @property
    def objective(self) -> float | None: ...

    @property
    def bound(self) -> float | None: ...


def contradictions(results: Sequence[Stated]) -> list[str]:
    """One line of text for each pair of methods whose results on one instance contradict each
    other, so that one of the two is wrong.

    A bound of one method may not exceed an objective of another one. Two different objectives that
    are both called optimal contradict each other, too, because each comes with its bound.
    """
    lines: dict[frozenset[str], str] = {}
    for one, other in permutations(results, 2):
        if other.objective is None:
            continue
        objective = f"objective {number_text(other.objective, 8)} of {other.method}"
        if one.status == "infeasible":
            said = f"{one.method} calls the instance infeasible, {objective} has a decision"
        elif one.bound is not None and one.bound > other.objective * (1 + OPTIMAL_GAP):
            name = one.method
            if one.status == "optimal":
                name += f", which calls its {number_text(one.objective, 8)} optimal,"
            said = f"bound {number_text(one.bound, 8)} of {name} is above {objective}"
        else:
            continue
        lines.setdefault(frozenset((one.method, other.method)), said)
    return [f"{said}: one of the two methods is wrong" for said in lines.values()]
