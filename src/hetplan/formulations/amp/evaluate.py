"""The independent evaluator of problem `amp`: it judges a decision from the data alone, in plain
Python.

Sets   j in 0..pp-1 stages, i in 0..dp-1 data ranks (pipelines), r in 0..tp-1 tensor ranks,
       l in 0..L-1 layers.
Data   see data.py; gas = global_batch / (dp mbs) micro-batches per pipeline and iteration;
       k = state_bytes_per_param_byte of the memory constraint.

Constraints, each checked by the function of its number:
(1) pp dp tp = D
(2) gas is whole, and so at least 1
(3) every device's type has a table at (tp, mbs)
(4) placement has the shape [pp][dp][tp] and names no device twice; with (1) it is a bijection
(5) stages are contiguous and nonempty, and cover the layers
(6) (k sum_l param_bytes + sum_l layer_frozen_bytes
     + min(gas, pp - j) mbs sum_l layer_bytes_per_sample) / tp fits each device
    of stage j

Objective, with B(group) the lowest bandwidth between any two devices of a group, bytes/s:
T    = max_i T_i + max_jr S_jr   (eq. 4)
T_i  = (gas - 1) max_j t_ij + sum_j t_ij + sum_{j < pp-1} e_ij   (eq. 5)
t_ij = sum_l (slowest seconds in the tensor group
              + 2 (tp-1)/tp tensor_bytes_l mbs / B(tensor group))
e_ij = activation_bytes of the stage's last layer mbs / min_r bandwidth to stage j + 1 at rank r
S_jr = 2 (dp-1)/dp (sum_l param_bytes / tp) / B(data group)   (eq. 3)
Source AMP (NeurIPS 2022), Section 3.3 and 3.4; (6) is hetplan's, for the 1F1B schedule.

`describe` gives a decision as tables for people: the degrees, then one line per stage.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import fsum

from hetplan.formulations.amp.data import AmpData, AmpDecision
from hetplan.solvers.registry import Evaluation
from hetplan.text import (
    Table,
    devices_text,
    names_text,
    ranges_text,
    seconds_text,
    share_text,
)

# A sum of bytes may exceed a capacity by rounding in its last digits, not by more.
MEMORY_TOLERANCE = 1e-9


def evaluate(data: AmpData, decision: AmpDecision) -> Evaluation:
    """The objective T of `decision` with its `parts` as in `Breakdown.parts`, or its violations.

    All violations of (1) to (5) are listed. (6) is checked only where (1) to (5) hold, since the
    memory of a device depends on its stage.
    """
    violations = [
        *degrees_use_every_device(data, decision),
        *batch_splits_evenly(data, decision),
        *types_have_tables(data, decision),
        *placement_names_devices_once(data, decision),
        *stages_cover_layers(data, decision),
    ]
    if not violations:
        violations = list(devices_have_memory(data, decision))
    if violations:
        return Evaluation(None, tuple(violations))
    priced = price(data, decision)
    return Evaluation(priced.objective, (), priced.parts())


def degrees_use_every_device(data: AmpData, decision: AmpDecision) -> Iterator[str]:  # (1)
    """A violation where the degrees do not multiply to the number of devices."""
    pp, dp, tp = decision.pipeline, decision.data, decision.tensor
    count = len(data.devices)
    product = pp * dp * tp
    if product != count:
        yield (
            f"pipeline {pp} x data {dp} x tensor {tp} is {product}, "
            f"expected the number of devices ({count})"
        )


def batch_splits_evenly(data: AmpData, decision: AmpDecision) -> Iterator[str]:  # (2)
    """A violation where the global batch is no whole number of micro-batches per pipeline."""
    dp, mbs = decision.data, decision.micro_batch
    together = dp * mbs  # samples of one micro-batch in every pipeline
    if data.global_batch % together != 0:
        yield (
            f"global_batch {data.global_batch} is no multiple of "
            f"data {dp} x micro_batch {mbs} = {together}"
        )


def types_have_tables(data: AmpData, decision: AmpDecision) -> Iterator[str]:  # (3)
    """A violation for each device type without a table at the tensor degree and micro-batch."""
    tp, mbs = decision.tensor, decision.micro_batch
    tabled = {
        table.type for table in data.layer_seconds if (table.tensor, table.micro_batch) == (tp, mbs)
    }
    types = dict.fromkeys(device.type for device in data.devices)
    for name in types:
        if name not in tabled:
            yield f"no layer_seconds of type {name!r} for tensor {tp}, micro_batch {mbs}"


def placement_names_devices_once(data: AmpData, decision: AmpDecision) -> Iterator[str]:  # (4)
    """A violation for each list of the placement whose length is not its degree, for each device
    number out of range and for each repetition of a device."""
    pp, dp, tp = decision.pipeline, decision.data, decision.tensor
    placement = decision.placement
    if len(placement) != pp:
        yield f"placement has {len(placement)} stages, expected pipeline ({pp})"
    for j, stage in enumerate(placement):
        if len(stage) != dp:
            yield f"placement[{j}] has {len(stage)} data ranks, expected data ({dp})"
        for i, group in enumerate(stage):
            if len(group) != tp:
                yield f"placement[{j}][{i}] has {len(group)} devices, expected tensor ({tp})"
    count = len(data.devices)
    first_place: dict[int, str] = {}
    for j, i, r, device in positions(decision):
        place = f"placement[{j}][{i}][{r}]"
        if device >= count:
            yield f"{place} is device {device}, expected one of 0..{count - 1}"
        elif device in first_place:
            yield f"{place} repeats device {device} of {first_place[device]}"
        else:
            first_place[device] = place


def stages_cover_layers(data: AmpData, decision: AmpDecision) -> Iterator[str]:  # (5)
    """A violation where the number of ranges is not that of the stages, for each range that does
    not begin where the range before it ends, for each empty range, and where the last range does
    not end at layer L."""
    pp, count = decision.pipeline, len(data.layers)
    if len(decision.stages) != pp:
        yield f"stages has {len(decision.stages)} ranges, expected pipeline ({pp})"
    begin = 0
    for j, (first, last) in enumerate(decision.stages):
        if first != begin:
            yield f"stages[{j}] begins at layer {first}, expected {begin}"
        if first >= last:
            yield f"stages[{j}] is empty: [{first}, {last})"
        begin = last
    if begin != count:
        yield f"stages end at layer {begin}, expected {count}"


def devices_have_memory(data: AmpData, decision: AmpDecision) -> Iterator[str]:  # (6)
    """A violation for each device whose peak exceeds the memory of its type. Needs (1) to (5)."""
    peak = peak_bytes(data, decision)
    if peak is None or data.memory is None:
        return
    for j, i, r, device in positions(decision):
        name = data.devices[device].type
        capacity = data.memory.device_bytes[name]
        if peak[device] > capacity * (1 + MEMORY_TOLERANCE):
            yield (
                f"device {device} (placement[{j}][{i}][{r}], type {name!r}) "
                f"holds {peak[device]:.6g} bytes, has {capacity:.6g}"
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
    """The terms of T of one decision, and the memory of each device; `price` makes it."""

    gas: int  # micro-batches per pipeline and iteration
    stages: tuple[tuple[float, ...], ...]  # [dp][pp] seconds, t_ij
    tensor: tuple[tuple[float, ...], ...]  # [dp][pp] seconds of t_ij in tensor all-reduces
    links: tuple[tuple[float, ...], ...]  # [dp][pp - 1] seconds, e_ij
    bottleneck: tuple[float, ...]  # [dp] seconds of gas - 1 micro-batches on the slowest stage
    pipelines: tuple[float, ...]  # [dp] seconds, T_i
    synchronisation: tuple[tuple[float, ...], ...]  # [pp][tp] seconds, S_jr
    peak_bytes: tuple[float, ...] | None  # [D] bytes; None without a memory constraint

    @property
    def slowest(self) -> int:
        """The number of the pipeline that takes longest (the first of equals)."""
        return self.pipelines.index(max(self.pipelines))

    @property
    def objective(self) -> float:
        """T in seconds per iteration."""
        return max(self.pipelines) + max(map(max, self.synchronisation))

    def parts(self) -> dict[str, float]:
        """The slowest pipeline's terms and the synchronisation, in seconds.

        `bottleneck + fill + links + synchronisation` is the objective. `pipeline` is the sum of
        the first three terms. `tensor_all_reduce` is the part of `fill` that tensor groups spend
        in all-reduces.
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
    """Every term of T for a decision that keeps (1) to (5)."""
    gas = data.global_batch // (decision.data * decision.micro_batch)
    stages, ranks = range(decision.pipeline), range(decision.data)
    tensor = tuple(tuple(tensor_seconds(data, decision, j, i) for j in stages) for i in ranks)
    links = tuple(tuple(link_seconds(data, decision, j, i) for j in stages[:-1]) for i in ranks)
    totals = tuple(
        tuple(compute_seconds(data, decision, j, i) + tensor[i][j] for j in stages) for i in ranks
    )
    bottleneck = tuple((gas - 1) * max(totals[i]) for i in ranks)
    pipelines = tuple(fsum([bottleneck[i], *totals[i], *links[i]]) for i in ranks)
    synchronisation = tuple(
        tuple(sync_seconds(data, decision, j, r) for r in range(decision.tensor)) for j in stages
    )
    return Breakdown(
        gas=gas,
        stages=totals,
        tensor=tensor,
        links=links,
        bottleneck=bottleneck,
        pipelines=pipelines,
        synchronisation=synchronisation,
        peak_bytes=peak_bytes(data, decision),
    )


