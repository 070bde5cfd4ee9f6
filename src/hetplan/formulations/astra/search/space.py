"""The parameter space of Astra's Table 3, and the table of its strategies: rows as arrays.

Values that follow from others (data parallelism, overlap flags) are columns too, so that rules can
name them. A row is a base (degrees, micro-batch) times an option (interleaving, sequence
parallelism, optimizer, recomputation, offload). Rules over base columns alone are applied to the
bases, rules over the pipeline size and options to the options of each pipeline size, all to the
joined rows: the same rows survive, far fewer are made.

The pool of GPUs is that of Astra's three search modes (Section 3.2, eq. 1-3): types, counts, links,
prices. A type's links: `intra` bytes/s between two devices of a node, `network` bytes/s in and out
of one node, shared by all its devices. Where no cluster file gives them, `offer_of` knows the usual
machines.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hetplan.errors import require, unknown_name
from hetplan.formulations.astra.problem import Ints
from hetplan.formulations.astra.search.facts import ModelFacts
from hetplan.formulations.astra.search.rules import Column, Rule, Table, dropped
from hetplan.profiling.cluster import (
    GBIT,
    INTRA_NODE_LATENCY_US,
    MAX_DEVICES,
    NETWORK_LATENCY_US,
    Cluster,
    DeviceSpec,
    Node,
    catalogue,
    device,
)
from hetplan.profiling.profile import Profile
from hetplan.text import grouped

Mode = Literal["homogeneous", "heterogeneous", "cost"]

# (devices per node, intra-node Gbit/s of one device in one direction, network Gbit/s of the node,
# GB/s of one device to its host and of the host's memory per device), by prefix.
# NVLink totals of the datasheets (both directions): V100 300, A100 600, A800 and H800 400, H100 and
# H200 900 GB/s, B200 to GB300 1,800 GB/s; Infinity Fabric: MI300X and MI325X 896, MI355X 1,075
# GB/s; Gaudi 2 and 3: 21 Ethernet ports of 100 and 200 Gbit/s inside, three outside.
# A rack of GB200 or GB300 NVL72 is one scale-up domain of 72 devices.
# Networks: one adapter per device, 100 Gbit/s (V100), 200 (A100, A800) and 400 (H100, H800, H20,
# H200, B200, GB200, MI300X to MI355X) and 800 (B300, GB300).
# Hosts: PCIe x16 of generation 3 (V100), 4 (A100, A800) and 5 (H100, H800, H200), 16, 32 and 64
# GB/s in one direction less a fifth for protocol, NVLink-C2C (GH200) 450 GB/s; an eighth of two
# sockets' DDR4-2666 (6 channels each), DDR4-3200 (8) and DDR5-4800 (8), GH200's LPDDR5X 500 GB/s.
_MACHINES: Mapping[str, tuple[int, float, float, float, float]] = {
    "V100-SXM": (8, 1200, 800, 12.5, 32),
    "A100-SXM": (8, 2400, 1600, 25, 51),
    "A800": (8, 1600, 1600, 25, 51),
    "H100": (8, 3600, 3200, 50, 77),
    "H800": (8, 1600, 3200, 50, 77),
    "H200": (8, 3600, 3200, 50, 77),
    "GH200": (4, 3600, 800, 450, 500),
    "H20": (8, 3600, 3200, 50, 77),
    "B200": (8, 7200, 3200, 50, 77),
    "B300": (8, 7200, 6400, 50, 77),
    "GB200": (72, 7200, 28800, 225, 250),
    "GB300": (72, 7200, 57600, 225, 250),
    "MI300X": (8, 3584, 3200, 50, 77),
    "MI325X": (8, 3584, 3200, 50, 77),
    "MI355X": (8, 4300, 3200, 50, 77),
    "Gaudi2": (8, 2100, 2400, 25, 51),
    "Gaudi3": (8, 4200, 4800, 50, 77),
}
# Anything else: PCIe 4.0 x16 and one adapter of 100 Gbit/s.
_PLAIN = (8, 200.0, 100.0, 25.0, 51.0)


@dataclass(frozen=True)
class Offer:
    """One type of device in the pool. most: how many there are; SI units; host_link, host_memory:
    bytes/s of one device to its host, and of the host's memory per device. switch_nodes: nodes
    under one switch; uplink: bytes/s of one of them to what lies under others."""

    name: str
    spec: DeviceSpec
    most: int
    node_devices: int
    intra: float
    network: float
    host_link: float
    host_memory: float
    intra_latency: float = INTRA_NODE_LATENCY_US * 1e-6
    network_latency: float = NETWORK_LATENCY_US * 1e-6
    switch_nodes: int = MAX_DEVICES
    uplink: float = math.inf

    @property
    def price_per_second(self) -> float | None:
        """Dollars per device and second."""
        price = self.spec.price_per_hour
        return None if price is None else price / 3600.0

    @property
    def node(self) -> Node:
        """A full node of it."""
        links = self.intra, self.network, self.intra_latency, self.network_latency
        return Node(self.name, self.node_devices, *links)


@dataclass(frozen=True)
class Pool:
    """What may be used. sizes: the numbers of GPUs to try, each with every offer (or all offers
    mixed)."""

    mode: Mode
    offers: tuple[Offer, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        require(
            self.offers and self.sizes,
            "the GPU pool is empty",
            expected="at least one type and one number of GPUs",
        )
        names = [offer.name for offer in self.offers]
        require(
            len(set(names)) == len(names),
            "the GPU pool names a type twice",
            got=", ".join(names),
        )
        for size in self.sizes:
            require(1 <= size <= 10**6, "number of GPUs", got=size, expected="1 to 1000000")
        if self.mode == "heterogeneous":
            total = sum(offer.most for offer in self.offers)
            require(
                total >= self.sizes[0],
                "the types together have too few GPUs",
                got=total,
                expected=f"{self.sizes[0]}",
            )


def homogeneous(offer: Offer) -> Pool:
    """Mode 1 (eq. 1): one type, all of its devices."""
    return Pool("homogeneous", (offer,), (offer.most,))


def heterogeneous(total: int, offers: tuple[Offer, ...]) -> Pool:
    """Mode 2 (eq. 2): `total` devices, of each type at most what it offers."""
    return Pool("heterogeneous", offers, (total,))


def cost(offers: tuple[Offer, ...], most: int) -> Pool:
    """Mode 3 (eq. 3): 2, 4, 8, … up to `most` devices of one type at a time (and `most` itself)."""
    require(most >= 2, "the largest number of GPUs", got=most, expected="at least 2")
    sizes = {2**e for e in range(1, most.bit_length()) if 2**e <= most} | {most}
    return Pool("cost", tuple(replace(offer, most=most) for offer in offers), tuple(sorted(sizes)))


def find_device(name: str) -> tuple[str, DeviceSpec]:
    """The catalogue's entry `name`, or the only one that starts with it (`A800`), in SXM form where
    there are others; raises InputError."""
    known = catalogue()
    if name in known:
        return name, known[name]
    near = [other for other in known if other.lower().startswith(name.lower())]
    near = [other for other in near if "-SXM" in other] or near
    require(
        len(near) <= 1,
        "several devices have that name",
        got=name,
        expected=f"one of {', '.join(near)}",
    )
    return (near[0], known[near[0]]) if near else (name, device(name))


def links_of(name: str) -> tuple[int, float, float, float, float]:
    """(devices per node, bytes/s: intra, network of a node, host_link, host_memory) of the usual
    machine with that device."""
    node, intra, network, host_link, host_memory = next(
        (m for prefix, m in _MACHINES.items() if name.startswith(prefix)), _PLAIN
    )
    return node, intra * GBIT, network * GBIT, host_link * 1e9, host_memory * 1e9


def offer_of(name: str, most: int) -> Offer:
    """`most` devices of a catalogued type in its usual machines; raises InputError."""
    full, spec = find_device(name)
    return Offer(full, spec, most, *links_of(full))


def offers_of_cluster(cluster: Cluster) -> tuple[Offer, ...]:
    """The types of a cluster with their counts; of differing nodes of one type the slowest figures
    count."""
    return tuple(
        Offer(
            name=name,
            spec=cluster.specs[name],
            most=sum(node.devices for node in nodes),
            node_devices=min(node.devices for node in nodes),
            intra=min(node.intra_bandwidth for node in nodes),
            network=min(node.network_bandwidth for node in nodes),
            host_link=links_of(name)[-2],
            host_memory=links_of(name)[-1],
            intra_latency=max(node.intra_latency for node in nodes),
            network_latency=max(node.network_latency for node in nodes),
            switch_nodes=min(node.switch_nodes for node in nodes),
            uplink=min(node.uplink for node in nodes),
        )
        for name, nodes in grouped((node.device, node) for node in cluster.nodes).items()
    )


GRANULARITIES = ("selective", "full", "hybrid")
METHODS = ("block", "uniform")
# String columns hold indices into these; numbers hold NONE where the option is not set.
EXCHANGES = ("p2p", "a2a")
VOCABULARY = {
    "cp_comm_type": EXCHANGES,
    "recompute_granularity": GRANULARITIES,
    "recompute_method": METHODS,
    "offload_optimizer": ("auto",),
}
NONE = -1

# Fixed before a strategy's options are chosen: these decide the groups and the micro-batches.
BASE = (
    "num_gpus",
    "pipeline_model_parallel_size",
    "tensor_model_parallel_size",
    "expert_model_parallel_size",
    "data_parallel_size",
    "micro_batch_size",
    "num_micro_batches",
    "context_parallel_size",
    "expert_tensor_parallel_size",
    "use_fsdp",
    "num_distributed_optimizer_instances",
    "cp_comm_type",
)
OPTIONS = (
    "num_layers_per_virtual_pipeline_stage",
    "sequence_parallel",
    "use_distributed_optimizer",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "no_overlap_offload_optimizer",
)
# Known from the pipeline size and the options: rules over these drop options before they meet the
# base.
DERIVED = (
    "num_layers_per_stage",
    "virtual_pipeline_model_parallel_size",
    "overlap_p2p_communication",
)
FLAGS = (
    "use_fsdp",
    "sequence_parallel",
    "use_distributed_optimizer",
    "no_overlap_offload_optimizer",
    "overlap_p2p_communication",
    "tp_comm_overlap",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "use_flash_attn",
)
CONSTANTS = (
    "num_layers",
    "num_attention_heads",
    "num_query_groups",
    "hidden_size",
    "seq_length",
    "global_batch_size",
    "num_experts",
    "moe_router_topk",
    "use_flash_attn",
    "offload_optimizer",
)
LATE = ("tp_comm_overlap", "overlap_grad_reduce", "overlap_param_gather", "gpu_type")


@dataclass(frozen=True)
class Space:
    """Which values each parameter may take; None: the whole range of Table 3 for the model at hand.

    pipeline, tensor: degrees, 1..N layers and 1..number of heads. micro_batch: 1..M, M = 8 by
    default. virtual: layers per virtual stage, 1..pipeline degree, beside "not interleaved".
    recompute_layers:
    1..layers per stage. interleaving: whether virtual stages are tried at all. expert: 1..number of
    experts. offload: whether optimizer states may move to the host where they do not fit. overlap:
    communication overlapped wherever Megatron-LM can. Beyond the paper: context: degrees of context
    parallelism. exchange: how context ranks meet in attention: keys and values go round a ring
    (p2p; Liu et al. 2023), or all ranks exchange tokens for heads (a2a; Jacobs et al. 2023).
    whole_experts: whether tensor ranks hold whole experts (expert-tensor degree 1).
    fsdp: whether weights, gradients and optimizer states are sharded over data and context ranks.
    shard_groups: into so many groups those ranks divide, each with all shards (HSDP). uneven:
    whether a stage may hold a layer less than the largest.
    """

    pipeline: tuple[int, ...] | None = None
    tensor: tuple[int, ...] | None = None
    micro_batch: tuple[int, ...] = tuple(range(1, 9))
    expert: tuple[int, ...] | None = None
    context: tuple[int, ...] = (1,)
    exchange: tuple[str, ...] = EXCHANGES[:1]
    whole_experts: tuple[bool, ...] = (False,)
    fsdp: tuple[bool, ...] = (False,)
    shard_groups: tuple[int, ...] = (1,)
    uneven: bool = False
    virtual: tuple[int, ...] | None = None
    interleaving: bool = True
    sequence_parallel: tuple[bool, ...] = (False, True)
    distributed_optimizer: tuple[bool, ...] = (False, True)
    recompute: tuple[str | None, ...] = (None, *GRANULARITIES)
    recompute_method: tuple[str, ...] = METHODS
    recompute_layers: tuple[int, ...] | None = None
    no_overlap_offload: tuple[bool, ...] = (True, False)
    offload: bool = True
    overlap: bool = True

    def __post_init__(self) -> None:
        for name in (
            "pipeline", "tensor", "micro_batch", "expert", "virtual", "context", "recompute_layers",
            "shard_groups",
        ):  # fmt: skip
            values = getattr(self, name)
            require(
                values is None or (values and min(values) >= 1),
                f"values of {name}",
                got=values,
                expected="at least one, each 1 or more",
            )
        for of, words, known in (
            ("kind of recomputation", self.recompute, (None, *GRANULARITIES)),
            ("method of recomputation", self.recompute_method, METHODS),
            ("exchange of context ranks", self.exchange, EXCHANGES),
        ):
            for word in (word for word in words if word not in known):
                raise unknown_name(f"unknown {of}", str(word), [name or "none" for name in known])

    def recomputations(self, stage_layers: int) -> list[tuple[int, int, int]]:
        """All (granularity, method, layers), as indices and numbers with NONE, for stages of that
        many layers."""
        counts = self.recompute_layers or tuple(range(1, stage_layers + 1))
        choices: list[tuple[int, int, int]] = []
        for granularity in self.recompute:
            if granularity in (None, "selective"):
                code = NONE if granularity is None else GRANULARITIES.index(granularity)
                choices.append((code, NONE, NONE))
                continue
            for method in self.recompute_method if granularity == "full" else ("block",):
                code = GRANULARITIES.index(granularity)
                choices += [
                    (code, METHODS.index(method), count)
                    for count in counts
                    if count <= stage_layers
                ]
        return choices

    def virtual_layers(self, pipeline: int, stage_layers: int) -> list[int]:
        """Layers per virtual stage that Table 3 lists: NONE, then 1..pipeline (at most a stage's
        layers)."""
        if not self.interleaving:
            return [NONE]
        values = self.virtual or tuple(range(1, pipeline + 1))
        return [NONE, *(v for v in values if v <= stage_layers)]


PARAMETERS = tuple(field.name for field in fields(Space))


def measured_sizes(profile: Profile, types: Iterable[str]) -> dict[str, Any]:
    """Values of `Space.tensor` and `Space.micro_batch` that the profile has of every type."""
    sizes = [
        {(table.tensor, table.micro_batch) for table in profile.tables if table.device == name}
        for name in types
    ]
    tensors, micro_batches = zip(*(set.intersection(*sizes) or {(1, 1)}), strict=True)
    return {"tensor": tuple(sorted({*tensors})), "micro_batch": tuple(sorted({*micro_batches}))}


def rule_columns(types: tuple[str, ...]) -> dict[str, Column]:
    """Every column that a rule may name. types: the device types of the pool at hand."""
    columns = {name: Column("number") for name in (*BASE, *OPTIONS, *DERIVED, *CONSTANTS)}
    columns |= {name: Column("bool") for name in FLAGS}
    columns |= {name: Column("string", words) for name, words in VOCABULARY.items()}
    columns["gpu_type"] = Column("string", types)
    return columns


def constants_of(facts: ModelFacts, global_batch: int) -> dict[str, int]:
    """The columns that are the same in every row (NONE: not set)."""
    shape, fused = facts.shape, any(t.name == "log-sum-exp" for t in facts.blocks[0].saved)
    return {
        "num_layers": facts.layers,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_heads,
        "hidden_size": shape.hidden,
        "seq_length": facts.sequence,
        "global_batch_size": global_batch,
        "num_experts": NONE if shape.experts is None else shape.experts.count,
        "moe_router_topk": NONE if shape.experts is None else shape.experts.active,
        "use_flash_attn": 1 if fused else NONE,
        "offload_optimizer": 0,
    }


Columns = dict[str, Ints]


@dataclass(frozen=True)
class Strategies:
    """Rows as columns of integers [R] (NONE: not set; flags 0 or 1; strings as indices).

    generated: size of the product before any rule; after_rules: rows that no rule drops.
    """

    columns: Columns
    generated: int

    @property
    def rows(self) -> int:
        """R."""
        return len(self.columns["num_gpus"])

    def take(self, rows: NDArray[np.generic]) -> "Strategies":
        """Those rows (indices or mask)."""
        return Strategies(
            {name: column[rows] for name, column in self.columns.items()}, self.generated
        )

    def row(self, number: int) -> dict[str, int | bool | str | None]:
        """One strategy with Megatron's names and plain values."""
        names = (*BASE, *OPTIONS, *DERIVED, *LATE[:-1])
        return {name: plain_value(name, int(self.columns[name][number])) for name in names}


