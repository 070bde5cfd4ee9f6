"""The machines on which published runs were made: GPU, links within and between nodes.

Bandwidths are those of one direction, as in cluster files; `between` is that of a node's network
cards together.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

from hetplan.profiling.cluster import Cluster, ClusterFile, build_cluster
from hetplan.runtime.truth.tables import NotPosedError


@dataclass(frozen=True)
class Machine:
    """A kind of node. device: of the catalogue, or a new type with `figures`: GiB, TFLOP/s in fp32
    and in 16 bit, GB/s, multiprocessors, watts where they bind. within, between: Gbit/s. per_node:
    GPUs that share the fast links."""

    device: str
    within: float
    between: float
    per_node: int = 8
    figures: tuple[float, float, float, float, int, float | None] | None = None
    source: str = ""


# NVLink 3 (A100): 12 links of 25 GB/s each way; NVLink 4 (H100, H200): 18; NVLink 5 (Blackwell):
# 18 of 50 GB/s. Networks as the sources state them; where one is silent, a DGX's cards: eight of
# 200 (A100) or 400 Gbit/s (later ones).
A100_80 = Machine("A100-SXM4-80GB", 2400, 1600, source="NVIDIA DGX A100 datasheet: 8 x 200 Gbit/s")
A100_40 = Machine("A100-SXM4-40GB", 2400, 1600, source="NVIDIA DGX A100 datasheet: 8 x 200 Gbit/s")
VTRAIN = Machine("A100-SXM4-80GB", 2400, 800, source="vTrain (MICRO 2024): 800 Gbit/s per node")
H100 = Machine("H100-SXM5-80GB", 3600, 3200, source="NVIDIA DGX H100 datasheet: 8 x 400 Gbit/s")
H200 = Machine("H200-SXM-141GB", 3600, 3200, source="NVIDIA DGX H200 datasheet: 8 x 400 Gbit/s")
# The GPU of torchtitan's reports: 6 stacks of HBM2e (6 x 1024 bit at 3.2 Gbit/s), 500 W.
H100_96 = Machine(
    "H100-96GB-HBM2e",
    3600,
    3200,
    figures=(96.0, 67.0, 989.5, 2457.0, 132, 500.0),
    source="torchtitan's reports: 96 GB HBM2e, 500 W, 400 Gbit/s per GPU",
)


def blackwell(
    name: str, memory_gib: float, tflops: float, per_node: int, between: float
) -> Machine:
    """A Blackwell system; dense bf16 peak, 8 TB/s of HBM3e, NVLink 5."""
    source = f"NVIDIA {name} datasheet, dense peaks"
    return Machine(
        name, 7200, between, per_node, (memory_gib, 80.0, tflops, 8000.0, 148, None), source
    )


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
    ("DGX-B200", blackwell("B200", 180.0, 2250.0, 8, 3200)),
    ("DGX-B300", blackwell("B300", 270.0, 2250.0, 8, 6400)),
    ("DGX-GB200", blackwell("GB200", 186.0, 2500.0, 64, 25600)),
    ("DGX-GB300", blackwell("GB300", 277.0, 2500.0, 64, 51200)),
    ("GB200", blackwell("GB200", 186.0, 2500.0, 64, 25600)),
    ("NVIDIA H100-SXM5-80GB", H100),
    ("NVIDIA H200-SXM5-141GB", H200),
    ("NVIDIA Blackwell GPU (GB200)", blackwell("GB200", 186.0, 2500.0, 64, 25600)),
    ("NVIDIA Blackwell GPU (B200", blackwell("B200", 180.0, 2250.0, 8, 3200)),
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
    devices: dict[str, Any] = {}
    if kind.figures:
        memory, single, half, speed, multiprocessors, watts = kind.figures
        devices[kind.device] = {
            "memory_gib": memory,
            "peak_tflops": {"fp32": single, "fp16": half, "bf16": half},
            "memory_gb_per_s": speed,
            "multiprocessors": multiprocessors,
            "tdp_w": watts,
            "source": kind.source,
        }
    document = {
        "format": "hetplan-cluster",
        "version": 1,
        "name": f"{gpus} {kind.device}",
        "nodes": nodes,
        "devices": devices,
    }
    return build_cluster(ClusterFile.model_validate(document, strict=False), where=kind.device)
