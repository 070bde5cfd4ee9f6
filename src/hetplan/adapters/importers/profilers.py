"""Imports files of Sailor, Metis, calculon and DeepSpeed's profiler: measured times per layer, or
descriptions of models and systems.

- Sailor (SOSP 2025): profiles, whose format `hetplan.adapters.importers.sailor` describes. Their
  times include the tensor group's all-reduces. PATH is a `profile.json` at
  profiles/<model>/<GPU>/, that folder, or the model's folder with all its GPUs. Sizes come from
  the `llm_info.json` in a folder above.
- Metis (ATC 2024): one JSON per device type, tensor degree and batch, such as
  `DeviceType.A100_tp2_bs4.json`. `model`: {"model_name", "num_layers", "parameters":
  {"parameters_per_layer_bytes": [L], optionally "activation_parameters_bytes": [L]}};
  `execution_time`: {"layer_compute_total_ms": [L]}, forward and backward together;
  `execution_memory`: {"layer_memory_total_mb": [L]} with states, gradients and activations. Source:
  the project's README.
- calculon: a model becomes a file for `--model FILE`, a system becomes a cluster file. Model:
  {"hidden", "feedforward", "seq_size", "attn_heads", "attn_size", "num_blocks"}. It describes
  blocks only, so the vocabulary is GPT-2's, padded as Megatron does. System: {"matrix": {type:
  {"tflops"}}, "mem1": {"GiB", "GBps"}, "networks": [{"bandwidth" (GB/s), "efficiency", "size",
  "latency" (s)}…]}. The first network joins the devices of a node, the second the nodes.
- DeepSpeed's flops profiler, as printed: its summary, and a tree of modules with parameters, MACs
  and latency. A module's line `(name): Class(` is followed by `12.6 M, 3.75% Params, 128.87 GMACs,
  4.10% MACs, 1.29 ms, 1.69% latency, …`; newer versions write `12.6 M = 3.75% Params`. Every block
  of a list of repeated blocks becomes a layer, and so does every module beside such a list. The
  profiler times each module's forward pass; the summary has the backward pass as a whole.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import AliasChoices, AliasPath, Field

from hetplan.adapters.importers.common import (
    DIVIDED_NOTE,
    MOST_LAYERS,
    Imported,
    Operator,
    Settings,
    chain_profile,
    layer,
    lines_of,
    lines_of_one_rank,
    profile,
    table_of_sums,
)
from hetplan.adapters.importers.sailor import (
    ModelData,
    SizesFile,
    has_links,
    load_model_data,
    located,
)
from hetplan.errors import InputError, T, require
from hetplan.files import read_foreign_json
from hetplan.profiling.models.configuration_keys import CALCULON_KEYS
from hetplan.profiling.models.configurations import from_config
from hetplan.profiling.profiles.profile import ProfileLayer, ProfileTable
from hetplan.profiling.workload import STATE_BYTES_PER_PARAM
from hetplan.schema import (
    MOST_RATE,
    Bytes,
    Filled,
    Foreign,
    ForeignName,
    Positive,
    PositiveCount,
    Rate,
    Seconds,
    as_name,
    parse,
    read_foreign,
)


def read_sailor(path: str, settings: Settings) -> Imported:
    """A profile from Sailor's, with a table per GPU type, tensor degree and micro-batch."""
    place = located(path)
    root, name = place.root, place.model
    data = load_model_data(root, name, read_foreign(SizesFile, root / "llm_info.json"))
    kinds = place.kinds
    settings.check_one_device_type(kinds)
    tables = []
    for kind in kinds:
        for tensor, batch in sorted(data.tables[kind]):
            forward, backward, _update = data.tables[kind][tensor, batch]
            table = ProfileTable(
                device=settings.device or kind,
                tensor=tensor,
                micro_batch=batch,
                forward_seconds=forward.tolist(),
                backward_seconds=backward.tolist(),
            )
            tables.append(table)
    layers = whole_layers(data)
    notes = ["update times are left out: a profile has none"]
    if ends_with_norm(layers):
        layers, tables = norm_in_head(layers, tables)
        notes.append("the norm before the head is a layer in the file, and a part of the head here")
    if has_links(root) and not settings.with_links:
        notes.append("the folder has links: --cluster-output FILE writes a cluster file with them")
    return profile(
        settings,
        model=name,
        source=f"Sailor profiles of {name} on {', '.join(kinds)}",
        where=path,
        layers=layers,
        tables=tables,
        sequence=data.sequence or None,  # 0: unknown
        notes=notes,
    )


