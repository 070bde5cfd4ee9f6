"""An `amp` decision as tables for people: the degrees, then one line per stage."""

from hetplan.formulations.amp.data import AmpData, AmpDecision
from hetplan.formulations.amp.evaluate import Breakdown, price
from hetplan.text import Table, devices_text, names_text, seconds_text, share_text


def describe(data: AmpData, decision: AmpDecision) -> list[Table]:
    """The stages of a feasible decision; times are of the slowest pipeline, sizes of the fullest
    device."""
    priced = price(data, decision)
    rows = tuple(stage_row(data, decision, priced, j) for j in range(decision.pipeline))
    header = ("stage", "layers", "", "devices", "micro-batch", "send", "sync", "memory")
    degrees = (
        f"pipeline {decision.pipeline} x data {decision.data} x tensor {decision.tensor}, "
        f"{priced.gas} micro-batches of {decision.micro_batch} in each pipeline"
    )
    return [Table(degrees, header, rows, right=(0, 1, 4, 5, 6))]


def stage_row(data: AmpData, decision: AmpDecision, priced: Breakdown, j: int) -> tuple[str, ...]:
    """One stage: its layers, devices over all pipelines, times, and memory against the limit."""
    first, last = decision.stages[j]
    devices = [device for group in decision.placement[j] for device in group]
    slowest = priced.slowest
    return (
        str(j),
        f"{first}-{last - 1}" if last - first > 1 else str(first),
        names_text([layer.name for layer in data.layers[first:last]]),
        devices_text([(device.node, device.type) for device in data.devices], devices),
        seconds_text(priced.stages[slowest][j]),
        seconds_text(priced.links[slowest][j]) if j + 1 < decision.pipeline else "-",
        seconds_text(max(priced.synchronisation[j])),
        memory_text(data, priced, devices),
    )


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
