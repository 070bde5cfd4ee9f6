"""HAP's own procedure, its search in the order of the single-device program, and its baselines.

Method `paper`: a program for fixed ratios and ratios for a fixed program, in turn.

Source: HAP, Section 3.1: from ratios proportional to speed, until the program repeats; the best
pair is kept. The ratios are those of the linear programme of Section 5.1, the program for fixed
ratios is that of A* (Fig. 10, module `astar`) with the prunings of Section 4.5. With memory, which
HAP does not limit, partial programs that do not fit at the fixed ratios are pruned, and the linear
programme has memory.

Where A* grows too large, it is cut off, which the message says, and the search in order (below)
takes its place. The message says as well where that has left states out. With memory it is asked at
several prices of bytes, and the cheapest program that fits counts.

Baselines. DP-EV and DP-CP: data parallelism with even ratios, or ratios in proportion to
speed. TAG: the latter, where gradients may also be computed from gathered factors; its parameter
servers and its placing of whole layers on devices have no triples. DeepSpeed: even shares of a
program that experts wrote, of which the best at even ratios is taken.

A theory does not say which of its triples are data parallelism, so that is read from names and
work. HAP's property names spell out forms: data parallelism shards dimension 0 only, and
communicates by all-reduce. Among such programs it replicates no work that can be shared. Where the
names spell no forms, or no such program exists, the forms do not restrict it. Source: HAP, Section
7.1.

A* in the order of the single-device program, for theories on which Figure 10 as printed does not
end.

As printed the search appends any instruction whose precondition is met. It meets independent
instructions in every order and at every time, and its estimate is that of one chain to the goal,
so that its states grow exponentially with the operators. Here

- tensors are computed once each, in one topological order of the single-device program;
  communications and local slices of what there is may stand between any two. The authors' code
  computes each tensor once, too (`unique_computation`), on forward graphs that are nearly chains;
- partial programs of as many tensors with the same properties still of use share a state, extended
  ones included (their `property_cache`); the one of the lowest score is kept;
- the estimate is the paper's, the least time of what is left at infinite bandwidth: with a fixed
  list of tensors, each one's cheapest form on every type, beside the stage under way;
- states are extended tensor by tensor, the best of each tensor first and only so many. The search
  is repeated with four times as many until it has left none out whose score is below the best
  program's, or until time is up.

Of the prunings of §4.5 the order takes the place of the first; the second is left out, since
programs that communicate a tensor twice are mostly the better ones; the third is the properties of
use. A property's tensor is what precedes its last `|`, without what follows a `~`, which names a
way to it. Nothing is found where tensors depend on each other in a circle, or one that cannot be
computed is not needed for the goal. Memory is known as a price of bytes.
"""

import heapq
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import add
from typing import NamedTuple

import networkx as nx
import numpy as np

from hetplan.formulations.hap import astar
from hetplan.formulations.hap.common import (
    best_ratios,
    fitting_program,
    greedy_program,
    outcome_of,
    reduced_or_answered,
    seconds_at,
    tried_byte_prices,
)
from hetplan.formulations.hap.data import HapData, HapDecision, Triple
from hetplan.formulations.hap.problem import (
    Floats,
    HapProblem,
    ReducedTheory,
    Step,
    compile_problem,
)
from hetplan.solvers.run import Outcome, Run, Stop, stop_reason

Known = frozenset[int]
ByType = tuple[float, ...]


class Move(NamedTuple):
    """A step: its triple's number, what it needs and gives, its seconds by type (a communication's
    are the same for all), what its bytes cost."""

    triple: int
    comm: bool
    pre: Known
    post: Known
    seconds: ByType
    paid: float


class Partial(NamedTuple):
    """A partial program: properties of use; seconds up to the last synchronisation, by type since
    then; the least that a whole program of it takes; the one before and the move added."""

    known: Known
    cost: float
    busy: ByType
    score: float
    before: "tuple[Partial, Move] | None" = None

    def program(self) -> list[int]:
        """Triple numbers in order."""
        numbers, at = list[int](), self.before
        while at is not None:
            numbers.append(at[1].triple)
            at = at[0].before
        return numbers[::-1]