def ends_with_norm(layers: list[ProfileLayer]) -> bool:
    """Whether the layer before the last one is a norm alone: it has a thousandth of the parameters
    of the block before it."""
    if len(layers) < 4:
        return False
    block, norm = layers[-3], layers[-2]
    return 0 < norm.param_bytes <= block.param_bytes / 1000


def norm_in_head(
    layers: list[ProfileLayer], tables: list[ProfileTable]
) -> tuple[list[ProfileLayer], list[ProfileTable]]:
    """The layers and tables in which the last two layers, a norm and the head, are one: hetplan's
    models have the last norm in their head."""
    *before, norm, head = layers
    added = ("param_bytes", "saved_bytes", "replicated_saved_bytes")
    sums = {key: getattr(norm, key) + getattr(head, key) for key in added}
    joined = head.model_copy(update=sums | {"name": norm.name})
    shorter = []
    for table in tables:
        seconds = {
            key: [*row[:-2], row[-2] + row[-1]]
            for key, row in (
                ("forward_seconds", table.forward_seconds),
                ("backward_seconds", table.backward_seconds),
            )
        }
        shorter.append(table.model_copy(update=seconds))
    return [*before, joined], shorter


def whole_layers(data: ModelData) -> list[ProfileLayer]:
    """The sizes of whole layers, from the sizes on one device.

    A layer keeps r bytes on every tensor-parallel rank and divides p bytes among the t ranks, so
    that each rank keeps k_t = r + p / t bytes. The two lowest degrees with sizes give r and p. With
    sizes of one degree only, r = 0.
    """
    least, *more = sorted(data.sizes)
    low = data.sizes[least]
    replicated = np.zeros_like(low.kept)
    if more:
        second = more[0]
        divided = (low.kept - data.sizes[second].kept) / (1 / least - 1 / second)
        # Measured sizes may lie beside the formula: neither part is below 0.
        replicated = (low.kept - divided / least).clip(0.0, low.kept)
    whole = replicated + (low.kept - replicated) * least
    result = []
    for i in range(data.layers):
        is_last = i == data.layers - 1
        entry = layer(
            f"layer-{i}",
            params=float(low.params[i] * least),  # as if wholly divided
            activation=0.0 if is_last else float(low.output[i]),
            saved=float(whole[i]),
            replicated=float(replicated[i]),
        )
        result.append(entry)
    return result


NAME = re.compile(r"DeviceType\.(?P<device>.+)_tp(?P<tensor>\d{1,4})_bs(?P<batch>\d{1,6})\.json$")
MILLI, MB = 1e-3, 1e6
# Bytes per parameter of the weights in Metis' files, which are of mixed precision.
PARAM_BYTES = 2
# The keys that lead to the sizes of layers in Metis' files.
SIZES = ("model", "parameters")


# One entry for each layer.
ByMetisLayer = Annotated[list[T], Field(max_length=MOST_LAYERS)]


