"""`hetplan cluster detect`: a cluster file from this machine, or from what launchers, schedulers
and tools tell of nodes."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hetplan.cli.help_page import described
from hetplan.cli.options import JsonOption, number, target
from hetplan.cli.output import emit
from hetplan.errors import one_line, require
from hetplan.files import to_yaml, write_text
from hetplan.profiling.hardware.cluster import GBIT, ClusterFile, build_cluster
from hetplan.profiling.hardware.detect import Options, described as described_nodes, located
from hetplan.profiling.hardware.gpu_lists import read_gpu_lists
from hetplan.profiling.hardware.hostfiles import read_hostfile
from hetplan.profiling.hardware.hosts import Host
from hetplan.profiling.hardware.jobs import job_hosts, with_gpus
from hetplan.profiling.hardware.kubernetes_nodes import read_nodes
from hetplan.profiling.hardware.launch_scripts import read_launch_script
from hetplan.profiling.hardware.node_lists import node_names
from hetplan.profiling.hardware.slurm_nodes import read_slurm_nodes
from hetplan.profiling.hardware.ssh_hosts import ask_hosts
from hetplan.profiling.hardware.topologies import read_topology
from hetplan.replays.offers import links_of
from hetplan.runtime.launch.devices import local_node
from hetplan.schema import parse
from hetplan.text import (
    Column,
    Table,
    comments,
    digits,
)


@described(
    examples=(
        (
            "This machine, or the nodes of the Slurm, PBS or LSF job that runs here",
            "hetplan cluster detect -o cluster.yaml",
        ),
        (
            "Two machines that take ssh without a password, and the network between them",
            "hetplan cluster detect --hosts desk,ann@attic:2222 -o cluster.yaml",
        ),
        (
            "The nodes of which `pdsh -w a,b nvidia-smi -L > gpus.txt` wrote",
            "hetplan cluster detect --gpus gpus.txt -o cluster.yaml",
        ),
    ),
)
def detect(
    hosts_over_ssh: Annotated[
        str | None,
        typer.Option(
            "--hosts",
            metavar="HOST[,HOST]",
            help="Ask these machines over ssh, and measure the network between them.",
        ),
    ] = None,
    hostfile: Annotated[
        Path | None,
        typer.Option(
            "--hostfile", metavar="FILE", help="Nodes, as `HOST slots=N` or `HOST:N` lines."
        ),
    ] = None,
    script: Annotated[
        Path | None,
        typer.Option(
            "--script",
            metavar="FILE",
            help="Nodes, as a script says that starts torchrun, deepspeed, accelerate, mpirun or "
            "srun, or asks Slurm or PBS.",
        ),
    ] = None,
    slurm: Annotated[
        str | None,
        typer.Option(
            "--slurm", metavar="NODELIST", help="Nodes, such as gpu[01-04]; default a job's own."
        ),
    ] = None,
    scontrol: Annotated[
        Path | None,
        typer.Option("--scontrol", metavar="FILE", help="Nodes, as `scontrol show node` prints."),
    ] = None,
    kubernetes: Annotated[
        Path | None,
        typer.Option(
            "--kubernetes", metavar="FILE", help="Nodes, as `kubectl get nodes -o json` prints."
        ),
    ] = None,
    gpus: Annotated[
        list[Path] | None,
        typer.Option(
            "--gpus",
            metavar="FILE",
            help="GPUs, as `nvidia-smi -L` or `nvidia-smi --query-gpu=name,memory.total "
            "--format=csv` prints; once per node, or one file with `HOST: ` before each line.",
        ),
    ] = None,
    topology: Annotated[
        Path | None,
        typer.Option(
            "--topology", metavar="FILE", help="Links in a node, as `nvidia-smi topo -m` prints."
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="TYPE[,TYPE]",
            help="Device type, one per component of a heterogeneous job, or NAME=TYPE for each "
            "name that devices have (a100=A100-SXM4-80GB,v100=V100-SXM2-32GB); default the local "
            "GPUs'.",
        ),
    ] = None,
    devices: Annotated[
        int | None,
        number("--devices", least=1, most=1e6, help="Devices per node; default as detected."),
    ] = None,
    intra: Annotated[
        float | None,
        number(
            "--intra",
            least=1e-6,
            most=1e6,
            metavar="GBIT",
            help="Gbit/s in a node; default measured.",
        ),
    ] = None,
    network: Annotated[
        float | None,
        number(
            "--network",
            least=1e-6,
            most=1e6,
            metavar="GBIT",
            help="Gbit/s between nodes; default the local card's.",
        ),
    ] = None,
    name: Annotated[
        str, typer.Option("--name", metavar="NAME", help="The cluster's name.")
    ] = "detected",
    output: Annotated[
        Path | None,
        target("--output", "-o", help="Write the cluster file (YAML)."),
    ] = None,
    json: JsonOption = False,
) -> int:
    """Describe the cluster that is here: local GPUs and links (through torch), machines that are
    asked over ssh, the nodes of a hostfile, of a scheduler's job, of Kubernetes or of
    nvidia-smi's lists. Each assumption
    is a line of the answer."""
    sources = (hosts_over_ssh, hostfile, script, slurm, scontrol, kubernetes, gpus or None)
    given = [option for option in sources if option is not None]
    require(
        len(given) <= 1,
        "--hosts, --hostfile, --script, --slurm, --scontrol, --kubernetes and --gpus exclude each "
        "other",
    )
    types, names = types_and_names(device or "")
    options = Options(
        device=types,
        names=names,
        devices=devices,
        intra_gbit=intra,
        network_gbit=network,
    )
    left_out: list[str] = []
    if hosts_over_ssh is not None:
        hosts = ask_hosts(hosts_over_ssh, where="--hosts")
        local = Host("")  # nothing is assumed to be as on this machine
    else:
        hosts, left_out = found_hosts(hostfile, script, slurm, scontrol, kubernetes, gpus)
        local = located(hosts, local_node())
    links = None if topology is None else read_topology(str(topology))
    nodes = described_nodes(hosts or [local], options, local, usual_intra_gbit, links)
    document: dict[str, Any] = {"format": "hetplan-cluster", "version": 1, "name": name}
    document["nodes"] = nodes.entries
    assumed = [one_line(line) for line in (*left_out, *nodes.assumed)]
    if assumed:
        document["assumed"] = assumed
    # Raises InputError where the document is no cluster file that hetplan can read.
    build_cluster(parse(ClusterFile, document, where="the detected cluster"))
    if output is not None:
        heading = comments("written by hetplan cluster detect")
        write_text(output, "\n".join([*heading, to_yaml(document)]))
    return emit(document, [nodes_table(document)], json=json)


def types_and_names(text: str) -> tuple[list[str], dict[str, str]]:
    """(the device types, name that devices have -> device type) of `--device`."""
    types: list[str] = []
    names: dict[str, str] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, device = map(str.strip, part.rpartition("="))
        if not equals:
            types.append(part)
            continue
        usable = name and device and name not in names
        require(usable, "not usable", where="--device", got=part, expected="NAME=TYPE, once a name")
        names[name] = device
    both = bool(types) and bool(names)
    require(not both, "types and NAME=TYPE exclude each other", where="--device", got=text)
    return types, names


def found_hosts(
    hostfile: Path | None,
    script: Path | None,
    slurm: str | None,
    scontrol: Path | None,
    kubernetes: Path | None,
    gpus: Sequence[Path] | None,
) -> tuple[list[Host], list[str]]:
    """(the nodes that an option or this process's job names, lines on nodes that are left out); no
    nodes where nothing names any."""
    if hostfile is not None:
        return read_hostfile(str(hostfile)), []
    if script is not None:
        return read_launch_script(str(script))
    if kubernetes is not None:
        return read_nodes(str(kubernetes))
    if scontrol is not None:
        return read_slurm_nodes(str(scontrol))
    if gpus:
        return read_gpu_lists(gpus)
    if slurm is not None:
        return with_gpus(node_names(slurm, where="node list"), os.environ), []
    return job_hosts(os.environ) or [], []


def usual_intra_gbit(device: str) -> float:
    """Gbit/s between two devices in the usual machine with that type."""
    return links_of(device).intra / GBIT


def nodes_table(document: dict[str, Any]) -> Table:
    """The table of a cluster file's document, with one row per entry of equal nodes."""
    return Table.of(
        f"cluster {document['name']}",
        document["nodes"],
        [
            Column("nodes", lambda node: node["count"], right=True),
            Column("devices", lambda node: node["devices"], right=True),
            Column("device", lambda node: node["device"]),
            Column(
                "Gbit/s within",
                lambda node: node["intra_node_gbit_per_s"],
                digits(4),
                right=True,
            ),
            Column(
                "between",
                lambda node: node["network_gbit_per_s"],
                digits(4),
                right=True,
            ),
        ],
        notes=document.get("assumed", ()),
    )
