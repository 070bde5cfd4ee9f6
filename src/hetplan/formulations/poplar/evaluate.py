"""The independent evaluator of problem `poplar`: it judges a decision from the data alone.

Sets   i in 0..n-1 devices; s steps, each taken count_s times.
Data   see data.py; mbs_i: the largest micro-batch that fits on device i.

Constraints, each checked by the function of its number:
(1) the decision has devices under ZeRO 0 and 1, steps under ZeRO 2 and 3
(2) it has one share per device, or one micro-batch per device in each step
(3) 1 <= b_i <= mbs_i where g_i > 0 (0 <= b_i <= mbs_i where g_i = 0), or b_is <= mbs_i
(4) sum_i g_i = G, or sum_s count_s sum_i b_is = G
(5) in each step at least one device takes some samples

Objective
ZeRO 0, 1:  T = max_i ( floor(g_i / b_i) t_i(b_i) + t_i(g_i mod b_i) ) + C       (Poplar eq. 1)
ZeRO 2, 3:  T = sum_s count_s ( max_i t_i(b_is) + C )                        (Algorithm 2, line 24)
Beside it   U = sum_i idle_i p_i                                                           (eq. 4)
with idle_i = time to the slowest (eq. 2) and p_i = max_b b / t_i(b) (eq. 3).

`describe` gives a decision as a table for people: devices that do the same in one line.
"""

from collections.abc import Iterator
from itertools import groupby

from hetplan.formulations.poplar.data import Device, PoplarData, PoplarDecision, Share, Step
from hetplan.solvers.registry import Evaluation
from hetplan.text import Table, grouped, ranges_text, seconds_text


def evaluate(data: PoplarData, decision: PoplarDecision) -> Evaluation:
    """The objective T of `decision` in seconds with its parts (`with_parts`), or every violation.

    (2) to (5) are checked where (1) holds.
    """
    if data.stepwise:
        return evaluation_of_steps(data, decision.steps)
    return evaluation_of_shares(data, decision.devices)


def evaluation_of_steps(data: PoplarData, steps: list[Step] | None) -> Evaluation:
    """The evaluation of a decision for ZeRO 2 and 3. steps: None where the decision has none."""
    if steps is None:  # (1)
        violation = f"decision has devices, expected steps for ZeRO {data.zero_stage}"
        return Evaluation(None, (violation,))
    violations = tuple(step_violations(data, steps))
    if violations:
        return Evaluation(None, violations)
    return price_steps(data, steps)


def evaluation_of_shares(data: PoplarData, shares: list[Share] | None) -> Evaluation:
    """The evaluation of a decision for ZeRO 0 and 1. shares: None where the decision has none."""
    if shares is None:  # (1)
        violation = f"decision has steps, expected devices for ZeRO {data.zero_stage}"
        return Evaluation(None, (violation,))
    violations = tuple(share_violations(data, shares))
    if violations:
        return Evaluation(None, violations)
    return price_shares(data, shares)


def share_violations(data: PoplarData, shares: list[Share]) -> Iterator[str]:
    """Every violation of a decision for ZeRO 0 and 1."""
    yield from devices_have_one_share(data, shares)
    yield from shares_fit(data, shares)
    yield from batch_is_complete(data, sum(share.samples for share in shares))


def step_violations(data: PoplarData, steps: list[Step]) -> Iterator[str]:
    """Every violation of a decision for ZeRO 2 and 3."""
    yield from devices_take_every_step(data, steps)
    yield from micro_batches_fit(data, steps)
    yield from batch_is_complete(data, sum(step.count * sum(step.micro_batches) for step in steps))
    yield from steps_have_samples(steps)


def devices_have_one_share(data: PoplarData, shares: list[Share]) -> Iterator[str]:  # (2)
    """A violation where there are more or fewer shares than devices."""
    count = len(data.devices)
    if len(shares) != count:
        yield f"decision.devices has {len(shares)} entries, expected one per device ({count})"


