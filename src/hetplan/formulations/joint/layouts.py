"""All layouts of an instance: which devices make which stages of which replicas.

The devices of a node are interchangeable, and so are nodes with equal data and the replicas of a
layout. Of layouts that differ only in the order of these, one is listed. The enumeration chooses
the number of devices on each node for every stage (`replicas_by_node`); then the layout gets its
devices (`with_devices`).
"""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from hetplan.formulations.joint.data import JointData
from hetplan.formulations.joint.design import Group

Layout = tuple[tuple[Group, ...], ...]  # devices [replicas][stages][row groups][tensor ranks]
NodeCounts = tuple[int, ...]  # [nodes] numbers of devices
StageCounts = tuple[NodeCounts, int]  # numbers of devices of a stage by node, and its tensor degree
ReplicaCounts = tuple[StageCounts, ...]  # the stages of a replica


def layouts(data: JointData) -> Iterator[Layout]:
    """All layouts of the instance; of equivalent ones, one."""
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
    """All choices of replicas, in descending order of the replicas; the first one has none.

    free: the numbers of devices that they may use. largest: no replica is above this one; None:
    there is no such limit.
    """
    yield ()
    for replica, left in replica_by_node(data, free):
        if replica and (largest is None or replica <= largest):
            for others in replicas_by_node(data, left, replica):
                yield (replica, *others)


def replica_by_node(
    data: JointData, free: NodeCounts
) -> Iterator[tuple[ReplicaCounts, NodeCounts]]:
    """(replica, devices left on each node) for every choice of one replica; the first choice has no
    stages."""
    yield (), free
    for first, left_by_first in first_stages(data, free):
        for rest, left in replica_by_node(data, left_by_first):
            yield (first, *rest), left


def first_stages(data: JointData, free: NodeCounts) -> Iterator[tuple[StageCounts, NodeCounts]]:
    """(stage, devices left on each node) for every choice of one stage on free devices of one
    type."""
    for kind in sorted({node.device for node in data.nodes}):
        choices = [
            range(count + 1) if node.device == kind else range(1)
            for count, node in zip(free, data.nodes, strict=True)
        ]
        for counts in itertools.product(*choices):
            if not any(counts):
                continue
            left = tuple(have - taken for have, taken in zip(free, counts, strict=True))
            for degree in data.tensor_degrees:
                # each row group lies within a node
                if all(count % degree == 0 for count in counts):
                    yield (counts, degree), left


def with_nodes_renamed(data: JointData, replicas: Sequence[ReplicaCounts]) -> object:
    """A key that is equal for layouts that differ only in the order of nodes with equal data.

    Nodes get new names in the order in which the layout uses them. A name is the data of the node
    and the number of equal nodes with earlier names.
    """
    data_of = [node.model_dump_json() for node in data.nodes]
    names: dict[int, tuple[str, int]] = {}
    for counts, _ in itertools.chain.from_iterable(replicas):
        for n in np.flatnonzero(counts).tolist():
            if n not in names:
                equal_before = sum(other == data_of[n] for other, _ in names.values())
                names[n] = data_of[n], equal_before

    def renamed(stage: StageCounts) -> object:
        counts, degree = stage
        named_counts = tuple((names[n], count) for n, count in enumerate(counts) if count)
        return named_counts, degree

    return tuple(tuple(renamed(stage) for stage in replica) for replica in replicas)


def with_devices(data: JointData, replicas: Sequence[ReplicaCounts]) -> Layout:
    """The layout with devices: the stages take the devices of each node in order. Every row group
    lies within a node."""
    next_free = [0, *itertools.accumulate(node.devices for node in data.nodes)]
    layout = []
    for replica in replicas:
        stages = []
        for counts, degree in replica:
            rows: list[tuple[int, ...]] = []
            for n, count in enumerate(counts):
                begin = next_free[n]
                end = begin + count
                next_free[n] = end
                rows += [tuple(range(first, first + degree)) for first in range(begin, end, degree)]
            stages.append(tuple(rows))
        layout.append(tuple(stages))
    return tuple(layout)
