"""The exact method of problem `hap`: it minimizes over programs and ratios together, and proves the
optimum.

The search is a branch and bound over cells, which are sets of ratios (module `cell_search`). It
bounds a cell by shortest paths in the graph of needs (module `needs`): the graph in all orders or,
where that has too many states, the graph in one order, called canonical.

Theorem. Without a memory limit, on the graph in all orders, the search ends with an optimum and a
bound within the gap asked for. Condition: in small cells, the arcs become whole stages of programs
(the computations between two communications), which they do unless there are too many stages per
arc (`Parameters.stages_per_arc`). Proof:

(1) Cells cover ratios that are optimal (module `cells`).
(2) Every minimal program is a path of the graph (`needs`).
(3) The bound of a cell that shrinks to a point tends to the least cost at the point, where arcs are
    whole stages (`whole_stages`).
(4) A cell is closed only where its programs cost no less than the threshold, which is the
    incumbent's objective less the gap that is allowed.

When the search stops earlier, the least bound of the open cells is still valid. With a memory
limit, the bound from Lagrangian multipliers (`byte_prices`) is at most the cost of the best mixture
of programs that fits on average, which may leave a gap.

Where cells would be too many (several segments, many device types), or leave a gap on a graph in
all orders, HiGHS solves the mixed-integer programme of paths (module `model`), starting from the
bound and the best program of the search. Source: hetplan, for HAP, Section 3.2.
"""

from contextlib import suppress
from dataclasses import replace

from hetplan.formulations.hap import model
from hetplan.formulations.hap.byte_prices import first_multipliers
from hetplan.formulations.hap.cell_search import (
    DEFAULTS,
    Cell,
    CellSearch,
    Incumbent,
    Parameters,
    surely_ends,
)
from hetplan.formulations.hap.cells import whole_cell
from hetplan.formulations.hap.chain_bound import chain_bound
from hetplan.formulations.hap.data import HapData, HapDecision
from hetplan.formulations.hap.first_programs import first_program, fitting_program
from hetplan.formulations.hap.graph import Graph
from hetplan.formulations.hap.needs import graph_of_needs
from hetplan.formulations.hap.outcomes import NONE_FITS, outcome_of, reduced_or_answered
from hetplan.formulations.hap.theory import ReducedTheory
from hetplan.solvers import branch_and_bound
from hetplan.solvers.branch_and_bound import Proof, SearchLimits
from hetplan.solvers.run import Outcome, Run, Stop, Stopped, stop_reason

# Rounding error of sums of thousands of terms, as a share of the optimum. It is subtracted from
# bounds.
SUM_ROUNDING = 1e-10
WIDE = (
    "the theory is too wide for an exact order of its parallel branches; "
    "the bound ignores their order"
)


def solve(data: HapData, run: Run, parameters: Parameters = DEFAULTS) -> Outcome[HapDecision]:
    """The proven optimum, or at the time limit the best decision so far and a proven bound."""
    theory = reduced_or_answered(data, run)
    if isinstance(theory, Outcome):
        return theory
    problem = theory.problem
    bound = chain_bound(theory)
    run.report(bound=bound)
    # The search uses up half of the gap asked for. The other half is left to rounding.
    incumbent = Incumbent(run, gap=0.5 * run.options.gap, theory=theory)
    if problem.capacity is not None:
        # Perhaps no program fits in memory. Until the search has one that does, the incumbent has
        # no decision and an objective above that of any program. 1e-300 keeps it above 0, which
        # the test of the objective below takes for optimal.
        incumbent.objective = problem.seconds_of_all * (1 + 1e-6) + 1e-300
    incumbent.try_program(first_program(theory))
    if problem.capacity is not None:
        incumbent.try_program(fitting_program(theory, run)[0])
    if bound >= incumbent.threshold or incumbent.objective <= 0:
        bound = min(bound, incumbent.objective)
        return outcome_of(theory, incumbent.decision, run=run, stop=Stop.OPTIMAL, bound=bound)
    graph = None
    with suppress(Stopped):
        graph = graph_of_needs(theory, parameters.most_states, run)
        if graph is None:
            limit = parameters.most_canonical_states
            graph = graph_of_needs(theory, limit, run, canonical=True)
    return _searched(theory, incumbent, graph, bound, run, parameters)


