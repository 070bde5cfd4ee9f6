"""Estimates a few physical constants from measured runs, and decides whether to trust them.

Constants
- compute: a factor of the seconds that the layers take on a device, for each device type.
- host: a factor of the seconds that the host takes to launch the layers' kernels, where the
  profile has these seconds.
- within, between: effective bandwidth of the links within and between nodes, as a share of the
  bandwidth in the cluster file.
- slot_seconds: seconds that every forward or backward pass of a stage takes in addition to its
  layers; only where the profile does not have the host's seconds.
- framework_bytes: bytes that framework and driver occupy on every device.

Model. T = seconds of the replay with these constants + slot_seconds * slots, where
slots = 2 (M + S - 1) for M micro-batches and S stages of the longest replica.

Fit. Gauss-Newton steps on ln(measured / predicted) find the logarithms of the constants. A normal
prior around no change keeps a constant near 1 that the runs hardly determine (ridge regression;
Hoerl and Kennard 1970).

Trust. A constant is refused if too few runs depend on it, if it does not improve the prediction of
runs left out, or if its posterior deviation is too large. K constants need 2 K + 1 runs. Each run
is left out once, and the linearised fit of the other runs predicts it. The constants are kept if
the error of these predictions is lower than the error without calibration, by more than the
standard error of the difference.
"""

import os
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hetplan.errors import require
from hetplan.plans.plan import Plan, load_plan, parse_plan
from hetplan.profiling.profiles.profile import Profile, ProfileTable
from hetplan.profiling.rates.collectives import with_intra_bandwidth
from hetplan.profiling.rates.times import together
from hetplan.profiling.workload import Workload
from hetplan.replays.replay import replay
from hetplan.schema import Bytes, Document, Foreign, Name, NonNegative, read_foreign

Floats = NDArray[np.float64]
Share = Annotated[float, Field(gt=0, le=100)]
# Names of the constants; COMPUTE is followed by the device type.
COMPUTE, HOST, WITHIN, BETWEEN, SLOT = "compute ", "host", "within", "between", "slot_seconds"


@dataclass(frozen=True)
class Rules:
    """The numbers by which constants are fitted and refused. No published source gives them."""

    noise: float = 0.02
    """Least standard deviation of ln(seconds) over repeated runs; where the fit leaves larger
    residuals, their deviation counts instead."""
    prior: float = 0.5
    """Standard deviation of a constant's logarithm before any run is seen (a factor of 1.6)."""
    moves: float = 0.03
    """Least change of ln(seconds) per change of ln(constant) with which a run depends on a
    constant."""
    runs: int = 3
    """Least number of runs that must depend on a constant."""
    certain: float = 0.25
    """Largest posterior deviation of a kept constant's logarithm."""
    helps: float = 0.97
    """Largest ratio of the errors of runs left out, with one more constant and without it, for
    which the constant is added."""
    surely: float = 1.0
    """Number of standard errors by which runs left out must be predicted better with the constants
    than without."""
    steps: int = 6
    """Largest number of Gauss-Newton steps."""
    largest: float = 0.7
    """Longest step of a constant's logarithm."""
    difference: float = 0.1
    """Change of a constant's logarithm in the finite differences."""


RULES = Rules()


class Calibration(Document):
    """The file of constants that `hetplan calibrate` writes, with the errors of the predicted
    seconds. An error is the mean of |predicted / measured - 1| over the runs."""

    format: Literal["hetplan-calibration"] = "hetplan-calibration"
    version: Literal[1] = 1
    cluster: Name
    runs: Annotated[int, Field(ge=1)]
    """Number of measured runs."""
    compute: dict[Name, Share] = Field(default_factory=dict)
    """Device type -> factor."""
    host: Share = 1.0
    within: Share = 1.0
    between: Share = 1.0
    slot_seconds: NonNegative = 0.0
    framework_bytes: NonNegative | None = None
    """None: no run has measured its memory."""
    fitted: list[Name]
    """Names of the fitted constants."""
    refused: dict[Name, Name] = Field(default_factory=dict)
    """Refused constant -> reason."""
    error_before: NonNegative
    """Error without calibration."""
    error_left_out: NonNegative | None
    """Error of runs that the fit of the other runs predicts."""

    def values(self) -> dict[str, float]:
        """Name of a constant -> its value, as `predicted_seconds` takes them."""
        return {
            HOST: self.host,
            WITHIN: self.within,
            BETWEEN: self.between,
            SLOT: self.slot_seconds,
            **{COMPUTE + kind: factor for kind, factor in self.compute.items()},
        }

    def adjusted(self, workload: Workload) -> Workload:
        """The workload with the calibrated times, links and reserved memory. `slot_seconds` has no
        place in a workload, and is left out."""
        changed = adjusted(workload, self.values())
        if self.framework_bytes is None:
            return changed
        return replace(changed, reserved_bytes=self.framework_bytes)


