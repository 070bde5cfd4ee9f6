"""The machines on which published runs were made: GPU, links within and between nodes.

Bandwidths are those of one direction, as in cluster files; `between` is that of a node's network
cards together.
"""

from dataclasses import dataclass
from functools import cache

from hetplan.profiling.cluster import (
    GBIT,
    INTRA_NODE_LATENCY_US,
    NETWORK_LATENCY_US,
    Cluster,
    Node,
    device,
)
from hetplan.studies.truth.tables import NotPosedError


@dataclass(frozen=True)
class Machine:
    """A kind of node. device: of the catalogue. within, between: Gbit/s. per_node: GPUs that share
    the fast links."""

    device: str
    within: float
    between: float
    per_node: int = 8


# NVLink 3 (A100): 12 links of 25 GB/s each way; NVLink 4 (H100, H200): 18; NVLink 5 (Blackwell):
# 18 of 50 GB/s; Infinity Fabric (MI300X, MI325X): 7 of 64 GB/s.
# Networks as the sources state them; where one is silent, a DGX's cards: eight of
# 200 (A100) or 400 Gbit/s (later ones), as NVIDIA's datasheets of DGX A100, H100, H200, B200 and
# B300 say. Racks of 72 GPUs on one NVLink hold 64 of a job; each GPU has a card of 400 (GB200) or
# 800 Gbit/s (B300, GB300).
A100_80 = Machine("A100-SXM4-80GB", 2400, 1600)
A100_40 = Machine("A100-SXM4-40GB", 2400, 1600)
VTRAIN = Machine("A100-SXM4-80GB", 2400, 800)  # vTrain (MICRO 2024): 800 Gbit/s per node
# What texts of the sets begin with, the longer ones first.
MACHINES = {
    Machine("H100-96GB-HBM2e", 3600, 3200): ("H100 96GB",),  # torchtitan: 400 Gbit/s per GPU
    Machine("H100-SXM5-80GB", 3600, 3200): (
        "h100_80gb", "H100", "DGX-H100", "NVIDIA H100-SXM5-80GB",
    ),
    Machine("H200-SXM-141GB", 3600, 3200): ("H200 ", "NVIDIA H200-SXM5-141GB"),
    Machine("MI300X", 3584, 3200): ("AMD Instinct MI300X",),
    Machine("MI325X", 3584, 3200): ("AMD Instinct MI325X",),
    A100_80: ("A100-SXM4-80GB", "A100 ", "a100_80gb"),
    A100_40: ("a100_40gb",),
    Machine("GB200", 7200, 25600, 64): ("GB200", "DGX-GB200", "NVIDIA Blackwell GPU (GB200)"),
    Machine("GB300", 7200, 51200, 64): ("GB300", "DGX-GB300"),
    Machine("B200", 7200, 3200): ("DGX-B200", "NVIDIA Blackwell GPU (B200"),
    Machine("B300", 7200, 6400): ("DGX-B300",),
}  # fmt: skip


def machine(text: str | None) -> Machine:
    """The machine that a set's text names; raises NotPosedError for one that is unknown."""
    for known, starts in MACHINES.items():
        if text is not None and text.startswith(starts):
            return known
    raise NotPosedError(f"unknown GPU {text!r}")


@cache
def cluster(kind: Machine, gpus: int) -> Cluster:
    """As many GPUs in full nodes, the last one with the rest."""
    full, rest = divmod(gpus, kind.per_node)
    links = (
        kind.within * GBIT, kind.between * GBIT, INTRA_NODE_LATENCY_US * 1e-6,
        NETWORK_LATENCY_US * 1e-6,
    )  # fmt: skip
    sizes = [kind.per_node] * full + [rest] * bool(rest)
    nodes = tuple(Node(kind.device, size, *links) for size in sizes)
    return Cluster(f"{gpus} {kind.device}", nodes, {kind.device: device(kind.device)})
