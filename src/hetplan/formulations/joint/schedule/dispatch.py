"""A list heuristic for the order of passes: dispatching by rules, then local search.

Dispatching follows time. The stage that can begin a pass first does, and of the passes that it can
begin then it takes the first one by the rule. A rule has an order of kinds and the most
micro-batches that a stage begins ahead; GPipe, 1F1B and their like follow from such rules.
Micro-batches pass in their order. A forward pass begins only where the stage has room for it, for
the forward passes that the micro-batches begun before still need on its later chunks, and for what
one backward pass of inputs keeps in addition, so that stages do not wait for each other's memory.

The local search moves one pass of one stage to another place, and keeps the order where it does not
become slower.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from hetplan.formulations.joint.schedule.bounds import heads_and_tails
from hetplan.formulations.joint.schedule.data import Order, Pass, PassProblem, sender
from hetplan.formulations.joint.schedule.evaluate import (
    MEMORY_TOLERANCE,
    DeadLock,
    Verdict,
    evaluate,
)
from hetplan.solvers.run import Run

TIE = 1e-9  # relative difference of times of one moment
MOST_MOVE = 4  # places that a move of the local search crosses
KIND_ORDERS = ("BDFW", "BDWF", "FBDW")
# Seconds that dispatching a pass, and pricing one in an order, count.
DISPATCH_SECONDS = 2e-4
EVALUATION_SECONDS = 5e-5


@dataclass(frozen=True)
class Rule:
    """A rule of dispatching."""

    kinds: str  # kinds of passes, the first choice first
    # the most micro-batches that stage s begins ahead of those that are done, for each virtual
    # stage behind it; 0: no limit
    ahead: int = 0


@dataclass(frozen=True)
class Found:
    """An order of passes with its seconds."""

    order: Order
    verdict: Verdict

    @property
    def seconds(self) -> float:
        """Seconds of the order."""
        return self.verdict.seconds


def rules() -> Iterator[Rule]:
    """The rules that are tried."""
    return (Rule(kinds, ahead) for kinds, ahead in product(KIND_ORDERS, (0, 1, 2)))


def judged(problem: PassProblem, order: Order | None) -> Found | None:
    """An order with its verdict; None where it is none, keeps too much, or waits for ever."""
    if order is None:
        return None
    try:
        verdict = evaluate(problem, order)
    except DeadLock:
        return None
    return None if verdict.violations else Found(order, verdict)


def dispatch(problem: PassProblem, rule: Rule) -> Order | None:
    """The order that a rule makes; None where stages come to wait for each other's memory."""
    return Dispatcher(problem, rule).run()


