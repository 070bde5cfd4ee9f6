"""Exports plans to other frameworks, as configurations or start scripts.

An exporter writes everything that its framework can express. It refuses a plan that uses anything
else, and the error names that feature.
"""

from collections.abc import Callable

from hetplan.adapters.exports import documents, scripts
from hetplan.adapters.exports.grid import Grid
from hetplan.errors import look_up
from hetplan.plans.plan import Plan
from hetplan.profiling.models.model import find_model
from hetplan.profiling.models.transformer import Transformer
from hetplan.profiling.models.zoo import BUILT_IN

# Framework -> the function of a plan and the model's shape (None: unknown) that writes its text.
# Functions that write no figures of the model ignore the shape.
EXPORTERS: dict[str, Callable[[Plan, Transformer | None], str]] = {
    "megatron": scripts.megatron,
    "bridge": documents.bridge,
    "deepspeed": documents.deepspeed,
    "torchtitan": documents.torchtitan,
    "flagscale": documents.flagscale,
    "torchrun": scripts.torchrun,
}


def export(plan: Plan, to: str, model: str | None = None) -> str:
    """The text of the configuration or script with which a framework runs the plan.

    It includes the model's figures where they are known and the framework can express them.
    to: the framework, a key of `EXPORTERS`. model: the name or the file of the plan's model; None:
    as the plan gives it. Raises InputError for an unknown name, and UnsupportedError for a plan
    that the framework cannot express.
    """
    exporter = look_up("unknown framework", to, EXPORTERS)
    Grid(plan, to).refuse(
        plan.program is not None and to != "torchrun",
        "SPMD programs",
        "the program: which tensors are sliced, and every collective",
    )
    shape = shape_of(plan, model)
    if shape is not None and not expressible(shape):
        shape = None
    return exporter(plan, shape)


def shape_of(plan: Plan, model: str | None) -> Transformer | None:
    """The shape of the model named `model`, or of the plan's model where `model` is None.

    A plan file may carry its model; otherwise the plan names it, and the shape is known if that
    model is built in. None: the shape is unknown, or the model is no transformer.
    """
    if model is not None:
        return find_model(model).shape
    if plan.inputs is not None:
        return plan.inputs.model.transformer()
    name = plan.workload.model
    return BUILT_IN[name].shape if name in BUILT_IN else None


def expressible(shape: Transformer) -> bool:
    """Whether Megatron's arguments can describe the model: blocks with two norms each, between an
    embedding and a language model's head."""
    return (
        shape.head == "lm"
        and shape.block_norms == 2
        and shape.final_norm
        and not shape.embedding_norm
        and shape.embedding_width is None
        and not shape.rare_features
    )
