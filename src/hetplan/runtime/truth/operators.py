"""Measured operators and collectives beside what the predictor says of them.

NeuSight (Lee et al., ASPLOS 2025): matrix products and elementwise operators in fp32 with TF32 off.
Vidur (Agrawal et al., MLSys 2024): products of transformer layers in fp16, and collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from hetplan.profiling.catalogue import DeviceSpec, catalogue
from hetplan.profiling.cluster import GBIT
from hetplan.profiling.operators import Elementwise, Matmul, Operator, Precision
from hetplan.profiling.times import DEFAULT_EFFICIENCY, Rates, all_reduce_seconds, operator_time
from hetplan.runtime.truth.tables import Cells, Predicted, Published, Source, require

# Names of the sets: of the catalogue, or memory GiB, TFLOP/s in fp32 and fp16, GB/s.
DEVICES: dict[str, str | tuple[float, float, float, float]] = {
    "Tesla P100-PCIE-16GB": "P100-PCIE-16GB",
    "Tesla T4": "T4",
    "NVIDIA A100-PCIE-40GB": "A100-PCIE-40GB",
    "a100": "A100-SXM4-80GB",
    "h100": "H100-SXM5-80GB",
    "Tesla V100-PCIE-32GB": (32, 14, 112, 900),  # NVIDIA V100 datasheet, PCIe column
    "Tesla P4": (8, 5.5, 5.5, 192),  # NVIDIA P4 datasheet
    "NVIDIA L4": (24, 30.3, 121, 300),  # NVIDIA L4 datasheet, dense
    "a40": (48, 37.4, 149.7, 696),  # NVIDIA A40 datasheet, dense
}
# Gbit/s one way between two GPUs of a node, among more of them, and between nodes. DGX: NVLink on a
# switch. Pairs: an NVLink bridge (A100: 12 links of 25 GB/s, A40: 4 of 14) joins two GPUs, PCIe 4.0
# x16 the others.
SYSTEMS = {
    "a100_dgx": (2400.0, 2400.0, 1600.0),
    "h100_dgx": (3600.0, 3600.0, 3200.0),
    "a100_pairwise_nvlink": (2400.0, 256.0, 200.0),
    "a40_pairwise_nvlink": (450.0, 256.0, 200.0),
}
# Tensors that an elementwise operator reads and writes; a name that ends in u takes a number.
MOVED = {"add": 3, "mul": 3, "div": 3, "pow": 3}
NODE_LATENCY, NETWORK_LATENCY = 6e-6, 20e-6  # as cluster files assume


def product(row: Cells) -> float:
    """NeuSight: B products of M x K by K x N in fp32; of `bmm` both sides are activations."""
    name = row.text("OPName")
    m, k, n, count = (row.whole(column) for column in ("M", "K", "N", "B"))
    product = Matmul(name, m, k, n, count, weight=name != "bmm")
    return seconds_of(product, row.text("Device"), "fp32")


def elementwise(row: Cells) -> float:
    """NeuSight: an elementwise operator, norm or softmax over B x H numbers in fp32."""
    name = row.text("OPName")
    moved = MOVED.get(name, 2) * row.whole("B") * row.whole("H")
    return seconds_of(Elementwise(name, moved, moved), row.text("Device"), "fp32")


def layer_product(row: Cells) -> float:
    """Vidur: a product of a transformer layer in fp16."""
    m, k, n = (row.whole(column) for column in ("m", "k", "n"))
    return seconds_of(Matmul(row.text("op"), m, k, n), row.text("device"), "fp16")


def collective(row: Cells) -> float:
    """Vidur: an all-reduce over the slowest link's ring, or a message, of `size` bytes."""
    system, operation, size = row.text("system"), row.text("op"), row.number("size") or 0.0
    require(system in SYSTEMS, f"unknown system {system}")
    require(operation in ("all_reduce", "send_recv"), f"unknown operation {operation}")
    ranks, inside = (
        row.whole("num_workers"),
        row.whole("num_workers") <= row.whole("devices_per_node"),
    )
    pair, several, network = SYSTEMS[system]
    rate = GBIT * ((pair if ranks == 2 else several) if inside else network)
    latency = NODE_LATENCY if inside else NETWORK_LATENCY
    if operation == "send_recv":
        return size / rate + latency
    return all_reduce_seconds(size, ranks, rate, latency)


@cache
def rates(device: str, precision: Precision) -> Rates:
    """What a device reaches; raises NotPosedError for one that is not modelled."""
    require(device in DEVICES, f"unknown device {device}")
    known = DEVICES[device]
    if isinstance(known, str):
        spec = catalogue()[known]
    else:
        memory, single, half, speed = known
        spec = DeviceSpec(
            memory_gib=memory,
            peak_tflops={"fp32": single, "fp16": half},
            memory_gb_per_s=speed,
            source="datasheet",
        )
    return Rates.of(spec, precision, DEFAULT_EFFICIENCY)


def seconds_of(operator: Operator, device: str, precision: Precision) -> float:
    """The forward pass of one operator, no less than a launch."""
    spent = operator_time(operator, rates(device, precision), 1, 1).forward
    return max(spent, DEFAULT_EFFICIENCY.launch_seconds)


def measured(seconds: Callable[[Cells], float], *columns: str) -> Source:
    """A file of operators; the columns tell their kind. They are no plans: no workload."""

    def published(row: Cells) -> Published:
        kind = ", ".join(row.text(column) for column in columns)
        return Published(None, row.number("seconds"), kind=kind)

    return Source(published, lambda row: Predicted(seconds(row)))


FILES = {
    "neusight_gemm_fp32.csv.gz": measured(product, "OPName", "Device"),
    "neusight_elementwise_fp32.csv.gz": measured(elementwise, "OPName", "Device"),
    "vidur_gemm_fp16.csv.gz": measured(layer_product, "op", "device"),
    "vidur_collectives.csv.gz": measured(
        collective, "op", "system", "num_workers", "devices_per_node"
    ),
}