@dataclass(frozen=True)
class MeasuredRun:
    """A plan that a user ran, and what was measured."""

    plan: Plan
    seconds: float  # measured seconds of an iteration
    peak_bytes: float | None  # most bytes on the fullest device; None: not measured
    where: str  # name of the file, for errors


@dataclass(frozen=True)
class Estimate:
    """The result of `calibrate`."""

    calibration: Calibration | None  # None: it cannot be trusted
    reason: str  # why it cannot be trusted; empty where it can
    # [run] predicted seconds; with the constants where there is a calibration
    predictions: tuple[float, ...]
    # [run] seconds predicted by the fit of the other runs; empty where no constant was fitted
    left_out: tuple[float, ...]


class MeasuredFile(Foreign):
    """A user's file of one measured run."""

    plan: dict[str, Any] | str  # the plan, or the name of its file relative to this file
    seconds: Annotated[float, Field(ge=1e-9, le=1e9)]  # measured seconds of an iteration
    peak_bytes: Annotated[Bytes, Field(ge=1)] | None = None  # most bytes on the fullest device


def load_measured_run(path: str | os.PathLike[str]) -> MeasuredRun:
    """The run in a file as `MeasuredFile` describes it. Raises InputError."""
    file = read_foreign(MeasuredFile, path)
    where = os.fspath(path)
    if isinstance(file.plan, str):
        plan = load_plan(Path(path).parent / file.plan)
    else:
        plan = parse_plan(file.plan, where=f"{where}: plan")
    return MeasuredRun(plan, file.seconds, file.peak_bytes, where)


def adjusted(workload: Workload, values: Mapping[str, float]) -> Workload:
    """The workload with layer times and bandwidths multiplied by the constants `values`. A constant
    without a value is 1."""
    within, between = values.get(WITHIN, 1.0), values.get(BETWEEN, 1.0)
    nodes = tuple(
        replace(
            with_intra_bandwidth(node, node.intra_bandwidth * within),
            network_bandwidth=node.network_bandwidth * between,
            flow=node.flow * between,
        )
        for node in workload.cluster.nodes
    )
    tables = [
        scaled(table, values.get(COMPUTE + table.device, 1.0), values.get(HOST, 1.0))
        for table in workload.profile.tables
    ]
    return replace(
        workload,
        cluster=replace(workload.cluster, nodes=nodes),
        profile=Profile(**{**dict(workload.profile), "tables": tables}),
    )


def scaled(table: ProfileTable, compute: float, host: float) -> ProfileTable:
    """The table with the device's part of its seconds times `compute`, and the host's part times
    `host`. `profiling.rates.times.together` adds up the same two parts."""
    changes: dict[str, list[float]] = {}
    for direction in ("forward", "backward"):
        seconds = np.array(getattr(table, f"{direction}_seconds"))
        launching = np.array(getattr(table, f"{direction}_host_seconds") or np.zeros_like(seconds))
        device = np.sqrt(np.maximum(seconds**2 - launching**2, 0.0))
        if launching.any():
            changes[f"{direction}_host_seconds"] = (host * launching).tolist()
        changes[f"{direction}_seconds"] = together(compute * device, host * launching).tolist()
    return table.model_copy(update=changes)


def slots(plan: Plan) -> int:
    """Number of passes that follow each other in the longest replica: 2 (M + S - 1). Each model
    chunk of a stage takes every micro-batch in a pass of its own."""
    return max(
        2 * (replica.steps * len(replica.stages[0].layers) + len(replica.stages) - 1)
        for replica in plan.replicas
    )


def predicted_seconds(plan: Plan, workload: Workload, values: Mapping[str, float]) -> float:
    """Predicted seconds of an iteration with the constants `values`."""
    replayed = replay(plan, adjusted(workload, values)).seconds
    return replayed + values.get(SLOT, 0.0) * slots(plan)


def candidates(workloads: Sequence[Workload]) -> list[str]:
    """The names of the constants on which runs of these workloads can depend."""
    device_types = {name: None for workload in workloads for name in workload.cluster.types}
    has_host_seconds = any(t.forward_host_seconds for w in workloads for t in w.profile.tables)
    of_launches = HOST if has_host_seconds else SLOT
    return [*(COMPUTE + name for name in device_types), of_launches, WITHIN, BETWEEN]


