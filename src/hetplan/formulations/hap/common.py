"""What every method starts and ends with: the reduced theory, or an answer that needs no search; a
first program and a lower bound found without search; the outcome.

The program and the bound are cheapest derivations of each property, for theories of any width, by
Knuth's generalisation of Dijkstra: the cost of a property is that of its cheapest triple plus the
sum (for a program) or the maximum (for a bound, and for a second program) of the costs of the
triple's preconditions. Sums count a shared branch once for each of its users. In a chain of
residual blocks that grows as 2^depth, until the cost of a late triple is lost in rounding. Maxima
do not grow so, but see only the dearest branch. So both are tried.

The ratio problem, min over B of t(Q, B) for a fixed program Q, is solved exactly, as a linear
programme through HiGHS,

    min  constant + sum_k comm_k M_k + sum_s T_s
    s.t. T_s >= (F_s + S_s . B_d) / v_d,   M_k >= B_kd,   sum_d n_d B_kd = 1,   B >= 0,
         and with memory  sum_k A_k B_kd <= W_d - P  for each type d

(A, P: the program's shared and fixed bytes). `shard_lengths` gives whole numbers of rows for
ratios.

Source: HAP, Section 5.1, eq. 3, and Section 5.2.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from hetplan.errors import require
from hetplan.formulations.hap.data import HapData, HapDecision
from hetplan.formulations.hap.problem import (
    NOTHING,
    Combine,
    CostOfRatios,
    Floats,
    HapProblem,
    ReducedTheory,
    Step,
    TripleSeconds,
    compile_problem,
    derivations,
    infeasible_because,
    reduce_theory,
)
from hetplan.solvers.general import minimise
from hetplan.solvers.highs import check_native
from hetplan.solvers.model import SMALLEST, Columns, Model, Totals
from hetplan.solvers.run import OPTIMAL_GAP, Outcome, Run, Stop, stop_reason

# Share of the memory that is left free where a solver's tolerance alone is too much.
LEFT_FREE = 1e-8


@dataclass(frozen=True)
class BestRatios:
    """ratios [g, K], their cost in seconds, and a proven lower bound of the problem (None: stopped
    early).

    Where no ratios were found that fit in memory, the seconds are infinite. Where it is proven that
    none fit, the bound is infinite, too.
    """

    ratios: Floats
    seconds: float
    bound: float | None

    @property
    def fits(self) -> bool:
        """Whether these ratios fit in memory."""
        return bool(np.isfinite(self.seconds))

    @property
    def proven_unfit(self) -> bool:
        """Whether it is proven that no ratios fit."""
        return self.bound is not None and not np.isfinite(self.bound)


def best_ratios(problem: HapProblem, cost: CostOfRatios, run: Run) -> BestRatios:
    """The optimum for a program's stages, also when the time of the run is up."""
    best = np.tile(problem.proportional, (problem.g, 1))
    estimate = problem.seconds(cost, best)
    least = estimate if problem.fits(cost, best) else np.inf
    if problem.K == 1 or (estimate <= 0 and np.isfinite(least)):
        return BestRatios(best, least, least)  # equal ratios hold least on the fullest device, too
    # This takes milliseconds, whatever is left of the time. No progress is reported: this is one
    # step of a method's work.
    exactly = Run(replace(run.options, gap=0.0, time_limit=None), cancel=run.cancel)
    bound: float | None = None
    for margin in (0.0, LEFT_FREE):
        model, ratio = _programme(problem, cost, estimate or 1.0, margin)
        answer = minimise("milp", model, exactly, report=lambda i, b: None)
        if not margin:
            bound = answer.bound
            if answer.stop is Stop.INFEASIBLE:
                return BestRatios(best, np.inf, np.inf)
        if answer.x is not None:
            point = np.maximum(answer.values(ratio), 0.0)
            point /= (point @ problem.counts)[:, None]
            seconds = problem.seconds(cost, point)
            if seconds < least and problem.fits(cost, point):
                best, least = point, seconds
        if np.isfinite(least):
            break
    return BestRatios(best, least, bound)


