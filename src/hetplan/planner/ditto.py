"""The strategy `ditto`: one pipeline over the cluster whose stages may differ in width, beside the
papers' algorithms.

Ditto takes the number of micro-batches as given: its problem is posed and solved for each size that
they can have. Of the templates found, each on devices of the real cluster, the one with the best
price is proposed; objective, bound and status are those of its size's problem, in Ditto's price.

Sets   k in 0..S-1 stages of one pipeline: layers [a_k, b_k) on the devices G_k of one node, tensor
       parallel, x = |G_k|.
Data   N_b micro-batches of m samples; B(G): the lowest bandwidth between any two devices of G,
       bytes/s.
Price  T = (N_b - 1) max_k t_k + sum_k t_k + sum_{k < S-1} e_k                             (1F1B)
       t_k = sum_l (the profile's seconds at tensor degree x + 2 (x-1)/x tensor_bytes_l m / B(G_k))
       e_k = activation_bytes of the stage's last layer m / the slowest link on which stage k + 1
             receives it
This is AMP's price (NeurIPS 2022, eq. 3 and 5) for one pipeline whose stages may differ in width,
so that plans of both problems compare. Ditto's own T leaves out e_k, divides compute evenly by x,
and counts T3 from the slowest stage on, by which an uneven pipeline may be given less than the
N_b t_k that its slowest stage alone computes.

Within the replay's memory. Stages of one template differ in width, so that the problem cannot say
what the replay counts (see `planner.amp`). With stages of at most M devices, layers keep
split + M whole and devices have capacity - b working(1): never looser than the replay, exact for
M = 1. The best over M = 1, 2, 4, … is taken; its bound is that of its micro-batch's problem as
first posed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import fsum
from typing import Any

from hetplan.errors import UnsupportedError
from hetplan.formulations import family
from hetplan.formulations.amp.data import AmpData
from hetplan.formulations.amp.evaluate import ring_seconds
from hetplan.formulations.amp.pose import pose as pose_amp
from hetplan.formulations.ditto.data import DittoData, DittoDecision
from hetplan.formulations.ditto.pose import (
    group_size,
    kind_names,
    kind_of,
    micro_batch_sizes,
    pose,
)
from hetplan.planner.amp import SAME, room
from hetplan.planner.known import solved
from hetplan.planner.strategy import (
    Candidate,
    Method,
    NoPlan,
    Problem,
    Strategy,
    joined,
    tensor_stage,
)
from hetplan.profiling.workload import Workload
from hetplan.runtime.plan import MicroBatches, Plan, Replica, new_plan
from hetplan.solvers.result import Result
from hetplan.solvers.run import Run
from hetplan.text import Table, devices_text, names_text, seconds_text, share_text

AUTO = Method("auto", exact=True)
Groups = list[list[int]]


class Ditto(Strategy):
    """One pipeline, stages of unequal width."""

    name = "ditto"
    methods = (AUTO, Method("paper", paper=True), Method("oobleck"), Method("greedy"))
    recomputes = True

    def pose(self, workload: Workload, run: Run) -> list[Templates]:
        """One problem, with an instance for each micro-batch size."""
        sizes = micro_batch_sizes(workload)
        if not sizes:
            raise NoPlan(
                "infeasible",
                "no micro-batch size with times of single devices of every type divides the global "
                "batch",
            )
        return [Templates(workload, [(size, pose(workload, size)) for size in sizes])]

    def within_replay(self, workload: Workload, run: Run, bound: float | None) -> Candidate | None:
        """The best over all largest widths, in half of the time; the rest is for its bound."""
        widths = [1 << k for k in range(group_size(workload).bit_length())]
        sizes = micro_batch_sizes(workload)
        instances = [(b, within_problem(workload, b, width)) for width in widths for b in sizes]
        half = run.part(time_limit=run.remaining / 2, quiet=False)
        try:
            best = Templates(workload, instances).solve(AUTO, half)
        except NoPlan:
            return None
        assert best.plan is not None and best.objective is not None
        size = best.plan.replicas[0].micro_batches[0].samples
        loose = solved(family("ditto"), pose(workload, size), "auto", run.part())
        reached = loose.bound is not None and best.objective <= loose.bound * (1 + SAME)
        return replace(best, bound=loose.bound, status="optimal" if reached else "feasible")


@dataclass(frozen=True)
class Templates(Problem):
    """The best template of several instances, each with its micro-batch size.

    baseline_seconds: for methods that prove nothing. Oobleck's table of states takes hours on large
    clusters and gives nothing before its end.
    """

    workload: Workload
    instances: Sequence[tuple[int, DittoData]]
    baseline_seconds: float = 20.0

    def solve(self, method: Method, run: Run) -> Candidate:
        """The instances one after the other, each with its part of the time that is left; of their
        templates the best by its price on the cluster."""
        if not method.exact:
            limit = min(self.baseline_seconds, run.options.time_limit or self.baseline_seconds)
            run.options = replace(run.options, time_limit=limit)
        results: list[Result[Any]] = []
        templates: list[Template] = []
        cluster = pose_amp(self.workload, memory=False)
        for left, (size, data) in zip(
            range(len(self.instances), 0, -1), self.instances, strict=True
        ):
            if run.should_stop and results:
                break
            run.report(note=f"micro-batches of {size}")
            part = run.part(time_limit=run.remaining / left)
            result = solved(family("ditto"), data, method.name, part)
            results.append(result)
            if (decision := result.decision) is not None:
                groups = place(self.workload, decision)
                priced = price(self.workload, cluster, decision, groups, size)
                template = Template(self.workload, size, data, result, decision, groups, priced)
                templates.append(template)
        seconds = fsum(result.seconds for result in results)
        if not templates:
            proven = all(result.status == "infeasible" for result in results)
            status = "infeasible" if proven and len(results) == len(self.instances) else "unknown"
            texts = dict.fromkeys(result.message or "out of time" for result in results)
            raise NoPlan(status, "; ".join(texts), seconds)
        best = min(templates, key=lambda template: template.priced.seconds)
        return replace(
            Candidate.of_result("ditto", method, best.result),
            predicted_seconds=best.priced.seconds,
            objective=best.result.objective,
            fits_memory=True,
            peak_bytes=best.peak_bytes(),
            solve_seconds=seconds,
            plan=best.to_plan(),
            message=best.notes(),
            tables=(best.table(),),
        )


@dataclass(frozen=True)
class Template:
    """What a method made of the instance of one micro-batch size, on devices of the cluster."""

    workload: Workload
    micro_batch: int
    data: DittoData
    result: Result[Any]
    decision: DittoDecision  # the result's
    groups: Groups
    priced: Priced

    def notes(self) -> str:
        """What a reader of the ranking has to know."""
        if self.result.bound is None:
            return self.result.message
        size = group_size(self.workload)
        narrow = size < max(node.devices for node in self.workload.cluster.nodes)
        return joined(
            self.result.message,
            "status and bound are of Ditto's own price with micro-batches of "
            f"{self.micro_batch}: {seconds_text(self.result.objective)}, "
            "without sends between stages",
            f"stages take at most {size} device{'s' if size > 1 else ''}" if narrow else "",
        )

    def peak_bytes(self) -> tuple[float, ...]:
        """[D] memory of each device: states and the micro-batches that 1F1B keeps alive; unused
        ones hold nothing."""
        memory, stages = self.data.memory, self.decision.stages
        assert memory is not None
        peaks = [0.0] * len(self.workload.cluster.devices)
        for k, (stage, group) in enumerate(zip(stages, self.groups, strict=True)):
            layers = slice(stage.first, stage.last)
            alive = min(self.data.micro_batches, len(stages) - k)
            kept = alive * fsum(memory.layer_activation_bytes[layers])
            for device in group:
                peaks[device] = (fsum(memory.layer_state_bytes[layers]) + kept) / len(group)
        return tuple(peaks)

    def to_plan(self) -> Plan:
        """One replica: every stage tensor parallel over its own group; 1F1B, no ZeRO."""
        stages = [
            tensor_stage([(stage.first, stage.last)], group)
            for stage, group in zip(self.decision.stages, self.groups, strict=True)
        ]
        batches = [MicroBatches(count=self.data.micro_batches, samples=self.micro_batch)]
        return new_plan(self.workload, [Replica(stages=stages, micro_batches=batches)])

    def table(self) -> Table:
        """One line per stage."""
        peaks, usable = self.peak_bytes(), self.workload.device_bytes()
        places = [(device.node, device.type) for device in self.workload.cluster.devices]
        names = [layer.name for layer in self.workload.profile.layers]
        rows = tuple(
            (
                str(k),
                f"{s.first}-{s.last - 1}" if s.last - s.first > 1 else str(s.first),
                names_text(names[s.first : s.last]),
                devices_text(places, group),
                seconds_text(self.priced.stages[k]),
                seconds_text(self.priced.links[k]) if k + 1 < len(self.groups) else "-",
                share_text(peaks[group[0]], usable[places[group[0]][1]]),
            )
            for k, (s, group) in enumerate(zip(self.decision.stages, self.groups, strict=True))
        )
        batches = f"{self.data.micro_batches} micro-batches of {self.micro_batch}"
        title = f"one pipeline of {len(self.groups)} stages, {batches}"
        header = ("stage", "layers", "", "devices", "micro-batch", "send", "memory")
        return Table(title, header, rows, right=(0, 1, 4, 5))


def within_problem(workload: Workload, micro_batch: int, width: int) -> DittoData:
    """The instance of one micro-batch size whose stages take at most `width` devices, within the
    replay's memory."""
    data = pose(workload, micro_batch, width=width)
    assert data.memory is not None
    beside = micro_batch * workload.working_bytes.get(1, 0.0)
    kept = [
        (layer.saved_bytes + (width - 1) * layer.replicated_saved_bytes) * micro_batch
        for layer in workload.profile.layers
    ]
    rooms = {name: room(capacity, beside) for name, capacity in data.memory.device_bytes.items()}
    memory = data.memory.model_copy(update={"device_bytes": rooms, "layer_activation_bytes": kept})
    return data.model_copy(update={"memory": memory})


