"""Cluster files from the inputs of launchers: hostfiles with `slots=`, Slurm node lists, and local
devices.

Hostfiles and node lists do not describe the devices of hosts. All hosts are taken to be like the
local node, or as options of the command say.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hetplan.errors import InputError, require
from hetplan.files import read_bytes

MOST_HOSTS = 4096
# Gbit/s of links that are neither measured nor given: PCIe 4.0 x16, and a data centre's Ethernet.
PCIE_GBIT, ETHERNET_GBIT = 256.0, 100.0
# `HOST slots=N max_slots=M`, where the last is of MPI and is not used
SLOTS = re.compile(
    r"^(?P<host>\S+)(?:\s+slots\s*=\s*(?P<slots>\d{1,6}))?(?:\s+max[_-]slots\s*=\s*\d+)?$"
)
# `gpu[01-04,07]` of a Slurm node list, its ranges, and the commas outside of brackets
BRACKETS = re.compile(r"^(?P<before>[^\[\],]*)(?:\[(?P<inside>[^\[\]]+)\](?P<after>[^\[\],]*))?$")
RANGE = re.compile(r"^\s*(\d{1,11})(?:-(\d{1,11}))?\s*$")
OUTER_COMMA = re.compile(r",(?![^\[]*\])")


@dataclass(frozen=True)
class Host:
    """One node. Fields are None where nothing is known of them."""

    name: str
    devices: int | None = None  # number of devices
    device: str | None = None  # type of the devices
    intra_gbit: float | None = None  # Gbit/s between two devices of the node
    network_gbit: float | None = None  # Gbit/s of the node's network


def read_hostfile(path: str) -> list[Host]:
    """The hosts of an MPI or DeepSpeed hostfile with lines `name slots=N`; `#` begins a comment.
    Raises InputError with the number of the line."""
    hosts: dict[str, int] = {}  # name -> slots
    for number, line in enumerate(read_bytes(path).decode("utf-8", "replace").splitlines(), 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        where = f"{path}: line {number}"
        match = SLOTS.match(text)
        if match is None:
            raise InputError("not usable", where=where, got=text, expected="HOST slots=N")
        slots = int(match["slots"] or 1)
        require(
            1 <= slots <= MOST_HOSTS,
            "slots is not usable",
            where=where,
            got=slots,
            expected=f"1 to {MOST_HOSTS}",
        )
        require(match["host"] not in hosts, "host stands twice", where=where, got=match["host"])
        hosts[match["host"]] = slots
    require(hosts, "no host", where=path, expected="lines HOST slots=N")
    return [Host(name, slots) for name, slots in hosts.items()]


def slurm_hosts(text: str) -> list[Host]:
    """The hosts of a Slurm node list, such as `gpu[01-04,07],login1`. Raises InputError."""
    names: list[str] = []
    for part in filter(None, map(str.strip, OUTER_COMMA.split(text))):
        match = BRACKETS.match(part)
        if match is None:
            raise InputError(
                "not usable", where="node list", got=text, expected="such as gpu[01-04,07]"
            )
        before, inside, after = match.groups(default="")
        numbers = [""]
        if inside:
            numbers = [number for piece in inside.split(",") for number in _range(piece)]
        names += [f"{before}{number}{after}" for number in numbers]
        require(
            len(names) <= MOST_HOSTS,
            "too many nodes",
            where="node list",
            got=len(names),
            expected=f"at most {MOST_HOSTS}",
        )
    require(names, "no node", where="node list", got=text, expected="such as gpu[01-04]")
    return [Host(name) for name in dict.fromkeys(names)]


def _range(piece: str) -> list[str]:
    """The numbers of a range such as `01-04`, with as many digits as its first number."""
    match = RANGE.match(piece)
    numbers = range(0)
    if match is not None:
        first, last = match[1], match[2] or match[1]
        numbers = range(int(first), int(last) + 1)
    if match is None or not 1 <= len(numbers) <= MOST_HOSTS:
        raise InputError(
            "not a range",
            where="node list",
            got=piece,
            expected=f"such as 01-04, rising, at most {MOST_HOSTS} nodes",
        )
    return [f"{number:0{len(match[1])}d}" for number in numbers]


def cluster_document(hosts: Sequence[Host], name: str, local: Host) -> dict[str, Any]:
    """The contents of a cluster file. Consecutive equal hosts are one entry of it.

    Raises InputError where the type or the number of a host's devices is not known.

    name: of the cluster. local: the local node, whose fields replace unknown fields of a host.
    """
    entries: list[dict[str, Any]] = []
    for host in hosts:
        complete = replace(
            host,
            devices=host.devices or local.devices,
            device=host.device or local.device,
            intra_gbit=host.intra_gbit or local.intra_gbit or PCIE_GBIT,
            network_gbit=host.network_gbit or local.network_gbit or ETHERNET_GBIT,
        )
        for value, description, option in (
            (complete.device, "device type", "--device NAME"),
            (complete.devices, "number of devices", "--devices N"),
        ):
            require(
                value is not None,
                f"{description} is not known",
                where=host.name,
                expected=f"{option}, or GPUs here",
            )
        entry = {
            "count": 1,
            "devices": complete.devices,
            "device": complete.device,
            "intra_node_gbit_per_s": complete.intra_gbit,
            "network_gbit_per_s": complete.network_gbit,
        }
        if entries and {**entries[-1], "count": 1} == entry:
            entries[-1]["count"] += 1
        else:
            entries.append(entry)
    return {"format": "hetplan-cluster", "version": 1, "name": name, "nodes": entries}


def local_network_gbit(root: Path = Path("/sys/class")) -> float | None:
    """Gbit/s of the fastest link of this host that is up: of its InfiniBand ports, or else of its
    Ethernet interfaces; None where no file states a rate."""
    infiniband = [_leading_number(path) for path in root.glob("infiniband/*/ports/*/rate")]
    ethernet = [_leading_number(path) / 1000 for path in root.glob("net/*/speed")]  # from Mbit/s
    return max([*infiniband, 0.0]) or max([*ethernet, 0.0]) or None  # 0 counts as no rate


def _leading_number(path: Path) -> float:
    """The number at the beginning of a file; 0 without one, as for an interface that is down."""
    try:
        match = re.match(r"\d+(\.\d+)?", path.read_text().strip())
    except OSError:
        return 0.0
    return float(match[0]) if match else 0.0
