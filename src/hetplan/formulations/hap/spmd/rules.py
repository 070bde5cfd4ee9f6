"""The background theory of a single-device program: every rule that matches, as priced triples.

Operators run in their ways (module `operators`), tensors change form by collectives (Fig. 9,
Section 4.4):

    All-Reduce         e|All-Reduce    -> e|Identity         mirrored: All-Reduce
    Reduce-Scatter(d)  e|All-Reduce    -> e|All-Gather(d)    mirrored: All-Gather
    All-Gather(d)      e|All-Gather(d) -> e|Identity         mirrored: Reduce-Scatter
    Grouped-Broadcast  e|All-Gather(d) -> e|Identity         mirrored: one reduction per slice
    All-To-All(d, f)   e|All-Gather(d) -> e|All-Gather(f)    mirrored: All-To-All
    Slice(d)           e|Identity      -> e|All-Gather(d)    mirrored: padding; both free
    Share              l|Identity      -> l|All-Reduce       each device keeps a part; free
    Repartition        e in one segment's ratios -> another's (Section 5.2): an All-To-All of slices

The theory is about the forward pass; every instruction is priced together with its mirror in the
backward pass, as HAP's released program does: the operator with the gradients of all inputs that
have one, the collective with the opposite one. Data and parameters are loaded in the form that an
operator wants and are communicated in no other way (Section 4.5). Where a parameter is whole, its
gradient comes out in summands: the operator's output counts as had (`e~`) only after an All-Reduce
of it; a matrix product over slices of the batch may gather its factors instead and compute the
gradient on every device (Section 2.5.2).

What instructions cost: FLOP of operators, seconds of collectives, bytes that stay on devices.

A collective takes a latency and the bytes of its largest slice over a bandwidth. Source: HAP,
Section 3.2 (fitted latency and bandwidth per collective, the largest slice decides).

Bytes count until the backward pass has been there. A parameter is held with its gradient and
optimizer states: whole on every device, or a slice on each. Of every tensor that an operator works
out, and of what a collective makes of it, the devices keep the form that they come to have;
summands are not kept, views (operators without work) cost nothing. A parameter that several
operators read counts once: as the first of them reads it, or as whole.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import numpy as np

from hetplan.errors import UnsupportedError
from hetplan.formulations.hap.data import Communication, Compute, Device, HapData, Memory, Triple
from hetplan.formulations.hap.spmd.operators import (
    ELEMENT_FLOPS,
    PARTIAL,
    WHOLE,
    Change,
    Collective,
    Form,
    Gather,
    Instruction,
    Run,
    Synchronise,
    Way,
    changes,
    operator,
    parsed,
    property_name,
    size,
    whole_way,
)
from hetplan.formulations.hap.spmd.program import PARAMETER, Axes, Node, SingleProgram, ways_of
from hetplan.profiling.hardware.cluster import Cluster
from hetplan.profiling.profiles.measured_collectives import OPERATIONS, Collectives
from hetplan.solvers.run import Run as SolverRun

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
    forward, backward = operator(node.kind).work(
        [source.shape for source in inputs], node.shape, node.attributes
    )
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


@dataclass(frozen=True)
class Links:
    """Bytes per second of each collective, for m devices: all-reduces count the whole tensor, the
    others m times the largest slice, grouped broadcasts the tensor and one latency per device.
    latency: seconds per launch. latencies: measured ones instead, of `all-reduce` and so on (of a
    grouped broadcast for all launches)."""

    devices: int
    all_gather: float
    broadcast: float
    all_reduce: float
    reduce_scatter: float
    all_to_all: float
    latency: float = 2e-5
    latencies: Mapping[str, float] = field(default_factory=dict)

    def price(self, how: str, size: float) -> Price:
        """A collective by its name, on a tensor of `size` bytes; of slices, padded to the largest
        unless they are broadcast one by one (Section 4.4)."""
        name, m = how.removesuffix(" factors"), self.devices
        operation = "all-to-all" if name == "Repartition" else name.lower()
        launches = m if name == "Grouped-Broadcast" else 1
        latency = self.latencies.get(operation, launches * self.latency)
        if name == "All-Reduce":
            return Price(latency + size / self.all_reduce)
        if name == "Grouped-Broadcast":
            return Price(latency + size / self.broadcast)
        of_slices = {"Reduce-Scatter": self.reduce_scatter, "All-Gather": self.all_gather}
        return Price(latency, m * size / of_slices.get(name, self.all_to_all))


def ring(devices: int, bytes_per_second: float, latency: float = 2e-5, sharing: int = 1) -> Links:
    """Rings over links of that speed: an all-gather passes (m - 1) / m of the tensor, an all-reduce
    twice that
    (Thakur et al. 2005); in an all-to-all `sharing` devices send (m - 1) / m of their slices over
    one link."""
    once = bytes_per_second / (max(devices - 1, 1) / devices)
    return Links(devices, once, bytes_per_second, once / 2, once, once * devices / sharing, latency)


def links_of(cluster: Cluster) -> Links:
    """Rings over the slowest link between any two devices of the cluster; every hop of an
    all-gather waits for a message."""
    m, nodes = len(cluster.devices), [device.node for device in cluster.devices]
    if m == 1:
        return ring(1, 1e15, 0.0)
    apart = ~np.eye(m, dtype=np.bool_)
    sharing = max(map(nodes.count, nodes)) if len(set(nodes)) > 1 else 1
    latency = max((m - 1) * float(cluster.latency().max()), 1e-6)
    return ring(m, float(cluster.bandwidth()[apart].min()), latency, sharing)


def three_steps(links: Links, bytes_per_second: float) -> Links:
    """Collectives between machines of several devices: each begins with a gather or reduction to
    one device of every machine and ends with a scatter or broadcast from it, both over links of
    that speed. Source: HAP, Section 6."""
    names = ("all_gather", "broadcast", "all_reduce", "reduce_scatter", "all_to_all")
    inside = 2 / bytes_per_second
    return replace(links, **{name: 1 / (1 / getattr(links, name) + inside) for name in names})


def measured_links(measured: Collectives, devices: int) -> Links:
    """Links whose collectives take as long as measured on so many ranks. What was measured counts
    each rank's own bytes; of a reduce-scatter and an all-to-all, in all parts together. Raises
    UnsupportedError where some were not measured on as many. Source: HAP, Section 3.2."""
    fits = {fit.operation: fit for fit in measured.fits if fit.ranks == devices}
    if lacking := [name for name in OPERATIONS if name != "send" and name not in fits]:
        raise UnsupportedError(
            "collectives were not measured on all devices of the cluster",
            where=f"collectives on {measured.device}", got=f"{measured.ranks} ranks",
            expected=f"{', '.join(lacking)} on {devices}",
        )  # fmt: skip
    speed = {name: fit.bytes_per_second for name, fit in fits.items()}
    return Links(
        devices, devices * speed["all-gather"], devices * speed["grouped-broadcast"],
        speed["all-reduce"], speed["reduce-scatter"], devices * speed["all-to-all"],
        latencies={name: fit.latency_seconds for name, fit in fits.items()},
    )  # fmt: skip


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


ELEMENT_BYTES = 4


@dataclass(frozen=True)
class Theory:
    """data: the instance; instructions: one per triple; axes: where the program's dimensions may be
    cut; holding: what its bytes are of, None without memory."""

    program: SingleProgram
    data: HapData
    instructions: tuple[Instruction, ...]
    axes: Axes
    holding: Holding | None = None

    def reads(self, instruction: Instruction) -> list[tuple[Node, str, Form]]:
        """(parameter, the one that it is a copy of or itself, form) of what an operator reads."""
        if not isinstance(instruction, Run):
            return []
        inputs = self.program.inputs(self.program.node(instruction.node))
        return [
            (source, self.program.copies.get(source.name, source.name), form)
            for source, form in zip(inputs, instruction.way.inputs, strict=True)
            if source.kind == PARAMETER
        ]


def theory_of(
    program: SingleProgram,
    devices: Sequence[Device],
    links: Links,
    *,
    element_bytes: int = ELEMENT_BYTES,
    all_dimensions: bool = False,
    weights: Mapping[str, float] | None = None,
    steps: int = 1,
    holding: Holding | None = None,
    slices: int | None = None,
    run: SolverRun | None = None,
) -> Theory:
    """The theory of `program` on `devices`; `all_dimensions`: also those that placeholders mark
    `unsliced`.

    weights: node -> factor on its FLOP (1 where left out). steps: how often the program runs before
    parameters change; gradients that add up meanwhile are all-reduced once, so that each run is
    charged with that part of it. holding: makes memory a constraint. slices: into so many a tensor
    must be sliceable, where a device stands for several. Raises `Stopped` where `run` should stop.
    """
    writer = _Writer(
        program,
        slices or len(devices),
        links,
        element_bytes,
        all_dimensions,
        weights or {},
        steps,
        holding,
    )
    for node in program.computations:
        if run is not None:
            run.check()
        writer.run(node)
        writer.change(node)
    writer.move_between_segments()
    data = HapData(
        devices=list(devices), segments=program.segments, triples=writer.triples,
        goal=property_name(program.loss.name, PARTIAL),
        memory=None if holding is None else Memory(device_bytes=list(holding.device_bytes)),
    )  # fmt: skip
    return Theory(program, data, tuple(writer.instructions), writer.axes, holding)


class _Writer:
    """Collects triples and instructions, side by side."""

    def __init__(
        self,
        program: SingleProgram,
        devices: int,
        links: Links,
        element_bytes: int,
        all_dimensions: bool,
        weights: Mapping[str, float],
        steps: int,
        holding: Holding | None,
    ) -> None:
        self.program, self.devices, self.links = program, devices, links
        self.element_bytes, self.all_dimensions = element_bytes, all_dimensions
        self.weights, self.steps, self.holding = weights, steps, holding
        self.axes, self.gradients = Axes(program), program.needs_gradient()
        self.triples: list[Triple] = []
        self.instructions: list[Instruction] = []
        # (tensor, segment that reads it, form) of what moves between segments, in order
        self.elsewhere: dict[tuple[str, int, Form], None] = {}

    def size(self, *nodes: Node) -> float:
        """Bytes of tensors."""
        return float(sum(node.elements for node in nodes) * self.element_bytes)

    def allowed(self, node: Node, way: Way) -> bool:
        """Whether every device can have a part of what the way slices."""
        return self.axes.sliceable(node, way, self.devices, all_dimensions=self.all_dimensions)

    def compute(
        self,
        instruction: Instruction,
        pre: Sequence[str],
        segment: int,
        fixed: float = 0.0,
        shared: float = 0.0,
    ) -> None:
        """One compute triple: FLOP of every device, and FLOP shared by the ratios."""
        self.instructions.append(instruction)
        self.triples.append(
            Compute(
                kind="compute", instruction=instruction.text(), pre=list(dict.fromkeys(pre)),
                post=[instruction.after], segment=segment, fixed_flops=fixed, shared_flops=shared,
                **self._bytes(instruction),
            )
        )  # fmt: skip

    def communicate(self, instruction: Change | Synchronise, segment: int, price: Price) -> None:
        """One communication triple."""
        self.instructions.append(instruction)
        self.triples.append(
            Communication(
                kind="comm", instruction=instruction.text(), pre=[instruction.before],
                post=[instruction.after], segment=segment, fixed_seconds=price.fixed,
                shared_seconds=price.shared, **self._bytes(instruction),
            )
        )  # fmt: skip

    def _bytes(self, instruction: Instruction) -> dict[str, float]:
        """What it adds to memory, where that is limited and more than 0."""
        if self.holding is None:
            return {}
        fixed, shared = self.holding.of(self.program, instruction)
        sizes = {"fixed_bytes": fixed, "shared_bytes": shared}
        return {key: size for key, size in sizes.items() if size > 0}

    def run(self, node: Node) -> None:
        """The operator in every way that its dimensions allow, the replicated one first, with what
        its parameters' gradients need."""
        waiting: dict[tuple[Form, tuple[str, ...]], str] = {}
        ways = dict.fromkeys([whole_way(len(node.inputs)), *ways_of(self.program, node)])
        for way in ways:
            if not self.allowed(node, way):
                continue
            pairs = zip(self.program.inputs(node), way.inputs, strict=True)
            held = [s for s, form in pairs if s.kind == PARAMETER and form == WHOLE]
            names, done = tuple(p.name for p in held), property_name(node.name, way.output)
            pre, flops = self._pre(node, way), self._work(node).total
            fixed, shared = (0.0, flops) if way.shared else (flops, 0.0)
            if not held:
                self.compute(Run(node.name, way, done), pre, node.segment, fixed, shared)
                continue
            key = (way.output, names)
            if key not in waiting:
                waiting[key] = property_name(f"{node.name}~{len(waiting) or ''}", way.output)
                price = self.links.price("All-Reduce", self.size(*held))
                sync = Synchronise(node.name, names, "All-Reduce", waiting[key], done)
                self.communicate(sync, node.segment, Price(price.fixed / self.steps))
            self.compute(Run(node.name, way, waiting[key]), pre, node.segment, fixed, shared)
            self._factors(node, way, names, done)

    def _pre(self, node: Node, way: Way) -> list[str]:
        """Properties of the inputs that are no sources; those of another segment under that
        segment's ratios."""
        pre = []
        for source, form in zip(self.program.inputs(node), way.inputs, strict=True):
            if source.source:
                continue
            name = source.name
            if source.segment != node.segment:
                self.elsewhere[name, node.segment, form] = None
                name = f"{name}@{node.segment}"
            pre.append(property_name(name, form))
        return pre

    def _work(self, node: Node) -> Work:
        return work_of(self.program, node, self.gradients, self.weights.get(node.name, 1.0))

    def _factors(self, node: Node, way: Way, held: tuple[str, ...], done: str) -> None:
        """Sufficient factors: for a product of a slice of the batch with a whole weight."""
        if not way.shared or way.output < 0 or node.kind != "contract":
            return
        inputs = self.program.inputs(node)
        terms, output = parsed(node.attributes["equation"])
        if inputs[0].kind == PARAMETER or inputs[1].name not in held:
            return
        letter = output[way.output]
        if terms[0][way.inputs[0]] != letter or any(letter in term for term in terms[1:]):
            return
        work, waits = self._work(node), property_name(f"{node.name}~factors", way.output)
        run = Run(node.name, way, waits, factors=True)
        everywhere, shared = sum(work.gradients[1:]), work.forward + work.gradients[0]
        self.compute(run, self._pre(node, way), node.segment, everywhere, shared)
        hows: tuple[Gather, Gather] = ("All-Gather factors", "Grouped-Broadcast factors")
        for how in hows:
            price = self.links.price(how, self.size(inputs[0]))
            sync = Synchronise(node.name, held, how, waits, done)
            self.communicate(sync, node.segment, price + self.links.price(how, self.size(node)))

    def change(self, node: Node) -> None:
        """Every change of form of a computed tensor."""
        if node is self.program.loss:
            self._change(node, "Share", WHOLE, PARTIAL)
            return
        whole = (WHOLE,) * len(node.inputs)
        cuts = [d for d in range(len(node.shape)) if self.allowed(node, Way(whole, d))]
        for how, source, target in changes(cuts):
            self._change(node, how, source, target)

    def _change(self, node: Node, how: Collective, source: Form, target: Form) -> None:
        before, after = property_name(node.name, source), property_name(node.name, target)
        change = Change(how, node.name, source, target, before, after)
        if how in ("Slice", "Share"):
            self.compute(change, [before], node.segment)
        else:
            self.communicate(change, node.segment, self._both_passes(how, node))

    def _both_passes(self, how: str, node: Node) -> Price:
        """A collective on a tensor, with its mirror on the gradient if there is one."""
        price, back = (
            self.links.price(one, self.size(node)) for one in (how, OPPOSITE.get(how, how))
        )
        return price + back if node.name in self.gradients else price

    def move_between_segments(self) -> None:
        """Tensors that another segment reads, under its ratios: a slice moves, other forms are as
        they were."""
        for name, segment, form in self.elsewhere:
            node = self.program.node(name)
            before, after = property_name(name, form), property_name(f"{name}@{segment}", form)
            move = Change("Repartition", name, form, form, before, after)
            if form < 0:
                self.compute(move, [before], node.segment)
            else:
                self.communicate(move, node.segment, self._both_passes("Repartition", node))
