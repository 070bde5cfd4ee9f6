"""Plans of every family replayed on a workload: chains of stages by the sixth problem's evaluator,
SPMD programs by their own; and the replay as a trace."""

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

from hetplan.errors import InputError, UnsupportedError
from hetplan.formulations.joint.plan import Plan
from hetplan.formulations.joint.pose import costs_of
from hetplan.formulations.joint.replay import ChainReplayer, Noise, Replay, Settings
from hetplan.profiling.simulator.pipeline import Collective, Replica as Pipeline
from hetplan.profiling.simulator.tasks import LABELS, Kind
from hetplan.profiling.workload import Workload

__all__ = ["Noise", "Replay", "Replayer", "Settings", "replay"]


class Replayer(ChainReplayer):
    """Replays plans of one workload, one after the other; what they have in common is kept."""

    def __init__(self, workload: Workload, settings: Settings | None = None) -> None:
        super().__init__(partial(costs_of, workload), settings)
        self.workload = workload

    def seconds(self, plan: Plan, limit: float = math.inf) -> float:
        """As of any plan; of an SPMD program its seconds."""
        return super().seconds(plan, limit) if plan.program is None else self.replay(plan).seconds

    def robust_seconds(self, plan: Plan, noise: Noise | None = None) -> float:
        """The median of replays whose durations are noisy; of an SPMD program its seconds."""
        if plan.program is not None:
            return self.replay(plan).seconds
        return super().robust_seconds(plan, noise)

    def parts(self, plan: Plan) -> tuple[list[Pipeline], list[Collective]]:
        """What the simulator takes of a plan without a program."""
        check_same(plan, self.workload)
        return super().parts(plan)

    def replay(self, plan: Plan) -> Replay:
        """One iteration of a plan, with its timeline and memory."""
        if plan.program is not None:
            check_same(plan, self.workload)
            return replay_program(plan, self.workload, self.settings)
        return super().replay(plan)


def replay(plan: Plan, workload: Workload, settings: Settings | None = None) -> Replay:
    """One iteration of the plan. Raises InputError unless plan and workload belong together,
    UnsupportedError for what is not modelled."""
    return Replayer(workload, settings).replay(plan)


def replay_program(plan: Plan, workload: Workload, settings: Settings) -> Replay:
    """One iteration of an SPMD program; every device is a unit of its own."""
    from hetplan.runtime.spmd_replay import SpmdCosts

    if settings != Settings():
        raise UnsupportedError(
            "collectives of SPMD programs stand where the program has them", where=plan.name,
            got="other settings than the default", expected="the default",
        )  # fmt: skip
    costs, usable = SpmdCosts.of(plan, workload), workload.device_bytes()
    return Replay(
        costs.timeline(),
        ((0, 0),) * len(costs.devices),
        tuple((device,) for device in costs.devices),
        costs.peak_bytes(),
        tuple(usable[device.type] for device in workload.cluster.devices),
    )


def check_same(plan: Plan, workload: Workload) -> None:
    """Raise InputError unless the plan was made for such a model, cluster and batch."""
    made, devices = plan.workload, workload.cluster.devices
    checks = (
        ("model", made.model, workload.model.name),
        ("global_batch", made.global_batch, workload.global_batch),
        ("sequence", made.sequence, workload.sequence),
        ("precision", made.precision, workload.precision),
        ("number of layers", len(made.layers), len(workload.profile.layers)),
        ("devices", [d.type for d in plan.devices], [d.type for d in devices]),
        ("nodes", [d.node for d in plan.devices], [d.node for d in devices]),
    )
    for name, of_plan, of_workload in checks:
        if of_plan != of_workload:
            raise InputError(
                f"{name} of the plan is not the workload's",
                where=plan.name,
                got=of_plan,
                expected=repr(of_workload),
            )


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
    events: list[dict[str, Any]] = []
    for replica, row, label in rows:
        head = {"ph": "M", "pid": replica}
        events.append({**head, "name": "process_name", "args": {"name": f"replica {replica}"}})
        events.append({**head, "tid": row, "name": "thread_name", "args": {"name": label}})
    for replica, row, name, category, start, end in spans:
        times = {"ts": start * MICRO, "dur": (end - start) * MICRO}
        place = {"pid": replica, "tid": row}
        events.append({"name": name, "cat": category, "ph": "X", **times, **place})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
