"""A workload as HAP's problem: the theory of its model's operators, with the seconds of its profile
and its links.

HAP has one speed per device (`programs.speeds` sets it from the profile). Collectives are rings
over the slowest link, as AMP counts them, with a launch per hop.

One program takes the whole global batch. Where that does not fit in memory it is run `runs` times
on equal parts, with gradients synchronised once. Memory is a constraint of the problem, with the
profile's saved activations.

Segments of a program, each with ratios of its own: runs of layers, or parts of the operators'
graph as METIS cuts it (extra `metis`).

Source: HAP, Section 5.2 (METIS: Karypis and Kumar 1998).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import accumulate
from typing import Literal

import networkx as nx
import numpy as np

from hetplan.errors import InputError, UnsupportedError, require
from hetplan.formulations.hap.data import Device, HapDecision
from hetplan.formulations.hap.pricing import Theory, theory_of
from hetplan.profiling.hardware.cluster import Cluster
from hetplan.profiling.models.operators import ELEMENT_BYTES
from hetplan.profiling.workload import Workload
from hetplan.programs.holding import Holding
from hetplan.programs.links import Links, links_of, three_steps
from hetplan.programs.networks import program_of
from hetplan.programs.program import SingleProgram
from hetplan.programs.speeds import profile_tables, saved_bytes, speeds_of
from hetplan.programs.work import by_layer, work_of
from hetplan.solvers.run import Run

# Weights of METIS are 32-bit whole numbers that must add up to less than 2^31.
LARGEST_WEIGHT = 10_000


def segmented(
    program: SingleProgram, count: int, how: Literal["layer", "metis"] = "layer"
) -> SingleProgram:
    """The program in up to `count` segments, numbered as they first appear; data and parameters go
    with their first user.

    Raises InputError unless there are at least as many operators, UnsupportedError for METIS where
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
    parts = _runs_of_layers(program, count) if how == "layer" else _metis_parts(program, count)
    numbers: dict[int, int] = {}
    segment_of: dict[str, int] = {}
    for node, part in zip(operators, parts, strict=True):
        segment_of[node.name] = numbers.setdefault(part, len(numbers))
    return program.in_segments(segment_of)


def _runs_of_layers(program: SingleProgram, count: int) -> list[int]:
    """Operator -> its segment. A layer belongs where the middle of its work falls when the whole is
    cut into equal parts."""
    work = by_layer(program)
    total, done, part_of = sum(work.values()), 0.0, {}
    for layer, flops in work.items():
        part_of[layer] = min(count - 1, int(count * (done + flops / 2) / total))
        done += flops
    return [part_of[node.layer] for node in program.computations]


def _metis_parts(program: SingleProgram, count: int) -> list[int]:
    """Operator -> its segment: balanced work, few entries on edges between segments."""
    require(
        find_spec("pymetis") is not None,
        "segments by METIS need pymetis",
        expected="pip install pymetis",
        kind=UnsupportedError,
    )
    import pymetis

    graph = _graph(program)
    first = [0, *accumulate(len(graph.adj[node]) for node in range(len(graph)))]
    near = [pair for node in range(len(graph)) for pair in graph.adj[node].items()]
    _, parts = pymetis.part_graph(
        count,
        pymetis.CSRAdjacency(first, [other for other, _ in near]),
        vweights=[graph.nodes[node]["work"] for node in range(len(graph))],
        eweights=[edge["entries"] for _, edge in near],
        options=pymetis.Options(seed=0),
    )
    return [int(part) for part in parts]


def _graph(program: SingleProgram) -> nx.Graph[int]:
    """Operators by number with their FLOP, edges between two with the entries of what one reads of
    the other, as weights."""
    gradients = program.needs_gradient()
    graph: nx.Graph[int] = nx.Graph()
    number = {node.name: i for i, node in enumerate(program.computations)}
    for node in program.computations:
        graph.add_node(number[node.name], work=work_of(program, node, gradients).total)
        for source in program.inputs(node):
            if not source.source:
                graph.add_edge(number[source.name], number[node.name], entries=source.elements)
    for rows, name in ((graph.nodes.values(), "work"), (graph.edges.values(), "entries")):
        top = max((row[name] for row in rows), default=0.0) or 1.0
        for row in rows:
            row[name] = max(1, round(LARGEST_WEIGHT * row[name] / top))
    return graph


