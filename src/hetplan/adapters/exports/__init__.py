"""Exports plans to other frameworks, as configurations or start scripts.

An exporter writes everything that its framework can express. It refuses a plan that uses anything
else, and the error names that feature.
"""

from collections.abc import Callable
from dataclasses import replace

from hetplan.adapters.exports import documents, hugging_face, scripts, titan
from hetplan.adapters.exports.grid import Grid
from hetplan.errors import look_up, require
from hetplan.plans.plan import Plan
from hetplan.profiling.models.model import find_model
from hetplan.profiling.models.transformer import Transformer
from hetplan.profiling.models.zoo import BUILT_IN

# Framework -> the function of a plan, the model's shape (None: unknown) and whether the model's own
# settings are to be written, that writes its text. Functions that write none ignore the latter two.
EXPORTERS: dict[str, Callable[..., str]] = {
    "megatron": scripts.megatron,
    "bridge": documents.bridge,
    "deepspeed": documents.deepspeed,
    "torchtitan": titan.torchtitan,
    "flagscale": documents.flagscale,
    "device-map": hugging_face.device_map,
    "accelerate": hugging_face.accelerate,
    "torchrun": scripts.torchrun,
}

# Frameworks that build the model themselves, from settings that say nothing of adapters.
WITHOUT_ADAPTERS = ("megatron", "bridge", "torchtitan", "flagscale")


def export(plan: Plan, to: str, model: str | None = None, *, with_model: bool = True) -> str:
    """The text of the configuration or script with which a framework runs the plan.

    It includes the settings of the model where the framework builds the model from them.
    to: the framework, a key of `EXPORTERS`. model: the name or the file of the plan's model; None:
    as the plan gives it. with_model: whether to write the settings of the model. Raises InputError
    for an unknown name and for a model with another number of blocks, and UnsupportedError for a
    plan, or a model, that the framework cannot express.
    """
    exporter = look_up("unknown framework", to, EXPORTERS)
    Grid(plan, to).refuse(
        plan.program is not None and to != "torchrun",
        "SPMD programs",
        "the program: which tensors are sliced, and every collective",
    )
    shape = shape_of(plan, model)
    Grid(plan, to).refuse(
        shape is not None and shape.adapters is not None and to in WITHOUT_ADAPTERS,
        "adapters beside frozen weights",
        "which weights are trained",
        "--to device-map, accelerate, deepspeed or torchrun",
    )
    layers = len(plan.workload.layers)
    require(
        shape is None or layers == shape.layers + 2,  # with the embedding and the head
        "the model has another number of blocks than the plan",
        where=model or plan.name,
        got=None if shape is None else shape.layers,
        expected=f"{layers - 2}",
    )
    if to == "device-map":
        return exporter(plan, shape, model=with_model, kind=kind_of(plan, model))
    return exporter(plan, shape, model=with_model)


def model_left_out(plan: Plan, to: str, model: str | None = None) -> str | None:
    """Why an export without `with_model=False` has no settings of the model although the framework
    builds the model from them; None where it has them, or the framework needs none."""
    if to not in WITHOUT_ADAPTERS:
        return None
    return Grid(plan, to, shape_of(plan, model)).missing


def kind_of(plan: Plan, model: str | None) -> str:
    """Hugging Face's `model_type` of the model named `model`, or of the plan's model where `model`
    is None; empty where it is unknown."""
    if model is not None:
        return find_model(model).model_type
    if plan.inputs is not None:
        return plan.inputs.model.model_type
    name = plan.workload.model
    return BUILT_IN[name].model_type if name in BUILT_IN else ""


def shape_of(plan: Plan, model: str | None) -> Transformer | None:
    """The shape of the model named `model`, or of the plan's model where `model` is None.

    A plan file may carry its model; otherwise the plan names it, and the shape is known if that
    model is built in. None: the shape is unknown, or the model is no transformer.
    """
    if model is not None:
        return find_model(model).shape
    name = plan.workload.model
    built_in = BUILT_IN[name].shape if name in BUILT_IN else None
    carried = None if plan.inputs is None else plan.inputs.model.transformer()
    if plan.inputs is None:
        return built_in
    # Plans of earlier versions carry the sizes of their model alone.
    if built_in is not None and carried == replace(built_in, function=None):
        return built_in
    return carried
