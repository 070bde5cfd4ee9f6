"""Checks for plans that `hetplan run` cannot execute. They need no torch: the planner calls them
when it makes a plan, and the runtime before it starts a process."""

from hetplan.errors import UnsupportedError, require
from hetplan.plans.plan import Plan
from hetplan.profiling.models.model import Model
from hetplan.profiling.models.transformer import Transformer


def check_shape(shape: Transformer) -> None:
    """Raise UnsupportedError for a transformer with features that hetplan's own torch layers do not
    compute."""
    lacking = {
        "latent attention": shape.latent is not None,
        "norms of queries and keys": shape.qk_norm != "none",
        f"{shape.block_norms} norms in a block": shape.block_norms != 2,
        "windows in some blocks only": bool(shape.full_every),
        "experts": shape.experts is not None,
        "attention sinks": shape.sinks,
    }
    names = [name for name, in_shape in lacking.items() if in_shape] + shape.rare_features
    require(
        not names,
        f"hetplan's own layers have no {', '.join(names)}: run the module itself by --factory",
        kind=UnsupportedError,
    )


def check_executed(plan: Plan) -> None:
    """Raise UnsupportedError for a plan with narrow products, and for the first of its further
    degrees that the runtime does not execute. `Degrees.overlap` is no reason: the runtime itself
    chooses the communication that runs beside computation."""
    degrees, narrow = plan.degrees, plan.workload.narrow
    require(
        not narrow, f"`hetplan run` has no {narrow}",
        where=plan.name, expected="hetplan export", kind=UnsupportedError,
    )  # fmt: skip
    if degrees is None:
        return
    tensor_degrees = {len(stage.tensor_shares) for r in plan.replicas for stage in r.stages}
    # without a number all layers are recomputed, one by one
    together = degrees.recompute_method == "uniform" and (degrees.recompute_layers or 1) > 1
    unequal_shards = degrees.shard_groups > 1 and plan.zero_shares is not None
    spread = degrees.expert > 1
    divides_tokens = degrees.context > 1 or degrees.sequence_parallel
    # feature that the runtime lacks -> (whether the plan needs it, what the runtime has instead)
    lacking = {
        "divided tokens between stages of different tensor degrees": (
            degrees.sequence_parallel and len(tensor_degrees) > 1, "one tensor degree",
        ),
        "experts over ranks that divide tokens": (
            spread and divides_tokens, "context 1, no sequence parallelism",
        ),
        "experts in tensor parts": (spread and degrees.expert_tensor > 1, "expert tensor 1"),
        "experts over replicas whose passes differ": (
            spread and not same_passes(plan), "equal stages and micro-batches",
        ),
        "layers that are computed again together": (together, "one by one"),
        "optimizer states on the host": (degrees.offloaded > 0, "states on the devices"),
        "groups of unequal shards": (unequal_shards, "no zero_shares"),
    }  # fmt: skip
    for feature, (needed, alternative) in lacking.items():
        require(
            not needed, f"`hetplan run` has no {feature}", where=plan.name, got=degrees.text,
            expected=f"{alternative}, or hetplan export", kind=UnsupportedError,
        )  # fmt: skip


def same_passes(plan: Plan) -> bool:
    """Whether all replicas have the same stages, and samples in the same micro-batches."""
    passes = []
    for replica in plan.replicas:
        stages = [(stage.layers, len(stage.tensor_shares)) for stage in replica.stages]
        has_samples = [b.samples > 0 for b in replica.micro_batches for _ in range(b.count)]
        passes.append((stages, has_samples))
    return all(of_replica == passes[0] for of_replica in passes)


def check_own_layers(plan: Plan, model: Model) -> None:
    """Raise UnsupportedError for a plan of stages that hetplan's own torch layers cannot run, so
    that the user has to give a module of their own."""
    check_executed(plan)
    check_whole_tokens(plan)
    if model.spec.shape is None or model.sequence is None:
        raise UnsupportedError(
            f"{model.name} has no torch layers here; name your own by --factory module:function"
        )
    check_shape(model.spec.shape)


def check_own_program(plan: Plan) -> None:
    """Raise UnsupportedError for an SPMD plan that hetplan cannot run with the program that it
    writes for the model, so that the user has to give a program of their own."""
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
    """Raise UnsupportedError for a plan that divides tokens, by context or by sequence
    parallelism."""
    degrees = plan.degrees
    require(
        degrees is None or (degrees.context == 1 and not degrees.sequence_parallel),
        "hetplan's own layers do not divide tokens: run the module itself by --factory",
        where=plan.name,
        got=degrees and degrees.text,
        kind=UnsupportedError,
    )
