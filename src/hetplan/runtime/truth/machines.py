"""The machines on which published runs were made: GPU, links within and between nodes.

Bandwidths are those of one direction, as in cluster files; `between` is that of a node's network
cards together.
"""

from dataclasses import dataclass
from functools import cache

from hetplan.profiling.cluster import Cluster, ClusterFile, build_cluster
from hetplan.runtime.truth.tables import NotPosedError


@dataclass(frozen=True)
class Machine:
    """A kind of node. device: of the catalogue. within, between: Gbit/s. per_node: GPUs that share
    the fast links."""

    device: str
    within: float
    between: float
    per_node: int = 8


# NVLink 3 (A100): 12 links of 25 GB/s each way; NVLink 4 (H100, H200): 18; NVLink 5 (Blackwell):
# 18 of 50 GB/s. Networks as the sources state them; where one is silent, a DGX's cards: eight of
# 200 (A100) or 400 Gbit/s (later ones).
A100_80 = Machine("A100-SXM4-80GB", 2400, 1600)  # NVIDIA DGX A100 datasheet: 8 x 200 Gbit/s
A100_40 = Machine("A100-SXM4-40GB", 2400, 1600)  # NVIDIA DGX A100 datasheet: 8 x 200 Gbit/s
VTRAIN = Machine("A100-SXM4-80GB", 2400, 800)  # vTrain (MICRO 2024): 800 Gbit/s per node
H100 = Machine("H100-SXM5-80GB", 3600, 3200)  # NVIDIA DGX H100 datasheet: 8 x 400 Gbit/s
H200 = Machine("H200-SXM-141GB", 3600, 3200)  # NVIDIA DGX H200 datasheet: 8 x 400 Gbit/s
H100_96 = Machine("H100-96GB-HBM2e", 3600, 3200)  # torchtitan's reports: 400 Gbit/s per GPU
B200 = Machine("B200", 7200, 3200)  # NVIDIA B200 datasheet
B300 = Machine("B300", 7200, 6400)  # NVIDIA B300 datasheet
GB200 = Machine("GB200", 7200, 25600, 64)  # NVIDIA GB200 datasheet
GB300 = Machine("GB300", 7200, 51200, 64)  # NVIDIA GB300 datasheet

# What texts of the sets begin with, the longer ones first. Racks of 72 GPUs on one NVLink hold 64
# of a job; each GPU has a card of 400 (GB200) or 800 Gbit/s (B300, GB300).
MACHINES = (
    ("A100-SXM4-80GB", A100_80),
    ("A100 ", A100_80),
    ("a100_80gb", A100_80),
    ("a100_40gb", A100_40),
    ("h100_80gb", H100),
    ("H100 96GB", H100_96),
    ("H100", H100),
    ("H200 ", H200),
    ("DGX-H100", H100),
    ("DGX-B200", B200),
    ("DGX-B300", B300),
    ("DGX-GB200", GB200),
    ("DGX-GB300", GB300),
    ("GB200", GB200),
    ("NVIDIA H100-SXM5-80GB", H100),
    ("NVIDIA H200-SXM5-141GB", H200),
    ("NVIDIA Blackwell GPU (GB200)", GB200),
    ("NVIDIA Blackwell GPU (B200", B200),
)


def machine(text: str | None) -> Machine:
    """The machine that a set's text names; raises NotPosedError for one that is unknown."""
    for start, known in MACHINES:
        if text is not None and text.startswith(start):
            return known
    raise NotPosedError(f"unknown GPU {text!r}")


@cache
def cluster(kind: Machine, gpus: int) -> Cluster:
    """As many GPUs in full nodes, the last one with the rest."""
    full, rest = divmod(gpus, kind.per_node)
    links = {"intra_node_gbit_per_s": kind.within, "network_gbit_per_s": kind.between}
    nodes = [
        {"count": count, "devices": devices, "device": kind.device, **links}
        for count, devices in ((full, kind.per_node), (1 if rest else 0, rest))
        if count
    ]
    document = {
        "format": "hetplan-cluster",
        "version": 1,
        "name": f"{gpus} {kind.device}",
        "nodes": nodes,
    }
    return build_cluster(ClusterFile.model_validate(document, strict=False), where=kind.device)
