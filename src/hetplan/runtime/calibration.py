"""A few physical constants estimated from a user's own measured runs, and whether that can be
trusted.

Constants  within, between   effective bandwidth of links within and between nodes, as a share of
           the cluster file's slot_seconds      what every forward or backward pass of a stage takes
           beside its layers framework_bytes   what framework and driver hold on every device
Model      T = replay with both bandwidths scaled + slot_seconds * slots, slots = 2 (M + S - 1) of
the longest replica.
Fit        least squares of predicted / measured - 1, one bandwidth after the other (golden
           section), until none moves, each with the overhead of a slot that is best beside it
           (which has a closed form). Runs are replayed on a grid of bandwidths, with straight lines
           over 1/bandwidth between. A bandwidth that moves no run's prediction by a percent when
           halved keeps its value.
Trust      leave one run out, fit the others, predict it. The constants are kept when there are at
           least two runs for each of them and one more, and the error of the runs left out is a
           tenth lower than without calibration.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from hetplan.errors import InputError
from hetplan.profiling.cluster import Cluster
from hetplan.profiling.foreign import read_foreign
from hetplan.profiling.workload import Workload
from hetplan.runtime.plan import Plan, load_plan, parse_plan
from hetplan.runtime.replay import replay
from hetplan.schema import Document, Name, NonNegative

NAMES = ("within", "between", "slot_seconds")
# Bandwidths reach between a twentieth and a bit more than the figure given.
RANGES: Mapping[str, tuple[float, float]] = {"within": (0.05, 1.5), "between": (0.05, 1.5)}
USUAL: Mapping[str, float] = {"within": 1.0, "between": 1.0, "slot_seconds": 0.0}
MATTERS = 0.01
# error of runs left out, of what it is without calibration: less is no accident of the noise
BETTER = 0.9
GRID = (0.05, 0.1, 0.2, 0.35, 0.6, 1.0, 1.5)  # shares of a bandwidth at which runs are replayed
GOLDEN = (math.sqrt(5) - 1) / 2
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
class Found:
    """calibration: None where it cannot be trusted, and reason then says why."""

    calibration: Calibration | None
    reason: str
    predictions: tuple[float, ...]
    left_out: tuple[float, ...]


def load_measured_run(path: str | os.PathLike[str]) -> MeasuredRun:
    """{"plan": a plan or its file's name, "seconds", optionally "peak_bytes"}; raises
    InputError."""
    document = read_foreign(path)
    entry = document["plan"]
    if isinstance(entry.value, str):
        plan = load_plan(Path(path).parent / entry.value)
    else:
        plan = parse_plan(entry.value, where=f"{os.fspath(path)}: plan")
    peak = document.get("peak_bytes")
    return MeasuredRun(
        plan,
        document["seconds"].number(1e-9, 1e9),
        None if peak is None or peak.value is None else peak.number(1.0),
        os.fspath(path),
    )


load_calibration = Calibration.load


def scaled(cluster: Cluster, within: float, between: float) -> Cluster:
    """The cluster with its links' bandwidths scaled."""
    nodes = tuple(
        replace(
            n,
            intra_bandwidth=n.intra_bandwidth * within,
            network_bandwidth=n.network_bandwidth * between,
        )
        for n in cluster.nodes
    )
    return replace(cluster, nodes=nodes)


def slots(plan: Plan) -> int:
    """Passes that follow each other in the longest replica: 2 (M + S - 1), chunks counted apart."""
    longest = 0
    for replica in plan.replicas:
        count = sum(batch.count for batch in replica.micro_batches) * len(replica.stages[0].layers)
        longest = max(longest, 2 * (count + len(replica.stages) - 1))
    return longest


def predicted_seconds(plan: Plan, workload: Workload, constants: Mapping[str, float]) -> float:
    """Seconds per iteration with these constants."""
    held = replace(
        workload, cluster=scaled(workload.cluster, constants["within"], constants["between"])
    )
    return replay(plan, held).seconds + constants["slot_seconds"] * slots(plan)


def calibrate(runs: Sequence[MeasuredRun], workload: Workload) -> Found:
    """Estimate the constants, and judge them by runs left out; raises InputError as `replay`
    does."""
    if not runs:
        raise InputError("no run", expected="at least one measured run")
    surfaces = [Surface(run.plan, workload) for run in runs]

    def predict(i: int, constants: Mapping[str, float]) -> float:
        return surfaces[i].seconds(constants)

    everything = range(len(runs))
    before = tuple(predict(i, USUAL) for i in everything)
    error_before = _error(before, runs)
    free = [name for name in NAMES if _matters(name, everything, predict)]
    needed = 2 * len(free) + 1
    framework = _framework(runs, workload)
    if len(runs) < needed:
        what = ", ".join(free)
        reason = f"{len(runs)} runs are too few to tell {what}: at least {needed} are needed"
        return Found(None, reason, before, ())
    constants = _fit(list(everything), free, runs, predict)
    left_out = tuple(
        predict(i, _fit([j for j in everything if j != i], free, runs, predict)) for i in everything
    )
    error_left_out = _error(left_out, runs)
    if error_left_out > BETTER * error_before:
        reason = (
            f"runs left out are predicted hardly better with constants ({100 * error_left_out:.3g} % off) than "
            f"without ({100 * error_before:.3g} %)"
        )
        return Found(None, reason, before, left_out)
    found = Calibration(
        cluster=workload.cluster.name, runs=len(runs), within=constants["within"],
        between=constants["between"], slot_seconds=constants["slot_seconds"], framework_bytes=framework, fitted=free,
        error_before=error_before, error_left_out=error_left_out,
    )  # fmt: skip
    return Found(found, "", tuple(predict(i, constants) for i in everything), left_out)


class Surface:
    """A plan's seconds over both bandwidths: replayed on the grid where asked, lines over
    1/bandwidth between."""

    def __init__(self, plan: Plan, workload: Workload) -> None:
        self.plan, self.workload, self.slots = plan, workload, slots(plan)
        self._known: dict[tuple[float, float], float] = {}

    def seconds(self, constants: Mapping[str, float]) -> float:
        """Seconds per iteration with these constants."""
        total = 0.0
        for within, share in _corners(constants["within"]):
            for between, other in _corners(constants["between"]):
                total += share * other * self._at(within, between)
        return total + constants["slot_seconds"] * self.slots

    def _at(self, within: float, between: float) -> float:
        if (within, between) not in self._known:
            links = scaled(self.workload.cluster, within, between)
            self._known[within, between] = replay(
                self.plan, replace(self.workload, cluster=links)
            ).seconds
        return self._known[within, between]


def _corners(value: float) -> list[tuple[float, float]]:
    """Points of the grid around a value and their shares, which are linear in 1/value."""
    at = min(max(bisect_left(GRID, value), 1), len(GRID) - 1)
    low, high = GRID[at - 1], GRID[at]
    share = (1 / low - 1 / value) / (1 / low - 1 / high)
    return [(p, w) for p, w in ((low, 1 - share), (high, share)) if w > 1e-12]


Predict = Callable[[int, Mapping[str, float]], float]


def _error(predictions: Sequence[float], runs: Sequence[MeasuredRun]) -> float:
    """Mean absolute relative error."""
    return sum(abs(p / run.seconds - 1) for p, run in zip(predictions, runs, strict=True)) / len(
        runs
    )


def _matters(name: str, chosen: Sequence[int], predict: Predict) -> bool:
    """Whether halving a bandwidth, or a slot's overhead of a percent of a slot, moves a prediction
    by a percent."""
    if name == "slot_seconds":
        return True
    return any(predict(i, {**USUAL, name: 0.5}) > (1 + MATTERS) * predict(i, USUAL) for i in chosen)


def _fit(
    chosen: Sequence[int], free: Sequence[str], runs: Sequence[MeasuredRun], predict: Predict
) -> dict[str, float]:
    """The constants with the least squared relative error over the chosen runs."""

    def judged(within: float, between: float) -> tuple[float, dict[str, float]]:
        """The least error at these bandwidths, and the constants: the best overhead of a slot
        follows from them."""
        rows = []
        for i in chosen:
            bare = (
                predict(i, {"within": within, "between": between, "slot_seconds": 0.0})
                / runs[i].seconds
            )
            rows.append((bare, slots(runs[i].plan) / runs[i].seconds))
        overhead = max(sum(n * (1 - t) for t, n in rows) / sum(n * n for _, n in rows), 0.0)
        error = sum((t + overhead * n - 1) ** 2 for t, n in rows)
        return error, {"within": within, "between": between, "slot_seconds": overhead}

    def along(constants: Mapping[str, float], name: str) -> Callable[[float], float]:
        fixed = {key: constants[key] for key in ("within", "between")}
        return lambda x: judged(**{**fixed, name: x})[0]

    value, best = judged(USUAL["within"], USUAL["between"])
    for _ in range(12):
        start = value
        for name in (name for name in free if name in RANGES):
            at = _golden(along(best, name), *RANGES[name])
            fixed = {key: best[key] for key in ("within", "between")}
            error, constants = judged(**{**fixed, name: at})
            if error < value:
                value, best = error, constants
        if value > start * (1 - 1e-4):
            break
    return best


def _golden(loss: Callable[[float], float], low: float, high: float) -> float:
    """Where a function of one number is least, by golden section on the logarithm; 30
    evaluations."""
    a, b = math.log(low), math.log(high)
    x, y = b - GOLDEN * (b - a), a + GOLDEN * (b - a)
    fx, fy = loss(math.exp(x)), loss(math.exp(y))
    for _ in range(28):
        if fx <= fy:
            b, y, fy = y, x, fx
            x = b - GOLDEN * (b - a)
            fx = loss(math.exp(x))
        else:
            a, x, fx = x, y, fy
            y = a + GOLDEN * (b - a)
            fy = loss(math.exp(y))
    return math.exp((a + b) / 2)


def _framework(runs: Sequence[MeasuredRun], workload: Workload) -> float | None:
    """The median of what runs held beside what is predicted; None where no run tells."""
    beside = sorted(
        run.peak_bytes - max(replay(run.plan, workload).peak_bytes)
        for run in runs
        if run.peak_bytes is not None
    )
    return max(beside[len(beside) // 2], 0.0) if beside else None
