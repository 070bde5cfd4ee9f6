"""A workload as a Poplar problem: curves from the profile, memory and collectives of one ZeRO stage.

The curve of a device is the profile's step time (forward + backward of all layers, no collectives) at the
micro-batches that it has tables for, and an interpolation in between, up to the largest that fits in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hetplan.errors import InputError
from hetplan.formulations.poplar.awareness import CurveDevice, explore_cluster
from hetplan.formulations.poplar.curves import dips, linear_curve, spline_curve
from hetplan.formulations.poplar.data import Device, PoplarData
from hetplan.formulations.poplar.problem import Floats
from hetplan.formulations.poplar.zero import Communication, Shards, States, communication, parts
from hetplan.profiling.profile import Profile
from hetplan.profiling.workload import Workload

Interpolation = Literal["linear", "spline"]
# Longest curve of one device; larger micro-batches than this gain nothing.
LONGEST_CURVE = 4096


@dataclass(frozen=True)
class Posed:
    """The instance and what stands behind it.

    parts [n]: of the shards on each device. once_seconds: collectives of stage 2 that are paid once per
    iteration, whatever the plan (the instance has none such; a prediction adds them). dips: where a spline
    runs below the measurements around it. unfit: why this stage is impossible on the cluster (then no device
    has a curve, so that the instance is infeasible), None where it is possible.
    """

    data: PoplarData
    states: States
    parts: Floats
    communication: Communication
    dips: tuple[str, ...]
    unfit: str | None = None

    @property
    def once_seconds(self) -> float:
        """Paid once per iteration beside the instance's objective."""
        return self.communication.per_iteration if self.data.stepwise else 0.0

    @property
    def holds_everywhere(self) -> bool:
        """Whether every device holds at least one sample."""
        return all(device.step_seconds for device in self.data.devices)

    def device_bytes(self, device: int, micro_batch: int) -> float:
        """Predicted bytes on a device whose largest micro-batch is `micro_batch` (without the reserve)."""
        part = float(self.parts[device])
        return self.states.resident(self.data.zero_stage, part) + micro_batch * self.states.per_sample


def pose(
    workload: Workload,
    zero_stage: int,
    *,
    shards: Shards = "equal",
    overlap: float = 0.0,
    interpolation: Interpolation = "linear",
) -> Posed:
    """The `poplar` data of `workload` under one ZeRO stage.

    shards: ZeRO's equal ones, or in proportion to each device's memory (stages 1 to 3; the paper's future
    work). overlap: share of the communication that hides behind computation. interpolation: straight lines,
    or the paper's natural spline of speeds. Devices on which nothing fits get an empty curve.
    Raises InputError where the profile has no table without tensor parallelism for some device type.
    """
    cluster, states = workload.cluster, States.of(workload)
    usable = workload.device_bytes()
    memory = [usable[device.type] for device in cluster.devices]
    held = parts(memory, shards)
    visible = communication(states, zero_stage, cluster, held).overlapped(overlap)
    longest = min(workload.global_batch, LONGEST_CURVE)
    points = {name: measured_points(workload.profile, name) for name in cluster.types}
    curves = {name: _curve(points[name], longest, interpolation) for name in cluster.types}
    unfit = _unfit(workload, states, zero_stage, held, memory)
    devices = []
    for device, part, free in zip(cluster.devices, held.tolist(), memory, strict=True):
        largest = 0 if unfit else min(states.largest_batch(zero_stage, part, free), longest)
        flops = cluster.specs[device.type].peak_flops(workload.precision)
        seconds = curves[device.type][1 : largest + 1].tolist()
        devices.append(Device(name=device.type, step_seconds=seconds, flops_per_second=flops))
    data = PoplarData(
        zero_stage=zero_stage,
        global_batch=workload.global_batch,
        comm_seconds=visible.per_step if zero_stage >= 2 else visible.per_iteration,
        devices=devices,
    )
    told = [f"{name}: {dip}" for name in cluster.types for dip in dips(points[name], curves[name])]
    return Posed(data, states, held, visible, tuple(told), unfit)


def _unfit(
    workload: Workload, states: States, zero_stage: int, held: Floats, memory: Sequence[float]
) -> str | None:
    """Why sharding is impossible: one device that cannot hold its part breaks it for all (not stage 0)."""
    if zero_stage == 0:
        return None
    for device, part, free in zip(workload.cluster.devices, held.tolist(), memory, strict=True):
        needed = states.resident(zero_stage, part)
        if needed > free:
            return (
                f"{device.type} cannot hold its part of the model states at ZeRO {zero_stage}: "
                f"{needed / 1e9:.1f} GB, {free / 1e9:.1f} GB free"
            )
    return None


def pose_lowest_stage(workload: Workload, first_stage: int = 0) -> Posed:
    """The lowest ZeRO stage at which every device holds a sample, found as Algorithm 1 does.

    Raises InputError when some device holds nothing even at stage 3.
    """

    def devices_at(stage: int) -> list[CurveDevice]:
        return [CurveDevice(device.step_seconds) for device in pose(workload, stage).data.devices]

    stage, _ = explore_cluster(devices_at, first_stage)
    return pose(workload, stage)


def measured_points(profile: Profile, device: str) -> dict[int, float]:
    """{micro-batch: seconds of forward + backward, all layers} of one type, tensor degree 1."""
    points = {
        table.micro_batch: float(np.sum(table.seconds()))
        for table in profile.tables
        if table.device == device and table.tensor == 1
    }
    if not points:
        where = f"profile of {profile.model}"
        raise InputError(f"no table of device type {device!r} at tensor degree 1", where=where)
    return points


def _curve(points: Mapping[int, float], largest: int, interpolation: Interpolation) -> Floats:
    """Interpolated between measurements; a spline is not trusted beyond the last one."""
    straight = linear_curve(points, largest)
    if interpolation == "linear":
        return straight
    if interpolation != "spline":
        raise InputError("interpolation", got=interpolation, expected="linear or spline")
    last = min(max(points), largest)
    straight[: last + 1] = spline_curve(points, last)
    return straight
