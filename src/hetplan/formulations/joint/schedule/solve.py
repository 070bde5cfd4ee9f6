"""The best order of passes of a pipeline, with a bound: rules and local search, a repeated period,
then CP-SAT; and the method `schedule` of problem `joint`."""

from collections.abc import Sequence
from dataclasses import dataclass

from hetplan.formulations.joint.data import JointData, JointDecision
from hetplan.formulations.joint.evaluate import plan_of
from hetplan.formulations.joint.schedule import cp
from hetplan.formulations.joint.schedule.bounds import lower_bound
from hetplan.formulations.joint.schedule.data import Order, PassProblem
from hetplan.formulations.joint.schedule.dispatch import (
    Found,
    best_dispatched,
    better,
    improve,
    judged,
)
from hetplan.formulations.joint.schedule.period import best_period
from hetplan.formulations.joint.schedule.pose import named_order, pose
from hetplan.formulations.joint.search import search
from hetplan.plans.plan import Plan
from hetplan.replays.chains import ChainReplayer
from hetplan.solvers.general import label, minimise
from hetplan.solvers.run import OPTIMAL_GAP, Outcome, Run, Stop, Stopped, stop_reason


@dataclass(frozen=True)
class Parameters:
    """Limits of the methods."""

    steps: int = 400  # of the local search
    passes: int = 2000  # the most passes of a model of CP-SAT
    period_share: float = 0.3  # of the time, for the repeated period
    seconds: float = 60.0  # for one pipeline, where the run has no time limit
    micros_of_a_period: int = 8  # the fewest micro-batches for which a period is sought
    constraints: Sequence[cp.Constraint] = cp.CONSTRAINTS  # of CP-SAT's model


@dataclass(frozen=True)
class Best:
    """The fastest order known and the bound."""

    found: Found | None  # None: no order is known
    bound: float  # seconds that no order is below
    stop: Stop

    @property
    def proven(self) -> bool:
        """Whether no order is faster."""
        return self.found is not None and close(self.bound, self.found)


def close(bound: float, found: Found | None) -> bool:
    """Whether an order attains a bound."""
    return found is not None and bound >= found.seconds * (1 - OPTIMAL_GAP)


def best_order(
    problem: PassProblem,
    run: Run,
    known: Sequence[Order] = (),
    parameters: Parameters = Parameters(),
) -> Best:
    """The fastest order that is found in the time of a run, and the bound of all orders.

    known: orders to begin with; those that do not fit are left out.
    """
    bound = lower_bound(problem)
    run.report(bound=bound)
    found = best_dispatched(problem, run)
    for order in known:
        found = better(found, judged(problem, order))
    found = found and improve(problem, found, run, parameters.steps, bound)
    if problem.micros >= parameters.micros_of_a_period and not close(bound, found):
        limit = parameters.period_share * min(run.remaining, parameters.seconds)
        part = run.part(time_limit=limit)
        found = better(found, judged(problem, best_period(problem, part)))
    if found is not None:
        run.report(incumbent=found.seconds)
    if close(bound, found):
        return Best(found, bound, Stop.OPTIMAL)
    if len(problem.passes) > parameters.passes:
        return Best(found, bound, stop_reason(run))
    return by_constraints(problem, run, found, bound, parameters.constraints)


def by_constraints(
    problem: PassProblem,
    run: Run,
    found: Found | None,
    bound: float,
    constraints: Sequence[cp.Constraint],
) -> Best:
    """The better one of the order that is known and of CP-SAT's."""
    most = found.seconds if found else longest(problem)
    try:
        v = cp.build(problem, run, most * (1 + OPTIMAL_GAP), bound, constraints)
    except Stopped:
        return Best(found, bound, stop_reason(run))
    if found is not None:
        cp.hint(v, found.order, found.verdict)
    answer = minimise("cp-sat", v.model, run)
    # No order is as fast as the model's limit. So an order that is known is the fastest, up to
    # rounding; without one, no order keeps the constraints.
    if answer.stop is Stop.INFEASIBLE:
        return Best(found, found.seconds if found else bound, Stop.INFEASIBLE)
    if answer.has_solution:
        found = better(found, judged(problem, cp.read(v, answer)))
    bound = max(bound, answer.bound or 0.0)
    if found is not None:
        bound = min(bound, found.seconds)  # the two differ by rounding
    return Best(found, bound, Stop.OPTIMAL if close(bound, found) else stop_reason(run))


