"""The assumptions of the formulas of seconds and bytes, besides the model and its devices."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from hetplan.profiling.frameworks import MEGATRON, Framework
from hetplan.profiling.models.operators import DEFAULT_STACK, Stack
from hetplan.profiling.profiles.profile import Profile
from hetplan.profiling.rates.efficiency import Learned, LearnedLinks


@dataclass(frozen=True)
class Assumptions:
    """The assumptions of the formulas about the training software, its measurements and its memory.

    The strategies that the formulas describe are Megatron-LM's.
    """

    framework: Framework = MEGATRON  # the framework that trains, and its memory on every device
    # bytes of each device that training cannot use; None: those that the framework's allocator
    # does not count
    reserved_bytes: float | None = None
    memory_margin: float = 0.0  # share of each device's memory that stays free besides
    # measured seconds of layers; the seconds of layers without a table are predicted
    profile: Profile | None = None
    # device type -> how much longer its operators take than predicted, by measurements on it
    learned: Mapping[str, Learned] = field(default_factory=dict)
    # learned efficiency of links; None: measured curves inside nodes, `network_share` between them
    links: LearnedLinks | None = None
    # The share of a node's network bandwidth that large collectives reach: 24 of 25 GB/s for each
    # HDR adapter of A800 nodes (NVIDIA/nccl#412), 96 of 100 GB/s for three DGX A100
    # (NVIDIA/nccl-tests#119).
    network_share: float = 0.96
    # the software that computes; a strategy says whether it is sequence parallel
    stack: Stack = DEFAULT_STACK
    # A bucket, whose gradients are reduced together, has at least `bucket_params` parameters, and
    # at least `bucket_params_per_rank` for each data rank (Megatron Core,
    # `DistributedDataParallelConfig.bucket_size`).
    bucket_params: float = 40e6
    bucket_params_per_rank: float = 1e6

    @property
    def reserved(self) -> float:
        """Bytes of each device that training cannot use."""
        if self.reserved_bytes is None:
            return self.framework.reserved_bytes
        return self.reserved_bytes
