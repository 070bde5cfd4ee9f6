"""The strategy `amp`: the workload as an AMP problem, proven, beside AMP's own procedure and
Megatron's rules; and `dp`, the floor: plain data parallelism, priced as AMP prices it.

Within the replay's memory. AMP's problem divides all that a stage keeps by its tensor degree t, and
knows no working memory of recomputation. The replay counts more. Let b be the samples of a
micro-batch, `alive` the number of micro-batches that a stage keeps at a time, and per sample: split
the bytes that tensor ranks divide, whole those that every rank keeps, working(t) those of the layer
that is being computed again. On every device
    states / t + alive b (split / t + whole) + b working(t) <= capacity.
An instance with the tables of a single degree (and of a single micro-batch, where there is working
memory) can say this: its layers keep split + t whole, its devices have capacity - b working(t).
Every decision of the whole problem belongs to one of these instances. The best of their optima is
therefore the optimum, and the least of their bounds is a bound of the whole problem.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import fsum
from typing import Any

from hetplan.formulations import family
from hetplan.formulations.amp.data import AmpData, AmpDecision
from hetplan.formulations.amp.evaluate import peak_bytes
from hetplan.formulations.amp.paper import rank
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
# How many of its least estimates AMP runs (§4.5).
BUDGET = 10
# Seconds or bytes that differ by less than this share count as equal: sums of the same numbers in
# another order differ in the last digits.
EQUAL_WITHIN = 1e-6


@dataclass(frozen=True)
class Amp(Strategy):
    """Degrees, placement, micro-batch and stages."""

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
        """One problem."""
        return [AmpProblem(workload, pose(workload))]

    def within_replay(self, workload: Workload, run: Run, bound: float | None) -> Candidate:
        """The best over `problems_within_replay`, and its bound. An optimum that reaches the given
        bound ends the search."""
        problems, candidates = list(problems_within_replay(workload)), list[Candidate]()
        for left, problem in zip(range(len(problems), 0, -1), problems, strict=True):
            if run.should_stop:
                break
            result = solve(
                family("amp"), problem.data, "auto", run.part(time_limit=run.remaining / left)
            )
            candidates.append(problem.candidate(AUTO, result))
            if (
                bound
                and result.objective is not None
                and result.objective <= bound * (1 + EQUAL_WITHIN)
            ):
                break
        bounds = [c.bound or 0.0 for c in candidates if c.status != "infeasible"]
        if len(candidates) < len(problems):
            bounds.append(0.0)
        seconds = fsum(c.solve_seconds for c in candidates)
        best = min(
            (c for c in candidates if c.objective is not None),
            key=lambda c: c.objective or 0.0,
            default=None,
        )
        if best is None or best.objective is None:
            status = "unknown" if bounds else "infeasible"
            return Candidate(strategy="amp", method=AUTO, status=status, solve_seconds=seconds)
        lower = min(max(min(bounds), bound or 0.0), best.objective)
        status = "optimal" if lower >= best.objective * (1 - EQUAL_WITHIN) else "feasible"
        return replace(best, bound=lower, status=status, solve_seconds=seconds)


@dataclass(frozen=True)
class AmpProblem(Problem):
    """The workload as an instance of AMP's problem."""

    workload: Workload
    data: AmpData

    def solve(self, method: StrategyMethod, run: Run) -> Candidate:
        """A method's result as a candidate."""
        if method is TRIALS:
            return self.fastest_trial(run)
        return self.candidate(method, solve(family("amp"), self.data, method.name, run))

    def fastest_trial(self, run: Run) -> Candidate:
        """Algorithm 1 with its last line: of the ten least estimates the one that runs fastest. A
        trial is a replay; one without room for it fails, as the paper's did."""
        begun, ranking = time.perf_counter(), rank(self.data, run)
        trials = []
        for place, one in enumerate(ranking.candidates[:BUDGET], start=1):
            decision = one.strategy.decision()
            replayed = replay(self.to_plan(decision), self.workload)
            if one.fits and replayed.fits:
                trials.append((replayed.seconds, place, one.seconds, decision))
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
        """A result as a candidate; the evaluator has checked that its decision fits in memory."""
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
        """Data rank i is replica i; 1F1B, no ZeRO, no recomputation.

        Every tensor group takes all rows of a micro-batch and equal parts of every weight.
        """
        batches = [
            MicroBatches(
                count=self.data.global_batch // (decision.data * decision.micro_batch),
                samples=decision.micro_batch,
            )
        ]
        replicas = [
            Replica(
                stages=[
                    tensor_stage([decision.stages[j]], decision.placement[j][i])
                    for j in range(decision.pipeline)
                ],
                micro_batches=batches,
            )
            for i in range(decision.data)
        ]
        return new_plan(self.workload, replicas)


