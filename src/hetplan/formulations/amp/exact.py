"""Exact joint optimisation of `amp`: degrees, micro-batch, cut and placement, with a proof.

The devices in the order of their cells give a first incumbent. Then a best-first branch and bound
divides the decisions:

1. a configuration, bounded in no time, gets the bound of its single pipelines (rows.py);
2. a configuration with that bound gets a narrow label search for the incumbent's sake,
   and its synchronisation time is halved a few times;
3. a box of it is searched with a width that grows until nothing below the incumbent is dropped.

Where a tensor group can be laid out in very many ways, step 3 lists only some; decisions that use
another one are nodes of their own, which are searched with every way listed.
Source: the problem is AMP's (NeurIPS 2022, eq. 1-5); the algorithm is hetplan's.

The label search of one configuration (`Groups`): stage by stage, and in a stage group by group.

A label stands for a choice of layers for the first stages and of cells for their tensor groups, the
last stage perhaps unfinished; label_children.py extends it and bounds its children. The engine of
solvers/labels.py keeps the labels of least bound that no other makes superfluous. What it cuts
leaves its least bound behind, so a search that cuts nothing below the limit has proven its best
decision optimal. evidence/speed/amp_search.md has the proofs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hetplan.formulations.amp.cuts import find_first
from hetplan.formulations.amp.data import AmpData, AmpDecision
from hetplan.formulations.amp.label_children import (
    Box,
    Children,
    Grid,
    Parts,
    Scratch,
    Stage,
    open_stage,
    place_group,
)
from hetplan.formulations.amp.layout import MAX_SHAPES, MOST_SHAPES, Layout, lay_out
from hetplan.formulations.amp.problem import (
    NO_CONFIGURATION,
    NO_ROOM,
    AmpProblem,
    Cells,
    Configuration,
    Floats,
    Ints,
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
from hetplan.solvers.labels import (
    Extensions,
    KeptLabels,
    LabelLimits,
    Labels,
    Numbers,
    set_labels,
)
from hetplan.solvers.run import Outcome, Run, Stop


@dataclass(frozen=True)
class GroupLimits:
    """What one label search spends."""

    # Intervals of the slowest stage that the search tells apart; more are joined. More raise the
    # bounds and take more time for each.
    most_tables: int = 14
    # Completion tables together, in numbers (8 bytes each).
    most_table_size: int = 2**25
    # Extensions of one call of a kernel at most (some 48 bytes each, well under a second).
    chunk: int = 2**20
    # Labels of equal hash that each label is compared with.
    neighbours: int = 8


class Groups:
    """The labels of a configuration's decisions with synchronisation in a box, as the `LabelRules`
    of `solvers.labels`.

    Bucket j (1 + dp) holds labels with j whole stages, bucket j (1 + dp) + 1 + i those whose stage
    j has its layers and groups in the rows before i. intervals: of the slowest stage, first and
    last of `model.stage_values`.
    """

    def __init__(
        self,
        model: RowModel,
        intervals: Sequence[tuple[int, int]],
        box: SyncBox,
        limits: GroupLimits,
    ) -> None:
        self.model, self.box, self.limits = model, box, limits
        self.config = model.layout.config
        self.grid, self.stages = make_grid(model, intervals, box.high, limits)

    def search(self, run: Run, *, width: int, limit: float) -> KeptLabels:
        """The labels below `limit` seconds, at most `width` after each group.

        Every decision of the box costs at least the least of the limit, the bound of what was cut
        and the seconds of the `best`.
        """
        fan = max(len(self.grid.params), len(self.grid.shape_class))
        return set_labels(
            self, self.root(), range(self.config.pipeline * (1 + self.config.data) + 1), run,
            threshold=lambda: limit, path_fields=["choice"],
            limits=LabelLimits(width, chunk=max(1, self.limits.chunk // fan)),
        )  # fmt: skip

    def best(self, labelled: KeptLabels) -> tuple[float, Strategy] | None:
        """The best decision among the labels, with its seconds."""
        if not len(labelled.last):
            return None
        label = labelled.last[:1]
        choices = [int(before["choice"]) for before in labelled.path(label[0])[-2::-1]]
        steps = np.array(choices).reshape(self.config.pipeline, 1 + self.config.data)
        placement = self.model.layout.cells.devices(self.grid.shape_cells[steps[:, 1:]])
        strategy = Strategy(self.config, placement, np.r_[0, steps[:, 0]])
        return float(self.seconds(label)[0]), strategy

    def seconds(self, labels: Labels) -> Floats:
        """[X] of decisions without a stage to come."""
        rows = (self.config.gas - 1) * labels["tops"] + labels["sums"]
        return np.asarray(labels["synced"] + rows.max(axis=1))

    def root(self) -> Labels:
        """The label of nothing."""
        cells, rows = (len(self.grid.size),), (self.config.data,)
        fields = [
            ("bound", "f8"), ("parent", "i8"), ("choice", "i8"), ("first", "i8"), ("end", "i8"),
            ("synced", "f8"), ("sums", "f8", rows), ("tops", "f8", rows), ("last", "i4", rows),
            ("used", "i4", cells),
        ]  # fmt: skip
        root = np.zeros(1, dtype=np.dtype(fields, align=True))
        root["parent"], root["bound"] = -1, self.box.low
        return root

    def extend(self, bucket: int, labels: Labels, limit: float) -> Iterator[Extensions]:
        """Every end of the next stage, or every shape of the group in the next row."""
        grid, config = self.grid, self.config
        j, i = divmod(bucket, 1 + config.data)
        if j == config.pipeline:
            return
        space = len(labels) * (len(grid.shape_class) if i else len(grid.params))
        whole, real = np.empty((2, space), dtype=np.int64), np.empty((4, space))
        out = Children(*whole, *real)
        burdens, classes = len(grid.weight), (config.data, len(grid.class_zone))
        scratch = Scratch(
            costs=np.empty((config.data, burdens, self.model.levels)),
            link=np.empty(classes),
            free=np.empty(classes, np.int64),
            one=np.empty((burdens, self.model.levels)),
            left=np.empty(burdens, np.int64),
        )
        # contiguous, since a kernel is compiled anew for each layout of its arrays
        parts = Parts(*(np.ascontiguousarray(labels[name]) for name in Parts._fields))
        box = Box(self.box.low, self.box.high, limit)
        count = (
            open_stage(grid, self.stages[j], parts, box, out, scratch)
            if i == 0
            else place_group(grid, self.stages[j], parts, i - 1, box, out, scratch)
        )
        out = Children._make(field[:count] for field in out)
        children = labels[out.parent]
        children["choice"], children["bound"] = out.choice, out.bound
        if i == 0:
            children["first"], children["end"] = children["end"], out.choice
        else:
            children["synced"], children["last"][:, i - 1] = out.synced, out.choice
            children["sums"][:, i - 1], children["tops"][:, i - 1] = out.total, out.top
            everyone = np.arange(count)
            for cells in grid.shape_cells[out.choice].T:
                children["used"][everyone, cells] += 1
        yield Extensions(children, out.parent, np.full(count, bucket + 1))

    def undominated(self, bucket: int, labels: Labels) -> Numbers:
        """The labels that no other makes superfluous; of whole decisions the best one."""
        if len(labels) < 2 or bucket < 2:
            return np.arange(len(labels))
        j, i = divmod(bucket, 1 + self.config.data)
        if j == self.config.pipeline:
            return np.array([self.seconds(labels).argmin()])
        placed = np.arange(self.config.data) < i - 1
        has_group = np.flatnonzero(placed | (j > 0))
        state, price = self.states(labels, has_group, placed[has_group])
        return np.flatnonzero(undominated(state, price, labels["bound"], self.limits.neighbours))

    def states(self, labels: Labels, rows: Ints, placed: NDArray[np.bool_]) -> tuple[Ints, Floats]:
        """([X, ...] the state of each label in a canonical form, [X, ...] what it has cost so far).

        rows: those that have a last group; placed: which of these have one in the present stage.
        Labels of equal states can be completed in the same ways, and the one of lower costs
        throughout then costs no more. A state is what is left when cells that are interchangeable
        are renamed, and rows put in another order. Of a full cell only its class matters: nothing
        more can be placed in it, and links out of it depend on the class alone.
        """
        count, kind = len(labels), self.model.layout.cells.kind
        tp, cells = self.config.tensor, len(kind)
        # Cells in the order of (class, use, which positions of last groups lie there).
        position = self.grid.shape_cells[labels["last"][:, rows]]  # [X, rows, tp]
        spot = (np.arange(count)[:, None] * cells + position.reshape(count, -1)).ravel()
        weight = np.where(placed, 1, 1 + self.config.data * tp).repeat(tp)
        there = np.bincount(spot, np.tile(weight, count), minlength=count * cells)
        full = labels["used"] == self.grid.size
        there = np.where(full, 0, there.reshape(count, cells).astype(np.int64))
        signature = ((kind * 8192 + labels["used"]) << 32) + there
        by_cell = np.argsort(signature, axis=1, kind="stable")
        rank = np.argsort(by_cell, axis=1, kind="stable")
        renamed = np.where(full, cells + kind, rank)[np.arange(count)[:, None, None], position]
        # Rows in the order of (placed, renamed cells, costs).
        code = renamed @ (2 * cells) ** np.arange(tp)[::-1]  # an order only: it may wrap around
        sums = labels["sums"][:, rows]
        rest = (self.config.gas - 1) * labels["tops"][:, rows] + sums
        by_row = np.lexsort((rest, sums, code, np.tile(~placed, (count, 1))), axis=-1)
        state = np.c_[
            labels["first"],
            labels["end"],
            np.take_along_axis(signature, by_cell, axis=1),
            np.take_along_axis(renamed, by_row[..., None], axis=1).reshape(count, -1),
        ]
        price = np.c_[
            labels["synced"],
            np.take_along_axis(sums, by_row, axis=1),
            np.take_along_axis(rest, by_row, axis=1),
        ]
        return state, price


def undominated(state: Ints, price: Floats, bound: Floats, neighbours: int) -> NDArray[np.bool_]:
    """[X] whether no neighbour in the same state has prices as low throughout.

    Neighbours are the labels of equal hash whose bounds come next; so many are compared.
    """
    mixed = np.random.default_rng(0).integers(1, 2**62, state.shape[1], dtype=np.int64)
    code = (state * mixed).sum(axis=1)  # wraps around: only groups equal states
    order = np.lexsort((bound, code))
    alive = np.ones(len(state), dtype=bool)
    for step in range(1, min(neighbours + 1, len(state))):
        x, y = order[:-step], order[step:]
        alike = code[x] == code[y]
        x, y = x[alike], y[alike]
        same = (state[x] == state[y]).all(axis=1)
        better = same & (price[x] <= price[y]).all(axis=1)
        worse = same & (price[y] <= price[x]).all(axis=1) & ~better
        alive[y[better]] = False
        alive[x[worse]] = False
    return alive


def make_grid(
    model: RowModel, intervals: Sequence[tuple[int, int]], sync_cap: float, limits: GroupLimits
) -> tuple[Grid, list[Stage]]:
    """The kernels' view: completion tables for the intervals, joined so that they are few and small
    enough."""
    pieces, values = list(intervals), model.stage_values
    sample, _ = model.tables(float(values[pieces[-1][1]]), sync_cap)
    most = max(2, min(limits.most_tables, limits.most_table_size // max(1, sample.size)))
    while len(pieces) > most:
        spans = [values[after[1]] - values[here[0]] for here, after in pairwise(pieces)]
        i = int(np.argmin(spans))
        pieces[i : i + 2] = [(pieces[i][0], pieces[i + 1][1])]
    tables = [model.tables(float(values[b]), sync_cap)[0] for _, b in pieces]
    lay, config = model.layout, model.layout.config
    kinds = np.c_[lay.shape_kind, lay.shape_zone]
    classes, shape_class = np.unique(kinds, axis=0, return_inverse=True)
    ranks = range(config.tensor)
    equal = [lay.shape_cells[:, : r + 1] == lay.shape_cells[:, r : r + 1] for r in ranks]
    grid = Grid(
        gas=config.gas,
        size=lay.cells.size,
        bandwidth=lay.cells.bandwidth,
        params=lay.params,
        sync=lay.sync,
        shape_cells=lay.shape_cells,
        shape_rank=np.stack([one.sum(axis=1) for one in equal], axis=1),
        shape_first=(lay.shape_cells == lay.shape_cells[:, :1]).sum(axis=1),
        shape_class=shape_class.reshape(-1),
        class_kind=np.ascontiguousarray(classes[:, 0]),
        class_zone=np.ascontiguousarray(classes[:, 1]),
        room=lay.zones.room,
        base=lay.zones.base,
        weight=model.weight,
        cell_weight=model.cell_weight,
        shape_weight=np.ascontiguousarray(model.cell_weight[:, lay.shape_cells].sum(axis=2)),
        most=config.pipeline * model.weight.max(axis=1),
        low=values[[a for a, _ in pieces]],
        high=np.r_[values, np.inf][[b + 1 for _, b in pieces]],
    )
    stages = [
        Stage(
            seconds=lay.stage_seconds(j),
            link=lay.link if j else np.zeros_like(lay.link),
            ahead=np.stack([table[:, j + 1] for table in tables]),
        )
        for j in range(config.pipeline)
    ]
    return grid, stages


# First and last candidate time of the slowest stage.
Intervals = tuple[tuple[int, int], ...]


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
            return Expansion(
                [(box.bound, replace(node, box=box, halvings=made)) for box in parts],
                dropped_bound=threshold,
            )
        if node.straddling:
            layout = self.lay_out(node.config, self.parameters.most_shapes)
            return (
                Expansion(
                    [(node.box.bound, replace(node, model=row_model(layout), straddling=False))]
                )
                if layout.complete
                else Expansion(dropped_bound=node.box.bound)
            )
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
