"""Exact optimisation of `joint` on few devices, with a proof; a bound on more.

A best-first branch and bound divides plans by

1. layout (which devices make which stages of which replicas), schedule, chunks, recomputation;
2. samples and micro-batches of every replica;
3. cuts between stages: these plans are replayed under every ZeRO level.

`replica_bounds.py` bounds each replica. evidence/speed/joint_bound.md says which plans are
left out as alike.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hetplan.formulations.joint.bound import Relaxation, lower_bound
from hetplan.formulations.joint.data import MOST_CHUNKS, JointData, JointDecision
from hetplan.formulations.joint.design import SCHEDULES, Design, Pipeline
from hetplan.formulations.joint.evaluate import decision_of, plan_of
from hetplan.formulations.joint.layouts import layouts
from hetplan.formulations.joint.replica_bounds import PartialPlan, ReplicaBounds
from hetplan.formulations.joint.search import Parameters as SearchParameters, search as local_search
from hetplan.formulations.joint.space import Space
from hetplan.solvers import branch_and_bound
from hetplan.solvers.branch_and_bound import Expansion, Incumbent
from hetplan.solvers.highs import check_native
from hetplan.solvers.run import Outcome, Run, Stop, stop_reason

Batches = tuple[tuple[int, int], ...]  # samples and micro-batch of replicas
Cuts = tuple[int, ...]  # [V + 1] of one replica


@dataclass(frozen=True)
class Parameters:
    """Limits of the enumeration and of the local search before it."""

    devices: int = 6  # with more, only a bound is given
    at_once: int = 5_000  # cuts; with more, chunks are first bounded by computing alone
    cuts: int = 500_000  # of one layout; layouts with more stay open
    share: float = 0.5  # of the time limit, for the local search
    longest: float = 200.0  # seconds of the time limit that this is a share of, at most
    short: int = 300  # steps of the local search where all is enumerated at once
    rounding: float = 1e-9  # by which a plan must be better, relative


class Branching:
    """The branches of one run on one instance."""

    def __init__(
        self,
        data: JointData,
        run: Run,
        parameters: Parameters,
        incumbent: Incumbent[JointDecision],
    ) -> None:
        self.data, self.run, self.parameters, self.incumbent = data, run, parameters, incumbent
        self.space, self.relaxation = Space(data), Relaxation(data)
        self.bounds = ReplicaBounds(data, self.space, self.relaxation)
        # (replica, layout, schedule, chunks, recomputation, samples) -> see `options`
        self.kept_options: dict[tuple[object, ...], list[tuple[float, int]]] = {}
        self.replays = 0

    def begin(self, starts: Sequence[JointDecision], steps: int | None) -> None:
        """Find an incumbent by local search, in a part of the time and in at most so many steps
        (None: its own number)."""
        limit = self.parameters.share * min(self.run.remaining, self.parameters.longest)
        parameters = None if steps is None else SearchParameters(steps=steps)
        outcome = local_search(self.data, self.run.part(time_limit=limit), starts, parameters)
        if outcome.decision is not None:
            plan = plan_of(self.data, outcome.decision)
            self.incumbent.offer(self.space.replayer.seconds(plan), outcome.decision)

    def roots(self) -> Iterator[tuple[float, PartialPlan]]:
        """(bound, partial plan) of every layout, schedule, number of chunks and recomputation."""
        for layout in layouts(self.data):
            if len(layout) > self.data.global_batch:  # a replica would have no sample
                continue
            for (schedule, chunks), mode in itertools.product(SCHEDULES, self.data.modes):
                plan = PartialPlan(layout, schedule, chunks, mode)
                runs_as_1f1b = plan.deepest == chunks == 1 and schedule == "interleaved-1f1b"
                if plan.deepest * chunks <= len(self.data.layers) and not runs_as_1f1b:
                    # out of time: 0 bounds every plan
                    bound = 0.0 if self.run.should_stop else self.bounds.by_speed(plan)
                    yield bound, plan

    def expand(self, plan: PartialPlan, threshold: float) -> Expansion[PartialPlan]:
        """The parts of a partial plan that may take less than `threshold` seconds; a plan whose
        cuts are set is replayed."""
        if plan.cuts:
            self.replay(plan)
            return Expansion(progress=True)
        too_many = self.bounds.number_of_cuts(plan) > self.parameters.cuts
        if not plan.batches:
            if too_many and plan.chunks == 1:
                return Expansion(dropped_bound=self.bounds.by_speed(plan))
            return Expansion(self.with_batches(plan, threshold))
        if too_many:
            return Expansion(dropped_bound=0.0)  # dropped with the plan's own bound
        return Expansion(self.with_cuts(plan, threshold), progress=True)

    def with_batches(self, plan: PartialPlan, threshold: float) -> list[tuple[float, PartialPlan]]:
        """(bound, plan with samples and micro-batches) of all that may take less."""
        every = self.batches(plan, 0, self.data.global_batch, threshold)
        return [(bound, plan._replace(batches=batches)) for bound, batches in every]

    def batches(
        self, plan: PartialPlan, i: int, left: int, threshold: float
    ) -> Iterator[tuple[float, Batches]]:
        """(bound, samples and micro-batches of replicas i, i + 1, …) that may take less, for `left`
        samples together."""
        replicas_behind = len(plan.layout) - i - 1
        if replicas_behind < 0:
            yield 0.0, ()
            return
        samples = range(1, left - replicas_behind + 1) if replicas_behind else (left,)
        for g in samples:
            for bound, b in self.options(plan, i, g):
                if not bound < threshold:
                    break
                for other, rest in self.batches(plan, i + 1, left - g, threshold):
                    yield max(bound, other), ((g, b), *rest)

    def options(self, plan: PartialPlan, i: int, g: int) -> list[tuple[float, int]]:
        """(bound, micro-batch) of replica i with g samples, the least bound first."""
        key = (i, plan.layout, plan.schedule, plan.chunks, plan.mode, g)
        if key not in self.kept_options:
            many = self.bounds.number_of_cuts(plan) > self.parameters.at_once
            rounds = len(plan.layout[i]) if plan.schedule == "interleaved-1f1b" else 1
            options = []
            for b in range(1, g + 1):
                if -(-g // b) % rounds:
                    continue
                self.run.check()
                if plan.chunks > 1 and many:
                    options.append((self.bounds.by_speed(plan), b))
                else:
                    options.append((float(self.bounds.paths(plan, i, g, b)[1].min()), b))
            self.kept_options[key] = sorted(options)
        return self.kept_options[key]

    def with_cuts(self, plan: PartialPlan, threshold: float) -> Iterator[tuple[float, PartialPlan]]:
        """(bound, plan) of every choice of the replicas' cuts that may take less."""
        choices: list[list[tuple[float, Cuts]]] = []  # of each replica
        for i, (g, b) in enumerate(plan.batches):
            cuts, bounds = self.bounds.paths(plan, i, g, b)
            less = np.flatnonzero(bounds < threshold)
            choices.append([(float(bounds[n]), tuple(cuts[n].tolist())) for n in less])
        return self.products(plan, choices)

    def products(
        self, plan: PartialPlan, choices: list[list[tuple[float, Cuts]]]
    ) -> Iterator[tuple[float, PartialPlan]]:
        """(bound, plan) of every choice of cuts, one for each replica."""
        for chosen in itertools.product(*choices):
            self.run.check()
            bound = max(bound for bound, _ in chosen)
            yield bound, plan._replace(cuts=tuple(cuts for _, cuts in chosen))

    def replay(self, plan: PartialPlan) -> None:
        """Replay the plan under every ZeRO level; the fastest that fits may be the incumbent."""
        pipelines = tuple(
            Pipeline(stages, cuts[1:-1], b, g)
            for stages, (g, b), cuts in zip(plan.layout, plan.batches, plan.cuts, strict=True)
        )
        highest = min(max(self.data.framework.pipeline_levels), 3)
        if plan.deepest == plan.chunks == 1:
            highest = 3
        for zero in range(highest + 1):
            if zero > 1 and len({pipeline.steps for pipeline in pipelines}) > 1:
                break
            design = Design(pipelines, plan.schedule, plan.chunks, zero, plan.mode)
            file = self.space.plan(design)
            self.replays += 1
            replayed = self.space.replayer.replay(file)
            if replayed.fits and replayed.seconds < self.incumbent.objective:
                self.incumbent.offer(replayed.seconds, decision_of(file))


