"""Local search over plans by their replays: simulated annealing of many designs, again and again.

Starts are given plans, constructions, and variations of the best of both. Constructions need no
paper: devices in the order of their nodes, the fastest or the slowest first, are cut into tensor
groups; these are dealt to replicas one after the other, or in blocks. Cuts make the slowest stage
as fast as can be, and replicas take samples in proportion to their speed. Then rounds:
random moves lead from the best start of each number of replicas, and from the best design so far,
to many others. Those of unlike shapes that are best are annealed; then the better half of what they
have become, with twice as many steps; and so on, until one is left (successive halving). In every
annealing replicas that are alike either stay so, mostly, or become unlike half of the time. A time
limit cuts this sequence of steps and changes nothing else, so that a seed and a number of steps
have one result.

The fastest plan that fits is the result. Where a plan's robust seconds
(`ChainReplayer.robust_seconds`) differ from its seconds by more than a hundredth, those count
instead: more time never makes a result worse by this rule. On the way, too much memory costs
seconds.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, groupby, product, takewhile
from operator import itemgetter

from hetplan.formulations.joint.data import JointData, JointDecision
from hetplan.formulations.joint.design import (
    SCHEDULES,
    Design,
    Group,
    Pipe,
    Space,
    design_of,
)
from hetplan.formulations.joint.evaluate import decision_of, plan_of
from hetplan.formulations.joint.moves import Moves
from hetplan.plans.plan import Plan
from hetplan.solvers.run import Outcome, Run, Stop, stop_reason
from hetplan.text import grouped

Valued = tuple[float, Design]
VALUE = itemgetter(0)
MICRO = (1, 2, 4, 8, 16)  # sizes of micro-batches that constructions have


@dataclass(frozen=True)
class Parameters:
    """What steers the search. Chosen on the four workloads of `evidence/speed/joint.py`."""

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
    focused: float = 0.5
    focus: tuple[str, ...] = ("cut", "order", "swap")
    # How often a move changes all replicas that are alike; every annealing draws one of these. The
    # best plans of `c` have four equal replicas, and what is one move away from that is slow.
    together: tuple[float, ...] = (0.5, 0.95)
    # Temperatures as shares of the present seconds: of the first step of an annealing, drawn
    # between two, and of the last.
    hot: float = 0.03
    warm: float = 0.01
    cold: float = 0.0005
    # A round's designs, each 1 to `away` moves from where it begins; and its first annealings, and
    # steps of each. No round begins from a design that takes more than `far` times as long as the
    # best, nor has one of more than `near`. On `a`, where equal replicas win, the papers' are 1.9
    # times as long as their single pipeline.
    scattered: int = 1000
    away: int = 6
    width: int = 16
    first_steps: int = 300
    far: float = 2.0
    near: float = 1.3
    # Constructions that are replayed, the best by computation alone, of each number of replicas.
    replayed: int = 8
    # From which share of the seconds on robust seconds count where they differ.
    robust_from: float = 0.01
    # An excess of memory by a share x costs (flat + steep x) of the seconds.
    flat: float = 0.02
    steep: float = 3.0
    kept: int = 100_000  # prices remembered; then memory begins anew
    # Seconds after the time limit in which a first plan that fits is still looked for.
    grace: float = 1.0


class Search:
    """One run on one instance; `best` is its result."""

    def __init__(self, space: Space, run: Run, parameters: Parameters) -> None:
        self.space, self.run, self.parameters = space, run, parameters
        self.rng = random.Random(run.options.seed)
        self.moves = Moves(space, self.rng)
        # Seconds that no replay is below, and `value` where it was asked for.
        self.prices: dict[Design, tuple[float, float | None]] = {}
        self.pool: dict[tuple[object, ...], Valued] = {}  # the best of each shape
        # Of those that fit, by `Plan.order`; robust seconds where they count.
        self.best: tuple[tuple[float, int], Plan] | None = None
        self.steps = self.replays = 0

    @property
    def done(self) -> bool:
        """Whether to return."""
        return self.run.should_stop or self.steps >= self.parameters.steps

    @property
    def late(self) -> bool:
        """Whether to return with what there is: something that fits is looked for some time after
        the time limit, too."""
        over = self.run.elapsed - (self.run.options.time_limit or math.inf)
        enough = self.best is not None or over > self.parameters.grace
        return self.run.should_stop and (enough or self.run.cancelled)

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
            own, forms = (value, design), (self.space.form(pipe.groups) for pipe in design.pipes)
            shape = (len(design.pipes), design.schedule, design.chunks, *max(forms))
            self.pool[shape] = min(self.pool.get(shape, own), own, key=VALUE)
        self.replays += 1
        self.prices[design] = seconds, value
        return value or seconds

    def judged(self, plan: Plan, seconds: float) -> float:
        """Seconds, and more where memory is too small. What fits may be the result."""
        excess = self.space.replayer.excess(plan)
        if excess:
            return seconds * (1 + self.parameters.flat + self.parameters.steep * excess)
        if self.best is None or plan.order(seconds) < self.best[0]:
            robust = self.space.replayer.robust_seconds(plan)
            near = abs(robust - seconds) <= self.parameters.robust_from * seconds
            order = plan.order(seconds if near else robust)
            if self.best is None or order < self.best[0]:
                self.best = order, plan
                self.run.report(incumbent=seconds)
        return seconds

    def begin(self, starts: Sequence[Plan]) -> None:
        """Given plans."""
        for plan in starts:
            if self.late:
                break
            self.judged(plan, self.space.replayer.seconds(plan))
            design = self.space.repaired(design_of(plan))
            if design is not None:
                self.value(design)

    def construct(self) -> None:
        """The best constructions of each number of replicas."""
        built = takewhile(lambda design: not self.late, constructions(self.space))
        for designs in grouped((len(design.pipes), design) for design in built).values():
            value = math.inf
            for design in sorted(designs, key=self.space.least)[: self.parameters.replayed]:
                if not self.late:
                    value = min(value, self.value(design, value if self.best else math.inf))

    def vary(self) -> None:
        """Variations of the best so far."""
        for value, design in self.bases():
            for change in variations(self.space, design):
                changed = change(design)
                changed = changed and self.space.repaired(changed)
                if changed and not self.run.should_stop:
                    there = self.value(changed, value)
                    design, value = (changed, there) if there < value else (design, value)

    def bases(self) -> list[Valued]:
        """The best design of each number of replicas, but none far from the best of all."""
        ranked = sorted(self.pool.values(), key=VALUE)
        firsts = {len(design.pipes): (value, design) for value, design in reversed(ranked)}
        far = self.parameters.far * ranked[0][0] if ranked else 0.0
        return sorted((pair for pair in firsts.values() if pair[0] <= far), key=VALUE)

    def scatter(self, bases: Sequence[Valued]) -> list[Valued]:
        """Designs some moves away from these; the best of unlike shapes."""
        p, rng = self.parameters, self.rng
        self.moves.together = max(p.together)
        self.pool.clear()
        for _ in range(p.scattered):
            if self.done:
                break
            self.steps += 1
            _, design = rng.choice(bases)
            for _ in range(rng.randint(1, p.away)):
                design = self.moves.draw(rng.choice([*p.shares]), design) or design
            self.value(design, p.near * bases[0][0])
        return sorted(self.pool.values(), key=VALUE)[: p.width]

    def anneal(self, design: Design, steps: int) -> Valued:
        """The best of a walk of so many steps."""
        p, rng = self.parameters, self.rng
        hot = p.warm * (p.hot / p.warm) ** rng.random()
        self.moves.together = rng.choice(p.together)
        names = list(p.shares if rng.random() >= p.focused else p.focus)
        weights = list(accumulate(p.shares[name] for name in names))
        value = self.value(design)
        best = value, design
        for step in range(steps):
            if self.done:
                break
            self.steps += 1
            warmth = hot * (p.cold / hot) ** (step / steps)
            limit = value * (1 - warmth * math.log(1 - rng.random()))
            name = rng.choices(names, cum_weights=weights)[0]
            changed = self.moves.draw(name, design)
            if changed is not None and self.value(changed, limit) <= limit:
                design, value = changed, self.value(changed)
                best = min(best, (value, design), key=VALUE)
        return best

    def rounds(self) -> None:
        """Until time or steps are spent."""
        starts = self.bases()
        best = starts[:1]
        while not self.done and starts:
            steps, walkers = self.parameters.first_steps, self.scatter([*best, *starts])
            while walkers and not self.done:
                ends = dict.fromkeys(self.anneal(design, steps) for _, design in walkers)
                walkers = sorted(ends, key=VALUE)
                best = [min(*best, walkers[0], key=VALUE)]
                steps, walkers = 2 * steps, walkers[: len(walkers) // 2]


def search(
    data: JointData,
    run: Run,
    starts: Sequence[JointDecision] = (),
    parameters: Parameters | None = None,
) -> Outcome[JointDecision]:
    """The fastest plan that fits, of all tried. starts: where to begin, beside constructions; those
    that fit are among what is tried. Proves no bound."""
    own = Search(Space(data), run, parameters or Parameters())
    own.begin([plan_of(data, start) for start in starts])
    own.construct()
    own.vary()
    own.rounds()
    plan = own.best[1] if own.best else None
    return Outcome(
        stop=stop_reason(run) if run.should_stop else Stop.DONE,
        decision=decision_of(plan) if plan else None,
        message="" if plan else f"none of {own.replays} plans fits in memory",
        details={"steps": own.steps, "replays": own.replays},
    )


def constructions(space: Space) -> Iterator[Design]:
    """GPipe designs of many shapes, each in all micro-batch sizes of `MICRO`. Numbers of replicas
    divide the number of some type's tensor groups."""
    speed = {kind: space.sums(kind, 1, 1, "none")[-1] for kind in space.kind}
    for sign, width in product((-1, 0, 1), space.degrees):
        order = sorted(
            range(len(space.kind)), key=lambda e: (sign * speed[space.kind[e]], space.node[e])
        )
        groups = list(tensor_groups(space, order, width))
        kinds = Counter(space.kind[group[0][0]] for group in groups).values()
        for count in range(1, min(len(groups), space.batch) + 1):
            if any(number % count == 0 for number in kinds):
                ends = [len(groups) * k // count for k in range(count + 1)]
                blocks = [groups[ends[k] : ends[k + 1]] for k in range(count)]
                for dealt, micro in product(
                    (blocks, [groups[k::count] for k in range(count)]), MICRO
                ):
                    design = replicas_of(space, dealt, micro)
                    if design is not None:
                        yield design


def tensor_groups(space: Space, order: list[int], width: int) -> Iterator[Group]:
    """Neighbours of one node; what is left over makes smaller groups."""
    for _, on_node in groupby(order, key=lambda e: space.node[e]):
        left = list(on_node)
        while left:
            size = max(t for t in space.degrees if t <= min(width, len(left)))
            yield (tuple(left[:size]),)
            left = left[size:]


def replicas_of(space: Space, dealt: list[list[Group]], micro: int) -> Design | None:
    """None where a replica would have no sample or too few layers."""
    fitted = [space.fitted(Pipe(tuple(g), (), micro, 64 * micro), 1, "none") for g in dealt]
    pipes = [pipe for pipe in fitted if pipe is not None]
    if len(pipes) < len(fitted):
        return None
    speeds = [1 / space.least(Design((pipe,))) for pipe in pipes]
    shares = [max(round(space.batch * speed / sum(speeds)), 1) for speed in speeds]
    shares[0] += space.batch - sum(shares)
    pipes = [
        replace(pipe, samples=share, micro=min(micro, share))
        for pipe, share in zip(pipes, shares, strict=True)
    ]
    return Design(tuple(pipes), "gpipe") if min(shares) > 0 else None


def variations(space: Space, design: Design) -> Iterator[Callable[[Design], Design | None]]:
    """Changes worth a trial one after the other: all rotations of the design's stages, schedules,
    ZeRO levels and recomputations."""
    longest = max(len(pipe.groups) for pipe in design.pipes)
    yield from (partial(rotated, by) for by in range(1, longest))
    yield from (partial(space.scheduled, schedule=name, chunks=n) for name, n in SCHEDULES)
    yield from (partial(replace, zero=zero) for zero in range(4))
    yield from (partial(replace, mode=mode) for mode in space.modes)


def rotated(by: int, design: Design) -> Design:
    """Every replica's first stages come last."""
    turned = [
        replace(pipe, groups=pipe.groups[by:] + pipe.groups[:by]) if by < len(pipe.groups) else pipe
        for pipe in design.pipes
    ]
    return replace(design, pipes=tuple(turned))
