"""The forms in which the devices hold a tensor, the ways in which an operator works on them, and
what the triples of a theory stand for.

HAP, Section 4.2: a distributed tensor has the property `e | I` where running the instruction I on
it gives `e` on every device. Forms and what a device holds of the tensor and, going backward, of
its gradient:

    form            property           value on device j          gradient on device j
    WHOLE           e|Identity         e                          one summand of it all
    PARTIAL         e|All-Reduce       a summand of e             the whole gradient
    d = 0, 1, …     e|All-Gather(d)    its slice along d          the same slice of the gradient

Gradients of whole tensors are summands because every operator's backward pass is linear in the
gradient: wherever a whole tensor is read by a device that computes a slice, its gradient comes out
as a summand anyway. Instructions say what each device does forward and, mirrored, backward.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Form = int
Shape = tuple[int, ...]
WHOLE: Form = -1
PARTIAL: Form = -2


def form_name(form: Form) -> str:
    """HAP's name of a form."""
    return {WHOLE: "Identity", PARTIAL: "All-Reduce"}.get(form, f"All-Gather({form})")


def property_name(tensor: str, form: Form) -> str:
    """`e|All-Gather(0)`."""
    return f"{tensor}|{form_name(form)}"


@dataclass(frozen=True)
class Way:
    """One rule of an operator: with inputs in these forms, running it on every device gives the
    output's form."""

    inputs: tuple[Form, ...]
    output: Form

    @property
    def shared(self) -> bool:
        """Whether the devices share the work (they repeat it where no tensor is sliced)."""
        return any(form >= 0 for form in (*self.inputs, self.output))


def whole_way(count: int) -> Way:
    """Replicated computation of an operator of `count` inputs. Source: HAP, Section 4.4."""
    return Way((WHOLE,) * count, WHOLE)


def along(letter: str, inputs: tuple[str, ...], output: str) -> Way:
    """The way that slices every tensor that has the dimension `letter`; without it in the output,
    sums remain."""
    return Way(
        tuple(t.find(letter) for t in inputs), output.find(letter) if letter in output else PARTIAL
    )


Collective = Literal[
    "All-Reduce",
    "Reduce-Scatter",
    "All-Gather",
    "Grouped-Broadcast",
    "All-To-All",
    "Slice",
    "Share",
    "Repartition",
]

Gather = Literal["All-Reduce", "All-Gather factors", "Grouped-Broadcast factors"]


@dataclass(frozen=True)
class Run:
    """An operator on every device. factors: the gradients of its parameters are computed from
    gathered factors."""

    node: str
    way: Way
    after: str
    factors: bool = False

    def text(self) -> str:
        """`fc1(All-Gather(0), Identity)`: the output's tensor, the inputs' forms."""
        forms = ", ".join(form_name(form) for form in self.way.inputs)
        return f"{self.node}({forms})" + (" by factors" if self.factors else "")


@dataclass(frozen=True)
class Change:
    """A tensor from one form to another: by a collective, or for nothing (Slice, Share)."""

    how: Collective
    tensor: str
    source: Form
    target: Form
    before: str
    after: str

    def text(self) -> str:
        """`All-Gather(fc1, 0)`."""
        dims = ", ".join(str(form) for form in (self.source, self.target) if form >= 0)
        return f"{self.how}({self.tensor}{', ' + dims if dims else ''})"


@dataclass(frozen=True)
class Synchronise:
    """The gradients of whole parameters, all-reduced; or, for sufficient factors, the gathering of
    what they are computed from. Only the backward pass has it."""

    node: str
    parameters: tuple[str, ...]
    how: Gather
    before: str
    after: str

    def text(self) -> str:
        """`All-Reduce(gradient of fc1.weight)`."""
        return f"{self.how} gradient({', '.join(self.parameters)})"


Instruction = Run | Change | Synchronise


def reading_segment(change: Change) -> int:
    """The segment that a repartitioned tensor moves to."""
    return int(change.after.rpartition("|")[0].rpartition("@")[2])


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
