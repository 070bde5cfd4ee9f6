"""What closed forms of seconds and bytes assume besides the model and its devices."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from hetplan.profiling.frameworks import MEGATRON, Framework
from hetplan.profiling.models.operators import DEFAULT_STACK, Stack
from hetplan.profiling.profiles.profile import Profile
from hetplan.profiling.rates.efficiency import Learned, LearnedLinks


@dataclass(frozen=True)
class Assumptions:
    """What pricing and memory assume besides the model and the pool.

    profile: measured layers; where it has no table they are predicted. learned: by device type,
    how much longer its own operators take than predicted. links: learned efficiency of links; None:
    measured fabrics inside nodes, `network_share` between them.
    network_share: what large collectives reach of a node's network: 24 of 25 GB/s for each HDR
    adapter of A800 nodes (NVIDIA/nccl#412), 96 of 100 GB/s for three DGX A100
    (NVIDIA/nccl-tests#119).
    stack: the software that computes; its sequence parallelism is the strategy's.
    bucket_params, bucket_params_per_rank: parameters whose gradients are reduced together, at
    least, and per data rank (Megatron Core, `DistributedDataParallelConfig.bucket_size`).
    framework: what trains, and what it holds on every device; the strategies are Megatron-LM's.
    reserved_bytes: memory of each device that training cannot use, None: what the framework's
    allocator does not count. memory_margin: share of each device's memory that stays free besides.
    """

    framework: Framework = MEGATRON
    reserved_bytes: float | None = None
    memory_margin: float = 0.0
    profile: Profile | None = None
    learned: Mapping[str, Learned] = field(default_factory=dict)
    links: LearnedLinks | None = None
    network_share: float = 0.96
    stack: Stack = DEFAULT_STACK
    bucket_params: float = 40e6
    bucket_params_per_rank: float = 1e6

    @property
    def reserved(self) -> float:
        """Bytes of each device that training cannot use."""
        known = self.reserved_bytes
        return self.framework.reserved_bytes if known is None else known
