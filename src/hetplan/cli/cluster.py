"""`hetplan cluster detect`: a cluster file from this machine, a hostfile or Slurm."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from hetplan.cli.help_page import described
from hetplan.cli.options import JsonOption, number, target
from hetplan.cli.output import emit, note
from hetplan.errors import require
from hetplan.files import to_yaml, write_text
from hetplan.profiling.hardware.cluster import GBIT, ClusterFile, build_cluster
from hetplan.profiling.hardware.detect import (
    ETHERNET_GBIT,
    Host,
    cluster_document,
    read_hostfile,
    slurm_hosts,
)
from hetplan.profiling.hardware.driver_names import unrecognised
from hetplan.replays.offers import links_of
from hetplan.runtime.launch.devices import (
    local_device_memory,
    local_device_name,
    local_node,
)
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
            "This machine, or the nodes of the Slurm job that runs here",
            "hetplan cluster detect -o cluster.yaml",
        ),
        (
            "The nodes of a hostfile, each with GPUs of one type",
            "hetplan cluster detect --hostfile hosts --device A100-SXM4-80GB -o cluster.yaml",
        ),
    ),
)
def detect(
    hostfile: Annotated[
        Path | None,
        typer.Option("--hostfile", metavar="FILE", help="Nodes, as `HOST slots=N` lines."),
    ] = None,
    slurm: Annotated[
        str | None,
        typer.Option(
            "--slurm", metavar="NODELIST", help="Nodes, such as gpu[01-04]; default a job's own."
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="NAME", help="Device type; default the local GPUs'."),
    ] = None,
    devices: Annotated[
        int | None,
        number("--devices", least=1, most=1e6, help="Devices per node, if not detected."),
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
    """Describe the cluster that is here: local GPUs and links (through torch), a hostfile's or a
    Slurm job's nodes."""
    require(hostfile is None or slurm is None, "--hostfile and --slurm exclude each other")
    job = slurm if slurm is not None else os.environ.get("SLURM_JOB_NODELIST") or None
    hosts = None  # None: this machine alone
    if hostfile is not None:
        hosts = read_hostfile(str(hostfile))
    elif job is not None:
        hosts = slurm_hosts(job)
    local = described_node(device, devices, intra, network)
    hosts = hosts or [local]
    _, usual_bytes_per_s, *_ = links_of(local.device or "")  # between devices of a node
    usual = usual_bytes_per_s / GBIT
    document = cluster_document(hosts, name, replace(local, intra_gbit=local.intra_gbit or usual))
    # Raises InputError where the document is no cluster file that hetplan can read.
    build_cluster(parse(ClusterFile, document, where="the detected cluster"))
    assumed = []
    largest = max(node["devices"] for node in document["nodes"])
    if local.intra_gbit is None and largest > 1:
        assumed.append(
            f"links within a node are assumed: {usual:g} Gbit/s, as in usual machines with "
            f"{local.device}; --intra says otherwise"
        )
    if local.network_gbit is None and len(hosts) > 1:
        assumed.append(
            f"links between nodes are assumed: {ETHERNET_GBIT:g} Gbit/s; --network says otherwise"
        )
    if output is not None:
        heading = comments("written by hetplan cluster detect", *assumed)
        write_text(output, "\n".join([*heading, to_yaml(document)]))
    note(*assumed)
    return emit(document, [nodes_table(document)], json=json)


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
    )


def described_node(
    device: str | None, devices: int | None, intra: float | None, network: float | None
) -> Host:
    """This machine as a node. The arguments that are not None replace the detected values.

    device: device type. devices: number of devices. intra, network: Gbit/s within the node and to
    other nodes. Raises InputError where the device type is unknown.
    """
    here = local_node()
    local = replace(
        here,
        device=device or here.device,
        devices=devices or here.devices or slurm_devices(),
        intra_gbit=intra or here.intra_gbit,
        network_gbit=network or here.network_gbit,
    )
    gpu = local_device_name()
    if local.device is None and gpu is not None:
        raise unrecognised(gpu, local_device_memory(), where="the GPUs here")
    require(
        local.device is not None,
        "no GPU was found here",
        where="--device",
        expected="a name of the catalogue, as --device A100-SXM4-80GB",
    )
    return local


def slurm_devices() -> int | None:
    """The number of GPUs that a Slurm job has on this node; None outside of such a job."""
    text = os.environ.get("SLURM_GPUS_ON_NODE", "")
    if not text.isdecimal():
        return None
    return int(text[:6]) or None  # a machine has no million GPUs: a longer text is cut
