"""calculon's descriptions: a model as one that `--model FILE` takes, a system as a cluster file.

Model: {"hidden", "feedforward", "seq_size", "attn_heads", "attn_size", "num_blocks"}; blocks only,
so the vocabulary is GPT-2's, padded as Megatron does. System: {"matrix": {type: {"tflops"}},
"mem1": {"GiB", "GBps"}, "networks":
[{"bandwidth" (GB/s), "efficiency", "size", "latency" (s)}…]}, the first network within a node, the
second between.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hetplan.errors import InputError
from hetplan.profiling.foreign import Foreign, read_foreign
from hetplan.profiling.huggingface import CALCULON_KEYS, from_config
from hetplan.profiling.importers.common import Imported, Settings
from hetplan.schema import MOST_RATE

VOCABULARY = 51200
# calculon's names of number formats, and ours.
FORMATS = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
GB_AS_GBIT = 8


def read(path: str, settings: Settings) -> Imported:
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
