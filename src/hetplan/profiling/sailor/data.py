"""What Sailor publishes: measured profiles, fits of link bandwidths, and plans that were run.

Profiles: `profiles/<model>/<GPU>/profile.json`: {micro-batch: {tensor degree: {layer: [forward,
backward, update]}}}, seconds. The update is that of the whole profiled model, repeated at every
layer: 12 bytes per parameter at the memory's speed, plain SGD. `llm_info.json`: {model: {tensor
degree: {layer: sizes}}}, of one device and one sample, in fp32.

Links: {GPU type: {GPUs: [[a, b, c], cap]}}, GB/s as a parabola over log2 of the message in MB, with
a cap in bytes/s; within a node (a ring over that many GPUs) and between two nodes (that many pairs
at once, all together). A fit only holds where it was made: beyond the parabola's top nothing is
taken from it, and messages below one MB go at the speed of one. All ranks of a node share its
cards, so more pairs never get less than fewer do.

Plans: stages of layers, per stage and data replica a GPU group, and what was measured.
"""

from __future__ import annotations

import math
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
    counts = {gpu: len(next(iter(table.values())).forward) for gpu, table in tables.items()}
    layers = min(counts.values())
    for gpu, count in counts.items():
        if count != layers:
            raise InputError(
                "number of layers differs from other GPUs'",
                where=str(root / gpu / "profile.json"),
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
    entries = {key_number(key, by_layer): entry for key, entry in by_layer.items()}
    missing = next((i for i in range(len(entries)) if i not in entries), None)
    if missing is not None or not entries:
        raise InputError(
            "layer is missing", where=by_layer.place, got=missing, expected="layers from 0 on"
        )
    return [entries[i] for i in range(len(entries))]


def _sizes(by_layer: Foreign, layers: int) -> LayerSizes:
    rows = in_order(by_layer)
    if len(rows) < layers:
        raise by_layer.error("too few layers", f"{layers}, as the profiles have")
    keys = ("params_bytes", "act_output_bytes", "act_mem_bytes")
    return LayerSizes(*(np.array([row[key].number() for row in rows[:layers]]) for key in keys))


def _sequence(by_degree: Foreign) -> int:
    """Tokens per sample s: the first layer takes tokens, positions and a mask, s^2 + 2 s numbers;
    else 0."""
    firsts = [by_layer.get("0") for _, by_layer in by_degree.items()]
    inputs = [first.get("act_input_floats") for first in firsts if first]
    numbers = next((entry.number() for entry in inputs if entry), 0.0)
    s = round(np.sqrt(numbers + 1.0) - 1.0)
    return s if s * s + 2 * s == numbers else 0


MB, GB = 1e6, 1e9


@dataclass(frozen=True)
class Fit:
    """GB/s = a x^2 + b x + c with x = log2(MB), at most `cap` bytes/s."""

    a: float
    b: float
    c: float
    cap: float

    def bandwidth(self, size: float) -> float:
        """Bytes/s of messages of `size` bytes."""
        x = max(math.log2(max(size, 1.0) / MB), 0.0)
        if self.a < 0:
            x = min(x, -self.b / (2 * self.a))
        value = (self.a * x * x + self.b * x + self.c) * GB
        return min(value, self.cap) if value > 0 else self.cap


# GPU type -> GPUs -> fit
Fits = dict[str, dict[int, Fit]]


@dataclass(frozen=True)
class Links:
    """Fits between nodes and within one."""

    between: Fits
    within: Fits

    def network(self, kind: str, pairs: int, size: float) -> float:
        """Bytes/s of `pairs` GPUs of one node together, `size` bytes in all, to another node."""
        fits = self.between.get(kind)
        if fits is None:
            known = ", ".join(sorted(self.between))
            raise NotPricedError(
                "no bandwidth between nodes", where="network_coeffs", got=kind, expected=known
            )
        usable = [count for count in fits if count <= pairs] or [min(fits)]
        return max(fits[count].bandwidth(size / count) for count in usable)

    def local(self, kind: str, ranks: int, size: float) -> float:
        """Bytes/s of each of `ranks` GPUs within a node; a network's where nothing was measured
        within."""
        if kind not in self.within:
            return self.network(kind, ranks, size) / max(ranks, 1)
        fits = self.within[kind]
        above = [count for count in fits if count >= ranks]
        return fits[min(above) if above else max(fits)].bandwidth(size)


def load_links(folder: Path) -> Links:
    """From `network_coeffs*.json` (with "inter" and "intra") and `*bandwidth*.json` (within nodes)
    of a folder."""
    network = sorted(folder.glob("network_coeffs*.json"))
    if not network:
        raise InputError("no file network_coeffs*.json", where=str(folder))
    links = Links({}, {})
    for path in sorted(folder.glob("*bandwidth*.json")):
        links.within.update(_fits(read_foreign(path)))
    for path in network:
        document = read_foreign(path)
        between, within = document.get("inter"), document.get("intra")
        if between is None and within is None:
            raise document.error("not usable", 'an object with "inter" or "intra"')
        links.between.update(_fits(between) if between else {})
        links.within.update(_fits(within) if within else {})
    return links


def _fits(by_type: Foreign) -> Fits:
    fits: Fits = {}
    for kind, by_count in by_type.items():
        fits[kind] = {key_number(count, entry, 1): _fit(entry) for count, entry in by_count.items()}
        if not fits[kind]:
            raise by_count.error("no fit", "{GPUs: [[a, b, c], cap]}")
    return fits


def _fit(entry: Foreign) -> Fit:
    factors, cap = entry.entries(length=2)
    a, b, c = (factor.number(-1e9, 1e9) for factor in factors.entries(length=3))
    return Fit(a, b, c, cap.number(1e-6))


@dataclass(frozen=True)
class Group:
    """The tensor group of one stage's replica: GPU type and GPUs per node of each of its nodes,
    tensor degree."""

    nodes: tuple[tuple[str, int], ...]
    tensor: int

    @property
    def kinds(self) -> tuple[str, ...]:
        """GPU types, each once."""
        return tuple(dict.fromkeys(kind for kind, _ in self.nodes))


@dataclass(frozen=True)
class RunPipeline:
    """One pipeline: layers by stage, groups by stage and data replica."""

    layers: tuple[tuple[int, ...], ...]
    groups: tuple[tuple[Group, ...], ...]


@dataclass(frozen=True)
class PlanRun:
    """A plan and its measurements (None: not given). file: relative to `validation/`."""

    file: str
    model: str | None
    pipelines: tuple[RunPipeline, ...]
    micro_batch: int
    global_batch: int
    seconds: float | None
    max_bytes: float | None

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return 1 + max(max(stage) for stage in self.pipelines[0].layers)

    @property
    def kinds(self) -> set[str]:
        """GPU types of all groups."""
        return {k for p in self.pipelines for stage in p.groups for g in stage for k in g.kinds}


def load_run(path: Path, root: Path) -> PlanRun:
    """The plan of a file below `root`; raises InputError with file, place, got and expected."""
    document = read_foreign(path)
    model, real, memory = (document.get(key) for key in ("model", "real", "max_mem"))
    return PlanRun(
        file=path.relative_to(root).as_posix(),
        model=model.text() if model else None,
        pipelines=tuple(_pipeline(entry) for entry in document["pipeline_list"].entries(least=1)),
        micro_batch=document["mbs"].whole(1),
        global_batch=document["gbs"].whole(1),
        seconds=_positive(real),
        max_bytes=_positive(memory),
    )


def _positive(entry: Foreign | None) -> float | None:
    """A measurement; None, and what nobody measured (0), are none."""
    return None if entry is None or entry.value is None else entry.number() or None


def _pipeline(entry: Foreign) -> RunPipeline:
    stages = entry["layers_per_stage"].entries(least=1)
    layers = tuple(tuple(layer.whole() for layer in stage.entries(least=1)) for stage in stages)
    following = 0
    for stage, numbers in zip(stages, layers, strict=True):
        if list(numbers) != list(range(following, following + len(numbers))):
            raise stage.error(
                "stages do not take the layers in turn", f"layers from {following} on"
            )
        following += len(numbers)
    groups = entry["tmp_per_stage"].entries(length=len(layers))
    return RunPipeline(
        layers, tuple(tuple(_group(g) for g in stage.entries(least=1)) for stage in groups)
    )


def _group(entry: Foreign) -> Group:
    nodes, tensor = entry.entries(length=2)
    members = [node.entries(least=2) for node in nodes.entries(least=1)]
    kinds = tuple((member[0].text(), member[1].whole(1, 4096)) for member in members)
    return Group(kinds, tensor.whole(1, 4096))