def place(workload: Workload, decision: DittoDecision) -> Groups:
    """Devices of each stage [S][x], each group in one node.

    Wide stages choose first, so that powers of two leave no remainder; a stage prefers the node of
    a neighbour in the pipeline, then the node with least room.
    """
    free = free_devices(workload)
    node_of = [-1] * len(decision.stages)
    groups: Groups = [[] for _ in decision.stages]
    for k in sorted(range(len(decision.stages)), key=lambda k: -decision.stages[k].devices):
        stage = decision.stages[k]
        rooms = [n for n, devices in free[stage.type].items() if len(devices) >= stage.devices]
        near = {node_of[j] for j in (k - 1, k + 1) if 0 <= j < len(node_of)}
        chosen = min(rooms, key=lambda n: (n not in near, len(free[stage.type][n]), n))
        node_of[k] = chosen
        devices = free[stage.type][chosen]
        groups[k], free[stage.type][chosen] = devices[: stage.devices], devices[stage.devices :]
    return groups


def free_devices(workload: Workload) -> dict[str, dict[int, list[int]]]:
    """Devices by the posed problem's type and by node."""
    nodes = workload.cluster.nodes
    kinds = list(dict.fromkeys(kind_of(node) for node in nodes))
    name = dict(zip(kinds, kind_names(kinds), strict=True))
    free: dict[str, dict[int, list[int]]] = {text: {} for text in name.values()}
    for device, place_of in enumerate(workload.cluster.devices):
        kind = kind_of(nodes[place_of.node])
        free[name[kind]].setdefault(place_of.node, []).append(device)
    return free


