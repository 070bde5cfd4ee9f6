"""Problem `hap` to proven optimality, jointly over programs and ratios: one search.

Branch and bound over cells of ratios (module `search`) on the graph of all orders or, where that
has too many states, on the canonical one. With memory, the problem without it comes first: its
bound holds, and its optimum may fit. Where cells are too many (several segments, many device
types), or leave something open on a small graph, the mixed-integer programme takes over from what
was found. Source: hetplan, for HAP, Section 3.2.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from hetplan.formulations.hap import model
from hetplan.formulations.hap.common import NONE_FITS, Posed, ended, pose
from hetplan.formulations.hap.data import HapData, HapDecision
from hetplan.formulations.hap.exact.byte_prices import first_prices
from hetplan.formulations.hap.exact.cells import whole_cell
from hetplan.formulations.hap.exact.search import Cell, Divider, Incumbent
from hetplan.formulations.hap.first import first_program, fitting_program, simple_bound
from hetplan.formulations.hap.graph import WIDE, Graph, choose
from hetplan.formulations.hap.theory import Theory
from hetplan.solvers.branch_and_bound import Limits, Proof, search
from hetplan.solvers.native import stopped
from hetplan.solvers.result import Outcome, Stop
from hetplan.solvers.run import Run

# Rounding in sums of thousands of terms, as a share of the optimum: deduction from bounds.
ROUNDING = 1e-10


@dataclass(frozen=True)
class Parameters:
    """Where the search gives way; chosen on the packaged instances and random theories."""

    # Nodes of the graph of all orders, and else of the canonical one.
    states: int = 3_000
    canonical_states: int = 300_000
    # Vertices of a cell, and free ratios (segments times types less one), beyond which cells are
    # too many: the programme is asked at once where the graph of all orders is small.
    vertices: int = 64
    free_ratios: int = 5
    # Cells without progress after which a bound that ignores orders is taken as it is.
    patience: int = 40
    # Where the programme can take over: share of the time for cells, and how many they may be on
    # graphs of so few arcs.
    share: float = 0.5
    cells: int = 400
    few_arcs: int = 2_000
    # With memory: share of the time for the problem without it.
    unlimited_share: float = 0.4


def solve(data: HapData, run: Run, parameters: Parameters = Parameters()) -> Outcome[HapDecision]:
    """Proven optimum, or with the time limit the best found so far and a proven bound."""
    posed = pose(data, run)
    if isinstance(posed, Outcome):
        return posed
    theory, problem = one_segment(posed.theory), posed.problem
    run.report(bound=simple_bound(theory))
    floor = simple_bound(theory)
    incumbent = Incumbent(run, gap=0.5 * run.options.gap, theory=theory)
    if problem.capacity is None:
        incumbent.price(first_program(theory))
    else:
        incumbent.objective = problem.most_seconds * (1 + 1e-6) + 1e-300
        incumbent.price(first_program(theory))
        plain = data.model_copy(update={"memory": None})
        unlimited = solve(
            plain, run.part(time_limit=parameters.unlimited_share * run.remaining), parameters
        )
        floor = max(floor, unlimited.bound or 0.0)
        if unlimited.decision is not None:
            incumbent.price(unlimited.decision.program)
        if floor < incumbent.threshold:
            incumbent.price(fitting_program(theory, run)[0])
    run.report(bound=floor)
    built = time.perf_counter()
    if floor >= incumbent.threshold or incumbent.objective <= 0:
        bound = min(floor, incumbent.objective)
        return ended(
            posed, incumbent.decision, run=run, stop=Stop.OPTIMAL, bound=bound, built=built
        )
    graph = choose(theory, parameters.states, parameters.canonical_states, run)
    return _searched(posed, incumbent, graph, floor, run, parameters)


def _searched(
    posed: Posed,
    incumbent: Incumbent,
    graph: Graph | None,
    floor: float,
    run: Run,
    parameters: Parameters,
) -> Outcome[HapDecision]:
    """Cells, then the programme where it may do better."""
    problem, built = incumbent.theory.problem, time.perf_counter()  # type: ignore[union-attr]
    free = problem.g * (problem.K - 1)
    many = problem.K**problem.g > parameters.vertices
    small = graph is not None and graph.ordered
    several = problem.g > 1 or problem.capacity is not None
    bound, proof = floor, None
    details: dict[str, object] = {}
    if graph is not None and not many and not (small and free > parameters.free_ratios):
        proof = _by_cells(graph, incumbent, several and small, run, parameters)
        bound = max(floor, proof.bound or 0.0)
        details = {"states": graph.n, "arcs": len(graph.head), "cells": proof.expanded}
        details["programs"] = len(incumbent.priced)
    proven = proof is not None and proof.proven
    if proven and incumbent.decision is None:
        return ended(
            posed, None, run=run, stop=Stop.INFEASIBLE, bound=None, built=built,
            message=NONE_FITS, details=details,
        )  # fmt: skip
    if not proven and not run.should_stop and (many or (small and (several or proof is None))):
        return model.search(
            "milp", posed, run, known=incumbent.decision, floor=bound, details=details
        )
    late = not proven and run.should_stop
    return ended(
        posed, incumbent.decision, run=run, built=built, bound=bound,
        stop=Stop.OPTIMAL if proven else stopped(run) if late else Stop.LIMIT,
        message="" if proven or small or late else WIDE, details=details,
    )  # fmt: skip


def _by_cells(
    graph: Graph, incumbent: Incumbent, programme: bool, run: Run, parameters: Parameters
) -> Proof:
    """The search over cells; `programme`: one takes over where it does not end."""
    problem = graph.theory.problem
    part = run.part(
        time_limit=(parameters.share if programme else 1.0) * run.remaining, quiet=False
    )
    incumbent.run = part
    few = programme and len(graph.head) <= parameters.few_arcs
    limits = Limits(
        patience=None if graph.ordered and problem.capacity is None else parameters.patience,
        most_nodes=parameters.cells if few else None,
        rounding=ROUNDING,
    )
    prices = None if problem.capacity is None else first_prices(problem)
    first = Cell(whole_cell(problem), incumbent.ratios, prices=prices)
    return search([(0.0, first)], Divider(graph, incumbent).expand, incumbent, part, limits)


def one_segment(theory: Theory) -> Theory:
    """The theory with all triples in segment 0 where only one segment's ratios cost anything."""
    problem = theory.problem
    shared = {step.segment for step in theory.steps if step.shared > 0}
    if problem.g == 1 or len(shared) > 1 or problem.capacity is not None:
        return theory
    steps = tuple(replace(s, segment=0) for s in problem.steps)
    moved = replace(problem, g=1, steps=steps)
    return replace(theory, problem=moved, steps=tuple(replace(s, segment=0) for s in theory.steps))