def compute_seconds(data: AmpData, decision: AmpDecision, j: int, i: int) -> float:
    """Seconds of t_ij without all-reduces: each layer takes as long as on the slowest device type
    of the tensor group."""
    types = {data.devices[device].type for device in decision.placement[j][i]}
    size = (decision.tensor, decision.micro_batch)
    of_this_size = [t for t in data.layer_seconds if (t.tensor, t.micro_batch) == size]
    tables = [table.seconds for table in of_this_size if table.type in types]
    first, last = decision.stages[j]
    return fsum(max(table[l] for table in tables) for l in range(first, last))


def tensor_seconds(data: AmpData, decision: AmpDecision, j: int, i: int) -> float:
    """Seconds of t_ij in tensor all-reduces (eq. 3 with M = tensor_bytes mbs); 0 for a group of one
    device."""
    first, last = decision.stages[j]
    size = fsum(layer.tensor_bytes for layer in data.layers[first:last]) * decision.micro_batch
    return ring_seconds(data, decision.placement[j][i], size)


def link_seconds(data: AmpData, decision: AmpDecision, j: int, i: int) -> float:
    """e_ij in seconds: the output of stage j's last layer passes over the slowest of the links that
    join equal tensor ranks of stages j and j + 1."""
    here, after = decision.placement[j][i], decision.placement[j + 1][i]
    slowest_link = min(data.bandwidth[a][b] for a, b in zip(here, after, strict=True))
    _, last = decision.stages[j]
    return data.layers[last - 1].activation_bytes * decision.micro_batch / slowest_link


