"""The paper's own method: Algorithm 1 on each device's curve, splines, then Algorithm 2; and its
baselines, DeepSpeed's equal micro-batches and Whale's shares by peak fp32 FLOP/s.

ZeRO 0, 1  speed_i = highest speed of the spline; g_i = floor(G speed_i / sum speed); the rest one
           by one to the device of the greatest under-utilisation u_i = (T - t_i) speed_i, T = max
           t_i (eq. 2 and 3).
ZeRO 2, 3  for every time t of the splines: b_i = the largest batch of at most t seconds, gas =
           ceil(G / sum b_i), wall = (t + C) gas; the t of least wall, its last step smaller.
As printed, line 9 divides a time by a speed and calls it idle time, and line 14 takes the minimum;
the text says "using equation (2) and (3)", "nodes with relatively lower workload", which is what is
done here. gas is printed as a plain quotient; steps are whole, so it is rounded up. All choices
look at the splines, the plan is priced on the curves.

DeepSpeed (Rasley et al. 2020) gives every device the same micro-batch in every step; the paper
tuned it to the largest that fits everywhere. Whale (Jia et al. 2022) gives each device a part of
every step in proportion to its peak FLOP/s in single precision, whatever precision is trained in;
the paper scaled it to the largest that fits everywhere. Neither can use a device on which nothing
fits. Baselines 1 and 2 are DeepSpeed on the devices of the slowest or of the fastest type alone; an
instance knows the collectives of all devices only, so these are what they pay. Where the global
batch is no multiple of a step, the last step is smaller in the same proportions.
Source: Poplar (AAAI 2025), Algorithms 1 and 2, "Models and Baselines".
"""

from collections import Counter
from typing import Final

import numpy as np

from hetplan.formulations.poplar.awareness import CurveDevice, dips, spline_curve
from hetplan.formulations.poplar.data import PoplarData, PoplarDecision, Share, Step
from hetplan.formulations.poplar.decisions import shares_decision, steps_decision
from hetplan.formulations.poplar.evaluate import evaluate
from hetplan.formulations.poplar.problem import (
    NOTHING_FITS,
    SAME_TIME,
    Floats,
    Ints,
    PoplarProblem,
    compile_problem,
    peak_speed_bound,
)
from hetplan.profiling.hardware.cluster import catalogue
from hetplan.profiling.profiles.largest_batch import explore
from hetplan.solvers.general import Known
from hetplan.solvers.run import Outcome, Run, Stop

# A batch is in the peak range when its speed is at least this share of the highest. The paper
# speaks of "the range that maximizes the GPU's compute capability" and states no width; this one is
# hetplan's.
PEAK_SHARE = 0.98
# "Whale uses single-precision floating point operations per second (FLOPs) as cost model" (Poplar,
# introduction).
WHALE_PRECISION: Final = "fp32"


def solve(data: PoplarData, run: Run) -> Outcome[PoplarDecision]:
    """Algorithms 1 and 2; no claim of optimality."""
    problem = compile_problem(data)
    if not problem.groups:
        return Outcome(stop=Stop.INFEASIBLE, message=NOTHING_FITS)
    aware = [explore(CurveDevice(group.seconds[1:].tolist())) for group in problem.groups]
    splines = [spline_curve(device.points, device.largest) for device in aware]
    dipping = [
        f"{group.name}: {dip}"
        for group, device, curve in zip(problem.groups, aware, splines, strict=True)
        for dip in dips(device.points, curve)
    ]
    more = f" (and {len(dipping) - 1} more)" if len(dipping) > 1 else ""
    return Outcome(
        stop=Stop.DONE,
        decision=algorithm_2(problem, splines),
        message=f"spline of {dipping[0]}{more}" if dipping else "",
        details={"passes": sum(len(device.tried) for device in aware), "dips": dipping},
    )


def known_before(data: PoplarData, problem: PoplarProblem) -> Known[PoplarDecision]:
    """Bound and plan of a problem in which something fits: Algorithm 2 on the curves themselves."""
    decision = algorithm_2(problem, [group.seconds for group in problem.groups])
    return Known(
        bound=peak_speed_bound(problem),
        decision=decision,
        objective=evaluate(data, decision).objective,
    )


def algorithm_2(problem: PoplarProblem, curves: list[Floats]) -> PoplarDecision:
    """The plan by curves [mbs + 1] of the groups."""
    return (search_steps if problem.stepwise else search_shares)(problem, curves)


