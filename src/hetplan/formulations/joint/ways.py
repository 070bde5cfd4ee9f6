"""All ways to run the replicas of an instance, each with a bound by computing alone: the columns of
the model that `general.py` states."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, product
from typing import NamedTuple

from hetplan.formulations.joint.data import JointData
from hetplan.formulations.joint.design import SCHEDULES, Design, Pipeline
from hetplan.formulations.joint.layouts import layouts
from hetplan.formulations.joint.space import Space
from hetplan.solvers.run import Run


class Way(NamedTuple):
    """One way to run one replica of a layout.

    A layout is a design whose replicas say no more than their devices, and as `samples` the fewest
    micro-batches that they can take: one round of an interleaved schedule. From ZeRO 2 on it is the
    number of micro-batches of all replicas.
    """

    layout: Design
    replica: int  # its number in the layout
    pipeline: Pipeline
    seconds: float  # E_k, that no plan with this replica is below


def all_ways(data: JointData, space_of: Callable[[int], Space], run: Run) -> Iterator[Way]:
    """Every way to run every replica, with the seconds of its computation alone.

    space_of: the space of the instance with that many samples. Raises Stopped when `run` ends.
    """
    for layout in all_layouts(data):
        for i in range(len(layout.pipelines)):
            for pipeline in ways_of(data, layout, i):
                run.check()
                exact_layout = layout
                if layout.zero > 1:
                    if any(pipeline.steps % other.samples for other in layout.pipelines):
                        continue  # no whole rounds in another replica
                    exact_layout = with_steps(layout, pipeline.steps)
                alone = replace(layout, pipelines=(pipeline,))
                seconds = space_of(pipeline.samples).lower_bound(alone)
                yield Way(exact_layout, i, pipeline, seconds)


def all_layouts(data: JointData) -> Iterator[Design]:
    """Layouts under all schedules, ZeRO levels and modes of recomputation; of those that are alike
    but for the names of devices, one.

    Between stages, levels above the framework's highest do as the highest does.
    """
    highest_between_stages = max(data.framework.pipeline_levels)
    for replicas in layouts(data):
        deepest = max(map(len, replicas))
        for schedule, chunks in SCHEDULES:
            if deepest * chunks > len(data.layers):
                continue
            pipelines = tuple(
                Pipeline(stages, (), 1, len(stages) if schedule == "interleaved-1f1b" else 1)
                for stages in replicas
            )
            highest = 3 if deepest == chunks == 1 else highest_between_stages
            for zero, mode in product(range(highest + 1), data.modes):
                yield Design(pipelines, schedule, chunks, zero, mode)


def with_steps(layout: Design, steps: int) -> Design:
    """The layout with this number of micro-batches in every replica."""
    pipelines = tuple(replace(pipeline, samples=steps) for pipeline in layout.pipelines)
    return replace(layout, pipelines=pipelines)


def ways_of(data: JointData, layout: Design, i: int) -> Iterator[Pipeline]:
    """All ways to run replica i: its cuts, samples and micro-batches."""
    replica, others = layout.pipelines[i], len(layout.pipelines) - 1
    most = data.global_batch - others  # every other replica has a sample
    fewest = 1 if others else most
    for cuts in cuts_of(data, layout, replica):
        for samples in range(fewest, most + 1):
            for micro_batch in range(1, samples + 1):
                pipeline = Pipeline(replica.groups, cuts, micro_batch, samples)
                if pipeline.steps % replica.samples == 0:
                    yield pipeline


def cuts_of(data: JointData, layout: Design, replica: Pipeline) -> list[tuple[int, ...]]:
    """All ways to cut the layers into the replica's virtual stages."""
    virtual_stages = len(replica.groups) * layout.chunks
    return list(combinations(range(1, len(data.layers)), virtual_stages - 1))