class MetisFile(Foreign):
    """The content of a Metis file: one device type, tensor degree and batch size.

    Every list has one entry per layer; only `megabytes` has another number in some files.
    """

    model: ForeignName = Field(validation_alias=AliasPath("model", "model_name"))
    # [L] bytes of the parameters on one device
    params: Filled[ByMetisLayer[Bytes]] = Field(
        validation_alias=AliasPath(*SIZES, "parameters_per_layer_bytes")
    )
    # [L] bytes that the layer sends to the next one, for the whole batch
    sent: ByMetisLayer[Bytes] | None = Field(
        None,
        validation_alias=AliasChoices(
            AliasPath(*SIZES, "activation_parameters_bytes"),
            AliasPath(*SIZES, "activation_paramters_bytes"),  # how some files spell it
        ),
    )
    # [L] forward and backward pass of the whole batch
    milliseconds: ByMetisLayer[Seconds] = Field(
        validation_alias=AliasPath("execution_time", "layer_compute_total_ms")
    )
    # [L] memory of states, gradients and activations on one device
    megabytes: ByMetisLayer[Bytes] = Field(
        validation_alias=AliasPath("execution_memory", "layer_memory_total_mb")
    )


def read_metis(path: str, settings: Settings) -> Imported:
    """A profile from one Metis file, or from all files of a folder, with one table per file.

    The layers' sizes come from the file with the least tensor degree and, of these, the least batch
    size.
    """
    start = Path(path)
    paths = sorted(start.glob("DeviceType.*.json")) if os.path.isdir(start) else [start]
    files: dict[tuple[str, int, int], MetisFile] = {}  # by (device type, tensor degree, batch)
    for file in paths:
        match = NAME.match(file.name)
        if match is None:
            raise InputError(
                "name is not usable",
                where=str(file),
                expected="DeviceType.<device>_tp<degree>_bs<batch>.json",
            )
        tensor = max(int(match["tensor"]), 1)
        batch = max(int(match["batch"]), 1)
        content = read_foreign(MetisFile, file)
        check_lengths(content, str(file))
        files[match["device"], tensor, batch] = content
    require(files, "no file DeviceType.*_tp*_bs*.json", where=path)
    settings.check_one_device_type(device for device, _, _ in files)
    least_tensor, least_batch, device = min(
        (tensor, batch, device) for device, tensor, batch in files
    )
    smallest = files[device, least_tensor, least_batch]
    layers, notes = metis_layers(smallest, least_tensor, least_batch)
    tables = []
    for device, tensor, batch in sorted(files):
        seconds = [MILLI * time for time in files[device, tensor, batch].milliseconds]
        tables.append(table_of_sums(settings.device or device, tensor, batch, seconds))
    return profile(
        settings,
        model=smallest.model,
        where=path,
        source=f"Metis profiles {start.name}",
        layers=layers,
        tables=tables,
        precision="fp16",
        notes=(DIVIDED_NOTE, *notes),
    )


def check_lengths(content: MetisFile, where: str) -> None:
    """Raise InputError where a list of a Metis file has not one entry per layer."""
    for key in ("sent", "milliseconds"):
        values = getattr(content, key)
        count = len(content.params) if values is None else len(values)
        require(
            count == len(content.params),
            f"{key} has {count} entries",
            where=where,
            expected=f"one per layer of parameters_per_layer_bytes ({len(content.params)})",
        )


def metis_layers(file: MetisFile, tensor: int, batch: int) -> tuple[list[ProfileLayer], list[str]]:
    """The sizes of whole layers, and notes on the figures that the file lacks.

    tensor, batch: the file's tensor degree and batch size.
    """
    params, memory = file.params, file.megabytes
    notes = []
    sent, kept = [0.0] * len(params), [0.0] * len(params)  # bytes of the whole batch
    if file.sent is None:
        notes.append("the files do not tell what layers send on: activation_bytes are 0")
    else:
        sent = file.sent
    if len(memory) == len(params):
        states_per_param_byte = STATE_BYTES_PER_PARAM / PARAM_BYTES
        for i, (megabytes, param_bytes) in enumerate(zip(memory, params, strict=True)):
            kept[i] = max(megabytes * MB - states_per_param_byte * param_bytes, 0.0)
    else:
        notes.append(
            f"layer_memory_total_mb has {len(memory)} entries for {len(params)} layers: "
            "saved_bytes are 0"
        )
    # A device has 1 / tensor of the parameters and of the kept bytes, but all of what is sent.
    layers = [
        layer(f"layer-{i}", params[i] * tensor, sent[i] / batch, kept[i] * tensor / batch)
        for i in range(len(params))
    ]
    return layers, notes


