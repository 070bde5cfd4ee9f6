"""Designs that the local search begins with, and variations that it tries on the best of them.

Constructions need no paper: devices in the order of their nodes, the fastest or the slowest first,
are cut into tensor groups; these are dealt to replicas one after the other, or in blocks. Cuts make
the slowest stage as fast as can be, and replicas take samples in proportion to their speed.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby, product

from hetplan.formulations.joint.design import SCHEDULES, Design, Group, Pipeline
from hetplan.formulations.joint.space import Space

MICRO_BATCHES = (1, 2, 4, 8, 16)  # samples of the micro-batches that constructions have
ROUND = 64  # micro-batches of a replica while its speed is compared with others'


def constructions(space: Space) -> Iterator[Design]:
    """GPipe designs of many shapes, each in all sizes of `MICRO_BATCHES`.

    Numbers of replicas divide the number of some type's tensor groups.
    """
    seconds = {kind: space.prefix_seconds(kind, 1, 1, "none")[-1] for kind in space.kind}
    devices = range(len(space.kind))
    for sign, width in product(
        (-1, 0, 1), space.tensor_degrees
    ):  # slowest, in order, fastest first
        order = sorted(devices, key=lambda e: (sign * seconds[space.kind[e]], space.node[e]))
        groups = list(tensor_groups(space, order, width))
        groups_of_types = Counter(space.kind[group[0][0]] for group in groups).values()
        for count in range(1, min(len(groups), space.batch) + 1):
            if any(number % count == 0 for number in groups_of_types):
                for dealt, size in product(deals(groups, count), MICRO_BATCHES):
                    design = replicas_of(space, dealt, size)
                    if design is not None:
                        yield design


def tensor_groups(space: Space, order: list[int], width: int) -> Iterator[Group]:
    """Tensor groups of neighbours on one node; what is left over makes smaller groups."""
    for _, on_node in groupby(order, key=lambda device: space.node[device]):
        left = list(on_node)
        while left:
            size = max(t for t in space.tensor_degrees if t <= min(width, len(left)))
            yield (tuple(left[:size]),)
            left = left[size:]


def deals(groups: list[Group], count: int) -> tuple[list[list[Group]], list[list[Group]]]:
    """The tensor groups of each of `count` replicas: dealt in blocks, and one after the other."""
    ends = [len(groups) * k // count for k in range(count + 1)]
    blocks = [groups[ends[k] : ends[k + 1]] for k in range(count)]
    in_turn = [groups[k::count] for k in range(count)]
    return blocks, in_turn


def replicas_of(space: Space, dealt: list[list[Group]], size: int) -> Design | None:
    """A design whose stages are these groups, with samples in proportion to the replicas' speeds;
    None where a replica would have no sample or too few layers. size: of micro-batches."""
    pipelines = []
    for groups in dealt:
        pipeline = Pipeline(tuple(groups), (), size, ROUND * size)
        fitted = space.with_even_cuts(pipeline, 1, "none")
        if fitted is None:
            return None
        pipelines.append(fitted)
    speeds = [1 / space.lower_bound(Design((pipeline,))) for pipeline in pipelines]
    shares = [max(round(space.batch * speed / sum(speeds)), 1) for speed in speeds]
    shares[0] += space.batch - sum(shares)  # what rounding leaves
    if shares[0] < 1:
        return None
    with_samples = (
        replace(pipeline, samples=share, micro_batch=min(size, share))
        for pipeline, share in zip(pipelines, shares, strict=True)
    )
    return Design(tuple(with_samples), "gpipe")


def variations(space: Space, design: Design) -> Iterator[Callable[[Design], Design | None]]:
    """Changes worth a trial one after the other: all rotations of the design's stages, schedules,
    ZeRO levels and recomputations."""
    longest = max(len(pipeline.groups) for pipeline in design.pipelines)
    for by in range(1, longest):
        yield partial(rotated, by)
    for schedule, chunks in SCHEDULES:
        yield partial(space.with_schedule, schedule=schedule, chunks=chunks)
    for zero in range(4):
        yield partial(replace, zero=zero)
    for mode in space.modes:
        yield partial(replace, recomputation=mode)


def rotated(by: int, design: Design) -> Design:
    """The design in which the first `by` stages of every longer replica come last."""
    pipelines = list(design.pipelines)
    for i, pipeline in enumerate(pipelines):
        if by < len(pipeline.groups):
            groups = pipeline.groups[by:] + pipeline.groups[:by]
            pipelines[i] = replace(pipeline, groups=groups)
    return replace(design, pipelines=tuple(pipelines))
