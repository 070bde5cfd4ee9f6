"""The parameter space of Astra's Table 3, and the table of its strategies.

A row is a base (degrees, micro-batch) times an option (interleaving, sequence parallelism,
optimizer, recomputation, offload). Rules over base columns alone are applied to the bases, rules
over the pipeline size and options to the options of each pipeline size, all to the joined rows: the
same rows survive, far fewer are made.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

import numpy as np

from hetplan.errors import require, unknown_name
from hetplan.formulations.astra.search.rules import Column, Rule, Table, dropped
from hetplan.formulations.astra.search.table import (
    BASE,
    CONSTANTS,
    DERIVED,
    EXCHANGES,
    FLAGS,
    GRANULARITIES,
    METHODS,
    NONE,
    OPTIONS,
    VOCABULARY,
    Columns,
    Strategies,
    nothing,
)
from hetplan.profiling.profiles.profile import Profile
from hetplan.replays.facts import ModelFacts


@dataclass(frozen=True)
class Space:
    """Which values each parameter may take; None: the whole range of Table 3 for the model at hand.

    pipeline, tensor: degrees, 1..N layers and 1..number of heads. micro_batch: 1..M, M = 8 by
    default. virtual: layers per virtual stage, 1..pipeline degree, beside "not interleaved".
    recompute_layers:
    1..layers per stage. interleaving: whether virtual stages are tried at all. expert: 1..number of
    experts. offload: whether optimizer states may move to the host where they do not fit. overlap:
    communication overlapped wherever Megatron-LM can. Beyond the paper: context: degrees of context
    parallelism. exchange: how context ranks meet in attention: keys and values go round a ring
    (p2p; Liu et al. 2023), or all ranks exchange tokens for heads (a2a; Jacobs et al. 2023).
    whole_experts: whether tensor ranks hold whole experts (expert-tensor degree 1).
    fsdp: whether weights, gradients and optimizer states are sharded over data and context ranks.
    shard_groups: into so many groups those ranks divide, each with all shards (HSDP). uneven:
    whether a stage may hold a layer less than the largest.
    """

    pipeline: tuple[int, ...] | None = None
    tensor: tuple[int, ...] | None = None
    micro_batch: tuple[int, ...] = tuple(range(1, 9))
    expert: tuple[int, ...] | None = None
    context: tuple[int, ...] = (1,)
    exchange: tuple[str, ...] = EXCHANGES[:1]
    whole_experts: tuple[bool, ...] = (False,)
    fsdp: tuple[bool, ...] = (False,)
    shard_groups: tuple[int, ...] = (1,)
    uneven: bool = False
    virtual: tuple[int, ...] | None = None
    interleaving: bool = True
    sequence_parallel: tuple[bool, ...] = (False, True)
    distributed_optimizer: tuple[bool, ...] = (False, True)
    recompute: tuple[str | None, ...] = (None, *GRANULARITIES)
    recompute_method: tuple[str, ...] = METHODS
    recompute_layers: tuple[int, ...] | None = None
    no_overlap_offload: tuple[bool, ...] = (True, False)
    offload: bool = True
    overlap: bool = True

    def __post_init__(self) -> None:
        for name in (
            "pipeline", "tensor", "micro_batch", "expert", "virtual", "context", "recompute_layers",
            "shard_groups",
        ):  # fmt: skip
            values = getattr(self, name)
            require(
                values is None or (values and min(values) >= 1),
                f"values of {name}",
                got=values,
                expected="at least one, each 1 or more",
            )
        for of, words, known in (
            ("kind of recomputation", self.recompute, (None, *GRANULARITIES)),
            ("method of recomputation", self.recompute_method, METHODS),
            ("exchange of context ranks", self.exchange, EXCHANGES),
        ):
            for word in (word for word in words if word not in known):
                raise unknown_name(f"unknown {of}", str(word), [name or "none" for name in known])

    def recomputations(self, stage_layers: int) -> list[tuple[int, int, int]]:
        """All (granularity, method, layers), as indices and numbers with NONE, for stages of that
        many layers."""
        counts = self.recompute_layers or tuple(range(1, stage_layers + 1))
        choices: list[tuple[int, int, int]] = []
        for granularity in self.recompute:
            if granularity in (None, "selective"):
                code = NONE if granularity is None else GRANULARITIES.index(granularity)
                choices.append((code, NONE, NONE))
                continue
            for method in self.recompute_method if granularity == "full" else ("block",):
                code = GRANULARITIES.index(granularity)
                choices += [
                    (code, METHODS.index(method), count)
                    for count in counts
                    if count <= stage_layers
                ]
        return choices

    def virtual_layers(self, pipeline: int, stage_layers: int) -> list[int]:
        """Layers per virtual stage that Table 3 lists: NONE, then 1..pipeline (at most a stage's
        layers)."""
        if not self.interleaving:
            return [NONE]
        values = self.virtual or tuple(range(1, pipeline + 1))
        return [NONE, *(v for v in values if v <= stage_layers)]


PARAMETERS = tuple(field.name for field in fields(Space))


def measured_sizes(profile: Profile, types: Iterable[str]) -> dict[str, Any]:
    """Values of `Space.tensor` and `Space.micro_batch` that the profile has of every type."""
    sizes = [
        {(table.tensor, table.micro_batch) for table in profile.tables if table.device == name}
        for name in types
    ]
    tensors, micro_batches = zip(*(set.intersection(*sizes) or {(1, 1)}), strict=True)
    return {"tensor": tuple(sorted({*tensors})), "micro_batch": tuple(sorted({*micro_batches}))}


def rule_columns(types: tuple[str, ...]) -> dict[str, Column]:
    """Every column that a rule may name. types: the device types of the pool at hand."""
    columns = {name: Column("number") for name in (*BASE, *OPTIONS, *DERIVED, *CONSTANTS)}
    columns |= {name: Column("bool") for name in FLAGS}
    columns |= {name: Column("string", words) for name, words in VOCABULARY.items()}
    columns["gpu_type"] = Column("string", types)
    return columns


def constants_of(facts: ModelFacts, global_batch: int) -> dict[str, int]:
    """The columns that are the same in every row (NONE: not set)."""
    shape, fused = facts.shape, any(t.name == "log-sum-exp" for t in facts.blocks[0].saved)
    return {
        "num_layers": facts.layers,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_heads,
        "hidden_size": shape.hidden,
        "seq_length": facts.sequence,
        "global_batch_size": global_batch,
        "num_experts": NONE if shape.experts is None else shape.experts.count,
        "moe_router_topk": NONE if shape.experts is None else shape.experts.active,
        "use_flash_attn": 1 if fused else NONE,
        "offload_optimizer": 0,
    }


def strategies(
    facts: ModelFacts,
    space: Space,
    rules: Iterable[Rule],
    *,
    gpus: int,
    global_batch: int,
    gpu_type: int = 0,
    whole_stages: bool = True,
) -> Strategies:
    """All strategies for `gpus` devices that no rule drops.

    gpu_type: index for the column of that name. whole_stages: every stage holds the same number of
    layers; else stages may differ (mode 2) and `num_layers_per_stage` is the average, rounded up.
    """
    rules = list(rules)
    constants = constants_of(facts, global_batch)
    base, generated = _bases(facts, space, global_batch, gpus=gpus, whole_stages=whole_stages)
    base = _keep(base, rules, constants)
    parts: list[Columns] = []
    for pipeline in np.unique(base["pipeline_model_parallel_size"]).tolist():
        mine = base["pipeline_model_parallel_size"] == pipeline
        options = _keep(_options(space, pipeline, -(-facts.layers // pipeline)), rules, constants)
        parts.append(_joined_rows({name: column[mine] for name, column in base.items()}, options))
    if not parts:
        return Strategies(nothing().columns, generated)
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    _add_late_columns(columns, space, gpu_type)
    return Strategies(_keep(columns, rules, constants), generated)


def _bases(
    facts: ModelFacts, space: Space, global_batch: int, *, gpus: int, whole_stages: bool
) -> tuple[Columns, int]:
    """The bases whose derived numbers are whole, and the size of Table 3's whole product."""
    N = facts.layers
    pipelines = [p for p in space.pipeline or range(1, N + 1) if p <= min(gpus, N)]
    tensors = [t for t in space.tensor or range(1, facts.shape.heads + 1) if t <= gpus]
    held = facts.shape.experts.count if facts.shape.experts else 1
    experts = list(space.expert or range(1, held + 1))
    exchanges = [EXCHANGES.index(word) for word in space.exchange]
    further = [space.context, space.whole_experts if held > 1 else (False,), space.fsdp]
    axes = [pipelines, tensors, experts, space.micro_batch, *further, space.shard_groups, exchanges]
    grid = np.array(list(product(*axes)), dtype=np.int64)
    p, t, e, b, c, apart, fsdp, groups, a2a = grid.reshape(-1, len(axes)).T
    d, et = gpus // (p * t * c), np.where(apart, 1, t)
    gas = global_batch // np.maximum(b * d, 1)
    whole = (d * p * t * c == gpus) & (gas >= 1) & (gas * b * d == global_batch)
    whole &= (t * c * d % (et * e) == 0) & ((apart == 0) | (t > 1))
    # whole shard groups of at least two ranks, of dense parameters and of experts
    whole &= (groups == 1) | (
        (fsdp == 1) & (2 * groups <= c * d) & (c * d % groups == 0)
        & (t * c * d // (et * e) % groups == 0)
    )  # fmt: skip
    # every rank has whole heads after the exchange
    heads, pairs = facts.shape.heads, facts.shape.kv_heads
    whole &= (a2a == 0) | ((c > 1) & (heads % (t * c) == 0) & (pairs % (t * c) == 0))
    if whole_stages:
        whole &= N % p == 0
    values = (np.full_like(p, gpus), p, t, e, d, b, gas, c, et, fsdp, groups, a2a)
    columns = {name: column[whole] for name, column in zip(BASE, values, strict=True)}
    options = sum(len(_options(space, p, -(-N // p))["sequence_parallel"]) for p in pipelines)
    return columns, math.prod(map(len, axes[1:])) * options


def _options(space: Space, pipeline: int, stage_layers: int) -> Columns:
    """Every option of Table 3 for one pipeline size, with what follows from it."""
    recomputations = np.array(space.recomputations(stage_layers), dtype=np.int64).reshape(-1, 3)
    axes = [
        np.array(space.virtual_layers(pipeline, stage_layers)),
        np.array(space.sequence_parallel, dtype=np.int64),
        np.array(space.distributed_optimizer, dtype=np.int64),
        np.arange(len(recomputations)),
        np.array(space.no_overlap_offload, dtype=np.int64),
    ]
    v, sp, do, recompute, blocking = (axis.ravel() for axis in np.meshgrid(*axes, indexing="ij"))
    columns = dict(zip(OPTIONS, (v, sp, do, *recomputations[recompute].T, blocking), strict=True))
    columns["num_layers_per_stage"] = np.full_like(v, stage_layers)
    columns["virtual_pipeline_model_parallel_size"] = np.where(
        v == NONE, NONE, stage_layers // np.maximum(v, 1)
    )
    columns["overlap_p2p_communication"] = ((v != NONE) & space.overlap).astype(np.int64)
    columns["pipeline_model_parallel_size"] = np.full_like(v, pipeline)
    return columns


def _keep(columns: Columns, rules: list[Rule], constants: Mapping[str, int]) -> Columns:
    """The rows that none of the rules drops whose parameters are known by now."""
    at_hand: dict[str, Any] = {**constants, **columns}
    ready = [rule for rule in rules if rule.names <= at_hand.keys()]
    needed = {name for rule in ready for name in rule.names}
    table: Table = {
        name: np.where(np.equal(at_hand[name], NONE), np.nan, at_hand[name]) for name in needed
    }
    keep = ~dropped(ready, table, len(next(iter(columns.values()))))
    return columns if keep.all() else {name: column[keep] for name, column in columns.items()}


def _joined_rows(base: Columns, options: Columns) -> Columns:
    """Every base with every option."""
    bases, count = len(base["num_gpus"]), len(options["sequence_parallel"])
    columns = {name: np.repeat(column, count) for name, column in base.items()}
    return columns | {
        name: np.tile(column, bases) for name, column in options.items() if name not in base
    }


def _add_late_columns(columns: Columns, space: Space, gpu_type: int) -> None:
    """Overlap flags on wherever Megatron-LM allows them, and the device type."""
    same = np.ones_like(columns["num_gpus"])
    columns |= {
        "tp_comm_overlap": columns["sequence_parallel"] * space.overlap,
        "overlap_grad_reduce": same * space.overlap,
        "overlap_param_gather": columns["use_distributed_optimizer"] * space.overlap,
        "gpu_type": same * gpu_type,
    }
