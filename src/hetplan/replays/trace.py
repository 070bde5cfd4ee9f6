"""A replayed or measured iteration as a trace for Perfetto."""

from collections.abc import Iterable
from typing import Any

from hetplan.replays.chains import Replay
from hetplan.replays.simulator.tasks import LABELS, Kind

COMMUNICATES = (LABELS[Kind.TRANSFER], LABELS[Kind.COLLECTIVE])
MICRO = 1e6  # seconds to microseconds


def trace(replayed: Replay) -> dict[str, Any]:
    """The replay as a trace.

    Each stage has a row 2 n for computing and a row 2 n + 1 for communicating. Under an SPMD
    program each device has them; collectives stand in the first device's.
    """
    places: list[tuple[int, int]] = []  # (replica, n) of each unit of the replay
    rows: list[tuple[int, int, str]] = []
    for unit, ((replica, stage), devices) in enumerate(
        zip(replayed.owners, replayed.devices, strict=True)
    ):
        numbers = ", ".join(map(str, devices))
        if replayed.by_device:
            n, label = unit, f"device {numbers}"
        else:
            n, label = stage, f"stage {stage} (devices {numbers})"
        places.append((replica, n))
        rows.append((replica, 2 * n, f"{label} computes"))
        rows.append((replica, 2 * n + 1, f"{label} communicates"))
    spans = []
    for event in replayed.timeline.events():
        (replica, n), kind = places[event["unit"]], event["kind"]
        row = 2 * n + 1 if kind in COMMUNICATES else 2 * n
        name = kind if event["micro_batch"] < 0 else f"{kind} {event['micro_batch']}"
        spans.append((replica, row, name, kind, event["start"], event["end"]))
    return trace_document(rows, spans)


def trace_document(
    rows: Iterable[tuple[int, int, str]],
    spans: Iterable[tuple[int, int, str, str, float, float]],
) -> dict[str, Any]:
    """The Trace Event Format, which chrome://tracing and Perfetto open.

    rows: (replica, number, label). spans: (replica, row, name, category, start, end) in seconds.
    """
    events: list[dict[str, Any]] = []
    for replica, row, label in rows:
        process = {"name": "process_name", "args": {"name": f"replica {replica}"}}
        thread = {"tid": row, "name": "thread_name", "args": {"name": label}}
        events += [{"ph": "M", "pid": replica, **process}, {"ph": "M", "pid": replica, **thread}]
    for replica, row, name, category, start, end in spans:
        span = {"name": name, "cat": category, "ph": "X", "pid": replica, "tid": row}
        events.append(span | {"ts": start * MICRO, "dur": (end - start) * MICRO})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
