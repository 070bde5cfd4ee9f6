"""Predicted seconds of operators and layers, and the bytes and seconds of recomputation.

An operator takes the seconds of the shipped rates of its kind and size (`profiling/rates`). A layer
takes the sum over its operators, combined with the seconds in which its host launches kernels
(`together`). Nothing here is fitted to any system's totals.

The mode of recomputation says which tensors a layer keeps for its backward pass, and which it
computes again:

- none: all tensors are kept;
- selective: the attention core (scores, softmax, context) is computed again (Korthikanti et al.
  2022, Section 5);
- operators: the outputs of fused attention and of every second product, from the first on, are
  kept, and all others are computed again (torchtitan's selective checkpointing per operator,
  torchtitan/models/llama3/infra/parallelize.py, `_apply_ac_to_transformer_block`);
- full: only the layer's input is kept, and its forward pass is repeated (Chen et al. 2016).
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from hetplan.errors import require
from hetplan.profiling.hardware.cluster import DeviceSpec, Floats
from hetplan.profiling.models.adapters import CAST_LAUNCHES
from hetplan.profiling.models.operators import (
    BLOCKS,
    CAST_KERNELS,
    DEFAULT_STACK,
    ELEMENT_BYTES,
    FLASH_8_BITS,
    FLASH_SPREAD,
    FURTHER_LAUNCH,
    FURTHER_TILES,
    GROUPED_ROWS,
    HALF_SEQUENCE,
    QUERY_TILE,
    REPEATED,
    Counted,
    Elementwise,
    Kind,
    Layer,
    Matmul,
    Operator,
    Precision,
    Shape,
    Stack,
    flash_shares,
    passes_of,
)
from hetplan.profiling.rates.efficiency import Learned
from hetplan.profiling.rates.products import (
    MoveEstimates,
    MoveKind,
    move_estimates,
    product_seconds,
)
from hetplan.profiling.rates.shipped import Estimate, Format
from hetplan.profiling.rates.tiles import PHYSICS, architecture

# The share of its speed that a 16-bit product keeps where k or n is no multiple of 8, by the
# largest power of two that divides both (NVIDIA, "Matrix Multiplication Background": operands of
# whole 16 bytes). Asynchronous copies take 4, 8 or 16 bytes (CUDA, cp.async), so that only products
# of odd sizes cannot use them; the share of odd sizes was taken from the heads of vTrain's single
# GPUs (50257 columns).
MISALIGNED = {1: 0.35, 2: 0.7, 4: 0.85}
# Kind of a described operator -> the measured kind whose rates it takes.
MOVES: dict[Kind, MoveKind] = {
    "add": "binary",
    "activation": "pointwise",
    "copy": "pointwise",
    "lookup": "pointwise",
    "loss": "softmax",
    "norm": "norm",
    "softmax": "softmax",
}


# The first product of a network, and of a mixture of experts.
NETWORK_PRODUCTS = ("up", "experts-up")


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer or operator for one micro-batch, on one device of a tensor group,
    without all-reduces."""

    forward: float
    backward: float
    # the seconds of the host's launches, which are part of the seconds above; see `together`
    forward_host: float = 0.0
    backward_host: float = 0.0


