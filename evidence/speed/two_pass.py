"""HAP: what mirroring loses. The full theory of forward and backward pass beside the mirrored one.

    python -m evidence.speed two_pass [--quick] [-o FILE.md|FILE.json]

`formulations/hap/pricing.py` prices every instruction with its mirror and searches the forward
pass alone. Here nothing is mirrored: gradients are tensors (`d x`), each operator's gradient of
each input is an instruction that may run by another sharding rule than the operator did, as long as
the values that it reads are had in its forms, and gradients of parameters are joined when the goal
wants them. With y = f(x …) run by a rule (form of x -> form of y), the gradient goes from the dual
of y's form to the dual of x's: whole and summands change places, slices stay. Beside it stands the
replicated rule.

A parameter is held in one form, which is given: the gradient is wanted in the same, and triples
cannot say that what is used must be updated. The best program is the best over all ways to hold the
parameters (`holdings`). Gradients of one tensor from several users are added in one form. Prices
are those of the mirrored theory. The frontier of these theories grows with depth, because what the
forward pass computed stays needed: one or two layers can be solved.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from evidence.speed.harness import markdown, save
from hetplan.formulations import family
from hetplan.formulations.hap.data import Communication, Compute, Device, HapData, Triple
from hetplan.formulations.hap.pricing import ELEMENT_BYTES, theory_of
from hetplan.programs.axes import Axes, sharding_rules_of
from hetplan.programs.forms import (
    PARTIAL,
    WHOLE,
    Form,
    ShardingRule,
    changes,
    form_name,
    property_name,
    replicated_rule,
)
from hetplan.programs.links import Links, Price, ring
from hetplan.programs.operators.operator import ELEMENT_FLOPS
from hetplan.programs.operators.table import operator
from hetplan.programs.program import PARAMETER, PLACEHOLDER, Node, SingleProgram, Writer
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Options, Run

GOAL = "the loss and every gradient"


def dual(form: Form) -> Form:
    """The form of the gradient of a tensor in `form`, as a sharding rule gives it."""
    return {WHOLE: PARTIAL, PARTIAL: WHOLE}.get(form, form)


def holdings(program: SingleProgram, devices: int) -> Iterator[dict[str, Form]]:
    """Every way to hold the parameters, each whole or sliced along one dimension."""
    axes = Axes(program)
    forms = []
    for node in program.parameters:
        dims = range(len(node.shape))
        cut = [
            d
            for d in dims
            if axes.sliceable(node, ShardingRule((), d), devices, all_dimensions=False)
        ]
        forms.append([WHOLE, *cut])
    for chosen in product(*forms):
        yield dict(zip((node.name for node in program.parameters), chosen, strict=True))


def two_pass_theory(
    program: SingleProgram,
    devices: Sequence[Device],
    links: Links,
    held: Mapping[str, Form],
    *,
    element_bytes: int = ELEMENT_BYTES,
) -> HapData:
    """The instance: forward, backward, every gradient where its parameter is; held: form of each
    parameter."""
    writer = _Writer(program, len(devices), links, element_bytes, held)
    for node in program.computations:
        writer.forward(node)
        writer.changes(node.name, node)
    writer.seeds()
    for node in reversed(program.computations):
        writer.joined(node)
        writer.backward(node)
    for node in program.parameters:
        writer.joined(node)
        writer.kept(node)
    writer.goal()
    return HapData(devices=list(devices), triples=writer.triples, goal=GOAL)


def gradient(tensor: str) -> str:
    """The name of a tensor's gradient."""
    return f"d {tensor}"


