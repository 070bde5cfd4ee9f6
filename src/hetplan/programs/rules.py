"""The rules of a single-device program: every step that an SPMD program for it may have.

Operators run by their sharding rules (`operators`). Tensors change form by collectives (HAP, Fig. 9
and Section 4.4):

    All-Reduce         e|All-Reduce    -> e|Identity         mirrored: All-Reduce
    Reduce-Scatter(d)  e|All-Reduce    -> e|All-Gather(d)    mirrored: All-Gather
    All-Gather(d)      e|All-Gather(d) -> e|Identity         mirrored: Reduce-Scatter
    Grouped-Broadcast  e|All-Gather(d) -> e|Identity         mirrored: one reduction per slice
    All-To-All(d, f)   e|All-Gather(d) -> e|All-Gather(f)    mirrored: All-To-All
    Slice(d)           e|Identity      -> e|All-Gather(d)    mirrored: padding; both free
    Share              l|Identity      -> l|All-Reduce       each device keeps a part; free
    Repartition        e in one segment's ratios -> another's (Section 5.2): an All-To-All of slices

The rules are about the forward pass; the backward pass mirrors it. Placeholders and parameters are
loaded in the form in which an operator reads them, and are never communicated (Section 4.5).

If an operator reads a parameter whole, the parameter's gradient comes in summands, which have to be
synchronised. A program with such an operator must contain the synchronisation. Therefore the
operator gives only a property with another name (`e~` for the tensor `e`), and the synchronisation
takes this property to that of `e`. The synchronisation is an All-Reduce of the gradient. A matrix
product over slices of the batch may gather its factors instead and compute the gradient on every
device (Section 2.5.2).

A program is a sequence of steps. It is a proof: each step needs properties that earlier steps give,
and some step gives the goal, which is the loss in summands.

Source: HAP, Section 4.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hetplan.plans.program import Collective
from hetplan.programs.axes import Axes, sharding_rules_of
from hetplan.programs.forms import (
    PARTIAL,
    WHOLE,
    Change,
    Form,
    Gather,
    Instruction,
    Run,
    ShardingRule,
    Synchronise,
    changes,
    property_name,
    replicated_rule,
)
from hetplan.programs.operators.products import parsed
from hetplan.programs.program import PARAMETER, Node, SingleProgram

FACTORS: tuple[Gather, Gather] = ("All-Gather factors", "Grouped-Broadcast factors")


@dataclass(frozen=True)
class Step:
    """One step that an SPMD program may have."""

    instruction: Instruction
    needs: tuple[str, ...]
    """Properties that earlier steps must give."""
    segment: int
    """The segment whose ratios cut the tensors of the instruction."""


@dataclass(frozen=True)
class Rules:
    """All steps that an SPMD program for `program` may have. `rules_of` lists them."""

    program: SingleProgram
    steps: tuple[Step, ...]
    axes: Axes
    """The axes, which say where the program's dimensions may be cut."""

    @property
    def goal(self) -> str:
        """The property that an SPMD program must give: the loss in summands."""
        return property_name(self.program.loss.name, PARTIAL)


def rules_of(
    program: SingleProgram,
    slices: int,
    *,
    all_dimensions: bool = False,
    check: Callable[[], None] | None = None,
) -> Rules:
    """The rules of `program`, whose tensors are cut into `slices` slices, one per device.

    all_dimensions: whether tensors are also cut along dimensions that placeholders mark `unsliced`.
    check: a function that is called for every operator, and may raise to end a long run.
    """
    writer = _Writer(program, slices, all_dimensions=all_dimensions)
    for node in program.computations:
        if check is not None:
            check()
        writer.run(node)
        writer.change(node)
    writer.move_between_segments()
    return Rules(program, tuple(writer.steps), writer.axes)


