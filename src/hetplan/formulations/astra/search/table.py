"""Tables of strategies: a column of integers for each parameter, under Megatron-LM's names.

Parameters that follow from others (the data-parallel degree, overlap flags) are columns, too, so
that rules can name them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetplan.replays.arrays import Ints

GRANULARITIES = ("selective", "full", "hybrid")  # of recomputation
METHODS = ("block", "uniform")  # of full recomputation
EXCHANGES = ("p2p", "a2a")  # of context ranks
# String column -> its words. The column holds the number of the word.
VOCABULARY = {
    "cp_comm_type": EXCHANGES,
    "recompute_granularity": GRANULARITIES,
    "recompute_method": METHODS,
    "offload_optimizer": ("auto",),
}
NONE = -1  # value of any column where the option is not set

# Columns of a base: degrees and micro-batches.
BASE = (
    "num_gpus",
    "pipeline_model_parallel_size",
    "tensor_model_parallel_size",
    "expert_model_parallel_size",
    "data_parallel_size",
    "micro_batch_size",
    "num_micro_batches",
    "context_parallel_size",
    "expert_tensor_parallel_size",
    "use_fsdp",
    "num_distributed_optimizer_instances",
    "cp_comm_type",
)
# Columns of an option.
OPTIONS = (
    "num_layers_per_virtual_pipeline_stage",
    "sequence_parallel",
    "use_distributed_optimizer",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "no_overlap_offload_optimizer",
)
# Columns that follow from the pipeline size and an option.
DERIVED = (
    "num_layers_per_stage",
    "virtual_pipeline_model_parallel_size",
    "overlap_p2p_communication",
)
# Columns of flags, 0 or 1.
FLAGS = (
    "use_fsdp",
    "sequence_parallel",
    "use_distributed_optimizer",
    "no_overlap_offload_optimizer",
    "overlap_p2p_communication",
    "tp_comm_overlap",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "use_flash_attn",
)
# Columns with the same value in every row. Rules may name them; they are not in the table.
CONSTANTS = (
    "num_layers",
    "num_attention_heads",
    "num_query_groups",
    "hidden_size",
    "seq_length",
    "global_batch_size",
    "num_experts",
    "moe_router_topk",
    "use_flash_attn",
    "offload_optimizer",
)
# Columns that are added to the combined rows of bases and options.
LATE = ("tp_comm_overlap", "overlap_grad_reduce", "overlap_param_gather", "gpu_type")


Columns = dict[str, Ints]  # name -> values of all rows


@dataclass(frozen=True)
class Strategies:
    """A table of R strategies."""

    columns: Columns  # name -> [R] values: numbers, flags 0 or 1, numbers of words; or NONE
    generated: int  # number of strategies in Table 3's product, before any rule

    @property
    def rows(self) -> int:
        """R."""
        return len(self.columns["num_gpus"])

    def take(self, rows: NDArray[np.generic]) -> "Strategies":
        """The table of some rows. rows: their numbers, or a mask [R]."""
        return Strategies(
            {name: column[rows] for name, column in self.columns.items()}, self.generated
        )

    def row(self, number: int) -> dict[str, int | bool | str | None]:
        """One strategy as Megatron-LM's names and values, without its device type."""
        names = (*BASE, *OPTIONS, *DERIVED, *LATE[:-1])  # `gpu_type` is the last of LATE
        return {name: plain_value(name, int(self.columns[name][number])) for name in names}


def plain_value(name: str, value: int) -> int | bool | str | None:
    """The value of Megatron-LM's parameter `name` for a value of its column."""
    if name in FLAGS:
        return bool(value)
    if value == NONE:
        return None
    if name in VOCABULARY:
        return VOCABULARY[name][value]
    return value


def joined(parts: Sequence[Strategies]) -> Strategies:
    """The rows of all tables in one table."""
    names = parts[0].columns
    columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in names}
    return Strategies(columns, sum(part.generated for part in parts))


def nothing() -> Strategies:
    """A table without rows."""
    names = (*BASE, *OPTIONS, *DERIVED, *LATE)
    return Strategies({name: np.zeros(0, dtype=np.int64) for name in names}, 0)
