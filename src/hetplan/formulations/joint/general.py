"""Problem `joint` for general solvers, on small instances: a model of lower bounds, whose plans are
replayed.

A *way* is one choice of cuts, micro-batch and samples for a replica of a layout (ways.py).

Sets   a layouts: devices [stages][row groups][tensor ranks] of all replicas, with schedule, chunks,
       ZeRO level, recomputation and, from ZeRO 2 on, the number of micro-batches
       k ways; each belongs to one replica i of one layout a
       K plans that have been replayed: sets of ways
Data   G samples of an iteration; g_k samples of way k; E_k seconds, a lower bound on the replay of
       every plan with way k (`Master.least`)
Vars   y_a in {0,1}: layout a is used;  x_k in {0,1}: way k is used;  T seconds
Min    T  s.t.
(1) sum_a y_a = 1
(2) sum of x_k over the ways of replica i of layout a = y_a, for every a and i
(3) sum_k g_k x_k = G
(4) T >= sum of E_k x_k over the ways of replica i of all layouts, for every i
(5) sum of x_k over k in K <= |K| - 1, for every plan K
Each plan that the solver returns is replayed and excluded by (5). The method ends when the model's
optimum is no less than the seconds of the fastest plan that was replayed and fits in memory.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice, product

import numpy as np

from hetplan.errors import UnsupportedError, require
from hetplan.formulations.joint.bound.driver import lower_bound
from hetplan.formulations.joint.bound.tables import Relaxation
from hetplan.formulations.joint.data import JointData, JointDecision
from hetplan.formulations.joint.design import Design, Pipeline
from hetplan.formulations.joint.evaluate import decision_of
from hetplan.formulations.joint.space import Space
from hetplan.formulations.joint.ways import ReplicaWay, all_ways, cuts_of
from hetplan.replays.chains import Replay
from hetplan.replays.simulator.tasks import Kind, Tasks, simulate
from hetplan.solvers.general import label, minimise
from hetplan.solvers.highs import check_native
from hetplan.solvers.model import Model, Totals
from hetplan.solvers.run import OPTIMAL_GAP, Outcome, Run, Stop, Stopped, stop_reason


@dataclass(frozen=True)
class Parameters:
    """Limits of small instances."""

    devices: int = 4  # most devices
    ways: int = 100_000  # most ways; two cores list that many in some seconds


class Master:
    """The ways of an instance, the model that chooses among them, and the replayed plans."""

    def __init__(self, data: JointData, run: Run) -> None:
        self.data, self.run = data, run
        self.best: Design | None = None  # the fastest replayed plan that fits in memory
        self.limit = math.inf  # seconds of `best`
        # The ways whose bounds E_k are no more than the `limit` when they are listed.
        self.ways: list[ReplicaWay] = []
        self.replayed: list[list[int]] = []  # the plans K, each as the numbers of its ways
        # global batch -> the space of the instance with this global batch
        self.space = cache(lambda batch: Space(data.model_copy(update={"global_batch": batch})))

    def add_ways(self, most: Parameters) -> None:
        """List the ways with their bounds E_k, in the order of their seconds of computation.

        Plans of one replica are replayed on the way and give a first `best`. Raises
        UnsupportedError where there are too many devices or ways.
        """
        devices = len(self.data.devices)
        ways: list[ReplicaWay] = []
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
            if way.seconds > self.limit:  # so are all later ones, since the limit only falls
                break
            seconds = self.least(way)
            if seconds < math.inf and seconds <= self.limit:
                self.ways.append(way._replace(seconds=seconds))

    def least(self, way: ReplicaWay) -> float:
        """The bound E_k of a way, in seconds; +inf where no plan with this way fits in memory.

        Where the layout has one replica, the way is a whole plan, and E_k its replayed seconds.
        Otherwise E_k is the least over all cuts of the other replicas, whose passes and messages
        take no time. Gradient collectives and updates depend on the other replicas only through
        their cuts. The other replicas need the least memory with one sample in each micro-batch.
        """
        pipelines = way.layout.pipelines
        others = pipelines[: way.replica] + pipelines[way.replica + 1 :]
        if not others:
            replay = self.replay(replace(way.layout, pipelines=(way.pipeline,)))
            return replay.seconds if replay.fits else math.inf
        least = math.inf
        cuts_of_others = [self.cuts_that_count(way.layout, other) for other in others]
        for chosen in product(*cuts_of_others):
            cut_others = (
                replace(other, cuts=cuts) for other, cuts in zip(others, chosen, strict=True)
            )
            design = replace(way.layout, pipelines=(way.pipeline, *cut_others))
            replay = self.replay(design, may_be_best=False)
            if replay.fits:
                least = min(least, seconds_with_first_replica(replay, way))
        return least

    def cuts_that_count(self, layout: Design, replica: Pipeline) -> list[tuple[int, ...]]:
        """The cuts of a replica with different weights on its stages: all of them, but only the
        first one for a single stage, which has all layers in any case."""
        cuts = cuts_of(self.data, layout, replica)
        return cuts if len(replica.groups) > 1 else cuts[:1]

    def replay(self, design: Design, *, may_be_best: bool = True) -> Replay:
        """The replay of a design. may_be_best: whether it is a plan of the instance, so that it may
        become the `best` one. Without it, its replicas together may have any number of samples."""
        samples = sum(pipeline.samples for pipeline in design.pipelines)
        space = self.space(samples)
        replay = space.replayer.replay(space.plan(design))
        if may_be_best and replay.fits and replay.seconds < self.limit:
            self.best, self.limit = design, replay.seconds
            self.run.report(incumbent=self.limit)
        return replay

    def model(self) -> Model:
        """The model of the module's docstring, with the plans replayed so far in (5)."""
        ways, seconds = self.ways, np.array([way.seconds for way in self.ways])
        model = Model("joint", self.run, Totals(least=seconds.min(), largest=seconds.max()))
        layouts = dict.fromkeys(way.layout for way in ways)
        number_of = {layout: a for a, layout in enumerate(layouts)}
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
        """Replay the plan that the solver chose, and exclude it by (5).

        chosen: numbers of the plan's ways, one for each replica in order.
        """
        ways = [self.ways[k] for k in chosen]
        pipelines = tuple(way.pipeline for way in ways)
        self.replay(replace(ways[0].layout, pipelines=pipelines))
        self.replayed.append(chosen)


