"""Single operators measured on a torch device.

Operators are drawn from sizes that transformers have: rows from a few tokens to some thousands,
widths from 64 to 16384, whole attention heads as batches of small products.
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

LARGEST_FLOPS = {"cpu": 4e9, "cuda": 2e13}
LARGEST_ELEMENTS = {"cpu": 2e7, "cuda": 1e9}


class Sizes(NamedTuple):
    """The sizes of one product and of one elementwise operator."""

    product: tuple[int, int, int, int]  # count, m, k, n
    elements: int
    is_sum: bool  # x + y; else x * x


# Many rows and few, narrow and wide, the scores of attention; from cached tensors to large ones.
QUICK = (
    Sizes((1, 4096, 4096, 4096), 2**16, is_sum=True),
    Sizes((1, 8192, 1024, 4096), 2**20, is_sum=False),
    Sizes((1, 512, 4096, 11008), 2**23, is_sum=True),
    Sizes((1, 2048, 8192, 2048), 2**25, is_sum=False),
    Sizes((64, 1024, 64, 1024), 2**27, is_sum=True),
)
QUICK_BYTES = 2**28


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
    """Measure `count` products and `count` elementwise operators of sizes that `seed` draws; see
    `operators_of`. Raises InputError for numbers that are not usable."""
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
    """Measure a product and an elementwise operator of each of the sizes.

    Peaks are the catalogue's where it knows `name`, else the highest rates that were reached.
    """
    tell = tell or silent
    dtype, width = DTYPES[precision], ELEMENT_BYTES[precision]
    measured = []
    for i, sizes in enumerate(drawn, 1):
        measured.append(_product(sizes.product, device, dtype, repeats))
        measured.append(_elementwise(sizes.elements, sizes.is_sum, device, dtype, repeats))
        if i % 10 == 0:
            tell(f"{2 * i} of {2 * len(drawn)} operators")
    if name is None:
        name = cpu_name(torch.get_num_threads()) if device == "cpu" else device_name(device)
    spec = catalogue().get(name)
    peak = max(2 * op.count * op.m * op.k * op.n / op.seconds for op in measured)
    bandwidth = max(op.elements * width / op.seconds for op in measured)
    if spec is not None and precision in spec.peak_tflops:
        peak, bandwidth = spec.peak_flops(precision), spec.memory_bytes_per_s
    return OperatorData(
        device=name,
        precision=precision,
        element_bytes=width,
        flops_per_second=peak,
        bytes_per_second=bandwidth,
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
    """Measure a few operators that transformers have, and on a GPU that has others beside it, an
    all-reduce over all of them. On a CPU the operators have an eighth of the rows and a
    sixty-fourth of the elements. Raises InputError for another device."""
    check_device(device)
    part = 8 if device == "cpu" else 1
    drawn = []
    for (count, m, k, n), elements, is_sum in operators:
        drawn.append(Sizes((count, m // part, k, n), elements // part**2, is_sum))
    data = operators_of(drawn, device, precision, 10, name=name)
    data = data.model_copy(update={"provenance": measured_here("hetplan profile quick", device)})
    gpus = 0 if device == "cpu" else usable_gpus()
    if gpus < 2:
        return data
    parts = [torch.ones(QUICK_BYTES // 4, device=f"cuda:{i}") for i in range(gpus)]

    def all_reduce() -> None:
        torch.cuda.nccl.all_reduce(parts)
        for i in range(gpus):
            torch.cuda.synchronize(i)

    bytes_per_link = 2 * (gpus - 1) / gpus * QUICK_BYTES
    rate = bytes_per_link / min(timed(all_reduce, device, 10))
    return data.model_copy(update={"bus_bytes_per_second": rate})


def cpu_name(threads: int) -> str:
    """The processor as Linux names it, with the number of threads that torch computes with."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:  # no Linux
        text = ""
    lines = (line.partition(":") for line in text.splitlines())
    name = next(
        (value.strip() for key, _, value in lines if key.strip() == "model name"),
        platform.machine(),
    )
    return f"{name}, {threads} thread{'s' if threads > 1 else ''}"


def _drawn_sizes(random: Random, kind: str) -> Sizes:
    """Random sizes for a kind of device, `cpu` or `cuda`."""
    product = _product_sizes(random, LARGEST_FLOPS[kind])
    elements = int(2 ** random.uniform(12, math.log2(LARGEST_ELEMENTS[kind])))
    return Sizes(product, elements, is_sum=random.random() < 0.5)


def _product_sizes(random: Random, largest_flops: float) -> tuple[int, int, int, int]:
    """Random (count, m, k, n) with at most `largest_flops`: products with weights, and now and then
    those of attention."""
    while True:
        if random.random() < 0.3:
            length, width = 2 ** random.randint(5, 11), random.choice((64, 128))
            inner = random.choice(((length, width, length), (length, length, width)))
            sizes = (2 ** random.randint(2, 7), *inner)
        else:
            widths = (64 * 2 ** random.randint(0, 8), 64 * 2 ** random.randint(0, 8))
            sizes = (1, 2 ** random.randint(4, 13), *widths)
        if 2.0 * sizes[0] * sizes[1] * sizes[2] * sizes[3] <= largest_flops:
            return sizes


def _product(
    sizes: tuple[int, int, int, int], device: str, dtype: Any, repeats: int
) -> MeasuredOperator:
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
    """x + y, or x * x: three and two numbers moved per element."""
    x, y = torch.randn(2, size, device=device, dtype=dtype)
    times = timed((lambda: x + y) if is_sum else (lambda: x * x), device, repeats)
    return MeasuredOperator(
        kind="elementwise",
        elements=float(size * (3 if is_sum else 2)),
        seconds=min(times),
        spread_seconds=max(times) - min(times),
    )
