"""An `amp` decision as tables for people: the degrees, then one line per stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hetplan.formulations.amp.data import AmpData, AmpDecision
from hetplan.formulations.amp.evaluate import Breakdown, price
from hetplan.text import Table, devices_text, names_text, seconds_text, share_text

# [D] numbers of (node, device) where people know them by others than the instance's
Shown = Sequence[tuple[int, int]]


def describe(
    data: AmpData,
    decision: AmpDecision,
    peak_bytes: tuple[float, ...] | None = None,
    shown: Shown | None = None,
) -> list[Table]:
    """The stages of a feasible decision; times are of the slowest pipeline, sizes of the fullest
    device.

    peak_bytes [D]: memory of each device where it was counted otherwise than by the instance.
    shown: numbers in another cluster.
    """
    priced = price(data, decision)
    if peak_bytes is not None:
        priced = replace(priced, peak_bytes=peak_bytes)
    rows = tuple(stage_row(data, decision, priced, j, shown) for j in range(decision.pipeline))
    header = ("stage", "layers", "", "devices", "micro-batch", "send", "sync", "memory")
    degrees = (
        f"pipeline {decision.pipeline} x data {decision.data} x tensor {decision.tensor}, "
        f"{priced.gas} micro-batches of {decision.micro_batch} in each pipeline"
    )
    return [Table(degrees, header, rows, right=(0, 1, 4, 5, 6))]


def stage_row(
    data: AmpData, decision: AmpDecision, priced: Breakdown, j: int, shown: Shown | None = None
) -> tuple[str, ...]:
    """One stage: its layers, devices over all pipelines, times, and memory against the limit."""
    first, last = decision.stages[j]
    devices = [device for group in decision.placement[j] for device in group]
    slowest = priced.slowest
    return (
        str(j),
        f"{first}-{last - 1}" if last - first > 1 else str(first),
        names_text([layer.name for layer in data.layers[first:last]]),
        where_text(data, devices, shown),
        seconds_text(priced.stages[slowest][j]),
        seconds_text(priced.links[slowest][j]) if j + 1 < decision.pipeline else "-",
        seconds_text(max(priced.synchronisation[j])),
        memory_text(data, priced, devices),
    )


def where_text(data: AmpData, devices: Sequence[int], shown: Shown | None) -> str:
    """The devices, by the numbers that people know them by."""
    numbers = shown or [(device.node, d) for d, device in enumerate(data.devices)]
    places = [(-1, "")] * (1 + max(number for _, number in numbers))
    for (node, number), device in zip(numbers, data.devices, strict=True):
        places[number] = (node, device.type)
    return devices_text(places, [numbers[d][1] for d in devices])


def memory_text(data: AmpData, priced: Breakdown, devices: list[int]) -> str:
    """What the device nearest to its limit holds, and that limit."""
    if priced.peak_bytes is None or data.memory is None:
        return "-"
    limits = data.memory.device_bytes
    peak = priced.peak_bytes

    def left(device: int) -> float:
        return limits[data.devices[device].type] - peak[device]

    tightest = min(devices, key=left)
    return share_text(peak[tightest], limits[data.devices[tightest].type])
