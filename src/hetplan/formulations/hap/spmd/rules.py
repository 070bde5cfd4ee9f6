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

from hetplan.formulations.hap.data import Communication, Compute, Device, HapData, Memory, Triple
from hetplan.formulations.hap.spmd.axes import Axes, ways_of
from hetplan.formulations.hap.spmd.forms import PARTIAL, WHOLE, Form, Way, property_name, whole_way
from hetplan.formulations.hap.spmd.holding import Holding
from hetplan.formulations.hap.spmd.instructions import (
    Change,
    Collective,
    Instruction,
    Run,
    Synchronise,
)
from hetplan.formulations.hap.spmd.links import Links, Price
from hetplan.formulations.hap.spmd.operators import operator, parsed
from hetplan.formulations.hap.spmd.program import PARAMETER, Node, SingleProgram
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
    writer = _Writer(program, len(devices), links, element_bytes, all_dimensions)
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


class _Writer:
    """Triples and instructions, side by side."""

    def __init__(
        self,
        program: SingleProgram,
        devices: int,
        links: Links,
        element_bytes: int,
        all_dimensions: bool,
    ) -> None:
        self.program, self.devices, self.links = program, devices, links
        self.element_bytes, self.all_dimensions = element_bytes, all_dimensions
        self.axes = Axes(program)
        self.gradients = program.needs_gradient()
        self.weights: Mapping[str, float] = {}
        self.steps = 1
        self.holding: Holding | None = None
        self.triples: list[Triple] = []
        self.instructions: list[Instruction] = []
        self.forms: dict[str, set[Form]] = {}
        self.elsewhere: dict[tuple[str, int, Form], None] = {}

    def compute(
        self,
        instruction: Instruction,
        pre: Sequence[str],
        post: str,
        segment: int,
        fixed: float,
        shared: float,
    ) -> None:
        """One compute triple."""
        self.instructions.append(instruction)
        self.triples.append(
            Compute(
                kind="compute", instruction=instruction.text(), pre=list(dict.fromkeys(pre)), post=[post],
                segment=segment, fixed_flops=fixed, shared_flops=shared, **self._bytes(instruction),
            )
        )  # fmt: skip

    def communicate(
        self, instruction: Instruction, pre: str, post: str, segment: int, price: Price
    ) -> None:
        """One communication triple."""
        self.instructions.append(instruction)
        self.triples.append(
            Communication(
                kind="comm", instruction=instruction.text(), pre=[pre], post=[post], segment=segment,
                fixed_seconds=price.fixed, shared_seconds=price.shared, **self._bytes(instruction),
            )
        )  # fmt: skip

    def _bytes(self, instruction: Instruction) -> dict[str, float]:
        """What it adds to memory, where that is limited and more than 0."""
        if self.holding is None:
            return {}
        fixed, shared = self.holding.of(self.program, instruction)
        found = {"fixed_bytes": fixed, "shared_bytes": shared}
        return {key: size for key, size in found.items() if size > 0}

    def size(self, *nodes: Node) -> float:
        """Bytes of tensors."""
        return float(sum(node.elements for node in nodes) * self.element_bytes)

    def run(self, node: Node) -> None:
        """The operator in every way that its dimensions allow, with what its parameters' gradients
        need."""
        waiting: dict[tuple[Form, tuple[str, ...]], str] = {}
        ways = [whole_way(len(node.inputs)), *ways_of(self.program, node)]
        for way in dict.fromkeys(ways):
            if not self.axes.sliceable(node, way, self.devices, all_dimensions=self.all_dimensions):
                continue
            self.forms.setdefault(node.name, set()).add(way.output)
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
                self.communicate(sync, waiting[key], done, node.segment, price)
            self._run(node, way, waiting[key], key[1])
            self._factors(node, way, held, done)

    def _whole_parameters(self, node: Node, way: Way) -> list[Node]:
        inputs = self.program.inputs(node)
        return [
            s
            for s, form in zip(inputs, way.inputs, strict=True)
            if s.kind == PARAMETER and form == WHOLE
        ]

    def _pre(self, node: Node, way: Way) -> list[str]:
        """Properties of the inputs that are no sources; those of another segment under that
        segment's ratios."""
        found = []
        for source, form in zip(self.program.inputs(node), way.inputs, strict=True):
            if source.source:
                continue
            name = source.name
            if source.segment != node.segment:
                self.elsewhere[name, node.segment, form] = None
                name = f"{name}@{node.segment}"
            found.append(property_name(name, form))
        return found

    def _work(self, node: Node) -> tuple[float, list[float]]:
        """FLOP forward, and backward for each input that has a gradient (0 for the others)."""
        inputs = self.program.inputs(node)
        forward, back = operator(node.kind).work(
            [s.shape for s in inputs], node.shape, node.attributes
        )
        factor = self.weights.get(node.name, 1.0)
        passed = self.gradients if node.name in self.gradients else set()
        needed = [b if s.name in passed else 0.0 for s, b in zip(inputs, back, strict=True)]
        return factor * forward, [factor * b for b in needed]

    def _run(self, node: Node, way: Way, after: str, unsynchronised: tuple[str, ...]) -> None:
        forward, backward = self._work(node)
        flops = forward + sum(backward)
        fixed, shared = (0.0, flops) if way.shared else (flops, 0.0)
        run = Run(node.name, way, after, unsynchronised)
        self.compute(run, self._pre(node, way), after, node.segment, fixed, shared)

    def _factors(self, node: Node, way: Way, held: list[Node], done: str) -> None:
        """Sufficient factors: for a product of a slice of the batch with a whole weight."""
        if not way.shared or way.output < 0 or node.kind != "contract":
            return
        inputs = self.program.inputs(node)
        terms, output = parsed(node.attributes["equation"])
        if inputs[1].kind != PARAMETER or inputs[0].kind == PARAMETER or inputs[1] not in held:
            return
        if terms[0][way.inputs[0]] != output[way.output] or any(
            output[way.output] in t for t in terms[1:]
        ):
            return
        forward, backward = self._work(node)
        names, waits = (
            tuple(p.name for p in held),
            property_name(f"{node.name}~factors", way.output),
        )
        run = Run(node.name, way, waits, names, factors=True)
        fixed = sum(backward[1:])
        self.compute(run, self._pre(node, way), waits, node.segment, fixed, forward + backward[0])
        pair = self.size(inputs[0]), self.size(node)
        padded = self.links.gather(pair[0]) + self.links.gather(pair[1])
        exact = self.links.broadcast_group(pair[0]) + self.links.broadcast_group(pair[1])
        for how, price in (("All-Gather factors", padded), ("Grouped-Broadcast factors", exact)):
            sync = Synchronise(node.name, names, how, waits, done)  # type: ignore[arg-type]
            self.communicate(sync, waits, done, node.segment, price)

    def change(self, node: Node) -> None:
        """Every change of form of a computed tensor."""
        if node is self.program.loss:
            self._free(node, "Share", WHOLE, PARTIAL)
            return
        bytes_, links = self.size(node), self.links
        back = node.name in self.gradients
        none = Price(0.0)
        dims = [d for d in range(len(node.shape)) if self._cuttable(node, d)]
        both = links.reduce_all(bytes_) + (links.reduce_all(bytes_) if back else none)
        self._comm(node, "All-Reduce", PARTIAL, WHOLE, both)
        for d in dims:
            gather, scatter = links.gather(bytes_), links.scatter(bytes_)
            group, swap = links.broadcast_group(bytes_), links.exchange(bytes_)
            self._comm(node, "Reduce-Scatter", PARTIAL, d, scatter + (gather if back else none))
            self._comm(node, "All-Gather", d, WHOLE, gather + (scatter if back else none))
            self._comm(node, "Grouped-Broadcast", d, WHOLE, group + (group if back else none))
            for f in dims:
                if f != d:
                    self._comm(node, "All-To-All", d, f, swap + (swap if back else none))
            self._free(node, "Slice", WHOLE, d)

    def _cuttable(self, node: Node, d: int) -> bool:
        way = Way((WHOLE,) * len(node.inputs), d)
        return self.axes.sliceable(node, way, self.devices, all_dimensions=self.all_dimensions)

    def _change(
        self, node: Node, how: Collective, source: Form, target: Form
    ) -> tuple[Change, str, str]:
        before, after = property_name(node.name, source), property_name(node.name, target)
        return Change(how, node.name, source, target, before, after), before, after

    def _comm(self, node: Node, how: Collective, source: Form, target: Form, price: Price) -> None:
        change, before, after = self._change(node, how, source, target)
        self.communicate(change, before, after, node.segment, price)

    def _free(self, node: Node, how: Collective, source: Form, target: Form) -> None:
        change, before, after = self._change(node, how, source, target)
        self.compute(change, [before], after, node.segment, 0.0, 0.0)

    def move_between_segments(self) -> None:
        """Tensors that another segment reads, under its ratios: a slice moves, other forms are as
        they were."""
        for name, segment, form in self.elsewhere:
            node = self.program.node(name)
            before, after = property_name(name, form), property_name(f"{name}@{segment}", form)
            move = Change("Repartition", name, form, form, before, after)
            if form < 0:
                self.compute(move, [before], after, node.segment, 0.0, 0.0)
                continue
            price = self.links.exchange(self.size(node))
            total = price + price if name in self.gradients else price
            self.communicate(move, before, after, node.segment, total)
