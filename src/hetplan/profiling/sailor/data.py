"""Sailor's profiles: per model and GPU type, seconds of every layer by micro-batch and tensor
degree, and sizes.

`profiles/<model>/<GPU>/profile.json`: {micro-batch: {tensor degree: {layer: [forward, backward,
update]}}}, seconds.
The update is that of the whole profiled model, repeated at every layer: 12 bytes per parameter at
the memory's speed, plain SGD. `llm_info.json`: {model: {tensor degree: {layer: sizes}}}, of one
device and one sample, in fp32.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hetplan.errors import InputError
from hetplan.profiling.foreign import Foreign, key_number, read_foreign

Floats = NDArray[np.float64]


class NotPricedError(InputError):
    """The data are in order, but lack what a plan needs: another GPU type, another model."""


SIZES = ("params_bytes", "act_output_bytes", "act_input_bytes", "act_mem_bytes")


@dataclass(frozen=True)
class Measured:
    """Seconds of one micro-batch on one tensor group: forward, backward [L]; update of the whole
    model."""

    forward: Floats
    backward: Floats
    update: float


# (tensor degree, micro-batch) -> what was measured
Tables = dict[tuple[int, int], Measured]


@dataclass(frozen=True)
class LayerSizes:
    """Bytes of each layer [L] on one device of a tensor group: parameters, activation sent on and
    kept, per sample."""

    params: Floats
    output: Floats
    kept: Floats


@dataclass(frozen=True)
class ModelData:
    """One model: tables by GPU type, sizes by tensor degree, tokens per sample (0: not told)."""

    name: str
    layers: int
    tables: dict[str, Tables]
    sizes: dict[int, LayerSizes]
    sequence: int


def model_names(folder: Path) -> list[str]:
    """Models with a folder of profiles; raises InputError where there is no `profiles` folder."""
    root = folder / "profiles"
    if not root.is_dir():
        raise InputError(
            "no such folder", where=str(root), expected="profiles/<model>/<GPU>/profile.json"
        )
    return sorted(entry.name for entry in root.iterdir() if entry.is_dir())


def load_model_data(folder: Path, name: str, info: Foreign) -> ModelData:
    """One model's profiles and sizes; raises InputError with file, place, got and expected."""
    root = folder / "profiles" / name
    tables = {
        gpu.name: read_profile(gpu / "profile.json")
        for gpu in sorted(root.iterdir())
        if (gpu / "profile.json").is_file()
    }
    if not tables:
        raise InputError("no profile", where=str(root), expected="<GPU>/profile.json")
    counts = {gpu: len(next(iter(found.values())).forward) for gpu, found in tables.items()}
    layers = next(iter(counts.values()))
    for gpu, count in counts.items():
        if count != layers:
            where = str(root / gpu / "profile.json")
            raise InputError(
                "number of layers differs from other GPUs'",
                where=where,
                got=count,
                expected=str(layers),
            )
    sizes = {
        key_number(degree, entry, 1): _sizes(entry, layers) for degree, entry in info[name].items()
    }
    if not sizes:
        raise info[name].error("no tensor degree", "{tensor degree: {layer: sizes}}")
    return ModelData(name, layers, tables, sizes, _sequence(info[name]))


def read_profile(path: str | os.PathLike[str]) -> Tables:
    """A `profile.json`; raises InputError with file, place, got and expected."""
    tables: Tables = {}
    layers: int | None = None
    for batch, by_degree in read_foreign(path).items():
        for degree, by_layer in by_degree.items():
            rows = in_order(by_layer)
            if layers not in (None, len(rows)):
                raise by_layer.error("number of layers differs from the tables before", str(layers))
            layers = len(rows)
            values = np.array(
                [[entry.seconds() for entry in row.entries(length=3)] for row in rows]
            )
            key = key_number(degree, by_layer, 1), key_number(batch, by_degree, 1)
            tables[key] = Measured(values[:, 0], values[:, 1], float(values[:, 2].max()))
    if not tables:
        raise InputError(
            "no table",
            where=os.fspath(path),
            expected="{micro-batch: {tensor degree: {layer: [3]}}}",
        )
    return tables


def in_order(by_layer: Foreign) -> list[Foreign]:
    """Entries of {"0": …, "1": …, …} by number; raises InputError where one is missing."""
    found = {key_number(key, by_layer): entry for key, entry in by_layer.items()}
    missing = next((i for i in range(len(found)) if i not in found), None)
    if missing is not None or not found:
        raise InputError(
            "layer is missing", where=by_layer.place, got=missing, expected="layers from 0 on"
        )
    return [found[i] for i in range(len(found))]


def _sizes(by_layer: Foreign, layers: int) -> LayerSizes:
    rows = in_order(by_layer)
    if len(rows) < layers:
        raise by_layer.error("too few layers", f"{layers}, as the profiles have")
    columns = {key: np.array([row[key].number() for row in rows[:layers]]) for key in SIZES}
    return LayerSizes(
        columns["params_bytes"], columns["act_output_bytes"], columns["act_mem_bytes"]
    )


def _sequence(by_degree: Foreign) -> int:
    """Tokens per sample s: the first layer takes tokens, positions and a mask, s^2 + 2 s numbers;
    else 0."""
    for _, by_layer in by_degree.items():
        first = by_layer.get("0")
        numbers = first.get("act_input_floats") if first else None
        if numbers:
            s = round(np.sqrt(numbers.number() + 1.0) - 1.0)
            return s if s * s + 2 * s == numbers.number() else 0
    return 0
