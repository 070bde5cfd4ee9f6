"""Measures the seconds of single operators on a torch device.

An operator is a batch of equal matrix products, [m, k] times [k, n], or elementwise. Sizes are
drawn among those of transformers: products with weights have some to some thousand rows (tokens)
and widths from 64 to 16384; those of attention are a batch of small products, one for each head.
"""

import math
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch

from hetplan.errors import require
from hetplan.profiling.hardware.cluster import catalogue
from hetplan.profiling.models.operators import ELEMENT_BYTES, Precision
from hetplan.profiling.rates.efficiency import MeasuredOperator, OperatorData
from hetplan.runtime.launch.devices import (
    check_device,
    device_name,
    measured_here,
    usable_gpus,
)
from hetplan.runtime.measuring.clock import timed
from hetplan.runtime.measuring.networks import silent
from hetplan.runtime.tracing.counter import DTYPES

# The largest drawn operators, by the kind of the device.
LARGEST_FLOPS = {"cpu": 4e9, "cuda": 2e13}  # FLOPs of a product
LARGEST_ELEMENTS = {"cpu": 2e7, "cuda": 1e9}  # elements of an elementwise operator's output


class Sizes(NamedTuple):
    """The sizes of a batch of products and of an elementwise operator, measured in turn."""

    product: tuple[int, int, int, int]  # number of products; m, k, n of each
    elements: int  # elements of the elementwise operator's output
    is_sum: bool  # True: the elementwise operator is x + y; False: x * x


# Products with many and few rows, narrow and wide weights, and the scores of attention; elementwise
# operators from tensors that a cache holds to large ones.
QUICK = (
    Sizes((1, 4096, 4096, 4096), 2**16, is_sum=True),
    Sizes((1, 8192, 1024, 4096), 2**20, is_sum=False),
    Sizes((1, 512, 4096, 11008), 2**23, is_sum=True),
    Sizes((1, 2048, 8192, 2048), 2**25, is_sum=False),
    Sizes((64, 1024, 64, 1024), 2**27, is_sum=True),
)
QUICK_BYTES = 2**28  # bytes of the all-reduce that `measure_quickly` measures


def measure_operators(
    device: str,
    precision: Precision,
    *,
    count: int = 60,
    repeats: int = 5,
    seed: int = 0,
    name: str | None = None,
    tell: Callable[[str], None] | None = None,
) -> OperatorData:
    """Measure `count` batches of products and `count` elementwise operators of random sizes.

    seed: seed of the random sizes. The other arguments are those of `operators_of`. Raises
    InputError where `count` or `repeats` is less than 1, or there is no such device.
    """
    check_device(device)
    require(
        count >= 1 and repeats >= 1,
        "operators and repeats",
        got=min(count, repeats),
        expected="at least 1",
    )
    random, kind = Random(seed), device.partition(":")[0]
    drawn = [_drawn_sizes(random, kind) for _ in range(count)]
    data = operators_of(drawn, device, precision, repeats, name=name, tell=tell)
    return data.model_copy(
        update={"provenance": measured_here("hetplan profile operators", device)}
    )


def operators_of(
    drawn: Sequence[Sizes],
    device: str,
    precision: Precision,
    repeats: int,
    *,
    name: str | None = None,
    tell: Callable[[str], None] | None = None,
) -> OperatorData:
    """Measure a batch of products and an elementwise operator of each of the sizes.

    repeats: number of measurements of each operator. name: name of the device type; None: the
    device's own name. tell: is called with a line about the progress. The peak rates are those of
    the catalogue where it has the device type, else the highest that were measured.
    """
    tell = tell or silent
    dtype, element_bytes = DTYPES[precision], ELEMENT_BYTES[precision]
    measured = []
    for i, sizes in enumerate(drawn, 1):
        measured.append(_product(sizes.product, device, dtype, repeats))
        measured.append(_elementwise(sizes.elements, sizes.is_sum, device, dtype, repeats))
        if i % 10 == 0:
            tell(f"{2 * i} of {2 * len(drawn)} operators")
    if name is None:
        name = cpu_name(torch.get_num_threads()) if device == "cpu" else device_name(device)
    spec = catalogue().get(name)
    if spec is not None and precision in spec.peak_tflops:
        flops_per_second, bytes_per_second = spec.peak_flops(precision), spec.memory_bytes_per_s
    else:
        flops_per_second = max(2 * op.count * op.m * op.k * op.n / op.seconds for op in measured)
        bytes_per_second = max(op.elements * element_bytes / op.seconds for op in measured)
    return OperatorData(
        device=name,
        precision=precision,
        element_bytes=element_bytes,
        flops_per_second=flops_per_second,
        bytes_per_second=bytes_per_second,
        provenance=measured_here("hetplan profile", device),
        operators=measured,
    )


