"""Problem `astra` for CP-SAT: every type has slots for stages, and slots are filled with layers.

Sets   i in 0..M-1 types that can carry a stage; j in 0..S_i-1 slots of type i, one stage each.
Data   t_i(n) = n c_i + h_i seconds of a stage with n >= 1 layers, t_i(0) = 0; N layers; P stages;
       K micro-batches.
Vars   n[i, j] >= 0 layers in a slot;  used[i, j] in {0,1};  t[i, j] ticks of the slot;
       theta ticks of the slowest stage.
Min    sum_i,j t[i, j] + (K-1) theta,  s.t.
(1) sum_i,j used[i, j] = P, used[i, j] <=> n[i, j] >= 1                    `use_one_slot_per_stage`
(2) sum_i,j n[i, j] = N                                                    `place_all_layers`
(3) t[i, j] = t_i(n[i, j])                                element          `take_time`
(4) n[i, j] >= n[i, j+1]                                  symmetry         `sort_the_slots`
(5) theta = max_i t[i, 0]                                 maximum          `wait_for_the_slowest`
(6) n[i, j] = n[i, 0] where used[i, j]                    under a condition `one_number_per_type`
(7) P theta >= sum_i,j t[i, j]                            implied          `outlast_the_average`
(6) holds with equal layers per type. By (4) the first slot of a type is its slowest stage, and slot
j is one of j+1 with at least as many layers, which bounds n[i, j] (`most_layers`). So does a known
plan: numbers of layers that cost more in one stage alone are left out (`affordable`).
Source Astra, eq. 22-23.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from ortools.sat.python.cp_model import IntVar

from hetplan.formulations.astra.data import AstraData, AstraDecision, AstraStage, DeviceType
from hetplan.solvers.constraint_model import ConstraintModel
from hetplan.solvers.general import Formulation, PriorResult, constraint_formulation
from hetplan.solvers.model import ModelAnswer, Totals
from hetplan.solvers.run import Outcome, Run, Stop

# The most values that the variables n[i, j] have together. With more, CP-SAT finds no stages within
# minutes.
MOST_VALUES = 200_000
TOO_LARGE = (
    "too many slots and numbers of layers for CP-SAT's own constraints; the method exact does not "
    "need them"
)
# Share by which sums of seconds may differ from the evaluator's, which adds in another order.
ROUNDING = 1e-12

Read = Callable[[ModelAnswer], AstraDecision]  # the decision of an answer
Slot = tuple[int, int]  # (number of the type, number of the slot on it)


@dataclass(frozen=True)
class StageType:
    """A device type that can carry a stage."""

    name: str
    slots: int  # S_i, the most stages on its devices
    layers: int  # the most layers of one stage
    layer_seconds: float
    p2p_seconds: float

    def seconds(self, layers: int) -> float:
        """t_i: seconds of a stage with that many layers for one micro-batch."""
        return layers * self.layer_seconds + self.p2p_seconds if layers else 0.0


def stage_types(data: AstraData) -> list[StageType]:
    """The types that can carry a stage; none where there are fewer layers than stages."""
    types = []
    for device_type in data.device_types:
        slots = min(data.stages, device_type.max_devices // stage_devices(data))
        layers = most_layers_of_a_stage(data, device_type)
        if slots > 0 and layers > 0:
            types.append(
                StageType(
                    name=device_type.name,
                    slots=slots,
                    layers=layers,
                    layer_seconds=device_type.layer_seconds,
                    p2p_seconds=device_type.p2p_seconds,
                )
            )
    return types


def stage_devices(data: AstraData) -> int:
    """Devices that one stage occupies."""
    return data.data_parallel * data.tensor_parallel


def most_layers_of_a_stage(data: AstraData, device_type: DeviceType) -> int:
    """The most layers of a stage: the other stages have one layer at least."""
    most = data.layers - data.stages + 1
    return most if device_type.max_layers is None else min(most, device_type.max_layers)


def most_layers(data: AstraData, device_type: StageType, slot: int) -> int:
    """The most layers in a slot: the slots before it have no fewer, and each other stage has one
    layer at least."""
    others = max(0, data.stages - (slot + 1))
    return min(device_type.layers, (data.layers - others) // (slot + 1))


def infeasible_because(data: AstraData, types: list[StageType]) -> str | None:
    """The reason that counting finds why there is no decision; None where it finds none."""
    if data.stages > data.layers:
        return f"{data.stages} stages need at least one layer each, there are {data.layers}"
    slots = sum(device_type.slots for device_type in types)
    if slots < data.stages:
        return f"the devices (and max_layers) allow {slots} stages, {data.stages} are asked for"
    of_slots = [device_type.layers for device_type in types for _ in range(device_type.slots)]
    room = sum(sorted(of_slots, reverse=True)[: data.stages])
    if room < data.layers:
        return (
            f"max_layers leaves room for {room} layers in {data.stages} stages, "
            f"there are {data.layers}"
        )
    return None


def least_work(data: AstraData, types: list[StageType]) -> float:
    """A lower bound on the sum of all stages' seconds: all layers and transfers at the fastest
    type's pace."""
    layer = min(device_type.layer_seconds for device_type in types)
    transfer = min(device_type.p2p_seconds for device_type in types)
    return (data.layers * layer + data.stages * transfer) * (1 - ROUNDING)


