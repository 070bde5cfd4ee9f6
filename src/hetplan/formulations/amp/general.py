"""AMP's problem by general solvers: one model per configuration, cheap bounds first, one incumbent
for all.

A configuration fixes the degrees and the micro-batch. The bound of its single pipelines (rows.py)
orders and prunes; each survivor becomes a model (model.py) that looks only for decisions cheaper
than the incumbent. The whole problem's bound is the least of the configurations' bounds: proven by
a model, the cut-off where a model found nothing below it, or still the cheap one.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from hetplan.formulations.amp.cuts import find_first
from hetplan.formulations.amp.data import AmpData, AmpDecision
from hetplan.formulations.amp.layout import lay_out
from hetplan.formulations.amp.model import Programme, Question
from hetplan.formulations.amp.problem import (
    NO_CONFIGURATION,
    NO_ROOM,
    Strategy,
    compile_problem,
    find_cells,
    place,
)
from hetplan.formulations.amp.rows import quick_seconds, root_bound, row_model
from hetplan.formulations.amp.tables import Tables
from hetplan.solvers import general
from hetplan.solvers.branch_and_bound import Incumbent
from hetplan.solvers.model import TooLarge
from hetplan.solvers.native import Sink, stop_reason
from hetplan.solvers.result import Outcome, Stop
from hetplan.solvers.run import Run, Stopped


@dataclass(frozen=True)
class Parameters:
    """What the loop trades."""

    # Share of the gap by which a decision must beat the incumbent to be worth a model's while.
    worth: float = 0.5
    # By how much decisions in a model that is written to a file may be worse than the best known.
    exported: float = 1e-4
    # Share of the time limit for first decisions and cheap bounds, before the first model.
    first_share: float = 0.3
    # Time for each configuration in the first round when there is no time limit.
    first_round_seconds: float = 2.0
    # Models of more terms are given up while they are built: general solvers get nowhere with them.
    most_terms: int = 500_000


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a model said of one configuration, looking for decisions that cost at most the cut-off.

    stop INFEASIBLE: there is none. bound: every such decision costs at least this. strategy: the
    best one found. hopeless: another try would end in the same way.
    """

    stop: Stop
    bound: float | None = None
    strategy: Strategy | None = None
    build_seconds: float = 0.0
    message: str = ""
    hopeless: bool = False


# (question, run for this model, where incumbents and bounds go) -> reply
Ask = Callable[[Question, Run, Sink], Reply]


@dataclass
class Case:
    """One configuration."""

    tables: Tables
    bound: float  # proven so far, +inf when it has no decision at all
    closed: bool = False  # nothing left to find
    given_up: bool = False  # open, but another try would be in vain


@dataclass
class Sweep:
    """The search over the configurations."""

    run: Run
    incumbent: Incumbent[Strategy]
    cases: list[Case]
    parameters: Parameters
    build_seconds: float = 0.0
    models: int = 0
    message: str = ""
    failed: bool = False

    @property
    def bound(self) -> float:
        """Every decision of the problem costs at least this."""
        return min([self.incumbent.objective, *(case.bound for case in self.cases)])

    @property
    def cutoff(self) -> float | None:
        """Only decisions that cost at most this are worth having; models for other solvers hold the
        best known, too."""
        if self.incumbent.decision is None:
            return None
        if self.run.tap is not None:
            return self.incumbent.objective * (1 + self.parameters.exported)
        return self.incumbent.threshold

    def waiting(self) -> list[Case]:
        """The configurations that a model should be asked about, least bound first; what cannot
        hold a decision worth having is closed."""
        limit = math.inf if self.cutoff is None else self.cutoff
        for case in self.cases:
            case.closed = case.closed or case.bound >= limit
        left = [case for case in self.cases if not case.closed and not case.given_up]
        return sorted(left, key=lambda case: case.bound)

    def execute(self, ask: Ask) -> None:
        """Ask about the open configurations in rounds, each round with twice the time for each.

        Early rounds close the easy ones and find incumbents that prune the hard ones; what stays
        open is solved anew with more time. The last one open gets all that is left.
        """
        share = 0.0
        while (waiting := self.waiting()) and not self.run.should_stop:
            left = self.run.remaining
            even = left / (2 * len(waiting))
            first = even if math.isfinite(left) else self.parameters.first_round_seconds
            share = max(2 * share, first)
            whole = len(waiting) == 1 or self.run.tap is not None
            for case in waiting:
                if case in self.waiting() and not self.run.should_stop:
                    self.ask_about(case, ask, math.inf if whole else share)

    def ask_about(self, case: Case, ask: Ask, seconds: float) -> None:
        """One model, and what follows from its reply."""
        chosen, cutoff = case.tables.configuration, self.cutoff
        part = self.run.part(time_limit=None if math.isinf(seconds) else seconds)
        begun = time.perf_counter()
        self.run.report(note=str(chosen))

        def report(incumbent: float | None, bound: float | None) -> None:
            others = [other.bound for other in self.cases if other is not case]
            least = min([self.incumbent.objective, *others])
            raised = None if bound is None else min(least, max(case.bound, bound))
            self.run.report(incumbent=incumbent, bound=raised)

        reply = ask(Question(case.tables, case.bound, cutoff), part, report)
        self.models += 1
        self.build_seconds += reply.build_seconds
        strategy = reply.strategy
        if strategy is not None:
            placed = place(case.tables.problem, strategy.configuration, strategy.placement)
            self.incumbent.offer(placed.seconds(strategy.cut), strategy)
        limit = math.inf if cutoff is None else cutoff
        if reply.stop is Stop.INFEASIBLE:
            case.bound, case.closed = max(case.bound, limit), True
        elif reply.bound is not None:
            case.bound = max(case.bound, min(reply.bound, limit))
            case.closed = reply.stop is Stop.OPTIMAL
        failed = reply.stop is Stop.ERROR
        if failed or reply.hopeless:
            self.failed, self.message = self.failed or failed, f"{chosen}: {reply.message}"
        # Another limit than time (of nodes, say) would end the next try just as early.
        early = reply.stop is Stop.LIMIT and time.perf_counter() - begun < seconds / 2
        case.given_up = failed or reply.hopeless or (early and not self.run.should_stop)
        if math.isfinite(self.bound):
            self.run.report(bound=self.bound)


