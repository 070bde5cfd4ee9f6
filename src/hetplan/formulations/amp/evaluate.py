"""The independent evaluator of problem `amp`: judges a decision from the data alone, in plain
Python.

Sets   j in 0..pp-1 stages, i in 0..dp-1 data ranks (pipelines), r in 0..tp-1 tensor ranks; l
layers.
Data   see data.py; gas = global_batch / (dp mbs) micro-batches per pipeline and iteration.
(1) pp dp tp = D              (2) gas is whole and >= 1     (3) every device's type has a table at
(tp, mbs)
(4) placement is a bijection  (5) stages are contiguous and nonempty and cover the layers
(6) (k sum_l param_bytes + min(gas, pp - j) mbs sum_l layer_bytes_per_sample) / tp fits each device
of j
Price, with B(group) the lowest bandwidth between any two devices of a group, bytes/s:
T    = max_i T_i + max_jr S_jr   (eq. 4)
T_i  = (gas - 1) max_j t_ij + sum_j t_ij + sum_{j < pp-1} e_ij   (eq. 5)
t_ij = sum_l (slowest seconds in the tensor group + 2 (tp-1)/tp tensor_bytes_l mbs / B(tensor
group))
e_ij = activation_bytes of the stage's last layer mbs / min_r bandwidth to stage j + 1
S_jr = 2 (dp-1)/dp (sum_l param_bytes / tp) / B(data group)   (eq. 3)
Source AMP (NeurIPS 2022), Section 3.3 and 3.4; (6) is hetplan's, for the 1F1B schedule.

`describe` gives a decision as tables for people: the degrees, then one line per stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import fsum

from hetplan.errors import require
from hetplan.formulations.amp.data import AmpData, AmpDecision
from hetplan.solvers.registry import Evaluation, objections
from hetplan.text import Table, devices_text, names_text, seconds_text, share_text

# A sum of bytes may exceed a capacity by rounding in its last digits, not by more.
MEMORY_TOLERANCE = 1e-9


def evaluate(data: AmpData, decision: AmpDecision) -> Evaluation:
    """Feasibility and price of `decision`; `parts` as in `Breakdown.parts`. Violations: the first
    of each check, and all of (6) where (1) to (5) hold."""
    checks = (check_configuration, check_placement, check_stages)
    violations = tuple(line for check in checks for line in objections(check, data, decision))
    violations = violations or over_memory(data, decision)
    if violations:
        return Evaluation(None, violations)
    priced = price(data, decision)
    return Evaluation(priced.objective, (), priced.parts())


def check_configuration(data: AmpData, decision: AmpDecision) -> None:
    """(1) the degrees multiply to the number of devices, (2) the global batch splits into a whole
    number of micro-batches per pipeline, (3) every device's type has a table at the tensor degree
    and micro-batch (all devices are used)."""
    pp, dp, tp, mbs = decision.pipeline, decision.data, decision.tensor, decision.micro_batch
    count, share = len(data.devices), dp * mbs
    degrees = f"pipeline {pp} x data {dp} x tensor {tp} is {pp * dp * tp}"
    require(pp * dp * tp == count, f"{degrees}, expected the number of devices ({count})")
    product = f"data {dp} x micro_batch {mbs} = {share}"
    fault = f"global_batch {data.global_batch} is no multiple of {product}"
    require(data.global_batch % share == 0, fault)
    known = {e.type for e in data.layer_seconds if (e.tensor, e.micro_batch) == (tp, mbs)}
    for kind in (device.type for device in data.devices):
        fault = f"no layer_seconds of type {kind!r} for tensor {tp}, micro_batch {mbs}"
        require(kind in known, fault)


def check_placement(data: AmpData, decision: AmpDecision) -> None:
    """(4) shape [pp][dp][tp], and every device exactly once."""
    placement, count = decision.placement, len(data.devices)
    has = f"placement has {len(placement)} stages"
    require(len(placement) == decision.pipeline, f"{has}, expected pipeline ({decision.pipeline})")
    for j, stage in enumerate(placement):
        has = f"placement[{j}] has {len(stage)} data ranks"
        require(len(stage) == decision.data, f"{has}, expected data ({decision.data})")
        for i, group in enumerate(stage):
            has = f"placement[{j}][{i}] has {len(group)} devices"
            require(len(group) == decision.tensor, f"{has}, expected tensor ({decision.tensor})")
    place: dict[int, str] = {}
    for j, i, r, device in positions(decision):
        here = f"placement[{j}][{i}][{r}]"
        require(device < count, f"{here} is device {device}, expected one of 0..{count - 1}")
        before = place.setdefault(device, here)
        require(before == here, f"{here} repeats device {device} of {before}")
    unused = [d for d in range(count) if d not in place]
    left = f"placement leaves device {min(unused, default=0)} unused ({len(unused)} in all)"
    require(not unused, left)


def check_stages(data: AmpData, decision: AmpDecision) -> None:
    """(5) one range per stage, contiguous from layer 0 to L, none empty."""
    stages, begin, count = decision.stages, 0, len(data.layers)
    has = f"stages has {len(stages)} ranges"
    require(len(stages) == decision.pipeline, f"{has}, expected pipeline ({decision.pipeline})")
    for j, (first, last) in enumerate(stages):
        require(first == begin, f"stages[{j}] begins at layer {first}, expected {begin}")
        require(first < last, f"stages[{j}] is empty: [{first}, {last})")
        begin = last
    require(begin == count, f"stages end at layer {begin}, expected {count}")


def over_memory(data: AmpData, decision: AmpDecision) -> tuple[str, ...]:
    """(6) the devices that hold more than their type's memory."""
    peak = peak_bytes(data, decision)
    if peak is None or data.memory is None:
        return ()
    types = [device.type for device in data.devices]
    room = [data.memory.device_bytes[kind] for kind in types]
    return tuple(
        f"device {d} (placement[{j}][{i}][{r}], type {types[d]!r}) holds {peak[d]:.6g} bytes, "
        f"has {room[d]:.6g}"
        for j, i, r, d in positions(decision)
        if peak[d] > room[d] * (1 + MEMORY_TOLERANCE)
    )


