"""The independent evaluator: feasibility and objective of a decision, from the definitions alone.

ZeRO 0, 1:  T = max_i ( floor(g_i / b_i) t_i(b_i) + t_i(g_i mod b_i) ) + C       (Poplar eq. 1)
ZeRO 2, 3:  T = sum_s ( max_i t_i(b_is) + C )                                (Algorithm 2, line 24)
Beside it   U = sum_i idle_i p_i                                                           (eq. 4)
with idle_i = time to the slowest (eq. 2) and p_i = max_b b / t_i(b) (eq. 3).

`describe` gives a decision as a table for people: devices that do the same in one line.
"""

from itertools import groupby

from hetplan.errors import require
from hetplan.formulations.poplar.data import Device, PoplarData, PoplarDecision, Share, Step
from hetplan.solvers.registry import Evaluation, objections
from hetplan.text import Table, grouped, ranges_text, seconds_text


def evaluate(data: PoplarData, decision: PoplarDecision) -> Evaluation:
    """T in seconds, or the first broken constraint.

    parts: compute_seconds and comm_seconds (they add up to T), idle_seconds (summed over devices)
    and under_utilisation (eq. 4, in samples: what the idle devices could have processed at peak
    speed).
    """
    if data.stepwise and decision.steps is not None:
        return _evaluate_steps(data, decision.steps)
    if not data.stepwise and decision.devices is not None:
        return _evaluate_shares(data, decision.devices)
    has, expected = ("devices", "steps") if data.stepwise else ("steps", "devices")
    return Evaluation(
        None, (f"decision has {has}, expected {expected} for ZeRO {data.zero_stage}",)
    )


def step_seconds(device: Device, batch: int) -> float:
    """t(batch) of one micro-batch; t(0) = 0."""
    return device.step_seconds[batch - 1] if batch else 0.0


def _evaluate_shares(data: PoplarData, shares: list[Share]) -> Evaluation:
    broken = objections(check_shares, data, shares)
    if broken:
        return Evaluation(None, broken)
    parts = [divmod(s.samples, s.micro_batch) if s.samples else (0, 0) for s in shares]
    busy = [
        full * step_seconds(device, share.micro_batch if full else 0) + step_seconds(device, last)
        for device, share, (full, last) in zip(data.devices, shares, parts, strict=True)
    ]
    compute = max(busy)
    return _evaluation(data, compute, data.comm_seconds, [compute - seconds for seconds in busy])


def check_shares(data: PoplarData, shares: list[Share]) -> None:
    """One share per device, each with a micro-batch that it holds; they add up to the batch."""
    has, count = f"decision.devices has {len(shares)} entries", len(data.devices)
    require(len(shares) == count, f"{has}, expected one per device ({count})")
    for i, (device, share) in enumerate(zip(data.devices, shares, strict=True)):
        least, largest = min(share.samples, 1), len(device.step_seconds)
        got = f"decision.devices[{i}].micro_batch is {share.micro_batch}"
        expected = f"{least} to {largest} ({share.samples} samples on {device.name})"
        require(least <= share.micro_batch <= largest, f"{got}, expected {expected}")
    check_total(data, sum(share.samples for share in shares))


def check_total(data: PoplarData, total: int) -> None:
    """The samples are the global batch."""
    wanted = data.global_batch
    require(total == wanted, f"samples add up to {total}, expected global_batch ({wanted})")


def _evaluate_steps(data: PoplarData, steps: list[Step]) -> Evaluation:
    broken = objections(check_steps, data, steps)
    if broken:
        return Evaluation(None, broken)
    compute, idle = 0.0, [0.0] * len(data.devices)
    for step in steps:
        busy = [step_seconds(d, b) for d, b in zip(data.devices, step.micro_batches, strict=True)]
        slowest = max(busy)
        compute += step.count * slowest
        for i, seconds in enumerate(busy):
            idle[i] += step.count * (slowest - seconds)
    return _evaluation(data, compute, data.comm_seconds * sum(step.count for step in steps), idle)


def check_steps(data: PoplarData, steps: list[Step]) -> None:
    """In every step one micro-batch per device, which it holds, and some sample; they add up to the
    batch."""
    for s, step in enumerate(steps):
        here, count = f"decision.steps[{s}]", len(data.devices)
        has = f"{here}.micro_batches has {len(step.micro_batches)} entries"
        require(len(step.micro_batches) == count, f"{has}, expected one per device ({count})")
        for i, (device, batch) in enumerate(zip(data.devices, step.micro_batches, strict=True)):
            got, most = f"{here}.micro_batches[{i}] is {batch}", len(device.step_seconds)
            require(batch <= most, f"{got}, expected at most {most} on {device.name}")
        require(any(step.micro_batches), f"{here} is empty, expected at least one sample in a step")
    check_total(data, sum(step.count * sum(step.micro_batches) for step in steps))


def _evaluation(data: PoplarData, compute: float, comm: float, idle: list[float]) -> Evaluation:
    lost = sum(
        (
            # the most samples per second over all micro-batches (0 for a device that holds none)
            seconds * max((b / step for b, step in enumerate(d.step_seconds, 1)), default=0.0)
            for d, seconds in zip(data.devices, idle, strict=True)
            if seconds
        ),
        0.0,
    )
    parts = {
        "compute_seconds": compute,
        "comm_seconds": comm,
        "idle_seconds": sum(idle),
        "under_utilisation": lost,
    }
    return Evaluation(compute + comm, (), parts)


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
    rows = [[(s.micro_batches[i], s.count) for s in steps] for i in range(len(data.devices))]
    return [
        tuple(
            (sum(n for _, n in same), batch) for batch, same in groupby(row, key=lambda one: one[0])
        )
        for row in rows
    ]


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
