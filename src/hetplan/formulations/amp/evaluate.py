"""The independent evaluator of problem `amp`: judges a decision from the data alone, in plain
Python.

Sets   j in 0..pp-1 stages, i in 0..dp-1 data ranks (pipelines), r in 0..tp-1 tensor ranks; l
layers.
Data   see data.py; gas = global_batch / (dp mbs) micro-batches per pipeline and iteration.
(1) pp dp tp = D              (2) gas is whole and >= 1     (3) every device's type has a table at
(tp, mbs)
(4) placement is a bijection  (5) stages are contiguous and nonempty and cover the layers
(6) (k sum_l param_bytes + min(gas, pp - j) mbs sum_l layer_bytes_per_sample) / tp fits each device
of j Price  see breakdown.py.
Source AMP (NeurIPS 2022), Section 3.3; (6) is hetplan's, for the 1F1B schedule.
"""

from __future__ import annotations

from hetplan.formulations.amp.breakdown import peak_bytes, price
from hetplan.formulations.amp.data import AmpData, AmpDecision
from hetplan.solvers.registry import Evaluation

# A sum of bytes may exceed a capacity by rounding in its last digits, not by more.
MEMORY_TOLERANCE = 1e-9


def evaluate(data: AmpData, decision: AmpDecision) -> Evaluation:
    """Feasibility and price of `decision`; `parts` as in `Breakdown.parts`, violations one line
    each."""
    violations = check(data, decision)
    if violations:
        return Evaluation(None, violations)
    priced = price(data, decision)
    return Evaluation(priced.objective, (), priced.parts())


def check(data: AmpData, decision: AmpDecision) -> tuple[str, ...]:
    """Everything that `decision` breaks: checks (1) to (5), and (6) where those hold."""
    found = [
        *check_degrees(data, decision),
        *check_micro_batches(data, decision),
        *check_tables(data, decision),
        *check_placement(data, decision),
        *check_stages(data, decision),
    ]
    return tuple(found or check_memory(data, decision))


def check_degrees(data: AmpData, decision: AmpDecision) -> list[str]:
    """(1) the degrees multiply to the number of devices."""
    product, count = decision.pipeline * decision.data * decision.tensor, len(data.devices)
    if product == count:
        return []
    degrees = f"pipeline {decision.pipeline} x data {decision.data} x tensor {decision.tensor}"
    return [f"{degrees} is {product}, expected the number of devices ({count})"]


def check_micro_batches(data: AmpData, decision: AmpDecision) -> list[str]:
    """(2) the global batch splits into a whole number of micro-batches per pipeline."""
    share = decision.data * decision.micro_batch
    if data.global_batch % share == 0:
        return []
    product = f"data {decision.data} x micro_batch {decision.micro_batch} = {share}"
    return [f"global_batch {data.global_batch} is no multiple of {product}"]


def check_tables(data: AmpData, decision: AmpDecision) -> list[str]:
    """(3) every device's type has a table at the tensor degree and micro-batch (all devices are
    used)."""
    key = (decision.tensor, decision.micro_batch)
    known = {entry.type for entry in data.layer_seconds if (entry.tensor, entry.micro_batch) == key}
    missing = sorted({device.type for device in data.devices} - known)
    return [
        f"no layer_seconds of type {name!r} for tensor {key[0]}, micro_batch {key[1]}"
        for name in missing
    ]


def check_placement(data: AmpData, decision: AmpDecision) -> list[str]:
    """(4) shape [pp][dp][tp], and every device exactly once."""
    placement, count = decision.placement, len(data.devices)
    if len(placement) != decision.pipeline:
        return [f"placement has {len(placement)} stages, expected pipeline ({decision.pipeline})"]
    for j, stage in enumerate(placement):
        if len(stage) != decision.data:
            return [f"placement[{j}] has {len(stage)} data ranks, expected data ({decision.data})"]
        for i, group in enumerate(stage):
            if len(group) != decision.tensor:
                return [
                    f"placement[{j}][{i}] has {len(group)} devices, "
                    f"expected tensor ({decision.tensor})"
                ]
    place: dict[int, str] = {}
    for j, i, r, device in positions(decision):
        here = f"placement[{j}][{i}][{r}]"
        if device >= count:
            return [f"{here} is device {device}, expected one of 0..{count - 1}"]
        if device in place:
            return [f"{here} repeats device {device} of {place[device]}"]
        place[device] = here
    unused = [d for d in range(count) if d not in place]
    return [f"placement leaves device {unused[0]} unused ({len(unused)} in all)"] if unused else []


def check_stages(data: AmpData, decision: AmpDecision) -> list[str]:
    """(5) one range per stage, contiguous from layer 0 to L, none empty."""
    stages, count = decision.stages, len(data.layers)
    if len(stages) != decision.pipeline:
        return [f"stages has {len(stages)} ranges, expected pipeline ({decision.pipeline})"]
    begin = 0
    for j, (first, last) in enumerate(stages):
        if first != begin:
            return [f"stages[{j}] begins at layer {first}, expected {begin}"]
        if last <= first:
            return [f"stages[{j}] is empty: [{first}, {last})"]
        begin = last
    return [] if begin == count else [f"stages end at layer {begin}, expected {count}"]


def check_memory(data: AmpData, decision: AmpDecision) -> list[str]:
    """(6) what each device holds fits its type's memory."""
    peak = peak_bytes(data, decision)
    if peak is None or data.memory is None:
        return []
    found = []
    for j, i, r, device in positions(decision):
        capacity = data.memory.device_bytes[data.devices[device].type]
        if peak[device] > capacity * (1 + MEMORY_TOLERANCE):
            where = (
                f"device {device} (placement[{j}][{i}][{r}], type {data.devices[device].type!r})"
            )
            found.append(f"{where} holds {peak[device]:.6g} bytes, has {capacity:.6g}")
    return found


def positions(decision: AmpDecision) -> list[tuple[int, int, int, int]]:
    """(stage, data rank, tensor rank, device) of every entry of the placement."""
    return [
        (j, i, r, device)
        for j, stage in enumerate(decision.placement)
        for i, group in enumerate(stage)
        for r, device in enumerate(group)
    ]
