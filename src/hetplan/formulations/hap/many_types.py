"""The ratio problem of one segment for any number of device types, by one sweep: its dual has a
single variable.

Let stage s hold fixed work F_s and shared work S_s > 0, r_s = F_s / S_s, and let v ascend. With
multipliers x[s, d] of the rows T_s >= (F_s + S_s b_d) / v_d in units of shared work, lambda_d of M
>= b_d, and z of the sum of ratios,

    max  z + sum_sd x[s, d] r_s / v_d    s.t.   sum_d x[s, d] = S_s,   sum_d lambda_d = 1,   x,
                                                lambda >= 0, sum_s x[s, d] >= v_d (n_d z - comm
                                                lambda_d)  =: D_d.

- For given D this is a transportation problem whose profits are products: stages in ascending r go
  to types in descending speed, the rest to the slowest. With R(c) = the fixed work of the first c
  of shared work (stages in ascending r; R is convex) and C_d = D_d + D_{d+1} + ..., the profit is
  R(all) / v_0 - sum_{d > 0} w_d R(C_d), w_d = 1 / v_{d-1} - 1 / v_d; it is feasible where C_0 <=
  all shared work.
- lambda on a faster type lowers more of the C_d, and by more: it goes to the fastest type until its
D is 0, and so on.

What is left is concave and piecewise linear in z: its slope is bisected. Every z gives a lower
bound. The ratios are b_d = v_d (p + sum_{0 < e <= d} w_e R'(C_e)), equal to the largest where
lambda_d > 0, p >= 0 the price of C_0 <= all; where the slope changes its sign at a kink, the mean
of both sides that sums to 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetplan.formulations.hap.problem import Floats, HapProblem, Stages

HALVINGS = 200


@dataclass(frozen=True)
class Side:
    """What holds at one z: the bound, its slope there, C_0, and ratios [K] without p; weight [K]:
    their sum is weight . (p v) more with p."""

    value: float
    slope: float
    first: float
    ratios: Floats
    shape: Floats


def sweep(problem: HapProblem, stages: Stages) -> tuple[Floats, float]:
    """(ratios [K], a lower bound of the cost), which meet but for rounding and ties."""
    dual = _Dual(problem, stages)
    low, high = 0.0, 1.0
    while dual.at(high).first < dual.work:
        high *= 2
    for _ in range(HALVINGS):
        middle = 0.5 * (low + high)
        if not low < middle < high:
            break
        side = dual.at(middle)
        if side.first <= dual.work and side.slope > 0:
            low = middle
        else:
            high = middle
    left, right = dual.at(low), dual.at(high)
    counts = problem.counts
    short = 1.0 - float(left.ratios @ counts)  # the slope on the left
    if right.first > dual.work:  # all shared work is placed: p makes up for what is missing
        return left.ratios + short / float(left.shape @ counts) * left.shape, left.value
    over = float(right.ratios @ counts) - 1.0
    part = short / (short + over) if short + over > 0 else 0.0
    return (1 - part) * left.ratios + part * right.ratios, max(left.value, right.value)


class _Dual:
    """The concave function of z."""

    def __init__(self, problem: HapProblem, stages: Stages) -> None:
        self._v, self._n = problem.speeds, problem.counts.astype(float)
        self._comm = float(stages.comm[0])
        S = stages.S[:, 0]
        shared = S > 0
        order = np.argsort(stages.F[shared] / S[shared], kind="stable")
        F, S = stages.F[shared][order], S[shared][order]
        self._r = np.append(F / S, 0.0)
        self._ends, self._fixed = np.append(0.0, np.cumsum(S)), np.append(0.0, np.cumsum(F))
        self.work = float(self._ends[-1])
        self._w = 1 / self._v[:-1] - 1 / self._v[1:]
        self._constant = stages.constant + float(stages.F.sum()) / float(self._v[0])
        self._faster = np.cumsum(self._n[::-1])[::-1]  # devices as fast at least

    def at(self, z: float) -> Side:
        """One z >= 0."""
        v, n = self._v, self._n
        # the slowest type that has some of lambda: the faster ones have all they can take
        top = int(np.searchsorted(-self._faster * z, -self._comm, side="right")) - 1 if z > 0 else 0
        top = max(top, 0)
        demand = v * n * z
        demand[top] = max(0.0, v[top] * (self._faster[top] * z - self._comm))
        demand[top + 1 :] = 0.0
        sums = np.cumsum(demand[::-1])[::-1]
        inside = np.minimum(sums[1:], self.work)
        fixed = np.interp(inside, self._ends, self._fixed)
        rate = self._r[
            np.minimum(np.searchsorted(self._ends, inside, side="right") - 1, len(self._r) - 2)
        ]
        price = np.append(0.0, np.cumsum(self._w * rate))
        capped = np.minimum(np.arange(len(v)), top)
        ratios, shape = (v * price)[capped], v[capped]
        return Side(
            self._constant + z - float(self._w @ fixed),
            1.0 - float(ratios @ n),
            float(sums[0]),
            ratios,
            shape,
        )
