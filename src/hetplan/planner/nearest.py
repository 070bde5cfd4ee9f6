"""The nearest plan that a framework can run, for a plan that it cannot run itself.

A change replaces one property of a plan: the ZeRO stage, the recomputation, the schedule, unequal
shares or batches, or a further degree. The nearest plan is one with the fewest changes that the
framework runs and that fits in memory; among those with equally many changes it is the one with the
shortest replay. Model, devices, batch, precision, stages and tensor degrees stay as they are.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from hetplan.errors import InputError, UnsupportedError
from hetplan.plans.degrees import Degrees
from hetplan.plans.plan import Plan, Prediction
from hetplan.replays.replay import Replayer

# No plan needs more changes than there are properties; more than three are another plan.
MOST_CHANGES = 3
# Sizes of micro-batches that are tried where those of a plan are unequal.
MOST_SIZES = 6

Change = tuple[str, dict[str, Any]]
"""(the change in words, keys of a plan's document -> their new values)."""


@dataclass(frozen=True)
class Nearest:
    """A plan that a framework can run in place of another one."""

    plan: Plan
    changes: tuple[str, ...]
    """The differences from the plan that it replaces, in words."""
    seconds: float
    """Seconds of its replay."""
    before: float
    """Seconds of the replay of the plan that it replaces."""


def nearest(plan: Plan, replayer: Replayer, runs: Callable[[Plan], bool]) -> Nearest | None:
    """The nearest plan that a framework runs; None where no `MOST_CHANGES` changes give one.

    runs: whether the framework can run a plan. Raises InputError and UnsupportedError where the
    plan itself cannot be replayed.
    """
    before = replayer.seconds(plan)
    known = {plan.model_dump_json()}
    level: list[tuple[Plan, tuple[str, ...]]] = [(plan, ())]
    for _ in range(MOST_CHANGES):
        level = list(further(level, known))
        best: Nearest | None = None
        for changed, changes in level:
            seconds = seconds_that_fit(changed, replayer) if runs(changed) else None
            if seconds is not None and (best is None or seconds < best.seconds):
                best = Nearest(predicted(changed, plan, seconds), changes, seconds, before)
        if best is not None:
            return best
    return None


def further(
    level: list[tuple[Plan, tuple[str, ...]]], known: set[str]
) -> Iterator[tuple[Plan, tuple[str, ...]]]:
    """All plans with one change more than those of a level, and their changes. known: the plans
    that were met, as JSON, to which the new ones are added."""
    for plan, changes in level:
        document = plan.model_dump(mode="json")
        for words, fields in single_changes(plan, document):
            try:
                # The prediction, and any reason for a refusal, are of the plan as it was.
                changed = Plan.model_validate(
                    {**document, "prediction": None, "refused": None, **fields}
                )
            except (InputError, ValidationError):
                continue  # the properties contradict each other
            text = changed.model_dump_json()
            if text not in known:
                known.add(text)
                yield changed, (*changes, words)


def predicted(changed: Plan, plan: Plan, seconds: float) -> Plan:
    """A changed plan with the seconds of its own replay, where the plan that it replaces states
    some."""
    if plan.prediction is None:
        return changed
    own = Prediction(
        strategy=plan.prediction.strategy,
        method=plan.prediction.method,
        predicted_seconds=seconds,
    )
    return changed.model_copy(update={"prediction": own})


def seconds_that_fit(plan: Plan, replayer: Replayer) -> float | None:
    """Seconds of a plan's replay; None where it does not fit in memory or cannot be replayed."""
    try:
        replay = replayer.replay(plan)
    except (InputError, UnsupportedError):
        return None
    return replay.seconds if replay.fits else None


def single_changes(plan: Plan, document: dict[str, Any]) -> Iterator[Change]:
    """Every change of one property of a plan. document: the plan as JSON types."""
    for zero in (0, 1, 2, 3):
        if zero != plan.zero:
            yield f"ZeRO {plan.zero} -> {zero}", {"zero": zero, "zero_shares": None}
    for kept in ("none", "selective", "operators", "full"):
        if kept != plan.recomputation:
            yield f"recomputation {plan.recomputation} -> {kept}", {"recomputation": kept}
    if plan.schedule in ("gpipe", "1f1b"):
        other = "1f1b" if plan.schedule == "gpipe" else "gpipe"
        yield f"schedule {plan.schedule} -> {other}", {"schedule": other}
    if plan.zero_shares is not None:
        yield "equal ZeRO shards", {"zero_shares": None}
    yield from equal_shares(document)
    yield from equal_batches(plan, document)
    if plan.degrees is not None:
        yield from other_degrees(plan.degrees)


def equal_shares(document: dict[str, Any]) -> Iterator[Change]:
    """Equal shares of weights and rows within each stage, where some are unequal."""
    replicas, unequal = [], False
    for replica in document["replicas"]:
        stages = []
        for stage in replica["stages"]:
            even = {key: [1.0] * len(stage[key]) for key in ("tensor_shares", "row_shares")}
            unequal |= any(len(set(stage[key])) > 1 for key in even)
            stages.append({**stage, **even})
        replicas.append({**replica, "stages": stages})
    if unequal:
        yield "equal shares within stages", {"replicas": replicas}


def equal_batches(plan: Plan, document: dict[str, Any]) -> Iterator[Change]:
    """Equal micro-batches of all replicas, where they are unequal: of the sizes that divide a
    replica's part of the batch, those next to the plan's own mean."""
    batches = [batch for replica in plan.replicas for batch in replica.micro_batches]
    per_replica, rest = divmod(plan.workload.global_batch, len(plan.replicas))
    alike = {(replica.samples, replica.steps) for replica in plan.replicas}
    if rest or (len({batch.samples for batch in batches}) == 1 and len(alike) == 1):
        return
    mean = plan.workload.global_batch / sum(batch.count for batch in batches)
    sizes = [size for size in range(1, per_replica + 1) if per_replica % size == 0]
    sizes.sort(key=lambda size: abs(size - mean))
    for size in sizes[:MOST_SIZES]:
        one = [{"count": per_replica // size, "samples": size}]
        replicas = [{**replica, "micro_batches": one} for replica in document["replicas"]]
        yield f"{one[0]['count']} micro-batches of {size} everywhere", {"replicas": replicas}


def other_degrees(degrees: Degrees) -> Iterator[Change]:
    """Every further degree that a plan can do without, at its default."""
    fields: dict[str, tuple[str, ...]] = {
        "overlap": ("overlap",),
        "offloaded": ("offloaded",),
        "recomputation of some layers": ("recompute_method", "recompute_layers"),
        "attention by all-to-all": ("exchange",),
        "groups of shards": ("shard_groups",),
    }
    default = Degrees()
    for words, names in fields.items():
        usual = {name: getattr(default, name) for name in names}
        if any(getattr(degrees, name) != value for name, value in usual.items()):
            changed = degrees.model_copy(update=usual)
            yield f"without {words}", {"degrees": changed.model_dump(mode="json")}
    flipped = not degrees.sequence_parallel
    changed = degrees.model_copy(update={"sequence_parallel": flipped})
    words = "with" if flipped else "without"
    yield f"{words} sequence parallelism", {"degrees": changed.model_dump(mode="json")}