def _programme(
    problem: HapProblem, cost: CostOfRatios, estimate: float, margin: float
) -> tuple[Model, Columns]:
    """The linear programme, and its columns of B [g, K].

    estimate: about what it costs. margin: share of the memory that is left free.
    """
    model = Model("hap-ratios", totals=Totals(least=estimate, largest=estimate))
    ratio = model.continuous("ratio", (problem.g, problem.K))
    top = model.continuous("top", problem.g)
    T = model.seconds("stage", len(cost.F))
    model.constant = cost.constant
    model.minimize(top, cost.comm)
    model.minimize(T)
    for k in range(problem.g):
        model.equal("whole", ratio[k], problem.counts.astype(float), to=1.0)
        for d in range(problem.K):
            model.row("largest", [top[k], ratio[k, d]], [1.0, -1.0], lower=0.0)
    for s, d in np.ndindex(len(cost.F), problem.K):
        model.row(
            "stage",
            np.append(T[s], ratio[:, d]),
            np.append(1.0, -cost.S[s] / problem.speeds[d]),
            lower=float(cost.F[s] / problem.speeds[d]),
        )
    if problem.capacity is not None:
        # in units of the largest coefficient; what is then too small for a solver becomes 0
        for d, room in enumerate(problem.capacity * (1 - margin) - cost.fixed_bytes):
            unit = max(float(cost.shared_bytes.max()), abs(float(room))) or 1.0
            parts = cost.shared_bytes / unit
            parts = np.where(parts < SMALLEST, 0.0, parts)
            model.row("memory", ratio[:, d], parts, upper=float(room) / unit)
    return model, ratio


def shard_lengths(ratios: Sequence[float], length: int) -> list[int]:
    """Whole numbers near length * ratios [m] that sum to `length`: the nearest ones, then one up or
    down where it adds least to the rounding error until the sum is right. Raises InputError for a
    length below 1. Source: HAP, Section 5.1."""
    require(length >= 1, "length of a dimension", got=length, expected="at least 1")
    wanted = np.array(ratios, dtype=float) * length
    lengths = np.maximum(np.rint(wanted), 0).astype(np.int64)
    while (off := length - int(lengths.sum())) != 0:
        step = 1 if off > 0 else -1
        worse = np.abs(lengths + step - wanted) - np.abs(lengths - wanted)
        if step < 0:
            worse[lengths == 0] = np.inf
        lengths[int(np.argmin(worse))] += step
    return [int(x) for x in lengths]


NO_RATIOS = "no ratios fit the given program in memory"
NONE_FITS = "no program fits in memory"

COMBINED: tuple[Combine, ...] = (sum, max)
# What all memory together costs, in multiples of the seconds of all triples.
TRIED_MULTIPLES = (1.0, 1e4, 0.1, 10.0, 0.01)


def reduced_or_answered(data: HapData, run: Run) -> ReducedTheory | Outcome[HapDecision]:
    """The reduced theory; or the outcome where there is no program, or where the program is given
    or costs nothing."""
    check_native(run.options)
    problem = compile_problem(data)
    reason = infeasible_because(data, problem)
    if reason is not None:
        return Outcome(stop=Stop.INFEASIBLE, message=reason)
    if problem.program is not None:
        return ratios_only(problem, problem.program, run)
    theory = reduce_theory(problem)
    return ratios_only(problem, theory.program([]), run) if theory.goal == NOTHING else theory


def ratios_only(problem: HapProblem, program: Sequence[int], run: Run) -> Outcome[HapDecision]:
    """The best ratios of the only program in question. Source: HAP, Section 5."""
    cost = problem.cost_of(program)
    best = best_ratios(problem, cost, run)
    stop, message = stop_reason(run), ""
    if best.proven_unfit:
        stop, message = Stop.INFEASIBLE, NO_RATIOS
    elif not best.fits:
        message = "no ratios found that fit"
    elif best.bound is not None and best.seconds - best.bound <= OPTIMAL_GAP * best.seconds:
        stop = Stop.OPTIMAL
    return Outcome(
        stop=stop,
        decision=problem.decision(program, best.ratios) if best.fits else None,
        bound=best.bound if best.fits else None,
        message=message,
        details={"stages": len(cost.F)},
    )


def outcome_of(
    theory: ReducedTheory,
    program: Sequence[int] | None,
    *,
    run: Run,
    stop: Stop,
    bound: float | None,
    build_seconds: float = 0.0,
    solver: str = "hetplan",
    message: str = "",
    details: Mapping[str, object] | None = None,
) -> Outcome[HapDecision]:
    """The outcome with `program` (triple numbers) under its best ratios, if any fit in memory. A
    bound is never below 0."""
    decision = None
    if program is not None:
        kept, problem = theory.program(program), theory.problem
        best = best_ratios(problem, problem.cost_of(kept), run)
        if best.fits:
            decision = problem.decision(kept, best.ratios)
    return Outcome(
        stop=stop,
        decision=decision,
        bound=None if bound is None or not np.isfinite(bound) else max(float(bound), 0.0),
        build_seconds=build_seconds,
        solver=solver,
        message=message,
        details=details or {},
    )


