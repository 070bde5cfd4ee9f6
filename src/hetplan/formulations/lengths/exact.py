"""The exact method (and `auto`): branch and bound over samples, the longest first.

A node has the places of the first samples. No replica becomes faster when it takes more samples, so
a node is left out when a replica alone reaches the best decision known. It is left out, too, when
the priced work of its samples and the least priced work of the others exceed the priced room of all
replicas in less time than the best decision takes (`problem`), or when the tokens that are left
exceed the room that is left.

Alike places are tried once: equal micro-batches of a replica, and those of equal replicas that hold
equal micro-batches. Equally long samples may change places, so each of them tries no place before
that of the last one. A sample that follows an equal one tells equal replicas apart: if it did not,
it could take the first of two alike replicas where only the second keeps the order of places.

The search begins with the decision of the heuristic.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from hetplan.formulations.lengths.data import LengthsData, LengthsDecision
from hetplan.formulations.lengths.heuristic import best_packing
from hetplan.formulations.lengths.problem import ROUNDING, LengthsProblem
from hetplan.solvers.native import GAP_SHARE
from hetplan.solvers.run import Outcome, Run, Stop, Stopped

SLOT_SECONDS = 4e-6  # that a look at a micro-batch counts towards the budget
PROVEN_NONE = "no packing of the samples into the micro-batches exists"


@dataclass
class State:
    """The micro-batches of one replica. `total` adds up their seconds, `work` those of their
    samples alone."""

    tokens: list[int]
    squares: list[int]
    around: list[float]  # seconds of each micro-batch elsewhere
    total: float = 0.0
    work: float = 0.0

    @property
    def key(self) -> tuple[tuple[int, int], ...]:
        """Its micro-batches in an order of their own. States of equal replicas with equal keys are
        alike."""
        return tuple(sorted(zip(self.tokens, self.squares, strict=True)))


@dataclass(frozen=True)
class Place:
    """A micro-batch that a sample may join."""

    value: float  # seconds of the replica with the sample
    replica: int
    slot: int


@dataclass
class Search:
    """The depth-first search. `best` and `kept` are the best decision known."""

    problem: LengthsProblem
    run: Run
    best: float
    kept: list[list[list[int]]] | None
    states: list[State] = field(init=False)
    at: list[tuple[int, int]] = field(init=False)  # places of the samples so far

    def __post_init__(self) -> None:
        p = self.problem
        self.states = [State([0] * k, [0] * k, [0.0] * k) for k in p.slots.tolist()]
        self.at = []
        self.seconds, self.around = p.seconds.tolist(), p.around.tolist()
        self.tokens, self.capacity = p.tokens.tolist(), p.capacity.tolist()
        self.overhead, self.around_overhead = p.overhead.tolist(), p.around_overhead.tolist()
        self.price = p.prices.of_replica.tolist()
        priced = (p.prices.of_replica[:, None] * p.seconds).min(axis=0)
        # [n + 1] priced work and tokens of the samples from each one on
        self.rest: list[float] = [*priced[::-1].cumsum()[::-1].tolist(), 0.0]
        self.tokens_left = [*p.tokens[::-1].cumsum()[::-1].tolist(), 0]
        self.room = int((p.capacity * p.slots).sum())
        self.better_than(self.best)

    def better_than(self, seconds: float) -> None:
        """Look only for decisions of less time than that, less the gap."""
        p, self.best = self.problem, seconds
        self.limit = seconds * (1 - GAP_SHARE * self.run.options.gap)
        room = p.room(min(self.limit, p.longest_seconds))
        self.most_priced = float(p.prices.of_replica @ room) * (1 + ROUNDING)

    def places(self) -> Iterator[Place]:
        """The places for the next sample, the fastest first."""
        i = len(self.at)
        size = self.tokens[i]
        follows = i > 0 and self.tokens[i - 1] == size
        first = self.at[-1] if follows else (0, 0)  # the place of the equal sample before
        alike: set[object] = set()
        found = []
        for r, state in enumerate(self.states):
            whole = r if follows else (self.problem.alike[r], state.key)
            longest = max(state.around)
            for k, tokens in enumerate(state.tokens):
                key = (whole, tokens, state.squares[k])
                if tokens + size > self.capacity[r] or key in alike or (r, k) < first:
                    continue
                alike.add(key)
                added, around = self.added(i, r, new=tokens == 0)
                value = state.total + added + max(longest, state.around[k] + around)
                found.append(Place(value, r, k))
        yield from sorted(found, key=lambda place: place.value)

    def added(self, sample: int, replica: int, *, new: bool) -> tuple[float, float]:
        """Seconds that a sample adds to a micro-batch, and to its way elsewhere. new: whether it is
        the first one there."""
        seconds, around = self.seconds[replica][sample], self.around[replica][sample]
        if new:
            return seconds + self.overhead[replica], around + self.around_overhead[replica]
        return seconds, around

    def leaves_out(self) -> bool:
        """Whether no completion of the present node is better than the best decision."""
        priced = self.rest[len(self.at)]
        for price, state in zip(self.price, self.states, strict=True):
            priced += price * state.work
        return priced > self.most_priced or self.tokens_left[len(self.at)] > self.room

    def go_to(self, place: Place) -> tuple[Place, State]:
        """Put the next sample at a place. Returns what `undo` needs."""
        i, state = len(self.at), self.states[place.replica]
        before = replace(
            state,
            tokens=list(state.tokens),
            squares=list(state.squares),
            around=list(state.around),
        )
        added, around = self.added(i, place.replica, new=state.tokens[place.slot] == 0)
        state.tokens[place.slot] += self.tokens[i]
        state.squares[place.slot] += self.tokens[i] ** 2
        state.around[place.slot] += around
        state.total += added
        state.work += self.seconds[place.replica][i]
        self.room -= self.tokens[i]
        self.at.append((place.replica, place.slot))
        return place, before

    def undo(self, done: tuple[Place, State]) -> None:
        """Take the last sample away again."""
        place, before = done
        self.states[place.replica] = before
        self.at.pop()
        self.room += self.tokens[len(self.at)]

    def finish(self) -> None:
        """Search everything. Raises Stopped where the run should stop."""
        n = self.problem.samples
        node_seconds = SLOT_SECONDS * int(self.problem.slots.sum())
        stack: list[tuple[Iterator[Place], tuple[Place, State] | None]] = [(self.places(), None)]
        while stack:
            self.run.check(node_seconds)
            places, done = stack[-1]
            place = next(places, None)
            if place is None or place.value >= self.limit:
                stack.pop()
                if done is not None:
                    self.undo(done)
                continue
            made = self.go_to(place)
            left_out = self.leaves_out()
            if left_out or len(self.at) == n:
                if not left_out:
                    self.keep()
                self.undo(made)
            else:
                stack.append((self.places(), made))

    def keep(self) -> None:
        """Keep the decision of the present node, which is complete and better than the best."""
        self.better_than(max(state.total + max(state.around) for state in self.states))
        self.kept = [[[] for _ in state.tokens] for state in self.states]
        for i, (r, k) in enumerate(self.at):
            self.kept[r][k].append(i)
        self.run.report(incumbent=self.best)


def solve(data: LengthsData, run: Run) -> Outcome[LengthsDecision]:
    """The optimum; when time runs out, the best decision so far and the bound at the root."""
    problem = LengthsProblem(data)
    reason = problem.infeasible_because()
    if reason is not None:
        return Outcome(stop=Stop.INFEASIBLE, message=reason)
    run.report(bound=problem.bound)
    packing = best_packing(problem, run)
    best = float("inf") if packing is None else packing.objective
    kept = None if packing is None else packing.placed()
    search = Search(problem, run, best, kept)
    stop, bound = Stop.OPTIMAL, None
    try:
        if problem.bound < search.limit:
            search.finish()
            bound = max(problem.bound, search.limit)
        else:
            bound = problem.bound
    except Stopped:
        stop, bound = Stop.LIMIT, problem.bound
    if search.kept is None:
        if stop is Stop.OPTIMAL:
            return Outcome(stop=Stop.INFEASIBLE, message=PROVEN_NONE)
        return Outcome(stop=stop, bound=bound)
    return Outcome(stop=stop, decision=problem.decision(search.kept), bound=bound)
