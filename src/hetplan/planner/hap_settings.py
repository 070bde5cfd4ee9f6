"""Settings of the strategy `hap` (`--set hap.NAME=VALUE`)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from hetplan.schema import PositiveCount, StrictModel


class HapSettings(StrictModel):
    """seconds: for the joint search, a sixtieth of it for the paper's; it ends with the best
    program and its bound.

    steps: runs of the program per iteration, a divisor of the global batch; left out: the fewest in
    which data parallelism fits in memory.
    """

    seconds: Annotated[float, Field(gt=0, le=86_400)] = 30.0
    steps: PositiveCount | None = None
