"""Clusters from hostfiles, Slurm node lists and local devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetplan.cli.main import main
from hetplan.errors import InputError
from hetplan.profiling import detect
from hetplan.profiling.catalogue import catalogue
from hetplan.profiling.cluster import load_cluster
from hetplan.profiling.detect import (
    Host,
    catalogued,
    local_network_gbit,
    read_hostfile,
    slurm_hosts,
)
from hetplan.runtime import devices


@pytest.fixture(autouse=True)
def nothing_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "local_node", lambda: Host("here"))
    monkeypatch.setattr(devices, "local_device_name", lambda: None)
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


def test_every_catalogued_name_is_found_again() -> None:
    for name, spec in catalogue().items():
        found = catalogued(name, spec.memory_bytes)
        assert found is not None and catalogue()[found].memory_gib == spec.memory_gib


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
        cluster.bandwidth()[0, 4] == 25e9 / 8
        and cluster.bandwidth()[0, 1] == detect.PCIE_GBIT * 1e9 / 8
    )
    assert "links within a node are assumed" in target.read_text()
    assert main([*arguments, "--slurm", "n[1-3]", "--device", "T4", "--devices", "8"]) == 0
    assert len(load_cluster(target).devices) == 24
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
    monkeypatch.setattr(devices, "local_node", lambda: Host("here", 4, "T4", 100.0, 50.0))
    target = tmp_path / "cluster.yaml"
    assert main(["cluster", "detect", "-o", str(target)]) == 0
    (node,) = load_cluster(target).nodes
    assert (node.devices, node.device) == (4, "T4")
    assert node.intra_bandwidth == 100e9 / 8 and node.network_bandwidth == 50e9 / 8
