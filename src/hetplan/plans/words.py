"""Text about a plan for people: a summary in words, and a table of its stages."""

from itertools import chain

from hetplan.plans.plan import Plan, Replica, Stage
from hetplan.text import Table, counted, devices_text, ranges_text


def summary(plan: Plan) -> str:
    """The plan in words: `2 pipelines of 4 stages, 16 micro-batches of 2, 1f1b, ZeRO 1, full
    recomputation`. Micro-batches are left out where replicas have different ones."""
    depths = sorted({len(replica.stages) for replica in plan.replicas})
    stages = "one stage" if depths == [1] else f"{' or '.join(map(str, depths))} stages"
    parts = [f"{counted(len(plan.replicas), 'pipeline')} of {stages}"]
    if len({batches_text(replica) for replica in plan.replicas}) == 1:
        parts.append(batches_in_words(plan.replicas[0]))
    chunks = len(plan.replicas[0].stages[0].layers)
    parts.append(f"{plan.schedule} in {chunks} chunks" if chunks > 1 else plan.schedule)
    parts.append(f"ZeRO {plan.zero}")
    if plan.recomputation != "none":
        parts.append(f"{plan.recomputation} recomputation")
    if plan.degrees is not None and plan.degrees.text:
        parts.append(plan.degrees.text)
    return ", ".join(parts)


def degrees_table(plan: Plan) -> Table:
    """A table of the first replica's stages, for a plan that cannot be replayed."""
    places = [(device.node, device.type) for device in plan.devices]
    rows = []
    for j, stage in enumerate(plan.replicas[0].stages):
        layers = chain.from_iterable(range(first, last) for first, last in stage.layers)
        rows.append((str(j), ranges_text(layers), devices_text(places, stage.all_devices)))
    notes = () if plan.refused is None else (plan.refused,)
    title = f"{plan.name}, {plan.origin or 'plan'}: {summary(plan)}"
    return Table(title, ("stage", "layers", "devices of replica 0"), tuple(rows), notes=notes)


def batches_text(replica: Replica) -> str:
    """Count and samples of a replica's micro-batches: `31 of 2 + 1 of 1`."""
    return " + ".join(f"{batch.count} of {batch.samples}" for batch in replica.micro_batches)


def batches_in_words(replica: Replica) -> str:
    """A replica's micro-batches with their noun: `31 micro-batches of 2 + 1 of 1`."""
    count, _, rest = batches_text(replica).partition(" of ")
    noun = "micro-batch" if replica.steps == 1 else "micro-batches"
    return f"{count} {noun} of {rest}"


def layers_text(stage: Stage) -> str:
    """The first and the last layer of each chunk of a stage: `0-3, 8-11`."""
    return ", ".join(f"{first}-{last - 1}" for first, last in stage.layers)
