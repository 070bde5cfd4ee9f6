"""Exact joint optimisation of `amp`: degrees, micro-batch, cut and placement, with a proof.

The devices in the order of their cells give a first incumbent. Then a best-first branch and bound
divides the decisions:

1. a configuration, bounded in no time, gets the bound of its single pipelines (rows.py);
2. a configuration with that bound gets a narrow label search (group_labels.py) for the
   incumbent's sake, and its synchronisation time is halved a few times;
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
from hetplan.formulations.amp.group_labels import GroupLabels, GroupLimits, Intervals
from hetplan.formulations.amp.layout import (
    MAX_SHAPES,
    MOST_SHAPES,
    TensorGroups,
    lay_out,
)
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


@dataclass(frozen=True)
class Parameters:
    """What the search trades; chosen on the packaged instances and those of
    evidence/speed/amp.py."""

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
class SyncSubproblem:
    """Decisions of one configuration with synchronisation in a box."""

    model: RowModel
    box: SyncBox
    halvings: int  # that made the box
    width: int  # of its next label search
    straddling: bool  # only decisions with a group that straddles cells


# A configuration without a bound, one with its row bound, or a box of one.
Subproblem = Configuration | RowModel | SyncSubproblem
Children = Expansion[Subproblem]


@dataclass
class BranchAndBound:
    """What all subproblems share, and how each is divided."""

    problem: AmpProblem
    cells: Cells
    run: Run
    parameters: Parameters
    incumbent: Incumbent[Strategy]
    ceiling: float = np.inf  # layer times are cut off here, see `lay_out`
    labels: int = 0  # kept in all label searches

    def expand(self, subproblem: Subproblem, threshold: float) -> Children:
        """The subproblem's children; see the module's docstring."""
        if isinstance(subproblem, Configuration):
            return self.bound_rows(subproblem)
        if isinstance(subproblem, RowModel):
            return Expansion(self.whole_boxes(subproblem))
        if subproblem.halvings < self.parameters.bisection.halvings:
            return self.halve(subproblem, threshold)
        if subproblem.straddling:
            return self.list_all_shapes(subproblem)
        return self.search_box(subproblem, threshold)

    def bound_rows(self, config: Configuration) -> Children:
        """The configuration with its row bound; nothing where it has no decision."""
        model = row_model(self.lay_out(config, self.parameters.shapes))
        bound = root_bound(model, self.run.check)
        return Expansion([(bound, model)] if bound < np.inf else ())

    def whole_boxes(self, model: RowModel) -> Iterator[tuple[float, Subproblem]]:
        """Every synchronisation, in a box that has been searched once for the incumbent's sake;
        decisions that straddle cells apart where not all ways to do so are listed."""
        low, high = float(model.sync_values[0]), float(model.sync_values[-1])
        models = {False: model}
        if not model.groups.complete:
            models[True] = row_model(model.groups, straddle=True)
        for straddling, one in models.items():
            limit = self.incumbent.threshold - low
            stages = bound_stages(one, high, limit, self.run.check, self.parameters.bisection)
            box = SyncBox(low, high, stages.bound)
            if not straddling:
                self.search_labels(one, box, stages.intervals, self.parameters.first_width)
            width = self.parameters.first_width * self.parameters.widen
            yield box.bound, SyncSubproblem(one, box, 0, width, straddling)

    def halve(self, subproblem: SyncSubproblem, threshold: float) -> Children:
        """The box in two; in one, which is not halved again, where it is narrow."""
        bisection = self.parameters.bisection
        parts = halves(subproblem.model, subproblem.box, threshold, self.run.check, bisection)
        halvings = subproblem.halvings + 1 if len(parts) > 1 else bisection.halvings
        return Expansion(
            [(box.bound, replace(subproblem, box=box, halvings=halvings)) for box in parts],
            dropped_bound=threshold,
        )

    def list_all_shapes(self, subproblem: SyncSubproblem) -> Children:
        """The box with every way to lay out a group; dropped where these are too many."""
        bound, config = subproblem.box.bound, subproblem.model.groups.config
        groups = self.lay_out(config, self.parameters.most_shapes)
        if not groups.complete:
            return Expansion(dropped_bound=bound)
        return Expansion([(bound, replace(subproblem, model=row_model(groups), straddling=False))])

    def search_box(self, subproblem: SyncSubproblem, threshold: float) -> Children:
        """The box with the bound that a label search leaves, and more width for the next one;
        dropped where that would take too much memory."""
        model, box, width = subproblem.model, subproblem.box, subproblem.width
        if width > self.parameters.most_width:
            return Expansion(dropped_bound=box.bound)
        limit, bisection = threshold - box.low, self.parameters.bisection
        try:
            stages = bound_stages(model, box.high, limit, self.run.check, bisection)
            bound = self.search_labels(model, box, stages.intervals, width)
        except MemoryError:
            return Expansion(dropped_bound=box.bound)
        return Expansion([(bound, replace(subproblem, width=width * self.parameters.widen))])

    def search_labels(
        self, model: RowModel, box: SyncBox, intervals: Intervals, width: int
    ) -> float:
        """One label search, which may meet an incumbent; the least bound of what it cut."""
        limit = self.incumbent.threshold
        if not intervals:
            return limit
        rules = GroupLabels(model, intervals, box, self.parameters.labels)
        labelled = rules.search(self.run, width=width, limit=limit)
        self.labels += labelled.count
        best = rules.best(labelled)
        if best is not None:
            self.incumbent.offer(*best)
        return min(labelled.cut_bound, limit)

    def lay_out(self, config: Configuration, most_shapes: int) -> TensorGroups:
        """The configuration's tensor groups."""
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
    state = BranchAndBound(problem, find_cells(problem), run, parameters, incumbent)
    configurations = list(problem.configurations())
    roots: list[tuple[float, Subproblem]] = [
        (quick_seconds(problem, config), config) for config in configurations
    ]
    find_first(problem, state.cells, incumbent, run)
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
