"""Measured operators and collectives beside what the predictor says of them.

NeuSight (Lee et al., ASPLOS 2025): matrix products and elementwise operators in fp32 with TF32 off.
Vidur (Agrawal et al., MLSys 2024): products of transformer layers in fp16, and collectives.
aiconfigurator (NVIDIA, ai-dynamo/aiconfigurator): products in bursts by format, the best of three
libraries, and nccl-tests within a node.
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
from hetplan.profiling.rates.shipped import Estimate, Format

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
# What drivers call a device, longer beginnings first; aiconfigurator writes these names. Gbit/s one
# way between two GPUs of a node: NVLink 3, 4 and 5, and PCIe 4.0 and 5.0 x16.
DRIVER_NAMES = {
    "NVIDIA A100-SXM4-80GB": ("A100-SXM4-80GB", 2400.0),
    "NVIDIA A100-SXM4-40GB": ("A100-SXM4-40GB", 2400.0),
    "NVIDIA A100-PCIE-40GB": ("A100-PCIE-40GB", 252.0),
    "NVIDIA A100 80GB PCIe": ("A100-PCIE-80GB", 252.0),
    "NVIDIA H100 80GB HBM3": ("H100-SXM5-80GB", 3600.0),
    "NVIDIA H200": ("H200-SXM-141GB", 3600.0),
    "NVIDIA H20": ("H20", 3600.0),
    "NVIDIA GH200": ("GH200-96GB", 3600.0),
    "NVIDIA B200": ("B200", 7200.0),
    "NVIDIA GB200": ("GB200", 7200.0),
    "NVIDIA B300": ("B300", 7200.0),
    "NVIDIA GB300": ("GB300", 7200.0),
    "NVIDIA L40S": ("L40S", 252.0),
    "NVIDIA L4": ("L4", 252.0),
    "NVIDIA A10G": ("A10G", 252.0),
    "NVIDIA A30": ("A30", 252.0),
    "NVIDIA A40": ("A40", 252.0),
    "NVIDIA GeForce RTX 3090": ("RTX-3090", 252.0),
    "NVIDIA GeForce RTX 4090": ("RTX-4090", 252.0),
    "NVIDIA GeForce RTX 5090": ("RTX-5090", 504.0),
    "NVIDIA RTX 6000 Ada Generation": ("RTX-6000-Ada", 252.0),
    "NVIDIA RTX PRO 6000 Blackwell": ("RTX-PRO-6000-Blackwell", 504.0),
    "AMD Instinct MI300X": ("MI300X", 3584.0),
    "AMD Instinct MI325X": ("MI325X", 3584.0),
}
# aiconfigurator's formats, and the width of which k and n have to be multiples in each.
FORMATS: dict[str, tuple[Format, int]] = {
    "bfloat16": ("bf16", 1), "float16": ("fp16", 1), "fp8": ("fp8", 16),
    "fp8_block": ("fp8-block", 128), "nvfp4": ("fp4", 32),
}  # fmt: skip
NCCL_OPERATIONS = {
    "all_reduce": "all-reduce", "all_gather": "all-gather", "reduce_scatter": "reduce-scatter",
    "alltoall": "all-to-all",
}  # fmt: skip
# Bytes of an element. aiconfigurator's collector divides the bytes of nccl-tests by them, so that
# its column message_size counts elements: 2^28 of `half` take as long as 2^29 of `int8`.
NCCL_BYTES = {"half": 2, "bfloat16": 2, "float": 4, "int8": 1}
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


def product(row: Cells) -> Estimate:
    """NeuSight: B products of M x K by K x N in fp32."""
    count, m, k, n = (row.whole(column) for column in ("B", "M", "K", "N"))
    return product_seconds(*device_of(row.text("Device")), "fp32", Shape(count, m, k, n))


def elementwise(row: Cells) -> Estimate:
    """NeuSight: an elementwise operator, norm or softmax over B x H numbers in fp32."""
    name, columns = row.text("OPName"), row.whole("H")
    require(name in MOVES, f"unknown operator {name}")
    kind, tensors = MOVES[name]
    moved = tensors * row.whole("B") * columns * ELEMENT_BYTES["fp32"]
    return move_seconds(kind, moved, *device_of(row.text("Device")), row=columns)


def layer_product(row: Cells) -> Estimate:
    """Vidur: a product of a transformer layer in fp16."""
    shape = Shape(1, row.whole("m"), row.whole("k"), row.whole("n"))
    return product_seconds(*device_of(row.text("device")), "fp16", shape)


def collective(row: Cells) -> Estimate:
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
    return collective_seconds(OPERATIONS[operation], size, ranks, fabric)


def driver_device(name: str) -> tuple[str, float]:
    """Name in the catalogue, and Gbit/s between two GPUs of a node, of the device that its driver
    calls so; raises NotPosedError."""
    starts = [start for start in DRIVER_NAMES if (name + " ").startswith(start + " ")]
    require(starts, f"unknown device {name}")
    return DRIVER_NAMES[max(starts, key=len)]


def burst(row: Cells) -> Estimate:
    """aiconfigurator: a product in a burst."""
    name, _ = driver_device(row.text("device"))
    written = row.text("gemm_dtype")
    require(written in FORMATS, f"products in {written} are not modelled")
    number, width = FORMATS[written]
    m, k, n = (row.whole(column) for column in "mkn")
    require(k % width == 0 and n % width == 0, f"{written} of k or n that are no {width} wide")
    units = "fp8" if number == "fp8-block" else number
    require(units in catalogue()[name].peak_tflops, f"{name} has no units for {written}")
    return product_seconds(name, catalogue()[name], number, Shape(1, m, k, n), regime="burst")


def nccl(row: Cells) -> Estimate:
    """aiconfigurator: a collective within a node."""
    name, gbit = driver_device(row.text("device"))
    operation, number = row.text("op_name"), row.text("nccl_dtype")
    require(operation in NCCL_OPERATIONS, f"unknown operation {operation}")
    require(number in NCCL_BYTES, f"unknown numbers {number}")
    latency, ranks = INTRA_NODE_LATENCY_US * 1e-6, row.whole("num_gpus")
    node = Node(name, max(ranks, 8), gbit * GBIT, gbit * GBIT, latency, latency)
    size = float(row.whole("message_size") * NCCL_BYTES[number])
    return collective_seconds(NCCL_OPERATIONS[operation], size, ranks, node_fabric(node))


def measured(
    estimate: Callable[[Cells], Estimate], *columns: str, unit: str = "seconds", scale: float = 1.0
) -> Source:
    """A file of operators; the columns tell their kind. They are no plans: no workload.

    unit: the column of what was measured; scale: seconds of its unit.
    """

    def published(row: Cells) -> Published:
        seconds = row.number(unit)
        return Published(
            None,
            None if seconds is None else seconds * scale,
            kind=", ".join(row.text(column) for column in columns),
        )

    def predicted(row: Cells) -> Predicted:
        made = estimate(row)
        return Predicted(made.seconds, interval=(made.low, made.high))

    return Source(published, predicted)


FILES = {
    "neusight_gemm_fp32.csv.gz": measured(product, "OPName", "Device"),
    "neusight_elementwise_fp32.csv.gz": measured(elementwise, "OPName", "Device"),
    "vidur_gemm_fp16.csv.gz": measured(layer_product, "op", "device"),
    "vidur_collectives.csv.gz": measured(
        collective, "op", "system", "num_workers", "devices_per_node"
    ),
    "aic_gemm.csv.gz": measured(burst, "gemm_dtype", "device", unit="best_ms", scale=1e-3),
    "aic_nccl.csv.gz": measured(
        nccl, "op_name", "nccl_dtype", "device", "num_gpus", unit="latency", scale=1e-3
    ),
}
