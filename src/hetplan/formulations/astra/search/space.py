"""The parameter space of Astra's Table 3, and the columns that a strategy table has.

Values that follow from others (data parallelism, overlap flags) are columns too, so that rules can
name them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

from hetplan.errors import InputError
from hetplan.formulations.astra.search.facts import ModelFacts
from hetplan.formulations.astra.search.rule_types import Column
from hetplan.names import unknown_name

GRANULARITIES = ("selective", "full", "hybrid")
METHODS = ("block", "uniform")
# String columns hold indices into these; numbers hold NONE where the option is not set.
VOCABULARY = {
    "recompute_granularity": GRANULARITIES,
    "recompute_method": METHODS,
    "offload_optimizer": ("auto",),
}
NONE = -1

# Fixed before a strategy's options are chosen: these decide the groups and the micro-batches.
BASE = (
    "num_gpus",
    "pipeline_model_parallel_size",
    "tensor_model_parallel_size",
    "expert_model_parallel_size",
    "data_parallel_size",
    "micro_batch_size",
    "num_micro_batches",
)
OPTIONS = (
    "num_layers_per_virtual_pipeline_stage",
    "sequence_parallel",
    "use_distributed_optimizer",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "no_overlap_offload_optimizer",
)
# Known from the pipeline size and the options: rules over these drop options before they meet the
# base.
DERIVED = (
    "num_layers_per_stage",
    "virtual_pipeline_model_parallel_size",
    "overlap_p2p_communication",
)
FLAGS = ("sequence_parallel", "use_distributed_optimizer", "no_overlap_offload_optimizer",
         "overlap_p2p_communication", "tp_comm_overlap", "overlap_grad_reduce", "overlap_param_gather",
         "use_flash_attn")  # fmt: skip
CONSTANTS = ("num_layers", "num_attention_heads", "num_query_groups", "hidden_size", "seq_length",
             "global_batch_size", "num_experts", "moe_router_topk", "use_flash_attn",
             "offload_optimizer")  # fmt: skip
LATE = ("tp_comm_overlap", "overlap_grad_reduce", "overlap_param_gather", "gpu_type")


@dataclass(frozen=True)
class Space:
    """Which values each parameter may take; None: the whole range of Table 3 for the model at hand.

    pipeline, tensor: degrees, 1..N layers and 1..number of heads. micro_batch: 1..M, M = 8 by
    default. virtual: layers per virtual stage, 1..pipeline degree, beside "not interleaved".
    recompute_layers:
    1..layers per stage. interleaving: whether virtual stages are tried at all. expert: 1..number of
    experts. offload: whether optimizer states may move to the host where they do not fit. overlap:
    communication overlapped wherever Megatron-LM can.
    """

    pipeline: tuple[int, ...] | None = None
    tensor: tuple[int, ...] | None = None
    micro_batch: tuple[int, ...] = tuple(range(1, 9))
    expert: tuple[int, ...] | None = None
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
        for name in ("pipeline", "tensor", "micro_batch", "expert", "virtual", "recompute_layers"):
            values = getattr(self, name)
            if values is not None and (not values or min(values) < 1):
                raise InputError(
                    f"values of {name}", got=values, expected="at least one, each 1 or more"
                )
        for word in self.recompute:
            if word is not None and word not in GRANULARITIES:
                raise unknown_name("unknown kind of recomputation", word, ("none", *GRANULARITIES))
        for word in self.recompute_method:
            if word not in METHODS:
                raise unknown_name("unknown method of recomputation", word, METHODS)

    def recomputations(self, stage_layers: int) -> list[tuple[int, int, int]]:
        """All (granularity, method, layers), as indices and numbers with NONE, for stages of that
        many layers."""
        counts = self.recompute_layers or tuple(range(1, stage_layers + 1))
        found: list[tuple[int, int, int]] = []
        for granularity in self.recompute:
            if granularity in (None, "selective"):
                code = NONE if granularity is None else GRANULARITIES.index(granularity)
                found.append((code, NONE, NONE))
                continue
            for method in self.recompute_method if granularity == "full" else ("block",):
                code = GRANULARITIES.index(granularity)
                found += [
                    (code, METHODS.index(method), count)
                    for count in counts
                    if count <= stage_layers
                ]
        return found

    def virtual_layers(self, pipeline: int, stage_layers: int) -> list[int]:
        """Layers per virtual stage that Table 3 lists: NONE, then 1..pipeline (at most a stage's
        layers)."""
        if not self.interleaving:
            return [NONE]
        values = self.virtual or tuple(range(1, pipeline + 1))
        return [NONE, *(v for v in values if v <= stage_layers)]


PARAMETERS = tuple(field.name for field in fields(Space))


@dataclass(frozen=True)
class Schema:
    """Columns for the rule language: kinds, and vocabularies of the pool at hand."""

    types: tuple[str, ...]

    @cached_property
    def columns(self) -> dict[str, Column]:
        """Every column that a rule may name."""
        columns = {name: Column("number") for name in (*BASE, *OPTIONS, *DERIVED, *CONSTANTS)}
        columns |= {name: Column("bool") for name in FLAGS}
        columns |= {name: Column("string", words) for name, words in VOCABULARY.items()}
        columns["gpu_type"] = Column("string", self.types)
        return columns


def constants_of(facts: ModelFacts, global_batch: int) -> dict[str, int]:
    """The columns that are the same in every row (NONE: not set)."""
    fused = any(tensor.name == "log-sum-exp" for tensor in facts.blocks[0].saved)
    return {
        "num_layers": facts.layers,
        "num_attention_heads": facts.heads,
        "num_query_groups": facts.query_groups,
        "hidden_size": facts.hidden,
        "seq_length": facts.sequence,
        "global_batch_size": global_batch,
        "num_experts": NONE if facts.experts is None else facts.experts,
        "moe_router_topk": NONE if facts.experts_per_token is None else facts.experts_per_token,
        "use_flash_attn": 1 if fused else NONE,
        "offload_optimizer": 0,
    }
