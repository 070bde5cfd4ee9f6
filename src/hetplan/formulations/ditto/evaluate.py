"""The independent evaluator of problem `ditto`: judges a template from the data alone, in plain
Python.

Sets   k in 0..S-1 stages, each layers [first, last) on x devices of type i.
Data   see data.py.
(1) S >= 1 stages, contiguous and nonempty, cover the layers   (2) x in {1, 2, 4, ..., M}
(3) devices used of a type <= nodes x M   (4) S <= N_b
(5) (sum_l state + min(N_b, S - k) sum_l activation) / x <= device_bytes of the stage's type
Price  t_k = sum_l ((forward + backward)_l / x + [x > 1] 2 allreduce_l[x]);  T = T1 + T2 + T3 with
       T1 = sum_k t_k,  T2 = (N_b - S + k* - 1) t_k*,  T3 = sum_{k >= k*} t_k,  k* the slowest
       stage.
Stages that fit (2) and (3) always pack into nodes, since their sizes are powers of two that divide
M.
Source Ditto, Section 3, eq. 1-3; Oobleck (SOSP 2023), Section 4.1.2; (5) is hetplan's, for 1F1B.
"""

import math

from hetplan.errors import require
from hetplan.formulations.ditto.data import DittoData, DittoDecision, DittoStage
from hetplan.solvers.registry import Evaluation, objections

# Of stages slower than all but this part of the slowest the first counts as slowest: it gives the
# least T, so a minimum exists.
TIE = 1e-9
# A sum of bytes may exceed a capacity by rounding in its last digits, not by more.
MEMORY_TOLERANCE = 1e-9


def evaluate(data: DittoData, decision: DittoDecision) -> Evaluation:
    """Feasibility and price of a template; `parts`: T1, T2, T3, the slowest stage's time and
    number. Violations: the first of each check, and of (5) where (1) to (4) hold."""
    checks = (check_cover, check_groups, check_devices, check_stage_count)
    violations = tuple(line for check in checks for line in objections(check, data, decision))
    violations = violations or objections(check_memory, data, decision)
    return (
        Evaluation(None, violations)
        if violations
        else price(data.micro_batches, [stage_seconds(data, stage) for stage in decision.stages])
    )


def price(micro_batches: int, times: list[float]) -> Evaluation:
    """T1 + T2 + T3 of stages that take `times` seconds per micro-batch."""
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
    """k*: the first stage within a relative TIE of the slowest."""
    least = max(times) * (1 - TIE)
    return next(k for k, t in enumerate(times) if t >= least)


def stage_seconds(data: DittoData, stage: DittoStage) -> float:
    """t_k: forward and backward of one micro-batch, with two all-reduces per layer where x > 1."""
    kind = next(kind for kind in data.device_types if kind.name == stage.type)
    layers = slice(stage.first, stage.last)
    compute = math.fsum(kind.forward_seconds[layers]) + math.fsum(kind.backward_seconds[layers])
    return (
        compute
        if stage.devices == 1
        else compute / stage.devices
        + 2 * math.fsum(kind.allreduce_seconds[str(stage.devices)][layers])
    )


def check_cover(data: DittoData, decision: DittoDecision) -> None:
    """(1) the stages part the layers."""
    require(decision.stages, "no stages, expected at least one")
    at = 0
    for k, stage in enumerate(decision.stages):
        require(stage.first == at, f"stages[{k}] begins with layer {stage.first}, expected {at}")
        require(stage.first < stage.last, f"stages[{k}] is empty: [{stage.first}, {stage.last})")
        at = stage.last
    require(at == data.layers, f"the stages end at layer {at}, expected {data.layers}")


def check_groups(data: DittoData, decision: DittoDecision) -> None:
    """(2) known types, and group sizes that one node offers."""
    names, most = [kind.name for kind in data.device_types], data.devices_per_node
    for k, (name, x) in enumerate((stage.type, stage.devices) for stage in decision.stages):
        require(name in names, f"stages[{k}].type is {name!r}, expected one of {', '.join(names)}")
        require(
            x <= most and not x & (x - 1),
            f"stages[{k}].devices is {x}, expected a power of two up to {most}",
        )


def check_devices(data: DittoData, decision: DittoDecision) -> None:
    """(3) no type gives more devices than it has."""
    for kind in data.device_types:
        used = sum(stage.devices for stage in decision.stages if stage.type == kind.name)
        limit = kind.nodes * kind.devices_per_node
        uses = f"{used} devices of type {kind.name} are used"
        require(used <= limit, f"{uses}, expected at most {limit}")


def check_stage_count(data: DittoData, decision: DittoDecision) -> None:
    """(4) every stage works in the steady phase."""
    count, most = len(decision.stages), data.micro_batches
    require(count <= most, f"{count} stages, expected at most micro_batches ({most})")


def check_memory(data: DittoData, decision: DittoDecision) -> None:
    """(5) states and the activations of the micro-batches in flight fit each device."""
    memory, count = data.memory, len(decision.stages)
    if memory is None:
        return
    for k, stage in enumerate(decision.stages):
        layers = slice(stage.first, stage.last)
        alive = min(data.micro_batches, count - k)
        held = math.fsum(memory.layer_state_bytes[layers])
        held = (held + alive * math.fsum(memory.layer_activation_bytes[layers])) / stage.devices
        limit = memory.device_bytes[stage.type]
        needs = f"stages[{k}] needs {held:.6g} bytes per device"
        require(held <= limit * (1 + MEMORY_TOLERANCE), f"{needs}, {stage.type} has {limit:.6g}")
