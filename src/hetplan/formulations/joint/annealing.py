"""Local search over plans by their replays: rounds of simulated annealing.

1. The search replays given plans, constructions (constructions.py), and variations of the best
   designs among them.
2. A round scatters: random moves lead from the best start of each number of replicas, and from the
   best design so far, to many designs. The best design of each shape is kept, and of these the
   best ones.
3. The round anneals: these designs are annealed, then the better half of the results with twice as
   many steps, and so on until one is left (successive halving). Then the next round begins.

In some annealings replicas that are alike mostly stay alike; in others a move makes them unlike
half of the time. The end of budget or time ends this sequence and changes nothing else in it. The
budget is counted: every move and every replay counts as the seconds that it takes on a slow core. A
seed, a budget and a number of workers therefore determine the result, on every machine.

Rounds run in several processes (workers.py), each with random numbers of its own and as many steps
as the first. The best of their plans is the result.

The result is the fastest plan that fits in memory. Where the robust seconds of a plan
(`ChainReplayer.robust_seconds`) differ from its replayed seconds by more than a hundredth, plans
are compared by the robust seconds. Compared in this way, a longer search never returns a worse
plan. During the search, designs that need too much memory are penalised in seconds.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from operator import itemgetter

from hetplan.formulations.joint.constructions import constructions, variations
from hetplan.formulations.joint.design import Design, design_of
from hetplan.formulations.joint.moves import Moves
from hetplan.formulations.joint.space import Space
from hetplan.plans.plan import Plan
from hetplan.solvers.run import Run
from hetplan.text import grouped

Valued = tuple[float, Design]  # (penalised seconds, design)
VALUE = itemgetter(0)  # the penalised seconds, as a key for sorting


@dataclass(frozen=True)
class Parameters:
    """Parameters of the search, chosen on the four workloads of `evidence/speed/joint.py`."""

    steps: int = 2_000_000  # most moves of each worker
    workers: int = 1  # processes that run rounds, this one among them
    # Rounds that may count fewer seconds than this run in this process alone: another one takes
    # two seconds to begin.
    least_shared: float = 3.0
    # Weight of each move in random draws.
    shares: Mapping[str, float] = field(
        default_factory=lambda: {
            "cut": 6, "order": 2, "swap": 2, "merge": 1,
            "split": 1, "pair": 1, "unite": 0.5, "divide": 0.5,
            "samples": 1, "micro": 1.5, "schedule": 1, "zero": 0.5, "mode": 0.2,
        }
    )  # fmt: skip
    # Share of the annealings that draw only the moves of `focus`, which keep the shapes of stages.
    focused: float = 0.5
    focus: tuple[str, ...] = ("cut", "order", "swap")
    # Probabilities that a move changes all replicas that are alike; every annealing draws one of
    # them. The best plans of workload `c` have four equal replicas, and all plans one move away
    # from such a plan are slow.
    alike_probabilities: tuple[float, ...] = (0.5, 0.95)
    # Temperatures as shares of the present seconds. An annealing begins at a temperature drawn
    # between `warm` and `hot`, and ends at `cold`.
    hot: float = 0.03
    warm: float = 0.01
    cold: float = 0.0005
    # Designs that a round scatters, and the most moves between a start and such a design.
    scattered: int = 1000
    away: int = 6
    # Designs that a round first anneals, and the steps of each of these annealings.
    width: int = 16
    first_steps: int = 300
    # A round has no start of more than `far` times the seconds of the best design, and anneals no
    # design of more than `near` times these. On workload `a`, where plans with equal replicas win,
    # such plans by the papers' methods take 1.9 times as long as those with a single pipeline.
    far: float = 2.0
    near: float = 1.3
    # Constructions of each number of replicas that are replayed: the best ones by `lower_bound`.
    replayed: int = 8
    # Robust seconds count where they differ from the seconds by more than this share of them.
    robust_from: float = 0.01
    # A plan that exceeds memory by a share x is penalised by (flat + steep x) of its seconds.
    flat: float = 0.02
    steep: float = 3.0
    cache_size: int = 100_000  # designs in the cache of seconds, which is emptied when it is full
    # Seconds after budget or time limit in which the search still looks for a first plan that fits.
    grace: float = 1.0
    # Seconds that a move counts, with the bound of the new design.
    move_seconds: float = 2e-4


@dataclass(frozen=True)
class BestPlan:
    """The best plan of a search that fits in memory."""

    # `Plan.order` of its seconds, or of its robust seconds where those count; the least is best
    order: tuple[float, int]
    plan: Plan


class LocalSearch:
    """One run on one instance; `incumbent` is its result.

    worker: the number of the worker whose rounds it runs, on which random numbers depend.
    """

    def __init__(self, space: Space, run: Run, parameters: Parameters, worker: int = 0) -> None:
        self.space, self.run, self.parameters = space, run, parameters
        seed = run.options.seed
        self.rng = random.Random(f"{seed} {worker}" if worker else seed)
        self.moves = Moves(space, self.rng)
        # Cache: design -> (lower bound on its replayed seconds; its penalised seconds, None where
        # the replay ended early).
        self.cached_seconds: dict[Design, tuple[float, float | None]] = {}
        # Shape (see `note_best_of_shape`) -> the best design of this shape.
        self.best_of_shape: dict[tuple[object, ...], Valued] = {}
        self.incumbent: BestPlan | None = None  # the best plan that fits in memory
        self.steps = 0  # number of moves so far
        self.replays = 0  # number of replays so far

    @property
    def done(self) -> bool:
        """Whether budget, time or steps are used up."""
        return self.run.should_stop or self.steps >= self.parameters.steps

    @property
    def late(self) -> bool:
        """Whether to return at once. Without an incumbent, the search goes on for some time after
        the end of its budget or time."""
        if not self.run.should_stop:
            return False
        after_time_limit = self.run.elapsed - (self.run.options.time_limit or math.inf)
        after_budget = self.run.spent - (self.run.budget or math.inf)
        overtime = max(after_time_limit, after_budget)
        looks_for_first = self.incumbent is None and overtime <= self.parameters.grace
        return self.run.cancelled or not looks_for_first

    def penalised_seconds(self, design: Design, limit: float = math.inf) -> float:
        """The design's replayed seconds, with a penalty where its memory is too small.

        Where the result would exceed `limit`, it may be any number between `limit` and the correct
        one: the replay ends early or is left out, and memory is not checked.
        """
        cached = self.cached_seconds.get(design)
        least, penalised = cached or (self.space.lower_bound(design), None)
        if penalised is not None:
            return penalised
        if least > limit:
            return least
        if len(self.cached_seconds) > self.parameters.cache_size:
            self.cached_seconds.clear()
        plan = self.space.sketch(design)
        seconds = self.space.replayer.seconds(plan, limit)
        self.count_replay(design)
        if seconds <= limit:
            penalised = self.offer(plan, seconds)
            self.note_best_of_shape(design, penalised)
        self.cached_seconds[design] = seconds, penalised
        return seconds if penalised is None else penalised

    def count_replay(self, design: Design) -> None:
        """Count the replay of a design."""
        self.replays += 1
        self.run.count(self.space.replay_seconds(design))

    def count_step(self) -> None:
        """Count a step, which is one move or several at once."""
        self.steps += 1
        self.run.count(self.parameters.move_seconds)

    def note_best_of_shape(self, design: Design, penalised: float) -> None:
        """Keep the design where it is the best of its shape: number of replicas, schedule, chunks,
        and the stages of one replica."""
        # of the greatest list of stages, so that the order of the replicas does not matter
        stages = max(self.space.shapes(pipeline.groups) for pipeline in design.pipelines)
        shape = (len(design.pipelines), design.schedule, design.chunks, *stages)
        best = self.best_of_shape.get(shape)
        if best is None or penalised < best[0]:
            self.best_of_shape[shape] = (penalised, design)

    def offer(self, plan: Plan, seconds: float) -> float:
        """The penalised seconds of a plan that takes `seconds`. A plan that fits in memory becomes
        the incumbent where it is better."""
        excess = self.space.replayer.excess(plan)
        if excess:
            return seconds * (1 + self.parameters.flat + self.parameters.steep * excess)
        if self.is_better(plan, seconds):
            robust = self.space.replayer.robust_seconds(plan)
            agree = abs(robust - seconds) <= self.parameters.robust_from * seconds
            compared = seconds if agree else robust
            if self.is_better(plan, compared):
                self.incumbent = BestPlan(plan.order(compared), plan)
                self.run.report(incumbent=seconds)
        return seconds

    def is_better(self, plan: Plan, seconds: float) -> bool:
        """Whether a plan that is compared by `seconds` is better than the incumbent."""
        if self.incumbent is None:
            return True
        return plan.order(seconds) < self.incumbent.order

    def begin(self, starts: Sequence[Plan]) -> None:
        """Replay the plans `starts`, and the designs nearest to them."""
        for plan in starts:
            if self.late:
                break
            self.offer(plan, self.space.replayer.seconds(plan))
            self.count_replay(design_of(plan))
            design = self.space.repaired(design_of(plan))
            if design is not None:
                self.penalised_seconds(design)

    def construct(self) -> None:
        """Replay the best constructions, by `lower_bound`, of each number of replicas."""
        in_time = takewhile(lambda design: not self.late, constructions(self.space))
        by_replicas = grouped((len(design.pipelines), design) for design in in_time)
        for designs in by_replicas.values():
            best = math.inf
            by_bound = sorted(designs, key=self.space.lower_bound)
            for design in by_bound[: self.parameters.replayed]:
                if self.late:
                    break
                # memory is checked only in replays within the limit, so without an incumbent there
                # is no limit
                limit = math.inf if self.incumbent is None else best
                best = min(best, self.penalised_seconds(design, limit))

    def vary(self) -> None:
        """Try all variations of each of the `bases`. A faster design takes the place of the base,
        and the remaining variations are applied to it."""
        for best, design in self.bases():
            for change in variations(self.space, design):
                changed = change(design)
                if changed is not None:
                    changed = self.space.repaired(changed)
                if changed is None or self.run.should_stop:
                    continue
                seconds = self.penalised_seconds(changed, best)
                if seconds < best:
                    best, design = seconds, changed

    def bases(self) -> list[Valued]:
        """The best design of each number of replicas, best first, without those of more than `far`
        times the seconds of the best one."""
        best: dict[int, Valued] = {}  # number of replicas -> its best design
        for seconds, design in sorted(self.best_of_shape.values(), key=VALUE):
            best.setdefault(len(design.pipelines), (seconds, design))
        ranked = sorted(best.values(), key=VALUE)
        if not ranked:
            return []
        least, _ = ranked[0]
        limit = self.parameters.far * least
        return [(seconds, design) for seconds, design in ranked if seconds <= limit]

    def scatter(self, bases: Sequence[Valued]) -> list[Valued]:
        """The best designs, one of each shape, of many that are some moves away from `bases`. The
        first base is the best."""
        p, rng = self.parameters, self.rng
        names = list(p.shares)
        self.moves.alike_probability = max(p.alike_probabilities)
        self.best_of_shape.clear()
        least, _ = bases[0]
        for _ in range(p.scattered):
            if self.done:
                break
            self.count_step()
            _, design = rng.choice(bases)
            for _ in range(rng.randint(1, p.away)):
                design = self.moves.draw(rng.choice(names), design) or design
            self.penalised_seconds(design, p.near * least)
        return sorted(self.best_of_shape.values(), key=VALUE)[: p.width]

    def anneal(self, design: Design, steps: int) -> Valued:
        """The best design that an annealing of `steps` moves from `design` meets.

        It accepts a neighbour of up to `limit` seconds. The limit exceeds the present seconds by an
        exponentially distributed amount. This is Metropolis' rule with the random number drawn
        before the replay, which can thereby end early.
        """
        p, rng = self.parameters, self.rng
        hot = p.warm * (p.hot / p.warm) ** rng.random()  # uniform in its logarithm
        self.moves.alike_probability = rng.choice(p.alike_probabilities)
        names = list(p.shares if rng.random() >= p.focused else p.focus)
        weights = list(accumulate(p.shares[name] for name in names))
        now = self.penalised_seconds(design)
        best = now, design
        for step in range(steps):
            if self.done:
                break
            self.count_step()
            temperature = hot * (p.cold / hot) ** (step / steps)
            # `random` may be 0, but not 1
            limit = now * (1 - temperature * math.log(1 - rng.random()))
            [name] = rng.choices(names, cum_weights=weights)
            changed = self.moves.draw(name, design)
            if changed is None:
                continue
            seconds = self.penalised_seconds(changed, limit)
            if seconds <= limit:
                design, now = changed, seconds
                best = min(best, (now, design), key=VALUE)
        return best

    def rounds(self) -> None:
        """Rounds of scattering and annealing until time or steps are used up; see the module's
        docstring."""
        starts = self.bases()
        best = starts[:1]
        while not self.done and starts:
            steps = self.parameters.first_steps
            designs = self.scatter([*best, *starts])
            while designs and not self.done:
                annealed = dict.fromkeys(self.anneal(design, steps) for _, design in designs)
                ranked = sorted(annealed, key=VALUE)
                best = [min(*best, ranked[0], key=VALUE)]  # `best` has one entry, as `starts` has
                steps, designs = 2 * steps, ranked[: len(ranked) // 2]
