"""What a certificate's check reads of an instance: exact seconds, bytes and rates.

Nothing here is taken from the code that computes bounds. All numbers are fractions.
"""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

# A table whose seconds fall with the rows by a larger share is not taken to grow.
FALL = Fraction(1, 10**12)
# The share by which rates that are computed with logarithms are raised.
LOGARITHMS = Fraction(1, 10**9)

Numbers = list[Fraction]


class Kind(NamedTuple):
    """Nodes of one type with equally many devices, which are homes or not.

    card, fabric: bytes per second that the fastest card among them receives, and that a ring inside
    one of them joins at most.
    """

    type: int
    devices: int
    nodes: int
    is_home: bool
    card: Fraction
    fabric: Fraction


class Instance:
    """What the inequalities read of an instance: fractions in seconds, bytes, and bytes/s."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data
        self.samples: int = data["global_batch"]
        self.nodes: Sequence[Mapping[str, Any]] = data["nodes"]
        self.layers: Sequence[Mapping[str, Any]] = data["layers"]
        self.types = sorted({node["device"] for node in self.nodes})
        self.counts = [
            sum(node["devices"] for node in self.nodes if node["device"] == kind)
            for kind in self.types
        ]
        # Gradients are summed, or, under ZeRO, half of the gradients' bytes and half of the
        # weights' pass.
        grown = Fraction(data["gradient_bytes"]) / data["element_bytes"]
        grown = min(grown, (grown + 1) / 2)
        self.joined = [grown * Fraction(layer["param_bytes"]) for layer in self.layers]
        self.tied_layers = [l for l in range(1, len(self.layers)) if self.tied_bytes(l)]
        tied = [self.tied_bytes(l) for l in self.tied_layers]
        self.tied = min([grown * size for size in tied] + [self.joined[0]])
        # of the last layer's copy, which a path that ends elsewhere joins through a card
        self.tied_ends = min(grown * self.tied_bytes(len(self.layers) - 1), self.joined[0])
        # bytes of a sample behind each layer but the last one
        self.sent = [Fraction(layer["activation_bytes"]) for layer in self.layers[:-1]]
        self.fabrics = [most_joined(node) for node in self.nodes]
        self.classes = self.node_classes()
        self.patterns = math.prod(alike.nodes + 1 for alike in self.classes)
        self.known_passes: dict[tuple[int, int, int], Pass] = {}
        self.known_least: dict[tuple[int, int], Pass | None] = {}

    def tied_bytes(self, layer: int) -> Fraction:
        """Bytes of weights that a layer shares with the first one."""
        return Fraction(self.layers[layer].get("tied_param_bytes", 0))

    def node_classes(self) -> list[Kind]:
        """Nodes of one type with equally many devices, whose cards and links are taken to be those
        of the fastest; none where there is a single node, because no homes are told apart then."""
        classes = []
        if len(self.nodes) == 1:
            return []
        for q, name in enumerate(self.types):
            for devices in sorted({n["devices"] for n in self.nodes if n["device"] == name}):
                alike = [
                    n
                    for n, node in enumerate(self.nodes)
                    if (node["device"], node["devices"]) == (name, devices)
                ]
                card = max(Fraction(self.nodes[n]["network_bandwidth"]) for n in alike)
                fabric = max(self.fabrics[n] for n in alike)
                classes.append(Kind(q, devices, len(alike), False, card, fabric))
        return classes

    def kinds(self, homes: tuple[int, ...] | None, *, apart: bool) -> list[Kind]:
        """Alike nodes together, homes before the others; or each node by itself. Of homes that are
        not told apart, none is taken to be one."""
        kinds = []
        for alike, chosen in zip(self.classes, homes or (0,) * len(self.classes), strict=True):
            for is_home, nodes in ((True, chosen), (False, alike.nodes - chosen)):
                groups = [1] * nodes if apart else [nodes] * (nodes > 0)
                kinds += [alike._replace(nodes=group, is_home=is_home) for group in groups]
        return kinds

    def degrees(self, q: int) -> list[int]:
        """Tensor degrees that a stage on the type may have."""
        most = max(node["devices"] for node in self.nodes if node["device"] == self.types[q])
        return [t for t in self.data["tensor_degrees"] if t <= most and self.tables(q, t)]

    def tables(self, q: int, t: int) -> list[Mapping[str, Any]]:
        """The measured passes of a type with t tensor ranks, by their numbers of samples. Where
        none were measured, those of one device, of which each rank takes a t-th."""
        of_type = [table for table in self.data["tables"] if table["type"] == self.types[q]]
        own = [table for table in of_type if table["tensor"] == t]
        return sorted(
            own or [table for table in of_type if table["tensor"] == 1],
            key=lambda table: int(table["micro_batch"]),
        )

    def passes(self, q: int, t: int, mode: str) -> list["Pass"]:
        """The passes of t tensor ranks, by the measured numbers of samples."""
        measured = []
        for table in self.tables(q, t):
            ranks = t if table["tensor"] != t else 1
            forward = [Fraction(x) / ranks for x in table["forward_seconds"]]
            backward = [Fraction(x) / ranks for x in table["backward_seconds"]]
            if mode != "none":  # the backward pass repeats a part of the forward pass
                repeated = table["repeated"][mode]
                backward = [
                    b + Fraction(r) * f for b, r, f in zip(backward, repeated, forward, strict=True)
                ]
            measured.append(Pass(int(table["micro_batch"]), forward, backward))
        return measured

    @property
    def modes(self) -> list[str]:
        """The modes of recomputation that plans may choose."""
        return list(self.layers[0]["kept"])

    def least_pass(self, q: int, t: int, samples: int) -> "Pass":
        """The least seconds of a pass of so many samples, over the modes of recomputation."""
        if (q, t, samples) not in self.known_passes:
            each = [pass_of(self.passes(q, t, mode), samples) for mode in self.modes]
            forward, backward = each[0].forward, each[0].backward
            for other in each[1:]:
                backward = [min(pair) for pair in zip(backward, other.backward, strict=True)]
            self.known_passes[q, t, samples] = Pass(samples, forward, backward)
        return self.known_passes[q, t, samples]

    def sizes(self, q: int, t: int) -> list[int]:
        """The measured numbers of samples up to G, and G. Seconds are linear between them."""
        measured = {int(table["micro_batch"]) for table in self.tables(q, t)}
        return sorted({size for size in measured if size < self.samples} | {self.samples})

    def slowest_pass(self, q: int, t: int, rows: int) -> "Pass":
        """The least seconds that a stage's pass takes if its largest row group has so many rows.

        The pass is that of the row group whose forward and backward seconds are largest together.
        If seconds never fall with the rows, this is the largest group. Otherwise it may be any, and
        each layer has its least seconds of all numbers of rows.
        """
        if (q, t) not in self.known_least:
            each = [self.least_pass(q, t, size) for size in self.sizes(q, t)]
            least = None
            if falls(each):
                least = Pass(
                    0,
                    [min(of_layer) for of_layer in zip(*(p.forward for p in each), strict=True)],
                    [min(of_layer) for of_layer in zip(*(p.backward for p in each), strict=True)],
                )
            self.known_least[q, t] = least
        return self.known_least[q, t] or self.least_pass(q, t, rows)

    def work(self, q: int) -> Numbers:
        """[L] least device-seconds of a sample on the type, forward and backward.

        A stage's pass takes at least as long as each of its row groups, forward and backward
        together. Seconds over samples are least at an end of a linear piece.
        """
        each = [
            [t * (f + b) / size for f, b in zip(p.forward, p.backward, strict=True)]
            for t in self.degrees(q)
            for size in self.sizes(q, t)
            for p in [self.least_pass(q, t, size)]
        ]
        return [min(of_layer) for of_layer in zip(*each, strict=True)]

    def forward_work(self, q: int) -> Numbers:
        """[L] the same of forward passes alone, whose seconds are those of `slowest_pass`."""
        each = [
            [t * f / size for f in self.slowest_pass(q, t, size).forward]
            for t in self.degrees(q)
            for size in self.sizes(q, t)
        ]
        return [min(of_layer) for of_layer in zip(*each, strict=True)]


class Pass(NamedTuple):
    """Forward and backward seconds [L] of so many samples."""

    samples: int
    forward: Numbers
    backward: Numbers


def pass_of(measured: Sequence[Pass], samples: int) -> Pass:
    """A pass of so many samples. Before the first measured number of samples seconds are those of
    the first one; between two of them, and behind the last one, they are linear."""
    first, last = measured[0], measured[-1]
    if samples <= first.samples:
        return Pass(samples, first.forward, first.backward)
    if samples > last.samples:
        before = measured[-2] if len(measured) > 1 else None
        more = samples - last.samples
        return Pass(
            samples,
            [
                x + more * slope
                for x, slope in zip(last.forward, slopes(before, last, 1), strict=True)
            ],
            [
                x + more * slope
                for x, slope in zip(last.backward, slopes(before, last, 2), strict=True)
            ],
        )
    after = next(i for i, point in enumerate(measured) if point.samples >= samples)
    low, high = measured[after - 1], measured[after]
    share = Fraction(samples - low.samples, high.samples - low.samples)
    return Pass(
        samples,
        [x + share * (y - x) for x, y in zip(low.forward, high.forward, strict=True)],
        [x + share * (y - x) for x, y in zip(low.backward, high.backward, strict=True)],
    )


def slopes(before: Pass | None, last: Pass, which: int) -> Numbers:
    """[L] seconds of a further sample behind the last measured number: those of the last piece, or
    the mean of a sample where that does not rise. which: 1 forward, 2 backward."""
    ends: Numbers = last[which]  # type: ignore[assignment]
    means = [x / last.samples for x in ends]
    if before is None:
        return means
    begins: Numbers = before[which]  # type: ignore[assignment]
    apart = last.samples - before.samples
    rises = [(y - x) / apart for x, y in zip(begins, ends, strict=True)]
    return [rise if rise > 0 else mean for rise, mean in zip(rises, means, strict=True)]


def falls(points: Sequence[Pass]) -> bool:
    """Whether the seconds of some layer's pass fall somewhere as samples grow."""
    return any(
        x > y * (1 + FALL)
        for before, after in pairwise(points)
        for lower, higher in (
            (before.forward, after.forward),
            (before.backward, after.backward),
        )
        for x, y in zip(lower, higher, strict=True)
    )


