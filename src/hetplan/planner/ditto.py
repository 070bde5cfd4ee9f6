"""The strategy `ditto`: one pipeline over the cluster whose stages may differ in width, beside the
papers' algorithms.

Ditto takes the number of micro-batches as given. Its problem is therefore posed and solved for each
size that micro-batches can have. Of the templates found, the one is proposed whose price and
transfers between stages together are least: Ditto's price leaves the transfers out. Objective,
bound and status are those of the instance with this template's size.

Within the replay's memory. Stages of one template differ in width, so that the problem cannot say
what the replay counts (see `planner.amp`). With stages of at most M devices, layers keep
split + M whole and devices have capacity - b working(1): never looser than the replay, exact for
M = 1. The best over M = 1, 2, 4, … is taken; its bound is that of its micro-batch's problem as
first posed.

With `--set ditto.failures=F` the strategy proposes what Oobleck runs instead: F + 1 pipelines or
more, made of templates that are proven for parts of the cluster, with micro-batches shared by
speed. The plan file carries the templates, of which a plan after a loss is made without solving.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import fsum
from operator import itemgetter
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from hetplan.formulations import family
from hetplan.formulations.ditto.data import DittoData, DittoDecision, DittoStage
from hetplan.formulations.ditto.pose import (
    group_size,
    kind_names,
    kind_of,
    micro_batch_sizes,
    pose,
)
from hetplan.formulations.ditto.templates import (
    Pipeline,
    instantiate,
    ready_templates,
    template_list,
)
from hetplan.planner.amp import EQUAL_WITHIN, room
from hetplan.planner.candidate import Candidate, StrategyMethod, joined
from hetplan.planner.strategy import NoPlan, Problem, Strategy, tensor_stage
from hetplan.plans.making import new_plan
from hetplan.plans.plan import MAX_RANKS, MicroBatches, Replica
from hetplan.plans.templates import ReadyTemplates, TemplateStage
from hetplan.profiling.workload import Workload
from hetplan.schema import StrictModel
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Result, Run
from hetplan.text import counted

AUTO = StrategyMethod("auto", exact=True)
Groups = list[list[int]]
Rooms = dict[str, dict[int, list[int]]]  # type -> node -> devices


class DittoSettings(StrictModel):
    """`--set ditto.NAME=VALUE`."""

    # Pipelines that may be lost: makes pipelines of templates, one more than that at least.
    failures: Annotated[int, Field(ge=0, le=MAX_RANKS)] | None = None


@dataclass(frozen=True)
class Ditto(Strategy):
    """One pipeline, stages of unequal width. ready: templates made before, to make pipelines of."""

    name = "ditto"
    methods = (
        AUTO,
        StrategyMethod("paper", paper=True),
        StrategyMethod("oobleck"),
        StrategyMethod("greedy-joined"),
    )
    Settings = DittoSettings
    recomputes = True

    settings: DittoSettings = field(default_factory=DittoSettings)
    ready: ReadyTemplates | None = None

    def pose(self, workload: Workload, run: Run) -> "list[DittoProblem | TemplatesProblem]":
        """One problem, with an instance for each micro-batch size."""
        sizes, failures = micro_batch_sizes(workload), self.settings.failures
        if self.ready is not None:
            sizes = [size for size in sizes if size == self.ready.samples]
        if not sizes:
            raise NoPlan(
                "infeasible",
                "no micro-batch size with times of single devices of every type divides the global "
                "batch",
            )
        if failures is not None:
            width = group_size(workload)
            return [
                TemplatesProblem(
                    workload,
                    [instance_within_replay(workload, size, width) for size in sizes],
                    failures,
                    self.ready,
                )
            ]
        return [DittoProblem(workload, [pose(workload, size) for size in sizes])]

    def within_replay(self, workload: Workload, run: Run, bound: float | None) -> Candidate | None:
        """The best over all largest widths, in half of the time; the rest is for its bound.
        Templates for parts of the cluster are posed within the replay's memory."""
        if self.settings.failures is not None:
            return None
        widths = [1 << k for k in range(group_size(workload).bit_length())]
        sizes = micro_batch_sizes(workload)
        instances = [instance_within_replay(workload, b, width) for width in widths for b in sizes]
        try:
            best = DittoProblem(workload, instances).solve(
                AUTO, run.part(time_limit=run.remaining / 2, quiet=False)
            )
        except NoPlan:
            return None
        assert best.plan is not None and best.objective is not None
        loose = solve(
            family("ditto"),
            pose(workload, best.plan.replicas[0].micro_batches[0].samples),
            "auto",
            run.part(),
        )
        reached = loose.bound is not None and best.objective <= loose.bound * (1 + EQUAL_WITHIN)
        return replace(best, bound=loose.bound, status="optimal" if reached else "feasible")


