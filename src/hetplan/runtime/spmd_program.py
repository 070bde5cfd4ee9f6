"""The part of a plan file that holds an SPMD program: one list of instructions that all devices
run, and ratios.

Forms are HAP's names (Section 4.2) of how the devices hold a tensor: `Identity` (each the whole),
`All-Reduce` (each a summand), `All-Gather(d)` (each its slice along d, as long as its ratio says).
The backward pass mirrors the list.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from hetplan.schema import Count, NonNegative, StrictModel

Form = Annotated[str, Field(pattern=r"^(Identity|All-Reduce|All-Gather\(\d+\))$")]
TensorName = Annotated[str, Field(min_length=1, max_length=400)]
Step = Literal[
    "Run",
    "All-Reduce",
    "Reduce-Scatter",
    "All-Gather",
    "Grouped-Broadcast",
    "All-To-All",
    "Slice",
    "Share",
    "Repartition",
    "All-Reduce gradient",
    "All-Gather factors",
    "Grouped-Broadcast factors",
]
SUM_TOLERANCE = 1e-9


class SpmdInstruction(StrictModel):
    """`do` on `tensor`. Run: the operator that makes it, with inputs in the forms `before`, leaves
    it in `after`; any other: the tensor goes from the form before to that after. gradient and
    factors: in the backward pass the gradients of `parameters`, used by the operator, are
    all-reduced, or what they are computed from is gathered."""

    do: Step
    tensor: TensorName
    before: list[Form] = Field(max_length=64)
    after: Form
    segment: Count = 0
    parameters: list[TensorName] = Field(default_factory=list, max_length=64)


class SpmdProgram(StrictModel):
    """instructions in order; ratios [segment][device of the stage]: part of each sliced dimension,
    rows sum to 1."""

    instructions: list[SpmdInstruction] = Field(min_length=1, max_length=100_000)
    ratios: list[list[NonNegative]] = Field(min_length=1, max_length=1024)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for k, row in enumerate(self.ratios):
            if abs(math.fsum(row) - 1) > SUM_TOLERANCE:
                raise ValueError(f"ratios[{k}] sums to {math.fsum(row)!r}, expected 1")
        for i, instruction in enumerate(self.instructions):
            if instruction.segment >= len(self.ratios):
                raise ValueError(
                    f"instructions[{i}].segment is {instruction.segment}, "
                    f"expected less than the rows of ratios ({len(self.ratios)})"
                )
        return self
