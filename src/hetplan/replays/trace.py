"""A replayed or measured iteration as a trace for Perfetto."""

from collections.abc import Iterable
from typing import Any

from hetplan.replays.chains import Replay
from hetplan.replays.simulator.tasks import LABELS, Kind

COMMUNICATES = (LABELS[Kind.TRANSFER], LABELS[Kind.COLLECTIVE])
MICRO = 1e6  # seconds to microseconds


def trace(replayed: Replay) -> dict[str, Any]:
    """The replay as a trace; 2 row for computing, 2 row + 1 for communicating.

    A row is a stage, or of an SPMD program a device; its collectives stand on the first one's.
    """
    units = [(i, unit if replayed.by_device else j) for unit, (i, j) in enumerate(replayed.owners)]
    rows = []
    for (replica, row), devices in zip(units, replayed.devices, strict=True):
        names = ", ".join(map(str, devices))
        label = f"device {names}" if replayed.by_device else f"stage {row} (devices {names})"
        rows += [
            (replica, 2 * row, f"{label} computes"),
            (replica, 2 * row + 1, f"{label} communicates"),
        ]
    spans = []
    for event in replayed.timeline.events():
        (replica, row), kind = units[event["unit"]], event["kind"]
        name = kind if event["micro_batch"] < 0 else f"{kind} {event['micro_batch']}"
        place = (replica, 2 * row + (kind in COMMUNICATES))
        spans.append((*place, name, kind, event["start"], event["end"]))
    return trace_document(rows, spans)


def trace_document(
    rows: Iterable[tuple[int, int, str]],
    spans: Iterable[tuple[int, int, str, str, float, float]],
) -> dict[str, Any]:
    """The Trace Event Format, which chrome://tracing and Perfetto open.

    rows: (replica, number, label). spans: (replica, row, name, category, start, end) in seconds.
    """
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": replica, **name}
        for replica, row, label in rows
        for name in (
            {"name": "process_name", "args": {"name": f"replica {replica}"}},
            {"tid": row, "name": "thread_name", "args": {"name": label}},
        )
    ]
    events += [
        {
            "name": name, "cat": category, "ph": "X", "ts": start * MICRO,
            "dur": (end - start) * MICRO, "pid": replica, "tid": row,
        }
        for replica, row, name, category, start, end in spans
    ]  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms"}
