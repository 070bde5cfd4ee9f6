"""The exact method (and `auto`): branch and bound over samples, the longest first.

A node places the first samples. No replica becomes faster when it takes more samples, so a node is
pruned when one replica takes as long as the best decision known. A node is pruned, too, when the
priced work of its samples and the least priced work of the other samples exceed the priced room of
all replicas within the seconds of the best decision (`problem`), or when more tokens are left than
fit into the remaining room.

Symmetry breaking: of equal micro-batches of a replica one is tried, and of equal replicas with
equal micro-batches one is tried. Equally long samples may be exchanged, so each of them tries no
place before the place of the previous one. For such a sample equal replicas count as different:
only the second of two equal replicas may keep the order of places, and then it must not be
skipped.

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
    """The micro-batches of one replica. `total` is the sum of their seconds on the slowest stage,
    `work` the same without c_r."""

    tokens: list[int]
    squares: list[int]
    fill_seconds: list[float]  # of each micro-batch
    total: float = 0.0
    work: float = 0.0

    @property
    def key(self) -> tuple[tuple[int, int], ...]:
        """The sorted micro-batches: equal replicas with equal keys are interchangeable."""
        return tuple(sorted(zip(self.tokens, self.squares, strict=True)))


@dataclass(frozen=True)
class Place:
    """A micro-batch that a sample may join."""

    value: float  # seconds of the replica with the sample
    replica: int
    slot: int


@dataclass
class Search:
    """The depth-first search. `best` and `kept` are the seconds and the samples of the best
    decision known."""

    problem: LengthsProblem
    run: Run
    best: float
    kept: list[list[list[int]]] | None
    states: list[State] = field(init=False)
    at: list[tuple[int, int]] = field(
        init=False
    )  # (replica, micro-batch) of the samples placed so far

    def __post_init__(self) -> None:
        p = self.problem
        self.states = [State([0] * k, [0] * k, [0.0] * k) for k in p.slots.tolist()]
        self.at = []
        self.seconds, self.fill_seconds = p.seconds.tolist(), p.fill_seconds.tolist()
        self.tokens, self.capacity = p.tokens.tolist(), p.capacity.tolist()
        self.overhead, self.fill_overhead = p.overhead.tolist(), p.fill_overhead.tolist()
        self.price = p.prices.of_replica.tolist()
        priced = (p.prices.of_replica[:, None] * p.seconds).min(axis=0)
        # [n + 1] priced work and tokens of the samples from each one on
        self.rest: list[float] = [*priced[::-1].cumsum()[::-1].tolist(), 0.0]
        self.tokens_left = [*p.tokens[::-1].cumsum()[::-1].tolist(), 0]
        self.room = int((p.capacity * p.slots).sum())
        self.better_than(self.best)

    def better_than(self, seconds: float) -> None:
        """From now on prune decisions that are not faster than `seconds` by more than the gap."""
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
            longest = max(state.fill_seconds)
            for k, tokens in enumerate(state.tokens):
                key = (whole, tokens, state.squares[k])
                if tokens + size > self.capacity[r] or key in alike or (r, k) < first:
                    continue
                alike.add(key)
                added, fill = self.added(i, r, new=tokens == 0)
                value = state.total + added + max(longest, state.fill_seconds[k] + fill)
                found.append(Place(value, r, k))
        yield from sorted(found, key=lambda place: place.value)

    def added(self, sample: int, replica: int, *, new: bool) -> tuple[float, float]:
        """(seconds on the slowest stage, fill seconds) that a sample adds to a micro-batch. new:
        whether the micro-batch is empty before."""
        seconds, fill = self.seconds[replica][sample], self.fill_seconds[replica][sample]
        if new:
            return seconds + self.overhead[replica], fill + self.fill_overhead[replica]
        return seconds, fill

    def can_be_pruned(self) -> bool:
        """Whether the bounds prove that no completion of the node beats the best decision."""
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
            fill_seconds=list(state.fill_seconds),
        )
        added, fill = self.added(i, place.replica, new=state.tokens[place.slot] == 0)
        state.tokens[place.slot] += self.tokens[i]
        state.squares[place.slot] += self.tokens[i] ** 2
        state.fill_seconds[place.slot] += fill
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
        """Search all nodes. Raises Stopped where the run should stop."""
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
            step = self.go_to(place)
            pruned = self.can_be_pruned()
            if pruned or len(self.at) == n:
                if not pruned:
                    self.keep()
                self.undo(step)
            else:
                stack.append((self.places(), step))

    def keep(self) -> None:
        """Keep the decision of the present node, which is complete and better than the best."""
        self.better_than(max(state.total + max(state.fill_seconds) for state in self.states))
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
