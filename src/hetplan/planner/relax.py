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
from hetplan.formulations.amp.pose import pose
from hetplan.planner.search import Search
from hetplan.planner.strategy import Strategy, chosen
from hetplan.planner.variant import Variant, recomputed
from hetplan.profiling.catalogue import GIB
from hetplan.profiling.workload import Workload
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Run
from hetplan.text import bytes_text

CLOSE = 0.01  # the answer is that near to the least, as a share of the memory that it makes
FACTOR = 64  # at most so many times the largest device's memory is tried
SECONDS, ALL_SECONDS = 5.0, 30.0  # for each method, and for one answer


@dataclass(frozen=True)
class Relaxation:
    """A change with which something fits."""

    what: str  # for people
    extra_bytes: Mapping[str, float]  # per device, by type; empty where it is no memory

    def document(self) -> Mapping[str, Any]:
        """As JSON types. proven: that less will not do is what was tried, never a proof."""
        return {"what": self.what, "extra_bytes": dict(self.extra_bytes), "proven": False}


def relaxations(
    workload: Workload, run: Run | None = None, strategies: Sequence[Strategy] | None = None
) -> list[Relaxation]:
    """What would make the workload fit, the smallest first; empty where none of it does.

    strategies: to plan with; those whose exact methods take long are left out where there are
    others.
    """
    run, picked = run or Run(), list(chosen() if strategies is None else strategies)
    quick = [strategy for strategy in picked if not strategy.slow] or picked
    types, counts = workload.cluster.types, workload.cluster.counts()
    sets = dict.fromkeys([types, *((name,) for name in types)])
    more = [more_memory(workload, some, quick, run) for some in sets]
    ordered = sorted(
        (r for r in more if r is not None),
        key=lambda r: sum(counts[name] * extra for name, extra in r.extra_bytes.items()),
    )
    return [*smaller_micro_batch(recomputed(workload, "full"), run), *ordered]


def more_memory(
    workload: Workload, types: tuple[str, ...], strategies: Sequence[Strategy], run: Run
) -> Relaxation | None:
    """The least extra bytes on each device of these types that some plan fits with; None where no
    amount tried does."""

    def fitting(extra: float) -> str | None:
        return fitting_plan(with_memory(workload, types, extra), strategies, run)

    room = max(workload.cluster.specs[name].memory_bytes for name in workload.cluster.types)
    low, high, until = 0.0, room / 4, time.monotonic() + ALL_SECONDS
    while (plan := fitting(high)) is None:
        low, high = high, 2 * high
        if high > FACTOR * room or run.cancelled:
            return None
    while high - low > CLOSE * (room + high) and time.monotonic() < until and not run.cancelled:
        middle = (low + high) / 2
        better = fitting(middle)
        low, high, plan = (middle, high, plan) if better is None else (low, middle, better)
    counts = workload.cluster.counts()
    on = " and ".join(f"each of {counts[name]} {name}" for name in types)
    return Relaxation(f"{bytes_text(high)} more on {on}, by {plan}", dict.fromkeys(types, high))


def with_memory(workload: Workload, types: Sequence[str], extra: float) -> Workload:
    """The workload with so many more bytes on each device of these types."""
    specs = dict(workload.cluster.specs)
    for name in types:
        size = specs[name].memory_gib + extra / GIB
        specs[name] = specs[name].model_copy(update={"memory_gib": size})
    return replace(workload, cluster=replace(workload.cluster, specs=specs))


def fitting_plan(workload: Workload, strategies: Sequence[Strategy], run: Run) -> str | None:
    """The name of a plan that fits when replayed, None without one."""
    for strategy in strategies:
        if run.cancelled:
            return None
        variant = Variant("full" if strategy.recomputes else "none")
        for c in Search(strategy, workload, run.part(time_limit=SECONDS), variant).exact():
            if c.fits_memory and c.plan is not None:
                return c.name
    return None


def smaller_micro_batch(workload: Workload, run: Run) -> list[Relaxation]:
    """Micro-batches of one sample, where the profile knows larger ones only: what is kept shrinks
    in proportion."""
    profile, types = workload.profile, workload.cluster.types
    least = min((size for name in types for size in profile.micro_batches(name, 1)), default=1)
    if least == 1:
        return []
    data = pose(workload)
    assert data.memory is not None
    kept = [held / least for held in data.memory.layer_bytes_per_sample]
    memory = data.memory.model_copy(update={"layer_bytes_per_sample": kept})
    one = data.model_copy(update={"memory": memory})
    if solve(family("amp"), one, "auto", run.part(time_limit=SECONDS)).decision is None:
        return []
    what = "micro-batches of one sample with full recomputation"
    return [Relaxation(f"{what} (the profile has none below {least})", {})]
