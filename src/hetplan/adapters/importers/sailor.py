"""Files that Sailor publishes: measured profiles, fits of link bandwidths, and plans that were run.

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

import math
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, Strict, model_validator

from hetplan.errors import InputError, require
from hetplan.schema import (
    ByLayer,
    Bytes,
    Count,
    DegreeKey,
    Filled,
    Foreign,
    ForeignName,
    ForeignRoot,
    NonNegative,
    PositiveCount,
    Seconds,
    read_foreign,
)

Floats = NDArray[np.float64]
# (tensor degree, micro-batch) -> seconds [3, L] of forward and backward pass, and of the update
Tables = dict[tuple[int, int], Floats]


class NotPricedError(InputError):
    """The data are in order, but lack what a plan needs: another GPU type, another model."""


Triple = Annotated[list[Seconds], Field(min_length=3, max_length=3)]
# profile.json
ProfileFile = ForeignRoot[
    Filled[dict[Annotated[PositiveCount, Strict(False)], Filled[dict[DegreeKey, ByLayer[Triple]]]]]
]


class LayerEntry(Foreign):
    """Sizes of a layer in `llm_info.json`."""

    params_bytes: Bytes
    act_output_bytes: Bytes
    act_mem_bytes: Bytes
    act_input_floats: NonNegative | None = None


# llm_info.json
SizesFile = ForeignRoot[dict[ForeignName, Filled[dict[DegreeKey, ByLayer[LayerEntry]]]]]


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
    require(
        root.is_dir(),
        "no such folder",
        where=str(root),
        expected="profiles/<model>/<GPU>/profile.json",
    )
    return sorted(entry.name for entry in root.iterdir() if entry.is_dir())


def load_model_data(folder: Path, name: str, info: SizesFile) -> ModelData:
    """One model's profiles and sizes; raises InputError with file, place, got and expected."""
    root = folder / "profiles" / name
    tables: dict[str, Tables] = {
        path.parent.name: {
            (degree, batch): np.array(rows).T
            for batch, by_degree in read_foreign(ProfileFile, path).root.items()
            for degree, rows in by_degree.items()
        }
        for path in sorted(root.glob("*/profile.json"))
    }
    require(tables, "no profile", where=str(root), expected="<GPU>/profile.json")
    counts = {gpu: {table.shape[1] for table in by.values()} for gpu, by in tables.items()}
    layers, *others = set(chain(*counts.values()))
    require(not others, "numbers of layers differ between tables", where=str(root), got=counts)
    for degree, rows in info.root[name].items():
        require(
            len(rows) >= layers,
            "too few layers",
            where=f"{folder / 'llm_info.json'}: {name}.{degree}",
            got=len(rows),
            expected=f"{layers}, as the profiles have",
        )
    sizes = {
        degree: LayerSizes(
            *np.array(
                [(r.params_bytes, r.act_output_bytes, r.act_mem_bytes) for r in rows[:layers]]
            ).T
        )
        for degree, rows in info.root[name].items()
    }
    inputs = [rows[0].act_input_floats for rows in info.root[name].values()]
    return ModelData(name, layers, tables, sizes, _tokens(max(filter(None, inputs), default=0.0)))


def _tokens(inputs: float) -> int:
    """Tokens per sample s: the first layer takes tokens, positions and a mask, s^2 + 2 s numbers;
    else 0."""
    s = round(math.sqrt(inputs + 1.0) - 1.0)
    return s if s * s + 2 * s == inputs else 0


MB, GB = 1e6, 1e9


class Fit(NamedTuple):
    """GB/s = a x^2 + b x + c with x = log2(MB) and factors a, b, c, at most `cap` bytes/s."""

    factors: Annotated[tuple[float, float, float], Strict(False)]
    cap: Annotated[float, Field(ge=1e-6)]

    def bandwidth(self, size: float) -> float:
        """Bytes/s of messages of `size` bytes."""
        a, b, c = self.factors
        x = max(math.log2(max(size, 1.0) / MB), 0.0)
        if a < 0:
            x = min(x, -b / (2 * a))
        value = (a * x * x + b * x + c) * GB
        return min(value, self.cap) if value > 0 else self.cap


