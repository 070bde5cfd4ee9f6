"""The loop around the general models: one model per configuration, cheap bounds first, one
incumbent for all.

A configuration fixes the degrees and the micro-batch. Its cheap bound (bound.py) orders and prunes;
each survivor becomes a model that looks only for decisions cheaper than the incumbent. The whole
problem's bound is the least of the configurations' bounds: proven by a model, the cut-off where a
model found nothing below it, or still the cheap one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from hetplan.formulations.amp.cells import Cells, find_cells
from hetplan.formulations.amp.data import AmpData, AmpDecision
from hetplan.formulations.amp.general.bound import least_seconds, quick_seconds
from hetplan.formulations.amp.general.tables import Tables
from hetplan.formulations.amp.orders import (
    allowance,
    improved,
    placements,
    try_placement,
    worthwhile,
)
from hetplan.formulations.amp.problem import AmpProblem, compile_problem
from hetplan.formulations.amp.strategy import Strategy, place
from hetplan.solvers.native import Sink, stopped
from hetplan.solvers.result import Outcome, Stop
from hetplan.solvers.run import Run

# Share of the gap by which a decision must beat the incumbent to be worth a model's while.
WORTH = 0.5
# By how much decisions in a model that is written to a file may be worse than the best known.
EXPORTED = 1e-4
# Shares of the time limit for the first decisions, and for cheap bounds before the first model.
FIRST_SHARE = 0.1
BOUND_SHARE = 0.3
# Time for each configuration in the first round when there is no time limit.
FIRST_ROUND_SECONDS = 2.0
# Models of more terms are not built: building alone takes long, and general solvers get nowhere
# with them.
MOST_TERMS = 500_000


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a model said of one configuration, looking for decisions that cost at most the cut-off.

    stop INFEASIBLE: there is none. bound: every such decision costs at least this. strategy: the
    best one found.
    """

    stop: Stop
    bound: float | None = None
    strategy: Strategy | None = None
    build_seconds: float = 0.0
    message: str = ""


@dataclass(frozen=True)
class Question:
    """What a model is asked: the cheapest decision of one configuration that costs at most `cutoff`
    (None: any).

    lower, upper: seconds that every such decision costs at least and at most.
    """

    tables: Tables
    lower: float
    cutoff: float | None

    @property
    def upper(self) -> float:
        """The cut-off, or what no decision of the configuration exceeds."""
        worst = self.tables.slowest_seconds
        return worst if self.cutoff is None else min(worst, self.cutoff)


# (question, run for this model, where incumbents and bounds go) -> reply
Model = Callable[[Question, Run, Sink], Reply]
# How many terms the model of a configuration has, about, without building it.
Size = Callable[[Tables], int]


@dataclass
class Case:
    """One configuration. bound: proven so far, +inf when it has no decision at all. terms: of its
    model.

    tried: whether first decisions were looked for. chained: whether `least_seconds` had its say.
    closed: nothing left to find. given_up: open, but another try would be in vain.
    """

    tables: Tables
    bound: float
    terms: int
    tried: bool = False
    chained: bool = False
    closed: bool = False
    given_up: bool = False

    @property
    def waits(self) -> bool:
        """Whether a model should be asked."""
        return not self.closed and not self.given_up


@dataclass
class State:
    """The search so far: the best strategy with its seconds, the configurations, and what they
    took."""

    run: Run
    cases: list[Case]
    best: float = math.inf
    strategy: Strategy | None = None
    build_seconds: float = 0.0
    models: int = 0
    message: str = ""
    failed: bool = False
    pruned: int = 0

    @property
    def bound(self) -> float:
        """Every decision of the problem costs at least this."""
        return min([self.best, *(case.bound for case in self.cases)])

    @property
    def cutoff(self) -> float | None:
        """Only decisions that cost at most this are worth having; models for other solvers hold the
        best known, too."""
        if self.strategy is None:
            return None
        return self.best * (
            1 + EXPORTED if self.run.tap is not None else 1 - WORTH * self.run.options.gap
        )

    def offer(self, problem: AmpProblem, strategy: Strategy) -> None:
        """Keep `strategy` if it is the best; priced exactly, whatever its model thought of it."""
        seconds = place(problem, strategy.configuration, strategy.placement).seconds(strategy.cut)
        if seconds < self.best:
            self.best, self.strategy = seconds, strategy
            self.run.report(incumbent=seconds)

    def prune(self) -> None:
        """Close what cannot hold a decision worth having."""
        for case in self.cases:
            if not case.closed and self.cutoff is not None and case.bound >= self.cutoff:
                case.closed = True
                self.pruned += 1


def solve_each(
    data: AmpData, run: Run, model: Model, solver: str, size: Size = lambda tables: tables.terms
) -> Outcome[AmpDecision]:
    """The best decision over all configurations by `model`, with the bound that it proves."""
    begun = time.perf_counter()
    problem = compile_problem(data)
    cells = find_cells(problem)
    tables = [Tables(problem, configuration, cells) for configuration in problem.configurations()]
    state = State(run, cases=[Case(one, quick_seconds(one), size(one)) for one in tables])
    if tables:
        find_first(state, problem, cells, share_of(run, FIRST_SHARE))
        exchange(state, problem, cells)
        find_bounds(state, share_of(run, BOUND_SHARE))
    state.build_seconds = time.perf_counter() - begun
    if tables:
        run.report(bound=state.bound if math.isfinite(state.bound) else None)
    sweep(state, problem, model)
    # what the shares left undone, where no model takes the time
    find_first(state, problem, cells, run)
    find_bounds(state, run)
    state.prune()
    return outcome(state, solver, time.perf_counter() - begun)


