"""Problem `ditto` for CP-SAT: places of stages counted from the end, and clocks at the boundaries.

The last stage has place 0: a stage at place j has j stages behind it, S - k = j + 1 micro-batches
in flight, and place s is that of the slowest stage k*. Places in front of the first stage are free.
Sets   j in 0..S_max-1 places; i types; o options, each a group of x_o devices of type i_o;
       b in 0..L boundaries of layers.
Data   clock_o[b] seconds of the layers in front of boundary b under option o; N_b micro-batches;
       D_i devices of type i; least_jo[b] the first layer of the longest stage that ends at boundary
       b and fits in the memory of option o at place j.
Vars   begin_j boundary where the stage at place j begins, 0 where the place is free;
       on[j, o] in {0,1}: the stage at place j has option o;  t_j ticks of the stage at place j;
       theta ticks of the slowest stage;  slowest[j] in {0,1}: place j is that of k*;  s;
       again_j ticks that the stage at place j adds behind k*;  steady ticks.
Min    sum_j t_j + sum_j again_j + steady,  s.t.
(1) end_0 = L, end_j = begin_(j-1), begin_(S_max-1) = 0;  begin_j < end_j, or both are 0 where the
    place is free                                            conditions      `cover_the_layers`
(2) place j has one option or is free; the options on i have D_i devices     `keep_to_devices`
(3) t_j = clock_o[end_j] - clock_o[begin_j] where on[j, o]   elements        `read_the_clocks`
(4) theta = max_j t_j                                        maximum         `take_the_slowest`
(5) one j is slowest: t_j >= (1 - TIE) theta, s = j          conditions      `place_the_slowest`
(6) again_j >= t_j where j < s                               conditions      `drain_again`
(7) steady >= (N_b - 1 - s) theta                            product         `stay_steady`
(8) begin_j >= least_jo[end_j] where on[j, o]                elements        `fit_memory`
(9) theta >= a constant, sum_j t_j >= W                      implied         `outlast_the_fastest`
S <= N_b, since there are no more places. The objective is T = T1 + T2 + T3: k* = S - 1 - s, and T3
holds t_k* once more, which makes (N_b - 2 - s) + 1 times theta beside T1.
The model may choose any of the tied slowest stages as k*; the first gives the least T. Stages whose
seconds differ by less than about `FINEST` of the objective may have the same ticks. They then tie
in the model, which only lowers its bound.
A first template is CP-SAT's hint and limits the seconds of a stage: without it 50 layers on five
devices are not proven in 15 s, with it in 9 s. Decision strategies, and shares of the work per
option, were tried and did not shorten proofs.
Source Ditto, Section 3; Oobleck (SOSP 2023), Section 4.1.2; (8) is hetplan's, for 1F1B.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python.cp_model import IntVar

from hetplan.errors import UnsupportedError, require
from hetplan.formulations.ditto.data import (
    DittoData,
    DittoDecision,
    DittoStage,
    Memory,
    group_sizes,
)
from hetplan.solvers.constraint_model import ConstraintModel
from hetplan.solvers.general import Formulation, PriorResult, constraint_formulation
from hetplan.solvers.model import ModelAnswer, Totals
from hetplan.solvers.run import Outcome, Run, Stop

# Stages within this relative difference of the slowest one tie.
TIE = 1e-9
# Bytes may exceed a capacity by this relative amount, since sums round.
SLACK = 1e-9
# The rounding of ticks, relative to the objective. It is as fine as `TIE`, because T jumps with the
# place of the slowest stage.
FINEST = 1e-9
# Entries of all tables together; with more, no model is built.
MOST_ENTRIES = 5_000_000
STARTS = 40  # templates that are tried before the model is solved
NO_DEVICE = "no device type has a node"

Read = Callable[[ModelAnswer], DittoDecision]  # the decision of an answer


@dataclass(frozen=True)
class Option:
    """A group of devices that a stage may run on."""

    type: int  # number of its device type in the instance
    devices: int
    seconds: NDArray[np.float64]  # [L] of one micro-batch

    @cached_property
    def clock(self) -> NDArray[np.float64]:
        """[L + 1] seconds of the layers in front of every boundary."""
        return np.concatenate([[0.0], np.cumsum(self.seconds)])


@dataclass(frozen=True)
class Instance:
    """The data with what the constraints read."""

    data: DittoData
    options: list[Option]
    places: int  # S_max
    work: float  # W, the seconds of all layers, each under its fastest option
    least_slowest: float  # a lower bound on the seconds of the slowest stage
    # [place][option] least_jo by boundary; None without limits of memory
    least_begins: list[list[NDArray[np.int64]]] | None

    def devices(self, i: int) -> int:
        """D_i."""
        return self.data.device_types[i].nodes * self.data.devices_per_node

    @property
    def bound(self) -> float:
        """A lower bound on T = sum_k t_k + (N_b - 1) theta - sum_{k > k*} (theta - t_k).

        The first sum is at least W, and each of at most S_max - 1 stages in the last one saves no
        more than theta. The seconds of a tied k* may be less than those of the slowest by `TIE`.
        """
        steady = (self.data.micro_batches - self.places) * self.least_slowest
        return (self.work + steady) * (1 - TIE)


def read_instance(data: DittoData) -> Instance | None:
    """The instance of the model; None where there is no device."""
    options = list(options_of(data))
    if not options:
        return None
    devices = sum(kind.nodes for kind in data.device_types) * data.devices_per_node
    places = min(data.layers, data.micro_batches, devices)
    fastest = np.array([option.seconds for option in options]).min(axis=0)  # [layer]
    work = float(fastest.sum())
    # in one second, each stage does at most one second of the work W
    speed = min(float(places), fastest_speed(data, options, fastest))
    least_slowest = max(float(fastest.max()), work / speed)
    least_begins = None
    if data.memory is not None:
        least_begins = [
            [least_begins_of(data, data.memory, option, j) for option in options]
            for j in range(places)
        ]
    return Instance(data, options, places, work, least_slowest, least_begins)


def least_begins_of(data: DittoData, memory: Memory, option: Option, j: int) -> NDArray[np.int64]:
    """[L + 1] least_jo; it is the boundary itself where not even one layer fits."""
    in_flight = min(data.micro_batches, j + 1)
    layer_bytes = np.array(memory.layer_state_bytes)
    layer_bytes = layer_bytes + in_flight * np.array(memory.layer_activation_bytes)
    before = np.concatenate([[0.0], np.cumsum(layer_bytes)])
    device_bytes = memory.device_bytes[data.device_types[option.type].name]
    room = device_bytes * option.devices * (1 + SLACK)
    return np.searchsorted(before, before - room)


def fastest_speed(data: DittoData, options: list[Option], fastest: NDArray[np.float64]) -> float:
    """A bound on the speed of all devices together: the seconds of the work W that they do in one
    second.

    W counts each layer with its seconds under its fastest option, which are `fastest` [L]. A device
    is no faster than under the best option of its type at the layer that suits it best.
    """
    per_device = [0.0] * len(data.device_types)  # [type]
    timed = fastest > 0
    for option in options:
        shares = fastest[timed] / option.seconds[timed]
        share = float(shares.max(initial=0.0)) / option.devices
        per_device[option.type] = max(per_device[option.type], share)
    devices = [kind.nodes * kind.devices_per_node for kind in data.device_types]
    # where no layer takes any time, any speed will do
    return float(np.dot(devices, per_device)) or 1.0


def options_of(data: DittoData) -> Iterator[Option]:
    """The options of the types that have nodes."""
    for i, kind in enumerate(data.device_types):
        if kind.nodes == 0:
            continue
        compute = np.array(kind.forward_seconds) + np.array(kind.backward_seconds)
        for x in group_sizes(kind.devices_per_node):
            seconds = compute / x
            if x > 1:
                seconds = seconds + 2 * np.array(kind.allreduce_seconds[str(x)])
            yield Option(i, x, seconds)


@dataclass(frozen=True)
class Start:
    """A template that is known before the model is solved; lists are by place."""

    begins: list[int]
    options: list[Option]
    objective: float  # T, seconds


def find_start(instance: Instance) -> Start | None:
    """The best template among those that `fill` builds for falling limits of a stage's seconds."""
    least, most = 0.0, max(float(option.clock[-1]) for option in instance.options)
    best = fill(instance, most)
    if best is None:
        return None
    for _ in range(STARTS):
        limit = (least + most) / 2
        found = fill(instance, limit)
        if found is None:
            least = limit
            continue
        most = limit
        if found.objective < best.objective:
            best = found
    return best


