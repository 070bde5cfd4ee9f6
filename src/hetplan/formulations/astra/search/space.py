"""The parameter space of Astra's Table 3, and the table of its strategies.

A strategy, a row of the table, combines a base (degrees, micro-batch) with an option (interleaving,
sequence parallelism, optimizer, recomputation, offload). Rules drop rows as early as possible:
rules about base columns drop bases, rules about the pipeline size and option columns drop options
of a pipeline size, and the other rules drop combined rows. The same rows remain as if all rules
were applied to all combinations, but far fewer rows are made.
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
    """The values that each parameter may take (`parameters` says for people what each means). None
    stands for the whole range of Table 3, which depends on the model. The parameters `context` to
    `uneven` are hetplan's."""

    pipeline: tuple[int, ...] | None = None  # pipeline degrees; None: 1..number of layers
    tensor: tuple[int, ...] | None = None  # tensor degrees; None: 1..number of heads
    micro_batch: tuple[int, ...] = tuple(range(1, 9))  # samples of a micro-batch
    expert: tuple[int, ...] | None = None  # expert degrees; None: 1..number of experts
    context: tuple[int, ...] = (1,)  # context degrees
    # The exchange of context ranks in attention. p2p: keys and values go round a ring (Liu et al.
    # 2023). a2a: all ranks exchange tokens for heads (Jacobs et al. 2023).
    exchange: tuple[str, ...] = EXCHANGES[:1]
    # whether tensor ranks hold whole experts (expert-tensor degree 1)
    whole_experts: tuple[bool, ...] = (False,)
    # whether weights, gradients and optimizer states are sharded over data and context ranks
    fsdp: tuple[bool, ...] = (False,)
    # numbers of groups of these ranks, where each group has all shards (HSDP)
    shard_groups: tuple[int, ...] = (1,)
    uneven: bool = False  # whether a stage may have one layer less than the largest stage
    # layers of a virtual stage, beside "not interleaved"; None: 1..pipeline degree
    virtual: tuple[int, ...] | None = None
    interleaving: bool = True  # whether virtual stages are tried at all
    sequence_parallel: tuple[bool, ...] = (False, True)
    distributed_optimizer: tuple[bool, ...] = (False, True)
    recompute: tuple[str | None, ...] = (None, *GRANULARITIES)  # granularities of recomputation
    recompute_method: tuple[str, ...] = METHODS
    # layers that are recomputed; None: 1..layers of a stage
    recompute_layers: tuple[int, ...] | None = None
    no_overlap_offload: tuple[bool, ...] = (True, False)
    offload: bool = True  # whether optimizer states may move to the host where they do not fit
    overlap: bool = True  # whether communication is overlapped wherever Megatron-LM can
    # Of it, whether the reduction of gradients and the gathering of weights are.
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True

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
        for parameter, words, allowed in (
            ("kind of recomputation", self.recompute, (None, *GRANULARITIES)),
            ("method of recomputation", self.recompute_method, METHODS),
            ("exchange of context ranks", self.exchange, EXCHANGES),
        ):
            for word in words:
                if word not in allowed:
                    names = [name or "none" for name in allowed]
                    raise unknown_name(f"unknown {parameter}", str(word), names)

    def recomputations(self, stage_layers: int) -> list[tuple[int, int, int]]:
        """All (granularity, method, layers) of recomputation for stages of `stage_layers` layers,
        as values of the table's columns."""
        numbers = self.recompute_layers or tuple(range(1, stage_layers + 1))
        numbers = tuple(number for number in numbers if number <= stage_layers)
        choices: list[tuple[int, int, int]] = []
        for granularity in self.recompute:
            if granularity is None:
                choices.append((NONE, NONE, NONE))
                continue
            code = GRANULARITIES.index(granularity)
            if granularity == "selective":
                choices.append((code, NONE, NONE))
                continue
            methods = self.recompute_method if granularity == "full" else ("block",)
            for method in methods:
                choices += [(code, METHODS.index(method), number) for number in numbers]
        return choices

    def virtual_layers(self, pipeline: int, stage_layers: int) -> list[int]:
        """The numbers of layers of a virtual stage that Table 3 lists: NONE for no virtual stages,
        then 1..pipeline, but no more than a stage has."""
        if not self.interleaving:
            return [NONE]
        values = self.virtual or tuple(range(1, pipeline + 1))
        return [NONE, *(v for v in values if v <= stage_layers)]


