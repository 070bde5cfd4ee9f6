"""Operators timed on a torch device, for learning its efficiency: products and elementwise ones of
many sizes.

Sizes are drawn from those that transformers have: rows from a few tokens to some thousands, widths
from 64 to 16384, whole attention heads as batches of small products. torch is imported by the
functions.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from hetplan.errors import InputError
from hetplan.profiling.catalogue import catalogue
from hetplan.profiling.efficiency import MeasuredOperator, OperatorData
from hetplan.profiling.operators import ELEMENT_BYTES
from hetplan.profiling.precision import Precision
from hetplan.runtime.devices import check_device, device_name, measured_here, now

WARM_UP = 2
LARGEST_FLOPS = {"cpu": 4e9, "cuda": 2e13}
LARGEST_ELEMENTS = {"cpu": 2e7, "cuda": 1e9}


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
    """`count` products and `count` elementwise operators; peaks from the catalogue where it knows
    `name`, else the most that was reached. Raises InputError for numbers that are not usable."""
    import torch

    check_device(device)
    if count < 1 or repeats < 1:
        raise InputError("operators and repeats", got=min(count, repeats), expected="at least 1")
    from hetplan.runtime.references.timed import DTYPES

    dtype = DTYPES[precision]
    random, kind = Random(seed), device.partition(":")[0]
    measured = []
    for i in range(count):
        measured.append(_product(_sizes(random, LARGEST_FLOPS[kind]), device, dtype, repeats))
        measured.append(_elementwise(random, LARGEST_ELEMENTS[kind], device, dtype, repeats))
        if tell is not None and (i + 1) % 10 == 0:
            tell(f"{2 * (i + 1)} of {2 * count} operators")
    width = ELEMENT_BYTES[precision]
    called = name or (cpu_name(torch.get_num_threads()) if device == "cpu" else device_name(device))
    spec = catalogue().get(called)
    peak = max(2 * op.count * op.m * op.k * op.n / op.seconds for op in measured)
    bandwidth = max(op.elements * width / op.seconds for op in measured)
    if spec is not None and precision in spec.peak_tflops:
        peak, bandwidth = spec.peak_flops(precision), spec.memory_bytes_per_s
    return OperatorData(
        device=called,
        precision=precision,
        element_bytes=width,
        flops_per_second=peak,
        bytes_per_second=bandwidth,
        provenance=measured_here("hetplan profile operators", device),
        operators=measured,
    )


def cpu_name(threads: int) -> str:
    """The processor as Linux names it, and how many threads torch computes with."""
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


def _sizes(random: Random, most: float) -> tuple[int, int, int, int]:
    """(count, m, k, n) with at most that many FLOPs: products with weights, and now and then those
    of attention."""
    while True:
        if random.random() < 0.3:
            length, width = 2 ** random.randint(5, 11), random.choice((64, 128))
            inner = random.choice(((length, width, length), (length, length, width)))
            sizes = (2 ** random.randint(2, 7), *inner)
        else:
            sizes = (
                1,
                2 ** random.randint(4, 13),
                64 * 2 ** random.randint(0, 8),
                64 * 2 ** random.randint(0, 8),
            )
        if 2.0 * sizes[0] * sizes[1] * sizes[2] * sizes[3] <= most:
            return sizes


def _product(
    sizes: tuple[int, int, int, int], device: str, dtype: Any, repeats: int
) -> MeasuredOperator:
    import torch

    count, m, k, n = sizes
    left, right = (
        torch.randn(count, m, k, device=device, dtype=dtype),
        torch.randn(count, k, n, device=device, dtype=dtype),
    )
    seconds, spread = _timed(lambda: left @ right, device, repeats)
    return MeasuredOperator(
        kind="product", count=float(count), m=float(m), k=float(k), n=float(n),
        elements=float(count * (m * k + k * n + m * n)), seconds=seconds, spread_seconds=spread,
    )  # fmt: skip


def _elementwise(
    random: Random, most: float, device: str, dtype: Any, repeats: int
) -> MeasuredOperator:
    """x + y, or x * x: three and two numbers moved per element."""
    import torch

    size = int(2 ** random.uniform(12, float(torch.tensor(most).log2())))
    x, y = (
        torch.randn(size, device=device, dtype=dtype),
        torch.randn(size, device=device, dtype=dtype),
    )
    both = random.random() < 0.5
    seconds, spread = _timed((lambda: x + y) if both else (lambda: x * x), device, repeats)
    return MeasuredOperator(
        kind="elementwise",
        elements=float(size * (3 if both else 2)),
        seconds=seconds,
        spread_seconds=spread,
    )


def _timed(run: Callable[[], Any], device: str, repeats: int) -> tuple[float, float]:
    """The fastest repeat (what is slower was disturbed) and the spread; a single thread's own time,
    on a CPU."""
    import torch

    alone = device == "cpu" and torch.get_num_threads() == 1
    times = []
    for i in range(WARM_UP + repeats):
        begun = time.thread_time() if alone else now(device)
        run()
        if i >= WARM_UP:
            times.append(max((time.thread_time() if alone else now(device)) - begun, 1e-9))
    return min(times), max(times) - min(times)
