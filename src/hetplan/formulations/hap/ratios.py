"""The best ratios of a fixed program, exactly: a linear programme, solved by HiGHS.

Sets   k segments, d device types of n_d devices, s stages of the program.
Data   v_d FLOP/s; F_s and S_sk FLOP; constant and comm_k seconds; with memory P bytes on every
       device, A_k bytes per ratio, W_d bytes of a device.
Vars   B_kd >= 0 ratio of a device of type d; M_k largest ratio; T_s seconds of a stage.
Min    constant + sum_k comm_k M_k + sum_s T_s  s.t.
(1) sum_d n_d B_kd = 1          (2) M_k >= B_kd
(3) T_s >= (F_s + sum_k S_sk B_kd) / v_d
(4) with memory  sum_k A_k B_kd <= W_d - P

Source: HAP, Section 5.1, eq. 3, and Section 5.2.
"""

from dataclasses import dataclass, replace

import numpy as np

from hetplan.formulations.hap.problem import CostOfRatios, Floats, HapProblem
from hetplan.solvers.expressions import Columns
from hetplan.solvers.general import minimise
from hetplan.solvers.model import SMALLEST, Model, Totals
from hetplan.solvers.run import Run, Stop

# Share of the memory that a second linear programme leaves free, where the ratios of the first one
# exceed the memory by the solver's tolerance.
LEFT_FREE = 1e-8


@dataclass(frozen=True)
class BestRatios:
    """The best ratios of a program, or the answer that none fit in memory."""

    ratios: Floats  # [g, K] of one device of each type
    seconds: float  # the program's cost at these ratios; infinite where they do not fit
    # A lower bound in seconds; infinite where it is proven that no ratios fit, None where the
    # solver proved nothing.
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
    """The best ratios of a program of this cost, also when the time of the run is up.

    The ratios start from those in proportion to speed, which are kept where no better ones are
    found.
    """
    best = np.tile(problem.proportional, (problem.g, 1))
    estimate = problem.program_seconds(cost, best)
    least = estimate if problem.fits(cost, best) else np.inf
    # With one type all devices have equal ratios, which is best for their bytes, too.
    # A program that costs nothing has no better ratios either.
    if problem.K == 1 or (estimate <= 0 and np.isfinite(least)):
        return BestRatios(best, least, least)
    # This takes milliseconds, whatever is left of the time. No progress is reported: this is one
    # step of a method's work.
    exactly = Run(replace(run.options, gap=0.0, time_limit=None), cancel=run.cancel)
    bound: float | None = None
    for margin in (0.0, LEFT_FREE):
        model, ratio = _programme(problem, cost, estimate or 1.0, margin)
        answer = minimise("milp", model, exactly, report=lambda incumbent, bound: None)
        if not margin:  # with a margin nothing is proven about the whole memory
            bound = answer.bound
            if answer.stop is Stop.INFEASIBLE:
                return BestRatios(best, np.inf, np.inf)
        if answer.x is not None:
            ratios = np.maximum(answer.values(ratio), 0.0)
            ratios /= (ratios @ problem.counts)[:, None]
            seconds = problem.program_seconds(cost, ratios)
            if seconds < least and problem.fits(cost, ratios):
                best, least = ratios, seconds
        if np.isfinite(least):
            break
    return BestRatios(best, least, bound)


def _programme(
    problem: HapProblem, cost: CostOfRatios, estimate: float, margin: float
) -> tuple[Model, Columns]:
    """The linear programme, and its columns of B [g, K].

    estimate: seconds, about its optimum. margin: share of the memory that is left free.
    """
    model = Model("hap-ratios", totals=Totals(least=estimate, largest=estimate))
    ratio = model.continuous("ratio", (problem.g, problem.K))
    top = model.continuous("top", problem.g)
    T = model.seconds("stage", len(cost.F))
    model.minimize(cost.constant + cost.comm @ top + T.sum())
    for k in range(problem.g):
        model.row("whole", problem.counts @ ratio[k] == 1)  # (1)
        model.row("largest", top[k] >= ratio[k])  # (2)
    flops = cost.F[:, None] + cost.S @ ratio  # [s, d]
    model.row("stage", T[:, None] >= flops / problem.speeds)  # (3)
    if problem.capacity is not None:
        for d, room in enumerate(problem.capacity * (1 - margin) - cost.fixed_bytes):  # (4)
            # in units of the largest coefficient; what is then too small for a solver becomes 0
            unit = max(float(cost.shared_bytes.max()), abs(float(room))) or 1.0
            coefficients = cost.shared_bytes / unit
            coefficients = np.where(coefficients < SMALLEST, 0.0, coefficients)
            model.row("memory", coefficients @ ratio[:, d] <= room / unit)
    return model, ratio
