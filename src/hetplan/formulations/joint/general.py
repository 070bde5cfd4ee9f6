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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice, product

import numpy as np

from hetplan.errors import UnsupportedError, require
from hetplan.formulations.joint.bound import Relaxation, lower_bound
from hetplan.formulations.joint.data import JointData, JointDecision
from hetplan.formulations.joint.design import Design, Pipeline
from hetplan.formulations.joint.evaluate import decision_of
from hetplan.formulations.joint.space import Space
from hetplan.formulations.joint.ways import Way, all_ways, cuts_of
from hetplan.replays.chains import Replay
from hetplan.replays.simulator.tasks import Kind, Tasks, simulate
from hetplan.solvers.general import label, minimise
from hetplan.solvers.highs import check_native
from hetplan.solvers.model import Model, Totals
from hetplan.solvers.run import OPTIMAL_GAP, Outcome, Run, Stop, Stopped, stop_reason


@dataclass(frozen=True)
class Parameters:
    """Limits of small instances: devices, and ways to run replicas. Two cores list 100,000 ways in
    some seconds."""

    devices: int = 4
    ways: int = 100_000


class Master:
    """The model and the plans that were replayed; (5) grows with them."""

    def __init__(self, data: JointData, run: Run) -> None:
        self.data, self.run = data, run
        self.best: Design | None = None  # of all plans that were replayed and fit
        self.limit = math.inf  # its seconds
        # All that may be part of a plan that is no slower than the best of one replica.
        self.ways: list[Way] = []
        self.replayed: list[list[int]] = []  # the sets K: numbers of ways
        self.space = cache(lambda batch: Space(data.model_copy(update={"global_batch": batch})))

    def add_ways(self, most: Parameters) -> None:
        """List the ways with their bounds E_k, those of least computation first. Raises
        UnsupportedError where there are too many."""
        devices = len(self.data.devices)
        ways: list[Way] = []
        if devices <= most.devices:
            ways = list(islice(all_ways(self.data, self.space, self.run), most.ways + 1))
        require(
            devices <= most.devices and len(ways) <= most.ways,
            "too many ways to run replicas for a general solver",
            where=f"{devices} devices, {len(self.data.layers)} layers",
            expected=f"at most {most.devices} devices and {most.ways} ways",
            kind=UnsupportedError,
        )
        for way in sorted(ways, key=lambda way: way.seconds):
            self.run.check()
            if way.seconds > self.limit:
                continue
            seconds = self.least(way)
            if seconds < math.inf and seconds <= self.limit:
                self.ways.append(way._replace(seconds=seconds))

    def least(self, way: Way) -> float:
        """E_k; inf where no plan with this way fits in memory.

        The only replica of a plan is replayed. Of several, the passes and messages of the others
        take no time. What is joined with them and all updates depend on nothing in them but cuts:
        the least over all cuts counts. They hold least with one sample in each micro-batch.
        """
        pipelines = way.layout.pipelines
        others = pipelines[: way.replica] + pipelines[way.replica + 1 :]
        if not others:
            replay = self.replay(replace(way.layout, pipelines=(way.pipeline,)))
            return replay.seconds if replay.fits else math.inf
        least = math.inf
        for cuts in product(*(self.cuts_that_count(way.layout, other) for other in others)):
            with_cuts = (
                replace(other, cuts=of_other) for other, of_other in zip(others, cuts, strict=True)
            )
            design = replace(way.layout, pipelines=(way.pipeline, *with_cuts))
            replay = self.replay(design, may_be_best=False)
            if replay.fits:
                least = min(least, seconds_with_first_replica(replay, way))
        return least

    def cuts_that_count(self, layout: Design, replica: Pipeline) -> list[tuple[int, ...]]:
        """All cuts of a replica; one of a single stage, whose chunks hold the same together."""
        every = cuts_of(self.data, layout, replica)
        return every if len(replica.groups) > 1 else every[:1]

    def replay(self, design: Design, *, may_be_best: bool = True) -> Replay:
        """The replay of a design. may_be_best: whether it is a plan of the instance."""
        samples = sum(pipeline.samples for pipeline in design.pipelines)
        space = self.space(samples)
        replay = space.replayer.replay(space.plan(design))
        if may_be_best and replay.fits and replay.seconds < self.limit:
            self.best, self.limit = design, replay.seconds
            self.run.report(incumbent=self.limit)
        return replay

    def model(self) -> Model:
        """(1) to (5)."""
        ways, seconds = self.ways, np.array([way.seconds for way in self.ways])
        model = Model("joint", self.run, Totals(least=seconds.min(), largest=seconds.max()))
        number_of = {layout: a for a, layout in enumerate(dict.fromkeys(w.layout for w in ways))}
        x, y = model.binary("x", (len(ways),)), model.binary("y", (len(number_of),))
        total = model.seconds("T", (), seconds.min(), min(seconds.max(), self.limit))
        model.minimize(total)
        model.row("layout", y.sum() == 1)  # (1)
        for (layout, _), numbers in ways_by_replica(number_of, ways).items():  # (2)
            model.row("replica", x[numbers].sum() == y[number_of[layout]])
        samples = np.array([way.pipeline.samples for way in ways])
        model.row("samples", samples @ x == self.data.global_batch)  # (3)
        for i in range(max(way.replica for way in ways) + 1):  # (4)
            numbers = [k for k, way in enumerate(ways) if way.replica == i]
            model.row("least", total >= seconds[numbers] @ x[numbers])
        for chosen in self.replayed:  # (5)
            model.row("replayed", x[chosen].sum() <= len(chosen) - 1)
        return model

    def replay_answer(self, chosen: list[int]) -> None:
        """Replay the plan of these ways, one for each replica in order, and exclude it by (5)."""
        ways = [self.ways[k] for k in chosen]
        pipelines = tuple(way.pipeline for way in ways)
        self.replay(replace(ways[0].layout, pipelines=pipelines))
        self.replayed.append(chosen)


