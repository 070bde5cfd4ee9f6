"""The canonical form of designs: designs that differ only in the numbers of devices become equal.

The devices of a node are interchangeable, and so are nodes with equal data. The canonical form uses
interchangeable devices and nodes in the order of their numbers. Designs that differ in nothing else
have equal replays; they become equal, and the search replays them once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from hetplan.formulations.joint.data import JointData
from hetplan.formulations.joint.design import Design, Group, Pipeline


class Renaming:
    """Gives devices and nodes of an instance their canonical numbers."""

    def __init__(self, data: JointData) -> None:
        nodes = range(len(data.nodes))
        self.node = [node for _, node in data.devices]  # [D] node of each device
        # [nodes] the first node with the same data
        self.first_equal = [data.nodes.index(node) for node in data.nodes]
        # first node -> all nodes with the same data
        self.equal_nodes = {
            first: [n for n in nodes if self.first_equal[n] == first] for first in self.first_equal
        }
        # [nodes] devices of each node
        self.on_node = [[d for d, node in enumerate(self.node) if node == n] for n in nodes]

    def canonical(self, design: Design) -> Design:
        """The design with canonical numbers of devices and nodes.

        Replicas are sorted by number of stages, cuts, micro-batch and samples; the row groups of a
        stage by their nodes. The tensor ranks of a row group may lie on several nodes.
        """
        unused_nodes = {first: iter(nodes) for first, nodes in self.equal_nodes.items()}
        unused_devices = [iter(devices) for devices in self.on_node]
        renamed: dict[int, int] = {}  # node -> its canonical number
        pipelines = []
        for pipeline in sorted(design.pipelines, key=size_of):
            groups: list[Group] = []
            for group in pipeline.groups:
                for device in chain.from_iterable(group):
                    node = self.node[device]
                    if node not in renamed:
                        renamed[node] = next(unused_nodes[self.first_equal[node]])
                groups.append(self.renamed_group(group, renamed, unused_devices))
            pipelines.append(replace(pipeline, groups=tuple(groups)))
        return replace(design, pipelines=tuple(pipelines))

    def renamed_group(
        self, group: Group, renamed: dict[int, int], unused: Sequence[Iterator[int]]
    ) -> Group:
        """The devices of a stage with canonical numbers.

        renamed: node -> its canonical number. unused: the devices of each node that no stage has.
        """
        nodes_of_rows = sorted([renamed[self.node[device]] for device in row] for row in group)
        return tuple(tuple(next(unused[node]) for node in row) for row in nodes_of_rows)


def size_of(pipeline: Pipeline) -> tuple[int, tuple[int, ...], int, int]:
    """The key by which replicas are sorted: everything in a replica but its devices."""
    return (len(pipeline.groups), pipeline.cuts, pipeline.micro_batch, pipeline.samples)
