"""Degrees of a plan beside stages, tensor ranks and replicas: context and expert ranks, others."""

from typing import Annotated, Literal

from pydantic import Field

from hetplan.schema import PositiveCount, StrictModel


class Degrees(StrictModel):
    """Degrees of a plan of `hetplan plan search` beside stages, tensor ranks and replicas, in the
    words of Megatron-LM. `hetplan export` writes it, and it is replayed (`degrees`); `hetplan run`
    refuses what it does not execute (`plans/refusals.py`).

    context: the row groups of a stage are then its context ranks, each with a part of every
    sample's tokens. exchange: how they meet in attention: keys and values go round a ring, or all
    exchange tokens for heads. expert: ranks over which a block's experts are spread; expert_tensor:
    tensor degree of an expert. sequence_parallel: tensor ranks divide what lies between their
    products. overlap: communication that goes on beside computation. recompute_method,
    recompute_layers: which layers of a virtual stage are computed again, null: all. offloaded:
    share of the optimizer states on the host. shard_groups: so many groups of ranks hold all shards
    of ZeRO 3, each one of them (HSDP).
    """

    context: PositiveCount = 1
    exchange: Literal["ring", "all-to-all"] = "ring"
    expert: PositiveCount = 1
    expert_tensor: PositiveCount = 1
    sequence_parallel: bool = False
    overlap: list[Literal["tensor", "gradients", "weights", "messages", "offload"]] = Field(
        default_factory=list
    )
    recompute_method: Literal["uniform", "block"] | None = None
    recompute_layers: PositiveCount | None = None
    offloaded: Annotated[float, Field(ge=0, le=1)] = 0.0
    shard_groups: PositiveCount = 1

    def __hash__(self) -> int:
        return hash(self.model_dump_json())

    @property
    def text(self) -> str:
        """`context 2, expert 8, expert tensor 1, sequence parallel`."""
        parts = (
            (self.context > 1, f"context {self.context}"),
            (self.exchange != "ring", "attention by all-to-all"),
            (self.expert > 1, f"expert {self.expert}, expert tensor {self.expert_tensor}"),
            (self.sequence_parallel, "sequence parallel"),
            (
                self.recompute_layers is not None,
                f"{self.recompute_method} recomputation of {self.recompute_layers} layers",
            ),
            (self.offloaded > 0, f"{self.offloaded:.0%} of the optimizer states offloaded"),
            (self.shard_groups > 1, f"shards in {self.shard_groups} groups"),
            (bool(self.overlap), f"overlap of {', '.join(self.overlap)}"),
        )
        return ", ".join(text for holds, text in parts if holds)
