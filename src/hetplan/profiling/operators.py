"""What a layer computes, as a short list of operators with their shapes.

Units: elements, FLOPs, bytes. Described operators (`Matmul`, `Elementwise`) are per sample, and
take `micro_batch` samples at once on a tensor-parallel group of `tensor` devices. Their backward
pass is counted operator by operator: a matrix product C = A B has two, dA = dC B^T and dB = A^T dC,
each with the forward's FLOPs and traffic, so twice the forward in all (once where A needs no
gradient).

Traced operators (`Counted`) belong to one pass each. Their sizes grow in straight lines with the
samples of a micro-batch, in elements of the training precision (an int64 counts as so many of
them), and tensor parallelism leaves them whole.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Strict

from hetplan.schema import Name, NonNegative, StrictModel

Precision = Literal["fp16", "bf16", "fp32"]
PRECISIONS: tuple[Precision, ...] = ("fp16", "bf16", "fp32")


ELEMENT_BYTES: dict[Precision, int] = {"fp16": 2, "bf16": 2, "fp32": 4}

Split = Literal["none", "k", "n", "count"]
Kind = Literal["add", "activation", "norm", "softmax", "copy", "lookup", "loss"]
# (a, b): a + b * samples
Line = Annotated[tuple[NonNegative, NonNegative], Strict(False)]
# count, m, k, n
Product = Annotated[tuple[Line, Line, Line, Line], Strict(False)]


def at(line: Line, samples: int) -> float:
    """A size for a micro-batch."""
    return line[0] + line[1] * samples


@dataclass(frozen=True)
class Shape:
    """`count` products of an m x k with a k x n matrix, as one device computes them."""

    count: float
    m: float
    k: float
    n: float

    @property
    def flops(self) -> float:
        """2 m k n per product."""
        return 2.0 * self.count * self.m * self.k * self.n


class Counted(StrictModel):
    """An operator of one pass. read, written: elements. product: None for what only moves memory.

    ruled: False where no rule says what the operator does; it then counts as the memory that it
    reads and writes.
    """

    name: Name
    backward: bool
    read: Line
    written: Line
    product: Product | None = None
    ruled: bool = True

    def shape(self, micro_batch: int = 1, tensor: int = 1) -> Shape | None:
        """Its products; None for what is none."""
        if self.product is None:
            return None
        return Shape(*(at(line, micro_batch) for line in self.product))

    def moved(self, micro_batch: int = 1, tensor: int = 1) -> float:
        """Elements read and written, in whichever pass it is."""
        return at(self.read, micro_batch) + at(self.written, micro_batch)


@dataclass(frozen=True)
class Matmul:
    """`count` products of m x k by k x n for each sample.

    weight: the k x n side is a parameter (read once for all samples, whose rows stack up in m);
    else both sides are activations and `count` grows with the micro-batch (attention). split: the
    dimension that tensor parallelism divides. left, out: elements per sample that really move to
    and from memory where that is not m k and m n: an implicit convolution reads each pixel once,
    fused attention keeps the scores on the chip. input_gradient: False for a first layer, which has
    no dA. attention: of an attention core, how it is computed; fused kernels skip what a causal
    mask hides, and compute the scores again in the backward pass (Dao et al. 2022).
    """

    name: str
    m: int
    k: int
    n: int
    count: int = 1
    weight: bool = True
    split: Split = "none"
    left: int | None = None
    out: int | None = None
    input_gradient: bool = True
    attention: Literal["none", "standard", "fused", "fused-causal"] = "none"

    def shape(self, micro_batch: int = 1, tensor: int = 1) -> Shape:
        """What one device of the group computes; dimensions that do not divide are padded up."""
        k = _share(self.k, tensor) if self.split == "k" else self.k
        n = _share(self.n, tensor) if self.split == "n" else self.n
        count = _share(self.count, tensor) if self.split == "count" else self.count
        if self.weight:
            return Shape(count, self.m * micro_batch, k, n)
        return Shape(count * micro_batch, self.m, k, n)

    def moved(self, micro_batch: int = 1, tensor: int = 1) -> float:
        """Elements that one device reads and writes in the forward pass."""
        s = self.shape(micro_batch, tensor)
        left = s.count * s.m * s.k
        out = s.count * s.m * s.n
        if self.left is not None:
            left = micro_batch * _share(self.left, tensor if self.split in ("k", "count") else 1)
        if self.out is not None:
            out = micro_batch * _share(self.out, tensor if self.split in ("n", "count") else 1)
        return float(left + s.count * s.k * s.n + out)

    @property
    def backward_products(self) -> int:
        """How many products of the forward's size the backward pass takes."""
        return 2 if self.input_gradient else 1


