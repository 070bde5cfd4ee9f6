"""The nodes of a Slurm cluster, from `scontrol show node`, with or without `-o`.

A record begins with `NodeName=`. Nodes without GPUs, and those whose state takes no jobs, are left
out; each is told.
"""

import re
from dataclasses import replace

from hetplan.errors import InputError, require
from hetplan.files import read_foreign_text
from hetplan.profiling.hardware.driver_names import is_slice
from hetplan.profiling.hardware.hosts import Host, check_number_of_devices, check_number_of_hosts

EXPECTED = "the output of scontrol show node"
RECORD = re.compile(r"^[ \t]*(?=NodeName=)", re.MULTILINE)
SETTING = re.compile(r"(?<!\S)(NodeName|Gres|CfgTRES|State)=(\S*)")
# Commas within parentheses stand between sockets, as in gpu:a100:8(S:0,2).
GRES_COMMA = re.compile(r",(?![^(]*\))")
# The type is matched lazily, so that a single field of digits is the number: gpu:4 has no type.
GPUS = re.compile(r"gpu(?::(?P<type>[^:()]+))??(?::(?P<number>\d{1,6}))?(?:\(.*\))?")
GPUS_OF_TRES = re.compile(r"gres/gpu(?::(?P<type>[^:=]+))?=(?P<number>\d{1,6})")
# States in which a node takes no jobs; `*` says that it does not answer.
UNUSABLE = ("DOWN", "DRAIN", "FAIL", "NOT_RESPONDING", "POWERED_DOWN", "FUTURE", "UNKNOWN", "*")


def read_slurm_nodes(path: str) -> tuple[list[Host], list[str]]:
    """(the nodes with GPUs, one line for each node that was left out). Raises InputError."""
    text = read_foreign_text(path)
    records = [dict(SETTING.findall(record)) for record in RECORD.split(text)]
    records = [record for record in records if record.get("NodeName")]
    require(records, "no node", where=path, expected=EXPECTED)
    check_number_of_hosts(len(records), path)
    hosts: list[Host] = []
    left_out: list[str] = []
    names: set[str] = set()
    for record in records:
        name, state = record["NodeName"], record.get("State", "")
        require(name not in names, "node stands twice", where=path, got=name)
        names.add(name)
        if any(word in state.upper() for word in UNUSABLE):
            left_out.append(f"node {name} is left out: its state is {state}")
            continue
        gres, configured = record.get("Gres", ""), record.get("CfgTRES", "")
        host = host_of(name, gres, configured, f"{path}: {name}")
        if host is None:
            left_out.append(f"node {name} is left out: it has no GPUs")
        else:
            hosts.append(host)
    require(hosts, "no node with GPUs that takes jobs", where=path, got="; ".join(left_out)[:200])
    return hosts, left_out


def host_of(name: str, gres: str, configured: str, where: str) -> Host | None:
    """The host with the GPUs of Slurm's `Gres`, or where a record has none, of its `CfgTRES`; None
    without GPUs. GPUs of several types are its parts. Slices of GPUs (MIG) are left out beside
    undivided ones."""
    counts, further = gpus_of_gres(gres, where)
    if not counts:
        counts, further = gpus_of_tres(configured)
    whole = {kind: count for kind, count in counts.items() if not is_slice(kind or "")}
    left_out = sum(counts.values()) - sum(whole.values()) if whole else 0
    parts = [
        # Slurm's types have underscores where a driver's names have blanks.
        Host(
            name,
            check_number_of_devices(count, where),
            driver_name=kind.replace("_", " ") if kind else None,
        )
        for kind, count in (whole or counts).items()
        if count
    ]
    if not parts:
        return None
    why = None
    if left_out:
        why = f"those on {name} that MIG does not divide; {left_out} slices are left out"
    elif further:
        why = f"those on {name} of a known type; {further} others are left out"
    if len(parts) > 1:
        return Host(name, parts=tuple(parts))
    return replace(parts[0], devices_from=why)


def gpus_of_gres(gres: str, where: str) -> tuple[dict[str | None, int], int]:
    """(type or None -> number of GPUs, 0 further ones) of a `Gres`. Raises InputError."""
    counts: dict[str | None, int] = {}
    for piece in GRES_COMMA.split(gres):
        if not re.match(r"gpu(?![\w-])", piece):
            continue
        match = GPUS.fullmatch(piece)
        if match is None:
            expected = "gpu:TYPE:N"
            raise InputError("Gres is not usable", where=where, got=gres, expected=expected)
        number = int(match["number"] or 1)  # Slurm's own default
        counts[match["type"]] = counts.get(match["type"], 0) + number
    return counts, 0


def gpus_of_tres(configured: str) -> tuple[dict[str | None, int], int]:
    """(type or None -> number of GPUs, number of GPUs of no stated type beside them) of a
    `CfgTRES`, which has the number of all GPUs and may have that of each type."""
    found = [match for match in map(GPUS_OF_TRES.fullmatch, configured.split(",")) if match]
    of_types = {match["type"]: int(match["number"]) for match in found if match["type"]}
    every = sum(int(match["number"]) for match in found if not match["type"])
    if of_types:
        return dict(of_types), max(every - sum(of_types.values()), 0)
    return ({None: every} if every else {}), 0