def share_of(run: Run, share: float) -> Run:
    """A part of the run with that share of the time left."""
    return run.part(time_limit=share * run.remaining if math.isfinite(run.remaining) else None)


def find_first(state: State, problem: AmpProblem, cells: Cells, run: Run) -> None:
    """Incumbents by rule for the open configurations that had none yet, in `run`'s time."""
    waiting = [case for case in state.cases if not case.tried and not case.closed]
    for case in waiting:
        if run.should_stop:
            return
        for array in placements(cells, case.tables.configuration):
            if run.should_stop:
                return
            found = try_placement(problem, case.tables.configuration, array)
            if found is not None:
                state.offer(problem, found[1])
        case.tried = True


def exchange(state: State, problem: AmpProblem, cells: Cells) -> None:
    """Exchanges of devices in the best strategy, where devices are unlike."""
    if state.strategy is None or not worthwhile(cells):
        return
    part = state.run.part(time_limit=allowance(state.run.remaining))
    _, strategy = improved(problem, cells, state.strategy, state.best, lambda: part.should_stop)
    state.offer(problem, strategy)


def find_bounds(state: State, run: Run) -> None:
    """The cheap bound of every open configuration that has none yet, those that promise most first,
    in `run`'s time."""
    for case in sorted(
        (case for case in state.cases if not case.closed), key=lambda case: case.bound
    ):
        if case.chained or run.should_stop:
            continue
        least = least_seconds(case.tables, run)
        case.chained = not run.should_stop
        case.bound, case.closed = (
            (math.inf, True) if least is None else (max(least, case.bound), False)
        )


def sweep(state: State, problem: AmpProblem, model: Model) -> None:
    """Solve the open configurations in rounds, cheapest bound first, each round with twice the time
    for each.

    Early rounds close the easy ones and find incumbents that prune the hard ones; what stays open
    is solved anew with more time. The last one open gets all that is left.
    """
    share = 0.0
    while not state.run.should_stop:
        state.prune()
        waiting = sorted((case for case in state.cases if case.waits), key=lambda case: case.bound)
        if not waiting:
            return
        left = state.run.remaining
        share = max(
            2 * share, left / (2 * len(waiting)) if math.isfinite(left) else FIRST_ROUND_SECONDS
        )
        for case in waiting:
            state.prune()
            if not case.closed and not state.run.should_stop:
                whole = len(waiting) == 1 or state.run.tap is not None
                solve_case(state, case, problem, model, math.inf if whole else share)


def solve_case(state: State, case: Case, problem: AmpProblem, model: Model, seconds: float) -> None:
    """One model, and what follows from its reply."""
    run, chosen, cutoff = state.run, case.tables.configuration, state.cutoff
    if case.terms > MOST_TERMS:
        size = f"{case.terms} terms, more than {MOST_TERMS}"
        case.given_up = True
        state.message = (
            f"the model of {chosen} would have {size}; the method exact has no such limit"
        )
        return
    part = run.part(time_limit=None if math.isinf(seconds) else seconds)
    begun = time.perf_counter()
    run.report(note=str(chosen))

    def report(incumbent: float | None, bound: float | None) -> None:
        others = min([state.best, *(other.bound for other in state.cases if other is not case)])
        run.report(
            incumbent=incumbent,
            bound=None if bound is None else min(others, max(case.bound, bound)),
        )

    reply = model(Question(case.tables, case.bound, cutoff), part, report)
    state.models += 1
    state.build_seconds += reply.build_seconds
    if reply.strategy is not None:
        state.offer(problem, reply.strategy)
    limit = math.inf if cutoff is None else cutoff
    if reply.stop is Stop.INFEASIBLE:
        case.bound, case.closed = max(case.bound, limit), True
    elif reply.bound is not None:
        case.bound = max(case.bound, min(reply.bound, limit))
        case.closed = reply.stop is Stop.OPTIMAL
    if reply.stop is Stop.ERROR:
        state.failed, state.message = True, f"{chosen}: {reply.message}"
    # Another limit than time (of nodes, say) would end the next try just as early.
    early = reply.stop is Stop.LIMIT and time.perf_counter() - begun < seconds / 2
    case.given_up = reply.stop is Stop.ERROR or (early and not run.should_stop)
    if math.isfinite(state.bound):
        run.report(bound=state.bound)


def outcome(state: State, solver: str, seconds: float) -> Outcome[AmpDecision]:
    """What the sweep proved, in the registry's terms; `seconds` it took, all but building counts as
    solving."""
    done = all(case.closed for case in state.cases)
    if done:
        stop = Stop.OPTIMAL if state.strategy is not None else Stop.INFEASIBLE
    else:
        stop = Stop.ERROR if state.failed and not state.run.should_stop else stopped(state.run)
    message = state.message if stop is not Stop.OPTIMAL else ""
    if stop is Stop.INFEASIBLE:
        message = why_infeasible(state)
    return Outcome(
        stop=stop,
        decision=None if state.strategy is None else state.strategy.decision(),
        bound=None if stop is Stop.INFEASIBLE or (state.bound == 0 and not done) else state.bound,
        build_seconds=state.build_seconds,
        solve_seconds=seconds - state.build_seconds,
        solver=solver,
        message=message,
        details={
            "configurations": len(state.cases),
            "pruned": state.pruned,
            "models": state.models,
            "open": sum(not case.closed for case in state.cases),
        },
    )


def why_infeasible(state: State) -> str:
    """The reason of a proven infeasibility."""
    if not state.cases:
        return (
            "no degrees and micro-batch divide the devices and the batch with tables for every type"
        )
    count = len(state.cases)
    return (
        f"no cut and placement fits the memory under any of the {count} combinations of degrees "
        "and micro-batch"
    )
