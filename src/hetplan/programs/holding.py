"""The bytes that each instruction of a program adds to the devices' memory, until the backward pass
has used them.

A parameter counts with its gradient and optimizer states: whole on every device, or a slice on
each. A parameter that several operators read counts once: in the form in which the first of them
reads it, or as whole where `Holding.tied_whole` says so. A tensor that an operator computes is kept
for the backward pass in the form in which the operator gives it, and again in every form into which
a collective changes it. Summands are not kept. The tensors of operators without work, such as
reshapes, take no bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from hetplan.programs.forms import PARTIAL, WHOLE, Change, Form, Instruction, Run
from hetplan.programs.program import PARAMETER, SingleProgram
from hetplan.programs.work import computing_operators

# Bytes of a parameter's entry. In fp32 training: weight, gradient and Adam's two moments of 4 bytes
# each. In 16 bits: weight and gradient of 2 bytes, and the weight and two moments in fp32.
STATE_BYTES = 16.0
# Changes of form that make no new tensor: a device goes on with all or a part of the one it has.
VIEWS = ("Slice", "Share")


@dataclass(frozen=True)
class Holding:
    """The bytes of parameters and of tensors that are kept for the backward pass."""

    state_bytes: float
    """Bytes of an entry of a parameter, with its gradient and optimizer states."""
    saved: Mapping[str, float]
    """Node -> bytes of its whole tensor that are kept; 0 for a node that is missing."""
    tied_whole: bool = False
    """Whether a parameter that several operators read counts as whole. Devices have it whole if the
    operators read it in different forms."""

    def of(self, program: SingleProgram, instruction: Instruction) -> tuple[float, float]:
        """(bytes on every device, bytes that the ratios divide) that an instruction adds."""
        parts: list[tuple[Form, float]] = []
        kept = form_kept(instruction)
        if kept is not None:
            tensor, form = kept
            parts.append((form, self.saved.get(tensor, 0.0)))
        if isinstance(instruction, Run):
            inputs = program.inputs(program.node(instruction.node))
            tied = program.copies.values()
            for source, form in zip(inputs, instruction.rule.inputs, strict=True):
                if source.kind == PARAMETER and source.name not in program.copies:
                    counted_form = WHOLE if self.tied_whole and source.name in tied else form
                    parts.append((counted_form, self.state_bytes * source.elements))
        # A form of 0 or more is the dimension along which the ratios divide the tensor.
        on_every_device = sum(size for form, size in parts if form == WHOLE)
        divided = sum(size for form, size in parts if form >= 0)
        return on_every_device, divided


def holding_of(
    program: SingleProgram, *, element_bytes: int, state_bytes: float = STATE_BYTES
) -> Holding:
    """The Holding in which every tensor that an operator computes is kept whole, with
    `element_bytes` per entry."""
    saved = {
        node.name: float(node.elements * element_bytes) for node in computing_operators(program)
    }
    return Holding(state_bytes, saved)


def form_kept(instruction: Instruction) -> tuple[str, Form] | None:
    """(tensor, form) that an instruction leaves on the devices for the backward pass; None for an
    instruction that leaves none."""
    if isinstance(instruction, Run):
        tensor, form = instruction.node, instruction.rule.output
    elif isinstance(instruction, Change) and instruction.how not in VIEWS:
        tensor, form = instruction.tensor, instruction.target
        # A repartition gives a sliced tensor other slices. A whole tensor stays as it is.
        if instruction.how == "Repartition" and form == WHOLE:
            return None
    else:
        return None
    return None if form == PARTIAL else (tensor, form)
