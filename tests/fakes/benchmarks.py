"""The scripts of `benchmarks/` as modules, for tests."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any
from unittest.mock import patch

from markdown_pages import ROOT


def benchmark(name: str) -> Any:
    """The module `benchmarks/NAME.py`, read once; what it imports from its folder is there."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        # Not longer than this: some scripts have the names of packages of tests.
        with patch.object(sys, "path", [*sys.path, str(ROOT / "benchmarks")]):
            spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
