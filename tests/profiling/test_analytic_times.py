"""Analytical times: invariants, closed cases and one published measurement that nothing was fitted
to."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from hetplan.errors import InputError
from hetplan.profiling.hardware.cluster import DeviceSpec, catalogue, device, example_cluster
from hetplan.profiling.models.adapters import Adapters
from hetplan.profiling.models.model import load_model
from hetplan.profiling.models.operators import (
    DEFAULT_STACK,
    FURTHER_LAUNCH,
    HALF_SEQUENCE,
    STACKS,
    Elementwise,
    Layer,
    Matmul,
    Precision,
    Shape,
    flash_shares,
    load_stack,
    passes_of,
)
from hetplan.profiling.models.transformer import Experts, transformer_layers
from hetplan.profiling.models.zoo import gpt2, llama, text_model
from hetplan.profiling.profiles.predict import predict
from hetplan.profiling.rates.products import move_seconds, product_seconds
from hetplan.profiling.rates.shipped import Format
from hetplan.profiling.rates.times import (
    Rates,
    all_reduce_seconds,
    kept_bytes,
    launched,
    launched_by,
    layer_time,
    operator_time,
    repeated_share,
)

# whole multiples of 8: products of other sizes are slower than somewhat larger ones
sizes = st.integers(1, 512).map(lambda size: 8 * size)
names = st.sampled_from(
    sorted(n for n, spec in catalogue().items() if {"fp16", "fp32"} <= set(spec.peak_tflops))
)
NEVER_MEASURED = "a device that nobody measured"


def bare(name: str, precision: Precision = "fp16", spec: DeviceSpec | None = None) -> Rates:
    """Rates of the device alone, as if its host cost no time."""
    return Rates(name, spec or device(name), precision, replace(DEFAULT_STACK, host_seconds=0.0))


def matmul_layer(m: int, k: int, n: int) -> Layer:
    return Layer("x", "x", k * n, (Matmul("x", m, k, n),), m * n, ())


@settings(deadline=None)
@given(names, sizes, sizes, sizes, st.integers(1, 64), st.sampled_from("mkn"))
def test_twice_the_work_is_never_faster(
    name: str, m: int, k: int, n: int, batch: int, side: str
) -> None:
    """But for the jumps of measured products by a twentieth."""
    size = {"m": m, "k": k, "n": n}
    wider = size | {side: 2 * size[side]}
    small = layer_time(matmul_layer(**size), bare(name), micro_batch=batch)
    large = layer_time(matmul_layer(**wider), bare(name), micro_batch=batch)
    more = layer_time(matmul_layer(**size), bare(name), micro_batch=2 * batch)
    for other in (large, more):
        assert other.forward >= 0.95 * small.forward and other.backward >= 0.95 * small.backward
    assert small.backward >= small.forward > 0


@settings(deadline=None)
@given(
    names, st.sampled_from(["gpt2", "llama-1.1b", "vit-base", "transgan-amp"]), st.integers(1, 16)
)
def test_faster_devices_and_more_ranks_are_never_slower(name: str, model: str, batch: int) -> None:
    layer, spec = load_model(model).layers[1], device(name)
    double = bare(NEVER_MEASURED, spec=replace_spec(spec, 2.0))
    single = bare(NEVER_MEASURED, spec=spec)
    whole = layer_time(layer, single, micro_batch=batch)
    faster = layer_time(layer, double, micro_batch=batch)
    split = layer_time(layer, single, micro_batch=batch, tensor=4)
    for other in (faster, split):
        assert other.forward <= whole.forward and other.backward <= whole.backward
    # Norms and residuals stay whole, so four ranks are less than four times as fast.
    assert split.forward > whole.forward / 4


def replace_spec(spec: DeviceSpec, factor: float) -> DeviceSpec:
    peaks = {precision: factor * peak for precision, peak in spec.peak_tflops.items()}
    return spec.model_copy(
        update={"peak_tflops": peaks, "memory_gb_per_s": factor * spec.memory_gb_per_s}
    )


def test_a_layer_adds_up_its_operators() -> None:
    """A product has two more of its size in the backward pass; what only moves memory has its
    own bytes there."""
    spec, rates = device("V100-SXM2-16GB"), bare("V100-SXM2-16GB")
    product = product_seconds("V100-SXM2-16GB", spec, "fp16", Shape(1, 512, 1024, 2048)).seconds
    moved = [
        move_seconds("norm", 2.0 * n, "V100-SXM2-16GB", spec).seconds for n in (10**8, 3 * 10**8)
    ]
    norm = Elementwise("norm", 10**8, 3 * 10**8, kind="norm")
    layer = Layer("x", "x", 0, (Matmul("x", 512, 1024, 2048), norm), 1, ())
    t = layer_time(layer, rates)
    assert t.forward == pytest.approx(product + moved[0])
    assert t.backward == pytest.approx(2 * product + moved[1])
    twice = Rates(rates.device, spec, "fp16", replace(rates.stack, kernels=2.0))
    assert layer_time(layer, twice).forward == pytest.approx(product + 2 * moved[0])


def test_a_layer_takes_no_less_than_its_host() -> None:
    layer = Layer("x", "x", 1, (Matmul("a", 1, 1, 1), Elementwise("b", 1, 1)), 1, ())
    name = "H100-SXM5-80GB"
    device_alone = layer_time(layer, bare(name))
    t = layer_time(layer, replace(bare(name), stack=replace(DEFAULT_STACK, host_seconds=1e-3)))
    assert (t.forward_host, t.backward_host) == pytest.approx((2e-3, 3e-3))
    assert t.forward == pytest.approx((device_alone.forward**2 + 4e-6) ** 0.5)
    assert t.backward == pytest.approx((device_alone.backward**2 + 9e-6) ** 0.5)


def test_layers_with_the_same_operators_may_take_different_times() -> None:
    """The casts of a layer's weights are none of its operators."""
    model = load_model("gpt2")
    first, second = model.layers[1:3]
    larger = replace(second, params=10 * second.params)
    model = replace(model, layers=(model.layers[0], first, larger, model.layers[3]))
    assert model.first_alike == (0, 1, 2, 1)
    casting = replace(DEFAULT_STACK, casts=True)
    cluster = example_cluster("p3-4")
    (table,) = predict(model, cluster, micro_batches=[1], tensor_degrees=[1], stack=casting).tables
    _, one, other, same = table.forward_seconds
    assert other > 1.01 * one and same == one


