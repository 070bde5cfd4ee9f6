"""What must hold of optimal plans whatever the numbers are."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.formulations import family
from hetplan.formulations.poplar.data import Device, PoplarData
from hetplan.solvers.registry import evaluate, solve

POPLAR = family("poplar")
times = st.floats(min_value=1 / 64, max_value=10.0, allow_nan=False, width=32)
curves = st.lists(times, min_size=1, max_size=12)


@st.composite
def instances(draw: st.DrawFn) -> PoplarData:
    """Any curves, up to 6 devices of up to 3 kinds, up to 60 samples."""
    kinds = draw(st.lists(curves, min_size=1, max_size=3))
    chosen = draw(st.lists(st.integers(0, len(kinds) - 1), min_size=1, max_size=6))
    return PoplarData(
        zero_stage=draw(st.integers(0, 3)),
        global_batch=draw(st.integers(1, 60)),
        comm_seconds=draw(st.sampled_from([0.0, 0.5, 4.0])),
        devices=[Device(name=f"kind{k}", step_seconds=kinds[k]) for k in chosen],
    )


def least(data: PoplarData) -> float:
    """The proven optimum."""
    result = solve(POPLAR, data, "exact")
    assert result.status == "optimal" and result.objective is not None
    return result.objective


def changed(data: PoplarData, **changes: object) -> PoplarData:
    """A checked copy."""
    return PoplarData.model_validate({**dict(data), **changes})


@given(instances(), curves)
@settings(max_examples=80)
def test_another_device_never_hurts(data: PoplarData, curve: list[float]) -> None:
    more = changed(data, devices=[*data.devices, Device(name="new", step_seconds=curve)])
    assert least(more) <= least(data) * (1 + 1e-9)


@given(instances(), times, st.integers(0, 5))
@settings(max_examples=80)
def test_a_larger_micro_batch_never_hurts(data: PoplarData, seconds: float, which: int) -> None:
    devices = list(data.devices)
    which %= len(devices)
    grown = [*devices[which].step_seconds, seconds]
    devices[which] = Device(name=devices[which].name, step_seconds=grown)
    assert least(changed(data, devices=devices)) <= least(data) * (1 + 1e-9)


@given(instances(), st.sampled_from([0.25, 3.0, 1e-3, 1e4]))
@settings(max_examples=80)
def test_scaling_all_times_scales_the_optimum(data: PoplarData, factor: float) -> None:
    devices = [
        Device(name=d.name, step_seconds=[t * factor for t in d.step_seconds]) for d in data.devices
    ]
    scaled = changed(data, devices=devices, comm_seconds=data.comm_seconds * factor)
    assert least(scaled) == pytest.approx(factor * least(data), rel=1e-9)


@given(instances())
@settings(max_examples=60)
def test_the_order_of_devices_does_not_matter(data: PoplarData) -> None:
    turned = changed(data, devices=list(reversed(data.devices)))
    assert least(turned) == pytest.approx(least(data), rel=1e-12)


@given(instances())
@settings(max_examples=60)
def test_heuristics_stay_above(data: PoplarData) -> None:
    best = least(data)
    for method in ("paper", "deepspeed", "whale"):
        result = solve(POPLAR, data, method)
        assert result.decision is not None
        assert evaluate(POPLAR, data, result.decision).violations == ()
        assert result.objective is not None and result.objective >= best * (1 - 1e-9)
