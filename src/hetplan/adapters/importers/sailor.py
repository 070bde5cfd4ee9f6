"""Reads files that Sailor publishes: measured profiles, fits of link bandwidths, and plans with the
measurements of their runs.

Profiles. `profiles/<model>/<GPU>/profile.json` holds {micro-batch: {tensor degree: {layer:
[forward, backward, update]}}}, in seconds. The entry `update` of every layer is the optimizer step
of the whole profiled model. The step is that of plain SGD: it moves 12 bytes per parameter of the
model at the memory's speed. `llm_info.json` holds {model: {tensor degree: {layer: sizes}}}, for one
device and one sample in fp32.

Links. A file holds {GPU type: {number of GPUs: [[a, b, c], cap]}}. A fit gives GB/s as a parabola
over log2 of the message's MB, with a cap in bytes/s. Within a node, it gives the bandwidth of a
ring over that number of GPUs. Between two nodes, it gives the bandwidth that this number of pairs
of GPUs reaches together. A fit only holds in its measured range: beyond the parabola's maximum the
bandwidth stays at the maximum, and messages below one MB get the bandwidth of one MB. All ranks of
a node share its network cards, so that more pairs never get less bandwidth than fewer pairs.

Plans. A file holds the layers of each stage, a group of GPUs for each stage and data replica, and
the measured seconds and bytes.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, Strict, model_validator

from hetplan.errors import InputError, look_up, require
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
    """The data are valid, but lack a GPU type or a model that a plan needs."""


Triple = Annotated[list[Seconds], Field(min_length=3, max_length=3)]  # forward, backward, update
# The content of `profile.json`.
ProfileFile = ForeignRoot[
    Filled[dict[Annotated[PositiveCount, Strict(False)], Filled[dict[DegreeKey, ByLayer[Triple]]]]]
]


class LayerEntry(Foreign):
    """Sizes of a layer in `llm_info.json`, on one device of a tensor group."""

    params_bytes: Bytes
    act_output_bytes: Bytes  # bytes per sample sent to the next layer
    act_mem_bytes: Bytes  # bytes per sample kept until the backward pass
    act_input_floats: NonNegative | None = None  # numbers per sample that the layer reads


# The content of `llm_info.json`.
SizesFile = ForeignRoot[dict[ForeignName, Filled[dict[DegreeKey, ByLayer[LayerEntry]]]]]


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of all layers on one device of a tensor group."""

    params: Floats  # [L] bytes of parameters
    output: Floats  # [L] bytes per sample sent to the next layer
    kept: Floats  # [L] bytes per sample kept until the backward pass


@dataclass(frozen=True)
class ModelData:
    """The profiles and sizes of one model, as `load_model_data` reads them."""

    name: str
    layers: int  # L
    tables: dict[str, Tables]  # GPU type -> its measured tables
    sizes: dict[int, LayerSizes]  # tensor degree -> sizes of the layers
    sequence: int  # tokens of a sample; 0: unknown


@dataclass(frozen=True)
class Place:
    """A model's profiles among Sailor's files."""

    root: Path  # the folder that holds `profiles` and `llm_info.json`
    model: str
    kinds: list[str]  # GPU types, one where a path names a profile


def located(path: str) -> Place:
    """The place of a `profile.json`, of its folder, or of a model's folder. Raises InputError."""
    require(os.path.exists(path), "no such file or folder", where=path)
    start = Path(os.path.abspath(path))  # a relative path may not name the folders above
    folder = start.parent if start.is_file() else start
    if (folder / "profile.json").is_file():
        model, kinds = folder.parent.resolve(), [folder.name]
    else:
        model = folder.resolve()
        kinds = sorted(file.parent.name for file in model.glob("*/profile.json"))
    roots = (above for above in model.parents if (above / "llm_info.json").is_file())
    root = next(roots, None)
    if root is None:
        raise InputError(
            "no llm_info.json in a folder above", where=path, expected="sizes of the model's layers"
        )
    require(
        model == root / "profiles" / model.name,
        "not in its place",
        where=path,
        expected=f"{root}/profiles/<model>/<GPU>/profile.json",
    )
    require(kinds, "no profile", where=str(model), expected="<GPU>/profile.json")
    return Place(root, model.name, kinds)