def test_widths_that_are_no_multiple_of_eight_are_slow() -> None:
    """GPT-2's vocabulary of 50257, against 50304."""
    odd, whole = (
        layer_time(matmul_layer(1024, 768, n), bare("A100-SXM4-80GB")) for n in (50257, 50304)
    )
    assert odd.forward > 2 * whole.forward
    both = [layer_time(matmul_layer(1024, 768, n), bare("T4", "fp32")) for n in (50257, 50304)]
    assert both[0].forward == pytest.approx(both[1].forward, rel=0.05)


def test_fused_attention_skips_what_the_mask_hides_and_computes_scores_again() -> None:
    """Dao 2023, Section 4.1: five products backward for two forward, half of each if causal."""
    rates, peak = bare("A100-SXM4-80GB"), 312e12
    full, causal = (
        Layer("x", "x", 0, (Matmul("s", 2048, 64, 2048, 16, weight=False, attention=kind),), 1, ())
        for kind in ("fused", "fused-causal")
    )
    whole, half = layer_time(full, rates), layer_time(causal, rates)
    forward, backward = flash_shares(rates.stack.flash, peak, bf16=True)
    flops = 2 * 16 * 2048 * 64 * 2048
    unfilled = 108 / (16 * 2048 / 128)  # multiprocessors over tiles of 128 queries
    for time, keys, part in ((whole, 2048, 1.0), (half, 1024, 0.5)):
        reached = peak * keys / (keys + HALF_SEQUENCE)
        whole_device = part * flops / reached
        assert time.forward == pytest.approx(whole_device / forward * (1 + unfilled))
        assert time.backward == pytest.approx(2.5 * whole_device / backward * (1 + unfilled / 2))


