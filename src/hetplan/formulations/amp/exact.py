"""Exact joint optimisation of `amp`: degrees, micro-batch, cut and placement, with a proof.

The devices in the order of their cells give a first incumbent. Then a best-first branch and bound
divides the decisions:

1. a configuration, bounded in no time, gets the bound of its single pipelines (rows.py);
2. a configuration with that bound gets a narrow label search (labels.py) for the incumbent's sake,
   and its synchronisation time is halved a few times;
3. a box of it is searched with a width that grows until nothing below the incumbent is dropped.

Where a tensor group can be laid out in very many ways, step 3 lists only some; decisions that use
another one are nodes of their own, which are searched with every way listed.
Source: the problem is AMP's (NeurIPS 2022, eq. 1-5); the algorithm is hetplan's.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from hetplan.formulations.amp.cuts import find_first
from hetplan.formulations.amp.data import AmpData, AmpDecision
from hetplan.formulations.amp.labels import GroupLimits, Groups
from hetplan.formulations.amp.layout import MAX_SHAPES, MOST_SHAPES, Layout, lay_out
from hetplan.formulations.amp.problem import (
    NO_CONFIGURATION,
    NO_ROOM,
    AmpProblem,
    Cells,
    Configuration,
    Strategy,
    compile_problem,
    find_cells,
)
from hetplan.formulations.amp.rows import (
    Bisection,
    RowModel,
    SyncBox,
    bound_stages,
    halves,
    quick_seconds,
    root_bound,
    row_model,
)
from hetplan.solvers import branch_and_bound
from hetplan.solvers.branch_and_bound import Expansion, Incumbent
from hetplan.solvers.run import Outcome, Run, Stop

# First and last candidate time of the slowest stage.
Intervals = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Parameters:
    """What the search trades; chosen on the packaged instances and those of benchmarks/amp.py."""

    # Labels kept at first, and how much more in each further search of the same box. Narrow
    # searches find decisions sooner; every search is begun anew.
    first_width: int = 50
    widen: int = 20
    # Boxes that need more stay open: memory grows with the width.
    most_width: int = 400_000
    # Ways to lay out a group: listed at first, and at most.
    shapes: int = MAX_SHAPES
    most_shapes: int = MOST_SHAPES
    # An incumbent below this share of the first one leaves stage times, which are cut off there,
    # too few digits: the proof is done again from it.
    least_share: float = 1e-4
    # A better decision must be better by this (relative), or by the user's gap.
    rounding: float = 1e-9
    # How far bounds are sharpened, and what one label search spends.
    bisection: Bisection = field(default_factory=Bisection)
    labels: GroupLimits = field(default_factory=GroupLimits)


@dataclass(frozen=True)
class Node:
    """Decisions of one configuration; `box`: those with synchronisation in it."""

    config: Configuration
    model: RowModel | None = None  # None: only `quick_seconds` bounds it
    box: SyncBox | None = None
    halvings: int = 0  # that made the box
    width: int = 0  # of its next search
    straddling: bool = False  # only decisions with a group that straddles cells


@dataclass
class Search:
    """What the steps share."""

    problem: AmpProblem
    cells: Cells
    run: Run
    parameters: Parameters
    incumbent: Incumbent[Strategy]
    ceiling: float = np.inf  # layer times are cut off here, see `lay_out`
    labels: int = 0

    def expand(self, node: Node, threshold: float) -> Expansion[Node]:
        """The node's children; see the module's docstring."""
        model = node.model
        if model is None:
            model = row_model(self.lay_out(node.config, self.parameters.shapes))
            bound = root_bound(model, self.run.check)
            return Expansion([(bound, replace(node, model=model))] if bound < np.inf else ())
        if node.box is None:
            return Expansion(self.whole_boxes(node, model))
        if node.halvings < self.parameters.bisection.halvings:
            parts = halves(model, node.box, threshold, self.run.check, self.parameters.bisection)
            made = node.halvings + 1 if len(parts) > 1 else self.parameters.bisection.halvings
            children = [(box.bound, replace(node, box=box, halvings=made)) for box in parts]
            return Expansion(children, dropped_bound=threshold)
        if node.straddling:
            layout = self.lay_out(node.config, self.parameters.most_shapes)
            if not layout.complete:
                return Expansion(dropped_bound=node.box.bound)
            whole = replace(node, model=row_model(layout), straddling=False)
            return Expansion([(node.box.bound, whole)])
        if node.width > self.parameters.most_width:
            return Expansion(dropped_bound=node.box.bound)
        try:
            limit, bisection = threshold - node.box.low, self.parameters.bisection
            stages = bound_stages(model, node.box.high, limit, self.run.check, bisection)
            dropped = self.search(model, node.box, stages.intervals, node.width)
        except MemoryError:
            return Expansion(dropped_bound=node.box.bound)
        return Expansion([(dropped, replace(node, width=node.width * self.parameters.widen))])

    def whole_boxes(self, node: Node, model: RowModel) -> Iterator[tuple[float, Node]]:
        """Every synchronisation, in a box that has been searched once for the incumbent's sake;
        decisions that straddle cells apart where not all ways to do so are listed."""
        low, high = float(model.sync_values[0]), float(model.sync_values[-1])
        models = {False: model}
        if not model.layout.complete:
            models[True] = row_model(model.layout, straddle=True)
        for straddling, one in models.items():
            limit = self.incumbent.threshold - low
            stages = bound_stages(one, high, limit, self.run.check, self.parameters.bisection)
            box = SyncBox(low, high, stages.bound)
            if not straddling:
                self.search(one, box, stages.intervals, self.parameters.first_width)
            width = self.parameters.first_width * self.parameters.widen
            yield box.bound, Node(node.config, one, box, width=width, straddling=straddling)

    def search(self, model: RowModel, box: SyncBox, intervals: Intervals, width: int) -> float:
        """One label search, which may meet an incumbent; the least bound of what it cut."""
        limit = self.incumbent.threshold
        if not intervals:
            return limit
        groups = Groups(model, intervals, box, self.parameters.labels)
        labelled = groups.search(self.run, width=width, limit=limit)
        self.labels += labelled.count
        best = groups.best(labelled)
        if best is not None:
            self.incumbent.offer(*best)
        return min(labelled.cut_bound, limit)

    def lay_out(self, config: Configuration, most_shapes: int) -> Layout:
        """The configuration's layout."""
        return lay_out(
            self.problem, self.cells, config, ceiling=self.ceiling, most_shapes=most_shapes
        )


