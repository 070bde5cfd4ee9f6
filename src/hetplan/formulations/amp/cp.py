"""Problem `amp` for CP-SAT: one model for each choice of degrees and micro-batch size, in elements
of tables.

A class is a set of devices that may be exchanged for one another: equal type, equal bandwidth to
every other device. A piece of stage j is a range of layers that it may hold. A pace is the seconds
of all layers on a tensor group; it follows from the types in the group. Bandwidths are numbered
from the lowest one, the levels.

Sets   j in 0..pp-1 stages, i in 0..dp-1 pipelines, r in 0..tp-1 tensor ranks; p = (j, i, r)
       positions; l in 0..L-1 layers; c classes; k levels; q paces.
Data   count_c devices; level_cd of the link of two classes; gas micro-batches; for each piece of
       stage j its seconds work_jq at each pace, seconds reduce_jk of its tensor all-reduces and
       seconds sync_jk of its gradients' all-reduce at each level; seconds of activations.
Vars   class_p;  piece_j;  cut_j in 0..L;  pace_ij;  level_ij of the tensor group, link_ij of the
       slowest link to the next stage, level_j of the slowest data group of stage j;
       ticks t_ij, e_ij, theta_i, T_i, S_j, T and S.
Min    T + S,  s.t.
(1) sum_p [class_p = c] = count_c                       counts          `place_every_device`
(2) cut_j, cut_(j+1) = first and end of piece_j         element         `cut_into_pieces`
(3) pace_ij by the types in group (j, i)                allowed tuples  `slow_down_to_types`
(4) level_ij <= level_cd for classes c, d in (j, i)     under conditions `reduce_over_slowest_link`
(5) t_ij = work_j[pace_ij] + reduce_j[level_ij]         element         `time_the_stages`
(6) link_ij = min_r level of class_(j,i,r), class_(j+1,i,r);  e_ij by link_ij and cut_(j+1)
                                                        allowed tuples  `send_activations`
(7) theta_i = max_j t_ij,  T_i = sum_j t_ij + (gas - 1) theta_i + sum_j e_ij,  T = max_i T_i
                                                        maximum         `add_up`
(8) level_j <= level_cd for c, d in a data group of j;  S_j = sync_j[level_j],  S = max_j S_j
                                                        element         `synchronise`
(9) a device of stage j holds piece_j                   element         `fit_memory`
(10) pipelines and tensor ranks ascend, read position by position       `order_ranks`   symmetry
(11) of two equal nodes the first one is used first                     `order_nodes`   symmetry
(12) pp theta_i >= sum_j t_ij >= seconds on the fastest types           `outlast_averages` implied
Conditions (4) and (8) hold a level from above only. A lower one makes the decision more expensive,
so that the best decision has the level of its slowest link.
Every table is rounded down and cut off above the largest time that is of interest.
Source AMP, eq. 3-5; the memory constraint, for 1F1B, is hetplan's.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise, product

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python.cp_model import BoolVarT, IntVar

from hetplan.clock import CLOCK
from hetplan.formulations.amp.data import AmpData, AmpDecision
from hetplan.solvers import general
from hetplan.solvers.branch_and_bound import Incumbent
from hetplan.solvers.constraint_model import ConstraintModel
from hetplan.solvers.model import ModelAnswer, Totals
from hetplan.solvers.run import Outcome, Run, Stop, Stopped, stop_reason

Floats = NDArray[np.float64]
Position = tuple[int, int, int]  # (stage, pipeline, tensor rank)
Piece = tuple[int, int]  # [first, end) layers

NO_CONFIGURATION = "no degrees and micro-batch size divide devices and batch and have all tables"
NO_ROOM = "proven by CP-SAT: for no degrees and micro-batch size do all layers fit into memory"
BACKEND = "cp-sat"  # whose native options the models use
TOO_LARGE = "more than {} entries in its tables; the method exact has no such limit"
# Bytes may exceed a capacity by this relative amount: rounding.
MEMORY_TOLERANCE = 1e-9


# --- configurations --------------------------------------------------------------------------


@dataclass(frozen=True)
class Configuration:
    """Degrees and micro-batch size of one model."""

    pipeline: int
    data: int
    tensor: int
    micro_batch: int
    gas: int  # micro-batches of a pipeline in one iteration

    def __str__(self) -> str:
        return (
            f"pp {self.pipeline} x dp {self.data} x tp {self.tensor}, "
            f"micro-batch {self.micro_batch}"
        )

    @property
    def roundings(self) -> int:
        """Values in one objective: two for each stage time, one for each link, one for S."""
        return 2 * (self.pipeline + self.gas - 1) + (self.pipeline - 1) + 1


def configurations(data: AmpData) -> Iterator[Configuration]:
    """All configurations that devices, layers, batch and tables allow."""
    count = len(data.devices)
    types = {device.type for device in data.devices}
    tables = {(table.tensor, table.micro_batch, table.type) for table in data.layer_seconds}
    sizes = sorted({(tensor, micro_batch) for tensor, micro_batch, _ in tables})
    for tensor, micro_batch in sizes:
        if not all((tensor, micro_batch, name) in tables for name in types):
            continue
        for pipeline in range(1, min(count, len(data.layers)) + 1):
            if count % (pipeline * tensor) != 0:
                continue
            ranks = count // (pipeline * tensor)
            gas, left = divmod(data.global_batch, ranks * micro_batch)
            if left == 0:
                yield Configuration(pipeline, ranks, tensor, micro_batch, gas)


# --- classes of devices ----------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceClass:
    """Devices that may be exchanged for one another."""

    type: str
    node: int
    devices: tuple[int, ...]


def classes_of(data: AmpData, run: Run) -> list[DeviceClass]:
    """The classes, by node and type. Raises `Stopped` where the run should stop."""
    bandwidth = np.array(data.bandwidth)

    def alike(d: int, e: int) -> bool:
        same = bandwidth[d] == bandwidth[e]
        same[[d, e]] = True
        return bool(same.all())

    found: dict[tuple[int, str], list[list[int]]] = {}  # by node and type
    for d, device in enumerate(data.devices):
        run.check()
        here = found.setdefault((device.node, device.type), [])
        known = next((devices for devices in here if alike(devices[0], d)), None)
        if known is None:
            here.append([d])
        else:
            known.append(d)
    return [
        DeviceClass(name, node, tuple(devices))
        for node, name in sorted(found)
        for devices in found[node, name]
    ]


def links_between(data: AmpData, classes: list[DeviceClass]) -> Floats:
    """[c, d] bandwidth between two devices of these classes; nan for a class of one device."""
    links = np.full((len(classes), len(classes)), np.nan)
    for c, d in product(range(len(classes)), repeat=2):
        one, other = classes[c].devices[0], classes[d].devices[-1]
        if one != other:
            links[c, d] = data.bandwidth[one][other]
    return links


def equal_nodes(classes: list[DeviceClass], links: Floats) -> list[tuple[list[int], list[int]]]:
    """(classes of one node, classes of a later one) for each two nodes whose exchange, class by
    class, changes no type, count or bandwidth; a node is paired with the next equal one only."""
    nodes: dict[int, list[int]] = {}
    for c, each in enumerate(classes):
        nodes.setdefault(each.node, []).append(c)
    pairs = []
    for number, mine in enumerate(nodes.values()):
        for theirs in list(nodes.values())[number + 1 :]:
            if len(mine) != len(theirs):
                continue
            exchanged = list(range(len(classes)))
            for c, d in zip(mine, theirs, strict=True):
                exchanged[c], exchanged[d] = d, c
            alike = all(
                classes[c].type == classes[d].type
                and len(classes[c].devices) == len(classes[d].devices)
                for c, d in zip(mine, theirs, strict=True)
            )
            if alike and np.array_equal(links, links[np.ix_(exchanged, exchanged)], equal_nan=True):
                pairs.append((mine, theirs))
                break
    return pairs


# --- tables of one configuration -------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Case:
    """A configuration with all that its models are made of."""

    data: AmpData
    chosen: Configuration
    levels: list[float]  # bandwidths, ascending; a single one where there are no links at all
    bound: float = 0.0  # seconds, proven so far; +inf where the configuration has no decision
    classes: list[DeviceClass] = field(default_factory=list)
    links: Floats = field(default_factory=lambda: np.zeros((0, 0)))  # [c, d] bytes/s

    @property
    def seconds(self) -> dict[str, Floats]:
        """Type -> [L] seconds of one micro-batch."""
        size = (self.chosen.tensor, self.chosen.micro_batch)
        types = {device.type for device in self.data.devices}
        return {
            table.type: np.array(table.seconds)
            for table in self.data.layer_seconds
            if (table.tensor, table.micro_batch) == size and table.type in types
        }

    @property
    def positions(self) -> list[Position]:
        """All positions: by stage, then pipeline, then tensor rank."""
        c = self.chosen
        return list(product(range(c.pipeline), range(c.data), range(c.tensor)))

    def layers(self, name: str) -> Floats:
        """[L] a field of all layers."""
        return np.array([getattr(layer, name) for layer in self.data.layers], dtype=np.float64)

    @property
    def reduce_bytes(self) -> Floats:
        """[L] bytes over the slowest link of a tensor group, for one micro-batch."""
        tp, size = self.chosen.tensor, self.chosen.micro_batch
        return 2 * (tp - 1) / tp * size * self.layers("tensor_bytes")

    @property
    def sync_bytes(self) -> Floats:
        """[L] bytes over the slowest link of a data group."""
        dp, tp = self.chosen.data, self.chosen.tensor
        return 2 * (dp - 1) / dp / tp * self.layers("param_bytes")

    @property
    def send_bytes(self) -> Floats:
        """[L] bytes of a micro-batch over the slowest link behind a stage with this last layer."""
        return self.chosen.micro_batch * self.layers("activation_bytes")

    def held_bytes(self, j: int) -> Floats:
        """[L] bytes on each device of stage j; 0 without a memory constraint."""
        memory, c = self.data.memory, self.chosen
        if memory is None:
            return np.zeros(len(self.data.layers))
        states = memory.state_bytes_per_param_byte * self.layers("param_bytes")
        alive = min(c.gas, c.pipeline - j) * c.micro_batch
        return (states + alive * np.array(memory.layer_bytes_per_sample)) / c.tensor

    def capacities(self) -> list[float]:
        """[c] bytes on a device of each class, the tolerance included."""
        memory = self.data.memory
        if memory is None:
            return [0.0] * len(self.classes)
        return [memory.device_bytes[c.type] * (1 + MEMORY_TOLERANCE) for c in self.classes]

    def fastest(self) -> Floats:
        """[L] the least seconds of a layer on any group: fastest type, fastest link."""
        return np.min(list(self.seconds.values()), axis=0) + self.reduce_bytes / self.levels[-1]

    def slowest(self) -> float:
        """Seconds that no decision exceeds."""
        c, bandwidth = self.chosen, self.levels[0]
        chain = np.max(list(self.seconds.values()), axis=0) + self.reduce_bytes / bandwidth
        sends = (c.pipeline - 1) * self.send_bytes.max() / bandwidth
        slowest = c.gas * chain.sum() + sends + self.sync_bytes.sum() / bandwidth
        return float(slowest) * (1 + 1e-9)  # sums of floats


def simple_bound(case: Case) -> float:
    """Seconds that no decision of the configuration falls below.

    On a type of slowdown s each layer takes s times as long as on the fastest type, at least. In
    theta seconds a group gets through theta / s of the fastest type's seconds, where s is the
    largest slowdown of its types, and 1 / s is no more than the average of 1 / s over its devices.
    All groups together get through all layers of dp pipelines.
    """
    c, bandwidth = case.chosen, case.levels[-1]
    fastest = np.min(list(case.seconds.values()), axis=0)
    speeds = 0.0
    worked = fastest > 0
    for name, count in Counter(device.type for device in case.data.devices).items():
        ratios = case.seconds[name][worked] / fastest[worked]
        speeds += count / ratios.min(initial=math.inf) if worked.any() else count
    theta = c.data * float(fastest.sum()) / (speeds / c.tensor)
    chain = case.fastest()
    theta = max(theta, float(chain.sum()) / c.pipeline, float(chain.max()))
    sends = (c.pipeline - 1) * float(case.send_bytes.min()) / bandwidth
    sync = float(case.sync_bytes.sum()) / c.pipeline / bandwidth
    total = (c.gas - 1) * theta + float(chain.sum()) + sends + sync
    return total * (1 - 1e-12)  # sums of floats


def prefix(values: Floats) -> Floats:
    """[L + 1] sums of the first values."""
    return np.concatenate([[0.0], np.cumsum(values)])


def sums(values: Floats, pieces: list[Piece]) -> Floats:
    """[piece] the sum of the values of each piece's layers."""
    return np.array([values[first:end].sum() for first, end in pieces])


