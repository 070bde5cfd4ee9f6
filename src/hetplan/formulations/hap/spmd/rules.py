"""The background theory of a single-device program: every rule that matches, as priced triples.

Operators run in their ways (module `operators`), tensors change form by collectives (Fig. 9,
Section 4.4):

    All-Reduce         e|All-Reduce    -> e|Identity         mirrored: All-Reduce
    Reduce-Scatter(d)  e|All-Reduce    -> e|All-Gather(d)    mirrored: All-Gather
    All-Gather(d)      e|All-Gather(d) -> e|Identity         mirrored: Reduce-Scatter
    Grouped-Broadcast  e|All-Gather(d) -> e|Identity         mirrored: one reduction per slice
    All-To-All(d, f)   e|All-Gather(d) -> e|All-Gather(f)    mirrored: All-To-All
    Slice(d)           e|Identity      -> e|All-Gather(d)    mirrored: padding with zeros; both for
    nothing Share              l|Identity      -> l|All-Reduce       each device keeps a part of the
    loss; for nothing Repartition        e in one segment's ratios -> another's (Section 5.2), an
    All-To-All where it is sliced

The theory is about the forward pass; every instruction is priced together with its mirror in the
backward pass, as HAP's released program does: the operator with the gradients of all inputs that
have one, the collective with the opposite one. Data and parameters are loaded in the form that an
operator wants and are communicated in no other way (Section 4.5). Where a parameter is whole, its
gradient comes out in summands: the operator's output counts as had (`e~`) only after an All-Reduce
of it; a matrix product over slices of the batch may gather its factors instead and compute the
gradient on every device (Section 2.5.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetplan.formulations.hap.data import Communication, Compute, Device, HapData, Memory, Triple
from hetplan.formulations.hap.spmd.axes import Axes, ways_of
from hetplan.formulations.hap.spmd.forms import PARTIAL, WHOLE, Form, Way, property_name, whole_way
from hetplan.formulations.hap.spmd.holding import Holding
from hetplan.formulations.hap.spmd.instructions import (
    Change,
    Collective,
    Gather,
    Instruction,
    Run,
    Synchronise,
    changes,
)
from hetplan.formulations.hap.spmd.links import Links, Price
from hetplan.formulations.hap.spmd.operators import parsed
from hetplan.formulations.hap.spmd.program import PARAMETER, Node, SingleProgram
from hetplan.formulations.hap.spmd.work import Work, work_of
from hetplan.solvers.run import Run as SolverRun

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
    run: SolverRun | None = None,
) -> Theory:
    """The theory of `program` on `devices`; `all_dimensions`: also those that placeholders mark
    `unsliced`.

    weights: node -> factor on its FLOP (1 where left out). steps: how often the program runs before
    parameters change; gradients that add up meanwhile are all-reduced once, so that each run is
    charged with that part of it. holding: makes memory a constraint. Raises `Stopped` where `run`
    should stop.
    """
    writer = _Writer(program, len(devices), links, element_bytes, all_dimensions=all_dimensions)
    writer.weights, writer.steps, writer.holding = weights or {}, steps, holding
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


class Triples:
    """Collects the triples of a program's theory."""

    def __init__(
        self,
        program: SingleProgram,
        devices: int,
        links: Links,
        element_bytes: int,
        *,
        all_dimensions: bool = False,
    ) -> None:
        self.program, self.devices, self.links = program, devices, links
        self.element_bytes, self.all_dimensions = element_bytes, all_dimensions
        self.axes, self.gradients = Axes(program), program.needs_gradient()
        self.triples: list[Triple] = []

    def size(self, *nodes: Node) -> float:
        """Bytes of tensors."""
        return float(sum(node.elements for node in nodes) * self.element_bytes)

    def allowed(self, node: Node, way: Way) -> bool:
        """Whether every device can have a part of what the way slices."""
        return self.axes.sliceable(node, way, self.devices, all_dimensions=self.all_dimensions)

    def ways(self, node: Node) -> list[Way]:
        """Every way that is allowed, the replicated one first."""
        ways = dict.fromkeys([whole_way(len(node.inputs)), *ways_of(self.program, node)])
        return [way for way in ways if self.allowed(node, way)]

    def cuts(self, node: Node) -> list[int]:
        """Dimensions along which a node's tensor can be sliced."""
        whole = (WHOLE,) * len(node.inputs)
        return [d for d in range(len(node.shape)) if self.allowed(node, Way(whole, d))]

    def add_compute(
        self, text: str, pre: Sequence[str], post: str, flops: tuple[float, float], **more: Any
    ) -> None:
        """A compute triple. flops: fixed, and shared by the ratios."""
        fixed, shared = flops
        self.triples.append(
            Compute(
                kind="compute", instruction=text, pre=list(dict.fromkeys(pre)), post=[post],
                fixed_flops=fixed, shared_flops=shared, **more,
            )
        )  # fmt: skip

    def add_communication(self, text: str, pre: str, post: str, price: Price, **more: Any) -> None:
        """A communication triple."""
        self.triples.append(
            Communication(
                kind="comm", instruction=text, pre=[pre], post=[post], fixed_seconds=price.fixed,
                shared_seconds=price.shared, **more,
            )
        )  # fmt: skip


