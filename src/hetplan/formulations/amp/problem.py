"""The instance as arrays, for the solvers (the evaluator does not use this module).

A *configuration* fixes the degrees pp (pipeline), dp (data), tp (tensor) and the micro-batch. It
leaves open the *placement*, a device for each stage, data rank and tensor rank, and the *cut* of
the layers into stages.

*Cells* are classes of interchangeable devices. Two devices are interchangeable when they have the
same type and the same bandwidth to every third device. This is an equivalence relation. All pairs
of devices inside a cell have the same bandwidth, and all pairs between two given cells have the
same bandwidth (evidence/speed/amp_search.md, Section 2, has the proof). T therefore depends on a
placement only through the cell of each position. A node with devices of one type is one cell, a
mixed node is several.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hetplan.formulations.amp.data import AmpData, AmpDecision

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Relative. A sum of bytes may exceed a capacity by rounding in its last digits. The evaluator has a
# constant of its own with the same value.
MEMORY_TOLERANCE = 1e-9

# Messages for instances that have no decision.
NO_CONFIGURATION = (
    "no degrees and micro-batch with a whole number of micro-batches, tables for every type and "
    "enough layers"
)
NO_ROOM = "no cut and placement fits the memory, whatever the degrees and the micro-batch"


@dataclass(frozen=True)
class Configuration:
    """The degrees and the micro-batch of a decision."""

    pipeline: int  # pp, the number of stages
    data: int  # dp, the number of pipelines
    tensor: int  # tp, the number of devices in a tensor group
    micro_batch: int  # samples of a micro-batch
    gas: int  # micro-batches per pipeline and iteration (gradient accumulation steps)

    def __str__(self) -> str:
        return f"pp{self.pipeline} dp{self.data} tp{self.tensor} mbs{self.micro_batch}"


@dataclass(frozen=True)
class AmpProblem:
    """Arrays of an AmpData with D devices and L layers; `compile_problem` makes it."""

    types: tuple[str, ...]  # names of the device types, in the order of their first devices
    device_type: Ints  # [D] number of each device's type
    bandwidth: Floats  # [D, D] bytes/s, +inf on the diagonal
    params: Floats  # [L] bytes of parameters
    activation: Floats  # [L] bytes per sample that a stage with this last layer sends on
    tensor: Floats  # [L] bytes per sample that the tensor ranks all-reduce
    # (tensor degree, micro-batch) -> [types, L] seconds of one micro-batch; only where every type
    # has a table
    seconds: dict[tuple[int, int], Floats]
    global_batch: int  # samples per iteration
    capacity: Floats  # [types] bytes of a device; +inf without a memory constraint
    states: Floats  # [L] bytes of weights, gradients and optimizer states; 0 without a constraint
    saved: Floats  # [L] bytes per sample kept until the backward pass; 0 without a constraint

    @property
    def devices(self) -> int:
        """D."""
        return len(self.device_type)

    @property
    def layers(self) -> int:
        """L."""
        return len(self.params)

    def configurations(self) -> Iterator[Configuration]:
        """All configurations: pp dp tp = D, pp <= L, every device type has a table, and the number
        of micro-batches per pipeline is whole and at least 1."""
        for tensor in divisors(self.devices):
            micro_batches = sorted(mbs for tp, mbs in self.seconds if tp == tensor)
            for data in divisors(self.devices // tensor):
                pipeline = self.devices // tensor // data
                if pipeline > self.layers:
                    continue
                for mbs in micro_batches:
                    gas, rest = divmod(self.global_batch, data * mbs)
                    if rest == 0 and gas >= 1:
                        yield Configuration(pipeline, data, tensor, mbs, gas)


def divisors(n: int) -> list[int]:
    """The positive divisors of n, ascending."""
    return [k for k in range(1, n + 1) if n % k == 0]


def compile_problem(data: AmpData) -> AmpProblem:
    """`data` as arrays."""
    types = tuple(dict.fromkeys(device.type for device in data.devices))
    number = {name: i for i, name in enumerate(types)}
    tables: dict[tuple[int, int], dict[str, list[float]]] = {}
    for entry in data.layer_seconds:
        if entry.type in number:
            table_of_type = tables.setdefault((entry.tensor, entry.micro_batch), {})
            table_of_type[entry.type] = entry.seconds
    seconds = {}
    for size, table_of_type in sorted(tables.items()):
        if len(table_of_type) == len(types):
            seconds[size] = np.array([table_of_type[name] for name in types])
    bandwidth = np.array(data.bandwidth, dtype=float)
    np.fill_diagonal(bandwidth, np.inf)
    params = np.array([layer.param_bytes for layer in data.layers])
    if data.memory is None:
        capacity = np.full(len(types), np.inf)
        states = np.zeros(len(data.layers))
        saved = np.zeros(len(data.layers))
    else:
        capacity = np.array([data.memory.device_bytes[name] for name in types])
        states = data.memory.state_bytes_per_param_byte * params
        states += data.memory.frozen(0, len(data.layers))
        saved = np.array(data.memory.layer_bytes_per_sample)
    return AmpProblem(
        types=types,
        device_type=np.array([number[device.type] for device in data.devices], dtype=np.int64),
        bandwidth=bandwidth,
        params=params,
        activation=np.array([layer.activation_bytes for layer in data.layers]),
        tensor=np.array([layer.tensor_bytes for layer in data.layers]),
        seconds=seconds,
        global_batch=data.global_batch,
        capacity=capacity,
        states=states,
        saved=saved,
    )


@dataclass(frozen=True)
class Cells:
    """The K cells of a problem's devices; `find_cells` makes it.

    Cells are interchangeable when they are alike in type, size, bandwidth inside the cell and
    bandwidth to every third cell. Interchangeable cells have consecutive numbers.
    """

    members: tuple[tuple[int, ...], ...]  # devices of each cell
    size: Ints  # [K] number of devices
    type: Ints  # [K] number of the device type
    cell_class: Ints  # [K] number of the cell's class of interchangeable cells, ascending
    # [K, K] bytes/s between a device of one cell and a device of the other. Diagonal: between two
    # devices of the cell; +inf where the cell has one device.
    bandwidth: Floats

    @property
    def count(self) -> int:
        """K."""
        return len(self.members)

    def devices(self, cell_of: Ints) -> Ints:
        """A device for each position: the cells' devices are used up in their order.

        cell_of: the cell of each position, in an array of any shape, which the result has, too.
        """
        unused = [iter(members) for members in self.members]
        chosen = [next(unused[cell]) for cell in cell_of.ravel()]
        return np.array(chosen, dtype=np.int64).reshape(cell_of.shape)


def interchangeable(labels: Sequence[Hashable], matrix: Floats) -> list[list[int]]:
    """The classes of interchangeable items, in the order of their first items.

    Items i and k are interchangeable when they have equal labels and matrix[i, x] = matrix[k, x]
    for every third item x. matrix: symmetric [n, n].
    """
    unclassified = list(range(len(labels)))
    classes = []
    while unclassified:
        first = unclassified[0]
        candidates = [i for i in unclassified if labels[i] == labels[first]]
        differs = matrix[candidates] != matrix[first]
        # only a third item x counts, neither the first item nor the candidate itself
        differs_at_first = differs[:, first]
        differs_at_itself = differs[np.arange(len(candidates)), candidates]
        mismatches = differs.sum(axis=1) - differs_at_first - differs_at_itself
        # the first item is among them, since it differs nowhere from itself
        members = [i for i, count in zip(candidates, mismatches, strict=True) if count == 0]
        classes.append(members)
        taken = set(members)
        unclassified = [i for i in unclassified if i not in taken]
    return classes


def find_cells(problem: AmpProblem) -> Cells:
    """The cells of a problem's devices."""
    cells = interchangeable(problem.device_type.tolist(), problem.bandwidth)  # devices of each
    first = np.array([cell[0] for cell in cells])
    second = np.array([cell[1] if len(cell) > 1 else cell[0] for cell in cells])
    bandwidth = problem.bandwidth[np.ix_(first, first)].copy()
    inside = np.where(first == second, np.inf, problem.bandwidth[first, second])
    np.fill_diagonal(bandwidth, inside)
    labels = [
        (int(problem.device_type[cell[0]]), len(cell), float(inside[c]))
        for c, cell in enumerate(cells)
    ]
    classes = interchangeable(labels, bandwidth)  # numbers of the cells in each class
    order = np.array([c for members in classes for c in members])
    return Cells(
        members=tuple(tuple(cells[c]) for c in order),
        size=np.array([len(cells[c]) for c in order], dtype=np.int64),
        type=problem.device_type[first[order]],
        cell_class=np.repeat(np.arange(len(classes)), [len(members) for members in classes]),
        bandwidth=np.ascontiguousarray(bandwidth[np.ix_(order, order)]),
    )


