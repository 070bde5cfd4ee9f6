"""What is measured on a torch device: a profile of a model's layers, and single operators.

A profile is written after each table, and gone on with where it stopped. Equal layers are measured
once: embedding, one block, head. A tensor degree is one rank's part of the layer (Megatron's split
of heads, feed-forward width and vocabulary), run alone: its all-reduces are priced elsewhere.

Operators are drawn from sizes that transformers have: rows from a few tokens to some thousands,
widths from 64 to 16384, whole attention heads as batches of small products.
"""

import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch

from hetplan.errors import require
from hetplan.formulations.poplar.awareness import OutOfMemoryOnDevice
from hetplan.profiling.hardware.cluster import catalogue
from hetplan.profiling.models.model import Model
from hetplan.profiling.models.operators import ELEMENT_BYTES, Precision
from hetplan.profiling.profiles.predict import profile_layers
from hetplan.profiling.profiles.profile import Profile, ProfileTable, Readings, load_profile
from hetplan.profiling.rates.efficiency import MeasuredOperator, OperatorData
from hetplan.runtime.launch.devices import (
    check_device,
    device_name,
    measured_here,
    now,
    usable_gpus,
)
from hetplan.runtime.measuring.networks import (
    KINDS,
    network,
    out_of_memory,
    saved_bytes,
    shape_of,
    silent,
    tokens_of,
)
from hetplan.runtime.tracing.counter import DTYPES

WARM_UP = 2


def measure_profile(
    model: Model,
    device: str,
    *,
    micro_batches: Sequence[int],
    tensor_degrees: Sequence[int] = (1,),
    name: str | None = None,
    repeats: int = 5,
    output: str | os.PathLike[str] | None = None,
    tell: Callable[[str], None] | None = None,
) -> Profile:
    """Measure every layer of `model` for each tensor degree and micro-batch on the torch device
    `device`.

    name: the device's type in cluster files, default what torch calls it. output: a file that is
    written after every table; one that is there already must be of the same model, and its tables
    are kept. tell: receives a line a table.
    Raises UnsupportedError without torch or for a model without torch layers, InputError for
    arguments, and where not even one size fits in memory.
    """
    check_device(device)
    shape_of(model)
    tell = tell or silent
    require(repeats >= 1, "repeats", got=repeats, expected="at least 1")
    kind = name or device_name(device)
    tables = _kept(model, output)
    have = {(table.device, table.tensor, table.micro_batch) for table in tables}
    wanted = [(tp, b) for tp in sorted(set(tensor_degrees)) for b in sorted(set(micro_batches))]
    too_large: dict[int, int] = {}
    for i, (tensor, batch) in enumerate(wanted):
        place = f"{i + 1}/{len(wanted)} tensor {tensor}, micro-batch {batch}"
        if (kind, tensor, batch) in have:
            tell(f"{place}: already in the file")
            continue
        if batch >= too_large.get(tensor, batch + 1):
            continue
        try:
            table = measure_layers(model, kind, device, tensor, batch, repeats)
        except OutOfMemoryOnDevice as error:
            too_large[tensor] = batch
            tell(f"{place}: {error}")
            continue
        tables.append(table)
        tell(f"{place}: {1e3 * sum(table.seconds()):.4g} ms forward and backward")
        if output is not None:
            _profile(model, tables, device).save(output)
    require(tables, "no size fits in the device's memory", where=device, got=min(micro_batches))
    return _profile(model, tables, device)


def _kept(model: Model, output: str | os.PathLike[str] | None) -> list[ProfileTable]:
    """Tables of an earlier run; raises InputError where the file is of another model."""
    if output is None or not Path(output).exists():
        return []
    where = os.fspath(output)
    kept = load_profile(output)
    for key, expected in (
        ("model", model.name), ("sequence", model.sequence), ("precision", model.precision),
    ):  # fmt: skip
        require(
            getattr(kept, key) == expected,
            f"{key} of the profile that is there differs",
            where=where,
            got=getattr(kept, key),
            expected=str(expected),
        )
    require(
        kept.provenance.kind == "measured",
        "a predicted profile is there already",
        where=where,
        expected="another name",
    )
    return list(kept.tables)