def measure_quickly(
    device: str,
    precision: Precision,
    *,
    name: str | None = None,
    operators: Sequence[Sizes] = QUICK,
) -> OperatorData:
    """Measure a few typical operators of transformers and, where the machine has several GPUs,
    all-reduces over two, four, eight and so on, and over all of them.

    operators: sizes on a GPU. A CPU gets an eighth of the rows and a sixty-fourth of the elements.
    name: see `operators_of`. Raises InputError where there is no such device.
    """
    check_device(device)
    divisor = 8 if device == "cpu" else 1
    sizes = []
    for (count, m, k, n), elements, is_sum in operators:
        product = count, m // divisor, k, n
        sizes.append(Sizes(product, elements // divisor**2, is_sum))
    data = operators_of(sizes, device, precision, 10, name=name)
    data = data.model_copy(update={"provenance": measured_here("hetplan profile quick", device)})
    gpus = 0 if device == "cpu" else usable_gpus()
    if gpus < 2:
        return data
    rates = {ranks: bus_bandwidth(ranks, device) for ranks in rank_counts(gpus)}
    return data.model_copy(
        update={"bus_bytes_per_second": rates[gpus], "all_reduce_bytes_per_second": rates}
    )


def rank_counts(gpus: int) -> list[int]:
    """Powers of two up to the number of GPUs of a machine, and this number."""
    powers = [2**i for i in range(1, gpus.bit_length()) if 2**i < gpus]
    return [*powers, gpus]


def bus_bandwidth(ranks: int, device: str) -> float:
    """Bytes/s that pass each link in a large all-reduce over the first `ranks` GPUs, as nccl-tests
    report it."""
    # fp32: 4 bytes an element
    tensors = [torch.ones(QUICK_BYTES // 4, device=f"cuda:{i}") for i in range(ranks)]

    def all_reduce() -> None:
        torch.cuda.nccl.all_reduce(tensors)
        for i in range(ranks):
            torch.cuda.synchronize(i)

    bytes_per_link = 2 * (ranks - 1) / ranks * QUICK_BYTES  # in a ring all-reduce
    return bytes_per_link / min(timed(all_reduce, device, 10))


def cpu_name(threads: int) -> str:
    """The name of the processor and the number of threads with which torch computes.

    Linux names the processor's model. Other systems name its architecture alone.
    """
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:  # no Linux
        text = ""
    name = platform.machine()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
            break
    return f"{name}, {threads} thread{'s' if threads > 1 else ''}"


def _drawn_sizes(random: Random, kind: str) -> Sizes:
    """Random sizes for a kind of device, `cpu` or `cuda`."""
    product = _product_sizes(random, LARGEST_FLOPS[kind])
    elements = int(2 ** random.uniform(12, math.log2(LARGEST_ELEMENTS[kind])))
    return Sizes(product, elements, is_sum=random.random() < 0.5)


def _product_sizes(random: Random, largest_flops: float) -> tuple[int, int, int, int]:
    """Random (number of products, m, k, n) of at most `largest_flops`: three in ten are those of
    attention, the others are products with weights."""
    while True:
        if random.random() < 0.3:
            tokens = 2 ** random.randint(5, 11)
            width = random.choice((64, 128))
            scores = (tokens, width, tokens)
            values = (tokens, tokens, width)
            product = random.choice((scores, values))
            heads = 2 ** random.randint(2, 7)
            sizes = (heads, *product)
        else:
            widths = (64 * 2 ** random.randint(0, 8), 64 * 2 ** random.randint(0, 8))
            sizes = (1, 2 ** random.randint(4, 13), *widths)
        if 2.0 * sizes[0] * sizes[1] * sizes[2] * sizes[3] <= largest_flops:
            return sizes


def _product(
    sizes: tuple[int, int, int, int], device: str, dtype: Any, repeats: int
) -> MeasuredOperator:
    """Measure a batch of products; sizes: (number of products, m, k, n)."""
    count, m, k, n = sizes
    left = torch.randn(count, m, k, device=device, dtype=dtype)
    right = torch.randn(count, k, n, device=device, dtype=dtype)
    times = timed(lambda: left @ right, device, repeats)
    return MeasuredOperator(
        kind="product", count=float(count), m=float(m), k=float(k), n=float(n),
        elements=float(count * (m * k + k * n + m * n)),
        seconds=min(times), spread_seconds=max(times) - min(times),
    )  # fmt: skip


def _elementwise(
    size: int, is_sum: bool, device: str, dtype: Any, repeats: int
) -> MeasuredOperator:
    """Measure x + y, which moves three numbers per element, or x * x, which moves two."""
    x, y = torch.randn(2, size, device=device, dtype=dtype)

    def operation() -> torch.Tensor:
        return x + y if is_sum else x * x

    times = timed(operation, device, repeats)
    return MeasuredOperator(
        kind="elementwise",
        elements=float(size * (3 if is_sum else 2)),
        seconds=min(times),
        spread_seconds=max(times) - min(times),
    )
