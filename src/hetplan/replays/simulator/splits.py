"""Named schedules whose backward passes are split into passes of inputs (B) and of weights (W), as
the order of each stage's passes.

Two schedules are 1F1B with W passes that wait (`zero_bubble`): Qi et al. 2023 ("Zero Bubble
Pipeline Parallelism"), Section 2. ZB-H1 keeps as much as 1F1B, ZB-H2 almost twice as much. For
unequal stages `listed` orders the passes by the stages' own seconds, for an explicit schedule.

The other schedules have two chunks on a V (`plans.passes`): chunk 0 goes down the stages, chunk 1
goes up again.

- ZBV: Qi et al. 2023, Section 6, by the phases of torch.distributed.pipelining's
  ScheduleZBVZeroBubble.
- DualPipeV: DeepSeek-AI 2024 (DeepSeek-V3), Section 3.2.1, and its repository DualPipe, by the
  steps of torch's ScheduleDualPipeV. Where these compute a forward and a backward pass at the same
  time, the forward pass comes first here.
- V-Half, V-Min: Qi et al. 2024 ("Pipeline Parallelism with Controllable Memory"), Section 3: one
  micro-batch's passes, repeated every six passes.
"""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

from hetplan.plans.passes import Order, Orders, Pass, PassKind

SplitSchedule = Literal["zb-h1", "zb-h2", "zbv", "dualpipev", "v-half", "v-min"]
PERIOD = 6  # passes of a micro-batch in a stage with two chunks
# Passes between a micro-batch's passes of neighbouring stages, on the ways down and up, forward and
# backward. A micro-batch is kept for the sum of them times the stages; the sum of 1F1B is twelve.
# The form is that of Qi et al. 2024, Section 3.2. The numbers are our own, of a search over small
# ones, so that V-Half keeps a little more than half at some numbers of stages.
WAYS = {"v-half": (1, 2, 1, 2), "v-min": (1, 1, 1, 1)}


@lru_cache(maxsize=256)
def split_orders(schedule: SplitSchedule, stages: int, batches: int) -> Orders:
    """[stage] the passes of a named schedule with split backward passes."""
    if schedule in ("zb-h1", "zb-h2"):
        return tuple(
            zero_bubble(schedule, stages - stage, stage, batches) for stage in range(stages)
        )
    if schedule in WAYS:
        return repeated_block(WAYS[schedule], stages, batches)
    of_stage = zbv if schedule == "zbv" else dual_pipe_v
    return tuple(of_stage(stages, stage, batches) for stage in range(stages))


def zero_bubble(schedule: SplitSchedule, warm: int, before: int, batches: int) -> Order:
    """The passes of a stage under ZB-H1 or ZB-H2: those of 1F1B, with W passes that wait until as
    many micro-batches are kept as the first stage keeps.

    warm: stages from this one on. before: stages before it.
    """
    if schedule == "zb-h2":
        warm, before = 2 * warm - 1, 2 * before
    passes = [Pass("F", 0, m) for m in range(min(warm, batches))]
    for m in range(batches):
        passes.append(Pass("B", 0, m))
        if m >= before:
            passes.append(Pass("W", 0, m - before))
        if m + warm < batches:
            passes.append(Pass("F", 0, m + warm))
    passes += [Pass("W", 0, m) for m in range(max(0, batches - before), batches)]
    return tuple(passes)


def listed(
    seconds: Sequence[tuple[float, float, float]], batches: int, kept: Sequence[int]
) -> Orders:
    """The order of a pipeline of one chunk per stage by a list heuristic: again and again, the pass
    that can begin first is taken; at a tie B before F, F before W.

    seconds: [stage] of F, B and W. kept: [stage] the most micro-batches between F and W.
    """
    stages = len(seconds)
    orders: list[list[Pass]] = [[] for _ in range(stages)]
    free = [0.0] * stages
    count = [Counter[PassKind]() for _ in range(stages)]  # passes so far, by kind
    end: dict[tuple[int, PassKind, int], float] = {}  # (stage, kind, micro-batch) -> seconds

    def ready(stage: int, kind: PassKind) -> float | None:
        """When the stage's next pass of a kind can begin; None where that is not known."""
        m = count[stage][kind]
        if m == batches or (kind == "F" and m - count[stage]["W"] == kept[stage]):
            return None
        needs: dict[PassKind, tuple[int, PassKind, int]] = {
            "F": (stage - 1, "F", m),
            "B": (stage + 1, "B", m) if stage + 1 < stages else (stage, "F", m),
            "W": (stage, "B", m),
        }
        if kind == "F" and stage == 0:
            return free[stage]
        done = end.get(needs[kind])
        return None if done is None else max(free[stage], done)

    kinds: tuple[PassKind, ...] = ("B", "F", "W")
    for _ in range(3 * stages * batches):
        possible = []
        for stage in range(stages):
            for rank, kind in enumerate(kinds):
                begin = ready(stage, kind)
                if begin is not None:
                    possible.append((begin, rank, stage))
        begin, rank, stage = min(possible)
        kind = kinds[rank]
        m = count[stage][kind]
        free[stage] = end[stage, kind, m] = begin + seconds[stage]["FBW".index(kind)]
        count[stage][kind] += 1
        orders[stage].append(Pass(kind, 0, m))
    return tuple(map(tuple, orders))


