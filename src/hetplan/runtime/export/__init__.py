"""Plans in the words of other frameworks: what each can say is written, what it cannot is refused
by name."""

from collections.abc import Callable

from hetplan.errors import look_up
from hetplan.formulations.joint.plan import Plan
from hetplan.runtime.export import documents, scripts
from hetplan.runtime.export.grid import refuse

EXPORTERS: dict[str, Callable[[Plan], str]] = {
    "megatron": scripts.megatron,
    "deepspeed": documents.deepspeed,
    "torchtitan": documents.torchtitan,
    "flagscale": documents.flagscale,
    "torchrun": scripts.torchrun,
}


def export(plan: Plan, to: str) -> str:
    """The plan as `to` reads it. Raises InputError for an unknown name, UnsupportedError for what
    `to` cannot say."""
    exporter = look_up("unknown framework", to, EXPORTERS)
    if plan.program is not None and to != "torchrun":
        lost = "the program: which tensors are sliced, and every collective"
        raise refuse(plan, to, "SPMD programs", lost)
    return exporter(plan)
