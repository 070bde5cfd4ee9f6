"""AMP's problem by general solvers: one model per configuration, cheap bounds first, one incumbent
for all.

A configuration fixes the degrees and the micro-batch. The bound of its single pipelines (rows.py)
orders and prunes; each survivor becomes a model (model.py) that looks only for decisions cheaper
than the incumbent. The whole problem's bound is the least of the configurations' bounds: proven by
a model, the cut-off where a model found nothing below it, or still the cheap one.
"""

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

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
from hetplan.solvers.branch_and_bound import Expansion, Incumbent, search
from hetplan.solvers.model import Model, ModelAnswer, TooLarge
from hetplan.solvers.native import Sink
from hetplan.solvers.run import Outcome, Run, Stop, Stopped

TOO_LARGE = "more than {} terms in its model; the method exact has no such limit"


@dataclass(frozen=True)
class Parameters:
    """What the loop trades."""

    # Share of the gap by which a decision must beat the incumbent to be worth a model's while.
    worth: float = 0.5
    # By how much decisions in a model that is written to a file may be worse than the best known.
    exported: float = 1e-4
    # Share of the time limit for first decisions and cheap bounds, before the first model.
    first_share: float = 0.3
    # Models of more terms are given up while they are built: general solvers get nowhere with them.
    most_terms: int = 500_000


# (method, model, run for it, where incumbents and bounds go) -> what a solver says of the model
Minimise = Callable[[str, Model, Run, Sink], ModelAnswer]


@dataclass(frozen=True)
class Case:
    """One configuration."""

    tables: Tables
    bound: float  # proven so far, +inf when it has no decision at all


@dataclass
class Sweep:
    """The search over the configurations, of the least bound first; each model may take all the
    time that is left."""

    run: Run
    incumbent: Incumbent[Strategy]
    method: str
    most_terms: float
    minimise: Minimise
    build_seconds: float = 0.0
    models: int = 0
    message: str = ""
    failed: bool = False

    def expand(self, case: Case, threshold: float) -> Expansion[Case]:
        """One model, which looks only for decisions below the threshold."""
        chosen = case.tables.configuration
        self.run.report(note=str(chosen))
        self.models += 1
        cutoff = None if math.isinf(threshold) else threshold
        begun, part = time.perf_counter(), self.run.part()
        try:
            programme = Programme(Question(case.tables, case.bound, cutoff), self.most_terms, part)
        except TooLarge:
            self.message = f"{chosen}: {TOO_LARGE.format(self.most_terms)}"
            return Expansion(dropped_bound=case.bound)
        finally:
            self.build_seconds += time.perf_counter() - begun
        answer = self.minimise(
            self.method, programme.model, part,
            lambda incumbent, bound: self.run.report(incumbent=incumbent),
        )  # fmt: skip
        if answer.has_solution:
            strategy = programme.strategy(answer)
            placed = place(case.tables.problem, strategy.configuration, strategy.placement)
            self.incumbent.offer(placed.seconds(strategy.cut), strategy)
        if answer.stop is Stop.INFEASIBLE:
            return Expansion(dropped_bound=threshold)
        if answer.stop is Stop.ERROR:
            self.failed = True
            self.message = f"{chosen}: {answer.message}"
        return Expansion(dropped_bound=max(case.bound, min(answer.bound or 0.0, threshold)))


def solve_by(
    method: str,
    data: AmpData,
    run: Run,
    minimise: Minimise = general.minimise,
    parameters: Parameters = Parameters(),
) -> Outcome[AmpDecision]:
    """The best decision over all configurations, with the bound that the solver behind `method`
    proves; minimise: another way to have a model solved."""
    begun, solver = time.perf_counter(), general.label(method, run.options)
    problem = compile_problem(data)
    cells = find_cells(problem)
    exported = run.tap is not None
    gap = -parameters.exported if exported else parameters.worth * run.options.gap
    incumbent = Incumbent[Strategy](run, gap)
    cases = [
        Case(Tables(problem, config, cells), quick_seconds(problem, config))
        for config in problem.configurations()
    ]
    left = run.remaining
    part = run.part(time_limit=parameters.first_share * left if math.isfinite(left) else None)
    find_first(problem, cells, incumbent, part)
    cases.sort(key=lambda case: case.bound)
    with contextlib.suppress(Stopped):  # the bounds that take no time stand
        for at, case in enumerate(cases):
            model = row_model(lay_out(problem, cells, case.tables.configuration))
            cases[at] = replace(case, bound=max(case.bound, root_bound(model, part.check)))
    spent = time.perf_counter() - begun
    sweep = Sweep(run, incumbent, method, parameters.most_terms, minimise, spent)
    proof = search([(case.bound, case) for case in cases], sweep.expand, incumbent, run)
    stop, message = proof.verdict(run, NO_ROOM if cases else NO_CONFIGURATION)
    if not proof.proven:
        stop = Stop.ERROR if sweep.failed and not run.should_stop else stop
        message = sweep.message
    return Outcome(
        stop=stop,
        decision=None if incumbent.decision is None else incumbent.decision.decision(),
        bound=proof.bound,
        build_seconds=sweep.build_seconds,
        solver=solver,
        message=message,
        details={"configurations": len(cases), "models": sweep.models},
    )
