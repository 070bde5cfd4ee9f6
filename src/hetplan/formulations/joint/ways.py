"""All ways to run the replicas of an instance. They are the columns x_k of the model in general.py.

A way is one choice of cuts, samples and micro-batch for one replica of a layout. It carries a lower
bound on the seconds of every plan with this replica, by the replica's computation alone.

A layout is a `Design` without these choices. Its replicas have their devices, no cuts and
micro-batches of one sample. Their `samples` are therefore a number of micro-batches:
- In a layout of `all_layouts` it is one round. A round is as many micro-batches as the replica has
  stages under an interleaved schedule, otherwise one micro-batch. The number of micro-batches of a
  way is a multiple of it.
- In the layout of a `ReplicaWay` with ZeRO 2 or 3 it is the number of micro-batches of the way. All
  replicas of such a plan have the same number.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, product
from typing import NamedTuple

from hetplan.formulations.joint.data import JointData
from hetplan.formulations.joint.design import SCHEDULES, Design, Pipeline
from hetplan.formulations.joint.layouts import layouts
from hetplan.formulations.joint.space import Space
from hetplan.solvers.run import Run


class ReplicaWay(NamedTuple):
    """One way to run one replica of a layout."""

    layout: Design
    replica: int  # the replica's number in the layout
    pipeline: Pipeline  # the replica with its cuts, samples and micro-batches
    seconds: float  # E_k: a lower bound on the seconds of every plan with this replica


def all_ways(data: JointData, space_of: Callable[[int], Space], run: Run) -> Iterator[ReplicaWay]:
    """All ways to run all replicas of all layouts, with the bounds by computation alone.

    space_of: number of samples -> the space of the instance with this global batch. Raises Stopped
    when `run` has to stop.
    """
    for layout in all_layouts(data):
        for i in range(len(layout.pipelines)):
            for pipeline in ways_of(data, layout, i):
                run.check()
                layout_of_way = layout
                if layout.zero > 1:  # all replicas run equally many micro-batches
                    if not whole_rounds(layout, pipeline.steps):
                        continue
                    layout_of_way = with_steps(layout, pipeline.steps)
                single_replica = replace(layout, pipelines=(pipeline,))
                seconds = space_of(pipeline.samples).lower_bound(single_replica)
                yield ReplicaWay(layout_of_way, i, pipeline, seconds)


def all_layouts(data: JointData) -> Iterator[Design]:
    """All layouts under all schedules, allowed ZeRO levels and modes of recomputation. Of layouts
    that differ in interchangeable devices only, one is listed. Levels that act as others are not
    listed."""
    for replicas in layouts(data):
        most_stages = max(map(len, replicas))
        for schedule, chunks in SCHEDULES:
            if most_stages * chunks > len(data.layers):
                continue
            interleaved = schedule == "interleaved-1f1b"
            pipelines = tuple(
                Pipeline(
                    groups=groups,
                    cuts=(),
                    micro_batch=1,
                    samples=len(groups) if interleaved else 1,
                )
                for groups in replicas
            )
            one_virtual_stage = most_stages == 1 and chunks == 1
            levels = data.own_levels(one_virtual_stage=one_virtual_stage)
            for zero, mode in product(levels, data.modes):
                yield Design(pipelines, schedule, chunks, zero, mode)


def whole_rounds(layout: Design, steps: int) -> bool:
    """Whether this number of micro-batches makes whole rounds in every replica of the layout."""
    return all(steps % replica.samples == 0 for replica in layout.pipelines)


def with_steps(layout: Design, steps: int) -> Design:
    """The layout with this number of micro-batches in every replica."""
    pipelines = tuple(replace(pipeline, samples=steps) for pipeline in layout.pipelines)
    return replace(layout, pipelines=pipelines)


def ways_of(data: JointData, layout: Design, i: int) -> Iterator[Pipeline]:
    """Replica i of a layout with all choices of cuts, samples and micro-batches."""
    replica = layout.pipelines[i]
    other_replicas = len(layout.pipelines) - 1
    most_samples = data.global_batch - other_replicas  # each other replica has at least one
    fewest_samples = 1 if other_replicas else most_samples
    round_length = replica.samples
    for cuts in cuts_of(data, layout, replica):
        for samples in range(fewest_samples, most_samples + 1):
            for micro_batch in range(1, samples + 1):
                pipeline = Pipeline(replica.groups, cuts, micro_batch, samples)
                if pipeline.steps % round_length == 0:
                    yield pipeline


def cuts_of(data: JointData, layout: Design, replica: Pipeline) -> list[tuple[int, ...]]:
    """All choices of `Pipeline.cuts`: the first layer of every virtual stage but the first."""
    virtual_stages = len(replica.groups) * layout.chunks
    return list(combinations(range(1, len(data.layers)), virtual_stages - 1))
