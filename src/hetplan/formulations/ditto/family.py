"""The Ditto family: names of its schemas, its evaluator and its methods (nothing is imported until used)."""

from __future__ import annotations

from hetplan.solvers.registry import Family, Method

_HERE = "hetplan.formulations.ditto"

FAMILY = Family(
    name="ditto",
    title="pipeline template of a heterogeneous cluster",
    paper="Ditto, on Oobleck (SOSP 2023)",
    data=f"{_HERE}.data:DittoData",
    decision=f"{_HERE}.data:DittoDecision",
    evaluate=f"{_HERE}.evaluate:evaluate",
    methods=(
        Method("auto", f"{_HERE}.exact.search:solve", True, "the fastest way to a proven optimum: `exact`"),
        Method("exact", f"{_HERE}.exact.search:solve", True, "bounded search over θ, shortest paths inside"),
    ),
)
