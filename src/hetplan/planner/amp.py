"""The strategies `amp` and `dp`.

`amp` solves the workload as an instance of AMP's problem: exactly, by AMP's own procedure, and by
Megatron's rules. `dp` is plain data parallelism with AMP's objective, the baseline of the ranking.

Plans within the memory that the replay counts: AMP's problem divides all bytes of a stage by its
tensor degree t, and counts no working memory of recomputation. The replay counts more. Let b be the
samples of a micro-batch, and `alive` the number of micro-batches whose activations a stage keeps at
a time. Let, in bytes per sample, `split` be the activations that tensor ranks divide, `whole` those
that every rank keeps, and working(t) the memory of the layer that is being recomputed. The replay
demands of every device

    states / t + alive b (split / t + whole) + b working(t) <= capacity.

An instance of AMP's problem can express this inequality if it has the tables of a single t, and of
a single b where working(t) > 0: its layers keep split + t whole, and its devices have a capacity of
capacity - b working(t). Every decision of the original instance has one t and one b, and so is one
of exactly one of these instances. The best of their optima is therefore the optimum, and the least
of their bounds is a lower bound of the original instance with the replay's memory.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import fsum
from typing import Any

from hetplan.formulations import family
from hetplan.formulations.amp.data import AmpData, AmpDecision
from hetplan.formulations.amp.evaluate import peak_bytes
from hetplan.formulations.amp.paper import ranked_candidates
from hetplan.formulations.amp.pose import pose
from hetplan.planner.candidate import Candidate, StrategyMethod
from hetplan.planner.strategy import NoPlan, Problem, Strategy, tensor_stage
from hetplan.plans.making import new_plan
from hetplan.plans.plan import MicroBatches, Plan, Replica
from hetplan.profiling.workload import Workload
from hetplan.replays.replay import replay
from hetplan.solvers.registry import evaluate, solve
from hetplan.solvers.run import Result, Run
from hetplan.text import bytes_text

AUTO = StrategyMethod("auto", exact=True)
TRIALS = StrategyMethod("paper-trials", paper=True)
# Number of AMP's least estimates that AMP runs (AMP, Section 4.5).
BUDGET = 10
# Seconds or bytes count as equal if they differ by less than this ratio: sums of the same numbers
# in another order differ in the last digits.
EQUAL_WITHIN = 1e-6


@dataclass(frozen=True)
class Amp(Strategy):
    """AMP's problem: the degrees of parallelism, the placement, the micro-batch size and the
    stages."""

    name = "amp"
    methods = (
        AUTO,
        StrategyMethod("paper", paper=True),
        TRIALS,
        StrategyMethod("megatron", quick=True),
    )
    recomputes = True
    slow = True

    def pose(self, workload: Workload, run: Run) -> "list[AmpProblem]":
        """The list of the one problem."""
        return [AmpProblem(workload, pose(workload))]

    def within_replay(self, workload: Workload, run: Run, bound: float | None) -> Candidate:
        """The best candidate of the `problems_within_replay`, with the bound of all of them. The
        search ends early with an optimum that reaches the given bound, which is that of the
        original problem."""
        problems = list(problems_within_replay(workload))
        candidates = list[Candidate]()
        for number, problem in enumerate(problems):
            if run.should_stop:
                break
            part = run.part(share=1 / (len(problems) - number))
            result = solve(family("amp"), problem.data, "auto", part)
            candidates.append(problem.candidate(AUTO, result))
            if not bound or result.objective is None:
                continue
            if result.objective <= bound * (1 + EQUAL_WITHIN):
                break
        bounds = [c.bound or 0.0 for c in candidates if c.status != "infeasible"]
        if len(candidates) < len(problems):
            # of the problems that were not solved; after an optimum that reaches the given bound,
            # this bound counts instead
            bounds.append(0.0)
        seconds = fsum(c.solve_seconds for c in candidates)
        with_plans = [c for c in candidates if c.objective is not None]
        best = min(with_plans, key=lambda c: c.objective or 0.0, default=None)
        if best is None or best.objective is None:
            status = "unknown" if bounds else "infeasible"
            return Candidate(strategy="amp", method=AUTO, status=status, solve_seconds=seconds)
        # `min` with the objective: rounding may lift a bound above the optimum
        lower_bound = min(max(min(bounds), bound or 0.0), best.objective)
        reached = lower_bound >= best.objective * (1 - EQUAL_WITHIN)
        status = "optimal" if reached else "feasible"
        return replace(best, bound=lower_bound, status=status, solve_seconds=seconds)


@dataclass(frozen=True)
class AmpProblem(Problem):
    """The workload as an instance of AMP's problem."""

    workload: Workload
    data: AmpData

    def solve(self, method: StrategyMethod, run: Run) -> Candidate:
        """The candidate of a method."""
        if method is TRIALS:
            return self.fastest_trial(run)
        return self.candidate(method, solve(family("amp"), self.data, method.name, run))

    def fastest_trial(self, run: Run) -> Candidate:
        """AMP's Algorithm 1 with its last line: of the ten strategies of least estimate the one
        that runs fastest. A replay takes the place of the run. A strategy that does not fit in the
        replay's memory fails, as those of the paper did."""
        begun = time.perf_counter()
        ranking = ranked_candidates(self.data, run)
        # (replayed seconds, place in the ranking, which settles ties, estimated seconds, decision)
        trials = []
        for place, estimated in enumerate(ranking.candidates[:BUDGET], start=1):
            decision = estimated.strategy.decision()
            replayed = replay(self.to_plan(decision), self.workload)
            if estimated.fits and replayed.fits:
                trials.append((replayed.seconds, place, estimated.seconds, decision))
        if not trials:
            raise NoPlan("unknown", f"none of the {BUDGET} least estimates fits in memory")
        _, place, seconds, decision = min(trials)
        return Candidate(
            strategy="amp",
            method=TRIALS,
            status="feasible",
            closed_form_seconds=seconds,
            objective=seconds,
            fits_memory=True,
            peak_bytes=peak_bytes(self.data, decision),
            solve_seconds=time.perf_counter() - begun,
            plan=self.to_plan(decision),
            message=f"AMP's estimate no. {place}, the fastest of {len(trials)} that run",
        )

    def candidate(self, method: StrategyMethod, result: Result[Any]) -> Candidate:
        """A solver's result as a candidate. The evaluator has checked that its decision fits in
        memory."""
        candidate = Candidate.of_result("amp", method, result)
        if result.decision is None:
            return candidate
        return replace(
            candidate,
            closed_form_seconds=result.objective,
            objective=result.objective,
            fits_memory=True,
            peak_bytes=peak_bytes(self.data, result.decision),
            plan=self.to_plan(result.decision),
        )

    def to_plan(self, decision: AmpDecision) -> Plan:
        """The plan of a decision: data rank i is replica i; 1F1B, no ZeRO, no recomputation. Each
        tensor group computes whole micro-batches with equal parts of every weight."""
        count = self.data.global_batch // (decision.data * decision.micro_batch)
        batches = MicroBatches(count=count, samples=decision.micro_batch)
        replicas = []
        for i in range(decision.data):
            stages = [
                tensor_stage([decision.stages[j]], decision.placement[j][i])
                for j in range(decision.pipeline)
            ]
            replicas.append(Replica(stages=stages, micro_batches=[batches]))
        return new_plan(self.workload, replicas)