class _Writer:
    """Triples, one rule at a time."""

    def __init__(
        self,
        program: SingleProgram,
        devices: int,
        links: Links,
        element_bytes: int,
        held: Mapping[str, Form],
    ) -> None:
        self.program, self.devices, self.links = program, devices, links
        self.element_bytes, self.axes = element_bytes, Axes(program)
        self.gradients, self.triples = program.needs_gradient(), list[Triple]()
        self.held = held
        # tensor -> names of the gradients that its users give
        self.given: dict[str, list[str]] = {}
        for node in program.computations:
            for i, name in enumerate(node.inputs):
                if name in self.gradients and node.name in self.gradients:
                    self.given.setdefault(name, []).append(f"{gradient(name)} by {node.name}.{i}")

    def allowed(self, node: Node, rule: ShardingRule) -> bool:
        """Whether every device can have a part of what the rule slices."""
        return self.axes.sliceable(node, rule, self.devices, all_dimensions=False)

    def cuts(self, node: Node) -> list[int]:
        """Dimensions along which a node's tensor can be sliced."""
        whole = (WHOLE,) * len(node.inputs)
        return [d for d in range(len(node.shape)) if self.allowed(node, ShardingRule(whole, d))]

    def add_compute(
        self, text: str, pre: Sequence[str], post: str, flops: tuple[float, float]
    ) -> None:
        """A compute triple. flops: fixed, and shared by the ratios."""
        self.triples.append(
            Compute(
                kind="compute", instruction=text, pre=list(dict.fromkeys(pre)), post=[post],
                fixed_flops=flops[0], shared_flops=flops[1],
            )
        )  # fmt: skip

    def add_communication(self, text: str, pre: str, post: str, price: Price) -> None:
        """A communication triple."""
        self.triples.append(
            Communication(
                kind="comm", instruction=text, pre=[pre], post=[post], fixed_seconds=price.fixed,
                shared_seconds=price.shared,
            )
        )  # fmt: skip

    def held_rules(self, node: Node) -> list[ShardingRule]:
        """The rules that read the parameters as they are held, the replicated one first."""
        sharding_rules = dict.fromkeys(
            [replicated_rule(len(node.inputs)), *sharding_rules_of(self.program, node)]
        )
        return [
            rule for rule in sharding_rules if self.allowed(node, rule) and self.fits(node, rule)
        ]

    def fits(self, node: Node, rule: ShardingRule) -> bool:
        """Whether the rule reads the parameters as they are held."""
        pairs = zip(self.program.inputs(node), rule.inputs, strict=True)
        return all(s.kind != PARAMETER or self.held[s.name] == form for s, form in pairs)

    def work(self, node: Node) -> tuple[float, list[float]]:
        """FLOP forward and per input backward."""
        shapes = [s.shape for s in self.program.inputs(node)]
        return operator(node.kind).work(shapes, node.shape, node.attributes)

    def forward(self, node: Node) -> None:
        """The operator by every sharding rule."""
        flops = self.work(node)[0]
        for rule in self.held_rules(node):
            post = property_name(node.name, rule.output)
            pre = self.values(node, rule)
            self.add_compute(f"{node.name}{forms(rule)}", pre, post, parts_of(flops, rule.shared))

    def values(
        self, node: Node, rule: ShardingRule, needed: Sequence[int] | None = None
    ) -> list[str]:
        """Properties of the inputs that are computed (all, or those of these numbers)."""
        return [
            property_name(source.name, form)
            for i, (source, form) in enumerate(
                zip(self.program.inputs(node), rule.inputs, strict=True)
            )
            if not source.source and (needed is None or i in needed)
        ]

    def reads(self, node: Node, i: int) -> list[int]:
        """Numbers of the inputs that the gradient of input i depends on."""
        count = len(node.inputs)
        if operator(node.kind).linear or (node.kind in ("contract", "convolve") and i == 2):
            return []
        if node.kind in ("contract", "convolve", "multiply"):
            return [j for j in range(min(2, count)) if j != i]
        return list(range(count))

    def backward(self, node: Node) -> None:
        """The gradient of each input, in the mirror of every rule and replicated."""
        if node.name not in self.gradients:
            return
        flops = self.work(node)[1]
        for i, source in enumerate(self.program.inputs(node)):
            if source.name not in self.gradients or source.kind == PLACEHOLDER:
                continue
            name, reads = f"{gradient(source.name)} by {node.name}.{i}", self.reads(node, i)
            for rule in self.held_rules(node):
                over = property_name(gradient(node.name), dual(rule.output))
                pre = [over, *self.values(node, rule, reads)]
                post = property_name(name, dual(rule.inputs[i]))
                text = f"{name}{forms(rule)}"
                self.add_compute(text, pre, post, parts_of(flops[i], rule.shared))
            rule = replicated_rule(len(node.inputs))
            if self.fits(node, rule):
                pre = [property_name(gradient(node.name), WHOLE), *self.values(node, rule, reads)]
                text, post = f"{name}{forms(rule)} replicated", property_name(name, WHOLE)
                self.add_compute(text, pre, post, (flops[i], 0.0))

    def seeds(self) -> None:
        """The gradient of the loss is 1: whole, or shared out; the loss may be shared out too."""
        loss, nothing = self.program.loss.name, (0.0, 0.0)
        for form in (WHOLE, PARTIAL):
            post = property_name(gradient(loss), form)
            self.add_compute(f"1 {form_name(form)}", [], post, nothing)
        whole, partial = property_name(loss, WHOLE), property_name(loss, PARTIAL)
        self.add_compute("Share", [whole], partial, nothing)

    def joined(self, node: Node) -> None:
        """Gradients from several users added in one form, then every change of form."""
        names = self.given.get(node.name, [])
        if node is self.program.loss or not names:
            return
        total = gradient(node.name)
        for form in (WHOLE, PARTIAL, *self.cuts(node)):
            parts = [property_name(name, form) for name in names]
            flops = 0.0 if len(names) == 1 else ELEMENT_FLOPS * node.elements * (1 + len(names))
            text, post = f"{total} added {form_name(form)}", property_name(total, form)
            self.add_compute(text, parts, post, parts_of(flops, form >= 0))
        if len(names) > 1:
            for name in names:
                self.changes(name, node)
        self.changes(total, node)

    def changes(self, name: str, node: Node) -> None:
        """Every collective on a tensor or gradient of the node's shape, one pass only."""
        if node is self.program.loss:
            return
        for how, source, target in changes(self.cuts(node)):
            before, after = property_name(name, source), property_name(name, target)
            if how == "Slice":
                self.add_compute(f"Slice({name}, {target})", [before], after, (0.0, 0.0))
            else:
                text = f"{how}({name}, {form_name(source)}, {form_name(target)})"
                price = self.links.price(how, float(node.elements * self.element_bytes))
                self.add_communication(text, before, after, price)

    def kept(self, node: Node) -> None:
        """A parameter's gradient is where the parameter is."""
        if node.name not in self.given:
            return
        pre = property_name(gradient(node.name), self.held[node.name])
        self.add_compute(f"keep {gradient(node.name)}", [pre], f"{node.name} done", (0.0, 0.0))

    def goal(self) -> None:
        """The loss in summands and every gradient."""
        done = [f"{node.name} done" for node in self.program.parameters if node.name in self.given]
        loss = property_name(self.program.loss.name, PARTIAL)
        self.add_compute("iteration", [loss, *done], GOAL, (0.0, 0.0))


