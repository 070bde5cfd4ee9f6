"""Clusters from what launchers, schedulers and this machine tell of their nodes.

Nothing of these tells everything. What is missing is taken from the options of the command first,
then from this machine, then from usual machines; every such assumption is a line of the answer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hetplan.errors import InputError, require
from hetplan.profiling.hardware.cluster import catalogue
from hetplan.profiling.hardware.driver_names import catalogued, significant_words, unrecognised
from hetplan.profiling.hardware.hosts import Host, fastest_port, several_types, told_part
from hetplan.profiling.hardware.topologies import Topology

# Gbit/s between nodes where nothing is known: a data centre's Ethernet.
ETHERNET_GBIT = 100.0


@dataclass(frozen=True)
class Options:
    """The user's statements about the nodes. A field is None where the user states nothing."""

    device: Sequence[str] = ()  # device types: one for all nodes, or one for each component
    # Name that a driver or a scheduler gives its devices -> device type.
    names: Mapping[str, str] = field(default_factory=dict)
    devices: int | None = None  # number of devices of a node
    intra_gbit: float | None = None
    network_gbit: float | None = None


@dataclass(frozen=True)
class Description:
    """A cluster file's nodes, and what is assumed in them."""

    entries: list[dict[str, Any]]  # consecutive equal nodes are one entry
    assumed: list[str]  # one line for each assumption


def described(
    hosts: Sequence[Host],
    options: Options,
    local: Host,
    usual_intra_gbit: Callable[[str], float],
    topology: Topology | None = None,
) -> Description:
    """The nodes of a cluster file. Raises InputError where the type or the number of a host's
    devices is not known.

    local: this machine, whose fields replace unknown fields of other hosts. usual_intra_gbit: a
    function from a device type to Gbit/s within the usual machine with it. topology: the links
    within each node, where known.
    """
    entries: list[dict[str, Any]] = []
    hosts, lines_of_parts = hosts_of_one_type(hosts, options, usual_intra_gbit)
    assumed = dict.fromkeys(lines_of_parts)  # a set in order
    for host in hosts:
        is_here = host is local
        device, line = device_of(host, options, None if is_here else local)
        lines = [line]
        devices, line = devices_of(host, options, None if is_here else local, topology)
        lines.append(line)
        intra, line = intra_of(host, device, options, local, usual_intra_gbit, topology)
        if devices > 1:
            lines.append(line)
        network, line = network_of(host, options, local)
        if len(hosts) > 1:
            lines.append(line)
        assumed |= dict.fromkeys(filter(None, lines))
        entry = {
            "count": 1,
            "devices": devices,
            "device": device,
            "intra_node_gbit_per_s": intra,
            "network_gbit_per_s": network,
        }
        if host.network_latency_us is not None and len(hosts) > 1:
            entry["network_latency_us"] = host.network_latency_us
        if entries and {**entries[-1], "count": 1} == entry:
            entries[-1]["count"] += 1
        else:
            entries.append(entry)
    return Description(entries, list(assumed))


def hosts_of_one_type(
    hosts: Sequence[Host], options: Options, usual_intra_gbit: Callable[[str], float]
) -> tuple[Sequence[Host], list[str]]:
    """(the hosts, lines that say what is assumed). A machine whose GPUs differ is one node for each
    type where it is the whole cluster: its nodes talk as its GPUs do. Beside other machines it
    raises InputError, since a node has one network rate, and these nodes would need another one
    between them."""
    mixed = next((host for host in hosts if host.parts), None)
    if mixed is None:
        return hosts, []
    if options.device:  # the user says one type for all
        together = [
            replace(host, parts=(), devices=sum(part.devices or 0 for part in host.parts))
            if host.parts
            else host
            for host in hosts
        ]
        return together, []
    if len(hosts) > 1:
        raise several_types(mixed)
    devices = [device_of(part, options, None)[0] for part in mixed.parts]
    gbit = min(usual_intra_gbit(device) for device in devices)
    types = " and ".join(told_part(part) for part in mixed.parts)
    lines = [f"{mixed.name} has {types}: it is written as {len(devices)} nodes of one type each"]
    if mixed.order:
        lines.append(f"ranks get the GPUs of these nodes by {mixed.order}")
    assumed = f"links between nodes are assumed: {gbit:g} Gbit/s, as within usual machines with "
    assumed += f"{', '.join(dict.fromkeys(devices))}; --network says otherwise"
    parts = [
        part
        if part.network_gbit is not None
        else replace(part, network_gbit=gbit, network_from=assumed)
        for part in mixed.parts
    ]
    return parts, lines


