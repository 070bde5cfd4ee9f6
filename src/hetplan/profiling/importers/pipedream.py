"""PipeDream's `graph.txt` (SOSP 2019): a graph of layers with milliseconds and bytes of one
mini-batch.

Lines `nodeI -- description -- forward_compute_time=…, backward_compute_time=…, activation_size=…,
parameter_size=…` and edges `\\tnodeI -- nodeJ`, in any order; times in ms, sizes in bytes. A size
may be a list in brackets, which is summed.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

from hetplan.errors import InputError
from hetplan.files import read_bytes
from hetplan.profiling.importers.common import (
    Graph,
    Imported,
    Node,
    Settings,
    chain_profile,
    device_note,
    profile_result,
)
from hetplan.schema import MOST_BYTES, MOST_SECONDS

DEVICE = "pipedream-gpu"
NUMBER = re.compile(r"node(\d{1,8})$")
FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")


def read(path: str, settings: Settings) -> Imported:
    """A profile with one table; --micro-batch says how many samples a mini-batch had (default
    1)."""
    graph = read_graph(path)
    profile = chain_profile(
        graph.chain(path), settings, model=Path(path).stem, device=DEVICE, where=path,
        source=f"PipeDream graph {Path(path).name}",
    )  # fmt: skip
    batch = (
        ""
        if settings.micro_batch
        else "one mini-batch counts as one sample; --micro-batch N divides it"
    )
    return profile_result(profile, device_note(settings, DEVICE), batch)


def read_graph(path: str) -> Graph:
    """Nodes and edges; raises InputError naming the line."""
    graph = Graph()
    for number, line in lines_of(path):
        where = f"{path}: line {number}"
        parts = [part.strip() for part in line.split(" -- ")]
        if len(parts) == 2:
            graph.edges.append((_node(parts[0], where), _node(parts[1], where)))
        elif len(parts) >= 3:
            key = _node(parts[0], where)
            if key in graph.nodes:
                raise InputError("node stands twice", where=where, got=parts[0])
            graph.nodes[key] = _operator(" ".join(parts[1:-1]), parts[-1], where)
        else:
            raise InputError(
                "not usable", where=where, got=line, expected="nodeI -- … or nodeI -- nodeJ"
            )
    if not graph.nodes:
        raise InputError(
            "no node", where=path, expected="lines nodeI -- description -- forward_compute_time=…"
        )
    for source, target in graph.edges:
        for end in (source, target):
            if end not in graph.nodes:
                raise InputError(
                    "an edge names a node that is not there", where=path, got=f"node{end}"
                )
    return graph


def lines_of(path: str) -> list[tuple[int, str]]:
    """Numbered lines that are not empty."""
    try:
        text = read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8 text at byte {error.start}", where=path) from None
    return [(i, line) for i, line in enumerate(text.splitlines(), 1) if line.strip()]


def _node(text: str, where: str) -> int:
    found = NUMBER.match(text)
    if found is None:
        raise InputError(
            "not usable", where=where, got=text, expected="a node's name, such as node12"
        )
    return int(found[1])


def _operator(description: str, fields: str, where: str) -> Node:
    values = {}
    for name in FIELDS:
        found = re.search(rf"{name}=(\[[^\]]*\]|[^,\s]+)", fields)
        if found is None:
            raise InputError(
                f"{name} is missing", where=where, got=fields, expected=f"{name}=NUMBER"
            )
        most = MOST_SECONDS if name.endswith("time") else MOST_BYTES
        values[name] = _sum(found[1], name, most, where)
    forward, backward, activation, params = (values[name] for name in FIELDS)
    return Node(description, forward / 1e3, backward / 1e3, params, activation, activation)


def _sum(text: str, name: str, most: float, where: str) -> float:
    """A number, or several in brackets."""
    total = 0.0
    for part in text.strip("[]").replace(";", ",").split(","):
        try:
            value = float(part)
        except ValueError:
            value = math.nan
        if not 0 <= value <= most:
            raise InputError(
                f"{name} is not usable",
                where=where,
                got=text,
                expected=f"a number from 0 to {most:g}",
            )
        total += value
    return total