def parts_of(flops: float, shared: bool) -> tuple[float, float]:
    """(fixed, shared) FLOP."""
    return (0.0, flops) if shared else (flops, 0.0)


def forms(rule: ShardingRule) -> str:
    """`(Identity, All-Gather(0)) -> All-Reduce`."""
    return f"({', '.join(map(form_name, rule.inputs))}) -> {form_name(rule.output)}"


DEVICES = [
    *[Device(name="V100", flops_per_second=3.86e12)] * 2,
    *[Device(name="P100", flops_per_second=2.15e12)] * 2,
]


def layers(count: int, batch: int = 1024, width: int = 2048) -> SingleProgram:
    """Dense layers with relu between them, and a loss."""
    w = Writer("layers")
    x, labels = w.placeholder("x", (batch, width)), w.placeholder("labels", (batch,), below=width)
    for i in range(count):
        x = w.linear(f"l{i}", x, "bi,oi->bo", (width, width))
        if i < count - 1:
            x = w.apply("relu", f"r{i}", x)
    w.apply("cross-entropy", "loss", x, labels, count=batch)
    return w.finish()


def proven(data: HapData) -> float | None:
    """The optimum; None where the goal cannot be reached."""
    result = solve(family("hap"), data, "auto", Run(Options(threads=1, time_limit=60)))
    assert result.status in ("optimal", "infeasible"), result.message
    return result.objective


def both(program: SingleProgram, links: Links) -> tuple[float, float]:
    """(mirrored, both passes under the best way to hold the parameters)."""
    mirrored = proven(theory_of(program, DEVICES, links).data)
    each = [
        proven(two_pass_theory(program, DEVICES, links, held))
        for held in holdings(program, len(DEVICES))
    ]
    assert mirrored is not None
    return mirrored, min(seconds for seconds in each if seconds is not None)


def main() -> None:
    """A table, printed and written where asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one layer")
    parser.add_argument("-o", "--output", help="write Markdown (.md) or every row (.json) here too")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for count in (1,) if arguments.quick else (1, 2):
        for speed in (1.3e9, 1e10, 1e11):
            mirrored, passes = both(layers(count), ring(len(DEVICES), speed))
            rows.append({"layers": count, "speed": speed, "mirrored": mirrored, "passes": passes})
    cells = [
        (
            r["layers"],
            f"{r['speed']:g}",
            f"{1e3 * r['mirrored']:.3f}",
            f"{1e3 * r['passes']:.3f}",
            f"{100 * max(0.0, 1 - r['passes'] / r['mirrored']):.1f} %",
        )
        for r in rows
    ]
    header = ("layers", "bytes/s", "mirrored, ms", "both passes, ms", "lower by")
    save(arguments.output, [markdown("What mirroring loses", header, cells)], rows)


if __name__ == "__main__":
    main()
