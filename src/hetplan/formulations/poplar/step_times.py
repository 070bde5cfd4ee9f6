"""ZeRO 2 and 3: f(B), the least time of a step of B samples, for every B.

f(B) = min over loads b_i that add up to B of max_i t_i(b_i): a min-max convolution of the curves,
O(B x mbs) for a group of equal devices, since any 2c loads of 0..mbs split into two halves of c
whose sums differ by at most mbs.
Where the sizes are too many for that, time by time: what loads of at most that time add up to.
"""

from __future__ import annotations

import numpy as np

from hetplan.formulations.poplar.fill import least_losses, surely_reached
from hetplan.formulations.poplar.kernels import double, merge
from hetplan.formulations.poplar.problem import Floats, Group, Ints, PoplarProblem
from hetplan.formulations.poplar.step_levels import level_of

# Comparisons up to which all sizes are convolved at once (about 0.3 s).
MAX_CONVOLUTION = 3e8


def step_times(problem: PoplarProblem) -> tuple[Ints, Floats]:
    """Sizes B that some step takes, ascending, and f(B): [J] samples, [J] seconds."""
    small = convolution_work(problem) <= MAX_CONVOLUTION
    seconds = convolved(problem) if small else time_by_time(problem)
    sizes = np.flatnonzero(np.isfinite(seconds[1:])) + 1
    return sizes.astype(np.int64), seconds[sizes]


def largest_step(problem: PoplarProblem) -> int:
    """The most samples of a step, at most G."""
    return min(problem.total, sum(g.count * min(g.largest, problem.total) for g in problem.groups))


def convolution_work(problem: PoplarProblem) -> float:
    """Comparisons of `convolved`."""
    work, reach, top = 0.0, 0, largest_step(problem)
    for group in problem.groups:
        size = min(top, group.count * group.largest)
        work += (
            2.0 * size * min(group.largest, size) * (group.count > 1)
            + float(min(reach, top)) * size
        )
        reach += size
    return work


def convolved(problem: PoplarProblem) -> Floats:
    """[top + 1] f(B), inf where no step takes B samples; f(0) = 0."""
    top = largest_step(problem)
    table = _of_group(problem.groups[0], top)
    for group in problem.groups[1:]:
        own = _of_group(group, top)
        table = merge(table, own, min(top, len(table) + len(own) - 2), True)
    return np.concatenate((table, np.full(top + 1 - len(table), np.inf)))


def _of_group(group: Group, top: int) -> Floats:
    """f of the devices of one group: doubled along the binary digits of their number."""
    curve = group.seconds[: top + 1]
    width, table, devices = len(curve) - 1, curve, 1
    for digit in bin(group.count)[3:]:
        devices *= 2
        table = double(table, width, min(top, devices * width), True)
        if digit == "1":
            devices += 1
            table = merge(table, curve, min(top, devices * width), True)
    return table


def time_by_time(problem: PoplarProblem) -> Floats:
    """The same (f(0) aside), from the sums that the loads of each time reach."""
    largest = largest_step(problem)
    seconds = np.full(largest + 1, np.inf)
    curves = [group.seconds[1 : problem.total + 1] for group in problem.groups]
    for limit in np.unique(np.concatenate(curves)).tolist():
        level = level_of(problem, limit)
        most = level.most
        sure = surely_reached(level.pools)
        width = most if sure is None else min(sure, most)
        if most - width >= 1:
            top = min(most - width, largest) + 1
            seconds[:top] = np.minimum(seconds[:top], limit)
        losses = least_losses(level.pools, width)
        found = most - np.flatnonzero(np.isfinite(losses))
        found = found[(found <= largest) & (found >= 1)]
        seconds[found] = np.minimum(seconds[found], limit)
    return seconds
