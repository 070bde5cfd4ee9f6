"""Problem `joint` for general solvers: which replicas to run together. For small instances.

Sets    a layouts: devices [stages][rows][tensor ranks] of all replicas, with schedule, chunks,
        ZeRO level, recomputation and, from ZeRO 2 on, the number of micro-batches
        k ways to run replica i of a layout: cuts, a micro-batch, g_k samples
Data    G samples of an iteration; E_k seconds that no plan with k replays below (`Master.least`)
Decide  y_a which layout, x_k which ways, T seconds
(1) sum_a y_a = 1                   (2) sum of x_k of replica i of layout a = y_a, each a and i
(3) sum_k g_k x_k = G               (4) T >= sum of E_k x_k of all layouts' replica i, each i
(5) sum of x_k in K <= |K| - 1 for all plans K that were replayed
Least T. Plans that the solver answers with are replayed and stated in (5), until no other is faster
than the fastest of those that fit in memory.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, islice, product
from typing import NamedTuple

import numpy as np

from hetplan.errors import UnsupportedError, require
from hetplan.formulations.joint.bound import Relaxation, lower_bound
from hetplan.formulations.joint.data import JointData, JointDecision
from hetplan.formulations.joint.design import SCHEDULES, Design, Pipe, Space
from hetplan.formulations.joint.evaluate import decision_of
from hetplan.formulations.joint.exact import layouts
from hetplan.replays.chains import Replay
from hetplan.replays.simulator.tasks import Kind, Tasks, simulate
from hetplan.solvers.general import label, minimise
from hetplan.solvers.highs import check_native
from hetplan.solvers.model import Model, Totals
from hetplan.solvers.run import OPTIMAL_GAP, Outcome, Run, Stop, Stopped, stop_reason


@dataclass(frozen=True)
class Parameters:
    """What is small: so many devices and ways to run replicas, at most. Two cores list 100,000 ways
    in some seconds."""

    devices: int = 4
    ways: int = 100_000


class Way(NamedTuple):
    """x_k and E_k. layout: a design whose replicas say no more than their devices, and as `samples`
    the fewest micro-batches that they can take, from ZeRO 2 on those of all replicas."""

    layout: Design
    replica: int
    pipe: Pipe
    seconds: float


def all_layouts(data: JointData) -> Iterator[Design]:
    """Of those that are alike but for the names of devices, one. Between stages the framework's
    highest ZeRO level is the highest."""
    for replicas in layouts(data):
        deepest, highest = max(map(len, replicas)), max(data.framework.pipeline_levels)
        for schedule, chunks in SCHEDULES:
            rounds = [len(stages) if schedule == "interleaved-1f1b" else 1 for stages in replicas]
            pipes = tuple(Pipe(own, (), 1, n) for own, n in zip(replicas, rounds, strict=True))
            levels = range(4 if deepest == chunks == 1 else highest + 1)
            if deepest * chunks <= len(data.layers):
                yield from (
                    Design(pipes, schedule, chunks, zero, mode)
                    for zero, mode in product(levels, data.modes)
                )


def cuts_of(data: JointData, layout: Design, replica: Pipe) -> list[tuple[int, ...]]:
    """All ways to cut the layers."""
    runs = len(replica.groups) * layout.chunks
    return list(combinations(range(1, len(data.layers)), runs - 1))


def ways_of(data: JointData, layout: Design, i: int) -> list[Pipe]:
    """All ways to run a replica."""
    own, others, G = layout.pipes[i], len(layout.pipes) - 1, data.global_batch
    fewest = 1 if others else G
    ways = []
    for cuts in cuts_of(data, layout, own):
        for g in range(fewest, G - others + 1):  # the others take a sample each, at least
            for micro_batch in range(1, g + 1):
                pipe = Pipe(own.groups, cuts, micro_batch, g)
                if pipe.steps % own.samples == 0:
                    ways.append(pipe)
    return ways


def without_waiting(tasks: Tasks) -> float:
    """Seconds that tasks take at least: the longest path where no port is waited for, and what
    holds a port and begins there no earlier than one of them, behind that beginning."""
    path = simulate(replace(tasks, use=np.full(len(tasks), -1)))
    task, port, held = tasks.holds
    begin = path.start[task]
    later = (port[:, None] == port) & (begin[:, None] <= begin)
    return max(path.seconds, float((begin + later @ held).max(initial=0.0)))


class Master:
    """The model; (5) grows. ways: all that may be part of a plan that is no slower than the best of
    one replica. best: of all plans that were replayed, with `limit` seconds."""

    def __init__(self, data: JointData, run: Run) -> None:
        self.data, self.run, self.limit = data, run, math.inf
        self.best: Design | None = None
        self.ways: list[Way] = []
        self.replayed: list[list[int]] = []
        self.space = cache(lambda batch: Space(data.model_copy(update={"global_batch": batch})))

    def add_ways(self, most: Parameters) -> None:
        """Those of least computation first. Raises UnsupportedError where there are too many."""
        devices = len(self.data.devices)
        ways = list(islice(self.all_ways(), most.ways + 1)) if devices <= most.devices else []
        require(
            devices <= most.devices and len(ways) <= most.ways,
            "too many ways to run replicas for a general solver",
            where=f"{devices} devices, {len(self.data.layers)} layers",
            expected=f"at most {most.devices} devices and {most.ways} ways",
            kind=UnsupportedError,
        )
        for way in sorted(ways, key=lambda way: way.seconds):
            self.run.check()
            seconds = self.least(way) if way.seconds <= self.limit else math.inf
            if seconds < math.inf and seconds <= self.limit:
                self.ways.append(way._replace(seconds=seconds))

    def all_ways(self) -> Iterator[Way]:
        """With the seconds of their computation alone."""
        for layout in all_layouts(self.data):
            for i in range(len(layout.pipes)):
                for pipe in ways_of(self.data, layout, i):
                    steps = pipe.steps if layout.zero > 1 else 0
                    pipes = tuple(replace(p, samples=steps or p.samples) for p in layout.pipes)
                    self.run.check()
                    if not any(steps % p.samples for p in layout.pipes):
                        least = self.space(pipe.samples).least(replace(layout, pipes=(pipe,)))
                        yield Way(replace(layout, pipes=pipes), i, pipe, least)

    def least(self, way: Way) -> float:
        """E_k; inf where it cannot be part of the best plan.

        The only replica of a plan is replayed. Of several, the passes and messages of the others
        take no time. What is joined with them and all updates depend on nothing in them but cuts:
        the least over all cuts counts. They hold least with one sample in each micro-batch.
        """
        layout, i, pipe, _ = way
        others, least = layout.pipes[:i] + layout.pipes[i + 1 :], math.inf
        every = [cuts_of(self.data, layout, p)[: None if p.groups[1:] else 1] for p in others]
        for cuts in product(*every):
            more = (replace(p, cuts=own) for p, own in zip(others, cuts, strict=True))
            replay = self.replay(replace(layout, pipes=(pipe, *more)), best=not others)
            if replay.fits and not others:
                return replay.seconds
            if replay.fits:
                tasks = replay.timeline.tasks
                kept = (tasks.unit < len(pipe.groups)) | (tasks.kind >= Kind.COLLECTIVE)
                counted = replace(tasks, seconds=tasks.seconds * kept, delay=tasks.delay * kept)
                least = min(least, without_waiting(counted))
        return least

    def replay(self, design: Design, *, best: bool = True) -> Replay:
        """best: whether it is a plan of its own, which may be the best."""
        space = self.space(sum(pipe.samples for pipe in design.pipes))
        replay = space.replayer.replay(space.plan(design))
        if best and replay.fits and replay.seconds < self.limit:
            self.best, self.limit = design, replay.seconds
            self.run.report(incumbent=self.limit)
        return replay

    def model(self) -> Model:
        """(1) to (5)."""
        ways, seconds = self.ways, np.array([way.seconds for way in self.ways])
        model = Model("joint", self.run, Totals(least=seconds.min(), largest=seconds.max()))
        kinds = list(dict.fromkeys(way.layout for way in ways))
        members = {(a, i): list[int]() for a in kinds for i in range(len(a.pipes))}
        for k, way in enumerate(ways):
            members[way.layout, way.replica].append(k)
        x, y = model.binary("x", (len(ways),)), model.binary("y", (len(kinds),))
        total = model.seconds("T", (), seconds.min(), min(seconds.max(), self.limit))
        model.minimize(total)
        model.row("layout", y.sum() == 1)  # (1)
        for (layout, _), numbers in members.items():  # (2)
            model.row("replica", x[numbers].sum() == y[kinds.index(layout)])
        samples = np.array([way.pipe.samples for way in ways])
        model.row("samples", samples @ x == self.data.global_batch)  # (3)
        for i in range(max(way.replica for way in ways) + 1):  # (4)
            numbers = [k for k, way in enumerate(ways) if way.replica == i]
            model.row("least", total >= seconds[numbers] @ x[numbers])
        for chosen in self.replayed:  # (5)
            model.row("replayed", x[chosen].sum() <= len(chosen) - 1)
        return model


def solve_by(
    method: str, data: JointData, run: Run, parameters: Parameters = Parameters()
) -> Outcome[JointDecision]:
    """The optimum, by the solver behind `method`; at the time limit, the best plan and a bound.
    Raises UnsupportedError for instances that are not small."""
    check_native(run.options)
    solver, begun = label(method, run.options), run.elapsed
    master, bound, built = Master(data, run), 0.0, 0.0
    try:
        master.add_ways(parameters)
        built, bound = run.elapsed - begun, 0.0 if master.ways else math.inf
        while bound < master.limit * (1 - OPTIMAL_GAP):
            answer = minimise(method, master.model(), run, lambda incumbent, bound: None)
            bound = math.inf if answer.stop is Stop.INFEASIBLE else answer.bound or bound
            if not answer.has_solution:
                break
            run.report(bound=min(bound, master.limit) or None)
            chosen = answer.counts("x").nonzero()[0].tolist()
            ways = [master.ways[k] for k in chosen]
            master.replay(replace(ways[0].layout, pipes=tuple(way.pipe for way in ways)))
            master.replayed.append(chosen)
    except Stopped:
        bound = bound or lower_bound(Relaxation(data), run, master.limit)
    bound, best = min(bound, master.limit), master.best
    proven = bound >= master.limit * (1 - OPTIMAL_GAP)
    stop = stop_reason(run)
    if proven:
        stop = Stop.OPTIMAL if best else Stop.INFEASIBLE
    return Outcome(
        stop=stop,
        decision=decision_of(master.space(data.global_batch).plan(best)) if best else None,
        bound=bound if 0 < bound < math.inf else None,
        build_seconds=built,
        solver=solver,
        message="no plan fits in memory" if proven and not best else "",
        details={"ways": len(master.ways), "replayed": len(master.replayed)},
    )
