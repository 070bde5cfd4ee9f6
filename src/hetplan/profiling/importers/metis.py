"""Metis's profiles (ATC 2024): one JSON per device type, tensor degree and batch,
`DeviceType.A100_tp2_bs4.json`.

`model`: {"model_name", "num_layers", "parameters": {"parameters_per_layer_bytes": [L], optionally
"activation_parameters_bytes": [L]}}; `execution_time`: {"layer_compute_total_ms": [L]} forward and
backward together;
`execution_memory`: {"layer_memory_total_mb": [L]} with states, gradients and activations. Source:
the project's README.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hetplan.errors import InputError
from hetplan.profiling.foreign import Foreign, read_foreign
from hetplan.profiling.importers.common import (
    TOGETHER,
    Imported,
    Settings,
    layer,
    profile,
    table_of_sums,
)
from hetplan.profiling.profile import ProfileLayer
from hetplan.profiling.workload import STATE_BYTES_PER_PARAM
from hetplan.schema import MOST_BYTES

NAME = re.compile(r"DeviceType\.(?P<device>.+)_tp(?P<tensor>\d{1,4})_bs(?P<batch>\d{1,6})\.json$")
MB = 1e6
# Mixed precision: 2 bytes per parameter in the file's sizes, 16 of states.
PARAM_BYTES = 2


@dataclass(frozen=True)
class Part:
    """One file."""

    device: str
    tensor: int
    batch: int
    document: Foreign

    @property
    def milliseconds(self) -> list[Foreign]:
        """[L]."""
        return self.document["execution_time"]["layer_compute_total_ms"].entries(least=1)


def read(path: str, settings: Settings) -> Imported:
    """A profile of all the folder's files, or of one."""
    start = Path(path)
    files = sorted(start.glob("DeviceType.*.json")) if start.is_dir() else [start]
    if not files:
        raise InputError("no file DeviceType.*_tp*_bs*.json", where=path)
    parts = sorted((_part(file) for file in files), key=lambda p: (p.device, p.tensor, p.batch))
    count = len(parts[0].milliseconds)
    for part in parts:
        if len(part.milliseconds) != count:
            raise part.document["execution_time"]["layer_compute_total_ms"].error(
                "number of layers differs from the other files'", f"{count} entries"
            )
    devices = {part.device for part in parts}
    if settings.device is not None and len(devices) > 1:
        raise InputError(
            "several device types", where="--device-type", got=", ".join(sorted(devices))
        )
    layers, notes = _layers(parts, count)
    return profile(
        settings,
        model=parts[0].document["model"]["model_name"].text(),
        where=path,
        source=f"Metis profiles {start.name}",
        layers=layers,
        tables=[
            table_of_sums(
                settings.device or part.device,
                part.tensor,
                part.batch,
                [entry.seconds(1e-3) for entry in part.milliseconds],
            )
            for part in parts
        ],
        precision="fp16",
        notes=(TOGETHER, *notes),
    )


def _part(file: Path) -> Part:
    match = NAME.match(file.name)
    if match is None:
        raise InputError(
            "name is not usable",
            where=str(file),
            expected="DeviceType.<device>_tp<degree>_bs<batch>.json",
        )
    return Part(
        match["device"],
        max(int(match["tensor"]), 1),
        max(int(match["batch"]), 1),
        read_foreign(file),
    )


def _layers(parts: Sequence[Part], count: int) -> tuple[list[ProfileLayer], list[str]]:
    """Sizes from the file of the least degree and batch, and what they lack."""
    chosen = min(parts, key=lambda p: (p.tensor, p.batch))
    sizes = chosen.document["model"]["parameters"]
    params = [
        entry.number(0, MOST_BYTES / chosen.tensor)
        for entry in sizes["parameters_per_layer_bytes"].entries(length=count)
    ]
    notes = []
    sent = next(
        (
            found
            for key in ("activation_parameters_bytes", "activation_paramters_bytes")
            if (found := sizes.get(key))
        ),
        None,
    )
    if sent is None:
        notes.append("the files do not tell what layers send on: activation_bytes are 0")
    activation = (
        [0.0] * count
        if sent is None
        else [e.number(0, MOST_BYTES) / chosen.batch for e in sent.entries(length=count)]
    )
    memory = chosen.document["execution_memory"]["layer_memory_total_mb"].entries()
    if len(memory) == count:
        states = STATE_BYTES_PER_PARAM / PARAM_BYTES
        kept = [
            max(entry.number(0, MOST_BYTES / MB) * MB - states * p, 0.0)
            * chosen.tensor
            / chosen.batch
            for entry, p in zip(memory, params, strict=True)
        ]
    else:
        notes.append(
            f"layer_memory_total_mb has {len(memory)} entries for {count} layers: saved_bytes are 0"
        )
        kept = [0.0] * count
    layers = [
        layer(f"layer-{i}", params[i] * chosen.tensor, activation[i], kept[i]) for i in range(count)
    ]
    return layers, notes
