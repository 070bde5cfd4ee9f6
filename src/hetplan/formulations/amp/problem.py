"""The instance as arrays, for the solvers (the evaluator does not use this module).

A *configuration* fixes the degrees and the micro-batch; placement and cut remain.

*Cells* are classes of interchangeable devices. Two devices are interchangeable when they have one
type and the same bandwidth to every third device; that is an equivalence, all pairs inside a cell
have one bandwidth and so have all pairs between two cells. A placement therefore matters only
through the cell of each position. A plain node is one cell, a mixed node several.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

from hetplan.formulations.amp.data import AmpData, AmpDecision

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# A sum of bytes may exceed a capacity by rounding in its last digits; the evaluator says the same
# for itself.
MEMORY_TOLERANCE = 1e-9


# Why there is no decision.
NO_CONFIGURATION = (
    "no degrees and micro-batch with a whole number of micro-batches, tables for every type and "
    "enough layers"
)
NO_ROOM = "no cut and placement fits the memory, whatever the degrees and the micro-batch"


@dataclass(frozen=True)
class Configuration:
    """Degrees and micro-batch. gas: micro-batches per pipeline and iteration (gradient accumulation
    steps)."""

    pipeline: int
    data: int
    tensor: int
    micro_batch: int
    gas: int

    def __str__(self) -> str:
        return f"pp{self.pipeline} dp{self.data} tp{self.tensor} mbs{self.micro_batch}"


@dataclass(frozen=True)
class AmpProblem:
    """Arrays of an AmpData. Types are numbered in order of first appearance among the devices.

    device_type [D]; bandwidth [D, D] bytes/s, +inf on the diagonal; params, activation, tensor [L]
    bytes; seconds {(tensor, micro_batch): [types, L]} for the pairs that every type has a table
    for. capacity [types] bytes (+inf without memory), state_factor, saved [L] bytes per sample.
    """

    types: tuple[str, ...]
    device_type: Ints
    bandwidth: Floats
    params: Floats
    activation: Floats
    tensor: Floats
    seconds: dict[tuple[int, int], Floats]
    global_batch: int
    capacity: Floats
    state_factor: float
    saved: Floats

    @property
    def devices(self) -> int:
        """D."""
        return len(self.device_type)

    @property
    def layers(self) -> int:
        """L."""
        return len(self.params)

    def configurations(self) -> Iterator[Configuration]:
        """All (pp, dp, tp, mbs) with pp dp tp = D, gas whole and >= 1, tables for every type, pp <=
        L."""
        for tensor in divisors(self.devices):
            batches = sorted(mbs for tp, mbs in self.seconds if tp == tensor)
            for data in divisors(self.devices // tensor):
                pipeline = self.devices // tensor // data
                for mbs in batches if pipeline <= self.layers else ():
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
            tables.setdefault((entry.tensor, entry.micro_batch), {})[entry.type] = entry.seconds
    bandwidth = np.array(data.bandwidth, dtype=float)
    np.fill_diagonal(bandwidth, np.inf)
    memory = data.memory
    return AmpProblem(
        types=types,
        device_type=np.array([number[device.type] for device in data.devices], dtype=np.int64),
        bandwidth=bandwidth,
        params=np.array([layer.param_bytes for layer in data.layers]),
        activation=np.array([layer.activation_bytes for layer in data.layers]),
        tensor=np.array([layer.tensor_bytes for layer in data.layers]),
        seconds={
            key: np.array([table[name] for name in types])
            for key, table in sorted(tables.items())
            if len(table) == len(types)
        },
        global_batch=data.global_batch,
        capacity=np.array([memory.device_bytes[name] if memory else np.inf for name in types]),
        state_factor=memory.state_bytes_per_param_byte if memory else 0.0,
        saved=np.array(memory.layer_bytes_per_sample if memory else [0.0] * len(data.layers)),
    )


@dataclass(frozen=True)
class Cells:
    """K cells, those of one class next to each other.

    members: devices of each cell. size, type, kind [K]: kind numbers the classes of interchangeable
    cells. bandwidth [K, K] bytes/s: between two devices of cells u and v; the diagonal is the
    bandwidth inside a cell
    (+inf for a cell of one device, where no such pair exists).
    """

    members: tuple[tuple[int, ...], ...]
    size: Ints
    type: Ints
    kind: Ints
    bandwidth: Floats

    @property
    def count(self) -> int:
        """K."""
        return len(self.members)

    def devices(self, cell_of: Ints) -> Ints:
        """Devices by position, those of a cell taken in order; cell_of: the cell of each."""
        left = [iter(members) for members in self.members]
        chosen = [next(left[cell]) for cell in cell_of.ravel()]
        return np.array(chosen, dtype=np.int64).reshape(cell_of.shape)


def interchangeable(labels: Sequence[Hashable], matrix: Floats) -> list[list[int]]:
    """Classes of items i, i' with equal labels and matrix[i, x] = matrix[i', x] for every other x.

    matrix: symmetric [n, n]. The classes are listed by their first item.
    """
    left = list(range(len(labels)))
    classes = []
    while left:
        first = left[0]
        alike = [i for i in left if labels[i] == labels[first]]
        differs = matrix[alike] != matrix[first]
        mismatches = differs.sum(axis=1) - differs[:, first] - differs[np.arange(len(alike)), alike]
        group = [i for i, count in zip(alike, mismatches, strict=True) if i == first or count == 0]
        classes.append(group)
        taken = set(group)
        left = [i for i in left if i not in taken]
    return classes


def find_cells(problem: AmpProblem) -> Cells:
    """The cells of a problem's devices, equal cells next to each other."""
    groups = interchangeable(problem.device_type.tolist(), problem.bandwidth)
    first = np.array([group[0] for group in groups])
    second = np.array([group[1] if len(group) > 1 else group[0] for group in groups])
    between = problem.bandwidth[np.ix_(first, first)].copy()
    inside = np.where(first == second, np.inf, problem.bandwidth[first, second])
    np.fill_diagonal(between, inside)
    labels = [
        (int(problem.device_type[group[0]]), len(group), float(inside[i]))
        for i, group in enumerate(groups)
    ]
    classes = interchangeable(labels, between)
    order = np.array([cell for kind in classes for cell in kind])
    return Cells(
        members=tuple(tuple(groups[cell]) for cell in order),
        size=np.array([len(groups[cell]) for cell in order], dtype=np.int64),
        type=problem.device_type[first[order]],
        kind=np.repeat(np.arange(len(classes)), [len(kind) for kind in classes]),
        bandwidth=np.ascontiguousarray(between[np.ix_(order, order)]),
    )


