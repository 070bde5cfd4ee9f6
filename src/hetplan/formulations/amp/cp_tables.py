"""The sets and tables of problem `amp`'s constraint models, made from the data alone.

A configuration is a choice of degrees and micro-batch size, and each has a model of its own. A case
is a configuration with all that its models are made of: classes of devices, levels of bandwidth
and paces of tensor groups.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray

from hetplan.formulations.amp.data import AmpData
from hetplan.solvers.run import Run

Floats = NDArray[np.float64]
Position = tuple[int, int, int]  # (stage, pipeline, tensor rank)

# Bytes may exceed a capacity by this relative amount: rounding.
MEMORY_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Configuration:
    """Degrees and micro-batch size of one model."""

    pipeline: int
    data: int
    tensor: int
    micro_batch: int
    gas: int  # micro-batches of a pipeline in one iteration

    def __str__(self) -> str:
        return (
            f"pp {self.pipeline} x dp {self.data} x tp {self.tensor}, "
            f"micro-batch {self.micro_batch}"
        )

    @property
    def roundings(self) -> int:
        """Values in one objective: two sums each for a stage's computation, for its all-reduces and
        for S, and one value for each link."""
        return 4 * (self.pipeline + self.gas - 1) + 2 + (self.pipeline - 1)


def configurations(data: AmpData) -> Iterator[Configuration]:
    """All configurations that devices, layers, batch and tables allow."""
    count = len(data.devices)
    types = {device.type for device in data.devices}
    tables = {(table.tensor, table.micro_batch, table.type) for table in data.layer_seconds}
    sizes = sorted({(tensor, micro_batch) for tensor, micro_batch, _ in tables})
    for tensor, micro_batch in sizes:
        if not all((tensor, micro_batch, name) in tables for name in types):
            continue
        for pipeline in range(1, min(count, len(data.layers)) + 1):
            if count % (pipeline * tensor) != 0:
                continue
            ranks = count // (pipeline * tensor)
            gas, left = divmod(data.global_batch, ranks * micro_batch)
            if left == 0:
                yield Configuration(pipeline, ranks, tensor, micro_batch, gas)


@dataclass(frozen=True)
class DeviceClass:
    """Devices that may be exchanged for one another."""

    type: str
    node: int
    devices: tuple[int, ...]


def classes_of(data: AmpData, run: Run) -> list[DeviceClass]:
    """The classes, by node and type. Raises `Stopped` where the run should stop."""
    bandwidth = np.array(data.bandwidth)

    def alike(d: int, e: int) -> bool:
        same = bandwidth[d] == bandwidth[e]
        same[[d, e]] = True
        return bool(same.all())

    # (node, type) -> the devices of each class
    members: dict[tuple[int, str], list[list[int]]] = {}
    for d, device in enumerate(data.devices):
        run.check()
        classes = members.setdefault((device.node, device.type), [])
        own_class = next((devices for devices in classes if alike(devices[0], d)), None)
        if own_class is None:
            classes.append([d])
        else:
            own_class.append(d)
    return [
        DeviceClass(name, node, tuple(devices))
        for node, name in sorted(members)
        for devices in members[node, name]
    ]


def links_between(data: AmpData, classes: list[DeviceClass]) -> Floats:
    """[c, d] bandwidth between two devices of these classes; nan for a class of one device."""
    links = np.full((len(classes), len(classes)), np.nan)
    for c, d in product(range(len(classes)), repeat=2):
        one, other = classes[c].devices[0], classes[d].devices[-1]
        if one != other:
            links[c, d] = data.bandwidth[one][other]
    return links


def equal_nodes(classes: list[DeviceClass], links: Floats) -> list[tuple[list[int], list[int]]]:
    """(classes of one node, classes of a later one) for each two nodes whose exchange, class by
    class, changes no type, count or bandwidth; a node is paired with the next equal one only."""
    nodes: dict[int, list[int]] = {}
    for c, each in enumerate(classes):
        nodes.setdefault(each.node, []).append(c)
    pairs = []
    for number, mine in enumerate(nodes.values()):
        for theirs in list(nodes.values())[number + 1 :]:
            if len(mine) != len(theirs):
                continue
            exchanged = list(range(len(classes)))
            for c, d in zip(mine, theirs, strict=True):
                exchanged[c], exchanged[d] = d, c
            alike = all(
                classes[c].type == classes[d].type
                and len(classes[c].devices) == len(classes[d].devices)
                for c, d in zip(mine, theirs, strict=True)
            )
            if alike and np.array_equal(links, links[np.ix_(exchanged, exchanged)], equal_nan=True):
                pairs.append((mine, theirs))
                break
    return pairs


@dataclass(frozen=True, eq=False)
class Case:
    """A configuration with all that its models are made of."""

    data: AmpData
    chosen: Configuration
    levels: list[float]  # bandwidths, ascending; a single one where there are no links at all
    bound: float = 0.0  # seconds, proven so far; +inf where the configuration has no decision
    classes: list[DeviceClass] = field(default_factory=list)
    links: Floats = field(default_factory=lambda: np.zeros((0, 0)))  # [c, d] bytes/s

    @property
    def seconds(self) -> dict[str, Floats]:
        """Type -> [L] seconds of one micro-batch."""
        size = (self.chosen.tensor, self.chosen.micro_batch)
        types = {device.type for device in self.data.devices}
        return {
            table.type: np.array(table.seconds)
            for table in self.data.layer_seconds
            if (table.tensor, table.micro_batch) == size and table.type in types
        }

    @property
    def positions(self) -> list[Position]:
        """All positions: by stage, then pipeline, then tensor rank."""
        c = self.chosen
        return list(product(range(c.pipeline), range(c.data), range(c.tensor)))

    def layers(self, name: str) -> Floats:
        """[L] a field of all layers."""
        return np.array([getattr(layer, name) for layer in self.data.layers], dtype=np.float64)

    @property
    def reduce_bytes(self) -> Floats:
        """[L] bytes over the slowest link of a tensor group, for one micro-batch."""
        tp, size = self.chosen.tensor, self.chosen.micro_batch
        volume: Floats = 2 * (tp - 1) / tp * size * self.layers("tensor_bytes")
        return volume

    @property
    def sync_bytes(self) -> Floats:
        """[L] bytes over the slowest link of a data group."""
        dp, tp = self.chosen.data, self.chosen.tensor
        volume: Floats = 2 * (dp - 1) / dp / tp * self.layers("param_bytes")
        return volume

    @property
    def send_bytes(self) -> Floats:
        """[L] bytes of a micro-batch over the slowest link behind a stage with this last layer."""
        return self.chosen.micro_batch * self.layers("activation_bytes")

    def held_bytes(self, j: int) -> Floats:
        """[L] bytes on each device of stage j; 0 without a memory constraint."""
        memory, c = self.data.memory, self.chosen
        if memory is None:
            return np.zeros(len(self.data.layers))
        states = memory.state_bytes_per_param_byte * self.layers("param_bytes")
        states = states + memory.frozen(0, len(self.data.layers))
        alive = min(c.gas, c.pipeline - j) * c.micro_batch
        held: Floats = (states + alive * np.array(memory.layer_bytes_per_sample)) / c.tensor
        return held

    def capacities(self) -> list[float]:
        """[c] bytes on a device of each class, the tolerance included."""
        memory = self.data.memory
        if memory is None:
            return [0.0] * len(self.classes)
        return [memory.device_bytes[c.type] * (1 + MEMORY_TOLERANCE) for c in self.classes]

    def fastest(self) -> Floats:
        """[L] the least seconds of a layer on any group: fastest type, fastest link."""
        compute = np.min(list(self.seconds.values()), axis=0)
        fastest: Floats = compute + self.reduce_bytes / self.levels[-1]
        return fastest

    def slowest(self) -> float:
        """Seconds that no decision exceeds."""
        c, bandwidth = self.chosen, self.levels[0]
        chain = np.max(list(self.seconds.values()), axis=0) + self.reduce_bytes / bandwidth
        sends = (c.pipeline - 1) * self.send_bytes.max() / bandwidth
        slowest = c.gas * chain.sum() + sends + self.sync_bytes.sum() / bandwidth
        return float(slowest) * (1 + 1e-9)  # sums of floats


def simple_bound(case: Case) -> float:
    """Seconds that no decision of the configuration falls below.

    On a type of slowdown s each layer takes s times as long as on the fastest type, at least. In
    theta seconds a group gets through theta / s of the fastest type's seconds, where s is the
    largest slowdown of its types, and 1 / s is no more than the average of 1 / s over its devices.
    All groups together get through all layers of dp pipelines.
    """
    c, bandwidth = case.chosen, case.levels[-1]
    seconds = case.seconds
    fastest = np.min(list(seconds.values()), axis=0)
    worked = fastest > 0  # the layers that take any time
    speeds = 0.0
    for name, count in Counter(device.type for device in case.data.devices).items():
        slowdown = 1.0
        if worked.any():
            slowdown = float((seconds[name][worked] / fastest[worked]).min())
        speeds += count / slowdown
    theta = c.data * float(fastest.sum()) / (speeds / c.tensor)
    chain = case.fastest()
    theta = max(theta, float(chain.sum()) / c.pipeline, float(chain.max()))
    sends = (c.pipeline - 1) * float(case.send_bytes.min()) / bandwidth
    sync = float(case.sync_bytes.sum()) / c.pipeline / bandwidth
    total = (c.gas - 1) * theta + float(chain.sum()) + sends + sync
    return total * (1 - 1e-12)  # sums of floats


def prefix(values: Floats) -> Floats:
    """[L + 1] sums of the first values."""
    return np.concatenate([[0.0], np.cumsum(values)])


def reach(case: Case, j: int, largest: float, room: float) -> list[int]:
    """[first] the last end of a stage j that begins there: it takes no longer than
    `largest` seconds in all micro-batches, even on the fastest types and links, and no more than
    `room` bytes. It is `first` where there is no such end."""
    layers = len(case.data.layers)
    held = prefix(case.held_bytes(j))
    seconds = case.chosen.gas * prefix(case.fastest())
    ends = []
    for first in range(layers):
        # a difference of sums of floats: a little more time is let pass, since times add up exactly
        most_seconds = seconds[first] + largest + 1e-9 * seconds[-1]
        end = int(np.searchsorted(seconds, most_seconds, side="right")) - 1
        if case.data.memory is not None:
            end = min(end, int(np.searchsorted(held, held[first] + room, side="right")) - 1)
        ends.append(max(first, end))
    return ends


def terms_of(case: Case) -> int:
    """The entries of all tables of a model of the configuration, about."""
    c = case.chosen
    layers = len(case.data.layers)
    types = len(case.seconds)
    classes, levels = len(case.classes), len(case.levels)
    paces = sum(math.comb(types, count) for count in range(1, min(types, c.tensor) + 1))
    groups = c.pipeline * (c.data + c.tensor)
    placing = (len(case.data.devices) + groups * classes) * classes
    timing = c.pipeline * layers * (paces + 2 * levels + c.data * levels)
    return placing + groups * paces + timing


@dataclass(frozen=True)
class Paces:
    """The seconds that tensor groups take, by the types in them."""

    types: list[str]
    rows: list[Floats]  # pace -> [L] seconds
    # (1 or 0 for each type: whether it is in the group, pace)
    by_types: list[tuple[int, ...]]


def paces_of(case: Case) -> Paces:
    """The paces of all sets of types that fit into a tensor group; equal rows are one pace."""
    seconds = case.seconds
    types = list(seconds)
    numbers: dict[tuple[float, ...], int] = {}
    by_types = []
    for count in range(1, min(len(types), case.chosen.tensor) + 1):
        for members in combinations(types, count):
            row = tuple(np.max([seconds[name] for name in members], axis=0).tolist())
            pace = numbers.setdefault(row, len(numbers))
            by_types.append((*(int(name in members) for name in types), pace))
    return Paces(types, [np.array(row) for row in numbers], by_types)