@dataclass
class Fit:
    """The fit of K constants to R measured runs, linearised at the present constants."""

    runs: Sequence[MeasuredRun]  # [R]
    workloads: Sequence[Workload]  # [R]
    names: list[str]  # [K]
    rules: Rules

    def __post_init__(self) -> None:
        # [R] ln(measured seconds)
        self.measured = np.log([run.seconds for run in self.runs])
        # the unit of slot_seconds in x
        self.slot = float(np.median([run.seconds / slots(run.plan) for run in self.runs]))
        # [K] logarithms of the constants; for slot_seconds its value divided by `slot`
        self.x = np.zeros(len(self.names))
        # (run, names and values of the constants it can depend on) -> ln(predicted seconds)
        self.cache: dict[tuple[int, tuple[tuple[str, float], ...]], float] = {}
        self.linearise()

    def values(self, x: Floats) -> dict[str, float]:
        """Name of a constant -> its value, for x [K]."""
        return {
            name: float(part * self.slot if name == SLOT else np.exp(part))
            for name, part in zip(self.names, x, strict=True)
        }

    def predicted(self, x: Floats) -> Floats:
        """[R] ln(predicted seconds) for x [K]. A run is replayed only where a constant has changed
        on which it can depend."""
        values, logarithms = self.values(x), []
        for i, (run, workload) in enumerate(zip(self.runs, self.workloads, strict=True)):
            of_devices = {COMPUTE + name for name in workload.cluster.types}
            relevant = {
                name: value
                for name, value in values.items()
                if name in of_devices or not name.startswith(COMPUTE)
            }
            key = i, tuple(relevant.items())
            if key not in self.cache:
                seconds = predicted_seconds(run.plan, workload, relevant)
                self.cache[key] = float(np.log(seconds))
            logarithms.append(self.cache[key])
        return np.array(logarithms)

    def linearise(self, *, slopes: bool = True) -> None:
        """Set `fitted` [R], ln(predicted seconds) at x; `slopes` [R, K], the change of `fitted` per
        change of x; and `noise`. slopes: False keeps the earlier slopes."""
        self.fitted = self.predicted(self.x)
        step = self.rules.difference
        if slopes:
            units = np.eye(len(self.names))
            changes = [self.predicted(self.x + step * unit) - self.fitted for unit in units]
            self.slopes = np.array(changes).reshape(len(self.names), len(self.runs)).T / step
        self.estimate_noise()

    def estimate_noise(self) -> None:
        """Set `noise`, the standard deviation of ln(seconds): of the residuals that a linear step
        leaves, and at least the rules' `noise`."""
        self.noise = self.rules.noise
        all_runs = np.ones(len(self.runs))
        step, _ = self.step(all_runs)
        residuals = self.measured - self.fitted - self.slopes @ step
        self.noise = max(self.rules.noise, float(np.std(residuals)))

    def step(self, chosen: Floats) -> tuple[Floats, Floats]:
        """The Gauss-Newton step [K] for some runs, and the covariance [K, K] of the posterior.
        chosen [R]: 1 for each of these runs, 0 for the others."""
        weighted = self.slopes * chosen[:, None] / self.noise**2
        precision = weighted.T @ self.slopes + np.eye(len(self.names)) / self.rules.prior**2
        gradient = weighted.T @ (self.measured - self.fitted) - self.x / self.rules.prior**2
        covariance = np.asarray(np.linalg.inv(precision), dtype=np.float64)
        return covariance @ gradient, covariance

    def solve(self) -> None:
        """Take Gauss-Newton steps until they are small. Slopes are computed again only after a step
        that moved a constant far."""
        all_runs = np.ones(len(self.runs))
        for _ in range(self.rules.steps):
            step, _ = self.step(all_runs)
            step = np.clip(step, -self.rules.largest, self.rules.largest)
            before, self.x = self.x, self.x + step
            if SLOT in self.names:
                slot_index = self.names.index(SLOT)
                self.x[slot_index] = max(self.x[slot_index], 0.0)  # a pass adds no negative seconds
            moved = np.abs(self.x - before).max(initial=0.0)
            self.linearise(slopes=moved > self.rules.difference)
            if moved < self.rules.difference / 10:  # small beside the errors of the slopes
                break

    def left_out(self) -> Floats:
        """[R] seconds of each run, predicted from the fit of all other runs, which is linearised
        around the fit of all runs."""
        steps = [self.step(chosen)[0] for chosen in 1 - np.eye(len(self.runs))]
        logarithms = self.fitted + (self.slopes * np.array(steps)).sum(axis=1)
        return np.asarray(np.exp(logarithms))

    def left_out_error(self) -> float:
        """The mean of |predicted / measured - 1| over the runs, each left out of its fit."""
        return float(np.mean(np.abs(self.left_out() / np.exp(self.measured) - 1)))

    def with_constants(self, names: Sequence[str]) -> "Fit":
        """A copy of this fit with only the constants `names`, before any step."""
        fit = copy(self)
        columns = [self.names.index(name) for name in names]
        fit.names = list(names)
        fit.x = self.x[columns]
        fit.slopes = self.slopes[:, columns]
        fit.estimate_noise()
        return fit


