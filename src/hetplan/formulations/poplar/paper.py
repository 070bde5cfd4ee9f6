"""The paper's own method: Algorithm 1 on each device's curve, splines, then Algorithm 2.

ZeRO 0, 1  speed_i = highest speed of the spline; g_i = floor(G speed_i / sum speed); the rest one
           by one to the device of the greatest under-utilisation u_i = (T - t_i) speed_i, T = max
           t_i (eq. 2 and 3).
ZeRO 2, 3  for every time t of the splines: b_i = the largest batch of at most t seconds, gas =
           ceil(G / sum b_i), wall = (t + C) gas; the t of least wall, its last step smaller.
As printed, line 9 divides a time by a speed and calls it idle time, and line 14 takes the minimum;
the text says "using equation (2) and (3)", "nodes with relatively lower workload", which is what is
done here. gas is printed as a plain quotient; steps are whole, so it is rounded up. All choices
look at the splines, the plan is priced on the curves. Source: Poplar (AAAI 2025), Algorithms 1 and
2.
"""

from __future__ import annotations

import time
from collections import Counter

import numpy as np

from hetplan.formulations.poplar.awareness import (
    Awareness,
    CurveDevice,
    dips,
    explore,
    spline_curve,
)
from hetplan.formulations.poplar.data import PoplarData, PoplarDecision
from hetplan.formulations.poplar.plans import shares_decision, steps_decision
from hetplan.formulations.poplar.problem import (
    NOTHING_FITS,
    Floats,
    Ints,
    PoplarProblem,
    compile_problem,
)
from hetplan.solvers.result import Outcome, Stop
from hetplan.solvers.run import Run

# A batch is in the peak range when its speed is at least this share of the highest. The paper
# speaks of "the range that maximizes the GPU's compute capability" and states no width; this one is
# hetplan's.
PEAK_SHARE = 0.98
# Times that differ by less than this part are equal.
SAME_TIME = 1e-9


def solve(data: PoplarData, run: Run) -> Outcome[PoplarDecision]:
    """Algorithms 1 and 2; no claim of optimality."""
    begun = time.perf_counter()
    problem = compile_problem(data)
    if not problem.groups:
        return Outcome(stop=Stop.INFEASIBLE, message=NOTHING_FITS)
    aware = [explore(CurveDevice(group.seconds[1:].tolist())) for group in problem.groups]
    splines = [spline_curve(found.points, found.largest) for found in aware]
    search = search_steps if problem.stepwise else search_shares
    dipping = _told(problem, aware, splines)
    more = f" (and {len(dipping) - 1} more)" if len(dipping) > 1 else ""
    return Outcome(
        stop=Stop.DONE,
        decision=search(problem, splines),
        solve_seconds=time.perf_counter() - begun,
        message=f"spline of {dipping[0]}{more}" if dipping else "",
        details={"passes": sum(len(found.tried) for found in aware), "dips": dipping},
    )


def _told(problem: PoplarProblem, aware: list[Awareness], splines: list[Floats]) -> list[str]:
    return [
        f"{group.name}: {dip}"
        for group, found, curve in zip(problem.groups, aware, splines, strict=True)
        for dip in dips(found.points, curve)
    ]


def speeds(curve: Floats) -> Floats:
    """Samples per second of batches 1..mbs of a curve [mbs + 1]."""
    return np.asarray(np.arange(1, len(curve)) / curve[1:])


class Shares:
    """Estimated time and micro-batch of any share of one curve, from its peak range where
    possible."""

    def __init__(self, curve: Floats) -> None:
        self.curve = curve
        speed = speeds(curve)
        self.peak = float(speed.max())
        self.range = 1 + np.flatnonzero(speed >= PEAK_SHARE * self.peak)
        self.known: dict[int, tuple[float, int]] = {0: (0.0, 0)}

    def of(self, samples: int) -> tuple[float, int]:
        """(seconds, micro-batch) of a share."""
        if samples not in self.known:
            batches = self.range[self.range <= samples]
            # a share below the peak range is one micro-batch, or as few as fit
            if not len(batches):
                batches = np.array([min(samples, len(self.curve) - 1)])
            times = samples // batches * self.curve[batches] + self.curve[samples % batches]
            # of equally fast ones the largest: the paper strives for large micro-batches
            best = int(np.flatnonzero(times <= times.min() * (1 + SAME_TIME))[-1])
            self.known[samples] = float(times[best]), int(batches[best])
        return self.known[samples]


def search_shares(problem: PoplarProblem, splines: list[Floats]) -> PoplarDecision:
    """Algorithm 2, lines 1 to 16."""
    shares = [Shares(curve) for curve in splines]
    group_of = np.repeat(np.arange(len(shares)), [group.count for group in problem.groups])
    speed = np.array([share.peak for share in shares])[group_of]
    optimal = problem.total / speed.sum()
    loads = np.floor(optimal * speed * (1 + 1e-12)).astype(np.int64)
    times = np.array([shares[k].of(int(g))[0] for k, g in zip(group_of, loads, strict=True)])
    for _ in range(problem.total - int(loads.sum())):
        i = int(np.argmax((times.max() - times) * speed))
        loads[i] += 1
        times[i] = shares[group_of[i]].of(int(loads[i]))[0]
    rows = [Counter(loads[group_of == k].tolist()) for k in range(len(shares))]
    return shares_decision(problem, rows, lambda k, g: shares[k].of(g)[1])


def search_steps(problem: PoplarProblem, splines: list[Floats]) -> PoplarDecision:
    """Algorithm 2, lines 17 to 29."""
    times = np.unique(np.concatenate([curve[1:] for curve in splines]))
    counts = np.array([group.count for group in problem.groups])
    # find(g, t): the largest batch of at most t seconds, whatever lies below it; [groups, times]
    found = np.array([_find(curve, times) for curve in splines])
    size = counts @ found
    steps = -(-problem.total // size)
    best = int(np.argmin((times + problem.comm) * steps))
    full = int(steps[best]) - 1
    rest = problem.total - full * int(size[best])
    last = int(np.argmax(size >= rest))
    rows = [(1, _trimmed(found[:, last], counts, int(size[last]) - rest))]
    if full:
        whole = [
            Counter({int(b): full * int(n)}) for b, n in zip(found[:, best], counts, strict=True)
        ]
        rows.insert(0, (full, whole))
    return steps_decision(problem, rows)


def _find(curve: Floats, times: Floats) -> Ints:
    falling = np.minimum.accumulate(curve[::-1])[::-1]
    return np.asarray(np.searchsorted(falling, times, side="right") - 1, dtype=np.int64)


def _trimmed(
    batches: Ints,
    counts: Ints,
    excess: int,
) -> list[Counter[int]]:
    """The last step: every device's batch, less one sample from one device after the other until it
    fits."""
    each = np.repeat(batches, counts)
    while excess > 0:
        loaded = np.flatnonzero(each > 0)[:excess]
        each[loaded] -= 1
        excess -= len(loaded)
    ends = np.cumsum(counts)
    return [Counter(each[end - n : end].tolist()) for end, n in zip(ends, counts, strict=True)]
