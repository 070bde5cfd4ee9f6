"""Segments of a program, each with ratios of its own: runs of layers, or parts of the operators'
graph.

Source: HAP, Section 5.2 (METIS, Karypis and Kumar 1998). Without pymetis, networkx halves the graph
again and again (Kernighan and Lin 1970), whose exchanges keep numbers of operators, not work; the
label says which of the two it was.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from importlib.util import find_spec
from itertools import accumulate
from typing import Literal

import networkx as nx

from hetplan.errors import InputError
from hetplan.formulations.hap.spmd.prices import by_layer, work_of
from hetplan.formulations.hap.spmd.program import SingleProgram

How = Literal["layer", "metis"]
METIS, FALLBACK, LAYERS = "METIS", "networkx, Kernighan-Lin", "layers"
# Weights of METIS are 32-bit whole numbers that must add up to less than 2^31.
LARGEST_WEIGHT = 10_000


def segmented(program: SingleProgram, count: int, how: How = "layer") -> tuple[SingleProgram, str]:
    """The program in up to `count` segments, numbered as they first appear, and what made them.

    Raises InputError unless there are at least as many operators.
    """
    operators = [node.name for node in program.computations]
    if not 1 <= count <= len(operators):
        raise InputError(
            "segments", where=program.name, got=count, expected=f"1 to {len(operators)}"
        )
    if count == 1:
        return program.with_segments({node.name: 0 for node in program.nodes}), LAYERS
    if how == "layer":
        return program.with_segments(_everywhere(program, _runs_of_layers(program, count))), LAYERS
    parts, label = _parts(program, count)
    return program.with_segments(_everywhere(program, parts)), label


def _everywhere(program: SingleProgram, segment: Mapping[str, int]) -> dict[str, int]:
    """Numbers in order of appearance; data and parameters go with their first user."""
    numbers: dict[int, int] = {}
    number_of: dict[str, int] = {}
    for node in program.computations:
        number_of[node.name] = numbers.setdefault(segment[node.name], len(numbers))
        for source in program.inputs(node):
            if source.source:
                number_of.setdefault(source.name, number_of[node.name])
    return {node.name: number_of.get(node.name, 0) for node in program.nodes}


def _runs_of_layers(program: SingleProgram, count: int) -> dict[str, int]:
    """A layer belongs where the middle of its work falls when the whole is cut into equal parts."""
    work = by_layer(program)
    total, done, at = sum(work.values()), 0.0, {}
    for layer, flops in work.items():
        at[layer] = min(count - 1, int(count * (done + flops / 2) / total))
        done += flops
    return {node.name: at[node.layer] for node in program.computations}


def _graph(program: SingleProgram) -> nx.Graph[int]:
    """Operators by number with their FLOP, edges between two with the entries of what one reads of
    the other, as weights."""
    gradients = program.needs_gradient()
    graph: nx.Graph[int] = nx.Graph()
    number = {node.name: i for i, node in enumerate(program.computations)}
    for node in program.computations:
        work = work_of(program, node, gradients).total
        graph.add_node(number[node.name], work=work)
        for source in program.inputs(node):
            if not source.source:
                graph.add_edge(number[source.name], number[node.name], entries=source.elements)
    for rows, name in ((graph.nodes.values(), "work"), (graph.edges.values(), "entries")):
        top = max((row[name] for row in rows), default=0.0) or 1.0
        for row in rows:
            row[name] = max(1, round(LARGEST_WEIGHT * row[name] / top))
    return graph


def _parts(program: SingleProgram, count: int) -> tuple[dict[str, int], str]:
    names, graph = [node.name for node in program.computations], _graph(program)
    if find_spec("pymetis") is not None:
        return dict(zip(names, _by_metis(graph, count), strict=True)), METIS
    return dict(zip(names, _by_halves(graph, count), strict=True)), FALLBACK


def _by_metis(graph: nx.Graph[int], count: int) -> list[int]:
    """Part of each operator: balanced work, few entries on edges between parts."""
    import pymetis

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


def _by_halves(graph: nx.Graph[int], count: int) -> list[int]:
    """The part with the most work is cut in two where half of it is done, and the cut improved by
    exchanges."""
    parts = [list(range(len(graph)))]
    while len(parts) < count:
        works = [sum(graph.nodes[node]["work"] for node in part) for part in parts]
        largest = max((k for k, part in enumerate(parts) if len(part) > 1), key=works.__getitem__)
        whole = parts.pop(largest)
        done = list(accumulate(graph.nodes[node]["work"] for node in whole))
        cut = min(max(1, bisect_right(done, done[-1] / 2)), len(whole) - 1)
        halves = nx.algorithms.community.kernighan_lin_bisection(
            graph.subgraph(whole), (set(whole[:cut]), set(whole[cut:])), weight="entries", seed=0
        )
        parts += [sorted(half) for half in halves]
    part_of = {node: number for number, part in enumerate(parts) for node in part}
    return [part_of[node] for node in range(len(graph))]