def least_seconds(data: AstraData, work: float) -> float:
    """A lower bound on the objective: the slowest stage takes an even share of the least work."""
    return work + (data.micro_batches - 1) * work / data.stages


def even_seconds(data: AstraData, types: list[StageType]) -> float | None:
    """The objective of the plan that fills the slots of the fastest types, with numbers of layers
    that differ by one at most; None where the instance does not allow it."""
    fastest = sorted(types, key=lambda device_type: device_type.layer_seconds)
    slots = [device_type for device_type in fastest for _ in range(device_type.slots)]
    base, more = divmod(data.layers, data.stages)
    if data.equal_layers_per_type and more > 0:
        return None
    seconds = []
    for number, device_type in enumerate(slots[: data.stages]):
        layers = base + 1 if number < more else base
        if layers > device_type.layers:
            return None
        seconds.append(device_type.seconds(layers))
    return sum(seconds) + (data.micro_batches - 1) * max(seconds)


def affordable(
    data: AstraData, types: list[StageType], work: float, upper: float
) -> list[StageType]:
    """The types with no more layers per stage than a plan of `upper` seconds can have.

    A stage of t seconds makes the objective at least K t, since it is one of the summands and theta
    is no less than t. The objective is also at least (K-1) t and the least work.
    """
    passes = data.micro_batches
    kept = []
    for device_type in types:
        most = 0
        for layers in range(1, device_type.layers + 1):
            seconds = device_type.seconds(layers)
            if max(passes * seconds, (passes - 1) * seconds + work) > upper * (1 + ROUNDING):
                break
            most = layers
        if most > 0:
            kept.append(replace(device_type, layers=most))
    return kept


@dataclass(frozen=True)
class Variables:
    """The variables of the docstring."""

    layers: dict[Slot, IntVar]
    used: dict[Slot, IntVar]
    ticks: dict[Slot, IntVar]
    slowest: IntVar


def make_variables(model: ConstraintModel, data: AstraData, types: list[StageType]) -> Variables:
    """The variables with their domains."""
    cp, layers, used, ticks = model.cp, {}, {}, {}
    for i, device_type in enumerate(types):
        for j in range(device_type.slots):
            model.check()
            most, name = most_layers(data, device_type, j), f"{i}_{j}"
            layers[i, j] = cp.new_int_var(0, most, f"layers_{name}")
            used[i, j] = cp.new_bool_var(f"used_{name}")
            ticks[i, j] = model.time(f"ticks_{name}", device_type.seconds(most))
    return Variables(layers, used, ticks, model.time("slowest"))


def use_one_slot_per_stage(
    model: ConstraintModel, data: AstraData, types: list[StageType], v: Variables
) -> None:  # (1)
    """The number of slots with layers is the number of stages."""
    for slot, used in v.used.items():
        model.cp.add(v.layers[slot] >= 1).only_enforce_if(used)
        model.cp.add(v.layers[slot] == 0).only_enforce_if(~used)
    model.cp.add(sum(v.used.values()) == data.stages)