def pieces_of(case: Case, j: int, largest: float) -> list[Piece]:
    """The pieces of stage j that some type has memory for and that take no longer than `largest`
    seconds in all micro-batches."""
    c, layers = case.chosen, len(case.data.layers)
    behind = c.pipeline - 1 - j  # stages, with a layer each at least
    firsts = [0] if j == 0 else range(j, layers - behind)
    held, seconds = prefix(case.held_bytes(j)), c.gas * prefix(case.fastest())
    # differences of sums of floats: a little more is let pass, which (5) and (9) refuse
    room, time = max(case.capacities()) + 1e-9 * held[-1], largest + 1e-9 * seconds[-1]
    pieces = []
    for first in firsts:
        for end in [layers] if behind == 0 else range(first + 1, layers - behind + 1):
            fits = case.data.memory is None or held[end] - held[first] <= room
            if fits and seconds[end] - seconds[first] <= time:
                pieces.append((first, end))
    return pieces


def terms_of(case: Case) -> int:
    """The entries of all tables of the largest model of a configuration, about."""
    c, layers, types = case.chosen, len(case.data.layers), len(case.seconds)
    lengths = layers - c.pipeline + 1
    paces = sum(math.comb(types, count) for count in range(1, min(types, c.tensor) + 1))
    pieces = min(c.pipeline, 2) * lengths + max(0, c.pipeline - 2) * lengths**2 // 2
    groups = c.pipeline * (c.data + c.tensor)
    classes = len(case.classes)
    placing = (len(case.data.devices) + groups * classes) * classes
    return placing + groups * paces + pieces * (paces + 2 * len(case.levels))


