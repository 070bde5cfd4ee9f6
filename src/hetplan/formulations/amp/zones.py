"""What the bound of a single pipeline tells apart: zones of tensor groups, and burdens.

Zone    a class of cells with the groups that lie inside one cell of it (*pure* groups), or, for
        each device type, all groups that straddle cells and whose slowest type it is. A zone is as
        good as its best group, so that bounds hold.
Burden  a weight for each device type, larger for slower types. A group absorbs the weight of its
        slowest type. All devices are used, so the groups together absorb at least a tp-th of the
        weight of all devices, and the pipelines have to share that out.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hetplan.formulations.amp.problem import AmpProblem, Cells, Configuration, Floats, Ints

# A cell with room for more groups than this never forces a crossing in the bound (a relaxation).
MAX_ROOM = 16
# Cell classes up to this many are zones of their own; more are merged by device type.
MAX_ZONES = 6


@dataclass(frozen=True)
class Zone:
    """What a group of one zone costs at least; bandwidths in bytes/s, 0 where there is no pair."""

    cells: Ints  # that hold pure groups; none where groups straddle cells
    type: int  # of the group's slowest device
    inside: float  # best bandwidth between the devices of a group
    room: int  # groups that one cell can hold, 0 for no limit
    sync_in: float  # best bandwidth of a data group inside one cell, 0 where it does not fit
    sync_out: float  # best bandwidth of a data group across cells
    stay: float  # best link inside a cell

    @property
    def straddles(self) -> bool:
        """Whether groups straddle cells."""
        return len(self.cells) == 0


@dataclass(frozen=True)
class Zones:
    """The zones as arrays, pure ones first; Z zones, bandwidths in bytes/s."""

    prefix: Floats  # [Z, L + 1] seconds of layers [0, l)
    capacity: Floats  # [Z] bytes of a device
    room: Ints  # [Z] as in `Zone`
    sync_in: Floats  # [Z] as in `Zone`
    sync_out: Floats  # [Z] as in `Zone`
    stay: Floats  # [Z] as in `Zone`
    leave: Floats  # [Z, Z] best link to another cell, 0 where there is none
    weight: Ints  # [H, Z] what a group absorbs of each burden
    straddles: Ints  # [Z] 1 where groups straddle cells, 0 where they are pure
    base: Ints  # [Z + 1] first row state of a zone; it has one for each number of groups left
    of_cell: Ints  # [K] zone of the cell's pure groups, -1 where a group does not fit
    of_type: Ints  # [types] zone of the straddling groups whose slowest type it is, -1 for none


def find_zones(
    problem: AmpProblem,
    cells: Cells,
    config: Configuration,
    prefix_of: Callable[[Floats, float], Floats],
    burdens: Ints,
) -> Zones:
    """The zones of one configuration.

    prefix_of: prefix sums of a group's layer times, of [L] seconds on its slowest type and the
    bandwidth inside it. burdens: [H, types] weights.
    """
    tp = config.tensor
    between = cells.bandwidth.copy()
    np.fill_diagonal(between, 0.0)  # no second cell, no link
    inside = np.diag(cells.bandwidth)
    inside = np.where(np.isfinite(inside), inside, 0.0)
    best_between = float(between.max())
    best_inside = float(inside.max()) or best_between
    anywhere = max(best_between, best_inside)

    zones = []
    holding = cells.size >= tp
    label = cells.kind if cells.kind[-1] < MAX_ZONES else cells.type
    for number in np.unique(label[holding]):
        members = np.flatnonzero(holding & (label == number))
        devices = int(cells.size[members].max())
        within = float(inside[members].max())
        zones.append(
            Zone(
                cells=members,
                type=int(cells.type[members[0]]),
                inside=within,
                room=devices // tp if devices // tp <= MAX_ROOM else 0,
                sync_in=within if devices >= config.data * tp else 0.0,
                sync_out=float(between[members].max()),
                stay=within,
            )
        )
    straddling_types = len(problem.types) if tp > 1 and cells.count > 1 else 0
    for slowest in range(straddling_types):
        zones.append(
            Zone(
                cells=np.zeros(0, dtype=np.int64),
                type=slowest,
                inside=best_between,
                room=0,
                sync_in=best_inside if cells.size.max() >= config.data else 0.0,
                sync_out=best_between,
                stay=anywhere,
            )
        )

    of_cell, of_type = np.full(cells.count, -1), np.full(len(problem.types), -1)
    leave = np.full((len(zones), len(zones)), best_between)
    for z, zone in enumerate(zones):
        of_cell[zone.cells] = z
        if zone.straddles:
            of_type[zone.type] = z
        for y, other in enumerate(zones):
            if zone.straddles and other.straddles:
                leave[z, y] = anywhere
            elif not zone.straddles and not other.straddles:
                leave[z, y] = between[np.ix_(zone.cells, other.cells)].max()
    types = [zone.type for zone in zones]
    room = np.array([zone.room for zone in zones], dtype=np.int64)
    seconds = problem.seconds[tp, config.micro_batch]
    prefix = [prefix_of(seconds[zone.type], zone.inside) for zone in zones]
    return Zones(
        prefix=np.array(prefix).reshape(len(zones), problem.layers + 1),
        capacity=problem.capacity[types],
        room=room,
        sync_in=np.array([zone.sync_in for zone in zones]),
        sync_out=np.array([zone.sync_out for zone in zones]),
        stay=np.array([zone.stay for zone in zones]),
        leave=leave,
        weight=np.ascontiguousarray(burdens[:, types]),
        straddles=np.array([zone.straddles for zone in zones], dtype=np.int64),
        base=np.r_[0, np.cumsum(np.maximum(room, 1))].astype(np.int64),
        of_cell=of_cell,
        of_type=of_type,
    )


def find_burdens(seconds: Floats) -> Ints:
    """[H, types] weights: 1 for the slow types where the speed falls most, in up to two ways.

    seconds: [types, L]. With two ways also two sums of both, which tell how they are to be shared
    out together. A single type has the burden 0.
    """
    total = seconds.sum(axis=1)
    fastest_first = np.argsort(total, kind="stable")
    paces = total[fastest_first]
    falls = paces[1:] / np.maximum(paces[:-1], 1e-300)
    deepest_first = sorted(range(len(falls)), key=lambda i: (falls[i], i), reverse=True)
    splits = sorted(i + 1 for i in deepest_first[:2] if falls[i] > 1)
    if not splits:
        return np.zeros((1, len(total)), dtype=np.int64)
    rank = np.argsort(fastest_first)
    slow = [(rank >= split).astype(np.int64) for split in splits]
    if len(slow) == 1:
        return np.array(slow)
    first, second = slow
    return np.array([first, second, first + second, 2 * first + second])