def place_all_layers(
    model: ConstraintModel, data: AstraData, types: list[StageType], v: Variables
) -> None:  # (2)
    """The slots hold all layers together."""
    model.cp.add(sum(v.layers.values()) == data.layers)


def take_time(
    model: ConstraintModel, data: AstraData, types: list[StageType], v: Variables
) -> None:  # (3)
    """A slot takes the ticks of its layers."""
    for i, device_type in enumerate(types):
        table = model.ticks([device_type.seconds(n) for n in range(device_type.layers + 1)])
        for j in range(device_type.slots):
            model.check()
            most = most_layers(data, device_type, j)
            model.cp.add_element(v.layers[i, j], table[: most + 1], v.ticks[i, j])


def sort_the_slots(
    model: ConstraintModel, data: AstraData, types: list[StageType], v: Variables
) -> None:  # (4)
    """Symmetry breaking: the layers of a type's slots descend."""
    for i, device_type in enumerate(types):
        for j in range(1, device_type.slots):
            model.cp.add(v.layers[i, j - 1] >= v.layers[i, j])


def wait_for_the_slowest(
    model: ConstraintModel, data: AstraData, types: list[StageType], v: Variables
) -> None:  # (5)
    """theta is the time of the slowest stage, which stands in the first slot of a type."""
    model.cp.add_max_equality(v.slowest, [v.ticks[i, 0] for i in range(len(types))])


def one_number_per_type(
    model: ConstraintModel, data: AstraData, types: list[StageType], v: Variables
) -> None:  # (6)
    """With equal layers per type, all stages of a type hold the same number of layers."""
    if not data.equal_layers_per_type:
        return
    for (i, j), used in v.used.items():
        if j > 0:
            model.cp.add(v.layers[i, j] == v.layers[i, 0]).only_enforce_if(used)


def outlast_the_average(
    model: ConstraintModel, data: AstraData, types: list[StageType], v: Variables
) -> None:  # (7)
    """Implied: the slowest stage is no faster than the average one."""
    model.cp.add(data.stages * v.slowest >= sum(v.ticks.values()))


CONSTRAINTS = (
    use_one_slot_per_stage,
    place_all_layers,
    take_time,
    sort_the_slots,
    wait_for_the_slowest,
    one_number_per_type,
    outlast_the_average,
)


def build(
    data: AstraData, types: list[StageType], least: float, run: Run
) -> tuple[ConstraintModel, Read]:
    """The model, and what reads its answers. least: a lower bound on the objective, in seconds."""
    passes = data.stages + data.micro_batches - 1  # stage times in one objective
    longest = max(device_type.seconds(device_type.layers) for device_type in types)
    totals = Totals(least=least, largest=passes * longest, roundings=passes)
    model = ConstraintModel("astra", run, totals)
    variables = make_variables(model, data, types)
    for constrain in CONSTRAINTS:
        constrain(model, data, types, variables)
    times = variables.ticks.values()
    slowest = variables.slowest
    model.cp.minimize(sum(times) + (data.micro_batches - 1) * slowest)

    def read(answer: ModelAnswer) -> AstraDecision:
        stages = []
        for (i, _), layers in variables.layers.items():
            if answer.value(layers) > 0:
                stages.append(AstraStage(type=types[i].name, layers=answer.value(layers)))
        return AstraDecision(stages=stages)

    return model, read


def formulate(data: AstraData, run: Run) -> Formulation[AstraDecision] | Outcome[AstraDecision]:
    """The model of an instance; the outcome where counting proves that there is no decision, or
    where the model would be too large."""
    types = stage_types(data)
    reason = infeasible_because(data, types)
    if reason is not None:
        return Outcome(stop=Stop.INFEASIBLE, message=reason)
    work = least_work(data, types)
    least = least_seconds(data, work)
    upper = even_seconds(data, types)
    if upper is not None:
        types = affordable(data, types, work, upper)
    values = sum(most_layers(data, each, slot) for each in types for slot in range(each.slots))
    if values > MOST_VALUES:
        return Outcome(stop=Stop.LIMIT, bound=least, message=TOO_LARGE)
    return constraint_formulation(
        lambda: build(data, types, least, run),
        infeasible="proven by CP-SAT: no slots on these devices hold all layers",
        prior=PriorResult(bound=least),
    )
