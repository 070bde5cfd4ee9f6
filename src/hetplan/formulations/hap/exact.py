"""Problem `hap` to proven optimality, jointly over programs and ratios: the code that proves an
instance.

Branch and bound over cells of ratios (module `cell_search`) on the graph of needs, in all orders
or, where that has too many states, in one order (the canonical graph, module `needs`).

Where cells are too many (several segments, many device types), or do not close the gap on a graph
in all orders, HiGHS solves the mixed-integer programme of paths (module `model`), from the bound
and the program found. Source: hetplan, for HAP, Section 3.2.
"""

from contextlib import suppress

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
from hetplan.solvers.branch_and_bound import SearchLimits
from hetplan.solvers.run import Outcome, Run, Stop, Stopped, stop_reason

# Rounding in sums of thousands of terms, as a share of the optimum; taken off bounds.
SUM_ROUNDING = 1e-10
WIDE = (
    "the theory is too wide for an exact order of its parallel branches; "
    "the bound ignores their order"
)


def solve(data: HapData, run: Run, parameters: Parameters = DEFAULTS) -> Outcome[HapDecision]:
    """Proven optimum, or with the time limit the best found so far and a proven bound."""
    theory = reduced_or_answered(data, run)
    if isinstance(theory, Outcome):
        return theory
    problem = theory.problem
    floor = chain_bound(theory)
    run.report(bound=floor)
    incumbent = Incumbent(run, gap=0.5 * run.options.gap, theory=theory)
    if problem.capacity is not None:
        # no program may fit: without one this cut-off, above what any program costs, stands in for
        # its cost, and `decision` stays None
        incumbent.objective = problem.seconds_of_all * (1 + 1e-6) + 1e-300
    incumbent.try_program(first_program(theory))
    if problem.capacity is not None:
        incumbent.try_program(fitting_program(theory, run)[0])
    if floor >= incumbent.threshold or incumbent.objective <= 0:
        return outcome_of(
            theory, incumbent.decision, run=run, stop=Stop.OPTIMAL,
            bound=min(floor, incumbent.objective),
        )  # fmt: skip
    graph = None
    with suppress(Stopped):
        graph = graph_of_needs(theory, parameters.most_states, run)
        graph = graph or graph_of_needs(
            theory, parameters.most_canonical_states, run, canonical=True
        )
    return _searched(theory, incumbent, graph, floor, run, parameters)


def _searched(
    theory: ReducedTheory,
    incumbent: "Incumbent",
    graph: Graph | None,
    bound: float,
    run: Run,
    parameters: Parameters,
) -> Outcome[HapDecision]:
    """Cells, then HiGHS where it may finish what they leave open."""
    problem = theory.problem
    all_orders = graph is not None and graph.in_execution_order
    milp_can_finish = all_orders and (problem.g > 1 or problem.capacity is not None)
    vertices = problem.K**problem.g
    too_many = all_orders and (
        vertices > parameters.most_vertices
        or problem.g * (problem.K - 1) > parameters.most_free_ratios
    )
    proven, details = False, dict[str, object]()
    if (
        graph is not None
        and not too_many
        and (all_orders or len(graph.head) * vertices <= parameters.most_arc_vertices)
    ):
        share = parameters.cells_share if milp_can_finish else 1.0
        part = run.part(time_limit=share * run.remaining, quiet=False)
        incumbent.run = part
        multipliers = None if problem.capacity is None else first_multipliers(problem)
        first = Cell(whole_cell(problem), multipliers=multipliers)
        proof = branch_and_bound.search(
            [(0.0, first)], CellSearch(graph, incumbent, parameters).expand, incumbent, part,
            SearchLimits(
                patience=None if surely_ends(graph) else parameters.patience, rounding=SUM_ROUNDING
            ),
        )  # fmt: skip
        proven, bound = proof.proven, max(bound, proof.bound or 0.0)
        details = {
            "states": graph.n, "arcs": len(graph.head), "cells": proof.expanded,
            "programs": len(incumbent.tried),
        }  # fmt: skip
    if not proven and not run.should_stop and (too_many or milp_can_finish):
        return model.solve_reduced(
            "milp", theory, run, known=incumbent.decision, floor=bound, details=details
        )
    stop, message = Stop.LIMIT, "" if all_orders else WIDE
    if proven:
        stop, message = Stop.OPTIMAL, ""
        if incumbent.decision is None:
            stop, message = Stop.INFEASIBLE, NONE_FITS
    elif run.should_stop:
        stop, message = stop_reason(run), ""
    return outcome_of(
        theory, incumbent.decision, run=run, stop=stop, message=message,
        bound=None if stop is Stop.INFEASIBLE else bound, details=details,
    )  # fmt: skip
