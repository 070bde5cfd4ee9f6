"""Devices and clusters: the catalogue, cluster files, clusters from what launchers are given."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings, strategies as st

from fakes.workloads import cluster_document
from hetplan.errors import InputError
from hetplan.profiling.hardware.cluster import (
    GBIT,
    GIB,
    Cluster,
    ClusterFile,
    DeviceOverride,
    build_cluster,
    catalogue,
    catalogue_file,
    device,
    example_cluster,
    example_clusters,
    load_cluster,
    overridden,
)
from hetplan.profiling.hardware.driver_names import catalogued, unrecognised
from hetplan.profiling.inputs.parts import ClusterRecord

# Per chip, from the architecture whitepapers: multiprocessors, FLOPs per multiprocessor and clock
# (fp32; matrix units with fp32 accumulation), boost clock in GHz; memory bus in bits and Gbit/s per
# pin. Independent of the peaks.
CHIPS = {
    "P4": (20, 256, 256, 1.076, 256, 6),
    "L4": (58, 256, 1024, 2.04, 192, 12.5),
    "A40": (84, 256, 1024, 1.74, 384, 14.5),
    "V100-PCIE-32GB": (80, 128, 1024, 1.38, 4096, 1.752),
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
    "RTX-2080": (46, 128, 512, 1.71, 256, 14),
    "RTX-2080-SUPER": (48, 128, 512, 1.815, 256, 15.5),
    "Quadro-RTX-5000": (48, 128, 1024, 1.815, 256, 14),
    "Quadro-RTX-6000": (72, 128, 1024, 1.77, 384, 14),
    "Quadro-RTX-8000": (72, 128, 1024, 1.77, 384, 14),
    "RTX-3060Ti": (38, 256, 512, 1.665, 256, 14),
    "RTX-3070": (46, 256, 512, 1.725, 256, 14),
    "RTX-3070Ti": (48, 256, 512, 1.77, 256, 19),
    "RTX-3080-10GB": (68, 256, 512, 1.71, 320, 19),
    "RTX-3080-12GB": (70, 256, 512, 1.71, 384, 19),
    "RTX-3080Ti": (80, 256, 512, 1.665, 384, 19),
    "RTX-3090Ti": (84, 256, 512, 1.86, 384, 21),
    "A2": (10, 256, 1024, 1.77, 128, 12.5),
    "A10": (72, 256, 1024, 1.695, 384, 12.5),
    "A4000": (48, 256, 1024, 1.56, 256, 14),
    "A4500": (56, 256, 1024, 1.65, 320, 16),
    "A5000": (64, 256, 1024, 1.695, 384, 16),
    "A5500": (80, 256, 1024, 1.665, 384, 16),
    "RTX-4060": (24, 256, 512, 2.46, 128, 17),
    "RTX-4060Ti-8GB": (34, 256, 512, 2.535, 128, 18),
    "RTX-4060Ti-16GB": (34, 256, 512, 2.535, 128, 18),
    "RTX-4070": (46, 256, 512, 2.475, 192, 21),
    "RTX-4070-SUPER": (56, 256, 512, 2.475, 192, 21),
    "RTX-4070Ti": (60, 256, 512, 2.61, 192, 21),
    "RTX-4070Ti-SUPER": (66, 256, 512, 2.61, 256, 21),
    "RTX-4080": (76, 256, 512, 2.505, 256, 22.4),
    "RTX-4080-SUPER": (80, 256, 512, 2.55, 256, 23),
    "RTX-4090D": (114, 256, 512, 2.52, 384, 21),
    "L40": (142, 256, 512, 2.49, 384, 18),
    "RTX-4000-Ada": (48, 256, 1024, 2.175, 160, 18),
    "RTX-4500-Ada": (60, 256, 1024, 2.58, 192, 18),
    "RTX-5000-Ada": (100, 256, 1024, 2.55, 256, 18),
    "RTX-5880-Ada": (110, 256, 1024, 2.46, 384, 20),
    "RTX-5060Ti-8GB": (36, 256, 512, 2.572, 128, 28),
    "RTX-5060Ti-16GB": (36, 256, 512, 2.572, 128, 28),
    "RTX-5070": (48, 256, 512, 2.512, 192, 28),
    "RTX-5070Ti": (70, 256, 512, 2.452, 256, 28),
    "RTX-5080": (84, 256, 512, 2.617, 256, 30),
}


# Memory in a name is the nominal one.
NAMED_MEMORY = {name: int(name.rsplit("-", 1)[1][:-2]) for name in CHIPS if name.endswith("GB")}


# Hopper's matrix units are rated at 1.83 GHz, its plain units at the highest boost clock.
HOPPER_BOOST = 1.98


@pytest.mark.parametrize("name", CHIPS)
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
    assert spec.memory_bytes == spec.memory_gib * GIB


@pytest.mark.parametrize("name", sorted(catalogue()))
def test_entries_are_plausible_and_sourced(name: str) -> None:
    spec = catalogue()[name]
    assert spec.memory_gib == NAMED_MEMORY.get(name, spec.memory_gib)
    assert 190 <= spec.memory_gb_per_s <= 10_000
    peaks = spec.peak_tflops
    assert {"fp16", "fp32"} <= set(peaks) or "bf16" in peaks
    sixteen = peaks.get("bf16", peaks.get("fp16", 0.0))
    # Dense 16 bit with fp32 accumulation: twice plain fp32 at least, and no sparse figure (GH100:
    # 1979). A P4, a P40 and Apple's compute fp16 as fp32.
    # The matrix units of an RTX 5090 D are held below those of an RTX 5090.
    plain = name in ("P4", "P40", "RTX-5090D") or spec.vendor == "apple"
    doubled = 1.0 if plain else 1.9
    assert doubled * peaks.get("fp32", 0.0) <= sixteen <= (1000 if name in CHIPS else 2600)
    # 8 bit operands twice as fast, 4 bit ones at least twice as fast again (Gaudi 3: not at all).
    if "fp8" in peaks:
        assert peaks["fp8"] == pytest.approx(sixteen * (1 if name == "Gaudi3" else 2), rel=0.02)
    if "fp4" in peaks:
        assert 2 * peaks["fp8"] <= peaks["fp4"] <= 4 * peaks["fp8"]
    # FLOPs per byte: above 240 only sparse or fp16-accumulation figures on known cards would land;
    # a few have many FLOPs for their narrow memory.
    narrow = (
        *("L2", "L4", "L40S", "RTX-4500-Ada", "RTX-5000-Ada", "RTX-6000-Ada", "GB10"),
        *("H100-PCIE-80GB", "H800-PCIE-80GB", "H100-96GB-HBM2e", "Gaudi3", "TPU-v6e"),
    )
    highest = 570 if name in narrow else 320
    assert 10 <= 1e12 * sixteen / spec.memory_bytes_per_s <= highest
    assert spec.price_per_hour is None or 0.01 <= spec.price_per_hour <= 20
    assert spec.vendor in ("nvidia", "amd", "intel", "huawei", "google", "apple")
    assert (spec.price_source is None) == (spec.price_per_hour is None)
    assert re.search(r"\b20\d\d\b", spec.price_source or "2025"), "a price has a date"
    assert any(word in spec.source for word in ("datasheet", "whitepaper", "specifications"))


def test_bf16_only_where_the_hardware_has_it() -> None:
    without = {name for name, spec in catalogue().items() if "bf16" not in spec.peak_tflops}
    assert without - {"M2-Ultra", "M3-Ultra"} == {
        n
        for n in catalogue()
        if n.startswith(("P4", "P100", "V100", "T4", "RTX-2080", "Quadro", "Titan"))
    }


@pytest.mark.parametrize(
    ("typed", "suggested"),
    [
        ("v100", "did you mean .*V100-SXM2-16GB"),
        ("A100-SXM-80GB", "did you mean .*A100-SXM4-80GB"),
        ("rtx4090", "did you mean .*RTX-4090"),
        ("§", "expected one of the [0-9]+ names in docs/files.md, or in the cluster file"),
    ],
)
def test_unknown_names_get_suggestions(typed: str, suggested: str) -> None:
    with pytest.raises(InputError, match=suggested):
        device(typed)


def test_unknown_examples_get_suggestions() -> None:
    with pytest.raises(InputError, match="did you mean amp-mixed"):
        example_cluster("amp-mix")


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
    spec = overridden("my-card", DeviceOverride.model_validate(parts), where="place")
    assert spec.price_per_hour is None and spec.vendor == "other"
    del parts[lacking]
    with pytest.raises(InputError, match=f"place: {lacking} is missing"):
        overridden("my-card", DeviceOverride.model_validate(parts), where="place")


ROOT = Path(__file__).parents[2]


HEAD = "format: hetplan-cluster\nversion: 1\nname: c\n"


NODE = "{devices: 2, device: T4, intra_node_gbit_per_s: 50, network_gbit_per_s: 10}"


def load(tmp_path: Path, text: str) -> Cluster:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return load_cluster(path)


def test_the_mixed_cluster_of_amp() -> None:
    cluster = example_cluster("amp-mixed")
    assert [(d.type, d.node) for d in cluster.devices] == [
        *(("V100-SXM2-16GB", n) for n in range(3) for _ in range(4)),
        *(("T4", 3) for _ in range(4)),
    ]
    bandwidth = cluster.bandwidth() * 8e-9
    assert bandwidth[0, 3] == pytest.approx(170) and bandwidth[0, 4] == pytest.approx(10)
    assert bandwidth[0, 12] == pytest.approx(10)  # the lower of 10 and 50
    assert bandwidth[12, 15] == pytest.approx(50)
    prices = catalogue()
    expected = 12 * prices["V100-SXM2-16GB"].price_per_hour + 4 * prices["T4"].price_per_hour  # type: ignore[operator]
    assert cluster.price_per_hour() == pytest.approx(expected)


@pytest.mark.parametrize("name", ["amp-mixed", "g4dn-4", "p3-4", "two-generations"])
def test_packaged_examples_stand_in_the_examples_folder(name: str) -> None:
    copy = load_cluster(ROOT / "examples" / f"{name}.yaml")
    assert copy == example_cluster(name)
    assert len(copy.devices) == 16


@pytest.mark.parametrize("name", example_clusters())
def test_packaged_examples_are_named_like_their_files(name: str) -> None:
    assert example_cluster(name).name == name


def test_own_devices_and_latencies(tmp_path: Path) -> None:
    text = (
        HEAD
        + """nodes:
  - devices: 1
    device: my-card
    intra_node_gbit_per_s: 8
    network_gbit_per_s: 4
    network_latency_us: 50
  - devices: 2
    device: T4
    intra_node_gbit_per_s: 16
    network_gbit_per_s: 2
    intra_node_latency_us: 0