def sync_seconds(data: AmpData, decision: AmpDecision, j: int, r: int) -> float:
    """S_jr in seconds: gradient all-reduce of the data group of stage j and tensor rank r."""
    first, last = decision.stages[j]
    size = fsum(layer.param_bytes for layer in data.layers[first:last]) / decision.tensor
    return ring_seconds(data, [rank[r] for rank in decision.placement[j]], size)


def ring_seconds(data: AmpData, group: Sequence[int], size: float) -> float:
    """Seconds of a ring all-reduce of `size` bytes: 2 (n-1)/n size / B, with n devices and the
    lowest bandwidth B between any two of them (eq. 3)."""
    n = len(group)
    if n == 1:
        return 0.0
    slowest_link = min(data.bandwidth[a][b] for a, b in combinations(group, 2))
    return 2 * (n - 1) / n * size / slowest_link


def peak_bytes(data: AmpData, decision: AmpDecision) -> tuple[float, ...] | None:
    """[D] bytes on each device at its peak; None without a memory constraint. Needs (1) to (5)."""
    memory = data.memory
    if memory is None:
        return None
    gas = data.global_batch // (decision.data * decision.micro_batch)
    peak = [0.0] * len(data.devices)
    for j, (first, last) in enumerate(decision.stages):
        params = fsum(layer.param_bytes for layer in data.layers[first:last])
        states = memory.state_bytes_per_param_byte * params
        states += fsum(memory.frozen(first, last))
        samples_alive = min(gas, decision.pipeline - j) * decision.micro_batch
        activations = samples_alive * fsum(memory.layer_bytes_per_sample[first:last])
        for group in decision.placement[j]:
            for device in group:
                peak[device] = (states + activations) / decision.tensor
    return tuple(peak)


def describe(data: AmpData, decision: AmpDecision) -> list[Table]:
    """A table of a feasible decision's stages. It shows the times of the slowest pipeline, and the
    memory of each stage's device with the least memory left."""
    priced = price(data, decision)
    rows = tuple(stage_row(data, decision, priced, j) for j in range(decision.pipeline))
    header = ("stage", "layers", "", "devices", "micro-batch", "send", "sync", "memory")
    degrees = (
        f"pipeline {decision.pipeline} x data {decision.data} x tensor {decision.tensor}, "
        f"{priced.gas} micro-batches of {decision.micro_batch} in each pipeline"
    )
    return [Table(degrees, header, rows, right=(0, 1, 4, 5, 6))]


def stage_row(data: AmpData, decision: AmpDecision, priced: Breakdown, j: int) -> tuple[str, ...]:
    """The row of one stage: its layers, its devices in all pipelines, its times, and its memory
    beside the limit."""
    first, last = decision.stages[j]
    devices = [device for group in decision.placement[j] for device in group]
    slowest = priced.slowest
    sends = j + 1 < decision.pipeline
    return (
        str(j),
        ranges_text(range(first, last)),
        names_text([layer.name for layer in data.layers[first:last]]),
        devices_text([(device.node, device.type) for device in data.devices], devices),
        seconds_text(priced.stages[slowest][j]),
        seconds_text(priced.links[slowest][j] if sends else None),
        seconds_text(max(priced.synchronisation[j])),
        memory_text(data, priced, devices),
    )


def memory_text(data: AmpData, priced: Breakdown, devices: list[int]) -> str:
    """The peak memory of the device with the least memory left, and that device's limit."""
    if priced.peak_bytes is None or data.memory is None:
        return "-"
    limits = data.memory.device_bytes
    peak = priced.peak_bytes

    def room(device: int) -> float:
        return limits[data.devices[device].type] - peak[device]

    tightest = min(devices, key=room)
    return share_text(peak[tightest], limits[data.devices[tightest].type])
