"""The ratio problem: min over B of t(Q, B) for a fixed program Q, exactly.

One device type is trivial. With one segment there is a closed form where all work is shared, and
two types leave one variable, whose breakpoints are searched. All else is a linear programme through
HiGHS,

    min constant + sum_k comm_k M_k + sum_s T_s   s.t.   T_s >= (F_s + S_s . B_d) / v_d,   M_k >=
    B_kd, sum_d n_d B_kd = 1,   B >= 0,

whose rows (stage, type) are added as they are violated. With memory, ratios that are the best
without it and fit are the best; others come from the linear programme with the rows

    sum_k A_k B_kd <= W_d - P        for each type d (A, P: the program's shared and fixed bytes).

Source: HAP, Section 5.1, eq. 3, and Section 5.2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hetplan.formulations.hap.problem import Floats, HapProblem, Stages
from hetplan.solvers.general import minimise
from hetplan.solvers.model import SMALLEST, Columns, Model, Totals
from hetplan.solvers.result import Stop
from hetplan.solvers.run import Run

MAX_ROUNDS = 200
# Rows violated by less than this share of the objective are left out; the bound is unharmed.
VIOLATION = 1e-11
# Share of the memory that is left free where a solver's tolerance alone is too much.
MARGIN = 1e-8


@dataclass(frozen=True)
class Ratios:
    """ratios [g, K], their cost in seconds, and a proven lower bound of the problem (None: stopped
    early).

    Where no ratios that fit in memory were found seconds are infinite, and the bound, too, where
    there are none.
    """

    ratios: Floats
    seconds: float
    bound: float | None
    how: str

    @property
    def fits(self) -> bool:
        """Whether these ratios fit in memory."""
        return bool(np.isfinite(self.seconds))

    @property
    def impossible(self) -> bool:
        """Whether it is proven that none do."""
        return self.bound is not None and not np.isfinite(self.bound)


def best_ratios(problem: HapProblem, stages: Stages, run: Run | None = None) -> Ratios:
    """The optimum for a program's stages."""
    found = _at_once(problem, stages)
    if found is not None and problem.fits(stages, found.ratios):
        return found
    # what is best for equal devices holds least on the fullest, too
    if found is not None and problem.K == 1:
        return _none_fits(problem)
    return _by_rows(problem, stages, run or Run())


def _at_once(problem: HapProblem, stages: Stages) -> Ratios | None:
    """The optimum without memory where one of the quick ways applies."""
    if problem.K == 1:
        return _told(problem, stages, np.tile(problem.even, (problem.g, 1)), "one type")
    if problem.g == 1 and not stages.F.any():
        return _told(problem, stages, _all_shared(problem, stages)[None, :], "closed form")
    if problem.g == 1 and problem.K == 2:
        return _told(problem, stages, _two_types(problem, stages)[None, :], "breakpoints")
    return None


def _none_fits(problem: HapProblem) -> Ratios:
    """It is proven that no ratios fit in memory."""
    return Ratios(np.tile(problem.even, (problem.g, 1)), np.inf, np.inf, "no ratios fit in memory")


def _told(problem: HapProblem, stages: Stages, ratios: Floats, how: str) -> Ratios:
    seconds = problem.seconds(stages, ratios)
    return Ratios(ratios, seconds, seconds, how)


def _all_shared(problem: HapProblem, stages: Stages) -> Floats:
    """b_d = min(M, t v_d): stages cost (sum S) t in all, collectives comm M; the optimum has M = t
    v for some speed v, because the cost is piecewise linear in M with its kinks there."""
    shapes, work = _capped(problem), float(stages.S.sum())
    busy = (shapes / problem.speeds).max(axis=1)
    costs = work * busy + float(stages.comm[0]) * shapes.max(axis=1)
    best: Floats = shapes[int(np.argmin(costs))]
    return best


def _capped(problem: HapProblem) -> Floats:
    """[K, K]: ratios in proportion to speed, those of types faster than type i as that of i."""
    shapes = np.minimum(problem.speeds[None, :], problem.speeds[:, None])
    return np.asarray(shapes / (shapes @ problem.counts)[:, None])


def _two_types(problem: HapProblem, stages: Stages) -> Floats:
    """One variable x, the slower type's ratio, the other being (1 - n_0 x) / n_1: cost is convex
    and piecewise linear, so its optimum is at an end or a kink; the kinks are bisected by their
    values."""
    (v0, v1), (n0, n1) = problem.speeds, problem.counts
    F, S = stages.F, stages.S[:, 0]
    slope = S / v0 + S * n0 / (n1 * v1)
    with np.errstate(divide="ignore", invalid="ignore"):
        kinks = ((F + S / n1) / v1 - F / v0) / slope
    ends = np.array([0.0, 1.0 / (n0 + n1), 1.0 / n0])
    points = np.unique(
        np.concatenate([ends, kinks[np.isfinite(kinks) & (kinks > 0) & (kinks < 1.0 / n0)]])
    )

    def at(x: float) -> Floats:
        return np.array([x, max(0.0, (1.0 - n0 * x) / n1)])

    low, high = 0, len(points) - 1
    while high - low > 2:  # convex along the sorted points
        middle = (low + high) // 2
        here, there = (
            problem.seconds(stages, at(float(points[i]))[None, :]) for i in (middle, middle + 1)
        )
        low, high = (low, middle + 1) if here <= there else (middle, high)
    found = min(
        (float(points[i]) for i in range(low, high + 1)),
        key=lambda x: problem.seconds(stages, at(x)[None, :]),
    )
    return at(found)