def _profile(model: Model, tables: Sequence[ProfileTable], device: str) -> Profile:
    return Profile(
        model=model.name,
        sequence=model.sequence,
        precision=model.precision,
        provenance=measured_here("hetplan profile measure", device),
        layers=profile_layers(model),
        tables=list(tables),
    )


def measure_layers(
    model: Model, kind: str, device: str, tensor: int, batch: int, repeats: int
) -> ProfileTable:
    """The table of one tensor degree and micro-batch, in which every layer has its kind's readings;
    raises OutOfMemoryOnDevice where it does not fit. kind: the device's type."""
    with out_of_memory(batch):
        made = network(model, device, tensor=tensor, blocks=1)
        tokens = tokens_of(model, batch, device, tensor=tensor)
        with torch.no_grad():
            x = made.layers[0](tokens)
        of_kind = {
            name: _read(layer, arguments, own, device, repeats)
            for name, layer, own, arguments in zip(
                KINDS, made.layers, made.own, ((tokens,), (x,), (x, tokens)), strict=True
            )
        }
    rows = [of_kind[layer.kind] for layer in model.layers]
    columns: dict[str, Any] = {key: [row[key] for row in rows] for key in rows[0]}
    seconds = {key: columns.pop(key) for key in ("forward_seconds", "backward_seconds")}
    return ProfileTable(
        device=kind, tensor=tensor, micro_batch=batch, **seconds, readings=Readings(**columns)
    )


def _read(
    layer: Any, arguments: tuple[Any, ...], own: Sequence[Any], device: str, repeats: int
) -> dict[str, float]:
    """One layer on (x,) or (x, targets): medians and spreads (slowest less fastest repeat) in
    seconds, and bytes, by their names in the profile.

    saved_bytes: what autograd keeps between the passes. peak_bytes: beside the parameters and what
    is kept, at the passes' peak; not of a CPU, where nothing keeps such books.
    """
    x, targets = arguments[0].detach(), arguments[1:]
    x.requires_grad_(x.is_floating_point())
    with saved_bytes(layer.parameters()) as kept:
        once = layer(x, *targets)
        saved = kept()
    gradient = torch.ones_like(once)
    once.backward(gradient)
    del once
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    times = []
    for _ in range(WARM_UP + repeats):
        x.grad = None
        begun = now(device)
        out = layer(x, *targets)
        between = now(device)
        out.backward(gradient)
        times.append((between - begun, now(device) - between))
        del out
    forward, backward = zip(*times[WARM_UP:], strict=True)
    reading = {
        "forward_seconds": statistics.median(forward),
        "backward_seconds": statistics.median(backward),
        "forward_spread_seconds": max(forward) - min(forward),
        "backward_spread_seconds": max(backward) - min(backward),
        # of an AdamW step of the layer's own parameters, where it has some
        "optimizer_seconds": (
            statistics.median(_timed(torch.optim.AdamW(own, lr=0.0).step, device, repeats))
            if own
            else 0.0
        ),
        "saved_bytes": saved,
    }
    if device != "cpu":
        reading["peak_bytes"] = float(
            max(torch.cuda.max_memory_allocated(device) - before - saved, 0.0)
        )
    return reading


LARGEST_FLOPS = {"cpu": 4e9, "cuda": 2e13}
LARGEST_ELEMENTS = {"cpu": 2e7, "cuda": 1e9}
Drawn = tuple[tuple[int, int, int, int], int, bool]  # of a product; elements, whether x + y
# Many rows and few, narrow and wide, the scores of attention; from cached tensors to large ones.
QUICK: tuple[Drawn, ...] = (
    ((1, 4096, 4096, 4096), 2**16, True),
    ((1, 8192, 1024, 4096), 2**20, False),
    ((1, 512, 4096, 11008), 2**23, True),
    ((1, 2048, 8192, 2048), 2**25, False),
    ((64, 1024, 64, 1024), 2**27, True),
)
QUICK_BYTES = 2**28
LAUNCHES = {"cpu": 1, "cuda": 10}  # of an operator between two looks at the clock


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
    """`count` products and `count` elementwise operators of sizes that `seed` draws; see
    `operators_of`. Raises InputError for numbers that are not usable."""
    check_device(device)
    require(
        count >= 1 and repeats >= 1,
        "operators and repeats",
        got=min(count, repeats),
        expected="at least 1",
    )
    random, kind = Random(seed), device.partition(":")[0]
    drawn = [
        (
            _sizes(random, LARGEST_FLOPS[kind]),
            int(2 ** random.uniform(12, math.log2(LARGEST_ELEMENTS[kind]))),
            random.random() < 0.5,
        )
        for _ in range(count)
    ]
    data = operators_of(drawn, device, precision, repeats, name=name, tell=tell)
    return data.model_copy(
        update={"provenance": measured_here("hetplan profile operators", device)}
    )


