"""Clusters from what launchers, schedulers, tools and this machine tell of nodes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hetplan.cli.main import main
from hetplan.errors import InputError
from hetplan.profiling.hardware.cluster import load_cluster
from hetplan.profiling.hardware.detect import local_network_gbit
from hetplan.profiling.hardware.hostfiles import read_hostfile
from hetplan.profiling.hardware.hosts import Host
from hetplan.profiling.hardware.jobs import job_hosts
from hetplan.profiling.hardware.kubernetes_nodes import read_nodes
from hetplan.profiling.hardware.node_lists import node_names
from hetplan.profiling.hardware.topologies import read_topology


@pytest.fixture(autouse=True)
def nothing_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetplan.cli.cluster.local_node", lambda: Host("here"))
    for name in ("SLURM_JOB_NODELIST", "SLURM_GPUS_ON_NODE", "PBS_NODEFILE", "LSB_MCPU_HOSTS"):
        monkeypatch.delenv(name, raising=False)


def written(folder: Path, text: str) -> str:
    path = folder / "hosts"
    path.write_text(text)
    return str(path)


def detected(
    capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[list[tuple[int, int, str]], list[str]]:
    """([(nodes, devices, device)] of the entries, assumptions) of the command's JSON answer."""
    assert main(["cluster", "detect", "--json", *arguments]) == 0
    document = json.loads(capsys.readouterr().out)
    entries = [(node["count"], node["devices"], node["device"]) for node in document["nodes"]]
    return entries, document.get("assumed", [])


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        (
            "# a comment\nworker-1 slots=4\nworker-2 slots=4  # same\n\nworker-3 slots = 8 "
            "max_slots=8\nworker-4 max_slots=2\nhead\n",
            [
                ("worker-1", 4),
                ("worker-2", 4),
                ("worker-3", 8),
                ("worker-4", 2),
                ("head", None),
            ],
        ),
        ("node-02:2\nnode-03:8\nother03:3\n", [("node-02", 2), ("node-03", 8), ("other03", 3)]),
        ("node1:4\nnode2\nnode1:2\n", [("node1", 6), ("node2", 1)]),
        ("node1,node2\n", [("node1", None), ("node2", None)]),
        ("node1:4, node2:4\n", [("node1", 4), ("node2", 4)]),
        ("n1\nn1\nn2\nn2\nn3\n", [("n1", 2), ("n2", 2), ("n3", 1)]),
        ("n1\nn2\n", [("n1", None), ("n2", None)]),
        ("gpu[01-02,07]:8\n", [("gpu01", 8), ("gpu02", 8), ("gpu07", 8)]),
        ("[2001:db8::1]:8\n2001:db8::2 slots=4\n", [("2001:db8::1", 8), ("2001:db8::2", 4)]),
        ("[fd00::2] slots=2\n[fd00::3]\n", [("fd00::2", 2), ("fd00::3", None)]),
        ("a:4:mlx5_0\nb::mlx5_1\n[fd00::2]:2:hca\n", [("a", 4), ("b", 1), ("fd00::2", 2)]),
        ("a:4:mlx5_0\n[fd00::2]::hca\n", [("a", 4), ("fd00::2", 1)]),
        ("me@a:4\nb slots=2 port=2222\n", [("a", 4), ("b", 2)]),
        ("a 8 all.q@a UNDEFINED\nb 4\n", [("a", 8), ("b", 4)]),
    ],
)
def test_hostfiles(text: str, hosts: list[tuple[str, int | None]], tmp_path: Path) -> None:
    found = read_hostfile(written(tmp_path, text))
    assert [(host.name, host.devices) for host in found] == hosts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=x\n", r"hosts: line 1: not usable"),
        ("a slots=4\na slots=4\n", r"hosts: line 2: host stands twice"),
        ("a slots=4\na\n", r"hosts: line 2: host stands twice"),
        ("a slots=0\n", r"line 1: number of devices is not usable"),
        ("a slots=4 max_slots=2\n", r"line 1: more slots than the most"),
        ("# nothing\n", r"no host"),
        ("a gpu=4\n", r"line 1: not usable"),
        ("a slots:4\n", r"line 1: not usable"),
        ("a:2222\n", r"line 1: number of devices is not usable .*got 2222"),
        ("b:1\na:22\n", r"line 2: has ssh's port or 22 processes"),
        ("a:4 slots=4\n", r"line 1: tells two numbers of processes"),
        ("^a\n", r"line 1: not usable"),
        ("a:4:5\n", r"line 1: not usable"),
        ("a:4:\n", r"line 1: not usable"),
        ("a:mlx5_0\n", r"line 1: not usable"),
        ("[fd00::zz] slots=2\n", r"line 1: not "),
        ("a[1-9999999]\n", r"line 1: not a range"),
    ],
)
def test_broken_hostfiles(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        read_hostfile(written(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("gpu[01-03,07],login1", ["gpu01", "gpu02", "gpu03", "gpu07", "login1"]),
        ("a[8-11]-ib, b2", ["a8-ib", "a9-ib", "a10-ib", "a11-ib", "b2"]),
        ("rack[1-2]n[01-02]", ["rack1n01", "rack1n02", "rack2n01", "rack2n02"]),
        ("r1i[0-1]n[0-2]", ["r1i0n0", "r1i0n1", "r1i0n2", "r1i1n0", "r1i1n1", "r1i1n2"]),
        ("a[1][2]", ["a12"]),
        ("x[1-2]y[1,3]z[5],w1", ["x1y1z5", "x1y3z5", "x2y1z5", "x2y3z5", "w1"]),
    ],
)
def test_slurm_node_lists(text: str, names: list[str]) -> None:
    assert node_names(text, where="node list") == names


@pytest.mark.parametrize(
    "text",
    [
        *("", "a[1-", "a[3-1]", "a[x]", "a[1-99999999]", "a[]", "a[1]]", "a[[1]]"),
        *("a[000x123]", "a[1-4000]b[1-4000]", "a[1-2]b[1-2]" * 40),
    ],
)
def test_broken_node_lists(text: str) -> None:
    with pytest.raises(InputError, match=r"node list"):
        node_names(text, where="node list")


JOB = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_NUM_NODES": "3"}


@pytest.mark.parametrize(
    ("variables", "devices", "driver_name"),
    [
        ({"SLURM_GPUS_ON_NODE": "4"}, [4, 4, 4], None),
        ({"SLURM_GPUS_PER_NODE": "a100:8", "SLURM_GPUS_ON_NODE": "4"}, [8, 8, 8], "a100"),
        ({"SLURM_GPUS": "12"}, [4, 4, 4], None),
        ({"SLURM_GPUS": "10", "SLURM_GPUS_ON_NODE": "4"}, [None] * 3, None),
        ({"SLURM_GPUS": "10"}, [None] * 3, None),
        ({"SLURM_GPUS_PER_TASK": "2", "SLURM_TASKS_PER_NODE": "2(x2),1"}, [4, 4, 2], None),
        (
            {"SLURM_TRES_PER_TASK": "cpu=8,gres/gpu:h200=1", "SLURM_TASKS_PER_NODE": "4(x3)"},
            [4, 4, 4],
            "h200",
        ),
        ({"SLURM_JOB_GPUS": "0,1"}, [2, 2, 2], None),
        ({}, [None] * 3, None),
    ],
)
def test_gpus_of_a_slurm_job(
    variables: dict[str, str], devices: list[int | None], driver_name: str | None
) -> None:
    hosts = job_hosts(JOB | variables)
    assert hosts is not None
    assert [host.devices for host in hosts] == devices
    assert {host.driver_name for host in hosts} == {driver_name}


HETEROGENEOUS = {
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_NODELIST": "a[1-2]",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "a[1-2]",
    "SLURM_JOB_NUM_NODES_HET_GROUP_0": "2",
    "SLURM_GPUS_PER_NODE_HET_GROUP_0": "4",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "rack[1-2]n[1-2]",
    "SLURM_JOB_NUM_NODES_HET_GROUP_1": "4",
    "SLURM_GPUS_PER_NODE_HET_GROUP_1": "nvidia_geforce_rtx_3090:2",
}


def test_components_of_a_heterogeneous_job() -> None:
    hosts = job_hosts(HETEROGENEOUS)
    assert hosts is not None
    assert [(host.name, host.devices, host.component) for host in hosts[:3]] == [
        ("a1", 4, 0),
        ("a2", 4, 0),
        ("rack1n1", 2, 1),
    ]
    assert len(hosts) == 6 and hosts[5].driver_name == "nvidia_geforce_rtx_3090"
    with pytest.raises(InputError, match=r"another number of nodes.*got 4, expected 5"):
        job_hosts(HETEROGENEOUS | {"SLURM_JOB_NUM_NODES_HET_GROUP_1": "5"})
    with pytest.raises(InputError, match="node stands in two components"):
        job_hosts(HETEROGENEOUS | {"SLURM_JOB_NODELIST_HET_GROUP_1": "a[2-5]"})


def test_types_of_a_heterogeneous_job(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes of another component are not taken to be like this machine."""
    monkeypatch.setattr("hetplan.cli.cluster.local_node", lambda: Host("a1.domain", 4, "T4"))
    for name, value in HETEROGENEOUS.items():
        monkeypatch.setenv(name, value)
    entries, assumed = detected(capsys)
    assert entries == [(2, 4, "T4"), (4, 2, "RTX-3090")]
    assert any("devices are assumed to be T4, as here" in line for line in assumed)
    assert any("is taken for RTX-3090" in line for line in assumed)
    assert detected(capsys, "--device", "L4,L40S")[0] == [(2, 4, "L4"), (4, 2, "L40S")]
    monkeypatch.setenv("SLURM_GPUS_PER_NODE_HET_GROUP_1", "2")
    assert main(["cluster", "detect"]) == 2
    assert "rack1n1: device type is not known" in capsys.readouterr().err


def test_jobs_of_pbs_and_lsf(tmp_path: Path) -> None:
    nodes = written(tmp_path, "n1\nn1\nn2\nn2\n")
    hosts = job_hosts({"PBS_NODEFILE": nodes})
    assert hosts is not None and [(h.name, h.devices) for h in hosts] == [("n1", 2), ("n2", 2)]
    gpus = tmp_path / "gpus"
    gpus.write_text("n1-gpu0\nn1-gpu1\nn2-gpu0\n")
    hosts = job_hosts({"PBS_NODEFILE": nodes, "PBS_GPUFILE": str(gpus)})
    assert hosts is not None and [(h.name, h.devices) for h in hosts] == [("n1", 2), ("n2", 1)]
    hosts = job_hosts({"LSB_MCPU_HOSTS": "a 42 b 42"})
    assert hosts is not None and [(h.name, h.devices) for h in hosts] == [("a", None), ("b", None)]
    # a line for each processor, and the GPUs of the job, as at NCI
    hosts = job_hosts({"PBS_NODEFILE": nodes, "PBS_NGPUS": "8", "PBS_NCPUS": "4"})
    assert hosts is not None and [(h.name, h.devices) for h in hosts] == [("n1", 4), ("n2", 4)]
    with pytest.raises(InputError, match="LSB_MCPU_HOSTS: not usable"):
        job_hosts({"LSB_MCPU_HOSTS": "a 42 b"})
    assert job_hosts({}) is None


MATRIX = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV4\t{far}\t{far}\tPIX\t0-31\t0
GPU1\tNV4\t X \t{far}\t{far}\tPXB\t0-31\t0
GPU2\t{far}\t{far}\t X \tNV4\tSYS\t32-63\t1
GPU3\t{far}\t{far}\tNV4\t X \tSYS\t32-63\t1
NIC0\tPIX\tPXB\tSYS\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
"""


@pytest.mark.parametrize(
    ("far", "device", "gbit", "basis"),
    [
        ("NV2", "V100-SXM2-16GB", 400, "NVLinks.*NV2 of 4, NV4 of 2"),
        ("NV4", "RTX-3090", 450, "NVLinks.*NV4 of 6"),
        ("SYS", "A6000", 200, "PCIe through the link between processors.*not measured"),
        ("PHB", "H100-NVL-94GB", 400, "PCIe through a processor's host bridge"),
    ],
)
def test_topologies(far: str, device: str, gbit: float, basis: str, tmp_path: Path) -> None:
    topology = read_topology(written(tmp_path, MATRIX.format(far=far)))
    found, told = topology.fabric(device)
    assert topology.gpus == 4 and found == gbit
    assert re.search(basis, told)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing\n", "no matrix"),
        (MATRIX.format(far="WIRE"), r"line 2: unknown link .*got 'WIRE'"),
        (MATRIX.format(far="SYS").replace("GPU3\tSYS", "GPU3\tPHB"), "GPU0 and GPU3 differ"),
        ("\tGPU0\tGPU1\nGPU0\t X \tPIX\n", "rows are missing .*got 'GPU1'"),
        ("\tGPU0\tGPU1\nGPU0\t X\nGPU1\tPIX\t X\n", "line 2: not a row"),
    ],
)
def test_broken_topologies(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        read_topology(written(tmp_path, text))


def test_a_topology_gives_number_and_links(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    matrix = written(tmp_path, MATRIX.format(far="NV4"))
    arguments = ["--slurm", "n[1-2]", "--topology", matrix, "--device", "A100-SXM4-80GB"]
    target = tmp_path / "cluster.yaml"
    entries, assumed = detected(capsys, *arguments, "-o", str(target))
    assert entries == [(2, 4, "A100-SXM4-80GB")]
    assert load_cluster(target).bandwidth()[0, 1] == 800e9 / 8
    assert any("800 Gbit/s by the NVLinks" in line for line in assumed)
    arguments[-1] = "T4"  # a T4 has no NVLinks
    assert main(["cluster", "detect", *arguments]) == 2
    assert "rate of this device's NVLinks" in capsys.readouterr().err


def node(name: str, labels: dict[str, str], **further: Any) -> dict[str, Any]:
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    status = {**ready, "allocatable": further.pop("allocatable", {})}
    return {
        "kind": "Node",
        "metadata": {"name": name, "labels": labels},
        "status": further.pop("status", status),
        **further,
    }


NVIDIA = {
    "nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB",
    "nvidia.com/gpu.count": "8",
    "nvidia.com/gpu.memory": "81920",
}
AMD = {"amd.com/gpu.product-name": "AMD_Instinct_MI300X_OAM"}
T4 = {"cloud.google.com/gke-accelerator": "nvidia-tesla-t4"}


def test_nodes_of_kubernetes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cordoned = node("e", NVIDIA, spec={"unschedulable": True})
    unready = node("f", NVIDIA, status={"conditions": [{"type": "Ready", "status": "False"}]})
    items = [
        node("a", NVIDIA, allocatable={"nvidia.com/gpu": "8"}),
        node("b", NVIDIA, allocatable={"nvidia.com/gpu": "6"}),
        node("c", AMD, allocatable={"amd.com/gpu": "4"}),
        node("d", T4, allocatable={"nvidia.com/gpu": "2"}),
        cordoned,
        unready,
        node("g", {}, allocatable={"cpu": "8"}),
        # MIG's strategy `mixed`: nvidia.com/gpu may count divided GPUs, too
        node("h", NVIDIA, allocatable={"nvidia.com/gpu": "8", "nvidia.com/mig-3g.40gb": "4"}),
        node("i", NVIDIA, allocatable={"nvidia.com/gpu": "8", "nvidia.com/mig-1g.10gb": "56"}),
        node("j", {}, allocatable={"nvidia.com/mig-3g.47gb": "2"}),
    ]
    path = written(tmp_path, json.dumps({"kind": "List", "items": items}))
    entries, assumed = detected(capsys, "--kubernetes", path)
    assert entries == [
        (1, 8, "A100-SXM4-80GB"),
        (1, 6, "A100-SXM4-80GB"),
        (1, 4, "MI300X"),
        (1, 2, "T4"),
        (1, 6, "A100-SXM4-80GB"),
    ]
    told = "\n".join(assumed)
    assert "6 on h beside MIG slices, which are left out (4 nvidia.com/mig-3g.40gb)" in told
    assert "i is left out: MIG divides all its GPUs (56 nvidia.com/mig-1g.10gb)" in told
    assert "j is left out: MIG divides its GPUs (2 nvidia.com/mig-3g.47gb)" in told
    for line in ("e is left out: it takes no pods", "f is left out: it is not ready"):
        assert line in told
    assert "g is left out: it has no GPUs" in told and "fewer than the label" in told


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "no list of nodes"),
        ({"kind": "PodList", "items": []}, "no list of nodes"),
        ({"kind": "List", "items": 3}, "no items"),
        ({"kind": "List", "items": []}, "no node with GPUs"),
        ({"kind": "List", "items": [{"metadata": {}}]}, r"items\[0\]: node without a name"),
        ({"kind": "List", "items": [3]}, r"items\[0\]: node without a name"),
        (node("a", NVIDIA | {"nvidia.com/gpu.count": "99999"}), "a: number of devices"),
    ],
)
def test_broken_lists_of_nodes(document: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        read_nodes(written(tmp_path, json.dumps(document)))


def test_slices_of_devices_are_refused_and_an_option_decides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = NVIDIA | {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB-MIG-3g.40gb"}
    path = written(tmp_path, json.dumps(node("a", labels)))
    assert main(["cluster", "detect", "--kubernetes", path]) == 2
    assert "a slice (MIG) of a device" in capsys.readouterr().err
    entries, _ = detected(capsys, "--kubernetes", path, "--device", "A30", "--devices", "2")
    assert entries == [(1, 2, "A30")]


def test_network_cards(tmp_path: Path) -> None:
    assert local_network_gbit(tmp_path) is None
    cards = (("eth0", "2500"), ("lo", ""), ("down", "-1"), ("veth1", "10000"), ("bond0", "5000"))
    for card, speed in cards:
        (tmp_path / "net" / card).mkdir(parents=True)
        (tmp_path / "net" / card / "speed").write_text(f"{speed}\n")
    for part in ("eth0/device", "down/device", "bond0/bonding"):
        (tmp_path / "net" / part).mkdir()
    assert local_network_gbit(tmp_path) == 5, "a bridge has no cable"
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
    for text in (target.read_text(), capsys.readouterr().out):
        assert "links within a node are assumed" in " ".join(text.split())
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


def test_options_count_before_what_files_tell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, "node1\nnode2 slots=64\n")
    entries, assumed = detected(
        capsys, "--hostfile", path, "--device", "T4", "--devices", "8", "--intra", "100"
    )
    assert entries == [(2, 8, "T4")]
    assert assumed == ["links between nodes are assumed: 100 Gbit/s; --network says otherwise"]
    assert main(["cluster", "detect", "--hostfile", path, "--device", "T4"]) == 2
    assert "line 1 has neither slots=N nor :N" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "found"), [("NVIDIA GeForce RTX 3090 Ti", "RTX-3090Ti"), ("Tesla T4", "T4")]
)
def test_a_driver_s_name_as_an_option(
    name: str, found: str, capsys: pytest.CaptureFixture[str]
) -> None:
    entries, assumed = detected(capsys, "--slurm", "n1", "--devices", "1", "--device", name)
    assert entries == [(1, 1, found)] and f"{name} is taken for" in assumed[0]