def repeated_block(ways: tuple[int, int, int, int], stages: int, batches: int) -> Orders:
    """The order in which every stage repeats one micro-batch's six passes every `PERIOD` passes.

    ways: passes between neighbouring stages on the four ways. Where the time of a pass is taken
    modulo the period, the next free one is used.
    """
    taken: list[dict[int, int]] = [{} for _ in range(stages)]  # time modulo period -> time
    times: list[dict[tuple[PassKind, int], int]] = [{} for _ in range(stages)]

    def place(stage: int, kind: PassKind, chunk: int, earliest: int) -> int:
        """Put a pass at the first free time from `earliest` on, which is returned."""
        time = next(t for t in range(earliest, earliest + PERIOD) if t % PERIOD not in taken[stage])
        taken[stage][time % PERIOD] = times[stage][kind, chunk] = time
        return time

    down, up = range(stages), range(stages - 1, -1, -1)
    steps: list[tuple[PassKind, int, range]] = [
        ("F", 0, down), ("F", 1, up), ("B", 1, down), ("B", 0, up),
    ]  # fmt: skip
    time = -1
    for (kind, chunk, way), apart in zip(steps, ways, strict=True):
        for i, stage in enumerate(way):
            time = place(stage, kind, chunk, time + (apart if i else 1))
    for stage in range(stages):
        for chunk in (1, 0):
            place(stage, "W", chunk, times[stage]["B", chunk] + 1)
    orders = []
    for of_stage in times:
        at = [
            (time + PERIOD * m, Pass(kind, chunk, m))
            for (kind, chunk), time in of_stage.items()
            for m in range(batches)
        ]
        orders.append(tuple(one for _, one in sorted(at)))
    return tuple(orders)


class Writer:
    """Writes the order of a stage with two chunks. The passes of a kind and chunk take the
    micro-batches one after the other."""

    def __init__(self) -> None:
        self.order: list[Pass] = []
        self.count = Counter[tuple[PassKind, int]]()  # passes so far, by kind and chunk
        self.waiting: list[int] = []  # chunks of the W passes that are still to come

    def add(self, chunk: int, *kinds: PassKind, times: int = 1) -> None:
        """Add the next pass of each of these kinds of a chunk, and repeat that `times` times."""
        for kind in kinds * times:
            counted: PassKind = "B" if kind == "D" else kind
            self.order.append(Pass(kind, chunk, self.count[counted, chunk]))
            self.count[counted, chunk] += 1
            if kind == "D":
                self.count["W", chunk] += 1
            elif kind == "B":
                self.waiting.append(chunk)
            elif kind == "W":
                self.waiting.remove(chunk)

    def add_waiting(self) -> None:
        """Add the W pass that has waited longest, if there is one."""
        if self.waiting:
            self.add(self.waiting[0], "W")


def zbv(stages: int, stage: int, batches: int) -> Order:
    """The passes of a stage under ZBV. Passes of micro-batches that the pipeline lacks are left
    out."""
    stages_behind, all_batches = stages - stage, max(2 * stages - 1, batches)
    written = Writer()
    written.add(0, "F", times=2 * stages_behind - 1)
    for _ in range(stage):
        written.add(1, "F")
        written.add(0, "F")
    for _ in range(stages_behind):
        written.add(1, "F", "B", "W")
    while written.count["F", 1] < all_batches:
        if written.count["F", 0] < all_batches:
            written.add(0, "F")
        written.add(0, "B", "W")
        written.add(1, "F", "B", "W")
    for _ in range(stage):
        written.add(0, "B")
        written.add(1, "B")
    for _ in range(stages_behind):
        written.add(0, "B", "W")
    for chunk in (1, 0):
        written.add(chunk, "W", times=written.waiting.count(chunk))
    return tuple(one for one in written.order if one.batch < batches)


def dual_pipe_v(stages: int, stage: int, batches: int) -> Order:
    """The passes of a stage under DualPipeV, for at least twice as many micro-batches as stages."""
    behind = stages - stage - 1
    written = Writer()
    written.add(0, "F", times=2 * behind)
    for _ in range(stage + 1):
        written.add(0, "F")
        written.add(1, "F")
    for _ in range(behind):
        written.add(1, "B")
        written.add_waiting()
        written.add(1, "F")
    for _ in range(batches - 2 * stages + stage + 1):
        written.add(0, "F")
        written.add(1, "D", "F")
        written.add(0, "D")
    for _ in range(behind):
        written.add(1, "D", "F")
        written.add(0, "D")
    # From the middle of the drain on, W passes wait for the end.
    split_from = 2 * ((stage + 1) // 2) + (stage + 1) % 2
    for number in range(2 * (stage + 1)):
        written.add(1 - number % 2, "D" if number < split_from else "B")
    for _ in range(behind):
        written.add_waiting()
        written.add(0, "B")
    while written.waiting:
        written.add_waiting()
    return tuple(written.order)