@dataclass(frozen=True)
class Priced:
    """Seconds of a template's parts."""

    micro_batches: int
    stages: tuple[float, ...]  # [S] of one micro-batch on a stage
    links: tuple[float, ...]  # [S] of one micro-batch to the next stage; the last one's is 0

    @property
    def seconds(self) -> float:
        """T."""
        return fsum([(self.micro_batches - 1) * max(self.stages), *self.stages, *self.links])


def price(
    workload: Workload, cluster: AmpData, decision: DittoDecision, groups: Groups, micro_batch: int
) -> Priced:
    """Seconds of a template on the devices `groups`; cluster: the workload's AMP data, for its
    bandwidths."""
    layers, stages, links = workload.profile.layers, [], []
    for k, (stage, group) in enumerate(zip(decision.stages, groups, strict=True)):
        compute = layer_seconds(workload, group, micro_batch)[stage.first : stage.last]
        size = fsum(layer.tensor_bytes for layer in layers[stage.first : stage.last]) * micro_batch
        stages.append(fsum(compute) + ring_seconds(cluster, group, size))
        sent = layers[stage.last - 1].activation_bytes * micro_batch
        after = groups[k + 1] if k + 1 < len(groups) else None
        links.append(0.0 if after is None else sent / slowest_link(cluster, group, after))
    return Priced(workload.global_batch // micro_batch, tuple(stages), tuple(links))


def layer_seconds(workload: Workload, group: Sequence[int], micro_batch: int) -> list[float]:
    """[L] seconds on one tensor group; an even part of one device's where the profile lacks the
    degree."""
    name, width = workload.cluster.devices[group[0]].type, len(group)
    table = workload.profile.table(name, width, micro_batch)
    if table is not None:
        return table.seconds()
    alone = workload.profile.table(name, 1, micro_batch)
    if alone is None:
        raise UnsupportedError(
            f"no times of single devices of {name} for micro-batch {micro_batch}"
        )
    return [seconds / width for seconds in alone.seconds()]


def slowest_link(cluster: AmpData, here: Sequence[int], after: Sequence[int]) -> float:
    """Bytes/s of the slowest link in use: every device of the next stage receives the whole
    activation.

    Tensor ranks that exist on both sides talk to each other; where one side is wider, its ranks
    share a partner.
    """
    most = max(len(here), len(after))
    pairs = ((here[r * len(here) // most], after[r * len(after) // most]) for r in range(most))
    return min(cluster.bandwidth[a][b] for a, b in pairs)
