"""The local search: a few starts, then rounds of annealing in several processes.

annealing.py has the search itself, workers.py the processes.
"""

from collections.abc import Sequence

from hetplan.formulations.joint.annealing import LocalSearch, Parameters
from hetplan.formulations.joint.data import JointData, JointDecision
from hetplan.formulations.joint.evaluate import decision_of, plan_of
from hetplan.formulations.joint.space import Space
from hetplan.formulations.joint.workers import Helpers
from hetplan.solvers.run import CUT, Outcome, Run, Stop, stop_reason
from hetplan.text import percent_text


def search(
    data: JointData,
    run: Run,
    starts: Sequence[JointDecision] = (),
    parameters: Parameters | None = None,
) -> Outcome[JointDecision]:
    """The fastest plan that the search finds. Proves no bound.

    starts: plans that the search begins with, beside constructions; it is no worse than these.
    """
    local = LocalSearch(Space(data), run, parameters or Parameters())
    with Helpers(local) as helpers:
        local.begin([plan_of(data, start) for start in starts])
        local.construct()
        local.vary()
        helpers.begin()
        local.rounds()
        helpers.merge()
    stop = stop_reason(run) if run.should_stop else Stop.DONE
    return outcome_of(local, stop, helpers.workers)


def outcome_of(local: LocalSearch, stop: Stop, workers: int) -> Outcome[JointDecision]:
    """The outcome of a search that has ended: its incumbent with the reason to stop. workers: the
    processes that ran its rounds."""
    if local.incumbent is None:
        decision, message = None, f"none of {local.replays} plans fits in memory"
    else:
        decision, message = decision_of(local.incumbent.plan), ""
    if local.run.cut:
        text = cut_text(local)
        message = f"{message}; {text}" if message else text
    return Outcome(
        stop=stop,
        decision=decision,
        message=message,
        details={"steps": local.steps, "replays": local.replays, "workers": workers},
    )


def cut_text(local: LocalSearch) -> str:
    """A text that says where the time limit cut the search."""
    run = local.run
    done = percent_text(run.spent / (run.budget or run.spent))
    return f"{CUT}: joint after {local.steps} steps, {done} of its budget"
