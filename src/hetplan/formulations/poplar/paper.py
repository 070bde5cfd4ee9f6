"""The paper's own method: Algorithm 1 on each device's curve, splines, then Algorithm 2; and its
baselines, DeepSpeed's equal micro-batches and Whale's shares by peak fp32 FLOP/s.

Algorithm 2 chooses by the splines, and its plan is priced on the curves:
ZeRO 0, 1  speed_i is the highest speed of the spline of device i. The device gets
           g_i = floor(G speed_i / sum speed) samples. Each of the remaining samples goes to the
           device of the greatest under-utilisation u_i = (T - t_i) speed_i, T = max t_i (eq. 2 and
           3).
ZeRO 2, 3  For every time t of the splines, b_i is the largest batch of at most t seconds, and
           gas = ceil(G / sum b_i) steps take wall = (t + C) gas. The t of least wall is chosen. The
           last step is smaller.
The print differs from its text in two lines: line 9 divides a time by a speed and calls the result
idle time, and line 14 takes the minimum. The text says "using equation (2) and (3)" and "nodes with
relatively lower workload", which is done here. gas is printed as a plain quotient; steps are whole,
so that it is rounded up.

DeepSpeed (Rasley et al. 2020) gives every device the same micro-batch in every step. The paper
tuned it to the largest one that fits on all devices. Whale (Jia et al. 2022) gives each device a
part of every step in proportion to its peak FLOP/s in single precision, also where training has
another precision. The paper scaled the steps to the largest ones that fit. Neither can use a device
on which no sample fits. Baselines 1 and 2 are DeepSpeed on the devices of the slowest or of the
fastest type alone. An instance has the collectives of all devices only, so that these count for
them as well. Where the global batch is no multiple of a step, the last step is smaller in the same
proportions.
Source: Poplar (AAAI 2025), Algorithms 1 and 2, "Models and Baselines".
"""

from collections import Counter
from typing import Final, NamedTuple

import numpy as np

from hetplan.formulations.poplar.curves import CurveDevice, dips, spline_curve
from hetplan.formulations.poplar.data import PoplarData, PoplarDecision, Share, Step
from hetplan.formulations.poplar.decisions import shares_decision, steps_decision
from hetplan.formulations.poplar.evaluate import evaluate, peak_speed
from hetplan.formulations.poplar.problem import (
    NOTHING_FITS,
    ROUNDING,
    SAME_TIME,
    Floats,
    Ints,
    PoplarProblem,
    compile_problem,
    peak_speed_bound,
)
from hetplan.profiling.hardware.cluster import catalogue
from hetplan.profiling.profiles.largest_batch import explore
from hetplan.solvers.general import PriorResult
from hetplan.solvers.run import Outcome, Run, Stop

# A batch is in the peak range when its speed is at least this share of the highest. The paper
# speaks of "the range that maximizes the GPU's compute capability" and states no width; this one is
# hetplan's.
PEAK_SHARE = 0.98
# "Whale uses single-precision floating point operations per second (FLOPs) as cost model" (Poplar,
# introduction).
WHALE_PRECISION: Final = "fp32"


def solve(data: PoplarData, run: Run) -> Outcome[PoplarDecision]:
    """The plan of Algorithms 1 and 2, without a claim of optimality."""
    problem = compile_problem(data)
    if not problem.groups:
        return Outcome(stop=Stop.INFEASIBLE, message=NOTHING_FITS)
    explored = [explore(CurveDevice(group.seconds[1:].tolist())) for group in problem.groups]
    splines = [spline_curve(device.points, device.largest) for device in explored]
    dip_lines: list[str] = []
    for group, device, spline in zip(problem.groups, explored, splines, strict=True):
        dip_lines += [f"{group.name}: {dip}" for dip in dips(device.points, spline)]
    message = ""
    if dip_lines:
        message = f"spline of {dip_lines[0]}"
    if len(dip_lines) > 1:
        message += f" (and {len(dip_lines) - 1} more)"
    return Outcome(
        stop=Stop.DONE,
        decision=algorithm_2(problem, splines),
        message=message,
        details={"passes": sum(len(device.tried) for device in explored), "dips": dip_lines},
    )


def prior_result(data: PoplarData, problem: PoplarProblem) -> PriorResult[PoplarDecision]:
    """The bound of peak speeds and the plan of Algorithm 2 on the curves themselves. A sample must
    fit on some device."""
    decision = algorithm_2(problem, [group.seconds for group in problem.groups])
    return PriorResult(
        bound=peak_speed_bound(problem),
        decision=decision,
        objective=evaluate(data, decision).objective,
    )


