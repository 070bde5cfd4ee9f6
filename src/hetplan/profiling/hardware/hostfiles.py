"""Hostfiles: the hosts of a launch, and how many processes each takes.

One line names one host or several. What a line says of the number of processes depends on the
launcher, and a number of processes is taken for that of the devices:

`host slots=N max_slots=M`  Open MPI, DeepSpeed, Horovod. A host may stand once.
`host:N`, `host`            MPICH, Intel MPI, Horovod's `-H`. Without `:N` it is one process. A host
                            that stands again adds its processes.
`host:N:HCA`, `host::HCA`   MVAPICH, with an InfiniBand adapter, which changes nothing here
`host`, some of them again  PBS (`$PBS_NODEFILE`): one line for each process.
`host`, each once           a list of names, which says nothing of the number
`host N`                    LSF (`LSB_MCPU_HOSTS`, one host a line)
`host N queue range`        Grid Engine (`$PE_HOSTFILE`)

A line may also name several hosts (`host1:4,host2:4`) or a Slurm node list (`gpu[01-04]:8`). IPv6
addresses stand as they are or in brackets; behind brackets `:N` is a number of processes.
"""

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from hetplan.errors import InputError, require
from hetplan.files import read_foreign_text
from hetplan.profiling.hardware.hosts import (
    Host,
    check_number_of_devices,
    check_number_of_hosts,
)
from hetplan.profiling.hardware.node_lists import OUTER_COMMA, node_names
from hetplan.text import grouped

EXPECTED = "HOST slots=N, HOST:N or HOST"
# The names under which Open MPI takes a number of slots, and what beside it changes nothing here.
SLOTS = ("slots", "count", "cpu")
LIMITS = ("max_slots", "max-slots", "slots_max", "slots-max")
WITHOUT_EFFECT = ("port", "user", "username", "user_name", "user-name", "binding", "ifname")
NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")
NUMBER = re.compile(r"\d{1,6}")
ADAPTER = re.compile(r"[A-Za-z]\w*")  # the name of an InfiniBand adapter, as mlx5_0
SSH_PORT = 22


class Form(StrEnum):
    """The way in which a line states the number of processes."""

    SLOTS = "slots"  # slots=N
    COLON = "colon"  # :N
    COLUMN = "column"  # a number in the second column
    NAME = "name"  # not at all


@dataclass(frozen=True)
class Entry:
    """One host of one line."""

    name: str
    form: Form
    processes: int | None
    where: str  # file and line, for messages


def read_hostfile(path: str) -> list[Host]:
    """The hosts of a hostfile; `#` begins a comment. Raises InputError with the number of the line.

    `devices_from` of a host says how its number of devices was told.
    """
    entries: list[Entry] = []
    text = read_foreign_text(path)
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].strip()
        if content:
            entries += entries_of(content, f"{path}: line {number}")
            check_number_of_hosts(len({entry.name for entry in entries}), path)
    require(entries, "no host", where=path, expected=f"lines {EXPECTED}")
    by_name = grouped((entry.name, entry) for entry in entries)
    forms = {entry.form for entry in entries}
    some_name_again = any(
        len(of_host) > 1 and of_host[0].form is Form.NAME for of_host in by_name.values()
    )
    return [host_of(of_host, forms, some_name_again, path) for of_host in by_name.values()]


def host_of(of_host: Sequence[Entry], forms: set[Form], some_name_again: bool, path: str) -> Host:
    """The host of all entries with one name.

    forms: the forms of all lines of the file. some_name_again: whether a bare name stands on
    several lines of the file, as only a list with one line per process has it.
    """
    first = of_host[0]
    if len(of_host) > 1:
        same_form = {entry.form for entry in of_host} == {first.form}
        may_repeat = same_form and first.form in (Form.COLON, Form.NAME)
        require(may_repeat, "host stands twice", where=of_host[1].where, got=first.name)
    processes = [entry.processes for entry in of_host if entry.processes is not None]
    if processes:
        number = check_number_of_devices(sum(processes), of_host[-1].where)
        return Host(first.name, number, devices_from=f"as many as a host's processes in {path}")
    if some_name_again:
        number = check_number_of_devices(len(of_host), of_host[-1].where)
        return Host(first.name, number, devices_from=f"as many as a host's lines in {path}")
    if forms == {Form.NAME, Form.COLON}:
        why = f"one where {path} has no :N, as MPICH and Intel MPI take it"
        return Host(first.name, 1, devices_from=why)
    return Host(first.name, devices_from=f"{first.where} has neither slots=N nor :N")


