"""Problem `hap` with memory, to proven optimality.

In this order, until the gap asked for is proven: the problem without memory, whose bound holds here
too and whose optimum may fit (one segment: the joint search); branch and bound over cells of all
ratios by prices of bytes (module `byte_prices`), whose paths are the programs tried; the
mixed-integer programme where the graph of all orders is small.
The simplex that holds an optimum without memory need not hold one here (a fast device may have
little), so that the joint search itself cannot take memory in. Source: hetplan.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hetplan.formulations.hap import milp
from hetplan.formulations.hap.byte_prices import (
    MOST_VERTICES,
    Bounded,
    Cell,
    Path,
    Prices,
    Pricing,
    first_prices,
    whole_cell,
)
from hetplan.formulations.hap.cells import coordinates, halves
from hetplan.formulations.hap.common import NONE_FITS, Posed, ended
from hetplan.formulations.hap.data import HapDecision
from hetplan.formulations.hap.first import first_program, fitting_program, simple_bound
from hetplan.formulations.hap.problem import Floats
from hetplan.formulations.hap.ratios import best_ratios
from hetplan.formulations.hap.states import build, canonical
from hetplan.solvers.native import stopped
from hetplan.solvers.result import Outcome, Stop
from hetplan.solvers.run import Run, Stopped

Unlimited = Callable[[Run], Outcome[HapDecision]]
# States of the graph of all orders for the mixed-integer programme; canonical ones for prices.
STATES, CANONICAL_STATES = 2_000, 300_000
# Shares of the time left for the problem without memory: where that seems to matter little, and
# else.
MOST, LEAST = 0.8, 0.3
# Cells in which programs are also looked for at one point: the first ones, then every so many.
EACH, SOME = 10, 8
# Binding paths of which every two are crossed; states that are found in a second, on a slow
# machine.
BINDING, STATES_PER_SECOND = 5, 30_000
# Cells without a hundredth of the gap of progress after which bounds by prices are taken as they
# are.
PATIENCE = 40
# Rounding in sums of thousands of terms, as a share of the optimum: deduction from bounds.
ROUNDING = 1e-10


@dataclass
class Incumbent:
    """The best program that fits and its ratios' seconds; programs are priced once."""

    posed: Posed
    run: Run
    seconds: float = np.inf
    program: list[int] | None = None
    priced: set[tuple[int, ...]] = field(default_factory=set)

    def offer(self, chosen: Sequence[int]) -> None:
        """A program that uses the triples `chosen` in that order."""
        program = self.posed.theory.program(chosen)
        if tuple(program) in self.priced:
            return
        self.priced.add(tuple(program))
        problem = self.posed.problem
        found = best_ratios(problem, problem.stages(program), self.run)
        if found.seconds < self.seconds:
            self.seconds, self.program = found.seconds, program
            self.run.report(incumbent=found.seconds)

    @property
    def threshold(self) -> float:
        """The bound that proves it; without one, what shows that nothing fits."""
        if self.program is None:
            return self.posed.problem.most_seconds * (1 + 1e-6) + 1e-300
        return self.seconds * (1 - 0.5 * self.run.options.gap)


@dataclass
class Ended:
    """bound of all programs that fit (infinite: none does); how many cells."""

    bound: float
    cells: int = 0


def search(posed: Posed, run: Run, unlimited: Unlimited | None) -> Outcome[HapDecision]:
    """The optimum, or the best found and a bound. unlimited: solves the same without memory, where
    that is quick."""
    incumbent = Incumbent(posed, run)
    bound, details = simple_bound(posed.theory), dict[str, object]()
    slack = _slack(posed, incumbent)
    if not slack:
        incumbent.offer(fitting_program(posed.theory, run)[0])
    if unlimited is not None:
        found = unlimited(run.part(time_limit=run.remaining * (MOST if slack else LEAST)))
        bound = max(bound, found.bound or 0.0)
        details["unlimited_bound"] = found.bound
        if found.decision is not None:
            incumbent.offer(found.decision.program)
        run.report(bound=bound)
    built = time.perf_counter()
    priced = Ended(bound)
    if not incumbent.seconds <= _enough(bound, run) and not run.should_stop:
        small = build(posed.theory, STATES) is not None
        share = 1.0 if not small else 0.5 if unlimited is not None else 0.25
        part = run.part(time_limit=share * run.remaining, quiet=False)
        priced = by_prices(posed, incumbent, part) or priced
        bound = max(bound, priced.bound)
        details["cells"] = priced.cells
        if (
            np.isfinite(bound)
            and incumbent.seconds > _enough(bound, run)
            and (small or not priced.cells)
        ):
            return _programme(posed, incumbent, run, bound, details)
    if not np.isfinite(bound):
        return ended(
            posed, None, run=run, stop=Stop.INFEASIBLE, bound=None, built=built, message=NONE_FITS,
            details=details,
        )  # fmt: skip
    proven = incumbent.seconds <= _enough(bound, run)
    stop = Stop.OPTIMAL if proven else stopped(run) if run.should_stop else Stop.LIMIT
    return ended(
        posed, incumbent.program, run=run, stop=stop, bound=bound, built=built, details=details,
        message=RELAXED if priced.cells and not proven else "",
    )  # fmt: skip


