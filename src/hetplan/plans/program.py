"""An SPMD program in a plan file: what every device runs, in HAP's words."""

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from hetplan.errors import require
from hetplan.schema import PLAIN, Count, NonNegative, StrictModel

# HAP's names (Section 4.2) of how the devices hold a tensor: `Identity` (each the whole),
# `All-Reduce` (each a summand), `All-Gather(d)` (each its slice along d, as its ratio says).
Form = Annotated[str, Field(pattern=r"^(Identity|All-Reduce|All-Gather\(\d+\))$")]
TensorName = Annotated[str, Field(min_length=1, max_length=400, pattern=PLAIN)]
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
    """instructions in order, run by all devices and mirrored in the backward pass; ratios
    [segment][device of the stage]: part of each sliced dimension, rows sum to 1."""

    instructions: list[SpmdInstruction] = Field(min_length=1, max_length=100_000)
    ratios: list[list[NonNegative]] = Field(min_length=1, max_length=1024)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for k, row in enumerate(self.ratios):
            total = math.fsum(row)
            require(abs(total - 1) <= 1e-9, f"ratios[{k}] sums to {total!r}, expected 1")
        for i, instruction in enumerate(self.instructions):
            require(
                instruction.segment < len(self.ratios),
                f"instructions[{i}].segment is {instruction.segment}, "
                f"expected less than the rows of ratios ({len(self.ratios)})",
            )
        return self
