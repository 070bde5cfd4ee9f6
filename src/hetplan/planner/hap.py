"""The strategy `hap`: one SPMD program over all devices with sharding ratios, beside HAP's
procedure and its baselines.

A candidate's objective, bound and status are those of the instance of HAP's problem, whose ratios
may give a device fractions of samples, heads and experts. They are in seconds per iteration: the
instance's seconds times the number of the program's runs per iteration. `closed_form_seconds` is
the objective of the same program with whole samples, heads and experts.
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

# The methods that do not search jointly have the setting `seconds` divided by this. HAP's A* ends
# in that time on networks of 24 layers; the others take milliseconds.
DIVISOR_WITHOUT_SEARCH = 6


class HapSettings(StrictModel):
    """The settings `--set hap.NAME=VALUE`."""

    seconds: Annotated[float, Field(gt=0, le=86_400)] = 30.0
    """Time limit of the joint search (method `auto`), at which it returns its best program and
    bound. The limit of every other method is a sixth of it."""
    steps: PositiveCount | None = None
    """Number of runs of the program per iteration, a divisor of the global batch; None: the fewest
    runs with which data parallelism fits in memory."""
    collectives: Name | None = None
    """Path of a file of `hetplan profile collectives`, measured with one rank per device of the
    cluster."""
    segments: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of segments of the model. Each segment has its own sharding ratios."""
    cut: Literal["layer", "metis"] = "layer"
    """How the model is cut into segments: by layers, or by METIS (extra `metis`)."""
    devices: Literal["gpus", "machines"] = "gpus"
    """Whether ratios are chosen for GPUs or for machines. The GPUs of a machine share its ratio
    evenly."""


@dataclass(frozen=True)
class Hap(Strategy):
    """The strategy: one SPMD program with a sharding ratio per device."""

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
        """The list of the one problem. The time in which its theory is written down counts for the
        time limit. Raises NoPlan where the model states exceed the memory of all devices together,
        or where the time limit is reached before the theory is complete. Raises UnsupportedError
        where the program takes several runs, and these train a user's module wrongly."""
        begun = time.perf_counter()
        usable = workload.device_bytes()
        total_bytes = sum(usable[device.type] for device in workload.cluster.devices)
        if workload.state_bytes > total_bytes:  # each entry of a parameter is on some device
            raise NoPlan(
                "infeasible",
                f"one copy of the model states takes {bytes_text(workload.state_bytes)}, "
                f"all devices have {bytes_text(total_bytes)}",
            )
        settings = self.settings
        machines = settings.devices == "machines"
        require(
            not (machines and settings.collectives),
            "measured collectives are between GPUs, not machines",
            where="hap.collectives",
            expected="hap.devices=gpus",
        )
        links = None
        if settings.collectives is not None:
            measured = Collectives.load(settings.collectives)
            links = measured_links(measured, len(workload.cluster.devices))
        posing = begin_run(run, "hap")
        cut = (settings.segments, settings.cut)
        try:
            posed = pose(workload, settings.steps, posing, links=links, cut=cut)
            searched = posed
            if machines:
                searched = pose(workload, posed.runs, posing, cut=cut, machines=True)
        except Stopped:
            raise NoPlan(
                "unknown",
                f"no time to write its theory down ({seconds_text(time.perf_counter() - begun)})",
            ) from None
        check_runs = workload.model.spec.check_runs
        if posed.runs > 1 and check_runs is not None:
            check_runs(workload.global_batch)
        return [
            SpmdProblem(
                posed=posed,
                searched=searched,
                search_seconds=settings.seconds,
                posing_seconds=time.perf_counter() - begun,
                measured=links is not None,
            )
        ]


def reported_per_iteration(run: Run, runs: int, seconds: float) -> Run:
    """A run for solving the instance, whose program runs `runs` times per iteration. It multiplies
    the incumbents and bounds that it reports to `run` by this number, so that they are seconds per
    iteration. seconds: budget of the new run."""

    def watch(progress: Progress) -> None:
        run.report(
            incumbent=seconds_per_iteration(runs, progress.incumbent),
            bound=seconds_per_iteration(runs, progress.bound),
            note=progress.note,
        )

    part = run.part(seconds=seconds)
    part.watch, part.hopeless = watch, run.hopeless / runs
    return part


def seconds_per_iteration(runs: int, seconds: float | None) -> float | None:
    """Seconds per iteration of a program that runs `runs` times; None where unknown."""
    return None if seconds is None else runs * seconds


