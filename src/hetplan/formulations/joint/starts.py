"""Where a local search begins: designs that need no paper, and variations of any design.

Devices in the order of their nodes, the fastest or the slowest first, are cut into tensor groups;
these are dealt to replicas one after the other, or in blocks. Cuts make the slowest stage as fast
as can be, and replicas take samples in proportion to their speed.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby, product

from hetplan.formulations.joint.design import SCHEDULES, Design, Group, Pipe, Space

MICRO = (1, 2, 4, 8, 16)


def constructions(space: Space) -> Iterator[Design]:
    """GPipe designs of many shapes, each in all micro-batch sizes of `MICRO`. Numbers of replicas
    divide the number of some type's tensor groups."""
    speed = {kind: space.sums(kind, 1, 1, "none")[-1] for kind in space.kind}
    for sign, width in product((-1, 0, 1), space.degrees):
        order = sorted(
            range(len(space.kind)), key=lambda e: (sign * speed[space.kind[e]], space.node[e])
        )
        groups = list(tensor_groups(space, order, width))
        kinds = Counter(space.kind[group[0][0]] for group in groups).values()
        for count in range(1, min(len(groups), space.batch) + 1):
            if any(number % count == 0 for number in kinds):
                ends = [len(groups) * k // count for k in range(count + 1)]
                blocks = [groups[ends[k] : ends[k + 1]] for k in range(count)]
                for dealt, micro in product(
                    (blocks, [groups[k::count] for k in range(count)]), MICRO
                ):
                    design = replicas_of(space, dealt, micro)
                    if design is not None:
                        yield design


def tensor_groups(space: Space, order: list[int], width: int) -> Iterator[Group]:
    """Neighbours of one node; what is left over makes smaller groups."""
    for _, on_node in groupby(order, key=lambda e: space.node[e]):
        left = list(on_node)
        while left:
            size = max(t for t in space.degrees if t <= min(width, len(left)))
            yield (tuple(left[:size]),)
            left = left[size:]


def replicas_of(space: Space, dealt: list[list[Group]], micro: int) -> Design | None:
    """None where a replica would have no sample or too few layers."""
    fitted = [space.fitted(Pipe(tuple(g), (), micro, 64 * micro), 1, "none") for g in dealt]
    pipes = [pipe for pipe in fitted if pipe is not None]
    if len(pipes) < len(fitted):
        return None
    speeds = [1 / space.least(Design((pipe,))) for pipe in pipes]
    shares = [max(round(space.batch * speed / sum(speeds)), 1) for speed in speeds]
    shares[0] += space.batch - sum(shares)
    pipes = [
        replace(pipe, samples=share, micro=min(micro, share))
        for pipe, share in zip(pipes, shares, strict=True)
    ]
    return Design(tuple(pipes), "gpipe") if min(shares) > 0 else None


def variations(space: Space, design: Design) -> Iterator[Callable[[Design], Design | None]]:
    """Changes worth a trial one after the other: all rotations of the design's stages, schedules,
    ZeRO levels and recomputations."""
    longest = max(len(pipe.groups) for pipe in design.pipes)
    yield from (partial(rotated, by) for by in range(1, longest))
    for schedule, chunks in SCHEDULES:
        yield partial(space.scheduled, schedule=schedule, chunks=chunks)
    yield from (partial(replace, zero=zero) for zero in range(4))
    yield from (partial(replace, mode=mode) for mode in space.modes)


def rotated(by: int, design: Design) -> Design:
    """Every replica's first stages come last."""
    turned = [
        replace(pipe, groups=pipe.groups[by:] + pipe.groups[:by]) if by < len(pipe.groups) else pipe
        for pipe in design.pipes
    ]
    return replace(design, pipes=tuple(turned))
