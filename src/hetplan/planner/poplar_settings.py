"""Settings of the strategy `poplar` (`--set poplar.NAME=VALUE`), and the assumptions that they
stand for."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from hetplan.errors import InputError
from hetplan.formulations.poplar.pose import Assumptions
from hetplan.formulations.poplar.zero import STAGES
from hetplan.profiling.batch_curve import BatchCurve, load_batch_curve
from hetplan.profiling.collectives import load_collectives
from hetplan.schema import StrictModel


def _naming_files(value: str) -> str:
    if not any(part.strip() for part in value.split(",")):
        raise ValueError("names no file")
    return value


class PoplarSettings(StrictModel):
    """zero: `all` stages, the `lowest` at which every device holds a sample (Algorithm 1), or one
    of 0 to 3.

    shards: `equal`, or by `memory` of each device. overlap: share of the communication hidden
    behind computation, 0 to 1. interpolation between measured micro-batches: `linear`, or the
    paper's `spline`. curves: files of `hetplan profile --batch-curve`, separated by commas, one per
    device type. collectives: a file of `hetplan profile --collectives`, in place of the cluster's
    links.
    """

    zero: Literal["all", "lowest", 0, 1, 2, 3] = "all"
    shards: Literal["equal", "memory"] = "equal"
    overlap: Annotated[float, Field(ge=0, le=1)] = 0.0
    interpolation: Literal["linear", "spline"] = "linear"
    curves: Annotated[str, AfterValidator(_naming_files)] | None = None
    collectives: Annotated[str, AfterValidator(_naming_files)] | None = None

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages to try where they do not depend on the workload."""
        return (self.zero,) if isinstance(self.zero, int) else STAGES

    def assumptions(self) -> Assumptions:
        """With the curve files read; raises InputError."""
        found: dict[str, BatchCurve] = {}
        for path in filter(None, (part.strip() for part in (self.curves or "").split(","))):
            curve = load_batch_curve(path)
            if curve.device in found:
                raise InputError(
                    "second batch curve of a device type", where=path, got=curve.device
                )
            found[curve.device] = curve
        measured = None if self.collectives is None else load_collectives(self.collectives.strip())
        return Assumptions(self.shards, self.overlap, self.interpolation, found, measured)
