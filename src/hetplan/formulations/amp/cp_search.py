"""Method `cp-sat` of problem `amp`: the constraint models of all configurations, in rounds.

Every round gives each open configuration some seconds to look for decisions that cost less than the
incumbent and less than a target. Where there is none, the configuration's bound rises to that. The
least bound of all configurations is the bound of the instance.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

import numpy as np

from hetplan.clock import CLOCK
from hetplan.formulations.amp.cp import Programme, read
from hetplan.formulations.amp.cp_tables import (
    Case,
    classes_of,
    configurations,
    links_between,
    simple_bound,
    terms_of,
)
from hetplan.formulations.amp.data import AmpData, AmpDecision
from hetplan.solvers import general
from hetplan.solvers.branch_and_bound import Incumbent
from hetplan.solvers.model import ModelAnswer
from hetplan.solvers.run import Outcome, Run, Stop, Stopped, stop_reason

BACKEND = "cp-sat"  # whose native options the models use
NO_CONFIGURATION = "no degrees and micro-batch size divide devices and batch and have all tables"
NO_ROOM = "proven by CP-SAT: for no degrees and micro-batch size do all layers fit into memory"
TOO_LARGE = "more than {} entries in its tables; the method exact has no such limit"


@dataclass(frozen=True)
class Parameters:
    """Limits and shares of the search over configurations."""

    # A model looks for decisions that beat the incumbent by this share of the user's gap.
    worth: float = 0.5
    # Seconds of each model in the first round; every further round has twice as many.
    first_seconds: float = 1.0
    # The first round looks for decisions up to this multiple of the least bound; every further
    # round squares it. Close targets leave little to search, and where there is an incumbent, far
    # ones are not needed.
    growth: float = 2.0
    # A configuration whose tables have more entries is left open.
    most_terms: int = 2_000_000


class Sweep:
    """Solves the models of all configurations in rounds of ever more seconds, until each has a
    decision that is proven best or is proven to have none below the incumbent."""

    def __init__(self, method: str, run: Run, cases: list[Case], parameters: Parameters) -> None:
        self.method, self.run, self.parameters = method, run, parameters
        self.open = sorted(cases, key=lambda case: case.bound)
        self.done = math.inf  # seconds, the least bound of the configurations that are not open
        self.complete = True  # whether all configurations that are not open are proven
        self.incumbent = Incumbent[AmpDecision](run, parameters.worth * run.options.gap)
        self.models, self.build_seconds = 0, 0.0
        self.message, self.failed = "", False  # about the last configuration that was left out

    @property
    def bound(self) -> float:
        """Seconds that no decision falls below; +inf where there is none."""
        return min(self.done, *(case.bound for case in self.open), self.incumbent.objective)

    def go(self) -> None:
        """Solve all models. Raises `Stopped` where the run should stop."""
        seconds, growth = self.parameters.first_seconds, self.parameters.growth
        while self.open:
            target = self.bound * growth
            for case in list(self.open):
                self.run.check()
                self.solve(case, target, seconds)
                if math.isfinite(self.bound):
                    self.run.report(bound=self.bound)
            if self.run.tap is not None:  # the models were handed over
                return
            seconds *= 2
            growth *= growth

    def close(self, case: Case, *, proven: bool = True) -> None:
        """Take a configuration off the open ones, with the bound that it has then."""
        self.open.remove(case)
        self.done = min(self.done, case.bound)
        self.complete = self.complete and proven

    def give_up(self, case: Case, message: str) -> None:
        """Take a configuration off the open ones, unproven."""
        self.message = f"{case.chosen}: {message}"
        self.close(case, proven=False)

    def raise_bound(self, case: Case, bound: float) -> Case:
        """The configuration with this bound, if it is higher."""
        raised = replace(case, bound=max(case.bound, bound))
        self.open[self.open.index(case)] = raised
        return raised

    def solve(self, case: Case, target: float, seconds: float) -> None:
        """Look for decisions of a configuration that cost less than the incumbent and `target`, for
        `seconds` at most unless no other configuration is open. A target of 0 stands for none."""
        cutoff, slowest = self.incumbent.threshold, case.slowest()
        if case.bound >= cutoff:
            return self.close(case)
        if terms_of(case) > self.parameters.most_terms:
            return self.give_up(case, TOO_LARGE.format(self.parameters.most_terms))
        below = cutoff if cutoff <= slowest else math.inf  # infinite: no decision is left out
        if 0 < target < min(cutoff, slowest) and self.run.tap is None:
            below = target
        if case.bound >= below:
            return None  # its turn comes in a later round
        self.run.report(note=str(case.chosen))
        part = self.part(seconds if len(self.open) > 1 else None)
        begun = CLOCK.seconds()
        programme = Programme(case, min(below, slowest), self.run)
        self.build_seconds += CLOCK.seconds() - begun
        answer = self.minimise(programme, part)
        # the model has only decisions below that, so that it proves no more
        proven = below if answer.stop is Stop.INFEASIBLE else min(answer.bound or 0.0, below)
        case = self.raise_bound(case, proven)
        if answer.stop is Stop.ERROR:
            self.failed = True
            self.give_up(case, answer.message)
        elif answer.stop is Stop.OPTIMAL:
            # a model with a far cut-off has coarse ticks: it has another turn with a closer one
            close_enough = case.bound >= self.incumbent.objective * (1 - self.run.options.gap)
            if close_enough or below == cutoff:
                self.close(case)
        elif answer.stop is Stop.LIMIT and part.remaining > seconds / 2 and self.run.tap is None:
            self.give_up(case, "a native option ended its model")
        return None

    def part(self, seconds: float | None) -> Run:
        """The run of one model. Probing takes most of the time of these models and is left out,
        unless the user's native options say otherwise."""
        if self.run.budget is None:
            part = self.run.part(time_limit=seconds)
        else:
            part = self.run.part(seconds=seconds)
        native = dict(part.options.native)
        native[BACKEND] = {"cp_model_probing_level": 0, **native.get(BACKEND, {})}
        return replace(part, options=replace(part.options, native=native))

    def minimise(self, programme: Programme, part: Run) -> ModelAnswer:
        """The answer to a model; its decision is offered as the incumbent."""
        self.models += 1
        answer = general.minimise(
            self.method, programme.model, part,
            # the bound is that of one configuration, and none of the problem
            lambda incumbent, bound: self.run.report(incumbent=incumbent),
        )  # fmt: skip
        if answer.has_solution:
            decision = read(programme, answer)
            self.incumbent.offer(seconds_of(programme.case.data, decision), decision)
        return answer


