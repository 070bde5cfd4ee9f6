"""The nodes of a Slurm cluster, from `scontrol show node`, with or without `-o`.

A record begins with `NodeName=`. Nodes without GPUs, and those whose state takes no jobs, are left
out; each is told.
"""

import re

from hetplan.errors import InputError, require
from hetplan.files import read_bytes
from hetplan.profiling.hardware.hosts import Host, check_number_of_devices, check_number_of_hosts

EXPECTED = "the output of scontrol show node"
RECORD = re.compile(r"^[ \t]*(?=NodeName=)", re.MULTILINE)
SETTING = re.compile(r"(?<!\S)(NodeName|Gres|State)=(\S*)")
# Commas within parentheses stand between sockets, as in gpu:a100:8(S:0,2).
GRES_COMMA = re.compile(r",(?![^(]*\))")
GPUS = re.compile(r"gpu(?::(?P<type>[^:()]+))??(?::(?P<number>\d{1,6}))?(?:\(.*\))?")
# States in which a node takes no jobs; `*` says that it does not answer.
UNUSABLE = ("DOWN", "DRAIN", "FAIL", "NOT_RESPONDING", "POWERED_DOWN", "FUTURE", "UNKNOWN", "*")


def read_slurm_nodes(path: str) -> tuple[list[Host], list[str]]:
    """(the nodes with GPUs, one line for each node that was left out). Raises InputError."""
    text = read_bytes(path).decode("utf-8-sig", "replace")
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
        host = host_of(name, record.get("Gres", ""), f"{path}: {name}")
        if host is None:
            left_out.append(f"node {name} is left out: it has no GPUs")
        else:
            hosts.append(host)
    require(hosts, "no node with GPUs that takes jobs", where=path, got="; ".join(left_out)[:200])
    return hosts, left_out


def host_of(name: str, gres: str, where: str) -> Host | None:
    """The host with the GPUs of Slurm's `Gres`; None without GPUs. Raises InputError for several
    types, as a node of a cluster file has one."""
    pieces = [piece for piece in GRES_COMMA.split(gres) if re.match(r"gpu(?![\w-])", piece)]
    found = [GPUS.fullmatch(piece) for piece in pieces]
    if not found:
        return None
    first = found[0]
    if len(found) > 1 or first is None:
        expected = "gpu:TYPE:N of one type"
        raise InputError("Gres is not usable", where=where, got=gres, expected=expected)
    number = int(first["number"] or 1)  # Slurm's own default
    if number == 0:
        return None
    # Slurm's types have underscores where a driver's names have blanks.
    product = first["type"].replace("_", " ") if first["type"] else None
    return Host(name, check_number_of_devices(number, where), driver_name=product)