@dataclass(frozen=True)
class DittoProblem(Problem):
    """Several instances, one for each number of micro-batches; the best of their templates is
    proposed.

    baseline_seconds: the time of methods that prove nothing. Oobleck's table of states takes hours
    on large clusters and gives nothing before its end.
    """

    workload: Workload
    instances: Sequence[DittoData]
    baseline_seconds: float = 20.0

    def solve(self, method: StrategyMethod, run: Run) -> Candidate:
        """The instances one after the other, each with its part of the time that is left; of their
        templates the best."""
        if not method.exact:
            limit = min(self.baseline_seconds, run.options.time_limit or self.baseline_seconds)
            run.options = replace(run.options, time_limit=limit)
        results: list[Result[Any]] = []
        templates: list[tuple[float, Result[Any], PlacedTemplate]] = []
        for left, data in zip(range(len(self.instances), 0, -1), self.instances, strict=True):
            if run.should_stop and results:
                break
            run.report(note=f"{data.micro_batches} micro-batches")
            result = solve(
                family("ditto"), data, method.name, run.part(time_limit=run.remaining / left)
            )
            results.append(result)
            if result.decision is not None:
                stages = result.decision.stages
                placed = PlacedTemplate(
                    self.workload,
                    data,
                    stages,
                    place(stages, free_devices(self.workload)),
                    data.micro_batches,
                )
                templates.append(
                    ((result.objective or 0.0) + placed.send_seconds(), result, placed)
                )
        solving = fsum(result.seconds for result in results)
        if not templates:
            proven = all(result.status == "infeasible" for result in results)
            status = "infeasible" if proven and len(results) == len(self.instances) else "unknown"
            texts = dict.fromkeys(result.message or "out of time" for result in results)
            raise NoPlan(status, "; ".join(texts), solving)
        _, best, placed = min(templates, key=itemgetter(0))
        return replace(
            Candidate.of_result("ditto", method, best),
            closed_form_seconds=best.objective,
            objective=best.objective,
            fits_memory=True,
            peak_bytes=placed.peak_bytes(),
            solve_seconds=solving,
            plan=new_plan(self.workload, [placed.replica()]),
            message=joined(best.message, narrowness(self.workload)),
        )


@dataclass(frozen=True)
class TemplatesProblem(Problem):
    """Pipelines made of templates for parts of the cluster, at the micro-batch size where their
    slowest takes least. ready: the templates, where they were made before."""

    workload: Workload
    instances: Sequence[DittoData]
    failures: int
    ready: ReadyTemplates | None

    def as_listed(self, method: StrategyMethod) -> StrategyMethod:
        """Candidates are `ditto/templates`."""
        return replace(method, name="templates")

    def solve(self, method: StrategyMethod, run: Run) -> Candidate | None:
        """The list of each size, each with its part of the time that is left, and the fastest
        pipelines of it."""
        if method is not AUTO:
            return None
        begun, made = time.perf_counter(), []
        reason = "out of time"
        for left, data in zip(range(len(self.instances), 0, -1), self.instances, strict=True):
            run.report(note=f"{data.micro_batches} micro-batches")
            if self.ready is None:
                part = run.part(time_limit=run.remaining / left)
                templates = list(template_list(data, part).templates)
            else:
                templates = ready_templates(data, decisions_of(self.ready))
            chosen = instantiate(
                templates,
                tuple(kind.nodes for kind in data.device_types),
                data.micro_batches,
                run.part(),
                failures=self.failures,
            )
            reason = chosen.message or reason
            if chosen.iteration_seconds is not None:
                made.append((chosen.iteration_seconds, data, chosen.pipelines, templates))
        solving = time.perf_counter() - begun
        if not made:
            raise NoPlan("unknown", reason, solving)
        seconds, data, pipelines, templates = min(made, key=itemgetter(0))
        placed = self.placed(data, pipelines)
        ready = self.ready or ReadyTemplates(
            failures=self.failures,
            samples=self.workload.global_batch // data.micro_batches,
            pipelines=[in_plan_file(template.decision) for template in templates],
        )
        return Candidate(
            strategy="ditto",
            method=method,
            status="feasible",
            closed_form_seconds=seconds,
            objective=seconds,
            fits_memory=True,
            peak_bytes=tuple(map(fsum, zip(*(one.peak_bytes() for one in placed), strict=True))),
            solve_seconds=solving,
            plan=new_plan(self.workload, [one.replica() for one in placed], templates=ready),
            message=joined(
                f"{counted(len(placed), 'pipeline')} from {counted(len(templates), 'template')}",
                narrowness(self.workload),
            ),
        )

    def placed(self, data: DittoData, pipelines: Sequence[Pipeline]) -> "list[PlacedTemplate]":
        """Each pipeline on nodes of its own, the next ones of each kind; larger nodes are posed as
        several."""
        units = {
            kind.name: [
                (node, devices[at : at + kind.devices_per_node])
                for node, devices in free_devices(self.workload)[kind.name].items()
                for at in range(0, len(devices), kind.devices_per_node)
            ]
            for kind in data.device_types
        }
        placed = []
        for pipeline in pipelines:
            own: Rooms = {name: defaultdict(list) for name in units}
            for name, count in zip(units, pipeline.template.nodes, strict=True):
                for _ in range(count):
                    node, devices = units[name].pop(0)
                    own[name][node] += devices
            stages = pipeline.template.decision.stages
            placed.append(
                PlacedTemplate(
                    self.workload, data, stages, place(stages, own), pipeline.micro_batches
                )
            )
        return placed