def _searched(
    theory: ReducedTheory,
    incumbent: Incumbent,
    graph: Graph | None,
    bound: float,
    run: Run,
    parameters: Parameters,
) -> Outcome[HapDecision]:
    """The outcome of the search over cells, or of HiGHS where the search ends without a proof and
    HiGHS can find one.

    graph: None where the time was up before the graph was complete, or where it has too many
        states.
    bound: seconds, a lower bound proven before the search.
    """
    problem = theory.problem
    # Only in the graph in all orders do paths have the execution order of their programs; in the
    # canonical graph they do not.
    all_orders = graph is not None and graph.in_execution_order
    too_many_ratios = all_orders and _has_too_many_ratios(theory, parameters)
    # With one segment and without a memory limit, the search finds the proof by itself.
    milp_can_finish = all_orders and (problem.g > 1 or problem.capacity is not None)
    proven = False
    details: dict[str, object] = {}
    if graph is not None and not too_many_ratios and _can_be_bounded(graph, parameters):
        share = parameters.cells_share if milp_can_finish else 1.0
        # The part bounds the same problem, so that it ends where the run is hopeless.
        part = replace(run.part(share=share, quiet=False), hopeless=run.hopeless)
        proof = _proof_by_cells(graph, incumbent, part, parameters)
        proven = proof.proven
        bound = max(bound, proof.bound or 0.0)
        run.report(bound=bound)
        details = {
            "states": graph.n,
            "arcs": len(graph.head),
            "cells": proof.expanded,
            "programs": len(incumbent.tried),
        }
    if not proven and not run.should_stop and (too_many_ratios or milp_can_finish):
        return model.solve_reduced(
            "milp", theory, run, known=incumbent.decision, floor=bound, details=details
        )
    if proven and incumbent.decision is None:
        return outcome_of(
            theory,
            None,
            run=run,
            stop=Stop.INFEASIBLE,
            message=NONE_FITS,
            bound=None,
            details=details,
        )
    message = ""
    if proven:
        stop = Stop.OPTIMAL
    elif run.should_stop:
        stop = stop_reason(run)
    else:
        stop = Stop.LIMIT
        if not all_orders:
            message = WIDE
    return outcome_of(
        theory,
        incumbent.decision,
        run=run,
        stop=stop,
        message=message,
        bound=bound,
        details=details,
    )


def _has_too_many_ratios(theory: ReducedTheory, parameters: Parameters) -> bool:
    """Whether a cell has too many vertices, or the instance too many free ratios, for a search that
    divides cells."""
    problem = theory.problem
    vertices = problem.K**problem.g
    free_ratios = problem.g * (problem.K - 1)
    return vertices > parameters.most_vertices or free_ratios > parameters.most_free_ratios


def _can_be_bounded(graph: Graph, parameters: Parameters) -> bool:
    """Whether the graph is small enough to bound the first cell on it."""
    if graph.in_execution_order:
        return True
    problem = graph.theory.problem
    vertices: int = problem.K**problem.g
    return len(graph.head) * vertices <= parameters.most_arc_vertices


def _proof_by_cells(graph: Graph, incumbent: Incumbent, run: Run, parameters: Parameters) -> Proof:
    """The proof of the branch and bound over cells of ratios.

    The search improves the incumbent, which reports to `run` from then on.
    """
    problem = graph.theory.problem
    incumbent.run = run
    multipliers = None
    if problem.capacity is not None:
        multipliers = first_multipliers(problem)
    first = Cell(whole_cell(problem), multipliers=multipliers)
    patience = None  # a search that surely ends with a proof is not given up
    if not surely_ends(graph):
        patience = parameters.patience
    return branch_and_bound.search(
        [(0.0, first)],
        CellSearch(graph, incumbent, parameters).expand,
        incumbent,
        run,
        SearchLimits(patience=patience, rounding=SUM_ROUNDING),
    )