class DataParallel(Strategy):
    """Plain data parallelism: the whole model on every device, equal shares of the batch.

    It is AMP's problem with pipeline = tensor = 1, in which only the micro-batch size is decided.
    """

    name = "dp"
    methods = (StrategyMethod("enumeration", exact=True),)
    recomputes = True

    def pose(self, workload: Workload, run: Run) -> "list[DataParallelProblem]":
        """The list of the one problem."""
        return [DataParallelProblem(workload, pose(workload))]


class DataParallelProblem(AmpProblem):
    """AMP's problem with only the micro-batch size to decide. It is solved by evaluating every
    size.

    The answer is the fastest size that fits in memory. If none fits, it is the fastest of all,
    marked as one that does not fit.
    """

    def solve(self, method: StrategyMethod, run: Run) -> Candidate:
        """The best of all decisions. It is optimal, because every decision is evaluated."""
        begun = time.perf_counter()
        # Seconds are computed without memory limits, so that decisions that do not fit have them.
        limited = self.with_plain_memory()
        unlimited = self.data.model_copy(update={"memory": None})
        # (whether it exceeds the memory, seconds, number, which settles ties, decision)
        priced = []
        for number, decision in enumerate(self.decisions()):
            seconds = evaluate(family("amp"), unlimited, decision).objective
            if seconds is not None:
                exceeds = evaluate(family("amp"), limited, decision).objective is None
                priced.append((exceeds, seconds, number, decision))
        if not priced:
            raise NoPlan(
                "infeasible",
                f"no micro-batch size with a table divides {self.data.global_batch} samples over "
                f"{len(self.data.devices)} devices",
            )
        exceeds, seconds, _, best = min(priced)
        peak = peak_bytes(limited, best) or ()
        message = ""
        if exceeds:
            message = f"does not fit: one device has to hold {bytes_text(max(peak))}"
        return Candidate(
            strategy="dp",
            method=method,
            status="infeasible" if exceeds else "optimal",
            closed_form_seconds=seconds,
            objective=None if exceeds else seconds,
            bound=None if exceeds else seconds,
            fits_memory=not exceeds,
            peak_bytes=peak,
            solve_seconds=time.perf_counter() - begun,
            plan=self.to_plan(best),
            message=message,
        )

    def with_plain_memory(self) -> AmpData:
        """The data with the memory of plain data parallelism: tied weights count once, and the
        working memory of recomputation counts beside the activations of a sample."""
        assert self.data.memory is not None
        kept = list(self.data.memory.layer_bytes_per_sample)
        # at any layer: each device has all of them
        kept[0] += self.workload.working_bytes.get(1, 0.0)
        layers = [
            layer.model_copy(update={"param_bytes": profiled.param_bytes})
            for layer, profiled in zip(self.data.layers, self.workload.profile.layers, strict=True)
        ]
        changes: dict[str, list[float]] = {"layer_bytes_per_sample": kept}
        if self.data.memory.layer_frozen_bytes is not None:
            profiled_layers = self.workload.profile.layers
            changes["layer_frozen_bytes"] = [layer.frozen_bytes for layer in profiled_layers]
        memory = self.data.memory.model_copy(update=changes)
        return self.data.model_copy(update={"layers": layers, "memory": memory})

    def decisions(self) -> list[AmpDecision]:
        """A decision for every micro-batch size that divides the global batch evenly and for which
        the profile has a table of each device type."""
        data, count = self.data, len(self.data.devices)
        profile, types = self.workload.profile, self.workload.cluster.types
        sizes = set.intersection(*(set(profile.micro_batches(name, 1)) for name in types))
        return [
            AmpDecision(
                pipeline=1,
                data=count,
                tensor=1,
                micro_batch=size,
                placement=[[[device] for device in range(count)]],
                stages=[(0, len(data.layers))],
            )
            for size in sorted(sizes)
            if data.global_batch % (count * size) == 0
        ]