def fill(instance: Instance, limit: float) -> Start | None:
    """A template from the last layer to the first one, each stage of the most layers per device
    that take at most `limit` seconds; None where places or devices do not suffice."""
    left = [instance.devices(i) for i in range(len(instance.data.device_types))]
    begins: list[int] = []
    options: list[Option] = []
    times: list[float] = []
    end = instance.data.layers
    while end > 0 and len(begins) < instance.places:
        best, begin, most_layers = None, end, 0.0
        for o, option in enumerate(instance.options):
            if left[option.type] < option.devices:
                continue
            fitting = int(np.searchsorted(option.clock, option.clock[end] - limit))
            if instance.least_begins is not None:
                fitting = max(fitting, int(instance.least_begins[len(begins)][o][end]))
            if (end - fitting) / option.devices > most_layers:
                best = option
                begin = fitting
                most_layers = (end - fitting) / option.devices
        if best is None:
            return None
        left[best.type] -= best.devices
        times.append(float(best.clock[end] - best.clock[begin]))
        begins.append(begin)
        options.append(best)
        end = begin
    if end > 0:
        return None
    s = max(j for j, seconds in enumerate(times) if seconds >= max(times) * (1 - TIE))
    steady = (instance.data.micro_batches - 1 - s) * times[s]
    return Start(begins, options, sum(times) + sum(times[:s]) + steady)


