"""Shortest paths in graphs with circles, in every order of their nodes, against networkx."""

from __future__ import annotations

from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hetplan.formulations import family
from hetplan.formulations.hap.data import HapData
from hetplan.formulations.hap.exact.kernels import lengths
from hetplan.formulations.hap.graph_kernels import shortest_paths
from hetplan.solvers.options import Options
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Run

COSTS = 3


@st.composite
def graphs(draw: st.DrawFn) -> tuple[Any, Any, Any, Any, Any]:
    """(first, head, component, costs [A, COSTS], the graph): components ascend along arcs, the last
    node is a sink."""
    n = draw(st.integers(2, 9))
    pairs = draw(
        st.lists(st.tuples(st.integers(0, n - 2), st.integers(0, n - 1)), min_size=1, max_size=24)
    )
    graph: Any = nx.DiGraph([pair for pair in pairs if pair[0] != pair[1]])
    graph.add_nodes_from(range(n))
    parts = [sorted(part) for part in nx.strongly_connected_components(graph)]
    order = nx.lexicographical_topological_sort(
        nx.condensation(graph, parts), key=lambda i: n - 1 in parts[i]
    )
    mixed = [(i, node) for i, k in enumerate(order) for node in draw(st.permutations(parts[k]))]
    mixed = [pair for pair in mixed if pair[1] != n - 1] + [
        (n, n - 1)
    ]  # the sink is alone, and may come last
    place = {node: at for at, (_, node) in enumerate(mixed)}
    graph = nx.relabel_nodes(graph, place)
    arcs = sorted(graph.edges)
    assume(arcs)
    first = np.searchsorted([u for u, _ in arcs], np.arange(n + 1)).astype(np.int64)
    numbers = st.lists(st.integers(0, 5), min_size=COSTS, max_size=COSTS)
    costs = np.array([draw(numbers) for _ in arcs], float).reshape(len(arcs), COSTS)
    return (
        first,
        np.array([v for _, v in arcs], np.int64),
        np.array([i for i, _ in mixed]),
        costs,
        graph,
    )


def expected(graph: Any, costs: Any, which: int) -> list[float]:
    """From every node to the last one."""
    weighted: Any = nx.DiGraph()
    weighted.add_nodes_from(graph)
    for (u, v), cost in zip(sorted(graph.edges), costs[:, which], strict=True):
        weighted.add_edge(v, u, weight=cost)
    found = nx.single_source_dijkstra_path_length(weighted, len(graph) - 1)
    return [found.get(node, np.inf) for node in range(len(graph))]


@given(graphs())
def test_both_kernels_find_what_networkx_does(made: tuple[Any, Any, Any, Any, Any]) -> None:
    first, head, component, costs, graph = made
    component = np.unique(component, return_inverse=True)[1].astype(np.int64)
    length, arc = shortest_paths(first, head, component, costs)
    sums = lengths(first, head, component, costs[:, None, :])
    for which in range(COSTS):
        told = expected(graph, costs, which)
        assert length[:, which].tolist() == told
        assert sums[:, 0, which].tolist() == told
        for node in range(len(first) - 2):
            a = arc[node, which]
            assert (a < 0) == (told[node] == np.inf)
            assert a < 0 or told[node] == costs[a, which] + told[head[a]]


def theory() -> HapData:
    """A circle (gathered, sliced again) of which one node leads on: programs behind it were once
    taken for none."""

    def compute(
        name: str, pre: list[str], post: str, fixed: float = 0.0, shared: float = 0.0
    ) -> dict[str, Any]:
        flops = {"fixed_flops": fixed, "shared_flops": shared}
        return {
            "instruction": name,
            "pre": pre,
            "post": [post],
            "segment": 0,
            "kind": "compute",
            **flops,
        }

    gathered = {
        "instruction": "gather",
        "pre": ["t0|S"],
        "post": ["t0|R"],
        "segment": 0,
        "kind": "comm",
    }
    return HapData.model_validate(
        {
            "devices": [
                {"name": "a", "flops_per_second": 1.0},
                {"name": "b", "flops_per_second": 3.0},
            ],
            "segments": 3,
            "goal": "goal",
            "triples": [
                compute("b1", [], "b|S"),
                compute("rows", ["t0|S"], "t1|S", shared=60.0),
                compute("slice", ["t0|R"], "t0|S"),
                compute("join", ["t1|S", "c|S"], "goal"),
                {**gathered, "fixed_seconds": 0.0, "shared_seconds": 0.0},
                compute("load", [], "t0|S", fixed=2.0),
                compute("b2", ["b|S"], "c|S", fixed=0.3),
                compute("columns", ["t0|R"], "t1|S", shared=0.8),
            ],
        }
    )


@pytest.mark.parametrize("method", ["exact", "auto", "milp"])
def test_a_circle_behind_which_programs_were_lost(method: str) -> None:
    found = solve(family("hap"), theory(), method, Run(Options(threads=1)))
    assert found.objective == pytest.approx(2.35, rel=1e-9)
    assert found.bound == pytest.approx(2.35, rel=1e-6)