def layer_time(
    layer: Layer,
    rates: "Rates",
    *,
    micro_batch: int = 1,
    tensor: int = 1,
    learned: Learned | None = None,
) -> LayerTime:
    """Seconds of `layer` for `micro_batch` samples on each of `tensor` devices that divide it.

    Matrix products shrink with `tensor`; norms, residuals and dropouts shrink only where the stack
    is sequence parallel. All-reduces are not included, the host's launches are (`together`). Raises
    InputError where `micro_batch` or `tensor` is below 1.

    rates: rates of the devices. learned: factors from operators measured on such a device; None:
    none.
    """
    for name, value in (("micro_batch", micro_batch), ("tensor", tensor)):
        require(value >= 1, f"{name} is not usable", got=value, expected="at least 1")
    times = [operator_time(op, rates, micro_batch, tensor) for op in layer.operators]
    # The host's seconds are not corrected: `operator_time` leaves them out, they are added below.
    if learned is not None:
        factors = [learned.factor(op, micro_batch, tensor) for op in layer.operators]
        times = [
            LayerTime(time.forward * factor, time.backward * factor)
            for time, factor in zip(times, factors, strict=True)
        ]
    # [forward, backward] each; a layer may have no operators (a dropout of 0)
    device = np.zeros(2)  # seconds of the kernels
    launches = launched(layer, rates.stack)
    for seconds in times:
        device += (seconds.forward, seconds.backward)
    if rates.stack.casts and rates.precision != "fp32":
        # 3 elements of 16 bits for each weight, in either pass: fp32 is read, 16 bits are written
        weights = (layer.trained + layer.tied_params - layer.frozen_tied) / tensor
        device += rates.moved_seconds(3 * weights, "copy")
    if layer.quantised:
        device += rates.moved_seconds(cast_elements(layer, rates.precision) / tensor, "copy")
        products = [op for op in layer.operators if isinstance(op, Matmul) and op.frozen]
        launches += CAST_LAUNCHES * len(products)
    if tensor > 1:
        for reduce in layer.reduces:
            launches[int(reduce.backward)] += 1
            # Two copies, read and written each. A single sample is in order as it is gathered.
            if rates.stack.gather_copies and micro_batch > 1:
                copied = 4 * micro_batch * reduce.elements
                device[int(reduce.backward)] += rates.moved_seconds(copied, "copy")
    host = launches * rates.stack.host_seconds
    forward, backward = together(device, host).tolist()
    stop = stop_of(layer, rates.stack)
    if stop is not None:
        behind = sum(seconds.forward for seconds in times[stop:])
        host_behind = launched_by(layer, range(stop, len(times)), rates.stack)[0]
        host_behind *= rates.stack.host_seconds
        before = together(device[:1] - behind, host[:1] - host_behind)
        forward = float(before[0] + math.hypot(behind, host_behind))
    return LayerTime(forward, backward, *host.tolist())


def stop_of(layer: Layer, stack: Stack) -> int | None:
    """The number of the first operator before which the host waits for the device in the forward
    pass, to read how many tokens each expert gets; None where it never does.

    Full CUDA graphs have sizes that no host reads. The backward pass knows the sizes already.
    Source: Megatron Core, moe/token_dispatcher.py (`tokens_per_expert` on the host).
    """
    if layer.kind != "moe-block" or stack.graphs == "full":
        return None
    names = [op.name for op in layer.operators]
    return names.index("experts-up")


def launched(layer: Layer, stack: Stack) -> Floats:
    """[2] what the host launches in the forward and the backward pass of a layer, with the kernels
    of a router and without what CUDA graphs take from the host; in operators, of which a further
    kernel is a part."""
    launches = launched_by(layer, range(len(layer.operators)), stack)
    if layer.kind == "moe-block" and stack.graphs == "none":
        launches += FURTHER_LAUNCH * stack.router_launches
    return launches


def launched_by(layer: Layer, operators: range, stack: Stack) -> Floats:
    """[2] what the host launches for some operators of a layer, given by their numbers, in the
    forward and the backward pass; in operators, of which a further kernel is a part.

    A group of products has a kernel for each weight. A product of it in 8 or 4 bits has further
    ones for its operands. CUDA graphs of parts of a block hold all before the
    network's products, the norm before them included.
    """
    launches = np.zeros(2)
    if stack.graphs == "full" and layer.kind in BLOCKS:
        return launches
    first_launched = 0
    if stack.graphs == "partial" and layer.kind in BLOCKS:
        network = [n for n, op in enumerate(layer.operators) if op.name in NETWORK_PRODUCTS]
        first_launched = min(network, default=len(layer.operators))
    for number in operators:
        op = layer.operators[number]
        if number < first_launched:
            continue
        passes = np.array(passes_of(op))
        launches += passes
        if isinstance(op, Matmul) and op.weight:
            launches += passes * (op.count - 1) * FURTHER_LAUNCH
            if op.count > 1 and op.narrow and stack.narrow is not None:
                launches += passes * op.count * CAST_KERNELS * FURTHER_LAUNCH
    return launches


def cast_elements(layer: Layer, precision: Precision) -> float:
    """Numbers of the precision that a pass moves when it casts the frozen weights of a layer from 8
    or 4 bits: every weight is read in these bits, and written in the precision's.

    Both passes cast, because neither keeps the weights that it has cast. A copy of these bytes
    takes as long."""
    width = ELEMENT_BYTES[precision]
    return layer.quantised_bytes / width + layer.quantised


