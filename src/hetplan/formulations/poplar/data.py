"""Data and decision of problem `poplar`, as they stand in files.

Sets   i in 0..n-1 devices; b in 1..mbs_i micro-batch sizes that fit on device i.
Data   t_i(b) seconds of forward + backward for a micro-batch of b samples, t_i(0) = 0, in any shape
       (neither monotone nor convex); C seconds of one synchronisation; G samples per iteration; the
       ZeRO stage.
Decide stages 0, 1: per device its samples g_i and its micro-batch b_i, sum g_i = G (one
       synchronisation). stages 2, 3: accumulation steps s that all devices take together, b_is
       samples each, sum over i, s = G.
Source Poplar (AAAI 2025), "Problem Formulation" and Algorithm 2; stages 2 and 3 synchronise in
every step.
"""

from typing import Annotated, Any, Self

from pydantic import (
    FailFast,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from hetplan.schema import Count, Name, NonNegative, Positive, PositiveCount, StrictModel


class Device(StrictModel):
    """One accelerator.

    step_seconds: [mbs] seconds, step_seconds[b - 1] = t(b); empty where no sample fits.
    flops_per_second: the vendor's peak in single precision, which only the baseline `whale` reads;
    where it is None, `whale` takes that of the catalogue's entry for `name`.
    """

    name: Name
    step_seconds: Annotated[list[Positive], FailFast()] = Field(max_length=1_000_000)
    """[mbs] t(b) at index b - 1."""
    flops_per_second: Positive | None = None


class PoplarData(StrictModel):
    """`data` of a `poplar` instance: devices [n], global_batch G in samples, comm_seconds C."""

    zero_stage: Annotated[int, Field(ge=0, le=3)]
    global_batch: PositiveCount
    """G."""
    comm_seconds: NonNegative
    """C."""
    devices: Annotated[list[Device], FailFast()] = Field(min_length=1, max_length=65_536)

    @property
    def stepwise(self) -> bool:
        """Whether every accumulation step synchronises (ZeRO 2 and 3)."""
        return self.zero_stage >= 2


class Share(StrictModel):
    """ZeRO 0 and 1: the samples of one device, processed as floor(samples / micro_batch)
    micro-batches and one last smaller one. micro_batch may be 0 only where samples is 0."""

    samples: Count
    """g_i."""
    micro_batch: Count
    """b_i."""


class Step(StrictModel):
    """ZeRO 2 and 3: `count` equal accumulation steps of micro_batches[i] samples on device i."""

    count: PositiveCount
    micro_batches: list[Count]
    """[n] b_is."""


class PoplarDecision(StrictModel):
    """`decision` of a `poplar` instance: `devices` for ZeRO 0 and 1, `steps` for ZeRO 2 and 3,
    never both."""

    devices: list[Share] | None = None
    steps: list[Step] | None = None

    @model_validator(mode="after")
    def _has_either_devices_or_steps(self) -> Self:
        if (self.devices is None) == (self.steps is None):
            raise ValueError("a decision has either devices (ZeRO 0 and 1) or steps (ZeRO 2 and 3)")
        return self

    @model_serializer(mode="wrap")
    def _without_the_absent_one(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if value is not None}