def devices_take_every_step(data: PoplarData, steps: list[Step]) -> Iterator[str]:  # (2)
    """A violation for each step with more or fewer micro-batches than devices."""
    count = len(data.devices)
    for s, step in enumerate(steps):
        if len(step.micro_batches) != count:
            yield (
                f"decision.steps[{s}].micro_batches has {len(step.micro_batches)} entries, "
                f"expected one per device ({count})"
            )


def shares_fit(data: PoplarData, shares: list[Share]) -> Iterator[str]:  # (3)
    """A violation for each device with samples but no micro-batch, and for each micro-batch that
    does not fit on its device."""
    # (2) reports where there are not as many shares as devices
    for i, (device, share) in enumerate(zip(data.devices, shares, strict=False)):
        least = 1 if share.samples else 0
        largest = len(device.step_seconds)
        if least > largest:
            yield (
                f"decision.devices[{i}].samples is {share.samples}, "
                f"expected 0 on {device.name}, which no sample fits on"
            )
        elif not least <= share.micro_batch <= largest:
            yield (
                f"decision.devices[{i}].micro_batch is {share.micro_batch}, "
                f"expected {least} to {largest} ({share.samples} samples on {device.name})"
            )


def micro_batches_fit(data: PoplarData, steps: list[Step]) -> Iterator[str]:  # (3)
    """A violation for each micro-batch that does not fit on its device."""
    # (2) reports steps that have not as many micro-batches as there are devices
    for s, step in enumerate(steps):
        for i, (device, batch) in enumerate(zip(data.devices, step.micro_batches, strict=False)):
            largest = len(device.step_seconds)
            if batch > largest:
                yield (
                    f"decision.steps[{s}].micro_batches[{i}] is {batch}, "
                    f"expected at most {largest} on {device.name}"
                )


def batch_is_complete(data: PoplarData, total: int) -> Iterator[str]:  # (4)
    """A violation where the samples of all devices are not the global batch."""
    if total != data.global_batch:
        yield f"samples add up to {total}, expected global_batch ({data.global_batch})"


def steps_have_samples(steps: list[Step]) -> Iterator[str]:  # (5)
    """A violation for each step in which no device takes a sample."""
    for s, step in enumerate(steps):
        if not any(step.micro_batches):
            yield f"decision.steps[{s}] is empty, expected at least one sample in a step"


def step_seconds(device: Device, batch: int) -> float:
    """t(batch): seconds of one micro-batch on a device; t(0) = 0."""
    return device.step_seconds[batch - 1] if batch else 0.0


def price_shares(data: PoplarData, shares: list[Share]) -> Evaluation:
    """The evaluation of shares that keep (2) to (4)."""
    busy = [
        share_seconds(device, share) for device, share in zip(data.devices, shares, strict=True)
    ]
    compute = max(busy)
    idle = [compute - seconds for seconds in busy]
    return with_parts(data, compute, data.comm_seconds, idle)


def share_seconds(device: Device, share: Share) -> float:
    """Seconds that a device computes: its full micro-batches and a last smaller one."""
    if share.samples == 0:
        return 0.0
    full, last = divmod(share.samples, share.micro_batch)
    whole = full * step_seconds(device, share.micro_batch)
    return whole + step_seconds(device, last)


def price_steps(data: PoplarData, steps: list[Step]) -> Evaluation:
    """The evaluation of steps that keep (2) to (5)."""
    compute, idle = 0.0, [0.0] * len(data.devices)
    for step in steps:
        busy = [step_seconds(d, b) for d, b in zip(data.devices, step.micro_batches, strict=True)]
        slowest = max(busy)
        compute += step.count * slowest
        for i, seconds in enumerate(busy):
            idle[i] += step.count * (slowest - seconds)
    synchronisations = sum(step.count for step in steps)
    return with_parts(data, compute, data.comm_seconds * synchronisations, idle)


