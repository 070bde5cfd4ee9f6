"""Longest processing time first, each expert where it is done earliest.

Source: Graham 1969, for equal machines.
"""

from experts.data import ExpertsData, ExpertsDecision
from hetplan.solvers.run import Outcome, Run, Stop


def solve(data: ExpertsData, run: Run) -> Outcome[ExpertsDecision]:
    """A placement; it claims no bound."""
    place = longest_first(data)
    if place is None:
        return Outcome(stop=Stop.INFEASIBLE, message="fewer places than experts")
    return Outcome(stop=Stop.DONE, decision=ExpertsDecision(device_of=place))


def longest_first(data: ExpertsData) -> list[int] | None:
    """[experts] the device of each; None where there are fewer places than experts."""
    work = [0.0] * len(data.devices)
    room = [device.room for device in data.devices]
    place = [0] * len(data.expert_flops)
    for e in sorted(range(len(place)), key=lambda e: -data.expert_flops[e]):
        free = [j for j in range(len(room)) if room[j]]
        if not free:
            return None
        done = {
            j: (work[j] + data.expert_flops[e]) / data.devices[j].flops_per_second for j in free
        }
        place[e] = min(free, key=lambda j: done[j])
        work[place[e]] += data.expert_flops[e]
        room[place[e]] -= 1
    return place
