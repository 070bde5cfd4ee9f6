"""When nothing fits: the least that would have to change.

Recomputation and every micro-batch size of the profile are choices of the search already. What remains is memory. The
least extra memory per device is found by bisection on AMP's exact problem with full recomputation (pipelines and tensor
groups) and in closed form for ZeRO 3 (the states divided over all devices); the smaller of both is told, for all
devices alike and for each type alone. Both are the families' memory models; the replay may need a little more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hetplan.formulations import family
from hetplan.formulations.amp.data import AmpData
from hetplan.formulations.amp.pose import pose
from hetplan.formulations.poplar.zero import States
from hetplan.planner.recomputation import recomputed
from hetplan.profiling.workload import Workload
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Progress, Run
from hetplan.text import bytes_text

STEPS = 10  # halvings: the answer is within 0.1 % of the largest that was tried
FACTOR = 64  # at most so many times the largest device's memory is tried
SECONDS = 5.0  # for each question


@dataclass(frozen=True)
class Relaxation:
    """what: for people. extra_bytes: per device, by type; empty where it is no memory. proven: that less will not do
    (by the family's own memory model)."""

    what: str
    extra_bytes: Mapping[str, float]
    proven: bool

    def document(self) -> Mapping[str, Any]:
        """As JSON types."""
        return {"what": self.what, "extra_bytes": dict(self.extra_bytes), "proven": self.proven}


def relaxations(workload: Workload, run: Run | None = None) -> list[Relaxation]:
    """What would make the workload fit, the smallest first; empty where none of it does."""
    outer = run or Run()
    least = recomputed(workload, "full")
    all_types = workload.cluster.types
    choices = dict.fromkeys([all_types, *((name,) for name in all_types)])
    found = [r for types in choices if (r := more_memory(least, types, outer)) is not None]
    counts = workload.cluster.counts()
    ordered = sorted(found, key=lambda r: sum(counts[t] * x for t, x in r.extra_bytes.items()))
    return [*smaller_micro_batch(least, outer), *ordered]


def more_memory(workload: Workload, types: tuple[str, ...], run: Run) -> Relaxation | None:
    """The least extra bytes on each device of these types; None where no amount tried does."""
    pipelines = by_pipelines(workload, types, run)
    sharded = by_shards(workload, types)
    choices = [(extra, how, proven) for extra, how, proven in (pipelines, sharded) if extra is not None]
    if not choices:
        return None
    extra, how, proven = min(choices)
    counts = workload.cluster.counts()
    on = " and ".join(f"each of {counts[name]} {name}" for name in types)
    text = f"{bytes_text(extra)} more on {on}, {how}"
    return Relaxation(text, dict.fromkeys(types, extra), proven and pipelines[0] is not None)


def by_shards(workload: Workload, types: tuple[str, ...]) -> tuple[float | None, str, bool]:
    """ZeRO 3 with full recomputation over all devices, one sample each."""
    states, usable = States.of(workload), workload.device_bytes()
    needed = states.resident(3, 1 / len(workload.cluster.devices)) + states.per_sample
    lacking = {name: needed - room for name, room in usable.items()}
    if any(lacks > 0 for name, lacks in lacking.items() if name not in types):
        return None, "", False
    extra = max(0.0, *(lacking[name] for name in types))
    return extra, "under ZeRO 3 with full recomputation", True


def by_pipelines(workload: Workload, types: tuple[str, ...], run: Run) -> tuple[float | None, str, bool]:
    """The least extra for some plan of AMP's problem, from above, and whether everything below was refuted."""
    data = pose(workload)
    how = "as a pipeline with full recomputation"
    high, proven = max(workload.device_bytes().values(), default=0.0) or 2.0**30, True
    low, top = 0.0, FACTOR * high
    while (answer := fits(data, types, high, run)) is not True:
        proven = proven and answer is False
        low, high = high, 2 * high
        if high > top or run.cancelled:
            return None, how, False
    for _ in range(STEPS):
        middle = (low + high) / 2
        answer = fits(data, types, middle, run)
        proven = proven and answer is not None
        low, high = (low, middle) if answer else (middle, high)
    return high, how, proven


def fits(data: AmpData, types: tuple[str, ...], extra: float, run: Run) -> bool | None:
    """Whether some decision holds with that many more bytes on each device of the types; None: not known in time."""
    assert data.memory is not None
    rooms = {
        name: room + (extra if name in types else 0.0) for name, room in data.memory.device_bytes.items()
    }
    memory = data.memory.model_copy(update={"device_bytes": rooms})
    result = solve(family("amp"), data.model_copy(update={"memory": memory}), "auto", first_found(run))
    if result.decision is not None:
        return True
    return False if result.status == "infeasible" else None


def first_found(run: Run) -> Run:
    """A run that ends with the first decision found, or after a few seconds."""
    inner = run.part(time_limit=SECONDS)
    alone = Run(inner.options)

    def watch(progress: Progress) -> None:
        if progress.incumbent is not None or run.cancelled:
            alone.cancel.set()

    alone.watch = watch
    return alone


def smaller_micro_batch(workload: Workload, run: Run) -> list[Relaxation]:
    """Micro-batches of one sample, where the profile knows larger ones only: what is kept shrinks in proportion."""
    sizes = [size for name in workload.cluster.types for size in workload.profile.micro_batches(name, 1)]
    least = min(sizes, default=1)
    if least == 1:
        return []
    data = pose(workload)
    assert data.memory is not None
    kept = [held / least for held in data.memory.layer_bytes_per_sample]
    memory = data.memory.model_copy(update={"layer_bytes_per_sample": kept})
    if not fits(data.model_copy(update={"memory": memory}), (), 0.0, run):
        return []
    text = f"micro-batches of one sample with full recomputation (the profile has none below {least})"
    return [Relaxation(text, {}, False)]