devices:
  my-card:
    memory_gib: 24
    peak_tflops: {fp16: 90, fp32: 22}
    memory_gb_per_s: 600
    source: vendor datasheet
  T4: {price_per_hour: 0.3}
"""
    )
    cluster = load(tmp_path, text)
    assert cluster.specs["my-card"].source == "vendor datasheet"
    assert cluster.specs["T4"].price_per_hour == 0.3
    assert cluster.price_per_hour() is None
    assert cluster.bandwidth()[0, 1] == 0.25e9
    latency = cluster.latency()
    assert latency[0, 1] == pytest.approx(50e-6) and latency[1, 2] == 0 and latency[0, 0] == 0


def test_stated_all_reduces(tmp_path: Path) -> None:
    """By number of ranks, in Gbit/s; a plan file carries them."""
    text = "nodes: [{devices: 8, device: L4, intra_node_gbit_per_s: 256, network_gbit_per_s: 10, "
    cluster = load(tmp_path, HEAD + text + "all_reduce_gbit_per_s: {8: 40, 2: 160}}]\n")
    assert cluster.nodes[0].all_reduce == ((2, 20e9), (8, 5e9))
    record = ClusterRecord.of(cluster).model_dump(mode="json")
    again = ClusterRecord.model_validate_json(json.dumps(record)).cluster("c", cluster.file)
    assert again == cluster
    with pytest.raises(InputError, match=r"all_reduce_gbit_per_s.*got 1, expected at least 2"):
        load(tmp_path, HEAD + text + "all_reduce_gbit_per_s: {1: 40}}]\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes: []\n", r"c\.yaml: nodes: .*at least 1 item\)$"),
        ("nodes: []\n3: 1\n3: 2\n", r"c\.yaml: line 6 column 1: .*key '3' stands twice$"),
        (f"nodes: [{NODE}]\nextra: 1\n", r"c\.yaml: extra: unknown key"),
        (
            f"nodes: [{NODE.replace('network_gbit_per_s', 'network_gbits')}]\n",
            r"nodes\[0\]\.network_gbits: unknown key; did you mean network_gbit_per_s.* 1 more",
        ),
        (
            f"nodes: [{NODE.replace('T4', 'T44')}]\n",
            r"c\.yaml: nodes\[0\]\.device: unknown device 'T44'; did you mean T4",
        ),
        (
            f"nodes: [{NODE.replace('50', '0')}]\n",
            r"nodes\[0\]\.intra_node_gbit_per_s: .*got 0, expected at least 1e-06",
        ),
        (f"nodes: [{NODE.replace('10', '-1')}]\n", r"nodes\[0\]\.network_gbit_per_s: .*got -1"),
        (f"nodes: [{NODE.replace('10', '.nan')}]\n", r"nodes\[0\]\.network_gbit_per_s: .*finite"),
        (
            f"nodes: [{NODE.replace('10', 'fast')}]\n",
            r"network_gbit_per_s: .*got 'fast', expected a number",
        ),
        (
            f"nodes: [{NODE.replace('devices: 2', 'devices: 2.5')}]\n",
            r"nodes\[0\]\.devices: .*got 2.5",
        ),
        (
            f"nodes: [{NODE.replace('devices: 2', 'devices: true')}]\n",
            r"nodes\[0\]\.devices: .*got True",
        ),
        (f"nodes: [{NODE.replace('{', '{count: 0, ')}]\n", r"nodes\[0\]\.count: .*got 0"),
        (
            f"nodes: [{NODE.replace('{', '{count: 4096, ')}]\n",
            r"nodes: too many devices .*8192.*at most 4096",
        ),
        (
            f"nodes: [{NODE}]\ndevices: {{x: {{memory_gib: 1}}}}\n",
            r"c\.yaml: devices\.x: peak_tflops is missing",
        ),
        (
            f"nodes: [{NODE}]\ndevices: {{T4: {{memory_gib: -1}}}}\n",
            r"devices\.T4\.memory_gib: .*got -1",
        ),
        (
            f"nodes: [{NODE}]\ndevices: {{T4: {{peak_tflops: {{fp6: 1}}}}}}\n",
            r"devices\.T4\.peak_tflops",
        ),
    ],
)
def test_errors_name_file_place_got_and_expected(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        load(tmp_path, HEAD + text)
    assert "\n" not in str(caught.value)


nodes = st.fixed_dictionaries(
    {
        "count": st.integers(1, 3),
        "devices": st.integers(1, 4),
        "device": st.sampled_from(sorted(catalogue())),
        "intra_node_gbit_per_s": st.floats(0.1, 4000),
        "network_gbit_per_s": st.floats(0.1, 4000),
        "network_latency_us": st.floats(0, 100),
    }
)


@settings(deadline=None)
@given(st.lists(nodes, min_size=1, max_size=4))
def test_matrices_are_symmetric_and_follow_the_rule(entries: list[dict[str, object]]) -> None:
    file = ClusterFile.model_validate(
        {"format": "hetplan-cluster", "version": 1, "name": "h", "nodes": entries}
    )
    cluster = build_cluster(file)
    bandwidth, latency = cluster.bandwidth(), cluster.latency()
    devices = sum(e.count * e.devices for e in file.nodes)
    assert len(cluster.devices) == devices == sum(cluster.counts().values())
    for (i, one), (j, other) in product(enumerate(cluster.devices), repeat=2):
        a, b = cluster.nodes[one.node], cluster.nodes[other.node]
        if one.node == other.node:
            assert bandwidth[i, j] == a.intra_bandwidth
        else:
            assert bandwidth[i, j] == min(a.network_bandwidth, b.network_bandwidth)
            assert latency[i, j] == max(a.network_latency, b.network_latency)


@pytest.mark.parametrize(
    ("driver", "gib", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", 79.2, "A100-SXM4-80GB"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100-SXM4-40GB"),
        ("NVIDIA A100 80GB PCIe", 79.2, "A100-PCIE-80GB"),
        ("Tesla V100-SXM2-16GB", 15.8, "V100-SXM2-16GB"),
        ("NVIDIA GeForce RTX 3080", 9.8, "RTX-3080-10GB"),
        ("NVIDIA GeForce RTX 3080", 11.8, "RTX-3080-12GB"),
        ("NVIDIA GeForce RTX 3080", None, None),
        ("NVIDIA GeForce RTX 3090", 23.7, "RTX-3090"),
        ("NVIDIA GeForce RTX 3090 Ti", 23.7, "RTX-3090Ti"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 15.7, "RTX-4070Ti-SUPER"),
        ("NVIDIA GeForce RTX 4090 D", 23.6, "RTX-4090D"),
        ("NVIDIA GeForce RTX 5090 D", 31.4, "RTX-5090D"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 15.7, None),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 95.6, "RTX-PRO-6000-Blackwell"),
        (
            "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
            95.6,
            "RTX-PRO-6000-Blackwell-Max-Q",
        ),
        ("NVIDIA TITAN RTX", 23.6, "Titan-RTX"),
        ("NVIDIA GeForce RTX 2080 Ti", 10.8, "RTX-2080Ti"),
        ("NVIDIA RTX A6000", 47.5, "A6000"),
        ("NVIDIA RTX 6000 Ada Generation", 47.5, "RTX-6000-Ada"),
        ("Quadro RTX 6000", 23.7, "Quadro-RTX-6000"),
        ("NVIDIA H100 80GB HBM3", 79.1, "H100-SXM5-80GB"),
        ("NVIDIA H100 80GB HBM3", None, "H100-SXM5-80GB"),
        ("NVIDIA H100 PCIe", 79.1, "H100-PCIE-80GB"),
        ("NVIDIA H100", 95.0, "H100-96GB-HBM2e"),
        ("NVIDIA H200", 139.8, "H200-SXM-141GB"),
        ("NVIDIA H200 NVL", 139.8, "H200-NVL-141GB"),
        ("NVIDIA H800", 79.1, "H800-SXM5-80GB"),
        ("NVIDIA H20", 139.8, "H20-141GB"),
        ("NVIDIA GH200 480GB", 94.5, "GH200-96GB"),
        ("Tesla T4", 14.7, "T4"),
        ("AMD Instinct MI250X", 64.0, "MI250X-GCD"),
        ("AMD INSTINCT MI250X (MCM) OAM AC MBA", 64.0, "MI250X-GCD"),
        ("AMD Instinct MI300X OAM", 191.7, "MI300X"),
        ("NVIDIA-A100-SXM4-80GB", None, "A100-SXM4-80GB"),
        ("nvidia_geforce_rtx_3090", None, "RTX-3090"),
        ("Some Card", 16.0, None),
        ("NVIDIA A100-SXM4-80GB", 20.0, None),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 39.25, None),
        ("NVIDIA A40-48Q", 44.0, None),
        ("NVIDIA GeForce RTX 4090", 47.4, None),
    ],
)
def test_names_of_drivers(driver: str, gib: float | None, name: str | None) -> None:
    assert catalogued(driver, None if gib is None else gib * 2**30) == name


@pytest.mark.parametrize(
    ("driver", "gib", "message"),
    [
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 39.25, r"a slice \(MIG\).*near.*A100-SXM4-80GB"),
        ("NVIDIA A40-48Q", 44.0, "a virtual GPU.*near.*A40"),
        ("NVIDIA GeForce RTX 5070 Ti Laptop GPU", 11.5, "fewer watts.*near.*RTX-5070Ti"),
        ("NVIDIA GeForce RTX 4090", 47.4, r"other memory than RTX-4090 .*47\.4 GiB"),
        ("AMD Instinct MI308X", 192.0, "near.*MI300X"),
        ("AMD Instinct MI250X", None, "several.*one of MI250X, MI250X-GCD"),
    ],
)
def test_refused_names_tell_what_is_near(driver: str, gib: float | None, message: str) -> None:
    error = unrecognised(driver, None if gib is None else gib * 2**30, where="the GPUs here")
    assert re.search(message, str(error))


def test_every_further_name_leads_to_its_device() -> None:
    for entry, names in catalogue_file().driver_names.items():
        memory = catalogue()[entry].memory_bytes
        assert {catalogued(name, memory) for name in names} == {entry}


def test_nodes_under_two_switches_share_uplinks(tmp_path: Path) -> None:
    """Four nodes, two under a switch with uplinks of a fourth of what they have to each other."""
    file = tmp_path / "racks.yaml"
    file.write_text(
        "format: hetplan-cluster\nversion: 1\nname: racks\nnodes:\n"
        "  - {count: 4, devices: 1, device: T4, intra_node_gbit_per_s: 100, "
        "network_gbit_per_s: 80, nodes_per_switch: 2, uplink_gbit_per_s: 20}\n"
        "  - {count: 1, devices: 1, device: T4, intra_node_gbit_per_s: 100, "
        "network_gbit_per_s: 40}\n"
    )
    between = load_cluster(file).bandwidth() / GBIT
    assert between[0].tolist() == [100, 80, 20, 20, 20]
    assert between[2].tolist() == [20, 20, 100, 80, 20]
    assert between[4].tolist() == [20, 20, 20, 20, 100]


@pytest.mark.parametrize(("name", "near"), [("MI308X", "did you mean MI300X"), ("FooChip-9", "")])
def test_an_unknown_device_shows_what_describes_one(name: str, near: str) -> None:
    """Also where a known one has nearly that name; the lines shown can be used."""
    with pytest.raises(InputError) as error:
        device(name)
    text = str(error.value)
    assert near in text and "\n" not in text
    shown = yaml.safe_load(text.split("`")[1])["devices"]
    own = cluster_document(devices={name: shown["NAME"]})
    own["nodes"][0]["device"] = name
    assert build_cluster(ClusterFile.model_validate(own)).specs[name].memory_gib == 80
