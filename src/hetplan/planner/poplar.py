"""The strategy `poplar`: data parallelism with unequal shares of the batch under each ZeRO stage,
solved exactly and by the paper's algorithm.

Under ZeRO 2 the weights are gathered once per iteration, which takes the same seconds in every
plan. Poplar's problem leaves them out. Objective and bound of a candidate are those of its instance
plus these seconds, so that both are seconds per iteration.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from hetplan.errors import require
from hetplan.formulations import family
from hetplan.formulations.poplar.data import PoplarDecision
from hetplan.formulations.poplar.evaluate import pieces_of
from hetplan.formulations.poplar.pose import (
    Assumptions,
    NoStageFits,
    Posed,
    pose,
    pose_lowest_stage,
)
from hetplan.planner.candidate import Candidate, StrategyMethod, joined
from hetplan.planner.strategy import NoPlan, Problem, Strategy
from hetplan.plans.making import new_plan
from hetplan.plans.plan import MicroBatches, Plan, Replica, Stage
from hetplan.profiling.profiles.batch_curve import BatchCurve
from hetplan.profiling.profiles.measured_collectives import Collectives
from hetplan.profiling.workload import Workload
from hetplan.replays.model_states import STAGES
from hetplan.schema import StrictModel
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Run
from hetplan.text import seconds_text

ON_CURVES = "the iteration is that of the measured curves, not replayed"


class PoplarSettings(StrictModel):
    """The settings `--set poplar.NAME=VALUE`."""

    zero: Literal["all", "lowest", 0, 1, 2, 3] = "all"
    """ZeRO stages: all; the lowest at which every device can hold a sample (Algorithm 1); or one.
    """
    shards: Literal["equal", "memory"] = "equal"
    """Whether ZeRO's shards are equal or in proportion to the memory of each device."""
    curves: str | None = None
    """Paths of files of `hetplan profile batch-curve`, separated by commas, one per device type."""
    collectives: str | None = None
    """Path of a file of `hetplan profile collectives`, in place of the cluster's links."""

    def assumptions(self) -> Assumptions:
        """The assumptions of the problem, with the content of the files. Raises InputError."""
        curves: dict[str, BatchCurve] = {}
        paths = [path.strip() for path in (self.curves or "").split(",")]
        for path in filter(None, paths):
            curve = BatchCurve.load(path)
            first_of_device = curves.setdefault(curve.device, curve)
            require(
                first_of_device is curve,
                "second batch curve of a device type",
                where=path,
                got=curve.device,
            )
        measured = None
        if self.collectives is not None:
            measured = Collectives.load(self.collectives.strip())
        return Assumptions(self.shards, curves, measured)


@dataclass(frozen=True)
class Poplar(Strategy):
    """The strategy: data parallelism with unequal shares of the batch."""

    name = "poplar"
    methods = (StrategyMethod("auto", exact=True), StrategyMethod("paper", paper=True))
    Settings = PoplarSettings
    recomputes = True

    settings: PoplarSettings = field(default_factory=PoplarSettings)
    levels: tuple[int, ...] = STAGES  # ZeRO stages of the problems that may be posed

    def within_levels(self, levels: Sequence[int]) -> "Poplar":
        """The strategy that poses only problems of these ZeRO stages. The setting `lowest` stays as
        it is, because the paper's algorithm finds the stage."""
        return replace(self, levels=tuple(levels))

    def pose(self, workload: Workload, run: Run) -> "list[ZeroStageProblem]":
        """One problem for each ZeRO stage. Raises NoPlan where the lowest stage is wanted and none
        fits, and where the stage that is set is not among the allowed ones."""
        zero = self.settings.zero
        assumed = self.settings.assumptions()
        if zero == "lowest":
            try:
                return [ZeroStageProblem(workload, pose_lowest_stage(workload, assumed), assumed)]
            except NoStageFits as error:
                raise NoPlan("infeasible", str(error)) from None
        wanted = STAGES if zero == "all" else (zero,)
        stages = [stage for stage in wanted if stage in self.levels]
        if not stages:
            raise NoPlan("unknown", f"ZeRO {zero} is not among the levels asked for")
        return [
            ZeroStageProblem(workload, pose(workload, stage, assumed), assumed) for stage in stages
        ]


