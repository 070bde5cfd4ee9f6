"""The schema of an SPMD program in a plan file: the instructions that every device runs, with the
names of HAP (Section 4.2)."""

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from hetplan.errors import require
from hetplan.schema import PLAIN, Count, NonNegative, StrictModel

# The form in which the devices hold a tensor. `Identity`: each device holds the whole tensor.
# `All-Reduce`: each device holds a summand. `All-Gather(d)`: each device holds a slice along
# dimension d, whose length follows the device's ratio.
Form = Annotated[str, Field(pattern=r"^(Identity|All-Reduce|All-Gather\(\d+\))$")]
TensorName = Annotated[str, Field(min_length=1, max_length=400, pattern=PLAIN)]
# A change of a tensor's form.
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
Step = Literal[
    "Run",
    Collective,
    "All-Reduce gradient",
    "All-Gather factors",
    "Grouped-Broadcast factors",
]


class SpmdInstruction(StrictModel):
    """One instruction: the step `do` on `tensor`.

    `Run` computes the operator whose output is the tensor: its inputs have the forms `before`, its
    output has the form `after`. Every other step takes the tensor from the form `before` to the
    form `after`. `… gradient` all-reduces the gradients of `parameters`, which the operator uses,
    in the backward pass; `… factors` gathers the tensors from which these gradients are computed.
    """

    do: Step
    tensor: TensorName
    before: list[Form] = Field(max_length=64)
    """One form per input for `Run`, else the tensor's form."""
    after: Form
    segment: Count = 0
    """The row of `SpmdProgram.ratios` by which tensors are sliced."""
    parameters: list[TensorName] = Field(default_factory=list, max_length=64)
    """The parameters whose gradients are synchronised; empty for `Run` and for changes of form."""


class SpmdProgram(StrictModel):
    """A program. All devices run its instructions in order in the forward pass. In the backward
    pass they run the mirror of each instruction, in reverse order."""

    instructions: list[SpmdInstruction] = Field(min_length=1, max_length=100_000)
    ratios: list[list[NonNegative]] = Field(min_length=1, max_length=1024)
    """[segment][device of the stage] share of each sliced dimension on the device; a row sums to 1.
    """

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for segment, row in enumerate(self.ratios):
            total = math.fsum(row)  # exact, so that 1e-9 allows only for the rounding of each ratio
            require(abs(total - 1) <= 1e-9, f"ratios[{segment}] sums to {total!r}, expected 1")
        rows = len(self.ratios)
        for i, instruction in enumerate(self.instructions):
            if instruction.segment >= rows:
                raise ValueError(
                    f"instructions[{i}].segment is {instruction.segment}, "
                    f"expected less than the rows of ratios ({rows})"
                )
        return self
