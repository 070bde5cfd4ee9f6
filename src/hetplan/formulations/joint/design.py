"""Plans as a local search writes them: compact, cheap to change and to compare; and their prices.

A `Design` says what a plan file says, within the space of problem `joint`: equal parts for the rows
and tensor ranks of a stage, equal micro-batches but for the last. `Space` answers what a search
asks of an instance: which devices there are, how long layers take on them, and what a design costs.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import accumulate, chain, pairwise

from hetplan.formulations.joint.data import MOST_CHUNKS, JointData, JointDecision
from hetplan.formulations.joint.replay import ChainReplayer
from hetplan.plans.degrees import Degrees
from hetplan.plans.plan import MicroBatches, Plan, Recomputation, Replica, Schedule, Stage
from hetplan.profiling.simulator.pipeline import Schedule as Pipelined

Group = tuple[tuple[int, ...], ...]  # devices [rows][tensor ranks] of a stage
Form = tuple[str, int, int]  # of a stage: type, rows, tensor ranks
SCHEDULES: tuple[tuple[Pipelined, int], ...] = (
    ("gpipe", 1),
    ("1f1b", 1),
    *(("interleaved-1f1b", chunks) for chunks in range(1, MOST_CHUNKS + 1)),
)  # with numbers of chunks; interleaved with one is 1F1B that warms up twice as long
HALVINGS = 20  # of the slowest stage's seconds, in a search for even cuts
KEPT_STAGES = 20_000  # that are remembered, and answers on cuts


@dataclass(frozen=True, slots=True)
class Pipe:
    """A replica: groups [S] of devices; cuts [S C - 1], the first layers of its virtual stages but
    the first; samples of a micro-batch, and of the iteration."""

    groups: tuple[Group, ...]
    cuts: tuple[int, ...]
    micro: int
    samples: int

    @property
    def steps(self) -> int:
        """Micro-batches."""
        return -(-self.samples // self.micro)


@dataclass(frozen=True, slots=True)
class Design:
    """A plan. chunks: of every stage, more than 1 only when interleaved. degrees: further ones,
    where there are any."""

    pipes: tuple[Pipe, ...]
    schedule: Schedule = "1f1b"
    chunks: int = 1
    zero: int = 0
    mode: Recomputation = "none"
    degrees: Degrees | None = None

    @property
    def used(self) -> set[int]:
        """Devices."""
        return {e for pipe in self.pipes for group in pipe.groups for row in group for e in row}


def design_of(plan: Plan | JointDecision) -> Design:
    """The design nearest to a plan: its own, or with equal shares and micro-batches."""
    pipes = []
    for replica in plan.replicas:
        ends = sorted(end for stage in replica.stages for _, end in stage.layers)
        groups = tuple(tuple(map(tuple, stage.devices)) for stage in replica.stages)
        micro = max(batch.samples for batch in replica.micro_batches)
        if replica.samples:
            pipes.append(Pipe(groups, tuple(ends[:-1]), micro, replica.samples))
    return Design(
        tuple(pipes),
        plan.schedule,
        len(plan.replicas[0].stages[0].layers),
        plan.zero,
        plan.recomputation,
        plan.degrees if isinstance(plan, Plan) else None,
    )


def stage_of(group: Group, *layers: tuple[int, int]) -> Stage:
    """A stage with equal shares."""
    return Stage.model_construct(
        layers=list(layers),
        devices=[list(row) for row in group],
        row_shares=[1.0] * len(group),
        tensor_shares=[1.0] * len(group[0]),
    )


def with_pipes(design: Design, pipes: Sequence[Pipe | None]) -> Design | None:
    """With other replicas; None where one of them is."""
    made = tuple(pipe for pipe in pipes if pipe is not None)
    return replace(design, pipes=made) if len(made) == len(pipes) else None


class Space:
    """An instance, as a search sees it. kind, node [D]: of the devices; layers L; modes of
    recomputation and tensor degrees to choose from."""

    def __init__(self, data: JointData) -> None:
        self.data, self.replayer = data, ChainReplayer.of(data)
        self.kind = [kind for kind, _ in data.devices]
        self.node = [node for _, node in data.devices]
        self.layers, self.batch = len(data.layers), data.global_batch
        self.degrees, self.modes = sorted(data.tensor_degrees), data.modes
        self.sums = cache(self._sums)
        nodes = range(len(data.nodes))
        self._first = [data.nodes.index(node) for node in data.nodes]  # the first node like each
        self._twins = {m: [n for n in nodes if self._first[n] == m] for m in self._first}
        self._on_node = [[e for e, m in enumerate(self.node) if m == n] for n in nodes]
        self._same = data.common_fields
        self.stage = lru_cache(KEPT_STAGES)(stage_of)
        self.even_cuts = lru_cache(KEPT_STAGES)(self._even_cuts)

    def _sums(self, kind: str, tensor: int, rows: int, mode: Recomputation) -> list[float]:
        """[L + 1] forward and backward seconds, added up from the first layer."""
        forward, backward, *_ = self.replayer.costs(mode).layer_seconds(kind, tensor, rows)
        return list(accumulate((forward + backward).tolist(), initial=0.0))

    def plan(self, design: Design) -> Plan:
        """The plan file. Raises pydantic's ValidationError where the design breaks its rules."""
        return Plan.model_validate(dict(self.sketch(design)))

    def sketch(self, design: Design) -> Plan:
        """`plan` of a design that keeps the rules; they are not checked."""
        replicas = []
        for pipe in design.pipes:
            parts, count = [*pairwise((0, *pipe.cuts, self.layers))], len(pipe.groups)
            stages = [self.stage(group, *parts[s::count]) for s, group in enumerate(pipe.groups)]
            full, rest = divmod(pipe.samples, pipe.micro)
            batches = [
                MicroBatches.model_construct(count=n, samples=size)
                for n, size in ((full, pipe.micro), (1, rest))
                if n and size
            ]
            replicas.append(Replica.model_construct(stages=stages, micro_batches=batches))
        return Plan.model_construct(
            **self._same,
            replicas=replicas,
            schedule=design.schedule,
            zero=design.zero,
            recomputation=design.mode,
            degrees=design.degrees,
        )

    def form(self, groups: Sequence[Group]) -> list[Form]:
        """Type, rows and tensor ranks of every stage."""
        return [(self.kind[g[0][0]], len(g), len(g[0])) for g in groups]

    def legal(self, group: Group) -> bool:
        """Whether rows are alike, of one type, each in one node and of a usable tensor degree."""
        kinds, widths = {self.kind[e] for row in group for e in row}, {len(row) for row in group}
        in_nodes = all(len({self.node[e] for e in row}) == 1 for row in group)
        return in_nodes and len(kinds) == len(widths) == 1 and widths <= {*self.degrees}

    def least(self, design: Design) -> float:
        """Seconds that no replay of the design is below: of every stage, the first micro-batch's
        way to it, all its passes, and the last one's way back; computation alone."""
        longest = 0.0
        for pipe in design.pipes:
            ends, count = (0, *pipe.cuts, self.layers), len(pipe.groups)
            micro = min(pipe.micro, pipe.samples)
            times, way = pipe.samples // micro, 0.0
            for s, (kind, rows, tensor) in enumerate(self.form(pipe.groups)):
                both = self.sums(kind, tensor, -(-micro // rows), design.mode)  # of the fullest row
                own = sum(both[ends[v + 1]] - both[ends[v]] for v in range(s, len(ends) - 1, count))
                longest = max(longest, way + times * own)
                way += both[ends[s + 1]] - both[ends[s]]
        return longest

    def fitted(self, pipe: Pipe, chunks: int, mode: Recomputation) -> Pipe | None:
        """With cuts that make the slowest virtual stage as fast as can be, to a millionth; None
        where there are too few layers."""
        cuts = self.even_cuts(tuple(self.form(pipe.groups)), pipe.micro, chunks, mode)
        return None if cuts is None else replace(pipe, cuts=cuts)

    def _even_cuts(
        self, form: tuple[Form, ...], micro: int, chunks: int, mode: Recomputation
    ) -> tuple[int, ...] | None:
        """`fitted` for stages of such types, rows and tensor ranks."""
        if len(form) * chunks > self.layers:
            return None
        sums = [self.sums(kind, tensor, -(-micro // rows), mode) for kind, rows, tensor in form]
        low, high, cuts = 0.0, max(each[-1] for each in sums), None
        for _ in range(HALVINGS):
            limit = (low + high) / 2
            ends = self._within(sums * chunks, limit)
            low, high, cuts = (low, limit, ends) if ends else (limit, high, cuts)
        return tuple(cuts or self._within(sums * chunks, math.inf) or ())

    def _within(self, sums: Sequence[Sequence[float]], limit: float) -> list[int] | None:
        """Cuts where every virtual stage takes at most `limit` seconds; None if there are none."""
        begin, cuts = 0, []
        for after, each in zip(range(len(sums) - 1, -1, -1), sums, strict=True):
            end = bisect_right(each, each[begin] + limit) - 1
            begin = min(end, self.layers - after) if end > begin else 0
            if not begin:
                return None
            cuts.append(begin)
        return cuts[:-1] if begin == self.layers else None

    def scheduled(self, design: Design, schedule: Schedule, chunks: int) -> Design | None:
        """Under another schedule with so many chunks; new cuts where their number changes."""
        pipes: list[Pipe | None] = (
            [self.fitted(pipe, chunks, design.mode) for pipe in design.pipes]
            if chunks != design.chunks
            else list(design.pipes)
        )
        return with_pipes(replace(design, schedule=schedule, chunks=chunks), pipes)

    def canonical(self, design: Design) -> Design:
        """The same design on devices and nodes that are numbered anew: of those that are alike, the
        first in use is the first. Replicas and rows stand in an order of their own.

        The tensor ranks of a row may lie on several nodes.
        """
        unused_twins = {first: iter(nodes) for first, nodes in self._twins.items()}
        unused_devices = [iter(devices) for devices in self._on_node]
        renamed: dict[int, int] = {}  # node -> the node that stands for it
        pipes = []
        for pipe in sorted(design.pipes, key=lambda p: (len(p.groups), p.cuts, p.micro, p.samples)):
            groups: list[Group] = []
            for group in pipe.groups:
                for device in chain.from_iterable(group):
                    node = self.node[device]
                    if node not in renamed:
                        renamed[node] = next(unused_twins[self._first[node]])
                rows = sorted(group, key=lambda row: [renamed[self.node[e]] for e in row])
                groups.append(
                    tuple(
                        tuple(next(unused_devices[renamed[self.node[e]]]) for e in row)
                        for row in rows
                    )
                )
            pipes.append(Pipe(tuple(groups), pipe.cuts, pipe.micro, pipe.samples))
        return replace(design, pipes=tuple(pipes))

    def repaired(self, design: Design) -> Design | None:
        """With micro-batches that suit the schedule (whole rounds of the stages) and ZeRO (equally
        many on all replicas from level 2 on); None where none do."""
        stages = any(len(pipe.groups) > 1 for pipe in design.pipes)
        if (design.zero == 2) if design.degrees else (design.zero > 1 and stages):
            design = replace(design, zero=1)  # between stages the higher levels do as it does
        if design.schedule == "interleaved-1f1b" and not stages:  # of one stage the same
            design = replace(
                design,
                pipes=tuple(replace(pipe, cuts=()) for pipe in design.pipes),
                schedule="1f1b",
                chunks=1,
            )
        pipes, steps = [], design.pipes[0].steps if design.zero > 1 else 0
        for pipe in design.pipes:
            rounds = len(pipe.groups) if design.schedule == "interleaved-1f1b" else 1
            micro = suitable(pipe, rounds, steps)
            if micro is None:
                return None
            pipes.append(pipe if micro == pipe.micro else replace(pipe, micro=micro))
        return self.canonical(replace(design, pipes=tuple(pipes)))


def suitable(pipe: Pipe, rounds: int, steps: int) -> int | None:
    """The micro-batch size nearest to the replica's that makes whole rounds, and so many steps
    where they are not 0; None where none does."""
    sizes = [pipe.micro] if pipe.micro <= pipe.samples else []
    for more in ((), range(1, pipe.samples + 1)):
        numbers = {size: -(-pipe.samples // size) for size in (*sizes, *more)}
        suit = [m for m, n in numbers.items() if n % rounds == 0 and n == (steps or n)]
        if suit:
            return int(min(suit, key=lambda size: abs(size - pipe.micro)))
    return None
