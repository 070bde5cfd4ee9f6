"""The strategy table: Table 3's product, rules pushed down to where their columns are known, rows
as arrays.

A row is a base (degrees, micro-batch) times an option (interleaving, sequence parallelism,
optimizer, recomputation, offload). Rules over base columns alone are applied to the bases, rules
over the pipeline size and options to the options of each pipeline size, the rest to the joined
rows: the same rows survive, far fewer are made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from hetplan.formulations.astra.search.facts import ModelFacts
from hetplan.formulations.astra.search.rules import Rule, Values, dropped
from hetplan.formulations.astra.search.space import (
    BASE,
    CONSTANTS,
    DERIVED,
    FLAGS,
    LATE,
    NONE,
    OPTIONS,
    VOCABULARY,
    Space,
    constants_of,
)

Ints = NDArray[np.int64]
Columns = dict[str, Ints]


@dataclass(frozen=True)
class Strategies:
    """Rows as columns of integers [R] (NONE: not set; flags 0 or 1; strings as indices).

    generated: size of the product before any rule; after_rules: rows that no rule drops.
    """

    columns: Columns
    generated: int

    @property
    def rows(self) -> int:
        """R."""
        return len(self.columns["num_gpus"])

    def take(self, rows: NDArray[np.generic]) -> Strategies:
        """Those rows (indices or mask)."""
        return Strategies(
            {name: column[rows] for name, column in self.columns.items()}, self.generated
        )

    def row(self, number: int) -> dict[str, int | bool | str | None]:
        """One strategy with Megatron's names and plain values."""
        result: dict[str, int | bool | str | None] = {}
        for name in (*BASE, *OPTIONS, *DERIVED, *LATE[:-1]):
            value = int(self.columns[name][number])
            if name in FLAGS:
                result[name] = bool(value)
            elif value == NONE:
                result[name] = None
            else:
                result[name] = VOCABULARY[name][value] if name in VOCABULARY else value
        return result


def joined(parts: Sequence[Strategies]) -> Strategies:
    """Tables one under the other."""
    names = parts[0].columns
    columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in names}
    return Strategies(columns, sum(part.generated for part in parts))


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
    base, count = _bases(facts, space, constants, gpus=gpus, whole_stages=whole_stages)
    early, middle, late = _sorted_rules(rules)
    base = _keep(base, early, constants)
    parts: list[Columns] = []
    generated = 0
    for pipeline in np.unique(base["pipeline_model_parallel_size"]):
        mine = base["pipeline_model_parallel_size"] == pipeline
        stage_layers = -(-facts.layers // int(pipeline))
        options = _options(space, int(pipeline), stage_layers)
        options = _keep(options, middle, constants)
        parts.append(_joined_rows({name: column[mine] for name, column in base.items()}, options))
    for pipeline, bases in count.items():
        generated += bases * _option_count(space, pipeline, -(-facts.layers // pipeline))
    columns = (
        {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        if parts
        else _nothing()
    )
    _add_late_columns(columns, space, gpu_type)
    return Strategies(_keep(columns, late, constants), generated)


def _bases(
    facts: ModelFacts, space: Space, constants: Mapping[str, int], *, gpus: int, whole_stages: bool
) -> tuple[Columns, dict[int, int]]:
    """The bases whose derived numbers are whole, and how many bases Table 3 lists for each pipeline
    size."""
    pipelines = [
        p for p in space.pipeline or range(1, facts.layers + 1) if p <= min(gpus, facts.layers)
    ]
    tensors = [t for t in space.tensor or range(1, facts.heads + 1) if t <= gpus]
    experts = list(space.expert or range(1, (facts.experts or 1) + 1))
    grid = np.array(
        list(product(pipelines, tensors, experts, space.micro_batch)), dtype=np.int64
    ).reshape(-1, 4)
    p, t, e, b = grid.T
    d = gpus // (p * t)
    gas = constants["global_batch_size"] // np.maximum(b * d, 1)
    whole = (
        (d >= 1)
        & (d * p * t == gpus)
        & (gas >= 1)
        & (gas * b * d == constants["global_batch_size"])
    )
    whole &= d % e == 0
    if whole_stages:
        whole &= facts.layers % p == 0
    values = (np.full_like(p, gpus), p, t, e, d, b, gas)
    per_pipeline = len(tensors) * len(experts) * len(space.micro_batch)
    return (
        {name: column[whole] for name, column in zip(BASE, values, strict=True)},
        dict.fromkeys(pipelines, per_pipeline),
    )


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


def _option_count(space: Space, pipeline: int, stage_layers: int) -> int:
    flags = (
        len(space.sequence_parallel)
        * len(space.distributed_optimizer)
        * len(space.no_overlap_offload)
    )
    return (
        flags
        * len(space.virtual_layers(pipeline, stage_layers))
        * len(space.recomputations(stage_layers))
    )


def _sorted_rules(rules: list[Rule]) -> tuple[list[Rule], list[Rule], list[Rule]]:
    """Rules by the earliest level at which all their columns are known."""
    bases, options = (
        {*BASE, *CONSTANTS},
        {*OPTIONS, *DERIVED, *CONSTANTS, "pipeline_model_parallel_size"},
    )
    early = [rule for rule in rules if rule.names <= bases]
    middle = [rule for rule in rules if not rule.names <= bases and rule.names <= options]
    late = [rule for rule in rules if not rule.names <= bases and not rule.names <= options]
    return early, middle, late


def _keep(columns: Columns, rules: list[Rule], constants: Mapping[str, int]) -> Columns:
    """The rows that none of the rules drops."""
    rows = len(next(iter(columns.values())))
    needed = {name for rule in rules for name in rule.names}
    table = {
        name: _values(name, columns[name] if name in columns else constants[name])
        for name in needed
    }
    keep = ~dropped(rules, table, rows)
    return columns if keep.all() else {name: column[keep] for name, column in columns.items()}


def _values(name: str, column: Ints | int) -> Values:
    data = np.asarray(column)
    known = data != NONE
    if name in FLAGS:
        data = data == 1
    return Values(data, None if known.all() else known)


def _joined_rows(base: Columns, options: Columns) -> Columns:
    """Every base with every option."""
    bases, count = len(base["num_gpus"]), len(options["sequence_parallel"])
    columns = {name: np.repeat(column, count) for name, column in base.items()}
    return columns | {
        name: np.tile(column, bases) for name, column in options.items() if name not in base
    }


def _nothing() -> Columns:
    return {name: np.zeros(0, dtype=np.int64) for name in (*BASE, *OPTIONS, *DERIVED)}


def _add_late_columns(columns: Columns, space: Space, gpu_type: int) -> None:
    """Overlap flags on wherever Megatron-LM allows them, and the device type."""
    rows = len(columns["num_gpus"])
    columns["tp_comm_overlap"] = columns["sequence_parallel"] * space.overlap
    columns["overlap_grad_reduce"] = np.full(rows, int(space.overlap), dtype=np.int64)
    columns["overlap_param_gather"] = columns["use_distributed_optimizer"] * space.overlap
    columns["gpu_type"] = np.full(rows, gpu_type, dtype=np.int64)
