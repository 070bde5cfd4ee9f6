"""Sets e experts, j devices. Data w_e expert_flops, v_j flops_per_second, m_j room.

Decide the device of each expert.
"""

from pydantic import Field

from hetplan.schema import Count, Name, Positive, StrictModel


class Device(StrictModel):
    """A device with room for `room` experts."""

    name: Name
    flops_per_second: Positive
    room: Count


class ExpertsData(StrictModel):
    """An instance's `data`."""

    expert_flops: list[Positive] = Field(min_length=1, max_length=1000)
    devices: list[Device] = Field(min_length=1, max_length=1000)


class ExpertsDecision(StrictModel):
    """A device for each expert."""

    device_of: list[Count]  # [experts] -> number of a device
