"""Exact optimisation of `joint`: a proven optimum on few devices, a lower bound on more.

A local search (search.py) gives a first incumbent. On few devices, a best-first branch and bound
then divides all plans

1. by layout (which devices make which stages of which replicas), schedule, number of chunks, and
   mode of recomputation;
2. by the samples and micro-batches of every replica;
3. by the cuts between stages. The resulting plans are replayed under every ZeRO level.

replica_bounds.py bounds each replica. evidence/speed/joint_bound.md says which plans are left out
because others run equally long.

Where plans are many, bound/ gives a lower bound of all plans. Then a second search,
equal_search.py, seeks the fastest plan with equal replicas, and bound/ladder.py bounds these plans,
too.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hetplan.formulations.joint.annealing import Parameters as SearchParameters
from hetplan.formulations.joint.bound.driver import Bounds, lower_bounds
from hetplan.formulations.joint.bound.ladder import KnownPlan, equal_rungs, ladder
from hetplan.formulations.joint.bound.tables import Relaxation
from hetplan.formulations.joint.data import MOST_CHUNKS, JointData, JointDecision
from hetplan.formulations.joint.design import SCHEDULES, Design, Pipeline
from hetplan.formulations.joint.equal_search import equal_search
from hetplan.formulations.joint.evaluate import decision_of, plan_of
from hetplan.formulations.joint.layouts import layouts
from hetplan.formulations.joint.replica_bounds import PartialPlan, ReplicaBounds
from hetplan.formulations.joint.search import search as local_search
from hetplan.formulations.joint.space import Space
from hetplan.plans.alike import has_equal_replicas
from hetplan.plans.ladder import Rung
from hetplan.plans.plan import Plan
from hetplan.solvers import branch_and_bound
from hetplan.solvers.branch_and_bound import Expansion, Incumbent
from hetplan.solvers.highs import check_native
from hetplan.solvers.run import Outcome, Run, Stop, stop_reason

Batches = tuple[tuple[int, int], ...]  # (samples, micro-batch) of each replica
Cuts = tuple[int, ...]  # [V + 1] first layers of the virtual stages of one replica, and L
# Seconds that a layout and each of its roots count towards a budget, without their bounds.
LAYOUT_SECONDS, ROOT_SECONDS = 3e-4, 1e-5


@dataclass(frozen=True)
class Parameters:
    """Limits of the enumeration and of the local search before it."""

    devices: int = 6  # on more devices plans are not enumerated
    # Limits on the number of ways to cut the layers of a plan's deepest replica. Above the first
    # one an interleaved plan is first bounded by its computation alone; above the second one plans
    # stay undecided.
    at_once: int = 5_000
    cuts: int = 500_000
    # The local search takes this share of the budget and of the time limit, and at most `longest`
    # counted seconds. Of what is then left, the search for equal replicas takes its own share, of
    # the rest their bounds take theirs, and all else is for all plans; neither of the two takes
    # more than `longest_of_class`.
    share: float = 0.4
    longest: float = 100.0
    share_of_class: float = 0.2
    longest_of_class: float = 25.0
    share_of_relaxation: float = 0.5  # of what is left, for all plans before they are enumerated
    workers: int = 2  # processes among which the local search divides its rounds
    short: int = 300  # steps of the local search where every layout has few cuts
    rounding: float = 1e-9  # share by which a plan must be faster than the incumbent


class Branching:
    """The nodes of one branch and bound, which are partial plans, and the rules that divide
    them."""

    def __init__(
        self,
        data: JointData,
        run: Run,
        parameters: Parameters,
        incumbent: Incumbent[JointDecision],
    ) -> None:
        self.data, self.run, self.parameters, self.incumbent = data, run, parameters, incumbent
        self.space, self.relaxation = Space(data), Relaxation(data)
        self.bounds = ReplicaBounds(data, self.space, self.relaxation, run)
        # (replica, layout, schedule, chunks, recomputation, samples) -> result of `options`
        self.cached_options: dict[tuple[object, ...], list[tuple[float, int]]] = {}
        self.replays = 0  # number of plans that the branch and bound has replayed
        # Number of steps, replays and workers of the local search, and where it was cut.
        self.search_details: dict[str, object] = {}
        self.search_message = ""
        self.equal: KnownPlan | None = None  # the fastest known plan with equal replicas
        self.rungs: list[Rung] = []  # of plans with equal replicas

    def begin(self, starts: Sequence[JointDecision], steps: int | None) -> None:
        """Find an incumbent by local search in a part of the time.

        starts: plans that it begins with. steps: the most steps; None: the search's own number.
        """
        share, longest = self.parameters.share, self.parameters.longest
        part = self.run.part(seconds=longest, share=share)
        parameters = SearchParameters(workers=self.parameters.workers)
        if steps is not None:
            parameters = SearchParameters(steps=steps)
        outcome = local_search(self.data, part, starts, parameters)
        self.search_details = dict(outcome.details)
        self.search_message = outcome.message
        if outcome.decision is not None:
            self.offer(plan_of(self.data, outcome.decision))

    def offer(self, plan: Plan) -> None:
        """Offer a plan that fits in memory as the incumbent, and among plans with equal
        replicas."""
        seconds = self.space.replayer.seconds(plan)
        self.incumbent.offer(seconds, decision_of(plan))
        is_faster = self.equal is None or seconds < self.equal.seconds
        if is_faster and has_equal_replicas(plan):
            self.equal = KnownPlan(plan, seconds)

    def climb(self, starts: Sequence[JointDecision]) -> None:
        """Find a plan with equal replicas, and bound these plans, in a part of the time. starts:
        plans that the local search began with."""
        share, longest = self.parameters.share_of_class, self.parameters.longest_of_class
        plans = [plan_of(self.data, start) for start in starts]
        if self.incumbent.decision is not None:
            plans.append(plan_of(self.data, self.incumbent.decision))
        plan = equal_search(self.data, self.run.part(seconds=longest, share=share), plans)
        if plan is not None:
            self.offer(Plan.model_validate(dict(plan)))
        part = self.run.part(seconds=longest, share=share)
        self.rungs = equal_rungs(self.relaxation, self.equal, part)

    def roots(self) -> Iterator[tuple[float, PartialPlan]]:
        """(bound, partial plan) of every layout, schedule, number of chunks and recomputation."""
        for layout in layouts(self.data):
            self.run.count(LAYOUT_SECONDS)
            if len(layout) > self.data.global_batch:  # a replica would have no sample
                continue
            for (schedule, chunks), mode in itertools.product(SCHEDULES, self.data.modes):
                plan = PartialPlan(layout, schedule, chunks, mode)
                enough_layers = plan.deepest * chunks <= len(self.data.layers)
                one_virtual_stage = plan.deepest == chunks == 1
                runs_as_1f1b = one_virtual_stage and schedule == "interleaved-1f1b"
                if enough_layers and not runs_as_1f1b:
                    self.run.count(ROOT_SECONDS)
                    # 0 bounds every plan, for when time has run out
                    bound = 0.0 if self.run.should_stop else self.bounds.computation_bound(plan)
                    yield bound, plan

    def expand(self, plan: PartialPlan, threshold: float) -> Expansion[PartialPlan]:
        """The children of a partial plan whose bounds are less than `threshold` seconds. A plan
        whose cuts are chosen has no children and is replayed."""
        if plan.cuts:
            self.replay(plan)
            return Expansion(progress=True)
        too_many_cuts = self.bounds.number_of_cuts(plan) > self.parameters.cuts
        # the search raises 0 to the plan's own bound
        undecided = Expansion[PartialPlan](dropped_bound=0.0)
        if not plan.batches:
            # With one chunk, `options` would go through all cuts. With more, it takes the bound by
            # computation alone, and a plan that has no valid batches is decided.
            if too_many_cuts and plan.chunks == 1:
                return undecided
            return Expansion(self.with_batches(plan, threshold))
        if too_many_cuts:
            return undecided
        return Expansion(self.with_cuts(plan, threshold), progress=True)

    def with_batches(self, plan: PartialPlan, threshold: float) -> list[tuple[float, PartialPlan]]:
        """(bound, plan) for every choice of samples and micro-batches with a bound below
        `threshold`."""
        choices = self.batches(plan, 0, self.data.global_batch, threshold)
        return [(bound, plan._replace(batches=batches)) for bound, batches in choices]

    def batches(
        self, plan: PartialPlan, i: int, left: int, threshold: float
    ) -> Iterator[tuple[float, Batches]]:
        """(bound, batches of replicas i, i + 1, …) for every choice with a bound below `threshold`.

        left: the samples of these replicas together.
        """
        replicas_behind = len(plan.layout) - i - 1
        if replicas_behind < 0:
            yield 0.0, ()
            return
        # each replica has a sample; the last one takes all that are left
        samples = range(1, left - replicas_behind + 1) if replicas_behind else (left,)
        for g in samples:
            for bound, b in self.options(plan, i, g):
                if not bound < threshold:
                    break
                for bound_behind, behind in self.batches(plan, i + 1, left - g, threshold):
                    yield max(bound, bound_behind), ((g, b), *behind)

    def options(self, plan: PartialPlan, i: int, g: int) -> list[tuple[float, int]]:
        """(bound, micro-batch) for every micro-batch size of replica i with g samples, in ascending
        order."""
        key = (i, plan.layout, plan.schedule, plan.chunks, plan.mode, g)
        if key not in self.cached_options:
            many_cuts = self.bounds.number_of_cuts(plan) > self.parameters.at_once
            # an interleaved schedule needs a multiple of the number of stages
            divisor = len(plan.layout[i]) if plan.schedule == "interleaved-1f1b" else 1
            options = []
            for b in range(1, g + 1):
                micro_batches = -(-g // b)
                if micro_batches % divisor:
                    continue
                self.run.check()
                if plan.chunks > 1 and many_cuts:
                    bound = self.bounds.computation_bound(plan)
                else:
                    _, bounds = self.bounds.bounds_by_cut(plan, i, g, b)
                    bound = float(bounds.min())
                options.append((bound, b))
            self.cached_options[key] = sorted(options)
        return self.cached_options[key]

    def with_cuts(self, plan: PartialPlan, threshold: float) -> Iterator[tuple[float, PartialPlan]]:
        """(bound, plan) for every choice of cuts with a bound below `threshold`."""
        choices: list[list[tuple[float, Cuts]]] = []  # (bound, cuts) of each replica
        for i, (g, b) in enumerate(plan.batches):
            cuts, bounds = self.bounds.bounds_by_cut(plan, i, g, b)
            below = np.flatnonzero(bounds < threshold)
            choices.append([(float(bounds[n]), tuple(cuts[n].tolist())) for n in below])
        return self.products(plan, choices)

    def products(
        self, plan: PartialPlan, choices: list[list[tuple[float, Cuts]]]
    ) -> Iterator[tuple[float, PartialPlan]]:
        """(bound, plan) for every combination of the replicas' choices of cuts.

        choices: (bound, cuts) of each replica.
        """
        for chosen in itertools.product(*choices):
            self.run.check()
            bound = max(bound for bound, _ in chosen)
            yield bound, plan._replace(cuts=tuple(cuts for _, cuts in chosen))

    def replay(self, plan: PartialPlan) -> None:
        """Replay the plan under every allowed ZeRO level, and offer those that fit in memory as the
        incumbent."""
        pipelines = tuple(
            Pipeline(groups=stages, cuts=cuts[1:-1], micro_batch=b, samples=g)
            for stages, (g, b), cuts in zip(plan.layout, plan.batches, plan.cuts, strict=True)
        )
        one_virtual_stage = plan.deepest == plan.chunks == 1
        equal_steps = len({pipeline.steps for pipeline in pipelines}) == 1
        for zero in self.data.own_levels(one_virtual_stage=one_virtual_stage):
            if zero > 1 and not equal_steps:  # a rule of plan files
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
    workers: int | None = None,
) -> Outcome[JointDecision]:
    """The fastest plan with its proof; the incumbent and the proven bound when time runs out.

    starts: plans that the local search begins with. workers: the processes of its rounds; None:
    those of `parameters`.
    """
    check_native(run.options)
    if workers is not None:
        parameters = replace(parameters, workers=workers)
    incumbent = Incumbent[JointDecision](run, parameters.rounding)
    branching = Branching(data, run, parameters, incumbent)
    devices = sum(node.devices for node in data.nodes)
    if devices > parameters.devices:
        return with_bound_only(branching, starts)
    many_cuts = most_cuts(data, devices) > parameters.cuts
    branching.begin(starts, None if many_cuts else parameters.short)
    relaxed: Bounds | None = None  # of all plans, by bound/
    if many_cuts:
        branching.climb(starts)
        part = run.part(share=parameters.share_of_relaxation)
        relaxed = lower_bounds(branching.relaxation, part, incumbent.objective)
    roots = list(branching.roots())
    proof = branch_and_bound.search(roots, branching.expand, incumbent, run)
    if proof.proven:
        stop = Stop.INFEASIBLE if proof.empty else Stop.OPTIMAL
        bound = proof.bound
    else:
        stop = stop_reason(run)
        known = 0.0 if relaxed is None else relaxed.every
        bound = max(known, proof.bound or 0.0) or None
    return outcome_of(branching, stop, bound, relaxed, layouts=len(roots), nodes=proof.expanded)


def with_bound_only(
    branching: Branching, starts: Sequence[JointDecision]
) -> Outcome[JointDecision]:
    """The best plan of the local searches, and the lower bounds of bound/."""
    run, incumbent = branching.run, branching.incumbent
    branching.begin(starts, None)
    branching.climb(starts)
    relaxed = lower_bounds(branching.relaxation, run, incumbent.objective)
    stop, bound = stop_reason(run), relaxed.every or None
    return outcome_of(branching, stop, bound, relaxed, layouts=0, nodes=0)


def most_cuts(data: JointData, devices: int) -> int:
    """An upper bound on the number of ways to cut the layers of any replica."""
    boundaries = len(data.layers) - 1
    most_cuts_of_replica = MOST_CHUNKS * devices - 1
    return math.comb(boundaries, min(most_cuts_of_replica, boundaries // 2))


def outcome_of(
    branching: Branching,
    stop: Stop,
    bound: float | None,
    relaxed: Bounds | None,
    *,
    layouts: int,
    nodes: int,
) -> Outcome[JointDecision]:
    """The outcome of a run: the incumbent with the given reason to stop and bound, and the ladder
    of bounds where all plans were bounded at once. relaxed: these bounds."""
    from hetplan import __version__

    rungs = []
    if relaxed is not None and bound is not None:
        objective = branching.incumbent.objective
        best = objective if math.isfinite(objective) else None
        if branching.incumbent.decision is not None:
            # the enumeration may have found a faster plan with equal replicas
            branching.offer(plan_of(branching.data, branching.incumbent.decision))
        best_equal = None if branching.equal is None else branching.equal.seconds
        rungs = ladder(relaxed.alone, branching.rungs, bound, best, best_equal)
    message = branching.search_message if branching.run.cut else ""
    if stop is Stop.INFEASIBLE:
        message = "no plan fits into memory"
    return Outcome(
        stop=stop,
        decision=branching.incumbent.decision,
        bound=bound,
        solver=f"hetplan {__version__}",
        message=message,
        details={
            "layouts": layouts,
            "nodes": nodes,
            "replays": branching.replays,
            "search": branching.search_details,
            "ladder": [rung.model_dump() for rung in rungs],
        },
    )
