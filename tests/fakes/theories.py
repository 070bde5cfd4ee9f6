"""The theories of `benchmarks/hap_theories.py`, for tests."""

from __future__ import annotations

import importlib.util
from typing import Any

from markdown_pages import ROOT

_SPEC = importlib.util.spec_from_file_location(
    "hap_theories", ROOT / "benchmarks" / "hap_theories.py"
)
assert _SPEC is not None and _SPEC.loader is not None
made: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(made)
chain, residual, stages_only = made.chain, made.residual, made.stages_only
NETWORKS, theory_named = made.NETWORKS, made.theory_named
