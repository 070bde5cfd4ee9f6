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
  backward node have the same)}; `edges[]`: {"sourceId", "destId", "cost" (ms of a transfer of the
  source's output, the same on all of its edges), "size" (bytes; may be missing)}.
  Graphs for inference have no backward nodes: their backward seconds are 0.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import networkx as nx
from pydantic import BeforeValidator, Field

from hetplan.adapters.importers.common import (
    TOGETHER,
    Imported,
    Operator,
    Settings,
    chain_layers,
    chain_profile,
    lines_of,
    profile,
    table_of_sums,
)
from hetplan.errors import InputError, require
from hetplan.schema import (
    Bytes,
    Count,
    DegreeKey,
    Filled,
    Foreign,
    ForeignName,
    Seconds,
    parse,
    read_foreign,
)

MILLI = 1e-3
EDGE = re.compile(r"\s*node(\d{1,8}) -- node(\d{1,8})\s*$")
NODE = re.compile(r"\s*node(\d{1,8}) -- (?:(.*) -- )?(\w+=.*)$")
FIGURE = re.compile(r"(\w+)=(\[[^\]]*\]|[^,\s]+)")


def ordered(
    names: Mapping[int, str], edges: Iterable[tuple[int, int]], where: str
) -> "nx.DiGraph[int]":
    """The graph, its nodes in an order of work, lowest number first. Raises InputError for a
    circle."""
    graph: nx.DiGraph[int] = nx.DiGraph(edges)
    graph.add_nodes_from(names)
    try:
        order = list(nx.lexicographical_topological_sort(graph))
    except nx.NetworkXUnfeasible:
        raise InputError(
            "operators wait for each other in a circle",
            where=where,
            got=names[min(source for source, _ in nx.find_cycle(graph))],
        ) from None
    in_turn: nx.DiGraph[int] = nx.DiGraph()
    in_turn.add_nodes_from(order)
    in_turn.add_edges_from(graph.edges)
    return in_turn


def in_order(
    operators: dict[int, Operator], edges: list[tuple[int, int]], where: str
) -> dict[int, float]:
    """Numbers of the operators in an order of work, each with the bytes that pass the cut behind
    it. Raises InputError for a circle."""
    graph = ordered({n: one.name for n, one in operators.items()}, edges, where)
    order = list(graph)
    place = {number: i for i, number in enumerate(order)}
    crossing, leaving = 0.0, [0.0] * len(order)
    behind = {}
    for i, number in enumerate(order):
        crossing -= leaving[i]
        last = max((place[after] for after in graph.successors(number)), default=i)
        if last > i:
            crossing += operators[number].output
            leaving[last] += operators[number].output
        behind[number] = max(crossing, 0.0)
    return behind


def graph_profile(
    operators: dict[int, Operator],
    edges: list[tuple[int, int]],
    settings: Settings,
    *,
    path: str,
    device: str,
    source: str,
    notes: Iterable[str],
) -> Imported:
    """A profile with one table of operators in an order of work."""
    return chain_profile(
        [(operators[number], size) for number, size in in_order(operators, edges, path).items()],
        settings,
        model=Path(path).stem,
        device=device,
        where=path,
        source=f"{source} {Path(path).name}",
        notes=notes,
    )


class Edge(Foreign):
    """An edge of a JSON graph, and the bytes that it carries."""

    source: Count = Field(alias="sourceId")
    target: Count = Field(alias="destId")
    size: Bytes = Field(validation_alias="communicationCost")


def check_ends(edges: Sequence[Edge], known: Collection[int], where: str) -> None:
    """Raise InputError where an edge names a node that is not there."""
    for i, edge in enumerate(edges):
        for key, end in (("sourceId", edge.source), ("destId", edge.target)):
            require(
                end in known,
                "an edge names a node that is not there",
                where=f"{where}: edges[{i}].{key}",
                got=end,
            )


def output_bytes(nodes: Iterable[int], carried: Iterable[tuple[int, float]]) -> dict[int, float]:
    """Bytes of every node's output: the most that an edge carries from it. carried: the source and
    the bytes of each edge."""
    sizes = dict.fromkeys(nodes, 0.0)
    for source, size in carried:
        sizes[source] = max(sizes[source], size)
    return sizes


def read_pipedream(path: str, settings: Settings) -> Imported:
    """A profile with one table; --micro-batch says how many samples a mini-batch had (default
    1)."""
    return graph_profile(
        *pipedream_graph(path),
        settings,
        path=path,
        device="pipedream-gpu",
        source="PipeDream graph",
        notes=["" if settings.micro_batch else ONE_SAMPLE.format("mini-batch")],
    )


# Where the file does not tell how many samples were measured at once.
ONE_SAMPLE = "one {} counts as one sample; --micro-batch N divides it"


def pipedream_graph(path: str) -> tuple[dict[int, Operator], list[tuple[int, int]]]:
    """Operators and edges; raises InputError naming the line."""
    operators: dict[int, Operator] = {}
    edges = []
    for number, line in lines_of(path):
        where = f"{path}: line {number}"
        if edge := EDGE.match(line):
            edges.append((int(edge[1]), int(edge[2])))
        elif match := NODE.match(line):
            key = int(match[1])
            node = parse(PipeDreamNode, dict(FIGURE.findall(match[3])), where=where)
            require(key not in operators, "node stands twice", where=where, got=f"node{key}")
            operators[key] = Operator(
                match[2].replace(" -- ", " "),
                node.forward * MILLI,
                node.backward * MILLI,
                node.params,
                node.activation,
                node.activation,
            )
        else:
            raise InputError(
                "not usable", where=where, got=line, expected="nodeI -- … or nodeI -- nodeJ"
            )
    require(
        operators,
        "no node",
        where=path,
        expected="lines nodeI -- description -- forward_compute_time=…",
    )
    for end in (end for edge in edges for end in edge):
        require(
            end in operators,
            "an edge names a node that is not there",
            where=path,
            got=f"node{end}",
        )
    return operators, edges


def summed(text: str) -> float:
    """A number, or several in brackets; a validator, raises ValueError."""
    return sum(map(float, text.strip("[]").replace(";", ",").split(",")))


class PipeDreamNode(Foreign):
    """The figures behind a node's description; milliseconds and bytes."""

    forward: Annotated[Seconds, BeforeValidator(summed)] = Field(alias="forward_compute_time")
    backward: Annotated[Seconds, BeforeValidator(summed)] = Field(alias="backward_compute_time")
    activation: Annotated[Bytes, BeforeValidator(summed)] = Field(alias="activation_size")
    params: Annotated[Bytes, BeforeValidator(summed)] = Field(alias="parameter_size")


class PiperVariant(Foreign):
    """One way to run a node, of a sample on one device."""

    seconds: Seconds = Field(alias="timePerSample")
    params: Bytes = Field(alias="parameterSize")
    kept: Bytes = Field(alias="memoryUsageA")


def without_recomputation(variants: Any) -> Any:
    """The variant of a list that recomputes nothing; a validator, raises ValueError."""
    for variant in variants if isinstance(variants, list) else ():
        if isinstance(variant, dict) and variant.get("id") == "vanilla":
            return variant
    raise ValueError('no variant without recomputation, expected an entry with "id": "vanilla"')


class PiperNode(Foreign):
    """An operator; variants: by tensor degree, without recomputation."""

    number: Count = Field(alias="id")
    name: ForeignName
    variants: dict[DegreeKey, Annotated[PiperVariant, BeforeValidator(without_recomputation)]] = (
        Field(alias="TMPCs")
    )


class PiperGraph(Foreign):
    """The file."""

    nodes: Filled[list[PiperNode]]
    edges: list[Edge]


def read_piper(path: str, settings: Settings) -> Imported:
    """A profile with one table per tensor degree that all nodes have, micro-batches of one
    sample."""
    graph = read_foreign(PiperGraph, path)
    nodes = {node.number: node for node in graph.nodes}
    check_ends(graph.edges, nodes, path)
    degrees = sorted(set.intersection(*(set(node.variants) for node in graph.nodes)))
    require(degrees, "no tensor degree that all nodes have", where=f"{path}: nodes")
    carried, least = ((edge.source, edge.size) for edge in graph.edges), degrees[0]
    output = output_bytes(nodes, carried)
    operators = {
        number: Operator(
            name=node.name,
            forward=0.0,
            backward=0.0,
            params=node.variants[least].params * least,
            output=output[number],
            kept=node.variants[least].kept * least,
        )
        for number, node in nodes.items()
    }
    crossing = in_order(operators, [(edge.source, edge.target) for edge in graph.edges], path)
    return profile(
        settings,
        model=Path(path).stem,
        source=f"Piper graph {Path(path).name}",
        where=path,
        layers=chain_layers([(operators[n], bytes_behind) for n, bytes_behind in crossing.items()]),
        tables=[
            table_of_sums(
                settings.device or "piper-gpu",
                degree,
                1,
                [nodes[number].variants[degree].seconds for number in crossing],
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


class PlacedNode(Foreign):
    """A forward or a backward node; those of one colour, where they have one, belong together.
    size: bytes of parameters and output."""

    number: Count = Field(alias="id")
    name: ForeignName
    milliseconds: Seconds = Field(alias="fpgaLatency")
    size: Bytes
    backward: bool | Annotated[int, Field(ge=0, le=1)] = Field(alias="isBackwardNode")
    colour: Count | None = Field(None, alias="colorClass")


class PlacedEdge(Edge):
    """An edge, and what the transfer of its source's output costs in ms."""

    size: Bytes = 0.0
    cost: Seconds = 0.0


class PlacedGraph(Foreign):
    """The file."""

    nodes: Filled[list[PlacedNode]]
    edges: list[PlacedEdge]


PLAIN_RATE = 12.5e6  # bytes per ms, 100 Gbit/s, where no edge tells a rate


def transfers(
    nodes: Collection[int], edges: Sequence[PlacedEdge]
) -> tuple[dict[int, float], dict[int, float], float]:
    """Bytes of every node's output; the bytes whose transfer takes what the file says, at the third
    value: the file's usual rate, bytes per ms. Without costs both are the same."""
    rates = sorted(edge.size / edge.cost for edge in edges if edge.cost and edge.size)
    rate = rates[len(rates) // 2] if rates else PLAIN_RATE
    sizes = output_bytes(nodes, ((edge.source, edge.size) for edge in edges))
    sent = output_bytes(nodes, ((edge.source, edge.cost * rate) for edge in edges))
    return sizes if any(sizes.values()) else sent, sent if any(sent.values()) else sizes, rate


def forward_node_of(
    nodes: Mapping[int, PlacedNode], edges: Iterable[Edge], where: str
) -> dict[int, int]:
    """Node -> the forward node with which it makes one layer.

    The forward node of a backward node is the first of its colour; where there is none, the last
    forward node that it follows, else that of the backward node that it follows.
    """
    graph = ordered(
        {number: node.name for number, node in nodes.items()},
        ((edge.source, edge.target) for edge in edges),
        where,
    )
    first = dict[int | None, int]()
    for number, node in nodes.items():
        if not node.backward and node.colour is not None:
            first.setdefault(node.colour, number)
    order = {number: i for i, number in enumerate(graph)}
    forward = [number for number in order if not nodes[number].backward]
    require(forward, "no forward node", where=f"{where}: nodes")
    layer = dict[int, int]()
    for number in graph:
        node, before = nodes[number], list(graph.predecessors(number))
        own = [n for n in before if not nodes[n].backward]
        near = max(own or [layer[n] for n in before] or forward, key=order.__getitem__)
        layer[number] = first.get(node.colour, near) if node.backward else number
    return layer


def read_dnn_partitioning(path: str, settings: Settings) -> Imported:
    """A profile with one table, of the accelerator; forward and backward node of a colour are one
    layer."""
    graph = read_foreign(PlacedGraph, path)
    nodes = {node.number: node for node in graph.nodes}
    twice = next((node.number for node in graph.nodes if nodes[node.number] is not node), None)
    require(twice is None, "node stands twice", where=f"{path}: nodes", got=twice)
    check_ends(graph.edges, nodes, path)
    forward = {number: node for number, node in nodes.items() if not node.backward}
    backward = dict.fromkeys(forward, 0.0)
    for number, layer in forward_node_of(nodes, graph.edges, path).items():
        backward[layer] += nodes[number].milliseconds * MILLI if nodes[number].backward else 0.0
    colours = [node.colour for node in forward.values() if node.colour is not None]
    edges = [edge for edge in graph.edges if edge.source in forward and edge.target in forward]
    kept, sent, rate = transfers(forward, edges)
    gbit = f"{rate * 8 / 1e6:.4g} Gbit/s"
    operators = {
        number: Operator(
            name=node.name,
            forward=node.milliseconds * MILLI,
            backward=backward[number],
            params=max(node.size - kept[number], 0.0),
            output=sent[number],
            kept=kept[number],
        )
        for number, node in forward.items()
    }
    return graph_profile(
        operators,
        [(edge.source, edge.target) for edge in edges],
        settings,
        path=path,
        device="dnn-partitioning-accelerator",
        source=f"dnn-partitioning graph, transfers cost as there at {gbit}:",
        notes=(
            "" if len(forward) < len(nodes) else "a graph for inference: backward seconds are 0",
            f"on links of {gbit} transfers take what the file says; the cluster file has the links",
            "" if len({*colours}) == len(colours) else "nodes of one colour may be cut apart",
            "" if settings.micro_batch else ONE_SAMPLE.format("pass"),
        ),
    )