def fitted(fit: Fit) -> tuple[Fit, dict[str, str]]:
    """(the fit of the constants that are kept, refused constant -> reason)."""
    rules = fit.rules
    dependent_runs = (np.abs(fit.slopes) >= rules.moves).sum(axis=0)  # [K]
    refused = {
        name: f"{count} runs depend on it, expected {rules.runs}"
        for name, count in zip(fit.names, dependent_runs, strict=True)
        if count < rules.runs
    }
    while True:
        best = selected(fit, [name for name in fit.names if name not in refused])
        best.solve()
        _, covariance = best.step(np.ones(len(best.runs)))
        deviation = np.sqrt(np.diag(covariance))  # [K] of each constant's logarithm
        if deviation.max(initial=0.0) <= rules.certain:
            break
        worst = int(np.argmax(deviation))
        refused[best.names[worst]] = f"uncertain by a factor of {np.exp(deviation[worst]):.3g}"
    others = [name for name in fit.names if name not in best.names and name not in refused]
    return best, refused | dict.fromkeys(others, "runs left out are no better with it, or too few")


def selected(fit: Fit, free: Sequence[str]) -> Fit:
    """The fit of some of the constants `free`, chosen greedily: each turn adds the constant with
    which runs left out are predicted best, while it improves the prediction enough."""
    best = fit.with_constants([])
    # with one more constant than `best` has, K + 1 constants need 2 (K + 1) + 1 runs
    while 2 * len(best.names) + 3 <= len(fit.runs):
        tried = [fit.with_constants([*best.names, name]) for name in free if name not in best.names]
        if not tried:
            break
        following = min(tried, key=Fit.left_out_error)
        if following.left_out_error() > fit.rules.helps * best.left_out_error():
            break
        best = following
    return best


def calibrate(
    runs: Sequence[MeasuredRun], workloads: Sequence[Workload], rules: Rules = RULES
) -> Estimate:
    """Estimate the constants from the runs, and decide by runs left out whether to trust them.

    workloads: one for each run. Raises InputError as `replay` does.
    """
    require(runs, "no run", expected="at least one measured run")
    start = Fit(runs, workloads, candidates(workloads), rules)
    before = np.exp(start.fitted)
    fit, refused = fitted(start)
    if not fit.names:
        what = f"{len(runs)} runs are too few" if len(runs) < rules.runs else "runs do not tell"
        reason = f"{what}: {'; '.join(f'{name}: {why}' for name, why in refused.items())}"
        return Estimate(None, reason, tuple(before), ())
    left_out = fit.left_out()
    measured = np.exp(start.measured)
    errors_before = np.abs(before / measured - 1)  # [R]
    errors_left_out = np.abs(left_out / measured - 1)  # [R]
    error_before, error_left_out = float(errors_before.mean()), float(errors_left_out.mean())
    gain = errors_before - errors_left_out
    standard_error = gain.std(ddof=1) / np.sqrt(len(runs))
    if gain.mean() <= rules.surely * standard_error:
        return Estimate(
            None,
            "runs left out are predicted hardly better with constants "
            f"({100 * error_left_out:.3g} % off) than without ({100 * error_before:.3g} %)",
            tuple(before),
            tuple(left_out),
        )
    values = fit.values(fit.x)
    calibration = Calibration(
        cluster=workloads[0].cluster.name,
        runs=len(runs),
        compute={n.removeprefix(COMPUTE): v for n, v in values.items() if n.startswith(COMPUTE)},
        host=values.get(HOST, 1.0),
        within=values.get(WITHIN, 1.0),
        between=values.get(BETWEEN, 1.0),
        slot_seconds=values.get(SLOT, 0.0),
        framework_bytes=framework_bytes(runs, workloads),
        fitted=fit.names,
        refused=refused,
        error_before=error_before,
        error_left_out=error_left_out,
    )
    return Estimate(calibration, "", tuple(np.exp(fit.fitted)), tuple(left_out))


def framework_bytes(runs: Sequence[MeasuredRun], workloads: Sequence[Workload]) -> float | None:
    """The upper median, over the runs, of the measured peak bytes less the predicted peak bytes,
    at least 0. None where no run has measured its memory."""
    differences = sorted(
        run.peak_bytes - max(replay(run.plan, workload).peak_bytes)
        for run, workload in zip(runs, workloads, strict=True)
        if run.peak_bytes is not None
    )
    return max(differences[len(differences) // 2], 0.0) if differences else None