@dataclass(frozen=True)
class Strategy:
    """A decision as arrays."""

    configuration: Configuration
    placement: Ints  # [pp, dp, tp] devices
    cut: Ints  # [pp + 1] stage j has layers cut[j] to cut[j + 1] - 1

    def decision(self) -> AmpDecision:
        """The decision in the form of the file format."""
        chosen = self.configuration
        return AmpDecision(
            pipeline=chosen.pipeline,
            data=chosen.data,
            tensor=chosen.tensor,
            micro_batch=chosen.micro_batch,
            placement=self.placement.tolist(),
            stages=list(pairwise(self.cut.tolist())),
        )


@dataclass(frozen=True)
class Placed:
    """A configuration with a placement, whose cut is open: the costs of all cuts follow from it.
    `place` makes it."""

    problem: AmpProblem
    configuration: Configuration
    placement: Ints  # [pp, dp, tp] devices
    layer_seconds: Floats  # [dp, pp, L] seconds of each layer on each group, all-reduces included
    link: Floats  # [dp, pp - 1] seconds behind a stage per byte of one sample's activation
    sync: Floats  # [pp] seconds of the slowest data group per byte of the stage's parameters
    capacity: Floats  # [pp] bytes of the stage's smallest device

    def seconds(self, cut: Ints) -> float:
        """T in seconds (eq. 4 and 5) with `cut` [pp + 1]."""
        stage_seconds = [
            self.layer_seconds[:, j, first:last].sum(axis=1)
            for j, (first, last) in enumerate(pairwise(cut))
        ]
        stages = np.stack(stage_seconds, axis=1)  # [dp, pp]
        links = self.link @ self.problem.activation[cut[1:-1] - 1]
        pipelines = (self.configuration.gas - 1) * stages.max(axis=1) + stages.sum(axis=1) + links
        return float(pipelines.max() + self.sync_seconds(cut))

    def sync_seconds(self, cut: Ints) -> float:
        """Seconds of the slowest gradient all-reduce, the max over S of eq. 4."""
        return float((self.sync * np.add.reduceat(self.problem.params, cut[:-1])).max())

    def fits(self, cut: Ints) -> bool:
        """Whether every stage fits in the memory of its smallest device."""
        room = self.capacity * (1 + MEMORY_TOLERANCE)
        return bool((stage_bytes(self.problem, self.configuration, cut) <= room).all())


