"""What the set `real` is made from: profiles that others measured and published, on clusters of the
devices measured.

Sailor (SOSP 2025, MIT licence): layers of four language models on seven GPU types, with the
bandwidths fitted to measurements. Piper (NeurIPS 2021, MIT): BERT-32 on an A100. PipeDream (SOSP
2019, MIT) and dnn-partitioning (NeurIPS 2020, MIT): layers of vision and translation models and of
BERT-24. Last, hetplan's own profile of a small model on one and on two cores of a processor. Which
nodes there are, and links that nobody measured, are assumptions; each origin says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetplan.adapters.importers import import_file
from hetplan.adapters.importers.common import Settings
from hetplan.adapters.importers.sailor import Links, load_links
from hetplan.profiling.hardware.cluster import Cluster, ClusterFile, DeviceSpec, build_cluster
from hetplan.profiling.models.configurations import from_config
from hetplan.profiling.models.model import Model, load_model
from hetplan.profiling.models.zoo import ModelSpec
from hetplan.profiling.profiles.profile import Profile, load_profile
from hetplan.profiling.workload import Workload, make_workload

GIGA_BIT = 1e9 / 8
# Messages at which Sailor's fits are read: a stage's activations within a node and between nodes.
WITHIN_BYTES, BETWEEN_BYTES = 64e6, 32e6
# Source -> how the origin of an instance names it: licence and holder of the copyright included.
CREDIT = {
    "sailor": "Sailor (eth-easl/sailor, SOSP 2025; MIT licence, Copyright (c) 2023 - present "
    "ETH Zurich)",
    "piper": "Piper (msr-fiddle/piper, NeurIPS 2021; MIT licence, Copyright (c) 2021 - present "
    "Microsoft Corporation)",
    "pipedream": "PipeDream (msr-fiddle/pipedream, SOSP 2019; MIT licence, "
    "Copyright (c) 2015 - present Microsoft Corporation)",
    "dnn-partitioning": "dnn-partitioning (msr-fiddle/dnn-partitioning, NeurIPS 2020; MIT licence, "
    "Copyright (c) 2020 - present Microsoft Corporation)",
    "hetplan": "hetplan's own profile",
}
# Device -> GiB, TFLOP/s in fp32, GB/s of memory: the vendors' datasheets.
DEVICES = {
    "A100-40": (40, 19.5, 1555),
    "A100-80": (80, 19.5, 2039),
    "V100-16": (16, 15.7, 900),
    "GH-96": (96, 67.0, 4000),
    "RTX-2080": (8, 10.1, 448),
    "Titan-RTX": (24, 16.3, 672),
    "RTX-3090": (24, 35.6, 936),
    "piper-gpu": (80, 19.5, 2039),
    "pipedream-gpu": (16, 15.7, 900),
    "dnn-partitioning-accelerator": (16, 15.7, 900),
    "one-core": (4, 0.1, 20),
    "two-cores": (8, 0.2, 20),
}


@dataclass(frozen=True)
class Measured:
    """A profile and where it is from. links: of Sailor's devices, None elsewhere."""

    profile: Profile
    source: str
    links: Links | None = None

    @property
    def credit(self) -> str:
        """The source with its licence."""
        return CREDIT[self.source]


def sailor(folder: Path, model: str) -> Measured:
    """One model on all GPU types that Sailor measured it on."""
    return Measured(
        imported("sailor", folder / "sailor" / "profiles" / model),
        "sailor",
        load_links(folder / "sailor"),
    )


def other(folder: Path, kind: str, file: str, micro_batch: int | None = None) -> Measured:
    """A graph of Piper, PipeDream or dnn-partitioning; micro_batch: samples of a measured pass."""
    return Measured(imported(kind, folder / kind / file, micro_batch), kind)


def own(file: Path) -> Measured:
    """What `hetplan profile measure --device cpu` wrote, of one and of two cores."""
    return Measured(load_profile(file), "hetplan")


def imported(kind: str, path: Path, micro_batch: int | None = None) -> Profile:
    """As `hetplan profile import` reads it."""
    found = import_file(kind, path, Settings(micro_batch=micro_batch))
    return Profile.model_validate(found.document)


