"""The independent evaluator of problem `hap`: semantics and cost of a program, from the data
alone."""

import math
from dataclasses import dataclass
from operator import add

from hetplan.errors import require
from hetplan.formulations.hap.data import Communication, HapData, HapDecision
from hetplan.solvers.registry import Evaluation, objections

# Ratios that sum to 1 up to this are taken as they stand.
SUM_TOLERANCE = 1e-9
# Bytes beyond a device's memory by up to this share of it are rounding.
MEMORY_TOLERANCE = 1e-9


def evaluate(data: HapData, decision: HapDecision) -> Evaluation:
    """Objective in seconds, or what program and ratios break first, or all devices that hold too
    much. Source: HAP, Section 3.2."""
    program = objections(check_program, data, decision.program)
    violations = program + objections(check_ratios, data, decision.ratios)
    violations = violations or _memory_violations(data, decision)
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
