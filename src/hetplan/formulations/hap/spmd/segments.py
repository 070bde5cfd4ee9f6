"""Segments of a program, each with ratios of its own: runs of layers, or parts of the operators'
graph as METIS cuts it (extra `metis`).

Source: HAP, Section 5.2 (METIS: Karypis and Kumar 1998).
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from itertools import accumulate
from typing import Literal

import networkx as nx

from hetplan.errors import UnsupportedError, require
from hetplan.formulations.hap.spmd.program import SingleProgram
from hetplan.formulations.hap.spmd.rules import by_layer, work_of

# Weights of METIS are 32-bit whole numbers that must add up to less than 2^31.
LARGEST_WEIGHT = 10_000


def segmented(
    program: SingleProgram, count: int, how: Literal["layer", "metis"] = "layer"
) -> SingleProgram:
    """The program in up to `count` segments, numbered as they first appear; data and parameters go
    with their first user.

    Raises InputError unless there are at least as many operators, UnsupportedError for METIS where
    pymetis is not installed.
    """
    operators = program.computations
    require(
        1 <= count <= len(operators),
        "segments",
        where=program.name,
        got=count,
        expected=f"1 to {len(operators)}",
    )
    parts = _runs_of_layers(program, count) if how == "layer" else _metis_parts(program, count)
    numbers: dict[int, int] = {}
    each = zip(operators, parts, strict=True)
    return in_segments(
        program, {node.name: numbers.setdefault(part, len(numbers)) for node, part in each}
    )


def in_segments(program: SingleProgram, segment_of: Mapping[str, int]) -> SingleProgram:
    """The program with these segments of operators; data and parameters go with their first
    user."""
    first = dict[str, int]()
    for node in program.computations:
        for source in (*program.inputs(node), node):
            if source is node or source.source:
                first.setdefault(source.name, segment_of.get(node.name, 0))
    return program.with_segments({node.name: first.get(node.name, 0) for node in program.nodes})


def _runs_of_layers(program: SingleProgram, count: int) -> list[int]:
    """Of each operator. A layer belongs where the middle of its work falls when the whole is cut
    into equal parts."""
    work = by_layer(program)
    total, done, part_of = sum(work.values()), 0.0, {}
    for layer, flops in work.items():
        part_of[layer] = min(count - 1, int(count * (done + flops / 2) / total))
        done += flops
    return [part_of[node.layer] for node in program.computations]


def _metis_parts(program: SingleProgram, count: int) -> list[int]:
    """Of each operator: balanced work, few entries on edges between parts."""
    require(
        find_spec("pymetis") is not None,
        "segments by METIS need pymetis",
        expected="pip install pymetis",
        kind=UnsupportedError,
    )
    import pymetis

    graph = _graph(program)
    first = [0, *accumulate(len(graph.adj[node]) for node in range(len(graph)))]
    near = [pair for node in range(len(graph)) for pair in graph.adj[node].items()]
    _, parts = pymetis.part_graph(
        count,
        pymetis.CSRAdjacency(first, [other for other, _ in near]),
        vweights=[graph.nodes[node]["work"] for node in range(len(graph))],
        eweights=[edge["entries"] for _, edge in near],
        options=pymetis.Options(seed=0),
    )
    return [int(part) for part in parts]


def _graph(program: SingleProgram) -> nx.Graph[int]:
    """Operators by number with their FLOP, edges between two with the entries of what one reads of
    the other, as weights."""
    gradients = program.needs_gradient()
    graph: nx.Graph[int] = nx.Graph()
    number = {node.name: i for i, node in enumerate(program.computations)}
    for node in program.computations:
        graph.add_node(number[node.name], work=work_of(program, node, gradients).total)
        for source in program.inputs(node):
            if not source.source:
                graph.add_edge(number[source.name], number[node.name], entries=source.elements)
    for rows, name in ((graph.nodes.values(), "work"), (graph.edges.values(), "entries")):
        top = max((row[name] for row in rows), default=0.0) or 1.0
        for row in rows:
            row[name] = max(1, round(LARGEST_WEIGHT * row[name] / top))
    return graph