def ask_solver(method: str, most_terms: float, question: Question, run: Run, report: Sink) -> Reply:
    """One configuration by the solver behind `method`: build, solve, read the strategy out of the
    incumbent."""
    begun = time.perf_counter()
    try:
        programme = Programme(question, most_terms, run)
    except Stopped:
        return Reply(stop=stop_reason(run), build_seconds=time.perf_counter() - begun)
    except TooLarge:
        message = f"more than {most_terms} terms in its model; the method exact has no such limit"
        spent = time.perf_counter() - begun
        return Reply(stop=Stop.LIMIT, build_seconds=spent, message=message, hopeless=True)
    built = time.perf_counter()
    answer = general.minimise(method, programme.model, run, report)
    return Reply(
        stop=answer.stop,
        bound=answer.bound,
        strategy=programme.strategy(answer) if answer.has_solution else None,
        build_seconds=built - begun,
        message=answer.message,
    )


def solve_by(
    method: str,
    data: AmpData,
    run: Run,
    ask: Ask | None = None,
    parameters: Parameters = Parameters(),
) -> Outcome[AmpDecision]:
    """The best decision over all configurations, with the bound that the solver behind `method`
    proves; ask: another way to have a model solved."""
    begun, solver = time.perf_counter(), general.label(method, run.options)
    problem = compile_problem(data)
    cells = find_cells(problem)
    incumbent = Incumbent[Strategy](run, gap=parameters.worth * run.options.gap)
    cases = [
        Case(Tables(problem, config, cells), quick_seconds(problem, config))
        for config in problem.configurations()
    ]
    left = run.remaining
    part = run.part(time_limit=parameters.first_share * left if math.isfinite(left) else None)
    find_first(problem, cells, incumbent, part)
    try:
        for case in sorted(cases, key=lambda case: case.bound):
            model = row_model(lay_out(problem, cells, case.tables.configuration))
            case.bound = max(case.bound, root_bound(model, part.check))
    except Stopped:
        pass  # the bounds that take no time stand
    sweep = Sweep(run, incumbent, cases, parameters, time.perf_counter() - begun)
    if cases and math.isfinite(sweep.bound):
        run.report(bound=sweep.bound)
    sweep.execute(ask or partial(ask_solver, method, parameters.most_terms))
    return outcome(sweep, solver)


def outcome(sweep: Sweep, solver: str) -> Outcome[AmpDecision]:
    """What the sweep proved, in the registry's terms."""
    best, bound = sweep.incumbent.decision, sweep.bound
    done = all(case.closed for case in sweep.cases)
    message = sweep.message
    if done:
        stop, message = Stop.OPTIMAL, ""
        if best is None:
            stop, message = Stop.INFEASIBLE, NO_ROOM if sweep.cases else NO_CONFIGURATION
    else:
        failed = sweep.failed and not sweep.run.should_stop
        stop = Stop.ERROR if failed else stop_reason(sweep.run)
    return Outcome(
        stop=stop,
        decision=None if best is None else best.decision(),
        bound=None if stop is Stop.INFEASIBLE or (bound == 0 and not done) else bound,
        build_seconds=sweep.build_seconds,
        solver=solver,
        message=message,
        details={
            "configurations": len(sweep.cases),
            "models": sweep.models,
            "open": sum(not case.closed for case in sweep.cases),
        },
    )
