"""The virtual cluster of the weakest devices and Oobleck's templates for it (Ditto, Sections 4 and
6)."""

from __future__ import annotations

from hetplan.formulations.ditto.data import DeviceType, DittoData
from hetplan.formulations.ditto.division import Division
from hetplan.formulations.ditto.folding import Folding
from hetplan.formulations.ditto.problem import compile_problem
from hetplan.solvers.run import Run


def virtual_cluster(data: DittoData, folding: Folding) -> DittoData:
    """n nodes of M weakest devices; memory is left out, as Ditto and Oobleck do."""
    kind = folding.weakest.model_copy(update={"nodes": folding.nodes(data)})
    return DittoData(micro_batches=data.micro_batches, device_types=[kind])


def single_devices(data: DittoData, folding: Folding) -> DittoData:
    """The same devices without nodes, so that every stage has just one: the uniform template's
    cluster."""
    weakest = folding.weakest
    kind = DeviceType(
        name=weakest.name,
        nodes=folding.nodes(data) * folding.devices_per_node,
        devices_per_node=1,
        forward_seconds=weakest.forward_seconds,
        backward_seconds=weakest.backward_seconds,
    )
    # Oobleck would refuse more stages than micro-batches; the virtual stages are merged afterwards.
    return DittoData(micro_batches=max(data.micro_batches, kind.nodes), device_types=[kind])


def virtual_templates(
    data: DittoData, folding: Folding, run: Run
) -> tuple[Division, list[tuple[float, int]]] | None:
    """Oobleck's table for the virtual cluster and its templates (T, S), best first; None: out of
    time."""
    division = Division(compile_problem(virtual_cluster(data, folding)))
    return (division, division.ranked()) if division.fill(run) else None


def uniform_template(data: DittoData, folding: Folding, run: Run) -> list[tuple[int, int]] | None:
    """The virtual template of n M stages of one weakest device each, as layer ranges; None: out of
    time.

    Needs L >= n M (Section 6.3); the caller says so.
    """
    division = Division(compile_problem(single_devices(data, folding)))
    if not division.fill(run):
        return None
    return [(a, b) for a, b, _ in division.template(folding.nodes(data) * folding.devices_per_node)]