VOCABULARY = 51200  # GPT-2's, padded as Megatron does
# A file of calculon has at least one of these keys.
CALCULON_ANY = ("networks", "matrix", "hidden", "num_blocks")


class CalculonNetwork(Foreign):
    """A network of a system in a calculon file."""

    bandwidth: Rate  # GB/s
    efficiency: Annotated[float, Field(ge=1e-6, le=1)]  # the share of `bandwidth` that it reaches
    size: PositiveCount  # number of devices that the network joins
    latency: Seconds

    @property
    def gbit_per_s(self) -> float:
        """Gbit/s that the network reaches."""
        return self.bandwidth * self.efficiency * 8  # Gbit in a GB


def tflops_of(calculons: str) -> AliasPath:
    """The path of keys to the rate of a number format in a calculon file.

    calculons: calculon's name of the number format.
    """
    return AliasPath("matrix", calculons, "tflops")


class CalculonSystem(Foreign):
    """The content of a calculon file that describes a system."""

    # TFLOP/s of matrix products by number format; None: not given
    fp16: Rate | None = Field(None, validation_alias=tflops_of("float16"))
    bf16: Rate | None = Field(None, validation_alias=tflops_of("bfloat16"))
    fp32: Rate | None = Field(None, validation_alias=tflops_of("float32"))
    # memory of a device; calculon's systems without a limit have 80e9
    memory_gib: Positive = Field(validation_alias=AliasPath("mem1", "GiB"))
    memory_gb_per_s: Rate = Field(validation_alias=AliasPath("mem1", "GBps"))
    # the first network joins the devices of a node, the second the nodes
    networks: Filled[list[CalculonNetwork]]


def read_calculon(path: str, settings: Settings) -> Imported:
    """A model or a cluster from a calculon file; the file's keys tell whether it describes a model
    or a system."""
    document = read_foreign_json(path)
    require(
        isinstance(document, dict) and (not document.keys().isdisjoint(CALCULON_ANY)),
        "neither a model nor a system",
        where=path,
        expected='"hidden" … or "matrix", "networks" …',
    )
    if "networks" in document or "matrix" in document:
        return cluster_of_system(parse(CalculonSystem, document, where=path), path, settings)
    config = {
        "model_type": "calculon",
        **{key: document[key] for key in CALCULON_KEYS if key in document},
        "vocab_size": VOCABULARY,
    }
    from_config(config, name=Path(path).stem, where=path)  # raises InputError for a wrong model
    return Imported(
        "model",
        config,
        (f"calculon's models are blocks alone: a vocabulary of {VOCABULARY} is assumed",),
    )


def cluster_of_system(described: CalculonSystem, path: str, settings: Settings) -> Imported:
    """A cluster of equal nodes from a system of calculon.

    It has `settings.nodes` nodes (None: 1). The first network's size is the number of devices of a
    node.
    """
    peaks = described.model_dump(include={"fp16", "bf16", "fp32"}, exclude_none=True)
    require(
        peaks,
        "no number format that training uses",
        where=f"{path}: matrix",
        expected="float16, bfloat16, float32",
    )
    if "fp16" in peaks:  # devices compute products as fast in either format of two bytes
        peaks.setdefault("bf16", peaks["fp16"])
    inside, *others = described.networks
    outside = others[0] if others else inside  # a single network joins the nodes, too
    name = as_name(settings.device or Path(path).stem)
    cluster = {
        "format": "hetplan-cluster",
        "version": 1,
        "name": as_name(settings.model or Path(path).stem),
        "nodes": [
            {
                "count": settings.nodes or 1,
                "devices": inside.size,
                "device": name,
                "intra_node_gbit_per_s": inside.gbit_per_s,
                "network_gbit_per_s": outside.gbit_per_s,
                "intra_node_latency_us": inside.latency * 1e6,
                "network_latency_us": outside.latency * 1e6,
            }
        ],
        "devices": {
            name: {
                # 80e9 stands for a memory without limit, and a cluster file takes less.
                "memory_gib": min(described.memory_gib, MOST_RATE),
                "memory_gb_per_s": described.memory_gb_per_s,
                "peak_tflops": peaks,
                "source": as_name(f"calculon system {Path(path).name}"),
            }
        },
    }
    notes = ["bandwidths are the networks' times their efficiency"]
    if not settings.nodes:
        notes.insert(0, "one node; --nodes N makes more")
    return Imported("cluster", cluster, tuple(notes))


