"""Data and decision of problem `hap`, as they stand in files.

Sets   j in 0..m-1 devices, k in 0..g-1 segments, i triples {pre_i} instruction_i {post_i} over
properties.
Data   v_j flops_per_second; a compute triple has fixed_flops F_i and shared_flops S_i, a comm
       triple fixed_seconds and shared_seconds; every triple belongs to one segment; a goal
       property; optionally a program, when only the ratios are asked for; optionally memory:
       device_bytes W_j, and on every triple fixed_bytes P_i and shared_bytes A_i (0 where left
       out).
Decide a sequence Q of distinct triples and ratios B[k][j] >= 0 with sum_j B[k][j] = 1.
Min    sum over stages of (comm + max_j compute_j), a stage beginning at each comm instruction, with
       comm = fixed_seconds + shared_seconds max_j B[k][j] and
       compute_j = sum over the stage's compute instructions of (F + S B[k][j]) / v_j.
S.t.   (1) the pre of each instruction is among the posts of the earlier ones;
       (2) the goal is among all posts;
       (3) no triple is used twice;
       (4) with memory, sum over the program of (P_i + A_i B[segment_i][j]) <= W_j for all j.
Source HAP, Section 3.2 (cost), 4.2 (background theory as Hoare triples), 5.2 (segments); (4) is
hetplan's.
"""

from typing import Annotated, Literal, Self

from pydantic import FailFast, Field, model_validator

from hetplan.schema import (
    Count,
    Matrix,
    Name,
    NonNegative,
    Positive,
    Row,
    StrictModel,
    check_length,
)

# The name of a property, or the text of an instruction. A property's name is `tensor | form`: it
# says that the tensor is there in this form.
Property = Annotated[str, Field(min_length=1, max_length=400)]
Properties = Annotated[list[Property], FailFast()]
Program = list[Count]  # triple numbers
# A limit of a field's default does not tighten that of its type: the type must have it.
Segments = Annotated[int, Field(ge=1, le=1024)]


class Device(StrictModel):
    """One virtual device: a GPU or a machine of equal GPUs."""

    name: Name
    flops_per_second: Positive
    """v_j."""


class Compute(StrictModel):
    """A computation: every device does fixed_flops + shared_flops times its ratio."""

    kind: Literal["compute"]
    instruction: Property
    """Its text, for people."""
    pre: Properties
    """Properties that it needs."""
    post: Properties
    """Properties that it gives."""
    segment: Count = 0
    """The segment whose ratios divide the work."""
    fixed_flops: NonNegative
    """F_i, FLOP on every device."""
    shared_flops: NonNegative
    """S_i, FLOP that the ratios divide."""
    fixed_bytes: NonNegative | None = None
    """P_i, bytes on every device."""
    shared_bytes: NonNegative | None = None
    """A_i, bytes that the ratios divide."""


class Communication(StrictModel):
    """A collective: fixed_seconds + shared_seconds times the largest ratio; all devices wait for
    it."""

    kind: Literal["comm"]
    instruction: Property
    """Its text, for people."""
    pre: Properties
    """Properties that it needs."""
    post: Properties
    """Properties that it gives."""
    segment: Count = 0
    """The segment whose largest ratio counts."""
    fixed_seconds: NonNegative
    shared_seconds: NonNegative
    """Seconds per unit of the largest ratio."""
    fixed_bytes: NonNegative | None = None
    """P_i, bytes on every device."""
    shared_bytes: NonNegative | None = None
    """A_i, bytes that the ratios divide."""


Triple = Annotated[Compute | Communication, Field(discriminator="kind")]


class Memory(StrictModel):
    """The optional memory constraint: bytes of each device, in the order of `devices`.

    What an instruction adds stays until the program ends: parameters with their gradients and
    optimizer states, and what its mirror in the backward pass needs.
    """

    device_bytes: Row
    """[m] W_j."""


class HapData(StrictModel):
    """`data` of a `hap` instance."""

    devices: list[Device] = Field(min_length=1, max_length=16_384)
    segments: Segments = 1
    """g, the number of segments."""
    triples: Annotated[list[Triple], FailFast(), Field(min_length=1, max_length=200_000)]
    goal: Property
    program: Program | None = None
    """The given program; None: it is sought."""
    memory: Memory | None = None
    """None: memory is not limited."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.memory is None:
            self._check_no_bytes_are_given()
        else:
            capacity = self.memory.device_bytes
            check_length(capacity, len(self.devices), "memory.device_bytes", "device")
        self._check_segments()
        self._check_program()
        return self

    def _check_no_bytes_are_given(self) -> None:
        for i, triple in enumerate(self.triples):
            for key in ("fixed_bytes", "shared_bytes"):
                value = getattr(triple, key)
                if value is not None:
                    raise ValueError(
                        f"triples[{i}].{key} is {value!r}, "
                        "expected none without memory.device_bytes"
                    )

    def _check_segments(self) -> None:
        for i, triple in enumerate(self.triples):
            if triple.segment >= self.segments:
                raise ValueError(
                    f"triples[{i}].segment is {triple.segment}, "
                    f"expected less than segments ({self.segments})"
                )

    def _check_program(self) -> None:
        if self.program is None:
            return
        count = len(self.triples)
        for position, i in enumerate(self.program):
            if i >= count:
                raise ValueError(
                    f"program[{position}] is {i}, expected less than the number of triples "
                    f"({count})"
                )


class HapDecision(StrictModel):
    """`decision` of a `hap` instance: triple numbers in order of execution and ratios [g][m]."""

    program: Program
    ratios: Matrix
    """B[k][j], the share of device j in the divided work of segment k."""
