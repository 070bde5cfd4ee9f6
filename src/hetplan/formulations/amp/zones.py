"""Zones of tensor groups and burdens, for the lower bound of single pipelines in `rows`.

Zone    a set of tensor groups that the bound treats alike: all have the time and the bandwidths of
        the best group among them. Groups that lie inside one cell are *pure*. The pure groups of a
        class of interchangeable cells are one zone. The groups that straddle cells make one zone
        for each device type, the slowest type among their devices.
Burden  a weight of 0 or more for each device type, larger for slower types. A group absorbs the
        weight of its slowest type. All devices are used, so the groups together absorb at least
        1/tp of the weight of all devices (tp: tensor degree), and the pipelines share that sum.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hetplan.formulations.amp.problem import AmpProblem, Cells, Configuration, Floats, Ints

# Both numbers keep the tables of rows.py small, which have an entry for every group that a cell of
# a zone may still hold.
# A cell with room for more groups than this counts as unlimited (a relaxation).
MAX_ROOM = 16
# With more classes of cells than this, the classes of one device type share a zone (a relaxation).
MAX_ZONES = 6


@dataclass(frozen=True)
class Zone:
    """One zone. Bandwidths are in bytes/s, each the best of any group of the zone; 0 where no such
    pair of devices exists."""

    cells: Ints  # the cells of pure groups; empty where the groups straddle cells
    type: int  # number of the slowest device type in a group
    inside: float  # bandwidth between the devices of a group
    room: int  # number of groups that the largest cell can hold; 0: no limit
    sync_in: float  # bandwidth of a data group inside one cell; 0 where the cells are too small
    sync_out: float  # bandwidth of a data group across cells
    stay: float  # bandwidth between the groups of consecutive stages that lie in the same cell

    @property
    def straddles(self) -> bool:
        """Whether the zone's groups straddle cells."""
        return len(self.cells) == 0


@dataclass(frozen=True)
class Zones:
    """Arrays of the Z zones of a configuration, zones of pure groups first; L layers, K cells,
    H burdens, bandwidths in bytes/s."""

    prefix: Floats  # [Z, L + 1] seconds of layers [0, l) on a group, at least
    capacity: Floats  # [Z] bytes of a device of the zone's type
    room: Ints  # [Z] `Zone.room`
    sync_in: Floats  # [Z] `Zone.sync_in`
    sync_out: Floats  # [Z] `Zone.sync_out`
    stay: Floats  # [Z] `Zone.stay`
    leave: Floats  # [Z, Z] best bandwidth to a group in another cell; 0: there is no other cell
    weight: Ints  # [H, Z] weight that a group absorbs of each burden
    straddles: Ints  # [Z] 1 where groups straddle cells, 0 where they are pure
    # [Z + 1] number of the zone's first row state; the last entry is the number of all states. A
    # row state is the zone of a pipeline's last group and the number of groups, 0 to room - 1, for
    # which that group's cell still has room. A zone without a limit has one state.
    base: Ints
    of_cell: Ints  # [K] zone of the cell's pure groups; -1: the cell holds no group
    of_type: Ints  # [types] zone of straddling groups with this slowest type; -1: there is none


def find_zones(
    problem: AmpProblem,
    cells: Cells,
    config: Configuration,
    prefix_of: Callable[[Floats, float], Floats],
    burdens: Ints,
) -> Zones:
    """The zones of one configuration.

    prefix_of: ([L] seconds of the layers on the slowest type of a group, bytes/s between the
    group's devices) -> [L + 1] prefix sums of the group's layer times, all-reduces included.
    burdens: [H, types] weights.
    """
    bandwidth = _CellBandwidth.of(cells)
    zones = [
        *_pure_zones(cells, config, bandwidth),
        *_straddling_zones(problem, cells, config, bandwidth),
    ]
    of_cell = np.full(cells.count, -1)
    of_type = np.full(len(problem.types), -1)
    for z, zone in enumerate(zones):
        of_cell[zone.cells] = z
        if zone.straddles:
            of_type[zone.type] = z
    types = [zone.type for zone in zones]
    room = np.array([zone.room for zone in zones], dtype=np.int64)
    seconds = problem.seconds[config.tensor, config.micro_batch]
    prefix = [prefix_of(seconds[zone.type], zone.inside) for zone in zones]
    states = np.maximum(room, 1)  # a zone without a limit needs one state
    return Zones(
        prefix=np.array(prefix).reshape(len(zones), problem.layers + 1),
        capacity=problem.capacity[types],
        room=room,
        sync_in=np.array([zone.sync_in for zone in zones]),
        sync_out=np.array([zone.sync_out for zone in zones]),
        stay=np.array([zone.stay for zone in zones]),
        leave=_leave(zones, bandwidth),
        weight=np.ascontiguousarray(burdens[:, types]),
        straddles=np.array([zone.straddles for zone in zones], dtype=np.int64),
        base=np.r_[0, np.cumsum(states)].astype(np.int64),
        of_cell=of_cell,
        of_type=of_type,
    )


