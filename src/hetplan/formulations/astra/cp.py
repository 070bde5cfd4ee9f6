"""Problem `astra` for CP-SAT: every stage has a kind, and elements of tables say what kinds mean.

Sets   s in 0..P-1 stages; q in 0..Q-1 kinds of stage, a type and a number of layers; i types.
Data   type_q, layers_q >= 1, seconds_q = layers_q c + h of its type; most_i stages on type i;
       N layers; K micro-batches.
Vars   kind_s in 0..Q-1;  n_s layers and t_s ticks of stage s;  theta ticks of the slowest stage;
       on[s, i] in {0,1}: stage s is of type i;  with equal layers per type also number_i layers.
Min    sum_s t_s + (K-1) theta,  s.t.
(1) n_s = layers_(kind_s), t_s = seconds_(kind_s)       element           `know_what_kinds_mean`
(2) sum_s n_s = N                                                         `place_all_layers`
(3) on[s, i] <=> kind_s is of type i, sum_s on[s, i] <= most_i            `keep_to_devices`
(4) theta = max_s t_s                                   maximum           `take_the_slowest`
(5) n_s = number_i where on[s, i]                       under a condition `one_number_per_type`
(6) kind_s <= kind_(s+1)                                symmetry          `sort_the_stages`
(7) P theta >= sum_s t_s                                implied           `outlast_the_average`
(6) loses nothing, since the order of the stages does not change the objective.
Source Astra, eq. 22-23.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from ortools.sat.python.cp_model import IntVar

from hetplan.formulations.astra.data import AstraData, AstraDecision, AstraStage, DeviceType
from hetplan.solvers.constraint_model import ConstraintModel
from hetplan.solvers.general import Formulation
from hetplan.solvers.model import ModelAnswer, Totals
from hetplan.solvers.run import Outcome, Run, Stop

NO_STAGE = "no device type can carry a stage, or there are fewer layers than stages"


@dataclass(frozen=True)
class Kind:
    """One kind of stage."""

    type: int  # number of its device type in the instance
    layers: int
    seconds: float  # of one micro-batch


def kinds_of(data: AstraData) -> list[Kind]:
    """All kinds of stage that the instance allows, by type and number of layers."""
    most_layers = data.layers - data.stages + 1  # the other stages have a layer each
    kinds = []
    for i, device_type in enumerate(data.device_types):
        if most_stages(data, device_type) == 0:
            continue
        most = most_layers
        if device_type.max_layers is not None:
            most = min(most, device_type.max_layers)
        for layers in range(1, most + 1):
            seconds = layers * device_type.layer_seconds + device_type.p2p_seconds
            kinds.append(Kind(i, layers, seconds))
    return kinds


def most_stages(data: AstraData, device_type: DeviceType) -> int:
    """The most stages that the devices of a type can carry."""
    return device_type.max_devices // (data.data_parallel * data.tensor_parallel)


@dataclass(frozen=True)
class Variables:
    """The variables, by stage."""

    kind: list[IntVar]
    layers: list[IntVar]
    ticks: list[IntVar]
    slowest: IntVar
    on: dict[tuple[int, int], IntVar]  # (stage, type)


def make_variables(model: ConstraintModel, data: AstraData, kinds: list[Kind]) -> Variables:
    """The variables of the docstring."""
    cp, stages = model.cp, range(data.stages)
    types = sorted({kind.type for kind in kinds})
    return Variables(
        kind=[cp.new_int_var(0, len(kinds) - 1, f"kind_{s}") for s in stages],
        layers=[cp.new_int_var(1, data.layers, f"layers_{s}") for s in stages],
        ticks=[model.time(f"ticks_{s}") for s in stages],
        slowest=model.time("slowest"),
        on={(s, i): cp.new_bool_var(f"on_{s}_{i}") for s in stages for i in types},
    )


def know_what_kinds_mean(
    model: ConstraintModel, data: AstraData, kinds: list[Kind], v: Variables
) -> None:  # (1)
    """The layers and ticks of a stage are those of its kind."""
    layers = [kind.layers for kind in kinds]
    ticks = model.ticks([kind.seconds for kind in kinds])
    for s in range(data.stages):
        model.cp.add_element(v.kind[s], layers, v.layers[s])
        model.cp.add_element(v.kind[s], ticks, v.ticks[s])


def place_all_layers(
    model: ConstraintModel, data: AstraData, kinds: list[Kind], v: Variables
) -> None:  # (2)
    """The stages hold all layers together."""
    model.cp.add(sum(v.layers) == data.layers)


def keep_to_devices(
    model: ConstraintModel, data: AstraData, kinds: list[Kind], v: Variables
) -> None:  # (3)
    """No type carries more stages than it has device groups."""
    types = [kind.type for kind in kinds]
    for s in range(data.stages):
        type_of_stage = model.cp.new_int_var(0, len(data.device_types) - 1, f"type_{s}")
        model.cp.add_element(v.kind[s], types, type_of_stage)
        for i in dict.fromkeys(types):
            model.cp.add(type_of_stage == i).only_enforce_if(v.on[s, i])
            model.cp.add(type_of_stage != i).only_enforce_if(~v.on[s, i])
    for i in dict.fromkeys(types):
        stages = sum(v.on[s, i] for s in range(data.stages))
        model.cp.add(stages <= most_stages(data, data.device_types[i]))


def take_the_slowest(
    model: ConstraintModel, data: AstraData, kinds: list[Kind], v: Variables
) -> None:  # (4)
    """theta is the time of the slowest stage."""
    model.cp.add_max_equality(v.slowest, v.ticks)


def one_number_per_type(
    model: ConstraintModel, data: AstraData, kinds: list[Kind], v: Variables
) -> None:  # (5)
    """With equal layers per type, all stages of a type hold the same number of layers."""
    if not data.equal_layers_per_type:
        return
    for i in dict.fromkeys(kind.type for kind in kinds):
        number = model.cp.new_int_var(1, data.layers, f"number_{i}")
        for s in range(data.stages):
            model.cp.add(v.layers[s] == number).only_enforce_if(v.on[s, i])


def sort_the_stages(
    model: ConstraintModel, data: AstraData, kinds: list[Kind], v: Variables
) -> None:  # (6)
    """Symmetry breaking: the kinds of the stages ascend."""
    for one, other in pairwise(v.kind):
        model.cp.add(one <= other)


def outlast_the_average(
    model: ConstraintModel, data: AstraData, kinds: list[Kind], v: Variables
) -> None:  # (7)
    """Implied: the slowest stage is no faster than the average one."""
    model.cp.add(data.stages * v.slowest >= sum(v.ticks))


CONSTRAINTS = (
    know_what_kinds_mean,
    place_all_layers,
    keep_to_devices,
    take_the_slowest,
    one_number_per_type,
    sort_the_stages,
    outlast_the_average,
)


def build(data: AstraData, kinds: list[Kind], run: Run) -> tuple[ConstraintModel, Variables]:
    """The model and its variables."""
    seconds = np.array([kind.seconds for kind in kinds])
    passes = data.stages + data.micro_batches - 1  # stage times in one objective
    totals = Totals(
        least=passes * float(seconds.min()),
        largest=passes * float(seconds.max()),
        roundings=passes,
    )
    model = ConstraintModel("astra", run, totals)
    variables = make_variables(model, data, kinds)
    for constrain in CONSTRAINTS:
        constrain(model, data, kinds, variables)
    model.cp.minimize(sum(variables.ticks) + (data.micro_batches - 1) * variables.slowest)
    return model, variables


def formulate(data: AstraData, run: Run) -> Formulation[AstraDecision] | Outcome[AstraDecision]:
    """The model of an instance; the outcome where no stage is possible at all."""
    kinds = kinds_of(data)
    if not kinds:
        return Outcome(stop=Stop.INFEASIBLE, message=NO_STAGE)
    made: list[Variables] = []  # by `build`, for `read`

    def build_model() -> ConstraintModel:
        model, variables = build(data, kinds, run)
        made.append(variables)
        return model

    def read(answer: ModelAnswer) -> AstraDecision:
        stages = [kinds[answer.value(kind)] for kind in made[-1].kind]
        return AstraDecision(
            stages=[
                AstraStage(type=data.device_types[stage.type].name, layers=stage.layers)
                for stage in stages
            ]
        )

    return Formulation(
        build=build_model,
        read=read,
        infeasible="proven by CP-SAT: no kinds of stages hold all layers on these devices",
    )