def _by_rows(problem: HapProblem, stages: Stages, run: Run) -> Ratios:
    """Row generation over HiGHS; rows enter where the incumbent ratios violate them."""
    start = np.tile(problem.proportional, (problem.g, 1))
    estimate = problem.seconds(stages, start)
    best, least = start, estimate if problem.fits(stages, start) else np.inf
    if estimate <= 0 and np.isfinite(least):
        return _told(problem, stages, start, "nothing to share")
    # those that bind where ratios follow speed up to one of the speeds
    points = [np.tile(row, (problem.g, 1)) for row in _capped(problem)]
    rows = {(s, int(d)) for at in points for s, d in enumerate(_slowest(problem, stages, at))}
    bound: float | None = None
    for margin in (0.0, MARGIN):
        for _ in range(MAX_ROUNDS):
            model, ratio, T = _programme(problem, stages, rows, estimate, margin)
            answer = minimise("milp", model, _exactly(run), report=lambda i, b: None)
            if answer.stop is Stop.INFEASIBLE and not margin:
                return _none_fits(problem)
            if answer.x is None or answer.bound is None:
                break
            if not margin:
                bound = answer.bound if bound is None else max(bound, answer.bound)
            point = np.maximum(answer.values(ratio), 0.0)
            point /= (point @ problem.counts)[:, None]
            seconds = problem.seconds(stages, point)
            if seconds < least and problem.fits(stages, point):
                best, least = point, seconds
            busy = (stages.F[:, None] + stages.S @ point) / problem.speeds
            late = busy - answer.values(T)[:, None] > VIOLATION * estimate
            new = {(int(s), int(d)) for s, d in np.argwhere(late)} - rows
            if not new:
                break
            rows |= new
        if np.isfinite(least):
            break
    return Ratios(best, least, bound, "linear programme")


def _exactly(run: Run) -> Run:
    """A part of the run that asks for no gap."""
    part = run.part()
    return replace(part, options=replace(part.options, gap=0.0))


def _slowest(problem: HapProblem, stages: Stages, ratios: Floats) -> Floats:
    busy: Floats = ((stages.F[:, None] + stages.S @ ratios) / problem.speeds).argmax(axis=1)
    return busy


def _programme(
    problem: HapProblem, stages: Stages, rows: set[tuple[int, int]], estimate: float, margin: float
) -> tuple[Model, Columns, Columns]:
    """The linear programme with the given rows, its columns of B [g, K] and of T.

    estimate: about what it costs. margin: share of the memory that is left free.
    """
    size = estimate if estimate > 0 else 1.0
    model = Model("hap-ratios", totals=Totals(least=size, largest=size))
    ratio = model.continuous("ratio", (problem.g, problem.K))
    top = model.continuous("top", problem.g)
    T = model.seconds("stage", len(stages.F))
    model.constant = stages.constant
    model.minimize(top, stages.comm)
    model.minimize(T)
    for k in range(problem.g):
        model.equal("whole", ratio[k], problem.counts.astype(float), to=1.0)
        for d in range(problem.K):
            model.row("largest", [top[k], ratio[k, d]], [1.0, -1.0], lower=0.0)
    fit_memory(model, problem, stages, ratio, margin)
    for s, d in sorted(rows):
        values = np.append(1.0, -stages.S[s] / problem.speeds[d])
        fixed = float(stages.F[s] / problem.speeds[d])
        model.row("stage", np.append(T[s], ratio[:, d]), values, lower=fixed)
    return model, ratio, T


def fit_memory(
    model: Model, problem: HapProblem, stages: Stages, ratio: Columns, margin: float
) -> None:
    """Each type's bytes; in units of the largest coefficient, those too small for a solver become
    0."""
    if problem.capacity is None or stages.shared_bytes is None:
        return
    for d, room in enumerate(problem.capacity * (1 - margin) - stages.fixed_bytes):
        unit = max(float(stages.shared_bytes.max()), abs(float(room)))
        if unit > 0:
            parts = stages.shared_bytes / unit
            parts = np.where(parts < SMALLEST, 0.0, parts)
            model.row("memory", ratio[:, d], parts, upper=float(room) / unit)