class Dispatcher:
    """One run of dispatching."""

    def __init__(self, problem: PassProblem, rule: Rule) -> None:
        self.problem, self.rule = problem, rule
        self.tail = heads_and_tails(problem)[1]
        self.order: list[list[Pass]] = [[] for _ in range(problem.stages)]
        self.end: dict[Pass, float] = {}
        self.free = [0.0] * problem.stages
        self.port_free: dict[int, float] = {}
        self.kept = [0.0] * problem.stages
        # [S] bytes that the largest backward pass of inputs keeps in addition
        self.spare = [0.0] * problem.stages
        if problem.weight:
            for _, v, m in problem.passes:
                stage = problem.place[v]
                self.spare[stage] = max(self.spare[stage], self.added_by_inputs(v, m))
        # the next micro-batch of each kind of pass and virtual stage
        self.next = dict.fromkeys(((one.kind, one.virtual) for one in problem.passes), 0)

    def run(self) -> Order | None:
        """The order, or None."""
        for _ in self.problem.passes:
            choices = [
                (self.can_begin(one), one) for one in self.next_passes() if self.has_room(one)
            ]
            if not choices:
                return None
            moment = min(begin for begin, _ in choices)
            first = [(begin, one) for begin, one in choices if begin <= moment * (1 + TIE)]
            _, one = min(first, key=lambda choice: self.turn(choice[1]))
            self.do(one)
        return self.order

    def next_passes(self) -> Iterator[Pass]:
        """The passes whose results are there and whose turn it is."""
        for (kind, v), m in self.next.items():
            if m == self.problem.micros:
                continue
            one = Pass(kind, v, m)
            source = sender(self.problem, one)
            if source is None or source in self.end:
                yield one

    def message_begins(self, one: Pass) -> float:
        """When the message of a pass can begin."""
        source = sender(self.problem, one)
        begin = 0.0 if source is None else self.end[source]
        if self.problem.receiver_waits:
            begin = max(begin, self.free[self.problem.place[one.virtual]])
        ports = self.problem.message(one).ports
        return max([begin, *(self.port_free.get(port, 0.0) for port, _ in ports)])

    def can_begin(self, one: Pass) -> float:
        """When the stage can begin to work on a pass, waiting for its message included."""
        if self.problem.receiver_waits:
            return self.message_begins(one)
        arrived = self.message_begins(one) + self.problem.message(one).lasts
        return max(self.free[self.problem.place[one.virtual]], arrived)

    def has_room(self, one: Pass) -> bool:
        """Whether a stage may begin a pass."""
        problem, (kind, v, m) = self.problem, one
        stage = problem.place[v]
        if kind == "B":
            return self.fits(stage, self.kept[stage] + self.added_by_inputs(v, m))
        if kind != "F":
            return True
        back = "B" if problem.weight else "D"
        begun_ahead = m - self.next[back, v]  # type: ignore[index]
        if self.rule.ahead and begun_ahead >= self.rule.ahead * (len(problem.place) - v):
            return False
        needed = self.kept[stage] + problem.bytes_before_backward(v, m) + self.spare[stage]
        for other in problem.chunks[stage]:
            if other <= v:
                continue
            # the micro-batches up to this one have still to pass the later chunks
            for micro in range(self.next["F", other], m + 1):
                needed += problem.bytes_before_backward(other, micro)
        return self.fits(stage, needed)

    def added_by_inputs(self, v: int, m: int) -> float:
        """Bytes by which a backward pass of inputs keeps more than the forward pass."""
        problem = self.problem
        return problem.bytes_before_weight(v, m) - problem.bytes_before_backward(v, m)

    def fits(self, stage: int, kept: float) -> bool:
        """Whether a stage has room for `kept` bytes."""
        room = self.problem.room
        return room is None or kept <= room[stage] * (1 + MEMORY_TOLERANCE / 2)

    def turn(self, one: Pass) -> tuple[object, ...]:
        """Passes that can begin in one moment are done in the order of these keys."""
        return (self.rule.kinds.index(one.kind), -self.tail[one], -one.virtual, one.micro)

    def do(self, one: Pass) -> None:
        """Do a pass next."""
        problem, (kind, v, m) = self.problem, one
        stage, message = problem.place[v], problem.message(one)
        sent = self.message_begins(one)
        for port, share in message.ports:
            self.port_free[port] = sent + share * message.seconds
        begin = max(self.free[stage], sent + message.lasts)
        self.end[one] = self.free[stage] = begin + problem.seconds(one)
        self.order[stage].append(one)
        self.next[kind, v] += 1
        if kind == "F":
            self.kept[stage] += problem.bytes_before_backward(v, m)
        elif kind == "W":
            self.kept[stage] -= problem.bytes_before_weight(v, m)
        else:
            self.kept[stage] -= problem.bytes_before_backward(v, m)
            if kind == "B":
                self.kept[stage] += problem.bytes_before_weight(v, m)


def best_dispatched(problem: PassProblem, run: Run) -> Found | None:
    """The fastest order of all rules; None where none has room."""
    best: Found | None = None
    for rule in rules():
        if run.should_stop:
            break
        run.count(DISPATCH_SECONDS * len(problem.passes))
        best = better(best, judged(problem, dispatch(problem, rule)))
    return best


def better(one: Found | None, other: Found | None) -> Found | None:
    """The faster one of two."""
    if one is None or (other is not None and other.seconds < one.seconds):
        return other
    return one


def improve(problem: PassProblem, found: Found, run: Run, steps: int, enough: float = 0.0) -> Found:
    """The order after `steps` steps of local search, or as soon as it takes at most `enough`
    seconds."""
    draw = random.Random(run.options.seed)
    order = [list(passes) for passes in found.order]
    for _ in range(steps):
        if run.should_stop or found.seconds <= enough:
            break
        run.count(EVALUATION_SECONDS * len(problem.passes))
        moved = move(order, draw)
        if moved is None:
            continue
        passes, stage = moved
        tried = [passes if s == stage else kept for s, kept in enumerate(order)]
        other = judged(problem, tried)
        if other is not None and other.seconds <= found.seconds:
            found, order = other, tried
    return found


def move(order: Sequence[Sequence[Pass]], draw: random.Random) -> tuple[list[Pass], int] | None:
    """(a stage's passes with one of them at another place, the stage); None where the move would
    change the order of micro-batches."""
    stage = draw.randrange(len(order))
    passes = list(order[stage])
    at = draw.randrange(len(passes))
    to = at + draw.choice((-1, 1)) * draw.randint(1, MOST_MOVE)
    if not 0 <= to < len(passes):
        return None
    one = passes[at]
    crossed = passes[min(at, to) : max(at, to) + 1]
    if any(each != one and each[:2] == one[:2] for each in crossed):
        return None
    passes.insert(to, passes.pop(at))
    return passes, stage