@pytest.mark.parametrize(
    ("device_type", "heads", "microseconds", "backward_microseconds"),
    [
        # SimuMax (MooreThreads/SimuMax@4dcaae5, configs/system): causal attention inside training,
        # samples of 4096 tokens, heads of 128 numbers
        ("B200", 128, 490, 1469),
        ("B200", 32, 167, 384),
        ("B200", 16, 106, 202),
        ("B200", 8, 98, 116),
        ("A100-PCIE-80GB", 64, 1484, 4383),
        ("A100-PCIE-80GB", 16, 446, 1240),
        ("A100-PCIE-80GB", 8, 280, 724),
        ("A100-PCIE-80GB", 4, 214, 408),
    ],
)
def test_few_heads_do_not_fill_a_device(
    device_type: str, heads: int, microseconds: float, backward_microseconds: float
) -> None:
    """On full devices of these types predictions are 18 % too slow to 7 % too fast. Without idle
    multiprocessors those of 8 heads on a B200 are a third of what was measured."""
    stack = replace(STACKS["fused"], flash=3)
    rates = Rates(device_type, device(device_type), "bf16", stack)
    op = Matmul("scores", 4096, 128, 4096, heads, weight=False, attention="fused-causal")
    forward, backward = rates.attention_seconds(op, op.shape())
    assert 2e6 * forward == pytest.approx(microseconds, rel=0.4)
    assert 2e6 * backward == pytest.approx(backward_microseconds, rel=0.3)


def test_published_layer_time_of_a_22b_model() -> None:
    """Korthikanti et al. 2022, Table 4: one layer of the 22B model, tensor degree 8, micro-batch 4,
    on A100s:
    7.7 ms forward and 19.6 ms in all, without recomputation. Nothing here was fitted to it."""
    model = load_model(
        text_model(
            "22b",
            "",
            2048,
            gpt2(48, 6144, 64, vocabulary=51200, positions=2048, attention="standard"),
        )
    )
    layer = model.layers[1]
    t = layer_time(layer, bare("A100-SXM4-80GB"), micro_batch=4, tensor=8)
    reduce = sum(all_reduce_seconds(4 * r.size("fp16"), 8, 250e9, 6e-6) for r in layer.reduces)
    assert t.forward + reduce / 2 == pytest.approx(7.7e-3, rel=0.1)
    assert t.forward + t.backward + reduce == pytest.approx(19.6e-3, rel=0.1)


def test_all_reduce_closed_cases() -> None:
    assert all_reduce_seconds(1e9, 1, 1e9, 1.0) == 0
    assert all_reduce_seconds(8e9, 4, 1e9) == pytest.approx(2 * 3 / 4 * 8)  # AMP, equation 3
    assert all_reduce_seconds(0, 4, 1e9, 1e-5) == pytest.approx(6e-5)
    assert all_reduce_seconds(8e9, 5, 1e9) > all_reduce_seconds(8e9, 4, 1e9)


@pytest.mark.parametrize(
    ("precision", "micro_batch", "tensor", "message"),
    [
        ("fp16", 0, 1, "micro_batch is not usable"),
        ("fp16", 1, 0, "tensor is not usable"),
        ("bf16", 1, 1, "bf16"),
    ],
)
def test_layer_time_refuses_nonsense(
    precision: Precision, micro_batch: int, tensor: int, message: str
) -> None:
    layer = load_model("gpt2").layers[1]
    with pytest.raises(InputError, match=message):
        layer_time(layer, bare("T4", precision), micro_batch=micro_batch, tensor=tensor)


def test_checkpointing_by_operator_keeps_attention_and_every_second_product() -> None:
    rates, layer = bare("A100-SXM4-80GB"), load_model("llama3-8b", precision="bf16").layers[1]
    rates = replace(rates, precision="bf16")
    times = {op.name: operator_time(op, rates, 1, 1).forward for op in layer.operators}
    products = sum(times[name] for name in ("qkv", "attention-output", "up", "down"))
    moves = sum(times.values()) - products - times["scores"] - times["context"]
    share = repeated_share(layer, "operators", rates, 1, 1)
    assert share == pytest.approx((moves + products / 2) / sum(times.values()))
    # input, attention's output and log-sum-exp; of the products q, k, v, o, gate, up and down those
    # of odd places. Compiled, down is not kept, since nothing reads it again.
    s, h, kv, f = 8192, 4096, 1024, 14336
    beside = 2 * s * h + 2 * s * h + 4 * s * 32
    for compiled, written in ((False, h + kv + f + h), (True, h + kv + f)):
        kept = kept_bytes(layer, "operators", "bf16", 1, 2.0 * s * h, compiled=compiled)
        assert kept == pytest.approx(beside + 2 * s * written)


