"""Hosts that are asked over ssh. The tests' ssh runs every host's commands here, with another
nvidia-smi for each host."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hetplan.cli.main import main
from hetplan.profiling.hardware.cluster import load_cluster
from hetplan.profiling.hardware.ssh_hosts import answer_of, sections_of, target_of

SSH = """#!/bin/sh
while [ "$1" = -o ] || [ "$1" = -p ]; do shift 2; done
host=${{1#*@}}
shift
if [ ! -d {folder}/$host ]; then
    echo "ssh: Could not resolve hostname $host" >&2
    exit 255
fi
echo "Welcome to $host"
PATH={folder}/$host:$PATH SSH_CONNECTION="192.0.2.1 5 127.0.0.1 22" exec "$@"
"""
# A host without python3 cannot measure.
NO_PYTHON = "#!/bin/sh\nexit 127\n"
TWO = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tPHB\t0-15\nGPU1\tPHB\t X \t0-15\n"


def smi_of(gpus: str, topology: str = "", listed: str = "") -> str:
    """An nvidia-smi. gpus: rows of a query of name and memory."""
    return (
        "#!/bin/sh\n"
        f"case $1 in topo) printf '%s' '{topology}';; -L) printf '%s' '{listed}';;\n"
        f"*) printf '%s' 'name, memory.total [MiB]\n{gpus}';; esac\n"
    )


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of machines: `desk` has two RTX 3090, `attic` one RTX 4090, `pi` no GPU."""
    executable(tmp_path / "bin" / "ssh", SSH.format(folder=tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    smi = {
        "desk": smi_of("NVIDIA GeForce RTX 3090, 24576 MiB\n" * 2, TWO),
        "attic": smi_of("NVIDIA GeForce RTX 4090, 24564 MiB\n"),
        "pi": "#!/bin/sh\necho nvidia-smi has failed >&2\nexit 9\n",
        "mixed": smi_of("NVIDIA GeForce RTX 3090, 24576 MiB\nNVIDIA GeForce RTX 4090, 24564 MiB\n"),
    }
    for host, text in smi.items():
        executable(tmp_path / host / "nvidia-smi", text)
        executable(tmp_path / host / "python3", NO_PYTHON)
    return tmp_path


def with_python(machines: Path, *hosts: str) -> None:
    for host in hosts:
        (machines / host / "python3").unlink()


def detected(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["cluster", "detect", "--json", *arguments]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["cluster", "detect", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def test_the_network_between_hosts_is_measured(
    machines: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_python(machines, "desk", "attic")
    file = machines / "cluster.yaml"
    document = detected(capsys, "--hosts", "desk,ann@attic:2222", "-o", str(file))
    desk, attic = document["nodes"]
    assert (desk["device"], desk["devices"]) == ("RTX-3090", 2)
    assert (attic["device"], attic["devices"]) == ("RTX-4090", 1)
    assert 0.1 < attic["network_gbit_per_s"] == desk["network_gbit_per_s"]
    assert 0 < attic["network_latency_us"] < 1e5
    assert document["assumed"] == [
        "links within a node are assumed: 200 Gbit/s of PCIe through a processor's host bridge, "
        "the slowest pair in nvidia-smi topo -m of desk (pairs: PHB of 1), not measured; --intra "
        "says otherwise"
    ]
    cluster = load_cluster(file)
    assert [node.device for node in cluster.nodes] == ["RTX-3090", "RTX-4090"]
    assert cluster.nodes[1].network_latency == pytest.approx(attic["network_latency_us"] * 1e-6)


def test_what_cannot_be_measured_is_told(
    machines: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_python(machines, "desk")
    document = detected(capsys, "--hosts", "desk, attic")
    assert all("network_latency_us" not in node for node in document["nodes"])
    assert any(line.startswith("links between nodes are assumed") for line in document["assumed"])
    stated = detected(capsys, "--hosts", "desk,attic", "--network", "2.5", "--intra", "90")
    assert [node["network_gbit_per_s"] for node in stated["nodes"]] == [2.5, 2.5]
    assert "assumed" not in stated


def test_one_host_needs_no_network(machines: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = detected(capsys, "--hosts", "attic")
    assert len(document["nodes"]) == 1 and "assumed" not in document


def test_every_host_that_cannot_be_asked_is_named(
    machines: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = refused(capsys, "--hosts", "desk,cellar,ann@mixed,roof")
    assert "--hosts: cannot be asked: cellar: ssh: Could not resolve hostname cellar; " in said
    assert "ann@mixed: the GPUs of this node differ" in said
    assert said.rstrip().endswith("roof: ssh: Could not resolve hostname roof")
    assert "nvidia-smi there says nvidia-smi has failed" in refused(capsys, "--hosts", "pi")
    said = refused(capsys, "--hosts", "pi", "--device", "RTX-4090")
    assert "number of devices is not known: nvidia-smi there says" in said
    monkeypatch.setenv("PATH", str(machines / "empty"))
    assert "this machine has no ssh" in refused(capsys, "--hosts", "desk,attic")


def test_slices_of_a_host_s_gpus_are_told(
    machines: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A query of a machine whose GPUs MIG divides shows whole GPUs; the list shows the slices."""
    listed = "GPU 0: NVIDIA A30 (UUID: G-0)\n  MIG 2g.12gb Device 0: (UUID: MIG-1)\n"
    gpus = "NVIDIA A30, 24576 MiB\n"
    executable(machines / "lab" / "nvidia-smi", smi_of(gpus, listed=listed))
    executable(machines / "lab" / "python3", NO_PYTHON)
    assert "this is a slice (MIG) of a device" in refused(capsys, "--hosts", "lab")
    listed = f"{listed}GPU 1: NVIDIA A30 (UUID: G-1)\n"
    executable(machines / "lab" / "nvidia-smi", smi_of(gpus * 2, listed=listed))
    document = detected(capsys, "--hosts", "lab")
    assert (document["nodes"][0]["device"], document["nodes"][0]["devices"]) == ("A30", 1)
    assert any("MIG divides 1 other" in line for line in document["assumed"])


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        (" , ", "no host"),
        ("desk,desk", "a host stands twice"),
        ("desk,localhost", "other hosts cannot reach a host by this name"),
        ("desk,127.0.0.1:22", "other hosts cannot reach a host by this name"),
        ("desk:0", "is not a host of ssh"),
        ("-oProxyCommand=touch spoiled", "is not a host of ssh"),
        ("ann@-oProxyCommand=touch", "is not a host of ssh"),
    ],
)
def test_names_that_no_host_has(
    hosts: str, message: str, machines: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, "--hosts", hosts)


def test_sources_of_hosts_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert "exclude each other" in refused(capsys, "--hosts", "a", "--slurm", "b")


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("desk", ["desk"]),
        ("ann@desk:2222", ["-p", "2222", "ann@desk"]),
        ("fe80::1", ["fe80::1"]),
        ("[fe80::1]:22", ["-p", "22", "fe80::1"]),
    ],
)
def test_hosts_of_ssh(host: str, words: list[str]) -> None:
    assert target_of(host, "hosts").words == words


def test_ports_of_the_answer() -> None:
    """InfiniBand counts before Ethernet; a port that is down says -1 or nothing."""
    lines = (
        "motd\n== gpus\n== list\n== topology\n== infiniband\n{}== ethernet\n1000\n-1\n"
        "== address\n== end\n"
    )
    for infiniband, gbit in (("", 1), ("100 Gb/sec (4X EDR)\n", 100)):
        answer = answer_of("desk", sections_of(lines.format(infiniband)))
        assert answer.host.network_gbit == gbit and answer.address == "desk"
    of_two_types = lines.replace("== gpus\n", "== gpus\nname, memory.total\nA, 1\nB, 1\n")
    parts = answer_of("a", sections_of(of_two_types.format(""))).host.parts
    assert [(part.driver_name, part.devices) for part in parts] == [("A", 1), ("B", 1)]


def test_programs_of_the_measurement_are_old_python(tmp_path: Path) -> None:
    """Hosts may have an older python3 than hetplan needs."""
    import ast

    from hetplan.profiling.hardware.network_probe import SINK, SOURCE

    for program in (SINK, SOURCE):
        ast.parse(program, feature_version=(3, 6))
    assert shutil.which("sh")
