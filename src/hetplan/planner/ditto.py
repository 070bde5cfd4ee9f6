"""The strategy `ditto`: one pipeline over the cluster whose stages may differ in width, beside the
papers' algorithms.

Ditto takes the number of micro-batches as given: its problem is posed and solved for each size that
they can have. Of the templates found the one with the best price of `planner.template` is proposed;
objective, bound and status are those of its size's problem, in Ditto's own price.

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

from hetplan.formulations import family
from hetplan.formulations.amp.pose import pose as pose_amp
from hetplan.formulations.ditto.data import DittoData, DittoDecision
from hetplan.formulations.ditto.pose import group_size, micro_batch_sizes, pose
from hetplan.planner.amp import SAME, room
from hetplan.planner.candidate import Candidate, Method, joined
from hetplan.planner.known import solved
from hetplan.planner.strategy import NoPlan, Problem, Strategy, new_plan, tensor_stage
from hetplan.planner.template import Groups, Priced, place, price
from hetplan.profiling.workload import Workload
from hetplan.runtime.plan import MicroBatches, Plan, Replica
from hetplan.solvers.result import Result
from hetplan.solvers.run import Run
from hetplan.text import Table, devices_text, names_text, seconds_text, share_text

AUTO = Method("auto", exact=True)
# Oobleck's table of states takes hours on large clusters and gives nothing before its end.
BASELINE_SECONDS = 20.0


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
        """The best over all largest widths, priced on the cluster as the strategy prices."""
        widths = [1 << k for k in range(group_size(workload).bit_length())]
        problems = Templates(
            workload,
            [
                (size, within_problem(workload, size, width))
                for width in widths
                for size in micro_batch_sizes(workload)
            ],
        )
        try:
            best = problems.best(AUTO, problems.solved(AUTO, run))
        except NoPlan:
            return None
        assert best.plan is not None and best.objective is not None
        size = best.plan.replicas[0].micro_batches[0].samples
        loose = solved(family("ditto"), pose(workload, size), "auto", run.part())
        reached = loose.bound is not None and best.objective <= loose.bound * (1 + SAME)
        status = "optimal" if reached else "feasible"
        return replace(best, bound=loose.bound, status=status)


@dataclass(frozen=True)
class Solved:
    """What a method made of the instance of one micro-batch size."""

    micro_batch: int
    data: DittoData
    result: Result[Any]

    @property
    def decision(self) -> DittoDecision:
        """The template, where one was found."""
        assert isinstance(self.result.decision, DittoDecision)
        return self.result.decision


@dataclass(frozen=True)
class Templates(Problem):
    """The best template of several instances, each with its micro-batch size."""

    workload: Workload
    instances: Sequence[tuple[int, DittoData]]

    def solve(self, method: Method, run: Run) -> Candidate:
        """The best template of a method."""
        if not method.exact:
            limit = min(BASELINE_SECONDS, run.options.time_limit or BASELINE_SECONDS)
            run.options = replace(run.options, time_limit=limit)
        return self.best(method, self.solved(method, run))

    def solved(self, method: Method, run: Run) -> list[Solved]:
        """The instances one after the other, each with its part of the time that is left."""
        every: list[Solved] = []
        for left, (size, data) in zip(
            range(len(self.instances), 0, -1), self.instances, strict=True
        ):
            if run.should_stop and every:
                break
            run.report(note=f"micro-batches of {size}")
            part = run.part(time_limit=run.remaining / left)
            every.append(Solved(size, data, solved(family("ditto"), data, method.name, part)))
        return every

    def best(self, method: Method, every: Sequence[Solved]) -> Candidate:
        """The best by its price on the cluster; raises NoPlan with the reasons where there is
        none."""
        seconds = fsum(one.result.seconds for one in every)
        templates = [one for one in every if one.result.decision is not None]
        if not templates:
            proven = all(one.result.status == "infeasible" for one in every)
            proven = proven and len(every) == len(self.instances)
            texts = dict.fromkeys(one.result.message or "out of time" for one in every)
            raise NoPlan("infeasible" if proven else "unknown", "; ".join(texts), seconds)
        cluster = pose_amp(self.workload)
        groups = [place(self.workload, one.decision) for one in templates]
        prices = [
            price(self.workload, cluster, one.decision, own, one.micro_batch)
            for one, own in zip(templates, groups, strict=True)
        ]
        at = min(range(len(templates)), key=lambda i: prices[i].seconds)
        best = templates[at]
        return replace(
            Candidate.of_result("ditto", method, best.result),
            predicted_seconds=prices[at].seconds,
            objective=best.result.objective,
            fits_memory=True,
            peak_bytes=self.peak_bytes(best, groups[at]),
            solve_seconds=seconds,
            plan=self.to_plan(best, groups[at]),
            message=self.notes(best),
            tables=(self.table(best, groups[at], prices[at]),),
        )

    def notes(self, best: Solved) -> str:
        """What a reader of the ranking has to know."""
        if best.result.bound is None:
            return best.result.message
        size = group_size(self.workload)
        narrow = size < max(node.devices for node in self.workload.cluster.nodes)
        return joined(
            best.result.message,
            "status and bound are of Ditto's own price with micro-batches of "
            f"{best.micro_batch}: {seconds_text(best.result.objective)}, "
            "without sends between stages",
            f"stages take at most {size} device{'s' if size > 1 else ''}" if narrow else "",
        )

    def peak_bytes(self, best: Solved, groups: Groups) -> tuple[float, ...]:
        """[D] memory of each device: states and the micro-batches that 1F1B keeps alive; unused
        ones hold nothing."""
        memory, stages = best.data.memory, best.decision.stages
        assert memory is not None
        peaks = [0.0] * len(self.workload.cluster.devices)
        for k, (stage, group) in enumerate(zip(stages, groups, strict=True)):
            layers = slice(stage.first, stage.last)
            alive = min(best.data.micro_batches, len(stages) - k)
            kept = alive * fsum(memory.layer_activation_bytes[layers])
            for device in group:
                peaks[device] = (fsum(memory.layer_state_bytes[layers]) + kept) / len(group)
        return tuple(peaks)

    def to_plan(self, best: Solved, groups: Groups) -> Plan:
        """One replica: every stage tensor parallel over its own group; 1F1B, no ZeRO."""
        stages = [
            tensor_stage([(stage.first, stage.last)], group)
            for stage, group in zip(best.decision.stages, groups, strict=True)
        ]
        batches = [MicroBatches(count=best.data.micro_batches, samples=best.micro_batch)]
        return new_plan(self.workload, [Replica(stages=stages, micro_batches=batches)])

    def table(self, best: Solved, groups: Groups, priced: Priced) -> Table:
        """One line per stage."""
        peaks, usable = self.peak_bytes(best, groups), self.workload.device_bytes()
        places = [(device.node, device.type) for device in self.workload.cluster.devices]
        names = [layer.name for layer in self.workload.profile.layers]
        rows = tuple(
            (
                str(k),
                f"{s.first}-{s.last - 1}" if s.last - s.first > 1 else str(s.first),
                names_text(names[s.first : s.last]),
                devices_text(places, group),
                seconds_text(priced.stages[k]),
                seconds_text(priced.links[k]) if k + 1 < len(groups) else "-",
                share_text(peaks[group[0]], usable[places[group[0]][1]]),
            )
            for k, (s, group) in enumerate(zip(best.decision.stages, groups, strict=True))
        )
        batches = f"{best.data.micro_batches} micro-batches of {best.micro_batch}"
        title = f"one pipeline of {len(groups)} stages, {batches}"
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
