"""The stages behind a table of shortest paths; plain numpy, since compiling it would take longer
than it ever runs."""

from __future__ import annotations

from hetplan.formulations.ditto.exact.paths import Line
from hetplan.formulations.ditto.exact.space import Space, States, Windows
from hetplan.formulations.ditto.problem import Floats, Ints, Stages

Step = tuple[int, int, int, int]


def trace(
    space: Space,
    windows: Windows,
    states: States,
    lines: tuple[Line, Line, Line],
    first: Ints,
    last: Ints,
    value: Floats,
) -> Stages:
    """The path behind value[1, full, layer 0]; lines, first, last, value: as given to and left by
    `relax_all`.

    The sums are the very floats of `relax_all`, so equality finds the arc taken.
    """
    u, a, phase = space.vectors - 1, 0, 1
    stages: Stages = []
    while a < space.problem.layers:
        here = float(value[phase, states.offset[u] + a])
        smaller = (
            u - int(stride) for i, stride in enumerate(space.strides) if space.coords[u, i] > 0
        )
        for s in smaller:
            if first[s] <= a <= last[s] and value[phase, states.offset[s] + a] == here:
                u = s
                break
        else:
            r, b, u, to = _step(
                space, windows, states, lines, first, last, value, (u, a, phase), here
            )
            stages.append((a, b, r))
            a, phase = b, to
    return stages


def _step(
    space: Space,
    windows: Windows,
    states: States,
    lines: tuple[Line, Line, Line],
    first: Ints,
    last: Ints,
    value: Floats,
    state: tuple[int, int, int],
    here: float,
) -> Step:
    """The arc out of a state that costs what the state does: option, last layer, vector and phase
    behind it."""
    u, a, phase = state
    window = windows.after if phase == 0 else windows.before
    for r, s in enumerate((u - space.delta).tolist()):
        lacks = space.coords[u, space.kind[r]] < space.size[r]
        if lacks or (space.counted and space.coords[u, -1] < 1):
            continue
        end = min(window[space.stages[s], r, a], last[s]) + 1
        for to in range(phase, -1, -1):
            begin = (
                max(a + 1, first[s])
                if to == phase
                else max(a + 1, first[s], windows.peak_first[r, a])
            )
            if begin >= end:
                continue
            base, rate = lines[2 if to == 1 else phase]
            behind = value[to, states.offset[s] + begin : states.offset[s] + end]
            hits = (behind + rate * space.problem.time[r, a, begin:end] + base == here).nonzero()[0]
            if len(hits):
                return r, int(begin + hits[0]), s, to
    raise AssertionError("the shortest path cannot be traced back")
