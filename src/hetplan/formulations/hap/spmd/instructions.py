"""What the triples of a theory stand for: what each device does forward and, mirrored, backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from hetplan.formulations.hap.spmd.forms import PARTIAL, WHOLE, Form, Way, form_name

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
    """An operator on every device. waits: its output is not had before the gradients of
    `unsynchronised` parameters are synchronised. factors: these gradients are computed from
    gathered factors."""

    node: str
    way: Way
    after: str
    unsynchronised: tuple[str, ...] = ()
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
