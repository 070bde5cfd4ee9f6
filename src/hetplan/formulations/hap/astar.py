"""The A* search of HAP, Fig. 10, for fixed ratios, and the prunings of Section 4.5.

The first two prunings rewrite the theory. Both speak of placeholders and parameters, in a theory
its sources: triples that need nothing and take no time. (An operator that loads its data itself
needs nothing either, but it computes, and its result may be communicated as any other's.) Fusion: a
source is merged into each triple that needs its effects. One communication per tensor:
communications of a tensor exclude each other, and a source's tensor is not communicated at all. A
property's tensor is what precedes its last `|`. The third removes redundant properties from partial
programs.

A partial program costs its time up to the last synchronisation; the estimate of the rest assumes
infinite bandwidth.
"""

import heapq
import itertools
from dataclasses import dataclass

import networkx as nx
import numpy as np

from hetplan.formulations.hap.problem import Floats, Step
from hetplan.formulations.hap.theory import NOTHING, ReducedTheory
from hetplan.solvers.run import Run
from hetplan.text import grouped

# Fused alternatives of one triple beyond which its producers are left unfused.
MOST_FUSED = 64


@dataclass(frozen=True)
class Move:
    """Steps run one after the other as one instruction."""

    steps: tuple[Step, ...]
    pre: frozenset[int]
    post: frozenset[int]
    tensors: frozenset[str] = frozenset()  # that it communicates, and that may be so only once


def fuse(theory: ReducedTheory, *, once: bool) -> list[Move]:
    """Section 4.5's first pruning and, with `once`, its second.

    Sources that hold no bytes are in no move: the reduced theory has their effects for nothing.
    """
    before = theory.problem.steps

    def tensors(properties: frozenset[int]) -> frozenset[str]:
        names = [theory.problem.properties[p] for p in properties]
        return frozenset(name.rpartition("|")[0] or name for name in names)

    def is_source(step: Step) -> bool:
        takes_time = step.comm or step.fixed or step.shared
        return not before[step.index].pre and not takes_time

    sources = [step for step in theory.steps if is_source(step)]
    had = [step for step in theory.for_nothing if is_source(step)]
    loaded = tensors(frozenset().union(*(step.post for step in [*sources, *had])))
    moves: list[Move] = []
    consumed: set[int] = set()
    for step in theory.steps:
        if is_source(step):
            continue
        communicates = step.comm and once
        communicated = tensors(before[step.index].pre) if communicates else frozenset[str]()
        if communicated & loaded:
            continue
        for chosen in _producers(step, sources):
            consumed.update(s.index for s in chosen)
            produced = frozenset[int]().union(*(s.post for s in chosen))
            moves.append(
                Move((*chosen, step), step.pre - produced, step.post | produced, communicated)
            )
    # a source that no triple consumes whole (the goal itself, or only parts of several effects)
    # stays on its own
    needed = {p for step in theory.steps for p in step.pre}
    for step in sources:
        whole = step.index in consumed and len(step.post) == 1 and step.post <= needed
        if not whole or theory.goal in step.post:
            moves.append(Move((step,), frozenset(), step.post))
    return moves


def _producers(step: Step, sources: list[Step]) -> list[tuple[Step, ...]]:
    """Every way to fuse sources into `step`: at most one per property that it needs."""
    ways: list[tuple[Step, ...]] = [()]
    for p in sorted(step.pre):
        producers = [s for s in sources if p in s.post and s.post <= step.pre]
        grown = [
            way if any(p in s.post for s in way) else (*way, s) for way in ways for s in producers
        ]
        grown += ways  # the property may also be there already
        if len(grown) > MOST_FUSED:
            break
        ways = list(dict.fromkeys(grown))
    return ways


@dataclass
class _Partial:
    """A partial program."""

    program: tuple[int, ...]  # triple numbers
    known: frozenset[int]  # of these the ones that are still of use
    ever: frozenset[int]  # all properties that it has given
    communicated: frozenset[str]  # tensors
    cost: float  # seconds up to the last synchronisation
    busy: Floats  # [K] seconds since then
    held: Floats  # [K] bytes
    queued: bool = True  # still in the queue S of Fig. 10

    def no_dearer(self, other: "_Partial") -> bool:
        """Whether it costs and holds no more than another."""
        return self.cost <= other.cost and bool((self.held <= other.held).all())


