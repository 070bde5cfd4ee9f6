"""One design for all that differ in the names of devices alone.

Devices of one node are alike, and so are nodes with equal data. Of those that are alike the first
in use is the first, so that designs that run equally long are equal, and are replayed once.
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
        self.node = [node for _, node in data.devices]
        self.first_like = [data.nodes.index(node) for node in data.nodes]  # [nodes]
        # The first of nodes that are alike -> all of them.
        self.twins = {m: [n for n in nodes if self.first_like[n] == m] for m in self.first_like}
        self.on_node = [[e for e, m in enumerate(self.node) if m == n] for n in nodes]

    def canonical(self, design: Design) -> Design:
        """The same design on devices and nodes that are numbered anew.

        Replicas are sorted by stages, cuts and batches, the rows of a stage by their nodes. The
        tensor ranks of a row may lie on several nodes.
        """
        unused_twins = {first: iter(nodes) for first, nodes in self.twins.items()}
        unused_devices = [iter(devices) for devices in self.on_node]
        renamed: dict[int, int] = {}  # node -> the node that stands for it
        pipelines = []
        for pipeline in sorted(design.pipelines, key=size_of):
            groups: list[Group] = []
            for group in pipeline.groups:
                for device in chain.from_iterable(group):
                    node = self.node[device]
                    if node not in renamed:
                        renamed[node] = next(unused_twins[self.first_like[node]])
                groups.append(self.renamed_group(group, renamed, unused_devices))
            pipelines.append(replace(pipeline, groups=tuple(groups)))
        return replace(design, pipelines=tuple(pipelines))

    def renamed_group(
        self, group: Group, renamed: dict[int, int], unused: Sequence[Iterator[int]]
    ) -> Group:
        """A stage's devices under their new numbers. unused: of each node the devices left."""
        on_nodes = sorted([renamed[self.node[device]] for device in row] for row in group)
        return tuple(tuple(next(unused[node]) for node in row) for row in on_nodes)


def size_of(pipeline: Pipeline) -> tuple[int, tuple[int, ...], int, int]:
    """The key that replicas are sorted by: all but their devices."""
    return (len(pipeline.groups), pipeline.cuts, pipeline.micro_batch, pipeline.samples)