@dataclass(frozen=True)
class _CellBandwidth:
    """Bandwidths of pairs of devices by their cells, in bytes/s."""

    between: Floats  # [K, K] between devices of two cells; 0 on the diagonal
    inside: Floats  # [K] between devices of one cell; 0 where it has one device
    best_between: float  # the largest of `between`
    # The largest of `inside`; that of `between` where no cell has two devices. It does not count
    # there, since no data group of several devices lies inside a cell.
    best_inside: float

    @classmethod
    def of(cls, cells: Cells) -> "_CellBandwidth":
        """The bandwidths of the cells."""
        between = cells.bandwidth.copy()
        np.fill_diagonal(between, 0.0)
        inside = np.diag(cells.bandwidth)
        inside = np.where(np.isfinite(inside), inside, 0.0)
        best_between = float(between.max())
        best_inside = float(inside.max()) or best_between
        return cls(between, inside, best_between, best_inside)

    @property
    def best(self) -> float:
        """The largest bandwidth of any two devices."""
        return max(self.best_between, self.best_inside)


def _pure_zones(cells: Cells, config: Configuration, bandwidth: _CellBandwidth) -> list[Zone]:
    """Zones of groups that lie inside one cell: one for each class of cells or device type."""
    tp = config.tensor
    holds_group = cells.size >= tp
    classes = int(cells.cell_class[-1]) + 1
    # cells of one key share a zone
    zone_key = cells.cell_class if classes <= MAX_ZONES else cells.type
    zones = []
    for key in np.unique(zone_key[holds_group]):
        members = np.flatnonzero(holds_group & (zone_key == key))
        devices = int(cells.size[members].max())
        room = devices // tp
        inside = float(bandwidth.inside[members].max())
        zone = Zone(
            cells=members,
            type=int(cells.type[members[0]]),
            inside=inside,
            room=room if room <= MAX_ROOM else 0,
            sync_in=inside if devices >= config.data * tp else 0.0,
            sync_out=float(bandwidth.between[members].max()),
            stay=inside,
        )
        zones.append(zone)
    return zones


def _straddling_zones(
    problem: AmpProblem, cells: Cells, config: Configuration, bandwidth: _CellBandwidth
) -> list[Zone]:
    """Zones of groups that straddle cells: one for each device type."""
    if config.tensor == 1 or cells.count == 1:
        return []
    # a data group has one device of each pipeline
    data_group_fits = cells.size.max() >= config.data
    return [
        Zone(
            cells=np.zeros(0, dtype=np.int64),
            type=slowest,
            inside=bandwidth.best_between,
            room=0,
            sync_in=bandwidth.best_inside if data_group_fits else 0.0,
            sync_out=bandwidth.best_between,
            stay=bandwidth.best,
        )
        for slowest in range(len(problem.types))
    ]


def _leave(zones: Sequence[Zone], bandwidth: _CellBandwidth) -> Floats:
    """[Z, Z] best bandwidth from a group of one zone to a group of another zone in another cell.

    Two straddling groups may also have equal ranks in the same cell.
    """
    leave = np.full((len(zones), len(zones)), bandwidth.best_between)
    for z, zone in enumerate(zones):
        for y, other in enumerate(zones):
            if zone.straddles and other.straddles:
                leave[z, y] = bandwidth.best
            elif not zone.straddles and not other.straddles:
                leave[z, y] = bandwidth.between[np.ix_(zone.cells, other.cells)].max()
    return leave


def find_burdens(seconds: Floats) -> Ints:
    """[H, types] weights of the burdens.

    Types are sorted by the sum of their layer times, and split where that sum rises by the largest
    factor. The burden of a split has weight 1 for the slower types and 0 for the faster ones. The
    two largest rises give two burdens. Two weighted sums of these are burdens, too, since they
    bound how the pipelines share both burdens together. Where all types are equally fast, there is
    one burden, with weight 0.

    seconds: [types, L].
    """
    total = seconds.sum(axis=1)
    fastest_first = np.argsort(total, kind="stable")
    sorted_total = total[fastest_first]
    divisors = np.maximum(sorted_total[:-1], 1e-300)  # layers may take 0 seconds
    factors = sorted_total[1:] / divisors
    steepest_first = sorted(range(len(factors)), key=lambda i: (factors[i], i), reverse=True)
    # a split is the number of types before it, the faster ones
    splits = sorted(i + 1 for i in steepest_first[:2] if factors[i] > 1)
    if not splits:
        return np.zeros((1, len(total)), dtype=np.int64)
    rank = np.argsort(fastest_first)
    slow = [(rank >= split).astype(np.int64) for split in splits]
    if len(slow) == 1:
        return np.array(slow)
    first, second = slow
    return np.array([first, second, first + second, 2 * first + second])
