"""Warmers (see `solvers.warm`): the kernels of the joint search on one node and one arc."""

from __future__ import annotations

import numpy as np

from hetplan.formulations.hap.cutting import best_in_cell
from hetplan.formulations.hap.exact import kernels, labelling
from hetplan.formulations.hap.graph_kernels import components


def labels() -> None:
    """The potentials' and the label setting's."""
    first, head, component = np.array([0, 1, 1]), np.array([1]), np.array([0, 1])
    one = np.ones(1)
    common = (first, head, np.zeros(1, dtype=np.bool_), one, one, component)
    cell = np.ones((1, 1))
    potential = kernels.potentials(*common, cell, one, cell, one, True)
    none, empty = np.zeros(0), np.zeros((0, 1))
    _, _, _, parent, arc, last, sums = labelling.labels(
        *common, 0, cell, one, one, none, empty, potential, cell, 10.0, 0.0, 10, 10
    )
    labelling.price(last, parent, arc, sums, *common[2:5], cell, one, 10.0)


def duals() -> None:
    """Those of the duals and of the components."""
    best_in_cell(np.ones(1), np.ones(1), 1.0, np.ones((1, 1)), np.ones(1), np.inf)
    components(np.array([0, 0]), np.zeros(0, dtype=np.int64))
