"""The forms in which the devices hold a tensor, and the ways in which an operator works on them.

HAP, Section 4.2: a distributed tensor has the property `e | I` where running the instruction I on
it gives `e` on every device. Forms and what a device holds of the tensor and, going backward, of
its gradient:

    form            property           value on device j          gradient on device j
    WHOLE           e|Identity         e                          a summand: they add up to the
    gradient PARTIAL         e|All-Reduce       a summand of e             the whole gradient
    d = 0, 1, …     e|All-Gather(d)    its slice along d          the same slice of the gradient

Gradients of whole tensors are summands because every operator's backward pass is linear in the
gradient: wherever a whole tensor is read by a device that computes a slice, its gradient comes out
as a summand anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

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
