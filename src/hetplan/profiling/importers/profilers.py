"""Sailor's profiles (SOSP 2025): see `hetplan.profiling.sailor.data`. Times include the tensor
group's all-reduces.

PATH is a `profile.json` at profiles/<model>/<GPU>/, that folder, or the model's folder with all its
GPUs; sizes come from the `llm_info.json` in a folder above.


Metis's profiles (ATC 2024): one JSON per device type, tensor degree and batch,
`DeviceType.A100_tp2_bs4.json`.

`model`: {"model_name", "num_layers", "parameters": {"parameters_per_layer_bytes": [L], optionally
"activation_parameters_bytes": [L]}}; `execution_time`: {"layer_compute_total_ms": [L]} forward and
backward together;
`execution_memory`: {"layer_memory_total_mb": [L]} with states, gradients and activations. Source:
the project's README.


calculon's descriptions: a model as one that `--model FILE` takes, a system as a cluster file.

Model: {"hidden", "feedforward", "seq_size", "attn_heads", "attn_size", "num_blocks"}; blocks only,
so the vocabulary is GPT-2's, padded as Megatron does. System: {"matrix": {type: {"tflops"}},
"mem1": {"GiB", "GBps"}, "networks":
[{"bandwidth" (GB/s), "efficiency", "size", "latency" (s)}…]}, the first network within a node, the
second between.


Printed output of DeepSpeed's flops profiler: its summary, and a tree of modules with parameters,
MACs and latency.

A module's line `(name): Class(` is followed by `12.6 M, 3.75% Params, 128.87 GMACs, 4.10% MACs,
1.29 ms, 1.69% latency, …`; newer versions write `12.6 M = 3.75% Params`. Layers are the tree's
modules, a list of repeated blocks unrolled and what stands beside it kept whole. The profiler times
forward passes; the summary has the backward pass as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hetplan.errors import InputError
from hetplan.profiling.foreign import Foreign, read_foreign
from hetplan.profiling.importers.common import (
    TOGETHER,
    Imported,
    Operator,
    Settings,
    chain_profile,
    layer,
    lines_of,
    profile,
    table,
    table_of_sums,
)
from hetplan.profiling.model_files import CALCULON_KEYS, from_config
from hetplan.profiling.profile import ProfileLayer
from hetplan.profiling.sailor.data import ModelData, load_model_data
from hetplan.profiling.workload import STATE_BYTES_PER_PARAM
from hetplan.schema import MOST_BYTES, MOST_RATE


def read_sailor(path: str, settings: Settings) -> Imported:
    """A profile with a table per GPU type, tensor degree and micro-batch."""
    start = Path(path)
    if not start.exists():
        raise InputError("no such file or folder", where=path)
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
    if model.resolve() != root / "profiles" / name:
        raise InputError(
            "not in its place", where=path, expected=f"{root}/profiles/<model>/<GPU>/profile.json"
        )
    data = load_model_data(root, name, read_foreign(root / "llm_info.json"))
    kinds = list(data.tables) if gpu is None else [gpu]
    settings.one_kind(kinds)
    return profile(
        settings,
        model=name,
        source=f"Sailor profiles of {name} on {', '.join(kinds)}",
        where=path,
        layers=layers(data),
        tables=[
            table(
                settings.device or kind,
                *key,
                list(map(float, m.forward)),
                list(map(float, m.backward)),
            )
            for kind in kinds
            for key, m in sorted(data.tables[kind].items(), key=lambda item: item[0])
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
        other = data.sizes[more[0]].kept
        divided = (low.kept - other) / (1 / least - 1 / more[0])
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


def read_metis(path: str, settings: Settings) -> Imported:
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
    settings.one_kind(part.device for part in parts)
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
    notes, activation, kept = [], [0.0] * count, [0.0] * count
    # the second is how some files spell it
    sent = sizes.get("activation_parameters_bytes") or sizes.get("activation_paramters_bytes")
    if sent is None:
        notes.append("the files do not tell what layers send on: activation_bytes are 0")
    else:
        activation = [e.number(0, MOST_BYTES) / chosen.batch for e in sent.entries(length=count)]
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
    layers = [
        layer(f"layer-{i}", params[i] * chosen.tensor, activation[i], kept[i]) for i in range(count)
    ]
    return layers, notes


VOCABULARY = 51200
# calculon's names of number formats, and ours.
FORMATS = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
GB_AS_GBIT = 8


def read_calculon(path: str, settings: Settings) -> Imported:
    """A model or a system, by its keys."""
    document = read_foreign(path)
    if document.get("networks") is not None or document.get("matrix") is not None:
        return system(document, settings)
    if document.get("hidden") is not None or document.get("num_blocks") is not None:
        return model(document)
    raise InputError(
        "neither a model nor a system", where=path, expected='"hidden" … or "matrix", "networks" …'
    )


def model(document: Foreign) -> Imported:
    """A configuration of model type calculon."""
    sizes = {key: document[key].whole(1, 10**7) for key in CALCULON_KEYS}
    config = {"model_type": "calculon", **sizes, "vocab_size": VOCABULARY}
    from_config(
        config, name=Path(document.where).stem, where=document.where
    )  # a whole number of heads and so on
    note = f"calculon's models are blocks alone: a vocabulary of {VOCABULARY} is assumed"
    return Imported("model", config, (note,))


def system(document: Foreign, settings: Settings) -> Imported:
    """A cluster of `nodes` nodes (default 1) of as many devices as the first network joins."""
    peaks = {}
    for name, entry in document["matrix"].items():
        if name in FORMATS:
            peaks[FORMATS[name]] = entry["tflops"].number(1e-6, 1e9)
    if not peaks:
        raise document["matrix"].error("no number format that training uses", ", ".join(FORMATS))
    if "fp16" in peaks:
        peaks.setdefault("bf16", peaks["fp16"])
    networks = document["networks"].entries(least=1)
    inside, outside = networks[0], networks[min(1, len(networks) - 1)]
    name = settings.device or Path(document.where).stem
    node: dict[str, Any] = {
        "count": settings.nodes or 1,
        "devices": inside["size"].whole(1, 4096),
        "device": name,
        "intra_node_gbit_per_s": _gbit(inside),
        "network_gbit_per_s": _gbit(outside),
        "intra_node_latency_us": inside["latency"].seconds() * 1e6,
        "network_latency_us": outside["latency"].seconds() * 1e6,
    }
    described = {
        # 80e9 stands for no limit
        "memory_gib": min(document["mem1"]["GiB"].number(1e-6), MOST_RATE),
        "memory_gb_per_s": document["mem1"]["GBps"].number(1e-6, 1e9),
        "peak_tflops": peaks,
        "source": f"calculon system {Path(document.where).name}",
    }
    cluster = {
        "format": "hetplan-cluster",
        "version": 1,
        "name": settings.model or Path(document.where).stem,
        "nodes": [node],
        "devices": {name: described},
    }
    note = "" if settings.nodes else "one node; --nodes N makes more"
    return Imported(
        "cluster",
        cluster,
        tuple(filter(None, (note, "bandwidths are the networks' times their efficiency"))),
    )


def _gbit(network: Foreign) -> float:
    bandwidth = network["bandwidth"].number(1e-6, 1e8)
    return bandwidth * network["efficiency"].number(1e-6, 1.0) * GB_AS_GBIT


SCALES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "sec": 1.0}
BLOCKS = ("ModuleList", "Sequential")
MODULE = re.compile(r"^\s*(?:\((?P<name>[^)]*)\):\s*)?(?P<kind>[A-Za-z_]\w*)\((?P<rest>.*)$")
PARAMS = re.compile(r"(?P<n>[\d.]+)\s*(?P<scale>[kKMGBT]?)\s*[,=]\s*[\d.]+% Params")
LATENCY = re.compile(r"(?P<n>[\d.]+)\s*(?P<unit>s|sec|ms|us|ns)\s*[,=]\s*[\d.]+% latency")
SUMMARY = re.compile(
    r"^(?P<key>batch size per GPU|fwd latency|bwd latency|model parallel size):\s*(?P<value>.+)$"
)
TIME = re.compile(r"(?P<n>[\d.]+)\s*(?P<unit>s|sec|ms|us|ns)$")


@dataclass
class Module:
    """One module of the tree: forward seconds and parameters, None where the output leaves them
    out."""

    name: str
    kind: str
    line: int
    params: float | None = None
    seconds: float | None = None
    inner: list[Module] = field(default_factory=list)


def read_deepspeed(path: str, settings: Settings) -> Imported:
    """A profile with one table; the backward pass has the summary's ratio to the forward pass, 2
    without one."""
    lines = lines_of(path)
    summary = {
        match["key"]: match["value"].strip()
        for _, line in lines
        if (match := SUMMARY.match(line.strip()))
    }
    tree = parse_tree(lines, path)
    ratio, guessed = 2.0, "no backward latency in the summary: twice the forward one"
    forward, backward = (_time(summary.get(key)) for key in ("fwd latency", "bwd latency"))
    if forward and backward:
        ratio, guessed = backward / forward, ""
    batch = summary.get("batch size per GPU", "")
    used = settings.micro_batch or (
        int(batch) if batch.isdecimal() and int(batch[:9]) > 0 else None
    )
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
        replace(settings, micro_batch=used, precision=settings.precision or "fp16"),
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
    if not starts:
        raise InputError(
            "no detailed profile", where=path, expected="a heading 'Detailed Profile per GPU'"
        )
    stack: list[Module] = []
    for number, line in lines[starts[-1] + 1 :]:
        if not stack and not (MODULE.match(line) and line.rstrip().endswith("(")):
            continue  # notes between the heading and the tree
        if stack and line.strip() == ")":
            done = stack.pop()
            if not stack:
                return done
            continue
        match = MODULE.match(line)
        if match and not PARAMS.match(line.strip()):
            module = Module(match["name"] or "", match["kind"], number)
            if stack:
                stack[-1].inner.append(module)
            _figures(module, match["rest"])
            if line.rstrip().endswith("("):
                stack.append(module)
        elif stack:
            _figures(stack[-1], line)
    raise InputError("the tree of modules does not end", where=path, expected="closing parentheses")


def _figures(module: Module, text: str) -> None:
    """Take the figures of a line, where it has some."""
    params, latency = PARAMS.search(text), LATENCY.search(text)
    if params:
        module.params = float(params["n"]) * SCALES[params["scale"]]
    if latency:
        module.seconds = float(latency["n"]) * UNITS[latency["unit"]]


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


def _time(text: str | None) -> float | None:
    match = TIME.match(text) if text else None
    return float(match["n"]) * UNITS[match["unit"]] if match else None
