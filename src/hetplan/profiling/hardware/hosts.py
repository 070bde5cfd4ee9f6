"""Hosts: the nodes that a launcher's or a scheduler's text names, with what is known of each."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from hetplan.errors import InputError, require
from hetplan.profiling.hardware.cluster import GIB

MOST_HOSTS = 4096
# Devices of one host. The largest machines have fewer; port numbers are larger.
MOST_DEVICES = 512


@dataclass(frozen=True)
class Host:
    """One node. Fields are None where nothing is known of them."""

    name: str
    devices: int | None = None  # number of devices
    device: str | None = None  # type of the devices, a name of the catalogue
    intra_gbit: float | None = None  # Gbit/s between two devices of the node
    network_gbit: float | None = None  # Gbit/s of the node's network
    # microseconds of a message between nodes, where they were measured
    network_latency_us: float | None = None
    # The lines that tell the user what these two rates of a host other than this machine follow
    # from; empty where they were measured.
    intra_from: str = ""
    network_from: str = ""
    # What the number of devices follows from, where it is not stated as such; where the number is
    # not known, why.
    devices_from: str | None = None
    driver_name: str | None = None  # a name of the devices that still is to be looked up
    memory_bytes: float | None = None  # bytes of one device's memory
    component: int | None = None  # number of the component of a heterogeneous job
    # Of a machine whose GPUs differ: one host for each type, all of this name. The other fields
    # tell nothing then.
    parts: tuple["Host", ...] = ()
    # The variables that give the ranks of the parts their GPUs; empty where these are not known.
    order: str = ""


def told_part(part: Host) -> str:
    """The GPUs of one type of a machine, for messages."""
    size = "" if part.memory_bytes is None else f" of {part.memory_bytes / GIB:.3g} GiB"
    return f"{part.devices} {part.driver_name}{size}"


def several_types(host: Host) -> InputError:
    """The error for a machine whose GPUs differ beside other machines."""
    return InputError(
        "the GPUs of this node differ, and a node of a cluster file has one type",
        where=host.name,
        got=", ".join(told_part(part) for part in host.parts),
        expected="GPUs of one type, or this machine alone",
    )


def check_number_of_devices(number: int, where: str) -> int:
    """The number of devices of a host; raises InputError for one that no host has."""
    require(
        1 <= number <= MOST_DEVICES,
        "number of devices is not usable",
        where=where,
        got=number,
        expected=f"1 to {MOST_DEVICES}",
    )
    return number


def check_number_of_hosts(number: int, where: str) -> None:
    """Raise InputError for more hosts than a cluster may have."""
    require(
        number <= MOST_HOSTS,
        "too many nodes",
        where=where,
        got=number,
        expected=f"at most {MOST_HOSTS}",
    )


def fastest_port(infiniband: Iterable[str], ethernet: Iterable[str]) -> float | None:
    """Gbit/s of the fastest port of a host that is up: of its InfiniBand ports, or else of its
    Ethernet cards; None where no text states a rate.

    infiniband, ethernet: what the system says of each, as "100 Gb/sec (4X EDR)" and as "1000" in
    Mbit/s.
    """
    of_infiniband = [leading_number(text) for text in infiniband]
    of_ethernet = [leading_number(text) / 1000 for text in ethernet]
    return max([*of_infiniband, 0.0]) or max([*of_ethernet, 0.0]) or None  # 0 counts as no rate


def leading_number(text: str) -> float:
    """The number at the beginning of a text; 0 without one, as for an interface that is down."""
    match = re.match(r"\d+(\.\d+)?", text.strip())
    return float(match[0]) if match else 0.0
