"""What frameworks with equal replicas can say: the plan as a grid of stages, data ranks and tensor
ranks.

Every check names what the framework lacks and what an export without it would lose.

What can be said stands in the arguments of Megatron-LM (their names with underscores), which
FlagScale takes as they are and Megatron Bridge under other names. A setting of True is a bare flag;
what is Megatron's default is left out.

Balanced pipeline layouts say which layers each virtual stage holds, for Megatron-LM and torchtitan.
Units of a chain: embedding, blocks, all layers of multi-token prediction (MTP) together, loss with
the head. Virtual stage k is on pipeline rank k mod P. The slowest virtual stage is as fast as any
cut of the chain allows; of such cuts the one with the least sum of squares is taken, and of equal
ones that whose earlier stages hold more, since whole rounds of stages load all ranks alike. A stage
may be empty. A unit counts in parts of 1 / 4e7 of the whole, so that sums of squares are exact.
Megatron Core (`transformer/pipeline_parallel_layer_layout.py`) writes E, t, m and L, `|` between
virtual stages, `t*3` and `(tt|)*29`. It wants the MTP layers in one virtual stage, which is a
rank's last. torchtitan names modules, and has no MTP.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, pairwise
from typing import Any

import numpy as np

from hetplan.errors import UnsupportedError, require
from hetplan.plans.degrees import Degrees
from hetplan.plans.plan import Plan, Replica
from hetplan.profiling.transformer import Transformer
from hetplan.schema import Range
from hetplan.text import comments, grouped, ranges_text


@dataclass(frozen=True)
class Layout:
    """pipeline: ranks. units: as Megatron writes each. ends [K]: first unit behind each virtual
    stage. seconds [K]: of each."""

    pipeline: int
    units: tuple[str, ...]
    ends: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def stages(self) -> list[tuple[str, ...]]:
        """[K] units of each virtual stage."""
        return [self.units[first:last] for first, last in pairwise((0, *self.ends))]

    def megatron(self) -> str:
        """The value of `--pipeline-model-parallel-layout`."""
        *before, last = map(runs_text, self.stages)
        repeated = [(text, len(list(run))) for text, run in groupby(before)]
        texts = [f"({text}|)*{count}" if count > 1 else f"{text}|" for text, count in repeated]
        return "".join([*texts, last])

    def torchtitan(self) -> list[list[str]]:
        """`module_fqns_per_model_part`: modules of each virtual stage, without MTP."""
        blocks = (f"layers.{i}" for i in range(self.units.count("t")))
        named = {"E": ["tok_embeddings"], "L": ["norm", "output"]}
        modules = [[next(blocks)] if unit == "t" else named.get(unit, []) for unit in self.units]
        return [[*chain(*modules[first:last])] for first, last in pairwise((0, *self.ends))]


def runs_text(units: Sequence[str]) -> str:
    """A virtual stage in Megatron's letters: `Et*3`."""
    runs = ((letter, len(list(run))) for letter, run in groupby("".join(units)))
    return "".join(f"{letter}*{count}" if count > 1 else letter for letter, count in runs)


def balanced(seconds: Sequence[float], pipeline: int, virtual: int = 1, mtp: int = 0) -> Layout:
    """The layout of P x V virtual stages whose slowest is the fastest.

    seconds: of embedding, each block and head, forward and backward, each at least 0. mtp: layers,
    each as slow as the last block; the head computes their logits as well (DeepSeek-V3, Section
    2.2), and their projection is left out.
    """
    embedding, *blocks, head = seconds
    units = ("E", *"t" * len(blocks), *(["m" * mtp] if mtp else []), "L")
    each = np.array(
        [0.0, embedding, *blocks, *([mtp * blocks[-1]] if mtp else []), (1 + mtp) * head]
    )
    reach, parts = np.cumsum(each), np.cumsum(np.rint(each * (4e7 / each.sum())))
    spans = np.where(np.tri(len(reach), k=-1), np.inf, parts - parts[:, None])
    early = (pipeline * (virtual - 1) if mtp else 0, len(blocks) + 1)
    slowest, _ = least(spans, pipeline * virtual, np.maximum, early)
    _, ends = least(np.where(spans <= slowest, spans**2, np.inf), pipeline * virtual, np.add, early)
    return Layout(
        pipeline=pipeline,
        units=units,
        ends=ends,
        seconds=tuple(float(reach[b] - reach[a]) for a, b in pairwise((0, *ends))),
    )