def seconds_with_first_replica(replay: Replay, way: Way) -> float:
    """Seconds of a replay in which only the first replica's passes and messages, collectives and
    updates take time, at least."""
    tasks = replay.timeline.tasks
    of_first = tasks.unit < len(way.pipeline.groups)
    counts = of_first | (tasks.kind >= Kind.COLLECTIVE)
    counted = replace(tasks, seconds=tasks.seconds * counts, delay=tasks.delay * counts)
    return without_waiting(counted)


def without_waiting(tasks: Tasks) -> float:
    """Seconds that tasks take at least: the longest path where no port is waited for, and what
    holds a port and begins there no earlier than one of them, behind that beginning."""
    path = simulate(replace(tasks, use=np.full(len(tasks), -1)))
    task, port, held = tasks.holds
    begin = path.start[task]
    later = (port[:, None] == port) & (begin[:, None] <= begin)
    return max(path.seconds, float((begin + later @ held).max(initial=0.0)))


def ways_by_replica(
    layouts: Mapping[Design, int], ways: Sequence[Way]
) -> dict[tuple[Design, int], list[int]]:
    """(layout, replica) -> the numbers of its ways, also where there are none."""
    members = {(a, i): list[int]() for a in layouts for i in range(len(a.pipelines))}
    for k, way in enumerate(ways):
        members[way.layout, way.replica].append(k)
    return members


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
            master.replay_answer(answer.counts("x").nonzero()[0].tolist())
    except Stopped:
        bound = bound or lower_bound(Relaxation(data), run, master.limit)
    bound, best = min(bound, master.limit), master.best
    proven = bound >= master.limit * (1 - OPTIMAL_GAP)
    stop = stop_reason(run)
    if proven:
        stop = Stop.INFEASIBLE if best is None else Stop.OPTIMAL
    return Outcome(
        stop=stop,
        decision=decision_of(master.space(data.global_batch).plan(best)) if best else None,
        bound=bound if 0 < bound < math.inf else None,
        build_seconds=built,
        solver=solver,
        message="no plan fits in memory" if stop is Stop.INFEASIBLE else "",
        details={"ways": len(master.ways), "replayed": len(master.replayed)},
    )
