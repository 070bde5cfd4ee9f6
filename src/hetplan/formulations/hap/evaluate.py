"""The independent evaluator of problem `hap`: it judges a program and its ratios from the data
alone.

Sets   i in program triples, in the program's order; j in 0..m-1 devices, k in 0..g-1 segments.
Data   see data.py.

Constraints, each checked by the function of its number ((1) to (4) as in data.py):
(1) the pre of each instruction is among the posts of the earlier ones
(2) the goal is among all posts
(3) no triple is used twice
(4) with memory, sum over the program of (P_i + A_i B[segment_i][j]) <= W_j for all j
(5) ratios has one row per segment with one entry per device, and sum_j B[k][j] = 1
(6) every number in the program is that of a triple
(7) the program is the given one, where the instance asks for ratios only

Objective  sum over stages of (comm + max_j compute_j), a stage beginning at each communication:
comm      = fixed_seconds + shared_seconds max_j B[k][j]
compute_j = sum over the stage's compute instructions of (F + S B[k][j]) / v_j
Source HAP, Section 3.2; (4) is hetplan's.

`describe` and `show` give a decision for people, from the instance and the decision alone: the
ratios per device type, the stages, and every instruction as in HAP's Figure 11.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from operator import add
from typing import Any

from hetplan.formulations.hap.data import Communication, HapData, HapDecision
from hetplan.solvers.registry import Evaluation
from hetplan.text import Table, bytes_text, counted, grouped, names_text, ranges_text, seconds_text

# Ratios that sum to 1 up to this are taken as they stand.
SUM_TOLERANCE = 1e-9
# Bytes beyond a device's memory by up to this share of it are rounding.
MEMORY_TOLERANCE = 1e-9


def evaluate(data: HapData, decision: HapDecision) -> Evaluation:
    """The objective of `decision` in seconds with its parts, or every violation.

    (4) is checked where all others hold, since the program and the ratios tell the bytes.
    """
    violations = [
        *program_violations(data, decision.program),
        *ratios_are_shares(data, decision.ratios),
    ]
    if not violations:
        violations = list(devices_have_memory(data, decision))
    if violations:
        return Evaluation(None, tuple(violations))
    stages, _ = walked(data, decision)
    communication = [stage.comm_seconds for stage in stages]
    computation = [max(stage.compute_seconds) for stage in stages]
    parts = {"communication": math.fsum(communication), "computation": math.fsum(computation)}
    return Evaluation(math.fsum(communication + computation), parts=parts)


@dataclass
class Stage:
    """The instructions from one communication to the next."""

    stage: int  # its number
    begins_with: str  # the communication's instruction; empty in the first stage
    comm_seconds: float  # the communication's time
    compute_seconds: list[float]  # [m] seconds that each device computes
    computations: int = 0  # number of compute instructions

    @property
    def total_seconds(self) -> float:
        """The stage's time: the communication, then the slowest device's computation."""
        return self.comm_seconds + max(self.compute_seconds)


def walked(data: HapData, decision: HapDecision) -> tuple[list[Stage], list[tuple[int, float]]]:
    """(The stages of a program in order, for each instruction the number of its stage and its
    seconds). The seconds of a computation are those on its slowest device."""
    idle = [0.0] * len(data.devices)
    stages = [Stage(0, "", 0.0, idle)]
    instructions: list[tuple[int, float]] = []
    for i in decision.program:
        triple = data.triples[i]
        shares = decision.ratios[triple.segment]
        if isinstance(triple, Communication):
            seconds = triple.fixed_seconds + triple.shared_seconds * max(shares)
            stages.append(Stage(len(stages), triple.instruction, seconds, idle))
        else:
            busy = [
                (triple.fixed_flops + triple.shared_flops * share) / device.flops_per_second
                for share, device in zip(shares, data.devices, strict=True)
            ]
            seconds = max(busy)
            stage = stages[-1]
            stage.compute_seconds = list(map(add, stage.compute_seconds, busy))
            stage.computations += 1
        instructions.append((stages[-1].stage, seconds))
    return stages, instructions


def program_violations(data: HapData, program: list[int]) -> Iterator[str]:
    """Every violation of the constraints on the program alone: (1) to (3), (6) and (7)."""
    yield from instructions_have_their_inputs(data, program)
    yield from goal_is_established(data, program)
    yield from triples_are_used_once(program)
    yield from triples_exist(data, program)
    yield from program_is_the_given_one(data, program)


def instructions_have_their_inputs(data: HapData, program: list[int]) -> Iterator[str]:  # (1)
    """A violation for each property that an instruction needs and no earlier one establishes."""
    established: set[str] = set()
    for position, i in existing_triples(data, program):
        triple = data.triples[i]
        for needed in triple.pre:
            if needed not in established:
                yield (
                    f"program[{position}] ({triple.instruction}) needs {needed!r}, "
                    "which nothing before it gives"
                )
        # also where an input is missing: later instructions do not lack it once more
        established.update(triple.post)


def goal_is_established(data: HapData, program: list[int]) -> Iterator[str]:  # (2)
    """A violation where no instruction establishes the goal."""
    for _, i in existing_triples(data, program):
        if data.goal in data.triples[i].post:
            return
    yield f"the program does not establish the goal {data.goal!r}"


def triples_are_used_once(program: list[int]) -> Iterator[str]:  # (3)
    """A violation for each repetition of a triple."""
    first: dict[int, int] = {}
    for position, i in enumerate(program):
        if i in first:
            yield f"program[{position}] repeats triple {i} of program[{first[i]}]"
        else:
            first[i] = position


def devices_have_memory(data: HapData, decision: HapDecision) -> Iterator[str]:  # (4)
    """A violation for each device whose memory the bytes of the program exceed. Needs (5)
    and (6)."""
    if data.memory is None:
        return
    for j, needed in enumerate(held_bytes(data, decision)):
        capacity = data.memory.device_bytes[j]
        if needed > capacity * (1 + MEMORY_TOLERANCE):
            name = data.devices[j].name
            yield f"device {j} ({name}) holds {needed:.6g} bytes, it has {capacity:.6g}"


def ratios_are_shares(data: HapData, ratios: list[list[float]]) -> Iterator[str]:  # (5)
    """A violation where the number of rows is not that of segments, for each row whose number of
    entries is not that of devices, and for each row that does not sum to 1."""
    count, segments = len(data.devices), data.segments
    if len(ratios) != segments:
        yield f"ratios has {len(ratios)} rows, expected one per segment ({segments})"
    for k, row in enumerate(ratios):
        if len(row) != count:
            yield f"ratios[{k}] has {len(row)} entries, expected one per device ({count})"
        total = math.fsum(row)
        if abs(total - 1.0) > SUM_TOLERANCE:
            yield f"ratios[{k}] sums to {total!r}, expected 1"


def triples_exist(data: HapData, program: list[int]) -> Iterator[str]:  # (6)
    """A violation for each number in the program that no triple has."""
    count = len(data.triples)
    for position, i in enumerate(program):
        if i >= count:
            yield f"program[{position}] is {i}, expected less than {count}"


def program_is_the_given_one(data: HapData, program: list[int]) -> Iterator[str]:  # (7)
    """A violation where the instance gives a program and this is another."""
    if data.program is not None and data.program != program:
        yield "the program is not the one that the instance asks the ratios for"


def existing_triples(data: HapData, program: list[int]) -> Iterator[tuple[int, int]]:
    """(position, triple number) of each entry of the program that is the number of a triple. (6)
    reports the other entries."""
    for position, i in enumerate(program):
        if i < len(data.triples):
            yield position, i


def held_bytes(data: HapData, decision: HapDecision) -> list[float]:
    """[m] bytes that the program leaves on each device, the left side of (4); 0 without memory."""
    terms: list[list[float]] = [[] for _ in data.devices]
    for i in decision.program:
        triple = data.triples[i]
        # fields that are left out, as all are without memory, stand for 0 bytes
        fixed = triple.fixed_bytes or 0.0
        shared = triple.shared_bytes or 0.0
        for device_terms, share in zip(terms, decision.ratios[triple.segment], strict=True):
            device_terms.append(fixed + shared * share)
    return [math.fsum(device_terms) for device_terms in terms]


MOST_STAGES = 60  # rows of the table of stages


def instructions(data: HapData, decision: HapDecision) -> list[dict[str, Any]]:
    """Every instruction in order, as JSON types.

    `stage` and `triple` are numbers, `tensor` is the tensor that the instruction gives (HAP's
    properties are named `tensor | form`), `before` and `after` are the properties that it needs and
    gives, and `seconds` are those on the slowest device.
    """
    rows = []
    _, stage_and_seconds = walked(data, decision)
    for position, i in enumerate(decision.program):
        triple = data.triples[i]
        stage, seconds = stage_and_seconds[position]
        rows.append(
            {
                "position": position,
                "stage": stage,
                "triple": i,
                "kind": triple.kind,
                "instruction": triple.instruction,
                "tensor": _tensor(triple.post),
                "before": list(triple.pre),
                "after": list(triple.post),
                "segment": triple.segment,
                "seconds": seconds,
            }
        )
    return rows


def _tensor(properties: Sequence[str]) -> str:
    """The tensor of the first property that a triple gives; a dash where it gives nothing."""
    name = properties[0] if properties else "-"
    return name.rpartition("|")[0].strip() or name


def describe(data: HapData, decision: HapDecision) -> list[Table]:
    """Two tables of a feasible decision: the ratios, then the stages in order, each with its
    communication, the number of its computations and its slowest device."""
    stages, _ = walked(data, decision)
    return [_ratios(data, decision), _stages(data, stages)]


def _ratios(data: HapData, decision: HapDecision) -> Table:
    """The table of ratios, with one row for all devices of equal speed, memory and ratios."""
    capacity = None if data.memory is None else data.memory.device_bytes
    used = held_bytes(data, decision)

    def row_key(j: int) -> tuple[float, ...]:
        """Speed, memory and ratios of device j; devices with the same key share a row."""
        speed = data.devices[j].flops_per_second
        ratios = [row[j] for row in decision.ratios]
        if capacity is None:
            return (speed, *ratios)
        return (speed, capacity[j], *ratios)

    rows = []
    for members in grouped((row_key(j), j) for j in range(len(data.devices))).values():
        first = members[0]
        row = [
            ranges_text(members),
            names_text([data.devices[j].name for j in members]),
            f"{data.devices[first].flops_per_second / 1e12:.4g}",
            *(f"{100 * ratios[first]:.3f}" for ratios in decision.ratios),
        ]
        if capacity is not None:
            row.append(f"{bytes_text(used[first])} of {bytes_text(capacity[first])}")
        rows.append(tuple(row))
    header = ["devices", "names", "TFLOP/s"]
    header += [f"% of segment {k}" for k in range(data.segments)]
    if capacity is not None:
        header.append("holds")
    numbers = tuple(range(2, len(header)))
    return Table("sharding ratios per device", tuple(header), tuple(rows), right=numbers)


def _stages(data: HapData, stages: Sequence[Stage]) -> Table:
    """The table of the first MOST_STAGES stages, with the number of further ones in a note."""
    rows = []
    for stage in stages[:MOST_STAGES]:
        busy = max(stage.compute_seconds)
        slowest = data.devices[stage.compute_seconds.index(busy)].name if busy > 0 else "-"
        rows.append(
            (
                str(stage.stage),
                stage.begins_with or "-",
                seconds_text(stage.comm_seconds),
                str(stage.computations),
                seconds_text(busy),
                slowest,
            )
        )
    communications = len(stages) - 1  # the first stage begins with none
    total = sum(stage.computations for stage in stages) + communications
    title = f"{counted(total, 'instruction')} in {counted(len(stages), 'stage')}"
    header = ("stage", "begins with", "takes", "computations", "slowest takes", "slowest")
    more = len(stages) - len(rows)
    notes = (f"{more} more stages",) if more else ()
    return Table(title, header, tuple(rows), notes, right=(0, 2, 3, 4))


def listing(listed: Sequence[dict[str, Any]]) -> Table:
    """The table of a program as in HAP's Figure 11. listed: the rows of `instructions`."""
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
    """(The tables of ratios, stages and instructions, the same as JSON types)."""
    stages, _ = walked(data, decision)
    listed = instructions(data, decision)
    document = {
        "devices": [device.name for device in data.devices],
        "ratios": decision.ratios,
        "seconds": sum(stage.total_seconds for stage in stages),
        "stages": [asdict(stage) for stage in stages],
        "instructions": listed,
    }
    if data.memory is not None:
        document["held_bytes"] = held_bytes(data, decision)
        document["device_bytes"] = data.memory.device_bytes
    return [_ratios(data, decision), _stages(data, stages), listing(listed)], document
