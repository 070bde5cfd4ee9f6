"""Makes the plan of a workload, gives the workload and the model of a plan, and checks the number
of processes that run a plan."""

from collections.abc import Iterable, Sequence
from typing import Any

from hetplan.errors import InputError, require
from hetplan.plans.plan import Plan, PlanDevice, PlanWorkload
from hetplan.profiling.inputs.inputs import Inputs, Named, Replaced
from hetplan.profiling.models.model import Model, load_model
from hetplan.profiling.workload import Workload


def common_fields(workload: PlanWorkload, devices: Iterable[tuple[str, int]]) -> dict[str, Any]:
    """The fields that all plan files of a workload have in common. devices: (type, node) of each
    device of the cluster."""
    return {
        "name": f"{workload.model} on {workload.cluster}"[:200],
        "workload": workload,
        "devices": [PlanDevice(type=kind, node=node) for kind, node in devices],
    }


def new_plan(workload: Workload, replicas: Sequence[Any], **more: Any) -> Plan:
    """A plan for the workload. replicas: the field of this name. more: the other fields of the plan
    file that differ from their defaults."""
    stated = PlanWorkload(
        model=workload.model.name,
        cluster=workload.cluster.name,
        global_batch=workload.global_batch,
        sequence=workload.sequence,
        precision=workload.precision,
        framework=workload.framework.name,
        stack=workload.stack.name,
        layers=[layer.name for layer in workload.profile.layers],
    )
    common = common_fields(stated, ((d.type, d.node) for d in workload.cluster.devices))
    return Plan.model_validate({**common, "replicas": list(replicas), **more})


def with_inputs(plan: Plan, inputs: Inputs | None) -> Plan:
    """The plan with its field `inputs` set: the workload that it was made for."""
    return plan.model_copy(update={"inputs": inputs})


def workload_of(plan: Plan, where: str | None = None, replaced: Replaced | None = None) -> Workload:
    """The workload in a plan's field `inputs`.

    where: the plan's file, for messages. replaced: parts of the workload that take the place of
    those in the plan. Raises InputError for a plan without inputs, and where the parts do not fit
    together.
    """
    where = where or plan.name
    if plan.inputs is None:
        raise InputError("the plan does not carry the workload that it was made for", where=where)
    return plan.inputs.workload(named_by(plan, where), replaced or Replaced())


def named_by(plan: Plan, where: str) -> Named:
    """The names and sizes that the plan's field `workload` states and its field `inputs` lacks.
    Both fields together give the workload. where: the plan's file, for messages."""
    stated = plan.workload
    return Named(
        where=where,
        model=stated.model,
        cluster=stated.cluster,
        global_batch=stated.global_batch,
        sequence=stated.sequence,
        precision=stated.precision,
        layers=stated.layers,
    )


def model_of(plan: Plan, name: str | None = None) -> Model:
    """The model of a plan. Raises InputError.

    name: a name or a file of a model in place of the plan's. None: the model in the plan's inputs;
    for a plan without inputs the built-in model of the name that the plan states.
    """
    if name is None and plan.inputs is not None:
        return plan.inputs.model_of(named_by(plan, plan.name))
    stated = plan.workload
    return load_model(name or stated.model, sequence=stated.sequence, precision=stated.precision)


def check_world(plan: Plan, world_size: int) -> None:
    """Raise InputError unless the number of started processes, `world_size`, is the plan's."""
    require(
        world_size == plan.world_size,
        "number of processes",
        where=plan.name,
        got=world_size,
        expected=f"{plan.world_size}, one per device",
    )
