"""Peak memory of a device, by component: the one formula of the replay and of the commands `fits`
and `plan search`.

Sizes are numbers (of one device) or arrays (of the devices of many strategies at once). The peak is
at the loss or at the recomputation of a layer, whichever needs more, because a backward pass does
not do both at the same time. For a framework that states no bytes of its logits the two are added,
which is an upper bound.
"""

from dataclasses import asdict, dataclass
from typing import Generic

import numpy as np

from hetplan.profiling.frameworks import Framework, Size, StateBytes
from hetplan.profiling.models.operators import Layer, Precision
from hetplan.replays.arrays import Flags, Floats, Numbers
from hetplan.text import bytes_text

SMALL = 0.005  # share of the allocated bytes up to which `PeakBytes.text` leaves a component out
# Names of saved tensors in `profiling.models.transformer`:
# the inputs of the products that tensor ranks divide by columns
INPUTS = frozenset(("qkv input", "up input", "head input"))
LOGITS = "logits"  # kept by the head for the loss
ATTENTION_OUTPUT = "attention output"  # before context ranks exchange tokens for heads
EXPERT_INPUT = "up input"  # input of the product whose columns expert-tensor ranks divide


def saved_bytes_of(layer: Layer, name: str, precision: Precision) -> float:
    """Bytes per sample of the layer's saved tensors named `name`; 0 where it has none."""
    return float(sum(t.size(precision) for t in layer.saved if t.name == name))


def inputs_bytes(layer: Layer, precision: Precision) -> float:
    """Bytes per sample of the inputs of products that sequence-parallel ranks gather."""
    return sum(t.size(precision) for t in layer.saved if t.name in INPUTS)


def logits_of(head: Layer, precision: Precision) -> tuple[float, float]:
    """(number of logits, bytes of them that the head keeps), per sample."""
    logits = [t for t in head.saved if t.name == LOGITS]
    count = sum(t.elements for t in logits)
    return float(count), saved_bytes_of(head, LOGITS, precision)


def on_a_rank(
    split: Numbers, whole: Numbers, gathered: Numbers, tensor: Numbers, divided: bool | Flags
) -> Floats:
    """Bytes that each tensor rank keeps of a layer:

        split / tensor + whole                                          tokens not divided
        split / tensor + whole / tensor + gathered (1 - 1 / tensor)     tokens divided

    Source: Korthikanti et al. 2022, Sections 4.2.2 and 4.2.3.

    split: bytes of tensors that tensor ranks always divide. whole: bytes of tensors between
    products, which tensor ranks divide only where they divide tokens. gathered: the part of `whole`
    that ranks gather and keep although they divide tokens. tensor: the tensor degree. divided:
    whether tensor ranks divide tokens (sequence parallelism).
    """
    divided_tokens = whole / tensor + gathered * (1 - 1 / tensor)
    return np.asarray(split / tensor + np.where(divided, divided_tokens, whole))


def gathered_for_experts(
    layer: Layer, precision: Precision, tensor: Numbers, expert_tensor: Numbers
) -> Floats:
    """Bytes per sample that expert-tensor ranks gather: the parameter `gathered` of `on_a_rank` for
    a layer of experts, 0 for any other.

    All ranks that divide the columns of an expert keep the expert's whole input. Tensor ranks that
    hold whole experts keep only the tokens of their experts. So a rank gathers
    input (expert_tensor - 1) / (tensor - 1).

    tensor, expert_tensor: tensor degree of the block and of an expert.
    """
    expert_input = 0.0
    if layer.kind == "moe-block":
        expert_input = saved_bytes_of(layer, EXPERT_INPUT, precision)
    # One tensor rank gathers nothing: expert_tensor is 1 then, and 0 / 1 is 0.
    return np.asarray((expert_tensor - 1) / np.maximum(tensor - 1, 1) * expert_input)


@dataclass(frozen=True)
class Passes(Generic[Size]):
    """Bytes per sample that the passes of a stage need on each of its devices."""

    saved: Size  # tensors kept from the forward to the backward pass
    working: Size  # tensors of the layer that is computed again
    logits: Size  # logits that are kept, 0 without the head
    loss: Size  # logits with their copies and gradient at the loss
    # the larger one of the activations that the stage receives and sends; 0 for the whole model
    boundary: Size


@dataclass(frozen=True, slots=True)
class PeakBytes(Generic[Size]):
    """Bytes on one device at its peak, by component; all 0 on a device that is not used."""

    weights: Size
    gradients: Size
    optimizer: Size  # optimizer states, with the fp32 weights of mixed precision
    activations: Size  # tensors kept from forward to backward passes, without logits
    working: Size  # tensors of the layer that is computed again
    logits: Size  # logits of the micro-batch at the loss, with their copies and gradient
    collectives: Size  # gathered layers, gradients being reduced, buckets
    transfers: Size  # buffers of activations and gradients between stages
    workspace: float  # workspaces of the framework's libraries
    reserved: float  # CUDA context and NCCL, which no allocator counts

    @property
    def allocated(self) -> Size:
        """Bytes that `torch.cuda.max_memory_allocated` counts."""
        states = self.weights + self.gradients + self.optimizer
        passes = self.activations + self.working + self.logits
        return states + passes + self.collectives + self.transfers + self.workspace

    @property
    def text(self) -> str:
        """The components of `allocated` above the share `SMALL` of it, the largest first, such as
        `weights 1.2 GiB, …`."""
        components = asdict(self)
        del components["reserved"]
        least = SMALL * self.allocated
        largest_first = sorted(components.items(), key=lambda item: -item[1])
        shown = [f"{name} {bytes_text(size)}" for name, size in largest_first if size > least]
        return ", ".join(shown)


UNUSED = PeakBytes(
    weights=0.0,
    gradients=0.0,
    optimizer=0.0,
    activations=0.0,
    working=0.0,
    logits=0.0,
    collectives=0.0,
    transfers=0.0,
    workspace=0.0,
    reserved=0.0,
)


def held_on(
    framework: Framework,
    states: StateBytes[Size],
    passes: Passes[Size],
    kept: Size,
    rows: Size,
    reserved: float,
) -> PeakBytes[Size]:
    """The bytes on a device at its peak.

    states: bytes of the model states on the device. passes: bytes per sample of its stage. kept:
    bytes of all micro-batches that the stage keeps at the same time, logits among them. rows: the
    device's samples of the largest micro-batch. reserved: bytes that the allocator does not count.
    """
    logits = rows * passes.logits  # counted as `loss` below, and not twice
    loss = rows * passes.loss
    working = rows * passes.working
    # Multiplying by a comparison, which counts as 1 or 0, selects for numbers and for arrays.
    if framework.logit_bytes is not None:
        at_recomputation = working > loss  # whether the peak is there, and not at the loss
        working = working * at_recomputation
        loss = loss * (1 - at_recomputation)
    return PeakBytes(
        weights=states.weights,
        gradients=states.gradients,
        optimizer=states.optimizer,
        # A measured profile may keep fewer bytes than the logits that the model's layers have.
        activations=(kept - logits) * (kept > logits),
        working=working,
        logits=loss,
        collectives=states.buffers,
        transfers=framework.transfer_buffers * rows * passes.boundary,
        workspace=framework.workspace_bytes,
        reserved=reserved,
    )
