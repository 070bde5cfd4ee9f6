"""A replay as a trace that chrome://tracing and Perfetto open: one row per stage, transfers and
collectives apart.

Format: Trace Event Format, "Complete Events" (ph X, ts and dur in microseconds).
"""

from __future__ import annotations

from typing import Any

from hetplan.profiling.simulator.tasks import Kind
from hetplan.profiling.simulator.timeline import LABELS
from hetplan.runtime.replay import Replay

COMMUNICATES = (LABELS[Kind.TRANSFER], LABELS[Kind.COLLECTIVE])
MICRO = 1e6


def trace(found: Replay) -> dict[str, Any]:
    """The document; pid: the replica, tid: 2 row for computing, 2 row + 1 for communicating.

    A row is a stage, or of an SPMD program a device; its collectives stand on the first one's.
    """
    events: list[dict[str, Any]] = []
    rows = [(i, unit if found.by_device else j) for unit, (i, j) in enumerate(found.owners)]
    for unit, (replica, stage) in enumerate(rows):
        names = ", ".join(map(str, found.devices[unit]))
        head = {"ph": "M", "pid": replica}
        events.append({**head, "name": "process_name", "args": {"name": f"replica {replica}"}})
        for row, what in ((2 * stage, "computes"), (2 * stage + 1, "communicates")):
            label = (
                f"device {names} {what}"
                if found.by_device
                else f"stage {stage} (devices {names}) {what}"
            )
            events.append({**head, "tid": row, "name": "thread_name", "args": {"name": label}})
    for event in found.timeline.events():
        replica, stage = rows[event["unit"]]
        batch = event["micro_batch"]
        events.append(
            {
                "name": event["kind"] if batch < 0 else f"{event['kind']} {batch}",
                "cat": event["kind"],
                "ph": "X",
                "ts": event["start"] * MICRO,
                "dur": (event["end"] - event["start"]) * MICRO,
                "pid": replica,
                "tid": 2 * stage + (event["kind"] in COMMUNICATES),
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