@dataclass(frozen=True)
class Elementwise:
    """A memory-bound operator: elements that it moves per sample, forward and backward.

    kind: what it computes, which says the share of the memory bandwidth that it reaches. split:
    whether tensor parallelism divides it; without sequence parallelism, norms, residuals and
    dropouts on the full hidden size stay whole on every rank (Shoeybi et al. 2019, Section 3).
    """

    name: str
    forward: int
    backward: int
    split: bool = False
    kind: Kind = "add"

    def shape(self, micro_batch: int = 1, tensor: int = 1) -> None:
        """It is no product."""

    def moved(self, micro_batch: int = 1, tensor: int = 1) -> float:
        """Elements moved in the forward pass by one device."""
        return float(micro_batch * _share(self.forward, tensor if self.split else 1))

    def moved_back(self, micro_batch: int = 1, tensor: int = 1) -> float:
        """Elements moved in the backward pass by one device."""
        return float(micro_batch * _share(self.backward, tensor if self.split else 1))


Operator = Matmul | Elementwise | Counted


def launches(op: Operator) -> tuple[int, int]:
    """Kernels of the forward and of the backward pass."""
    if isinstance(op, Counted):
        return (0, 1) if op.backward else (1, 0)
    return 1, op.backward_products if isinstance(op, Matmul) else 1


def flops_of(op: Operator) -> tuple[float, float]:
    """FLOPs of matrix products for one sample: forward, backward."""
    shape = op.shape()
    if shape is None:
        return 0.0, 0.0
    if isinstance(op, Counted):
        return (0.0, shape.flops) if op.backward else (shape.flops, 0.0)
    return shape.flops, shape.flops * launches(op)[1]


@dataclass(frozen=True)
class Saved:
    """A tensor kept from forward to backward, per sample.

    element_bytes: None = the training precision's; 1 for dropout masks, 4 for fp32 logits. split:
    whether tensor parallelism divides it.
    """

    name: str
    elements: int
    split: bool
    element_bytes: int | None = None

    def size(self, precision: Precision) -> float:
        """Bytes per sample, unsplit."""
        return float(self.elements * (self.element_bytes or ELEMENT_BYTES[precision]))


@dataclass(frozen=True)
class Reduce:
    """A tensor-parallel all-reduce in the forward or the backward pass: elements per sample."""

    elements: int
    backward: bool
    element_bytes: int | None = None

    def size(self, precision: Precision) -> float:
        """Bytes per sample."""
        return float(self.elements * (self.element_bytes or ELEMENT_BYTES[precision]))


# Kinds of layers.
BLOCKS = ("block", "moe-block")  # of described transformers
TRACED = "traced"  # a layer between the first and the last of a traced module
# What recomputation applies to; embeddings and heads keep everything.
REPEATED = (*BLOCKS, TRACED)


@dataclass(frozen=True)
class Layer:
    """One link of the chain. All figures per sample and for the whole (unsplit) layer.

    params: parameters that this layer owns. tied_params: parameters owned by an earlier layer (a
    language-model head that shares the embedding): a stage that holds this layer without the owner
    keeps a copy of them. output: elements sent to the next layer.
    """

    name: str
    kind: str
    params: int
    operators: tuple[Operator, ...]
    output: int
    saved: tuple[Saved, ...]
    reduces: tuple[Reduce, ...] = ()
    tied_params: int = 0

    def forward_flops(self) -> float:
        """FLOPs of the matrix products, forward."""
        return sum(flops_of(op)[0] for op in self.operators)

    def backward_flops(self) -> float:
        """FLOPs of the matrix products, backward."""
        return sum(flops_of(op)[1] for op in self.operators)

    def saved_bytes(self, precision: Precision) -> float:
        """Bytes kept for the backward pass, no recomputation."""
        return sum(tensor.size(precision) for tensor in self.saved)

    def replicated_saved_bytes(self, precision: Precision) -> float:
        """The part of `saved_bytes` that every tensor rank keeps whole (no sequence
        parallelism)."""
        return sum(tensor.size(precision) for tensor in self.saved if not tensor.split)

    def tensor_bytes(self, precision: Precision) -> float:
        """Bytes all-reduced inside a tensor-parallel group, forward and backward together."""
        return sum(reduce.size(precision) for reduce in self.reduces)


def _share(size: int, parts: int) -> int:
    """The largest part of `size` divided into `parts`."""
    return -(-size // parts)