def seconds_with_first_replica(replay: Replay, way: ReplicaWay) -> float:
    """A lower bound on the seconds of a replay in which the passes and messages of all replicas but
    the first take no time. Collectives and updates take their time in all replicas.

    way: the way of the first replica.
    """
    tasks = replay.timeline.tasks
    # units are stages, numbered replica by replica
    of_first_replica = tasks.unit < len(way.pipeline.groups)
    takes_time = of_first_replica | np.isin(tasks.kind, (Kind.COLLECTIVE, Kind.OPTIMIZER))
    remaining = replace(tasks, seconds=tasks.seconds * takes_time, delay=tasks.delay * takes_time)
    return without_waiting(remaining)


def without_waiting(tasks: Tasks) -> float:
    """A lower bound on the seconds of tasks: the larger of two bounds.

    The first is the longest path through the tasks where no task waits for a port. On this path
    every task has its earliest start. The second bound takes a port and a task that holds it: this
    task and those with later earliest starts hold the port one after the other, from the task's
    earliest start on.
    """
    path = simulate(replace(tasks, use=np.full(len(tasks), -1)))  # -1: a task holds no ports
    task, port, held_seconds = tasks.holds
    start = path.start[task]
    same_port = port[:, None] == port
    not_earlier = start[:, None] <= start
    busy_until = start + (same_port & not_earlier) @ held_seconds
    return max(path.seconds, float(busy_until.max(initial=0.0)))


def ways_by_replica(
    layouts: Mapping[Design, int], ways: Sequence[ReplicaWay]
) -> dict[tuple[Design, int], list[int]]:
    """(layout, replica) -> numbers of its ways; an empty list where it has none."""
    numbers = {(layout, i): list[int]() for layout in layouts for i in range(len(layout.pipelines))}
    for k, way in enumerate(ways):
        numbers[way.layout, way.replica].append(k)
    return numbers


def solve_by(
    method: str, data: JointData, run: Run, parameters: Parameters = Parameters()
) -> Outcome[JointDecision]:
    """The optimum, found by a general solver; at the time limit, the best plan and a bound.

    method: name of the general solver. Raises UnsupportedError for instances that are not small.
    """
    check_native(run.options)
    solver, begun = label(method, run.options), run.elapsed
    master, bound, built = Master(data, run), 0.0, 0.0
    ended, message = Stop.LIMIT, ""
    try:
        master.add_ways(parameters)
        built = run.elapsed - begun
        if not master.ways:  # no plan fits in memory
            bound = math.inf
        while bound < master.limit * (1 - OPTIMAL_GAP):
            # nothing is reported: the model's objectives are no seconds of plans
            answer = minimise(method, master.model(), run, lambda incumbent, bound: None)
            bound = answer.bound or bound
            if answer.stop is Stop.INFEASIBLE:  # all plans of the model have been replayed
                bound = math.inf
            if not answer.has_solution:
                ended, message = answer.stop, answer.message
                break
            run.report(bound=min(bound, master.limit) or None)  # a bound of 0 proves nothing
            master.replay_answer(np.flatnonzero(answer.counts("x")).tolist())
    except Stopped:
        pass
    # where the solver told no bound, that of exact.py for many devices
    bound = bound or lower_bound(Relaxation(data), run, master.limit)
    bound, best = min(bound, master.limit), master.best
    proven = bound >= master.limit * (1 - OPTIMAL_GAP)
    stop = Stop.ERROR if ended is Stop.ERROR else stop_reason(run)
    if proven:
        stop = Stop.INFEASIBLE if best is None else Stop.OPTIMAL
        message = "no plan fits in memory" if best is None else ""
    return Outcome(
        stop=stop,
        decision=decision_of(master.space(data.global_batch).plan(best)) if best else None,
        bound=bound if 0 < bound < math.inf else None,
        build_seconds=built,
        solver=solver,
        message=message,
        details={"ways": len(master.ways), "replayed": len(master.replayed)},
    )
