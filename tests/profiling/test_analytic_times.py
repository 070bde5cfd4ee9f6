"""Analytical times: invariants, closed cases and one published measurement that nothing was fitted
to."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.errors import InputError
from hetplan.profiling.catalogue import DeviceSpec, catalogue, device
from hetplan.profiling.models import load_model
from hetplan.profiling.operators import Elementwise, Layer, Matmul, Precision
from hetplan.profiling.times import (
    DEFAULT_EFFICIENCY,
    Efficiency,
    all_reduce_seconds,
    layer_time,
)
from hetplan.profiling.zoo import gpt2, text_model

sizes = st.integers(1, 4096)
specs = st.sampled_from(sorted(catalogue())).map(device)


def matmul_layer(m: int, k: int, n: int) -> Layer:
    return Layer("x", "x", k * n, (Matmul("x", m, k, n),), m * n, ())


@settings(deadline=None)
@given(specs, sizes, sizes, sizes, st.integers(1, 64), st.sampled_from("mkn"), sizes)
def test_more_work_is_never_faster(
    spec: DeviceSpec, m: int, k: int, n: int, batch: int, side: str, extra: int
) -> None:
    size = {"m": m, "k": k, "n": n}
    wider = size | {side: size[side] + extra}
    small = layer_time(matmul_layer(**size), spec, "fp16", micro_batch=batch)
    large = layer_time(matmul_layer(**wider), spec, "fp16", micro_batch=batch)
    more = layer_time(matmul_layer(**size), spec, "fp16", micro_batch=batch + 1)
    for other in (large, more):
        assert other.forward >= small.forward and other.backward >= small.backward
    assert small.backward >= small.forward > 0


@settings(deadline=None)
@given(
    specs, st.sampled_from(["gpt2", "llama-1.1b", "vit-base", "transgan-amp"]), st.integers(1, 16)
)
def test_faster_devices_and_more_ranks_are_never_slower(
    spec: DeviceSpec, name: str, batch: int
) -> None:
    layer = load_model(name).layers[1]
    double = replace_spec(spec, 2.0)
    whole = layer_time(layer, spec, "fp16", micro_batch=batch)
    faster = layer_time(layer, double, "fp16", micro_batch=batch)
    split = layer_time(layer, spec, "fp16", micro_batch=batch, tensor=4)
    for other in (faster, split):
        assert other.forward <= whole.forward and other.backward <= whole.backward
    # Norms and residuals stay whole, so four ranks are less than four times as fast.
    assert split.forward > whole.forward / 4


def replace_spec(spec: DeviceSpec, factor: float) -> DeviceSpec:
    peaks = {precision: factor * peak for precision, peak in spec.peak_tflops.items()}
    return spec.model_copy(
        update={"peak_tflops": peaks, "memory_gb_per_s": factor * spec.memory_gb_per_s}
    )


def test_large_product_is_bound_by_flops() -> None:
    t = layer_time(matmul_layer(8192, 8192, 8192), device("V100-SXM2-16GB"), "fp16")
    assert t.forward == pytest.approx(2 * 8192**3 / (125e12 * DEFAULT_EFFICIENCY.matmul_16))
    assert t.backward == pytest.approx(2 * t.forward)


def test_thin_product_and_elementwise_are_bound_by_memory() -> None:
    spec = device("V100-SXM2-16GB")
    rate = 900e9 * DEFAULT_EFFICIENCY.memory
    thin = layer_time(matmul_layer(1, 8192, 8192), spec, "fp16")
    assert thin.forward == pytest.approx(2 * (8192 + 8192 * 8192 + 8192) / rate)
    layer = Layer("x", "x", 0, (Elementwise("x", 10**8, 3 * 10**8),), 1, ())
    assert layer_time(layer, spec, "fp32").forward == pytest.approx(4 * 10**8 / rate)
    assert layer_time(layer, spec, "fp32").backward == pytest.approx(12 * 10**8 / rate)


def test_tiny_layer_costs_its_launches() -> None:
    layer = Layer("x", "x", 1, (Matmul("a", 1, 1, 1), Elementwise("b", 1, 1)), 1, ())
    t = layer_time(
        layer, device("H100-SXM5-80GB"), "fp16", efficiency=Efficiency(launch_seconds=1e-5)
    )
    assert (t.forward, t.backward) == pytest.approx((2e-5, 3e-5), rel=1e-12)


def test_narrow_products_waste_tiles() -> None:
    """Sixteen columns cost as many tiles as sixty-four: the effect behind the narrow blocks of
    AMP's GAN."""
    spec = replace_spec(device("T4"), 1.0).model_copy(update={"memory_gb_per_s": 1e6})
    narrow = layer_time(matmul_layer(65536, 512, 16), spec, "fp16")
    wide = layer_time(matmul_layer(65536, 512, 64), spec, "fp16")
    assert narrow.forward == pytest.approx(wide.forward)


def test_published_layer_time_of_a_22b_model() -> None:
    """Korthikanti et al. 2022, Table 4: one layer of the 22B model, tensor degree 8, micro-batch 4,
    on A100s:
    7.7 ms forward and 19.6 ms in all, without recomputation. Nothing here was fitted to it."""
    model = load_model(
        text_model("22b", "", 2048, gpt2(48, 6144, 64, vocabulary=51200, positions=2048))
    )
    layer = model.layers[1]
    t = layer_time(layer, device("A100-SXM4-80GB"), "fp16", micro_batch=4, tensor=8)
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
        layer_time(layer, device("T4"), precision, micro_batch=micro_batch, tensor=tensor)