def greedy_program(
    theory: ReducedTheory, seconds_of: TripleSeconds, combine: Combine = sum
) -> list[int]:
    """Triple numbers, in order, of the program that derives each property by its cheapest triple,
    where the preconditions of a triple cost their total (`combine` is sum) or the dearest of them
    (max)."""
    by = derivations(theory.steps, seconds_of, combine)[1]
    order: list[int] = []
    derived: set[int] = set()
    stack: list[tuple[int, bool]] = [] if theory.goal == NOTHING else [(theory.goal, False)]
    while stack:
        p, ready = stack.pop()
        if p in derived:
            continue
        if ready:
            derived.add(p)
            order.append(theory.steps[by[p]].index)
            continue
        stack.append((p, True))
        stack += [(q, False) for q in theory.steps[by[p]].pre if q not in derived]
    return theory.program(order)


def seconds_at(theory: ReducedTheory, ratios: Floats) -> TripleSeconds:
    """Seconds of a triple as a stage of its own at ratios [g, K]."""
    problem = theory.problem

    def seconds_of(step: Step) -> float:
        row = ratios[step.segment]
        return (
            step.fixed + step.shared * float(row.max())
            if step.comm
            else float(((step.fixed + step.shared * row) / problem.speeds).max())
        )

    return seconds_of


def least_seconds(theory: ReducedTheory) -> TripleSeconds:
    """A bound of a triple's share of any program's cost, whatever the ratios.

    A stage lasts at least as long as the mean over all devices. In it shared work counts at least
    1 / (n v), with the speed v of the fastest device. The largest of n ratios is at least 1 / n.
    """
    problem = theory.problem
    devices = float(problem.counts.sum())
    mean = float((problem.counts / problem.speeds).sum()) / devices
    least = 1.0 / (devices * float(problem.speeds[-1]))

    def seconds_of(step: Step) -> float:
        computing = step.fixed * mean + step.shared * least
        return step.fixed + step.shared / devices if step.comm else computing

    return seconds_of


def chain_bound(theory: ReducedTheory) -> float:
    """A lower bound of every program's cost: the dearest chain of preconditions, with the least
    seconds of each triple."""
    return derivations(theory.steps, least_seconds(theory), max)[0][theory.goal] * (1 - 1e-12)


def fitting_program(theory: ReducedTheory, run: Run) -> tuple[list[int], float]:
    """(A program, its seconds under its best ratios; infinite where it does not fit).

    Without memory it is the first program. With memory, programs are derived with every byte at a
    price in seconds, for several prices. The cheapest of these and of the first one that fits is
    taken."""
    problem, program = theory.problem, first_program(theory)
    best = best_ratios(problem, problem.cost_of(program), run).seconds, program
    if problem.capacity is None:
        return best[1], best[0]
    seconds = seconds_at(theory, np.tile(problem.proportional, (problem.g, 1)))
    devices = float(problem.counts.sum())
    for byte_price, combine in product(tried_byte_prices(problem), COMBINED):

        def both(step: Step, byte_price: float = byte_price) -> float:
            return seconds(step) + byte_price * (devices * step.fixed_bytes + step.shared_bytes)

        program = greedy_program(theory, both, combine)
        best = min(best, (best_ratios(problem, problem.cost_of(program), run).seconds, program))
        if run.should_stop and np.isfinite(best[0]):
            break
    return best[1], best[0]


def tried_byte_prices(problem: HapProblem) -> list[float]:
    """Seconds per byte that are tried: all memory together then costs the seconds of all triples,
    or multiples of that."""
    assert problem.capacity is not None
    room = float(problem.capacity @ problem.counts) or 1.0
    return [times * (problem.seconds_of_all or 1.0) / room for times in TRIED_MULTIPLES]


def first_program(theory: ReducedTheory) -> list[int]:
    """The cheapest of the greedy programs at proportional and at even ratios, by their cost
    there."""
    problem = theory.problem
    ratios = [np.tile(row, (problem.g, 1)) for row in (problem.proportional, problem.even)]
    programs = [
        (at, greedy_program(theory, seconds_at(theory, at), combine))
        for at, combine in product(ratios, COMBINED)
    ]
    return min((problem.seconds(problem.cost_of(p), at), p) for at, p in programs)[1]
