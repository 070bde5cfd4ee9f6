"""A replayed plan as a table with one row per stage.

Replicas that differ only in the numbers of their devices share their rows. A plan with an SPMD
program has one row per device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
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

MOST_ROWS = 40  # further rows of a table are left out


@dataclass(frozen=True)
class StageRow:
    """A row of the table: one stage of like replicas, or one device of a program."""

    plan: Plan
    run: Replay
    units: list[int]  # the units of the replay (`Replay`) in this row

    @property
    def replica(self) -> Replica:
        """The replica of the first unit."""
        i, _ = self.run.owners[self.units[0]]
        return self.plan.replicas[i]

    @property
    def stage_number(self) -> int:
        """Index of the stage in its replica."""
        _, j = self.run.owners[self.units[0]]
        return j

    @property
    def stage(self) -> Stage:
        """The stage of the first unit."""
        return self.replica.stages[self.stage_number]

    @property
    def devices(self) -> list[int]:
        """The devices of all units."""
        return list(chain.from_iterable(self.run.devices[unit] for unit in self.units))

    def share(self) -> float:
        """A device's share of the samples or columns that a program's first segment divides."""
        assert self.plan.program is not None
        return self.plan.program.ratios[0][self.units[0]]

    def computing_seconds(self) -> float:
        """Seconds of computation of the unit that computes longest."""
        return max(float(self.run.timeline.busy[unit]) for unit in self.units)

    def idle_share(self) -> float:
        """The share of the iteration in which the unit that is least idle does not compute."""
        idle_seconds = min(float(self.run.timeline.idle[unit]) for unit in self.units)
        return idle_seconds / self.run.seconds

    def memory_text(self) -> str:
        """Bytes of the device nearest to its limit, and the limit."""
        peak, limit = self.run.peak_bytes, self.run.limit_bytes
        # a limit may be 0: then one byte, so that the quotient exists
        fullest = max(self.devices, key=lambda device: peak[device] / max(limit[device], 1.0))
        return share_text(peak[fullest], limit[fullest])


def stage_table(plan: Plan, run: Replay, title: str, notes: Sequence[str] = ()) -> Table:
    """The table of a plan and its replay. It has the columns `pipelines` and `batches` only where
    replicas differ in stages or micro-batches."""
    places = [(device.node, device.type) for device in plan.devices]
    if run.by_device:
        units_of_rows = [[unit] for unit in range(len(run.owners))]
    else:
        units_of_rows = units_of_like_stages(plan, run)
    rows = [StageRow(plan, run, units) for units in units_of_rows]
    first_replicas = {run.owners[row.units[0]][0] for row in rows}
    micro_batches = {batches_text(replica) for replica in plan.replicas}

    columns: list[Column[StageRow]] = []
    if len(first_replicas) > 1:
        columns.append(Column("pipelines", lambda row: f"x{len(row.units)}", right=True))
    columns += [
        Column("stage", lambda row: row.stage_number, right=True),
        Column("layers", lambda row: layers_text(row.stage), right=True),
        Column("devices", lambda row: devices_text(places, row.devices)),
    ]
    if plan.program:
        columns.append(Column("share", StageRow.share, percent_text, right=True))
    else:
        columns.append(Column("tensor", lambda row: len(row.stage.tensor_shares), right=True))
    if len(micro_batches) > 1:
        columns.append(Column("batches", lambda row: batches_text(row.replica), right=True))
    columns += [
        Column("computes", StageRow.computing_seconds, seconds_text, right=True),
        Column("idle", StageRow.idle_share, percent_text, right=True),
        Column("memory", StageRow.memory_text, right=True),
    ]
    if len(rows) > MOST_ROWS:
        notes = [*notes, f"{len(rows) - MOST_ROWS} more rows; --json lists all"]
    return Table.of(title, rows[:MOST_ROWS], columns, notes)


def units_of_like_stages(plan: Plan, run: Replay) -> list[list[int]]:
    """For each stage of each group of like replicas, its units in all of these replicas. Like
    replicas differ only in the numbers of their devices."""
    like_replicas = grouped((form_of(plan, r), i) for i, r in enumerate(plan.replicas))
    unit_of = {owner: unit for unit, owner in enumerate(run.owners)}
    rows = []
    for members in like_replicas.values():
        for j in range(len(plan.replicas[members[0]].stages)):
            rows.append([unit_of[i, j] for i in members])
    return rows


def form_of(plan: Plan, replica: Replica) -> str:
    """A text that is equal for like replicas: device types, layers and micro-batches."""
    types = [
        [[plan.devices[device].type for device in group] for group in stage.devices]
        for stage in replica.stages
    ]
    return str((types, [stage.layers for stage in replica.stages], replica.micro_batches))
