"""Warmers (see `solvers.warm`): the kernels of the exact method and of Oobleck's divide and
conquer."""

from __future__ import annotations

import math

from hetplan.formulations.ditto import oobleck
from hetplan.formulations.ditto.data import DeviceType, DittoData
from hetplan.formulations.ditto.exact import search
from hetplan.formulations.ditto.exact.relaxer import Relaxer
from hetplan.formulations.ditto.exact.space import Space
from hetplan.formulations.ditto.problem import compile_problem
from hetplan.solvers.run import Run


def small(micro_batches: int = 2) -> DittoData:
    """Two devices, two layers."""
    kind = DeviceType(
        name="a",
        nodes=2,
        devices_per_node=1,
        forward_seconds=[1.0, 1.0],
        backward_seconds=[1.0, 1.0],
    )
    return DittoData(micro_batches=micro_batches, device_types=[kind])


def exact() -> None:
    """Compile the exact method: a search, and stages counted where there are more devices than
    micro-batches."""
    search.solve(small(), Run())
    space = Space(compile_problem(small(1)), counted=False)
    Relaxer(space, Run())(2.0, 2.0, math.inf)


def division() -> None:
    """Compile the divide and conquer."""
    oobleck.solve(small(), Run())
