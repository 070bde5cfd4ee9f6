"""What is measured on a torch device: a profile of a model's layers, and single operators.

A profile is written after each table, and gone on with where it stopped. Equal layers are measured
once: embedding, one block, head. A tensor degree is one rank's part of the layer (Megatron's split
of heads, feed-forward width and vocabulary), run alone: its all-reduces are priced elsewhere.

Operators are drawn from sizes that transformers have: rows from a few tokens to some thousands,
widths from 64 to 16384, whole attention heads as batches of small products.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from hetplan.errors import InputError
from hetplan.formulations.poplar.awareness import OutOfMemoryOnDevice
from hetplan.profiling.catalogue import catalogue
from hetplan.profiling.efficiency import MeasuredOperator, OperatorData
from hetplan.profiling.models import Model
from hetplan.profiling.operators import ELEMENT_BYTES, Precision
from hetplan.profiling.predict import profile_layers
from hetplan.profiling.profile import Profile, ProfileTable, Readings, load_profile
from hetplan.runtime.devices import check_device, device_name, measured_here, now, torch_here

WARM_UP = 2


def measure_profile(
    model: Model,
    device: str,
    *,
    micro_batches: Sequence[int],
    tensor_degrees: Sequence[int] = (1,),
    name: str | None = None,
    repeats: int = 5,
    warm_up: int = WARM_UP,
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
    from hetplan.runtime.references.timed import shape_of

    shape_of(model)
    if repeats < 1:
        raise InputError("repeats", got=repeats, expected="at least 1")
    kind = name or device_name(device)
    tables = _kept(model, output)
    have = {(table.device, table.tensor, table.micro_batch) for table in tables}
    wanted = [(tp, b) for tp in sorted(set(tensor_degrees)) for b in sorted(set(micro_batches))]
    too_large: dict[int, int] = {}
    for i, (tensor, batch) in enumerate(wanted):
        place = f"{i + 1}/{len(wanted)} tensor {tensor}, micro-batch {batch}"
        if (kind, tensor, batch) in have:
            _say(tell, f"{place}: already in the file")
            continue
        if batch >= too_large.get(tensor, batch + 1):
            continue
        try:
            readings = measure_layers(model, device, tensor, batch, repeats, warm_up)
        except OutOfMemoryOnDevice as error:
            too_large[tensor] = batch
            _say(tell, f"{place}: {error}")
            continue
        tables.append(_table(model, kind, tensor, batch, readings))
        seconds = sum(tables[-1].seconds())
        _say(tell, f"{place}: {1e3 * seconds:.4g} ms forward and backward")
        if output is not None:
            _profile(model, tables, device).save(output)
    if not tables:
        raise InputError(
            "no size fits in the device's memory", where=device, got=min(micro_batches)
        )
    return _profile(model, tables, device)


def _kept(model: Model, output: str | os.PathLike[str] | None) -> list[ProfileTable]:
    """Tables of an earlier run; raises InputError where the file is of another model."""
    if output is None or not Path(output).exists():
        return []
    where = os.fspath(output)
    kept = load_profile(output)
    for key in ("model", "sequence", "precision"):
        got = getattr(kept, key)
        expected = model.name if key == "model" else getattr(model, key)
        if got != expected:
            raise InputError(
                f"{key} of the profile that is there differs",
                where=where,
                got=got,
                expected=str(expected),
            )
    if kept.provenance.kind != "measured":
        raise InputError(
            "a predicted profile is there already", where=where, expected="another name"
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


def _table(
    model: Model, device: str, tensor: int, batch: int, readings: dict[str, LayerReading]
) -> ProfileTable:
    """Every layer with its kind's reading."""
    rows = [readings[layer.kind] for layer in model.layers]
    peaks = [row.peak_bytes for row in rows if row.peak_bytes is not None]
    return ProfileTable(
        device=device,
        tensor=tensor,
        micro_batch=batch,
        forward_seconds=[row.forward for row in rows],
        backward_seconds=[row.backward for row in rows],
        readings=Readings(
            forward_spread_seconds=[row.forward_spread for row in rows],
            backward_spread_seconds=[row.backward_spread for row in rows],
            optimizer_seconds=[row.optimizer for row in rows],
            saved_bytes=[row.saved_bytes for row in rows],
            peak_bytes=peaks if len(peaks) == len(rows) else None,
        ),
    )


def _say(tell: Callable[[str], None] | None, line: str) -> None:
    if tell is not None:
        tell(line)


@dataclass(frozen=True)
class LayerReading:
    """One layer and micro-batch: medians and spreads (slowest less fastest repeat) in seconds, and
    bytes.

    saved_bytes: what autograd keeps between the passes. peak_bytes: beside the parameters and what
    is kept, at the passes' peak; None on a CPU, where nothing keeps such books.
    """

    forward: float
    backward: float
    forward_spread: float
    backward_spread: float
    optimizer: float
    saved_bytes: float
    peak_bytes: float | None


def measure_layers(
    model: Model, device: str, tensor: int, batch: int, repeats: int, warm_up: int
) -> dict[str, LayerReading]:
    """Every kind of layer at one tensor degree and micro-batch; raises OutOfMemoryOnDevice where it
    does not fit."""
    import torch

    from hetplan.runtime.references.timed import KINDS, network, out_of_memory, tokens_of

    with out_of_memory(batch):
        made = network(model, device, tensor=tensor, blocks=1)
        tokens = tokens_of(model, batch, device, tensor=tensor)
        with torch.no_grad():
            x = made.layers[0](tokens)
        inputs = ((tokens,), (x,), (x, tokens))
        return {
            kind: _read(layer, given, own, device, repeats, warm_up)
            for kind, layer, own, given in zip(KINDS, made.layers, made.own, inputs, strict=True)
        }


def _read(
    layer: Any, given: tuple[Any, ...], own: Sequence[Any], device: str, repeats: int, warm_up: int
) -> LayerReading:
    """One layer on (x,) or (x, targets)."""
    import torch

    from hetplan.runtime.references.timed import saved_by_autograd

    x, targets = given[0].detach(), given[1:]
    x.requires_grad_(x.is_floating_point())
    with saved_by_autograd(layer.parameters()) as kept:
        once = layer(x, *targets)
        saved = kept()
    gradient = torch.ones_like(once)
    once.backward(gradient)
    del once
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    times = []
    for _ in range(warm_up + repeats):
        x.grad = None
        begun = now(device)
        out = layer(x, *targets)
        between = now(device)
        out.backward(gradient)
        times.append((between - begun, now(device) - between))
        del out
    peak = None
    if device != "cpu":
        peak = float(max(torch.cuda.max_memory_allocated(device) - before - saved, 0.0))
    forward, backward = zip(*times[warm_up:], strict=True)
    return LayerReading(
        forward=statistics.median(forward),
        backward=statistics.median(backward),
        forward_spread=max(forward) - min(forward),
        backward_spread=max(backward) - min(backward),
        optimizer=_optimizer_seconds(own, device, repeats),
        saved_bytes=saved,
        peak_bytes=peak,
    )


def _optimizer_seconds(own: Sequence[Any], device: str, repeats: int) -> float:
    """Median seconds of an AdamW step of a layer's own parameters."""
    if not own:
        return 0.0
    optimizer = torch_here().optim.AdamW(own, lr=0.0)
    optimizer.step()  # makes the moments
    times = []
    for _ in range(repeats):
        begun = now(device)
        optimizer.step()
        times.append(now(device) - begun)
    return statistics.median(times)


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
