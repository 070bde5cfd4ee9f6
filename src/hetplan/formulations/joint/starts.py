"""Where a local search begins: designs that need no paper, and variations of any design.

Devices in the order of their nodes, the fastest or the slowest first, are cut into groups of so
many rows of so many tensor ranks; these are dealt to equal replicas, so that each has every type or
every node, or a part of the cluster to itself. Cuts make the slowest stage as fast as can be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby, pairwise, product

from hetplan.formulations.joint.design import SCHEDULES, Design, Group, Pipe, Space

MICRO = (1, 2, 4, 8, 16)


def constructions(space: Space) -> Iterator[Design]:
    """GPipe designs of all shapes, each in all micro-batch sizes of `MICRO`."""
    numbers = range(len(space.kind))
    speed = {k: space.sums(k, 1, 1, "none")[-1] for k in set(space.kind)}
    orders = {
        tuple(sorted(numbers, key=lambda e: (sign * speed[space.kind[e]], space.node[e])))
        for sign in (-1, 0, 1)
    }
    shapes = product(sorted(orders), space.degrees, (1, 2, 4, 8), (False, True))
    for order, width, rows, whole in shapes:
        groups = grouped(space, order, width, rows)
        if rows > 1 and all(len(group) < rows for group in groups):
            continue
        of_kind = Counter(space.kind[group[0][0]] for group in groups).values()
        for count in range(1, min(len(groups), space.batch) + 1):
            if all(number % count for number in of_kind):
                continue
            dealt = deal(groups, count, whole)
            for micro in MICRO:
                design = equal_replicas(space, dealt, micro)
                if design is not None:
                    yield design


def grouped(space: Space, order: tuple[int, ...], width: int, rows: int) -> list[Group]:
    """Neighbours of one node as tensor groups, those of one type as rows; what is left over makes
    smaller ones."""
    made: list[Group] = []
    for _, of_kind in groupby(order, key=lambda e: space.kind[e]):
        pieces: list[tuple[int, ...]] = []
        for _, of_node in groupby(of_kind, key=lambda e: space.node[e]):
            left = list(of_node)
            while left:
                size = max(t for t in space.degrees if t <= min(width, len(left)))
                pieces.append(tuple(left[:size]))
                left = left[size:]
        for _, alike in groupby(pieces, key=len):
            same = list(alike)
            made += [tuple(same[k : k + rows]) for k in range(0, len(same), rows)]
    return made


def deal(groups: list[Group], count: int, whole: bool) -> list[list[Group]]:
    """To so many replicas: in blocks (whole), or one after the other."""
    if whole:
        ends = [len(groups) * k // count for k in range(count + 1)]
        return [groups[a:b] for a, b in pairwise(ends)]
    return [groups[k::count] for k in range(count)]


def equal_replicas(space: Space, dealt: list[list[Group]], micro: int) -> Design | None:
    """Each replica with samples in proportion to its speed; None where some would have none or too
    few layers."""
    pipes: list[Pipe] = []
    for groups in dealt:
        pipe = space.fitted(Pipe(tuple(groups), (), micro, micro), 1, "none")
        if pipe is None:
            return None
        pipes.append(pipe)
    speeds = [1 / space.least(Design((replace(pipe, samples=64 * micro),))) for pipe in pipes]
    shares = [max(round(space.batch * speed / sum(speeds)), 1) for speed in speeds]
    shares[0] += space.batch - sum(shares)
    if min(shares) < 1:
        return None
    pipes = [
        replace(pipe, samples=n, micro=min(micro, n)) for pipe, n in zip(pipes, shares, strict=True)
    ]
    return Design(tuple(pipes), "gpipe")


def variations(space: Space, design: Design) -> Iterator[Callable[[Design], Design | None]]:
    """Changes worth a trial one after the other: all rotations of the design's stages, schedules,
    ZeRO levels, recomputations and micro-batch sizes."""
    longest = max(len(pipe.groups) for pipe in design.pipes)
    yield from (partial(rotated, by) for by in range(1, longest))
    for schedule, chunks in SCHEDULES:
        yield partial(space.scheduled, schedule=schedule, chunks=chunks)
    yield from (partial(replace, zero=zero) for zero in range(4))
    yield from (partial(replace, mode=mode) for mode in space.modes)
    yield from (partial(resized, micro) for micro in MICRO)


def rotated(by: int, design: Design) -> Design:
    """Every replica's first stages come last."""
    pipes = []
    for pipe in design.pipes:
        turn = by % len(pipe.groups)
        pipes.append(replace(pipe, groups=pipe.groups[turn:] + pipe.groups[:turn]))
    return replace(design, pipes=tuple(pipes))


def resized(micro: int, design: Design) -> Design:
    """With micro-batches of another size."""
    pipes = (replace(pipe, micro=min(micro, pipe.samples)) for pipe in design.pipes)
    return replace(design, pipes=tuple(pipes))