def stage_bytes(problem: AmpProblem, configuration: Configuration, cut: Ints) -> Floats:
    """[pp] bytes on each device of a stage under 1F1B."""
    pp, tp = configuration.pipeline, configuration.tensor
    samples_alive = np.minimum(configuration.gas, pp - np.arange(pp)) * configuration.micro_batch
    states = np.add.reduceat(problem.states, cut[:-1])
    saved = samples_alive * np.add.reduceat(problem.saved, cut[:-1])
    return np.asarray((states + saved) / tp)


def ring_factor(ranks: int) -> float:
    """2 (n-1)/n: bytes that a ring all-reduce of n ranks moves over each link per byte of the
    message (eq. 3)."""
    return 2 * (ranks - 1) / ranks


def slowest_pair(problem: AmpProblem, groups: Ints) -> Floats:
    """[...] lowest bandwidth, in bytes/s, between two devices of each group; +inf for groups of one
    device. groups: [..., n] devices."""
    pairs = problem.bandwidth[groups[..., :, None], groups[..., None, :]]
    return np.asarray(pairs.min(axis=(-2, -1)))


def place(problem: AmpProblem, configuration: Configuration, placement: Ints) -> Placed:
    """The costs of a configuration with `placement`, devices [pp, dp, tp]."""
    tp, dp, mbs = configuration.tensor, configuration.data, configuration.micro_batch
    tensor_groups = placement.transpose(1, 0, 2)  # [dp, pp, tp]
    data_groups = placement.transpose(0, 2, 1)  # [pp, tp, dp]
    tables = problem.seconds[tp, mbs][problem.device_type[tensor_groups]]  # [dp, pp, tp, L]
    # [dp, pp] seconds of a tensor all-reduce per byte of one sample
    reduce_seconds = ring_factor(tp) * mbs / slowest_pair(problem, tensor_groups)  # 0 for tp = 1
    here, after = tensor_groups[:, :-1], tensor_groups[:, 1:]
    return Placed(
        problem=problem,
        configuration=configuration,
        placement=placement,
        layer_seconds=tables.max(axis=2) + reduce_seconds[..., None] * problem.tensor,
        link=mbs / problem.bandwidth[here, after].min(axis=2),
        sync=ring_factor(dp) / tp / slowest_pair(problem, data_groups).min(axis=1),
        capacity=problem.capacity[problem.device_type[placement]].min(axis=(1, 2)),
    )


def by_node(nodes: Sequence[int]) -> list[list[int]]:
    """The devices of each node, nodes in ascending order. nodes: [D] node of each device."""
    devices: dict[int, list[int]] = {node: [] for node in sorted(set(nodes))}
    for device, node in enumerate(nodes):
        devices[node].append(device)
    return list(devices.values())


def megatron_placement(nodes: Sequence[int], configuration: Configuration) -> Ints:
    """The placement in Megatron's order, devices [pp, dp, tp].

    Megatron numbers ranks with tensor ranks innermost, then data ranks, then stages, and fills node
    after node (AMP §3.6, §4.1). Tensor groups thus lie within nodes, and data groups are as near
    together as that allows. Where the tensor degree does not divide a node's number of devices,
    the tensor groups inside nodes come first, node after node. The left-over devices then form
    groups across nodes.

    nodes: [D] node of each device.
    """
    tp = configuration.tensor
    grouped, left_over = list[int](), list[int]()
    for devices in by_node(nodes):
        in_groups = len(devices) - len(devices) % tp
        grouped += devices[:in_groups]
        left_over += devices[in_groups:]
    order = np.array([*grouped, *left_over], dtype=np.int64)
    return order.reshape(configuration.pipeline, configuration.data, tp)