@dataclass(frozen=True)
class Order:
    """making [n + 1]: the moves that compute the tensor of that number, none last; changing:
    property -> moves that turn it into others of the same tensor. useful [n + 1]: properties still
    of use once so many tensors are computed; rest [n + 1]: seconds of computing left at least, by
    type."""

    goal: int
    making: list[list[Move]]
    changing: dict[int, list[Move]]
    useful: list[Known]
    rest: list[ByType]

    def within(self, width: int, least: float, run: Run) -> tuple[Partial | None, bool]:
        """(The best program below `least`, extending so many states of each tensor; whether others
        that might be better were left out)."""
        left_out, count, none = False, itertools.count(), frozenset[int]()
        level = {none: Partial(none, 0.0, (0.0,) * len(self.rest[0]), 0.0)}
        for made, making in enumerate(self.making):
            after: dict[Known, Partial] = {}
            queue = [(old.score, next(count), old) for old in level.values()]
            heapq.heapify(queue)
            extended = 0
            while queue:
                score, _, old = heapq.heappop(queue)
                if level[old.known].score < score:
                    continue
                if extended == width or run.should_stop:
                    left_out = True
                    break
                extended += 1
                if self.goal in old.known:
                    return old, left_out
                changes = (move for p in sorted(old.known) for move in self.changing.get(p, ()))
                for new in self.extended(old, changes, made, level, least):
                    heapq.heappush(queue, (new.score, next(count), new))
                for _ in self.extended(old, making, made + 1, after, least):
                    pass
            level = after
        return None, left_out

    def extended(
        self, old: Partial, moves: Iterable[Move], made: int, states: dict[Known, Partial],
        least: float,
    ) -> Iterator[Partial]:  # fmt: skip
        """The partial programs with one move more, of so many tensors, that are the best of their
        states, in which they are put."""
        for move in moves:
            if not move.pre <= old.known:
                continue
            known = (old.known | move.post) & self.useful[made]
            cost, busy = old.cost + move.paid, tuple(map(add, old.busy, move.seconds))
            if move.comm:
                cost, busy = cost + max(busy), (0.0,) * len(busy)
            score = cost + max(map(add, busy, self.rest[made]))
            if score < least and (known not in states or score < states[known].score):
                states[known] = Partial(known, cost, busy, score, (old, move))
                yield states[known]


def search(
    theory: ReducedTheory, ratios: Floats, run: Run, *, most: int, byte_price: float = 0.0
) -> tuple[list[int] | None, int | None]:
    """The best program met at ratios [g, K], None where there is none; and how many states of each
    tensor were extended for it (`most` at most), None for all that could be better.

    byte_price: seconds per byte on one device.
    """
    order, best, width = arranged(theory, ratios, byte_price), None, 1
    left_out = order is not None
    while order is not None and left_out and width < most and not run.should_stop:
        width *= 4
        program, left_out = order.within(width, best.score if best else np.inf, run)
        best = program or best
    return theory.program(best.program()) if best else None, width if left_out else None


def arranged(theory: ReducedTheory, ratios: Floats, byte_price: float) -> Order | None:
    """The order of the theory's tensors; None where they depend on each other in a circle."""
    problem, names = theory.problem, theory.problem.properties
    moves = []
    for step in theory.steps:
        row = ratios[step.segment]
        paid = byte_price * (step.fixed_bytes * float(problem.counts.sum()) + step.shared_bytes)
        shares, speeds = (row.max(), np.ones(problem.K)) if step.comm else (row, problem.speeds)
        seconds = tuple(((step.fixed + step.shared * shares) / speeds).tolist())
        moves.append(Move(step.index, step.comm, step.pre, step.post, seconds, paid))

    def tensors(properties: Known) -> set[str]:
        return {(names[p].rpartition("|")[0] or names[p]).partition("~")[0] for p in properties}

    graph: nx.DiGraph[str] = nx.DiGraph()
    place: dict[str, int] = {}
    made_by = [tensors(move.post) - tensors(move.pre) for move in moves]
    for n, (move, made) in enumerate(zip(moves, made_by, strict=True)):
        graph.add_nodes_from(made)
        graph.add_edges_from(itertools.product(tensors(move.pre), made))
        place = dict.fromkeys(made, n) | place
    try:
        order = list(nx.lexicographical_topological_sort(graph, key=lambda t: place.get(t, -1)))
    except nx.NetworkXUnfeasible:
        return None
    number = {tensor: i for i, tensor in enumerate(order)}
    making: list[list[Move]] = [[] for _ in range(len(order) + 1)]
    changing: dict[int, list[Move]] = defaultdict(list)
    sources: nx.DiGraph[int] = nx.DiGraph()
    for move, made in zip(moves, made_by, strict=True):
        if made:
            making[min(number[tensor] for tensor in made)].append(move)
        else:
            sources.add_edges_from(itertools.product(move.post, move.pre))
            changing[min(move.pre)].append(move)
    wanted, useful = {theory.goal}, list[Known]()
    rest = np.zeros((len(order) + 1, problem.K))
    for i in range(len(order), -1, -1):
        for p in frozenset({theory.goal}).union(*(move.pre for move in making[i])):
            wanted |= {p} | (nx.descendants(sources, p) if p in sources else set())
        useful.append(frozenset(wanted))
        work = [(0.0,) * problem.K if move.comm else move.seconds for move in making[i]]
        rest[i] = np.min(work, axis=0) if work else 0.0
    left = rest[::-1].cumsum(axis=0)[::-1]
    return Order(theory.goal, making, changing, useful[::-1], [tuple(row) for row in left.tolist()])


