"""Graphs of operators, as PipeDream, Piper and the dnn-partitioning project write them.

An operator's output crosses every cut between it and the last operator that needs it, once.

- PipeDream (SOSP 2019), `graph.txt`, milliseconds and bytes of one mini-batch. Lines `nodeI --
  description -- forward_compute_time=…, backward_compute_time=…, activation_size=…,
  parameter_size=…` and edges `\\tnodeI -- nodeJ`, in any order. A size may be a list in brackets,
  which is summed.
- Piper (NeurIPS 2021), JSON. `nodes[]`: {"id", "name", "TMPCs": {degree: [{"id": "vanilla" |
  "activation recomp", "timePerSample" (seconds, forward and backward), "parameterSize",
  "memoryUsageA" (per sample in flight), "memoryUsageB" (once), …}]}}; `edges[]`: {"sourceId",
  "destId", "communicationCost" (bytes per sample)}. "vanilla" is without recomputation.
- "Efficient Algorithms for Device Placement of DNN Graph Operators" (NeurIPS 2020), msr-fiddle,
  JSON. `nodes[]`: {"id", "name", "cpuLatency", "fpgaLatency" (ms; "fpga" is any accelerator),
  "size" (bytes: parameters and output), "isBackwardNode", "colorClass" (a forward node and its
  backward node have the same)}; `edges[]`: {"sourceId", "destId", "size" (bytes)}. Graphs for
  inference have no backward nodes: their backward seconds are 0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from pathlib import Path

import networkx as nx

from hetplan.errors import InputError
from hetplan.profiling.foreign import Foreign, key_number, read_foreign
from hetplan.profiling.importers.common import (
    TOGETHER,
    Imported,
    Operator,
    Settings,
    chain_profile,
    layer,
    lines_of,
    profile,
    table_of_sums,
)
from hetplan.schema import MOST_BYTES, MOST_SECONDS

MILLI = 1e-3
NUMBER = re.compile(r"node(\d{1,8})$")
FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")


def in_order(
    operators: dict[int, Operator], edges: list[tuple[int, int]], where: str
) -> list[tuple[int, float]]:
    """Numbers of the operators in an order of work, lowest first, each with the bytes that pass the
    cut behind it. Raises InputError for a circle."""
    graph: nx.DiGraph[int] = nx.DiGraph(edges)
    graph.add_nodes_from(operators)
    try:
        order = list(nx.lexicographical_topological_sort(graph))
    except nx.NetworkXUnfeasible:
        first = min(source for source, _ in nx.find_cycle(graph))
        raise InputError(
            "operators wait for each other in a circle", where=where, got=operators[first].name
        ) from None
    place = {number: i for i, number in enumerate(order)}
    crossing, leaving = 0.0, [0.0] * len(order)
    chain = []
    for i, number in enumerate(order):
        crossing -= leaving[i]
        last = max((place[after] for after in graph.successors(number)), default=i)
        if last > i:
            crossing += operators[number].output
            leaving[last] += operators[number].output
        chain.append((number, max(crossing, 0.0)))
    return chain


def ends_of(entry: Foreign, known: Collection[int]) -> tuple[int, int]:
    """An edge of a JSON graph; raises InputError where it names a node that is not there."""
    for key in ("sourceId", "destId"):
        if entry[key].whole() not in known:
            raise entry[key].error("an edge names a node that is not there")
    return entry["sourceId"].whole(), entry["destId"].whole()


def read_pipedream(path: str, settings: Settings) -> Imported:
    """A profile with one table; --micro-batch says how many samples a mini-batch had (default
    1)."""
    operators, edges = pipedream_graph(path)
    return chain_profile(
        [(operators[number], crossing) for number, crossing in in_order(operators, edges, path)],
        settings,
        model=Path(path).stem,
        device="pipedream-gpu",
        where=path,
        source=f"PipeDream graph {Path(path).name}",
        notes=["" if settings.micro_batch else one_sample("mini-batch")],
    )


def one_sample(what: str) -> str:
    """That the file does not tell how many samples were measured at once."""
    return f"one {what} counts as one sample; --micro-batch N divides it"


def pipedream_graph(path: str) -> tuple[dict[int, Operator], list[tuple[int, int]]]:
    """Operators and edges; raises InputError naming the line."""
    operators: dict[int, Operator] = {}
    edges = []
    for number, line in lines_of(path):
        where = f"{path}: line {number}"
        parts = [part.strip() for part in line.split(" -- ")]
        if len(parts) == 2:
            edges.append((_node(parts[0], where), _node(parts[1], where)))
        elif len(parts) >= 3:
            key = _node(parts[0], where)
            if key in operators:
                raise InputError("node stands twice", where=where, got=parts[0])
            operators[key] = _operator(" ".join(parts[1:-1]), parts[-1], where)
        else:
            expected = "nodeI -- … or nodeI -- nodeJ"
            raise InputError("not usable", where=where, got=line, expected=expected)
    if not operators:
        expected = "lines nodeI -- description -- forward_compute_time=…"
        raise InputError("no node", where=path, expected=expected)
    for end in (end for edge in edges for end in edge):
        if end not in operators:
            raise InputError("an edge names a node that is not there", where=path, got=f"node{end}")
    return operators, edges


def _node(text: str, where: str) -> int:
    match = NUMBER.match(text)
    if match is None:
        expected = "a node's name, such as node12"
        raise InputError("not usable", where=where, got=text, expected=expected)
    return int(match[1])


def _operator(description: str, fields: str, where: str) -> Operator:
    values = []
    for name in FIELDS:
        match = re.search(rf"{name}=(\[[^\]]*\]|[^,\s]+)", fields)
        if match is None:
            expected = f"{name}=NUMBER"
            raise InputError(f"{name} is missing", where=where, got=fields, expected=expected)
        most = MOST_SECONDS if name.endswith("time") else MOST_BYTES
        values.append(_sum(match[1], name, most, where))
    forward, backward, activation, params = values
    return Operator(description, forward * MILLI, backward * MILLI, params, activation, activation)


def _sum(text: str, name: str, most: float, where: str) -> float:
    """A number, or several in brackets."""
    total = 0.0
    for part in text.strip("[]").replace(";", ",").split(","):
        try:
            value = float(part)
        except ValueError:
            value = math.nan
        if not 0 <= value <= most:
            expected = f"a number from 0 to {most:g}"
            raise InputError(f"{name} is not usable", where=where, got=text, expected=expected)
        total += value
    return total


def read_piper(path: str, settings: Settings) -> Imported:
    """A profile with one table per tensor degree that all nodes have, micro-batches of one
    sample."""
    document = read_foreign(path)
    nodes = document["nodes"].entries(least=1)
    variants = {node["id"].whole(): _variants(node["TMPCs"]) for node in nodes}
    degrees = sorted(set.intersection(*(set(by_degree) for by_degree in variants.values())))
    if not degrees:
        raise document["nodes"].error("no tensor degree that all nodes have")
    edges, sent = [], dict.fromkeys(variants, 0.0)
    for edge in document["edges"].entries():
        edges.append(ends_of(edge, variants))
        bytes_sent = edge["communicationCost"].number(0, MOST_BYTES)
        sent[edges[-1][0]] = max(sent[edges[-1][0]], bytes_sent)
    names = {node["id"].whole(): node["name"].text() for node in nodes}
    operators = {n: Operator(name, 0.0, 0.0, 0.0, sent[n], 0.0) for n, name in names.items()}
    chain, least = in_order(operators, edges, path), degrees[0]

    def whole(number: int, key: str) -> float:
        return variants[number][least][key].number(0, MOST_BYTES / least) * least

    return profile(
        settings,
        model=Path(path).stem,
        source=f"Piper graph {Path(path).name}",
        where=path,
        layers=[
            layer(
                f"{i}-{names[number]}",
                whole(number, "parameterSize"),
                crossing,
                whole(number, "memoryUsageA"),
            )
            for i, (number, crossing) in enumerate(chain)
        ],
        tables=[
            table_of_sums(
                settings.device or "piper-gpu",
                degree,
                1,
                [variants[number][degree]["timePerSample"].seconds() for number, _ in chain],
            )
            for degree in degrees
        ],
        notes=(
            settings.device_note("piper-gpu"),
            TOGETHER,
            "times without recomputation; what is kept per sample is that of the lowest degree, as "
            "if wholly divided",
        ),
    )


def _variants(by_degree: Foreign) -> dict[int, Foreign]:
    """The variant without recomputation of each degree."""
    variants = {}
    for degree, entry in by_degree.items():
        plain = [v for v in entry.entries(least=1) if v["id"].text() == "vanilla"]
        if not plain:
            raise entry.error("no variant without recomputation", 'an entry with "id": "vanilla"')
        variants[key_number(degree, entry, 1, 4096)] = plain[0]
    return variants


def read_dnn_partitioning(path: str, settings: Settings) -> Imported:
    """A profile with one table, of the accelerator; forward and backward node of a colour are one
    layer."""
    operators, edges, training = placement_graph(read_foreign(path))
    return chain_profile(
        [(operators[number], crossing) for number, crossing in in_order(operators, edges, path)],
        settings,
        model=Path(path).stem,
        device="dnn-partitioning-accelerator",
        where=path,
        source=f"dnn-partitioning graph {Path(path).name}",
        notes=(
            "" if training else "a graph for inference: backward seconds are 0",
            "" if settings.micro_batch else one_sample("pass"),
        ),
    )


def placement_graph(
    document: Foreign,
) -> tuple[dict[int, Operator], list[tuple[int, int]], bool]:
    """Forward nodes with their backward node's time, their edges, and whether there are backward
    nodes."""
    nodes = document["nodes"].entries(least=1)
    backward: dict[int, float] = {}
    forward: dict[int, Foreign] = {}
    for node in nodes:
        if node["isBackwardNode"].whole(0, 1):
            colour = node["colorClass"].whole()
            backward[colour] = backward.get(colour, 0.0) + node["fpgaLatency"].seconds(MILLI)
        elif forward.setdefault(node["id"].whole(), node) is not node:
            raise node["id"].error("node stands twice")
    alone = set(backward) - {node["colorClass"].whole() for node in forward.values()}
    if alone:
        raise document["nodes"].error(
            f"colorClass {min(alone)} has a backward node and no forward node"
        )
    known = {node["id"].whole() for node in nodes}
    edges, sent = [], dict.fromkeys(forward, 0.0)
    for edge in document["edges"].entries():
        source, target = ends_of(edge, known)
        if source in forward and target in forward:
            edges.append((source, target))
            sent[source] = max(sent[source], edge["size"].number(0, MOST_BYTES))
    operators, left = {}, dict(backward)
    for number, node in forward.items():
        output = sent[number]
        operators[number] = Operator(
            name=node["name"].text(),
            forward=node["fpgaLatency"].seconds(MILLI),
            # a colour's backward seconds count once, at its first forward node
            backward=left.pop(node["colorClass"].whole(), 0.0),
            params=max(node["size"].number(0, MOST_BYTES) - output, 0.0),
            output=output,
            kept=output,
        )
    return operators, edges, bool(backward)
