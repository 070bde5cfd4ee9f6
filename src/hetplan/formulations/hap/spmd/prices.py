"""What instructions cost: FLOP of operators, seconds of collectives, bytes that stay on devices.

A collective takes a latency and the bytes of its largest slice over a bandwidth. Source: HAP,
Section 3.2 (fitted latency and bandwidth per collective, the largest slice decides).

Bytes count until the backward pass has been there. A parameter is held with its gradient and
optimizer states: whole on every device, or a slice on each. Of every tensor that an operator works
out, and of what a collective makes of it, the devices keep the form that they come to have;
summands are not kept, views (operators without work) cost nothing. A parameter that several
operators read counts once: as the first of them reads it, or as whole.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from hetplan.formulations.hap.spmd.forms import PARTIAL, WHOLE, Change, Form, Instruction, Run
from hetplan.formulations.hap.spmd.operators import ELEMENT_FLOPS, operator, size
from hetplan.formulations.hap.spmd.program import PARAMETER, Node, SingleProgram
from hetplan.profiling.cluster import Cluster

PRODUCTS = ("contract", "convolve", "attention")


@dataclass(frozen=True)
class Work:
    """FLOP of one operator."""

    forward: float
    gradients: tuple[float, ...] = ()
    """Of the backward pass, for each input; 0 where no gradient is needed."""

    @property
    def backward(self) -> float:
        """For all gradients."""
        return sum(self.gradients)

    @property
    def total(self) -> float:
        """Both passes."""
        return self.forward + self.backward


def work_of(program: SingleProgram, node: Node, needed: Set[str], weight: float = 1.0) -> Work:
    """The work that theories charge for a node.

    needed: the tensors with gradients, `program.needs_gradient()`. weight: a factor on all of it.
    """
    inputs = program.inputs(node)
    shapes = [source.shape for source in inputs]
    forward, backward = operator(node.kind).work(shapes, node.shape, node.attributes)
    pairs = zip(inputs, backward, strict=True)
    passed = needed if node.name in needed else ()
    return Work(weight * forward, tuple(weight * b if s.name in passed else 0.0 for s, b in pairs))


def products_of(program: SingleProgram, node: Node, needed: Set[str]) -> Work:
    """The part of it that is products of matrices, as counters of FLOP see it; 0 for other
    kinds."""
    if node.kind not in PRODUCTS:
        return Work(0.0)
    work, inputs = work_of(program, node, needed), program.inputs(node)
    if node.kind == "attention":
        b, n, q, _ = node.shape
        heads, keys = n * node.attributes.get("queries", 1), inputs[-1].shape[2]
        scores = ELEMENT_FLOPS * float(b * heads * q * keys)
        return Work(work.forward - 4 * scores, (work.backward - 6 * scores,))
    bias = ELEMENT_FLOPS * size(node.shape) * (len(inputs) - 2)
    return Work(work.forward, (work.backward - bias,))


def by_layer(program: SingleProgram) -> dict[str, float]:
    """layer -> FLOP forward and backward, in order of appearance."""
    needed = program.needs_gradient()
    flops: dict[str, float] = {}
    for node in program.computations:
        flops[node.layer] = flops.get(node.layer, 0.0) + work_of(program, node, needed).total
    return flops


OPPOSITE = {"Reduce-Scatter": "All-Gather", "All-Gather": "Reduce-Scatter"}


@dataclass(frozen=True)
class Price:
    """fixed + shared * largest ratio, in seconds."""

    fixed: float
    shared: float = 0.0

    def __add__(self, other: "Price") -> "Price":
        return Price(self.fixed + other.fixed, self.shared + other.shared)

    def divided(self, parts: int) -> "Price":
        """One of so many equal parts."""
        return Price(self.fixed / parts, self.shared / parts)


@dataclass(frozen=True)
class Links:
    """Bytes per second of each collective, for m devices: all-reduces count the whole tensor, the
    others m times the largest slice, grouped broadcasts the tensor and one latency per device.
    latency: seconds per launch."""

    devices: int
    all_gather: float
    broadcast: float
    all_reduce: float
    reduce_scatter: float
    all_to_all: float
    latency: float = 2e-5

    def price(self, how: str, size: float) -> Price:
        """A collective by its name, on a tensor of `size` bytes; of slices, padded to the largest
        unless they are broadcast one by one (Section 4.4)."""
        m = self.devices
        if how == "All-Reduce":
            return Price(self.latency + size / self.all_reduce)
        if how.startswith("Grouped-Broadcast"):
            return Price(m * self.latency + size / self.broadcast)
        of_slices = {"Reduce-Scatter": self.reduce_scatter, "All-Gather": self.all_gather}
        speed = of_slices.get(how.removesuffix(" factors"), self.all_to_all)
        return Price(self.latency, m * size / speed)

    def mirrored(self, how: str, size: float) -> Price:
        """The collective that stands for it in the backward pass."""
        return self.price(OPPOSITE.get(how, how), size)


def measured_by_hap(devices: int) -> Links:
    """The figures in HAP's artefact, for GPUs of machines on 10.4 Gbit/s (Section 7.1)."""
    return Links(devices, 9.46e9, 9.15e9, 5.91e9, 9.74e9, 2.46e10)


