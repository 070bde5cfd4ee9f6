"""A `hap` decision as tables for people: the ratios per device type, and the stages of the program."""

from __future__ import annotations

from hetplan.formulations.hap.data import Communication, HapData, HapDecision
from hetplan.text import Table, names_text, ranges_text, seconds_text

MOST_STAGES = 60


def describe(data: HapData, decision: HapDecision) -> list[Table]:
    """Ratios, then stages in order: the collective, how much is computed, which device is the slowest."""
    return [_ratios(data, decision), _stages(data, decision)]


def _ratios(data: HapData, decision: HapDecision) -> Table:
    groups: dict[tuple[float, ...], list[int]] = {}
    for j, device in enumerate(data.devices):
        key = (device.flops_per_second, *(row[j] for row in decision.ratios))
        groups.setdefault(key, []).append(j)
    rows = []
    for (speed, *shares), members in groups.items():
        names = names_text([data.devices[j].name for j in members])
        rows.append((ranges_text(members), names, f"{speed / 1e12:.4g}", *(f"{100 * b:.3f}" for b in shares)))
    header = ("devices", "names", "TFLOP/s", *(f"% of segment {k}" for k in range(data.segments)))
    return Table("sharding ratios per device", header, tuple(rows), right=tuple(range(2, len(header))))


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
                busy[j] += (triple.fixed_flops + triple.shared_flops * shares[j]) / device.flops_per_second
        slowest = max(range(len(busy)), key=busy.__getitem__)
        name = data.devices[slowest].name if busy[slowest] > 0 else "-"
        rows.append(
            (str(number), opening, seconds_text(waiting), str(count), seconds_text(busy[slowest]), name)
        )
    notes = (f"{len(rows) - MOST_STAGES} more stages",) if len(rows) > MOST_STAGES else ()
    header = ("stage", "begins with", "takes", "computations", "slowest takes", "slowest")
    return Table(
        f"{len(decision.program)} instructions in {len(rows)} stages", header, tuple(rows[:MOST_STAGES]), notes,
        right=(0, 2, 3, 4),
    )  # fmt: skip