def plain_value(name: str, value: int) -> int | bool | str | None:
    """A value of a column as Megatron says it."""
    if name in FLAGS:
        return bool(value)
    word = VOCABULARY[name][value] if name in VOCABULARY else value
    return None if value == NONE else word


def joined(parts: Sequence[Strategies]) -> Strategies:
    """Tables one under the other."""
    names = parts[0].columns
    columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in names}
    return Strategies(columns, sum(part.generated for part in parts))


def strategies(
    facts: ModelFacts,
    space: Space,
    rules: Iterable[Rule],
    *,
    gpus: int,
    global_batch: int,
    gpu_type: int = 0,
    whole_stages: bool = True,
) -> Strategies:
    """All strategies for `gpus` devices that no rule drops.

    gpu_type: index for the column of that name. whole_stages: every stage holds the same number of
    layers; else stages may differ (mode 2) and `num_layers_per_stage` is the average, rounded up.
    """
    rules = list(rules)
    constants = constants_of(facts, global_batch)
    base, generated = _bases(facts, space, global_batch, gpus=gpus, whole_stages=whole_stages)
    base = _keep(base, rules, constants)
    parts: list[Columns] = []
    for pipeline in np.unique(base["pipeline_model_parallel_size"]).tolist():
        mine = base["pipeline_model_parallel_size"] == pipeline
        options = _keep(_options(space, pipeline, -(-facts.layers // pipeline)), rules, constants)
        parts.append(_joined_rows({name: column[mine] for name, column in base.items()}, options))
    if not parts:
        return Strategies(nothing().columns, generated)
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    _add_late_columns(columns, space, gpu_type)
    return Strategies(_keep(columns, rules, constants), generated)


def _bases(
    facts: ModelFacts, space: Space, global_batch: int, *, gpus: int, whole_stages: bool
) -> tuple[Columns, int]:
    """The bases whose derived numbers are whole, and the size of Table 3's whole product."""
    N = facts.layers
    pipelines = [p for p in space.pipeline or range(1, N + 1) if p <= min(gpus, N)]
    tensors = [t for t in space.tensor or range(1, facts.shape.heads + 1) if t <= gpus]
    held = facts.shape.experts.count if facts.shape.experts else 1
    experts = list(space.expert or range(1, held + 1))
    exchanges = [EXCHANGES.index(word) for word in space.exchange]
    further = [space.context, space.whole_experts if held > 1 else (False,), space.fsdp]
    axes = [pipelines, tensors, experts, space.micro_batch, *further, space.shard_groups, exchanges]
    grid = np.array(list(product(*axes)), dtype=np.int64)
    p, t, e, b, c, apart, fsdp, groups, a2a = grid.reshape(-1, len(axes)).T
    d, et = gpus // (p * t * c), np.where(apart, 1, t)
    gas = global_batch // np.maximum(b * d, 1)
    whole = (d * p * t * c == gpus) & (gas >= 1) & (gas * b * d == global_batch)
    whole &= (t * c * d % (et * e) == 0) & ((apart == 0) | (t > 1))
    # whole shard groups of at least two ranks, of dense parameters and of experts
    whole &= (groups == 1) | (
        (fsdp == 1) & (2 * groups <= c * d) & (c * d % groups == 0)
        & (t * c * d // (et * e) % groups == 0)
    )  # fmt: skip
    # every rank has whole heads after the exchange
    heads, pairs = facts.shape.heads, facts.shape.kv_heads
    whole &= (a2a == 0) | ((c > 1) & (heads % (t * c) == 0) & (pairs % (t * c) == 0))
    if whole_stages:
        whole &= N % p == 0
    values = (np.full_like(p, gpus), p, t, e, d, b, gas, c, et, fsdp, groups, a2a)
    columns = {name: column[whole] for name, column in zip(BASE, values, strict=True)}
    options = sum(len(_options(space, p, -(-N // p))["sequence_parallel"]) for p in pipelines)
    return columns, math.prod(map(len, axes[1:])) * options


def _options(space: Space, pipeline: int, stage_layers: int) -> Columns:
    """Every option of Table 3 for one pipeline size, with what follows from it."""
    recomputations = np.array(space.recomputations(stage_layers), dtype=np.int64).reshape(-1, 3)
    axes = [
        np.array(space.virtual_layers(pipeline, stage_layers)),
        np.array(space.sequence_parallel, dtype=np.int64),
        np.array(space.distributed_optimizer, dtype=np.int64),
        np.arange(len(recomputations)),
        np.array(space.no_overlap_offload, dtype=np.int64),
    ]
    v, sp, do, recompute, blocking = (axis.ravel() for axis in np.meshgrid(*axes, indexing="ij"))
    columns = dict(zip(OPTIONS, (v, sp, do, *recomputations[recompute].T, blocking), strict=True))
    columns["num_layers_per_stage"] = np.full_like(v, stage_layers)
    columns["virtual_pipeline_model_parallel_size"] = np.where(
        v == NONE, NONE, stage_layers // np.maximum(v, 1)
    )
    columns["overlap_p2p_communication"] = ((v != NONE) & space.overlap).astype(np.int64)
    columns["pipeline_model_parallel_size"] = np.full_like(v, pipeline)
    return columns


def _keep(columns: Columns, rules: list[Rule], constants: Mapping[str, int]) -> Columns:
    """The rows that none of the rules drops whose parameters are known by now."""
    at_hand: dict[str, Any] = {**constants, **columns}
    ready = [rule for rule in rules if rule.names <= at_hand.keys()]
    needed = {name for rule in ready for name in rule.names}
    table: Table = {
        name: np.where(np.equal(at_hand[name], NONE), np.nan, at_hand[name]) for name in needed
    }
    keep = ~dropped(ready, table, len(next(iter(columns.values()))))
    return columns if keep.all() else {name: column[keep] for name, column in columns.items()}


def _joined_rows(base: Columns, options: Columns) -> Columns:
    """Every base with every option."""
    bases, count = len(base["num_gpus"]), len(options["sequence_parallel"])
    columns = {name: np.repeat(column, count) for name, column in base.items()}
    return columns | {
        name: np.tile(column, bases) for name, column in options.items() if name not in base
    }


def nothing() -> Strategies:
    """A table without rows."""
    names = (*BASE, *OPTIONS, *DERIVED, *LATE)
    return Strategies({name: np.zeros(0, dtype=np.int64) for name in names}, 0)


def _add_late_columns(columns: Columns, space: Space, gpu_type: int) -> None:
    """Overlap flags on wherever Megatron-LM allows them, and the device type."""
    same = np.ones_like(columns["num_gpus"])
    columns |= {
        "tp_comm_overlap": columns["sequence_parallel"] * space.overlap,
        "overlap_grad_reduce": same * space.overlap,
        "overlap_param_gather": columns["use_distributed_optimizer"] * space.overlap,
        "gpu_type": same * gpu_type,
    }