def most_joined(node: Mapping[str, Any]) -> Fraction:
    """The most bytes per second that a ring inside a node joins. Every rank of it sends at least
    its bytes, at the rate of the links, or in the seconds of a measured curve.

    A curve is monotone between two sizes that are near to each other, so the larger size over the
    least seconds of both is at most joined. The logarithms are taken in floating point; the result
    is raised by far more than their error.
    """
    rates = [Fraction(node["intra_bandwidth"])]
    for curve in node.get("all_reduce", {}).values():
        knots: Sequence[float] = curve["log2_bytes"]
        steps = int(8 * (max(knots) - min(knots))) + 1
        sizes = sorted({*knots, *(min(knots) + i / 8 for i in range(steps))})
        rates.append(Fraction(2.0 ** sizes[0] / curve_seconds(curve, sizes[0])))
        for size, larger in pairwise(sizes):
            least = min(curve_seconds(curve, size), curve_seconds(curve, larger))
            rates.append(Fraction(2.0**larger / least))
        # Beyond the last size the seconds grow in proportion, but for a constant.
        end = 2.0 ** knots[-1]
        rates.append(Fraction(end / (curve["seconds"][-1] * curve["stretch"])))
    return max(rates) * (1 + LOGARITHMS)


def curve_seconds(curve: Mapping[str, Any], size: float) -> float:
    """Seconds of 2 ** size bytes, size from the first to the last knot: the logarithms of bytes and
    seconds are linear between knots, and what exceeds the first value is stretched."""
    knots, seconds = curve["log2_bytes"], curve["seconds"]
    after = next(i for i, knot in enumerate(knots) if knot >= size)
    value = seconds[after]
    if knots[after] > size:
        share = (size - knots[after - 1]) / (knots[after] - knots[after - 1])
        low, high = math.log2(seconds[after - 1]), math.log2(seconds[after])
        value = 2.0 ** (low + share * (high - low))
    return float(seconds[0] + (value - seconds[0]) * curve["stretch"])
