"""The label search of one configuration: stage by stage, and in a stage group by group.

A label stands for a choice of layers for the first stages and of shapes for their tensor groups;
the last of these stages may lack some groups. A *row* is a pipeline. A *shape* is the cells of a
group's ranks, in order (layout.py). label_children.py extends labels and bounds the extended ones,
their children. The engine of solvers/labels.py keeps the undominated labels of least bound. Of the
labels that it drops for lack of room it reports the least bound. A search that drops no label below
its limit has therefore proven its best decision optimal.
evidence/speed/amp_search.md has the proofs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hetplan.formulations.amp.label_children import ChildRules
from hetplan.formulations.amp.problem import Floats, Ints, Strategy
from hetplan.formulations.amp.rows import RowModel, SyncBox
from hetplan.solvers.labels import (
    Extensions,
    KeptLabels,
    LabelLimits,
    Labels,
    Numbers,
    set_labels,
)
from hetplan.solvers.run import Run

# Intervals of the time of the slowest stage, ascending: the numbers of the first and the last
# candidate time in `RowModel.stage_values`.
Intervals = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class GroupLimits:
    """Limits of one label search, chosen on the packaged instances and those of
    evidence/speed/amp.py."""

    # Most intervals of the slowest stage's time; neighbouring ones are joined until there are no
    # more. With more intervals bounds are higher, and each bound takes more time.
    most_tables: int = 14
    # Most numbers (of 8 bytes) in all completion tables together.
    most_table_size: int = 2**24
    # Pairs of a label and a choice that are computed at a time, with up to some kilobytes each.
    chunk: int = 2**15
    # Labels of equal hash that each label is compared with.
    neighbours: int = 8


class GroupLabels:
    """The labels of a configuration's decisions with synchronisation times in a box, as the
    `LabelRules` of `solvers.labels`.

    Bucket j (1 + dp) holds the labels with j whole stages. Bucket j (1 + dp) + 1 + i holds the
    labels with j whole stages in which stage j has its layers, and its groups in rows 0 to i - 1.
    """

    def __init__(
        self, model: RowModel, intervals: Intervals, box: SyncBox, limits: GroupLimits
    ) -> None:
        """intervals: the intervals of the time of the slowest stage that can beat the limit."""
        self.box, self.limits = box, limits
        self.groups, self.config = model.groups, model.groups.config
        self.children = ChildRules(model, join_nearest(model, intervals, box, limits), box)

    def search(self, run: Run, *, width: int, limit: float) -> KeptLabels:
        """The labels with bounds below `limit` seconds, at most `width` in each bucket.

        Every decision of the box costs at least the least of three values: the limit, the least
        bound of the dropped labels, and the seconds of the `best` decision.
        """
        choices = max(len(self.groups.params), len(self.groups.shape_cells))
        return set_labels(
            self,
            self.root(),
            range(self.config.pipeline * (1 + self.config.data) + 1),
            run,
            threshold=lambda: limit,
            path_fields=["choice"],
            limits=LabelLimits(width, chunk=max(1, self.limits.chunk // choices)),
        )

    def best(self, labelled: KeptLabels) -> tuple[float, Strategy] | None:
        """(seconds, strategy) of the best decision among the labels; None where no label has all
        stages."""
        if not len(labelled.last):
            return None
        label = labelled.last[:1]  # `undominated` leaves only the best one
        *extended, _ = labelled.path(label[0])  # from the label back to the root, which is left out
        choices = [int(on_path["choice"]) for on_path in reversed(extended)]
        by_stage = np.array(choices).reshape(self.config.pipeline, 1 + self.config.data)
        ends, shapes = by_stage[:, 0], by_stage[:, 1:]
        placement = self.groups.cells.devices(self.groups.shape_cells[shapes])
        strategy = Strategy(self.config, placement, np.r_[0, ends])
        return float(self.seconds(label)[0]), strategy

    def seconds(self, labels: Labels) -> Floats:
        """[X] T of the decisions that labels with all stages stand for."""
        rows = (self.config.gas - 1) * labels["tops"] + labels["sums"]
        return np.asarray(labels["synced"] + rows.max(axis=1))

    def root(self) -> Labels:
        """The label without any stage."""
        cells, rows = self.groups.cells.count, self.config.data
        fields = [
            ("bound", "f8"),  # seconds; every decision of the label costs at least this
            ("parent", "i8"),  # number of the label that this one extends; -1: none
            ("choice", "i8"),  # the end of the last stage, or the shape of the last group
            ("first", "i8"),  # first layer of the last stage
            ("end", "i8"),  # the layer behind the last stage
            ("synced", "f8"),  # seconds, slowest synchronisation so far
            ("sums", "f8", (rows,)),  # seconds, Σ t + Σ e of each row so far
            ("tops", "f8", (rows,)),  # seconds, slowest stage of each row so far
            ("last", "i4", (rows,)),  # shape of each row's last group
            ("used", "i4", (cells,)),  # number of devices in use of each cell
        ]
        root = np.zeros(1, dtype=np.dtype(fields, align=True))
        root["parent"], root["bound"] = -1, self.box.low
        return root

    def extend(self, bucket: int, labels: Labels, limit: float) -> Iterator[Extensions]:
        """The labels of a bucket extended by every end of the next stage, or by every shape of the
        group in the next row."""
        j, step = divmod(bucket, 1 + self.config.data)
        if j == self.config.pipeline:
            return
        if step == 0:
            opened = self.children.open_stage(j, labels, limit)
            parent, bound = opened.parent, opened.bound
            children = labels[parent]
            children["first"], children["end"] = children["end"], opened.end
            children["choice"] = opened.end
        else:
            row = step - 1
            placed = self.children.place_group(j, row, labels, limit)
            parent, bound = placed.parent, placed.bound
            children = labels[parent]
            children["choice"] = children["last"][:, row] = placed.shape
            children["sums"][:, row], children["tops"][:, row] = placed.total, placed.top
            children["synced"] = placed.synced
            every_child = np.arange(len(children))
            for cells_of_rank in self.groups.shape_cells[placed.shape].T:
                children["used"][every_child, cells_of_rank] += 1
        children["bound"] = bound
        yield Extensions(children, parent, np.full(len(children), bucket + 1))

    def undominated(self, bucket: int, labels: Labels) -> Numbers:
        """The labels of a bucket that no other label dominates. Of labels with all stages, only the
        best one is undominated."""
        # Bucket 0 has the root. The labels of bucket 1 have no group, and each has another end of
        # stage 0, so that no two have equal states.
        if len(labels) < 2 or bucket < 2:
            return np.arange(len(labels))
        j, step = divmod(bucket, 1 + self.config.data)
        if j == self.config.pipeline:
            return np.array([self.seconds(labels).argmin()])
        in_stage_j = np.arange(self.config.data) < step - 1  # rows with a group on stage j
        rows = np.flatnonzero(in_stage_j | (j > 0))  # rows with a group on any stage
        state, costs = self.states(labels, rows, in_stage_j[rows])
        return np.flatnonzero(undominated(state, costs, labels["bound"], self.limits.neighbours))

    def states(
        self, labels: Labels, rows: Ints, in_stage: NDArray[np.bool_]
    ) -> tuple[Ints, Floats]:
        """(state [X, ...], costs so far [X, ...]) of each label, for dominance.

        Labels of equal states have the same completions. A label therefore dominates another one of
        the same state whose costs are all equal or higher.

        The costs are `synced`, and of each row sums and (gas - 1) tops + sums. They suffice: if a
        completion adds s to a row's sum and has t as its slowest stage, the row costs
        (gas - 1) max(tops, t) + sums + s. That is s plus the larger of (gas - 1) tops + sums and
        (gas - 1) t + sums.

        A state does not change when interchangeable cells are renamed or rows are reordered: cells
        and rows are sorted into a canonical order. Of a full cell the state has only its class of
        interchangeable cells. No device is left in such a cell, and its bandwidths to other cells
        depend on its class.

        rows: numbers of the rows that have a group. in_stage: [rows] whether a row's last group is
        in the present stage.
        """
        count, kind = len(labels), self.groups.cells.cell_class
        tp, cells = self.config.tensor, len(kind)
        every_label = np.arange(count)
        # Cells are sorted by (class, devices in use, number of ranks of last groups). Ranks of
        # groups in the present stage and ranks of groups in the stage before are counted apart.
        position = self.groups.shape_cells[labels["last"][:, rows]]  # [X, rows, tp] cell
        label_and_cell = every_label[:, None] * cells + position.reshape(count, -1)
        # at most dp tp ranks are in the present stage, so that the sum tells both numbers
        weight = np.where(in_stage, 1, 1 + self.config.data * tp).repeat(tp)
        ranks = np.bincount(label_and_cell.ravel(), np.tile(weight, count), minlength=count * cells)
        full = labels["used"] == self.groups.cells.size
        ranks = np.where(full, 0, ranks.reshape(count, cells).astype(np.int64))
        # Three numbers in 64 bits: an instance has at most 4096 devices, so `used` is below 8192,
        # and `ranks` is below 2^32.
        signature = ((kind * 8192 + labels["used"]) << 32) + ranks
        cell_order = np.argsort(signature, axis=1, kind="stable")
        new_number = np.argsort(cell_order, axis=1, kind="stable")
        new_name = np.where(full, cells + kind, new_number)  # [X, K]
        renamed = new_name[every_label[:, None, None], position]  # [X, rows, tp]
        # Rows are sorted by (whether the last group is in the present stage, renamed cells, costs).
        code = renamed @ (2 * cells) ** np.arange(tp)[::-1]  # an order only: it may wrap around
        sums = labels["sums"][:, rows]
        row_costs = (self.config.gas - 1) * labels["tops"][:, rows] + sums
        keys = (row_costs, sums, code, np.tile(~in_stage, (count, 1)))  # the last one counts first
        row_order = np.lexsort(keys, axis=-1)
        state = np.c_[
            labels["first"],
            labels["end"],
            np.take_along_axis(signature, cell_order, axis=1),
            np.take_along_axis(renamed, row_order[..., None], axis=1).reshape(count, -1),
        ]
        costs = np.c_[
            labels["synced"],
            np.take_along_axis(sums, row_order, axis=1),
            np.take_along_axis(row_costs, row_order, axis=1),
        ]
        return state, costs


def undominated(state: Ints, costs: Floats, bound: Floats, neighbours: int) -> NDArray[np.bool_]:
    """[X] whether a label is dominated by none of those that it is compared with.

    A label dominates another one of the same state whose costs are all equal or higher. Each label
    is compared with the next `neighbours` labels of the same hash, in the order of their bounds.

    state: [X, ...] and costs: [X, ...], see `GroupLabels.states`. bound: [X] seconds.
    """
    factors = np.random.default_rng(0).integers(1, 2**62, state.shape[1], dtype=np.int64)
    state_hash = (state * factors).sum(axis=1)  # may wrap around
    order = np.lexsort((bound, state_hash))
    alive = np.ones(len(state), dtype=bool)
    for step in range(1, min(neighbours + 1, len(state))):
        x, y = order[:-step], order[step:]
        same_hash = state_hash[x] == state_hash[y]
        x, y = x[same_hash], y[same_hash]
        same_state = (state[x] == state[y]).all(axis=1)
        x_dominates = same_state & (costs[x] <= costs[y]).all(axis=1)
        y_dominates = same_state & (costs[y] <= costs[x]).all(axis=1) & ~x_dominates
        alive[y[x_dominates]] = False
        alive[x[y_dominates]] = False
    return alive


def join_nearest(
    model: RowModel, intervals: Intervals, box: SyncBox, limits: GroupLimits
) -> Intervals:
    """The intervals, of which neighbours are joined until their completion tables are few and small
    enough. Each time the two neighbours are joined that span the least time together."""
    joined, values = list(intervals), model.stage_values
    _, last = joined[-1]
    table, _ = model.tables(float(values[last]), box.high)  # for its size, equal for all intervals
    most = max(2, min(limits.most_tables, limits.most_table_size // max(1, table.size)))
    while len(joined) > most:
        neighbours = [(first, last) for (first, _), (_, last) in pairwise(joined)]
        spans = [values[last] - values[first] for first, last in neighbours]
        i = int(np.argmin(spans))
        joined[i : i + 2] = [neighbours[i]]
    return joined
