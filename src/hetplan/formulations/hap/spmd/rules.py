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
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetplan.formulations.hap.data import Communication, Compute, Device, HapData, Memory, Triple
from hetplan.formulations.hap.spmd.forms import (
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
    property_name,
    whole_way,
)
from hetplan.formulations.hap.spmd.operators import parsed
from hetplan.formulations.hap.spmd.prices import Holding, Links, Price, Work, work_of
from hetplan.formulations.hap.spmd.program import PARAMETER, Axes, Node, SingleProgram, ways_of
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
    run: SolverRun | None = None,
) -> Theory:
    """The theory of `program` on `devices`; `all_dimensions`: also those that placeholders mark
    `unsliced`.

    weights: node -> factor on its FLOP (1 where left out). steps: how often the program runs before
    parameters change; gradients that add up meanwhile are all-reduced once, so that each run is
    charged with that part of it. holding: makes memory a constraint. Raises `Stopped` where `run`
    should stop.
    """
    writer = _Writer(
        program, len(devices), links, element_bytes, all_dimensions, weights or {}, steps, holding
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
                price = self.links.price("All-Reduce", self.size(*held)).divided(self.steps)
                sync = Synchronise(node.name, names, "All-Reduce", waiting[key], done)
                self.communicate(sync, node.segment, price)
            run = Run(node.name, way, waiting[key])
            self.compute(run, pre, node.segment, fixed, shared)
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
        price, size = self.links.price(how, self.size(node)), self.size(node)
        return price + self.links.mirrored(how, size) if node.name in self.gradients else price

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
