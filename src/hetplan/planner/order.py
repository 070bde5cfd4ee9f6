"""The best order of the passes of a plan: the plan with an explicit order where that is faster."""

from dataclasses import dataclass
from typing import Any

from hetplan.errors import UnsupportedError, require
from hetplan.formulations.joint.schedule.solve import best_orders, with_orders
from hetplan.plans.plan import Plan
from hetplan.profiling.workload import Workload
from hetplan.replays.replay import StageReplayer
from hetplan.solvers.run import OPTIMAL_GAP, Run


@dataclass(frozen=True)
class Ordering:
    """A plan and the best order of its passes."""

    plan: Plan  # with the order if that is faster, else as it was
    seconds_before: float  # replayed, under the plan's own schedule
    seconds: float  # replayed, of `plan`
    # seconds that no order of these passes replays below, on the same stages and in the same
    # memory; backward passes all whole or all split, as the orders that are sought
    bound: float
    split: bool  # whether backward passes may be split

    @property
    def is_faster(self) -> bool:
        """Whether the order is faster than the plan's own schedule."""
        return self.seconds < self.seconds_before

    def document(self) -> dict[str, Any]:
        """The answer as JSON types."""
        return {
            "schedule": self.plan.schedule,
            "seconds_before": self.seconds_before,
            "seconds": self.seconds,
            "bound": self.bound,
            "split": self.split,
        }


def order(plan: Plan, workload: Workload, run: Run, *, split: bool = True) -> Ordering:
    """The best order of the passes of a plan, within the time of the run.

    split: whether the orders may do a backward pass in two parts. Raises UnsupportedError for a
    plan without stages, for one whose backward passes cannot be split, and for one whose replicas
    exchange something after every pass.
    """
    require(
        plan.program is None,
        "has no passes to order",
        where=plan.name,
        got=plan.schedule,
        expected="a plan of stages",
        kind=UnsupportedError,
    )
    require(
        not split or plan.recomputation in ("none", "selective"),
        "backward passes cannot be split",
        where=plan.name,
        got=f"recomputation {plan.recomputation}",
        expected="none or selective, or orders of whole passes",
        kind=UnsupportedError,
    )
    replayer = StageReplayer(workload)
    before = replayer.replay(plan).seconds
    orders = best_orders(plan, replayer, run, split=split)
    bound = max(best.bound for _, best in orders)
    ordered = with_orders(plan, [(problem, best.found) for problem, best in orders])
    same = Ordering(plan, before, before, min(bound, before), split)
    if ordered is None:
        return same
    replayed = replayer.replay(ordered)
    if not replayed.fits or replayed.seconds >= before * (1 - OPTIMAL_GAP):
        return same
    prediction = plan.prediction
    if prediction is not None:
        # The other figures are of the schedule that the planner chose.
        prediction = prediction.model_copy(
            update={
                "predicted_seconds": replayed.seconds,
                "closed_form_seconds": None,
                "objective": None,
                "bound": None,
                "ladder": None,
            }
        )
    ordered = ordered.model_copy(update={"prediction": prediction})
    return Ordering(ordered, before, replayed.seconds, bound, split)
