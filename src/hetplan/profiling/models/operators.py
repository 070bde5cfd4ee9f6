"""The operators of a layer: a short list with their shapes.

Units: elements, FLOPs, bytes. Described operators (`Matmul`, `Elementwise`) are per sample, and
take `micro_batch` samples at once on a tensor-parallel group of `tensor` devices. Their backward
pass is counted operator by operator: a matrix product C = A B has two, dA = dC B^T and dB = A^T dC,
each with the forward's FLOPs and traffic, so twice the forward in all (once where A needs no
gradient).

Traced operators (`Counted`) belong to one pass each. Their sizes grow in straight lines with the
samples of a micro-batch, in elements of the training precision (an int64 counts as so many of
them), and tensor parallelism leaves them whole.

A software stack is what a training framework adds to this arithmetic. A device works as fast as its
host hands it kernels. An eager framework spends tens of microseconds
of a CPU core per operator (Python, autograd, dispatch), so that small layers wait for the host
whatever the device; compiled steps spend less, and CUDA graphs nearly nothing. Stacks also differ
in which kernels they have (fused attention, fused norms), in the type of the gradients that travel,
and in whether weights are cast before every pass.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Strict

from hetplan.errors import look_up
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
        """The sizes of its products; None for an operator that only moves memory."""
        if self.product is None:
            return None
        return Shape(*(at(line, micro_batch) for line in self.product))

    def moved(self, micro_batch: int = 1, tensor: int = 1) -> float:
        """Elements read and written, in whichever pass it is."""
        return at(self.read, micro_batch) + at(self.written, micro_batch)


@dataclass(frozen=True)
class Matmul:
    """`count` products of m x k by k x n for each sample."""

    name: str
    m: int
    k: int
    n: int
    count: int = 1
    # True: the k x n side is a parameter, read once for all samples, whose rows stack up in m.
    # False: both sides are activations, and `count` grows with the micro-batch (attention).
    weight: bool = True
    split: Split = "none"  # the dimension that tensor parallelism divides
    # Elements per sample that move from and to memory where they are not m k and m n: an implicit
    # convolution reads each pixel once, fused attention keeps the scores on the chip.
    left: int | None = None
    out: int | None = None
    input_gradient: bool = True  # False for a first layer, which has no dA
    # How an attention core is computed. Fused kernels skip the part that a causal mask hides, and
    # compute the scores again in the backward pass (Dao et al. 2022).
    attention: Literal["none", "standard", "fused", "fused-causal"] = "none"
    frozen: bool = False  # whether the weight is not trained, and has no dB

    def shape(self, micro_batch: int = 1, tensor: int = 1) -> Shape:
        """The products of one device of the group; dimensions that do not divide are padded up."""
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
        """The number of products of the forward's size that the backward pass takes."""
        return int(self.input_gradient) + int(not self.frozen)


@dataclass(frozen=True)
class Elementwise:
    """A memory-bound operator."""

    name: str
    forward: int  # elements per sample that the forward pass moves
    backward: int  # elements per sample that the backward pass moves
    # Whether tensor parallelism divides it. Without sequence parallelism, norms, residuals and
    # dropouts on the full hidden size stay whole on every rank (Shoeybi et al. 2019, Section 3).
    split: bool = False
    kind: Kind = "add"  # the operation, on which the reached share of the bandwidth depends

    def shape(self, micro_batch: int = 1, tensor: int = 1) -> None:
        """None: the operator has no products."""

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
    forward, backward = launches(op)
    return shape.flops * forward, shape.flops * backward


@dataclass(frozen=True)
class Saved:
    """A tensor kept from the forward to the backward pass, per sample."""

    name: str
    elements: int
    split: bool  # whether tensor parallelism divides it
    element_bytes: int | None = (
        None  # 1 for dropout masks, 4 for fp32 logits; None: the precision's
    )

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
# The kinds of layers that recomputation applies to; embeddings and heads keep everything.
REPEATED = (*BLOCKS, TRACED)


@dataclass(frozen=True)
class Layer:
    """One layer of the chain. All figures are per sample and for the whole (unsplit) layer."""

    name: str
    kind: str
    params: int  # parameters that this layer owns
    operators: tuple[Operator, ...]
    output: int  # elements sent to the next layer
    saved: tuple[Saved, ...]
    reduces: tuple[Reduce, ...] = ()
    # Parameters owned by an earlier layer (a language-model head that shares the embedding): a
    # stage that holds this layer without the owner keeps a copy of them.
    tied_params: int = 0
    # The part of `params` that is not trained: it has no gradients and no optimizer states.
    frozen: int = 0

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