@dataclass(frozen=True)
class Variables:
    """The variables, by place."""

    end: list[IntVar]  # the boundaries: L, and then begin_j of every place
    on: list[list[IntVar]]  # [place][option]
    ticks: list[IntVar]
    theta: IntVar
    slowest: list[IntVar]
    again: list[IntVar]
    steady: IntVar
    s: IntVar
    most: int  # ticks of a stage at most

    @property
    def begin(self) -> list[IntVar]:
        """The boundaries where the stages begin."""
        return self.end[1:]


def longest_stage(instance: Instance, start: Start | None) -> float:
    """The most seconds of a stage in a template that is no worse than the start.

    The slowest stage counts at least N_b - S_max + 1 times in T: once among all stages, and
    N_b - 1 - s times in the steady phase. A start that takes no time limits nothing: there would
    be no time left to choose a tick by.
    """
    longest = max(float(option.clock[-1]) for option in instance.options)
    if start is None or start.objective == 0:
        return longest
    times = instance.data.micro_batches - instance.places + 1
    return min(longest, start.objective / times * (1 + TIE))


def make_variables(model: ConstraintModel, instance: Instance, start: Start | None) -> Variables:
    """The variables of the docstring."""
    cp = model.cp
    data = instance.data
    places = range(instance.places)
    options = range(len(instance.options))
    # a stage without work may have -1 ticks, see `read_the_clocks`
    most = model.tick(longest_stage(instance, start))
    return Variables(
        end=[
            cp.new_constant(data.layers),
            *(cp.new_int_var(0, data.layers - 1, f"begin_{j}") for j in places),
        ],
        on=[[cp.new_bool_var(f"on_{j}_{o}") for o in options] for j in places],
        ticks=[cp.new_int_var(-1, most, f"ticks_{j}") for j in places],
        theta=cp.new_int_var(0, most, "theta"),
        slowest=[cp.new_bool_var(f"slowest_{j}") for j in places],
        again=[cp.new_int_var(0, most, f"again_{j}") for j in places],
        steady=cp.new_int_var(0, data.micro_batches * most, "steady"),
        s=cp.new_int_var(0, instance.places - 1, "s"),
        most=most,
    )