def model_names(folder: Path) -> list[str]:
    """The models that have a folder of profiles. Raises InputError where there is no folder
    `profiles`."""
    root = folder / "profiles"
    require(
        root.is_dir(),
        "no such folder",
        where=str(root),
        expected="profiles/<model>/<GPU>/profile.json",
    )
    return sorted(entry.name for entry in root.iterdir() if entry.is_dir())


def load_model_data(folder: Path, name: str, info: SizesFile) -> ModelData:
    """The profiles and sizes of one model.

    folder: the folder that holds `profiles`. name: the model's name. info: the content of
    `llm_info.json`. Raises InputError with file, place, got and expected.
    """
    root = folder / "profiles" / name
    tables = {path.parent.name: load_tables(path) for path in sorted(root.glob("*/profile.json"))}
    require(tables, "no profile", where=str(root), expected="<GPU>/profile.json")
    counts = {  # GPU type -> the numbers of layers of its tables
        gpu: {table.shape[1] for table in gpu_tables.values()} for gpu, gpu_tables in tables.items()
    }
    where = str(folder / "llm_info.json")
    sizes_of_model = look_up("no sizes of model", name, info.root, where=where)
    layers, *others = set(chain(*counts.values()))
    require(not others, "numbers of layers differ between tables", where=str(root), got=counts)
    for degree, rows in sizes_of_model.items():
        require(
            len(rows) >= layers,
            "too few layers",
            where=f"{where}: {name}.{degree}",
            got=len(rows),
            expected=f"{layers}, as the profiles have",
        )
    sizes = {degree: layer_sizes(rows[:layers]) for degree, rows in sizes_of_model.items()}
    # Each tensor rank reads whole samples, so that all tensor degrees that state this count state
    # the same one.
    inputs = [rows[0].act_input_floats for rows in sizes_of_model.values()]
    stated_inputs = max(filter(None, inputs), default=0.0)
    return ModelData(name, layers, tables, sizes, _tokens(stated_inputs))


def load_tables(path: Path) -> Tables:
    """The measured tables of a `profile.json`."""
    tables: Tables = {}
    for batch, by_degree in read_foreign(ProfileFile, path).root.items():
        for degree, rows in by_degree.items():
            tables[degree, batch] = np.array(rows).T
    return tables


def layer_sizes(entries: Sequence[LayerEntry]) -> LayerSizes:
    """The sizes of all layers as arrays."""
    return LayerSizes(
        params=np.array([entry.params_bytes for entry in entries]),
        output=np.array([entry.act_output_bytes for entry in entries]),
        kept=np.array([entry.act_mem_bytes for entry in entries]),
    )


def _tokens(inputs: float) -> int:
    """The tokens s of a sample, from the count of numbers that the first layer reads.

    The first layer reads s tokens, s positions and a mask of s^2 entries: s^2 + 2 s numbers.
    Returns 0 where no s gives the count.
    """
    s = round(math.sqrt(inputs + 1.0) - 1.0)
    return s if s * s + 2 * s == inputs else 0


MB, GB = 1e6, 1e9


class Fit(NamedTuple):
    """A fitted bandwidth over the size of messages: a x^2 + b x + c GB/s with x = log2(MB)."""

    factors: Annotated[tuple[float, float, float], Strict(False)]  # a, b, c
    cap: Annotated[float, Field(ge=1e-6, le=1e18)]  # most bytes/s; no link reaches 1e18

    def bandwidth(self, size: float) -> float:
        """Bytes/s of messages of `size` bytes; the cap where the parabola is not positive."""
        a, b, c = self.factors
        x = max(math.log2(max(size, 1.0) / MB), 0.0)
        if a < 0:
            x_of_maximum = -b / (2 * a)
            x = min(x, x_of_maximum)
        value = (a * x * x + b * x + c) * GB
        if value > 0:
            return min(value, self.cap)
        return self.cap  # the fit does not hold here, and only the cap remains


# GPU type -> number of GPUs within a node, or of pairs of GPUs between nodes -> fit
Fits = dict[ForeignName, Filled[dict[DegreeKey, Fit]]]