# GPU type -> GPUs -> fit
Fits = dict[ForeignName, Filled[dict[DegreeKey, Fit]]]


class Links(Foreign):
    """Fits between nodes (`inter`) and within one (`intra`): a `network_coeffs*.json`."""

    inter: Fits
    intra: Fits = Field(default_factory=dict)

    def network(self, kind: str, pairs: int, size: float) -> float:
        """Bytes/s of `pairs` GPUs of one node together, `size` bytes in all, to another node."""
        fits = self.inter.get(kind)
        if fits is None:
            raise NotPricedError(
                "no bandwidth between nodes",
                where="network_coeffs",
                got=kind,
                expected=", ".join(sorted(self.inter)),
            )
        usable = [count for count in fits if count <= pairs] or [min(fits)]
        return max(fits[count].bandwidth(size / count) for count in usable)

    def local(self, kind: str, ranks: int, size: float) -> float:
        """Bytes/s of each of `ranks` GPUs within a node; a network's where nothing was measured
        within."""
        if kind not in self.intra:
            return self.network(kind, ranks, size) / max(ranks, 1)
        fits = self.intra[kind]
        above = [count for count in fits if count >= ranks]
        return fits[min(above) if above else max(fits)].bandwidth(size)


def load_links(folder: Path) -> Links:
    """From the `network_coeffs*.json` and `*bandwidth*.json` of a folder; later files win."""
    paths = sorted(folder.glob("network_coeffs*.json"))
    require(paths, "no file network_coeffs*.json", where=str(folder))
    links = Links(inter={})
    for path in sorted(folder.glob("*bandwidth*.json")):
        links.intra.update(read_foreign(ForeignRoot[Fits], path).root)
    for path in paths:
        file = read_foreign(Links, path)
        links.inter.update(file.inter)
        links.intra.update(file.intra)
    return links


class NodeGpus(NamedTuple):
    """GPUs of one node; the zone is not used."""

    kind: ForeignName
    gpus: PositiveCount
    zone: Any = None


class Group(NamedTuple):
    """The tensor group of one stage's replica: its nodes and its tensor degree."""

    nodes: Filled[list[NodeGpus]]
    tensor: Annotated[int, Field(ge=1, le=4096)]

    @property
    def kinds(self) -> tuple[str, ...]:
        """GPU types, each once."""
        return tuple(dict.fromkeys(node.kind for node in self.nodes))


class RunPipeline(Foreign):
    """One pipeline: layers by stage, groups by stage and data replica."""

    layers: Filled[list[Filled[list[Count]]]] = Field(alias="layers_per_stage")
    groups: list[Filled[list[Group]]] = Field(alias="tmp_per_stage")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        layers = list(chain(*self.layers))
        require(
            layers == list(range(len(layers))),
            "layers_per_stage does not take the layers in turn, from 0 on",
        )
        require(
            len(self.groups) == len(self.layers),
            f"tmp_per_stage has {len(self.groups)} entries, expected one per stage "
            f"({len(self.layers)})",
        )
        return self


# What nobody measured stands as 0 in some files.
NONE_FOR_ZERO = AfterValidator(lambda measured: measured or None)


class PlanRun(Foreign):
    """A plan and its measurements, None where nobody measured. file: its name, relative to
    `validation/`."""

    file: str = ""
    model: ForeignName | None = None
    pipelines: Filled[list[RunPipeline]] = Field(alias="pipeline_list")
    micro_batch: PositiveCount = Field(alias="mbs")
    global_batch: PositiveCount = Field(alias="gbs")
    seconds: Annotated[Seconds | None, NONE_FOR_ZERO] = Field(None, alias="real")
    max_bytes: Annotated[Bytes | None, NONE_FOR_ZERO] = Field(None, alias="max_mem")

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return sum(map(len, self.pipelines[0].layers))

    @property
    def kinds(self) -> set[str]:
        """GPU types of all groups."""
        return {k for p in self.pipelines for stage in p.groups for g in stage for k in g.kinds}


def load_run(path: Path, root: Path) -> PlanRun:
    """The plan of a file below `root`; raises InputError with file, place, got and expected."""
    return read_foreign(PlanRun, path).model_copy(
        update={"file": path.relative_to(root).as_posix()}
    )
