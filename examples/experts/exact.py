"""Branch and bound, heaviest experts first.

All work shared in proportion to speed gives the bound sum w / sum v. It holds for every placement,
because the slowest device takes at least the mean weighted by speed. A branch is cut when a
device's seconds reach the best found. Devices of one speed, work and room are alike: only the first
of them is tried.
"""

from experts.data import ExpertsData, ExpertsDecision
from experts.greedy import longest_first
from hetplan.solvers.run import Outcome, Run, Stop, Stopped


def solve(data: ExpertsData, run: Run) -> Outcome[ExpertsDecision]:
    """The optimum, or at the time limit the best placement so far and a bound."""
    if sum(device.room for device in data.devices) < len(data.expert_flops):
        return Outcome(stop=Stop.INFEASIBLE, message="fewer places than experts")
    search = Search(data, run)
    try:
        search.place(0)
        stop, bound = Stop.OPTIMAL, search.best
    except Stopped:
        stop, bound = Stop.LIMIT, search.floor
    return Outcome(stop=stop, decision=ExpertsDecision(device_of=search.kept), bound=bound)


class Search:
    """The placement so far, and the best one."""

    def __init__(self, data: ExpertsData, run: Run) -> None:
        self.run, self.flops = run, data.expert_flops
        self.speed = [device.flops_per_second for device in data.devices]
        self.room = [device.room for device in data.devices]
        self.work = [0.0] * len(self.speed)
        self.order = sorted(range(len(self.flops)), key=lambda e: -self.flops[e])
        self.kept = longest_first(data) or []
        self.device_of = list(self.kept)
        self.best = max(
            sum(f for f, k in zip(self.flops, self.kept, strict=True) if k == j) / v
            for j, v in enumerate(self.speed)
        )
        self.floor = sum(self.flops) / sum(self.speed)

    def place(self, depth: int) -> None:
        """Try every device for the expert at `depth` of the order, and go on."""
        self.run.check()
        if depth == len(self.order):
            self.best = max(work / speed for work, speed in zip(self.work, self.speed, strict=True))
            self.kept = list(self.device_of)
            return
        e = self.order[depth]
        tried: set[tuple[float, float, int]] = set()
        for j in range(len(self.speed)):
            alike = (self.speed[j], self.work[j], self.room[j])
            after = self.work[j] + self.flops[e]
            if not self.room[j] or alike in tried or after / self.speed[j] >= self.best:
                continue
            tried.add(alike)
            before, self.work[j] = self.work[j], after
            self.room[j] -= 1
            self.device_of[e] = j
            self.place(depth + 1)
            self.work[j] = before
            self.room[j] += 1
