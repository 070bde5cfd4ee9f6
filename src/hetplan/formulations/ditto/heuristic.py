"""How Ditto's heuristics end: with a template, or with the reason why they have none."""

from __future__ import annotations

import time

from hetplan.formulations.ditto.data import DittoDecision
from hetplan.formulations.ditto.problem import DittoProblem, Stages
from hetplan.solvers.result import Outcome, Stop


def nothing(message: str, begun: float, stop: Stop = Stop.DONE) -> Outcome[DittoDecision]:
    """No template, because of `message`."""
    return Outcome(stop=stop, message=message, solve_seconds=time.perf_counter() - begun)


def concluded(
    problem: DittoProblem, stages: Stages, begun: float, message: str = "", **details: object
) -> Outcome[DittoDecision]:
    """The template found; none where it breaks what Ditto and Oobleck do not look at."""
    if len(stages) > problem.micro_batches:
        count = f"{len(stages)} stages for {problem.micro_batches} micro-batches"
        return nothing(f"the template found has {count}", begun)
    if not problem.fits(stages):
        return nothing(
            "the template found does not fit in memory, which the algorithm ignores", begun
        )
    return Outcome(
        stop=Stop.DONE,
        decision=problem.decision(stages),
        solve_seconds=time.perf_counter() - begun,
        message=message,
        details=details,
    )
