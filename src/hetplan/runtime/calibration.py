"""A few physical constants estimated from measured runs, and whether that can be trusted.

- compute: factors on the device seconds of each device type's layers; host: on what the host takes
  to launch them, where the profile says that; within, between: effective bandwidth of links within
  and between nodes, as a share of the cluster's. slot_seconds: what every forward or backward pass
  of a stage takes beside its layers; only where the profile does not know the host.
  framework_bytes: what framework and driver hold on every device.
- Model: T = replay with these constants + slot_seconds * slots, slots = 2 (M + S - 1) of the
  longest replica.
- Fit: the constants' logarithms by Gauss-Newton steps on ln(measured / predicted), with a normal
  prior around no change, so that what the runs hardly tell stays near it (ridge regression; Hoerl
  and Kennard 1970).
- Trust: a constant is refused that moves too few runs, that does not help runs left out, or that
  the runs leave uncertain (posterior deviation); the runs must be twice the constants and one more.
  Each run is left out once and
  predicted from the others by the linearised fit; the constants are kept where that error is lower
  than without calibration by more than its standard error.
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
from hetplan.profiling.rates.times import together
from hetplan.profiling.workload import Workload
from hetplan.replays.replay import replay
from hetplan.schema import Bytes, Document, Foreign, Name, NonNegative, read_foreign

Floats = NDArray[np.float64]
Share = Annotated[float, Field(gt=0, le=100)]
COMPUTE, HOST, WITHIN, BETWEEN, SLOT = "compute ", "host", "within", "between", "slot_seconds"


@dataclass(frozen=True)
class Rules:
    """How constants are fitted and when they are refused; none comes from a published set.

    noise: of repeated runs, as a logarithm; what the fit leaves, where that is more. prior:
    deviation of a constant's logarithm before any run is seen: a factor of 1.6. moves: change of
    ln(seconds) per change of ln(constant) from which on a run tells it; runs: that must. certain:
    largest posterior deviation of a kept constant's logarithm. helps: error of runs left out with
    one constant more, of what it is without. surely: standard errors by which
    runs left out must be better with constants than without. steps, largest: of Gauss-Newton, and
    the longest in logarithms. difference: of a constant's logarithm in the finite differences.
    """

    noise: float = 0.02
    prior: float = 0.5
    moves: float = 0.03
    runs: int = 3
    certain: float = 0.25
    helps: float = 0.97
    surely: float = 1.0
    steps: int = 6
    largest: float = 0.7
    difference: float = 0.1


RULES = Rules()


class Calibration(Document):
    """Constants, and the mean absolute error of seconds without them and, for runs left out, with
    them.

    compute: by device type. framework_bytes: null where no run tells its memory. refused: constants
    that the runs do not tell, with the reason.
    """

    format: Literal["hetplan-calibration"] = "hetplan-calibration"
    version: Literal[1] = 1
    cluster: Name
    runs: Annotated[int, Field(ge=1)]
    compute: dict[Name, Share] = Field(default_factory=dict)
    host: Share = 1.0
    within: Share = 1.0
    between: Share = 1.0
    slot_seconds: NonNegative = 0.0
    framework_bytes: NonNegative | None = None
    fitted: list[Name]
    refused: dict[Name, Name] = Field(default_factory=dict)
    error_before: NonNegative
    error_left_out: NonNegative | None

    def values(self) -> dict[str, float]:
        """Constants by name, as `predicted_seconds` takes them."""
        return {
            HOST: self.host,
            WITHIN: self.within,
            BETWEEN: self.between,
            SLOT: self.slot_seconds,
            **{COMPUTE + kind: factor for kind, factor in self.compute.items()},
        }

    def adjusted(self, workload: Workload) -> Workload:
        """The workload with these times, links and memory; what passes take beside is not in it."""
        changed, held = adjusted(workload, self.values()), self.framework_bytes
        return changed if held is None else replace(changed, reserved_bytes=held)


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


class MeasuredFile(Foreign):
    """plan: a plan, or its file's name beside this file."""

    plan: dict[str, Any] | str
    seconds: Annotated[float, Field(ge=1e-9, le=1e9)]
    peak_bytes: Annotated[Bytes, Field(ge=1)] | None = None


def load_measured_run(path: str | os.PathLike[str]) -> MeasuredRun:
    """From a file as `MeasuredFile` describes; raises InputError."""
    file, where = read_foreign(MeasuredFile, path), os.fspath(path)
    return MeasuredRun(
        load_plan(Path(path).parent / file.plan)
        if isinstance(file.plan, str)
        else parse_plan(file.plan, where=f"{where}: plan"),
        file.seconds,
        file.peak_bytes,
        where,
    )


