"""Warmers (see `solvers.warm`): the kernels of the exact method and of the paper's enumeration."""

from __future__ import annotations

from hetplan.formulations.astra import exact, paper
from hetplan.formulations.astra.data import AstraData, DeviceType
from hetplan.solvers.run import Run


def small(equal: bool) -> AstraData:
    """Two types, neither of which is better in everything: `exact` needs its tables."""
    kinds = [
        DeviceType(name=name, max_devices=2, layer_seconds=c, p2p_seconds=h)
        for name, c, h in (("a", 1.0, 2.0), ("b", 2.0, 1.0))
    ]
    return AstraData(
        layers=4, stages=2, micro_batches=2, data_parallel=1, tensor_parallel=1, device_types=kinds,
        equal_layers_per_type=equal,
    )  # fmt: skip


def unequal() -> None:
    """Compile what unequal layers per type need."""
    exact.solve(small(equal=False), Run())


def equal() -> None:
    """Compile what equal layers per type need, the enumeration too."""
    exact.solve(small(equal=True), Run())
    paper.solve(small(equal=True), Run())