def narrowness(workload: Workload) -> str:
    """A note where stages cannot have all devices of a node; else empty."""
    size = group_size(workload)
    if size >= max(node.devices for node in workload.cluster.nodes):
        return ""
    return f"stages take at most {counted(size, 'device')}"


def in_plan_file(decision: DittoDecision) -> list[TemplateStage]:
    """A template as a plan file holds it."""
    return [TemplateStage.model_validate(stage.model_dump()) for stage in decision.stages]


def decisions_of(ready: ReadyTemplates) -> list[list[DittoStage]]:
    """The templates of a plan file as decisions of problem `ditto`."""
    return [
        [DittoStage.model_validate(stage.model_dump()) for stage in pipeline]
        for pipeline in ready.pipelines
    ]


@dataclass(frozen=True)
class PlacedTemplate:
    """A template found for an instance, placed on devices of the cluster, as one pipeline."""

    workload: Workload
    data: DittoData
    stages: list[DittoStage]
    groups: Groups  # devices of each
    micro_batches: int  # of the pipeline

    def send_seconds(self) -> float:
        """Seconds of one micro-batch from stage to stage over the slowest links in use."""
        layers, bandwidth = self.workload.profile.layers, self.workload.cluster.bandwidth()
        samples = self.workload.global_batch // self.data.micro_batches
        return fsum(
            layers[stage.last - 1].activation_bytes * samples / bandwidth[np.ix_(here, after)].min()
            for stage, (here, after) in zip(self.stages, pairwise(self.groups), strict=False)
        )

    def peak_bytes(self) -> tuple[float, ...]:
        """[D] memory of each device: states and the micro-batches that 1F1B keeps alive; unused
        ones hold nothing."""
        memory, stages = self.data.memory, self.stages
        assert memory is not None
        peaks = [0.0] * len(self.workload.cluster.devices)
        for k, (stage, group) in enumerate(zip(stages, self.groups, strict=True)):
            layers = slice(stage.first, stage.last)
            kept = min(self.micro_batches, len(stages) - k) * fsum(
                memory.layer_activation_bytes[layers]
            )
            for device in group:
                peaks[device] = (fsum(memory.layer_state_bytes[layers]) + kept) / len(group)
        return tuple(peaks)

    def replica(self) -> Replica:
        """Every stage tensor parallel over its own group; 1F1B, no ZeRO."""
        stages = [
            tensor_stage([(stage.first, stage.last)], group)
            for stage, group in zip(self.stages, self.groups, strict=True)
        ]
        return Replica(
            stages=stages,
            micro_batches=[
                MicroBatches(
                    count=self.micro_batches,
                    samples=self.workload.global_batch // self.data.micro_batches,
                )
            ],
        )


def instance_within_replay(workload: Workload, micro_batch: int, width: int) -> DittoData:
    """The instance of one micro-batch size whose stages take at most `width` devices, within the
    replay's memory."""
    data = pose(workload, micro_batch, width=width)
    assert data.memory is not None
    beside = micro_batch * workload.working_bytes.get(1, 0.0)
    kept = [
        (layer.saved_bytes + (width - 1) * layer.replicated_saved_bytes) * micro_batch
        for layer in workload.profile.layers
    ]
    memory = data.memory.model_copy(
        update={
            "device_bytes": {
                name: room(capacity, beside) for name, capacity in data.memory.device_bytes.items()
            },
            "layer_activation_bytes": kept,
        }
    )
    return data.model_copy(update={"memory": memory})


def place(stages: Sequence[DittoStage], free: Rooms) -> Groups:
    """Devices of each stage [S][x], each group in one node, taken from those that are free.

    Wide stages choose first, so that powers of two leave no remainder; a stage prefers the node of
    a neighbour in the pipeline, then the node with least room.
    """
    node_of = [-1] * len(stages)
    groups: Groups = [[] for _ in stages]
    for k in sorted(range(len(stages)), key=lambda k: -stages[k].devices):
        stage = stages[k]
        rooms = [n for n, devices in free[stage.type].items() if len(devices) >= stage.devices]
        near = {node_of[j] for j in (k - 1, k + 1) if 0 <= j < len(node_of)}
        chosen = min(rooms, key=lambda n: (n not in near, len(free[stage.type][n]), n))
        node_of[k] = chosen
        devices = free[stage.type][chosen]
        groups[k], free[stage.type][chosen] = devices[: stage.devices], devices[stage.devices :]
    return groups


def free_devices(workload: Workload) -> Rooms:
    """Devices by the posed problem's type and by node."""
    nodes = workload.cluster.nodes
    kinds = list(dict.fromkeys(kind_of(node) for node in nodes))
    name = dict(zip(kinds, kind_names(kinds), strict=True))
    free: Rooms = {text: {} for text in name.values()}
    for device, place_of in enumerate(workload.cluster.devices):
        free[name[kind_of(nodes[place_of.node])]].setdefault(place_of.node, []).append(device)
    return free