class Links(Foreign):
    """The content of a `network_coeffs*.json`."""

    inter: Fits  # between two nodes
    intra: Fits = Field(default_factory=dict)  # within a node

    def network(self, kind: str, pairs: int, size: float) -> float:
        """Bytes/s that `pairs` GPUs of a node together reach when they send `size` bytes in all to
        as many GPUs of another node. kind: the GPU type."""
        fits = self.inter.get(kind)
        if fits is None:
            raise NotPricedError(
                "no bandwidth between nodes",
                where="network_coeffs",
                got=kind,
                expected=", ".join(sorted(self.inter)),
            )
        # More pairs never get less bandwidth than fewer: the best fit up to `pairs` counts.
        usable = [count for count in fits if count <= pairs] or [min(fits)]
        return max(fits[count].bandwidth(size / count) for count in usable)

    def local(self, kind: str, ranks: int, size: float) -> float:
        """Bytes/s of each of `ranks` GPUs of a node, in messages of `size` bytes within the node.

        Each GPU of a type without measurements within a node gets an equal share of the network's
        bandwidth for `size` bytes in all.
        """
        if kind not in self.intra:
            return self.network(kind, ranks, size) / max(ranks, 1)
        fits = self.intra[kind]
        at_least_ranks = [count for count in fits if count >= ranks]
        nearest = min(at_least_ranks) if at_least_ranks else max(fits)
        return fits[nearest].bandwidth(size)


def has_links(folder: Path) -> bool:
    """Whether a folder has a file of bandwidths between nodes."""
    return any(folder.glob("network_coeffs*.json"))


def load_links(folder: Path) -> Links:
    """The fits of all `network_coeffs*.json` and `*bandwidth*.json` of a folder.

    The fits of a GPU type come from the last file that has the type. The function reads
    `network_coeffs*.json` after `*bandwidth*.json`, each in alphabetical order.
    """
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
    """The GPUs that a plan uses on one node."""

    kind: ForeignName  # GPU type
    gpus: PositiveCount  # number of GPUs
    zone: Any = None  # not used


class Group(NamedTuple):
    """The tensor group of one stage in one data replica."""

    nodes: Filled[list[NodeGpus]]
    tensor: Annotated[int, Field(ge=1, le=4096)]  # tensor degree

    @property
    def kinds(self) -> tuple[str, ...]:
        """The GPU types of the group, each once."""
        return tuple(dict.fromkeys(node.kind for node in self.nodes))


class RunPipeline(Foreign):
    """A pipeline and all its data replicas."""

    # [stage] numbers of its layers
    layers: Filled[list[Filled[list[Count]]]] = Field(alias="layers_per_stage")
    # [stage][data replica] tensor group
    groups: list[Filled[list[Group]]] = Field(alias="tmp_per_stage")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        """Check that the stages take all layers in order, and that each stage has its groups."""
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


# Some files have 0 for a value that was not measured.
NONE_FOR_ZERO = AfterValidator(lambda measured: measured or None)


class PlanRun(Foreign):
    """A plan that Sailor's authors ran, and its measurements; None: not measured."""

    file: str = ""  # path of the file, relative to the folder `validation`
    model: ForeignName | None = None
    pipelines: Filled[list[RunPipeline]] = Field(alias="pipeline_list")
    micro_batch: PositiveCount = Field(alias="mbs")  # samples
    global_batch: PositiveCount = Field(alias="gbs")  # samples
    # seconds of an iteration
    seconds: Annotated[Seconds | None, NONE_FOR_ZERO] = Field(None, alias="real")
    # peak memory of a GPU
    max_bytes: Annotated[Bytes | None, NONE_FOR_ZERO] = Field(None, alias="max_mem")

    @property
    def layers(self) -> int:
        """Number of the model's layers."""
        return sum(map(len, self.pipelines[0].layers))

    @property
    def kinds(self) -> set[str]:
        """GPU types of all groups."""
        kinds: set[str] = set()
        for pipeline in self.pipelines:
            for group in chain(*pipeline.groups):
                kinds.update(group.kinds)
        return kinds


def load_run(path: Path, root: Path) -> PlanRun:
    """The plan of a file below the folder `root`, which the plan's `file` is relative to. Raises
    InputError with file, place, got and expected."""
    name = path.relative_to(root).as_posix()
    return read_foreign(PlanRun, path).model_copy(update={"file": name})
