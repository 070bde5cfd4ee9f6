"""Plans in the words of other frameworks: what each can say is written, what it cannot is refused
by name."""

from collections.abc import Callable

from hetplan.adapters.exports import documents, scripts
from hetplan.adapters.exports.grid import Grid
from hetplan.errors import look_up
from hetplan.plans.plan import Plan
from hetplan.profiling.models.model import find_model
from hetplan.profiling.models.transformer import Transformer
from hetplan.profiling.models.zoo import BUILT_IN

EXPORTERS: dict[str, Callable[[Plan, Transformer | None], str]] = {
    "megatron": scripts.megatron,
    "bridge": documents.bridge,
    "deepspeed": documents.deepspeed,
    "torchtitan": documents.torchtitan,
    "flagscale": documents.flagscale,
    "torchrun": scripts.torchrun,
}


def export(plan: Plan, to: str, model: str | None = None) -> str:
    """The plan as `to` reads it, with the figures of its model where that is known. model: name or
    file, None for the plan's own. Raises InputError for an unknown name, UnsupportedError for what
    `to` cannot say."""
    exporter = look_up("unknown framework", to, EXPORTERS)
    Grid(plan, to).refuse(
        plan.program is not None and to != "torchrun",
        "SPMD programs",
        "the program: which tensors are sliced, and every collective",
    )
    shape = shape_of(plan, model)
    return exporter(plan, shape if shape is not None and sayable(shape) else None)


def shape_of(plan: Plan, model: str | None) -> Transformer | None:
    """The shape of a named model, else of the plan's own, which it carries or which is built in;
    None where it is not known or not a transformer."""
    if model is not None:
        return find_model(model).shape
    if plan.inputs is not None:
        return plan.inputs.model.transformer()
    name = plan.workload.model
    return BUILT_IN[name].shape if name in BUILT_IN else None


def sayable(shape: Transformer) -> bool:
    """Whether Megatron's arguments describe the model: blocks of two norms between an embedding and
    a language model's head."""
    return (
        shape.head == "lm"
        and shape.block_norms == 2
        and shape.final_norm
        and not shape.embedding_norm
        and shape.embedding_width is None
    )
