"""Counting stages where a relaxation without the count cannot decide: label setting on what it
leaves open.

The relaxation's shortest paths, from the back and from the front, bound every template through a
state. Few states stay below the cut-off; on these the stages are counted (`labels`), which is exact
for the interval as charged.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetplan.formulations.ditto.exact.labels import label
from hetplan.formulations.ditto.exact.paths import Line, relax
from hetplan.formulations.ditto.exact.space import Charge, Space, States, Windows
from hetplan.formulations.ditto.problem import Floats, Ints, Stages, tie
from hetplan.solvers.run import Run

# Three more tables beside the relaxation's, and labels of 24 bytes: together well under 2 GB.
MOST_STATES = 16_000_000


class TooManyLabels(Exception):
    """Counting the stages would take more memory than given."""


@dataclass(frozen=True)
class Relaxed:
    """Shortest paths from the back, with `fee` per stage; cost: of the whole path, fees
    included."""

    value: Floats
    first: Ints
    last: Ints
    fee: float
    cost: float
    template: Stages


def lines(charge: Charge, fee: float) -> tuple[Line, Line, Line]:
    """What a stage costs behind k*, as k* and ahead of it, with a fee for each."""
    return (fee - charge.credit, 2.0), (charge.peak[0] + fee, charge.peak[1]), (fee, 1.0)


def cheapest_counted(
    space: Space,
    run: Run,
    windows: Windows,
    states: States,
    charge: Charge,
    relaxed: Relaxed,
    limit: float,
    room: int,
) -> tuple[float, Stages] | None:
    """The cheapest template of the interval as charged and its cost, None if none is below `limit`.

    Raises TooManyLabels where there would be more than `room` labels, `Stopped` where `run` should
    stop.
    """
    p = space.problem
    if states.total > MOST_STATES:
        raise TooManyLabels
    front = from_the_front(space, run, windows, states, charge, relaxed)
    after, before = space.counted_windows(windows)
    begin = np.empty((2, states.total), dtype=np.int32)
    until = np.empty_like(begin)
    cost, links = np.empty(room), np.empty((room, 4), dtype=np.int32)
    best = np.full(p.most_stages + 1, np.inf)
    count = label(
        run, p.time, lines(charge, 0.0), space.coords, space.strides, space.kind, space.size, space.delta, after,
        before, windows.peak_first, relaxed.first, relaxed.last, states.offset, relaxed.value, front, relaxed.fee,
        limit + relaxed.fee * p.micro_batches, begin, until, cost, links, best, np.empty((len(best), 4), np.int32),
    )  # fmt: skip
    if count < 0:
        raise TooManyLabels
    at = states.offset[-1]
    if begin[1, at] == until[1, at]:
        return None
    # The last of a list has most stages and costs least.
    number = until[1, at] - 1
    found, template = float(cost[number]), []
    while links[number, 2] >= 0:
        option, a = divmod(int(links[number, 3]), p.layers)
        number = links[number, 2]
        b = int(links[number, 3]) % p.layers if links[number, 2] >= 0 else p.layers
        template.append((a, b, option))
    return found, template


def from_the_front(
    space: Space, run: Run, windows: Windows, states: States, charge: Charge, relaxed: Relaxed
) -> Floats:
    """[2, states] the least cost of the layers [0, a) by the devices that u leaves, fees included;
    mirrored.

    The instance read from its end is another one: its state (full - u, L - a) is what lies in front
    of (u, a), its tables are these in reverse order, and of its phases 1 is past k* (seen from the
    front) and 0 is not.
    """
    p = space.problem
    layers, sizes = p.layers, np.maximum(states.last - states.first + 1, 0)
    begin = states.total - (states.offset + states.first) - sizes
    offset = (begin - (layers - states.last))[::-1].copy()
    first, last = (layers - relaxed.last)[::-1].copy(), (layers - relaxed.first)[::-1].copy()
    behind, peak, ahead = lines(charge, relaxed.fee)
    after, peak_first = mirrored(space, windows)
    value = np.full((2, states.total), np.inf)
    free = np.zeros((2, layers + 1)), np.zeros(space.vectors)
    relax(
        run, space.mirrored_time, ahead, peak, behind, space.coords, space.strides, space.kind, space.size, space.delta,
        space.stages[::-1].copy(), 0, False, after, after, peak_first, first, last, offset, *free, np.inf, value,
    )  # fmt: skip
    return value


def mirrored(space: Space, windows: Windows) -> tuple[Ints, Ints]:
    """`after` and `peak_first` of the instance read from its end, never too narrow.

    Stages that differ by less than a tie count as equal here: sums over the same layers from
    another end may.
    """
    layers, ends = space.problem.layers, np.arange(space.problem.layers + 1)
    after = np.ascontiguousarray((layers - windows.back)[:, :, ::-1])
    long = (space.mirrored_time < windows.low - tie(windows.low)).sum(axis=2)
    return after, ends + 1 + long
