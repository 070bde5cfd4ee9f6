"""What each part of the papers' algorithms costs.

    python -m evidence.speed ablations DIR SET [SET …]

Each variant takes one freedom away and is as good as it can be in the others; its decision is
priced by the family's evaluator, and stands as a row in DIR, as a study's does. Rows that are there
are not made again.

amp     megatron-order   devices in Megatron's order for all degrees and micro-batches, each with
                         the cut that is best for its slowest stages (`envelope_cut`); even-cut: the
                         best known plan with equally many layers per stage
astra   equal-layers     of instances that leave layers free: all stages of a type hold equally many
poplar  largest-micro-batch  ZeRO 0 and 1: every device runs at its largest micro-batch, shares are
                             free
        equal-steps          ZeRO 2 and 3: all accumulation steps are alike but for a smaller last
                             one
What folding, recovery and alternation cost is told by the studies' own rows of `merge`, `paper` and
`exact`.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from hetplan.formulations.amp.cuts import try_placement, uniform_cut
from hetplan.formulations.amp.data import AmpDecision
from hetplan.formulations.amp.problem import compile_problem, megatron_placement
from hetplan.formulations.poplar.data import PoplarDecision
from hetplan.instances.library import Instance, find, plain
from hetplan.schema import parse
from hetplan.solvers.registry import evaluate, solve
from hetplan.solvers.run import Options, Run
from hetplan.studies.rows import Task, compact_json, digest, keys, subjects, task_key, write_row
from hetplan.studies.workers import now, outline

SECONDS = 60.0
# Sums over more devices or samples than this take minutes.
MOST_DEVICES, MOST_SAMPLES = 64, 8192


def megatron_order(instance: Instance) -> Any | None:
    """AMP: the best of all degrees and micro-batches in Megatron's order."""
    data = instance.data
    problem = compile_problem(data)
    nodes = [device.node for device in data.devices]
    trials = [
        trial
        for chosen in problem.configurations()
        if (trial := try_placement(problem, chosen, megatron_placement(nodes, chosen))) is not None
    ]
    return min(trials, key=lambda pair: pair[0])[1].decision() if trials else None


def even_cut(instance: Instance) -> Any | None:
    """AMP: the best known plan, its stages cut evenly."""
    best = known(instance)
    if best is None:
        return None
    cut = uniform_cut(len(instance.data.layers), best["pipeline"])
    stages = [[int(a), int(b)] for a, b in pairwise(cut)]
    return parse(AmpDecision, {**best, "stages": stages}, where=instance.name)


def known(instance: Instance) -> dict[str, Any] | None:
    """The decision in the library's record."""
    entry = find(f"{instance.problem}/{instance.name}")
    best = None if entry is None else entry.best_known()
    return None if best is None else best.decision


def equal_layers(instance: Instance) -> Any | None:
    """Astra: the optimum with equal layers per type."""
    if instance.data.equal_layers_per_type:
        return None
    restricted = instance.data.model_copy(update={"equal_layers_per_type": True})
    return solve(
        instance.family, restricted, "exact", Run(Options(time_limit=SECONDS, threads=1))
    ).decision


