"""A `hap` decision as tables for people: the ratios per device type, and the stages of the
program."""

from __future__ import annotations

from collections.abc import Sequence

from hetplan.formulations.hap.data import Communication, HapData, HapDecision
from hetplan.formulations.hap.evaluate import held_bytes
from hetplan.text import Table, bytes_text, names_text, ranges_text, seconds_text

MOST_STAGES = 60


def describe(
    data: HapData, decision: HapDecision, shown: Sequence[tuple[int, int]] | None = None
) -> list[Table]:
    """Ratios, then stages in order: the collective, how much is computed, which device is the
    slowest.

    shown [m]: numbers of (node, device) in another cluster.
    """
    numbers = range(len(data.devices)) if shown is None else [number for _, number in shown]
    return [_ratios(data, decision, numbers), _stages(data, decision)]


def _ratios(data: HapData, decision: HapDecision, numbers: Sequence[int]) -> Table:
    groups: dict[tuple[float, ...], list[int]] = {}
    limits = [] if data.memory is None else data.memory.device_bytes
    for j, device in enumerate(data.devices):
        key = (device.flops_per_second, *limits[j : j + 1], *(row[j] for row in decision.ratios))
        groups.setdefault(key, []).append(j)
    rows, held = [], held_bytes(data, decision)
    for members in groups.values():
        names, first = names_text([data.devices[j].name for j in members]), members[0]
        speed, shares = (
            data.devices[first].flops_per_second,
            (row[first] for row in decision.ratios),
        )
        memory = (f"{bytes_text(held[first])} of {bytes_text(limits[first])}",) if limits else ()
        rows.append(
            (
                ranges_text(numbers[j] for j in members),
                names,
                f"{speed / 1e12:.4g}",
                *(f"{100 * b:.3f}" for b in shares),
                *memory,
            )
        )
    segments = tuple(f"% of segment {k}" for k in range(data.segments))
    header = ("devices", "names", "TFLOP/s", *segments, *(("holds",) if limits else ()))
    return Table(
        "sharding ratios per device", header, tuple(rows), right=tuple(range(2, len(header)))
    )


def _stages(data: HapData, decision: HapDecision) -> Table:
    stages: list[list[int]] = [[]]
    for i in decision.program:
        if isinstance(data.triples[i], Communication):
            stages.append([])
        stages[-1].append(i)
    rows = []
    for number, members in enumerate(stages):
        busy, opening, waiting = [0.0] * len(data.devices), "-", 0.0
        count = 0
        for i in members:
            triple = data.triples[i]
            shares = decision.ratios[triple.segment]
            if isinstance(triple, Communication):
                opening = triple.instruction
                waiting = triple.fixed_seconds + triple.shared_seconds * max(shares)
                continue
            count += 1
            for j, device in enumerate(data.devices):
                busy[j] += (
                    triple.fixed_flops + triple.shared_flops * shares[j]
                ) / device.flops_per_second
        slowest = max(range(len(busy)), key=busy.__getitem__)
        name = data.devices[slowest].name if busy[slowest] > 0 else "-"
        rows.append(
            (
                str(number),
                opening,
                seconds_text(waiting),
                str(count),
                seconds_text(busy[slowest]),
                name,
            )
        )
    notes = (f"{len(rows) - MOST_STAGES} more stages",) if len(rows) > MOST_STAGES else ()
    header = ("stage", "begins with", "takes", "computations", "slowest takes", "slowest")
    return Table(
        f"{len(decision.program)} instructions in {len(rows)} stages", header, tuple(rows[:MOST_STAGES]), notes,
        right=(0, 2, 3, 4),
    )  # fmt: skip
