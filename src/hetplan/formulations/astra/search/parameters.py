"""The parameters of a search for people: their values, their meaning, and the values that are tried
without them. docs/search.md lists them."""

from typing import NamedTuple


class Meaning(NamedTuple):
    """The description of a field of `Space` in docs/search.md, in Markdown."""

    values: str
    meaning: str  # and, after the semicolon, the values without the parameter


MEANINGS = {
    "pipeline": Meaning(
        "numbers, ranges (`1,2,4-8`)",
        "pipeline degrees; 1 to the number of layers",
    ),
    "tensor": Meaning("numbers, ranges", "tensor degrees; 1 to the number of heads"),
    "expert": Meaning("numbers, ranges", "expert degrees; 1 to the number of experts"),
    "micro_batch": Meaning("numbers, ranges", "samples per micro-batch; 1-8"),
    "context": Meaning("numbers, ranges", "context degrees, ring attention; 1 (not in the paper)"),
    "exchange": Meaning(
        "`p2p`, `a2a` or both",
        "how context ranks meet in attention: a ring, or all-to-all of tokens for heads "
        "(Ulysses); p2p (not in the paper)",
    ),
    "whole_experts": Meaning(
        "`true`, `false` or both",
        "tensor ranks hold whole experts, expert-tensor degree 1; false (not in the paper)",
    ),
    "fsdp": Meaning(
        "`true`, `false` or both",
        "weights, gradients and optimizer states sharded over data and context ranks; "
        "false (not in the paper)",
    ),
    "shard_groups": Meaning(
        "numbers, ranges",
        "groups of ranks that hold all shards each (HSDP); 1 (not in the paper)",
    ),
    "uneven": Meaning(
        "`true` or `false`",
        "the last stages may hold a layer less than the others; the slowest is a full "
        "one, or the last with the head; false (not in the paper)",
    ),
    "virtual": Meaning(
        "numbers, ranges",
        "layers per virtual stage, beside no interleaving; 1 to the pipeline degree",
    ),
    "recompute_layers": Meaning(
        "numbers, ranges",
        "recomputed layers (`block`), layers per group (`uniform`); 1 to a stage's layers",
    ),
    "sequence_parallel": Meaning("`true`, `false` or both", "sequence parallelism; both"),
    "distributed_optimizer": Meaning(
        "`true`, `false` or both",
        "optimizer states shared over data ranks (ZeRO 1); both",
    ),
    "no_overlap_offload": Meaning("`true`, `false` or both", "offloading that blocks; both"),
    "overlap": Meaning(
        "`true` or `false`",
        "communication behind computation wherever Megatron-LM can; true",
    ),
    "overlap_grad_reduce": Meaning("`true` or `false`", "of it, that of gradients; true"),
    "overlap_param_gather": Meaning(
        "`true` or `false`",
        "of it, that of weights (Megatron-LM refuses this one alone); true",
    ),
    "interleaving": Meaning("`true` or `false`", "whether virtual stages are tried; true"),
    "offload": Meaning("`true` or `false`", "whether optimizer states may move to the host; true"),
    "recompute": Meaning(
        "`none`, `selective`, `full`, `hybrid`",
        "what is recomputed (`hybrid`: some layers in full, the others' attention core); all four",
    ),
    "recompute_method": Meaning(
        "`block`, `uniform`",
        "how full recomputation picks its layers; both",
    ),
}
