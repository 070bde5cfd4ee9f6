"""The best ratios of a fixed program, exactly.

The ratio problem, min over B of t(Q, B) for a fixed program Q, is solved as a linear programme
through HiGHS,

    min  constant + sum_k comm_k M_k + sum_s T_s
    s.t. T_s >= (F_s + S_s . B_d) / v_d,   M_k >= B_kd,   sum_d n_d B_kd = 1,   B >= 0,
         and with memory  sum_k A_k B_kd <= W_d - P  for each type d

(A, P: the program's shared and fixed bytes).

Source: HAP, Section 5.1, eq. 3, and Section 5.2.
"""

from dataclasses import dataclass, replace

import numpy as np

from hetplan.formulations.hap.problem import CostOfRatios, Floats, HapProblem
from hetplan.solvers.general import minimise
from hetplan.solvers.model import SMALLEST, Columns, Model, Totals
from hetplan.solvers.run import Run, Stop

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