Attention = Literal["standard", "fused"]


@dataclass(frozen=True)
class Stack:
    """One software stack: how a training framework computes and communicates."""

    name: str
    attention: (
        Attention  # "standard" writes and keeps the scores; "fused" (FlashAttention) does not
    )
    # the host's seconds per described operator and pass; the backward pass of a matrix product
    # counts twice
    host_seconds: float
    # device kernels per described memory-bound operator; each further one moves its bytes again
    kernels: float
    # bytes per parameter of the gradients that replicas exchange; None: the training precision's
    gradient_bytes: int | None
    casts: bool  # whether fp32 weights are cast to the training precision in every pass
    origin: str  # the source of the figures
    flash: int = 2  # the version of FlashAttention
    fp8: bool = False  # whether products with weights are computed on 8-bit numbers
    fp4: bool = False  # whether products with weights are computed on 4-bit numbers
    # whether the collectives of tensor ranks hide behind products (asynchronous tensor parallelism)
    hidden_reduces: bool = False
    # whether tensor ranks divide norms, dropouts and residuals, too (Korthikanti et al. 2022,
    # Section 4.2.2)
    sequence_parallel: bool = False
    # whether tensors that are gathered and scattered are copied, since the sequence is not their
    # first dimension
    gather_copies: bool = False


STACKS = {
    stack.name: stack
    for stack in (
        Stack(
            "eager-2021", "standard", 90e-6, 1.0, None, False,
            "Megatron-LM of 2021 with its fused kernels", 1,
        ),
        Stack("eager", "fused", 40e-6, 2.0, 4, True, "PyTorch eager with autocast"),
        Stack("fused", "fused", 40e-6, 1.0, 4, False, "fused kernels under eager PyTorch"),
        Stack("compiled", "fused", 15e-6, 0.7, 4, False, "torch.compile by block", 3),
        Stack("graphs", "fused", 2e-6, 0.7, 4, False, "CUDA graphs", 3),
        Stack(
            "fp8", "fused", 40e-6, 1.0, 4, False,
            "fused kernels, products with weights in 8 bits (Transformer Engine)", 3, fp8=True,
        ),
        Stack(
            "fp4", "fused", 40e-6, 1.0, 4, False,
            "fused kernels, products with weights in 4 bits (Transformer Engine)", 3, fp4=True,
        ),
    )
}  # fmt: skip
# Shares of the 16-bit peak that fused attention reaches forward and backward on long sequences, by
# version: on devices before bf16, on Ampere and Ada, and on those whose tensor cores outrun
# everything else. Dao 2023, Section 1 (version 1: 30 to 50 % forward, 25 to 35 % backward on A100)
# and Section 4.1 (version 2: up to 73 and 63 %); Shah et al. 2024, abstract (version 2: 35 % on
# H100; version 3: 1.5 to 2.0 times that forward, 1.5 to 1.75 times backward). Version 1 on H100 by
# what version 2 loses there.
FLASH: dict[int, tuple[tuple[float, float], ...]] = {
    1: ((0.3, 0.25), (0.4, 0.3), (0.23, 0.17)),
    2: ((0.3, 0.25), (0.6, 0.5), (0.35, 0.28)),
    3: ((0.3, 0.25), (0.6, 0.5), (0.6, 0.45)),
}
# The ranges that the papers state, around their middle.
FLASH_SPREAD = {"low": 0.8, "seconds": 1.0, "high": 1.25}
OUTRUN = 500e12  # FLOP/s: A100 312, H100 989
HALF_SEQUENCE = 256.0  # keys at which fused attention reaches half of these


def flash_shares(version: int, peak: float, bf16: bool) -> tuple[float, float]:
    """The shares of `peak` FLOP/s that fused attention reaches on long sequences, (forward,
    backward)."""
    before_bf16, ampere, hopper = FLASH[version]
    if not bf16:
        return before_bf16
    return hopper if peak > OUTRUN else ampere


# A collective that hides behind computation takes multiprocessors and memory bandwidth from it: so
# much of what is hidden is lost. Agrawal et al. 2024 ("Optimizing ML Concurrent Computation and
# Communication with GPU DMA Engines") measured 21 to 72 % of the ideal speed-up of hiding; the
# middle.
CONTENTION = 0.5

DEFAULT_STACK = STACKS["fused"]


def load_stack(name: str, *, where: str | None = None) -> Stack:
    """The stack of that name, which stands `where`; raises InputError that suggests the nearest."""
    return look_up("unknown software stack", name, STACKS, where=where)
