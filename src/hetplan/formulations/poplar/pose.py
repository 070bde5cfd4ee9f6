"""A workload as a Poplar problem: curves from the profile, memory and collectives of one ZeRO
stage.

The curve of a device has the profile's step times (forward + backward of all layers, no
collectives) at the micro-batches for which the profile has tables, interpolated in between, up to
the largest micro-batch that fits in memory. Where a batch curve was measured on a live device, its
times and its largest micro-batch take the place of these.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from hetplan.errors import InputError, require
from hetplan.formulations.poplar.curves import linear_curve
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

# The largest micro-batch of a curve; larger ones gain nothing.
LONGEST_CURVE = 4096
# Bytes that differ by up to this share are equal: the file of the curve and that of the cluster may
# round them.
ROUNDED = 1e-9


class NoStageFits(InputError):
    """Some device holds not even one sample at any ZeRO stage."""


@dataclass(frozen=True)
class Assumptions:
    """Assumptions with which a workload is posed."""

    # Under stages 1 to 3: ZeRO's equal shards, or shards in proportion to each device's memory (the
    # paper's future work).
    shards: Shards = "equal"
    # device type -> measured batch curve
    curves: Mapping[str, BatchCurve] = field(default_factory=dict)
    collectives: Collectives | None = None  # measured, in place of the cluster's links


@dataclass(frozen=True)
class Posed:
    """The instance of a workload, and the figures from which it was made. `pose` makes it."""

    data: PoplarData
    states: States
    parts: Floats  # [n] the part of the model states that each device holds as its shard
    communication: Communication
    # Why no plan is possible at this stage: no device then has a curve, and the instance is
    # infeasible. None: plans are possible.
    unfit: str | None
    notes: tuple[str, ...] = ()  # one line for each assumption about measured curves and their ends

    @property
    def once_seconds(self) -> float:
        """Seconds of the collectives of stage 2 that run once per iteration.

        They are the same for all plans and no part of the instance's objective. Whoever states the
        time of an iteration, or a bound on it, adds them.
        """
        return self.communication.per_iteration if self.data.stepwise else 0.0

    def device_bytes(self, device: int, micro_batch: int) -> float:
        """Predicted bytes on a device whose largest micro-batch is `micro_batch`, without the
        reserve."""
        resident = self.states.resident(self.data.zero_stage, float(self.parts[device]))
        return resident + micro_batch * self.states.per_sample


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
    shards = parts(memory, assumed.shards)
    check_curves(workload, assumed)
    longest = min(workload.global_batch, LONGEST_CURVE)
    points = {name: _points(workload, assumed, name) for name in cluster.types}
    curves = {name: linear_curve(points[name], longest) for name in cluster.types}
    fitting: list[int] = []  # [n] the largest micro-batch that fits: as measured, or by the model
    for device, shard, free in zip(cluster.devices, shards.tolist(), memory, strict=True):
        if device.type in assumed.curves:
            fitting.append(assumed.curves[device.type].largest[zero_stage])
        else:
            fitting.append(states.largest_batch(zero_stage, shard, free))
    unfit = _why_no_plan(workload, states, zero_stage, shards, memory, fitting, assumed.curves)
    if unfit:
        fitting = [0] * len(fitting)
    members = [i for i, batch in enumerate(fitting) if batch]
    seconds = communication(
        states, zero_stage, cluster, shards, members, measured=assumed.collectives
    )
    data = PoplarData(
        zero_stage=zero_stage,
        global_batch=workload.global_batch,
        # collectives of stage 2 that run once per iteration are in `once_seconds`
        comm_seconds=seconds.per_step if zero_stage >= 2 else seconds.per_iteration,
        devices=_devices(workload, curves, [min(batch, longest) for batch in fitting]),
    )
    largest = dict.fromkeys(cluster.types, 0)
    for device, batch in zip(cluster.devices, fitting, strict=True):
        largest[device.type] = max(largest[device.type], batch)
    notes = tuple(notes_of(workload, assumed, points, largest, longest))
    return Posed(
        data=data,
        states=states,
        parts=shards,
        communication=seconds,
        unfit=unfit,
        notes=notes,
    )


def _points(workload: Workload, assumed: Assumptions, name: str) -> Mapping[int, float]:
    """{micro-batch: seconds} of a device type: of its measured curve, or of the profile where no
    curve was measured or no micro-batch fitted."""
    if name in assumed.curves and assumed.curves[name].measured:
        return assumed.curves[name].measured
    return measured_points(workload.profile, name)


def check_curves(workload: Workload, assumed: Assumptions) -> None:
    """Raise InputError for curves of another workload or cluster, and for unequal shards, with
    which no curve was measured."""
    for name, curve in assumed.curves.items():
        require(
            name in workload.cluster.types,
            "batch curve of a device type not in the cluster",
            got=name,
            expected=" or ".join(workload.cluster.types),
        )
        check_curve(curve, workload.model, len(workload.cluster.devices))
        where = f"batch curve of {name}"
        capacity = workload.cluster.specs[name].memory_bytes
        require(
            curve.memory_bytes <= capacity * (1 + ROUNDED),
            "memory_bytes is more than the cluster's device has",
            where=where,
            got=bytes_text(curve.memory_bytes),
            expected=f"at most {bytes_text(capacity)}",
        )
        require(
            assumed.shards == "equal",
            "measured with equal shards",
            where=where,
            got=assumed.shards,
            expected="equal",
        )


def _devices(
    workload: Workload, curves: Mapping[str, Floats], fitting: Sequence[int]
) -> list[Device]:
    """[n] the devices of the instance; equal ones share one object, which is validated once.

    curves: curves of each device type. fitting: [n] the largest micro-batch of each device.
    """

    @cache
    def device_of(name: str, largest: int) -> Device:
        spec = workload.cluster.specs[name]
        # the FLOP/s that the baseline `whale` counts; a device of a cluster file may state none
        flops = spec.peak_flops(WHALE_PRECISION) if WHALE_PRECISION in spec.peak_tflops else None
        step_seconds = curves[name][1 : largest + 1].tolist()
        return Device(name=name, step_seconds=step_seconds, flops_per_second=flops)

    return [
        device_of(device.type, largest)
        for device, largest in zip(workload.cluster.devices, fitting, strict=True)
    ]


def _why_no_plan(
    workload: Workload,
    states: States,
    zero_stage: int,
    shards: Floats,
    memory: Sequence[float],
    fitting: Sequence[int],
    curves: Mapping[str, BatchCurve],
) -> str | None:
    """The reason why there is no plan; None where there may be one.

    A plan needs the shards of all devices. So there is no plan where a device cannot hold its
    shard. There is none either where no device takes a sample. shards, memory, fitting: [n], see
    `pose`.
    """
    devices = workload.cluster.devices
    for device, shard, free, batch in zip(devices, shards.tolist(), memory, fitting, strict=True):
        needed = states.resident(zero_stage, shard)
        # a micro-batch that was measured fits, whatever the model of memory says
        if zero_stage > 0 and needed > free and not batch:
            return (
                f"{device.type} cannot hold its part of the model states at ZeRO {zero_stage}: "
                f"{bytes_text(needed)}, {bytes_text(free)} free"
            )
    if any(fitting):
        return None
    measured = [
        f"measured so on {name} within {bytes_text(curves[name].memory_bytes)}"
        for name in workload.cluster.types
        if name in curves
    ]
    predicted = [i for i, device in enumerate(devices) if device.type not in curves]
    reasons = []
    if predicted:
        i = max(predicted, key=lambda i: memory[i])  # the device of the largest memory
        needed = states.resident(zero_stage, float(shards[i])) + states.per_sample
        reasons.append(f"{bytes_text(needed)}, {bytes_text(memory[i])} free on {devices[i].type}")
    why = "; ".join(reasons + measured)
    return f"no device holds its model states and one sample at ZeRO {zero_stage}: {why}"


def pose_lowest_stage(workload: Workload, assumed: Assumptions | None = None) -> Posed:
    """The instance at the lowest ZeRO stage at which a sample fits on every device, as Algorithm 1
    chooses it.

    Raises NoStageFits where on some device no sample fits even at stage 3, InputError as `pose`
    does.
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
    """Lines of text that say which curves and collectives were measured, and where curves are
    extrapolated or cut off.

    points: device type -> {micro-batch: seconds}. largest: device type -> the largest micro-batch
    that fits on one of its devices. longest: the largest micro-batch of a curve.
    """
    curves, collectives = assumed.curves, assumed.collectives
    if curves:
        kind = workload.profile.provenance.kind
        others = [name for name in largest if name not in curves]
        rest = f"; {', '.join(others)} from the {kind} profile" if others else ""
        yield f"measured batch curves: {', '.join(curves)}{rest}"
    for name, most in largest.items():
        curve = curves.get(name)
        last = max(points[name])
        end = min(most, longest)
        if curve is not None and curve.tried_up_to is not None and most == curve.tried_up_to:
            yield f"{name}: no micro-batch beyond {most} was tried, more may fit"
        elif curve is not None and last < end:
            yield f"{name}: extrapolated beyond {last} samples, the largest measured, up to {end}"
        if most > longest and longest < workload.global_batch:
            yield f"{name}: micro-batches beyond {longest} are not considered"
    if collectives is not None:
        where = f"{collectives.ranks} ranks of {collectives.device} by {collectives.backend}"
        yield f"collectives as measured on {where}"