def cluster(
    measured: Measured, nodes: Sequence[tuple[str, int, int]], gbit: tuple[float, float] = (100, 10)
) -> Cluster:
    """(device, nodes, devices per node)…; gbit: within and between nodes, where no bandwidth was
    measured."""
    entries: list[dict[str, Any]] = []
    for device, count, per_node in nodes:
        within, between = gbit
        if measured.links is not None:
            within = round(
                measured.links.local(device, max(2, per_node), WITHIN_BYTES) / GIGA_BIT, 1
            )
            between = round(measured.links.network(device, per_node, BETWEEN_BYTES) / GIGA_BIT, 2)
        entries.append(
            {
                "count": count,
                "devices": per_node,
                "device": device,
                "intra_node_gbit_per_s": within,
                "network_gbit_per_s": between,
            }
        )
    document = {
        "format": "hetplan-cluster",
        "version": 1,
        "name": "real",
        "nodes": entries,
        "devices": {device: described(device) for device, _, _ in nodes},
    }
    return build_cluster(ClusterFile.model_validate(document))


def described(device: str) -> dict[str, Any]:
    """A device's entry in a cluster file."""
    memory, fp32, bandwidth = DEVICES[device]
    spec = DeviceSpec.model_validate(
        {
            "memory_gib": memory,
            "peak_tflops": {"fp32": fp32, "fp16": fp32, "bf16": fp32},
            "memory_gb_per_s": bandwidth,
            "source": "vendor's datasheet",
            "vendor": "nvidia",
        }
    )
    return spec.model_dump(exclude_none=True, exclude={"price_per_hour", "price_source"})


def workload(
    measured: Measured, where: Cluster, batch: int, profile: Profile | None = None
) -> Workload:
    """The model on a cluster, by its profile or by what was made of it."""
    profile = profile or measured.profile
    degrees = {table.tensor for table in profile.tables}
    first = load_model("gpt2").layers[0]
    spec = ModelSpec(
        profile.model,
        "measured",
        profile.sequence,
        lambda sequence: (first,) * len(profile.layers),
        lambda tensor: tensor in degrees,
    )
    model = Model(spec, profile.sequence, profile.precision, spec.build(0))
    return make_workload(model, where, batch, profile=profile)


def opt_350(measured: Measured, where: Cluster, batch: int) -> Workload:
    """Sailor's OPT-350 with its operators, for SPMD programs: 24 blocks as wide as the
    embedding."""
    config = {
        "model_type": "opt",
        "hidden_size": 1024,
        "ffn_dim": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "word_embed_proj_dim": 1024,
        "do_layer_norm_before": True,
        "tie_word_embeddings": False,
    }
    spec = from_config(config, name=measured.profile.model)
    model = load_model(spec, sequence=2048, precision="fp32")
    document = measured.profile.model_dump()
    for layer, named in zip(document["layers"], model.layers, strict=True):
        layer["name"] = named.name
    return make_workload(model, where, batch, profile=Profile.model_validate(document))


def with_reduces_apart(measured: Measured, where: Cluster) -> Profile:
    """The profile with tensor groups' all-reduces outside the times, so that a group across nodes
    pays for its links.

    Megatron's four a block and micro-batch (embedding and head: one), at the bandwidth measured
    within the node, come off the times, which keep a tenth at least: a group within a node takes
    what was measured. Without measured bandwidths only single devices are kept. Degrees larger than
    the smallest node are dropped.
    """
    document = measured.profile.model_dump()
    least = 1 if measured.links is None else min(node.devices for node in where.nodes)
    layers = document["layers"]
    last = len(layers) - 1
    for i, layer in enumerate(layers):
        sent = layers[i - 1 if i == last else i]["activation_bytes"]
        layer["tensor_bytes"] = 0.0 if least == 1 else sent * (1 if i in (0, last) else 4)
    within = {node.device: node.intra_bandwidth for node in where.nodes}
    document["tables"] = [
        table
        for table in document["tables"]
        if table["device"] in within and table["tensor"] <= least
    ]
    for table in document["tables"]:
        degree = table["tensor"]
        share = 2 * (degree - 1) / degree * table["micro_batch"] / within[table["device"]] / 2
        for key in ("forward_seconds", "backward_seconds"):
            pairs = zip(table[key], layers, strict=True)
            table[key] = [
                max(0.1 * seconds, seconds - share * layer["tensor_bytes"])
                for seconds, layer in pairs
            ]
    return Profile.model_validate(document)
