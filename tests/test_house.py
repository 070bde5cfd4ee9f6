"""Limits on the source's shape that no linter of the project checks: import circles, long
functions, long parameter lists, compiled kernels and top-level commands."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

import networkx as nx
import pytest

from test_layout import SOURCE, imports, module_name, modules

LONGEST_FUNCTION = 80  # lines
PARAMETERS = 12
PARAMETERS_OF_A_COMMAND = 16
KERNELS = 25
COMMANDS = 16

Function = ast.FunctionDef | ast.AsyncFunctionDef
Rule = Callable[[str, ast.AST], list[str]]


def sources() -> dict[str, ast.Module]:
    """Every module of hetplan by its dotted name."""
    return {
        module_name(path): ast.parse((SOURCE / path).read_text(encoding="utf-8"))
        for path in modules()
    }


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


def functions(tree: ast.AST) -> Iterator[Function]:
    """All functions and methods, nested ones too."""
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def decorators(function: Function) -> list[str]:
    """The names of a function's decorators, without their arguments."""
    return [
        ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)
        for decorator in function.decorator_list
    ]


def is_command(module: str, function: Function) -> bool:
    """Whether typer makes a command of it (a public function of the command line), or it is
    `hetplan.plan`, the Python twin of one."""
    public = module.startswith("hetplan.cli.") and not function.name.startswith("_")
    return public or (module, function.name) == ("hetplan.planner.library", "plan")


def long_functions(module: str, tree: ast.AST) -> list[str]:
    """Functions of more than LONGEST_FUNCTION lines."""
    return [
        f"{module}.{f.name}: {lines} lines"
        for f in functions(tree)
        if (lines := (f.end_lineno or 0) - f.lineno + 1) > LONGEST_FUNCTION
    ]


def wide_functions(module: str, tree: ast.AST) -> list[str]:
    """Functions with too many parameters."""
    faults = []
    for f in functions(tree):
        count = len(f.args.posonlyargs) + len(f.args.args) + len(f.args.kwonlyargs)
        if count > (PARAMETERS_OF_A_COMMAND if is_command(module, f) else PARAMETERS):
            faults.append(f"{module}.{f.name}: {count} parameters")
    return faults


@pytest.mark.parametrize(
    ("rule", "module", "source"),
    [
        (long_functions, "hetplan.files", "def f():\n" + "    x = 1\n" * 80),
        (
            wide_functions,
            "hetplan.files",
            f"def f(*, {', '.join(f'a{i}' for i in range(13))}): ...",
        ),
        (wide_functions, "hetplan.cli.x", f"def f({', '.join(f'a{i}' for i in range(17))}): ..."),
    ],
)
def test_each_limit_is_noticed(rule: Rule, module: str, source: str) -> None:
    assert rule(module, ast.parse(source))


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


@pytest.mark.parametrize("rule", [long_functions, wide_functions])
def test_functions_keep_the_limit(rule: Rule) -> None:
    assert [fault for name, tree in sources().items() for fault in rule(name, tree)] == []


def test_few_kernels_are_compiled() -> None:
    kernels = [
        f"{name}.{f.name}"
        for name, tree in sources().items()
        for f in functions(tree)
        if any(d.split(".")[-1] in ("kernel", "njit", "jit") for d in decorators(f))
    ]
    assert len(kernels) <= KERNELS, kernels


def test_the_command_line_has_few_commands() -> None:
    from hetplan.cli.main import program

    visible = sorted(name for name, command in program().commands.items() if not command.hidden)
    assert len(visible) <= COMMANDS, visible
