"""Imports graphs of operators, as PipeDream, Piper and the dnn-partitioning project write them.

The importers put the operators into an order of execution: a chain that a plan can cut anywhere. An
operator's output crosses every cut between the operator and the last operator that reads the
output, once.

- PipeDream (SOSP 2019), `graph.txt`, milliseconds and bytes of one mini-batch. Lines `nodeI --
  description -- forward_compute_time=…, backward_compute_time=…, activation_size=…,
  parameter_size=…` and edges `\\tnodeI -- nodeJ`, in any order. A figure may be a list in
  brackets, whose sum counts.
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
from typing import Annotated, Any, NamedTuple, TypeVar

import networkx as nx
from pydantic import BeforeValidator, FailFast, Field

from hetplan.adapters.importers.common import (
    DIVIDED_NOTE,
    MOST_LAYERS,
    Imported,
    Operator,
    Settings,
    chain_layers,
    chain_profile,
    check_layers,
    lines_of,
    profile,
    table_of_sums,
)
from hetplan.errors import InputError, T, require, short_repr
from hetplan.schema import (
    Bytes,
    Count,
    DegreeKey,
    Foreign,
    ForeignName,
    Seconds,
    parse,
    read_foreign,
)

MILLI = 1e-3
# Up to 8 digits, beyond the nodes of any graph: Python refuses to read thousands of them.
EDGE = re.compile(r"\s*node(\d{1,8}) -- node(\d{1,8})\s*$")
NODE = re.compile(r"\s*node(\d{1,8}) -- (?:(.*) -- )?(\w+=.*)$")  # number, description, figures
FIGURE = re.compile(r"(\w+)=(\[[^\]]*\]|[^,\s]+)")


def ordered(
    names: Mapping[int, str], edges: Iterable[tuple[int, int]], where: str
) -> "nx.DiGraph[int]":
    """The graph with its nodes in an order of execution.

    Of several nodes whose predecessors have all run, the one with the lowest number comes first.
    names: number of each node -> its name. edges: (source, target). where: the file, for errors.
    Raises InputError for a circle.
    """
    graph: nx.DiGraph[int] = nx.DiGraph(edges)
    graph.add_nodes_from(names)  # those without edges, too
    try:
        order = list(nx.lexicographical_topological_sort(graph))
    except nx.NetworkXUnfeasible:
        raise InputError(
            "operators wait for each other in a circle",
            where=where,
            # Any node of the circle would do; the lowest makes the message the same in every run.
            got=names[min(source for source, _ in nx.find_cycle(graph))],
        ) from None
    in_execution_order: nx.DiGraph[int] = nx.DiGraph()
    in_execution_order.add_nodes_from(order)
    in_execution_order.add_edges_from(graph.edges)
    return in_execution_order


def bytes_behind(
    operators: dict[int, Operator], edges: list[tuple[int, int]], where: str
) -> dict[int, float]:
    """Number of each operator -> bytes that cross the cut behind it. The operators are in an order
    of execution.

    edges: (source, target). where: the file, for errors. Raises InputError for a circle.
    """
    names = {number: operator.name for number, operator in operators.items()}
    graph = ordered(names, edges, where)
    order = list(graph)
    position = {number: i for i, number in enumerate(order)}
    crossing = 0.0  # bytes of the outputs so far that a later operator reads
    # [i] bytes of the outputs that the i-th operator is the last to read
    last_read = [0.0] * len(order)
    behind = {}
    for i, number in enumerate(order):
        output = operators[number].output
        crossing -= last_read[i]
        last_reader = max((position[reader] for reader in graph.successors(number)), default=i)
        if last_reader > i:
            crossing += output
            last_read[last_reader] += output
        behind[number] = max(crossing, 0.0)  # rounding may leave less than 0
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
    """A profile with one table, whose layers are the operators in an order of execution.

    edges: (source, target). device: the device type's name unless the user gives one. source: the
    provenance, which the file's name follows. notes: the importer's assumptions.
    """
    crossing = bytes_behind(operators, edges, path)
    return chain_profile(
        [(operators[number], size) for number, size in crossing.items()],
        settings,
        model=Path(path).stem,
        device=device,
        where=path,
        source=f"{source} {Path(path).name}",
        notes=notes,
    )


class GraphNode(Foreign):
    """A node of a JSON graph."""

    number: Count = Field(alias="id")
    name: ForeignName


N = TypeVar("N", bound=GraphNode)


# Lists of a JSON graph. They stop at the first wrong entry, since complaints about many take far
# more memory than the entries. A node of a graph is a layer or the backward pass of one.
Nodes = Annotated[list[T], Field(min_length=1, max_length=2 * MOST_LAYERS), FailFast()]
Edges = Annotated[list[T], Field(max_length=500_000), FailFast()]


class Edge(Foreign):
    """An edge of a JSON graph."""

    source: Count = Field(alias="sourceId")  # number of a node
    target: Count = Field(alias="destId")  # number of a node
    size: Bytes = Field(validation_alias="communicationCost")  # bytes that the edge carries


def nodes_by_number(nodes: Sequence[N], where: str) -> dict[int, N]:
    """The nodes of a JSON graph by their numbers. Raises InputError for a number that stands
    twice. where: the file."""
    by_number: dict[int, N] = {}
    for i, node in enumerate(nodes):
        require(
            node.number not in by_number,
            "node stands twice",
            where=f"{where}: nodes[{i}].id",
            got=node.number,
        )
        by_number[node.number] = node
    return by_number


def check_ends(edges: Sequence[Edge], nodes: Collection[int], where: str) -> None:
    """Raise InputError where an edge names a node that the file does not have."""
    for i, edge in enumerate(edges):
        for key, end in (("sourceId", edge.source), ("destId", edge.target)):
            require(
                end in nodes,
                "an edge names a node that is not there",
                where=f"{where}: edges[{i}].{key}",
                got=end,
            )


def output_bytes(nodes: Iterable[int], carried: Iterable[tuple[int, float]]) -> dict[int, float]:
    """Bytes of every node's output: the largest that an edge carries away from the node.

    carried: (source, bytes) of each edge.
    """
    sizes = dict.fromkeys(nodes, 0.0)
    for source, size in carried:
        sizes[source] = max(sizes[source], size)
    return sizes


def read_pipedream(path: str, settings: Settings) -> Imported:
    """A profile with one table, from a PipeDream graph.

    settings.micro_batch: number of samples in a measured mini-batch; None: 1.
    """
    operators, edges = pipedream_graph(path)
    notes = []
    if not settings.micro_batch:
        notes.append(ONE_SAMPLE.format("mini-batch"))
    return graph_profile(
        operators,
        edges,
        settings,
        path=path,
        device="pipedream-gpu",
        source="PipeDream graph",
        notes=notes,
    )


# The note for a file that does not give the number of samples in a measured pass.
ONE_SAMPLE = "one {} counts as one sample; --micro-batch N divides it"


def pipedream_graph(path: str) -> tuple[dict[int, Operator], list[tuple[int, int]]]:
    """The operators of a PipeDream graph by their numbers, and its edges as (source, target).
    Raises InputError that names the line."""
    operators: dict[int, Operator] = {}
    edges = []
    for line_number, line in lines_of(path):
        where = f"{path}: line {line_number}"
        check_layers(len(operators), where)
        if edge := EDGE.match(line):
            edges.append((int(edge[1]), int(edge[2])))
        elif match := NODE.match(line):
            number = int(match[1])
            description = match[2]
            figures = match[3]
            node = parse(PipeDreamNode, dict(FIGURE.findall(figures)), where=where)
            require(number not in operators, "node stands twice", where=where, got=f"node{number}")
            operators[number] = Operator(
                name=description.replace(" -- ", " ") if description else f"node{number}",
                forward=node.forward * MILLI,
                backward=node.backward * MILLI,
                params=node.params,
                output=node.activation,
                kept=node.activation,
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
    for ends in edges:
        for end in ends:
            require(
                end in operators,
                "an edge names a node that is not there",
                where=path,
                got=f"node{end}",
            )
    return operators, edges


def summed(text: str) -> float:
    """The sum of a list of numbers in brackets, with commas or semicolons between them, or the
    number that the text is.

    A validator of pydantic: it raises ValueError for any other text.
    """
    numbers = text.strip("[]").replace(";", ",").split(",")
    try:
        return sum(map(float, numbers))
    except ValueError:
        raise ValueError(f"is {short_repr(text)}, expected a number or a list of numbers") from None


class PipeDreamNode(Foreign):
    """The figures behind the description in a node's line, for one mini-batch."""

    # milliseconds of the forward and of the backward pass
    forward: Annotated[Seconds, BeforeValidator(summed)] = Field(alias="forward_compute_time")
    backward: Annotated[Seconds, BeforeValidator(summed)] = Field(alias="backward_compute_time")
    # bytes of the output, which is kept until the backward pass
    activation: Annotated[Bytes, BeforeValidator(summed)] = Field(alias="activation_size")
    # bytes of the parameters
    params: Annotated[Bytes, BeforeValidator(summed)] = Field(alias="parameter_size")


