"""Measured operators and collectives beside what the predictor says of them.

NeuSight (Lee et al., ASPLOS 2025): matrix products and elementwise operators in fp32 with TF32 off.
Vidur (Agrawal et al., MLSys 2024): products of transformer layers in fp16, and collectives.
"""

from collections.abc import Callable

from evidence.truth.tables import Cells, Predicted, Published, Source, require
from hetplan.profiling.hardware.cluster import (
    GBIT,
    INTRA_NODE_LATENCY_US,
    DeviceSpec,
    Node,
    catalogue,
)
from hetplan.profiling.models.operators import ELEMENT_BYTES, Shape
from hetplan.profiling.rates.collectives import collective_seconds, node_fabric
from hetplan.profiling.rates.products import MoveKind, move_seconds, product_seconds

# Names of the sets, and of the catalogue.
DEVICES = {
    "Tesla P100-PCIE-16GB": "P100-PCIE-16GB",
    "Tesla V100-PCIE-32GB": "V100-PCIE-32GB",
    "Tesla P4": "P4",
    "Tesla T4": "T4",
    "NVIDIA L4": "L4",
    "NVIDIA A100-PCIE-40GB": "A100-PCIE-40GB",
    "a100": "A100-SXM4-80GB",
    "a40": "A40",
    "h100": "H100-SXM5-80GB",
}
# Device, Gbit/s one way between two GPUs of a node and among more of them. DGX: NVLink on a switch.
# Pairs: an NVLink bridge (A100: 12 links of 25 GB/s, A40: 4 of 14) joins two GPUs, PCIe 4.0 x16 the
# others. What joins the nodes is stated nowhere.
SYSTEMS = {
    "a100_dgx": ("A100-SXM4-80GB", 2400.0, 2400.0),
    "h100_dgx": ("H100-SXM5-80GB", 3600.0, 3600.0),
    "a100_pairwise_nvlink": ("A100-PCIE-80GB", 2400.0, 2400.0),
    "a40_pairwise_nvlink": ("A40", 450.0, 256.0),
}
OPERATIONS = {"all_reduce": "all-reduce", "send_recv": "send"}
# How elementwise operators move memory, and how many tensors; a name that ends in u takes a number.
MOVES: dict[str, tuple[MoveKind, int]] = {
    **dict.fromkeys(("add", "mul", "div", "pow"), ("binary", 3)),
    **dict.fromkeys(("addu", "mulu", "divu", "powu", "relu", "gelu", "tanh"), ("pointwise", 2)),
    "ln": ("norm", 2),
    "softmax": ("softmax", 2),
}


def device_of(name: str) -> tuple[str, DeviceSpec]:
    """Name and entry in the catalogue; raises NotPosedError."""
    require(name in DEVICES, f"unknown device {name}")
    return DEVICES[name], catalogue()[DEVICES[name]]


def product(row: Cells) -> float:
    """NeuSight: B products of M x K by K x N in fp32."""
    count, m, k, n = (row.whole(column) for column in ("B", "M", "K", "N"))
    return product_seconds(*device_of(row.text("Device")), "fp32", Shape(count, m, k, n)).seconds


def elementwise(row: Cells) -> float:
    """NeuSight: an elementwise operator, norm or softmax over B x H numbers in fp32."""
    name, columns = row.text("OPName"), row.whole("H")
    require(name in MOVES, f"unknown operator {name}")
    kind, tensors = MOVES[name]
    moved = tensors * row.whole("B") * columns * ELEMENT_BYTES["fp32"]
    return move_seconds(kind, moved, *device_of(row.text("Device")), row=columns).seconds


def layer_product(row: Cells) -> float:
    """Vidur: a product of a transformer layer in fp16."""
    shape = Shape(1, row.whole("m"), row.whole("k"), row.whole("n"))
    return product_seconds(*device_of(row.text("device")), "fp16", shape).seconds


def collective(row: Cells) -> float:
    """Vidur: an all-reduce, or a message, of `size` bytes."""
    system, operation = row.text("system"), row.text("op")
    require(system in SYSTEMS, f"unknown system {system}")
    require(operation in OPERATIONS, f"unknown operation {operation}")
    ranks, each = row.whole("num_workers"), row.whole("devices_per_node")
    require(ranks <= each, "the network between nodes is not stated")
    device, pair, several = SYSTEMS[system]
    rate, latency = GBIT * (pair if ranks == 2 else several), INTRA_NODE_LATENCY_US * 1e-6
    fabric = node_fabric(Node(device, each, rate, rate, latency, latency))
    size = row.number("size") or 0.0
    return collective_seconds(OPERATIONS[operation], size, ranks, fabric).seconds


def measured(seconds: Callable[[Cells], float], *columns: str) -> Source:
    """A file of operators; the columns tell their kind. They are no plans: no workload."""

    def published(row: Cells) -> Published:
        return Published(
            None, row.number("seconds"), kind=", ".join(row.text(column) for column in columns)
        )

    return Source(published, lambda row: Predicted(seconds(row)))


FILES = {
    "neusight_gemm_fp32.csv.gz": measured(product, "OPName", "Device"),
    "neusight_elementwise_fp32.csv.gz": measured(elementwise, "OPName", "Device"),
    "vidur_gemm_fp16.csv.gz": measured(layer_product, "op", "device"),
    "vidur_collectives.csv.gz": measured(
        collective, "op", "system", "num_workers", "devices_per_node"
    ),
}