Cut = tuple[int, Literal["layer", "metis"]]


@dataclass(frozen=True)
class Posed:
    """theory: of one run on `samples` samples; runs: of its program, per iteration; links: what
    its collectives are priced by; cut: number of segments, and how they are cut."""

    workload: Workload
    theory: Theory
    runs: int
    links: Links
    cut: Cut

    @property
    def samples(self) -> int:
        """Samples of one run."""
        return self.workload.global_batch // self.runs

    def device_bytes(self, decision: HapDecision) -> tuple[float, ...]:
        """[m] predicted bytes in whole units: states of the parameters held, and the tensors
        kept."""
        assert self.theory.holding is not None, "posed with memory"
        return self.theory.decided(decision).bytes(self.theory.holding)

    def fits(self, decision: HapDecision) -> bool:
        """Whether every device holds its part in whole units."""
        memory = self.theory.data.memory
        assert memory is not None, "posed with memory"
        return all(
            held <= room
            for held, room in zip(self.device_bytes(decision), memory.device_bytes, strict=True)
        )


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
    """The `hap` problem of `workload`, in `runs` runs (None: the fewest in which data parallelism
    fits in memory). tied_whole: as in `Holding`. links: default rings over the cluster's. cut: into
    segments, as `segmented` does it. machines: every node is one device, as fast as all that it
    has, which train data-parallel (HAP, Section 3); `links` are not for these.

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
    precision, slices = workload.precision, len(devices)
    usable, saved = workload.device_bytes(), saved_bytes(workload, program)
    if machines:
        nodes, speeds = workload.cluster.nodes, {one.name: one.flops_per_second for one in devices}
        devices = [
            Device(name=node.device, flops_per_second=node.devices * speeds[node.device])
            for node in nodes
        ]
        # the devices of a node share what it keeps
        saved = {name: size / min(node.devices for node in nodes) for name, size in saved.items()}
        alone = tuple(replace(node, devices=1) for node in nodes)
        inside = [node.intra_bandwidth for node in nodes if node.devices > 1]
        between = links_of(Cluster(workload.cluster.name, alone, workload.cluster.specs))
        links = three_steps(between, min(inside, default=np.inf))
    holding = Holding(
        workload.state_bytes_per_param_byte * ELEMENT_BYTES[precision],
        saved,
        tied_whole,
    )
    theory = theory_of(
        program,
        devices,
        links,
        element_bytes=ELEMENT_BYTES[precision],
        weights=weights,
        runs=runs,
        holding=holding,
        device_bytes=[usable[device.name] for device in devices],
        slices=slices,
        check=None if run is None else run.check,
    )
    return Posed(workload, theory, runs, links, cut)


def runs_that_fit(workload: Workload) -> int:
    """The fewest equal parts of the global batch that leave a sample for each device and with which
    data parallelism by speed fits; the most parts where none fits."""
    devices, batch = workload.cluster.devices, workload.global_batch
    usable = workload.device_bytes()
    saved = sum(layer.saved_bytes for layer in workload.profile.layers)
    speed = {
        name: 1 / sum(table.layer_seconds()) * table.micro_batch
        for name, table in profile_tables(workload).items()
    }
    share = {name: speed[name] / sum(speed[d.type] for d in devices) for name in speed}
    choices = [n for n in range(1, batch + 1) if batch % n == 0 and batch // n >= len(devices)] or [
        1
    ]

    def fits(n: int) -> bool:
        return all(
            workload.state_bytes + saved * np.ceil(batch / n * share[name]) <= usable[name]
            for name in share
        )

    return next((n for n in choices if fits(n)), choices[-1])


def priced(workload: Workload, program: SingleProgram) -> tuple[list[Device], dict[str, float]]:
    """(The cluster's devices with their speeds, the weight of every operator's FLOP)."""
    speeds, weights = speeds_of(workload, program)
    devices = [
        Device(name=device.type, flops_per_second=speeds[device.type])
        for device in workload.cluster.devices
    ]
    return devices, weights
