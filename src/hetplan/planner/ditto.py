"""The strategy `ditto`: one pipeline over the cluster whose stages may differ in width, solved
exactly and by the papers' algorithms.

A template is a solution of Ditto's problem: consecutive layers for each stage, with a device type
and a number of devices. The number of devices is the stage's width.

Ditto takes the number of micro-batches as given. Its problem is therefore posed and solved for each
micro-batch size. Ditto's objective leaves out the transfers between stages. The proposed template
is the one with the least sum of objective and transfers. The candidate
has the objective, bound and status of the instance with this template's micro-batch size.

Plans within the memory that the replay counts: let a stage have t devices and micro-batches of b
samples. Let, in bytes per sample, `split` be the activations that the devices of a stage divide,
`whole` those that each of them keeps, and working(t) the memory of the layer that is being
recomputed. On every device the replay counts b (split / t + whole) for each micro-batch that the
stage keeps, and b working(t) once. Ditto's problem divides all activations by t and has no working
memory. Its stages differ in width, so that no single t can be put into its data.

Instead it is posed for stages of at most M devices, with layers that keep split + M whole and with
devices of capacity - b working(1). This demands at least the memory that the replay counts, because
for t <= M

    (split + M whole) / t >= split / t + whole    and    working(1) >= working(t).

For M = 1 it demands exactly as much. The candidate is the best over M = 1, 2, 4, …; its bound is
that of the problem as first posed, for the candidate's micro-batch size.

With `--set ditto.failures=F` the strategy proposes what Oobleck runs instead: F + 1 pipelines or
more, which instantiate templates that are proven for parts of the cluster, and which take
micro-batches in proportion to their speed. The plan file has these templates, so that the plan
after a loss is made without solving.
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
Groups = list[list[int]]  # [stage] the devices of the stage
Rooms = dict[str, dict[int, list[int]]]  # device type of the problem -> node -> its free devices


class DittoSettings(StrictModel):
    """The settings `--set ditto.NAME=VALUE`."""

    failures: Annotated[int, Field(ge=0, le=MAX_RANKS)] | None = None
    """Number of pipelines that may be lost. The plan then has at least one pipeline more, each made
    of a template. None: the plan is one pipeline."""


@dataclass(frozen=True)
class Ditto(Strategy):
    """The strategy: one pipeline with stages of unequal width, or pipelines of templates."""

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
    # Templates of an earlier plan, of which pipelines are made without solving; None: solve.
    ready: ReadyTemplates | None = None

    def pose(self, workload: Workload, run: Run) -> "list[DittoProblem | TemplatesProblem]":
        """The list of one problem, which has an instance for each micro-batch size. Raises NoPlan
        where there is no size."""
        sizes = micro_batch_sizes(workload)
        failures = self.settings.failures
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
            instances = [instance_within_replay(workload, size, width) for size in sizes]
            return [TemplatesProblem(workload, instances, failures, self.ready)]
        return [DittoProblem(workload, [pose(workload, size) for size in sizes])]

    def within_replay(self, workload: Workload, run: Run, bound: float | None) -> Candidate | None:
        """The best candidate over all widths M (see the module), found in half of the time. The
        rest of the time is for its bound. None for pipelines of templates, which are posed within
        the replay's memory from the start."""
        if self.settings.failures is not None:
            return None
        # the powers of two up to the largest width, which is also a power of two
        widths = [1 << k for k in range(group_size(workload).bit_length())]
        sizes = micro_batch_sizes(workload)
        instances = [instance_within_replay(workload, b, width) for width in widths for b in sizes]
        # not quiet: its incumbents and bounds are progress of this search
        half = run.part(share=0.5, quiet=False)
        try:
            best = DittoProblem(workload, instances).solve(AUTO, half)
        except NoPlan:
            return None
        assert best.plan is not None and best.objective is not None
        micro_batch = best.plan.replicas[0].micro_batches[0].samples
        posed_first = solve(family("ditto"), pose(workload, micro_batch), "auto", run.part())
        lower = posed_first.bound
        reached = lower is not None and best.objective <= lower * (1 + EQUAL_WITHIN)
        return replace(best, bound=lower, status="optimal" if reached else "feasible")