def together(device: Floats, host: Floats) -> Floats:
    """Seconds of passes whose kernels take `device` seconds and whose launches take `host` seconds.

    The host runs ahead of the device where it is faster, and the device waits where it is not;
    where both take equally long, delays of either cost time. The root of the sum of squares has all
    three properties. It was chosen over the maximum on layers of vTrain's single nodes.
    """
    return np.asarray(np.hypot(device, host))


@dataclass(frozen=True)
class Rates:
    """The seconds of operators on one device type in one precision under one software stack."""

    device: str  # the catalogue's name, by which measurements are looked up
    spec: DeviceSpec
    precision: Precision
    stack: Stack = DEFAULT_STACK
    # The number of every `Estimate` that is used: its seconds, or an end of the interval in which
    # eight of ten measurements lay.
    edge: Literal["low", "seconds", "high"] = "seconds"

    @cached_property
    def _moves(self) -> dict[Kind, MoveEstimates]:
        """The estimates by kind of operator that `moved_seconds` has needed so far."""
        return {}

    @cached_property
    def flops_per_s(self) -> float:
        """FLOP/s of a large matrix product; raises InputError where the device lacks the
        precision."""
        large = Shape(1, 4096, 4096, 4096)
        return large.flops / self.product_seconds(large)

    def moved_seconds(self, elements: float, kind: Kind) -> float:
        """Seconds of moving `elements` numbers of the precision."""
        moved = elements * ELEMENT_BYTES[self.precision]
        if kind not in self._moves:
            self._moves[kind] = move_estimates(MOVES[kind], self.device, self.spec)
        return self.end_of(self._moves[kind].estimate(moved))

    def end_of(self, estimate: Estimate) -> float:
        """The number of an estimate that `edge` names."""
        return float(getattr(estimate, self.edge))

    def product_seconds(self, shape: Shape, number: Format | None = None) -> float:
        """Seconds of matrix products in sustained use; misaligned sizes slow 16-bit products, and
        narrower ones, down. number: format of the operands; None: that of the precision."""
        share = 1.0
        if self.precision != "fp32":
            alignment = math.gcd(int(shape.k), int(shape.n), 8)
            share = MISALIGNED.get(alignment, 1.0)
        estimate = product_seconds(self.device, self.spec, number or self.precision, shape)
        return self.end_of(estimate) / share

    def attention_seconds(self, op: Matmul, shape: Shape) -> tuple[float, float]:
        """(forward, backward) seconds of one of the two products of fused attention.

        The backward pass has five products for the forward pass's two. A causal mask halves the
        products (Dao 2023, Section 4.1), and the number of keys that a query sees on average.

        Few heads leave multiprocessors idle. With T tiles of queries on M multiprocessors, a kernel
        takes 1 + `FURTHER_TILES` M / T times as long as a filled one.
        """
        seen = 0.5 if op.attention == "fused-causal" else 1.0
        keys = seen * max(shape.k, shape.n)  # one of the two is the head's width, the other keys
        flops = seen * shape.flops
        peak = self.spec.peak_flops(self.precision)
        forward_share, backward_share = flash_shares(
            self.stack.flash, peak, "bf16" in self.spec.peak_tflops
        )
        reached = peak * keys / (keys + HALF_SEQUENCE) / FLASH_SPREAD[self.edge]
        if self.stack.fp8_attention:
            reached *= FLASH_8_BITS
        forward = flops / (reached * forward_share)
        backward = 2.5 * flops / (reached * backward_share)
        multiprocessors = self.spec.multiprocessors or PHYSICS.multiprocessors
        tiles = shape.count * max(shape.m / QUERY_TILE, 1.0)
        on_blackwell, elsewhere, in_backward = FURTHER_TILES
        in_forward = on_blackwell if architecture(self.spec) == "blackwell" else elsewhere
        return (
            forward * (1 + in_forward * multiprocessors / tiles),
            backward * (1 + in_backward * multiprocessors / tiles),
        )