# --- the model of one configuration ----------------------------------------------------------


@dataclass(frozen=True)
class Paces:
    """The seconds that tensor groups take, by the types in them."""

    types: list[str]
    rows: list[Floats]  # pace -> [L] seconds
    # (1 or 0 for each type: whether it is in the group, pace)
    by_types: list[tuple[int, ...]]


def paces_of(case: Case) -> Paces:
    """The paces of all sets of types that fit into a tensor group; equal rows are one pace."""
    seconds = case.seconds
    types = list(seconds)
    numbers: dict[tuple[float, ...], int] = {}
    by_types = []
    for count in range(1, min(len(types), case.chosen.tensor) + 1):
        for members in combinations(types, count):
            row = tuple(np.max([seconds[name] for name in members], axis=0).tolist())
            pace = numbers.setdefault(row, len(numbers))
            by_types.append((*(int(name in members) for name in types), pace))
    return Paces(types, [np.array(row) for row in numbers], by_types)


class Programme:
    """The model of one configuration, its variables, and what constraints share."""

    def __init__(self, case: Case, largest: float, run: Run | None) -> None:
        """largest: seconds; decisions above are left out."""
        self.case, c = case, case.chosen
        least = min(case.bound, largest)
        totals = Totals(least=least, largest=largest, roundings=c.roundings)
        self.model = ConstraintModel("amp", run, totals)
        self.cp, self.most = self.model.cp, self.model.tick(largest)
        self.pieces = [pieces_of(case, j, largest) for j in range(c.pipeline)]
        self.paces = paces_of(case)
        self.possible = all(self.pieces)  # whether every stage has a piece
        if self.possible:
            self.make_variables()
            for constrain in CONSTRAINTS:
                constrain(self)

    def make_variables(self) -> None:
        """The variables of the docstring."""
        case, c, cp = self.case, self.case.chosen, self.cp
        stages, groups = range(c.pipeline), list(product(range(c.pipeline), range(c.data)))
        layers, top = len(case.data.layers), len(case.levels) - 1
        most_pace = len(self.paces.rows) - 1
        self.device_class = {
            p: cp.new_int_var(0, len(case.classes) - 1, f"class_{p}") for p in case.positions
        }
        # whether a position has a device of a class
        self.at = {
            (p, k): cp.new_bool_var(f"at_{p}_{k}")
            for p in case.positions
            for k in range(len(case.classes))
        }
        self.piece = [cp.new_int_var(0, len(self.pieces[j]) - 1, f"piece_{j}") for j in stages]
        self.cut = [cp.new_int_var(0, layers, f"cut_{j}") for j in range(c.pipeline + 1)]
        self.pace = {g: cp.new_int_var(0, most_pace, f"pace_{g}") for g in groups}
        least_level = 0 if case.reduce_bytes.any() else top  # nothing to reduce: it does not matter
        self.level = {g: cp.new_int_var(least_level, top, f"level_{g}") for g in groups}
        self.stage_time = {g: self.time(f"stage_time_{g}") for g in groups}
        self.send_time = {g: self.time(f"send_time_{g}") for g in groups[: -c.data or None]}
        self.slowest_stage = [self.time(f"slowest_stage_{i}") for i in range(c.data)]
        self.slowest_pipeline = self.time("slowest_pipeline")
        self.sync = self.time("sync")

    def time(self, name: str) -> IntVar:
        """A variable in ticks up to the largest of interest."""
        return self.cp.new_int_var(0, self.most, name)

    def ticks(self, seconds: Floats) -> list[int]:
        """Seconds in ticks, rounded down, and cut off above the largest of interest."""
        return [min(ticks, self.most + 1) for ticks in self.model.ticks(seconds)]

    def of_piece(self, j: int, seconds: Floats, name: str) -> IntVar:
        """A variable: the ticks of the piece of stage j. seconds: [L] of each layer."""
        self.model.check()
        ticks = self.ticks(sums(seconds, self.pieces[j]))
        variable = self.cp.new_int_var(min(ticks), max(ticks), name)
        self.cp.add_element(self.piece[j], ticks, variable)
        return variable

    def among(self, positions: Sequence[Position], classes: Sequence[int], name: str) -> BoolVarT:
        """A variable: whether a device of one of these classes is at one of these positions."""
        literal = self.cp.new_bool_var(name)
        here = [self.at[p, k] for p in positions for k in classes]
        self.cp.add_max_equality(literal, here)
        return literal

    def limit_level(self, level: IntVar, positions: Sequence[Position], name: str) -> None:
        """A level is no higher than that of any link between two of these positions."""
        case, cp, top = self.case, self.cp, len(self.case.levels) - 1
        number = {bandwidth: k for k, bandwidth in enumerate(case.levels)}
        has = [self.among(positions, [k], f"{name}_has_{k}") for k in range(len(case.classes))]
        for k, d in combinations(range(len(case.classes)), 2):
            if number[case.links[k, d]] < top:
                cp.add(level <= number[case.links[k, d]]).only_enforce_if(has[k], has[d])
        for k, each in enumerate(case.classes):
            if len(each.devices) == 1 or number[case.links[k, k]] == top:
                continue
            several = cp.new_bool_var(f"{name}_several_{k}")
            cp.add(sum(self.at[p, k] for p in positions) <= 1).only_enforce_if(~several)
            cp.add(level <= number[case.links[k, k]]).only_enforce_if(several)


