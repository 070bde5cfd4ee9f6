"""What the runtime takes from torch is public, and there in the torch that is installed."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hetplan.runtime

torch: Any = pytest.importorskip("torch", reason="torch is an extra of hetplan")

FILES = sorted(Path(hetplan.runtime.__file__).parent.rglob("*.py"))
# The one module that may use private names.
PRIVATE = Path(hetplan.runtime.__file__).parent / "tracing" / "private.py"


def imported(tree: ast.AST) -> Iterator[tuple[str, str | None, str]]:
    """(module, name in it or None, name here) of every import of torch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    yield alias.name, None, alias.asname or "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                yield str(node.module), alias.name, alias.asname or alias.name


def dotted(node: ast.Attribute) -> list[str] | None:
    """`a.b.c` as its parts."""
    parts: list[str] = []
    inner: ast.expr = node
    while isinstance(inner, ast.Attribute):
        parts.append(inner.attr)
        inner = inner.value
    return [inner.id, *reversed(parts)] if isinstance(inner, ast.Name) else None


def used(source: str) -> set[str]:
    """Full names of everything of torch that a file names, `torch.nn.Module`, say."""
    tree = ast.parse(source)
    here: dict[str, str] = {}
    found: set[str] = set()
    for module, name, local in imported(tree):
        full = module if name is None else f"{module}.{name}"
        found.add(full)
        here[local] = "torch" if name is None and local == "torch" else full
    for node in ast.walk(tree):
        parts = dotted(node) if isinstance(node, ast.Attribute) else None
        if parts and parts[0] in here:
            found.add(".".join([here[parts[0]], *parts[1:]]))
    return found


def there(full: str) -> bool:
    """Whether torch has a name: a module, or what a module has."""
    parts = full.split(".")
    value: Any = importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], 2):
        if not hasattr(value, part):
            try:
                importlib.import_module(".".join(parts[:i]))
            except ImportError:
                return False
        value = getattr(value, part)
    return True


def private(full: str) -> bool:
    """Whether any part begins with an underscore (`__version__` is nobody's secret)."""
    return any(part.startswith("_") and not part.startswith("__") for part in full.split("."))


ALL = sorted({name for file in FILES for name in used(file.read_text(encoding="utf-8"))})
PUBLIC = sorted(
    {name for file in FILES if file != PRIVATE for name in used(file.read_text(encoding="utf-8"))}
)


def test_private_names_of_torch_are_in_one_module() -> None:
    assert len(PUBLIC) > 50
    assert [name for name in PUBLIC if private(name)] == []
    assert any(private(name) for name in ALL)
    assert used("import torch\ntorch._C._x()") == {"torch", "torch._C", "torch._C._x"}


def test_the_installed_torch_has_all_of_it() -> None:
    assert [name for name in ALL if not there(name)] == []
    assert not there("torch.nn.no_such_name")
