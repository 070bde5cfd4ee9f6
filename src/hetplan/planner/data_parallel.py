"""The strategy `dp`, the floor: the whole model on every device, equal shares of the batch.

It is the AMP problem with pipeline = tensor = 1: only the micro-batch size is to be decided, so
that all of its decisions are priced, by the evaluator.
"""

from __future__ import annotations

import time

from hetplan.formulations import family
from hetplan.formulations.amp.data import AmpData, AmpDecision
from hetplan.formulations.amp.describe import describe
from hetplan.formulations.amp.evaluate import peak_bytes
from hetplan.formulations.amp.pose import pose
from hetplan.planner.amp import AmpProblem
from hetplan.planner.candidate import Candidate, Method
from hetplan.planner.strategy import NoPlan, Strategy
from hetplan.profiling.workload import Workload
from hetplan.solvers.registry import evaluate
from hetplan.solvers.run import Run
from hetplan.text import bytes_text


class DataParallel(Strategy):
    """Plain data parallelism."""

    name = "dp"
    methods = (Method("enumeration", exact=True),)
    recomputes = True

    def pose(self, workload: Workload, run: Run) -> list[Enumeration]:
        """One problem."""
        return [Enumeration(workload, pose(workload))]


class Enumeration(AmpProblem):
    """The fastest micro-batch size that fits; where none fits, the fastest of all, marked so."""

    def solve(self, method: Method, run: Run) -> Candidate:
        """The best of all decisions: proven by having looked at each."""
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
        peak = peak_bytes(held, best)
        assert peak is not None
        return Candidate(
            strategy="dp",
            method=method,
            status="infeasible" if exceeds else "optimal",
            predicted_seconds=seconds,
            objective=None if exceeds else seconds,
            bound=None if exceeds else seconds,
            fits_memory=not exceeds,
            peak_bytes=peak,
            solve_seconds=time.perf_counter() - begun,
            plan=self.to_plan(best),
            message=f"does not fit: one device has to hold {bytes_text(max(peak))}"
            if exceeds
            else "",
            tables=tuple(describe(self.data, best, peak, self.workload.cluster.shown)),
        )

    def held(self) -> AmpData:
        """The data with the memory of plain data parallelism: tied weights once, a sample's
        activations with what is computed again beside them."""
        assert self.data.memory is not None
        kept = list(self.data.memory.layer_bytes_per_sample)
        kept[0] += self.workload.working_bytes.get(1, 0.0)
        layers = [
            layer.model_copy(update={"param_bytes": own.param_bytes})
            for layer, own in zip(self.data.layers, self.workload.profile.layers, strict=True)
        ]
        memory = self.data.memory.model_copy(update={"layer_bytes_per_sample": kept})
        return self.data.model_copy(update={"layers": layers, "memory": memory})

    def decisions(self) -> list[AmpDecision]:
        """Every micro-batch size that all device types have a table for and that divides the batch
        evenly."""
        data, count = self.data, len(self.data.devices)
        sizes = [
            {e.micro_batch for e in data.layer_seconds if (e.tensor, e.type) == (1, name)}
            for name in {device.type for device in data.devices}
        ]
        return [
            AmpDecision(
                pipeline=1,
                data=count,
                tensor=1,
                micro_batch=size,
                placement=[[[device] for device in range(count)]],
                stages=[(0, len(data.layers))],
            )
            for size in sorted(set.intersection(*sizes))
            if data.global_batch % (count * size) == 0
        ]