def seconds_of(data: AmpData, decision: AmpDecision) -> float:
    """The seconds of a decision, without rounding."""
    size = decision.micro_batch
    gas = data.global_batch // (decision.data * size)
    tables = {
        table.type: table.seconds
        for table in data.layer_seconds
        if (table.tensor, table.micro_batch) == (decision.tensor, size)
    }

    def ring(group: Sequence[int], volume: float) -> float:
        """Seconds of an all-reduce of `volume` bytes."""
        times = (volume / data.bandwidth[d][e] for d, e in combinations(group, 2))
        return 2 * (len(group) - 1) / len(group) * max(times, default=0.0)

    slowest = sync = 0.0
    for i in range(decision.data):
        groups = [stage[i] for stage in decision.placement]
        stages = []
        for group, (first, end) in zip(groups, decision.stages, strict=True):
            rows = [tables[data.devices[d].type] for d in group]
            work = sum(max(row[l] for row in rows) for l in range(first, end))
            volume = sum(layer.tensor_bytes for layer in data.layers[first:end]) * size
            stages.append(work + ring(group, volume))
        sends = 0.0
        for (_, end), (here, after) in zip(decision.stages, pairwise(groups), strict=False):
            volume = data.layers[end - 1].activation_bytes * size
            links = (data.bandwidth[d][e] for d, e in zip(here, after, strict=True))
            sends += volume / min(links)
        slowest = max(slowest, (gas - 1) * max(stages) + sum(stages) + sends)
    for stage, (first, end) in zip(decision.placement, decision.stages, strict=True):
        volume = sum(layer.param_bytes for layer in data.layers[first:end]) / decision.tensor
        for data_group in zip(*stage, strict=True):
            sync = max(sync, ring(data_group, volume))
    return slowest + sync


def solve_by(
    method: str, data: AmpData, run: Run, parameters: Parameters = Parameters()
) -> Outcome[AmpDecision]:
    """The best decision over all configurations, and the least of their proven bounds."""
    begun = CLOCK.seconds()
    solver = general.label(method, run.options)
    rates = np.array(data.bandwidth)
    levels = np.unique(rates[~np.eye(len(data.devices), dtype=bool)]).tolist() or [1.0]
    cases = [Case(data, chosen, levels) for chosen in configurations(data)]
    if not cases:
        return Outcome(stop=Stop.INFEASIBLE, solver=solver, message=NO_CONFIGURATION)
    cases = [replace(case, bound=simple_bound(case)) for case in cases]
    run.report(bound=min(case.bound for case in cases))
    sweep = Sweep(method, run, cases, parameters)
    try:
        classes = classes_of(data, run)
        links = links_between(data, classes)
        sweep.open = [replace(case, classes=classes, links=links) for case in sweep.open]
        sweep.build_seconds = CLOCK.seconds() - begun
        sweep.go()
    except Stopped:
        pass  # configurations that are still open keep their bounds
    proven = not sweep.open and sweep.complete
    if not proven:
        stop = Stop.ERROR if sweep.failed and not run.should_stop else stop_reason(run)
        message = sweep.message
    elif sweep.incumbent.decision is None:
        stop, message = Stop.INFEASIBLE, NO_ROOM
    else:
        stop, message = Stop.OPTIMAL, ""
    return Outcome(
        stop=stop,
        decision=sweep.incumbent.decision,
        bound=sweep.bound if math.isfinite(sweep.bound) else None,
        build_seconds=sweep.build_seconds,
        solver=solver,
        message=message,
        details={"configurations": len(cases), "models": sweep.models},
    )