# The words of DeepSpeed's flops profiler: scales of counts, units of time in seconds, classes of
# torch that hold lists of modules, and the forms of lines.
SCALES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "sec": 1.0}
BLOCKS = ("ModuleList", "Sequential")
# `(name): Class(` or, of the root, `Class(`.
MODULE = re.compile(r"^\s*(?:\((?P<name>[^)]*)\):\s*)?(?P<kind>[A-Za-z_]\w*)\((?P<rest>.*)$")
NUMBER = r"(?<![\d.])(?P<n>\d+(?:\.\d*)?)"  # it does not begin within another number
PARAMS = re.compile(NUMBER + r"\s*(?P<scale>[kKMGBT]?)\s*[,=]\s*[\d.]+% Params")
TIME = NUMBER + r"\s*(?P<unit>s|sec|ms|us|ns)"
LATENCY = re.compile(TIME + r"\s*[,=]\s*[\d.]+% latency")
SUMMARY = re.compile(rf"^(?P<key>fwd|bwd) latency:\s*{TIME}$")
# 1 to 9 digits behind leading zeros; a batch size of 0 says nothing.
BATCH = re.compile(r"^batch size per GPU:\s*(?P<n>0*[1-9]\d{0,8})$")


HEADING = "Detailed Profile"
LONGEST_LINE = 10_000  # characters of a line that the profiler prints; longer ones are of others
MOST_LEVELS = 100  # of the tree of modules


@dataclass
class Module:
    """One module of the tree that the profiler prints."""

    name: str  # the module's name in the module around it; empty for the root
    kind: str  # the name of its class
    line: int  # number of its line in the file
    depth: int  # number of spaces before the line's text
    params: float | None = None  # number of parameters; None: not printed
    seconds: float | None = None  # seconds of the forward pass; None: not printed
    inner: "list[Module]" = field(default_factory=list)  # the modules directly within


def read_deepspeed(path: str, settings: Settings) -> Imported:
    """A profile with one table, from the output of DeepSpeed's flops profiler.

    The ratio of backward to forward seconds is the same for all layers: the ratio of the summary's
    latencies, or 2 without them.
    """
    lines = lines_of_one_rank(lines_of(path), HEADING)
    latency: dict[str, float] = {}  # fwd, bwd -> seconds of the summary
    micro_batch = settings.micro_batch
    for _, line in lines:
        if len(line) > LONGEST_LINE:
            continue  # of another program
        if summary := SUMMARY.match(line.strip()):
            latency[summary["key"]] = _seconds(summary)
        elif batch := BATCH.match(line.strip()):
            micro_batch = micro_batch or int(batch["n"])  # the user's, else the file's first
    tree = parse_tree(lines, path)
    ratio = 2.0  # the backward pass of a matrix product computes two products
    notes = []
    if latency.get("fwd") and latency.get("bwd"):
        ratio = latency["bwd"] / latency["fwd"]
    else:
        notes.append("no backward latency in the summary: twice the forward one")
    notes.append(
        "the profiler does not tell what layers send on and keep: activation_bytes and "
        "saved_bytes are 0"
    )
    param_bytes = 4 if settings.precision == "fp32" else 2
    chain = []
    for module in layers_of(tree):
        if module.params is None or module.seconds is None:
            raise InputError(
                f"module {module.name} has no figures", where=f"{path}: line {module.line}",
                expected="output that is not shortened (module_depth = -1, detailed)",
            )  # fmt: skip
        operator = Operator(
            name=f"{module.name}-{module.kind}" if module.name else module.kind,
            forward=module.seconds,
            backward=ratio * module.seconds,
            params=param_bytes * module.params,
            output=0.0,
            kept=0.0,
        )
        bytes_behind = 0.0  # the profiler does not tell, see the note
        chain.append((operator, bytes_behind))
    return chain_profile(
        chain,
        replace(settings, micro_batch=micro_batch, precision=settings.precision or "fp16"),
        model=tree.kind,
        device="deepspeed-gpu",
        where=path,
        source=f"DeepSpeed flops profiler, {Path(path).name}",
        notes=notes,
    )


