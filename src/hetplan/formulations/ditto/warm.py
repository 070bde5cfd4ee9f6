"""Warmers (see `solvers.warm`): the kernels of the exact method and of Oobleck's divide and conquer."""

from __future__ import annotations

from hetplan.formulations.ditto import oobleck
from hetplan.formulations.ditto.data import DeviceType, DittoData
from hetplan.formulations.ditto.exact import search
from hetplan.solvers.run import Run


def small() -> DittoData:
    """Two devices, two layers."""
    kind = DeviceType(
        name="a", nodes=2, devices_per_node=1, forward_seconds=[1.0, 1.0], backward_seconds=[1.0, 1.0]
    )
    return DittoData(micro_batches=2, device_types=[kind])


def exact() -> None:
    """Compile the exact method."""
    search.solve(small(), Run())


def division() -> None:
    """Compile the divide and conquer."""
    oobleck.solve(small(), Run())
