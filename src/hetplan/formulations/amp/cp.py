"""Problem `amp` for CP-SAT: one model for each choice of degrees and micro-batch size, in elements
of tables.

A class is a set of devices that may be exchanged for one another: equal node, equal type, equal
bandwidth to every other device. The levels are the bandwidths of links, from the lowest one. A pace
is the seconds of all layers on a tensor group, which follow from the types in the group.

Sets   j in 0..pp-1 stages, i in 0..dp-1 pipelines, r in 0..tp-1 tensor ranks; p = (j, i, r)
       positions; l in 0..L-1 layers; c classes; k levels; q paces.
Data   count_c devices; level_cd of a link between two classes; gas micro-batches; in seconds, sums
       over the first layers: work_q at a pace, reduce_k of tensor all-reduces and sync_k of
       gradients' all-reduces at a level; send_kl at a level of layer l's output.
Vars   class_p;  cut_j in 0..L, cut_0 = 0, cut_pp = L;  pace_ij and level_ij of a tensor group;
       link_ij, the level to the next stage;  level_j of the data groups of stage j;
       ticks t_ij of stages, e_ij of sends, theta_i of slowest stages, T of pipelines, S.
Min    T + S,  s.t.
(1)  sum_p [class_p = c] = count_c                            counts      `place_every_device`
(2)  cut_j < cut_(j+1) <= reach_j[cut_j]                      element     `cut_into_stages`
(3)  pace_ij by the types among class_(j,i,*)                 table       `slow_down_to_types`
(4)  level_ij <= level_cd where c and d are in (j, i)         conditions  `reduce_over_slowest_link`
(5)  t_ij >= work over [cut_j, cut_(j+1)) at pace_ij
             + reduce over [cut_j, cut_(j+1)) at level_ij     element     `time_the_stages`
(6)  link_ij = min_r level of class_(j,i,r), class_(j+1,i,r);
     e_ij = send at link_ij of layer cut_(j+1) - 1            table, min  `send_activations`
(7)  theta_i = max_j t_ij;
     T = max_i (sum_j t_ij + (gas - 1) theta_i + sum_j e_ij)  max         `add_up`
(8)  level_j <= level_cd where c and d are in a data group of j;
     S >= sync over [cut_j, cut_(j+1)) at level_j             element     `synchronise`
(9)  cut_(j+1) <= reach_j[cut_j] of the memory of class_p, for all p in j
                                                              element     `fit_memory`
(10) pipelines and tensor ranks ascend, read position by position         `order_ranks`    symmetry
(11) of two equal nodes the first one is used first                       `order_nodes`    symmetry
(12) pp theta_i >= sum_j t_ij >= seconds on the fastest types and links   `outlast_averages` implied
(4) and (8) bound a level from above only: a lower one makes the decision more expensive, so that
the best decision has the level of its slowest link. (10) and (11) hold for the first one, read
position by position, of all decisions that differ by exchanges, so that they go together.
Times and sums at the end of a stage are rounded down, sums at its begin up.
Source AMP, eq. 3-5; the memory constraint, for 1F1B, is hetplan's.
"""

import math
from collections.abc import Sequence
from itertools import combinations, pairwise, product

import numpy as np
from ortools.sat.python.cp_model import BoolVarT, IntVar

from hetplan.formulations.amp.cp_tables import (
    Case,
    Floats,
    Position,
    equal_nodes,
    paces_of,
    prefix,
    reach,
)
from hetplan.formulations.amp.data import AmpDecision
from hetplan.solvers.constraint_model import ConstraintModel
from hetplan.solvers.model import ModelAnswer, Totals
from hetplan.solvers.run import Run