def operator_time(op: Operator, rates: Rates, micro_batch: int, tensor: int) -> LayerTime:
    """Seconds of one operator for a micro-batch on one of `tensor` devices, without the host's."""
    # A lookup is not divided by tokens: each rank looks up all tokens in its part of the table.
    if rates.stack.sequence_parallel and isinstance(op, Elementwise) and op.kind != "lookup":
        op = replace(op, split=True)
    if isinstance(op, Matmul) and op.attention.startswith("fused"):
        return LayerTime(*rates.attention_seconds(op, op.shape(micro_batch, tensor)))
    shape = op.shape(micro_batch, tensor)
    if isinstance(op, Matmul) and op.weight:
        return weight_product_time(op, op.shape(micro_batch, tensor), rates)
    if shape is not None and shape.count:
        seconds = rates.product_seconds(shape)
    else:
        # a traced operator has no kind; its tensors are moved as those of an addition
        kind = op.kind if isinstance(op, Elementwise) else "add"
        seconds = rates.moved_seconds(op.moved(micro_batch, tensor), kind)
    if isinstance(op, Matmul):
        return LayerTime(seconds, seconds * op.backward_products)
    if isinstance(op, Counted):
        return LayerTime(0.0, seconds) if op.backward else LayerTime(seconds, 0.0)
    seconds_back = rates.moved_seconds(op.moved_back(micro_batch, tensor), op.kind)
    return LayerTime(rates.stack.kernels * seconds, rates.stack.kernels * seconds_back)


def weight_product_time(op: Matmul, shape: Shape, rates: Rates) -> LayerTime:
    """Seconds of a product with a weight, whose gradient is added to that of earlier micro-batches.

    The gradient is read and written (Megatron Core, `main_grad`; Transformer Engine,
    `fuse_wgrad_accumulation`). A product of few rows takes as long as these bytes. In a group of
    products, as of experts, they take their time besides (SimuMax's B200).

    In 8 or 4 bits operands are cast: the input, and the weight where the stack casts it in every
    pass, in the forward pass; the output's gradient in the backward pass.
    """
    narrow = rates.stack.narrow if op.narrow else None
    seconds = rates.product_seconds(shape, narrow)
    grouped = seconds
    if shape.count > 1:
        grouped *= 1 + GROUPED_ROWS / shape.m
    weights = shape.count * shape.k * shape.n
    forward, backward = grouped, 0.0
    if op.input_gradient:
        backward += grouped
    if not op.frozen:
        element_bytes = ELEMENT_BYTES[rates.precision]
        elements = 2 * weights * (rates.stack.gradient_bytes or element_bytes) / element_bytes
        added = rates.moved_seconds(elements, "copy")
        backward += seconds + added if shape.count > 1 else max(seconds, added)
    if narrow is not None:
        forward += cast_seconds(shape.count * shape.m * shape.k, rates)
        if rates.stack.casts_weights:
            forward += cast_seconds(weights, rates)
        if op.backward_products:
            backward += cast_seconds(shape.count * shape.m * shape.n, rates)
    return LayerTime(forward, backward)


def cast_seconds(elements: float, rates: Rates) -> float:
    """Seconds of casting `elements` numbers of an operand to 8 or 4 bits."""
    return rates.moved_seconds(rates.stack.cast_elements * elements, "copy")


def all_reduce_seconds(size: float, ranks: int, bandwidth: float, latency: float = 0.0) -> float:
    """Seconds of a ring all-reduce without overlap: 2 (n - 1) (size / (n b) + a).

    size: bytes per rank. ranks: n >= 1 (1 gives 0). bandwidth: b, bytes/s of the ring's slowest
    link. latency: a, seconds per message. Source: Patarasuk and Yuan 2009; AMP (NeurIPS 2022),
    equation 3, which has no latency.
    """
    return 2.0 * (ranks - 1) * (size / (ranks * bandwidth) + latency)


def weight_share(layer: Layer, rates: Rates, micro_batch: int, tensor: int) -> float:
    """The share of the layer's backward seconds that the gradients of its weights take; 0 where the
    backward pass takes no time, and in frozen layers.

    Of the products with a trained weight it is one of two, or all where the input has no gradient;
    of lookups it is all. A traced layer does not say of which operand a product is the gradient;
    half of its products count. Source: Qi et al. 2023 (Zero Bubble), Table 1.
    """
    if layer.frozen and layer.frozen >= layer.params + layer.tied_params:
        return 0.0
    backward = weights = 0.0
    for op in layer.operators:
        seconds = operator_time(op, rates, micro_batch, tensor).backward
        backward += seconds
        weights += seconds * weight_part(op)
    return weights / backward if backward > 0 else 0.0


def weight_part(op: Operator) -> float:
    """The part of an operator's backward pass that computes the gradient of a weight."""
    if isinstance(op, Matmul):
        trained = op.weight and not op.frozen
        return 1 / op.backward_products if trained else 0.0
    if isinstance(op, Counted):
        return 0.5 if op.shape() is not None else 0.0
    return 1.0 if op.kind == "lookup" else 0.0