@pytest.mark.parametrize(("device_type", "number"), [("H100-SXM5-80GB", "fp8"), ("B200", "fp4")])
def test_narrow_products_take_their_own_rate_and_casts(device_type: str, number: Format) -> None:
    """The input is cast in the forward pass, the output's gradient once for both products of the
    backward pass, and the weight only where the stack does it in every pass."""
    plain, layer = bare(device_type, "bf16"), matmul_layer(8192, 4096, 6144)
    formats: dict[str, Any] = {number: True}
    narrow = replace(plain, stack=replace(plain.stack, **formats))
    product = plain.product_seconds(Shape(1, 8192, 4096, 6144), number)
    made = layer_time(layer, narrow)
    inputs, gradients, weights = (
        plain.moved_seconds(2 * elements, "copy")
        for elements in (8192 * 4096, 8192 * 6144, 4096 * 6144)
    )
    assert made.forward == pytest.approx(product + inputs)
    assert made.backward == pytest.approx(2 * product + gradients)
    in_every_pass = replace(narrow, stack=replace(narrow.stack, casts_weights=True))
    assert layer_time(layer, in_every_pass).forward == pytest.approx(made.forward + weights)
    thrice = replace(narrow, stack=replace(narrow.stack, cast_elements=3.0))
    more = plain.moved_seconds(3 * 8192 * 4096, "copy") - inputs
    assert layer_time(layer, thrice).forward == pytest.approx(made.forward + more)


def mixture(experts: int = 8) -> Layer:
    """A block with experts, two of which each of 4096 tokens visits."""
    shape = llama(2, 1024, 8, 512, vocabulary=512, experts=Experts(experts, 2, early=True))
    return transformer_layers(shape, 4096)[1]


def test_heads_routers_and_adapters_stay_in_sixteen_bits() -> None:
    """Stacks of 8 bits replace the linear layers of blocks alone."""
    plain = bare("H100-SXM5-80GB", "bf16")
    narrow = replace(plain, stack=replace(plain.stack, fp8=True))
    shape = llama(2, 1024, 8, 2048, vocabulary=512, experts=Experts(8, 2))
    shape = replace(shape, adapters=Adapters(16, "o"))
    _, block, _, head = transformer_layers(shape, 4096)
    assert layer_time(head, narrow) == layer_time(head, plain)
    ranks = 16
    kept = [
        op
        for op in block.operators
        if isinstance(op, Matmul) and (op.name == "router" or ranks in (op.k, op.n))
    ]
    assert len(kept) == 3  # the router, A and B
    for op in kept:
        assert operator_time(op, narrow, 1, 1) == operator_time(op, plain, 1, 1)
    output = next(op for op in block.operators if op.name == "attention-output")
    assert operator_time(output, narrow, 1, 1) != operator_time(output, plain, 1, 1)


def test_products_of_experts_lose_by_few_rows_and_add_their_gradients() -> None:
    """SimuMax's B200: 1 + 150 / rows forward; the gradient's bytes beside its product."""
    rates = bare("B200", "bf16")
    one = Matmul("x", 1200, 2048, 4096)
    group = replace(one, count=8)
    seconds = rates.product_seconds(group.shape())
    made = operator_time(group, rates, 1, 1)
    added = rates.moved_seconds(2 * 8 * 2048 * 4096 * 4 / 2, "copy")  # fp32, read and written
    assert made.forward == pytest.approx(seconds * (1 + 150 / 1200))
    assert made.backward == pytest.approx(made.forward + seconds + added)
    halved = replace(rates, stack=replace(rates.stack, gradient_bytes=2))
    smaller = rates.moved_seconds(2 * 8 * 2048 * 4096 * 2 / 2, "copy")
    assert operator_time(group, halved, 1, 1).backward == pytest.approx(
        made.backward - added + smaller
    )
    # A single product of many rows hides the bytes; one of few rows takes as long as they do.
    alone = operator_time(one, rates, 1, 1)
    assert alone.backward == pytest.approx(2 * alone.forward)
    few = operator_time(replace(one, m=8), rates, 1, 1)
    of_one = rates.moved_seconds(2 * 2048 * 4096 * 4 / 2, "copy")
    assert few.backward == pytest.approx(few.forward + of_one)
    assert of_one > few.forward


