"""Peak memory of a device, by component: the one formula of the replay and of the commands `fits`
and `plan search`.

Sizes are numbers (of one device) or arrays (of the devices of many strategies at once). The peak is
at the loss, in the head's backward pass or in that of a block, which may compute the block again,
whichever needs more, because a backward pass does one after the other. For a framework that states
no bytes of its logits, loss and block are added, which is an upper bound.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Generic, Literal, NamedTuple

import numpy as np

from hetplan.profiling.frameworks import Framework, Size, StateBytes
from hetplan.profiling.models.operators import ELEMENT_BYTES, Layer, Matmul, Precision
from hetplan.replays.arrays import Flags, Floats, Numbers
from hetplan.text import bytes_text

SMALL = 0.005  # share of the allocated bytes up to which `PeakBytes.text` leaves a component out
# Names of saved tensors in `profiling.models.transformer`:
# the inputs of the products that tensor ranks divide by columns
INPUTS = frozenset(("qkv input", "up input", "head input"))
LOGITS = "logits"  # kept by the head for the loss
ATTENTION_OUTPUT = "attention output"  # before context ranks exchange tokens for heads
EXPERT_INPUT = "up input"  # input of the product whose columns expert-tensor ranks divide
EXPERT_PRODUCTS = ("experts-up", "experts-down")  # operators whose weights are the experts'
Division = Literal["rows", "columns", "nothing"]  # what tensor ranks divide of a weight
# dimension of a product that tensor ranks divide -> what they divide of its weight
DIVISIONS: Mapping[str, Division] = {"k": "rows", "n": "columns"}
# Names of products in `profiling.models.transformer` whose weights Transformer Engine does not hold
ROUTER, HEAD = "router", "lm-head"


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


def working_gradients(layer: Layer, precision: Precision) -> tuple[float, float]:
    """(all bytes, bytes that tensor ranks do not always divide) per sample of the gradients that
    the backward pass of a layer holds beside what is kept.

    They are the gradients of the layer's output and of its largest kept tensor. In a gated network
    the latter is the input of the activation, whose gradient is written while those of the
    activation's output and of the residual exist and the kept tensors do, too. The gradient of the
    activation's output counts as the kept input of the next product, which is used up by then.
    """
    output = float(layer.output * ELEMENT_BYTES[precision])
    largest, divided = 0.0, True
    for tensor in layer.saved:
        if tensor.size(precision) > largest:
            largest, divided = tensor.size(precision), tensor.split
    return output + largest, output + (0.0 if divided else largest)


class WeightShape(NamedTuple):
    """The shape of a product's weight."""

    rows: int
    columns: int
    divided: Division
    expert: bool  # whether it is an expert's

    def on_a_rank(self, ranks: Numbers) -> tuple[Numbers, Numbers]:
        """(rows, columns) of the part that each of `ranks` ranks has."""
        return (
            self.rows / ranks if self.divided == "rows" else self.rows + 0 * ranks,
            self.columns / ranks if self.divided == "columns" else self.columns + 0 * ranks,
        )


def weight_shapes(layer: Layer) -> tuple[WeightShape, ...]:
    """The shapes of the trained weights of a block's products, each once, without the router's. All
    experts of a block have weights of the same two shapes."""
    shapes: dict[WeightShape, None] = {}
    for op in layer.operators:
        if isinstance(op, Matmul) and op.weight and not op.frozen and op.name != ROUTER:
            expert = op.name in EXPERT_PRODUCTS
            shapes[WeightShape(op.k, op.n, DIVISIONS.get(op.split, "nothing"), expert)] = None
    return tuple(shapes)


def head_of(head: Layer, precision: Precision) -> tuple[float, float]:
    """(bytes of the weight of the head's product, bytes per sample of its input); zeros for a head
    without such a product."""
    width = ELEMENT_BYTES[precision]
    for op in head.operators:
        if isinstance(op, Matmul) and op.name == HEAD and not op.frozen:
            return float(op.k * op.n * width), float(op.m * op.k * width)
    return 0.0, 0.0


