"""A measured profile, table by table: written after each, and gone on with where it stopped."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from hetplan.errors import InputError
from hetplan.formulations.poplar.awareness import OutOfMemoryOnDevice
from hetplan.profiling.models import Model
from hetplan.profiling.predict import profile_layers
from hetplan.profiling.profile import Profile, ProfileTable, Provenance, Readings, load_profile
from hetplan.runtime.batch_curve import device_name, torch_version
from hetplan.runtime.chain import shape_of
from hetplan.runtime.layers import LayerReading, measure_pieces
from hetplan.runtime.trial import check_device

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
    shape_of(model)
    if repeats < 1:
        raise InputError("repeats", got=repeats, expected="at least 1")
    kind = name or device_name(device)
    tables = _kept(model, output)
    have = {(table.device, table.tensor, table.micro_batch) for table in tables}
    wanted = [(tp, b) for tp in sorted(set(tensor_degrees)) for b in sorted(set(micro_batches))]
    source = f"hetplan profile, {torch_version()} on {device_name(device)}"
    too_large: dict[int, int] = {}
    for i, (tensor, batch) in enumerate(wanted):
        place = f"{i + 1}/{len(wanted)} tensor {tensor}, micro-batch {batch}"
        if (kind, tensor, batch) in have:
            _say(tell, f"{place}: already in the file")
            continue
        if batch >= too_large.get(tensor, batch + 1):
            continue
        try:
            found = measure_pieces(model, device, tensor, batch, repeats, warm_up)
        except OutOfMemoryOnDevice as error:
            too_large[tensor] = batch
            _say(tell, f"{place}: {error}")
            continue
        tables.append(_table(model, kind, tensor, batch, found))
        seconds = sum(tables[-1].seconds())
        _say(tell, f"{place}: {1e3 * seconds:.4g} ms forward and backward")
        if output is not None:
            _profile(model, tables, source).save(output)
    if not tables:
        raise InputError(
            "no size fits in the device's memory", where=device, got=min(micro_batches)
        )
    return _profile(model, tables, source)


def _kept(model: Model, output: str | os.PathLike[str] | None) -> list[ProfileTable]:
    """Tables of an earlier run; raises InputError where the file is of another model."""
    if output is None or not Path(output).exists():
        return []
    where = os.fspath(output)
    found = load_profile(output)
    for key in ("model", "sequence", "precision"):
        got = getattr(found, key)
        expected = model.name if key == "model" else getattr(model, key)
        if got != expected:
            raise InputError(
                f"{key} of the profile that is there differs",
                where=where,
                got=got,
                expected=str(expected),
            )
    if found.provenance.kind != "measured":
        raise InputError(
            "a predicted profile is there already", where=where, expected="another name"
        )
    return list(found.tables)


def _profile(model: Model, tables: Sequence[ProfileTable], source: str) -> Profile:
    return Profile(
        model=model.name,
        sequence=model.sequence,
        precision=model.precision,
        provenance=Provenance(
            kind="measured",
            source=source[:200],
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        ),
        layers=profile_layers(model),
        tables=list(tables),
    )


def _table(
    model: Model, device: str, tensor: int, batch: int, found: dict[str, LayerReading]
) -> ProfileTable:
    """Every layer with its kind's reading."""
    rows = [found[layer.kind] for layer in model.layers]
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