class Shares:
    """Estimated time and micro-batch of any share of one curve, from its peak range where
    possible."""

    def __init__(self, curve: Floats) -> None:
        self.curve = curve
        speed = np.arange(1, len(curve)) / curve[1:]
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
    loads = np.floor((problem.total / speed.sum()) * speed * (1 + 1e-12)).astype(np.int64)
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
    batches = np.array([largest_within(curve, times) for curve in splines])  # [groups, times]
    size = counts @ batches
    steps = -(-problem.total // size)
    best = int(np.argmin((times + problem.comm) * steps))
    full = int(steps[best]) - 1
    rest = problem.total - full * int(size[best])
    last = int(np.argmax(size >= rest))
    rows = [(1, _trimmed(batches[:, last], counts, int(size[last]) - rest))]
    if full:
        whole = [
            Counter({int(b): full * int(n)}) for b, n in zip(batches[:, best], counts, strict=True)
        ]
        rows.insert(0, (full, whole))
    return steps_decision(problem, rows)


def largest_within(curve: Floats, times: Floats) -> Ints:
    """Algorithm 2's find(g, t): the largest batch of at most t seconds, whatever lies below it."""
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


def deepspeed(data: PoplarData, run: Run) -> Outcome[PoplarDecision]:
    """The same micro-batch everywhere, the largest that fits on all devices."""
    return _in_proportion(data, np.ones(len(data.devices)), "")


def whale(data: PoplarData, run: Run) -> Outcome[PoplarDecision]:
    """Micro-batches and shares in proportion to peak fp32 FLOP/s."""
    return _in_proportion(data, *peak_flops(data))


def solve_by(method: str, data: PoplarData, run: Run) -> Outcome[PoplarDecision]:
    """DeepSpeed on the devices of the slowest type (`weak-only`) or of the fastest: by the highest
    speed of the curves, then by their length."""
    pick = min if method == "weak-only" else max
    *_, name = pick(
        (max((b / t for b, t in enumerate(d.step_seconds, 1)), default=0.0), len(d.step_seconds),
         d.name)
        for d in data.devices
    )  # fmt: skip
    weights = np.array([float(device.name == name) for device in data.devices])
    return _in_proportion(data, weights, f"{name} alone, with the collectives of all devices")


def peak_flops(data: PoplarData) -> tuple[Floats, str]:
    """[n] peak FLOP/s of the devices, from the instance or else the catalogue (WHALE_PRECISION).

    Where a device has neither, all devices fall back on the highest speed of their curves, which
    flatters Whale; the message says so.
    """
    known = catalogue()
    flops: list[float] = []
    for device in data.devices:
        if device.flops_per_second is not None:
            flops.append(device.flops_per_second)
        elif device.name in known:
            flops.append(known[device.name].peak_flops(WHALE_PRECISION, name=device.name))
        else:
            peaks = [
                max((b / t for b, t in enumerate(d.step_seconds, 1)), default=0.0)
                for d in data.devices
            ]
            return np.array(
                peaks
            ), f"no peak FLOP/s known for {device.name!r}: measured speeds instead"
    return np.array(flops), ""


def _in_proportion(data: PoplarData, weights: Floats, message: str) -> Outcome[PoplarDecision]:
    """Micro-batches floor(scale x weight), at least 1, for the largest scale at which they fit on
    all devices of positive weight; the others get nothing."""
    largest, takes = np.array([len(device.step_seconds) for device in data.devices]), weights > 0
    empty = np.flatnonzero(takes & (largest == 0))
    if not largest.any():  # no method has a plan then
        return Outcome(stop=Stop.INFEASIBLE, message=NOTHING_FITS)
    if len(empty):
        name = data.devices[empty[0]].name
        return Outcome(
            stop=Stop.DONE,
            message=f"device {empty[0]} ({name}) holds no sample, and all must take part",
        )
    scale = float(np.min(largest[takes] / weights[takes]))
    batches = np.minimum(
        np.maximum(takes, np.floor(scale * weights * (1 + 1e-12)).astype(np.int64)), largest
    )
    if data.stepwise:
        decision = PoplarDecision(steps=_steps(data.global_batch, batches))
    else:
        loads = rounded(data.global_batch, weights)
        shares = [
            Share(samples=g, micro_batch=b)
            for g, b in zip(loads.tolist(), batches.tolist(), strict=True)
        ]
        decision = PoplarDecision(devices=shares)
    return Outcome(stop=Stop.DONE, decision=decision, message=message)


def _steps(total: int, batches: Ints) -> list[Step]:
    full, rest = divmod(total, int(batches.sum()))
    steps = [Step(count=full, micro_batches=batches.tolist())] if full else []
    if rest:
        steps.append(
            Step(count=1, micro_batches=rounded(rest, batches.astype(np.float64)).tolist())
        )
    return steps


def rounded(total: int, weights: Floats) -> Ints:
    """Integers in proportion to `weights` that add up to `total`: floors, then the largest
    remainders."""
    exact = total * (weights / weights.sum())
    floors: Ints = np.floor(exact * (1 - 1e-14)).astype(np.int64)  # never more than `total` in sum
    floors[np.argsort(floors - exact, kind="stable")[: total - int(floors.sum())]] += 1
    return floors
