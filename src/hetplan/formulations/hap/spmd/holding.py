"""Bytes that the instructions of a program leave on the devices until the backward pass has been
there.

A parameter is held with its gradient and optimizer states: whole on every device, or a slice on
each. Of every tensor that an operator works out, and of what a collective makes of it, the devices
keep the form that they come to have; summands are not kept, views (operators without work) cost
nothing. A copy of a parameter is not counted again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetplan.formulations.hap.spmd.forms import PARTIAL, WHOLE, Form
from hetplan.formulations.hap.spmd.instructions import Change, Instruction, Run
from hetplan.formulations.hap.spmd.program import PARAMETER, Node, SingleProgram
from hetplan.formulations.hap.spmd.work import work_of

# Of a parameter's entry: weight, gradient and Adam's two moments in fp32, or 2 + 2 and fp32 copies
# in 16 bit.
STATE_BYTES = 16.0
# What makes no new form of a tensor.
VIEWS = ("Slice", "Share")


@dataclass(frozen=True)
class Holding:
    """device_bytes [m]; state_bytes per entry of a parameter; saved: node -> bytes of its whole
    tensor (0 where left out)."""

    device_bytes: tuple[float, ...]
    state_bytes: float
    saved: Mapping[str, float]

    def of(self, program: SingleProgram, instruction: Instruction) -> tuple[float, float]:
        """(fixed bytes, shared bytes) that an instruction adds."""
        parts: list[tuple[Form, float]] = []
        if (kept := form_kept(instruction)) is not None:
            parts.append((kept[1], self.saved.get(kept[0], 0.0)))
        if isinstance(instruction, Run):
            inputs = program.inputs(program.node(instruction.node))
            for source, form in zip(inputs, instruction.way.inputs, strict=True):
                if source.kind == PARAMETER and source.name not in program.copies:
                    parts.append((form, self.state_bytes * source.elements))
        fixed = sum(size for form, size in parts if form == WHOLE)
        return fixed, sum(size for form, size in parts if form >= 0)


def holding_of(
    program: SingleProgram,
    device_bytes: Sequence[float],
    *,
    element_bytes: int,
    state_bytes: float = STATE_BYTES,
) -> Holding:
    """Every tensor that is worked out is kept as it is."""
    saved = {node.name: float(node.elements * element_bytes) for node in worked_out(program)}
    return Holding(tuple(device_bytes), state_bytes, saved)


def worked_out(program: SingleProgram) -> list[Node]:
    """The operators that compute something."""
    gradients = program.needs_gradient()
    return [node for node in program.computations if work_of(program, node, gradients).total > 0]


def form_kept(instruction: Instruction) -> tuple[str, Form] | None:
    """(tensor, form) that an instruction leaves on the devices; None where it leaves none."""
    if isinstance(instruction, Run):
        tensor, form = instruction.node, instruction.way.output
    elif isinstance(instruction, Change) and instruction.how not in VIEWS:
        tensor, form = instruction.tensor, instruction.target
        if instruction.how == "Repartition" and form == WHOLE:  # as it was
            return None
    else:
        return None
    return None if form == PARTIAL else (tensor, form)