def cover_the_layers(model: ConstraintModel, instance: Instance, v: Variables) -> None:  # (1)
    """The stages follow one another from the last layer to the first; free places are empty."""
    cp = model.cp
    cp.add(v.begin[-1] == 0)
    for j, on in enumerate(v.on):
        taken = cp.new_bool_var(f"taken_{j}")
        cp.add(sum(on) == taken)
        cp.add(v.end[j] >= 1).only_enforce_if(taken)
        cp.add(v.begin[j] < v.end[j]).only_enforce_if(taken)
        cp.add(v.end[j] == 0).only_enforce_if(~taken)
        cp.add(v.begin[j] == 0).only_enforce_if(~taken)


def keep_to_devices(model: ConstraintModel, instance: Instance, v: Variables) -> None:  # (2)
    """A place has at most one option, and no type has more devices in use than there are."""
    for on in v.on:
        model.cp.add_at_most_one(on)
    for i in range(len(instance.data.device_types)):
        used = []
        for on in v.on:
            for o, option in enumerate(instance.options):
                if option.type == i:
                    used.append(option.devices * on[o])
        model.cp.add(sum(used) <= instance.devices(i))


def read_the_clocks(model: ConstraintModel, instance: Instance, v: Variables) -> None:  # (3)
    """A stage takes what the clock of its option shows at its end less what it shows at its begin;
    a free place takes nothing.

    The end is rounded down and the begin up, so that no stage is too long. All clocks are slow by
    `TIE`, so that theta, the most of all stages, does not exceed the seconds of a tied k*.
    """
    cp = model.cp
    for o, option in enumerate(instance.options):
        clock = option.clock * (1 - TIE)
        down = model.ticks(clock)
        up = model.ticks_up(clock)
        for j, on in enumerate(v.on):
            model.check()
            at_end = cp.new_int_var(0, down[-1], f"at_end_{j}_{o}")
            at_begin = cp.new_int_var(0, up[-1], f"at_begin_{j}_{o}")
            cp.add_element(v.end[j], down, at_end)
            cp.add_element(v.begin[j], up, at_begin)
            cp.add(v.ticks[j] == at_end - at_begin).only_enforce_if(on[o])
    for on, ticks in zip(v.on, v.ticks, strict=True):
        cp.add(ticks == 0).only_enforce_if([~each for each in on])


def take_the_slowest(model: ConstraintModel, instance: Instance, v: Variables) -> None:  # (4)
    """theta is the time of the slowest stage."""
    model.cp.add_max_equality(v.theta, v.ticks)


def place_the_slowest(model: ConstraintModel, instance: Instance, v: Variables) -> None:  # (5)
    """One stage is k*. It is slower than all others, up to `TIE` and the rounding of both."""
    cp = model.cp
    cp.add_exactly_one(v.slowest)
    cp.add(v.s == sum(j * slowest for j, slowest in enumerate(v.slowest)))
    tied = math.ceil(TIE * v.most) + 2
    for slowest, on, ticks in zip(v.slowest, v.on, v.ticks, strict=True):
        cp.add(ticks >= v.theta - tied).only_enforce_if(slowest)
        cp.add_at_least_one([*on, ~slowest])


def drain_again(model: ConstraintModel, instance: Instance, v: Variables) -> None:  # (6)
    """Stages behind k* take their time once more."""
    for j, (again, ticks) in enumerate(zip(v.again, v.ticks, strict=True)):
        behind = model.cp.new_bool_var(f"behind_{j}")
        model.cp.add(behind == sum(v.slowest[j + 1 :]))
        model.cp.add(again >= ticks).only_enforce_if(behind)


def stay_steady(model: ConstraintModel, instance: Instance, v: Variables) -> None:  # (7)
    """The steady phase and k* itself in T3 take theta N_b - 1 - s times."""
    batches = instance.data.micro_batches
    factors = (batches - 1 - v.s, v.theta)
    product = model.product("steady_ticks", factors, (batches, v.most), batches * v.most)
    model.cp.add(v.steady >= product)