def algorithm_2(problem: PoplarProblem, curves: list[Floats]) -> PoplarDecision:
    """The plan of Algorithm 2. curves: [mbs + 1] t of each group."""
    if problem.stepwise:
        return search_steps(problem, curves)
    return search_shares(problem, curves)


class EstimatedShare(NamedTuple):
    """A share by a curve, in its best micro-batches."""

    seconds: float
    micro_batch: int


class Shares:
    """Estimates the shares of a device by its curve."""

    def __init__(self, curve: Floats) -> None:
        self.curve = curve  # [mbs + 1] t
        speed = np.arange(1, len(curve)) / curve[1:]
        self.peak = float(speed.max())  # samples per second
        # the micro-batches of the peak range, ascending
        self.range = 1 + np.flatnonzero(speed >= PEAK_SHARE * self.peak)
        self._estimated = {0: EstimatedShare(0.0, 0)}  # samples -> share

    def of(self, samples: int) -> EstimatedShare:
        """The estimate of a share. Its micro-batches are of the peak range where the share is large
        enough."""
        if samples not in self._estimated:
            batches = self.range[self.range <= samples]
            # a share below the peak range is one micro-batch, or as few as fit
            if not len(batches):
                batches = np.array([min(samples, len(self.curve) - 1)])
            times = samples // batches * self.curve[batches] + self.curve[samples % batches]
            # of equally fast ones the largest: the paper strives for large micro-batches
            best = int(np.flatnonzero(times <= times.min() * (1 + SAME_TIME))[-1])
            self._estimated[samples] = EstimatedShare(float(times[best]), int(batches[best]))
        return self._estimated[samples]


def search_shares(problem: PoplarProblem, splines: list[Floats]) -> PoplarDecision:
    """The plan of Algorithm 2, lines 1 to 16."""
    shares = [Shares(curve) for curve in splines]
    # arrays over all devices, group by group
    group_of = np.repeat(np.arange(len(shares)), [group.count for group in problem.groups])
    speed = np.array([share.peak for share in shares])[group_of]
    # ROUNDING, so that no quotient that is whole falls below its number
    loads = np.floor((problem.total / speed.sum()) * speed * (1 + ROUNDING)).astype(np.int64)
    times = np.array([shares[k].of(int(g)).seconds for k, g in zip(group_of, loads, strict=True)])
    for _ in range(problem.total - int(loads.sum())):
        i = int(np.argmax((times.max() - times) * speed))
        loads[i] += 1
        times[i] = shares[group_of[i]].of(int(loads[i])).seconds
    # for each group, samples of a share -> devices
    rows = [Counter(loads[group_of == k].tolist()) for k in range(len(shares))]
    return shares_decision(problem, rows, lambda k, samples: shares[k].of(samples).micro_batch)


