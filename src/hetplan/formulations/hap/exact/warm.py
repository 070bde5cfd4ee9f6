"""Warmers (see `solvers.warm`): the kernels of the joint search, in two parts, on a theory of one
computation."""

from __future__ import annotations

import numpy as np

from hetplan.formulations.hap.data import Compute, Device, HapData
from hetplan.formulations.hap.exact.arrays import Arrays, priced_graph
from hetplan.formulations.hap.problem import compile_problem
from hetplan.formulations.hap.states import Graph
from hetplan.formulations.hap.theory import Theory, reduce_theory
from hetplan.solvers.options import Options
from hetplan.solvers.run import Run

ONE = np.ones((1, 1))


def theory() -> Theory:
    """The goal is what one computation on one device gives."""
    triple = Compute(
        kind="compute", instruction="o", pre=[], post=["p"], fixed_flops=1.0, shared_flops=1.0
    )
    data = HapData(devices=[Device(name="d", flops_per_second=1.0)], triples=[triple], goal="p")
    return reduce_theory(compile_problem(data))


def arrays() -> Arrays:
    """Its two states, as a graph."""
    only = theory()
    assert only.goal is not None
    first, head, component = np.array([0, 1, 1]), np.array([1]), np.array([0, 1])
    needs = frozenset((only.goal,)), frozenset[int]()
    return priced_graph(only.problem, Graph(only, first, head, np.array([0]), component, needs))


def labels() -> None:
    """What sets labels and prices their programs."""
    from hetplan.formulations.hap.exact.labels import labels as set_labels

    _, found = set_labels(
        arrays(), ONE, ONE[0], np.zeros((2, 1, 1)), ONE, np.inf, slack=0.0, room=10, per_node=10
    )
    assert found is not None
    found.price(ONE, np.inf)


def states() -> None:
    """What finds states and bounds what follows, without memory and with it."""
    from hetplan.formulations.hap.exact.kernels import potentials
    from hetplan.formulations.hap.exact.opened import Explorer
    from hetplan.formulations.hap.graph_kernels import shortest_paths

    priced, only = arrays(), theory()
    first, head, *_, component = priced.common
    shortest_paths(first, head, component, ONE)
    potentials(*priced.common, ONE, priced.slow, ONE, ONE[0], True)
    Explorer(only.problem, only).open(ONE, ONE, np.inf, 10, Run(Options(threads=1)))
