"""The independent evaluator of problem `hap`: semantics and cost of a program, from the data
alone."""

import math

from hetplan.formulations.hap.data import Communication, HapData, HapDecision
from hetplan.solvers.registry import Evaluation

# Ratios that sum to 1 up to this are taken as they stand.
SUM_TOLERANCE = 1e-9
# Bytes beyond a device's memory by up to this share of it are rounding.
MEMORY_TOLERANCE = 1e-9


def evaluate(data: HapData, decision: HapDecision) -> Evaluation:
    """Objective in seconds, or every constraint that `decision` breaks. Source: HAP, Section
    3.2."""
    violations = [
        *program_violations(data, decision.program),
        *_ratio_violations(data, decision.ratios),
    ]
    violations = violations or _memory_violations(data, decision)
    if violations:
        return Evaluation(None, tuple(violations))
    communication, computation = [], []
    speeds = [device.flops_per_second for device in data.devices]
    busy = [0.0] * len(speeds)
    for i in decision.program:
        triple = data.triples[i]
        ratios = decision.ratios[triple.segment]
        if isinstance(triple, Communication):
            computation.append(max(busy))
            busy = [0.0] * len(speeds)
            communication.append(triple.fixed_seconds + triple.shared_seconds * max(ratios))
        else:
            fixed, shared = triple.fixed_flops, triple.shared_flops
            busy = [
                seconds + (fixed + shared * share) / speed
                for seconds, share, speed in zip(busy, ratios, speeds, strict=True)
            ]
    computation.append(max(busy))
    parts = {"communication": math.fsum(communication), "computation": math.fsum(computation)}
    return Evaluation(math.fsum(communication + computation), parts=parts)


def program_violations(data: HapData, program: list[int]) -> list[str]:
    """What makes the program no proof of the goal, one line each."""
    problems: list[str] = []
    known: set[str] = set()
    used: dict[int, int] = {}
    for position, i in enumerate(program):
        if i >= len(data.triples):
            problems.append(f"program[{position}] is {i}, expected less than {len(data.triples)}")
            continue
        if i in used:
            problems.append(f"program[{position}] repeats triple {i} of program[{used[i]}]")
        used.setdefault(i, position)
        missing = [p for p in data.triples[i].pre if p not in known]
        if missing:
            name = data.triples[i].instruction
            problems.append(
                f"program[{position}] ({name}) needs {missing[0]!r}, which nothing before it gives"
            )
        known.update(data.triples[i].post)
    if data.goal not in known:
        problems.append(f"the program does not establish the goal {data.goal!r}")
    if data.program is not None and program != data.program:
        problems.append("the program is not the one that the instance asks the ratios for")
    return problems


def _ratio_violations(data: HapData, ratios: list[list[float]]) -> list[str]:
    problems: list[str] = []
    if len(ratios) != data.segments:
        problems.append(
            f"ratios has {len(ratios)} rows, expected one per segment ({data.segments})"
        )
    for k, row in enumerate(ratios):
        if len(row) != len(data.devices):
            problems.append(
                f"ratios[{k}] has {len(row)} entries, expected one per device ({len(data.devices)})"
            )
        elif abs(math.fsum(row) - 1.0) > SUM_TOLERANCE:
            problems.append(f"ratios[{k}] sums to {math.fsum(row)!r}, expected 1")
    return problems


def held_bytes(data: HapData, decision: HapDecision) -> list[float]:
    """[m] bytes that the program leaves on each device, constraint (4); 0 without memory."""
    held: list[list[float]] = [[] for _ in data.devices]
    for i in decision.program:
        triple = data.triples[i]
        fixed, shared = triple.fixed_bytes or 0.0, triple.shared_bytes or 0.0
        for parts, share in zip(held, decision.ratios[triple.segment], strict=True):
            parts.append(fixed + shared * share)
    return [math.fsum(parts) for parts in held]


def _memory_violations(data: HapData, decision: HapDecision) -> list[str]:
    """(4), of a program and ratios that keep to all else."""
    if data.memory is None:
        return []
    limits = data.memory.device_bytes
    return [
        f"device {j} ({data.devices[j].name}) holds {held:.6g} bytes, it has {limit:.6g}"
        for j, (held, limit) in enumerate(zip(held_bytes(data, decision), limits, strict=True))
        if held > limit * (1 + MEMORY_TOLERANCE)
    ]