class PiperVariant(Foreign):
    """The costs of a node on one device at some tensor degree."""

    seconds: Seconds = Field(alias="timePerSample")  # forward and backward pass of a sample
    params: Bytes = Field(alias="parameterSize")  # bytes of the parameters
    kept: Bytes = Field(alias="memoryUsageA")  # bytes kept per sample in flight


def without_recomputation(variants: Any) -> Any:
    """The first variant in a list that recomputes nothing.

    A validator of pydantic: it raises ValueError for any other value.
    """
    if isinstance(variants, list):
        for variant in variants:
            if isinstance(variant, dict) and variant.get("id") == "vanilla":
                return variant
    raise ValueError('no variant without recomputation, expected an entry with "id": "vanilla"')


class PiperNode(GraphNode):
    """An operator of a Piper graph."""

    # tensor degree -> the variant without recomputation
    variants: Annotated[
        dict[DegreeKey, Annotated[PiperVariant, BeforeValidator(without_recomputation)]],
        Field(alias="TMPCs", max_length=64),
    ]


class PiperGraph(Foreign):
    """The content of a Piper file."""

    nodes: Nodes[PiperNode]
    edges: Edges[Edge]


def read_piper(path: str, settings: Settings) -> Imported:
    """A profile from a Piper graph, with one table for each tensor degree that all nodes have.

    The tables are for micro-batches of one sample.
    """
    graph = read_foreign(PiperGraph, path)
    nodes = nodes_by_number(graph.nodes, path)
    check_layers(len(nodes), f"{path}: nodes")
    check_ends(graph.edges, nodes, path)
    degrees_of_nodes = [set(node.variants) for node in graph.nodes]
    degrees = sorted(set.intersection(*degrees_of_nodes))
    require(degrees, "no tensor degree that all nodes have", where=f"{path}: nodes")
    output = output_bytes(nodes, ((edge.source, edge.size) for edge in graph.edges))
    # A profile has the sizes of whole layers; at the least degree a device has 1 / least of them.
    least = degrees[0]
    operators = {
        number: Operator(
            name=node.name,
            forward=0.0,  # the tables have the seconds, for each degree
            backward=0.0,
            params=node.variants[least].params * least,
            output=output[number],
            kept=node.variants[least].kept * least,
        )
        for number, node in nodes.items()
    }
    crossing = bytes_behind(operators, [(edge.source, edge.target) for edge in graph.edges], path)
    tables = []
    for degree in degrees:
        seconds = [nodes[number].variants[degree].seconds for number in crossing]
        tables.append(table_of_sums(settings.device or "piper-gpu", degree, 1, seconds))
    return profile(
        settings,
        model=Path(path).stem,
        source=f"Piper graph {Path(path).name}",
        where=path,
        layers=chain_layers([(operators[number], size) for number, size in crossing.items()]),
        tables=tables,
        notes=(
            settings.device_note("piper-gpu"),
            DIVIDED_NOTE,
            "times without recomputation; what is kept per sample is that of the lowest degree, as "
            "if wholly divided",
        ),
    )