def least(
    costs: Any, stages: int, join: Any, early: tuple[int, int]
) -> tuple[float, tuple[int, ...]]:
    """The least joined cost of cutting units into so many stages, and where each ends.

    costs [N + 1, N + 1]: of a stage from one unit up to another. early: (K, n): none of the first K
    stages ends behind unit n.
    """
    at, came = costs[0].copy(), []
    for k in range(1, stages):
        if k <= early[0]:
            at[early[1] + 1 :] = np.inf
        joined = join(at[:, None], costs)
        came.append(len(at) - 1 - joined[::-1].argmin(axis=0))
        at = joined.min(axis=0)
    ends = [len(at) - 1]
    for begin in reversed(came):
        ends.append(int(begin[ends[-1]]))
    return float(at[-1]), tuple(ends[::-1])


# Of Megatron-LM, and so of FlagScale.
RECOMPUTATION: dict[str, dict[str, str | int]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective"},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


class Grid:
    """A plan as a framework of equal replicas sees it; its figures hold once `check` has passed.

    stages[j]: layer ranges, one per model chunk; widths [stage]: tensor degree. micro_batch:
    samples; count: micro-batches of each data rank. shape: of the model, where it is known.
    """

    def __init__(self, plan: Plan, framework: str, shape: Transformer | None = None) -> None:
        first = plan.replicas[0]
        self.plan, self.framework, self.shape = plan, framework, shape
        self.stages = [stage.layers for stage in first.stages]
        self.widths = [len(stage.devices[0]) for stage in first.stages]
        self.pipeline, self.data = len(self.stages), len(plan.replicas)
        self.chunks = len(self.stages[0])
        self.micro_batch, self.count = first.micro_batches[0].samples, first.steps

    def refuse(self, where: object, lacks: str, lost: str) -> None:
        """Raise UnsupportedError where the plan has what the framework cannot express."""
        require(
            not where,
            f"{self.framework} cannot express {lacks}; what would be lost: {lost}",
            where=self.plan.name,
            expected="a plan without it (other --strategies or --precision), or --to torchrun",
            kind=UnsupportedError,
        )

    def only(self, key: str, known: Sequence[object], lost: str) -> None:
        """Refuse a plan whose `key` (zero, schedule, recomputation, precision) is none of
        `known`."""
        value = getattr(self.plan.workload if key == "precision" else self.plan, key)
        only = ", ".join(map(str, known))
        self.refuse(value not in known, f"{key} {value} (only {only})", lost)

    def check(self) -> None:
        """Refuse a plan whose replicas differ, or whose samples or weights divide unequally."""
        self.refuse(
            self.plan.schedule == "interleaved-1f1b" and (self.chunks == 1) != (self.pipeline == 1),
            "interleaved 1F1B of one stage, or of one chunk",
            "the order of passes",
        )
        for lacks, lost in unequal(self.plan):
            self.refuse(True, lacks, lost)

    @property
    def devices(self) -> list[list[list[int]]]:
        """[stage][data rank][context and tensor rank]."""
        replicas = self.plan.replicas
        return [[r.stages[j].all_devices for r in replicas] for j in range(self.pipeline)]

    @property
    def ranked(self) -> list[int]:
        """Devices by rank where tensor ranks are innermost, then context, data and stages."""
        return [d for stage in self.devices for group in stage for d in group]

    @property
    def virtual_stages(self) -> list[Range]:
        """Layer ranges in the order of the model: chunk 0 of all stages, then chunk 1."""
        return [stage[c] for c in range(self.chunks) for stage in self.stages]

    def equal_width(self) -> int:
        """The tensor degree of all stages; refuses different ones."""
        self.refuse(
            len(set(self.widths)) > 1,
            f"stages of different tensor degrees ({', '.join(map(str, self.widths))})",
            "the stages' widths",
        )
        return self.widths[0]

    def blocks(self) -> int:
        """The number of blocks of a chain embedding, blocks, head; refuses other chains."""
        names = self.plan.workload.layers
        ends = (names[0], names[-1]) == ("embedding", "head")
        self.refuse(
            len(names) < 3 or not ends or self.plan.workload.sequence is None,
            f"layers other than one embedding, blocks and one head ({names[0]} .. {names[-1]})",
            "where each layer goes",
        )
        return len(names) - 2

    def blocks_by_stage(self) -> list[int]:
        """Blocks of each virtual stage."""
        blocks = self.blocks()
        return [len(range(max(a, 1), min(b, blocks + 1))) for a, b in self.virtual_stages]

    def nodes(self) -> list[tuple[int, int]]:
        """(node, ranks) in the order of ranks; refuses ranks that come back to a node, which
        launchers cannot number."""
        node_of = [device.node for device in self.plan.devices]
        order = grouped((node_of[device], rank) for rank, device in enumerate(self.ranked))
        for node, ranks in order.items():
            self.refuse(
                ranks[-1] - ranks[0] >= len(ranks),
                "ranks of one node that are not consecutive "
                f"(node {node} has ranks {ranges_text(ranks)})",
                "the placement of stages and replicas on nodes",
            )
        return [(node, len(ranks)) for node, ranks in order.items()]


def unequal(plan: Plan) -> Iterator[tuple[str, str]]:
    """(what a framework of equal replicas lacks, what would be lost) of everything that is not
    equal."""
    for i, replica in enumerate(plan.replicas):
        for j, stage in enumerate(replica.stages):
            here = f"replicas[{i}].stages[{j}]"
            if len(stage.devices) > 1 and plan.degrees is None:
                yield (
                    f"row groups within a stage ({here}.devices has {len(stage.devices)})",
                    f"the division of every micro-batch as {listed(stage.row_shares)}",
                )
            if len(set(stage.tensor_shares)) > 1:
                yield (
                    f"unequal tensor shards ({here}.tensor_shares)",
                    f"the division of its weights as {listed(stage.tensor_shares)}",
                )
    if plan.zero_shares is not None and len({plan.zero_shares[d] for d in plan.ranks}) > 1:
        yield "unequal ZeRO shards (zero_shares)", "shards by each device's memory"
    for i, replica in enumerate(plan.replicas):
        if shape_of(replica) != shape_of(plan.replicas[0]):
            yield (
                f"replicas with different stages (replicas[{i}] and replicas[0])",
                f"the cut of replicas[{i}] into {len(replica.stages)} stages of its own",
            )
    sizes = {batch.samples for replica in plan.replicas for batch in replica.micro_batches}
    counts = {replica.steps for replica in plan.replicas}
    for numbers, lacks, takes in (
        (sizes, "micro-batches of different sizes", "device"),
        (counts, "different numbers of micro-batches", "replica"),
    ):
        if len(numbers) > 1:
            yield (
                f"{lacks} ({listed(sorted(numbers))})",
                f"the samples that each {takes} takes by its speed",
            )


def listed(numbers: Iterable[float]) -> str:
    """Numbers with commas."""
    return ", ".join(f"{number:g}" for number in numbers)


def shape_of(replica: Replica) -> list[tuple[list[Range], int]]:
    """Layers and tensor degree of each stage."""
    return [(stage.layers, len(stage.devices[0])) for stage in replica.stages]


def heading(plan: Plan, framework: str, version: str) -> list[str]:
    """Comment lines: what this is, for which version, and what was predicted."""
    lines = [f"{plan.name}, for {framework} ({version})"]
    prediction = plan.prediction
    if prediction is not None and prediction.predicted_seconds is not None:
        lines.append(
            f"by {prediction.strategy}/{prediction.method}, "
            f"{prediction.predicted_seconds:.6g} s per iteration predicted (replayed)"
        )
    return comments(*lines)


Settings = dict[str, Any]

# `Degrees.overlap` as Megatron has it.
OVERLAP = {
    "tensor": "tp_comm_overlap",
    "gradients": "overlap_grad_reduce",
    "weights": "overlap_param_gather",
    "offload": "overlap_cpu_optimizer_d2h_h2d",
}
# Of Megatron's FSDP, by ZeRO level.
SHARDED = {2: "optim_grads", 3: "optim_grads_params"}


def settings(grid: Grid) -> Settings:
    """Degrees, batch, stages, recomputation and the optimizer's sharding."""
    plan, degrees = grid.plan, grid.plan.degrees or Degrees()
    tensor, hybrid = grid.equal_width(), degrees.shard_groups > 1
    grid.refuse(
        degrees.expert > 1 and tensor > 1 and not degrees.sequence_parallel,
        "expert parallelism beside tensor ranks that are not sequence parallel",
        "the division of what lies between matrix products",
    )
    again = dict(RECOMPUTATION[plan.recomputation])
    if degrees.recompute_layers is not None:
        again["recompute_method"] = degrees.recompute_method or "uniform"
        again["recompute_num_layers"] = degrees.recompute_layers
    optional: Settings = {
        "fp8_format": "hybrid" if plan.workload.stack == "fp8" else None,
        "fp4_format": "e2m1" if plan.workload.stack == "fp4" else None,
        "context_parallel_size": degrees.context if degrees.context > 1 else None,
        "cp_comm_type": "a2a" if degrees.exchange == "all-to-all" else None,
        "expert_model_parallel_size": degrees.expert if degrees.expert > 1 else None,
        "expert_tensor_parallel_size": degrees.expert_tensor if degrees.expert > 1 else None,
        "sequence_parallel": degrees.sequence_parallel,
        **{flag: name in degrees.overlap for name, flag in OVERLAP.items()},
        "no_overlap_p2p_communication": plan.degrees is not None
        and grid.chunks > 1
        and "messages" not in degrees.overlap,
        "use_distributed_optimizer": plan.zero > 0,
        "use_megatron_fsdp": plan.zero in SHARDED,
        "data_parallel_sharding_strategy": SHARDED.get(plan.zero),
        "num_distributed_optimizer_instances": degrees.shard_groups if hybrid else None,
        "outer_dp_sharding_strategy": "no_shard" if hybrid else None,
        "ckpt_format": "fsdp_dtensor" if plan.zero in SHARDED else None,
        "optimizer_cpu_offload": degrees.offloaded > 0,
        "optimizer_offload_fraction": round(degrees.offloaded, 4) or None,
    }
    return {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": grid.pipeline,
        "micro_batch_size": grid.micro_batch,
        "global_batch_size": plan.workload.global_batch,
        "num_layers": grid.blocks(),
        "seq_length": plan.workload.sequence,
        **({plan.workload.precision: True} if plan.workload.precision != "fp32" else {}),
        **stage_settings(grid),
        **again,
        **stated(optional),
        **(model_settings(grid.shape, plan.workload.sequence or 0) if grid.shape else {}),
    }


def stated(values: Settings) -> Settings:
    """Those that are set."""
    return {k: v for k, v in values.items() if v is not None and v is not False}


def stage_settings(grid: Grid) -> Settings:
    """How the blocks divide: nothing where that is Megatron's own even cut, which divides what the
    first and the last stage leave evenly over the others."""
    counts = grid.blocks_by_stage()
    if len(counts) == 1:
        return {}
    if all(counts) and len(set(counts)) == 1:
        return {"num_layers_per_virtual_pipeline_stage": counts[0]} if grid.chunks > 1 else {}
    first, *middle, last = counts
    if all(counts) and grid.chunks == 1 and len(set(middle)) == 1:
        return {
            f"decoder_{end}_pipeline_num_layers": count
            for end, count in (("first", first), ("last", last))
            if count != middle[0]
        }
    kinds = ["E", *["t"] * grid.blocks(), "L"]
    stages = (runs_text(kinds[first:last]) for first, last in grid.virtual_stages)
    return {"pipeline_model_parallel_layout": "|".join(stages)}  # `Et*5|t*6|t*5L`


def model_settings(t: Transformer, sequence: int) -> Settings:
    """A text model's own figures. Megatron pads the vocabulary itself."""
    experts, latent = t.experts, t.latent
    values: Settings = {
        "hidden_size": t.hidden,
        "ffn_hidden_size": t.feed_forward,
        "num_attention_heads": t.heads,
        "kv_channels": t.head_dim,
        "group_query_attention": t.kv_heads < t.heads,
        "num_query_groups": t.kv_heads if t.kv_heads < t.heads else None,
        "vocab_size": t.vocabulary,
        "max_position_embeddings": max(sequence, t.positions),
        "position_embedding_type": "rope" if t.rotary else None if t.positions else "none",
        "normalization": "RMSNorm" if t.norm == "rms" else None,
        "swiglu": t.gated,
        "disable_bias_linear": not t.feed_forward_bias,
        "add_qkv_bias": t.attention_bias and not t.feed_forward_bias,
        "qk_layernorm": t.qk_norm != "none",
        "untie_embeddings_and_output_weights": not t.tied,
        "window_size": f"({t.window - 1},0)" if t.window else None,
        "window_attn_skip_freq": t.full_every or None,
    }
    values |= {} if t.dropout else {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    if latent:
        values |= {
            "multi_latent_attention": True,
            "q_lora_rank": latent.query,
            "kv_lora_rank": latent.keys,
            "qk_head_dim": latent.nope,
            "qk_pos_emb_head_dim": latent.rope,
            "v_head_dim": latent.value,
        }
    if experts:
        visited = [(i + 1) % experts.every == 0 and i >= experts.dense for i in range(t.layers)]
        values |= {
            "num_experts": experts.count,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_topk": experts.active,
            "moe_ffn_hidden_size": experts.width,
            "moe_shared_expert_intermediate_size": experts.shared or None,
            "moe_expert_capacity_factor": experts.capacity,
            "moe_pad_expert_input_to_capacity": experts.capacity is not None,
            "moe_layer_freq": None if all(visited) else str([int(one) for one in visited]),
        }
    return stated(values)


# Megatron's arguments -> the places in Megatron Bridge's ConfigContainer, where that is not `model`
# and the same name; those that begin with ! hold the opposite.
BRIDGE: dict[str, tuple[str, ...]] = {
    "num_experts": ("model.num_moe_experts",),
    "fp8_format": ("model.fp8",),
    "fp4_format": ("model.fp4",),
    "swiglu": ("model.gated_linear_unit",),
    "disable_bias_linear": ("!model.add_bias_linear",),
    "untie_embeddings_and_output_weights": ("!model.share_embeddings_and_output_weights",),
    "group_query_attention": (),
    "max_position_embeddings": (),
    "seq_length": ("model.seq_length", "dataset.sequence_length"),
    "micro_batch_size": ("train.micro_batch_size",),
    "global_batch_size": ("train.global_batch_size",),
    "decoder_first_pipeline_num_layers": ("model.num_layers_in_first_pipeline_stage",),
    "decoder_last_pipeline_num_layers": ("model.num_layers_in_last_pipeline_stage",),
    "no_overlap_p2p_communication": ("!model.overlap_p2p_comm",),
    "tp_comm_overlap": ("comm_overlap.tp_comm_overlap",),
    "overlap_grad_reduce": ("ddp.overlap_grad_reduce",),
    "overlap_param_gather": ("ddp.overlap_param_gather",),
    "use_distributed_optimizer": (
        "ddp.use_distributed_optimizer", "optimizer.use_distributed_optimizer",
    ),
    "use_megatron_fsdp": ("ddp.use_megatron_fsdp", "dist.use_megatron_fsdp"),
    "data_parallel_sharding_strategy": ("ddp.data_parallel_sharding_strategy",),
    "num_distributed_optimizer_instances": ("ddp.num_distributed_optimizer_instances",),
    "outer_dp_sharding_strategy": ("ddp.outer_dp_sharding_strategy",),
    "ckpt_format": ("checkpoint.ckpt_format",),
    "optimizer_cpu_offload": ("optimizer.optimizer_cpu_offload",),
    "optimizer_offload_fraction": ("optimizer.optimizer_offload_fraction",),
    "overlap_cpu_optimizer_d2h_h2d": ("optimizer.overlap_cpu_optimizer_d2h_h2d",),
}  # fmt: skip


def bridge_sections(grid: Grid) -> dict[str, Any]:
    """Sections of Bridge's configuration."""
    values, document = settings(grid), dict[str, Any]()
    values.pop(grid.plan.workload.precision, None)
    if values.pop("num_layers_per_virtual_pipeline_stage", None):
        values["virtual_pipeline_model_parallel_size"] = grid.chunks
    for name, value in values.items():
        for place in BRIDGE.get(name, (f"model.{name}",)):
            section, _, key = place.removeprefix("!").partition(".")
            document.setdefault(section, {})[key] = not value if place[0] == "!" else value
    return document