def solve(data: AmpData, run: Run, parameters: Parameters = Parameters()) -> Outcome[AmpDecision]:
    """The best decision with its proof, or the best found and the bound so far when time runs
    out."""
    from hetplan import __version__

    problem = compile_problem(data)
    exactly = run.options.gap <= 1e-6
    incumbent = Incumbent[Strategy](run, parameters.rounding if exactly else None)
    state = Search(problem, find_cells(problem), run, parameters, incumbent)
    configurations = list(problem.configurations())
    roots = [(quick_seconds(problem, config), Node(config)) for config in configurations]
    find_first(state.problem, state.cells, incumbent, run)
    while True:
        state.ceiling = incumbent.objective
        proof = branch_and_bound.search(roots, state.expand, incumbent, run)
        again = incumbent.objective < parameters.least_share * state.ceiling < np.inf
        if not (proof.proven and again):
            break
    gave_up = "given up before the proof: the search would need too much memory"
    stop, message = proof.verdict(run, NO_ROOM if configurations else NO_CONFIGURATION, gave_up)
    exactly_proven = exactly and stop is Stop.OPTIMAL
    return Outcome(
        stop=stop,
        decision=None if incumbent.decision is None else incumbent.decision.decision(),
        bound=incumbent.objective if exactly_proven else proof.bound,
        solver=f"hetplan {__version__}",
        message=message,
        details={
            "configurations": len(configurations),
            "nodes": proof.expanded,
            "labels": state.labels,
        },
    )