class PlacedNode(GraphNode):
    """A forward or a backward node of a dnn-partitioning graph."""

    milliseconds: Seconds = Field(alias="fpgaLatency")  # on the accelerator
    size: Bytes  # bytes of the parameters and the output together
    # whether it is a backward node
    backward: bool | Annotated[int, Field(ge=0, le=1)] = Field(alias="isBackwardNode")
    # a forward node and its backward node have one colour; None: it is not given
    colour: Count | None = Field(None, alias="colorClass")


class PlacedEdge(Edge):
    """An edge of a dnn-partitioning graph."""

    size: Bytes = 0.0  # bytes of the source's output
    cost: Seconds = 0.0  # milliseconds of a transfer of the source's output


class PlacedGraph(Foreign):
    """The content of a dnn-partitioning file."""

    nodes: Nodes[PlacedNode]
    edges: Edges[PlacedEdge]


# The rate of transfers, 100 Gbit/s in bytes per ms, where no edge has both a size and a cost. Any
# rate would do: it turns costs into bytes, and a note names it as the bandwidth of the links.
PLAIN_RATE = 12.5e6


class Transfers(NamedTuple):
    """The transfers of a dnn-partitioning graph's outputs, see `transfers`.

    Where the file lacks all sizes, or all costs, `sizes` and `sent` are the same.
    """

    sizes: dict[int, float]  # node -> bytes of its output
    sent: dict[int, float]  # node -> bytes whose transfer at `rate` takes as long as the file says
    rate: float  # bytes per ms: the median of the edges' rates


