"""A `hap` decision for people: the ratios per device type, the stages, and every instruction as in
HAP's Figure 11.

`describe` and `show` work from the instance and the decision alone.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hetplan.formulations.hap.data import HapData, HapDecision
from hetplan.formulations.hap.evaluate import Stage, held_bytes, walked
from hetplan.text import Table, bytes_text, counted, grouped, names_text, ranges_text, seconds_text

MOST_STAGES = 60


def instructions(data: HapData, decision: HapDecision) -> list[dict[str, Any]]:
    """Every instruction in order, as JSON types: its position in the program, stage and triple, the
    tensor that it gives (HAP's properties are `tensor | form`), properties before and after, and
    the seconds of a collective, or of the slowest device's computation."""
    taken = walked(data, decision)[1]
    return [
        {
            "position": position,
            "stage": stage,
            "triple": i,
            "kind": data.triples[i].kind,
            "instruction": data.triples[i].instruction,
            "tensor": _tensor(data.triples[i].post),
            "before": list(data.triples[i].pre),
            "after": list(data.triples[i].post),
            "segment": data.triples[i].segment,
            "seconds": seconds,
        }
        for position, (i, (stage, seconds)) in enumerate(zip(decision.program, taken, strict=True))
    ]


def _tensor(properties: Sequence[str]) -> str:
    """The tensor that a triple gives; a dash where it gives nothing."""
    name = properties[0] if properties else "-"
    return name.rpartition("|")[0].strip() or name


def describe(data: HapData, decision: HapDecision) -> list[Table]:
    """Ratios, then stages in order: the collective, how much is computed, which device is the
    slowest."""
    return [_ratios(data, decision), _stages(data, walked(data, decision)[0])]


def _ratios(data: HapData, decision: HapDecision) -> Table:
    """A row for the devices of equal speed, memory and ratios."""
    limits = [] if data.memory is None else data.memory.device_bytes
    alike = grouped(
        ((device.flops_per_second, *limits[j : j + 1], *(row[j] for row in decision.ratios)), j)
        for j, device in enumerate(data.devices)
    )
    rows, held = [], held_bytes(data, decision)
    for members in alike.values():
        first = members[0]
        memory = (f"{bytes_text(held[first])} of {bytes_text(limits[first])}",) if limits else ()
        rows.append(
            (
                ranges_text(members),
                names_text([data.devices[j].name for j in members]),
                f"{data.devices[first].flops_per_second / 1e12:.4g}",
                *(f"{100 * row[first]:.3f}" for row in decision.ratios),
                *memory,
            )
        )
    segments = tuple(f"% of segment {k}" for k in range(data.segments))
    header = ("devices", "names", "TFLOP/s", *segments, *(("holds",) if limits else ()))
    return Table(
        "sharding ratios per device", header, tuple(rows), right=tuple(range(2, len(header)))
    )


def _stages(data: HapData, stages: Sequence[Stage]) -> Table:
    rows = []
    for stage in stages[:MOST_STAGES]:
        busy = max(stage.compute_seconds)
        slowest = data.devices[stage.compute_seconds.index(busy)].name if busy > 0 else "-"
        waiting, took = seconds_text(stage.comm_seconds), seconds_text(busy)
        begins, many = stage.begins_with or "-", str(stage.computations)
        rows.append((str(stage.stage), begins, waiting, many, took, slowest))
    more, done = len(stages) - len(rows), sum(s.computations + (s.stage > 0) for s in stages)
    header = ("stage", "begins with", "takes", "computations", "slowest takes", "slowest")
    title = f"{counted(done, 'instruction')} in {counted(len(stages), 'stage')}"
    notes = (f"{more} more stages",) if more else ()
    return Table(title, header, tuple(rows), notes, right=(0, 2, 3, 4))


def listing(listed: Sequence[dict[str, Any]]) -> Table:
    """The program as in Figure 11: instruction, tensor, properties before and after, cost,
    stage."""
    rows = tuple(
        (
            str(row["position"]),
            str(row["stage"]),
            row["instruction"],
            row["tensor"],
            ", ".join(row["before"]) or "-",
            ", ".join(row["after"]),
            seconds_text(row["seconds"]),
        )
        for row in listed
    )
    header = ("#", "stage", "instruction", "tensor", "before", "after", "takes")
    note = "takes: a collective's time, or the slowest device's; a stage begins at each collective"
    return Table(counted(len(rows), "instruction"), header, rows, (note,), right=(0, 1, 6))


def show(data: HapData, decision: HapDecision) -> tuple[list[Table], dict[str, Any]]:
    """Ratios, stages and listing; and the same as JSON types."""
    stages, listed = walked(data, decision)[0], instructions(data, decision)
    document = {
        "devices": [device.name for device in data.devices],
        "ratios": decision.ratios,
        "seconds": sum(stage.seconds for stage in stages),
        "stages": [asdict(stage) for stage in stages],
        "instructions": listed,
    }
    if data.memory is not None:
        document["held_bytes"] = held_bytes(data, decision)
        document["device_bytes"] = data.memory.device_bytes
    return [_ratios(data, decision), _stages(data, stages), listing(listed)], document
