"""A `poplar` decision as a table for people: devices that do the same in one line."""

from itertools import groupby

from hetplan.formulations.poplar.data import PoplarData, PoplarDecision
from hetplan.formulations.poplar.evaluate import evaluate, step_seconds
from hetplan.text import Table, grouped, ranges_text, seconds_text

Pieces = tuple[tuple[int, int], ...]


def pieces_of(data: PoplarData, decision: PoplarDecision) -> list[Pieces]:
    """[n] what each device processes, in order: (times, micro-batch), equal neighbours joined.

    ZeRO 0 and 1: full micro-batches and the last one. ZeRO 2 and 3: all steps, those without
    samples as 0.
    """
    if decision.devices is not None:
        shares = [
            (divmod(share.samples, share.micro_batch or 1), share.micro_batch)
            for share in decision.devices
        ]
        return [
            tuple(piece for piece in ((full, batch), (1, last)) if piece[0] and piece[1])
            for (full, last), batch in shares
        ]
    steps = decision.steps or []
    per_device = []
    for i in range(len(data.devices)):
        rows = [(step.micro_batches[i], step.count) for step in steps]
        joined = [
            (sum(n for _, n in same), batch)
            for batch, same in groupby(rows, key=lambda row: row[0])
        ]
        per_device.append(tuple(joined))
    return per_device


def busy_seconds(data: PoplarData, pieces: list[Pieces]) -> list[float]:
    """[n] computing time of each device."""
    return [
        sum(times * step_seconds(device, batch) for times, batch in row)
        for device, row in zip(data.devices, pieces, strict=True)
    ]


def describe(data: PoplarData, decision: PoplarDecision) -> list[Table]:
    """The plan of a feasible decision."""
    pieces = pieces_of(data, decision)
    busy = busy_seconds(data, pieces)
    parts = evaluate(data, decision).parts
    same = grouped(((device.name, pieces[i]), i) for i, device in enumerate(data.devices))
    rows = tuple(
        (
            f"{len(members)} {name} ({ranges_text(members)})",
            str(sum(times * batch for times, batch in row)),
            " + ".join(f"{times} x {batch}" for times, batch in row) or "nothing",
            f"{len(data.devices[members[0]].step_seconds)}",
            seconds_text(busy[members[0]]),
        )
        for (name, row), members in same.items()
    )
    title = (
        f"ZeRO {data.zero_stage}, {data.global_batch} samples: "
        f"{seconds_text(parts['compute_seconds'])} of "
        f"computation, {seconds_text(parts['comm_seconds'])} of communication"
    )
    header = ("devices", "samples each", "micro-batches", "largest that fits", "busy")
    note = (
        f"under-utilisation (Poplar, eq. 4): {parts['under_utilisation']:.4g} samples at peak speed"
    )
    return [Table(title, header, rows, (note,), right=(1, 3, 4))]
