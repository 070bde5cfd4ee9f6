"""What Ditto's algorithms share: folding, the virtual cluster, and how a heuristic ends.

A device is worth some number of devices of the weakest type (Section 5.3). The virtual cluster has
only such devices; Oobleck's divide and conquer makes templates for it (Sections 4 and 6).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hetplan.formulations.ditto.data import DeviceType, DittoData, DittoDecision
from hetplan.formulations.ditto.problem import (
    DittoProblem,
    Stages,
    compile_problem,
    infeasible_because,
)
from hetplan.solvers.run import Outcome, Run, Stop, Stopped, stop_reason


class NoTemplate(Exception):
    """Why an algorithm has no template."""


@dataclass(frozen=True)
class Template:
    """What an algorithm found."""

    stages: Stages
    message: str = ""
    details: Mapping[str, object] = field(default_factory=dict)
    stop: Stop = Stop.DONE  # a limit, where more time might have found a better one


def conclude(
    data: DittoData, run: Run, algorithm: Callable[[DittoProblem], Template]
) -> Outcome[DittoDecision]:
    """Run an algorithm; no decision where its template breaks what Ditto and Oobleck ignore.

    The algorithm raises `NoTemplate`, or `Stopped` where the run should stop.
    """
    problem = compile_problem(data)
    try:
        reason = infeasible_because(problem)
        if reason is not None:
            raise NoTemplate(reason)
        template = algorithm(problem)
        if len(template.stages) > problem.micro_batches:
            count = f"{len(template.stages)} stages for {problem.micro_batches} micro-batches"
            raise NoTemplate(f"the template found has {count}")
        if not problem.fits(template.stages):
            raise NoTemplate(
                "the template found does not fit in memory, which the algorithm ignores"
            )
    except NoTemplate as why:
        return Outcome(stop=Stop.DONE, message=str(why))
    except Stopped:
        return Outcome(stop=stop_reason(run), message="out of time")
    return Outcome(
        stop=template.stop,
        decision=problem.decision(template.stages),
        message=template.message,
        details=template.details,
    )


@dataclass(frozen=True)
class Folding:
    """How many devices of the weakest type each device is worth."""

    weakest: DeviceType  # the type with the largest total
    factors: Mapping[str, int]  # d_i of each type that has nodes, by name
    nodes: int  # n = sum_i n_i d_i: of the virtual cluster, of M weakest devices each (eq. 5)

    @property
    def devices(self) -> int:
        """Of the virtual cluster."""
        return self.nodes * self.weakest.devices_per_node


def fold(data: DittoData, *, communication: bool = False) -> Folding:
    """The folding factors.

    Without communication d_i = round(weakest total / total) (Section 5.3.1); with it, the d from 1
    to that number whose p(d) comes closest to the type's total (Section 5.3.2). Halves are rounded
    up. Raises NoTemplate where a type costs nothing at all and others do: there is no ratio.
    """
    present = [kind for kind in data.device_types if kind.nodes]
    weakest = max(present, key=total_seconds)
    most = total_seconds(weakest)
    factors = {}
    for kind in present:
        total = total_seconds(kind)
        if total <= 0 < most or (total > 0 and most / total > 1e9):
            raise NoTemplate("no folding: a device type computes the model in no time")
        factor = math.floor(most / total + 0.5) if total > 0 else 1
        if communication:
            far = [abs(virtual_seconds(weakest, d) - total) for d in range(1, factor + 1)]
            factor = 1 + far.index(min(far))
        factors[kind.name] = factor
    return Folding(weakest, factors, sum(kind.nodes * factors[kind.name] for kind in present))


def total_seconds(kind: DeviceType) -> float:
    """sum_l c_i(l): the whole model's forward and backward on one device."""
    return math.fsum(kind.forward_seconds) + math.fsum(kind.backward_seconds)


def virtual_seconds(weakest: DeviceType, d: int) -> float:
    """p(d) = total / d + c_in(d): the model on d weakest devices, n' full nodes and one of d'
    devices.

    c_across is left out: Oobleck's profile, hence the instance, has no transfers between nodes. An
    all-reduce of d' devices is taken as one of the next group size, since the profile has powers of
    two only.
    """
    layers, size = len(weakest.forward_seconds), weakest.devices_per_node
    full, rest = divmod(d, size)
    inside = rest / d * layers * mean_allreduce(weakest, rest)
    inside += full * size / d * layers * mean_allreduce(weakest, size if full else 0)
    return total_seconds(weakest) / d + inside


def mean_allreduce(kind: DeviceType, devices: int) -> float:
    """l_c.in[d]: mean over the layers of one all-reduce on `devices` devices; 0 for fewer than
    two."""
    if devices < 2:
        return 0.0
    row = kind.allreduce_seconds[str(1 << (devices - 1).bit_length())]
    return math.fsum(row) / len(row)


def virtual_cluster(data: DittoData, folding: Folding) -> DittoData:
    """n nodes of M weakest devices; memory is left out, as Ditto and Oobleck do."""
    kind = folding.weakest.model_copy(update={"nodes": folding.nodes})
    return DittoData(micro_batches=data.micro_batches, device_types=[kind])


def single_devices(data: DittoData, folding: Folding) -> DittoData:
    """The same devices without nodes, so that every stage has just one."""
    weakest = folding.weakest
    kind = DeviceType(
        name=weakest.name,
        nodes=folding.devices,
        devices_per_node=1,
        forward_seconds=weakest.forward_seconds,
        backward_seconds=weakest.backward_seconds,
    )
    # Oobleck would refuse more stages than micro-batches; the virtual stages are merged afterwards.
    return DittoData(micro_batches=max(data.micro_batches, kind.nodes), device_types=[kind])