class Programme:
    """The model of one configuration, its variables, and what constraints share."""

    def __init__(self, case: Case, largest: float, run: Run) -> None:
        """largest: seconds; decisions above are left out."""
        self.case, self.largest = case, largest
        self.paces = paces_of(case)
        # the sums of whole chains are totals, too
        slow = [self.sums(row)[-1] for row in self.paces.rows]
        slow += [self.sums(case.reduce_bytes / case.levels[0])[-1]]
        slow += [self.sums(case.sync_bytes / case.levels[0])[-1]]
        totals = Totals(
            least=min(case.bound, largest),
            largest=max(largest, *slow),
            roundings=case.chosen.roundings,
        )
        self.model = ConstraintModel("amp", run, totals)
        self.cp = self.model.cp
        self.most = self.model.tick(largest)
        self.make_variables()
        for constrain in CONSTRAINTS:
            constrain(self)

    def make_variables(self) -> None:
        """The variables of the docstring."""
        case, c, cp = self.case, self.case.chosen, self.cp
        stages = range(c.pipeline)
        groups = list(product(range(c.pipeline), range(c.data)))
        layers = len(case.data.layers)
        top = len(case.levels) - 1
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
        # every stage before a cut and every stage behind it has a layer, at least
        inner = [cp.new_int_var(j, layers - c.pipeline + j, f"cut_{j}") for j in stages[1:]]
        self.cut = [cp.new_constant(0), *inner, cp.new_constant(layers)]
        self.pace = {g: cp.new_int_var(0, most_pace, f"pace_{g}") for g in groups}
        least_level = 0 if case.reduce_bytes.any() else top  # nothing to reduce: it does not matter
        self.level = {g: cp.new_int_var(least_level, top, f"level_{g}") for g in groups}
        self.stage_time = {g: self.time(f"stage_time_{g}") for g in groups}
        self.send_time = {g: self.time(f"send_time_{g}") for g in groups[: -c.data]}
        self.slowest_stage = [self.time(f"slowest_stage_{i}") for i in range(c.data)]
        self.slowest_pipeline = self.time("slowest_pipeline")
        self.sync = self.time("sync")

    def time(self, name: str) -> IntVar:
        """A variable in ticks up to the largest of interest."""
        return self.cp.new_int_var(0, self.most, name)

    def sums(self, seconds: Floats) -> Floats:
        """[L + 1] sums of the first layers' seconds, where a layer that takes longer than the
        largest of interest counts as twice that: no stage with it is of interest."""
        return prefix(np.minimum(seconds, 2 * self.largest))

    def of_stage(self, j: int, seconds: Floats, name: str) -> IntVar:
        """A variable: the ticks of the layers of stage j, the sum up to its end, rounded down, less
        the one up to its begin, rounded up. seconds: [L] of each layer."""
        self.model.check()
        sums = self.sums(seconds)
        up_to_end, up_to_begin = self.model.ticks(sums), self.model.ticks_up(sums)
        end = self.cp.new_int_var(0, up_to_end[-1], f"{name}_up_to_end")
        begin = self.cp.new_int_var(0, up_to_begin[-1], f"{name}_up_to_begin")
        self.cp.add_element(self.cut[j + 1], up_to_end, end)
        self.cp.add_element(self.cut[j], up_to_begin, begin)
        ticks = self.cp.new_int_var(-1, up_to_end[-1], name)  # -1: two roundings of the same sum
        self.cp.add(ticks == end - begin)
        return ticks

    def one_of(self, choice: IntVar, ticks: list[IntVar], name: str) -> IntVar:
        """A variable: the chosen one of these, which is not above the largest of interest."""
        chosen = self.cp.new_int_var(-1, self.most, name)
        self.cp.add_element(choice, ticks, chosen)
        return chosen

    def among(self, positions: Sequence[Position], classes: Sequence[int], name: str) -> BoolVarT:
        """A variable: whether a device of one of these classes is at one of these positions."""
        literal = self.cp.new_bool_var(name)
        here = [self.at[p, k] for p in positions for k in classes]
        self.cp.add_max_equality(literal, here)
        return literal

    def limit_level(self, level: IntVar, positions: Sequence[Position], name: str) -> None:
        """A level is no higher than that of any link between two of these positions."""
        case = self.case
        cp = self.cp
        top = len(self.case.levels) - 1
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


def cut_into_stages(m: Programme) -> None:  # (2)
    """Every stage has a layer, and no more layers than time and memory allow on any type."""
    room = max(m.case.capacities())
    for j, (begin, end) in enumerate(pairwise(m.cut)):
        m.cp.add(begin < end)
        reach_at_most(m, j, reach(m.case, j, m.largest, room), f"reach_{j}")


def reach_at_most(m: Programme, j: int, ends: list[int], name: str, *when: BoolVarT) -> None:
    """Under a condition stage j ends at the end for its begin, or before. ends: [begin]."""
    end = m.cp.new_int_var(0, len(ends), name)
    m.cp.add_element(m.cut[j], ends, end)
    m.cp.add(m.cut[j + 1] <= end).only_enforce_if(when)


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
    case, reduces = m.case, bool(m.case.reduce_bytes.any())
    for j in range(case.chosen.pipeline):
        work = [m.of_stage(j, row, f"work_{j}_{q}") for q, row in enumerate(m.paces.rows)]
        reduce = []
        if reduces:
            for k, bandwidth in enumerate(case.levels):
                reduce.append(m.of_stage(j, case.reduce_bytes / bandwidth, f"reduce_{j}_{k}"))
        for i in range(case.chosen.data):
            ticks = [m.one_of(m.pace[j, i], work, f"work_{j}_{i}")]
            if reduces:
                ticks.append(m.one_of(m.level[j, i], reduce, f"reduce_{j}_{i}"))
            m.cp.add(m.stage_time[j, i] >= sum(ticks))


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
        tuples = []
        for k, bandwidth in enumerate(case.levels):
            ticks = m.model.ticks(case.send_bytes / bandwidth)
            tuples += [(k, last + 1, t) for last, t in enumerate(ticks) if t <= m.most]
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
    for j in range(case.chosen.pipeline):
        level = m.cp.new_int_var(0, len(case.levels) - 1, f"data_level_{j}")
        for r in range(case.chosen.tensor):
            m.limit_level(level, data_group(case, j, r), f"data_{j}_{r}")
        sync = [
            m.of_stage(j, case.sync_bytes / bandwidth, f"sync_{j}_{k}")
            for k, bandwidth in enumerate(case.levels)
        ]
        m.cp.add(m.sync >= m.one_of(level, sync, f"sync_{j}"))


def fit_memory(m: Programme) -> None:  # (9)
    """A stage with a device of a small memory has no more layers than fit into it."""
    if m.case.data.memory is None:
        return
    capacities = m.case.capacities()
    for size in sorted(set(capacities))[:-1]:  # (2) has the largest one
        small = [k for k, capacity in enumerate(capacities) if capacity == size]
        for j in range(m.case.chosen.pipeline):
            positions = [p for p in m.case.positions if p[0] == j]
            is_small = m.among(positions, small, f"memory_{size:.0f}_{j}")
            ends = reach(m.case, j, m.largest, size)
            reach_at_most(m, j, ends, f"reach_{size:.0f}_{j}", is_small)


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
    least -= 4 * c.pipeline  # stage times are rounded down by less than this
    for i in range(c.data):
        stages = sum(m.stage_time[j, i] for j in range(c.pipeline))
        m.cp.add(c.pipeline * m.slowest_stage[i] >= stages)
        m.cp.add(stages >= least)


CONSTRAINTS = (
    place_every_device,
    cut_into_stages,
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
        stages=list(pairwise(int(answer.value(cut)) for cut in m.cut)),
    )
