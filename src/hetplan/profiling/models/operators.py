"""Layers and their operators, and the software stacks that run them.

Described operators (`Matmul`, `Elementwise`) are those of models that hetplan knows. Their sizes
are elements per sample; they take `micro_batch` samples at once on a tensor-parallel group of
`tensor` devices. A described operator stands for its forward and its backward pass. The backward
pass of a matrix product C = A B has two products, dA = dC B^T and dB = A^T dC, each with the FLOPs
and the traffic of the forward pass; one of them where A needs no gradient.

Traced operators (`Counted`) are those of torch modules and belong to one pass each. Their sizes
grow linearly with the samples of a micro-batch, in elements of the training precision (an int64
counts as several elements). Tensor parallelism does not divide them.

A software stack (`Stack`) describes how a training framework runs the operators. A device works no
faster than its host launches kernels. An eager framework spends tens of microseconds of a CPU core
per operator (Python, autograd, dispatch), so that small layers wait for the host on any device.
Compiled steps spend less, and CUDA graphs nearly nothing. Stacks also differ in their kernels
(fused attention, fused norms), in the type of the gradients that replicas exchange, and in whether
weights are cast before every pass.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Strict

from hetplan.errors import look_up
from hetplan.schema import Name, NonNegative, StrictModel

Precision = Literal["fp16", "bf16", "fp32"]
PRECISIONS: tuple[Precision, ...] = ("fp16", "bf16", "fp32")

ELEMENT_BYTES: dict[Precision, int] = {"fp16": 2, "bf16": 2, "fp32": 4}

Split = Literal["none", "k", "n", "count"]  # the dimension that tensor parallelism divides
Kind = Literal["add", "activation", "norm", "softmax", "copy", "lookup", "loss"]
# (a, b) of a size a + b * samples
Line = Annotated[tuple[NonNegative, NonNegative], Strict(False)]
# the sizes count, m, k and n of matrix products
Product = Annotated[tuple[Line, Line, Line, Line], Strict(False)]


def at(line: Line, samples: int) -> float:
    """The size of a line for a micro-batch of `samples` samples."""
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
        """FLOPs of all products: 2 m k n each."""
        return 2.0 * self.count * self.m * self.k * self.n


class Counted(StrictModel):
    """A traced operator of one pass."""

    name: Name
    backward: bool
    """Whether it is of the backward pass."""
    read: Line
    """Elements."""
    written: Line
    """Elements."""
    product: Product | None = None
    """Its matrix products; None: it only moves memory."""
    ruled: bool = True
    """False: no rule describes the operator, and it counts as the memory that it reads and writes.
    """

    def shape(self, micro_batch: int = 1, tensor: int = 1) -> Shape | None:
        """The sizes of its products; None for an operator that only moves memory."""
        if self.product is None:
            return None
        return Shape(*(at(line, micro_batch) for line in self.product))

    def moved(self, micro_batch: int = 1, tensor: int = 1) -> float:
        """Elements that it reads and writes in its pass."""
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
    # Whether a stack of 8 or 4 bits computes the product in them. Heads, routers and adapters it
    # does not: Transformer Engine replaces the linear layers of blocks, while Megatron Core's
    # output layer, router and adapters are torch's (models/gpt/gpt_model.py, moe/router.py,
    # peft/utils.py of Megatron Bridge), and torchtitan's float8 recipes filter `output`.
    narrow: bool = True

    def shape(self, micro_batch: int = 1, tensor: int = 1) -> Shape:
        """The products of one device of a tensor-parallel group. A divided dimension that is no
        multiple of `tensor` is padded."""
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
        # `left` replaces m k and is divided as k or the count is; `out` replaces m n and is divided
        # as n or the count is
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
    """A memory-bound operator, which has no matrix products."""

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
        """Elements that one device reads and writes in the forward pass."""
        return float(micro_batch * _share(self.forward, tensor if self.split else 1))

    def moved_back(self, micro_batch: int = 1, tensor: int = 1) -> float:
        """Elements that one device reads and writes in the backward pass."""
        return float(micro_batch * _share(self.backward, tensor if self.split else 1))


Operator = Matmul | Elementwise | Counted


def passes_of(op: Operator) -> tuple[int, int]:
    """(forward, backward) number of times that the operator's work is done; of a product, the
    number of products of its size."""
    if isinstance(op, Counted):
        return (0, 1) if op.backward else (1, 0)
    if isinstance(op, Matmul):
        return 1, op.backward_products
    return 1, int(op.backward > 0)


def flops_of(op: Operator) -> tuple[float, float]:
    """(forward, backward) FLOPs of the operator's matrix products for one sample."""
    shape = op.shape()
    if shape is None:
        return 0.0, 0.0
    forward, backward = passes_of(op)
    return shape.flops * forward, shape.flops * backward


