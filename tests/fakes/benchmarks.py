"""The scripts of `benchmarks/` as modules, for tests."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from markdown_pages import ROOT


def benchmark(name: str) -> Any:
    """The module `benchmarks/NAME.py`, read once."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