def longest(problem: PassProblem) -> float:
    """Seconds of all passes and messages, one after the other, and the longest tail."""
    passes = sum(problem.seconds(one) + problem.message(one).lasts for one in problem.passes)
    return passes + max(problem.tail(s) for s in range(problem.stages))


def best_orders(
    plan: Plan, replayer: ChainReplayer, run: Run, *, split: bool = True
) -> list[tuple[PassProblem, Best]]:
    """The problem of each replica of a plan, and its best order. Replicas that are alike share one.
    split: whether the orders may do a backward pass in two parts.

    Raises UnsupportedError as `pose` does.
    """
    problems, schedule = pose(plan, replayer, split=split), plan.pass_schedule
    solved: dict[PassProblem, Best] = {}
    parameters = Parameters()
    for problem in problems:
        if problem not in solved:
            left = len(set(problems) - set(solved))
            seconds = min(run.remaining / left, parameters.seconds)
            known = []
            if schedule != "explicit":
                known = [named_order(problem, schedule)]
            solved[problem] = best_order(problem, run.part(time_limit=seconds), known, parameters)
    return [(problem, solved[problem]) for problem in problems]


def with_orders(plan: Plan, orders: Sequence[tuple[PassProblem, Found | None]]) -> Plan | None:
    """The plan with an explicit order for each replica; None where one has none."""
    passes = []
    for problem, found in orders:
        if found is None:
            return None
        passes.append(problem.texts(found.order))
    return Plan.model_validate({**dict(plan), "schedule": "explicit", "passes": passes})


def solve(
    data: JointData, run: Run, decision: JointDecision | None = None, *, split: bool = True
) -> Outcome[JointDecision]:
    """The best orders of the passes of a plan, replica by replica.

    decision: the plan; None: the fastest plan that the local search finds in half of the time.
    split: whether the orders may do a backward pass in two parts. The outcome's decision is the
    plan with its own schedule. The orders, their seconds and the bounds of each replica are among
    the details: `passes` as a plan file writes them, `order_seconds`, `order_bound` and
    `named_seconds`, those of the plan's own schedule. The outcome has no bound, because the bound
    of an order is one of this plan alone. `hetplan plan order` writes the orders into a plan.
    """
    if decision is None:
        decision = search(data, run.share(2)).decision
    if decision is None:
        return Outcome(stop=Stop.DONE, message="no plan fits in memory")
    solver = label("cp-sat", run.options)
    plan, replayer = plan_of(data, decision), ChainReplayer.of(data)
    orders = best_orders(plan, replayer, run, split=split)
    wholes = pose(plan, replayer, split=False)
    named = [judged(whole, named_order(whole, decision.schedule)) for whole in wholes]
    proven = all(best.proven for _, best in orders)
    texts = [
        None if best.found is None else problem.texts(best.found.order) for problem, best in orders
    ]
    return Outcome(
        stop=Stop.DONE if proven else stop_reason(run),
        decision=decision,
        solver=solver,
        message="orders proven best" if proven else "",
        details={
            "passes": texts,
            "order_seconds": [seconds_of(best.found) for _, best in orders],
            "order_bound": [best.bound for _, best in orders],
            "named_seconds": [seconds_of(found) for found in named],
        },
    )


def seconds_of(found: Found | None) -> float | None:
    """Seconds of an order; None without one."""
    return None if found is None else found.seconds
