"""The label search of one configuration: stage by stage, and in a stage group by group.

A label stands for a choice of layers for the first stages and of cells for their tensor groups, the
last stage perhaps unfinished; label_children.py extends it and bounds its children. The engine of
solvers/labels.py keeps the labels of least bound that no other makes superfluous. What it cuts
leaves its least bound behind, so a search that cuts nothing below the limit has proven its best
decision optimal. evidence/speed/amp_search.md has the proofs.
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

# First and last candidate time of the slowest stage, ascending.
Intervals = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class GroupLimits:
    """What one label search spends."""

    # Intervals of the slowest stage that the search tells apart; more are joined. More raise the
    # bounds and take more time for each.
    most_tables: int = 14
    # Completion tables together, in numbers (8 bytes each).
    most_table_size: int = 2**24
    # Pairs of a label and a choice at a time (some kilobytes each where all are possible).
    chunk: int = 2**15
    # Labels of equal hash that each label is compared with.
    neighbours: int = 8


class GroupLabels:
    """The labels of a configuration's decisions with synchronisation in a box, as the `LabelRules`
    of `solvers.labels`.

    Bucket j (1 + dp) holds labels with j whole stages, bucket j (1 + dp) + 1 + i those whose stage
    j has its layers and groups in the rows before i. intervals: of the slowest stage, first and
    last of `model.stage_values`.
    """

    def __init__(
        self, model: RowModel, intervals: Intervals, box: SyncBox, limits: GroupLimits
    ) -> None:
        self.box, self.limits = box, limits
        self.groups, self.config = model.groups, model.groups.config
        self.children = ChildRules(model, join_nearest(model, intervals, box, limits), box)

    def search(self, run: Run, *, width: int, limit: float) -> KeptLabels:
        """The labels below `limit` seconds, at most `width` after each group.

        Every decision of the box costs at least the least of the limit, the bound of what was cut
        and the seconds of the `best`.
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
        """The best decision among the labels, with its seconds."""
        if not len(labelled.last):
            return None
        label = labelled.last[:1]
        choices = [int(before["choice"]) for before in labelled.path(label[0])[-2::-1]]
        steps = np.array(choices).reshape(self.config.pipeline, 1 + self.config.data)
        placement = self.groups.cells.devices(self.groups.shape_cells[steps[:, 1:]])
        strategy = Strategy(self.config, placement, np.r_[0, steps[:, 0]])
        return float(self.seconds(label)[0]), strategy

    def seconds(self, labels: Labels) -> Floats:
        """[X] of decisions without a stage to come."""
        rows = (self.config.gas - 1) * labels["tops"] + labels["sums"]
        return np.asarray(labels["synced"] + rows.max(axis=1))

    def root(self) -> Labels:
        """The label of nothing."""
        cells, rows = self.groups.cells.count, self.config.data
        fields = [
            ("bound", "f8"),  # seconds; every decision of the label costs at least this
            ("parent", "i8"),
            ("choice", "i8"),  # the end of the last stage, or the shape of the last group
            ("first", "i8"),  # first layer of the last stage
            ("end", "i8"),  # layers done
            ("synced", "f8"),  # slowest synchronisation so far
            ("sums", "f8", (rows,)),  # Σ t + Σ e of each row so far
            ("tops", "f8", (rows,)),  # slowest stage of each row so far
            ("last", "i4", (rows,)),  # shape of each row's last group
            ("used", "i4", (cells,)),  # devices taken of each cell
        ]
        root = np.zeros(1, dtype=np.dtype(fields, align=True))
        root["parent"], root["bound"] = -1, self.box.low
        return root

    def extend(self, bucket: int, labels: Labels, limit: float) -> Iterator[Extensions]:
        """Every end of the next stage, or every shape of the group in the next row."""
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
            everyone = np.arange(len(children))
            for cells in self.groups.shape_cells[placed.shape].T:
                children["used"][everyone, cells] += 1
        children["bound"] = bound
        yield Extensions(children, parent, np.full(len(children), bucket + 1))

    def undominated(self, bucket: int, labels: Labels) -> Numbers:
        """The labels that no other makes superfluous; of whole decisions the best one."""
        if len(labels) < 2 or bucket < 2:
            return np.arange(len(labels))
        j, step = divmod(bucket, 1 + self.config.data)
        if j == self.config.pipeline:
            return np.array([self.seconds(labels).argmin()])
        placed = np.arange(self.config.data) < step - 1
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
        count, kind = len(labels), self.groups.cells.kind
        tp, cells = self.config.tensor, len(kind)
        # Cells in the order of (class, use, which positions of last groups lie there).
        position = self.groups.shape_cells[labels["last"][:, rows]]  # [X, rows, tp]
        spot = (np.arange(count)[:, None] * cells + position.reshape(count, -1)).ravel()
        weight = np.where(placed, 1, 1 + self.config.data * tp).repeat(tp)
        there = np.bincount(spot, np.tile(weight, count), minlength=count * cells)
        full = labels["used"] == self.groups.cells.size
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


def join_nearest(
    model: RowModel, intervals: Intervals, box: SyncBox, limits: GroupLimits
) -> Intervals:
    """The intervals, those joined whose times are nearest until their tables are few and small
    enough."""
    pieces, values = list(intervals), model.stage_values
    sample, _ = model.tables(float(values[pieces[-1][1]]), box.high)
    most = max(2, min(limits.most_tables, limits.most_table_size // max(1, sample.size)))
    while len(pieces) > most:
        spans = [values[after[1]] - values[here[0]] for here, after in pairwise(pieces)]
        i = int(np.argmin(spans))
        pieces[i : i + 2] = [(pieces[i][0], pieces[i + 1][1])]
    return pieces
