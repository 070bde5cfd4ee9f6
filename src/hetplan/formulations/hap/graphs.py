"""Which graph a theory's methods work on: all states where they are few, else the canonical
ones."""

from __future__ import annotations

from dataclasses import dataclass

from hetplan.formulations.hap.states import Graph, build, canonical
from hetplan.formulations.hap.theory import Theory
from hetplan.solvers.run import Run, Stopped

WIDE = "the theory is too wide for an exact order of its parallel branches; the bound ignores their order"


@dataclass(frozen=True)
class Chosen:
    """graph None: even the canonical states are too many, or time is up. exact: whether its paths
    are the programs."""

    graph: Graph | None
    exact: bool


def choose(theory: Theory, states: int, canonical_states: int, run: Run) -> Chosen:
    """The graph of all states within `states` nodes, else the canonical one within
    `canonical_states`."""
    try:
        whole = build(theory, states, run=run)
        if whole is not None:
            return Chosen(whole, True)
        return Chosen(canonical(theory, canonical_states, run=run), False)
    except Stopped:
        return Chosen(None, False)
