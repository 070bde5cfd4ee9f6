"""`hetplan cluster detect`: a cluster file from this machine, a hostfile or Slurm."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from hetplan.cli.options import JsonOption
from hetplan.cli.output import check_target, note, print_json, print_tables
from hetplan.errors import InputError
from hetplan.text import Table, number_text

app = typer.Typer(
    help="Write cluster files.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def root() -> None:
    """Write cluster files."""


@app.command("detect")
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
        typer.Option("--devices", metavar="N", help="Devices per node, where nothing tells."),
    ] = None,
    intra: Annotated[
        float | None,
        typer.Option("--intra", metavar="GBIT", help="Gbit/s within a node; default measured."),
    ] = None,
    network: Annotated[
        float | None,
        typer.Option(
            "--network", metavar="GBIT", help="Gbit/s between nodes; default the local card's."
        ),
    ] = None,
    name: Annotated[
        str, typer.Option("--name", metavar="NAME", help="The cluster's name.")
    ] = "detected",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the cluster file (YAML)."),
    ] = None,
    json: JsonOption = False,
) -> int:
    """Describe the cluster that is here: local GPUs and links (through torch), a hostfile's or a
    Slurm job's nodes."""
    from dataclasses import replace

    from hetplan.profiling.cluster import ClusterFile, build_cluster
    from hetplan.profiling.detect import cluster_document, read_hostfile, slurm_hosts
    from hetplan.runtime.devices import local_node
    from hetplan.schema import parse

    check_target(output)
    if hostfile is not None and slurm is not None:
        raise InputError("--hostfile and --slurm exclude each other")
    for option, value in (("--devices", devices), ("--intra", intra), ("--network", network)):
        if value is not None and not 0 < value <= 1e6:
            raise InputError(
                "not usable", where=option, got=value, expected="more than 0, at most 1e6"
            )
    found = local_node()
    local = replace(
        found,
        device=device or found.device,
        devices=devices or found.devices or slurm_devices(),
        intra_gbit=intra or found.intra_gbit,
        network_gbit=network or found.network_gbit,
    )
    job = os.environ.get("SLURM_JOB_NODELIST", "")
    if hostfile is not None:
        hosts = read_hostfile(str(hostfile))
    elif slurm is not None or job:
        hosts = slurm_hosts(slurm if slurm is not None else job)
    else:
        hosts = [local]
    if local.device is None:
        raise InputError(
            "device type is not known",
            where="--device",
            got=unknown_device(),
            expected="a name of the catalogue",
        )
    document = cluster_document(hosts, name, local)
    build_cluster(parse(ClusterFile, document, where="the detected cluster"))
    told = assumptions(
        local.intra_gbit,
        local.network_gbit,
        max(n["devices"] for n in document["nodes"]),
        len(hosts),
    )
    if output is not None:
        write(document, told, output)
    for line in told:
        note(line)
    if json:
        print_json(document)
    else:
        print_tables([table(document)])
    return 0


def slurm_devices() -> int | None:
    """GPUs per node of a Slurm job; None outside of one."""
    text = os.environ.get("SLURM_GPUS_ON_NODE", "")
    return int(text) if text.isdecimal() and int(text[:6]) > 0 else None


def unknown_device() -> str | None:
    """The local GPU's name, which the catalogue does not know."""
    from hetplan.runtime.devices import local_device_name

    return local_device_name()


def assumptions(intra: float | None, network: float | None, devices: int, hosts: int) -> list[str]:
    """What neither was measured nor given."""
    from hetplan.profiling.detect import ETHERNET_GBIT, PCIE_GBIT

    told = []
    if intra is None and devices > 1:
        told.append(
            f"links within a node are assumed: {PCIE_GBIT:g} Gbit/s (PCIe 4.0 x16); --intra says otherwise"
        )
    if network is None and hosts > 1:
        told.append(
            f"links between nodes are assumed: {ETHERNET_GBIT:g} Gbit/s; --network says otherwise"
        )
    return told


def write(document: dict[str, Any], told: list[str], path: Path) -> None:
    """YAML with a comment of what was assumed."""
    import yaml

    from hetplan.files import write_text

    head = "".join(f"# {line}\n" for line in ("written by hetplan cluster detect", *told))
    write_text(path, head + yaml.safe_dump(document, sort_keys=False))


def table(document: dict[str, Any]) -> Table:
    """One row per entry of equal nodes."""
    rows = tuple(
        (
            str(node["count"]),
            str(node["devices"]),
            node["device"],
            number_text(node["intra_node_gbit_per_s"], 4),
            number_text(node["network_gbit_per_s"], 4),
        )
        for node in document["nodes"]
    )
    header = ("nodes", "devices", "device", "Gbit/s within", "between")
    return Table(f"cluster {document['name']}", header, rows, right=(0, 1, 3, 4))
