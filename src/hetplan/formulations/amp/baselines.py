"""The rules that AMP is compared with: Megatron's (§4.1) and random strategies (§4.5, RS).

Both list a few strategies, price each exactly, as a real trial would, and return the fastest that
fits in memory; the mean over those that fit stands in `details`, since the paper reports least and
mean (Tables 3-5).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from hetplan.formulations.amp.cuts import parameter_cut, uniform_cut
from hetplan.formulations.amp.data import AmpData, AmpDecision
from hetplan.formulations.amp.problem import (
    NO_CONFIGURATION,
    AmpProblem,
    Configuration,
    compile_problem,
)
from hetplan.formulations.amp.strategy import Strategy, by_node, megatron_placement, place
from hetplan.solvers.result import Outcome, Stop
from hetplan.solvers.run import Run

# How many random strategies the paper tries (§4.5).
DRAWS = 50


@dataclass(frozen=True)
class Trial:
    """A strategy and its exact T in seconds; None where it does not fit in memory."""

    strategy: Strategy
    seconds: float | None


def try_out(problem: AmpProblem, strategy: Strategy) -> Trial:
    """Price one strategy."""
    placed = place(problem, strategy.configuration, strategy.placement)
    return Trial(strategy, placed.seconds(strategy.cut) if placed.fits(strategy.cut) else None)


def megatron(data: AmpData, run: Run) -> Outcome[AmpDecision]:
    """Megatron's rules (§4.1): least tensor x pipeline, tensor groups in nodes, equal layers or
    parameters.

    For each micro-batch size, of the degrees whose tensor groups are no larger than the smallest
    node, those with the least tp pp (with memory: the least at which a strategy fits) in Megatron's
    order, each cut both by the number of layers and by parameters.
    """
    return best_of(
        data, run, megatron_trials, "no usable degrees with tensor groups within the smallest node"
    )


def megatron_trials(data: AmpData, problem: AmpProblem, run: Run) -> Iterator[Trial]:
    """Megatron's proposals, micro-batch after micro-batch; those too big for the memory
    included."""
    nodes = [device.node for device in data.devices]
    smallest = min(map(len, by_node(nodes)))
    allowed = [chosen for chosen in problem.configurations() if chosen.tensor <= smallest]
    allowed.sort(key=lambda each: (each.micro_batch, each.tensor * each.pipeline))
    for _, same_batch in groupby(allowed, key=lambda each: each.micro_batch):
        for _, same_product in groupby(same_batch, key=lambda each: each.tensor * each.pipeline):
            trials = [
                try_out(problem, Strategy(chosen, megatron_placement(nodes, chosen), cut))
                for chosen in same_product
                for cut in (
                    uniform_cut(problem.layers, chosen.pipeline),
                    parameter_cut(problem.params, chosen.pipeline),
                )
            ]
            yield from trials
            if run.should_stop:
                return
            if any(trial.seconds is not None for trial in trials):
                break


def random(data: AmpData, run: Run) -> Outcome[AmpDecision]:
    """The best of 50 strategies drawn at random: configuration, bijection and cut, each uniformly
    (§4.5).

    Draws that do not fit in memory count as draws; the run's seed decides them all.
    """
    return best_of(data, run, random_trials, NO_CONFIGURATION)


def random_trials(data: AmpData, problem: AmpProblem, run: Run) -> Iterator[Trial]:
    """50 random strategies."""
    rng = np.random.default_rng(run.options.seed)
    choices = list(problem.configurations())
    for _ in range(DRAWS if choices else 0):
        yield try_out(problem, random_strategy(problem, choices[rng.integers(len(choices))], rng))
        if run.should_stop:
            return


def random_strategy(
    problem: AmpProblem, chosen: Configuration, rng: np.random.Generator
) -> Strategy:
    """A uniformly random bijection and a uniformly random cut for `chosen`."""
    shape = (chosen.pipeline, chosen.data, chosen.tensor)
    inner = 1 + np.sort(rng.choice(problem.layers - 1, size=chosen.pipeline - 1, replace=False))
    cut = np.concatenate([[0], inner, [problem.layers]]).astype(np.int64)
    return Strategy(chosen, rng.permutation(problem.devices).reshape(shape), cut)


def best_of(
    data: AmpData,
    run: Run,
    trials: Callable[[AmpData, AmpProblem, Run], Iterator[Trial]],
    nothing: str,
) -> Outcome[AmpDecision]:
    """The fastest of a rule's strategies that fits, and how the others did; proves no bound.

    nothing: the message where the rule lists no strategy at all.
    """
    begun = time.perf_counter()
    problem = compile_problem(data)
    count, fitting = 0, list[tuple[float, Strategy]]()
    for trial in trials(data, problem, run):
        count += 1
        if trial.seconds is not None:
            fitting.append((trial.seconds, trial.strategy))
            run.report(incumbent=trial.seconds)
    stopped = Stop.INTERRUPTED if run.cancelled else Stop.LIMIT
    details: dict[str, object] = {"strategies": count, "fitting": len(fitting)}
    best = None
    if fitting:
        best = min(fitting, key=lambda each: each[0])[1].decision()
        details["mean_seconds"] = sum(seconds for seconds, _ in fitting) / len(fitting)
    reason = f"none of {count} strategies fits in memory" if count else nothing
    return Outcome(
        stop=stopped if run.should_stop else Stop.DONE,
        decision=best,
        solve_seconds=time.perf_counter() - begun,
        message="" if best else reason,
        details=details,
    )
