"""Measures the profile of a model's layers on a torch device.

The profile is written after each table, and a later run goes on from the file. Equal layers are
measured once: the embedding, one block, and the head. For a tensor degree, one rank's part of the
layer (Megatron's split of heads, feed-forward width and vocabulary) runs alone. The planner adds
the seconds of its all-reduces.
"""

import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from hetplan.errors import require
from hetplan.profiling.models.model import Model
from hetplan.profiling.profiles.largest_batch import OutOfMemoryOnDevice
from hetplan.profiling.profiles.predict import profile_layers
from hetplan.profiling.profiles.profile import Profile, ProfileTable, Readings, load_profile
from hetplan.runtime.launch.devices import (
    check_device,
    device_name,
    measured_here,
    now,
)
from hetplan.runtime.measuring.clock import WARM_UP, timed
from hetplan.runtime.measuring.networks import (
    KINDS,
    network,
    out_of_memory,
    saved_bytes,
    shape_of,
    silent,
    tokens_of,
)


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

    name: the device's type in cluster files; None: torch's name of it. output: a file that is
    written after every table. Where it exists, it must belong to the same model, and its tables are
    kept. tell: receives a line for each table.

    Raises UnsupportedError without torch or for a model without torch layers. Raises InputError for
    arguments out of range, and where no micro-batch fits in memory.
    """
    check_device(device)
    shape_of(model)
    tell = tell or silent
    require(repeats >= 1, "repeats", got=repeats, expected="at least 1")
    device_type = name or device_name(device)
    tables = _tables_in(output, model)
    measured = {(table.device, table.tensor, table.micro_batch) for table in tables}
    wanted = [
        (tensor, batch)
        for tensor in sorted(set(tensor_degrees))
        for batch in sorted(set(micro_batches))
    ]
    too_large: dict[int, int] = {}  # tensor degree -> a micro-batch that does not fit in memory
    for i, (tensor, batch) in enumerate(wanted):
        progress = f"{i + 1}/{len(wanted)} tensor {tensor}, micro-batch {batch}"
        if (device_type, tensor, batch) in measured:
            tell(f"{progress}: already in the file")
            continue
        if tensor in too_large and batch >= too_large[tensor]:
            continue
        try:
            table = measure_layers(model, device_type, device, tensor, batch, repeats)
        except OutOfMemoryOnDevice as error:
            too_large[tensor] = batch
            tell(f"{progress}: {error}")
            continue
        tables.append(table)
        tell(f"{progress}: {1e3 * sum(table.layer_seconds()):.4g} ms forward and backward")
        if output is not None:
            _profile(model, tables, device).save(output)
    require(tables, "no size fits in the device's memory", where=device, got=min(micro_batches))
    return _profile(model, tables, device)


def _tables_in(output: str | os.PathLike[str] | None, model: Model) -> list[ProfileTable]:
    """The tables of the profile in the file `output`; none where there is no such file. Raises
    InputError where the profile belongs to another model, or was predicted."""
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
    """The measured profile of a model with these tables."""
    return Profile(
        model=model.name,
        sequence=model.sequence,
        precision=model.precision,
        provenance=measured_here("hetplan profile measure", device),
        layers=profile_layers(model),
        tables=list(tables),
    )


def measure_layers(
    model: Model, device_type: str, device: str, tensor: int, batch: int, repeats: int
) -> ProfileTable:
    """The table of one tensor degree and micro-batch. Layers of the same kind (embedding, block,
    head) have the same readings. device_type: name of the device's type. device: torch's name of
    the device. Raises OutOfMemoryOnDevice where the micro-batch does not fit in memory."""
    readings: dict[str, dict[str, float]] = {}  # kind of layer -> its readings
    with out_of_memory(batch):
        one_of_each = network(model, device, tensor=tensor, blocks=1)
        tokens = tokens_of(model, batch, device, tensor=tensor)
        with torch.no_grad():
            x = one_of_each.layers[0](tokens)
        inputs = ((tokens,), (x,), (x, tokens))
        for layer_kind, layer, parameters, arguments in zip(
            KINDS, one_of_each.layers, one_of_each.layer_parameters, inputs, strict=True
        ):
            readings[layer_kind] = _read(layer, arguments, parameters, device, repeats)
    rows = [readings[layer.kind] for layer in model.layers]
    columns: dict[str, Any] = {key: [row[key] for row in rows] for key in rows[0]}
    seconds = {key: columns.pop(key) for key in ("forward_seconds", "backward_seconds")}
    return ProfileTable(
        device=device_type,
        tensor=tensor,
        micro_batch=batch,
        **seconds,
        readings=Readings(**columns),
    )


def _read(
    layer: Any, arguments: tuple[Any, ...], parameters: Sequence[Any], device: str, repeats: int
) -> dict[str, float]:
    """The readings of one layer by their names in the profile.

    Seconds are medians over the repeats. A spread is the difference of the slowest and the fastest
    repeat. The reading `saved_bytes` counts the bytes that autograd keeps between the passes. The
    reading `peak_bytes` counts further bytes at the peak of the passes, without the bytes of the
    parameters. It is left out on a CPU, where no allocator counts bytes.

    arguments: (x,) or (x, targets). parameters: the parameters that the optimizer updates.
    """
    x, targets = arguments[0].detach(), arguments[1:]
    x.requires_grad_(x.is_floating_point())
    with saved_bytes(layer.parameters()) as kept:
        warm_up = layer(x, *targets)
        saved = kept()
    gradient = torch.ones_like(warm_up)
    warm_up.backward(gradient)
    del warm_up
    on_gpu = device != "cpu"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
        bytes_before = torch.cuda.memory_allocated(device)
    times = []  # (forward seconds, backward seconds) of each repeat
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
        "optimizer_seconds": 0.0,
        "saved_bytes": saved,
    }
    if parameters:
        # the learning rate 0 leaves the weights as they are, and takes as long as any other rate
        step = torch.optim.AdamW(parameters, lr=0.0).step
        reading["optimizer_seconds"] = statistics.median(timed(step, device, repeats))
    if on_gpu:
        peak = torch.cuda.max_memory_allocated(device) - bytes_before - saved
        reading["peak_bytes"] = float(max(peak, 0.0))
    return reading