def entries_of(content: str, where: str) -> list[Entry]:
    """The hosts of a line. Raises InputError."""
    words = re.sub(r"\s*=\s*", "=", re.sub(r"\s*,\s*", ",", content)).split()
    settings = [word for word in words if "=" in word]
    names = words[: len(words) - len(settings)]
    if not names or words[: len(names)] != names:
        raise InputError("not usable", where=where, got=content, expected=EXPECTED)
    slots = number_of_slots(settings, content, where)
    column = number_of_column(names[1:], content, where)
    hosts = [host for piece in OUTER_COMMA.split(names[0]) for host in hosts_of(piece, where)]
    entries = []
    for name, processes in hosts:
        told = [number for number in (slots, column, processes) if number is not None]
        require(
            len(told) <= 1,
            "tells two numbers of processes",
            where=where,
            got=content,
            expected="one of slots=N and :N; ports are not read",
        )
        form = Form.NAME
        if slots is not None:
            form = Form.SLOTS
        elif column is not None:
            form = Form.COLUMN
        elif processes is not None:
            form = Form.COLON
        entries.append(Entry(name, form, told[0] if told else None, where))
    return entries


def number_of_slots(settings: Sequence[str], content: str, where: str) -> int | None:
    """The number of slots among the settings `key=value` of a line; None without one."""
    slots, most = None, None
    for setting in settings:
        key, _, value = setting.partition("=")
        if key in WITHOUT_EFFECT:
            continue
        usable = key in (*SLOTS, *LIMITS) and NUMBER.fullmatch(value)
        if not usable:
            raise InputError("not usable", where=where, got=content, expected=EXPECTED)
        if key in LIMITS:
            most = int(value)
            continue
        require(slots is None, "slots stand twice", where=where, got=content)
        slots = check_number_of_devices(int(value), where)
    if most is None:
        return slots
    if slots is None:  # Open MPI then takes the most for the number of slots
        return check_number_of_devices(most, where)
    require(slots <= most, "more slots than the most", where=where, got=content)
    return slots


def number_of_column(columns: Sequence[str], content: str, where: str) -> int | None:
    """The number in the columns behind a host's name, as LSF and Grid Engine write it; None without
    such columns."""
    if not columns:
        return None
    is_number = bool(NUMBER.fullmatch(columns[0]))
    of_grid_engine = len(columns) == 3 and "@" in columns[1]
    usable = is_number and (len(columns) == 1 or of_grid_engine)
    require(usable, "not usable", where=where, got=content, expected=EXPECTED)
    return check_number_of_devices(int(columns[0]), where)


def hosts_of(piece: str, where: str) -> list[tuple[str, int | None]]:
    """(name, processes or None) of each host in a piece of a line without blanks and commas."""
    if is_ipv6(piece):
        return [(piece, None)]
    place = without_adapter(piece)
    name, colon, number = place.rpartition(":")
    if not colon or place.endswith("]"):  # colons within brackets are an address's
        name, colon, number = place, "", ""
    in_brackets = name.startswith("[") and name.endswith("]") and is_ipv6(name[1:-1])
    processes = None
    if colon:
        usable = NUMBER.fullmatch(number)
        require(usable, "not usable", where=where, got=piece, expected=EXPECTED)
        require(
            int(number) != SSH_PORT,
            "has ssh's port or 22 processes",
            where=where,
            got=piece,
            expected="HOST, or HOST slots=22",
        )
        processes = check_number_of_devices(int(number), where)
    if in_brackets:
        return [(name[1:-1], processes)]
    _, _, name = name.rpartition("@")  # user@host
    names = node_names(name, where=where)
    for each in names:
        require(NAME.fullmatch(each), "not usable", where=where, got=piece, expected=EXPECTED)
    return [(each, processes) for each in names]


def without_adapter(piece: str) -> str:
    """A piece of a line without MVAPICH's adapter: `host:N` of `host:N:HCA`, and `host` of
    `host::HCA`. A piece without adapter stays as it is."""
    place, _, adapter = piece.rpartition(":")
    if not ADAPTER.fullmatch(adapter):
        return piece
    if place.endswith(":"):  # the number of processes is left out
        return place.removesuffix(":")
    _, colon, number = place.rpartition(":")
    has_number = colon and NUMBER.fullmatch(number)
    return place if has_number else piece


def is_ipv6(text: str) -> bool:
    """Whether a text is an IPv6 address, perhaps with a zone."""
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True
