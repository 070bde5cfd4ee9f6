"""The forms in which devices hold a tensor, and the instructions of an SPMD program.

HAP, Section 4.2: a distributed tensor e has the property `e|I` if running the instruction I on it
gives `e` on every device. A form says what a device has of the tensor and, in the backward pass, of
the tensor's gradient:

    form            property           value on device j        gradient on device j
    WHOLE           e|Identity         e                        a summand of the whole gradient
    PARTIAL         e|All-Reduce       a summand of e           the whole gradient
    d = 0, 1, …     e|All-Gather(d)    slice j along d          the same slice of the gradient

The gradient of a whole tensor comes in summands because every operator's backward pass is linear in
the gradient: a device that computes a slice of the output from a whole input contributes a summand
to the input's gradient. An instruction says what each device does in the forward pass; in the
backward pass each device does the instruction's mirror.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from hetplan.plans.program import Collective

Form = int
WHOLE: Form = -1
PARTIAL: Form = -2


def form_name(form: Form) -> str:
    """HAP's name of a form."""
    names = {WHOLE: "Identity", PARTIAL: "All-Reduce"}
    return names.get(form, f"All-Gather({form})")


def property_name(tensor: str, form: Form) -> str:
    """The property of a tensor in a form, such as `e|All-Gather(0)`."""
    return f"{tensor}|{form_name(form)}"


@dataclass(frozen=True)
class ShardingRule:
    """One sharding rule of an operator: if the inputs have their forms, running the operator on
    every device gives the output in its form."""

    inputs: tuple[Form, ...]
    output: Form

    @property
    def shared(self) -> bool:
        """Whether the devices share the work. If no tensor is sliced, each device does all work."""
        return any(form >= 0 for form in (*self.inputs, self.output))


def replicated_rule(count: int) -> ShardingRule:
    """The replicated sharding rule of an operator with `count` inputs: every device computes the
    whole output. Source: HAP, Section 4.4."""
    return ShardingRule((WHOLE,) * count, WHOLE)


def summands(count: int = 1) -> ShardingRule:
    """The sharding rule by which summands of all `count` inputs give summands of the output."""
    return ShardingRule((PARTIAL,) * count, PARTIAL)


def along(letter: str, inputs: tuple[str, ...], output: str) -> ShardingRule:
    """The sharding rule that slices every tensor of a contraction along the dimension `letter`.

    inputs, output: the letters of each tensor's dimensions. If the output lacks the letter, the
    devices get summands of the output.
    """
    # an input without the letter is read whole: `find` gives -1, which is WHOLE
    forms = tuple(letters.find(letter) for letters in inputs)
    if letter in output:
        return ShardingRule(forms, output.find(letter))
    return ShardingRule(forms, PARTIAL)


Gather = Literal["All-Reduce", "All-Gather factors", "Grouped-Broadcast factors"]


@dataclass(frozen=True)
class Run:
    """The instruction that computes an operator on every device."""

    node: str
    """The tensor that the operator makes."""
    rule: ShardingRule
    """The forms of the operator's inputs and output."""
    after: str
    """The property that the instruction gives."""
    factors: bool = False
    """Whether the gradients of the operator's parameters are computed from gathered factors."""

    def text(self) -> str:
        """The output's tensor and the inputs' forms: `fc1(All-Gather(0), Identity)`."""
        forms = ", ".join(form_name(form) for form in self.rule.inputs)
        return f"{self.node}({forms})" + (" by factors" if self.factors else "")


@dataclass(frozen=True)
class Change:
    """The instruction that takes a tensor from one form to another: by a collective, or at no cost
    (Slice, Share)."""

    how: Collective
    tensor: str
    source: Form
    target: Form
    before: str
    """The property that the instruction needs."""
    after: str
    """The property that the instruction gives."""

    def text(self) -> str:
        """The collective, the tensor and its sliced dimensions: `All-Gather(fc1, 0)`."""
        dimensions = [str(form) for form in (self.source, self.target) if form >= 0]
        return f"{self.how}({', '.join([self.tensor, *dimensions])})"


@dataclass(frozen=True)
class Synchronise:
    """The instruction that synchronises the gradients of whole parameters, in the backward pass
    only: an all-reduce of the gradients, or the gathering of the tensors (sufficient factors) from
    which every device computes the gradients."""

    node: str
    """The tensor whose operator reads the parameters."""
    parameters: tuple[str, ...]
    how: Gather
    before: str
    """The property that the instruction needs."""
    after: str
    """The property that the instruction gives."""

    def text(self) -> str:
        """The collective and the parameters: `All-Reduce gradient(fc1.weight)`."""
        return f"{self.how} gradient({', '.join(self.parameters)})"


Instruction = Run | Change | Synchronise


def reading_segment(change: Change) -> int:
    """The segment that reads a repartitioned tensor, from its property `TENSOR@SEGMENT|FORM`."""
    tensor, _, _ = change.after.rpartition("|")
    _, _, segment = tensor.rpartition("@")
    return int(segment)


def is_free(change: Change) -> bool:
    """Whether a change of form takes no communication: each device keeps a part of its tensor, or
    all of it. A repartition moves slices only: whole tensors and summands do not depend on the
    ratios, by which segments differ."""
    if change.how == "Repartition":
        return change.source < 0
    return change.how in ("Slice", "Share")


def changes(cuts: Sequence[int]) -> Iterator[tuple[Collective, Form, Form]]:
    """(collective, form before, form after) of every change of form of a tensor that can be sliced
    along the dimensions `cuts`."""
    yield "All-Reduce", PARTIAL, WHOLE
    for d in cuts:
        yield "Reduce-Scatter", PARTIAL, d
        yield "All-Gather", d, WHOLE
        yield "Grouped-Broadcast", d, WHOLE
        for other in cuts:
            if other != d:
                yield "All-To-All", d, other
        yield "Slice", WHOLE, d