class _Writer(Triples):
    """Triples and instructions, side by side."""

    weights: Mapping[str, float]
    steps: int
    holding: Holding | None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.instructions: list[Instruction] = []
        self.elsewhere: dict[tuple[str, int, Form], None] = {}

    def compute(
        self,
        instruction: Instruction,
        pre: Sequence[str],
        segment: int,
        flops: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        """One compute triple."""
        self.instructions.append(instruction)
        held = self._bytes(instruction)
        text, post = instruction.text(), instruction.after
        self.add_compute(text, pre, post, flops, segment=segment, **held)

    def communicate(self, instruction: Change | Synchronise, segment: int, price: Price) -> None:
        """One communication triple."""
        self.instructions.append(instruction)
        held, text = self._bytes(instruction), instruction.text()
        before, after = instruction.before, instruction.after
        self.add_communication(text, before, after, price, segment=segment, **held)

    def _bytes(self, instruction: Instruction) -> dict[str, float]:
        """What it adds to memory, where that is limited and more than 0."""
        if self.holding is None:
            return {}
        fixed, shared = self.holding.of(self.program, instruction)
        sizes = {"fixed_bytes": fixed, "shared_bytes": shared}
        return {key: size for key, size in sizes.items() if size > 0}

    def run(self, node: Node) -> None:
        """The operator in every way that its dimensions allow, with what its parameters' gradients
        need."""
        waiting: dict[tuple[Form, tuple[str, ...]], str] = {}
        for way in self.ways(node):
            held = self._whole_parameters(node, way)
            done = property_name(node.name, way.output)
            if not held:
                self._run(node, way, done, ())
                continue
            key = (way.output, tuple(p.name for p in held))
            if key not in waiting:
                waiting[key] = property_name(f"{node.name}~{len(waiting) or ''}", way.output)
                sync = Synchronise(node.name, key[1], "All-Reduce", waiting[key], done)
                price = self.links.reduce_all(self.size(*held)).divided(self.steps)
                self.communicate(sync, node.segment, price)
            self._run(node, way, waiting[key], key[1])
            self._factors(node, way, held, done)

    def _whole_parameters(self, node: Node, way: Way) -> list[Node]:
        pairs = zip(self.program.inputs(node), way.inputs, strict=True)
        return [s for s, form in pairs if s.kind == PARAMETER and form == WHOLE]

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
        weight = self.weights.get(node.name, 1.0)
        return work_of(self.program, node, self.gradients, weight)

    def _run(self, node: Node, way: Way, after: str, unsynchronised: tuple[str, ...]) -> None:
        flops = self._work(node).total
        run = Run(node.name, way, after, unsynchronised)
        parts = (0.0, flops) if way.shared else (flops, 0.0)
        self.compute(run, self._pre(node, way), node.segment, parts)

    def _factors(self, node: Node, way: Way, held: list[Node], done: str) -> None:
        """Sufficient factors: for a product of a slice of the batch with a whole weight."""
        if not way.shared or way.output < 0 or node.kind != "contract":
            return
        inputs = self.program.inputs(node)
        terms, output = parsed(node.attributes["equation"])
        if inputs[1].kind != PARAMETER or inputs[0].kind == PARAMETER or inputs[1] not in held:
            return
        letter = output[way.output]
        if terms[0][way.inputs[0]] != letter or any(letter in term for term in terms[1:]):
            return
        work, names = self._work(node), tuple(p.name for p in held)
        waits = property_name(f"{node.name}~factors", way.output)
        run = Run(node.name, way, waits, names, factors=True)
        parts = (sum(work.gradients[1:]), work.forward + work.gradients[0])
        self.compute(run, self._pre(node, way), node.segment, parts)
        hows: tuple[Gather, Gather] = ("All-Gather factors", "Grouped-Broadcast factors")
        for how in hows:
            price = self.links.price(how, self.size(inputs[0]))
            sync = Synchronise(node.name, names, how, waits, done)
            self.communicate(sync, node.segment, price + self.links.price(how, self.size(node)))

    def change(self, node: Node) -> None:
        """Every change of form of a computed tensor."""
        if node is self.program.loss:
            self.compute(change_of(node, "Share", WHOLE, PARTIAL), *self._free(node, WHOLE))
            return
        size, links = self.size(node), self.links
        for how, source, target in changes(self.cuts(node)):
            change = change_of(node, how, source, target)
            if how == "Slice":
                self.compute(change, *self._free(node, source))
                continue
            price = links.price(how, size)
            if node.name in self.gradients:
                price += links.mirrored(how, size)
            self.communicate(change, node.segment, price)

    def _free(self, node: Node, source: Form) -> tuple[list[str], int]:
        return [property_name(node.name, source)], node.segment

    def move_between_segments(self) -> None:
        """Tensors that another segment reads, under its ratios: a slice moves, other forms are as
        they were."""
        for name, segment, form in self.elsewhere:
            node = self.program.node(name)
            before, after = property_name(name, form), property_name(f"{name}@{segment}", form)
            move = Change("Repartition", name, form, form, before, after)
            if form < 0:
                self.compute(move, [before], node.segment)
                continue
            price = self.links.exchange(self.size(node))
            total = price + price if name in self.gradients else price
            self.communicate(move, node.segment, total)


def change_of(node: Node, how: Collective, source: Form, target: Form) -> Change:
    """A change of form of a node's tensor."""
    before, after = property_name(node.name, source), property_name(node.name, target)
    return Change(how, node.name, source, target, before, after)
