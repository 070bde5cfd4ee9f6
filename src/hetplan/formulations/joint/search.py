"""Local search over plans by their replays: simulated annealing from many starts, again and again.

Starts are given plans, constructions (`starts`), and variations of the best of both. Then
generations of annealing: the best designs of unlike shapes, as they are known by then, are annealed
one after the other; each generation takes half as many of them, at least one, and twice as many
steps. A time limit cuts this sequence of steps and changes nothing else, so that a seed and a
number of steps have one result.

The fastest plan that fits is the result. Where its robust seconds (`ChainReplayer.robust_seconds`)
differ by more than a hundredth, the best few are compared by those. On the way, too much memory
costs seconds.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from hetplan.formulations.joint.data import JointData, JointDecision
from hetplan.formulations.joint.design import Design, Space, design_of
from hetplan.formulations.joint.evaluate import decision_of, plan_of
from hetplan.formulations.joint.moves import Moves
from hetplan.formulations.joint.plan import Plan
from hetplan.formulations.joint.starts import constructions, variations
from hetplan.solvers.native import stop_reason
from hetplan.solvers.run import Outcome, Run, Stop


@dataclass(frozen=True)
class Parameters:
    """What steers the search. Chosen on the four workloads of `benchmarks/joint.py`."""

    steps: int = 2_000_000  # moves in all
    # How often each move is drawn, relative to the others.
    shares: Mapping[str, float] = field(
        default_factory=lambda: {
            "cut": 6, "order": 2, "swap": 2, "merge": 1,
            "split": 1, "pair": 1, "unite": 0.5, "divide": 0.5,
            "samples": 1, "micro": 1.5, "schedule": 1, "zero": 0.5, "mode": 0.2,
        }
    )  # fmt: skip
    # Annealings that draw only from `focus`, as a share of all: those keep the shapes of stages.
    focused: float = 0.2
    focus: tuple[str, ...] = ("cut", "order", "swap")
    # Temperatures as shares of the present seconds: of the first step of an annealing, drawn
    # between two, and of the last.
    hot: float = 0.03
    warm: float = 0.01
    cold: float = 0.0005
    # Of the first generation: annealings, and steps of each. None begins with a design that takes
    # more than `far` times as long as the best. On `a`, where equal replicas win, the papers' are
    # 1.9 times as long as their single pipeline.
    width: int = 4
    first_steps: int = 400
    far: float = 2.0
    # Constructions that are replayed, the best by computation alone, of each number of replicas;
    # and starts that are tried under all rotations, schedules, ZeRO levels …
    replayed: int = 8
    varied: int = 6
    few: int = 8  # plans that are compared by robust seconds
    robust_from: float = 0.01  # where the best one's differ by more than this share
    # An excess of memory by a share x costs (flat + steep x) of the seconds.
    flat: float = 0.02
    steep: float = 3.0
    kept: int = 100_000  # prices remembered; then memory begins anew


class Search:
    """One run on one instance; `chosen` is its result."""

    def __init__(self, space: Space, run: Run, parameters: Parameters) -> None:
        self.space, self.run, self.parameters = space, run, parameters
        self.rng = random.Random(run.options.seed)
        self.moves = Moves(space, self.rng)
        # Seconds that no replay is below, and `value` where it was asked for.
        self.prices: dict[Design, tuple[float, float | None]] = {}
        self.pool: dict[tuple[object, ...], tuple[float, Design]] = {}  # the best of each shape
        self.fitting: dict[tuple[object, ...], tuple[float, Plan]] = {}  # results, by shape
        self.steps = self.replays = 0

    @property
    def done(self) -> bool:
        """Whether to return."""
        return self.run.should_stop or self.steps >= self.parameters.steps

    def value(self, design: Design, limit: float = math.inf) -> float:
        """Replayed seconds, and more where memory is too small. Above `limit`, any number between
        both: its memory, or all of it, goes unasked."""
        seconds, value = self.prices.get(design) or (self.space.least(design), None)
        if value is not None or seconds > limit:
            return value or seconds
        if len(self.prices) > self.parameters.kept:
            self.prices.clear()
        plan = self.space.sketch(design)
        seconds = self.space.replayer.seconds(plan, limit)
        if seconds <= limit:
            value = self.judged(plan, seconds)
            if value < self.kept_below(design):
                self.pool[shape_of(design)] = value, design
        self.replays += 1
        self.prices[design] = seconds, value
        return value or seconds

    def kept_below(self, design: Design) -> float:
        """Of a design's shape, those of less seconds are worth keeping."""
        return self.pool.get(shape_of(design), (math.inf,))[0]

    def judged(self, plan: Plan, seconds: float) -> float:
        """Seconds, and more where memory is too small. What fits is a result where it is the
        fastest of its schedule and numbers of stages."""
        excess = self.space.replayer.excess(plan)
        if excess:
            return seconds * (1 + self.parameters.flat + self.parameters.steep * excess)
        shape = (plan.schedule, *(len(replica.stages) for replica in plan.replicas))
        if shape not in self.fitting or seconds < self.fitting[shape][0]:
            self.fitting[shape] = seconds, plan
            self.run.report(incumbent=seconds)
        return seconds

    def chosen(self) -> Plan | None:
        """The fastest of all; that of least robust seconds of the best few where the fastest's
        differ from its seconds."""
        robust = self.space.replayer.robust_seconds
        ranked = sorted(self.fitting.values(), key=lambda pair: pair[0])[: self.parameters.few]
        if not ranked:
            return None
        seconds, fastest = ranked[0]
        if abs(robust(fastest) - seconds) <= self.parameters.robust_from * seconds:
            return fastest
        return min((plan for _, plan in ranked), key=robust)

    def begin(self, starts: Sequence[JointDecision]) -> None:
        """Given plans, constructions, and variations of the best of both."""
        for start in starts:
            plan = plan_of(self.space.data, start)
            self.judged(plan, self.space.replayer.seconds(plan))
            design = self.space.repaired(design_of(start))
            if design is not None:
                self.value(design)
        by_count: dict[int, list[Design]] = {}
        for design in constructions(self.space):
            by_count.setdefault(len(design.pipes), []).append(design)
        for designs in by_count.values():
            for design in sorted(designs, key=self.space.least)[: self.parameters.replayed]:
                late = self.run.should_stop and (self.fitting or self.run.cancelled)
                if not late:  # something that fits, if need be after the time limit
                    self.value(design, self.kept_below(design) if self.fitting else math.inf)
        for value, design in self.front(self.parameters.varied):
            for change in variations(self.space, design):
                changed = change(design)
                changed = changed and self.space.repaired(changed)
                if changed and not self.run.should_stop:
                    there = self.value(changed, value)
                    design, value = (changed, there) if there < value else (design, value)

    def front(self, count: int) -> list[tuple[float, Design]]:
        """The best designs of unlike shapes, but none far from the best of all."""
        ranked = sorted(self.pool.values(), key=lambda pair: pair[0])
        return [pair for pair in ranked[:count] if pair[0] <= self.parameters.far * ranked[0][0]]

    def anneal(self, design: Design, steps: int) -> None:
        """A walk of so many steps."""
        p, rng = self.parameters, self.rng
        hot = p.warm * (p.hot / p.warm) ** rng.random()
        names = list(p.shares if rng.random() >= p.focused else p.focus)
        weights = list(accumulate(p.shares[name] for name in names))
        value = self.value(design)
        for step in range(steps):
            if self.done:
                break
            self.steps += 1
            warmth = hot * (p.cold / hot) ** (step / steps)
            limit = value * (1 - warmth * math.log(1 - rng.random()))
            name = rng.choices(names, cum_weights=weights)[0]
            changed = self.moves.draw(name, design)
            if changed is None:
                continue
            there = self.value(changed, limit)
            if there <= limit:
                design, value = changed, there

    def generations(self) -> None:
        """Until time or steps are spent."""
        steps, width = self.parameters.first_steps, self.parameters.width
        while not self.done and self.pool:
            for _, design in self.front(width):
                self.anneal(design, steps)
            steps, width = 2 * steps, max(width // 2, 1)


def shape_of(design: Design) -> tuple[int, bool]:
    """What tells designs apart that are annealed each for itself: replicas, and whether stages have
    several chunks."""
    return len(design.pipes), design.chunks > 1


def search(
    data: JointData,
    run: Run,
    starts: Sequence[JointDecision] = (),
    parameters: Parameters | None = None,
) -> Outcome[JointDecision]:
    """The fastest plan that fits, of all tried. starts: where to begin, beside constructions; those
    that fit are among what is tried. Proves no bound."""
    own = Search(Space(data), run, parameters or Parameters())
    own.begin(starts)
    own.generations()
    plan = own.chosen()
    return Outcome(
        stop=stop_reason(run) if run.should_stop else Stop.DONE,
        decision=decision_of(plan) if plan else None,
        message="" if plan else f"none of {own.replays} plans fits in memory",
        details={"steps": own.steps, "replays": own.replays},
    )