def test_what_the_host_launches_for_experts() -> None:
    """70 kernels of a router, one for each expert's product, and three more in 8 bits."""
    stack, layer = STACKS["fused"], mixture()
    operators = sum(passes_of(op)[0] for op in layer.operators)
    products = 2 * (8 - 1)  # up and down, beyond the first expert's
    eager = launched(layer, stack)[0]
    assert eager == pytest.approx(operators + FURTHER_LAUNCH * (products + 70))
    fused = launched(layer, replace(stack, router_launches=30))[0]
    assert fused == pytest.approx(eager - FURTHER_LAUNCH * 40)
    narrow = launched(layer, replace(stack, fp8=True))[0]
    assert narrow == pytest.approx(eager + FURTHER_LAUNCH * 2 * 8 * 3)
    # graphs of parts leave the experts' two products, their activation, combine and the residual
    partial = launched(layer, replace(stack, graphs="partial"))[0]
    assert partial == pytest.approx(5 + FURTHER_LAUNCH * products)
    assert launched(layer, replace(stack, graphs="full")).tolist() == [0, 0]


def test_the_host_stops_before_experts() -> None:
    """A block is what precedes the stop, which graphs launch, and then what follows: the root of
    squares."""
    device_alone, layer = bare("H100-SXM5-80GB", "bf16"), mixture(64)
    rates = replace(device_alone, stack=replace(STACKS["fused"], graphs="partial"))
    names = [op.name for op in layer.operators]
    stop = names.index("experts-up")
    parts = []
    for operators in (range(stop), range(stop, len(names))):
        device = sum(
            operator_time(layer.operators[n], device_alone, 1, 1).forward for n in operators
        )
        launches = launched_by(layer, operators, rates.stack)[0]
        parts.append(math.hypot(device, 40e-6 * launches))
    made = layer_time(layer, rates)
    assert made.forward == pytest.approx(sum(parts))
    whole = math.hypot(layer_time(layer, device_alone).forward, made.forward_host)
    assert made.forward > 1.01 * whole
    full = replace(rates, stack=replace(rates.stack, graphs="full"))
    assert layer_time(layer, full).forward == pytest.approx(layer_time(layer, device_alone).forward)


def test_attention_in_eight_bits_is_faster_where_the_stack_says_so() -> None:
    plain = bare("H100-SXM5-80GB", "bf16")
    narrow = replace(plain, stack=replace(plain.stack, fp8_attention=True))
    op = Matmul("scores", 4096, 128, 4096, 8, weight=False, attention="fused-causal")
    slow, fast = (operator_time(op, rates, 1, 1) for rates in (plain, narrow))
    assert slow.forward == pytest.approx(1.6 * fast.forward)
    assert slow.backward == pytest.approx(1.6 * fast.backward)


def test_settings_of_a_stack() -> None:
    stack = load_stack("fp8:graphs=partial,one_copy=true,router=deepep")
    assert stack == replace(STACKS["fp8"], graphs="partial", one_copy=True, router_launches=17)
    for text, said in (
        ("fp7", "unknown software stack"), ("fp8:graph=full", "graphs"), ("fp8:graphs=all", "full"),
        ("fp8:one_copy", "true"), ("fp8:host_seconds=0", "unknown setting"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=said):
            load_stack(text, where="--stack")


def test_attention_stays_in_sixteen_bits() -> None:
    plain = bare("H100-SXM5-80GB", "bf16")
    eight = replace(plain, stack=replace(plain.stack, fp8=True))
    scores = Layer("x", "x", 0, (Matmul("s", 512, 64, 512, 16, weight=False),), 1, ())
    assert layer_time(scores, eight) == layer_time(scores, plain)