@dataclass(frozen=True, kw_only=True)
class Notes:
    """The facts about a candidate that its message tells the user."""

    method_message: str  # the method's message; empty: none
    collectives_are_measured: bool  # whether collectives take measured times
    devices_are_machines: bool  # whether objective and bound take each machine as one device
    # The largest peak of the devices whose memory the program exceeds; None: it fits on all.
    unfit_peak_bytes: float | None
    # Whether objective and bound are for ratios that may divide samples, heads and experts.
    bound_is_of_fractions: bool

    def text(self) -> str:
        """All notes in one line."""
        texts = [self.method_message]
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

    posed: Posed  # the instance with GPUs as devices, by which programs are judged
    searched: Posed  # the instance to solve: `posed` itself, or the one with machines as devices
    search_seconds: float  # time limit of the joint search
    posing_seconds: float  # spent on writing the theory down
    measured: bool = False  # whether collectives take measured times

    def solve(self, method: StrategyMethod, run: Run) -> Candidate:
        """A method's result as a candidate, with its program in whole units. Raises NoPlan where
        the method has no program."""
        posed = self.posed
        seconds = self.search_seconds
        if not method.exact:
            seconds /= DIVISOR_WITHOUT_SEARCH
        result = solve(
            family("hap"),
            self.searched.theory.data,
            method.name,
            reported_per_iteration(run, posed.runs, seconds),
        )
        solve_seconds = result.seconds + self.posing_seconds
        if not isinstance(result.decision, HapDecision) or result.objective is None:
            raise NoPlan(result.status, self.why_no_program(result), solve_seconds)
        decision = self.in_whole_units(self.on_every_device(result.decision))
        peak_bytes = posed.device_bytes(decision)
        unfit_peaks = self.peaks_over_memory(peak_bytes)
        if unfit_peaks and self.counts_tied_weights_by_parts:
            with suppress(Stopped):  # where no time is left for it, this program is the result
                return self.with_tied_weights_whole(run).solve(method, run)
        plan = self.to_plan(decision)
        costs = SpmdCosts.of(plan, posed.workload, posed.links) if self.measured else None
        return replace(
            Candidate.of_result("hap", method, result),
            closed_form_seconds=posed.runs * posed.theory.seconds_in_whole_units(decision),
            objective=posed.runs * result.objective,
            bound=seconds_per_iteration(posed.runs, result.bound),
            fits_memory=not unfit_peaks,
            peak_bytes=peak_bytes,
            solve_seconds=solve_seconds,
            plan=plan,
            predicted_seconds=None if costs is None else costs.timeline().seconds,
            measured=self.measured,
            message=Notes(
                method_message=result.message,
                collectives_are_measured=self.measured,
                devices_are_machines=self.searched is not posed,
                unfit_peak_bytes=max(unfit_peaks, default=None),
                bound_is_of_fractions=method.exact,
            ).text(),
        )

    def why_no_program(self, result: Result[Any]) -> str:
        """The reason why a result has no decision, with the setting that may help."""
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
        """The peaks that exceed the usable memory of their device. peak_bytes: largest use of every
        device."""
        usable = self.posed.workload.device_bytes()
        devices = self.posed.workload.cluster.devices
        return [
            peak
            for device, peak in zip(devices, peak_bytes, strict=True)
            if peak > usable[device.type]
        ]

    @property
    def counts_tied_weights_by_parts(self) -> bool:
        """Whether the instance may count too little memory. A device holds a parameter whole if
        several operators read it in different ways, but the theory counts only the slices that each
        operator reads."""
        holding = self.posed.theory.holding
        return holding is not None and not holding.tied_whole and self.searched is self.posed

    def with_tied_weights_whole(self, run: Run) -> "SpmdProblem":
        """The problem whose theory counts tied weights as held whole. Raises Stopped."""
        posed = self.posed
        tied_whole = pose(
            posed.workload, posed.runs, run, tied_whole=True, links=posed.links, cut=posed.cut
        )
        return replace(self, posed=tied_whole, searched=tied_whole)

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
        """The decision with its ratios rounded to whole samples, or the decision itself. The one
        whose program in whole units fits in memory is taken; if both or none fit, the faster one;
        if both are equally fast, the rounded one."""
        posed = self.posed
        samples = posed.samples
        ratios = [
            [length / samples for length in shard_lengths(row, samples)] for row in decision.ratios
        ]
        rounded = decision.model_copy(update={"ratios": ratios})

        def unfit_then_seconds(candidate: HapDecision) -> tuple[bool, float]:
            return not posed.fits(candidate), posed.theory.seconds_in_whole_units(candidate)

        return min((rounded, decision), key=unfit_then_seconds)

    def to_plan(self, decision: HapDecision) -> Plan:
        """The plan of a decision: one replica of one stage on all devices, and their program."""
        posed = self.posed
        workload = posed.workload
        layers = len(workload.profile.layers)
        devices = range(len(workload.cluster.devices))
        replica = Replica(
            stages=[tensor_stage([(0, layers)], devices)],
            micro_batches=[MicroBatches(count=posed.runs, samples=posed.samples)],
        )
        program = write_program(posed.theory.decided(decision))
        return new_plan(workload, [replica], schedule="spmd", program=program)