@dataclass(frozen=True)
class Saved:
    """A tensor kept from the forward to the backward pass."""

    name: str
    elements: int  # per sample
    split: bool  # whether tensor parallelism divides it
    # 1 for dropout masks, 4 for fp32 logits; None: those of the training precision
    element_bytes: int | None = None

    def size(self, precision: Precision) -> float:
        """Bytes per sample of the whole tensor."""
        return float(self.elements * (self.element_bytes or ELEMENT_BYTES[precision]))


@dataclass(frozen=True)
class Reduce:
    """An all-reduce of tensor-parallel ranks in the forward or in the backward pass."""

    elements: int  # per sample
    backward: bool  # whether it is of the backward pass
    element_bytes: int | None = None  # None: those of the training precision

    def size(self, precision: Precision) -> float:
        """Bytes per sample."""
        return float(self.elements * (self.element_bytes or ELEMENT_BYTES[precision]))


# Kinds of layers.
BLOCKS = ("block", "moe-block")  # of described transformers
TRACED = "traced"  # a layer between the first and the last of a traced module
# The kinds of layers that recomputation applies to; embeddings and heads keep everything.
REPEATED = (*BLOCKS, TRACED)  # hence the ends of a traced module have a kind of their own


@dataclass(frozen=True)
class Layer:
    """One layer of a model's chain. All sizes are per sample and of the whole (unsplit) layer."""

    name: str
    kind: str  # such as "embedding", "head", "convolution", one of `BLOCKS` or `TRACED`
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
    frozen_tied: int = 0  # the same part of `tied_params`
    # The part of `frozen` that is held in fewer bits than those of the training precision, its
    # bytes with their scales, and the most of these weights that one product casts.
    quantised: int = 0
    quantised_bytes: int = 0
    cast: int = 0

    @property
    def trained(self) -> int:
        """Parameters that the layer owns and that are trained."""
        return self.params - self.frozen

    def frozen_bytes(self, precision: Precision) -> float:
        """Bytes in which the layer holds its frozen parameters."""
        plain = (self.frozen - self.quantised) * ELEMENT_BYTES[precision]
        return float(plain + self.quantised_bytes)

    def forward_flops(self) -> float:
        """FLOPs of the matrix products of the forward pass."""
        return sum(flops_of(op)[0] for op in self.operators)

    def backward_flops(self) -> float:
        """FLOPs of the matrix products of the backward pass."""
        return sum(flops_of(op)[1] for op in self.operators)

    def saved_bytes(self, precision: Precision) -> float:
        """Bytes kept for the backward pass without recomputation."""
        return sum(tensor.size(precision) for tensor in self.saved)

    def replicated_saved_bytes(self, precision: Precision) -> float:
        """The part of `saved_bytes` that every tensor rank keeps whole without sequence
        parallelism."""
        return sum(tensor.size(precision) for tensor in self.saved if not tensor.split)

    def tensor_bytes(self, precision: Precision) -> float:
        """Bytes all-reduced inside a tensor-parallel group, forward and backward together."""
        return sum(reduce.size(precision) for reduce in self.reduces)


