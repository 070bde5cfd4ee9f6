"""Exact joint optimisation of `amp`: bound every configuration, search those that can win, widen
until proven.

1. A few orders of the devices (`orders`), and exchanges of devices where most are unlike, give a
   first incumbent; no layer slower than it can be in a better decision.
2. Every configuration gets the row bound (`rows`), first without synchronisation; those that can
   still win get more orders and a narrow label search (`columns`), cheapest bound first, which give
   a good incumbent.
3. What the incumbent leaves is divided into boxes of synchronisation time; each is a job with its
own bound.
4. The job of least bound is searched with a width that grows until nothing is dropped: then it is
closed.
The least bound of the open jobs is the bound of the whole; it is valid whenever the search ends.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, islice

import numpy as np

from hetplan.formulations.amp.cells import Cells, find_cells
from hetplan.formulations.amp.data import AmpData, AmpDecision
from hetplan.formulations.amp.exact.columns import NOTHING, Found, decision, make_grid, search
from hetplan.formulations.amp.exact.layout import MAX_SHAPES, MOST_SHAPES, Layout, lay_out
from hetplan.formulations.amp.exact.rows import (
    RowModel,
    SyncBox,
    bound_configuration,
    bound_stages,
    row_model,
)
from hetplan.formulations.amp.exchange import allowance, improved, worthwhile
from hetplan.formulations.amp.general.bound import quick_seconds
from hetplan.formulations.amp.general.tables import Tables
from hetplan.formulations.amp.orders import placements, try_placement
from hetplan.formulations.amp.problem import AmpProblem, Configuration, compile_problem
from hetplan.formulations.amp.strategy import Strategy
from hetplan.solvers.result import Outcome, Stop
from hetplan.solvers.run import Run
from hetplan.solvers.threads import Work

FIRST_WIDTH = 24
WIDEN = 6
# Columns tried per label: this many and 8 for each label of the width.
LEAVES = 2000
# Memory of the widest search: labels of some 10 (D + K) bytes and their children.
MAX_WIDTH = 50_000
# Orders tried on every configuration before anything is bounded.
FIRST_ORDERS = 3
# An incumbent below this share of the ceiling leaves stage times too few digits: prove again from
# it.
LEAST_SHARE = 1e-4
# Labels within this of the incumbent (relative) are pruned when the user asks for a plain proof.
ROUNDING = 1e-9


@dataclass
class Job:
    """Decisions of one configuration with synchronisation in a box; `bound` is proven for them."""

    model: RowModel
    box: SyncBox
    bound: float
    width: int = FIRST_WIDTH
    restricted: bool = False  # the search does not list all shapes: it finds, but does not prove

    @property
    def name(self) -> str:
        """The configuration."""
        return str(self.model.layout.config)


@dataclass
class Search:
    """State shared by the steps: the incumbent, the open jobs and the wish to stop."""

    problem: AmpProblem
    cells: Cells
    run: Run
    incumbent: np.ndarray[tuple[int], np.dtype[np.float64]] = field(
        default_factory=lambda: np.full(1, np.inf)
    )
    stop: np.ndarray[tuple[int], np.dtype[np.int64]] = field(
        default_factory=lambda: np.zeros(1, dtype=np.int64)
    )
    decision: AmpDecision | None = None
    strategy: Strategy | None = None  # the best that came from an order or an exchange
    ceiling: float = np.inf  # layer times are cut off here, see `lay_out`
    bound: float | None = None
    finished: bool = False
    stuck: int = 0  # jobs given up: too many shapes, or too wide a search
    totals: dict[str, int] = field(
        default_factory=lambda: {"configurations": 0, "labels": 0, "leaves": 0, "jobs": 0}
    )

    @property
    def tolerance(self) -> float:
        """Relative distance below the incumbent that is not worth searching."""
        gap = self.run.options.gap
        return ROUNDING if gap <= 1e-6 else gap

    @property
    def worth(self) -> float:
        """Only bounds below this are of interest."""
        return float(self.incumbent[0]) * (1 - self.tolerance)

    def stopped(self) -> bool:
        """Whether to return at once."""
        return bool(self.stop[0])

    def take(self, model: RowModel, found: Found) -> None:
        """Keep what a search found if it is the best so far."""
        self.totals["labels"] += found.labels
        self.totals["leaves"] += found.leaves
        if found.cost <= self.incumbent[0] and np.isfinite(found.cost):
            self.incumbent[0] = found.cost
            lay = model.layout
            self.decision = decision(lay, lay.shape_cells[found.shapes], found.ends)

    def search(self, job: Job, width: int) -> Found:
        """One label search of `job`; the incumbent may improve."""
        limit = self.worth - job.box.low
        stages = bound_stages(job.model, job.box.high, limit, self.stopped)
        if not stages.intervals:
            done = not self.stopped()
            return Found(np.inf, np.inf if done else job.bound, NOTHING, NOTHING, 0, 0, done)
        found = search(
            make_grid(job.model, stages, job.box.high),
            job.box,
            width=width,
            most_leaves=LEAVES + 8 * width,
            tolerance=self.tolerance,
            incumbent=self.incumbent,
            stop=self.stop,
        )
        self.take(job.model, found)
        return found

    def lay_out(self, config: Configuration, most_shapes: int = MAX_SHAPES) -> Layout:
        """The configuration's layout."""
        return lay_out(
            self.problem, self.cells, config, ceiling=self.ceiling, most_shapes=most_shapes
        )

    def try_orders(self, config: Configuration, most: int | None = None) -> None:
        """First incumbents from `orders` (the first `most` of them) for one configuration."""
        for array in islice(placements(self.cells, config), most):
            if self.stopped():
                return
            found = try_placement(self.problem, config, array)
            if found is not None:
                self.offer(*found)

    def offer(self, seconds: float, strategy: Strategy) -> None:
        """Keep a strategy if it is the best so far."""
        if seconds < self.incumbent[0]:
            self.incumbent[0], self.strategy = seconds, strategy
            self.decision = strategy.decision()

    def exchange(self) -> None:
        """Exchanges of devices in the best strategy of the orders, where devices are unlike."""
        if self.strategy is None or not worthwhile(self.cells):
            return
        part = self.run.part(time_limit=allowance(self.run.remaining))
        known, seconds = self.strategy, float(self.incumbent[0])

        def stop() -> bool:
            return self.stopped() or part.should_stop

        self.offer(*improved(self.problem, self.cells, known, seconds, stop))

    def root_jobs(self) -> tuple[list[Job], float]:
        """A job per configuration that has a decision at all, cheapest bound first; and a bound of
        the rest.

        The rest: configurations that were not looked at before the wish to stop, +inf without any.
        """
        jobs, unseen = [], np.inf
        for config in self.problem.configurations():
            self.totals["configurations"] += 1
            quick = quick_seconds(Tables(self.problem, config, self.cells))
            if self.stopped():
                unseen = min(unseen, quick)
                continue
            model = row_model(self.lay_out(config))
            low, most = float(model.sync_values[0]), float(model.sync_values[-1])
            bound = max(
                quick, low + bound_stages(model, most, np.inf, self.stopped, tolerance=1e-3).bound
            )
            if np.isfinite(bound):
                jobs.append(Job(model, SyncBox(low, most, bound), bound))
        return sorted(jobs, key=lambda job: job.bound), unseen

    def boxes(self, jobs: list[Job]) -> Iterator[Job]:
        """The jobs divided into boxes of synchronisation, those that the incumbent beats left
        out."""
        for job in jobs:
            if job.bound >= self.worth:
                continue
            lay = job.model.layout
            for box in bound_configuration(job.model, lambda: self.worth, self.stopped):
                yield Job(job.model, box, max(box.bound, job.bound))
            if not lay.complete:
                straddling = row_model(lay, straddle=True)
                for box in bound_configuration(straddling, lambda: self.worth, self.stopped):
                    yield Job(straddling, box, max(box.bound, job.bound), restricted=True)

    def execute(self) -> None:
        """All steps; leaves `decision`, `bound` and `finished` behind."""
        for config in self.problem.configurations():
            self.try_orders(config, FIRST_ORDERS)
        self.exchange()
        self.ceiling = float(self.incumbent[0])
        self.prove()
        while (
            self.finished
            and self.decision is not None
            and self.incumbent[0] < LEAST_SHARE * self.ceiling
        ):
            self.ceiling = float(self.incumbent[0])
            self.bound = None
            self.prove()

    def prove(self) -> None:
        """Bound and search every configuration, layer times cut off at the ceiling."""
        self.totals["configurations"] = 0
        roots, unseen = self.root_jobs()
        if np.isfinite(unseen):
            self.finished = False
            self.note(min([unseen, *(job.bound for job in roots)]))
            return
        if not roots:
            self.finished = not self.stopped()
            return
        self.note(roots[0].bound)
        for job in roots:
            if job.bound < self.worth:
                self.try_orders(job.model.layout.config)
        for job in roots:
            if self.stopped():
                break
            if job.bound < self.worth:
                self.search(job, FIRST_WIDTH)
        self.close(list(self.boxes(roots)) if not self.stopped() else roots)

    def close(self, jobs: list[Job]) -> None:
        """Search the job of least bound, again and again, ever wider, until none is open."""
        order = count()
        heap = [(job.bound, next(order), job) for job in jobs]
        heapq.heapify(heap)
        self.totals["jobs"] = len(heap)
        stuck: list[Job] = []
        while heap and heap[0][0] < self.worth and not self.stopped():
            _, _, job = heapq.heappop(heap)
            self.note(min([job.bound, *(other.bound for other in stuck)]))
            found = self.search(job, job.width)
            if found.finished:
                dropped = job.bound if job.restricted else found.dropped
                job.bound = max(job.bound, dropped)
            if job.bound < self.worth:
                job.width *= WIDEN
                if job.width > MAX_WIDTH:
                    stuck.append(job)
                elif job.restricted:
                    whole = self.unrestricted(job)
                    if whole is None:
                        stuck.append(job)
                    else:
                        heapq.heappush(heap, (whole.bound, next(order), whole))
                else:
                    heapq.heappush(heap, (job.bound, next(order), job))
        open_bounds = [entry[0] for entry in heap] + [job.bound for job in stuck]
        self.stuck = len(stuck)
        least = min([*open_bounds, self.worth if np.isfinite(self.incumbent[0]) else np.inf])
        self.finished = not self.stopped() and all(b >= self.worth for b in open_bounds)
        self.note(least)
        if self.finished and self.decision is not None and self.run.options.gap <= 1e-6:
            self.bound = float(self.incumbent[0])  # pruned labels lie within rounding of it

    def unrestricted(self, job: Job) -> Job | None:
        """The same decisions with every shape listed; None where they are too many even for a last
        resort."""
        lay = job.model.layout
        every = self.lay_out(lay.config, MOST_SHAPES)
        if not every.complete:
            return None
        return Job(row_model(every), job.box, job.bound)

    def note(self, bound: float) -> None:
        """Record a proven bound (bounds of open jobs only rise)."""
        if np.isfinite(bound) and bound > 0:
            self.bound = max(self.bound or 0.0, min(bound, float(self.incumbent[0])))


