"""An SPMD program in a plan file: the instructions that every device runs, with HAP's names."""

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from hetplan.errors import require
from hetplan.schema import PLAIN, Count, NonNegative, StrictModel

# HAP's names (Section 4.2) for the form in which the devices hold a tensor. `Identity`: each device
# holds the whole tensor. `All-Reduce`: each holds a summand. `All-Gather(d)`: each holds a slice
# along dimension d, whose length follows its ratio.
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
    before: list[Form] = Field(max_length=64)  # of each input for `Run`, else one form
    after: Form
    segment: Count = 0  # the row of `SpmdProgram.ratios` by which tensors are sliced
    parameters: list[TensorName] = Field(default_factory=list, max_length=64)


class SpmdProgram(StrictModel):
    """The program: all devices run the instructions in order, and mirrored in the backward pass."""

    instructions: list[SpmdInstruction] = Field(min_length=1, max_length=100_000)
    # [segment][device of the stage] the device's share of each sliced dimension; a row sums to 1
    ratios: list[list[NonNegative]] = Field(min_length=1, max_length=1024)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for segment, row in enumerate(self.ratios):
            total = math.fsum(row)
            require(abs(total - 1) <= 1e-9, f"ratios[{segment}] sums to {total!r}, expected 1")
        for i, instruction in enumerate(self.instructions):
            require(
                instruction.segment < len(self.ratios),
                f"instructions[{i}].segment is {instruction.segment}, "
                f"expected less than the rows of ratios ({len(self.ratios)})",
            )
        return self
