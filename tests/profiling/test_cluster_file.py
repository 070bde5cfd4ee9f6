"""Cluster files: what they mean, and one precise line for each way to get them wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.errors import InputError
from hetplan.profiling.catalogue import catalogue
from hetplan.profiling.cluster import (
    Cluster,
    ClusterFile,
    build_cluster,
    example_cluster,
    example_clusters,
    load_cluster,
)

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
    cluster = example_cluster(name)
    assert cluster.name == name and len(cluster.devices) > 1


def test_unknown_example_is_suggested() -> None:
    with pytest.raises(InputError, match="did you mean amp-mixed"):
        example_cluster("amp-mix")


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes: []\n", r"c\.yaml: nodes: .*at least 1 item"),
        (f"nodes: [{NODE}]\nextra: 1\n", r"c\.yaml: extra: unknown key"),
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
        (f"nodes: [{NODE.replace('10', '.inf')}]\n", r"nodes\[0\]\.network_gbit_per_s"),
        (
            f"nodes: [{NODE.replace('10', 'fast')}]\n",
            r"network_gbit_per_s: .*got 'fast', expected a valid number",
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
            f"nodes: [{NODE}]\ndevices: {{T4: {{peak_tflops: {{fp8: 1}}}}}}\n",
            r"devices\.T4\.peak_tflops",
        ),
    ],
)
def test_errors_name_file_place_got_and_expected(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        load(tmp_path, HEAD + text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1\n", "not an object"),
        ("format: hetplan-profile\nversion: 1\n", "not a hetplan-cluster file"),
        ("format: hetplan-cluster\nversion: 2\n", "version"),
        ("", "not an object"),
    ],
)
def test_other_files_are_refused_at_once(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load(tmp_path, text)


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
    assert np.array_equal(bandwidth, bandwidth.T) and np.array_equal(latency, latency.T)
    assert (
        len(cluster.devices)
        == sum(e.count * e.devices for e in file.nodes)
        == sum(cluster.counts().values())
    )
    for i, one in enumerate(cluster.devices):
        for j, other in enumerate(cluster.devices):
            a, b = cluster.nodes[one.node], cluster.nodes[other.node]
            if one.node == other.node:
                assert bandwidth[i, j] == a.intra_bandwidth
            else:
                assert bandwidth[i, j] == min(a.network_bandwidth, b.network_bandwidth)
                assert latency[i, j] == max(a.network_latency, b.network_latency)