@dataclass(frozen=True)
class Strategy:
    """placement [pp, dp, tp] device numbers; cut [pp + 1]: stage j is layers cut[j] to cut[j + 1] -
    1."""

    configuration: Configuration
    placement: Ints
    cut: Ints

    def decision(self) -> AmpDecision:
        """As the file format writes it."""
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
    """A configuration on its devices, cut left open.

    placement [pp, dp, tp]. layer_seconds [dp, pp, L]: of each layer if that tensor group ran it,
    all-reduce included. link [dp, pp - 1]: seconds per activation byte (of one sample) behind each
    stage. sync [pp]: seconds per parameter byte of the stage, slowest data group. capacity [pp]:
    bytes of the smallest device.
    """

    problem: AmpProblem
    configuration: Configuration
    placement: Ints
    layer_seconds: Floats
    link: Floats
    sync: Floats
    capacity: Floats

    def seconds(self, cut: Ints) -> float:
        """T of eq. 4 and 5 for `cut` [pp + 1]."""
        stages = np.stack(
            [
                self.layer_seconds[:, j, first:last].sum(axis=1)
                for j, (first, last) in enumerate(pairwise(cut))
            ],
            axis=1,
        )
        links = self.link @ self.problem.activation[cut[1:-1] - 1]
        pipelines = (self.configuration.gas - 1) * stages.max(axis=1) + stages.sum(axis=1) + links
        return float(pipelines.max() + self.sync_seconds(cut))

    def sync_seconds(self, cut: Ints) -> float:
        """The slowest gradient all-reduce, max_d S_d."""
        return float((self.sync * np.add.reduceat(self.problem.params, cut[:-1])).max())

    def fits(self, cut: Ints) -> bool:
        """Whether every stage fits the memory of its smallest device."""
        room = self.capacity * (1 + MEMORY_TOLERANCE)
        return bool((stage_bytes(self.problem, self.configuration, cut) <= room).all())