def place_every_device(m: Programme) -> None:  # (1)
    """Every position has a class, and every class as many positions as devices."""
    for p, device_class in m.device_class.items():
        for k in range(len(m.case.classes)):
            m.cp.add(device_class == k).only_enforce_if(m.at[p, k])
            m.cp.add(device_class != k).only_enforce_if(~m.at[p, k])
    for k, each in enumerate(m.case.classes):
        m.cp.add(sum(m.at[p, k] for p in m.case.positions) == len(each.devices))


def cut_into_pieces(m: Programme) -> None:  # (2)
    """The pieces follow one another."""
    for j, pieces in enumerate(m.pieces):
        m.cp.add_element(m.piece[j], [first for first, _ in pieces], m.cut[j])
        m.cp.add_element(m.piece[j], [end for _, end in pieces], m.cut[j + 1])


def slow_down_to_types(m: Programme) -> None:  # (3)
    """A tensor group takes each layer at the speed of its slowest type."""
    for (j, i), pace in m.pace.items():
        group = tensor_group(m.case, j, i)
        present = []
        for name in m.paces.types:
            classes = [k for k, each in enumerate(m.case.classes) if each.type == name]
            present.append(m.among(group, classes, f"type_{name}_{j}_{i}"))
        m.cp.add_allowed_assignments([*present, pace], m.paces.by_types)