def solve(
    data: JointData,
    run: Run,
    parameters: Parameters = Parameters(),
    starts: Sequence[JointDecision] = (),
) -> Outcome[JointDecision]:
    """The fastest plan with its proof, or the best one so far and a bound when time runs out.
    starts: plans that the local search begins with."""
    check_native(run.options)
    incumbent = Incumbent[JointDecision](run, parameters.rounding)
    branching = Branching(data, run, parameters, incumbent)
    devices = sum(node.devices for node in data.nodes)
    if devices > parameters.devices:
        return with_bound_only(branching, starts)
    many_cuts = most_cuts(data, devices) > parameters.cuts
    branching.begin(starts, None if many_cuts else parameters.short)
    general = 0.0  # the bound of all plans
    if many_cuts:
        part = run.part(time_limit=parameters.share * run.remaining)
        general = lower_bound(branching.relaxation, part, incumbent.objective)
    roots = list(branching.roots())
    proof = branch_and_bound.search(roots, branching.expand, incumbent, run)
    if proof.proven:
        stop = Stop.INFEASIBLE if proof.empty else Stop.OPTIMAL
        bound = proof.bound
    else:
        stop, bound = stop_reason(run), max(general, proof.bound or 0.0) or None
    return outcome_of(branching, stop, bound, layouts=len(roots), nodes=proof.expanded)


def with_bound_only(
    branching: Branching, starts: Sequence[JointDecision]
) -> Outcome[JointDecision]:
    """The best plan of the local search, and the bound of all plans."""
    run, incumbent = branching.run, branching.incumbent
    branching.begin(starts, None)
    bound = lower_bound(branching.relaxation, run, incumbent.objective)
    return outcome_of(branching, stop_reason(run), bound or None, layouts=0, nodes=0)


def most_cuts(data: JointData, devices: int) -> int:
    """No layout has more ways to cut its replica with the most virtual stages."""
    inner = len(data.layers) - 1
    return math.comb(inner, min(MOST_CHUNKS * devices - 1, inner // 2))


def outcome_of(
    branching: Branching, stop: Stop, bound: float | None, *, layouts: int, nodes: int
) -> Outcome[JointDecision]:
    """The incumbent of a run that has ended."""
    from hetplan import __version__

    return Outcome(
        stop=stop,
        decision=branching.incumbent.decision,
        bound=bound,
        solver=f"hetplan {__version__}",
        message="no plan fits into memory" if stop is Stop.INFEASIBLE else "",
        details={"layouts": layouts, "nodes": nodes, "replays": branching.replays},
    )
