"""How large an instance is: one number per problem, for pictures of seconds against size."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from hetplan.errors import InputError
from hetplan.instances.envelope import Instance
from hetplan.instances.library import find
from hetplan.studies.rows import Row

# Where a row's details say how large its instance is.
KEY = "instance_size"
# Problem -> what is counted, and how, of the instance's data.
SIZES: Mapping[str, tuple[str, Callable[[Any], int]]] = {
    "amp": ("devices × layers", lambda data: len(data.devices) * len(data.layers)),
    "astra": (
        "stages × layers × types",
        lambda data: data.stages * data.layers * len(data.device_types),
    ),
    "hap": ("triples × devices", lambda data: len(data.triples) * len(data.devices)),
    "poplar": (
        "devices × largest micro-batch",
        lambda data: sum(len(d.step_seconds) for d in data.devices),
    ),
    "ditto": (
        "devices × layers",
        lambda data: (
            sum(kind.nodes * kind.devices_per_node for kind in data.device_types)
            * len(data.device_types[0].forward_seconds)
        ),
    ),
}


def size_of(instance: Instance) -> int | None:
    """Its size; None for a problem without a measure."""
    found = SIZES.get(instance.problem)
    return None if found is None else found[1](instance.data)


def row_size(row: Row) -> int | None:
    """Of a row's instance: as its details say, else of the library's instance of that name; None
    where unknown."""
    told = json.loads(row["details_json"] or "{}").get(KEY)
    return int(told) if told is not None else library_size(row["problem"], row["instance"])


@cache
def library_size(problem: str, name: str) -> int | None:
    """Of a packaged instance; None where there is none of that name."""
    entry = find(f"{problem}/{name}")
    if entry is None:
        return None
    try:
        return size_of(entry.load())
    except InputError:  # from a later version of the format: its size is not known here
        return None
