"""Local search over plans by their replays: simulated annealing of many designs, again and again.

Starts are given plans, constructions (`constructions.py`), and variations of the best of both. Then
rounds: random moves lead from the best start of each number of replicas, and from the best design
so far, to many others. Those of unlike shapes that are best are annealed; then the better half of
what they have become, with twice as many steps; and so on, until one is left (successive halving).
In every annealing replicas that are alike either stay so, mostly, or become unlike half of the
time. A time limit cuts this sequence of steps and changes nothing else, so that a seed and a number
of steps have one result.

The fastest plan that fits is the result. Where a plan's robust seconds
(`ChainReplayer.robust_seconds`) differ from its seconds by more than a hundredth, those count
instead: more time never makes a result worse by this rule. On the way, too much memory costs
seconds.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from operator import itemgetter

from hetplan.formulations.joint.constructions import constructions, variations
from hetplan.formulations.joint.data import JointData, JointDecision
from hetplan.formulations.joint.design import Design, design_of
from hetplan.formulations.joint.evaluate import decision_of, plan_of
from hetplan.formulations.joint.moves import Moves
from hetplan.formulations.joint.space import Space
from hetplan.plans.plan import Plan
from hetplan.solvers.run import Outcome, Run, Stop, stop_reason
from hetplan.text import grouped

Valued = tuple[float, Design]  # penalised seconds, design
VALUE = itemgetter(0)


@dataclass(frozen=True)
class Parameters:
    """Parameters of the search, chosen on the four workloads of `evidence/speed/joint.py`."""

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
    # between `warm` and `hot`, and of the last.
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
    kept: int = 100_000  # designs whose seconds are remembered; then memory begins anew
    # Seconds after the time limit in which a first plan that fits is still looked for.
    grace: float = 1.0


class LocalSearch:
    """One run on one instance; `incumbent` is its result."""

    def __init__(self, space: Space, run: Run, parameters: Parameters) -> None:
        self.space, self.run, self.parameters = space, run, parameters
        self.rng = random.Random(run.options.seed)
        self.moves = Moves(space, self.rng)
        # Design -> seconds that no replay is below; its penalised seconds, None: not asked for.
        self.known: dict[Design, tuple[float, float | None]] = {}
        self.best_of_shape: dict[tuple[object, ...], Valued] = {}
        # The best plan that fits, behind what plans are ordered by: `Plan.order` of its seconds, or
        # of its robust seconds where those count.
        self.incumbent: tuple[tuple[float, int], Plan] | None = None
        self.steps = self.replays = 0

    @property
    def done(self) -> bool:
        """Whether time or steps are spent."""
        return self.run.should_stop or self.steps >= self.parameters.steps

    @property
    def late(self) -> bool:
        """Whether to return with what there is: some time after the limit, a plan that fits is
        still looked for where there is none."""
        if not self.run.should_stop:
            return False
        over = self.run.elapsed - (self.run.options.time_limit or math.inf)
        nothing_yet = self.incumbent is None and over <= self.parameters.grace
        return self.run.cancelled or not nothing_yet

    def penalised_seconds(self, design: Design, limit: float = math.inf) -> float:
        """Replayed seconds, and more where memory is too small.

        Where they are above `limit`, the answer may be any number between the two: the replay ends
        early, or is left out, and memory goes unasked.
        """
        known = self.known.get(design)
        least, penalised = known or (self.space.lower_bound(design), None)
        if penalised is not None:
            return penalised
        if least > limit:
            return least
        if len(self.known) > self.parameters.kept:
            self.known.clear()
        plan = self.space.sketch(design)
        seconds = self.space.replayer.seconds(plan, limit)
        self.replays += 1
        if seconds <= limit:
            penalised = self.offer(plan, seconds)
            self.note_best_of_shape(design, penalised)
        self.known[design] = seconds, penalised
        return seconds if penalised is None else penalised

    def note_best_of_shape(self, design: Design, penalised: float) -> None:
        """Keep the design where it is the best of its shape: number of replicas, schedule, chunks,
        and the stages of one replica."""
        stages = max(self.space.shapes(pipeline.groups) for pipeline in design.pipelines)
        shape = (len(design.pipelines), design.schedule, design.chunks, *stages)
        best = self.best_of_shape.get(shape)
        if best is None or penalised < best[0]:
            self.best_of_shape[shape] = (penalised, design)

    def offer(self, plan: Plan, seconds: float) -> float:
        """The plan's seconds, and more where its memory is too small. A plan that fits becomes the
        incumbent where it is better."""
        excess = self.space.replayer.excess(plan)
        if excess:
            return seconds * (1 + self.parameters.flat + self.parameters.steep * excess)
        if self.incumbent is None or plan.order(seconds) < self.incumbent[0]:
            robust = self.space.replayer.robust_seconds(plan)
            agree = abs(robust - seconds) <= self.parameters.robust_from * seconds
            order = plan.order(seconds if agree else robust)
            if self.incumbent is None or order < self.incumbent[0]:
                self.incumbent = order, plan
                self.run.report(incumbent=seconds)
        return seconds

    def begin(self, starts: Sequence[Plan]) -> None:
        """Replay given plans, and the designs nearest to them."""
        for plan in starts:
            if self.late:
                break
            self.offer(plan, self.space.replayer.seconds(plan))
            design = self.space.repaired(design_of(plan))
            if design is not None:
                self.penalised_seconds(design)

    def construct(self) -> None:
        """Replay the best constructions of each number of replicas."""
        in_time = takewhile(lambda design: not self.late, constructions(self.space))
        by_replicas = grouped((len(design.pipelines), design) for design in in_time)
        for designs in by_replicas.values():
            best = math.inf
            for design in sorted(designs, key=self.space.lower_bound)[: self.parameters.replayed]:
                if not self.late:
                    limit = math.inf if self.incumbent is None else best
                    best = min(best, self.penalised_seconds(design, limit))

    def vary(self) -> None:
        """Try variations of the best so far; each that is faster is kept and varied further."""
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
        """The best design of each number of replicas, but none far from the best of all."""
        best: dict[int, Valued] = {}  # number of replicas -> its best design
        for seconds, design in sorted(self.best_of_shape.values(), key=VALUE):
            best.setdefault(len(design.pipelines), (seconds, design))
        ranked = sorted(best.values(), key=VALUE)
        return [
            (seconds, design)
            for seconds, design in ranked
            if seconds <= self.parameters.far * ranked[0][0]
        ]

    def scatter(self, bases: Sequence[Valued]) -> list[Valued]:
        """Designs some moves away from these; the best of unlike shapes."""
        p, rng = self.parameters, self.rng
        names = list(p.shares)
        self.moves.together = max(p.together)
        self.best_of_shape.clear()
        for _ in range(p.scattered):
            if self.done:
                break
            self.steps += 1
            _, design = rng.choice(bases)
            for _ in range(rng.randint(1, p.away)):
                design = self.moves.draw(rng.choice(names), design) or design
            self.penalised_seconds(design, p.near * bases[0][0])
        return sorted(self.best_of_shape.values(), key=VALUE)[: p.width]

    def anneal(self, design: Design, steps: int) -> Valued:
        """The best of a random walk of so many steps.

        A neighbour is accepted at up to `limit` seconds, which are exponentially distributed above
        the present seconds: Metropolis' rule, drawn before the replay so that this can end early.
        """
        p, rng = self.parameters, self.rng
        hot = p.warm * (p.hot / p.warm) ** rng.random()
        self.moves.together = rng.choice(p.together)
        names = list(p.shares if rng.random() >= p.focused else p.focus)
        weights = list(accumulate(p.shares[name] for name in names))
        now = self.penalised_seconds(design)
        best = now, design
        for step in range(steps):
            if self.done:
                break
            self.steps += 1
            temperature = hot * (p.cold / hot) ** (step / steps)
            limit = now * (1 - temperature * math.log(1 - rng.random()))
            name = rng.choices(names, cum_weights=weights)[0]
            changed = self.moves.draw(name, design)
            if changed is None:
                continue
            seconds = self.penalised_seconds(changed, limit)
            if seconds <= limit:
                design, now = changed, seconds
                best = min(best, (now, design), key=VALUE)
        return best

    def rounds(self) -> None:
        """Scatter and anneal until time or steps are spent; of each round the better half goes on,
        twice as long, until one is left."""
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
    local = LocalSearch(Space(data), run, parameters or Parameters())
    local.begin([plan_of(data, start) for start in starts])
    local.construct()
    local.vary()
    local.rounds()
    return outcome_of(local, stop_reason(run) if run.should_stop else Stop.DONE)


def outcome_of(local: LocalSearch, stop: Stop) -> Outcome[JointDecision]:
    """The incumbent of a search that has ended."""
    if local.incumbent is None:
        decision, message = None, f"none of {local.replays} plans fits in memory"
    else:
        decision, message = decision_of(local.incumbent[1]), ""
    return Outcome(
        stop=stop,
        decision=decision,
        message=message,
        details={"steps": local.steps, "replays": local.replays},
    )