DOES_NOT_FIT = "no program was found that fits in memory at the ratios tried"
REPEATED = "no program communicates each tensor at most once; that pruning was left out"
CUT_OFF = "HAP's A*, cut off at {states} states{instead}"
NOT_BEGUN = "HAP's A*, stopped before its first state{instead}"
IN_ORDER = "; the same search in the program's order ended"
KEPT = " and completed in the program's order, {width} states of each tensor, or greedily"
DERIVED = " and completed greedily"


@dataclass(frozen=True)
class Parameters:
    """When A* has grown too large, printed or in the program's order."""

    # Partial programs that A* may extend, its seconds, and its share of the time left.
    extensions: int = 1_000
    seconds: float = 2.0
    share: float = 0.25
    # Seconds of A* in the order of the single-device program, and its share of the time left.
    ordered_seconds: float = 10.0
    ordered_share: float = 0.75
    # States of each tensor that it extends at most.
    ordered_states: int = 256


def solve(data: HapData, run: Run, parameters: Parameters = Parameters()) -> Outcome[HapDecision]:
    """The best pair of the alternation; no bound."""
    theory = reduced_or_answered(data, run)
    if isinstance(theory, Outcome):  # one program at most: its ratios, without a claim
        return theory if theory.decision is None else replace(theory, stop=Stop.DONE, bound=None)
    problem, programs = theory.problem, _Programs(theory, run, parameters)
    ratios = np.tile(problem.proportional, (problem.g, 1))
    best: Sequence[int] | None = None
    least, tried = np.inf, set[tuple[int, ...]]()
    while best is None or not run.should_stop:
        program = programs.at(ratios)
        answer = best_ratios(problem, problem.cost_of(program), run)
        if tuple(program) in tried or not answer.fits:
            break
        tried.add(tuple(program))
        ratios = answer.ratios
        if answer.seconds < least:
            best, least = program, answer.seconds
            run.report(incumbent=least)
    return outcome_of(
        theory, best, run=run, bound=None, details={"rounds": len(tried)},
        stop=stop_reason(run) if run.should_stop else Stop.DONE,
        message=DOES_NOT_FIT if best is None else programs.note,
    )  # fmt: skip


