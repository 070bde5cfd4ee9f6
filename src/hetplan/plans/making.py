"""Plans of a workload, and the processes that a plan needs."""

from collections.abc import Iterable, Sequence
from typing import Any

from hetplan.errors import require
from hetplan.plans.plan import Plan, PlanDevice, PlanWorkload
from hetplan.profiling.workload import Workload


def common_fields(workload: PlanWorkload, devices: Iterable[tuple[str, int]]) -> dict[str, Any]:
    """The fields that all plan files of a workload on devices (type, node) have in common."""
    return {
        "name": f"{workload.model} on {workload.cluster}"[:200],
        "workload": workload,
        "devices": [PlanDevice(type=kind, node=node) for kind, node in devices],
    }


def new_plan(workload: Workload, replicas: Sequence[Any], **more: Any) -> Plan:
    """A plan for the workload. more: other fields of the plan file."""
    own = PlanWorkload(
        model=workload.model.name,
        cluster=workload.cluster.name,
        global_batch=workload.global_batch,
        sequence=workload.sequence,
        precision=workload.precision,
        framework=workload.framework.name,
        stack=workload.stack.name,
        layers=[layer.name for layer in workload.profile.layers],
    )
    common = common_fields(own, ((d.type, d.node) for d in workload.cluster.devices))
    return Plan.model_validate({**common, "replicas": list(replicas), **more})


def check_world(plan: Plan, world_size: int) -> None:
    """Raise InputError unless as many processes were started as the plan needs."""
    require(
        world_size == plan.world_size,
        "number of processes",
        where=plan.name,
        got=world_size,
        expected=f"{plan.world_size}, one per device",
    )