class ProgramSearch:
    """A search for one program: its moves by what they need, their times and bytes, and distances
    to the goal."""

    def __init__(self, theory: ReducedTheory, moves: list[Move], ratios: Floats) -> None:
        self.theory, self.moves, self.ratios = theory, moves, ratios
        self.times = [[self._time(step) for step in move.steps] for move in moves]
        self.held = [
            sum(s.fixed_bytes + s.shared_bytes * ratios[s.segment] for s in move.steps)
            for move in moves
        ]
        self.by_pre = grouped(
            (p, n) for n, move in enumerate(moves) for p in move.pre or (NOTHING,)
        )
        self.distance = self._distances()
        zeros, none = np.zeros(theory.problem.K), frozenset[int]()
        self.nothing = _Partial((), none, none, frozenset(), 0.0, zeros, zeros)

    def _time(self, step: Step) -> tuple[float | None, Floats]:
        """(Seconds of a communication, None of a computation; [K] seconds of computing)."""
        row, speeds = self.ratios[step.segment], self.theory.problem.speeds
        return (
            (step.fixed + step.shared * float(row.max()), np.zeros(len(speeds)))
            if step.comm
            else (None, (step.fixed + step.shared * row) / speeds)
        )

    def _distances(self) -> dict[int, float]:
        """property -> least computing, on the type that has least of it, on a way from it to the
        goal."""
        goal = self.theory.goal
        graph: nx.DiGraph[int] = nx.DiGraph()
        graph.add_node(goal)
        for move, times in zip(self.moves, self.times, strict=True):
            work = sum(float(busy.min()) for _, busy in times)
            for p, q in itertools.product(move.post, move.pre or (NOTHING,)):
                if work < graph.get_edge_data(p, q, {"weight": np.inf})["weight"]:
                    graph.add_edge(p, q, weight=work)
        return dict(nx.single_source_dijkstra_path_length(graph, goal))

    def fits(self, partial: _Partial) -> bool:
        """Whether what a partial program holds fits in memory."""
        room = self.theory.problem.capacity
        return room is None or bool((partial.held <= room).all())

    def estimate(self, partial: _Partial) -> float:
        """ecost: the stage under way and the computing that is still to come at least."""
        rest = [self.distance[p] for p in (*partial.known, NOTHING) if p in self.distance]
        return float(partial.busy.max()) + min(rest, default=0.0)

    def useful(self, move: Move, partial: _Partial) -> bool:
        """Whether a move may be made, now or later, and gives a property that was never there."""
        return not move.post <= partial.ever and not move.tensors & partial.communicated

    def applicable(self, partial: _Partial) -> list[int]:
        """Moves whose precondition is met and that add a property (line 7), in a fixed order."""
        near = {n for p in (*partial.known, NOTHING) for n in self.by_pre.get(p, ())}
        return [
            n
            for n in sorted(near)
            if self.moves[n].pre <= partial.known and self.useful(self.moves[n], partial)
        ]

    def extended(self, partial: _Partial, n: int) -> _Partial:
        """The partial program with move n appended; properties that no useful move needs any more
        are dropped (third pruning)."""
        move, cost, busy = self.moves[n], partial.cost, partial.busy
        for seconds, computing in self.times[n]:
            if seconds is None:
                busy = busy + computing
            else:
                cost, busy = cost + float(busy.max()) + seconds, computing
        after = _Partial(
            (*partial.program, *(s.index for s in move.steps)), partial.known | move.post,
            partial.ever | move.post, partial.communicated | move.tensors, cost, busy,
            partial.held + self.held[n],
        )  # fmt: skip
        after.known = frozenset(
            p
            for p in after.known
            if p == self.theory.goal
            or any(self.useful(self.moves[m], after) for m in self.by_pre.get(p, ()))
        )
        return after


def search(
    theory: ReducedTheory, ratios: Floats, run: Run, *, once: bool, most: int | None = None
) -> tuple[list[int] | None, bool, int]:
    """(The program that Fig. 10 finds at ratios [g, K], None where there is none; whether the
    search ended; how many partial programs it extended, `most` at most).

    once: with the second pruning. Lines 9-14 compare costs up to the last synchronisation, as
    Section 4.3 defines the cost of a partial program; what differs since then is not seen, nor
    which tensors may still be communicated, so that a cheaper program may be missed. With
    memory, what does not fit is left out, and a partial program beats another only if it holds no
    more.
    """
    look = ProgramSearch(theory, fuse(theory, once=once), ratios)
    empty = look.nothing
    order = itertools.count()
    queue: list[tuple[float, int, _Partial]] = [(look.estimate(empty), next(order), empty)]
    by_known: dict[frozenset[int], list[_Partial]] = {}
    best, least = empty, np.inf
    extensions = 0
    while queue:
        if run.should_stop or extensions == most:
            return None, False, extensions
        score, _, partial = heapq.heappop(queue)
        if score >= least:
            break
        if not partial.queued:
            continue
        partial.queued = False
        extensions += 1
        for n in look.applicable(partial):
            after = look.extended(partial, n)
            if not look.fits(after):
                continue
            total = after.cost + float(after.busy.max())
            if theory.goal in after.known:
                if total < least:
                    best, least = after, total
            elif not _beaten(after, by_known):
                by_known.setdefault(after.known, []).append(after)
                heapq.heappush(queue, (after.cost + look.estimate(after), next(order), after))
    return theory.program(best.program) if np.isfinite(least) else None, True, extensions


def _beaten(after: _Partial, by_known: dict[frozenset[int], list[_Partial]]) -> bool:
    """Lines 9 to 14: whether another partial program has all its properties and costs no more;
    those that it beats itself leave the queue."""
    if any(
        known >= after.known and any(o.queued and o.no_dearer(after) for o in others)
        for known, others in by_known.items()
    ):
        return True
    for known, others in list(by_known.items()):
        if known <= after.known:
            for other in others:
                other.queued = other.queued and not after.no_dearer(other)
        others[:] = [o for o in others if o.queued]
        if not others:
            del by_known[known]
    return False