def tensor_group(case: Case, j: int, i: int) -> list[Position]:
    """The positions of the tensor group of stage j and pipeline i."""
    return [(j, i, r) for r in range(case.chosen.tensor)]


def data_group(case: Case, j: int, r: int) -> list[Position]:
    """The positions of the data group of stage j and tensor rank r."""
    return [(j, i, r) for i in range(case.chosen.data)]


def reduce_over_slowest_link(m: Programme) -> None:  # (4)
    """A tensor group's all-reduces are no faster than its slowest link."""
    if m.case.reduce_bytes.any():
        for (j, i), level in m.level.items():
            m.limit_level(level, tensor_group(m.case, j, i), f"tensor_{j}_{i}")


def time_the_stages(m: Programme) -> None:  # (5)
    """A stage computes at its pace and reduces at its level."""
    for j in range(m.case.chosen.pipeline):
        work = [m.of_piece(j, row, f"work_{j}_{q}") for q, row in enumerate(m.paces.rows)]
        reduce = [
            m.of_piece(j, m.case.reduce_bytes / bandwidth, f"reduce_{j}_{k}")
            for k, bandwidth in enumerate(m.case.levels)
        ]
        for i in range(m.case.chosen.data):
            work_time, reduce_time = m.time(f"work_{j}_{i}"), m.time(f"reduce_{j}_{i}")
            m.cp.add_element(m.pace[j, i], work, work_time)
            m.cp.add_element(m.level[j, i], reduce, reduce_time)
            m.cp.add(m.stage_time[j, i] == work_time + reduce_time)


def send_activations(m: Programme) -> None:  # (6)
    """A stage sends its output over the slowest link of its tensor ranks."""
    case = m.case
    number = {bandwidth: k for k, bandwidth in enumerate(case.levels)}
    link_levels = [
        (k, d, number[case.links[k, d]])
        for k, d in product(range(len(case.classes)), repeat=2)
        if not math.isnan(case.links[k, d])
    ]
    for (j, i), send_time in m.send_time.items():
        links = []
        for here, after in zip(tensor_group(case, j, i), tensor_group(case, j + 1, i), strict=True):
            link = m.cp.new_int_var(0, len(case.levels) - 1, f"link_{here}")
            ends = [m.device_class[here], m.device_class[after]]
            m.cp.add_allowed_assignments([*ends, link], link_levels)
            links.append(link)
        slowest = m.cp.new_int_var(0, len(case.levels) - 1, f"link_{j}_{i}")
        m.cp.add_min_equality(slowest, links)
        cuts = sorted({end for _, end in m.pieces[j]})
        tuples = []
        for k, bandwidth in enumerate(case.levels):
            ticks = m.ticks(case.send_bytes / bandwidth)
            tuples += [(k, end, ticks[end - 1]) for end in cuts]
        m.cp.add_allowed_assignments([slowest, m.cut[j + 1], send_time], tuples)