def _slack(posed: Posed, incumbent: Incumbent) -> bool:
    """Whether the first program's best ratios without memory fit, so that it may well not matter;
    it is offered."""
    program, problem = first_program(posed.theory), posed.problem
    incumbent.offer(program)
    stages = problem.stages(posed.theory.program(program))
    plain = best_ratios(replace(problem, capacity=None), stages, incumbent.run)
    return problem.fits(stages, plain.ratios)


RELAXED = "with memory the bound takes one mean over device types for all stages"


def _enough(bound: float, run: Run) -> float:
    """What an incumbent may cost to be proven by a bound."""
    return bound / (1 - run.options.gap) if run.options.gap < 1 else np.inf


def _programme(
    posed: Posed, incumbent: Incumbent, run: Run, bound: float, details: dict[str, object]
) -> Outcome[HapDecision]:
    """The mixed-integer programme from the incumbent on; never a lower bound than `bound`."""
    from hetplan.solvers import highs

    return milp.search(
        highs.solve, posed, run, known=incumbent.program, floor=bound, details=details
    )


def by_prices(posed: Posed, incumbent: Incumbent, run: Run) -> Ended | None:
    """Best-first branch and bound over cells; None where the theory or its segments are too many
    for it."""
    problem = posed.problem
    states = int(min(CANONICAL_STATES, STATES_PER_SECOND * run.remaining))
    try:
        graph = (
            canonical(posed.theory, states, run=run)
            if problem.K**problem.g <= MOST_VERTICES
            else None
        )
    except Stopped:
        graph = None
    if graph is None:
        return None
    pricing, order = Pricing(problem, graph), itertools.count()
    Open = tuple[float, int, Cell, Prices, tuple[tuple[Path, Floats], ...]]
    cells: list[Open] = [(0.0, next(order), whole_cell(problem), first_prices(problem), ())]
    least, since, counted = 0.0, 0, 0
    while cells and not run.should_stop:
        if cells[0][0] >= incumbent.threshold:
            break
        progress = (cells[0][0] - least) / max(incumbent.threshold - least, 1e-300)
        least, since = (cells[0][0], 0) if progress > 0.01 else (least, since + 1)
        if since > PATIENCE:
            break
        bound, _, cell, prices, cuts = heapq.heappop(cells)
        counted += 1
        found, met = pricing.bounded(cell.vertices, prices, cuts, incumbent.threshold, run)
        if counted <= EACH or counted % SOME == 0:
            met += _tried(pricing, found, incumbent.threshold, run)
        for program in dict.fromkeys(path.program for path in met):
            if run.should_stop:
                break
            incumbent.offer(program)
        bound = max(bound, found.bound)
        if bound >= incumbent.threshold:
            continue
        for part in split(cell, found, problem.counts.astype(float)):
            heapq.heappush(cells, (bound, next(order), part, found.prices, found.cuts))
        run.report(bound=min(cells[0][0], incumbent.threshold) * (1 - ROUNDING))
    if not cells or cells[0][0] >= incumbent.threshold:
        return Ended(_proven(incumbent), counted)
    return Ended(cells[0][0] * (1 - ROUNDING), counted)


def _tried(pricing: Pricing, found: Bounded, enough: float, run: Run) -> list[Path]:
    """Programs for the point that a bound comes from: shortest paths there, and crossings of those
    that bind."""
    if found.point is None:
        return []
    there, met = pricing.bounded(found.point[None], found.prices, (), enough, run)
    binding = list(dict.fromkeys(id(path) for path, _ in (*there.cuts, *found.cuts)))
    paths = {id(path): path for path, _ in (*there.cuts, *found.cuts)}
    for one, other in itertools.combinations([paths[n] for n in binding[:BINDING]], 2):
        met += pricing.crossed(one, other, found.point)
    return met


def _proven(incumbent: Incumbent) -> float:
    """The bound once no cell is left: infinite where nothing fits."""
    return np.inf if incumbent.program is None else incumbent.threshold * (1 - ROUNDING)


def split(cell: Cell, found: Bounded, counts: Floats) -> list[Cell]:
    """Halves along the longest edge of all segments' simplices, at the point that the bound comes
    from."""
    simplices = cell.simplices
    K = simplices.shape[1]
    if K == 1:
        return [cell]
    longest = [
        max(float(np.abs(s[i] - s[j]) @ counts) for i in range(K) for j in range(i))
        for s in simplices
    ]
    k = int(np.argmax(longest))
    at = None if found.point is None else found.point[k]
    if at is not None and coordinates(simplices[k], at).min() < -1e-9:
        at = None
    parts = []
    for half in halves(simplices[k], counts, at):
        changed = simplices.copy()
        changed[k] = half
        parts.append(Cell(changed))
    return parts
