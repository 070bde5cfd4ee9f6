"""The further degrees of a plan, beside stages, tensor ranks and replicas: context ranks, expert
ranks and the options that go with them."""

from typing import Annotated, Literal

from pydantic import Field

from hetplan.schema import PositiveCount, StrictModel


class Degrees(StrictModel):
    """The further degrees of a plan, in the words of Megatron-LM.

    `hetplan plan search` and the strategies `astra` and `joint` choose them, the replay prices
    them, and `hetplan export` writes them. `hetplan run` refuses those that it does not execute
    (`plans/refusals.py`).
    """

    context: PositiveCount = 1
    """Context ranks of a stage: its row groups, each with a part of every sample's tokens."""
    exchange: Literal["ring", "all-to-all"] = "ring"
    """How context ranks compute attention over all tokens: by passing keys and values round a ring,
    or by an all-to-all exchange of tokens for heads."""
    expert: PositiveCount = 1
    """Ranks over which the experts of a block are spread."""
    expert_tensor: PositiveCount = 1
    """Tensor degree of each expert."""
    sequence_parallel: bool = False
    """Whether tensor ranks divide the tokens of the activations between their matrix products."""
    overlap: list[Literal["tensor", "gradients", "weights", "messages", "offload"]] = Field(
        default_factory=list
    )
    """Communication that runs beside computation."""
    recompute_method: Literal["uniform", "block"] | None = None
    """Which layers of a virtual stage (a chunk of a stage) are recomputed, as Megatron-LM's options
    `recompute_method` and `recompute_num_layers` say. None: all of them."""
    recompute_layers: PositiveCount | None = None
    """Number of layers that `block` recomputes, or that `uniform` recomputes together."""
    offloaded: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of optimizer states on the host."""
    shard_groups: PositiveCount = 1
    """Groups of ranks of which each holds all shards of ZeRO 3 (HSDP)."""

    def __hash__(self) -> int:
        return hash(self.model_dump_json())  # lists have no hash

    @property
    def text(self) -> str:
        """The degrees that differ from their defaults, in words: `context 2, expert 8, expert
        tensor 1, sequence parallel`."""
        texts: list[str] = []
        if self.context > 1:
            texts.append(f"context {self.context}")
        if self.exchange != "ring":
            texts.append("attention by all-to-all")
        if self.expert > 1:
            texts.append(f"expert {self.expert}, expert tensor {self.expert_tensor}")
        if self.sequence_parallel:
            texts.append("sequence parallel")
        if self.recompute_layers is not None:
            texts.append(f"{self.recompute_method} recomputation of {self.recompute_layers} layers")
        if self.offloaded > 0:
            texts.append(f"{self.offloaded:.0%} of the optimizer states offloaded")
        if self.shard_groups > 1:
            texts.append(f"shards in {self.shard_groups} groups")
        if self.overlap:
            texts.append(f"overlap of {', '.join(self.overlap)}")
        return ", ".join(texts)
