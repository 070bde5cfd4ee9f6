"""What a posed workload takes for granted, told in words: measured curves, where they end, hidden
communication."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hetplan.errors import InputError
from hetplan.formulations.poplar.data import PoplarData
from hetplan.profiling.batch_curve import BatchCurve
from hetplan.profiling.workload import Workload
from hetplan.text import bytes_text, percent_text

# A curve measured within less than this part of what the cluster's device has is worth a word.
MUCH_LESS = 0.9


def check_memory(workload: Workload, curve: BatchCurve) -> None:
    """Refuse a curve measured within more memory than the cluster's device has; raises
    InputError."""
    held = workload.cluster.specs[curve.device].memory_bytes
    if curve.memory_bytes > held * (1 + 1e-9):
        raise InputError(
            "memory_bytes is more than the cluster's device has",
            where=f"batch curve of {curve.device}",
            got=bytes_text(curve.memory_bytes),
            expected=f"at most {bytes_text(held)}",
        )


def told(
    workload: Workload,
    curves: Mapping[str, BatchCurve],
    points: Mapping[str, Mapping[int, float]],
    fits: Sequence[int],
    longest: int,
) -> Iterator[str]:
    """One line each: what is measured, extrapolated, capped, cut. fits [n] before the cut at
    `longest`."""
    devices = workload.cluster.devices
    largest = dict.fromkeys(workload.cluster.types, 0)
    for device, batch in zip(devices, fits, strict=True):
        largest[device.type] = max(largest[device.type], batch)
    usable = workload.device_bytes()
    if curves:
        kind = workload.profile.provenance.kind
        others = [name for name in largest if name not in curves]
        rest = f"; {', '.join(others)} from the {kind} profile" if others else ""
        yield f"measured batch curves: {', '.join(curves)}{rest}"
    for name, most in largest.items():
        curve, last = curves.get(name), max(points[name])
        if curve is not None and curve.memory_bytes < MUCH_LESS * usable[name]:
            yield f"{name}: measured within {bytes_text(curve.memory_bytes)} of {bytes_text(usable[name])}"
        if curve is not None and curve.tried_up_to is not None and most == curve.tried_up_to:
            yield f"{name}: no micro-batch beyond {most} was tried, more may fit"
        elif curve is not None and last < min(most, longest):
            yield f"{name}: extrapolated beyond {last} samples, the largest measured, up to {min(most, longest)}"
        if most > longest and longest < workload.global_batch:
            yield f"{name}: micro-batches beyond {longest} are not considered"


def hideable(data: PoplarData) -> float:
    """Seconds of computation that the collectives can hide behind at most.

    ZeRO 0 and 1: those of an iteration with every device at its peak; ZeRO 2 and 3: of the longest
    step.
    """
    curves = [device.step_seconds for device in data.devices if device.step_seconds]
    if not curves:
        return 0.0
    if data.stepwise:
        return max(max(curve[: data.global_batch]) for curve in curves)
    return data.global_batch / sum(max(b / t for b, t in enumerate(curve, 1)) for curve in curves)


def hidden_text(share: float, hidden: float, whole: float) -> str:
    """`overlap: 50 % of the communication …`, with what computation allows where that is less."""
    asked = (
        f"overlap: {percent_text(share)} of the communication is taken to hide behind computation"
    )
    if hidden < share * whole * (1 - 1e-9):
        return f"{asked}, {percent_text(hidden / whole)} where there is no more computation"
    return asked
