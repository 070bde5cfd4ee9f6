"""A `ditto` decision as a table for people: one line per stage."""

from __future__ import annotations

from hetplan.formulations.ditto.data import DittoData, DittoDecision
from hetplan.formulations.ditto.evaluate import price, slowest_stage, stage_seconds
from hetplan.text import Table, seconds_text


def describe(data: DittoData, decision: DittoDecision) -> list[Table]:
    """The stages of a feasible template, with T1, T2 and T3 in the notes."""
    times = [stage_seconds(data, stage) for stage in decision.stages]
    slowest = slowest_stage(times)
    rows = []
    for k, (stage, seconds) in enumerate(zip(decision.stages, times, strict=True)):
        share = (
            "slowest"
            if k == slowest
            else f"{100 * seconds / times[slowest]:.1f} %"
            if times[slowest]
            else "-"
        )
        layers = (
            f"{stage.first}-{stage.last - 1}" if stage.last - stage.first > 1 else f"{stage.first}"
        )
        rows.append((f"{k}", layers, stage.type, f"{stage.devices}", seconds_text(seconds), share))
    parts = price(data.micro_batches, times).parts
    used = sum(stage.devices for stage in decision.stages)
    available = sum(kind.nodes for kind in data.device_types) * data.devices_per_node
    title = (
        f"{data.layers} layers on {len(times)} stages, {used} of {available} devices, "
        f"{data.micro_batches} micro-batches"
    )
    header = ("stage", "layers", "type", "devices", "per micro-batch", "of the slowest")
    notes = tuple(
        f"{name} {seconds_text(parts[name])}: {meaning}"
        for name, meaning in (
            ("T1", "the first micro-batch through all stages"),
            ("T2", "the steady phase, paced by the slowest stage"),
            ("T3", "the last micro-batch from the slowest stage on"),
        )
    )
    return [Table(title, header, tuple(rows), notes=notes, right=(0, 3, 4, 5))]