def test_local_gpus_fill_what_hosts_do_not_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    local = Host("here", 4, "T4", 100.0, 50.0)
    monkeypatch.setattr("hetplan.cli.cluster.local_node", lambda: local)
    target = tmp_path / "cluster.yaml"
    assert detected(capsys, "-o", str(target)) == ([(1, 4, "T4")], [])
    (only,) = load_cluster(target).nodes
    assert only.intra_bandwidth == 100e9 / 8 and only.network_bandwidth == 50e9 / 8
    entries, assumed = detected(capsys, "--slurm", "n[1-2]")
    assert entries == [(2, 4, "T4")]
    assert len(assumed) == 4 and all("assumed" in line and "here" in line for line in assumed)


def test_an_unknown_local_gpu_is_refused_with_what_is_near(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    local = Host(
        "here", 2, driver_name="NVIDIA A40-48Q", memory_bytes=44 * 2**30, network_gbit=10.0
    )
    monkeypatch.setattr("hetplan.cli.cluster.local_node", lambda: local)
    assert main(["cluster", "detect"]) == 2
    error = capsys.readouterr().err
    assert "a virtual GPU" in error and "near, but other products, are A40" in error
    assert detected(capsys, "--device", "A40")[0] == [(1, 2, "A40")]


def test_nodes_of_scontrol(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        "NodeName=a Arch=x86_64 CPUTot=8\n   Gres=gpu:a100-sxm4-80gb:8(S:0-1)\n"
        "   State=IDLE ThreadsPerCore=2\n   Reason=NodeName=x\n\n"
        "NodeName=b Gres=gpu:nvidia_h100_80gb_hbm3:4(S:0,2),lustre:1 State=MIXED\n"
        "NodeName=c Gres=gpu:t4:2 State=IDLE+DRAIN\n"
        "NodeName=d Gres=gpu:t4:2 State=DOWN*\n"
        "NodeName=e Gres=(null) State=IDLE\n"
    )
    entries, assumed = detected(capsys, "--scontrol", written(tmp_path, text))
    assert entries == [(1, 8, "A100-SXM4-80GB"), (1, 4, "H100-SXM5-80GB")]
    assert [line for line in assumed if "left out" in line] == [
        "node c is left out: its state is IDLE+DRAIN",
        "node d is left out: its state is DOWN*",
        "node e is left out: it has no GPUs",
    ]
    path = written(tmp_path, "NodeName=a Gres=gpu:8 State=IDLE\n")
    assert detected(capsys, "--scontrol", path, "--device", "T4")[0] == [(1, 8, "T4")]


@pytest.mark.parametrize(
    ("text", "entries", "told"),
    [
        ("Gres=(null) CfgTRES=cpu=8,gres/gpu=16,gres/gpu:nvidia_b200=4", (4, "B200"), "12 others"),
        ("CfgTRES=cpu=8,gres/gpu=2,gres/gpu:t4=2", (2, "T4"), "is taken for T4"),
        (
            "Gres=gpu:h200:2,gpu:h200_3g.71gb:8(S:0-1)",
            (2, "H200-SXM-141GB"),
            "8 slices are left out",
        ),
        ("Gres=gpu:l4:2,gpu:l4_1g.6gb:4(S:0-1)", (2, "L4"), "4 slices are left out"),
    ],
)
def test_gpus_that_slurm_counts_beside_slices(
    text: str,
    entries: tuple[int, str],
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = written(tmp_path, f"NodeName=a State=IDLE {text}\n")
    found, assumed = detected(capsys, "--scontrol", path)
    assert found == [(1, *entries)] and told in "\n".join(assumed)


def test_names_of_devices_are_types_by_an_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "NodeName=a Gres=gpu:a100:4\nNodeName=b Gres=gpu:v100:4\n"
    arguments = ["--scontrol", written(tmp_path, text), "--device"]
    found, _ = detected(capsys, *arguments, "a100=A100-PCIE-40GB, V100=V100-SXM2-32GB")
    assert found == [(1, 4, "A100-PCIE-40GB"), (1, 4, "V100-SXM2-32GB")]
    for wrong, message in (
        ("a100=T4", "b: the catalogue has no such device"),
        ("a100=T4,a100=L4", "--device: not usable (got 'a100=L4'"),
        ("=T4", "--device: not usable"),
        ("a100=T4,L4", "types and NAME=TYPE exclude each other"),
    ):
        assert main(["cluster", "detect", *arguments, wrong]) == 2
        assert message in capsys.readouterr().err


def test_a_machine_of_several_types_is_a_node_for_each(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = (
        Host("here", 2, "L4", 180.0, 90.0, driver_name="NVIDIA L4"),
        Host("here", 1, "T4", None, 90.0, driver_name="Tesla T4"),
    )
    local = Host("here", parts=parts, order="CUDA_VISIBLE_DEVICES=0,2,1")
    monkeypatch.setattr("hetplan.cli.cluster.local_node", lambda: local)
    target = tmp_path / "cluster.yaml"
    found, assumed = detected(capsys, "-o", str(target))
    assert found == [(1, 2, "L4"), (1, 1, "T4")]
    assert assumed == [
        "here has 2 NVIDIA L4 and 1 Tesla T4: it is written as 2 nodes of one type each",
        "ranks get the GPUs of these nodes by CUDA_VISIBLE_DEVICES=0,2,1",
    ]
    cluster = load_cluster(target)
    assert cluster.nodes[0].intra_bandwidth == 180e9 / 8
    assert [node.network_bandwidth for node in cluster.nodes] == [90e9 / 8] * 2
    assert detected(capsys, "--device", "A2")[0] == [(1, 3, "A2")], "the user says one type"
    found, _ = detected(capsys, "--slurm", "n1", "--device", "T4", "--devices", "4")
    assert found == [(1, 4, "T4")], "this machine is no part of the cluster"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-8-sig"])
def test_texts_of_windows_are_read(
    encoding: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "hosts"
    path.write_bytes(LIST.replace("\n", "\r\n").encode(encoding))
    assert detected(capsys, "--gpus", str(path))[0] == [(1, 2, "A100-SXM4-80GB")]
    path.write_bytes("a slots=4\r\nb slots=2\r\n".encode(encoding))
    found, _ = detected(capsys, "--hostfile", str(path), "--device", "T4")
    assert found == [(1, 4, "T4"), (1, 2, "T4")]
    path.write_bytes(json.dumps(node("a", NVIDIA)).encode(encoding))
    assert detected(capsys, "--kubernetes", str(path))[0] == [(1, 8, "A100-SXM4-80GB")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing\n", "hosts: no node"),
        ("NodeName=a Gres=gpu:a100:x State=IDLE\n", "hosts: a: Gres is not usable"),
        (
            "NodeName=a Gres=gpu:l4:4,gpu:t4:2 State=IDLE\nNodeName=b Gres=gpu:t4:2\n",
            "a: the GPUs of this node differ, and a node of a cluster file has one type",
        ),
        ("NodeName=a Gres=gpu:t4:2 State=DOWN\n", "no node with GPUs that takes jobs"),
        ("NodeName=a Gres=gpu:2\nNodeName=a Gres=gpu:2\n", "node stands twice"),
    ],
)
def test_broken_scontrol(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cluster", "detect", "--scontrol", written(tmp_path, text)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


LIST = """\
GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)
GPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a78)
"""
SLICES = """\
GPU {index}: A100-SXM4-40GB (UUID: GPU-aa)
  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4f1ef)
  MIG {second}     Device  1: (UUID: MIG-c6d4f1f0)
"""
QUERY = """\
index, name, memory.used [MiB], memory.total [MiB], mig.mode.current
0, NVIDIA H100 80GB HBM3, 12 MiB, 81559 MiB, Disabled
1, NVIDIA H100 80GB HBM3, 12 MiB, 81559 MiB, {mig}
"""

# As nvidia-smi 595 prints it without options; older drivers have narrower columns.
BOX = """\
Tue Sep  1 14:02:23 2026
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 595.84                 Driver Version: 595.84         CUDA Version: 13.2     |
+-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |
|                                         |                        |               MIG M. |
|=========================================+========================+======================|
|   0  NVIDIA GeForce RTX 3090        Off |   00000000:01:00.0  On |                  N/A |
|  0%   41C    P2            115W /  250W |   22598MiB /  24576MiB |      9%      Default |
|                                         |                        |                  N/A |
+-----------------------------------------+------------------------+----------------------+
|   1  NVIDIA A100-SXM4-80GB          On  |   00000000:21:00.0 Off |                    0 |
| N/A   35C    P8              7W /  250W |   24006MiB /  81920MiB |      0%      Default |
|                                         |                        |             Enabled  |
+-----------------------------------------+------------------------+----------------------+

| Processes:                                                                              |
|    0   N/A  N/A            4417      C   ./llama-server                        22586MiB |
"""


@pytest.mark.parametrize(
    ("text", "entries", "told"),
    [
        (BOX, [(1, 1, "RTX-3090")], "1 on hosts, where MIG divides 1 other(s)"),
        (
            "name, memory.total [MiB]\nNVIDIA L4, 23034\nTesla T4, 15360\nNVIDIA L4, 23034\n",
            [(1, 2, "L4"), (1, 1, "T4")],
            "ranks get the GPUs of these nodes by CUDA_DEVICE_ORDER=PCI_BUS_ID "
            "CUDA_VISIBLE_DEVICES=0,2,1",
        ),
        (LIST, [(1, 2, "A100-SXM4-80GB")], "A100-SXM4-80GB is taken for A100-SXM4-80GB"),
        (QUERY.format(mig="[N/A]"), [(1, 2, "H100-SXM5-80GB")], "within a node are assumed"),
        (QUERY.format(mig="Enabled"), [(1, 1, "H100-SXM5-80GB")], "MIG divides 1 other"),
        (LIST + SLICES.format(index=2, second="1g.5gb"), [(1, 2, "A100-SXM4-80GB")], "MIG divides"),
        ("0, Tesla T4, 3, 15360\n1, Tesla T4, 12, 15360\n", [(1, 2, "T4")], "as in usual"),
        ("A100-SXM4-40GB\nA100-SXM4-40GB\n", [(1, 2, "A100-SXM4-40GB")], "is taken for"),
        ("name\nNVIDIA L4\n", [(1, 1, "L4")], "is taken for"),
        (
            "".join(f"{host}: {line}\n" for host in "ab" for line in LIST.splitlines())
            + "c: bash: nvidia-smi: command not found\nconnection closed\n",
            [(2, 2, "A100-SXM4-80GB")],
            "c is left out: it shows no GPU, and says bash: nvidia-smi: command not found",
        ),
        (
            "[WARNING]: python\na | CHANGED | rc=0 >>\nGPU 0: NVIDIA L4 (UUID: GPU-1)\n\n"
            'b | UNREACHABLE! => {\n    "changed": false\n}\n',
            [(1, 1, "L4")],
            "b is left out: it shows no GPU, and says UNREACHABLE! => {",
        ),
        (
            "a | CHANGED | rc=0 | (stdout) GPU 0: NVIDIA L4 (UUID: G-1)\\nGPU 1: NVIDIA L4\n",
            [(1, 2, "L4")],
            "is taken for L4",
        ),
        (
            "----\nnode[1-3] (3)\n----\nname, memory.total [MiB]\nNVIDIA L40S, 46068 MiB\n"
            "----\nlogin\n----\nNVIDIA-SMI has failed\n",
            [(3, 1, "L40S")],
            "login is left out: it shows no GPU, and says NVIDIA-SMI has failed",
        ),
        (
            "=== titan-1 ===\nNVIDIA GeForce RTX 2080 Ti, 11264 MiB\n==> b.txt <==\n"
            "NVIDIA TITAN RTX, 24576 MiB\n",
            [(1, 1, "RTX-2080Ti"), (1, 1, "Titan-RTX")],
            "between nodes are assumed",
        ),
        (
            f"Unable to determine the device handle for GPU1: Unknown Error\n{LIST}",
            [(1, 2, "A100-SXM4-80GB")],
            "passed over: Unable to determine",
        ),
    ],
)
def test_lists_of_nvidia_smi(
    text: str,
    entries: list[tuple[int, int, str]],
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found, assumed = detected(capsys, "--gpus", written(tmp_path, text))
    assert found == entries
    assert any(told in line for line in assumed), assumed


def test_a_list_of_nvidia_smi_for_each_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.txt"
    other.write_text(QUERY.format(mig="Disabled"))
    arguments = ["--gpus", written(tmp_path, LIST), "--gpus", str(other)]
    found, _ = detected(capsys, *arguments)
    assert found == [(1, 2, "A100-SXM4-80GB"), (1, 2, "H100-SXM5-80GB")]
    assert main(["cluster", "detect", *arguments, "--gpus", str(other)]) == 2
    assert "other.txt: other: host stands twice" in capsys.readouterr().err
    assert main(["cluster", "detect", *arguments, "--slurm", "a"]) == 2
    assert "exclude each other" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no GPU (expected the output of nvidia-smi -L"),
        ("NVIDIA-SMI has failed\n", "hosts: passed over: NVIDIA-SMI has failed"),
        (LIST + LIST, "GPU stands twice"),
        (LIST + QUERY.format(mig="Disabled"), "two lists of one host's GPUs"),
        (QUERY.format(mig="Disabled") * 2, "two queries of one host"),
        ("0, GPU-aa\n", "hosts: no GPU"),
        ("index, uuid\n0, GPU-aa\n", "a query without the column name"),
        (
            "==> a <==\nNVIDIA L4, 23034\nTesla T4, 15360\n==> b <==\nTesla T4, 15360\n",
            "a: the GPUs of this node differ, and a node of a cluster file has one type (got '1 "
            "NVIDIA L4 of 22.5 GiB, 1 Tesla T4 of 15 GiB'",
        ),
        ("NVIDIA GeForce RTX 3080, 10240\nNVIDIA GeForce RTX 3080, 20480\n", "other memory than"),
        ("name, mig.mode.current\nNVIDIA H200, Enabled\n", "MIG divides all GPUs"),
        (SLICES.format(index=0, second="3g.20gb"), "this is a slice (MIG) of a device"),
        (SLICES.format(index=0, second="1g.5gb"), "this is a slice (MIG) of a device"),
        ("GPU 0: NVIDIA GeForce RTX 4090 Laptop GPU (UUID: GPU-1)\n", "held to fewer watts"),
        ("NVIDIA L4\n" * 600, "number of devices is not usable"),
        ("| NVIDIA-SMI 525.85.12  Driver Version: 525 |\nNVIDIA L4\n", "table has no GPU"),
        (BOX.replace("NVIDIA GeForce RTX 3090 ", "NVIDIA GeForce ...      "), "table cuts names"),
    ],
)
def test_broken_lists_of_nvidia_smi(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cluster", "detect", "--gpus", written(tmp_path, text)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
