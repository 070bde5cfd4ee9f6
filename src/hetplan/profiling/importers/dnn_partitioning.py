"""Graphs of "Efficient Algorithms for Device Placement of DNN Graph Operators" (NeurIPS 2020),
msr-fiddle.

`nodes[]`: {"id", "name", "cpuLatency", "fpgaLatency" (ms; "fpga" is any accelerator), "size"
(bytes: parameters and output), "isBackwardNode", "colorClass" (a forward node and its backward node
have the same)}; `edges[]`: {"sourceId", "destId", "size" (bytes)}. Graphs for inference have no
backward nodes: their backward seconds are 0.
"""

from __future__ import annotations

from pathlib import Path

from hetplan.profiling.foreign import Foreign, read_foreign
from hetplan.profiling.importers.common import (
    Graph,
    Imported,
    Node,
    Settings,
    chain_profile,
    device_note,
    profile_result,
)
from hetplan.schema import MOST_BYTES

DEVICE = "dnn-partitioning-accelerator"
MILLI = 1e-3


def read(path: str, settings: Settings) -> Imported:
    """A profile with one table, of the accelerator; forward and backward node of a colour are one
    layer."""
    document = read_foreign(path)
    graph, training = read_graph(document)
    profile = chain_profile(
        graph.chain(path), settings, model=Path(path).stem, device=DEVICE, where=path,
        source=f"dnn-partitioning graph {Path(path).name}",
    )  # fmt: skip
    return profile_result(
        profile,
        device_note(settings, DEVICE),
        "" if training else "a graph for inference: backward seconds are 0",
        "" if settings.micro_batch else "one pass counts as one sample; --micro-batch N divides it",
    )


def read_graph(document: Foreign) -> tuple[Graph, bool]:
    """Forward nodes with their backward node's time, and whether there are backward nodes."""
    nodes = document["nodes"].entries(least=1)
    backward: dict[int, float] = {}
    forward: dict[int, Foreign] = {}
    colours: set[int] = set()
    for node in nodes:
        colour = node["colorClass"].whole()
        if node["isBackwardNode"].whole(0, 1):
            backward[colour] = backward.get(colour, 0.0) + _seconds(node)
            continue
        number = node["id"].whole()
        if number in forward:
            raise node["id"].error("node stands twice")
        forward[number] = node
        colours.add(colour)
    alone = sorted(set(backward) - colours)
    if alone:
        raise document["nodes"].error(
            f"colorClass {alone[0]} has a backward node and no forward node"
        )
    everything = {node["id"].whole() for node in nodes}
    graph, sent = Graph(), dict.fromkeys(forward, 0.0)
    for edge in document["edges"].entries():
        ends = edge["sourceId"], edge["destId"]
        for end in ends:
            if end.whole() not in everything:
                raise end.error("an edge names a node that is not there")
        source, target = (end.whole() for end in ends)
        if source in forward and target in forward:
            graph.edges.append((source, target))
            sent[source] = max(sent[source], edge["size"].number(0, MOST_BYTES))
    shared: dict[int, float] = dict(backward)
    for number, node in forward.items():
        size = node["size"].number(0, MOST_BYTES)
        # a colour's backward seconds count once, at its first forward node
        seconds = shared.pop(node["colorClass"].whole(), 0.0)
        params = max(size - sent[number], 0.0)
        graph.nodes[number] = Node(
            node["name"].text(), _seconds(node), seconds, params, sent[number], sent[number]
        )
    return graph, bool(backward)


def _seconds(node: Foreign) -> float:
    return node["fpgaLatency"].seconds(MILLI)
