"""Data and decision of problem `hap`, as they stand in files.

Sets   j in 0..m-1 devices, k in 0..g-1 segments, i triples {pre_i} instruction_i {post_i} over properties.
Data   v_j flops_per_second; a compute triple has fixed_flops F_i and shared_flops S_i, a comm triple
       fixed_seconds and shared_seconds; every triple belongs to one segment; a goal property; optionally a
       program, when only the ratios are asked for.
Decide a sequence Q of distinct triples and ratios B[k][j] >= 0 with sum_j B[k][j] = 1.
Min    sum over stages of (comm + max_j compute_j), a stage beginning at each comm instruction, with
       comm = fixed_seconds + shared_seconds max_j B[k][j] and
       compute_j = sum over the stage's compute instructions of (F + S B[k][j]) / v_j.
S.t.   (1) pre of each instruction among the posts of the earlier ones, (2) the goal among all posts,
       (3) no triple twice.
Source HAP, Section 3.2 (cost), 4.2 (background theory as Hoare triples), 5.2 (segments).
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import FailFast, Field, model_validator

from hetplan.schema import Count, Matrix, Name, NonNegative, Positive, PositiveCount, StrictModel

Property = Annotated[str, Field(min_length=1, max_length=400)]
Properties = Annotated[list[Property], FailFast()]
Program = list[Count]


class Device(StrictModel):
    """One virtual device: a GPU or a machine of equal GPUs."""

    name: Name
    flops_per_second: Positive


class Compute(StrictModel):
    """A computation: every device does fixed_flops + shared_flops times its ratio."""

    kind: Literal["compute"]
    instruction: Property
    pre: Properties
    post: Properties
    segment: Count = 0
    fixed_flops: NonNegative
    shared_flops: NonNegative


class Communication(StrictModel):
    """A collective: fixed_seconds + shared_seconds times the largest ratio; all devices wait for it."""

    kind: Literal["comm"]
    instruction: Property
    pre: Properties
    post: Properties
    segment: Count = 0
    fixed_seconds: NonNegative
    shared_seconds: NonNegative


Triple = Annotated[Compute | Communication, Field(discriminator="kind")]


class HapData(StrictModel):
    """`data` of a `hap` instance."""

    devices: list[Device] = Field(min_length=1, max_length=16_384)
    segments: PositiveCount = Field(default=1, le=1024)
    triples: Annotated[list[Triple], FailFast(), Field(min_length=1, max_length=200_000)]
    goal: Property
    program: Program | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for i, triple in enumerate(self.triples):
            if triple.segment >= self.segments:
                raise ValueError(
                    f"triples[{i}].segment is {triple.segment}, expected less than segments ({self.segments})"
                )
        for position, i in enumerate(self.program or ()):
            if i >= len(self.triples):
                raise ValueError(
                    f"program[{position}] is {i}, expected less than the number of triples ({len(self.triples)})"
                )
        return self


class HapDecision(StrictModel):
    """`decision` of a `hap` instance: triple numbers in order of execution and ratios [g][m]."""

    program: Program
    ratios: Matrix
