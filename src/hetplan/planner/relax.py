"""When nothing fits: the least that would have to change.

Recomputation and every micro-batch size of the profile are choices of the search already. What
remains is memory: the least more per device, for all devices alike and for each type alone, is
found by bisection, and each amount is tried by planning: exact methods with full recomputation,
whose plans are replayed. What is told fits, therefore; that less would not do is what these methods
found, no theorem of all plans.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hetplan.formulations import family
from hetplan.formulations.amp.data import AmpData
from hetplan.formulations.amp.pose import pose
from hetplan.planner.candidates import Search
from hetplan.planner.recomputation import recomputed
from hetplan.planner.strategies import STRATEGIES, Strategy
from hetplan.profiling.catalogue import GIB
from hetplan.profiling.recomputation import Recomputation
from hetplan.profiling.workload import Workload
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Progress, Run
from hetplan.text import bytes_text

CLOSE = 0.01  # the answer is that near to the least, as a share of the memory that it makes
FACTOR = 64  # at most so many times the largest device's memory is tried
SECONDS, ALL_SECONDS = 5.0, 30.0  # for each method, and for one answer


@dataclass(frozen=True)
class Relaxation:
    """what: for people. extra_bytes: per device, by type; empty where it is no memory. proven:
    always False where it is memory: that less will not do is what was tried."""

    what: str
    extra_bytes: Mapping[str, float]
    proven: bool

    def document(self) -> Mapping[str, Any]:
        """As JSON types."""
        return {"what": self.what, "extra_bytes": dict(self.extra_bytes), "proven": self.proven}


def relaxations(
    workload: Workload, run: Run | None = None, strategies: Sequence[Strategy] | None = None
) -> list[Relaxation]:
    """What would make the workload fit, the smallest first; empty where none of it does.

    strategies: to plan with; those whose exact methods take long are left out where there are
    others.
    """
    outer = run or Run()
    picked = list(STRATEGIES.values() if strategies is None else strategies)
    quick = [s for s in picked if not s.slow] or picked
    all_types = workload.cluster.types
    choices = dict.fromkeys([all_types, *((name,) for name in all_types)])
    found = [
        r for types in choices if (r := more_memory(workload, types, quick, outer)) is not None
    ]
    counts = workload.cluster.counts()
    ordered = sorted(found, key=lambda r: sum(counts[t] * x for t, x in r.extra_bytes.items()))
    return [*smaller_micro_batch(recomputed(workload, "full"), outer), *ordered]


def more_memory(
    workload: Workload, types: tuple[str, ...], strategies: Sequence[Strategy], run: Run
) -> Relaxation | None:
    """The least extra bytes on each device of these types that some plan fits with; None where no
    amount tried does."""
    room = max(workload.cluster.specs[name].memory_bytes for name in workload.cluster.types)
    low, high, until = 0.0, room / 4, time.monotonic() + ALL_SECONDS
    while (how := fitting(workload, types, high, strategies, run)) is None:
        low, high = high, 2 * high
        if high > FACTOR * room or run.cancelled:
            return None
    while high - low > CLOSE * (room + high) and time.monotonic() < until and not run.cancelled:
        middle = (low + high) / 2
        better = fitting(workload, types, middle, strategies, run)
        low, high, how = (middle, high, how) if better is None else (low, middle, better)
    counts = workload.cluster.counts()
    on = " and ".join(f"each of {counts[name]} {name}" for name in types)
    return Relaxation(
        f"{bytes_text(high)} more on {on}, by {how}", dict.fromkeys(types, high), False
    )


def with_memory(workload: Workload, types: Sequence[str], extra: float) -> Workload:
    """The workload with so many more bytes on each device of these types."""
    specs = {
        name: spec.model_copy(update={"memory_gib": spec.memory_gib + extra / GIB})
        if name in types
        else spec
        for name, spec in workload.cluster.specs.items()
    }
    return replace(workload, cluster=replace(workload.cluster, specs=specs))


def fitting(
    workload: Workload,
    types: tuple[str, ...],
    extra: float,
    strategies: Sequence[Strategy],
    run: Run,
) -> str | None:
    """The plan that fits when replayed with that many more bytes on each device of the types, None
    without one."""
    bigger = with_memory(workload, types, extra)
    for strategy in strategies:
        if run.cancelled:
            return None
        part = run.part(time_limit=SECONDS)
        mode: Recomputation = "full" if strategy.recomputes else "none"
        methods = strategy.exact if strategy.methods else None
        for candidate in Search(strategy, bigger, part, {}).proposed(mode, methods):
            if candidate.fits_memory and candidate.plan is not None:
                return candidate.name
    return None


def smaller_micro_batch(workload: Workload, run: Run) -> list[Relaxation]:
    """Micro-batches of one sample, where the profile knows larger ones only: what is kept shrinks
    in proportion."""
    sizes = [
        size for name in workload.cluster.types for size in workload.profile.micro_batches(name, 1)
    ]
    least = min(sizes, default=1)
    if least == 1:
        return []
    data = pose(workload)
    assert data.memory is not None
    kept = [held / least for held in data.memory.layer_bytes_per_sample]
    memory = data.memory.model_copy(update={"layer_bytes_per_sample": kept})
    if not fits(data.model_copy(update={"memory": memory}), run):
        return []
    text = (
        f"micro-batches of one sample with full recomputation (the profile has none below {least})"
    )
    return [Relaxation(text, {}, False)]


def fits(data: AmpData, run: Run) -> bool:
    """Whether some decision holds, as far as is known in time."""
    return solve(family("amp"), data, "auto", first_found(run)).decision is not None


def first_found(run: Run) -> Run:
    """A run that ends with the first decision found, or after a few seconds."""
    inner = run.part(time_limit=SECONDS)
    alone = Run(inner.options)

    def watch(progress: Progress) -> None:
        if progress.incumbent is not None or run.cancelled:
            alone.cancel.set()

    alone.watch = watch
    return alone
