"""Tables of strategies: rows as columns of integers, in Megatron's names.

Values that follow from others (data parallelism, overlap flags) are columns too, so that rules can
name them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetplan.replays.arrays import Ints

GRANULARITIES = ("selective", "full", "hybrid")
METHODS = ("block", "uniform")
# String columns hold indices into these; numbers hold NONE where the option is not set.
EXCHANGES = ("p2p", "a2a")
VOCABULARY = {
    "cp_comm_type": EXCHANGES,
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
    "context_parallel_size",
    "expert_tensor_parallel_size",
    "use_fsdp",
    "num_distributed_optimizer_instances",
    "cp_comm_type",
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
LATE = ("tp_comm_overlap", "overlap_grad_reduce", "overlap_param_gather", "gpu_type")


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

    def take(self, rows: NDArray[np.generic]) -> "Strategies":
        """Those rows (indices or mask)."""
        return Strategies(
            {name: column[rows] for name, column in self.columns.items()}, self.generated
        )

    def row(self, number: int) -> dict[str, int | bool | str | None]:
        """One strategy with Megatron's names and plain values."""
        names = (*BASE, *OPTIONS, *DERIVED, *LATE[:-1])
        return {name: plain_value(name, int(self.columns[name][number])) for name in names}


def plain_value(name: str, value: int) -> int | bool | str | None:
    """A value of a column as Megatron says it."""
    if name in FLAGS:
        return bool(value)
    word = VOCABULARY[name][value] if name in VOCABULARY else value
    return None if value == NONE else word


def joined(parts: Sequence[Strategies]) -> Strategies:
    """Tables one under the other."""
    names = parts[0].columns
    columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in names}
    return Strategies(columns, sum(part.generated for part in parts))


def nothing() -> Strategies:
    """A table without rows."""
    names = (*BASE, *OPTIONS, *DERIVED, *LATE)
    return Strategies({name: np.zeros(0, dtype=np.int64) for name in names}, 0)