def stage_bytes(problem: AmpProblem, configuration: Configuration, cut: Ints) -> Floats:
    """Bytes per device of each stage under 1F1B, [pp]."""
    pp, tp = configuration.pipeline, configuration.tensor
    alive = np.minimum(configuration.gas, pp - np.arange(pp)) * configuration.micro_batch
    state = problem.state_factor * np.add.reduceat(problem.params, cut[:-1])
    return np.asarray((state + alive * np.add.reduceat(problem.saved, cut[:-1])) / tp)


def ring_factor(ranks: int) -> float:
    """Bytes that a ring all-reduce moves over each link per byte of the message: 2 (n-1)/n (eq.
    3)."""
    return 2 * (ranks - 1) / ranks


def slowest_pair(problem: AmpProblem, groups: Ints) -> Floats:
    """Lowest bandwidth within each group; groups [..., n] -> [...], +inf for groups of one."""
    pairs = problem.bandwidth[groups[..., :, None], groups[..., None, :]]
    return np.asarray(pairs.min(axis=(-2, -1)))


def place(problem: AmpProblem, configuration: Configuration, placement: Ints) -> Placed:
    """Fold `placement` [pp, dp, tp] into the costs that a cut sees."""
    tp, dp, mbs = configuration.tensor, configuration.data, configuration.micro_batch
    by_rank = placement.transpose(1, 0, 2)  # [dp, pp, tp]
    tables = problem.seconds[tp, mbs][problem.device_type[by_rank]]  # [dp, pp, tp, L]
    reduce_seconds = ring_factor(tp) * mbs / slowest_pair(problem, by_rank)  # per byte, [dp, pp]
    here, after = by_rank[:, :-1], by_rank[:, 1:]
    return Placed(
        problem=problem,
        configuration=configuration,
        placement=placement,
        layer_seconds=tables.max(axis=2) + reduce_seconds[..., None] * problem.tensor,
        link=mbs / problem.bandwidth[here, after].min(axis=2),
        sync=ring_factor(dp) / tp / slowest_pair(problem, placement.transpose(0, 2, 1)).min(axis=1),
        capacity=problem.capacity[problem.device_type[placement]].min(axis=(1, 2)),
    )


def by_node(nodes: Sequence[int]) -> list[list[int]]:
    """Device numbers of each node, nodes in ascending order; nodes [D]."""
    return [[d for d, own in enumerate(nodes) if own == node] for node in sorted(set(nodes))]


def megatron_placement(nodes: Sequence[int], configuration: Configuration) -> Ints:
    """Devices [pp, dp, tp] in Megatron's order; nodes [D] names the node of each device.

    Megatron numbers ranks tensor first, then data, then pipeline, and fills node after node (AMP
    §3.6, §4.1): tensor groups lie within nodes, and what is left of a node's links serves data
    groups next.
    Where the tensor degree does not divide a node's devices, whole groups come first, node after
    node, and the left-over devices then form groups across nodes.
    """
    tp = configuration.tensor
    members = by_node(nodes)
    whole = chain.from_iterable(node[: len(node) - len(node) % tp] for node in members)
    rest = chain.from_iterable(node[len(node) - len(node) % tp :] for node in members)
    order = np.array([*whole, *rest], dtype=np.int64)
    return order.reshape(configuration.pipeline, configuration.data, tp)
