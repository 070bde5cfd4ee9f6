"""The device catalogue: complete, plausible, sourced; suggestions; overrides."""

from __future__ import annotations

import re

import pytest

from hetplan.errors import InputError
from hetplan.profiling.catalogue import (
    GIB,
    DeviceOverride,
    DeviceSpec,
    catalogue,
    device,
    overridden,
)

REQUIRED = [
    "P100-PCIE-16GB",
    "V100-SXM2-16GB",
    "V100-SXM2-32GB",
    "V100-PCIE-16GB",
    "V100S-PCIE-32GB",
    "T4",
    "RTX-2080Ti",
    "Titan-RTX",
    "RTX-3060",
    "RTX-3090",
    "RTX-4090",
    "A6000",
    "A100-SXM4-40GB",
    "A100-SXM4-80GB",
    "A100-PCIE-40GB",
    "A100-PCIE-80GB",
    "A800-SXM4-80GB",
    "H100-SXM5-80GB",
    "H800-SXM5-80GB",
    "H200-SXM-141GB",
    "GH200-96GB",
]

# Memory in a name is the nominal one.
NAMED_MEMORY = {name: int(name.rsplit("-", 1)[1][:-2]) for name in REQUIRED if name.endswith("GB")}


# Per chip, from the architecture whitepapers: multiprocessors, FLOPs per multiprocessor and clock
# (fp32; matrix units with fp32 accumulation), boost clock in GHz; memory bus in bits and Gbit/s per
# pin. Independent of the peaks.
CHIPS = {
    "P100-PCIE-16GB": (56, 128, 256, 1.303, 4096, 1.43),
    "V100-SXM2-16GB": (80, 128, 1024, 1.53, 4096, 1.752),
    "V100-SXM2-32GB": (80, 128, 1024, 1.53, 4096, 1.752),
    "V100-PCIE-16GB": (80, 128, 1024, 1.38, 4096, 1.752),
    "V100S-PCIE-32GB": (80, 128, 1024, 1.597, 4096, 2.212),
    "T4": (40, 128, 1024, 1.59, 256, 10),
    "RTX-2080Ti": (68, 128, 512, 1.545, 352, 14),
    "Titan-RTX": (72, 128, 1024, 1.77, 384, 14),
    "RTX-3060": (28, 256, 512, 1.777, 192, 15),
    "RTX-3090": (82, 256, 512, 1.695, 384, 19.5),
    "RTX-4090": (128, 256, 512, 2.52, 384, 21),
    "A6000": (84, 256, 1024, 1.8, 384, 16),
    "A100-SXM4-40GB": (108, 128, 2048, 1.41, 5120, 2.43),
    "A100-SXM4-80GB": (108, 128, 2048, 1.41, 5120, 3.186),
    "A100-PCIE-40GB": (108, 128, 2048, 1.41, 5120, 2.43),
    "A100-PCIE-80GB": (108, 128, 2048, 1.41, 5120, 3.024),
    "A800-SXM4-80GB": (108, 128, 2048, 1.41, 5120, 3.186),
    "H100-SXM5-80GB": (132, 256, 4096, 1.83, 5120, 5.24),
    "H800-SXM5-80GB": (132, 256, 4096, 1.83, 5120, 5.24),
    "H200-SXM-141GB": (132, 256, 4096, 1.83, 6144, 6.25),
    "GH200-96GB": (132, 256, 4096, 1.83, 6144, 5.2),
}
# Hopper's matrix units are rated at 1.83 GHz, its plain units at the highest boost clock.
HOPPER_BOOST = 1.98


@pytest.mark.parametrize("name", REQUIRED)
def test_peaks_follow_from_the_chip(name: str) -> None:
    multiprocessors, plain, matrix, clock, bus, rate = CHIPS[name]
    spec = device(name)
    boost = HOPPER_BOOST if matrix == 4096 else clock
    assert spec.peak_flops("fp32") == pytest.approx(multiprocessors * plain * boost * 1e9, rel=0.01)
    assert spec.peak_flops("fp16") == pytest.approx(
        multiprocessors * matrix * clock * 1e9, rel=0.01
    )
    assert spec.peak_tflops.get("bf16", spec.peak_tflops["fp16"]) == spec.peak_tflops["fp16"]
    assert spec.memory_bytes_per_s == pytest.approx(bus / 8 * rate * 1e9, rel=0.01)