@dataclass(frozen=True)
class ZeroStageProblem(Problem):
    """The workload as an instance of Poplar's problem, under one ZeRO stage."""

    workload: Workload
    posed: Posed
    assumed: Assumptions

    def as_listed(self, method: StrategyMethod) -> StrategyMethod:
        """The method with the ZeRO stage in its name: `auto-zero2`."""
        return replace(method, name=f"{method.name}-zero{self.posed.data.zero_stage}")

    def solve(self, method: StrategyMethod, run: Run) -> Candidate | None:
        """The candidate of a method. Where no plan is possible under this ZeRO stage, the exact
        method raises NoPlan and every other method returns None.

        The batch curves of the instance end where memory does, so that every decision fits.
        """
        posed, usable = self.posed, self.workload.device_bytes()
        if posed.unfit is not None:
            if method.exact:
                raise NoPlan("infeasible", posed.unfit)
            return None
        result = solve(family("poplar"), posed.data, method.name, run)
        once = posed.once_seconds
        measured = bool(self.assumed.curves)
        notes = [result.message]
        if measured:
            notes.append(ON_CURVES)
        if once:
            gathered = f"{seconds_text(once)} of all-gather once per iteration"
            notes.append(f"iteration and bound include {gathered}")
        candidate = replace(
            Candidate.of_result("poplar", method, result),
            bound=None if result.bound is None else result.bound + once,
            details=result.details,
            message=joined(*notes, *posed.notes),
        )
        if result.decision is None or result.objective is None:
            return candidate
        seconds = result.objective + once
        peaks = self.peak_bytes(result.decision)
        # a device with a measured curve has computed its batches, whatever bytes are predicted
        fit = [
            peak <= usable[device.type] or device.type in self.assumed.curves
            for peak, device in zip(peaks, self.workload.cluster.devices, strict=True)
        ]
        return replace(
            candidate,
            closed_form_seconds=None if measured else seconds,
            predicted_seconds=seconds if measured else None,
            measured=measured,
            objective=seconds,
            fits_memory=all(fit),
            peak_bytes=peaks,
            plan=self.to_plan(result.decision),
        )

    def peak_bytes(self, decision: PoplarDecision) -> tuple[float, ...]:
        """[n] predicted bytes of each device.

        From ZeRO 1 on every device holds its shards, with samples or without. Under ZeRO 0 a device
        without samples is not in use and holds nothing.
        """
        peaks = []
        for i, pieces in enumerate(pieces_of(self.posed.data, decision)):
            largest = max((batch for _, batch in pieces), default=0)
            in_use = largest > 0 or self.posed.data.zero_stage > 0
            peaks.append(self.posed.device_bytes(i, largest) if in_use else 0.0)
        return tuple(peaks)

    def to_plan(self, decision: PoplarDecision) -> Plan:
        """The plan of a decision, in which every device in use is a replica of one stage.

        From ZeRO 1 on all devices are in use, some without samples. The plan states unequal shards,
        and in its origin that its seconds are from measured curves.
        """
        posed = self.posed
        layers = [(0, len(self.workload.profile.layers))]
        zero = posed.data.zero_stage
        without_samples = [(1, 0)] if zero else []
        replicas = []
        for i, pieces in enumerate(pieces_of(posed.data, decision)):
            row = pieces or without_samples  # (count, samples) of micro-batches
            if row:
                stages = [Stage(layers=layers, devices=[[i]])]
                batches = [MicroBatches(count=count, samples=samples) for count, samples in row]
                replicas.append(Replica(stages=stages, micro_batches=batches))
        origin = ""  # follows the method's name in the plan file
        if self.assumed.curves:
            origin = "; ".join(("", "priced with what a replay does not know of", *posed.notes))
        shares = posed.parts.tolist()
        # equal shares are the same number, 1 / n, so that they can be compared exactly
        unequal = zero > 0 and len(set(shares)) > 1
        return new_plan(
            self.workload,
            replicas,
            origin=origin,
            zero=zero,
            zero_shares=shares if unequal else None,
        )
