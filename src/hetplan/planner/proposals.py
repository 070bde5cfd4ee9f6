"""Asks a strategy for its candidates: every method solves every problem that the strategy poses. A
fault of hetplan gives a candidate that says so, and does not end the planning."""

import math
from collections.abc import Sequence
from dataclasses import replace

from hetplan.errors import InputError, UnsupportedError, debugging
from hetplan.planner.candidate import Candidate, StrategyMethod, joined
from hetplan.planner.faults import fault_text
from hetplan.planner.strategy import NoPlan, Problem, Strategy, begin_run
from hetplan.profiling.workload import Workload
from hetplan.schema import derived
from hetplan.solvers.run import CUT, Run, Stopped
from hetplan.text import percent_text


def propose(
    strategy: Strategy,
    workload: Workload,
    run: Run,
    methods: Sequence[StrategyMethod] | None = None,
    hopeless: float = math.inf,
) -> list[Candidate]:
    """One candidate for each problem and method, with a plan or the reason why there is none. Each
    method gets an equal share of the time that is left.

    methods: None: all of the strategy. hopeless: seconds; a method ends when its bound is above
    them. A fault in posing the problems is the answer of all methods; a fault in a method is the
    answer of this method alone.
    """
    methods = strategy.methods if methods is None else methods
    with derived(f"{workload.model.name} on {workload.cluster.name} as {strategy.name}"):
        try:
            problems = strategy.pose(workload, run)
        except (NoPlan, UnsupportedError) as error:
            return [refused(strategy, method, error) for method in methods]
        except Exception as error:  # noqa: BLE001 - a fault costs this strategy's rows alone
            return [fault_of(strategy.name, method, error) for method in methods]
        pairs = [(problem, method) for problem in problems for method in methods]
        candidates = []
        for i, (problem, method) in enumerate(pairs):
            share = replace(run.share(len(pairs) - i), hopeless=hopeless)
            candidate = attempt(strategy, problem, method, share)
            if candidate is not None:
                candidates.append(candidate)
        return candidates


def attempt(
    strategy: Strategy, problem: Problem, method: StrategyMethod, run: Run
) -> Candidate | None:
    """The candidate of one method for one problem; None where the method has none. After an
    interruption, the candidate says that the method was not begun."""
    named = problem.as_listed(method)
    try:
        if run.cancelled:
            raise NoPlan("unknown", "not begun: stopped from the keyboard")
        candidate = problem.solve(method, begin_run(run, f"{strategy.name}/{named.name}"))
    except (NoPlan, UnsupportedError, Stopped) as error:
        return refused(strategy, named, error)
    except Exception as error:  # noqa: BLE001 - a fault costs this method's row alone
        return fault_of(strategy.name, named, error)
    if candidate is None:
        return None
    candidate = replace(candidate, method=named)
    if run.cut and CUT not in candidate.message:
        share = percent_text(run.spent / (run.budget or 1.0))
        text = f"{CUT}: {candidate.name} after {share} of its budget"
        candidate = replace(candidate, message=joined(candidate.message, text))
    return candidate


def refused(
    strategy: Strategy, method: StrategyMethod, error: NoPlan | UnsupportedError | Stopped
) -> Candidate:
    """A candidate without a plan, with the reason in `error`."""
    text = str(error) or "stopped before it had a plan"
    reason = error if isinstance(error, NoPlan) else NoPlan("unknown", text)
    return Candidate(
        strategy=strategy.name,
        method=method,
        status=reason.status,
        message=reason.reason,
        solve_seconds=reason.seconds,
    )


def fault_of(strategy: str, method: StrategyMethod, error: Exception) -> Candidate:
    """The candidate of a method that failed by a fault of hetplan.

    Raises the error again if it is an InputError, which only the user can mend, and if
    HETPLAN_DEBUG is set.
    """
    if isinstance(error, InputError) or debugging():
        raise error
    return Candidate(
        strategy=strategy,
        method=method,
        status="unknown",
        message=f"failed: {fault_text(error)}",
        failed=True,
    )
