"""A replayed or measured iteration as a file that Perfetto and chrome://tracing open."""

from collections.abc import Iterable
from typing import Any

from hetplan.replays.chains import Replay
from hetplan.replays.simulator.tasks import LABELS, Kind

COMMUNICATES = (LABELS[Kind.TRANSFER], LABELS[Kind.COLLECTIVE])
MICRO = 1e6  # seconds to microseconds


def trace(replayed: Replay) -> dict[str, Any]:
    """The replay as a trace: one process per replica, two rows per unit of the replay.

    Row 2 n has the computation of unit n, row 2 n + 1 its communication. A unit is numbered by its
    stage, or under an SPMD program by its device; collectives are events of the first unit that
    joins them.
    """
    places: list[tuple[int, int]] = []  # (replica, n) of each unit of the replay
    rows: list[tuple[int, int, str]] = []
    units = zip(replayed.owners, replayed.devices, strict=True)
    for unit, ((replica, stage), devices) in enumerate(units):
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
        replica, n = places[event["unit"]]
        kind, micro_batch = event["kind"], event["micro_batch"]
        row = 2 * n + 1 if kind in COMMUNICATES else 2 * n
        name = kind if micro_batch < 0 else f"{kind} {micro_batch}"
        chunk = max(event["chunk"], 0)
        spans.append((replica, row, name, kind, event["start"], event["end"], chunk))
    return trace_document(rows, spans)


def trace_document(
    rows: Iterable[tuple[int, int, str]],
    spans: Iterable[tuple[int, int, str, str, float, float, int]],
) -> dict[str, Any]:
    """A document in the Trace Event Format.

    rows: (replica, number of the row, label). spans: (replica, number of the row, name, category,
    start, end, model chunk); start and end in seconds.
    """
    events: list[dict[str, Any]] = []
    for replica, row, label in rows:
        process = {"name": "process_name", "args": {"name": f"replica {replica}"}}
        thread = {"tid": row, "name": "thread_name", "args": {"name": label}}
        events += [{"ph": "M", "pid": replica, **process}, {"ph": "M", "pid": replica, **thread}]
    for replica, row, name, category, start, end, chunk in spans:
        span = {"name": name, "cat": category, "ph": "X", "pid": replica, "tid": row}
        times = {"ts": start * MICRO, "dur": (end - start) * MICRO}
        events.append({**span, **times, "args": {"chunk": chunk}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
