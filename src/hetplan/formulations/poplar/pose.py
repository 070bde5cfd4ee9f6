"""A workload as a Poplar problem: curves from the profile, memory and collectives of one ZeRO
stage.

The curve of a device is the profile's step time (forward + backward of all layers, no collectives)
at the micro-batches that it has tables for, and an interpolation in between, up to the largest that
fits in memory.
A batch curve measured on a live device takes the place of both, the times and the largest that
fits.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from hetplan.errors import InputError, require
from hetplan.formulations.poplar.awareness import linear_curve
from hetplan.formulations.poplar.data import Device, PoplarData
from hetplan.formulations.poplar.paper import WHALE_PRECISION
from hetplan.formulations.poplar.problem import Floats
from hetplan.formulations.poplar.zero import Communication, Shards, communication, parts
from hetplan.profiling.profiles.batch_curve import BatchCurve, check_curve
from hetplan.profiling.profiles.measured_collectives import Collectives
from hetplan.profiling.profiles.profile import Profile
from hetplan.profiling.workload import Workload
from hetplan.replays.model_states import STAGES, States
from hetplan.text import bytes_text

# Longest curve of one device; larger micro-batches than this gain nothing.
LONGEST_CURVE = 4096


class NoStageFits(InputError):
    """Some device holds not even one sample at any ZeRO stage."""


@dataclass(frozen=True)
class Assumptions:
    """Assumptions with which a workload is posed.

    shards: ZeRO's equal ones, or in proportion to each device's memory (stages 1 to 3; the paper's
    future work). curves: measured batch curves by device type. collectives: measured ones in place
    of the cluster's links.
    """

    shards: Shards = "equal"
    curves: Mapping[str, BatchCurve] = field(default_factory=dict)
    collectives: Collectives | None = None


@dataclass(frozen=True)
class Posed:
    """The instance and what stands behind it.

    parts [n]: of the shards on each device. once_seconds: collectives of stage 2 that are paid once
    per iteration, whatever the plan (the instance has no place for them: who states an iteration's
    time or a bound on it adds them to both). unfit: why no plan is possible at this stage (then no
    device has a curve, and the instance is infeasible), else None. notes: what is taken for
    granted, a line each: measured curves and where they end.
    """

    data: PoplarData
    states: States
    parts: Floats
    communication: Communication
    unfit: str | None
    notes: tuple[str, ...] = ()

    @property
    def once_seconds(self) -> float:
        """Paid once per iteration beside the instance's objective."""
        return self.communication.per_iteration if self.data.stepwise else 0.0

    def device_bytes(self, device: int, micro_batch: int) -> float:
        """Predicted bytes on a device whose largest micro-batch is `micro_batch` (without the
        reserve)."""
        return (
            self.states.resident(self.data.zero_stage, float(self.parts[device]))
            + micro_batch * self.states.per_sample
        )


def pose(workload: Workload, zero_stage: int, assumed: Assumptions | None = None) -> Posed:
    """The `poplar` data of `workload` under one ZeRO stage.

    Devices on which nothing fits get an empty curve. Raises InputError where the profile has no
    table without tensor parallelism for some device type, or a measured curve is of another
    workload.
    """
    assumed = assumed or Assumptions()
    cluster, states = workload.cluster, States.of(workload)
    usable = workload.device_bytes()
    memory = [usable[device.type] for device in cluster.devices]
    held = parts(memory, assumed.shards)
    check_curves(workload, assumed)
    longest = min(workload.global_batch, LONGEST_CURVE)
    # the profile's points where a curve has none (nothing fitted there)
    points = {
        name: (assumed.curves[name].measured if name in assumed.curves else {})
        or measured_points(workload.profile, name)
        for name in cluster.types
    }
    curves = {name: linear_curve(points[name], longest) for name in cluster.types}
    fits = [  # as measured, else by the memory model
        assumed.curves[device.type].largest[zero_stage]
        if device.type in assumed.curves
        else states.largest_batch(zero_stage, part, free)
        for device, part, free in zip(cluster.devices, held.tolist(), memory, strict=True)
    ]
    unfit = _unfit(workload, states, zero_stage, held, memory, fits, assumed.curves)
    if unfit:
        fits = [0] * len(fits)
    members = [i for i, batch in enumerate(fits) if batch]
    whole = communication(states, zero_stage, cluster, held, members, measured=assumed.collectives)
    data = PoplarData(
        zero_stage=zero_stage,
        global_batch=workload.global_batch,
        comm_seconds=whole.per_step if zero_stage >= 2 else whole.per_iteration,
        devices=_devices(workload, curves, [min(batch, longest) for batch in fits]),
    )
    largest = dict.fromkeys(cluster.types, 0)
    for device, batch in zip(cluster.devices, fits, strict=True):
        largest[device.type] = max(largest[device.type], batch)
    notes = tuple(notes_of(workload, assumed, points, largest, longest))
    return Posed(data, states, held, whole, unfit, notes)


