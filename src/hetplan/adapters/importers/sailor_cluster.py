"""A cluster file with the links that Sailor measured.

A fit of Sailor's gives a bandwidth for each size of a message. A cluster file has a rate and a
latency: seconds = latency + bytes / rate. Both are fitted to the seconds at SIZES by least squares
of the relative errors, and a note tells the largest of these errors.

`network_gbit_per_s`       what all pairs of GPUs of two nodes reach together
`flow_gbit_per_s`          what one pair reaches
`intra_node_gbit_per_s`    what two GPUs of a node reach
`all_reduce_gbit_per_s`    number of GPUs -> what their ring in a node reaches, largest size
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from hetplan.adapters.importers.common import Imported, Settings
from hetplan.adapters.importers.sailor import Links, load_links, located
from hetplan.errors import require
from hetplan.profiling.hardware.cluster import GBIT, catalogue
from hetplan.profiling.hardware.driver_names import catalogued
from hetplan.schema import as_name

# Sizes of messages from 1 MB to 1 GB. What plans send within and between nodes lies in between.
SIZES = tuple(1e6 * 2**power for power in range(11))
# The catalogue's types of Sailor's GPUs: those of Google's a2 and n1 machines, and of Alps.
DEVICES = {
    "A100-40": "A100-SXM4-40GB",
    "A100-80": "A100-SXM4-80GB",
    "V100-16": "V100-SXM2-16GB",
    "GH-96": "GH200-96GB",
}


class Line(NamedTuple):
    """Seconds of a message as a line over its bytes."""

    rate: float  # bytes/s
    latency: float  # seconds
    error: float  # the largest relative error at SIZES


def read_sailor_cluster(path: str, settings: Settings) -> Imported:
    """A cluster of `settings.nodes` nodes (None: 1) for each GPU type of the profiles at `path`.

    A node has as many devices as pairs of GPUs were measured between two nodes. A device has the
    name that it has in the profile, and the figures of the catalogue. Raises InputError for a type
    that the catalogue does not have, or between whose nodes no link was measured.
    """
    place = located(path)
    links = load_links(place.root)
    settings.check_one_device_type(place.kinds)
    nodes, devices, notes, errors = [], {}, [], []
    for kind in place.kinds:
        name = settings.device or kind
        catalogue_name = DEVICES.get(name) or catalogued(name, None)
        require(
            catalogue_name is not None,
            "the catalogue has no such device",
            where=f"{path}: {kind}",
            got=name,
            expected="--device-type NAME, and PATH of that type's profile",
        )
        entry, error = node_entry(links, kind)
        nodes.append({"count": settings.nodes or 1, "device": name, **entry})
        errors.append(error)
        if catalogue_name != name:
            spec = catalogue()[str(catalogue_name)].model_dump(exclude_none=True)
            devices[name] = spec
            notes.append(f"{name} is taken for the catalogue's {catalogue_name}")
    notes.append(
        "the links' rates are Sailor's fits as a rate and a latency: off by at most "
        f"{100 * max(errors):.2g} % for messages of 1 MB to 1 GB"
    )
    if settings.nodes is None:
        notes.append("one node of each type; --nodes N makes more")
    cluster: dict[str, Any] = {
        "format": "hetplan-cluster",
        "version": 1,
        "name": as_name(place.root.name or "sailor"),
        "nodes": nodes,
    }
    if devices:
        cluster["devices"] = devices
    return Imported("cluster", cluster, tuple(notes))


def node_entry(links: Links, kind: str) -> tuple[dict[str, Any], float]:
    """(the entry of a node with GPUs of this type without its count and device, the largest
    relative error of its lines)."""
    links.network(kind, 1, SIZES[0])  # raises InputError for a type without links
    devices = max(links.inter[kind])
    everything = line_of(lambda size: links.network(kind, devices, size))
    one_flow = line_of(lambda size: links.network(kind, 1, size))
    inside = line_of(lambda size: links.local(kind, 2, size))
    # A fit of several pairs may lie below that of one at some sizes.
    network = max(everything.rate, one_flow.rate)
    entry: dict[str, Any] = {
        "devices": devices,
        "intra_node_gbit_per_s": rounded(inside.rate / GBIT),
        "network_gbit_per_s": rounded(network / GBIT),
        "intra_node_latency_us": rounded(inside.latency * 1e6),
        "network_latency_us": rounded(one_flow.latency * 1e6),
    }
    if one_flow.rate < network:
        entry["flow_gbit_per_s"] = rounded(one_flow.rate / GBIT)
    rings = [ranks for ranks in sorted(links.intra.get(kind, ())) if 2 <= ranks <= devices]
    if rings:
        entry["all_reduce_gbit_per_s"] = {
            ranks: rounded(links.local(kind, ranks, SIZES[-1]) / GBIT) for ranks in rings
        }
    return entry, max(everything.error, one_flow.error, inside.error)


def rounded(value: float) -> float:
    """A value of a file that people edit, with four digits."""
    return float(f"{value:.4g}")


def line_of(bandwidth: Callable[[float], float]) -> Line:
    """The line whose relative errors at SIZES have the least sum of squares, with a latency that
    is not negative. bandwidth: bytes/s at a size in bytes."""
    size = np.array(SIZES)
    seconds = size / np.array([bandwidth(each) for each in size])
    per_second = np.stack([1 / seconds, size / seconds], axis=1)
    # Columns of one scale, which least squares need to be exact.
    scale = per_second.max(axis=0)
    (latency, inverse), *_ = np.linalg.lstsq(per_second / scale, np.ones(len(size)), rcond=None)
    latency, inverse = latency / scale[0], inverse / scale[1]
    if latency < 0 or inverse <= 0:
        shares = per_second[:, 1]
        latency, inverse = 0.0, shares.sum() / (shares @ shares)
    error = np.abs((latency + size * inverse) / seconds - 1).max()
    return Line(float(1 / inverse), float(latency), float(error))