def test_every_required_device_is_there() -> None:
    assert set(REQUIRED) <= set(catalogue())


@pytest.mark.parametrize("name", sorted(catalogue()))
def test_entries_are_plausible_and_sourced(name: str) -> None:
    spec = catalogue()[name]
    assert spec.memory_gib == NAMED_MEMORY.get(name, spec.memory_gib)
    assert 200 <= spec.memory_gb_per_s <= 10_000
    assert {"fp16", "fp32"} <= set(spec.peak_tflops)
    # Dense fp16 with fp32 accumulation: twice plain fp32 at least, and no sparse figure (GH100:
    # 1979).
    assert 1.9 * spec.peak_tflops["fp32"] <= spec.peak_tflops["fp16"] <= 1000
    # FLOPs per byte: above 240 only sparse or fp16-accumulation figures on known cards would land.
    assert 10 <= spec.peak_flops("fp16") / spec.memory_bytes_per_s <= 310
    assert spec.price_per_hour is not None and 0.01 <= spec.price_per_hour <= 20
    assert spec.vendor == "nvidia" and spec.price_source
    assert re.search(r"\b20\d\d\b", spec.price_source), "a price has a date"
    assert (
        "datasheet" in spec.source or "whitepaper" in spec.source or "specifications" in spec.source
    )


def test_bf16_only_where_the_hardware_has_it() -> None:
    without = {name for name, spec in catalogue().items() if "bf16" not in spec.peak_tflops}
    assert without == {
        n for n in REQUIRED if n.startswith(("P100", "V100", "T4", "RTX-2080", "Titan"))
    }


def test_figures_in_si_units() -> None:
    t4 = device("T4")
    assert t4.peak_flops("fp16") == 65e12
    assert t4.memory_bytes == 15 * GIB
    assert t4.memory_bytes_per_s == 320e9


@pytest.mark.parametrize(
    ("typed", "suggested"),
    [("v100", "V100-SXM2-16GB"), ("A100-SXM-80GB", "A100-SXM4-80GB"), ("rtx4090", "RTX-4090")],
)
def test_unknown_names_get_suggestions(typed: str, suggested: str) -> None:
    with pytest.raises(InputError, match=f"did you mean .*{suggested}"):
        device(typed)


def test_a_name_like_nothing_gets_the_whole_list() -> None:
    with pytest.raises(InputError, match=r"expected one of P100-PCIE-16GB, .*GH200-96GB"):
        device("§")


def test_missing_precision_names_device_and_alternatives() -> None:
    with pytest.raises(InputError, match=r"my T4: .*got 'bf16', expected fp16, fp32"):
        device("T4").peak_flops("bf16", name="my T4")


def test_override_replaces_only_what_is_given() -> None:
    changed = overridden(
        "T4", DeviceOverride(peak_tflops={"fp16": 30.0}, price_per_hour=0.2), where="x"
    )
    base = device("T4")
    assert changed.peak_tflops == {**base.peak_tflops, "fp16": 30.0}
    assert changed.price_per_hour == 0.2 and changed.price_source == "the cluster file"
    assert changed.memory_gib == base.memory_gib
    assert "peak_tflops" in changed.source and base.source in changed.source
    assert overridden("T4", DeviceOverride(), where="x") == base


@pytest.mark.parametrize("lacking", ["memory_gib", "peak_tflops", "memory_gb_per_s"])
def test_a_new_device_needs_its_physics(lacking: str) -> None:
    parts = {"memory_gib": 24.0, "peak_tflops": {"fp16": 90.0}, "memory_gb_per_s": 600.0}
    del parts[lacking]
    with pytest.raises(InputError, match=f"place: {lacking} is missing"):
        overridden("my-card", DeviceOverride.model_validate(parts), where="place")


def test_a_new_device_without_price_has_none() -> None:
    spec = overridden(
        "my-card",
        DeviceOverride(memory_gib=24.0, peak_tflops={"fp16": 90.0}, memory_gb_per_s=600.0),
        where="x",
    )
    assert isinstance(spec, DeviceSpec) and spec.price_per_hour is None and spec.vendor == "other"
