"""The independent evaluator of problem `hap`: semantics and cost of a program, from the data
alone.

`describe` and `show` give a decision for people, from the instance and the decision alone: the
ratios per device type, the stages, and every instruction as in HAP's Figure 11.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from operator import add
from typing import Any

from hetplan.errors import require
from hetplan.formulations.hap.data import Communication, HapData, HapDecision
from hetplan.solvers.registry import Evaluation, objections
from hetplan.text import Table, bytes_text, counted, grouped, names_text, ranges_text, seconds_text

# Ratios that sum to 1 up to this are taken as they stand.
SUM_TOLERANCE = 1e-9
# Bytes beyond a device's memory by up to this share of it are rounding.
MEMORY_TOLERANCE = 1e-9


def evaluate(data: HapData, decision: HapDecision) -> Evaluation:
    """Objective in seconds, or what program and ratios break first, or all devices that hold too
    much. Source: HAP, Section 3.2."""
    violations = (
        objections(check_program, data, decision.program)
        + objections(check_ratios, data, decision.ratios)
    ) or _memory_violations(data, decision)
    if violations:
        return Evaluation(None, violations)
    stages, _ = walked(data, decision)
    communication = [stage.comm_seconds for stage in stages]
    computation = [max(stage.compute_seconds) for stage in stages]
    parts = {"communication": math.fsum(communication), "computation": math.fsum(computation)}
    return Evaluation(math.fsum(communication + computation), parts=parts)


@dataclass
class Stage:
    """What happens from one collective to the next. begins_with: the collective; empty in the first
    stage. compute_seconds [m]: of each device."""

    stage: int
    begins_with: str
    comm_seconds: float
    compute_seconds: list[float]
    computations: int = 0

    @property
    def seconds(self) -> float:
        """Until the slowest device is done."""
        return self.comm_seconds + max(self.compute_seconds)


def walked(data: HapData, decision: HapDecision) -> tuple[list[Stage], list[tuple[int, float]]]:
    """Every stage in order; and of every instruction its stage and the seconds of a collective, or
    of the slowest device's computation."""
    idle = [0.0] * len(data.devices)
    stages, taken = [Stage(0, "", 0.0, idle)], list[tuple[int, float]]()
    for triple in (data.triples[i] for i in decision.program):
        shares = decision.ratios[triple.segment]
        if isinstance(triple, Communication):
            seconds = triple.fixed_seconds + triple.shared_seconds * max(shares)
            stages.append(Stage(len(stages), triple.instruction, seconds, idle))
        else:
            busy = [
                (triple.fixed_flops + triple.shared_flops * share) / device.flops_per_second
                for share, device in zip(shares, data.devices, strict=True)
            ]
            at, seconds = stages[-1], max(busy)
            at.compute_seconds = list(map(add, at.compute_seconds, busy))
            at.computations += 1
        taken.append((stages[-1].stage, seconds))
    return stages, taken


def check_program(data: HapData, program: list[int]) -> None:
    """The program is a proof of the goal. Raises InputError with what it breaks first."""
    known: set[str] = set()
    used: dict[int, int] = {}
    for position, i in enumerate(program):
        here, count = f"program[{position}]", len(data.triples)
        require(i < count, f"{here} is {i}, expected less than {count}")
        before = used.setdefault(i, position)
        require(before == position, f"{here} repeats triple {i} of program[{before}]")
        triple = data.triples[i]
        missing = next((p for p in triple.pre if p not in known), None)
        needs = f"{here} ({triple.instruction}) needs {missing!r}"
        require(missing is None, f"{needs}, which nothing before it gives")
        known.update(triple.post)
    require(data.goal in known, f"the program does not establish the goal {data.goal!r}")
    require(
        data.program in (None, program),
        "the program is not the one that the instance asks the ratios for",
    )


def check_ratios(data: HapData, ratios: list[list[float]]) -> None:
    """One row per segment with one share per device, which sum to 1."""
    count, g = len(data.devices), data.segments
    require(len(ratios) == g, f"ratios has {len(ratios)} rows, expected one per segment ({g})")
    for k, row in enumerate(ratios):
        has, total = f"ratios[{k}] has {len(row)} entries", math.fsum(row)
        require(len(row) == count, f"{has}, expected one per device ({count})")
        require(abs(total - 1.0) <= SUM_TOLERANCE, f"ratios[{k}] sums to {total!r}, expected 1")


def held_bytes(data: HapData, decision: HapDecision) -> list[float]:
    """[m] bytes that the program leaves on each device, constraint (4); 0 without memory."""
    held: list[list[float]] = [[] for _ in data.devices]
    for i in decision.program:
        triple = data.triples[i]
        fixed, shared = triple.fixed_bytes or 0.0, triple.shared_bytes or 0.0
        for parts, share in zip(held, decision.ratios[triple.segment], strict=True):
            parts.append(fixed + shared * share)
    return [math.fsum(parts) for parts in held]


def _memory_violations(data: HapData, decision: HapDecision) -> tuple[str, ...]:
    """(4), of a program and ratios that keep to all else."""
    limits = data.memory.device_bytes if data.memory else [math.inf] * len(data.devices)
    return tuple(
        f"device {j} ({data.devices[j].name}) holds {held:.6g} bytes, it has {limit:.6g}"
        for j, (held, limit) in enumerate(zip(held_bytes(data, decision), limits, strict=True))
        if held > limit * (1 + MEMORY_TOLERANCE)
    )


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