def add_up(m: Programme) -> None:  # (7)
    """The slowest pipeline: its slowest stage in all micro-batches but one, all stages and links
    once."""
    c = m.case.chosen
    totals = []
    for i in range(c.data):
        stages = [m.stage_time[j, i] for j in range(c.pipeline)]
        sends = [m.send_time[j, i] for j in range(c.pipeline - 1)]
        m.cp.add_max_equality(m.slowest_stage[i], stages)
        total = m.time(f"pipeline_{i}")
        m.cp.add(total == sum(stages) + (c.gas - 1) * m.slowest_stage[i] + sum(sends))
        totals.append(total)
    m.cp.add_max_equality(m.slowest_pipeline, totals)
    m.cp.minimize(m.slowest_pipeline + m.sync)
    m.cp.add(m.slowest_pipeline + m.sync <= m.most)


def synchronise(m: Programme) -> None:  # (8)
    """Gradients are all-reduced over the slowest link of any data group of a stage."""
    case = m.case
    if not case.sync_bytes.any():
        m.cp.add(m.sync == 0)
        return
    times = []
    for j in range(case.chosen.pipeline):
        level = m.cp.new_int_var(0, len(case.levels) - 1, f"data_level_{j}")
        for r in range(case.chosen.tensor):
            m.limit_level(level, data_group(case, j, r), f"data_{j}_{r}")
        reduce = [
            m.of_piece(j, case.sync_bytes / bandwidth, f"sync_{j}_{k}")
            for k, bandwidth in enumerate(case.levels)
        ]
        times.append(m.time(f"sync_{j}"))
        m.cp.add_element(level, reduce, times[-1])
    m.cp.add_max_equality(m.sync, times)


def fit_memory(m: Programme) -> None:  # (9)
    """A piece that only the i-th smallest capacity holds needs devices with it, or more."""
    if m.case.data.memory is None:
        return
    capacities = m.case.capacities()
    sizes = sorted(set(capacities))
    rank = [sizes.index(capacity) for capacity in capacities]
    for j, pieces in enumerate(m.pieces):
        held = sums(m.case.held_bytes(j), pieces)
        needed = np.searchsorted(sizes, held).tolist()  # the least rank that holds a piece
        need = m.cp.new_int_var(0, len(sizes) - 1, f"memory_{j}")
        m.cp.add_element(m.piece[j], needed, need)
        for p in (p for p in m.case.positions if p[0] == j):
            room = m.cp.new_int_var(0, len(sizes) - 1, f"memory_{p}")
            m.cp.add_element(m.device_class[p], rank, room)
            m.cp.add(need <= room)


def order_ranks(m: Programme) -> None:  # (10)
    """Symmetry breaking: neither an exchange of two pipelines nor one of two tensor ranks makes the
    classes, read position by position, smaller."""
    c = m.case.chosen
    stages, pipelines, ranks = range(c.pipeline), range(c.data), range(c.tensor)
    for one, other in pairwise(pipelines):
        here = [m.device_class[j, one, r] for j in stages for r in ranks]
        ascend(m, here, [m.device_class[j, other, r] for j in stages for r in ranks])
    for one, other in pairwise(ranks):
        here = [m.device_class[j, i, one] for j in stages for i in pipelines]
        ascend(m, here, [m.device_class[j, i, other] for j in stages for i in pipelines])


def ascend(m: Programme, one: list[IntVar], other: list[IntVar]) -> None:
    """The first sequence is not after the other one in the order of words."""
    equal_so_far: list[BoolVarT] = []
    for x, y in zip(one, other, strict=True):
        equal = m.cp.new_bool_var(f"equal_{x.name}_{y.name}")
        m.cp.add(x <= y).only_enforce_if(equal_so_far)
        m.cp.add(x < y).only_enforce_if([*equal_so_far, ~equal])
        equal_so_far = [equal]


def order_nodes(m: Programme) -> None:  # (11)
    """Symmetry breaking: a node is used only behind a position that uses the equal node before
    it."""
    for mine, theirs in equal_nodes(m.case.classes, m.case.links):
        before: list[BoolVarT] = []
        for p in m.case.positions:
            for k in theirs:
                m.cp.add_bool_or([*before, ~m.at[p, k]])
            before += [m.at[p, k] for k in mine]


def outlast_averages(m: Programme) -> None:  # (12)
    """Implied: the slowest stage is no faster than the average one, and all stages together no
    faster than on the fastest types and links."""
    c = m.case.chosen
    least = m.model.tick(float(m.case.fastest().sum()) * (1 - 1e-12))
    least -= 2 * c.pipeline  # stage times are rounded down by less than this
    for i in range(c.data):
        stages = sum(m.stage_time[j, i] for j in range(c.pipeline))
        m.cp.add(c.pipeline * m.slowest_stage[i] >= stages)
        m.cp.add(stages >= least)


CONSTRAINTS = (
    place_every_device,
    cut_into_pieces,
    slow_down_to_types,
    reduce_over_slowest_link,
    time_the_stages,
    send_activations,
    add_up,
    synchronise,
    fit_memory,
    order_ranks,
    order_nodes,
    outlast_averages,
)