def positions(decision: AmpDecision) -> list[tuple[int, int, int, int]]:
    """(stage, data rank, tensor rank, device) of every entry of the placement."""
    return [
        (j, i, r, device)
        for j, stage in enumerate(decision.placement)
        for i, group in enumerate(stage)
        for r, device in enumerate(group)
    ]


@dataclass(frozen=True)
class Breakdown:
    """Where the time of one iteration goes and what each device holds; seconds and bytes.

    gas: micro-batches per pipeline. stages, tensor [dp][pp]: one micro-batch on a stage, and the
    part of it that tensor groups spend in all-reduces. links [dp][pp-1]: one micro-batch to the
    next stage. bottleneck, pipelines [dp]: (gas-1) times the slowest stage; the whole of T_i.
    synchronisation [pp][tp]: gradient all-reduce of a data group.
    peak_bytes [D]: memory per device, None where the instance has no memory constraint.
    """

    gas: int
    stages: tuple[tuple[float, ...], ...]
    tensor: tuple[tuple[float, ...], ...]
    links: tuple[tuple[float, ...], ...]
    bottleneck: tuple[float, ...]
    pipelines: tuple[float, ...]
    synchronisation: tuple[tuple[float, ...], ...]
    peak_bytes: tuple[float, ...] | None

    @property
    def slowest(self) -> int:
        """The pipeline that takes longest (the first of equals)."""
        return self.pipelines.index(max(self.pipelines))

    @property
    def objective(self) -> float:
        """T in seconds per iteration."""
        return max(self.pipelines) + max(map(max, self.synchronisation))

    def parts(self) -> dict[str, float]:
        """The slowest pipeline's terms and the synchronisation.

        `bottleneck + fill + links + synchronisation` is the objective; `pipeline` is the first
        three of them together, `tensor_all_reduce` the share of `fill` that tensor groups spend
        communicating.
        """
        i = self.slowest
        return {
            "pipeline": self.pipelines[i],
            "bottleneck": self.bottleneck[i],
            "fill": fsum(self.stages[i]),
            "links": fsum(self.links[i]),
            "tensor_all_reduce": fsum(self.tensor[i]),
            "synchronisation": max(map(max, self.synchronisation)),
        }


def price(data: AmpData, decision: AmpDecision) -> Breakdown:
    """Every term of T for a decision that passes checks (1) to (5) of evaluate.py."""
    gas = data.global_batch // (decision.data * decision.micro_batch)
    stages, ranks = range(decision.pipeline), range(decision.data)
    tensor = tuple(tuple(tensor_seconds(data, decision, j, i) for j in stages) for i in ranks)
    links = tuple(tuple(link_seconds(data, decision, j, i) for j in stages[:-1]) for i in ranks)
    totals = tuple(
        tuple(compute_seconds(data, decision, j, i) + tensor[i][j] for j in stages) for i in ranks
    )
    bottleneck = tuple((gas - 1) * max(row) for row in totals)
    return Breakdown(
        gas=gas,
        stages=totals,
        tensor=tensor,
        links=links,
        bottleneck=bottleneck,
        pipelines=tuple(fsum([wait, *totals[i], *links[i]]) for i, wait in enumerate(bottleneck)),
        synchronisation=tuple(
            tuple(sync_seconds(data, decision, j, r) for r in range(decision.tensor))
            for j in stages
        ),
        peak_bytes=peak_bytes(data, decision),
    )