def _share(size: int, parts: int) -> int:
    """The size of the largest of `parts` parts, which are as equal as whole numbers allow."""
    return -(-size // parts)


Attention = Literal["standard", "fused"]


@dataclass(frozen=True)
class Stack:
    """One software stack: how a training framework computes and communicates."""

    name: str
    # "standard" writes and keeps the scores; "fused" (FlashAttention) does not
    attention: Attention
    # the host's seconds per operator (`launches`), with what Python and autograd do for it
    host_seconds: float
    # device kernels per described memory-bound operator; each further one moves its bytes again;
    # below 1, operators are fused with their neighbours
    kernels: float
    # bytes per parameter of the gradients that replicas exchange; None: the training precision's
    gradient_bytes: int | None
    casts: bool  # whether fp32 weights are cast to the training precision in every pass
    origin: str  # the source of the figures
    flash: int = 2  # the version of FlashAttention
    fp8: bool = False  # whether products with weights are computed on 8-bit numbers
    fp4: bool = False  # whether products with weights are computed on 4-bit numbers
    # The 16-bit elements that a cast to 8 or 4 bits moves for each element of an operand, which is
    # read in 16 bits, and written in 8 bits twice, as it is and transposed (NVIDIA Transformer
    # Engine, "FP8 primer"). Scaling by the tensor's present maximum reads it once more, before.
    cast_elements: float = 2.0
    # Whether weights are cast in every forward pass (torchao), and not once per step (Transformer
    # Engine, `is_first_microbatch`). The latter takes a tenth of what the optimizer moves, and is
    # left out.
    casts_weights: bool = False
    # whether the collectives of tensor ranks hide behind products (asynchronous tensor parallelism)
    hidden_reduces: bool = False
    # whether tensor ranks divide norms, dropouts and residuals, too (Korthikanti et al. 2022,
    # Section 4.2.2)
    sequence_parallel: bool = False
    # whether tensors that are gathered and scattered are copied, since the sequence is not their
    # first dimension
    gather_copies: bool = False
    # whether tokens travel to experts once for each node that they visit (DeepEP, HybridEP), and
    # not once for each expert
    one_copy: bool = False
    # The launches that CUDA graphs take from the host. `partial`: those of attention, of other
    # mixers, of the router and of the dispatch; `full`: all, so that no block waits for the host.
    graphs: Literal["none", "partial", "full"] = "none"
    # kernels of a router's forward pass besides its product, and of its backward pass
    router_launches: int = 70
    # whether the exchange with experts hides behind the computation of another micro-batch
    hidden_experts: bool = False
    # whether fused attention computes its products on 8-bit numbers
    fp8_attention: bool = False

    @property
    def narrow(self) -> Literal["fp8", "fp4"] | None:
        """The format of products with weights where it is narrower than the training precision."""
        if self.fp4:
            return "fp4"
        return "fp8" if self.fp8 else None


STACKS = {
    stack.name: stack
    for stack in (
        Stack(
            name="eager-2021",
            attention="standard",
            host_seconds=90e-6,
            kernels=1.0,
            gradient_bytes=None,
            casts=False,
            origin="Megatron-LM of 2021 with its fused kernels",
            flash=1,
        ),
        Stack(
            name="eager",
            attention="fused",
            host_seconds=40e-6,
            kernels=2.0,
            gradient_bytes=4,
            casts=True,
            origin="PyTorch eager with autocast",
        ),
        Stack(
            name="fused",
            attention="fused",
            host_seconds=40e-6,
            kernels=1.0,
            gradient_bytes=4,
            casts=False,
            origin="fused kernels under eager PyTorch",
        ),
        Stack(
            name="compiled",
            attention="fused",
            host_seconds=15e-6,
            kernels=0.7,
            gradient_bytes=4,
            casts=False,
            origin="torch.compile by block",
            flash=3,
        ),
        Stack(
            name="graphs",
            attention="fused",
            host_seconds=2e-6,
            kernels=0.7,
            gradient_bytes=4,
            casts=False,
            origin="CUDA graphs",
            flash=3,
        ),
        Stack(
            name="fp8",
            attention="fused",
            host_seconds=40e-6,
            kernels=1.0,
            gradient_bytes=4,
            casts=False,
            origin="fused kernels, products with weights in 8 bits (Transformer Engine)",
            flash=3,
            fp8=True,
        ),
        Stack(
            name="fp4",
            attention="fused",
            host_seconds=40e-6,
            kernels=1.0,
            gradient_bytes=4,
            casts=False,
            origin="fused kernels, products with weights in 4 bits (Transformer Engine)",
            flash=3,
            fp4=True,
        ),
    )
}
# The host's seconds for a further kernel of an operator, over those of the operator. In NVIDIA's
# runs of DeepSeek-V3 on GB200 (Megatron-LM, docs/discussions) a fused router spares some 40 kernels
# in either pass of a block, and 0.6 ms; scales written in place spare 12 kernels for each of eight
# experts, and 1 ms: 7.5 to 10 of 40 us.
FURTHER_LAUNCH = 0.22
# Further kernels of a product in 8 or 4 bits: a cast, and the scales of both operands put in order
# (Transformer Engine, `swizzle`). Products of single weights do it in their operator's time.
CAST_KERNELS = 3
# Kernels of a router by what the stack fuses: none of top-k, softmax, maps and losses; all that
# Megatron Core can (`moe_router_fusion`); and with DeepEP, which counts tokens itself (NVIDIA,
# Megatron-LM docs/discussions, "Optimizing DeepSeek-V3 training on GB200").
ROUTER_LAUNCHES = {"eager": 70, "fused": 30, "deepep": 17}
# A group of products, as of the experts of a block, takes 1 + `GROUPED_ROWS` / m times as long as
# one product of all rows, where each has m rows. SimuMax's B200 and A100, forward and of inputs'
# gradients: 1.5 to 2 times with 128 rows, 1.15 with 1024.
GROUPED_ROWS = 150.0
# Version of FlashAttention -> (forward, backward) shares of the 16-bit peak that it reaches on long
# sequences: on devices without bf16, on Ampere and Ada, and on devices with a peak above `OUTRUN`.
# Dao 2023, Section 1 (version 1: 30 to 50 % forward, 25 to 35 % backward on A100) and Section 4.1
# (version 2: up to 73 and 63 %); Shah et al. 2024, abstract (version 2: 35 % on H100; version 3:
# 1.5 to 2.0 times that forward, 1.5 to 1.75 times backward). Version 1 is assumed to lose the same
# share on H100 as version 2.
FLASH: dict[int, tuple[tuple[float, float], ...]] = {
    1: ((0.3, 0.25), (0.4, 0.3), (0.23, 0.17)),
    2: ((0.3, 0.25), (0.6, 0.5), (0.35, 0.28)),
    3: ((0.3, 0.25), (0.6, 0.5), (0.6, 0.45)),
}
# Factors on the seconds of fused attention, from the ranges that the papers state: the ends of
# their interval, and the middle. `Rates.edge` has the same keys.
FLASH_SPREAD = {"low": 0.8, "seconds": 1.0, "high": 1.25}
# FLOP/s above which tensor cores outrun the other units of a device: an A100 has 312e12, an H100
# 989e12.
OUTRUN = 500e12
# How much faster fused attention is in 8 than in 16 bits: 1.2 PFLOP/s over 740 TFLOP/s on H100
# (Shah et al. 2024, abstract).
FLASH_8_BITS = 1.6
HALF_SEQUENCE = 256.0  # keys at which fused attention reaches half of the shares
# Fused attention gives tiles of `QUERY_TILE` queries of a head to multiprocessors. A kernel takes
# as long as if it had further tiles for each multiprocessor, as many as these figures say: (forward
# on Blackwell, forward elsewhere, backward). Predictions of aiconfigurator's A100, H100 and B200
# (forward) and of SimuMax's B200 and A100 (backward) err least with these figures.
QUERY_TILE = 128
FURTHER_TILES = (2.0, 1.0, 0.5)


def flash_shares(version: int, peak: float, bf16: bool) -> tuple[float, float]:
    """(forward, backward) shares of `peak` FLOP/s that fused attention reaches on long sequences.
    bf16: whether the device has units for bf16."""
    before_bf16, ampere, hopper = FLASH[version]
    if not bf16:
        return before_bf16
    return hopper if peak > OUTRUN else ampere


# The share of a collective's hidden seconds that is lost, because the collective takes
# multiprocessors and memory bandwidth from the computation behind which it hides. The middle of the
# 21 to 72 % of the ideal speed-up that Agrawal et al. 2024 ("Optimizing ML Concurrent Computation
# and Communication with GPU DMA Engines") measured.
CONTENTION = 0.5

DEFAULT_STACK = STACKS["fused"]


# Settings of a stack that a user may state beside its name -> the values that they may have.
SETTINGS: dict[str, dict[str, Any]] = {
    "graphs": {"none": "none", "partial": "partial", "full": "full"},
    "router": ROUTER_LAUNCHES,
    **{
        name: {"true": True, "false": False}
        for name in ("one_copy", "hidden_experts", "hidden_reduces", "fp8_attention")
    },
}
FIELDS_OF_SETTINGS = {"router": "router_launches"}  # where the names differ


def load_stack(text: str, *, where: str | None = None) -> Stack:
    """The stack of a text `NAME` or `NAME:SETTING=VALUE[,SETTING=VALUE…]`. where: the place of the
    text, for messages. Raises InputError that suggests the nearest name."""
    name, _, rest = text.partition(":")
    stack = look_up("unknown software stack", name, STACKS, where=where)
    changes: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        setting, _, value = part.partition("=")
        values = look_up("unknown setting of a stack", setting, SETTINGS, where=where)
        field = FIELDS_OF_SETTINGS.get(setting, setting)
        changes[field] = look_up(f"unknown value of {setting}", value, values, where=where)
    return replace(stack, **changes)