class DataParallel(Strategy):
    """Plain data parallelism: the whole model on every device, equal shares of the batch.

    It is AMP's problem with pipeline = tensor = 1, so that only the micro-batch is to be decided.
    """

    name = "dp"
    methods = (StrategyMethod("enumeration", exact=True),)
    recomputes = True

    def pose(self, workload: Workload, run: Run) -> "list[DataParallelProblem]":
        """One problem."""
        return [DataParallelProblem(workload, pose(workload))]


class DataParallelProblem(AmpProblem):
    """AMP's problem with the micro-batch size alone to decide, solved by pricing every size.

    The answer is the fastest size that fits; where none fits, the fastest of all, marked so.
    """

    def solve(self, method: StrategyMethod, run: Run) -> Candidate:
        """The best of all decisions; it is proven, because each one is priced."""
        begun = time.perf_counter()
        # Memory is judged apart, so that what does not fit has a price as well.
        held, free = self.held(), self.data.model_copy(update={"memory": None})
        priced = [
            (evaluate(family("amp"), held, decision).objective is None, seconds, n, decision)
            for n, decision in enumerate(self.decisions())
            if (seconds := evaluate(family("amp"), free, decision).objective) is not None
        ]
        if not priced:
            raise NoPlan(
                "infeasible",
                f"no micro-batch size with a table divides {self.data.global_batch} samples over "
                f"{len(self.data.devices)} devices",
            )
        exceeds, seconds, _, best = min(priced)
        peak = peak_bytes(held, best) or ()
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

    def held(self) -> AmpData:
        """The data with the memory of plain data parallelism: tied weights once, a sample's
        activations with what is computed again beside them."""
        assert self.data.memory is not None
        kept = list(self.data.memory.layer_bytes_per_sample)
        kept[0] += self.workload.working_bytes.get(1, 0.0)
        layers = [
            layer.model_copy(update={"param_bytes": profiled.param_bytes})
            for layer, profiled in zip(self.data.layers, self.workload.profile.layers, strict=True)
        ]
        memory = self.data.memory.model_copy(update={"layer_bytes_per_sample": kept})
        return self.data.model_copy(update={"layers": layers, "memory": memory})

    def decisions(self) -> list[AmpDecision]:
        """Every micro-batch size that all device types have a table for and that divides the batch
        evenly."""
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
    """The problems that count memory as the replay does (see above): one for every tensor degree,
    and for every micro-batch where there is working memory. Those that no device has room for are
    left out."""
    whole = pose(workload)
    assert whole.memory is not None
    apart = any(workload.working_bytes.values())
    keys = {
        (entry.tensor, entry.micro_batch if apart else None): None for entry in whole.layer_seconds
    }
    for tensor, size in sorted(keys, key=lambda key: (key[0], key[1] or 0)):
        tables = [
            entry
            for entry in whole.layer_seconds
            if entry.tensor == tensor and size in (None, entry.micro_batch)
        ]
        beside = (size or 0) * workload.working_bytes.get(tensor, 0.0)
        rooms = {kind: room(size, beside) for kind, size in whole.memory.device_bytes.items()}
        if {entry.type for entry in tables} != {device.type for device in whole.devices}:
            continue
        kept = [
            layer.saved_bytes + (tensor - 1) * layer.replicated_saved_bytes
            for layer in workload.profile.layers
        ]
        memory = whole.memory.model_copy(
            update={"device_bytes": rooms, "layer_bytes_per_sample": kept}
        )
        if any(rooms.values()):
            yield AmpProblem(
                workload, whole.model_copy(update={"layer_seconds": tables, "memory": memory})
            )


def room(capacity: float, beside: float) -> float:
    """Bytes that are left of a device's memory."""
    return max(0.0, capacity * (1 - EQUAL_WITHIN) - beside)