def device_of(host: Host, options: Options, local: Host | None) -> tuple[str, str]:
    """(the type of a host's devices, a line that says what is assumed or nothing). local: None for
    this machine itself."""
    if host.driver_name is not None:
        stated = significant_words(host.driver_name)
        for name, device_type in options.names.items():
            if significant_words(name) == stated:
                return named_device(device_type)
    if options.device:
        index = 0
        if len(options.device) > 1:
            components = host.component is not None and host.component < len(options.device)
            require(
                components,
                "several types, and the job has not as many components",
                where="--device",
                got=",".join(options.device),
                expected="one type, one for each component of a heterogeneous job, or NAME=TYPE "
                "for each name that the nodes' devices have",
            )
            index = host.component or 0
        return named_device(options.device[index])
    if host.device is not None:
        return host.device, ""
    if host.driver_name is not None:
        found = catalogued(host.driver_name, host.memory_bytes)
        if found is not None and host.memory_bytes is not None:
            return found, ""
        if found is not None:  # nothing but a name says so
            return found, f"{host.driver_name} is taken for {found}; --device says otherwise"
    if local is not None and local.device is not None and is_alike(host, local):
        line = f"devices are assumed to be {local.device}, as here; --device says otherwise"
        return local.device, line
    if host.driver_name is not None:
        raise unrecognised(host.driver_name, host.memory_bytes, where=host.name)
    here = local or host
    if here.driver_name is not None and is_alike(host, here):
        raise unrecognised(here.driver_name, here.memory_bytes, where="the GPUs here")
    expected = "--device NAME, or GPUs here"
    if host.component is not None:
        expected = "--device NAME,NAME with one type for each component"
    why = f": {host.devices_from}" if host.devices is None and host.devices_from else ""
    raise InputError(f"device type is not known{why}", where=host.name, expected=expected)


def named_device(name: str) -> tuple[str, str]:
    """(the catalogue's name of a device that the user names, a line where that was a driver's)."""
    if name in catalogue():
        return name, ""
    found = catalogued(name, None)
    if found is not None:
        return found, f"--device {name} is taken for the catalogue's {found}"
    if " " in name.strip():  # no name of a catalogue: the driver's
        raise unrecognised(name, None, where="--device")
    return name, ""


def devices_of(
    host: Host, options: Options, local: Host | None, topology: Topology | None
) -> tuple[int, str]:
    """(the number of a host's devices, a line that says what is assumed or nothing)."""
    if options.devices is not None:
        return options.devices, ""
    if host.devices is not None:
        line = ""
        if host.devices_from is not None:
            line = f"devices of a node are assumed: {host.devices_from}; --devices says otherwise"
        return host.devices, line
    if topology is not None:
        return (
            topology.gpus,
            f"devices of a node are assumed: {topology.gpus}, as in {topology.where}",
        )
    if local is not None and local.devices is not None and is_alike(host, local):
        line = f"devices of a node are assumed: {local.devices}, as here; --devices says otherwise"
        return local.devices, line
    why = f": {host.devices_from}" if host.devices_from else ""
    raise InputError(
        f"number of devices is not known{why}",
        where=host.name,
        expected="--devices N, or GPUs here",
    )


def is_alike(host: Host, local: Host) -> bool:
    """Whether a host may be assumed to be like this machine: not where it is of another component
    of a heterogeneous job than this machine, as components exist because nodes differ."""
    return host.component is None or host.component == local.component


def intra_of(
    host: Host,
    device: str,
    options: Options,
    local: Host,
    usual_intra_gbit: Callable[[str], float],
    topology: Topology | None,
) -> tuple[float, str]:
    """(Gbit/s within a host, a line that says what is assumed or nothing)."""
    if options.intra_gbit is not None:
        return options.intra_gbit, ""
    if host is not local and host.intra_gbit is not None:
        return host.intra_gbit, host.intra_from
    if topology is not None:
        gbit, basis = topology.fabric(device)
        if gbit is not None:
            return gbit, (
                f"links within a node are assumed: {gbit:g} Gbit/s {basis}; --intra says otherwise"
            )
    if local.intra_gbit is not None and is_alike(host, local):
        if host is local:
            return local.intra_gbit, ""
        return local.intra_gbit, (
            f"links within a node are assumed: {local.intra_gbit:.4g} Gbit/s, as measured here; "
            "--intra says otherwise"
        )
    gbit = usual_intra_gbit(device)
    return gbit, (
        f"links within a node are assumed: {gbit:g} Gbit/s, as in usual machines with {device}; "
        "--intra says otherwise"
    )


def network_of(host: Host, options: Options, local: Host) -> tuple[float, str]:
    """(Gbit/s of a host's network, a line that says what is assumed or nothing)."""
    if options.network_gbit is not None:
        return options.network_gbit, ""
    if host is not local and host.network_gbit is not None:
        return host.network_gbit, host.network_from
    if local.network_gbit is not None and is_alike(host, local):
        return local.network_gbit, (
            f"links between nodes are assumed: {local.network_gbit:g} Gbit/s, the fastest port "
            "here; --network says otherwise"
        )
    line = f"links between nodes are assumed: {ETHERNET_GBIT:g} Gbit/s; --network says otherwise"
    return ETHERNET_GBIT, line


def local_network_gbit(root: Path = Path("/sys/class")) -> float | None:
    """Gbit/s of the fastest link of this host that is up: of its InfiniBand ports, or else of its
    Ethernet interfaces; None where no file states a rate."""
    infiniband = root.glob("infiniband/*/ports/*/rate")
    # Interfaces without a device are bridges and the like, whose speeds are no cable's; those of
    # bonds are.
    cards = [
        card / "speed"
        for card in root.glob("net/*")
        if (card / "device").exists() or (card / "bonding").exists()
    ]
    return fastest_port(map(_text_of, infiniband), map(_text_of, cards))


def _text_of(path: Path) -> str:
    """The text of a file of the system; empty where it cannot be read, as for a card that is
    down."""
    try:
        return path.read_text()
    except OSError:
        return ""


def located(hosts: Sequence[Host], local: Host) -> Host:
    """This machine with the number of the component that has it, so that other components of a
    heterogeneous job are not taken to be like it."""
    short = local.name.partition(".")[0]
    for host in hosts:
        if host.name.partition(".")[0] == short:
            return replace(local, component=host.component)
    return local