# --- all configurations ----------------------------------------------------------------------


@dataclass(frozen=True)
class Parameters:
    """Limits and shares of the search over configurations."""

    # A model looks for decisions that beat the incumbent by this share of the user's gap.
    worth: float = 0.5
    # Seconds of each model in the first round; every further round has twice as many.
    first_seconds: float = 1.0
    # The first round looks for decisions up to this multiple of the least bound; every further
    # round squares it. Close targets leave few pieces, and far ones are not needed where there is
    # an incumbent.
    growth: float = 1.5
    # A configuration whose tables have more entries is left open.
    most_terms: int = 2_000_000


class Sweep:
    """Solves the models of all configurations in rounds of ever more seconds, until each has a
    decision that is proven best or is proven to have none below the incumbent."""

    def __init__(self, method: str, run: Run, cases: list[Case], parameters: Parameters) -> None:
        self.method, self.run, self.parameters = method, run, parameters
        self.open = sorted(cases, key=lambda case: case.bound)
        self.done = math.inf  # seconds, the least bound of the configurations that are not open
        self.complete = True  # whether all configurations that are not open are proven
        self.incumbent = Incumbent[AmpDecision](run, parameters.worth * run.options.gap)
        self.models, self.build_seconds = 0, 0.0
        self.message, self.failed = "", False  # about the last configuration that was left out

    @property
    def bound(self) -> float:
        """Seconds that no decision falls below; +inf where there is none."""
        return min(self.done, *(case.bound for case in self.open), self.incumbent.objective)

    def go(self) -> None:
        """Solve all models. Raises `Stopped` where the run should stop."""
        seconds, growth = self.parameters.first_seconds, self.parameters.growth
        while self.open:
            target = self.bound * growth
            for case in list(self.open):
                self.run.check()
                self.solve(case, target, seconds)
                if math.isfinite(self.bound):
                    self.run.report(bound=self.bound)
            if self.run.tap is not None:  # the models were handed over
                return
            seconds *= 2
            growth *= growth

    def close(self, case: Case, *, proven: bool = True) -> None:
        """Take a configuration off the open ones, with the bound that it has then."""
        self.open.remove(case)
        self.done = min(self.done, case.bound)
        self.complete = self.complete and proven

    def give_up(self, case: Case, message: str) -> None:
        """Take a configuration off the open ones, unproven."""
        self.message = f"{case.chosen}: {message}"
        self.close(case, proven=False)

    def raise_bound(self, case: Case, bound: float) -> Case:
        """The configuration with this bound, if it is higher."""
        raised = replace(case, bound=max(case.bound, bound))
        self.open[self.open.index(case)] = raised
        return raised

    def solve(self, case: Case, target: float, seconds: float) -> None:
        """Look for decisions of a configuration that cost less than the incumbent and `target`, for
        `seconds` at most unless no other configuration is open. A target of 0 stands for none."""
        cutoff, slowest = self.incumbent.threshold, case.slowest()
        if case.bound >= cutoff:
            return self.close(case)
        if terms_of(case) > self.parameters.most_terms:
            return self.give_up(case, TOO_LARGE.format(self.parameters.most_terms))
        below = cutoff if cutoff <= slowest else math.inf  # infinite: no decision is left out
        if 0 < target < min(cutoff, slowest) and self.run.tap is None:
            below = target
        if case.bound >= below:
            return None  # its turn comes in a later round
        self.run.report(note=str(case.chosen))
        part = self.part(seconds if len(self.open) > 1 else None)
        begun = CLOCK.seconds()
        programme = Programme(case, min(below, slowest), self.run)
        self.build_seconds += CLOCK.seconds() - begun
        if programme.possible:
            answer = self.minimise(programme, part)
        else:
            answer = ModelAnswer(stop=Stop.INFEASIBLE)
        # the model has only decisions below that, so that it proves no more
        proven = below if answer.stop is Stop.INFEASIBLE else min(answer.bound or 0.0, below)
        case = self.raise_bound(case, proven)
        if answer.stop is Stop.ERROR:
            self.failed = True
            self.give_up(case, answer.message)
        elif answer.stop is Stop.OPTIMAL:
            # a model with a far cut-off has coarse ticks: it has another turn with a closer one
            close_enough = case.bound >= self.incumbent.objective * (1 - self.run.options.gap)
            if close_enough or below == cutoff:
                self.close(case)
        elif answer.stop is Stop.LIMIT and part.remaining > seconds / 2 and self.run.tap is None:
            self.give_up(case, "a native option ended its model")
        return None

    def part(self, seconds: float | None) -> Run:
        """The run of one model. Probing takes most of the time of these models and is left out,
        unless the user's native options say otherwise."""
        part = self.run.part(time_limit=seconds)
        native = dict(part.options.native)
        native[BACKEND] = {"cp_model_probing_level": 0, **native.get(BACKEND, {})}
        return replace(part, options=replace(part.options, native=native))

    def minimise(self, programme: "Programme", part: Run) -> ModelAnswer:
        """The answer to a model; its decision is offered as the incumbent."""
        self.models += 1
        answer = general.minimise(
            self.method, programme.model, part,
            # the bound is that of one configuration, and none of the problem
            lambda incumbent, bound: self.run.report(incumbent=incumbent),
        )  # fmt: skip
        if answer.has_solution:
            decision = read(programme, answer)
            self.incumbent.offer(seconds_of(programme.case.data, decision), decision)
        return answer


