"""Nodes of a cluster from what launchers are given: hostfiles with `slots=`, Slurm node lists, and
local devices.

Whoever lists hosts does not say what is in them: all are taken to be like the local node, or as
options say.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from hetplan.errors import InputError, require
from hetplan.files import read_bytes
from hetplan.profiling.hardware.cluster import catalogue

MOST_HOSTS = 4096
# Gbit/s, where nothing is measured or told: PCIe 4.0 x16, and a data centre's Ethernet.
PCIE_GBIT, ETHERNET_GBIT = 256.0, 100.0
SLOTS = re.compile(
    r"^(?P<host>\S+)(?:\s+slots\s*=\s*(?P<slots>\d{1,6}))?(?:\s+max[_-]slots\s*=\s*\d+)?$"
)
BRACKETS = re.compile(r"^(?P<before>[^\[\],]*)(?:\[(?P<inside>[^\[\]]+)\](?P<after>[^\[\],]*))?$")
RANGE = re.compile(r"^\s*(\d{1,11})(?:-(\d{1,11}))?\s*$")
OUTER_COMMA = re.compile(r",(?![^\[]*\])")  # outside of brackets
WORD = re.compile(r"[a-z]+\d+[a-z]*|\d+\w*|[a-z]+")


@dataclass(frozen=True)
class Host:
    """One node: its name, devices (None: not told) and links in Gbit/s (None: not known)."""

    name: str
    devices: int | None = None
    device: str | None = None
    intra_gbit: float | None = None
    network_gbit: float | None = None


def read_hostfile(path: str) -> list[Host]:
    """Hosts of an MPI or DeepSpeed hostfile: `name slots=N`, `#` begins a comment; raises
    InputError with the line."""
    hosts: dict[str, int] = {}
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
    """Hosts of a Slurm node list, such as `gpu[01-04,07],login1`; raises InputError."""
    names: list[str] = []
    for part in filter(None, map(str.strip, OUTER_COMMA.split(text))):
        match = BRACKETS.match(part)
        if match is None:
            raise InputError(
                "not usable", where="node list", got=text, expected="such as gpu[01-04,07]"
            )
        before, inside, after = match.groups(default="")
        numbers = [n for piece in inside.split(",") for n in _range(piece)] if inside else [""]
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
    """`01-04` as its numbers, as wide as the first."""
    match = RANGE.match(piece)
    numbers = range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)
    if match is None or not 1 <= len(numbers) <= MOST_HOSTS:
        raise InputError(
            "not a range",
            where="node list",
            got=piece,
            expected=f"such as 01-04, rising, at most {MOST_HOSTS} nodes",
        )
    return [f"{n:0{len(match[1])}d}" for n in numbers]


def catalogued(name: str, memory_bytes: float) -> str | None:
    """The catalogue's name of a device that its driver calls `name`; None where it is not clear
    which.

    All parts of the catalogue's name but its memory must stand in the driver's, and of those with
    the most parts that do, the memory must be the nearest, within a tenth.
    """
    words = _words(name)
    best: list[tuple[int, float, str]] = []
    for known, spec in catalogue().items():
        parts = [w for w in WORD.findall(known.lower()) if not re.fullmatch(r"\d+gb", w)]
        if parts and set(parts) <= words:
            off = abs(spec.memory_bytes / memory_bytes - 1)
            if off < 0.1:
                best.append((-len(parts), off, known))
    return min(best)[2] if best else None


def _words(name: str) -> set[str]:
    """`NVIDIA GeForce RTX 2080 Ti` as {nvidia, geforce, rtx, 2080, ti, 2080ti, …}: words and
    neighbours written as one.

    Drivers do not say SXM of an H100 with HBM3 or of an H200, which come in that form.
    """
    words = WORD.findall(name.lower())
    known = {*words, *map("".join, pairwise(words))}
    if "h200" in known or {"h100", "hbm3"} <= known:
        known |= {"sxm", "sxm5"}
    return known


def cluster_document(
    hosts: Sequence[Host], name: str, local: Host, comment: Iterable[str] = ()
) -> dict[str, Any]:
    """A cluster file's content; what a host does not tell is the local node's. Equal neighbours are
    one entry.

    Raises InputError where no device type or number of devices is known.
    """
    entries: list[dict[str, Any]] = []
    for host in hosts:
        full = replace(
            host,
            devices=host.devices or local.devices,
            device=host.device or local.device,
            intra_gbit=host.intra_gbit or local.intra_gbit or PCIE_GBIT,
            network_gbit=host.network_gbit or local.network_gbit or ETHERNET_GBIT,
        )
        for known, what, option in (
            (full.device, "device type", "--device NAME"),
            (full.devices, "number of devices", "--devices N"),
        ):
            require(
                known is not None,
                f"{what} is not known",
                where=host.name,
                expected=f"{option}, or GPUs here",
            )
        entry = {
            "count": 1,
            "devices": full.devices,
            "device": full.device,
            "intra_node_gbit_per_s": full.intra_gbit,
            "network_gbit_per_s": full.network_gbit,
        }
        if entries and {**entries[-1], "count": 1} == entry:
            entries[-1]["count"] += 1
        else:
            entries.append(entry)
    return {"format": "hetplan-cluster", "version": 1, "name": name, "nodes": entries}


def local_network_gbit(root: Path = Path("/sys/class")) -> float | None:
    """The fastest link of this host that is up, in Gbit/s: InfiniBand ports, else Ethernet; None
    where none tells."""
    rates = [_leading(path) for path in root.glob("infiniband/*/ports/*/rate")]
    speeds = [_leading(path) / 1000 for path in root.glob("net/*/speed")]
    return max(rates, default=0.0) or max([*speeds, 0.0]) or None


def _leading(path: Path) -> float:
    """The number that a file begins with; 0 for an interface that is down, which has none."""
    try:
        match = re.match(r"\d+(\.\d+)?", path.read_text().strip())
    except OSError:
        return 0.0
    return float(match[0]) if match else 0.0
