"""Refusals of plans that `hetplan run` cannot execute, known without torch: the planner gives them
when it makes a plan, the runtime before a process starts."""

from hetplan.errors import UnsupportedError, require
from hetplan.plans.plan import Plan
from hetplan.profiling.models.model import Model
from hetplan.profiling.models.transformer import Transformer


def check_shape(shape: Transformer) -> None:
    """Raise UnsupportedError for what hetplan's own layers do not compute."""
    lacking = {
        "latent attention": shape.latent is not None,
        "norms of queries and keys": shape.qk_norm != "none",
        f"{shape.block_norms} norms in a block": shape.block_norms != 2,
        "windows in some blocks only": bool(shape.full_every),
        "experts": shape.experts is not None,
    }
    names = [name for name, lacks in lacking.items() if lacks]
    require(
        not names,
        f"hetplan's own layers have no {', '.join(names)}: run the module itself by --factory",
        kind=UnsupportedError,
    )


def check_executed(plan: Plan) -> None:
    """Raise UnsupportedError for the first of a plan's degrees that the runtime does not execute.
    What overlaps what is the runtime's own choice."""
    degrees, narrow = plan.degrees, plan.workload.narrow
    require(
        not narrow, f"`hetplan run` has no {narrow}",
        where=plan.name, expected="hetplan export", kind=UnsupportedError,
    )  # fmt: skip
    if degrees is None:
        return
    widths = {len(stage.tensor_shares) for r in plan.replicas for stage in r.stages}
    together = degrees.recompute_method == "uniform" and (degrees.recompute_layers or 1) > 1
    unequal = degrees.shard_groups > 1 and plan.zero_shares is not None
    apart = degrees.expert > 1 and not same_passes(plan)
    divided = degrees.context > 1 or degrees.sequence_parallel
    lacking = {
        "divided tokens between stages of different tensor degrees": (
            degrees.sequence_parallel and len(widths) > 1, "one tensor degree",
        ),
        "experts over ranks that divide tokens": (
            degrees.expert > 1 and divided, "context 1, no sequence parallelism",
        ),
        "experts in tensor parts": (degrees.expert > 1 < degrees.expert_tensor, "expert tensor 1"),
        "experts over replicas whose passes differ": (apart, "equal stages and micro-batches"),
        "layers that are computed again together": (together, "one by one"),
        "optimizer states on the host": (degrees.offloaded > 0, "states on the devices"),
        "groups of unequal shards": (unequal, "no zero_shares"),
    }  # fmt: skip
    for what, (lacks, expected) in lacking.items():
        require(
            not lacks, f"`hetplan run` has no {what}", where=plan.name, got=degrees.text,
            expected=f"{expected}, or hetplan export", kind=UnsupportedError,
        )  # fmt: skip


def same_passes(plan: Plan) -> bool:
    """Whether all replicas have the same stages, and samples in the same micro-batches."""
    passes = [
        (
            [(stage.layers, len(stage.tensor_shares)) for stage in replica.stages],
            [b.samples > 0 for b in replica.micro_batches for _ in range(b.count)],
        )
        for replica in plan.replicas
    ]
    return all(own == passes[0] for own in passes)


def check_own_layers(plan: Plan, model: Model) -> None:
    """Raise UnsupportedError where hetplan cannot run a plan of stages of a described model without
    a module of the user's."""
    check_executed(plan)
    check_whole_tokens(plan)
    if model.spec.shape is None or model.sequence is None:
        raise UnsupportedError(
            f"{model.name} has no torch layers here; name your own by --factory module:function"
        )
    check_shape(model.spec.shape)


def check_own_program(plan: Plan) -> None:
    """Raise UnsupportedError where hetplan cannot run an SPMD plan without a program of the
    user's."""
    check_executed(plan)
    check_whole_tokens(plan)
    require(
        plan.workload.precision == "fp32",
        "SPMD programs are computed in fp32",
        where=plan.name,
        got=plan.workload.precision,
        expected="--virtual, a plan for fp32, or --factory with a program",
        kind=UnsupportedError,
    )


def check_whole_tokens(plan: Plan) -> None:
    """Raise UnsupportedError for a plan that divides tokens."""
    degrees = plan.degrees
    require(
        degrees is None or (degrees.context == 1 and not degrees.sequence_parallel),
        "hetplan's own layers do not divide tokens: run the module itself by --factory",
        where=plan.name,
        got=degrees and degrees.text,
        kind=UnsupportedError,
    )
