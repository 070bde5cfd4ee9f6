"""The forms in which devices hold a tensor, and the instructions of an SPMD program.

HAP, Section 4.2: a distributed tensor has the property `e | I` where running the instruction I on
it gives `e` on every device. A form says what a device holds of the tensor and, in the backward
pass, of the tensor's gradient:

    form            property           value on device j          gradient on device j
    WHOLE           e|Identity         e                          one summand of it all
    PARTIAL         e|All-Reduce       a summand of e             the whole gradient
    d = 0, 1, …     e|All-Gather(d)    its slice along d          the same slice of the gradient

Gradients of whole tensors are summands because every operator's backward pass is linear in the
gradient: wherever a device that computes a slice reads a whole tensor, the tensor's gradient comes
out as a summand. An instruction says what each device does in the forward pass; in the backward
pass each device does its mirror.
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
class Way:
    """One sharding rule of an operator: where the inputs have these forms, running the operator on
    every device gives the output in its form."""

    inputs: tuple[Form, ...]
    output: Form

    @property
    def shared(self) -> bool:
        """Whether the devices share the work; where no tensor is sliced, each does all of it."""
        return any(form >= 0 for form in (*self.inputs, self.output))


def whole_way(count: int) -> Way:
    """Replicated computation of an operator of `count` inputs. Source: HAP, Section 4.4."""
    return Way((WHOLE,) * count, WHOLE)


def summands(count: int = 1) -> Way:
    """Summands of all `count` inputs give summands of the output."""
    return Way((PARTIAL,) * count, PARTIAL)


def along(letter: str, inputs: tuple[str, ...], output: str) -> Way:
    """The way that slices every tensor of a contraction along the dimension `letter`.

    inputs, output: the letters of each tensor's dimensions. Where the output lacks the letter, the
    devices get summands of it.
    """
    forms = tuple(letters.find(letter) for letters in inputs)  # -1, WHOLE, where it is absent
    if letter in output:
        return Way(forms, output.find(letter))
    return Way(forms, PARTIAL)


Gather = Literal["All-Reduce", "All-Gather factors", "Grouped-Broadcast factors"]


@dataclass(frozen=True)
class Run:
    """An operator on every device."""

    node: str
    """The tensor that the operator makes."""
    way: Way
    after: str
    """The property that it gives."""
    factors: bool = False
    """Whether the gradients of its parameters are computed from gathered factors."""

    def text(self) -> str:
        """The output's tensor and the inputs' forms: `fc1(All-Gather(0), Identity)`."""
        forms = ", ".join(form_name(form) for form in self.way.inputs)
        return f"{self.node}({forms})" + (" by factors" if self.factors else "")


@dataclass(frozen=True)
class Change:
    """A tensor goes from one form to another: by a collective, or at no cost (Slice, Share)."""

    how: Collective
    tensor: str
    source: Form
    target: Form
    before: str
    """The property that it needs."""
    after: str
    """The property that it gives."""

    def text(self) -> str:
        """The collective, the tensor and its sliced dimensions: `All-Gather(fc1, 0)`."""
        dimensions = [str(form) for form in (self.source, self.target) if form >= 0]
        return f"{self.how}({', '.join([self.tensor, *dimensions])})"


@dataclass(frozen=True)
class Synchronise:
    """The all-reduce of whole parameters' gradients; or, for sufficient factors, the gathering of
    the tensors that these gradients are computed from. Only the backward pass has it."""

    node: str
    """The tensor whose operator reads the parameters."""
    parameters: tuple[str, ...]
    how: Gather
    before: str
    """The property that it needs."""
    after: str
    """The property that it gives."""

    def text(self) -> str:
        """The collective and the parameters: `All-Reduce gradient(fc1.weight)`."""
        return f"{self.how} gradient({', '.join(self.parameters)})"


Instruction = Run | Change | Synchronise


def reading_segment(change: Change) -> int:
    """The segment that a repartitioned tensor moves to."""
    tensor, _, _ = change.after.rpartition("|")
    _, _, segment = tensor.rpartition("@")
    return int(segment)


def is_free(change: Change) -> bool:
    """Whether a change of form is no collective: each device keeps a part of its tensor, or all of
    it."""
    if change.how == "Repartition":
        return change.source < 0
    return change.how in ("Slice", "Share")


def changes(cuts: Sequence[int]) -> Iterator[tuple[Collective, Form, Form]]:
    """Every change of form of a tensor that can be sliced along the dimensions `cuts`."""
    yield "All-Reduce", PARTIAL, WHOLE
    for d in cuts:
        yield "Reduce-Scatter", PARTIAL, d
        yield "All-Gather", d, WHOLE
        yield "Grouped-Broadcast", d, WHOLE
        for other in cuts:
            if other != d:
                yield "All-To-All", d, other
        yield "Slice", WHOLE, d
