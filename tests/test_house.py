"""No modules of hetplan import each other in a circle; `test_layout` has the directions."""

from __future__ import annotations

import ast

import networkx as nx

from test_layout import SOURCE, imports, module_name, modules, tree_of


def sources() -> dict[str, ast.Module]:
    """Every module of hetplan by its dotted name."""
    return {module_name(path): tree_of(SOURCE / path) for path in modules()}


def import_circles(trees: dict[str, ast.Module]) -> list[list[str]]:
    """Groups of modules that import each other in a circle, imports inside functions included."""
    graph: nx.DiGraph[str] = nx.DiGraph()
    for name, tree in trees.items():
        for _, imported in imports(tree):
            # `from a import b`: b may be a module or a name of a
            target = imported if imported in trees else imported.rpartition(".")[0]
            if target in trees:
                graph.add_edge(name, target)
    circles = [sorted(part) for part in nx.strongly_connected_components(graph) if len(part) > 1]
    return circles + [[name] for name in nx.nodes_with_selfloops(graph)]


def test_a_circle_is_noticed() -> None:
    trees = {
        "hetplan.a": "from hetplan.b import x",
        "hetplan.b": "def f():\n    from hetplan import a",
        "hetplan.c": "import hetplan.a",
    }
    circles = import_circles({name: ast.parse(source) for name, source in trees.items()})
    assert circles == [["hetplan.a", "hetplan.b"]]


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert import_circles(sources()) == []
