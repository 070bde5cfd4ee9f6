"""A measured profile, table by table: written after each, and gone on with where it stopped.

Equal layers are measured once: embedding, one block, head. A tensor degree is one rank's part of
the layer (Megatron's split of heads, feed-forward width and vocabulary), run alone: its all-reduces
are priced elsewhere.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetplan.errors import InputError
from hetplan.formulations.poplar.awareness import OutOfMemoryOnDevice
from hetplan.profiling.models import Model
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