def problems_within_replay(workload: Workload) -> Iterator[AmpProblem]:
    """The problems that count memory as the replay does (see the module): one for every tensor
    degree, or, if recomputation takes working memory, for every tensor degree and micro-batch size.
    Problems without tables of some device type, or without memory on any device, are left out."""
    original = pose(workload)
    assert original.memory is not None
    by_size = any(workload.working_bytes.values())
    # (tensor degree, micro-batch size or None for all sizes)
    keys = {
        (entry.tensor, entry.micro_batch if by_size else None) for entry in original.layer_seconds
    }
    for tensor, size in sorted(keys, key=lambda key: (key[0], key[1] or 0)):
        tables = [
            entry
            for entry in original.layer_seconds
            if entry.tensor == tensor and size in (None, entry.micro_batch)
        ]
        if {entry.type for entry in tables} != {device.type for device in original.devices}:
            continue
        # a size is None only where no degree has working memory
        working = (size or 0) * workload.working_bytes.get(tensor, 0.0)
        working += max(layer.cast_bytes for layer in workload.profile.layers) / tensor
        capacities = {
            name: room(capacity, working) for name, capacity in original.memory.device_bytes.items()
        }
        if not any(capacities.values()):
            continue
        # `saved_bytes` is split + whole, so that this is split + t whole
        kept = [
            layer.saved_bytes + (tensor - 1) * layer.replicated_saved_bytes
            for layer in workload.profile.layers
        ]
        memory = original.memory.model_copy(
            update={"device_bytes": capacities, "layer_bytes_per_sample": kept}
        )
        data = original.model_copy(update={"layer_seconds": tables, "memory": memory})
        yield AmpProblem(workload, data)


def room(capacity: float, working: float) -> float:
    """Bytes of a device's capacity beside the working memory of recomputation, a little fewer: a
    plan that just fits here must also fit by the replay's sum, whose last digits differ."""
    return max(0.0, capacity * (1 - EQUAL_WITHIN) - working)