PARAMETERS = tuple(field.name for field in fields(Space))


def measured_sizes(profile: Profile, types: Iterable[str]) -> dict[str, Any]:
    """The values of `Space.tensor` and `Space.micro_batch` for which the profile has a table of
    every type; both 1 where it has none. The seconds of pairs without tables are predicted."""
    sizes = [
        {(table.tensor, table.micro_batch) for table in profile.tables if table.device == name}
        for name in types
    ]
    tensors, micro_batches = zip(*(set.intersection(*sizes) or {(1, 1)}), strict=True)
    return {"tensor": tuple(sorted({*tensors})), "micro_batch": tuple(sorted({*micro_batches}))}


def rule_columns(types: tuple[str, ...]) -> dict[str, Column]:
    """Name -> column, for every column that a rule may name. types: device types of the pool."""
    columns = {name: Column("number") for name in (*BASE, *OPTIONS, *DERIVED, *CONSTANTS)}
    columns |= {name: Column("bool") for name in FLAGS}
    columns |= {name: Column("string", words) for name, words in VOCABULARY.items()}
    columns["gpu_type"] = Column("string", types)
    return columns


def constants_of(facts: ModelFacts, global_batch: int) -> dict[str, int]:
    """Name -> value, for the columns that have the same value in every row."""
    shape = facts.shape
    # only a fused attention kernel saves this tensor
    flash_attention = any(tensor.name == "log-sum-exp" for tensor in facts.blocks[0].saved)
    return {
        "num_layers": facts.layers,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_heads,
        "hidden_size": shape.hidden,
        "seq_length": facts.sequence,
        "global_batch_size": global_batch,
        "num_experts": NONE if shape.experts is None else shape.experts.count,
        "moe_router_topk": NONE if shape.experts is None else shape.experts.active,
        "use_flash_attn": 1 if flash_attention else NONE,
        "offload_optimizer": 0,  # the number of the word `auto`
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

    gpu_type: number of the device type. whole_stages: whether every stage has the same number of
    layers; otherwise stages may differ (mode 2), and `num_layers_per_stage` is the average, rounded
    up.
    """
    rules = list(rules)
    constants = constants_of(facts, global_batch)
    bases, generated = _bases(facts, space, global_batch, gpus=gpus, whole_stages=whole_stages)
    bases = _keep(bases, rules, constants)
    parts: list[Columns] = []  # the strategies of each pipeline size
    for pipeline in np.unique(bases["pipeline_model_parallel_size"]).tolist():
        has_size = bases["pipeline_model_parallel_size"] == pipeline
        bases_of_size = {name: column[has_size] for name, column in bases.items()}
        stage_layers = -(-facts.layers // pipeline)
        options = _keep(_options(space, pipeline, stage_layers), rules, constants)
        parts.append(_joined_rows(bases_of_size, options))
    if not parts:
        return Strategies(nothing().columns, generated)
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    _add_late_columns(columns, space, gpu_type)
    return Strategies(_keep(columns, rules, constants), generated)


def _bases(
    facts: ModelFacts, space: Space, global_batch: int, *, gpus: int, whole_stages: bool
) -> tuple[Columns, int]:
    """(the bases that are possible, the number of strategies in Table 3's whole product)."""
    N = facts.layers
    pipelines = [p for p in space.pipeline or range(1, N + 1) if p <= min(gpus, N)]
    tensors = [t for t in space.tensor or range(1, facts.shape.heads + 1) if t <= gpus]
    expert_count = facts.shape.experts.count if facts.shape.experts else 1
    axes = [
        pipelines,
        tensors,
        list(space.expert or range(1, expert_count + 1)),
        space.micro_batch,
        space.context,
        space.whole_experts if expert_count > 1 else (False,),
        space.fsdp,
        space.shard_groups,
        [EXCHANGES.index(word) for word in space.exchange],
    ]
    grid = np.array(list(product(*axes)), dtype=np.int64)
    p, t, e, b, c, whole_experts, fsdp, groups, a2a = grid.reshape(-1, len(axes)).T
    d = gpus // (p * t * c)  # data degree
    et = np.where(whole_experts, 1, t)  # expert-tensor degree
    gas = global_batch // np.maximum(b * d, 1)  # micro-batches; d is 0 with too few devices
    possible = (d * p * t * c == gpus) & (gas >= 1) & (gas * b * d == global_batch)
    # whole groups of expert ranks; with one tensor rank, whole experts would be listed twice
    expert_replicas = t * c * d // (et * e)
    possible &= (t * c * d % (et * e) == 0) & ((whole_experts == 0) | (t > 1))
    # whole shard groups of at least two ranks, of dense parameters and of experts
    groups_are_whole = (c * d % groups == 0) & (expert_replicas % groups == 0)
    possible &= (groups == 1) | ((fsdp == 1) & (2 * groups <= c * d) & groups_are_whole)
    # every rank has whole heads after the exchange
    heads, kv_heads = facts.shape.heads, facts.shape.kv_heads
    heads_are_whole = (heads % (t * c) == 0) & (kv_heads % (t * c) == 0)
    possible &= (a2a == 0) | ((c > 1) & heads_are_whole)
    if whole_stages:
        possible &= N % p == 0
    values = (np.full_like(p, gpus), p, t, e, d, b, gas, c, et, fsdp, groups, a2a)
    columns = {name: column[possible] for name, column in zip(BASE, values, strict=True)}
    options_of_sizes = [_options(space, size, -(-N // size)) for size in pipelines]
    options = sum(len(columns_of_size["sequence_parallel"]) for columns_of_size in options_of_sizes)
    bases_of_a_size = math.prod(map(len, axes[1:]))
    return columns, bases_of_a_size * options


def _options(space: Space, pipeline: int, stage_layers: int) -> Columns:
    """All options of Table 3 for one pipeline size, with the columns that follow from these."""
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
    """The rows that no rule drops. Rules that name other columns than the given ones are left for
    later."""
    values: dict[str, Any] = {**constants, **columns}
    applicable = [rule for rule in rules if rule.names <= values.keys()]
    needed = {name for rule in applicable for name in rule.names}
    table: Table = {
        name: np.where(np.equal(values[name], NONE), np.nan, values[name]) for name in needed
    }
    rows = len(next(iter(columns.values())))
    keep = ~dropped(applicable, table, rows)
    return columns if keep.all() else {name: column[keep] for name, column in columns.items()}


def _joined_rows(bases: Columns, options: Columns) -> Columns:
    """Every base with every option."""
    number_of_bases, number_of_options = len(bases["num_gpus"]), len(options["sequence_parallel"])
    columns = {name: np.repeat(column, number_of_options) for name, column in bases.items()}
    for name, column in options.items():
        if name not in bases:
            columns[name] = np.tile(column, number_of_bases)
    return columns


def _add_late_columns(columns: Columns, space: Space, gpu_type: int) -> None:
    """Add the overlap flags, which are on wherever Megatron-LM and the space allow them, and the
    device type."""
    every_row = np.ones_like(columns["num_gpus"])
    overlap = int(space.overlap)  # 0 sets all of these flags to 0
    reduces = overlap * int(space.overlap_grad_reduce)
    gathers = overlap * int(space.overlap_param_gather)
    columns |= {
        "tp_comm_overlap": columns["sequence_parallel"] * overlap,
        "overlap_grad_reduce": every_row * reduces,
        "overlap_param_gather": columns["use_distributed_optimizer"] * gathers,
        "gpu_type": every_row * gpu_type,
    }