def check_curves(workload: Workload, assumed: Assumptions) -> None:
    """Refuse curves of another workload, and curves beside shards that they were not measured
    with."""
    for name, curve in assumed.curves.items():
        require(
            name in workload.cluster.types,
            "batch curve of a device type not in the cluster",
            got=name,
            expected=" or ".join(workload.cluster.types),
        )
        check_curve(curve, workload.model, len(workload.cluster.devices))
        where, held = f"batch curve of {name}", workload.cluster.specs[name].memory_bytes
        require(
            curve.memory_bytes <= held * (1 + 1e-09),
            "memory_bytes is more than the cluster's device has",
            where=where,
            got=bytes_text(curve.memory_bytes),
            expected=f"at most {bytes_text(held)}",
        )
        require(
            assumed.shards == "equal",
            "measured with equal shards",
            where=where,
            got=assumed.shards,
            expected="equal",
        )


def _devices(workload: Workload, curves: Mapping[str, Floats], fits: Sequence[int]) -> list[Device]:
    """[n] devices of the instance; equal ones share one object, which is checked once."""

    @cache
    def made(name: str, largest: int) -> Device:
        spec = workload.cluster.specs[name]
        # as the baseline `whale` counts; a cluster file's own device may state none
        flops = spec.peak_flops(WHALE_PRECISION) if WHALE_PRECISION in spec.peak_tflops else None
        return Device(
            name=name, step_seconds=curves[name][1 : largest + 1].tolist(), flops_per_second=flops
        )

    return [made(d.type, n) for d, n in zip(workload.cluster.devices, fits, strict=True)]


def _unfit(
    workload: Workload,
    states: States,
    zero_stage: int,
    held: Floats,
    memory: Sequence[float],
    fits: Sequence[int],
    curves: Mapping[str, BatchCurve],
) -> str | None:
    """Why there is no plan: a device that cannot hold its shards stops all of them, or no device
    takes a sample."""
    devices = workload.cluster.devices
    for device, part, free, batch in zip(devices, held.tolist(), memory, fits, strict=True):
        needed = states.resident(zero_stage, part)
        if zero_stage > 0 and needed > free and not batch:
            return (
                f"{device.type} cannot hold its part of the model states at ZeRO {zero_stage}: "
                f"{bytes_text(needed)}, {bytes_text(free)} free"
            )
    if any(fits):
        return None
    measured = [
        f"measured so on {name} within {bytes_text(curves[name].memory_bytes)}"
        for name in workload.cluster.types
        if name in curves
    ]
    predicted = [i for i, device in enumerate(devices) if device.type not in curves]
    reasons = []
    if predicted:
        i = max(predicted, key=lambda i: memory[i])
        needed = states.resident(zero_stage, float(held[i])) + states.per_sample
        reasons.append(f"{bytes_text(needed)}, {bytes_text(memory[i])} free on {devices[i].type}")
    return f"no device holds its model states and one sample at ZeRO {zero_stage}: " + "; ".join(
        reasons + measured
    )


def pose_lowest_stage(workload: Workload, assumed: Assumptions | None = None) -> Posed:
    """The lowest ZeRO stage at which every device holds a sample, as Algorithm 1 chooses it.

    Raises NoStageFits when some device holds nothing even at stage 3, InputError as `pose` does.
    """
    for stage in STAGES:
        posed = pose(workload, stage, assumed)
        if all(device.step_seconds for device in posed.data.devices):
            return posed
    raise NoStageFits("a device cannot run one sample at any ZeRO stage", expected="more memory")


def measured_points(profile: Profile, device: str) -> dict[int, float]:
    """{micro-batch: seconds of forward + backward, all layers} of one type, tensor degree 1."""
    points = {
        table.micro_batch: float(np.sum(table.layer_seconds()))
        for table in profile.tables
        if table.device == device and table.tensor == 1
    }
    require(
        points,
        f"no table of device type {device!r} at tensor degree 1",
        where=f"profile of {profile.model}",
    )
    return points


def notes_of(
    workload: Workload,
    assumed: Assumptions,
    points: Mapping[str, Mapping[int, float]],
    largest: Mapping[str, int],
    longest: int,
) -> Iterator[str]:
    """One line each: what is measured, extrapolated, cut. largest: by type, before the cut at
    `longest`."""
    curves, collectives = assumed.curves, assumed.collectives
    if curves:
        kind = workload.profile.provenance.kind
        others = [name for name in largest if name not in curves]
        rest = f"; {', '.join(others)} from the {kind} profile" if others else ""
        yield f"measured batch curves: {', '.join(curves)}{rest}"
    for name, most in largest.items():
        curve, last, end = curves.get(name), max(points[name]), min(most, longest)
        if curve is not None and curve.tried_up_to is not None and most == curve.tried_up_to:
            yield f"{name}: no micro-batch beyond {most} was tried, more may fit"
        elif curve is not None and last < end:
            yield f"{name}: extrapolated beyond {last} samples, the largest measured, up to {end}"
        if most > longest and longest < workload.global_batch:
            yield f"{name}: micro-batches beyond {longest} are not considered"
    if collectives is not None:
        where = f"{collectives.ranks} ranks of {collectives.device} by {collectives.backend}"
        yield f"collectives as measured on {where}"
