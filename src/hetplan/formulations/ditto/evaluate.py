"""The independent evaluator of problem `ditto`: it judges a template from the data alone, in plain
Python.

Sets   k in 0..S-1 stages, each layers [first, last) on x devices of type i.
Data   N_b micro-batches; M devices of a node; L layers l; all others see data.py.

Constraints, each checked by the function of its number:
(1) S >= 1 stages, contiguous and nonempty, cover the layers
(2) x in {1, 2, 4, ..., M}
(3) devices used of a type <= nodes x M
(4) S <= N_b
(5) (sum_l state + min(N_b, S - k) sum_l activation) / x <= device_bytes of the stage's type
(6) every stage's type is one of the instance's
Stages that keep (2) and (3) always pack into nodes, since their sizes are powers of two that divide
M.

Objective  T = T1 + T2 + T3 with
       t_k = sum_l ((forward + backward)_l / x + [x > 1] 2 allreduce_l[x]),
       T1 = sum_k t_k,  T2 = (N_b - S + k* - 1) t_k*,  T3 = sum_{k >= k*} t_k,
       k* the slowest stage.
Source Ditto, Section 3, eq. 1-3; Oobleck (SOSP 2023), Section 4.1.2; (5) is hetplan's, for 1F1B.
"""

import math
from collections.abc import Iterator

from hetplan.formulations.ditto.data import DittoData, DittoDecision, DittoStage, group_sizes
from hetplan.solvers.registry import Evaluation

# Stages within this relative difference of the slowest one tie, so that rounding does not choose
# k*. The first of them counts as the slowest, which gives the least T.
TIE = 1e-9
# A sum of bytes may exceed a capacity by rounding in its last digits, not by more.
MEMORY_TOLERANCE = 1e-9


def evaluate(data: DittoData, decision: DittoDecision) -> Evaluation:
    """The objective T of a template with its parts (`evaluation_of`), or every violation.

    (5) is checked where all others hold, since memory depends on a stage's type and place.
    """
    violations = [
        *stages_cover_layers(data, decision),
        *groups_are_powers_of_two(data, decision),
        *types_have_devices(data, decision),
        *micro_batches_fill_the_pipeline(data, decision),
        *types_exist(data, decision),
    ]
    if not violations:
        violations = list(stages_have_memory(data, decision))
    if violations:
        return Evaluation(None, tuple(violations))
    times = [stage_seconds(data, stage) for stage in decision.stages]
    return evaluation_of(data.micro_batches, times)


def evaluation_of(micro_batches: int, times: list[float]) -> Evaluation:
    """The objective of a pipeline whose stages take `times` seconds per micro-batch; its parts are
    T1, T2, T3, and the seconds and the number of the slowest stage."""
    slowest = slowest_stage(times)
    warm_up = math.fsum(times)
    steady = (micro_batches - len(times) + slowest - 1) * times[slowest]
    drain = math.fsum(times[slowest:])
    parts = {
        "T1": warm_up,
        "T2": steady,
        "T3": drain,
        "slowest stage seconds": times[slowest],
        "slowest stage": float(slowest),
    }
    return Evaluation(math.fsum((warm_up, steady, drain)), (), parts)


def slowest_stage(times: list[float]) -> int:
    """k*: the number of the first stage within a relative TIE of the slowest."""
    least = max(times) * (1 - TIE)
    return next(k for k, t in enumerate(times) if t >= least)


def stage_seconds(data: DittoData, stage: DittoStage) -> float:
    """t_k: forward and backward of one micro-batch, with two all-reduces per layer where x > 1."""
    kind = next(kind for kind in data.device_types if kind.name == stage.type)
    layers = slice(stage.first, stage.last)
    compute = math.fsum(kind.forward_seconds[layers]) + math.fsum(kind.backward_seconds[layers])
    if stage.devices == 1:
        return compute
    all_reduce = math.fsum(kind.allreduce_seconds[str(stage.devices)][layers])
    return compute / stage.devices + 2 * all_reduce


def stages_cover_layers(data: DittoData, decision: DittoDecision) -> Iterator[str]:  # (1)
    """A violation where there is no stage, for each stage that does not begin where the one before
    ends, for each empty stage, and where the last one does not end at layer L."""
    if not decision.stages:
        yield "no stages, expected at least one"
        return
    begin = 0
    for k, stage in enumerate(decision.stages):
        if stage.first != begin:
            yield f"stages[{k}] begins with layer {stage.first}, expected {begin}"
        if stage.first >= stage.last:
            yield f"stages[{k}] is empty: [{stage.first}, {stage.last})"
        begin = stage.last
    if begin != data.layers:
        yield f"the stages end at layer {begin}, expected {data.layers}"


def groups_are_powers_of_two(data: DittoData, decision: DittoDecision) -> Iterator[str]:  # (2)
    """A violation for each stage whose number of devices is no power of two up to M."""
    sizes = group_sizes(data.devices_per_node)
    for k, stage in enumerate(decision.stages):
        if stage.devices not in sizes:
            yield (
                f"stages[{k}].devices is {stage.devices}, "
                f"expected a power of two up to {data.devices_per_node}"
            )


def types_have_devices(data: DittoData, decision: DittoDecision) -> Iterator[str]:  # (3)
    """A violation for each type of which more devices are used than there are."""
    for kind in data.device_types:
        used = sum(stage.devices for stage in decision.stages if stage.type == kind.name)
        available = kind.nodes * kind.devices_per_node
        if used > available:
            yield f"{used} devices of type {kind.name} are used, expected at most {available}"


def micro_batches_fill_the_pipeline(
    data: DittoData, decision: DittoDecision
) -> Iterator[str]:  # (4)
    """A violation where there are more stages than micro-batches: never would all stages compute at
    the same time."""
    count = len(decision.stages)
    if count > data.micro_batches:
        yield f"{count} stages, expected at most micro_batches ({data.micro_batches})"


def stages_have_memory(data: DittoData, decision: DittoDecision) -> Iterator[str]:  # (5)
    """A violation for each stage whose states and activations of the micro-batches in flight exceed
    the memory of its devices. Needs (1) to (4) and (6)."""
    memory = data.memory
    if memory is None:
        return
    count = len(decision.stages)
    for k, stage in enumerate(decision.stages):
        layers = slice(stage.first, stage.last)
        in_flight = min(data.micro_batches, count - k)
        states = math.fsum(memory.layer_state_bytes[layers])
        activations = in_flight * math.fsum(memory.layer_activation_bytes[layers])
        needed = (states + activations) / stage.devices
        capacity = memory.device_bytes[stage.type]
        if needed > capacity * (1 + MEMORY_TOLERANCE):
            yield (
                f"stages[{k}] needs {needed:.6g} bytes per device, {stage.type} has {capacity:.6g}"
            )


def types_exist(data: DittoData, decision: DittoDecision) -> Iterator[str]:  # (6)
    """A violation for each stage on a type that the instance does not have."""
    names = [kind.name for kind in data.device_types]
    for k, stage in enumerate(decision.stages):
        if stage.type not in names:
            yield f"stages[{k}].type is {stage.type!r}, expected one of {', '.join(names)}"
