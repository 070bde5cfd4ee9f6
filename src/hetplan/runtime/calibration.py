"""A few physical constants estimated from a user's own measured runs, and whether that can be
trusted.

- within, between: effective bandwidth of links within and between nodes, as a share of the cluster
  file's. slot_seconds: what every forward or backward pass of a stage takes beside its layers.
  framework_bytes: what framework and driver hold on every device.
- Model: T = replay with both bandwidths scaled + slot_seconds * slots, slots = 2 (M + S - 1) of the
  longest replica. Runs are replayed on a grid of bandwidths, with straight lines over 1/bandwidth
  between.
- Fit: least squares of predicted / measured - 1 over a grid of both bandwidths that is refined
  around its best point, each point with the overhead of a slot that is best there (which has a
  closed form). A bandwidth that moves no run's prediction by a percent when halved keeps its value.
- Trust: leave one run out, fit the others, predict it. The constants are kept when there are at
  least two runs for each of them and one more, and the error of the runs left out is a tenth lower
  than without calibration.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hetplan.errors import InputError
from hetplan.profiling.cluster import Cluster
from hetplan.profiling.foreign import Foreign, read_foreign
from hetplan.profiling.workload import Workload
from hetplan.runtime.plan import Plan, load_plan, parse_plan
from hetplan.runtime.replay import replay
from hetplan.schema import Bytes, Document, Name, NonNegative

Floats = NDArray[np.float64]
MATTERS = 0.01
# error of runs left out, of what it is without calibration: less is no accident of the noise
BETTER = 0.9
# Shares of a bandwidth at which runs are replayed. A bandwidth is between a twentieth and a bit
# more than the figure given.
GRID = np.array([0.05, 0.1, 0.2, 0.35, 0.6, 1.0, 1.5])
POINTS, REFINED = 33, 3  # bandwidths tried of each kind, and how often around the best one
Share = Annotated[float, Field(gt=0, le=10)]


class Calibration(Document):
    """Constants, and the mean absolute error of seconds without them and, for runs left out, with
    them.

    framework_bytes: null where no run tells its memory.
    """

    format: Literal["hetplan-calibration"] = "hetplan-calibration"
    version: Literal[1] = 1
    cluster: Name
    runs: Annotated[int, Field(ge=1)]
    within: Share = 1.0
    between: Share = 1.0
    slot_seconds: NonNegative = 0.0
    framework_bytes: NonNegative | None = None
    fitted: list[Name]
    error_before: NonNegative
    error_left_out: NonNegative | None


@dataclass(frozen=True)
class MeasuredRun:
    """A plan that a user ran: seconds per iteration, and bytes on the fullest device where told."""

    plan: Plan
    seconds: float
    peak_bytes: float | None
    where: str


@dataclass(frozen=True)
class Estimate:
    """calibration: None where it cannot be trusted, and reason then says why. predictions: seconds
    of each run, with the constants where there are some; left_out: each with the others' fit."""

    calibration: Calibration | None
    reason: str
    predictions: tuple[float, ...]
    left_out: tuple[float, ...]


@dataclass(frozen=True)
class Constants:
    """What is fitted; the defaults are no calibration."""

    within: float = 1.0
    between: float = 1.0
    slot_seconds: float = 0.0


class MeasuredFile(Foreign):
    """plan: a plan, or its file's name beside this file."""

    plan: dict[str, Any] | str
    seconds: Annotated[float, Field(ge=1e-9, le=1e9)]
    peak_bytes: Annotated[Bytes, Field(ge=1)] | None = None


def load_measured_run(path: str | os.PathLike[str]) -> MeasuredRun:
    """From a file as `MeasuredFile` describes; raises InputError."""
    file, where = read_foreign(MeasuredFile, path), os.fspath(path)
    if isinstance(file.plan, str):
        plan = load_plan(Path(path).parent / file.plan)
    else:
        plan = parse_plan(file.plan, where=f"{where}: plan")
    return MeasuredRun(plan, file.seconds, file.peak_bytes, where)


load_calibration = Calibration.load


def scaled(cluster: Cluster, within: float, between: float) -> Cluster:
    """The cluster with its links' bandwidths scaled."""
    nodes = tuple(
        replace(
            node,
            intra_bandwidth=node.intra_bandwidth * within,
            network_bandwidth=node.network_bandwidth * between,
        )
        for node in cluster.nodes
    )
    return replace(cluster, nodes=nodes)


def slots(plan: Plan) -> int:
    """Passes that follow each other in the longest replica: 2 (M + S - 1), chunks counted apart."""
    return max(
        2 * (replica.steps * len(replica.stages[0].layers) + len(replica.stages) - 1)
        for replica in plan.replicas
    )


def predicted_seconds(plan: Plan, workload: Workload, constants: Constants) -> float:
    """Seconds per iteration with these constants."""
    cluster = scaled(workload.cluster, constants.within, constants.between)
    bare = replay(plan, replace(workload, cluster=cluster)).seconds
    return bare + constants.slot_seconds * slots(plan)


