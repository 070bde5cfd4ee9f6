"""The strategy `poplar`: data parallelism under each ZeRO stage with unequal shares, beside the
paper's algorithm.

Under ZeRO 2 the weights are gathered once per iteration whatever the plan. The instance has no
place for that, so objective and bound of a candidate are those of its instance plus this constant:
both are seconds per iteration.
"""

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
    """`--set poplar.NAME=VALUE`."""

    # All stages, the lowest at which every device holds a sample (Algorithm 1), or one of them.
    zero: Literal["all", "lowest", 0, 1, 2, 3] = "all"
    shards: Literal["equal", "memory"] = "equal"  # by the memory of each device
    # Files of `hetplan profile batch-curve`, separated by commas, one per device type.
    curves: str | None = None
    # A file of `hetplan profile collectives`, in place of the cluster's links.
    collectives: str | None = None

    def assumptions(self) -> Assumptions:
        """With the files read; raises InputError."""
        curves: dict[str, BatchCurve] = {}
        for path in filter(None, (part.strip() for part in (self.curves or "").split(","))):
            curve = BatchCurve.load(path)
            require(
                curves.setdefault(curve.device, curve) is curve,
                "second batch curve of a device type",
                where=path,
                got=curve.device,
            )
        return Assumptions(
            self.shards,
            curves,
            None if self.collectives is None else Collectives.load(self.collectives.strip()),
        )


@dataclass(frozen=True)
class Poplar(Strategy):
    """Unequal batches under each ZeRO stage."""

    name = "poplar"
    methods = (StrategyMethod("auto", exact=True), StrategyMethod("paper", paper=True))
    Settings = PoplarSettings
    recomputes = True

    settings: PoplarSettings = field(default_factory=PoplarSettings)

    def pose(self, workload: Workload, run: Run) -> "list[ZeroStageProblem]":
        """One problem per ZeRO stage."""
        zero, assumed = self.settings.zero, self.settings.assumptions()
        if zero == "lowest":
            try:
                return [ZeroStageProblem(workload, pose_lowest_stage(workload, assumed), assumed)]
            except NoStageFits as error:
                raise NoPlan("infeasible", str(error)) from None
        return [
            ZeroStageProblem(workload, pose(workload, stage, assumed), assumed)
            for stage in (STAGES if zero == "all" else (zero,))
        ]


@dataclass(frozen=True)
class ZeroStageProblem(Problem):
    """The workload as an instance of Poplar's problem, under one ZeRO stage."""

    workload: Workload
    posed: Posed
    assumed: Assumptions

    def as_listed(self, method: StrategyMethod) -> StrategyMethod:
        """Candidates say their ZeRO stage: `auto-zero2`."""
        return replace(method, name=f"{method.name}-zero{self.posed.data.zero_stage}")

    def solve(self, method: StrategyMethod, run: Run) -> Candidate | None:
        """A method's result as a candidate; curves end where memory does, so that every decision
        fits."""
        posed, usable = self.posed, self.workload.device_bytes()
        if posed.unfit is not None:
            if method.exact:
                raise NoPlan("infeasible", posed.unfit)
            return None
        result = solve(family("poplar"), posed.data, method.name, run)
        once = posed.once_seconds
        candidate = replace(
            Candidate.of_result("poplar", method, result),
            bound=None if result.bound is None else result.bound + once,
            details=result.details,
            message=joined(
                result.message,
                ON_CURVES if self.assumed.curves else "",
                f"iteration and bound include {seconds_text(once)} of all-gather once per iteration"
                if once
                else "",
                *posed.notes,
            ),
        )
        if result.decision is None or result.objective is None:
            return candidate
        peak = self.peak_bytes(result.decision)
        seconds, measured = result.objective + once, bool(self.assumed.curves)
        return replace(
            candidate,
            closed_form_seconds=None if measured else seconds,
            predicted_seconds=seconds if measured else None,
            measured=measured,
            objective=seconds,
            fits_memory=all(
                p <= usable[d.type] or d.type in self.assumed.curves  # tried there, not predicted
                for p, d in zip(peak, self.workload.cluster.devices, strict=True)
            ),
            peak_bytes=peak,
            plan=self.to_plan(result.decision),
        )

    def peak_bytes(self, decision: PoplarDecision) -> tuple[float, ...]:
        """[n] predicted bytes of each device.

        From stage 1 on every device holds its shards, with samples or without; under stage 0 a
        device without samples is left out and holds nothing.
        """
        largest = [
            max((batch for _, batch in row), default=0)
            for row in pieces_of(self.posed.data, decision)
        ]
        return tuple(
            self.posed.device_bytes(i, batch) if batch or self.posed.data.zero_stage else 0.0
            for i, batch in enumerate(largest)
        )

    def to_plan(self, decision: PoplarDecision) -> Plan:
        """Every device that takes part is a replica of one stage.

        From stage 1 on all devices take part, some without samples. Shards that are not equal stand
        in the plan, and so does what it took for granted that a replay does not know of.
        """
        posed, layers = self.posed, [(0, len(self.workload.profile.layers))]
        stage = posed.data.zero_stage
        none = [(1, 0)] if stage else []
        replicas = [
            Replica(
                stages=[Stage(layers=layers, devices=[[i]])],
                micro_batches=[MicroBatches(count=times, samples=size) for times, size in row],
            )
            for i, pieces in enumerate(pieces_of(posed.data, decision))
            if (row := pieces or none)
        ]
        beside = ("", "priced with what a replay does not know of", *posed.notes)
        return new_plan(
            self.workload,
            replicas,
            origin="; ".join(beside) if self.assumed.curves else "",
            zero=stage,
            zero_shares=(
                posed.parts.tolist() if stage > 0 and len(set(posed.parts.tolist())) > 1 else None
            ),
        )
