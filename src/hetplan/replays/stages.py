"""A replayed plan as a table of its stages."""

from collections.abc import Sequence
from itertools import chain

from hetplan.plans.plan import Plan, Replica, Stage
from hetplan.plans.words import batches_text, layers_text
from hetplan.replays.chains import Replay
from hetplan.text import (
    Column,
    Table,
    devices_text,
    grouped,
    percent_text,
    seconds_text,
    share_text,
)

LISTED = 40  # rows of the table


def stage_table(plan: Plan, run: Replay, title: str, notes: Sequence[str] = ()) -> Table:
    """A table with one row per stage of each group of like replicas; of a program that all devices
    run together, one row per device. Times are of the slowest replica, memory is of the device
    nearest to its limit."""
    places = [(device.node, device.type) for device in plan.devices]
    # each row is a list of units of the replay, see `Replay.owners`
    rows = [[unit] for unit in range(len(run.owners))] if run.by_device else alike(plan, run)

    def replica(units: list[int]) -> Replica:
        i, _ = run.owners[units[0]]
        return plan.replicas[i]

    def stage(units: list[int]) -> Stage:
        i, j = run.owners[units[0]]
        return plan.replicas[i].stages[j]

    def devices(units: list[int]) -> list[int]:
        return list(chain.from_iterable(run.devices[unit] for unit in units))

    def share(units: list[int]) -> float:
        """A device's part of the samples or columns that a program divides."""
        assert plan.program is not None
        return plan.program.ratios[0][units[0]]

    def computes(units: list[int]) -> float:
        return max(float(run.timeline.busy[unit]) for unit in units)

    def idle(units: list[int]) -> float:
        return min(float(run.timeline.idle[unit]) for unit in units) / run.seconds

    def memory(units: list[int]) -> str:
        peak, limit = run.peak_bytes, run.limit_bytes
        fullest = max(devices(units), key=lambda d: peak[d] / max(limit[d], 1.0))
        return share_text(peak[fullest], limit[fullest])

    columns: list[Column[list[int]]] = []
    if len({run.owners[units[0]][0] for units in rows}) > 1:
        columns.append(Column("pipelines", lambda units: f"x{len(units)}", right=True))
    columns += [
        Column("stage", lambda units: run.owners[units[0]][1], right=True),
        Column("layers", lambda units: layers_text(stage(units)), right=True),
        Column("devices", lambda units: devices_text(places, devices(units))),
    ]
    if plan.program:
        columns.append(Column("share", share, percent_text, right=True))
    else:
        columns.append(Column("tensor", lambda units: len(stage(units).tensor_shares), right=True))
    if len({batches_text(each) for each in plan.replicas}) > 1:
        columns.append(Column("batches", lambda units: batches_text(replica(units)), right=True))
    columns += [
        Column("computes", computes, seconds_text, right=True),
        Column("idle", idle, percent_text, right=True),
        Column("memory", memory, right=True),
    ]
    if len(rows) > LISTED:
        notes = [*notes, f"{len(rows) - LISTED} more rows; --json lists all"]
    return Table.of(title, rows[:LISTED], columns, notes)


def alike(plan: Plan, run: Replay) -> list[list[int]]:
    """The rows of `stage_table`, each the units of one stage in all replicas that differ in the
    numbers of their devices alone."""

    def likeness(replica: Replica) -> str:
        types = [
            [[plan.devices[d].type for d in group] for group in stage.devices]
            for stage in replica.stages
        ]
        return str((types, [stage.layers for stage in replica.stages], replica.micro_batches))

    like_replicas = grouped((likeness(replica), i) for i, replica in enumerate(plan.replicas))
    unit = {owner: u for u, owner in enumerate(run.owners)}
    rows = []
    for members in like_replicas.values():
        for j in range(len(plan.replicas[members[0]].stages)):
            rows.append([unit[i, j] for i in members])
    return rows