def product_bytes(layer: Layer, precision: Precision) -> tuple[float, float]:
    """Bytes per sample of the outputs of the layer's products with trained weights: of the whole
    layer, and of those among them that every tensor rank has whole."""
    whole = replicated = 0.0
    for op in layer.operators:
        if isinstance(op, Matmul) and op.weight and not op.frozen:
            size = float(op.m * op.n * op.count) * ELEMENT_BYTES[precision]
            whole += size
            replicated += size if op.split == "k" else 0.0
    return whole, replicated


Recomputation = Literal["none", "selective", "operators", "full"]

CORE = ("scores", "softmax", "context")  # operators of attention's core
# Saved tensors of attention's core, and the outputs of fused attention.
CORE_SAVED = ("softmax output", "scores after dropout", "scores dropout mask")
FUSED_SAVED = ("attention output", "log-sum-exp")


def repeated_share(
    layer: Layer, mode: Recomputation, rates: Rates, micro_batch: int, tensor: int
) -> float:
    """The share of the layer's forward seconds that its backward pass repeats under a mode of
    recomputation; 0 where the forward pass takes no time."""
    if mode == "none" or layer.kind not in REPEATED:
        return 0.0
    if mode == "full":
        return 1.0
    forward = repeated = 0.0
    for op in layer.operators:
        seconds = operator_time(op, rates, micro_batch, tensor).forward
        forward += seconds
        repeated += seconds * repeated_part(op, mode)
    return repeated / forward if forward > 0 else 0.0


def repeated_part(op: Operator, mode: Recomputation) -> float:
    """The part of an operator that is computed again under `selective` or `operators`."""
    if mode == "selective":
        return float(op.name in CORE)
    if isinstance(op, Matmul) and op.weight:
        return 0.5  # the outputs of every second product are kept
    if isinstance(op, Matmul) and op.attention.startswith("fused"):
        return 0.0
    return 1.0


def products_of(op: Matmul, layer: Layer) -> list[float]:
    """Numbers in the outputs of the products that torch computes for one described product.

    Queries, keys and values have a product each, as have the gate and the values of a gated
    network, whose sizes the kept tensors say.
    """
    sizes = {saved.name: float(saved.elements) for saved in layer.saved}
    if op.name == "qkv" and "queries" in sizes and "keys and values" in sizes:
        keys = sizes["keys and values"] / 2
        return [sizes["queries"], keys, keys]
    written = float(op.m * op.n * op.count)
    if op.name == "up" and sizes.get("down input"):
        parts = round(written / sizes["down input"])
        return [written / parts] * parts
    return [written]


def kept_outputs(layer: Layer, tensor: int, *, compiled: bool) -> float:
    """Numbers per sample of the outputs of every second product of a layer, from the first on, on
    each of `tensor` devices.

    A compiled layer does not keep the output of its last product: no backward pass reads it, since
    the layer only adds it to its input. An eager layer keeps whatever its policy names.
    """
    outputs = []
    for op in layer.operators:
        if isinstance(op, Matmul) and op.weight:
            ranks = tensor if op.split == "n" else 1
            outputs += [written / ranks for written in products_of(op, layer)]
    last = len(outputs) - 1
    return sum(
        written
        for number, written in enumerate(outputs)
        if number % 2 == 0 and not (compiled and number == last)
    )


def kept_bytes(
    layer: Layer,
    mode: Recomputation,
    precision: Precision,
    tensor: int,
    input_bytes: float,
    *,
    compiled: bool = False,
) -> float:
    """Bytes per sample that a layer keeps for its backward pass under a mode of recomputation, on
    each device of a tensor group.

    input_bytes: bytes per sample of the layer's input. compiled: whether a compiler decides what
    `operators` keeps.
    """
    if mode == "full" and layer.kind in REPEATED:
        return input_bytes
    if mode == "operators" and layer.kind in REPEATED:
        outputs = kept_outputs(layer, tensor, compiled=compiled)
        core = sum(t.size(precision) for t in layer.saved if t.name in FUSED_SAVED) / tensor
        return input_bytes + core + outputs * ELEMENT_BYTES[precision]
    dropped = CORE_SAVED if mode == "selective" else ()
    kept = [saved for saved in layer.saved if saved.name not in dropped]
    return sum(saved.size(precision) / (tensor if saved.split else 1) for saved in kept)