class _Writer:
    """Collects the steps of `rules_of`."""

    def __init__(self, program: SingleProgram, slices: int, *, all_dimensions: bool) -> None:
        self.program, self.slices, self.all_dimensions = program, slices, all_dimensions
        self.axes = Axes(program)
        self.steps: list[Step] = []
        # (tensor, segment that reads it, form) of tensors that other segments read; the keys of
        # the dictionary are a set that keeps its order
        self.elsewhere: dict[tuple[str, int, Form], None] = {}

    def allowed(self, node: Node, rule: ShardingRule) -> bool:
        """Whether every device can have a slice of all tensors that the sharding rule slices."""
        return self.axes.sliceable(node, rule, self.slices, all_dimensions=self.all_dimensions)

    def add(self, instruction: Instruction, needs: tuple[str, ...], segment: int) -> None:
        """Add one step; the arguments are its fields."""
        self.steps.append(Step(instruction, needs, segment))

    def run(self, node: Node) -> None:
        """Add a step for each sharding rule of an operator that the lengths of its dimensions
        allow, the replicated rule first. Add the synchronisations of its parameters' gradients."""
        # (form of the output, whole parameters) -> property that waits for the synchronisation
        waiting: dict[tuple[Form, tuple[str, ...]], str] = {}
        sharding_rules = dict.fromkeys(
            [replicated_rule(len(node.inputs)), *sharding_rules_of(self.program, node)]
        )
        for rule in sharding_rules:
            if not self.allowed(node, rule):
                continue
            done = property_name(node.name, rule.output)
            whole = tuple(self.whole_parameters(node, rule))
            needs = self.inputs_of(node, rule)
            if not whole:
                self.add(Run(node.name, rule, done), needs, node.segment)
                continue
            key = (rule.output, whole)
            if key not in waiting:
                # the first name is `e~`, the others are `e~1`, `e~2`, …
                waiting[key] = property_name(f"{node.name}~{len(waiting) or ''}", rule.output)
                reduced = Synchronise(node.name, whole, "All-Reduce", waiting[key], done)
                self.add(reduced, (waiting[key],), node.segment)
            self.add(Run(node.name, rule, waiting[key]), needs, node.segment)
            if self.has_factors(node, rule, whole):
                self.run_by_factors(node, rule, whole)

    def whole_parameters(self, node: Node, rule: ShardingRule) -> Iterator[str]:
        """The names of the parameters that the operator reads whole."""
        for source, form in zip(self.program.inputs(node), rule.inputs, strict=True):
            if source.kind == PARAMETER and form == WHOLE:
                yield source.name

    def inputs_of(self, node: Node, rule: ShardingRule) -> tuple[str, ...]:
        """The properties that a run of the operator needs: those of its computed inputs, each once.
        An input of another segment is needed under the ratios of the node's segment (`e@2`)."""
        needs = []
        for source, form in zip(self.program.inputs(node), rule.inputs, strict=True):
            if source.source:
                continue
            name = source.name
            if source.segment != node.segment:
                self.elsewhere[name, node.segment, form] = None
                name = f"{name}@{node.segment}"
            needs.append(property_name(name, form))
        return tuple(dict.fromkeys(needs))

    def has_factors(self, node: Node, rule: ShardingRule, whole: tuple[str, ...]) -> bool:
        """Whether the operator multiplies a slice of the batch by a whole weight, so that every
        device can compute the weight's gradient from gathered factors."""
        if node.kind != "contract" or rule.output < 0:
            return False
        left, right = self.program.inputs(node)[:2]  # the factors; a third input is a bias
        if left.kind == PARAMETER or right.name not in whole or rule.inputs[0] < 0:
            return False
        # the dimension that is sliced, of the output and of the left factor, must be the same
        # letter, which the weight and the bias lack
        terms, output = parsed(node.attributes["equation"])
        batch_letter = output[rule.output]
        in_parameters = any(batch_letter in term for term in terms[1:])
        return terms[0][rule.inputs[0]] == batch_letter and not in_parameters

    def run_by_factors(self, node: Node, rule: ShardingRule, whole: tuple[str, ...]) -> None:
        """Add the run of the operator by sufficient factors, and both collectives that may gather
        the factors."""
        done = property_name(node.name, rule.output)
        waits = property_name(f"{node.name}~factors", rule.output)
        run = Run(node.name, rule, waits, factors=True)
        self.add(run, self.inputs_of(node, rule), node.segment)
        for how in FACTORS:
            gathered = Synchronise(node.name, whole, how, waits, done)
            self.add(gathered, (waits,), node.segment)

    def change(self, node: Node) -> None:
        """Add every change of form of the operator's output. The loss has only `Share`: it is a
        scalar, and the goal is the loss in summands."""
        if node is self.program.loss:
            self.add_change(node, "Share", WHOLE, PARTIAL)
            return
        # a rule with whole inputs asks for the slices of the output alone
        whole = (WHOLE,) * len(node.inputs)
        dimensions = range(len(node.shape))
        cuts = [d for d in dimensions if self.allowed(node, ShardingRule(whole, d))]
        for how, source, target in changes(cuts):
            self.add_change(node, how, source, target)

    def add_change(self, node: Node, how: Collective, source: Form, target: Form) -> None:
        """Add one change of form."""
        before, after = property_name(node.name, source), property_name(node.name, target)
        change = Change(how, node.name, source, target, before, after)
        self.add(change, (before,), node.segment)

    def move_between_segments(self) -> None:
        """Add a repartition for each tensor that another segment reads. A sliced tensor gets the
        other segment's slices; a tensor in another form stays as it is."""
        for name, segment, form in self.elsewhere:
            before, after = property_name(name, form), property_name(f"{name}@{segment}", form)
            move = Change("Repartition", name, form, form, before, after)
            self.add(move, (before,), self.program.node(name).segment)
