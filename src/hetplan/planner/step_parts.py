"""The parts of the seconds of recorded steps, beside those of the plan's own replay."""

from collections.abc import Hashable
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from hetplan.adapters.importers.traces.chrome import own_passes
from hetplan.adapters.importers.traces.reading import RunTrace
from hetplan.plans.plan import Plan
from hetplan.profiling.workload import Workload
from hetplan.replays.observed.kernels import RankParts, rank_parts
from hetplan.replays.observed.steps import Pass, Step, Worker, make_step
from hetplan.replays.observed.what_if import Alike, Parts, WhatIf, by_stage, mean_parts
from hetplan.replays.replay import replay
from hetplan.replays.trace import trace


@dataclass(frozen=True)
class MessageCost:
    """The messages of one boundary between virtual stages, in the mean over the steps."""

    kind: str  # kind of the pass that waits for them
    virtual_stage: int  # of that pass
    seconds: float  # for which a pass waits that needs one
    effect: float  # seconds by which a step would be shorter without them


@dataclass(frozen=True)
class PassParts:
    """The parts of steps whose passes are known, in the mean over the steps."""

    steps: tuple[tuple[int, Parts], ...]  # (number of the step, its parts)
    mean: Parts
    predicted: Parts | None  # of the plan's own replay; None without a plan
    # name of each worker -> seconds by which its slowness makes a step longer
    workers: dict[str, float]
    messages: tuple[MessageCost, ...]

    @property
    def seconds(self) -> float:
        """Mean seconds of a step."""
        return self.mean.seconds

    def document(self) -> dict[str, Any]:
        """The parts as JSON types."""
        steps = [
            {"step": number, "seconds": parts.seconds, "parts": asdict(parts)}
            for number, parts in self.steps
        ]
        workers = [
            {"worker": name, "effect_seconds": effect} for name, effect in self.workers.items()
        ]
        return {
            "seconds": self.seconds,
            "parts": asdict(self.mean),
            "predicted_parts": None if self.predicted is None else asdict(self.predicted),
            "workers": workers,
            "messages": [asdict(message) for message in self.messages],
            "steps": steps,
        }


def alike_in(plan: Plan) -> Alike:
    """Passes are alike that compute the same layers with equally many samples on the same types of
    devices."""
    samples: list[list[int]] = []  # [replica][micro-batch]
    shapes: dict[tuple[int, int], Hashable] = {}  # (replica, stage) -> layers, types and shares
    for r, replica in enumerate(plan.replicas):
        sizes = [[batch.samples] * batch.count for batch in replica.micro_batches]
        samples.append([size for of_batches in sizes for size in of_batches])
        for s, stage in enumerate(replica.stages):
            types = tuple(plan.devices[device].type for device in stage.all_devices)
            shapes[r, s] = (tuple(stage.layers), types, tuple(stage.row_shares))

    def alike(worker: Worker, one: Pass) -> Hashable:
        sizes = samples[worker.replica] if worker.replica < len(samples) else []
        size = sizes[one.micro_batch] if one.micro_batch < len(sizes) else None
        shape = shapes.get((worker.replica, worker.stage))
        return one.kind, one.virtual_stage, shape, size

    return alike


def replayed_step(plan: Plan, workload: Workload) -> Step:
    """The plan's own replay as a step."""
    events = trace(replay(plan, workload))["traceEvents"]
    passes, end = own_passes(events, plan.name, plan)
    return make_step(0, passes, end, plan.name)


def pass_parts(run: RunTrace, plan: Plan | None, workload: Workload | None) -> PassParts:
    """The parts of a run's steps. plan, workload: those of the run; None: unknown."""
    alike = by_stage if plan is None else alike_in(plan)
    what_ifs = [WhatIf(step, alike) for step in run.steps]
    parts = [what_if.parts() for what_if in what_ifs]
    predicted = None
    if plan is not None and workload is not None:
        predicted = WhatIf(replayed_step(plan, workload), alike).parts()
    effects = [what_if.worker_effects() for what_if in what_ifs]
    names = list(dict.fromkeys(name for of_step in effects for name in of_step))
    workers = {name: fmean(of_step.get(name, 0.0) for of_step in effects) for name in names}
    numbers = [step.number for step in run.steps]
    return PassParts(
        steps=tuple(zip(numbers, parts, strict=True)),
        mean=mean_parts(parts),
        predicted=predicted,
        workers=workers,
        messages=message_costs(what_ifs),
    )


def message_costs(what_ifs: list[WhatIf]) -> tuple[MessageCost, ...]:
    """The costs of the messages of every boundary, the most costly first."""
    effects = [what_if.message_effects() for what_if in what_ifs]
    boundaries = dict.fromkeys(boundary for of_step in effects for boundary in of_step)
    costs = []
    for kind, virtual_stage in boundaries:
        boundary = (kind, virtual_stage)
        seconds = [max(w.messages[boundary]) for w in what_ifs if boundary in w.messages]
        effect = fmean(of_step.get(boundary, 0.0) for of_step in effects)
        costs.append(MessageCost(kind, virtual_stage, fmean(seconds), effect))
    costs.sort(key=lambda cost: -cost.effect)
    return tuple(costs)


def mean_rank_parts(run: RunTrace) -> list[RankParts]:
    """The parts of every rank, in the mean over the steps of a run, by rank."""
    of_rank: dict[int, list[RankParts]] = {}
    for steps in run.ranks.values():
        for parts in rank_parts(steps):
            of_rank.setdefault(parts.rank, []).append(parts)
    return [
        RankParts(
            rank=rank,
            computing=fmean(parts.computing for parts in of_steps),
            transfers=fmean(parts.transfers for parts in of_steps),
            waiting=fmean(parts.waiting for parts in of_steps),
            idle=fmean(parts.idle for parts in of_steps),
        )
        for rank, of_steps in sorted(of_rank.items())
    ]