def parse_tree(lines: list[tuple[int, str]], path: str) -> Module:
    """The root of the first tree of modules behind the last heading of a detailed profile. A log
    may hold several profiles.

    lines: (number, text) of each line. Raises InputError where there is no such heading or tree.
    """
    headings = [i for i, (_, line) in enumerate(lines) if HEADING in line]
    require(
        headings,
        "no detailed profile",
        where=path,
        expected="a heading 'Detailed Profile per GPU'",
    )
    root: Module | None = None
    around: list[Module] = []  # the modules that a line may stand in, the root first
    for number, line in lines[headings[-1] + 1 :]:
        if root is not None and line.rstrip() == ")":
            return root
        if len(line) > LONGEST_LINE:
            require(
                root is None,
                "line is too long",
                where=f"{path}: line {number}",
                got=len(line),
                expected=f"at most {LONGEST_LINE} characters",
            )
            continue
        match = MODULE.match(line)
        is_line_of_figures = PARAMS.match(line.strip()) is not None
        # Notes stand between the heading and the root, whose line ends with a parenthesis.
        can_be_root = line.rstrip().endswith("(")
        if match and not is_line_of_figures and (root is not None or can_be_root):
            depth = len(line) - len(line.lstrip())
            module = Module(match["name"] or "", match["kind"], number, depth)
            while around and around[-1].depth >= depth:
                around.pop()
            if around:
                around[-1].inner.append(module)
            root = root or module
            around.append(module)
            require(
                len(around) <= MOST_LEVELS,
                "modules are nested too deeply",
                where=f"{path}: line {number}",
                expected=f"at most {MOST_LEVELS} levels",
            )
        if around:  # figures follow on the module's own line or on the next ones
            _figures(around[-1], line)
    raise InputError("the tree of modules does not end", where=path, expected="closing parentheses")


def _figures(module: Module, text: str) -> None:
    """Set the module's parameters and seconds where the line `text` has them."""
    params = PARAMS.search(text)
    latency = LATENCY.search(text)
    if params:
        module.params = float(params["n"]) * SCALES[params["scale"]]
    if latency:
        module.seconds = _seconds(latency)


def layers_of(tree: Module) -> Iterator[Module]:
    """The modules of a tree that are layers of a profile, in printed order.

    Each module of a list of blocks is a layer. A module that holds such a list is divided into the
    modules within; any other module is a layer as a whole.
    """
    if _is_list_of_blocks(tree):
        yield from tree.inner
    elif not any(map(_has_blocks, tree.inner)):
        yield tree
    else:
        for inner in tree.inner:
            if _has_blocks(inner):
                yield from layers_of(inner)
            else:
                yield inner


def _is_list_of_blocks(module: Module) -> bool:
    """Whether the module is a list of several modules."""
    return module.kind in BLOCKS and len(module.inner) > 1  # one module does not repeat


def _has_blocks(module: Module) -> bool:
    """Whether the module is or holds a list of several modules."""
    return _is_list_of_blocks(module) or any(map(_has_blocks, module.inner))


def _seconds(time: re.Match[str]) -> float:
    """Seconds of a match of `LATENCY` or `SUMMARY`."""
    return float(time["n"]) * UNITS[time["unit"]]