def with_parts(data: PoplarData, compute: float, comm: float, idle: list[float]) -> Evaluation:
    """The evaluation of a decision, with its parts.

    The parts compute_seconds and comm_seconds add up to T. idle_seconds is the sum over devices.
    under_utilisation is U, the samples that idle devices could have processed at peak speed.

    compute: seconds that the slowest devices compute. comm: seconds of all synchronisations. idle:
    [n] seconds for which each device waits for the slowest one.
    """
    lost = 0.0
    for device, seconds in zip(data.devices, idle, strict=True):
        if seconds:  # else the whole curve is read for nothing
            lost += seconds * peak_speed(device)
    parts = {
        "compute_seconds": compute,
        "comm_seconds": comm,
        "idle_seconds": sum(idle),
        "under_utilisation": lost,
    }
    return Evaluation(compute + comm, (), parts)


def peak_speed(device: Device) -> float:
    """p: the most samples per second over all micro-batches; 0 where no sample fits."""
    speeds = (batch / seconds for batch, seconds in enumerate(device.step_seconds, start=1))
    return max(speeds, default=0.0)


# The micro-batches of one device in order, equal neighbours joined: (times, samples).
Pieces = tuple[tuple[int, int], ...]


def pieces_of(data: PoplarData, decision: PoplarDecision) -> list[Pieces]:
    """[n] the micro-batches of each device of a feasible decision.

    ZeRO 0 and 1: the full micro-batches and a last smaller one. ZeRO 2 and 3: one per step, of 0
    samples where the device takes none.
    """
    if decision.devices is not None:
        return [pieces_of_share(share) for share in decision.devices]
    steps = decision.steps or []
    return [pieces_of_steps(steps, i) for i in range(len(data.devices))]


def pieces_of_share(share: Share) -> Pieces:
    """The full micro-batches of a share, and a last smaller one where samples are left."""
    if share.samples == 0:
        return ()
    full, last = divmod(share.samples, share.micro_batch)
    pieces = ((full, share.micro_batch), (1, last))
    return tuple((times, batch) for times, batch in pieces if times * batch > 0)


def pieces_of_steps(steps: list[Step], i: int) -> Pieces:
    """The micro-batches of device i, equal ones of consecutive steps joined."""
    pieces = []
    for batch, equal_steps in groupby(steps, key=lambda step: step.micro_batches[i]):
        pieces.append((sum(step.count for step in equal_steps), batch))
    return tuple(pieces)


def busy_seconds(data: PoplarData, pieces: list[Pieces]) -> list[float]:
    """[n] seconds that each device computes."""
    return [
        sum(times * step_seconds(device, batch) for times, batch in row)
        for device, row in zip(data.devices, pieces, strict=True)
    ]


def describe(data: PoplarData, decision: PoplarDecision) -> list[Table]:
    """A table of a feasible decision: one row for all devices of a name that do the same."""
    pieces = pieces_of(data, decision)
    busy = busy_seconds(data, pieces)
    parts = evaluate(data, decision).parts
    alike = grouped(((device.name, pieces[i]), i) for i, device in enumerate(data.devices))
    rows = []
    for (name, row), members in alike.items():
        first = members[0]
        rows.append(
            (
                f"{len(members)} {name} ({ranges_text(members)})",
                str(sum(times * batch for times, batch in row)),
                " + ".join(f"{times} x {batch}" for times, batch in row) or "nothing",
                str(len(data.devices[first].step_seconds)),
                seconds_text(busy[first]),
            )
        )
    title = (
        f"ZeRO {data.zero_stage}, {data.global_batch} samples: "
        f"{seconds_text(parts['compute_seconds'])} of computation, "
        f"{seconds_text(parts['comm_seconds'])} of communication"
    )
    header = ("devices", "samples each", "micro-batches", "largest that fits", "busy")
    lost = parts["under_utilisation"]
    note = f"under-utilisation (Poplar, eq. 4): {lost:.4g} samples at peak speed"
    return [Table(title, header, tuple(rows), (note,), right=(1, 3, 4))]