def search_steps(problem: PoplarProblem, splines: list[Floats]) -> PoplarDecision:
    """The plan of Algorithm 2, lines 17 to 29."""
    times = np.unique(np.concatenate([curve[1:] for curve in splines]))
    counts = np.array([group.count for group in problem.groups])
    batches = np.array([largest_within(curve, times) for curve in splines])  # [groups, times]
    size = counts @ batches  # [times] samples of a step; some batch runs within each time
    steps = -(-problem.total // size)  # [times]
    best = int(np.argmin((times + problem.comm) * steps))
    full = int(steps[best]) - 1  # all steps but the last one
    rest = problem.total - full * int(size[best])  # samples of the last step
    last = int(np.argmax(size >= rest))  # the first, and so the shortest step that takes them
    rows = [(1, _trimmed(batches[:, last], counts, int(size[last]) - rest))]
    if full:
        whole = [
            Counter({int(b): full * int(n)}) for b, n in zip(batches[:, best], counts, strict=True)
        ]
        rows.insert(0, (full, whole))
    return steps_decision(problem, rows)


def largest_within(curve: Floats, times: Floats) -> Ints:
    """[times] the largest batch of at most t seconds for each time t, Algorithm 2's find(g, t).

    Smaller batches may take longer. curve: [mbs + 1].
    """
    # the least seconds of each batch and all larger ones
    least = np.minimum.accumulate(curve[::-1])[::-1]
    return np.asarray(np.searchsorted(least, times, side="right") - 1, dtype=np.int64)


def _trimmed(batches: Ints, counts: Ints, excess: int) -> list[Counter[int]]:
    """For each group, micro-batch -> devices with it, in a last step with fewer samples.

    batches: [groups] the micro-batch of a full step. counts: [groups] devices. excess: samples of
    the full step that the last one does not have. Devices with samples give up one each, in turn.
    """
    each = np.repeat(batches, counts)  # the micro-batch of each device, group by group
    while excess > 0:
        loaded = np.flatnonzero(each > 0)[:excess]
        each[loaded] -= 1
        excess -= len(loaded)
    ends = np.cumsum(counts)
    return [Counter(each[end - n : end].tolist()) for end, n in zip(ends, counts, strict=True)]


def deepspeed(data: PoplarData, run: Run) -> Outcome[PoplarDecision]:
    """The plan with the same micro-batch on all devices, the largest that fits on all of them."""
    return _in_proportion(data, np.ones(len(data.devices)), "")


def whale(data: PoplarData, run: Run) -> Outcome[PoplarDecision]:
    """The plan with micro-batches and shares in proportion to peak fp32 FLOP/s."""
    flops, message = peak_flops(data)
    return _in_proportion(data, flops, message)


def solve_by(method: str, data: PoplarData, run: Run) -> Outcome[PoplarDecision]:
    """The plan of DeepSpeed on the devices of the slowest type (`weak-only`) or of the fastest.

    Types are compared by the highest speed of their curves, then by the length of the curves.
    """
    pick = min if method == "weak-only" else max
    _, _, name = pick(
        (peak_speed(device), len(device.step_seconds), device.name) for device in data.devices
    )
    weights = np.array([float(device.name == name) for device in data.devices])
    return _in_proportion(data, weights, f"{name} alone, with the collectives of all devices")


def peak_flops(data: PoplarData) -> tuple[Floats, str]:
    """([n] peak FLOP/s of the devices in WHALE_PRECISION, message).

    The instance states them, or else the catalogue. Where both lack a device, the
    highest speeds of the curves take the place of all FLOP/s. That flatters Whale, and the message
    says so.
    """
    known = catalogue()
    flops: list[float] = []
    for device in data.devices:
        if device.flops_per_second is not None:
            flops.append(device.flops_per_second)
        elif device.name in known:
            flops.append(known[device.name].peak_flops(WHALE_PRECISION, name=device.name))
        else:
            speeds = np.array([peak_speed(each) for each in data.devices])
            return speeds, f"no peak FLOP/s known for {device.name!r}: measured speeds instead"
    return np.array(flops), ""


def _in_proportion(data: PoplarData, weights: Floats, message: str) -> Outcome[PoplarDecision]:
    """The plan with micro-batches and shares in proportion to the devices' weights.

    A micro-batch is floor(scale x weight), and at least 1, for the largest scale at which all fit.
    Devices of weight 0 get no samples.

    weights: [n]. message: message for the outcome.
    """
    largest = np.array([len(device.step_seconds) for device in data.devices])
    takes = weights > 0  # [n] whether the device gets samples
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
    scaled = np.floor(scale * weights * (1 + ROUNDING)).astype(np.int64)
    batches = np.where(takes, np.maximum(scaled, 1), 0)
    batches = np.minimum(batches, largest)  # whatever the rounding
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
    """The steps that take `total` samples: full ones, and a last one with the rest in the same
    proportions. batches: [n] the micro-batches of a full step."""
    full, rest = divmod(total, int(batches.sum()))
    steps = []
    if full:
        steps.append(Step(count=full, micro_batches=batches.tolist()))
    if rest:
        last = rounded(rest, batches.astype(np.float64))
        steps.append(Step(count=1, micro_batches=last.tolist()))
    return steps


def rounded(total: int, weights: Floats) -> Ints:
    """Integers in proportion to `weights` that add up to `total`: floors, then the largest
    remainders."""
    exact = total * (weights / weights.sum())
    # Lowered by more than the rounding of the quotients, so that the floors add up to `total` at
    # most. A whole number that loses 1 has the largest remainder, and gets it back.
    rounded_down: Ints = np.floor(exact * (1 - 1e-14)).astype(np.int64)
    missing = total - int(rounded_down.sum())
    by_remainder = np.argsort(rounded_down - exact, kind="stable")  # the largest first
    rounded_down[by_remainder[:missing]] += 1
    return rounded_down
