"""The strategy `hap`: one SPMD program over all devices with sharding ratios, beside HAP's
procedure and its baselines.

Objective, bound and status are of the instance, in seconds per iteration (its seconds times the
runs of an iteration), where ratios divide everything. `closed_form_seconds` are the objective of
the program in whole units: samples, heads and experts do not divide.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from hetplan.errors import require
from hetplan.formulations import family
from hetplan.formulations.hap.data import HapDecision
from hetplan.formulations.hap.pose import Posed, pose
from hetplan.planner.candidate import Candidate, StrategyMethod, joined
from hetplan.planner.strategy import NoPlan, Problem, Strategy, begin_run, tensor_stage
from hetplan.plans.making import new_plan
from hetplan.plans.plan import MicroBatches, Plan, Replica
from hetplan.profiling.profiles.measured_collectives import Collectives
from hetplan.profiling.workload import Workload
from hetplan.programs.links import measured_links
from hetplan.programs.proofs import write_program
from hetplan.programs.shards import shard_lengths
from hetplan.replays.programs import SpmdCosts
from hetplan.schema import Name, PositiveCount, StrictModel
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Progress, Result, Run, Stopped
from hetplan.text import bytes_text, counted, seconds_text


class HapSettings(StrictModel):
    """`--set hap.NAME=VALUE`."""

    # For the joint search, a sixtieth of it for the others; it ends with the best program and its
    # bound.
    seconds: Annotated[float, Field(gt=0, le=86_400)] = 30.0
    # Runs of the program per iteration, a divisor of the global batch; None: the fewest in which
    # data parallelism fits in memory.
    steps: PositiveCount | None = None
    # What `hetplan profile collectives` wrote, of as many ranks as the cluster has devices.
    collectives: Name | None = None
    # Parts of the model with ratios of their own, and how they are cut (METIS: extra `metis`).
    segments: Annotated[int, Field(ge=1, le=64)] = 1
    cut: Literal["layer", "metis"] = "layer"
    # What gets ratios: every GPU, or every machine, whose GPUs then have equal parts of its own.
    devices: Literal["gpus", "machines"] = "gpus"


@dataclass(frozen=True)
class Hap(Strategy):
    """One SPMD program, sharding ratios per device."""

    name = "hap"
    methods = (
        StrategyMethod("auto", exact=True),
        StrategyMethod("paper", paper=True),
        StrategyMethod("dp-even"),
        StrategyMethod("dp-proportional", quick=True),
    )
    Settings = HapSettings
    slow = True

    settings: HapSettings = field(default_factory=HapSettings)

    def pose(self, workload: Workload, run: Run) -> "list[SpmdProblem]":
        """One problem. The time limit includes the time in which its theory is written down."""
        begun, usable = time.perf_counter(), workload.device_bytes()
        room = sum(usable[device.type] for device in workload.cluster.devices)
        if workload.state_bytes > room:  # however the parameters are sliced, somebody holds each
            raise NoPlan(
                "infeasible",
                f"one copy of the model states takes {bytes_text(workload.state_bytes)}, "
                f"all devices have {bytes_text(room)}",
            )
        wanted, links = self.settings, None
        machines = wanted.devices == "machines"
        require(
            not (machines and wanted.collectives),
            "measured collectives are between GPUs, not machines",
            where="hap.collectives",
            expected="hap.devices=gpus",
        )
        if wanted.collectives is not None:
            links = measured_links(
                Collectives.load(wanted.collectives), len(workload.cluster.devices)
            )
        begin, cut = begin_run(run, "hap"), (wanted.segments, wanted.cut)
        try:
            posed = pose(workload, wanted.steps, begin, links=links, cut=cut)
            searched = (
                pose(workload, posed.runs, begin, cut=cut, machines=True) if machines else posed
            )
        except Stopped:
            raise NoPlan(
                "unknown",
                f"no time to write its theory down ({seconds_text(time.perf_counter() - begun)})",
            ) from None
        return [
            SpmdProblem(
                posed,
                searched,
                wanted.seconds,
                time.perf_counter() - begun,
                measured=links is not None,
            )
        ]


def reported_per_iteration(run: Run, runs: int, time_limit: float) -> Run:
    """A run with its own time limit for a program that runs `runs` times per iteration. Incumbents
    and bounds that it reports reach `run` as seconds per iteration."""

    def watch(progress: Progress) -> None:
        incumbent, bound = (
            None if seconds is None else runs * seconds
            for seconds in (progress.incumbent, progress.bound)
        )
        run.report(incumbent=incumbent, bound=bound, note=progress.note)

    return Run(
        replace(run.options, time_limit=time_limit), watch, run.cancel, hopeless=run.hopeless / runs
    )


@dataclass(frozen=True, kw_only=True)
class Notes:
    """The facts that a reader needs beside the numbers of a candidate."""

    of_method: str  # the message of the method itself; empty: none
    collectives_are_measured: bool  # whether collectives take measured times
    devices_are_machines: bool  # whether objective and bound are of machines as devices
    unfit_peak_bytes: float | None  # the most bytes of a device that they exceed; None: all fit
    # Whether objective and bound are of ratios that may cut samples, heads and experts.
    bound_is_of_fractions: bool

    def text(self) -> str:
        """The facts in words, one behind the other."""
        texts = [self.of_method]
        if self.collectives_are_measured:
            texts.append("collectives take what was measured")
        if self.devices_are_machines:
            texts.append("objective and bound are of machines as devices")
        if self.unfit_peak_bytes is not None:
            peak = bytes_text(self.unfit_peak_bytes)
            texts.append(f"does not fit: one device has to hold {peak}")
        if self.bound_is_of_fractions:
            texts.append(
                "objective and bound are of ratios that divide everything; "
                "the iteration is in whole units"
            )
        return joined(*texts)


@dataclass(frozen=True)
class SpmdProblem(Problem):
    """The workload as an instance of HAP's problem: a theory whose programs all devices run."""

    posed: Posed
    searched: Posed  # the instance to solve: `posed` itself, or the same with machines as devices
    search_seconds: float  # for the joint search
    posing_seconds: float  # spent on writing the theory down
    measured: bool = False  # whether its collectives take measured times

    def solve(self, method: StrategyMethod, run: Run) -> Candidate:
        """A method's result as a candidate, its program in whole units."""
        posed = self.posed
        seconds = self.search_seconds if method.exact else self.search_seconds / 60
        time_limit = max(min(seconds, run.remaining), 1e-3)
        result = solve(
            family("hap"),
            self.searched.theory.data,
            method.name,
            reported_per_iteration(run, posed.runs, time_limit),
        )
        spent = result.seconds + self.posing_seconds
        if not isinstance(result.decision, HapDecision) or result.objective is None:
            raise NoPlan(result.status, self.why_no_program(result), spent)
        decision = self.in_whole_units(self.on_every_device(result.decision))
        peak = posed.device_bytes(decision)
        over = self.peaks_over_memory(peak)
        by_machine = self.searched is not posed
        if over and self.counts_tied_weights_by_parts:
            with suppress(Stopped):  # no time for it: the program stays as it is
                return self.with_tied_weights_whole(run).solve(method, run)
        plan = self.to_plan(decision)
        costs = SpmdCosts.of(plan, posed.workload, posed.links) if self.measured else None
        return replace(
            Candidate.of_result("hap", method, result),
            closed_form_seconds=posed.runs * posed.theory.seconds_in_whole_units(decision),
            objective=posed.runs * result.objective,
            bound=None if result.bound is None else posed.runs * result.bound,
            fits_memory=not over,
            peak_bytes=peak,
            solve_seconds=spent,
            plan=plan,
            predicted_seconds=None if costs is None else costs.timeline().seconds,
            measured=self.measured,
            message=Notes(
                of_method=result.message,
                collectives_are_measured=self.measured,
                devices_are_machines=by_machine,
                unfit_peak_bytes=max(over, default=None),
                bound_is_of_fractions=method.exact,
            ).text(),
        )

    def why_no_program(self, result: Result[Any]) -> str:
        """The reason of a result without a decision, and which setting may help."""
        if result.message:
            reason = result.message
        else:
            within = seconds_text(result.seconds)
            reason = f"no program within {within}; hap.seconds gives it longer"
        if result.status == "infeasible":
            runs = counted(self.posed.runs, "run")
            reason += f" in {runs} of {self.posed.samples} samples; hap.steps sets how many"
        return reason

    def peaks_over_memory(self, peak_bytes: Sequence[float]) -> list[float]:
        """The peaks of the devices that they do not fit on. peak_bytes: of every device."""
        usable, devices = self.posed.workload.device_bytes(), self.posed.workload.cluster.devices
        return [
            peak
            for device, peak in zip(devices, peak_bytes, strict=True)
            if peak > usable[device.type]
        ]

    @property
    def counts_tied_weights_by_parts(self) -> bool:
        """Whether the instance may count too little memory: parameters that several operators read
        in different ways are held whole, and the theory counts the parts that each reads."""
        holding = self.posed.theory.holding
        return holding is not None and not holding.tied_whole and self.searched is self.posed

    def with_tied_weights_whole(self, run: Run) -> "SpmdProblem":
        """The problem whose theory counts tied weights as held whole. Raises Stopped."""
        posed = self.posed
        careful = pose(
            posed.workload, posed.runs, run, tied_whole=True, links=posed.links, cut=posed.cut
        )
        return replace(self, posed=careful, searched=careful)

    def on_every_device(self, decision: HapDecision) -> HapDecision:
        """The decision with the ratio of each machine divided evenly over its devices."""
        if self.searched is self.posed:
            return decision
        cluster = self.posed.workload.cluster
        ratios = [
            [row[d.node] / cluster.nodes[d.node].devices for d in cluster.devices]
            for row in decision.ratios
        ]
        return decision.model_copy(update={"ratios": ratios})

    def in_whole_units(self, decision: HapDecision) -> HapDecision:
        """The decision with ratios that cut samples whole, where the program in whole units then
        fits and is no slower."""
        posed, batch = self.posed, self.posed.samples
        ratios = [
            [length / batch for length in shard_lengths(row, batch)] for row in decision.ratios
        ]
        rounded = decision.model_copy(update={"ratios": ratios})

        def order(candidate: HapDecision) -> tuple[bool, float]:
            return not posed.fits(candidate), posed.theory.seconds_in_whole_units(candidate)

        return min((rounded, decision), key=order)

    def to_plan(self, decision: HapDecision) -> Plan:
        """One replica of one stage on all devices, with the program that they run."""
        posed, workload = self.posed, self.posed.workload
        layers, devices = len(workload.profile.layers), range(len(workload.cluster.devices))
        replica = Replica(
            stages=[tensor_stage([(0, layers)], devices)],
            micro_batches=[MicroBatches(count=posed.runs, samples=posed.samples)],
        )
        program = write_program(posed.theory.decided(decision))
        return new_plan(workload, [replica], schedule="spmd", program=program)