def read(m: Programme, answer: ModelAnswer) -> AmpDecision:
    """The decision of an answer."""
    c = m.case.chosen
    left = [list(each.devices) for each in m.case.classes]
    placement = [[[0] * c.tensor for _ in range(c.data)] for _ in range(c.pipeline)]
    for (j, i, r), device_class in m.device_class.items():
        placement[j][i][r] = left[int(answer.value(device_class))].pop(0)
    return AmpDecision(
        pipeline=c.pipeline,
        data=c.data,
        tensor=c.tensor,
        micro_batch=c.micro_batch,
        placement=placement,
        stages=[m.pieces[j][int(answer.value(piece))] for j, piece in enumerate(m.piece)],
    )


def seconds_of(data: AmpData, decision: AmpDecision) -> float:
    """The seconds of a decision, without rounding."""
    size = decision.micro_batch
    gas = data.global_batch // (decision.data * size)
    tables = {
        table.type: table.seconds
        for table in data.layer_seconds
        if (table.tensor, table.micro_batch) == (decision.tensor, size)
    }

    def ring(group: Sequence[int], volume: float) -> float:
        """Seconds of an all-reduce of `volume` bytes."""
        times = (volume / data.bandwidth[d][e] for d, e in combinations(group, 2))
        return 2 * (len(group) - 1) / len(group) * max(times, default=0.0)

    slowest = sync = 0.0
    for i in range(decision.data):
        groups = [stage[i] for stage in decision.placement]
        stages = []
        for group, (first, end) in zip(groups, decision.stages, strict=True):
            rows = [tables[data.devices[d].type][first:end] for d in group]
            work = sum(max(column) for column in zip(*rows, strict=True))
            volume = sum(layer.tensor_bytes for layer in data.layers[first:end]) * size
            stages.append(work + ring(group, volume))
        sends = 0.0
        for (_, end), (here, after) in zip(decision.stages, pairwise(groups), strict=False):
            volume = data.layers[end - 1].activation_bytes * size
            links = (data.bandwidth[d][e] for d, e in zip(here, after, strict=True))
            sends += volume / min(links)
        slowest = max(slowest, (gas - 1) * max(stages) + sum(stages) + sends)
    for stage, (first, end) in zip(decision.placement, decision.stages, strict=True):
        volume = sum(layer.param_bytes for layer in data.layers[first:end]) / decision.tensor
        for group in zip(*stage, strict=True):
            sync = max(sync, ring(group, volume))
    return slowest + sync


def solve_by(
    method: str, data: AmpData, run: Run, parameters: Parameters = Parameters()
) -> Outcome[AmpDecision]:
    """The best decision over all configurations, and the least of their proven bounds."""
    begun, solver = CLOCK.seconds(), general.label(method, run.options)
    rates = np.array(data.bandwidth)
    levels = np.unique(rates[~np.eye(len(data.devices), dtype=bool)]).tolist() or [1.0]
    cases = [Case(data, chosen, levels) for chosen in configurations(data)]
    if not cases:
        return Outcome(stop=Stop.INFEASIBLE, solver=solver, message=NO_CONFIGURATION)
    cases = [replace(case, bound=simple_bound(case)) for case in cases]
    run.report(bound=min(case.bound for case in cases))
    sweep = Sweep(method, run, cases, parameters)
    try:
        classes = classes_of(data, run)
        links = links_between(data, classes)
        sweep.open = [replace(case, classes=classes, links=links) for case in sweep.open]
        sweep.build_seconds = CLOCK.seconds() - begun
        sweep.go()
    except Stopped:
        pass  # configurations that are still open keep their bounds
    proven = not sweep.open and sweep.complete
    if not proven:
        stop = Stop.ERROR if sweep.failed and not run.should_stop else stop_reason(run)
        message = sweep.message
    elif sweep.incumbent.decision is None:
        stop, message = Stop.INFEASIBLE, NO_ROOM
    else:
        stop, message = Stop.OPTIMAL, ""
    return Outcome(
        stop=stop,
        decision=sweep.incumbent.decision,
        bound=sweep.bound if math.isfinite(sweep.bound) else None,
        build_seconds=sweep.build_seconds,
        solver=solver,
        message=message,
        details={"configurations": len(cases), "models": sweep.models},
    )