class _Programs:
    """Programs for fixed ratios: by A* with both prunings of the theory; without the second one
    where both leave no program; in the program's order once A* has grown too large."""

    def __init__(self, theory: ReducedTheory, run: Run, parameters: Parameters) -> None:
        self.theory, self.run, self.parameters = theory, run, parameters
        # of the searches by A* that are still to be tried: whether they have the second pruning
        self._searches_left: tuple[bool, ...] = (True, False)
        self._states, self._instead = 0, IN_ORDER

    @property
    def note(self) -> str:
        """What was left out of HAP's procedure."""
        cut_off = CUT_OFF if self._states else NOT_BEGUN
        cut_off = cut_off.format(states=self._states, instead=self._instead)
        return (cut_off, REPEATED, "")[len(self._searches_left)]

    def at(self, ratios: Floats) -> Sequence[int]:
        """A program (triple numbers) for ratios [g, K]."""
        while self._searches_left:
            share = self.parameters.share * self.run.remaining
            program, finished, self._states = astar.search(
                self.theory,
                ratios,
                self.run.part(time_limit=min(self.parameters.seconds, share)),
                once=self._searches_left[0],
                most=self.parameters.extensions,
            )
            if program is not None:
                return program
            self._searches_left = self._searches_left[1:] if finished else ()
        return self._without_a_star(ratios)

    def _without_a_star(self, ratios: Floats) -> Sequence[int]:
        """The cheapest at these ratios of the cheapest derivation and the programs of A* in the
        order of the single-device program, with memory at several prices of bytes; where none fits
        at them, the cheapest at any."""
        problem = self.theory.problem
        prices = [0.0] if problem.capacity is None else [0.0, *tried_byte_prices(problem)]
        share = self.parameters.ordered_share * self.run.remaining
        seconds = min(self.parameters.ordered_seconds, share) / len(prices)
        programs: list[Sequence[int]] = [
            greedy_program(self.theory, seconds_at(self.theory, ratios))
        ]
        self._instead = IN_ORDER
        for price in prices:
            program, width = search(
                self.theory, ratios, self.run.part(time_limit=seconds),
                most=self.parameters.ordered_states, byte_price=price,
            )  # fmt: skip
            if program is not None:
                programs.append(program)
            if width is not None:
                self._instead = KEPT.format(width=width)
        if len(programs) == 1:
            self._instead = DERIVED
        fitting = [q for q in programs if problem.fits(problem.cost_of(q), ratios)]
        if fitting:
            return min(fitting, key=lambda q: problem.seconds(problem.cost_of(q), ratios))
        distinct = dict.fromkeys(map(tuple, [*programs, fitting_program(self.theory, self.run)[0]]))
        return min(
            distinct, key=lambda q: best_ratios(problem, problem.cost_of(q), self.run).seconds
        )


_OTHER_DIMENSION = re.compile(r"\|\s*all-gather\(\s*[1-9]\d*\s*\)\s*$", re.IGNORECASE)
_OTHER_COLLECTIVE = re.compile(
    r"reduce-scatter|all-to-all|all-gather|grouped-broadcast", re.IGNORECASE
)
# A second of replicated work weighs like so many seconds of anything else.
REPLICATED = 1e3
UNFIT_DATA_PARALLEL = "data parallelism at these ratios does not fit in memory"

# States of each tensor that are extended for DeepSpeed's program.
STATES = 64


def solve_by(method: str, data: HapData, run: Run) -> Outcome[HapDecision]:
    """The baseline's program at its ratios."""

    def rule(problem: HapProblem) -> Floats:
        return problem.even if method in ("dp-even", "deepspeed") else problem.proportional

    theory, message = reduced_or_answered(data, run), ""
    if isinstance(theory, Outcome):
        if theory.decision is None:
            return theory
        problem = compile_problem(data)
        program, ratios = theory.decision.program, np.tile(rule(problem), (problem.g, 1))
    else:
        problem = theory.problem
        ratios = np.tile(rule(problem), (problem.g, 1))
        program = data_parallel(data, theory, ratios, factors=method == "tag")
        if method == "deepspeed":
            program = search(theory, ratios, run, most=STATES)[0] or program
            message = "cut off by the time limit" if run.should_stop else ""
    if not problem.fits(problem.cost_of(program), ratios):
        return Outcome(stop=Stop.DONE, message=UNFIT_DATA_PARALLEL)
    return Outcome(stop=Stop.DONE, decision=problem.decision(program, ratios), message=message)


def data_parallel(
    data: HapData, theory: ReducedTheory, ratios: Floats, *, factors: bool = False
) -> list[int]:
    """The program (triple numbers) of data parallelism at ratios [g, K]; factors: whether gradients
    may be computed from gathered factors."""
    seconds, slowest = seconds_at(theory, ratios), float(theory.problem.speeds[0])

    def least(step: Step) -> float:
        return seconds(step) + (0.0 if step.comm else REPLICATED * step.fixed / slowest)

    def restricted(step: Step) -> float:
        return least(step) if allowed(data.triples[step.index]) else np.inf

    def allowed(triple: Triple) -> bool:
        return (factors and "factors" in triple.instruction) or all_reduces_slices_of_data(triple)

    program = greedy_program(theory, restricted)
    keeps = all(allowed(data.triples[i]) for i in program)
    return program if keeps else greedy_program(theory, least)


def all_reduces_slices_of_data(triple: Triple) -> bool:
    """Whether a triple has slices of dimension 0 alone, and no collectives but all-reduces."""
    other = triple.kind == "comm" and _OTHER_COLLECTIVE.search(triple.instruction)
    names = (*triple.pre, *triple.post)
    return not other and not any(map(_OTHER_DIMENSION.search, names))
