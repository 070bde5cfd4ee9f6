"""The bytes that stay on devices while a program runs.

Bytes count until the backward pass has been there. A parameter is held with its gradient and
optimizer states: whole on every device, or a slice on each. Of every tensor that an operator works
out, and of every form that a collective makes of it, the devices keep what they come to have.
Summands are not kept; views (operators without work) cost nothing. A parameter that several
operators read counts once: as the first of them reads it, or as whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from hetplan.programs.forms import PARTIAL, WHOLE, Change, Form, Instruction, Run
from hetplan.programs.program import PARAMETER, SingleProgram
from hetplan.programs.work import worked_out

# Bytes of a parameter's entry: weight, gradient and Adam's two moments in fp32, or 2 + 2 and fp32
# copies in 16 bit.
STATE_BYTES = 16.0
# Changes of form that make no new tensor.
VIEWS = ("Slice", "Share")


@dataclass(frozen=True)
class Holding:
    """The bytes that parameters and kept tensors take."""

    state_bytes: float
    """Bytes of an entry of a parameter, with its gradient and optimizer states."""
    saved: Mapping[str, float]
    """Node -> bytes of its whole tensor that are kept; 0 where left out."""
    tied_whole: bool = False
    """Whether a parameter that several operators read counts as whole: it is held whole where they
    read it in different ways."""

    def of(self, program: SingleProgram, instruction: Instruction) -> tuple[float, float]:
        """(Bytes on every device, bytes that the ratios divide) that an instruction adds."""
        parts: list[tuple[Form, float]] = []
        kept = form_kept(instruction)
        if kept is not None:
            tensor, form = kept
            parts.append((form, self.saved.get(tensor, 0.0)))
        if isinstance(instruction, Run):
            inputs, tied = program.inputs(program.node(instruction.node)), program.copies.values()
            for source, form in zip(inputs, instruction.way.inputs, strict=True):
                if source.kind == PARAMETER and source.name not in program.copies:
                    held = WHOLE if self.tied_whole and source.name in tied else form
                    parts.append((held, self.state_bytes * source.elements))
        fixed = sum(size for form, size in parts if form == WHOLE)
        return fixed, sum(size for form, size in parts if form >= 0)


def holding_of(
    program: SingleProgram, *, element_bytes: int, state_bytes: float = STATE_BYTES
) -> Holding:
    """The holding in which every tensor that is worked out is kept as it is."""
    saved = {node.name: float(node.elements * element_bytes) for node in worked_out(program)}
    return Holding(state_bytes, saved)


def form_kept(instruction: Instruction) -> tuple[str, Form] | None:
    """(Tensor, form) that an instruction leaves on the devices; None where it leaves none."""
    if isinstance(instruction, Run):
        tensor, form = instruction.node, instruction.way.output
    elif isinstance(instruction, Change) and instruction.how not in VIEWS:
        tensor, form = instruction.tensor, instruction.target
        if instruction.how == "Repartition" and form == WHOLE:  # the tensor stays as it was
            return None
    else:
        return None
    return None if form == PARTIAL else (tensor, form)
