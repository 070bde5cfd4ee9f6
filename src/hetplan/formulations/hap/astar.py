"""The A* search of HAP, Fig. 10, for fixed ratios, and the prunings of Section 4.5.

The first two prunings rewrite the theory. Both concern placeholders and parameters, which are the
sources of a theory here: triples that need nothing and take no time. (An operator that loads its
data itself needs nothing either, but it computes, and its result may be communicated as any
other's.) The first pruning, fusion, merges a source into each triple that needs its effects. The
second allows one communication per tensor: communications of a tensor exclude each other, and the
tensor of a source is not communicated at all. The tensor of a property is the part of its name
before the last `|`. The third pruning removes redundant properties from partial programs.

The cost of a partial program is its time up to the last synchronisation; the estimate of the rest
assumes infinite bandwidth.
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

# The most moves that fusion makes of one triple, whose number would else double with each property
# that it needs; sources of further properties stay moves apart.
MOST_FUSED = 64


@dataclass(frozen=True)
class Move:
    """Steps that run one after the other as one instruction."""

    steps: tuple[Step, ...]
    pre: frozenset[int]  # properties that it needs
    post: frozenset[int]  # properties that it gives
    # tensors that it communicates where each may be communicated only once
    tensors: frozenset[str] = frozenset()


def fuse(theory: ReducedTheory, *, once: bool) -> list[Move]:
    """The moves of a theory: its triples after Section 4.5's first pruning.

    Sources that hold no bytes are in no move: the reduced theory has their effects for nothing.

    once: whether a tensor is communicated only once (second pruning).
    """
    unreduced = theory.problem.steps  # the triples with all their preconditions

    def tensors(properties: frozenset[int]) -> frozenset[str]:
        """The tensors of these properties."""
        names = [theory.problem.properties[p] for p in properties]
        return frozenset(name.rpartition("|")[0] or name for name in names)

    def is_source(step: Step) -> bool:
        """Whether a triple needs nothing and takes no time."""
        # a collective ends a stage, even one of 0 seconds
        takes_time = step.comm or step.fixed or step.shared
        return not unreduced[step.index].pre and not takes_time

    sources = [step for step in theory.steps if is_source(step)]
    free_sources = [step for step in theory.for_nothing if is_source(step)]
    loaded_properties: set[int] = set()
    for step in [*sources, *free_sources]:
        loaded_properties |= step.post
    loaded = tensors(frozenset(loaded_properties))
    moves: list[Move] = []
    consumed: set[int] = set()
    for step in theory.steps:
        if is_source(step):
            continue
        communicated: frozenset[str] = frozenset()
        if step.comm and once:
            communicated = tensors(unreduced[step.index].pre)
        if communicated & loaded:
            continue
        for fused in _producers(step, sources):
            consumed.update(source.index for source in fused)
            produced = frozenset[int]().union(*(source.post for source in fused))
            moves.append(
                Move((*fused, step), step.pre - produced, step.post | produced, communicated)
            )
    # A source is also a move of its own unless other moves consume its only effect: it may give the
    # goal itself, or several effects of which a triple needs a part.
    for step in sources:
        only_fused = step.index in consumed and len(step.post) == 1
        if not only_fused or theory.goal in step.post:
            moves.append(Move((step,), frozenset(), step.post))
    return moves


def _producers(step: Step, sources: list[Step]) -> list[tuple[Step, ...]]:
    """The sets of sources that can be fused into `step`: at most one source per property that it
    needs. A source that also gives a property which `step` does not need is not fused."""
    selections: list[tuple[Step, ...]] = [()]
    for p in sorted(step.pre):
        producers = [s for s in sources if p in s.post and s.post <= step.pre]
        extended = []
        for selection in selections:
            # a second source of the same property adds nothing: the selection stays as it is
            given = any(p in s.post for s in selection)
            for producer in producers:
                extended.append(selection if given else (*selection, producer))
        extended += selections  # the property may also come from another move
        if len(extended) > MOST_FUSED:
            break
        selections = list(dict.fromkeys(extended))
    return selections


@dataclass
class _Partial:
    """A partial program: the beginning of a program."""

    program: tuple[int, ...]  # triple numbers
    known: frozenset[int]  # properties it has established that a further move or the goal needs
    ever: frozenset[int]  # all properties that it has established
    communicated: frozenset[str]  # tensors it has communicated that may be so only once
    cost: float  # seconds up to the last synchronisation
    busy: Floats  # [K] seconds that each device type computes after the last synchronisation
    held: Floats  # [K] bytes on one device of each type
    queued: bool = True  # whether it is in the queue S of Fig. 10

    def no_dearer(self, other: "_Partial") -> bool:
        """Whether it costs no more and holds no more bytes than another."""
        return self.cost <= other.cost and bool((self.held <= other.held).all())


class ProgramSearch:
    """The steps of Fig. 10's search for a program at given ratios.

    ratios: [g, K], of each segment and device type.
    """

    def __init__(self, theory: ReducedTheory, moves: list[Move], ratios: Floats) -> None:
        self.theory, self.moves, self.ratios = theory, moves, ratios
        # by move, the times of its steps, see `_time`
        self.times = [[self._time(step) for step in move.steps] for move in moves]
        # by move, the bytes that it adds on one device of each type, [K]
        self.held = [
            sum(s.fixed_bytes + s.shared_bytes * ratios[s.segment] for s in move.steps)
            for move in moves
        ]
        # property -> moves that need it; NOTHING -> moves that need none
        self.by_pre = grouped(
            (p, n) for n, move in enumerate(moves) for p in move.pre or (NOTHING,)
        )
        self.distance = self._distances()
        zeros, none = np.zeros(theory.problem.K), frozenset[int]()
        # the empty program, where the search begins
        self.nothing = _Partial((), none, none, frozenset(), 0.0, zeros, zeros)

    def _time(self, step: Step) -> tuple[float | None, Floats]:
        """(seconds of communication, [K] seconds of computing) of a step. A computation
        synchronises nothing, and its seconds of communication are None."""
        row = self.ratios[step.segment]
        speeds = self.theory.problem.speeds
        if step.comm:
            return step.fixed + step.shared * float(row.max()), np.zeros(len(speeds))
        return None, (step.fixed + step.shared * row) / speeds

    def _distances(self) -> dict[int, float]:
        """property -> least seconds of computing on a path of moves from it to the goal; each step
        counts with the device type that computes it fastest."""
        goal = self.theory.goal
        graph: nx.DiGraph[int] = nx.DiGraph()
        graph.add_node(goal)
        for move, times in zip(self.moves, self.times, strict=True):
            work = sum(float(busy.min()) for _, busy in times)
            for effect, need in itertools.product(move.post, move.pre or (NOTHING,)):
                least = graph.get_edge_data(effect, need, {"weight": np.inf})["weight"]
                if work < least:
                    graph.add_edge(effect, need, weight=work)
        return dict(nx.single_source_dijkstra_path_length(graph, goal))

    def fits(self, partial: _Partial) -> bool:
        """Whether the bytes of a partial program fit in memory."""
        capacity = self.theory.problem.capacity
        return capacity is None or bool((partial.held <= capacity).all())

    def estimate(self, partial: _Partial) -> float:
        """A lower bound of the seconds from the last synchronisation to the end (ecost in Fig. 10):
        the computing since then, and the least distance to the goal of an established property, or
        of none; 0 where no moves lead to the goal."""
        rest = [self.distance[p] for p in (*partial.known, NOTHING) if p in self.distance]
        return float(partial.busy.max()) + min(rest, default=0.0)

    def useful(self, move: Move, partial: _Partial) -> bool:
        """Whether a move may still be made, now or later, and would establish a new property."""
        return not move.post <= partial.ever and not move.tensors & partial.communicated

    def applicable(self, partial: _Partial) -> list[int]:
        """Moves (ascending) whose precondition is met and that add a property (line 7)."""
        candidates = {n for p in (*partial.known, NOTHING) for n in self.by_pre.get(p, ())}
        met = [n for n in sorted(candidates) if self.moves[n].pre <= partial.known]
        return [n for n in met if self.useful(self.moves[n], partial)]

    def extended(self, partial: _Partial, n: int) -> _Partial:
        """The partial program with move n appended; properties that no useful move needs any more
        are dropped (third pruning)."""
        move = self.moves[n]
        cost, busy = partial.cost, partial.busy
        for seconds, computing in self.times[n]:
            if seconds is None:
                busy = busy + computing
            else:  # a communication ends a stage, which takes as long as its slowest type
                cost = cost + float(busy.max()) + seconds
                busy = computing
        after = _Partial(
            program=(*partial.program, *(step.index for step in move.steps)),
            known=partial.known | move.post,
            ever=partial.ever | move.post,
            communicated=partial.communicated | move.tensors,
            cost=cost,
            busy=busy,
            held=partial.held + self.held[n],
        )
        after.known = frozenset(p for p in after.known if self._needed(p, after))
        return after

    def _needed(self, p: int, partial: _Partial) -> bool:
        """Whether property p is the goal, or a move that is still useful needs it."""
        if p == self.theory.goal:
            return True
        return any(self.useful(self.moves[m], partial) for m in self.by_pre.get(p, ()))


def search(
    theory: ReducedTheory, ratios: Floats, run: Run, *, once: bool, most: int | None = None
) -> tuple[list[int] | None, bool, int]:
    """(program, ended, extensions) of Fig. 10's search at ratios [g, K].

    program: triple numbers; None where there is no program or the search was stopped. ended:
    whether the search ran to its end. extensions: partial programs that it extended.

    Lines 9-14 compare costs up to the last synchronisation, as Section 4.3 defines the cost of a
    partial program. They see neither the seconds after it nor which tensors may still be
    communicated, so that a cheaper program may be missed. Where memory is limited, partial programs
    that do not fit are left out, and one beats another only if it holds no more bytes.

    once: with the second pruning. most: extensions after which the search stops; None: no limit.
    """
    look = ProgramSearch(theory, fuse(theory, once=once), ratios)
    empty = look.nothing
    order = itertools.count()
    queue: list[tuple[float, int, _Partial]] = [(look.estimate(empty), next(order), empty)]
    by_known: dict[frozenset[int], list[_Partial]] = {}
    best, least = empty, np.inf  # the incumbent and its seconds; inf: there is none yet
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
    if not np.isfinite(least):
        return None, True, extensions
    return theory.program(best.program), True, extensions


def _beaten(after: _Partial, by_known: dict[frozenset[int], list[_Partial]]) -> bool:
    """Lines 9 to 14: whether a partial program in the queue has all properties of `after` and costs
    no more. If there is none, partial programs that `after` beats leave the queue.

    by_known: the partial programs in the queue by their `known` properties; those that leave it are
    removed.
    """
    for known, others in by_known.items():
        if known >= after.known and any(o.queued and o.no_dearer(after) for o in others):
            return True
    for known, others in list(by_known.items()):
        if known <= after.known:
            for other in others:
                other.queued = other.queued and not after.no_dearer(other)
        others[:] = [o for o in others if o.queued]
        if not others:
            del by_known[known]
    return False
