"""What a device holds at its peak, by component: the one formula of the replay, of `fits` and of
`plan search`.

Sizes are numbers (of one device) or arrays (of the devices of many strategies at once). The peak is
at the loss, or where a layer is computed again, whichever is more, since the two meet in no moment
of a backward pass. A framework that says nothing of its logits may hold both at once, which is a
safe bound.
"""

from dataclasses import asdict, dataclass
from typing import Generic

import numpy as np

from hetplan.profiling.frameworks import Framework, Size, States
from hetplan.profiling.models.operators import Layer, Precision
from hetplan.replays.arrays import Flags, Floats, Numbers
from hetplan.text import bytes_text

SMALL = 0.005  # of what is allocated: not worth a word
# Saved tensors, as described transformers name them: the inputs of the products that tensor ranks
# divide by columns, and what the head keeps for the loss.
INPUTS = frozenset(("qkv input", "up input", "head input"))
LOGITS = "logits"
# What attention keeps before it meets other context ranks, and what the columns of an expert read.
ATTENTION_OUTPUT = "attention output"
EXPERT_INPUT = "up input"


def saved_bytes_of(layer: Layer, name: str, precision: Precision) -> float:
    """Bytes per sample of the saved tensors of that name, 0 where there are none."""
    return float(sum(t.size(precision) for t in layer.saved if t.name == name))


def inputs_bytes(layer: Layer, precision: Precision) -> float:
    """Bytes per sample of the inputs of products that sequence parallel ranks gather."""
    return sum(t.size(precision) for t in layer.saved if t.name in INPUTS)


def logits_of(head: Layer, precision: Precision) -> tuple[float, float]:
    """(number of a sample's logits, bytes that the head keeps of them)."""
    logits = [t for t in head.saved if t.name == LOGITS]
    return float(sum(t.elements for t in logits)), float(sum(t.size(precision) for t in logits))


def on_a_rank(
    split: Numbers, whole: Numbers, gathered: Numbers, tensor: Numbers, divided: bool | Flags
) -> Floats:
    """Bytes that each of the tensor ranks keeps of a layer.

    split / tensor, and of what lies between products all of it, or where ranks divide tokens
    whole / tensor + gathered (1 - 1 / tensor) (Korthikanti et al. 2022, Sections 4.2.2 and 4.2.3).

    split: bytes of tensors that all tensor ranks divide. whole: bytes of tensors that are divided
    only where tokens are, else whole on every rank. gathered: bytes of the part of `whole` that
    ranks which divide tokens gather and keep whole. tensor: ranks. divided: whether they divide
    tokens.
    """
    of_tokens = whole / tensor + gathered * (1 - 1 / tensor)
    return np.asarray(split / tensor + np.where(divided, of_tokens, whole))


def gathered_for_experts(
    layer: Layer, precision: Precision, tensor: Numbers, expert_tensor: Numbers
) -> Floats:
    """The part of `on_a_rank`'s gathered bytes that an expert layer has, per sample.

    The ranks that divide the columns of an expert all keep its input; the other tensor ranks hold
    whole experts and their own tokens alone: input (expert_tensor - 1) / (tensor - 1).

    tensor, expert_tensor: degrees of the block and of an expert.
    """
    common = saved_bytes_of(layer, EXPERT_INPUT, precision) if layer.kind == "moe-block" else 0.0
    return np.asarray((expert_tensor - 1) / np.maximum(tensor - 1, 1) * common)


@dataclass(frozen=True)
class Passes(Generic[Size]):
    """Bytes per sample on each device of a stage. saved: kept from forward to backward. working:
    of the layer that is computed again. logits: those that are kept, 0 without the head. loss:
    logits, their copies and gradient at the loss. boundary: of the larger of what the stage takes
    and sends, 0 for the whole model."""

    saved: Size
    working: Size
    logits: Size
    loss: Size
    boundary: Size


@dataclass(frozen=True, slots=True)
class Held(Generic[Size]):
    """Bytes on one device at its peak, by component; all 0 on one that is not used.

    optimizer: with the fp32 weights of mixed precision. activations: kept from forward to backward
    passes. working: of the layer that is computed again. logits: of the micro-batch at the loss,
    with their copies and gradient. collectives: gathered layers, gradients at work, buckets.
    transfers: buffers of activations and gradients between stages. workspace: of the framework's
    libraries. reserved: CUDA context and NCCL, which no allocator counts.
    """

    weights: Size
    gradients: Size
    optimizer: Size
    activations: Size
    working: Size
    logits: Size
    collectives: Size
    transfers: Size
    workspace: float
    reserved: float

    @property
    def allocated(self) -> Size:
        """What `torch.cuda.max_memory_allocated` counts."""
        states = self.weights + self.gradients + self.optimizer
        passes = self.activations + self.working + self.logits
        return states + passes + self.collectives + self.transfers + self.workspace

    @property
    def text(self) -> str:
        """What matters of `allocated` on one device, the largest first: `weights 1.2 GiB, …`."""
        parts = sorted(asdict(self).items(), key=lambda part: -part[1])
        least = SMALL * self.allocated
        shown = [part for part in parts if part[0] != "reserved" and part[1] > least]
        return ", ".join(f"{name} {bytes_text(size)}" for name, size in shown)


UNUSED = Held(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def held_on(
    framework: Framework,
    states: States[Size],
    passes: Passes[Size],
    kept: Size,
    rows: Size,
    reserved: float,
) -> Held[Size]:
    """What a device holds at its peak.

    kept: bytes of all micro-batches that it keeps at once, logits among them. rows: its samples of
    the largest micro-batch. reserved: bytes that the allocator does not count.
    """
    logits, loss, working = rows * passes.logits, rows * passes.loss, rows * passes.working
    # comparisons are 1 or 0 as numbers, of one device and of many
    if framework.logit_bytes is not None:
        again = working > loss
        working, loss = working * again, loss * (1 - again)
    return Held(
        states.weights,
        states.gradients,
        states.optimizer,
        activations=(kept - logits) * (kept > logits),
        working=working,
        logits=loss,
        collectives=states.buffers,
        transfers=framework.transfer_buffers * rows * passes.boundary,
        workspace=framework.workspace_bytes,
        reserved=reserved,
    )