def adjusted(workload: Workload, values: Mapping[str, float]) -> Workload:
    """The workload with layer times and bandwidths scaled; a constant that is not named is 1."""
    within, between = values.get(WITHIN, 1.0), values.get(BETWEEN, 1.0)
    nodes = tuple(
        replace(
            node,
            intra_bandwidth=node.intra_bandwidth * within,
            network_bandwidth=node.network_bandwidth * between,
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
    """The table with the device's and the host's part of its seconds scaled."""
    changes: dict[str, list[float]] = {}
    for way in ("forward", "backward"):
        seconds = np.array(getattr(table, f"{way}_seconds"))
        launching = np.array(getattr(table, f"{way}_host_seconds") or np.zeros_like(seconds))
        device = np.sqrt(np.maximum(seconds**2 - launching**2, 0.0))
        if launching.any():
            changes[f"{way}_host_seconds"] = (host * launching).tolist()
        changes[f"{way}_seconds"] = together(compute * device, host * launching).tolist()
    return table.model_copy(update=changes)


def slots(plan: Plan) -> int:
    """Passes that follow each other in the longest replica: 2 (M + S - 1), chunks counted apart."""
    return max(
        2 * (replica.steps * len(replica.stages[0].layers) + len(replica.stages) - 1)
        for replica in plan.replicas
    )


def predicted_seconds(plan: Plan, workload: Workload, values: Mapping[str, float]) -> float:
    """Seconds per iteration with these constants."""
    return replay(plan, adjusted(workload, values)).seconds + values.get(SLOT, 0.0) * slots(plan)


def candidates(workloads: Sequence[Workload]) -> list[str]:
    """The constants that runs on these workloads could tell."""
    kinds = {kind: None for workload in workloads for kind in workload.cluster.types}
    knows_host = any(t.forward_host_seconds for w in workloads for t in w.profile.tables)
    return [*(COMPUTE + kind for kind in kinds), HOST if knows_host else SLOT, WITHIN, BETWEEN]


@dataclass
class Fit:
    """Constants of R runs. names [K]; x [K]: their logarithms, of slot_seconds its value in parts
    of `slot` seconds; fitted [R]: ln(predicted); slopes [R, K]: its change per change of x."""

    runs: Sequence[MeasuredRun]
    workloads: Sequence[Workload]
    names: list[str]
    rules: Rules

    def __post_init__(self) -> None:
        self.measured = np.log([run.seconds for run in self.runs])
        self.slot = float(np.median([run.seconds / slots(run.plan) for run in self.runs]))
        self.x = np.zeros(len(self.names))
        self.known: dict[tuple[int, tuple[tuple[str, float], ...]], float] = {}
        self.look()

    def values(self, x: Floats) -> dict[str, float]:
        """Constants by name."""
        return {
            name: float(part * self.slot if name == SLOT else np.exp(part))
            for name, part in zip(self.names, x, strict=True)
        }

    def predicted(self, x: Floats) -> Floats:
        """[R] ln(seconds); each run is replayed once for the same values of what it depends on."""
        values, logarithms = self.values(x), []
        for i, (run, workload) in enumerate(zip(self.runs, self.workloads, strict=True)):
            others = {COMPUTE + kind for kind in workload.cluster.types}
            own = {k: v for k, v in values.items() if k in others or not k.startswith(COMPUTE)}
            key = i, tuple(own.items())
            if key not in self.known:
                self.known[key] = float(np.log(predicted_seconds(run.plan, workload, own)))
            logarithms.append(self.known[key])
        return np.array(logarithms)

    def look(self, *, slopes: bool = True) -> None:
        """Predictions and slopes at x."""
        self.fitted, step = self.predicted(self.x), self.rules.difference
        if slopes:
            units = np.eye(len(self.names))
            changes = [self.predicted(self.x + step * unit) - self.fitted for unit in units]
            self.slopes = np.array(changes).reshape(len(self.names), len(self.runs)).T / step
        self.settle()

    def settle(self) -> None:
        """The noise is what a linear step leaves of the residuals."""
        self.noise, everything = self.rules.noise, np.ones(len(self.runs))
        left = self.measured - self.fitted - self.slopes @ self.step(everything)[0]
        self.noise = max(self.rules.noise, float(np.std(left)))

    def step(self, chosen: Floats) -> tuple[Floats, Floats]:
        """The Gauss-Newton step for the runs that are chosen [R] (1 or 0), and the posterior's
        covariance."""
        weighted = self.slopes * chosen[:, None] / self.noise**2
        precision = weighted.T @ self.slopes + np.eye(len(self.names)) / self.rules.prior**2
        gradient = weighted.T @ (self.measured - self.fitted) - self.x / self.rules.prior**2
        covariance = np.asarray(np.linalg.inv(precision), dtype=np.float64)
        return covariance @ gradient, covariance

    def solve(self) -> None:
        """Steps until they are small; slopes are taken anew where constants have moved far."""
        everything = np.ones(len(self.runs))
        for _ in range(self.rules.steps):
            step = np.clip(self.step(everything)[0], -self.rules.largest, self.rules.largest)
            before, self.x = self.x, self.x + step
            if SLOT in self.names:
                at = self.names.index(SLOT)
                self.x[at] = max(self.x[at], 0.0)
            moved = np.abs(self.x - before).max(initial=0.0)
            self.look(slopes=moved > self.rules.difference)
            if moved < self.rules.difference / 10:
                break

    def left_out(self) -> Floats:
        """[R] seconds of each run by the fit of the others, linearised around the fit of all."""
        steps = [self.step(chosen)[0] for chosen in 1 - np.eye(len(self.runs))]
        return np.asarray(np.exp(self.fitted + (self.slopes * np.array(steps)).sum(axis=1)))

    def off(self) -> float:
        """Mean absolute error of the runs left out."""
        return float(np.mean(np.abs(self.left_out() / np.exp(self.measured) - 1)))

    def only(self, names: Sequence[str]) -> "Fit":
        """The same with some of the constants, before any step."""
        fit, at = copy(self), [self.names.index(name) for name in names]
        fit.names, fit.x, fit.slopes = list(names), self.x[at], self.slopes[:, at]
        fit.settle()
        return fit


def fitted(fit: Fit) -> tuple[Fit, dict[str, str]]:
    """The fit of the constants that the runs tell, and the others with the reason."""
    rules = fit.rules
    tells = (np.abs(fit.slopes) >= rules.moves).sum(axis=0)
    refused = {
        name: f"{count} runs depend on it, expected {rules.runs}"
        for name, count in zip(fit.names, tells, strict=True)
        if count < rules.runs
    }
    while True:
        best = selected(fit, [name for name in fit.names if name not in refused])
        best.solve()
        # [K] posterior, of each constant's logarithm
        deviation = np.sqrt(np.diag(best.step(np.ones(len(best.runs)))[1]))
        if deviation.max(initial=0.0) <= rules.certain:
            break
        worst = int(np.argmax(deviation))
        refused[best.names[worst]] = f"uncertain by a factor of {np.exp(deviation[worst]):.3g}"
    others = [name for name in fit.names if name not in best.names and name not in refused]
    return best, refused | dict.fromkeys(others, "runs left out are no better with it, or too few")


def selected(fit: Fit, free: Sequence[str]) -> Fit:
    """One after the other the constant that helps runs left out most, while it helps."""
    best = fit.only([])
    while 2 * len(best.names) + 3 <= len(fit.runs):
        tried = [fit.only([*best.names, name]) for name in free if name not in best.names]
        if not tried or (next_one := min(tried, key=Fit.off)).off() > fit.rules.helps * best.off():
            break
        best = next_one
    return best


def calibrate(
    runs: Sequence[MeasuredRun], workloads: Sequence[Workload], rules: Rules = RULES
) -> Estimate:
    """Estimate the constants, and judge them by runs left out. workloads: of each run. Raises
    InputError as `replay` does."""
    require(runs, "no run", expected="at least one measured run")
    start = Fit(runs, workloads, candidates(workloads), rules)
    before = np.exp(start.fitted)
    fit, refused = fitted(start)
    if not fit.names:
        what = f"{len(runs)} runs are too few" if len(runs) < rules.runs else "runs do not tell"
        reason = f"{what}: {'; '.join(f'{name}: {why}' for name, why in refused.items())}"
        return Estimate(None, reason, tuple(before), ())
    left_out = fit.left_out()
    off, off_left_out = (
        np.abs(seconds / np.exp(start.measured) - 1) for seconds in (before, left_out)
    )
    error_before, error_left_out = float(off.mean()), float(off_left_out.mean())
    gain = off - off_left_out
    if gain.mean() <= rules.surely * gain.std(ddof=1) / np.sqrt(len(runs)):
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
    """The median of what runs held beside what is predicted; None where no run tells."""
    beside = sorted(
        run.peak_bytes - max(replay(run.plan, workload).peak_bytes)
        for run, workload in zip(runs, workloads, strict=True)
        if run.peak_bytes is not None
    )
    return max(beside[len(beside) // 2], 0.0) if beside else None