def compute_seconds(data: AmpData, decision: AmpDecision, j: int, i: int) -> float:
    """Table part of t_ij: each layer at the pace of the slowest type in the tensor group."""
    types = {data.devices[device].type for device in decision.placement[j][i]}
    key = (decision.tensor, decision.micro_batch)
    tables = [
        entry.seconds
        for entry in data.layer_seconds
        if entry.type in types and (entry.tensor, entry.micro_batch) == key
    ]
    first, last = decision.stages[j]
    return fsum(max(table[l] for table in tables) for l in range(first, last))


def tensor_seconds(data: AmpData, decision: AmpDecision, j: int, i: int) -> float:
    """All-reduce part of t_ij (eq. 3 with M = tensor_bytes mbs); 0 for a group of one."""
    first, last = decision.stages[j]
    size = fsum(layer.tensor_bytes for layer in data.layers[first:last]) * decision.micro_batch
    return ring_seconds(data, decision.placement[j][i], size)


def link_seconds(data: AmpData, decision: AmpDecision, j: int, i: int) -> float:
    """e_ij: the last layer's activation over the slowest of the tensor ranks' links to stage j +
    1."""
    here, after = decision.placement[j][i], decision.placement[j + 1][i]
    slowest = min(data.bandwidth[a][b] for a, b in zip(here, after, strict=True))
    return data.layers[decision.stages[j][1] - 1].activation_bytes * decision.micro_batch / slowest


def sync_seconds(data: AmpData, decision: AmpDecision, j: int, r: int) -> float:
    """S_jr: gradient all-reduce of the data group of stage j and tensor rank r."""
    first, last = decision.stages[j]
    size = fsum(layer.param_bytes for layer in data.layers[first:last]) / decision.tensor
    return ring_seconds(data, [rank[r] for rank in decision.placement[j]], size)


def ring_seconds(data: AmpData, group: Sequence[int], size: float) -> float:
    """Ring all-reduce of `size` bytes, 2 (n-1)/n size / B with the lowest bandwidth B of any pair
    (eq. 3)."""
    n = len(group)
    return (
        0.0
        if n == 1
        else 2 * (n - 1) / n * size / min(data.bandwidth[a][b] for a, b in combinations(group, 2))
    )


def peak_bytes(data: AmpData, decision: AmpDecision) -> tuple[float, ...] | None:
    """Memory held by each device, [D]; None without a memory constraint. Needs checks (1) to (5) to
    hold."""
    memory = data.memory
    if memory is None:
        return None
    gas = data.global_batch // (decision.data * decision.micro_batch)
    peak = [0.0] * len(data.devices)
    for j, (first, last) in enumerate(decision.stages):
        state = memory.state_bytes_per_param_byte * fsum(
            layer.param_bytes for layer in data.layers[first:last]
        )
        alive = min(gas, decision.pipeline - j) * decision.micro_batch
        saved = alive * fsum(memory.layer_bytes_per_sample[first:last])
        for group in decision.placement[j]:
            for device in group:
                peak[device] = (state + saved) / decision.tensor
    return tuple(peak)


def describe(data: AmpData, decision: AmpDecision) -> list[Table]:
    """The stages of a feasible decision; times are of the slowest pipeline, sizes of the fullest
    device."""
    priced = price(data, decision)
    rows = tuple(stage_row(data, decision, priced, j) for j in range(decision.pipeline))
    header = ("stage", "layers", "", "devices", "micro-batch", "send", "sync", "memory")
    degrees = (
        f"pipeline {decision.pipeline} x data {decision.data} x tensor {decision.tensor}, "
        f"{priced.gas} micro-batches of {decision.micro_batch} in each pipeline"
    )
    return [Table(degrees, header, rows, right=(0, 1, 4, 5, 6))]


def stage_row(data: AmpData, decision: AmpDecision, priced: Breakdown, j: int) -> tuple[str, ...]:
    """One stage: its layers, devices over all pipelines, times, and memory against the limit."""
    first, last = decision.stages[j]
    devices = [device for group in decision.placement[j] for device in group]
    slowest = priced.slowest
    return (
        str(j),
        f"{first}-{last - 1}" if last - first > 1 else str(first),
        names_text([layer.name for layer in data.layers[first:last]]),
        devices_text([(device.node, device.type) for device in data.devices], devices),
        seconds_text(priced.stages[slowest][j]),
        seconds_text(priced.links[slowest][j]) if j + 1 < decision.pipeline else "-",
        seconds_text(max(priced.synchronisation[j])),
        memory_text(data, priced, devices),
    )


def memory_text(data: AmpData, priced: Breakdown, devices: list[int]) -> str:
    """What the device nearest to its limit holds, and that limit."""
    if priced.peak_bytes is None or data.memory is None:
        return "-"
    limits = data.memory.device_bytes
    peak = priced.peak_bytes

    def left(device: int) -> float:
        return limits[data.devices[device].type] - peak[device]

    tightest = min(devices, key=left)
    return share_text(peak[tightest], limits[data.devices[tightest].type])