def solve(data: AmpData, run: Run) -> Outcome[AmpDecision]:
    """The best decision with its proof, or the best found and the bound so far when time runs out.

    Source: the problem is AMP's (NeurIPS 2022, eq. 1-5); the algorithm is hetplan's.
    """
    begun = time.perf_counter()
    problem = compile_problem(data)
    state = Search(problem, find_cells(problem), run)
    built = time.perf_counter()
    # The kernels cannot look at the clock or at Ctrl-C: this thread does it for them.
    worker = Work(state.execute)
    try:
        while not worker.wait(0.05):
            known = float(state.incumbent[0])
            run.report(incumbent=known if np.isfinite(known) else None, bound=state.bound)
            if run.should_stop:
                state.stop[0] = 1
    finally:
        state.stop[0] = 1  # an interrupted caller must not leave a search behind
    worker.value()
    return _outcome(state, run, built - begun, time.perf_counter() - built)


def _outcome(
    state: Search, run: Run, build_seconds: float, solve_seconds: float
) -> Outcome[AmpDecision]:
    """What the search proved."""
    from hetplan import __version__

    if state.finished:
        stop = Stop.OPTIMAL if state.decision is not None else Stop.INFEASIBLE
    else:
        stop = Stop.INTERRUPTED if run.cancelled else Stop.LIMIT
    message = ""
    if state.stuck and not run.should_stop:
        message = f"given up before the proof: tensor groups can be laid out in too many ways ({state.stuck} searches)"
    if stop is Stop.INFEASIBLE:
        message = (
            "no degrees and micro-batch divide the devices and the batch with tables for every type"
        )
        if state.totals["configurations"]:
            message = (
                "no cut and placement fits the memory, whatever the degrees and the micro-batch"
            )
    return Outcome(
        stop=stop,
        decision=state.decision,
        bound=None if stop is Stop.INFEASIBLE else state.bound,
        build_seconds=build_seconds,
        solve_seconds=solve_seconds,
        solver=f"hetplan {__version__}",
        message=message,
        details=dict(state.totals),
    )