def operators_of(
    drawn: Sequence[Drawn],
    device: str,
    precision: Precision,
    repeats: int,
    *,
    name: str | None = None,
    tell: Callable[[str], None] | None = None,
) -> OperatorData:
    """A product and an elementwise operator of each size; peaks from the catalogue where it knows
    `name`, else the most that was reached."""
    dtype = DTYPES[precision]
    measured = []
    for i, (sizes, elements, both) in enumerate(drawn, 1):
        measured.append(_product(sizes, device, dtype, repeats))
        measured.append(_elementwise(elements, both, device, dtype, repeats))
        if i % 10 == 0:
            (tell or silent)(f"{2 * i} of {2 * len(drawn)} operators")
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
        provenance=measured_here("hetplan profile", device),
        operators=measured,
    )


def measure_quickly(
    device: str,
    precision: Precision,
    *,
    name: str | None = None,
    operators: Sequence[Drawn] = QUICK,
) -> OperatorData:
    """A few operators that transformers have (of an eighth of the rows on a CPU, and a sixty-fourth
    of the elements), and on a GPU that has others beside it, an all-reduce over all of them.

    operators: products, each with an elementwise operator. Raises InputError for another device.
    """
    check_device(device)
    part = 8 if device == "cpu" else 1
    drawn = [
        ((c, m // part, k, n), size // part**2, both) for (c, m, k, n), size, both in operators
    ]
    data = operators_of(drawn, device, precision, 10, name=name)
    data = data.model_copy(update={"provenance": measured_here("hetplan profile quick", device)})
    count = 0 if device == "cpu" else usable_gpus()
    if count < 2:
        return data
    parts = [torch.ones(QUICK_BYTES // 4, device=f"cuda:{i}") for i in range(count)]

    def all_reduce() -> None:
        torch.cuda.nccl.all_reduce(parts)
        for i in range(count):
            torch.cuda.synchronize(i)

    rate = 2 * (count - 1) / count * QUICK_BYTES / min(_timed(all_reduce, device, 10))
    return data.model_copy(update={"bus_bytes_per_second": rate})


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


def _sizes(random: Random, largest_flops: float) -> tuple[int, int, int, int]:
    """(count, m, k, n) with at most that many FLOPs: products with weights, and now and then those
    of attention."""
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
    times = _timed(lambda: left @ right, device, repeats)
    return MeasuredOperator(
        kind="product", count=float(count), m=float(m), k=float(k), n=float(n),
        elements=float(count * (m * k + k * n + m * n)),
        seconds=min(times), spread_seconds=max(times) - min(times),
    )  # fmt: skip


def _elementwise(size: int, both: bool, device: str, dtype: Any, repeats: int) -> MeasuredOperator:
    """x + y, or x * x: three and two numbers moved per element."""
    x, y = torch.randn(2, size, device=device, dtype=dtype)
    times = _timed((lambda: x + y) if both else (lambda: x * x), device, repeats)
    return MeasuredOperator(
        kind="elementwise",
        elements=float(size * (3 if both else 2)),
        seconds=min(times),
        spread_seconds=max(times) - min(times),
    )


def _timed(run: Callable[[], Any], device: str, repeats: int) -> list[float]:
    """Seconds of each repeat behind the warm-up; a single thread's own time, on a CPU. Of operators
    the fastest counts: what is slower was disturbed. On a GPU several launches share a repeat, so
    that they hide behind each other."""
    alone = device == "cpu" and torch.get_num_threads() == 1
    times, count = [], LAUNCHES[device.partition(":")[0]]
    for _ in range(WARM_UP + repeats):
        begun = time.thread_time() if alone else now(device)
        for _ in range(count):
            run()
        spent = (time.thread_time() if alone else now(device)) - begun
        times.append(max(spent / count, 1e-9))
    return times[WARM_UP:]
