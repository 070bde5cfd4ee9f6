"""Files of Sailor, Metis, calculon and DeepSpeed's profiler: times per layer, or descriptions.

- Sailor (SOSP 2025): profiles as `hetplan.adapters.importers.sailor` says; times include the
  tensor group's all-reduces. PATH is a `profile.json` at profiles/<model>/<GPU>/, that folder, or
  the model's folder with all its GPUs; sizes come from the `llm_info.json` in a folder above.
- Metis (ATC 2024): one JSON per device type, tensor degree and batch, such as
  `DeviceType.A100_tp2_bs4.json`. `model`: {"model_name", "num_layers", "parameters":
  {"parameters_per_layer_bytes": [L], optionally "activation_parameters_bytes": [L]}};
  `execution_time`: {"layer_compute_total_ms": [L]}, forward and backward together;
  `execution_memory`: {"layer_memory_total_mb": [L]} with states, gradients and activations. Source:
  the project's README.
- calculon: a model becomes one that `--model FILE` takes, a system a cluster file. Model:
  {"hidden", "feedforward", "seq_size", "attn_heads", "attn_size", "num_blocks"}; blocks only, so
  the vocabulary is GPT-2's, padded as Megatron does. System: {"matrix": {type: {"tflops"}}, "mem1":
  {"GiB", "GBps"}, "networks": [{"bandwidth" (GB/s), "efficiency", "size", "latency" (s)}…]}, the
  first network within a node, the second between.
- DeepSpeed's flops profiler, as printed: its summary, and a tree of modules with parameters, MACs
  and latency. A module's line `(name): Class(` is followed by `12.6 M, 3.75% Params, 128.87 GMACs,
  4.10% MACs, 1.29 ms, 1.69% latency, …`; newer versions write `12.6 M = 3.75% Params`. Layers are
  the tree's modules, a list of repeated blocks unrolled and what stands beside it kept whole. The
  profiler times forward passes; the summary has the backward pass as a whole.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Annotated

from pydantic import AliasChoices, AliasPath, Field

from hetplan.adapters.importers.common import (
    TOGETHER,
    Imported,
    Operator,
    Settings,
    chain_profile,
    layer,
    lines_of,
    profile,
    table_of_sums,
)
from hetplan.adapters.importers.sailor import ModelData, SizesFile, load_model_data
from hetplan.errors import InputError, require
from hetplan.files import read_json
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
    """A profile with a table per GPU type, tensor degree and micro-batch."""
    start = Path(path)
    require(start.exists(), "no such file or folder", where=path)
    folder = start.parent if start.is_file() else start
    one = (folder / "profile.json").is_file()
    model, gpu = (folder.parent, folder.name) if one else (folder, None)
    root = next(
        (above for above in model.resolve().parents if (above / "llm_info.json").is_file()), None
    )
    if root is None:
        raise InputError(
            "no llm_info.json in a folder above", where=path, expected="sizes of the model's layers"
        )
    name = model.resolve().name
    require(
        model.resolve() == root / "profiles" / name,
        "not in its place",
        where=path,
        expected=f"{root}/profiles/<model>/<GPU>/profile.json",
    )
    data = load_model_data(root, name, read_foreign(SizesFile, root / "llm_info.json"))
    kinds = list(data.tables) if gpu is None else [gpu]
    settings.one_kind(kinds)
    return profile(
        settings,
        model=name,
        source=f"Sailor profiles of {name} on {', '.join(kinds)}",
        where=path,
        layers=layers(data),
        tables=[
            ProfileTable(
                device=settings.device or kind,
                tensor=tensor,
                micro_batch=batch,
                forward_seconds=table[0].tolist(),
                backward_seconds=table[1].tolist(),
            )
            for kind in kinds
            for (tensor, batch), table in sorted(data.tables[kind].items(), key=itemgetter(0))
        ],
        sequence=data.sequence or None,
        notes=["update times are left out: a profile has none"],
    )


def layers(data: ModelData) -> list[ProfileLayer]:
    """Sizes of whole layers: parts that tensor parallelism divides, and parts that every rank
    keeps.

    With k_t bytes kept on each of t ranks, k_t = r + p / t; the two lowest degrees give r and p.
    """
    least, *more = sorted(data.sizes)
    low = data.sizes[least]
    replicated = 0.0 * low.kept
    if more:
        divided = (low.kept - data.sizes[more[0]].kept) / (1 / least - 1 / more[0])
        replicated = (low.kept - divided / least).clip(0.0, low.kept)
    whole = replicated + (low.kept - replicated) * least
    return [
        layer(
            f"layer-{i}",
            float(low.params[i] * least),
            float(low.output[i]) if i < data.layers - 1 else 0.0,
            float(whole[i]),
            float(replicated[i]),
        )
        for i in range(data.layers)
    ]


NAME = re.compile(r"DeviceType\.(?P<device>.+)_tp(?P<tensor>\d{1,4})_bs(?P<batch>\d{1,6})\.json$")
MILLI, MB = 1e-3, 1e6
# Mixed precision: 2 bytes per parameter in the file's sizes, 16 of states.
PARAM_BYTES = 2


SIZES = ("model", "parameters")


class MetisFile(Foreign):
    """One device type, tensor degree and batch; rows have an entry per layer [L], of `memory` not
    in every file."""

    model: ForeignName = Field(validation_alias=AliasPath("model", "model_name"))
    params: Filled[list[Bytes]] = Field(
        validation_alias=AliasPath(*SIZES, "parameters_per_layer_bytes")
    )
    sent: list[Bytes] | None = Field(
        None,
        validation_alias=AliasChoices(
            AliasPath(*SIZES, "activation_parameters_bytes"),
            AliasPath(*SIZES, "activation_paramters_bytes"),  # how some files spell it
        ),
    )
    milliseconds: list[Seconds] = Field(
        validation_alias=AliasPath("execution_time", "layer_compute_total_ms")
    )
    megabytes: list[Bytes] = Field(
        validation_alias=AliasPath("execution_memory", "layer_memory_total_mb")
    )


def read_metis(path: str, settings: Settings) -> Imported:
    """A profile of all the folder's files, or of one; sizes are those of the file of the least
    degree and batch."""
    start = Path(path)
    paths = sorted(start.glob("DeviceType.*.json")) if start.is_dir() else [start]
    files = {}
    for file in paths:
        match = NAME.match(file.name)
        if match is None:
            raise InputError(
                "name is not usable",
                where=str(file),
                expected="DeviceType.<device>_tp<degree>_bs<batch>.json",
            )
        sizes = max(int(match["tensor"]), 1), max(int(match["batch"]), 1)
        read = files[(match["device"], *sizes)] = read_foreign(MetisFile, file)
        for key in ("sent", "milliseconds"):
            count = len(getattr(read, key) or read.params)
            require(
                count == len(read.params),
                f"{key} has {count} entries",
                where=str(file),
                expected=f"one per layer of parameters_per_layer_bytes ({len(read.params)})",
            )
    require(files, "no file DeviceType.*_tp*_bs*.json", where=path)
    settings.one_kind(device for device, _, _ in files)
    (_, tensor, batch), chosen = min(files.items(), key=lambda item: (item[0][1:], item[0][0]))
    layers, notes = metis_layers(chosen, tensor, batch)
    return profile(
        settings,
        model=chosen.model,
        where=path,
        source=f"Metis profiles {start.name}",
        layers=layers,
        tables=[
            table_of_sums(
                settings.device or key[0],
                *key[1:],
                [MILLI * time for time in file.milliseconds],
            )
            for key, file in sorted(files.items(), key=itemgetter(0))
        ],
        precision="fp16",
        notes=(TOGETHER, *notes),
    )


def metis_layers(file: MetisFile, tensor: int, batch: int) -> tuple[list[ProfileLayer], list[str]]:
    """Sizes of whole layers, and what the file lacks for them."""
    params, memory = file.params, file.megabytes
    notes, kept = [], [0.0] * len(params)
    if file.sent is None:
        notes.append("the files do not tell what layers send on: activation_bytes are 0")
    if len(memory) == len(params):
        states = STATE_BYTES_PER_PARAM / PARAM_BYTES
        kept = [
            max(held * MB - states * p, 0.0) * tensor / batch
            for held, p in zip(memory, params, strict=True)
        ]
    else:
        notes.append(
            f"layer_memory_total_mb has {len(memory)} entries for {len(params)} layers: "
            "saved_bytes are 0"
        )
    layers = [
        layer(f"layer-{i}", params[i] * tensor, file.sent[i] / batch if file.sent else 0.0, kept[i])
        for i in range(len(params))
    ]
    return layers, notes


VOCABULARY = 51200
CALCULON_ANY = ("networks", "matrix", "hidden", "num_blocks")


class CalculonNetwork(Foreign):
    """bandwidth: GB/s. size: how many devices it joins. latency: seconds."""

    bandwidth: Rate
    efficiency: Annotated[float, Field(ge=1e-6, le=1)]
    size: PositiveCount
    latency: Seconds

    @property
    def gbit_per_s(self) -> float:
        """Gbit/s that the network reaches."""
        return self.bandwidth * self.efficiency * 8  # Gbit in a GB


def tflops_of(calculons: str) -> AliasPath:
    """Where a number format's rate stands, by calculon's name of it."""
    return AliasPath("matrix", calculons, "tflops")


class CalculonSystem(Foreign):
    """A system; the first network joins the devices of a node, the second the nodes. memory_gib:
    80e9 stands for no limit."""

    fp16: Rate | None = Field(None, validation_alias=tflops_of("float16"))
    bf16: Rate | None = Field(None, validation_alias=tflops_of("bfloat16"))
    fp32: Rate | None = Field(None, validation_alias=tflops_of("float32"))
    memory_gib: Positive = Field(validation_alias=AliasPath("mem1", "GiB"))
    memory_gb_per_s: Rate = Field(validation_alias=AliasPath("mem1", "GBps"))
    networks: Filled[list[CalculonNetwork]]


def read_calculon(path: str, settings: Settings) -> Imported:
    """A model or a system, by its keys."""
    document = read_json(path)
    require(
        isinstance(document, dict) and (not document.keys().isdisjoint(CALCULON_ANY)),
        "neither a model nor a system",
        where=path,
        expected='"hidden" … or "matrix", "networks" …',
    )
    if "networks" in document or "matrix" in document:
        return system(parse(CalculonSystem, document, where=path), path, settings)
    config = {
        "model_type": "calculon",
        **{key: document[key] for key in CALCULON_KEYS if key in document},
        "vocab_size": VOCABULARY,
    }
    from_config(config, name=Path(path).stem, where=path)  # raises InputError where it cannot be
    return Imported(
        "model",
        config,
        (f"calculon's models are blocks alone: a vocabulary of {VOCABULARY} is assumed",),
    )


def system(described: CalculonSystem, path: str, settings: Settings) -> Imported:
    """A cluster of `nodes` nodes (default 1) of as many devices as the first network joins."""
    peaks = described.model_dump(include={"fp16", "bf16", "fp32"}, exclude_none=True)
    require(
        peaks,
        "no number format that training uses",
        where=f"{path}: matrix",
        expected="float16, bfloat16, float32",
    )
    if "fp16" in peaks:
        peaks.setdefault("bf16", peaks["fp16"])
    inside, *others = described.networks
    outside = others[0] if others else inside
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


SCALES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "sec": 1.0}
BLOCKS = ("ModuleList", "Sequential")
MODULE = re.compile(r"^\s*(?:\((?P<name>[^)]*)\):\s*)?(?P<kind>[A-Za-z_]\w*)\((?P<rest>.*)$")
PARAMS = re.compile(r"(?P<n>[\d.]+)\s*(?P<scale>[kKMGBT]?)\s*[,=]\s*[\d.]+% Params")
TIME = r"(?P<n>[\d.]+)\s*(?P<unit>s|sec|ms|us|ns)"
LATENCY = re.compile(TIME + r"\s*[,=]\s*[\d.]+% latency")
SUMMARY = re.compile(rf"^(?P<key>fwd|bwd) latency:\s*{TIME}$")
BATCH = re.compile(r"^batch size per GPU:\s*(?P<n>0*[1-9]\d{0,8})$")


@dataclass
class Module:
    """One module of the tree: forward seconds and parameters, None where the output leaves them
    out."""

    name: str
    kind: str
    line: int
    depth: int
    params: float | None = None
    seconds: float | None = None
    inner: "list[Module]" = field(default_factory=list)


def read_deepspeed(path: str, settings: Settings) -> Imported:
    """A profile with one table; the backward pass has the summary's ratio to the forward pass, 2
    without one."""
    lines = lines_of(path)
    summaries = filter(None, (SUMMARY.match(line.strip()) for _, line in lines))
    latency = {match["key"]: _seconds(match) for match in summaries}
    batches = filter(None, (BATCH.match(line.strip()) for _, line in lines))
    tree = parse_tree(lines, path)
    ratio, guessed = 2.0, "no backward latency in the summary: twice the forward one"
    if latency.get("fwd") and latency.get("bwd"):
        ratio, guessed = latency["bwd"] / latency["fwd"], ""
    width = 4 if settings.precision == "fp32" else 2
    chain = []
    for module in layers_of(tree):
        if module.params is None or module.seconds is None:
            raise InputError(
                f"module {module.name} has no figures", where=f"{path}: line {module.line}",
                expected="output that is not shortened (module_depth = -1, detailed)",
            )  # fmt: skip
        label = f"{module.name}-{module.kind}" if module.name else module.kind
        seconds, params = module.seconds, width * module.params
        chain.append((Operator(label, seconds, ratio * seconds, params, 0.0, 0.0), 0.0))
    return chain_profile(
        chain,
        replace(
            settings,
            micro_batch=settings.micro_batch or next((int(match["n"]) for match in batches), None),
            precision=settings.precision or "fp16",
        ),
        model=tree.kind,
        device="deepspeed-gpu",
        where=path,
        source=f"DeepSpeed flops profiler, {Path(path).name}",
        notes=(
            guessed,
            "the profiler does not tell what layers send on and keep: activation_bytes and "
            "saved_bytes are 0",
        ),
    )


def parse_tree(lines: list[tuple[int, str]], path: str) -> Module:
    """The first tree behind the last heading of a detailed profile; raises InputError where there
    is none."""
    starts = [i for i, (_, line) in enumerate(lines) if "Detailed Profile" in line]
    require(
        starts,
        "no detailed profile",
        where=path,
        expected="a heading 'Detailed Profile per GPU'",
    )
    tree: list[Module] = []
    for number, line in lines[starts[-1] + 1 :]:
        if tree and line.rstrip() == ")":
            return tree[0]
        match = MODULE.match(line)
        if match and not PARAMS.match(line.strip()) and (tree or line.rstrip().endswith("(")):
            depth = len(line) - len(line.lstrip())
            module = Module(match["name"] or "", match["kind"], number, depth)
            above = next((one for one in reversed(tree) if one.depth < depth), module)
            above.inner += [module] if tree else []
            tree.append(module)
        if tree:  # notes stand between the heading and the tree
            _figures(tree[-1], line)
    raise InputError("the tree of modules does not end", where=path, expected="closing parentheses")


def _figures(module: Module, text: str) -> None:
    """Take the figures of a line, where it has some."""
    params, latency = PARAMS.search(text), LATENCY.search(text)
    if params:
        module.params = float(params["n"]) * SCALES[params["scale"]]
    if latency:
        module.seconds = _seconds(latency)


def layers_of(tree: Module) -> Iterator[Module]:
    """Modules in printed order; those that hold a list of blocks are opened, others and the blocks
    stay whole."""
    if tree.kind in BLOCKS and len(tree.inner) > 1:
        yield from tree.inner
        return
    if not any(map(_has_blocks, tree.inner)):
        yield tree
        return
    for inner in tree.inner:
        yield from layers_of(inner) if _has_blocks(inner) else (inner,)


def _has_blocks(module: Module) -> bool:
    """Whether the module is or holds a list of several modules."""
    return (module.kind in BLOCKS and len(module.inner) > 1) or any(map(_has_blocks, module.inner))


def _seconds(time: re.Match[str]) -> float:
    return float(time["n"]) * UNITS[time["unit"]]
