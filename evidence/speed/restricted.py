"""Parts of joint's space: each paper's own, and the whole without one of its freedoms.

The local search of `joint` runs in a part as in the whole. A design is put into the part (other
schedule, ZeRO level, order of stages, equal replicas) or, where its shape is none of the part's,
left out. So the best replay within a paper's own space can be told from the best replay at all, and
what one freedom is worth from what the others are.
"""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from hetplan.formulations.joint.annealing import LocalSearch, Parameters
from hetplan.formulations.joint.data import JointData, JointDecision
from hetplan.formulations.joint.design import SCHEDULES, Design, Pipeline, design_of
from hetplan.formulations.joint.evaluate import decision_of
from hetplan.formulations.joint.space import Space
from hetplan.plans.plan import Recomputation, Schedule
from hetplan.solvers.run import Outcome, Run, Stop

Choice = TypeVar("Choice", bound=Hashable)
ONE_CHUNK: Sequence[tuple[Schedule, int]] = (("1f1b", 1),)


@dataclass(frozen=True, kw_only=True)
class Restriction:
    """What is left to choose; by default everything."""

    schedules: Sequence[tuple[Schedule, int]] = SCHEDULES  # with numbers of chunks
    zeros: Sequence[int] = (0, 1, 2, 3)
    modes: Sequence[Recomputation] = ("none", "selective", "full")
    degrees: Sequence[int] | None = None  # of tensor parallelism; None: the instance's
    # Stages follow the cluster's list of nodes; alike nodes count as one.
    in_order: bool = False
    # Replicas have equally many samples, equal micro-batches, cuts, rows and tensor degrees.
    alike: bool = False
    alike_types: bool = False  # and equal device types, stage by stage
    uniform: bool = False  # all stages have one tensor degree and one row
    all_devices: bool = False  # none is idle
    stages: float = math.inf  # of a replica, at most
    replicas: float = math.inf  # at most


# The papers' own spaces, as far as they are chains of stages on one device type each.
SPACES: Mapping[str, Restriction] = {
    "amp": Restriction(schedules=ONE_CHUNK, zeros=(0,), alike=True, uniform=True, all_devices=True),
    "astra": Restriction(
        schedules=(*ONE_CHUNK, *SCHEDULES[3:]),
        zeros=(0, 1),
        alike=True,
        alike_types=True,
        uniform=True,
    ),
    "ditto": Restriction(
        schedules=ONE_CHUNK, zeros=(0,), degrees=tuple(2**k for k in range(10)), replicas=1
    ),
    "poplar": Restriction(schedules=ONE_CHUNK, degrees=(1,), stages=1, uniform=True),
}
# The whole space without one freedom.
WITHOUT: Mapping[str, Restriction] = {
    "nothing": Restriction(),
    "placement": Restriction(in_order=True),
    "schedule": Restriction(schedules=ONE_CHUNK),
    "uneven replicas": Restriction(alike=True),
    "ZeRO": Restriction(zeros=(0,)),
    "recomputation": Restriction(modes=("none",)),
    "tensor parallelism": Restriction(degrees=(1,)),
    "idle devices": Restriction(all_devices=True),
}


class Part(Space):
    """The part of an instance's space that a restriction leaves."""

    def __init__(self, data: JointData, restriction: Restriction) -> None:
        super().__init__(data)
        self.restriction = restriction
        self.modes = tuple(mode for mode in self.modes if mode in restriction.modes)
        allowed = restriction.degrees or self.tensor_degrees
        self.tensor_degrees = [t for t in self.tensor_degrees if t in allowed]

    def repaired(self, design: Design) -> Design | None:
        """The design within the part; None where its shape is none of the part's."""
        within = self.within(design)
        repaired = None if within is None else super().repaired(within)
        return repaired if repaired is not None and repaired == self.within(repaired) else None

    def within(self, design: Design) -> Design | None:
        """The design with the choices that the restriction leaves; None where its stages or
        replicas are not among them."""
        left = self.restriction
        if not self.allows_shape(design):
            return None
        pipelines = list(design.pipelines)
        if left.in_order:
            pipelines = [self.ordered(design, pipeline) for pipeline in pipelines]
        if left.alike:
            samples = self.batch // len(pipelines)
            cuts = rarest(pipeline.cuts for pipeline in pipelines)
            micro_batch = min(rarest(pipeline.micro_batch for pipeline in pipelines), samples)
            pipelines = [
                replace(pipeline, cuts=cuts, micro_batch=micro_batch, samples=samples)
                for pipeline in pipelines
            ]
        design = replace(
            design,
            pipelines=tuple(pipelines),
            zero=min(left.zeros, key=lambda level: abs(level - design.zero)),
            recomputation=(
                design.recomputation if design.recomputation in self.modes else self.modes[0]
            ),
        )
        if (design.schedule, design.chunks) in left.schedules:
            return design
        return self.with_schedule(design, *left.schedules[0])

    def allows_shape(self, design: Design) -> bool:
        """Whether the restriction allows the design's devices, stages and replicas."""
        left, count = self.restriction, len(design.pipelines)
        # Of each replica (row groups, tensor ranks) of every stage, and these with device types.
        forms = [
            [(len(group), len(group[0])) for group in pipeline.groups]
            for pipeline in design.pipelines
        ]
        typed = [self.shapes(pipeline.groups) for pipeline in design.pipelines]
        shapes = {shape for form in forms for shape in form}
        if count > left.replicas or max(map(len, forms)) > left.stages:
            return False
        if not {width for _, width in shapes} <= {*self.tensor_degrees}:
            return False
        if left.uniform and (len(shapes) > 1 or max(shapes)[0] > 1):
            return False
        if left.all_devices and len(design.used) < len(self.device_types):
            return False
        if left.alike and (self.batch % count or any(form != forms[0] for form in forms)):
            return False
        return not (left.alike_types and any(form != typed[0] for form in typed))

    def ordered(self, design: Design, pipeline: Pipeline) -> Pipeline:
        """The replica with its stages in the order of their nodes, and new cuts where that changes
        them."""
        first_equal = self.renaming.first_equal
        groups = sorted(pipeline.groups, key=lambda group: first_equal[self.node[group[0][0]]])
        other = replace(pipeline, groups=tuple(groups))
        if other == pipeline:
            return pipeline
        return self.with_even_cuts(other, design.chunks, design.recomputation) or pipeline


def rarest(values: Iterable[Choice]) -> Choice:
    """What a move changed of one of many."""
    counts = Counter(values)
    return min(counts, key=lambda value: counts[value])


class PartSearch(LocalSearch):
    """Local search within a part."""

    def penalised_seconds(self, design: Design, limit: float = math.inf) -> float:
        """Those of the design put into the part; inf where it cannot be."""
        within = self.space.repaired(design)
        return math.inf if within is None else super().penalised_seconds(within, limit)


def search_within(
    data: JointData,
    restriction: Restriction,
    run: Run,
    starts: Sequence[JointDecision] = (),
    parameters: Parameters | None = None,
) -> Outcome[JointDecision]:
    """The fastest plan within the part that fits, of all tried; starts are put into the part."""
    own = PartSearch(Part(data, restriction), run, parameters or Parameters())
    for start in starts:
        own.penalised_seconds(design_of(start))
    own.construct()
    own.vary()
    own.rounds()
    plan = own.incumbent.plan if own.incumbent else None
    return Outcome(
        stop=Stop.DONE,
        decision=decision_of(plan) if plan else None,
        message="" if plan else f"none of {own.replays} plans fits in memory",
        details={"steps": own.steps, "replays": own.replays},
    )
