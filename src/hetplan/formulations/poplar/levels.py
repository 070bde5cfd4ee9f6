"""The counting model that CP-SAT, HiGHS and Pyomo share: how many devices take which load, by what
time.

Sets   k groups of n_k equal devices; l in 1..L_k loads; v_1 < ... < v_J the different times of all
loads.
Data   tau_k(l) seconds of load l: h_k(l) of a whole share (ZeRO 0, 1) or t_k(l) of a micro-batch
(ZeRO 2, 3).
Vars   y[k, l] devices of group k that take load l, over all steps; s_j steps that take v_j or
longer
       (ZeRO 0, 1: one step, s_j is 0 or 1).
(1) sum_k,l  l y[k, l] = G
(2) s_j >= s_(j+1)
(3) sum over l with tau_k(l) >= v_j of y[k, l]  <=  n_k s_j             for each group, each of its
times v_j
min  sum_j (v_j - v_(j-1)) s_j + C x (s_1, or 1 for ZeRO 0, 1)          v_0 = 0
(3) is Hall's condition: the loads that a step admits are nested by its time, so all loads find a
step that is long enough, and no variable says which. Source: hetplan, for Poplar eq. 1 and
Algorithm 2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetplan.formulations.poplar.data import PoplarDecision
from hetplan.formulations.poplar.decode import shares_decision, steps_decision
from hetplan.formulations.poplar.kernels import share_seconds
from hetplan.formulations.poplar.problem import Floats, Group, Ints, PoplarProblem
from hetplan.formulations.poplar.share_times import largest_shares, sufficient_time

# Beyond this many loads or times general solvers get nowhere; the message names the method that
# does.
MAX_LOADS = 20_000
TOO_LARGE = (
    "too many different loads and times for a general model; the method exact does not need one"
)
NO_PLAN = "proven by the solver: no loads add up to the batch"


@dataclass(frozen=True)
class Levels:
    """seconds[k][l - 1] = tau; times [J] ascending; batch[k][l]: the micro-batch behind a share
    (ZeRO 0, 1).

    ceiling: time of some plan, without the one C of ZeRO 0, 1; floor: no plan takes less. Both in
    seconds.
    """

    problem: PoplarProblem
    seconds: tuple[Floats, ...]
    batch: tuple[Ints, ...]
    times: Floats
    floor: float
    ceiling: float

    @property
    def step_seconds(self) -> float:
        """What every step costs beside its time: C for ZeRO 2 and 3."""
        return self.problem.comm if self.problem.stepwise else 0.0

    @property
    def offset(self) -> float:
        """What is paid once: C for ZeRO 0 and 1."""
        return 0.0 if self.problem.stepwise else self.problem.comm

    @property
    def most_steps(self) -> int:
        """No plan within `ceiling` has more steps."""
        if not self.problem.stepwise:
            return 1
        shortest = float(self.times[0]) + self.problem.comm
        return min(self.problem.total, int(self.ceiling / shortest * (1 + 1e-12)))

    @property
    def size(self) -> int:
        """Loads and times together: columns of the model."""
        return sum(len(row) for row in self.seconds) + len(self.times)


def build_levels(problem: PoplarProblem) -> Levels | None:
    """The model's data; None where it has more than MAX_LOADS loads."""
    floor = problem.total / problem.speed * (1 - 1e-12)
    if problem.stepwise:
        seconds = [group.seconds[1 : problem.total + 1] for group in problem.groups]
        batch: list[Ints] = []
        ceiling = min(alone(problem, group)[0] for group in problem.groups)
        floor = max(floor, float(min(row.min() for row in seconds)) + problem.comm)
    else:
        ceiling = sufficient_time(problem)
        most = largest_shares(problem, ceiling)
        if sum(most) > MAX_LOADS:
            return None
        tables = [
            share_seconds(group.seconds, m) for group, m in zip(problem.groups, most, strict=True)
        ]
        seconds, batch = [h[1:] for h, _ in tables], [b for _, b in tables]
    times = np.unique(np.concatenate(seconds))
    times = times[times <= ceiling * (1 + 1e-12)]
    levels = Levels(problem, tuple(seconds), tuple(batch), times, floor, ceiling)
    return levels if levels.size <= MAX_LOADS else None


def alone(problem: PoplarProblem, group: Group) -> tuple[float, int, int, int]:
    """(seconds, micro-batch, steps with it on every device, samples left) when only `group` works,
    for ZeRO 2 and 3."""
    batch = min(group.peak_batch, problem.total)
    full, rest = divmod(problem.total, batch * group.count)
    step, single = (float(group.seconds[b]) + problem.comm for b in (batch, 1))
    return full * step + -(-rest // group.count) * single, batch, full, rest


def decode(
    levels: Levels,
    loads: Sequence[Counter[int]],
    at_least: Sequence[int],
    batch: Sequence[Ints] = (),
) -> PoplarDecision:
    """A decision from y[k, l] as loads[k] = {l: devices} and s_j as at_least[j].

    batch[k][l]: the micro-batch of a share (ZeRO 0, 1), the fastest one if not given.
    """
    problem, batch = levels.problem, batch or levels.batch
    if not problem.stepwise:
        rows = [
            row + Counter({0: group.count - row.total()})
            for group, row in zip(problem.groups, loads, strict=True)
        ]
        return shares_decision(problem, rows, lambda k, g: int(batch[k][g]))
    queues = [
        sorted(row.items(), key=lambda item: float(seconds[item[0] - 1]))
        for row, seconds in zip(loads, levels.seconds, strict=True)
    ]
    steps = []
    following = [*at_least[1:], 0]
    for count in reversed([here - after for here, after in zip(at_least, following, strict=True)]):
        # the longest steps take the longest loads first: Hall's condition makes that work
        if count:
            pairs = [group.count * count for group in problem.groups]
            steps.append((count, [_take(queue, n) for queue, n in zip(queues, pairs, strict=True)]))
    return steps_decision(problem, steps)


def _take(queue: list[tuple[int, int]], pairs: int) -> Counter[int]:
    """The last `pairs` entries of a queue; what is missing takes nothing."""
    taken: Counter[int] = Counter()
    while queue and pairs:
        load, times = queue.pop()
        used = min(times, pairs)
        taken[load] += used
        pairs -= used
        if times > used:
            queue.append((load, times - used))
    taken[0] += pairs
    return taken
