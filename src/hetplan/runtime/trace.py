"""A replay as a trace that chrome://tracing and Perfetto open: one row per stage, transfers and collectives apart.

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
    """The document; pid: the replica, tid: 2 stage for computing, 2 stage + 1 for communicating."""
    events: list[dict[str, Any]] = []
    for unit, (replica, stage) in enumerate(found.owners):
        names = ", ".join(map(str, found.devices[unit]))
        head = {"ph": "M", "pid": replica}
        events.append({**head, "name": "process_name", "args": {"name": f"replica {replica}"}})
        for row, what in ((2 * stage, "computes"), (2 * stage + 1, "communicates")):
            label = f"stage {stage} (devices {names}) {what}"
            events.append({**head, "tid": row, "name": "thread_name", "args": {"name": label}})
    for event in found.timeline.events():
        replica, stage = found.owners[event["unit"]]
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
