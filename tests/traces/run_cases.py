"""Steps of 1F1B whose parts are known by hand, and the files that record them."""

from __future__ import annotations

from collections.abc import Callable

from hetplan.replays.observed.steps import Pass, PassKind, Step, make_step

STAGES = 2
Seconds = Callable[[int, PassKind, int], float]  # (stage, kind, micro-batch) -> seconds


def two_stages(
    seconds: Seconds, *, message: float = 0.0, replica: int = 0, batches: int = 3
) -> list[tuple[int, int, Pass]]:
    """The passes of two stages under 1F1B, each as early as it can begin. A message takes
    `message` seconds after the pass that gives it, and devices compute meanwhile."""
    order: dict[int, list[tuple[PassKind, int]]] = {0: [("forward", 0)], 1: []}
    for m in range(batches):
        order[1] += [("forward", m), ("backward", m)]
        if m + 1 < batches:
            order[0].append(("forward", m + 1))
        order[0].append(("backward", m))
    done: dict[tuple[int, PassKind, int], float] = {}
    clock = [0.0, 0.0]
    passes = []
    while any(order.values()):
        for stage in range(STAGES):
            while order[stage]:
                kind, m = order[stage][0]
                needs = {(1, "forward"): (0, kind, m), (0, "backward"): (1, kind, m)}
                needed = needs.get((stage, kind))
                if needed is not None and needed not in done:
                    break
                arrived = 0.0 if needed is None else done[needed] + message
                begin = max(clock[stage], arrived)
                end = begin + seconds(stage, kind, m)
                clock[stage] = done[stage, kind, m] = end
                passes.append((replica, stage, Pass(kind, stage, m, begin, end)))
                order[stage].pop(0)
    return passes


def even(stage: int, kind: PassKind, batch: int) -> float:
    """1 s forward, 2 s backward."""
    return 1.0 if kind == "forward" else 2.0


def step_of(*replicas: list[tuple[int, int, Pass]], after: float = 0.0) -> Step:
    """A step of several replicas, which ends so many seconds after the last pass."""
    passes = [one for replica in replicas for one in replica]
    end = max(one.end for _, _, one in passes) + after
    return make_step(0, passes, end, "test")