def fit_memory(model: ConstraintModel, instance: Instance, v: Variables) -> None:  # (8)
    """States and the activations of the micro-batches in flight fit in the memory of a stage."""
    cp, layers = model.cp, instance.data.layers
    if instance.least_begins is None:
        return
    for j, tables in enumerate(instance.least_begins):
        for o, table in enumerate(tables):
            model.check()
            least = cp.new_int_var(0, layers, f"least_{j}_{o}")
            cp.add_element(v.end[j], table.tolist(), least)
            cp.add(v.begin[j] >= least).only_enforce_if(v.on[j][o])


def outlast_the_fastest(model: ConstraintModel, instance: Instance, v: Variables) -> None:  # (9)
    """Implied: no stages are faster together than all layers under their fastest options, nor is
    the slowest one faster than devices that share these layers at their highest speed."""
    model.cp.add(v.theta >= model.tick(instance.least_slowest * (1 - TIE)) - 2)
    rounded = 2 * instance.places
    model.cp.add(sum(v.ticks) >= model.tick(instance.work * (1 - TIE)) - rounded)


CONSTRAINTS = (
    cover_the_layers,
    keep_to_devices,
    read_the_clocks,
    take_the_slowest,
    place_the_slowest,
    drain_again,
    stay_steady,
    fit_memory,
    outlast_the_fastest,
)


def build(instance: Instance, start: Start | None, run: Run) -> tuple[ConstraintModel, Read]:
    """The model, and what reads its answers."""
    # The objective counts the seconds of k* at most N_b - 1 times beside those of every stage,
    # once or twice, and every stage has two roundings.
    passes = instance.data.micro_batches - 1 + instance.places
    largest = max(2 * passes * longest_stage(instance, start), instance.bound)
    totals = Totals(least=instance.bound, largest=largest, roundings=2 * passes, error=FINEST)
    model = ConstraintModel("ditto", run, totals)
    variables = make_variables(model, instance, start)
    for constrain in CONSTRAINTS:
        constrain(model, instance, variables)
    model.cp.minimize(sum(variables.ticks) + sum(variables.again) + variables.steady)
    if start is not None:
        hint(model, instance, start, variables)

    def read(answer: ModelAnswer) -> DittoDecision:
        options = []
        for on in variables.on:
            for option, chosen in zip(instance.options, on, strict=True):
                if answer.value(chosen):
                    options.append(option)
        begins = [answer.value(begin) for begin in variables.begin]
        return decision(instance.data, begins, options)

    return model, read


def hint(model: ConstraintModel, instance: Instance, start: Start, v: Variables) -> None:
    """The start, for CP-SAT to begin with."""
    for j, begin in enumerate(v.begin):
        model.cp.add_hint(begin, start.begins[j] if j < len(start.begins) else 0)
        for o, option in enumerate(instance.options):
            model.cp.add_hint(v.on[j][o], j < len(start.options) and start.options[j] is option)


def decision(data: DittoData, begins: list[int], options: list[Option]) -> DittoDecision:
    """The template of the stages at places 0, 1, …"""
    stages = []
    # `begins` has all places, `options` only those of stages, which are the first ones
    for end, begin, option in zip([data.layers, *begins], begins, options, strict=False):
        name = data.device_types[option.type].name
        stages.append(DittoStage(first=begin, last=end, type=name, devices=option.devices))
    return DittoDecision(stages=stages[::-1])


def formulate(data: DittoData, run: Run) -> Formulation[DittoDecision] | Outcome[DittoDecision]:
    """The model of an instance, or the outcome where there is no device at all."""
    instance = read_instance(data)
    if instance is None:
        return Outcome(stop=Stop.INFEASIBLE, message=NO_DEVICE)
    entries = 2 * instance.places * len(instance.options) * (data.layers + 1)
    require(
        entries <= MOST_ENTRIES,
        f"tables of {entries} entries are too large for CP-SAT",
        expected=f"at most {MOST_ENTRIES} (method exact takes more)",
        kind=UnsupportedError,
    )
    start = find_start(instance)
    return constraint_formulation(
        lambda: build(instance, start, run),
        infeasible="proven by CP-SAT: no template fits in memory",
        prior=PriorResult(
            bound=instance.bound,
            decision=None if start is None else decision(data, start.begins, start.options),
            objective=None if start is None else start.objective,
        ),
    )
