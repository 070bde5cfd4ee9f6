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
from hetplan.cli.main import main
from hetplan.errors import InputError
from hetplan.profiling.hardware.cluster import (
    GBIT,
    GIB,
    Cluster,
    ClusterFile,
    DeviceOverride,
    build_cluster,
    catalogue,
    device,
    example_cluster,
    example_clusters,
    load_cluster,
    overridden,
)
from hetplan.profiling.hardware.detect import (
    Host,
    catalogued,
    local_network_gbit,
    read_hostfile,
    slurm_hosts,
)
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
    # 1979). A P4 and Apple's compute fp16 as fp32.
    doubled = 1.0 if name == "P4" or spec.vendor == "apple" else 1.9
    assert doubled * peaks.get("fp32", 0.0) <= sixteen <= (1000 if name in CHIPS else 2600)
    # 8 bit operands twice as fast, 4 bit ones at least twice as fast again (Gaudi 3: not at all).
    if "fp8" in peaks:
        assert peaks["fp8"] == pytest.approx(sixteen * (1 if name == "Gaudi3" else 2), rel=0.02)
    if "fp4" in peaks:
        assert 2 * peaks["fp8"] <= peaks["fp4"] <= 4 * peaks["fp8"]
    # FLOPs per byte: above 240 only sparse or fp16-accumulation figures on known cards would land;
    # a few have many FLOPs for their narrow memory.
    narrow = ("L4", "L40S", "RTX-6000-Ada", "H100-96GB-HBM2e", "Gaudi3", "TPU-v6e")
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
        n for n in CHIPS if n.startswith(("P4", "P100", "V100", "T4", "RTX-2080", "Titan"))
    }


@pytest.mark.parametrize(
    ("typed", "suggested"),
    [
        ("v100", "did you mean .*V100-SXM2-16GB"),
        ("A100-SXM-80GB", "did you mean .*A100-SXM4-80GB"),
        ("rtx4090", "did you mean .*RTX-4090"),
        ("§", "expected one of P100-PCIE-16GB, .*GH200-96GB"),
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


@pytest.mark.parametrize("name", ["amp-mixed", "g4dn-4", "p3-4"])
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


@pytest.fixture(autouse=True)
def nothing_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetplan.cli.cluster.local_node", lambda: Host("here"))
    monkeypatch.setattr("hetplan.cli.cluster.local_device_name", lambda: None)
    for name in ("SLURM_JOB_NODELIST", "SLURM_GPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)


def test_hostfile(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(
        "# a comment\nworker-1 slots=4\nworker-2 slots=4  # same\n\nworker-3 slots = 8 "
        "max_slots=8\nhead\n"
    )
    assert [(h.name, h.devices) for h in read_hostfile(str(path))] == [
        ("worker-1", 4),
        ("worker-2", 4),
        ("worker-3", 8),
        ("head", 1),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=x\n", r"hosts: line 1: not usable"),
        ("a slots=4\na slots=4\n", r"hosts: line 2: host stands twice"),
        ("a slots=0\n", r"line 1: slots is not usable"),
        ("# nothing\n", r"no host"),
    ],
)
def test_broken_hostfiles(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_hostfile(str(path))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("gpu[01-03,07],login1", ["gpu01", "gpu02", "gpu03", "gpu07", "login1"]),
        ("a[8-11]-ib, b2", ["a8-ib", "a9-ib", "a10-ib", "a11-ib", "b2"]),
    ],
)
def test_slurm_node_lists(text: str, names: list[str]) -> None:
    assert [host.name for host in slurm_hosts(text)] == names


@pytest.mark.parametrize("text", ["", "a[1-", "a[3-1]", "a[x]", "a[1-99999999]", "a[1][2]"])
def test_broken_node_lists(text: str) -> None:
    with pytest.raises(InputError, match=r"node list"):
        slurm_hosts(text)


@pytest.mark.parametrize(
    ("driver", "gib", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", 79.2, "A100-SXM4-80GB"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100-SXM4-40GB"),
        ("Tesla V100-SXM2-16GB", 15.8, "V100-SXM2-16GB"),
        ("NVIDIA GeForce RTX 3090", 23.7, "RTX-3090"),
        ("NVIDIA TITAN RTX", 23.6, "Titan-RTX"),
        ("NVIDIA GeForce RTX 2080 Ti", 10.8, "RTX-2080Ti"),
        ("NVIDIA H100 80GB HBM3", 79.1, "H100-SXM5-80GB"),
        ("NVIDIA H200", 139.8, "H200-SXM-141GB"),
        ("NVIDIA GH200 480GB", 94.5, "GH200-96GB"),
        ("Tesla T4", 14.7, "T4"),
        ("Some Card", 16.0, None),
        ("NVIDIA A100-SXM4-80GB", 20.0, None),
    ],
)
def test_names_of_drivers(driver: str, gib: float, name: str | None) -> None:
    assert catalogued(driver, gib * 2**30) == name


def test_network_cards(tmp_path: Path) -> None:
    assert local_network_gbit(tmp_path) is None
    for card, speed in (("eth0", "25000"), ("lo", ""), ("down", "-1")):
        (tmp_path / "net" / card).mkdir(parents=True)
        (tmp_path / "net" / card / "speed").write_text(f"{speed}\n")
    assert local_network_gbit(tmp_path) == 25
    (tmp_path / "infiniband/mlx5_0/ports/1").mkdir(parents=True)
    (tmp_path / "infiniband/mlx5_0/ports/1/rate").write_text("200 Gb/sec (4X HDR)\n")
    assert local_network_gbit(tmp_path) == 200


def test_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts, target = tmp_path / "hosts", tmp_path / "cluster.yaml"
    hosts.write_text("a slots=4\nb slots=4\nc slots=2\n")
    arguments = ["cluster", "detect", "-o", str(target)]
    assert main([*arguments, "--hostfile", str(hosts), "--device", "T4", "--network", "25"]) == 0
    cluster = load_cluster(target)
    assert [(n.devices, n.device) for n in cluster.nodes] == [(4, "T4"), (4, "T4"), (2, "T4")]
    assert (
        cluster.bandwidth()[0, 4] == 25e9 / 8 and cluster.bandwidth()[0, 1] == 200e9 / 8  # PCIe
    )
    assert "links within a node are assumed" in target.read_text()
    assert main([*arguments, "--slurm", "n[1-3]", "--device", "T4", "--devices", "8"]) == 0
    assert len(load_cluster(target).devices) == 24
    assert main([*arguments, "--slurm", "n1", "--device", "A100-SXM4-80GB", "--devices", "8"]) == 0
    assert load_cluster(target).bandwidth()[0, 1] == 2400e9 / 8  # NVLink, by its form factor
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    assert main([*arguments, "--device", "T4"]) == 0
    assert len(load_cluster(target).devices) == 8
    capsys.readouterr()
    assert main(arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main([*arguments, "--device", "T5"]) == 2


def test_local_gpus_fill_what_hosts_do_not_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "hetplan.cli.cluster.local_node", lambda: Host("here", 4, "T4", 100.0, 50.0)
    )
    target = tmp_path / "cluster.yaml"
    assert main(["cluster", "detect", "-o", str(target)]) == 0
    (node,) = load_cluster(target).nodes
    assert (node.devices, node.device) == (4, "T4")
    assert node.intra_bandwidth == 100e9 / 8 and node.network_bandwidth == 50e9 / 8


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
