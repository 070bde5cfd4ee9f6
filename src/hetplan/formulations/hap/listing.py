"""A program in full: every instruction as in HAP's Figure 11, and the stages of every device drawn
to scale.

`show` gives both as tables and as JSON types, from the instance and the decision alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hetplan.formulations.hap.data import Communication, HapData, HapDecision
from hetplan.formulations.hap.describe import describe
from hetplan.formulations.hap.evaluate import held_bytes
from hetplan.text import Table, ranges_text, seconds_text

WIDTH = 100
COMPUTING, COMMUNICATING, WAITING = "#", "=", "."


@dataclass(frozen=True)
class Row:
    """One instruction: its place in the program and its stage, the triple's number, what it needs
    and gives.

    seconds: of a collective, or of the slowest device's computation.
    """

    position: int
    stage: int
    triple: int
    kind: str
    instruction: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    segment: int
    seconds: float

    @property
    def tensor(self) -> str:
        """The tensor that it gives (HAP's properties are `tensor | form`)."""
        return self.after[0].rpartition("|")[0].strip() or self.after[0]

    def document(self) -> dict[str, Any]:
        """As JSON types."""
        return {
            "position": self.position,
            "stage": self.stage,
            "triple": self.triple,
            "kind": self.kind,
            "instruction": self.instruction,
            "tensor": self.tensor,
            "before": list(self.before),
            "after": list(self.after),
            "segment": self.segment,
            "seconds": self.seconds,
        }


@dataclass(frozen=True)
class Interval:
    """One stage: the collective that begins it (empty: none), its seconds, and what each device
    computes [m]."""

    begins_with: str
    comm_seconds: float
    compute_seconds: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Until the slowest device is done."""
        return self.comm_seconds + max(self.compute_seconds)

    def document(self, number: int) -> dict[str, Any]:
        """As JSON types."""
        return {
            "stage": number,
            "begins_with": self.begins_with,
            "comm_seconds": self.comm_seconds,
            "compute_seconds": list(self.compute_seconds),
        }


def rows_of(data: HapData, decision: HapDecision) -> list[Row]:
    """Every instruction in order."""
    found, stage = [], 0
    for position, i in enumerate(decision.program):
        triple = data.triples[i]
        shares = decision.ratios[triple.segment]
        if isinstance(triple, Communication):
            stage += 1
            seconds = triple.fixed_seconds + triple.shared_seconds * max(shares)
        else:
            seconds = max(
                (triple.fixed_flops + triple.shared_flops * share) / device.flops_per_second
                for share, device in zip(shares, data.devices, strict=True)
            )
        found.append(
            Row(
                position, stage, i, triple.kind, triple.instruction, tuple(triple.pre), tuple(triple.post),
                triple.segment, seconds,
            )
        )  # fmt: skip
    return found


def stages_of(data: HapData, decision: HapDecision) -> list[Interval]:
    """Every stage in order; the first has no collective."""
    m = len(data.devices)
    begins: list[tuple[str, float]] = [("", 0.0)]
    busy = [[0.0] * m]
    for i in decision.program:
        triple = data.triples[i]
        shares = decision.ratios[triple.segment]
        if isinstance(triple, Communication):
            begins.append(
                (triple.instruction, triple.fixed_seconds + triple.shared_seconds * max(shares))
            )
            busy.append([0.0] * m)
            continue
        for j, device in enumerate(data.devices):
            busy[-1][j] += (
                triple.fixed_flops + triple.shared_flops * shares[j]
            ) / device.flops_per_second
    return [
        Interval(name, seconds, tuple(row))
        for (name, seconds), row in zip(begins, busy, strict=True)
    ]


def listing(data: HapData, decision: HapDecision) -> Table:
    """The program as in Figure 11: instruction, tensor, properties before and after, cost,
    stage."""
    rows = tuple(
        (
            str(row.position),
            str(row.stage),
            row.instruction,
            row.tensor,
            ", ".join(row.before) or "-",
            ", ".join(row.after),
            seconds_text(row.seconds),
        )
        for row in rows_of(data, decision)
    )
    header = ("#", "stage", "instruction", "tensor", "before", "after", "takes")
    notes = (
        "takes: a collective's time, or the slowest device's; a stage begins at each collective",
    )
    return Table(f"{len(rows)} instructions", header, rows, notes, right=(0, 1, 6))


def drawing(data: HapData, decision: HapDecision, width: int = WIDTH) -> Table:
    """The stages of every kind of device over time, `width` characters for the whole program."""
    stages = stages_of(data, decision)
    total = sum(stage.seconds for stage in stages)
    groups: dict[tuple[float, ...], list[int]] = {}
    for j, device in enumerate(data.devices):
        groups.setdefault(
            (device.flops_per_second, *(row[j] for row in decision.ratios)), []
        ).append(j)
    rows = [
        (
            ranges_text(members),
            data.devices[members[0]].name,
            line(stages, members[0], total, width),
        )
        for members in groups.values()
    ]
    rows.append(("", "", scale(stages, total, width)))
    notes = (
        f"{COMPUTING} computing, {COMMUNICATING} collective, {WAITING} waiting for the slowest; below: | a stage "
        f"begins (+ several); {seconds_text(total / width)} per character",
    )
    return Table(
        f"{len(stages)} stages, {seconds_text(total)}",
        ("devices", "kind", "time"),
        tuple(rows),
        notes,
    )


def line(stages: list[Interval], device: int, total: float, width: int) -> str:
    """What a device does at the middle of each character's time."""
    text, begin, at = [], 0.0, 0
    for c in range(width):
        moment = (c + 0.5) / width * total
        while at + 1 < len(stages) and moment >= begin + stages[at].seconds:
            begin, at = begin + stages[at].seconds, at + 1
        inside = moment - begin - stages[at].comm_seconds
        busy = stages[at].compute_seconds[device]
        text.append(COMMUNICATING if inside < 0 else COMPUTING if inside < busy else WAITING)
    return "".join(text)


def scale(stages: list[Interval], total: float, width: int) -> str:
    """Where stages begin."""
    marks, begin = [" "] * width, 0.0
    for stage in stages:
        at = min(width - 1, int(begin / total * width)) if total > 0 else 0
        marks[at] = "|" if marks[at] == " " else "+"
        begin += stage.seconds
    return "".join(marks)


def show(data: HapData, decision: HapDecision) -> tuple[list[Table], dict[str, Any]]:
    """Ratios, drawing and listing; and the same as JSON types."""
    stages = stages_of(data, decision)
    document = {
        "devices": [device.name for device in data.devices],
        "ratios": decision.ratios,
        "seconds": sum(stage.seconds for stage in stages),
        "stages": [stage.document(number) for number, stage in enumerate(stages)],
        "instructions": [row.document() for row in rows_of(data, decision)],
    }
    if data.memory is not None:
        document["held_bytes"] = held_bytes(data, decision)
        document["device_bytes"] = data.memory.device_bytes
    return [describe(data, decision)[0], drawing(data, decision), listing(data, decision)], document
