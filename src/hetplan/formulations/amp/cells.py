"""Cells: classes of interchangeable devices, and classes of interchangeable cells.

Two devices are interchangeable when they have one type and the same bandwidth to every third
device; that is an equivalence, all pairs inside a cell have one bandwidth and so have all pairs
between two cells. A placement therefore matters only through the cell of each position. A plain
node is one cell, a mixed node several.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hetplan.formulations.amp.problem import AmpProblem, Floats, Ints


@dataclass(frozen=True)
class Cells:
    """K cells, those of one class next to each other.

    members: devices of each cell. size, type, kind [K]: kind numbers the classes of interchangeable
    cells. bandwidth [K, K] bytes/s: between two devices of cells u and v; the diagonal is the
    bandwidth inside a cell
    (+inf for a cell of one device, where no such pair exists).
    """

    members: tuple[tuple[int, ...], ...]
    size: Ints
    type: Ints
    kind: Ints
    bandwidth: Floats

    @property
    def count(self) -> int:
        """K."""
        return len(self.members)

    @cached_property
    def cell_of(self) -> Ints:
        """[D] the cell of each device."""
        result = np.empty(int(self.size.sum()), dtype=np.int64)
        for cell, members in enumerate(self.members):
            result[list(members)] = cell
        return result

    def devices(self, cell_of: Ints) -> Ints:
        """Devices by position, those of a cell taken in order; cell_of: the cell of each."""
        left = [iter(members) for members in self.members]
        chosen = [next(left[cell]) for cell in cell_of.ravel()]
        return np.array(chosen, dtype=np.int64).reshape(cell_of.shape)


def interchangeable(labels: Sequence[Hashable], matrix: Floats) -> list[list[int]]:
    """Classes of items i, i' with equal labels and matrix[i, x] = matrix[i', x] for every other x.

    matrix: symmetric [n, n]. The classes are listed by their first item.
    """
    left = list(range(len(labels)))
    classes = []
    while left:
        first = left[0]
        alike = [i for i in left if labels[i] == labels[first]]
        rows = matrix[alike]
        differs = rows != matrix[first]
        mismatches = differs.sum(axis=1) - differs[:, first] - differs[np.arange(len(alike)), alike]
        group = [i for i, count in zip(alike, mismatches, strict=True) if i == first or count == 0]
        classes.append(group)
        taken = set(group)
        left = [i for i in left if i not in taken]
    return classes


def find_cells(problem: AmpProblem) -> Cells:
    """The cells of a problem's devices, equal cells next to each other."""
    groups = interchangeable(problem.device_type.tolist(), problem.bandwidth)
    first = np.array([group[0] for group in groups])
    second = np.array([group[1] if len(group) > 1 else group[0] for group in groups])
    between = problem.bandwidth[np.ix_(first, first)].copy()
    inside = np.where(first == second, np.inf, problem.bandwidth[first, second])
    np.fill_diagonal(between, inside)
    labels = [
        (int(problem.device_type[group[0]]), len(group), float(inside[i]))
        for i, group in enumerate(groups)
    ]
    classes = interchangeable(labels, between)
    order = np.array([cell for kind in classes for cell in kind])
    kinds: NDArray[np.int64] = np.array(
        [n for n, kind in enumerate(classes) for _ in kind], dtype=np.int64
    )
    return Cells(
        members=tuple(tuple(groups[cell]) for cell in order),
        size=np.array([len(groups[cell]) for cell in order], dtype=np.int64),
        type=problem.device_type[first[order]],
        kind=kinds,
        bandwidth=np.ascontiguousarray(between[np.ix_(order, order)]),
    )