def transfers(nodes: Collection[int], edges: Sequence[PlacedEdge]) -> Transfers:
    """The sizes of the nodes' outputs, and the bytes that stand for the costs of their transfers.

    nodes: the numbers of the nodes that the result covers.
    """
    rates = sorted(edge.size / edge.cost for edge in edges if edge.cost and edge.size)
    rate = rates[len(rates) // 2] if rates else PLAIN_RATE  # the upper median of an even number
    sizes = output_bytes(nodes, ((edge.source, edge.size) for edge in edges))
    sent = output_bytes(nodes, ((edge.source, edge.cost * rate) for edge in edges))
    if not any(sizes.values()):
        return Transfers(sent, sent, rate)
    if not any(sent.values()):
        return Transfers(sizes, sizes, rate)
    return Transfers(sizes, sent, rate)


def forward_node_of(
    nodes: Mapping[int, PlacedNode], edges: Iterable[Edge], where: str
) -> dict[int, int]:
    """Node -> the forward node of the layer that the node belongs to.

    A forward node belongs to itself. A backward node belongs to the first forward node of its
    colour. If its colour has no forward node, the first non-empty one of these sets decides, and in
    it the node that comes last in the order of execution:
    - the forward nodes that the backward node follows directly;
    - the forward nodes that the backward nodes directly before it belong to;
    - all forward nodes.
    """
    graph = ordered(
        {number: node.name for number, node in nodes.items()},
        ((edge.source, edge.target) for edge in edges),
        where,
    )
    first_of_colour: dict[int | None, int] = {}
    for number, node in nodes.items():
        if not node.backward and node.colour is not None:
            first_of_colour.setdefault(node.colour, number)
    position = {number: i for i, number in enumerate(graph)}
    forward = [number for number in position if not nodes[number].backward]
    require(forward, "no forward node", where=f"{where}: nodes")
    forward_node: dict[int, int] = {}
    for number in graph:
        node = nodes[number]
        if not node.backward:
            forward_node[number] = number
        elif node.colour in first_of_colour:
            forward_node[number] = first_of_colour[node.colour]
        else:
            before = list(graph.predecessors(number))
            forward_before = [n for n in before if not nodes[n].backward]
            # In the order of execution, the nodes before it have their forward node already.
            through_backward = [forward_node[n] for n in before]
            candidates = forward_before or through_backward or forward
            forward_node[number] = max(candidates, key=position.__getitem__)
    return forward_node


def read_dnn_partitioning(path: str, settings: Settings) -> Imported:
    """A profile from a dnn-partitioning graph, with one table, for the accelerator. A forward node
    and the backward nodes that belong to it are one layer."""
    graph = read_foreign(PlacedGraph, path)
    nodes = nodes_by_number(graph.nodes, path)
    check_ends(graph.edges, nodes, path)
    forward = {number: node for number, node in nodes.items() if not node.backward}
    backward = dict.fromkeys(forward, 0.0)  # forward node -> seconds of its backward nodes
    for number, forward_node in forward_node_of(nodes, graph.edges, path).items():
        if nodes[number].backward:
            backward[forward_node] += nodes[number].milliseconds * MILLI
    colours = [node.colour for node in forward.values() if node.colour is not None]
    shared_colours = len(set(colours)) < len(colours)
    edges = [edge for edge in graph.edges if edge.source in forward and edge.target in forward]
    sizes, sent, rate = transfers(forward, edges)
    link = f"{rate * 8 / 1e6:.4g} Gbit/s"  # from bytes per ms
    operators = {
        number: Operator(
            name=node.name,
            forward=node.milliseconds * MILLI,
            backward=backward[number],
            params=max(node.size - sizes[number], 0.0),  # `size` counts the output as well
            output=sent[number],
            kept=sizes[number],
        )
        for number, node in forward.items()
    }
    notes = []
    if len(forward) == len(nodes):
        notes.append("a graph for inference: backward seconds are 0")
    notes.append(
        f"on links of {link} transfers take what the file says; the cluster file has the links"
    )
    if shared_colours:
        notes.append("nodes of one colour may be cut apart")
    if not settings.micro_batch:
        notes.append(ONE_SAMPLE.format("pass"))
    return graph_profile(
        operators,
        [(edge.source, edge.target) for edge in edges],
        settings,
        path=path,
        device="dnn-partitioning-accelerator",
        source=f"dnn-partitioning graph, transfers cost as there at {link}:",
        notes=notes,
    )