def head_inputs(size: Numbers, tensor: Numbers, divided: bool | Flags) -> Floats:
    """Bytes of the head's input and of its gradient in the head's backward pass: the gradient, and
    where tensor ranks divide tokens also the input, which they gather again.

    size: bytes of the whole input. tensor, divided: see `on_a_rank`.
    """
    gathered_again = np.logical_and(divided, np.greater(tensor, 1))
    return np.asarray(np.where(gathered_again, 2 * size, size))


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
    # of the layer whose backward pass needs most: gradients, and tensors that it computes again
    working: Size
    logits: Size  # logits that are kept, 0 without the head
    loss: Size  # logits with their copies and gradient at the loss
    # the gradients of logits and of the head's input, where the head's backward pass makes an
    # unused gradient of its weight; else 0
    head: Size
    # the larger one of the activations that the stage receives and sends; 0 for the whole model
    boundary: Size


@dataclass(frozen=True, slots=True)
class PeakBytes(Generic[Size]):
    """Bytes on one device at its peak, by component; all 0 on a device that is not used."""

    weights: Size
    gradients: Size
    optimizer: Size  # optimizer states, with the fp32 weights of mixed precision
    activations: Size  # tensors kept from forward to backward passes, without logits
    # in the backward pass of a layer: gradients, and tensors that are computed again
    working: Size
    # at the loss, logits of the micro-batch with their copies and gradient; or in the head's
    # backward pass, gradients of the logits, of its input and, unused, of its weight
    logits: Size
    collectives: Size  # gathered layers, gradients being reduced, buckets
    casts: Size  # the largest frozen weight that a product casts from fewer bits
    unused: Size  # gradients of weights that nobody reads (`Framework.unused_gradients`)
    transfers: Size  # buffers of activations and gradients between stages
    workspace: float  # workspaces of the framework's libraries
    reserved: float  # CUDA context and NCCL, which no allocator counts

    @property
    def allocated(self) -> Size:
        """Bytes that `torch.cuda.max_memory_allocated` counts."""
        states = self.weights + self.gradients + self.optimizer
        passes = self.activations + self.working + self.logits
        buffers = self.collectives + self.casts + self.unused + self.transfers + self.workspace
        return states + passes + buffers

    def at(self, number: int) -> "PeakBytes[float]":
        """The bytes of one of the devices that arrays stand for."""
        sizes = {name: float(np.ravel(size)[number]) for name, size in self.sizes.items()}
        return PeakBytes(**sizes, workspace=self.workspace, reserved=self.reserved)

    @property
    def sizes(self) -> dict[str, Size]:
        """The components that are not constants of the framework, by name."""
        constants = ("workspace", "reserved")
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in constants
        }

    @property
    def largest_text(self) -> str:
        """The largest component and all of them, such as `largest: optimizer 3 GiB of 8 GiB`; for
        the bytes of one device."""
        sizes = {name: float(size) for name, size in self.sizes.items()}
        name = max(sizes, key=sizes.__getitem__)
        return f"largest: {name} {bytes_text(sizes[name])} of {bytes_text(float(self.allocated))}"

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
    casts=0.0,
    unused=0.0,
    transfers=0.0,
    workspace=0.0,
    reserved=0.0,
)


@dataclass(frozen=True)
class UnusedGradients(Generic[Size]):
    """Bytes on a device of weights' gradients that nobody reads; 0 for most frameworks."""

    blocks: Size  # a gradient for each shape of a weight in the blocks, at all times
    head: Size  # the gradient of the head's weight, in the head's backward pass


def held_on(
    framework: Framework,
    states: StateBytes[Size],
    passes: Passes[Size],
    kept: Size,
    rows: Size,
    reserved: float,
    unused: UnusedGradients[Size],
    casts: Size,
) -> PeakBytes[Size]:
    """The bytes on a device at its peak.

    states: bytes of the model states on the device. passes: bytes per sample of its stage. kept:
    bytes of all micro-batches that the stage keeps at the same time, logits among them. rows: the
    device's samples of the largest micro-batch. reserved: bytes that the allocator does not count.
    unused: gradients of weights that nobody reads. casts: bytes on the device of the largest frozen
    weight that a product casts.
    """
    logits = rows * passes.logits  # counted as `loss` below, and not twice
    loss = rows * passes.loss
    head = rows * passes.head + unused.head
    loss = loss + (head - loss) * (head > loss)
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
        casts=casts,
        unused=unused.blocks,
        transfers=framework.transfer_buffers * rows * passes.boundary,
        workspace=framework.workspace_bytes,
        reserved=reserved,
    )