@dataclass(frozen=True)
class DittoProblem(Problem):
    """The workload as instances of Ditto's problem. The best of their templates is proposed."""

    workload: Workload
    # One for each micro-batch size; within the replay's memory, one for each micro-batch size and
    # largest width.
    instances: Sequence[DittoData]
    # Time limit of methods that prove nothing. Oobleck's table of states takes hours on large
    # clusters and gives nothing before its end.
    baseline_seconds: float = 20.0

    def solve(self, method: StrategyMethod, run: Run) -> Candidate:
        """The candidate of the best template. The instances are solved one after the other, each in
        an equal share of the time that is left. Raises NoPlan where no instance has a template."""
        if not method.exact:
            run = run.part(seconds=self.baseline_seconds, quiet=False)
        results: list[Result[Any]] = []
        # (objective plus transfers, result, template)
        templates: list[tuple[float, Result[Any], PlacedTemplate]] = []
        for number, data in enumerate(self.instances):
            if run.should_stop and results:
                break
            run.report(note=f"{data.micro_batches} micro-batches")
            part = run.part(share=1 / (len(self.instances) - number))
            result = solve(family("ditto"), data, method.name, part)
            results.append(result)
            if result.decision is None:
                continue
            stages = result.decision.stages
            groups = place(stages, free_devices(self.workload))
            placed = PlacedTemplate(self.workload, data, stages, groups, data.micro_batches)
            seconds = (result.objective or 0.0) + placed.send_seconds()
            templates.append((seconds, result, placed))
        solving = fsum(result.seconds for result in results)
        if not templates:
            all_solved = len(results) == len(self.instances)
            proven = all_solved and all(result.status == "infeasible" for result in results)
            texts = dict.fromkeys(result.message or "out of time" for result in results)
            raise NoPlan("infeasible" if proven else "unknown", "; ".join(texts), solving)
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
    """The workload as pipelines that instantiate templates for parts of the cluster, at the
    micro-batch size at which the slowest pipeline takes least."""

    workload: Workload
    instances: Sequence[DittoData]  # one for each micro-batch size
    failures: int  # number of pipelines that may be lost
    ready: ReadyTemplates | None  # templates of an earlier plan; None: they are solved for

    def as_listed(self, method: StrategyMethod) -> StrategyMethod:
        """The method `templates`."""
        return replace(method, name="templates")

    def solve(self, method: StrategyMethod, run: Run) -> Candidate | None:
        """The candidate of the fastest pipelines over all micro-batch sizes; None for all methods
        but `auto`. The templates of each size are solved for in an equal share of the time that is
        left. Raises NoPlan where no size has pipelines."""
        if method is not AUTO:
            return None
        begun, made = time.perf_counter(), []
        reason = "out of time"
        for number, data in enumerate(self.instances):
            run.report(note=f"{data.micro_batches} micro-batches")
            if self.ready is None:
                part = run.part(share=1 / (len(self.instances) - number))
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
            reason = chosen.message or reason  # that of the last size is told
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
        # [pipeline][device]; a pipeline has 0 bytes on the devices of the others
        peaks = [template.peak_bytes() for template in placed]
        replicas = [template.replica() for template in placed]
        return Candidate(
            strategy="ditto",
            method=method,
            status="feasible",
            closed_form_seconds=seconds,
            objective=seconds,
            fits_memory=True,
            peak_bytes=tuple(map(fsum, zip(*peaks, strict=True))),
            solve_seconds=solving,
            plan=new_plan(self.workload, replicas, templates=ready),
            message=joined(
                f"{counted(len(placed), 'pipeline')} from {counted(len(templates), 'template')}",
                narrowness(self.workload),
            ),
        )

    def placed(self, data: DittoData, pipelines: Sequence[Pipeline]) -> "list[PlacedTemplate]":
        """The template of each pipeline, placed on nodes that no other pipeline uses, the next free
        ones of each device type. A node of the cluster that is larger than a node of the problem
        counts as several nodes."""
        free = free_devices(self.workload)
        # device type -> (node of the cluster, devices) of each node of the problem that is free
        free_nodes: dict[str, list[tuple[int, list[int]]]] = {}
        for kind in data.device_types:
            size = kind.devices_per_node
            free_nodes[kind.name] = [
                (node, devices[first : first + size])
                for node, devices in free[kind.name].items()
                for first in range(0, len(devices), size)
            ]
        placed = []
        for pipeline in pipelines:
            rooms: Rooms = {name: defaultdict(list) for name in free_nodes}
            for name, count in zip(free_nodes, pipeline.template.nodes, strict=True):
                for _ in range(count):
                    node, devices = free_nodes[name].pop(0)
                    rooms[name][node] += devices
            stages = pipeline.template.decision.stages
            groups = place(stages, rooms)
            placed.append(
                PlacedTemplate(self.workload, data, stages, groups, pipeline.micro_batches)
            )
        return placed


def narrowness(workload: Workload) -> str:
    """A note for workloads whose stages cannot have all devices of a node; else empty."""
    size = group_size(workload)
    if size >= max(node.devices for node in workload.cluster.nodes):
        return ""
    return f"stages take at most {counted(size, 'device')}"


def in_plan_file(decision: DittoDecision) -> list[TemplateStage]:
    """A template as the stages in a plan file."""
    return [TemplateStage.model_validate(stage.model_dump()) for stage in decision.stages]


def decisions_of(ready: ReadyTemplates) -> list[list[DittoStage]]:
    """The templates of a plan file as decisions of problem `ditto`."""
    return [
        [DittoStage.model_validate(stage.model_dump()) for stage in pipeline]
        for pipeline in ready.pipelines
    ]


