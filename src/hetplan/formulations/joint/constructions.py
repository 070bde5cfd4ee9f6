"""Designs that the local search begins with, and variations that it tries on the best of them.

A construction lists the devices with the fastest first, with the slowest first, or node by node.
It divides neighbours of one node into tensor groups. The replicas get the tensor groups in turn or
in blocks; each tensor group is a stage. Cuts make the slowest stage of a replica as fast as
possible. Replicas take samples in proportion to their speeds. Source: hetplan.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby, product

from hetplan.formulations.joint.design import Design, Group, Pipeline
from hetplan.formulations.joint.space import Space

MICRO_BATCHES = (1, 2, 4, 8, 16)  # samples of one micro-batch; constructions try every size
ROUND = 64  # micro-batches of every replica when the speeds of replicas are compared
LEAST_SECONDS = 1e-30  # what a replica counts at least when speeds are compared: layers may take 0


def constructions(space: Space) -> Iterator[Design]:
    """GPipe designs of many shapes, each with every micro-batch size of `MICRO_BATCHES`, under ZeRO
    0 or the nearest level that is allowed. Where no level is possible for pipelines, every replica
    is one tensor group."""
    # device type -> seconds of one sample's forward and backward pass through all layers
    seconds = {kind: space.prefix_seconds(kind, 1, 1, "none")[-1] for kind in space.device_types}
    devices = range(len(space.device_types))
    slowest_first, by_node, fastest_first = -1, 0, 1
    for direction, width in product((slowest_first, by_node, fastest_first), space.tensor_degrees):
        order = sorted(
            devices,
            key=lambda device: (
                direction * seconds[space.device_types[device]],
                space.node[device],
            ),
        )
        groups = list(tensor_groups(space, order, width))
        for dealt, size in product(all_deals(space, groups), MICRO_BATCHES):
            design = replicas_of(space, dealt, size)
            if design is not None and design.zero not in space.zero_levels:
                design = space.repaired(design)
            if design is not None:
                yield design


def all_deals(space: Space, groups: list[Group]) -> Iterator[list[list[Group]]]:
    """The stages of each replica, for every way to deal the tensor groups that is tried."""
    if not space.data.own_levels(one_virtual_stage=False):
        yield [[group] for group in groups[: space.batch]]
        return
    for count in replica_counts(space, groups):
        yield from deals(groups, count)


def replica_counts(space: Space, groups: list[Group]) -> Iterator[int]:
    """The numbers of replicas among which the tensor groups of some device type divide evenly."""
    groups_of_types = Counter(space.device_types[group[0][0]] for group in groups).values()
    for count in range(1, min(len(groups), space.batch) + 1):
        if any(number % count == 0 for number in groups_of_types):
            yield count


def tensor_groups(space: Space, order: list[int], width: int) -> Iterator[Group]:
    """Tensor groups of `width` neighbours in `order` on one node, each as a stage of one row group.
    Devices of a node that are left over make groups of smaller tensor degrees."""
    for _, on_node in groupby(order, key=lambda device: space.node[device]):
        ungrouped = list(on_node)
        while ungrouped:
            degree = max(t for t in space.tensor_degrees if t <= min(width, len(ungrouped)))
            yield (tuple(ungrouped[:degree]),)
            ungrouped = ungrouped[degree:]


def deals(groups: list[Group], count: int) -> tuple[list[list[Group]], list[list[Group]]]:
    """(in blocks, in turn): two ways to deal tensor groups to `count` replicas. Both list the
    tensor groups of each replica."""
    ends = [len(groups) * k // count for k in range(count + 1)]
    blocks = [groups[ends[k] : ends[k + 1]] for k in range(count)]
    in_turn = [groups[k::count] for k in range(count)]
    return blocks, in_turn


def replicas_of(space: Space, dealt: list[list[Group]], size: int) -> Design | None:
    """A GPipe design whose stages are the dealt groups, with samples in proportion to the replicas'
    speeds; None where a replica has more stages than layers, or the first one has no sample.

    dealt: the stages of each replica. size: samples of one micro-batch.
    """
    pipelines = []
    for groups in dealt:
        uncut = Pipeline(tuple(groups), cuts=(), micro_batch=size, samples=ROUND * size)
        pipeline = space.with_even_cuts(uncut, 1, "none")
        if pipeline is None:
            return None
        pipelines.append(pipeline)
    seconds = [space.lower_bound(Design((pipeline,))) for pipeline in pipelines]
    speeds = [1 / max(each, LEAST_SECONDS) for each in seconds]
    shares = [max(round(space.batch * speed / sum(speeds)), 1) for speed in speeds]
    shares[0] += space.batch - sum(shares)  # the first replica takes what rounding leaves
    if shares[0] < 1:
        return None
    with_samples = (
        replace(pipeline, samples=share, micro_batch=min(size, share))
        for pipeline, share in zip(pipelines, shares, strict=True)
    )
    return Design(tuple(with_samples), schedule="gpipe")


def variations(space: Space, design: Design) -> Iterator[Callable[[Design], Design | None]]:
    """Changes of a design that the search tries in this order: rotations of its stages, schedules,
    ZeRO levels and modes of recomputation."""
    most_stages = max(len(pipeline.groups) for pipeline in design.pipelines)
    for by in range(1, most_stages):
        yield partial(rotated, by)
    for schedule, chunks in space.schedules:
        yield partial(space.with_schedule, schedule=schedule, chunks=chunks)
    for zero in space.zero_levels:
        yield partial(replace, zero=zero)
    for mode in space.modes:
        yield partial(replace, recomputation=mode)


def rotated(by: int, design: Design) -> Design:
    """The design in which the devices of the first `by` stages of a replica come last. The cuts
    stay, so that devices change their layers. Replicas of `by` stages or fewer stay as they are."""
    pipelines = list(design.pipelines)
    for i, pipeline in enumerate(pipelines):
        if by < len(pipeline.groups):
            groups = pipeline.groups[by:] + pipeline.groups[:by]
            pipelines[i] = replace(pipeline, groups=groups)
    return replace(design, pipelines=tuple(pipelines))