def largest_micro_batch(instance: Instance) -> Any | None:
    """Poplar, ZeRO 0 and 1: least T such that the samples each device can do by then can sum up to
    G."""
    data = instance.data
    if data.stepwise or too_large(data):
        return None
    total = data.global_batch
    rows = {}
    for device in data.devices:
        curve = (0.0, *device.step_seconds)
        size = len(curve) - 1
        most = total if size else 0
        rows[tuple(curve)] = [
            (g // size) * curve[-1] + curve[g % size] if g else 0.0 for g in range(most + 1)
        ]
    per_device = [rows[0.0, *device.step_seconds] for device in data.devices]
    levels = sorted({value for row in rows.values() for value in row})
    at = bisect_left(
        levels, True, key=lambda level: reachable(allowed(per_device, level), total) is not None
    )
    if at == len(levels):
        return None
    shares = reachable(allowed(per_device, levels[at]), total)
    assert shares is not None
    chosen = [
        {"samples": g, "micro_batch": min(g, len(device.step_seconds))}
        for g, device in zip(shares, data.devices, strict=True)
    ]
    return parse(PoplarDecision, {"devices": chosen}, where=instance.name)


def equal_steps(instance: Instance) -> Any | None:
    """Poplar, ZeRO 2 and 3: as many equal steps of B samples as fit, and a last one of the rest,
    for the best B."""
    data = instance.data
    if not data.stepwise or too_large(data):
        return None
    per_device = [[0.0, *device.step_seconds] for device in data.devices]
    levels = sorted({value for row in per_device for value in row})
    cheapest: dict[int, float] = {0: 0.0}
    for level in levels:
        bits = prefixes(allowed(per_device, level), data.global_batch)[-1]
        for size in range(1, data.global_batch + 1):
            if bits >> size & 1 and size not in cheapest:
                cheapest[size] = level
    fixed, best = data.comm_seconds, None
    for size, seconds in cheapest.items():
        if size:
            count, rest = divmod(data.global_batch, size)
            if rest in cheapest:
                cost = count * (seconds + fixed) + (cheapest[rest] + fixed if rest else 0.0)
                best = min(best, (cost, size)) if best else (cost, size)
    if best is None:
        return None
    count, rest = divmod(data.global_batch, best[1])
    steps = []
    for number, size in ((count, best[1]), (1, rest)):
        if size:
            chosen = reachable(allowed(per_device, cheapest[size]), size)
            steps.append({"count": number, "micro_batches": chosen})
    return parse(PoplarDecision, {"steps": steps}, where=instance.name)


def too_large(data: Any) -> bool:
    """Whether the sums would take minutes."""
    return len(data.devices) > MOST_DEVICES or data.global_batch > MOST_SAMPLES


def allowed(per_device: Sequence[Sequence[float]], level: float) -> list[list[int]]:
    """By device the amounts that take at most `level` seconds."""
    shared: dict[int, list[int]] = {}
    for row in per_device:
        if id(row) not in shared:
            shared[id(row)] = [amount for amount, seconds in enumerate(row) if seconds <= level]
    return [shared[id(row)] for row in per_device]


def prefixes(choices: Sequence[Sequence[int]], total: int) -> list[int]:
    """Bit s of entry i: whether the first i devices can do s samples in all, s up to `total`."""
    mask, found = (1 << (total + 1)) - 1, [1]
    for amounts in choices:
        bits = 0
        for amount in amounts:
            bits |= found[-1] << amount
        found.append(bits & mask)
    return found


def reachable(choices: Sequence[Sequence[int]], total: int) -> list[int] | None:
    """An amount for each device, `total` in all; None where there is none."""
    reach = prefixes(choices, total)
    if not reach[-1] >> total & 1:
        return None
    left, chosen = total, []
    for amounts, before in zip(reversed(choices), reversed(reach[:-1]), strict=True):
        amount = next(a for a in amounts if a <= left and before >> (left - a) & 1)
        chosen.append(amount)
        left -= amount
    return chosen[::-1]


VARIANTS: dict[tuple[str, str], Callable[[Instance], Any | None]] = {
    ("amp", "megatron-order"): megatron_order,
    ("amp", "even-cut"): even_cut,
    ("astra", "equal-layers"): equal_layers,
    ("poplar", "largest-micro-batch"): largest_micro_batch,
    ("poplar", "equal-steps"): equal_steps,
}


def work(names: Sequence[str]) -> Iterator[tuple[Task, Instance]]:
    """Every variant of every instance as a task, its method an exact one's place-holder."""
    options = Options(time_limit=SECONDS, threads=1).as_dict()
    for _, instance, record in subjects(names):
        best, bound = (record.objective, record.bound) if record else (None, None)
        for problem, variant in VARIANTS:
            if problem == instance.problem:
                key, document = task_key(digest(instance), variant, options), instance.document()
                task = Task(key, "ablations", document, variant, options, best, bound, ())
                yield task, instance


def row(task: Task, instance: Instance) -> dict[str, Any] | None:
    """The variant's row; None where it does not apply to the instance."""
    begun, run = now(), Run(Options())
    decision = VARIANTS[instance.problem, task.method](instance)
    if decision is None:
        return None
    priced = evaluate(instance.family, instance.data, decision)
    return {
        **outline(replace(task, method="auto"), begun),
        "method": task.method,
        "exact": False,
        "status": "feasible" if priced.objective is not None else "unknown",
        "stop": "done",
        "objective": priced.objective,
        "seconds": run.elapsed,
        "message": "; ".join(priced.violations)[:500],
        "solver": "hetplan, evidence/speed/ablations.py",
        "decision_json": compact_json(plain(decision)),
        "details_json": "{}",
    }


def main(folder: Path, names: Sequence[str]) -> None:
    """Write the rows that are missing."""
    there = keys(folder)
    for task, instance in work(names):
        if task.key not in there:
            made = row(task, instance)
            if made is not None:
                write_row(folder, made)
                print(
                    f"{task.name}: {task.method} {made['objective']} {made['message']}", flush=True
                )


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), sys.argv[2:])
