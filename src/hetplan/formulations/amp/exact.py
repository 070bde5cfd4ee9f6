"""Exact joint optimisation of `amp`: degrees, micro-batch, cut and placement, with a proof.

First incumbents come from cuts.py (`find_first`). Then a best-first branch and bound divides the
decisions. A node is one of the following.

1. A configuration (degrees and micro-batch) with a lower bound that takes no time to compute. Its
   child is the configuration with the row bound, the bound of its single pipelines (rows.py).
2. A configuration with its row bound. Its child is a box: the decisions of the configuration whose
   synchronisation time lies in an interval. A narrow label search (group_labels.py) looks for a
   better incumbent in it.
3. A box. It is halved a few times. Then label searches of growing width go through it, until one
   drops no label below the incumbent.

Where a configuration has too many shapes of tensor groups (layout.py), step 3 lists only some of
them. Decisions with a group of another shape, which *straddles* cells, are in a second box. It is
searched with all shapes listed.
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
from hetplan.solvers.run import OPTIMAL_GAP, Outcome, Run, Stop


@dataclass(frozen=True)
class Parameters:
    """Parameters of the search, chosen on the packaged instances and those of
    evidence/speed/amp.py."""

    # Labels that the first label search keeps, and the factor by which each further search of the
    # same box keeps more. Narrow searches find decisions sooner. Every search begins anew.
    first_width: int = 50
    widen: int = 20
    # A box that needs a wider search stays undecided, because memory grows with the width.
    most_width: int = 400_000
    # Most shapes of tensor groups of a first box, and of a box of straddling groups.
    shapes: int = MAX_SHAPES
    most_shapes: int = MOST_SHAPES
    # Layer times are cut off at the first incumbent's objective (`lay_out`). An optimum below this
    # share of it leaves stage times too few digits. The search is then repeated with the optimum as
    # the first incumbent.
    least_share: float = 1e-4
    # The share by which a decision must beat the incumbent, where the user asks for an optimum (a
    # gap of at most `OPTIMAL_GAP`). Rounding makes smaller differences.
    rounding: float = 1e-9
    bisection: Bisection = field(default_factory=Bisection)  # how far bounds are sharpened
    labels: GroupLimits = field(default_factory=GroupLimits)  # limits of one label search


@dataclass(frozen=True)
class SyncSubproblem:
    """The decisions of one configuration whose synchronisation time lies in a box."""

    model: RowModel
    box: SyncBox
    halvings: int  # number of halvings that made the box
    width: int  # labels that its next label search keeps
    # Whether the box holds only the decisions with a group that straddles cells, and not all shapes
    # are listed yet.
    straddling: bool


# Nodes 1, 2 and 3 of the module's docstring.
Subproblem = Configuration | RowModel | SyncSubproblem
Children = Expansion[Subproblem]


@dataclass
class BranchAndBound:
    """The state of one branch and bound, and the rules that divide its nodes."""

    problem: AmpProblem
    cells: Cells
    run: Run
    parameters: Parameters
    incumbent: Incumbent[Strategy]
    ceiling: float = np.inf  # seconds at which layer times are cut off, see `lay_out`
    labels: int = 0  # number of labels that all label searches have kept

    def expand(self, subproblem: Subproblem, threshold: float) -> Children:
        """The children of a node; see the module's docstring. Decisions of `threshold` seconds or
        more are not of interest."""
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
        """The configuration with its row bound; no child where the configuration has no
        decision."""
        model = row_model(self.lay_out(config, self.parameters.shapes))
        bound = root_bound(model, self.run.check)
        if bound == np.inf:
            return Expansion()
        return Expansion([(bound, model)])

    def whole_boxes(self, model: RowModel) -> Iterator[tuple[float, Subproblem]]:
        """The box of all synchronisation times; and, where not all shapes are listed, a second one
        for the decisions with a group that straddles cells. A narrow label search of the first box
        may find an incumbent."""
        low, high = float(model.sync_values[0]), float(model.sync_values[-1])
        model_of = {False: model}  # whether a group must straddle cells -> the model
        if not model.groups.complete:
            model_of[True] = row_model(model.groups, straddle=True)
        for straddling, box_model in model_of.items():
            limit = self.incumbent.threshold - low
            stages = bound_stages(box_model, high, limit, self.run.check, self.parameters.bisection)
            box = SyncBox(low, high, stages.bound)
            if not straddling:
                self.search_labels(box_model, box, stages.intervals, self.parameters.first_width)
            width = self.parameters.first_width * self.parameters.widen
            yield box.bound, SyncSubproblem(box_model, box, 0, width, straddling)

    def halve(self, subproblem: SyncSubproblem, threshold: float) -> Children:
        """The two halves of a box; a narrow box becomes its own child, which is not halved
        again."""
        bisection = self.parameters.bisection
        parts = halves(subproblem.model, subproblem.box, threshold, self.run.check, bisection)
        halvings = subproblem.halvings + 1 if len(parts) > 1 else bisection.halvings
        return Expansion(
            [(box.bound, replace(subproblem, box=box, halvings=halvings)) for box in parts],
            # `halves` cuts off only decisions that cost the threshold or more
            dropped_bound=threshold,
        )

    def list_all_shapes(self, subproblem: SyncSubproblem) -> Children:
        """The box with all shapes listed; no child where they are too many, so that the box stays
        undecided."""
        bound, config = subproblem.box.bound, subproblem.model.groups.config
        groups = self.lay_out(config, self.parameters.most_shapes)
        if not groups.complete:
            return Expansion(dropped_bound=bound)
        listed = replace(subproblem, model=row_model(groups), straddling=False)
        return Expansion([(bound, listed)])

    def search_box(self, subproblem: SyncSubproblem, threshold: float) -> Children:
        """The box with the bound that a label search proves, and a larger width for the next
        search. It stays undecided where a search would take too much memory."""
        model, box, width = subproblem.model, subproblem.box, subproblem.width
        if width > self.parameters.most_width:
            return Expansion(dropped_bound=box.bound)
        limit = threshold - box.low
        bisection = self.parameters.bisection
        try:
            stages = bound_stages(model, box.high, limit, self.run.check, bisection)
            bound = self.search_labels(model, box, stages.intervals, width)
        except MemoryError:
            return Expansion(dropped_bound=box.bound)
        return Expansion([(bound, replace(subproblem, width=width * self.parameters.widen))])

    def search_labels(
        self, model: RowModel, box: SyncBox, intervals: Intervals, width: int
    ) -> float:
        """Search the labels of a box, which may find an incumbent, and return the least bound, in
        seconds, of the labels that the search drops; the incumbent's threshold where that is less.
        Every decision of the box costs at least this, or is no better than the incumbent.

        intervals: intervals of the time of the slowest stage, see `bound_stages`. width: labels to
        keep.
        """
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
        """The tensor groups of a configuration."""
        return lay_out(
            self.problem, self.cells, config, ceiling=self.ceiling, most_shapes=most_shapes
        )


def solve(data: AmpData, run: Run, parameters: Parameters = Parameters()) -> Outcome[AmpDecision]:
    """The optimum with its proof; the incumbent and the proven bound when time runs out."""
    from hetplan import __version__

    problem = compile_problem(data)
    to_optimality = run.options.gap <= OPTIMAL_GAP
    incumbent = Incumbent[Strategy](run, parameters.rounding if to_optimality else None)
    state = BranchAndBound(problem, find_cells(problem), run, parameters, incumbent)
    configurations = list(problem.configurations())
    roots: list[tuple[float, Subproblem]] = [
        (quick_seconds(problem, config), config) for config in configurations
    ]
    find_first(problem, state.cells, incumbent, run)
    while True:
        state.ceiling = incumbent.objective
        proof = branch_and_bound.search(roots, state.expand, incumbent, run)
        # an infinite ceiling cuts nothing off, and costs no digits
        too_few_digits = incumbent.objective < parameters.least_share * state.ceiling < np.inf
        if not (proof.proven and too_few_digits):
            break
    gave_up = "given up before the proof: the search would need too much memory"
    stop, message = proof.verdict(run, NO_ROOM if configurations else NO_CONFIGURATION, gave_up)
    # the proof allows `rounding`, within which the incumbent counts as optimal
    is_optimum = to_optimality and stop is Stop.OPTIMAL
    return Outcome(
        stop=stop,
        decision=None if incumbent.decision is None else incumbent.decision.decision(),
        bound=incumbent.objective if is_optimum else proof.bound,
        solver=f"hetplan {__version__}",
        message=message,
        details={
            "configurations": len(configurations),
            "nodes": proof.expanded,
            "labels": state.labels,
        },
    )
