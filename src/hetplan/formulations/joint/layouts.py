"""All layouts of an instance: which devices make which stages of which replicas.

The devices of a node are interchangeable, and so are nodes with equal data and the replicas of a
layout: of layouts that differ in these alone, one is listed. A layout is found first in numbers of
devices by node (`replicas_by_node`), and then gets the numbers of its devices.
"""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from hetplan.formulations.joint.data import JointData
from hetplan.formulations.joint.design import Group

Layout = tuple[tuple[Group, ...], ...]  # devices [replicas][stages][row groups][tensor ranks]
NodeCounts = tuple[int, ...]  # [nodes] numbers of devices
StageCounts = tuple[NodeCounts, int]  # devices of a stage by node, and its tensor degree
ReplicaCounts = tuple[StageCounts, ...]  # of its stages


def layouts(data: JointData) -> Iterator[Layout]:
    """Every layout once."""
    free = tuple(node.devices for node in data.nodes)
    seen = set()
    for replicas in replicas_by_node(data, free, None):
        key = with_nodes_renamed(data, replicas)
        if replicas and key not in seen:
            seen.add(key)
            yield with_devices(data, replicas)


def replicas_by_node(
    data: JointData, free: NodeCounts, largest: ReplicaCounts | None
) -> Iterator[tuple[ReplicaCounts, ...]]:
    """All choices of replicas on free devices, in descending order; none is above `largest`."""
    yield ()
    for replica, left in replica_by_node(data, free):
        if replica and (largest is None or replica <= largest):
            for others in replicas_by_node(data, left, replica):
                yield (replica, *others)


def replica_by_node(
    data: JointData, free: NodeCounts
) -> Iterator[tuple[ReplicaCounts, NodeCounts]]:
    """(stages, devices left) of every replica, the one without stages first."""
    yield (), free
    for first, left in first_stages(data, free):
        for rest, left_behind in replica_by_node(data, left):
            yield (first, *rest), left_behind


def first_stages(data: JointData, free: NodeCounts) -> Iterator[tuple[StageCounts, NodeCounts]]:
    """(stage, devices left) of every stage on free devices of one type."""
    for kind in sorted({node.device for node in data.nodes}):
        choices = [
            range(count + 1) if node.device == kind else range(1)
            for count, node in zip(free, data.nodes, strict=True)
        ]
        for counts in itertools.product(*choices):
            left = tuple(have - taken for have, taken in zip(free, counts, strict=True))
            for degree in data.tensor_degrees:
                if any(counts) and all(count % degree == 0 for count in counts):
                    yield (counts, degree), left


def with_nodes_renamed(data: JointData, replicas: Sequence[ReplicaCounts]) -> object:
    """A key that is equal for layouts that differ only in the names of nodes with equal data.

    A node's new name is its data and how many of its equals come before it.
    """
    data_of = [node.model_dump_json() for node in data.nodes]
    names: dict[int, tuple[str, int]] = {}
    for counts, _ in itertools.chain.from_iterable(replicas):
        for n in np.flatnonzero(counts).tolist():
            if n not in names:
                equals = sum(kind == data_of[n] for kind, _ in names.values())
                names[n] = data_of[n], equals
    return tuple(
        tuple(
            (tuple((names[n], count) for n, count in enumerate(counts) if count), degree)
            for counts, degree in replica
        )
        for replica in replicas
    )


def with_devices(data: JointData, replicas: Sequence[ReplicaCounts]) -> Layout:
    """The layout on the first devices of each node that are free. Every row lies within a node."""
    next_free = [0, *itertools.accumulate(node.devices for node in data.nodes)]
    layout = []
    for replica in replicas:
        stages = []
        for counts, degree in replica:
            rows: list[tuple[int, ...]] = []
            for n, count in enumerate(counts):
                begin, next_free[n] = next_free[n], next_free[n] + count
                rows += [tuple(range(d, d + degree)) for d in range(begin, begin + count, degree)]
            stages.append(tuple(rows))
        layout.append(tuple(stages))
    return tuple(layout)