@dataclass(frozen=True)
class PlacedTemplate:
    """A template placed on devices of the cluster, as one pipeline."""

    workload: Workload
    data: DittoData  # the instance that the template solves
    stages: list[DittoStage]
    groups: Groups
    micro_batches: int  # number of micro-batches of the pipeline

    def send_seconds(self) -> float:
        """Seconds in which one micro-batch goes from stage to stage, each time over the slowest
        link between the two groups of devices."""
        layers = self.workload.profile.layers
        bandwidth = self.workload.cluster.bandwidth()
        samples = self.workload.global_batch // self.data.micro_batches
        seconds = []
        # not strict: the last stage sends nothing, so that there is one pair less than stages
        for stage, (here, after) in zip(self.stages, pairwise(self.groups), strict=False):
            size = layers[stage.last - 1].activation_bytes * samples
            seconds.append(size / bandwidth[np.ix_(here, after)].min())
        return fsum(seconds)

    def peak_bytes(self) -> tuple[float, ...]:
        """[D] bytes on each device of the cluster: the states of its layers, and the activations of
        the micro-batches that 1F1B keeps at a time; 0 for devices that the pipeline does not use.
        """
        memory, stages = self.data.memory, self.stages
        assert memory is not None
        peaks = [0.0] * len(self.workload.cluster.devices)
        for k, (stage, group) in enumerate(zip(stages, self.groups, strict=True)):
            layers = slice(stage.first, stage.last)
            alive = min(self.micro_batches, len(stages) - k)
            kept = alive * fsum(memory.layer_activation_bytes[layers])
            for device in group:
                peaks[device] = (fsum(memory.layer_state_bytes[layers]) + kept) / len(group)
        return tuple(peaks)

    def replica(self) -> Replica:
        """The pipeline as a replica of a plan: 1F1B, no ZeRO, and each stage tensor parallel over
        its group of devices."""
        stages = [
            tensor_stage([(stage.first, stage.last)], group)
            for stage, group in zip(self.stages, self.groups, strict=True)
        ]
        samples = self.workload.global_batch // self.data.micro_batches
        batches = MicroBatches(count=self.micro_batches, samples=samples)
        return Replica(stages=stages, micro_batches=[batches])


def instance_within_replay(workload: Workload, micro_batch: int, width: int) -> DittoData:
    """The instance of one micro-batch size whose stages have at most `width` devices, with memory
    that is never looser than the replay's (see the module)."""
    data = pose(workload, micro_batch, width=width)
    assert data.memory is not None
    working = micro_batch * workload.working_bytes.get(1, 0.0)
    capacities = {
        name: room(capacity, working) for name, capacity in data.memory.device_bytes.items()
    }
    # split + M whole: `saved_bytes` is split + whole, `replicated_saved_bytes` is whole
    kept = [
        (layer.saved_bytes + (width - 1) * layer.replicated_saved_bytes) * micro_batch
        for layer in workload.profile.layers
    ]
    memory = data.memory.model_copy(
        update={"device_bytes": capacities, "layer_activation_bytes": kept}
    )
    return data.model_copy(update={"memory": memory})


def place(stages: Sequence[DittoStage], free: Rooms) -> Groups:
    """[stage] the devices of each stage, all in one node. They are removed from `free`.

    Wide stages choose first, so that widths of powers of two leave no remainder. A stage prefers
    the node of a neighbour in the pipeline, then the node with the fewest free devices.
    """
    node_of = [-1] * len(stages)  # [stage] its node, -1: not placed yet
    groups: Groups = [[] for _ in stages]
    for k in sorted(range(len(stages)), key=lambda k: -stages[k].devices):
        stage = stages[k]
        free_of_type = free[stage.type]
        large_enough = [n for n, devices in free_of_type.items() if len(devices) >= stage.devices]
        # no node has the number -1 of a neighbour that is not placed yet
        near = {node_of[j] for j in (k - 1, k + 1) if 0 <= j < len(node_of)}
        chosen = min(large_enough, key=lambda n: (n not in near, len(free_of_type[n]), n))
        node_of[k] = chosen
        devices = free_of_type[chosen]
        groups[k], free_of_type[chosen] = devices[: stage.devices], devices[stage.devices :]
    return groups


def free_devices(workload: Workload) -> Rooms:
    """All devices of the cluster, by device type of the posed problem and by node."""
    nodes = workload.cluster.nodes
    kinds = list(dict.fromkeys(kind_of(node) for node in nodes))
    name_of = dict(zip(kinds, kind_names(kinds), strict=True))
    free: Rooms = {name: {} for name in name_of.values()}
    for number, device in enumerate(workload.cluster.devices):
        name = name_of[kind_of(nodes[device.node])]
        free[name].setdefault(device.node, []).append(number)
    return free