def ring(devices: int, bytes_per_second: float, latency: float = 2e-5, sharing: int = 1) -> Links:
    """Rings over links of that speed: an all-gather passes (m - 1) / m of the tensor, an all-reduce
    twice that
    (Thakur et al. 2005); in an all-to-all `sharing` devices send (m - 1) / m of their slices over
    one link."""
    part = max(devices - 1, 1) / devices
    once = bytes_per_second / part
    exchange = once * devices / sharing
    return Links(devices, once, bytes_per_second, once / 2, once, exchange, latency)


def links_of(cluster: Cluster) -> Links:
    """Rings over the slowest link between any two devices of the cluster, with its latency."""
    matrix, delay = cluster.bandwidth(), cluster.latency()
    m = len(cluster.devices)
    if m == 1:
        return ring(1, 1e15, 0.0)
    i, j = min(
        ((i, j) for i in range(m) for j in range(m) if i != j), key=lambda pair: matrix[pair]
    )
    nodes = [device.node for device in cluster.devices]
    sharing = max(nodes.count(node) for node in set(nodes)) if len(set(nodes)) > 1 else 1
    return ring(m, float(matrix[i, j]), max(float(delay[i, j]), 1e-6), sharing)


# Of a parameter's entry: weight, gradient and Adam's two moments in fp32, or 2 + 2 and fp32 copies
# in 16 bit.
STATE_BYTES = 16.0
# What makes no new form of a tensor.
VIEWS = ("Slice", "Share")


@dataclass(frozen=True)
class Holding:
    """device_bytes [m]; state_bytes per entry of a parameter; saved: node -> bytes of its whole
    tensor (0 where left out). tied_whole: whether parameters that several operators read count as
    whole, as they are held where these read them in different ways."""

    device_bytes: tuple[float, ...]
    state_bytes: float
    saved: Mapping[str, float]
    tied_whole: bool = False

    def of(self, program: SingleProgram, instruction: Instruction) -> tuple[float, float]:
        """(fixed bytes, shared bytes) that an instruction adds."""
        parts: list[tuple[Form, float]] = []
        if (kept := form_kept(instruction)) is not None:
            parts.append((kept[1], self.saved.get(kept[0], 0.0)))
        if isinstance(instruction, Run):
            inputs, tied = program.inputs(program.node(instruction.node)), program.copies.values()
            for source, form in zip(inputs, instruction.way.inputs, strict=True):
                if source.kind == PARAMETER and source.name not in program.copies:
                    held = WHOLE if self.tied_whole and source.name in tied else form
                    parts.append((held, self.state_bytes * source.elements))
        fixed = sum(size for form, size in parts if form == WHOLE)
        return fixed, sum(size for form, size in parts if form >= 0)


def holding_of(
    program: SingleProgram,
    device_bytes: Sequence[float],
    *,
    element_bytes: int,
    state_bytes: float = STATE_BYTES,
) -> Holding:
    """Every tensor that is worked out is kept as it is."""
    saved = {node.name: float(node.elements * element_bytes) for node in worked_out(program)}
    return Holding(tuple(device_bytes), state_bytes, saved)


def worked_out(program: SingleProgram) -> list[Node]:
    """The operators that compute something."""
    gradients = program.needs_gradient()
    return [node for node in program.computations if work_of(program, node, gradients).total > 0]


def form_kept(instruction: Instruction) -> tuple[str, Form] | None:
    """(tensor, form) that an instruction leaves on the devices; None where it leaves none."""
    if isinstance(instruction, Run):
        tensor, form = instruction.node, instruction.way.output
    elif isinstance(instruction, Change) and instruction.how not in VIEWS:
        tensor, form = instruction.tensor, instruction.target
        if instruction.how == "Repartition" and form == WHOLE:  # as it was
            return None
    else:
        return None
    return None if form == PARTIAL else (tensor, form)
