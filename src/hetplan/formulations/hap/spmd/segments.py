"""Segments of a program, each with ratios of its own: runs of layers, or parts of the operators'
graph.

Source: HAP, Section 5.2 (METIS, Karypis and Kumar 1998). Without pymetis, networkx halves the graph
again and again
(Kernighan and Lin 1970), whose exchanges keep numbers of operators, not work; the label says which
of the two it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Literal

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


def _graph(program: SingleProgram) -> tuple[list[str], list[int], dict[tuple[int, int], int]]:
    """(operators, weights of their FLOP, weight in entries of each edge between two)."""
    names = [node.name for node in program.computations]
    number, gradients = {name: i for i, name in enumerate(names)}, program.needs_gradient()
    flops = [work_of(program, node, gradients).total for node in program.computations]
    entries: dict[tuple[int, int], float] = {}
    for node in program.computations:
        for source in program.inputs(node):
            if not source.source:
                pair = (number[source.name], number[node.name])
                entries[pair] = entries.get(pair, 0.0) + source.elements
    return names, _scaled(flops), dict(zip(entries, _scaled(list(entries.values())), strict=True))


def _scaled(values: list[float]) -> list[int]:
    top = max(values, default=1.0) or 1.0
    return [max(1, round(LARGEST_WEIGHT * value / top)) for value in values]


def _parts(program: SingleProgram, count: int) -> tuple[dict[str, int], str]:
    names, work, edges = _graph(program)
    if find_spec("pymetis") is not None:
        return dict(zip(names, _by_metis(work, edges, count), strict=True)), METIS
    return dict(zip(names, _by_halves(work, edges, count), strict=True)), FALLBACK


def _by_metis(work: list[int], edges: Mapping[tuple[int, int], int], count: int) -> list[int]:
    """Part of each operator: balanced work, few entries on edges between parts."""
    import pymetis

    near: list[list[tuple[int, int]]] = [[] for _ in work]
    for (a, b), weight in edges.items():
        near[a].append((b, weight))
        near[b].append((a, weight))
    first = [0]
    for row in near:
        first.append(first[-1] + len(row))
    _, parts = pymetis.part_graph(
        count,
        pymetis.CSRAdjacency(first, [b for row in near for b, _ in row]),
        vweights=work,
        eweights=[weight for row in near for _, weight in row],
        options=pymetis.Options(seed=0),
    )
    return [int(part) for part in parts]


def _by_halves(work: list[int], edges: Mapping[tuple[int, int], int], count: int) -> list[int]:
    """The part with the most work is cut in two where half of it is done, and the cut improved by
    exchanges."""
    import networkx as nx

    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(range(len(work)))
    graph.add_weighted_edges_from((a, b, weight) for (a, b), weight in edges.items())
    parts: list[set[int]] = [set(range(len(work)))]
    while len(parts) < count:
        largest = max(
            (part for part in parts if len(part) > 1),
            key=lambda part: sum(work[node] for node in part),
        )
        parts.remove(largest)
        parts += nx.algorithms.community.kernighan_lin_bisection(
            graph.subgraph(largest), partition=_halves(sorted(largest), work), seed=0
        )
    part_of = [0] * len(work)
    for number, part in enumerate(parts):
        for node in part:
            part_of[node] = number
    return part_of


def _halves(nodes: list[int], work: list[int]) -> tuple[set[int], set[int]]:
    """Nodes in order, cut where half of their work is done; neither half is empty."""
    total, done, cut = sum(work[node] for node in nodes), 0, 0
    while cut < len(nodes) - 1 and (cut == 0 or 2 * (done + work[nodes[cut]]) <= total):
        done, cut = done + work[nodes[cut]], cut + 1
    return set(nodes[:cut]), set(nodes[cut:])
