"""A workload as HAP's problem: the theory of its model's operators, with the seconds of its profile
and its links.

HAP has one speed per device (`programs.speeds` sets it from the profile). Collectives are rings
over the slowest link, as AMP counts them, with a launch per hop.

One program takes the whole global batch. Where the batch does not fit in memory, the program runs
`runs` times per iteration on equal parts of the batch, and gradients are synchronised once. Memory
is a constraint of the problem, with the profile's saved activations.

A program can be cut into segments, each with ratios of its own. Segments are consecutive layers, or
parts of the operators' graph as METIS cuts it (extra `metis`).

Source: HAP, Section 5.2 (METIS: Karypis and Kumar 1998).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import accumulate
from typing import Any, Literal

import networkx as nx
import numpy as np

from hetplan.errors import InputError, UnsupportedError, require
from hetplan.formulations.hap.data import Device, HapDecision
from hetplan.formulations.hap.pricing import Theory, theory_of
from hetplan.profiling.hardware.cluster import Cluster, Node
from hetplan.profiling.models.operators import ELEMENT_BYTES
from hetplan.profiling.workload import Workload
from hetplan.programs.holding import Holding
from hetplan.programs.links import Links, links_of, three_steps
from hetplan.programs.networks import program_of
from hetplan.programs.program import SingleProgram
from hetplan.programs.speeds import profile_tables, saved_bytes, speeds_of
from hetplan.programs.work import by_layer, work_of
from hetplan.solvers.run import Run

# The largest weight that METIS is given. Its weights are 32-bit whole numbers that must add up to
# less than 2^31.
LARGEST_WEIGHT = 10_000


def segmented(
    program: SingleProgram, count: int, how: Literal["layer", "metis"] = "layer"
) -> SingleProgram:
    """The program in up to `count` segments, numbered in the order in which they first appear.

    Data and parameters belong to the segment of the first operator that reads them. Raises
    InputError unless the program has at least `count` operators, UnsupportedError for METIS where
    pymetis is not installed.
    """
    operators = program.computations
    require(
        1 <= count <= len(operators),
        "segments",
        where=program.name,
        got=count,
        expected=f"1 to {len(operators)}",
    )
    parts = _consecutive_layers(program, count) if how == "layer" else _metis_parts(program, count)
    numbers: dict[int, int] = {}
    segment_of: dict[str, int] = {}
    for node, part in zip(operators, parts, strict=True):
        segment_of[node.name] = numbers.setdefault(part, len(numbers))
    return program.in_segments(segment_of)


def _consecutive_layers(program: SingleProgram, count: int) -> list[int]:
    """The segment of each operator, where segments are consecutive layers.

    The work of all layers is cut into `count` equal parts. A layer belongs to the part in which the
    middle of its work lies.
    """
    work = by_layer(program)
    total, before = sum(work.values()), 0.0
    part_of = {}
    for layer, flops in work.items():
        middle = before + flops / 2
        part_of[layer] = min(count - 1, int(count * middle / total))
        before += flops
    return [part_of[node.layer] for node in program.computations]


def _metis_parts(program: SingleProgram, count: int) -> list[int]:
    """The segment of each operator, as METIS cuts their graph: segments have about equal work, and
    few entries of tensors pass between them."""
    require(
        find_spec("pymetis") is not None,
        "segments by METIS need pymetis",
        expected="pip install pymetis",
        kind=UnsupportedError,
    )
    import pymetis

    graph = _weighted_graph(program)
    operators = range(len(graph))
    # the neighbours of operator i are neighbours[starts[i]:starts[i + 1]]
    starts = [0, *accumulate(len(graph.adj[operator]) for operator in operators)]
    neighbours: list[int] = []
    edge_weights: list[int] = []
    for operator in operators:
        for neighbour, edge in graph.adj[operator].items():
            neighbours.append(neighbour)
            edge_weights.append(edge["entries"])
    _, parts = pymetis.part_graph(
        count,
        pymetis.CSRAdjacency(starts, neighbours),
        vweights=[graph.nodes[operator]["work"] for operator in operators],
        eweights=edge_weights,
        options=pymetis.Options(seed=0),
    )
    return [int(part) for part in parts]


def _weighted_graph(program: SingleProgram) -> nx.Graph[int]:
    """The graph of the operators, by number, with weights from 1 to LARGEST_WEIGHT.

    An operator's `work` is in proportion to its FLOP. Two operators share an edge where one reads
    the other's tensor; the edge's `entries` are in proportion to the entries of that tensor.
    """
    gradients = program.needs_gradient()
    graph: nx.Graph[int] = nx.Graph()
    number = {node.name: i for i, node in enumerate(program.computations)}
    for node in program.computations:
        graph.add_node(number[node.name], work=work_of(program, node, gradients).total)
        for input_node in program.inputs(node):
            if input_node.name in number:  # an operator: neither data nor a parameter
                ends = number[input_node.name], number[node.name]
                graph.add_edge(*ends, entries=input_node.elements)
    _scale_weights(graph.nodes.values(), "work")
    _scale_weights(graph.edges.values(), "entries")
    return graph


def _scale_weights(weighted: Collection[dict[str, Any]], name: str) -> None:
    """Scale the weights called `name` to whole numbers, the largest one to LARGEST_WEIGHT."""
    largest = max((attributes[name] for attributes in weighted), default=0.0) or 1.0
    for attributes in weighted:
        attributes[name] = max(1, round(LARGEST_WEIGHT * attributes[name] / largest))


# The number of segments, and how a program is cut into them (`segmented`).
Cut = tuple[int, Literal["layer", "metis"]]


@dataclass(frozen=True)
class Posed:
    """A workload as a problem: `pose` makes it, and the planner solves it."""

    workload: Workload
    theory: Theory  # the theory of one run of the program, on `samples` samples
    runs: int  # runs of the program per iteration
    links: Links  # the links by which the theory's collectives are priced
    cut: Cut

    @property
    def samples(self) -> int:
        """Samples of one run."""
        return self.workload.global_batch // self.runs

    def device_bytes(self, decision: HapDecision) -> tuple[float, ...]:
        """[m] predicted bytes on each device, with every slice in whole units (module
        `programs.axes`).

        They are the states of the parameters on the device, and the tensors that it keeps.
        """
        assert self.theory.holding is not None, "posed with memory"
        return self.theory.decided(decision).bytes(self.theory.holding)

    def fits(self, decision: HapDecision) -> bool:
        """Whether the bytes of `device_bytes` fit in the memory of every device."""
        memory = self.theory.data.memory
        assert memory is not None, "posed with memory"
        needed = self.device_bytes(decision)
        return all(size <= room for size, room in zip(needed, memory.device_bytes, strict=True))


def pose(
    workload: Workload,
    runs: int | None = None,
    run: Run | None = None,
    *,
    tied_whole: bool = False,
    links: Links | None = None,
    cut: Cut = (1, "layer"),
    machines: bool = False,
) -> Posed:
    """The `hap` problem of `workload`.

    runs: runs of the program per iteration (the user's option `hap.steps`); None: the fewest in
    which data parallelism fits in memory. run: the run of the method, which may stop the
    construction. tied_whole: see `Holding`. links: links of the devices; None: rings over the
    cluster's slowest link. cut: the number of segments and how the program is cut into them.
    machines: every node becomes one device, as fast as all its GPUs, which train data-parallel
    (HAP, Section 3); `links` is then not used.

    Raises UnsupportedError where the model has no program, or the profile no times of single
    devices; InputError for runs that do not divide the global batch; `Stopped` where `run` should
    stop.
    """
    if runs is None:
        runs = runs_that_fit(workload)
    elif workload.global_batch % runs:
        expected = f"a divisor of the global batch ({workload.global_batch})"
        raise InputError("runs per iteration", where="hap.steps", got=runs, expected=expected)
    program = segmented(program_of(workload.model, workload.global_batch // runs), *cut)
    links = links or links_of(workload.cluster)
    devices, weights = priced(workload, program)
    slices = len(devices)  # every GPU gets one, even where nodes are the devices
    element_bytes = ELEMENT_BYTES[workload.precision]
    usable = workload.device_bytes()
    saved = saved_bytes(workload, program)
    if machines:
        nodes = workload.cluster.nodes
        devices = _devices_of_nodes(nodes, devices)
        links = _links_of_nodes(workload.cluster)
        # The GPUs of a node share the tensors that the node keeps. `Holding` has the same bytes for
        # all devices: those of a GPU in the smallest node, whose share is the largest.
        fewest = min(node.devices for node in nodes)
        saved = {name: size / fewest for name, size in saved.items()}
    holding = Holding(
        state_bytes=workload.state_bytes_per_param_byte * element_bytes,
        saved=saved,
        tied_whole=tied_whole,
    )
    theory = theory_of(
        program,
        devices,
        links,
        element_bytes=element_bytes,
        weights=weights,
        runs=runs,
        holding=holding,
        device_bytes=[usable[device.name] for device in devices],
        slices=slices,
        check=None if run is None else run.check,
    )
    return Posed(workload, theory, runs, links, cut)


def _devices_of_nodes(nodes: Sequence[Node], devices: Sequence[Device]) -> list[Device]:
    """One device for each node, as fast as all GPUs of the node. devices: the GPUs."""
    speeds = {device.name: device.flops_per_second for device in devices}
    return [
        Device(name=node.device, flops_per_second=node.devices * speeds[node.device])
        for node in nodes
    ]


def _links_of_nodes(cluster: Cluster) -> Links:
    """The links of a cluster whose nodes are its devices."""
    single = tuple(replace(node, devices=1) for node in cluster.nodes)
    between = links_of(Cluster(cluster.name, single, cluster.specs))
    inside = [node.intra_bandwidth for node in cluster.nodes if node.devices > 1]
    return three_steps(between, min(inside, default=np.inf))


def runs_that_fit(workload: Workload) -> int:
    """The fewest runs per iteration with which data parallelism fits in memory.

    Each run takes an equal part of the global batch, at least one sample for each device, and
    devices take samples in proportion to their speeds. Where no number of runs fits, the largest
    number is returned.
    """
    devices, batch = workload.cluster.devices, workload.global_batch
    usable = workload.device_bytes()
    saved = sum(layer.saved_bytes for layer in workload.profile.layers)  # bytes of a sample
    speed = {  # samples per second of each device type
        name: 1 / sum(table.layer_seconds()) * table.micro_batch
        for name, table in profile_tables(workload).items()
    }
    total_speed = sum(speed[device.type] for device in devices)
    share = {name: speed[name] / total_speed for name in speed}  # part of a batch, of one device
    divisors = [runs for runs in range(1, batch + 1) if batch % runs == 0]
    choices = [runs for runs in divisors if batch // runs >= len(devices)]
    if not choices:
        choices = [1]

    def fits(runs: int) -> bool:
        for name, part in share.items():
            samples = np.ceil(batch / runs * part)
            if workload.state_bytes + saved * samples > usable[name]:
                return False
        return True

    return next((runs for runs in choices if fits(runs)), choices[-1])


def priced(workload: Workload, program: SingleProgram) -> tuple[list[Device], dict[str, float]]:
    """(The cluster's devices with their speeds, node -> weight of the operator's FLOP)."""
    speeds, weights = speeds_of(workload, program)
    devices = [
        Device(name=device.type, flops_per_second=speeds[device.type])
        for device in workload.cluster.devices
    ]
    return devices, weights