def calibrate(runs: Sequence[MeasuredRun], workload: Workload) -> Estimate:
    """Estimate the constants, and judge them by runs left out; raises InputError as `replay`
    does."""
    if not runs:
        raise InputError("no run", expected="at least one measured run")
    measured = np.array([run.seconds for run in runs])
    before = np.array([predicted_seconds(run.plan, workload, Constants()) for run in runs])
    free = ["slot_seconds"]
    for name, halved in (("between", Constants(between=0.5)), ("within", Constants(within=0.5))):
        slower = np.array([predicted_seconds(run.plan, workload, halved) for run in runs])
        if (slower > (1 + MATTERS) * before).any():
            free.insert(0, name)
    needed = 2 * len(free) + 1
    if len(runs) < needed:
        what = ", ".join(free)
        reason = f"{len(runs)} runs are too few to tell {what}: at least {needed} are needed"
        return Estimate(None, reason, tuple(before), ())
    surface = Surface.of(runs, workload, free)
    everything = np.arange(len(runs))
    constants = surface.fit(everything)
    left_out = np.array(
        [surface.seconds(surface.fit(everything[everything != i]))[i] for i in everything]
    )
    error_before, error_left_out = (
        float(np.mean(np.abs(seconds / measured - 1))) for seconds in (before, left_out)
    )
    if error_left_out > BETTER * error_before:
        reason = (
            "runs left out are predicted hardly better with constants "
            f"({100 * error_left_out:.3g} % off) than without ({100 * error_before:.3g} %)"
        )
        return Estimate(None, reason, tuple(before), tuple(left_out))
    calibration = Calibration(
        cluster=workload.cluster.name,
        runs=len(runs),
        within=constants.within,
        between=constants.between,
        slot_seconds=constants.slot_seconds,
        framework_bytes=framework_bytes(runs, workload),
        fitted=free,
        error_before=error_before,
        error_left_out=error_left_out,
    )
    return Estimate(calibration, "", tuple(surface.seconds(constants)), tuple(left_out))


@dataclass(frozen=True)
class Surface:
    """Runs replayed over both bandwidths, without overhead. R runs.

    within [W], between [B]: shares, GRID or 1 alone. bare [R, W, B]: seconds. slots, measured [R].
    """

    within: Floats
    between: Floats
    bare: Floats
    slots: Floats
    measured: Floats

    @classmethod
    def of(cls, runs: Sequence[MeasuredRun], workload: Workload, free: Sequence[str]) -> Surface:
        """Replay every run at every point of the free bandwidths."""
        within, between = (GRID if name in free else np.ones(1) for name in ("within", "between"))
        bare = [
            [
                [predicted_seconds(run.plan, workload, Constants(w, b)) for b in between]
                for w in within
            ]
            for run in runs
        ]
        return cls(
            within,
            between,
            np.array(bare),
            np.array([slots(run.plan) for run in runs], float),
            np.array([run.seconds for run in runs]),
        )

    def bare_seconds(self, within: Floats, between: Floats) -> Floats:
        """[R, len(within), len(between)] seconds: straight lines over 1/bandwidth."""
        seconds: Floats = np.einsum(
            "xw,rwb,yb->rxy",
            _weights(self.within, within),
            self.bare,
            _weights(self.between, between),
        )
        return seconds

    def seconds(self, constants: Constants) -> Floats:
        """[R] with these constants."""
        bare = self.bare_seconds(np.array([constants.within]), np.array([constants.between]))[
            :, 0, 0
        ]
        return np.asarray(bare + constants.slot_seconds * self.slots)

    def fit(self, chosen: NDArray[np.intp]) -> Constants:
        """The constants with the least squared relative error over the chosen runs."""
        within, between = (
            np.geomspace(axis[0], axis[-1], POINTS if len(axis) > 1 else 1)
            for axis in (self.within, self.between)
        )
        best = Constants()
        for _ in range(REFINED):
            relative = (
                self.bare_seconds(within, between)[chosen] / self.measured[chosen, None, None]
            )
            each = (self.slots / self.measured)[chosen, None, None]
            overhead = np.maximum((each * (1 - relative)).sum(0) / (each**2).sum(), 0.0)
            error = ((relative + overhead * each - 1) ** 2).sum(0)
            i, j = np.unravel_index(np.argmin(error), error.shape)
            best = Constants(float(within[i]), float(between[j]), float(overhead[i, j]))
            within, between = _around(within, int(i)), _around(between, int(j))
        return best


def _weights(axis: Floats, values: Floats) -> Floats:
    """[values, axis] shares of the axis's points in each value, linear in 1/value."""
    return np.stack([np.interp(-1 / values, -1 / axis, unit) for unit in np.eye(len(axis))], axis=1)


def _around(values: Floats, place: int) -> Floats:
    """As many values between the neighbours of one of them."""
    low, high = values[max(place - 1, 0)], values[min(place + 1, len(values) - 1)]
    return np.geomspace(low, high, len(values))


def framework_bytes(runs: Sequence[MeasuredRun], workload: Workload) -> float | None:
    """The median of what runs held beside what is predicted; None where no run tells."""
    beside = sorted(
        run.peak_bytes - max(replay(run.plan, workload).peak_bytes)
        for run in runs
        if run.peak_bytes is not None
    )
    return max(beside[len(beside) // 2], 0.0) if beside else None
