"""The A* search of HAP, Fig. 10, for fixed ratios, and the prunings of Section 4.5.

The first two prunings rewrite the theory. Fusion: a triple without preconditions is merged into
each triple that needs its effects. One communication per tensor: communications of a tensor exclude
each other, and tensors that triples without preconditions produce (placeholders, parameters) are
not communicated at all. A property's tensor is what precedes its last `|`. The third removes
redundant properties from partial programs.

A partial program costs its time up to the last synchronisation; the estimate of the rest assumes
infinite bandwidth.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hetplan.formulations.hap.problem import Floats, HapProblem, Step
from hetplan.formulations.hap.theory import Theory
from hetplan.solvers.run import Run

# Fused alternatives of one triple beyond which its producers are left unfused.
MOST_FUSED = 64


@dataclass(frozen=True)
class Fused:
    """Steps run one after the other as one instruction; pre and post as bits; tensor: bits of what
    it must be the first to do (communicate a tensor, compute it). users: of a change
    of form, bits of the computations that use the tensor; none left, none needed (0: always of
    use)."""

    steps: tuple[Step, ...]
    pre: int
    post: int
    tensor: int
    users: int = 0

    def allowed(self, told: int) -> bool:
        """Whether it is still to be done, and of use, when what `told` says has been done."""
        return not self.tensor & told and (not self.users or bool(self.users & ~told))


@dataclass(frozen=True)
class FusedTheory:
    """The rewritten theory; goal as bits."""

    problem: HapProblem
    theory: Theory
    moves: tuple[Fused, ...]
    goal: int


def fuse(theory: Theory, *, once: bool, computed_once: bool = False) -> FusedTheory:
    """Section 4.5's first pruning and, with `once`, its second.

    computed_once: what the authors' released program does besides, each tensor is computed in one
    way only (and changes its form once, by communication or not); then the search no longer grows
    exponentially with depth.
    """
    names = theory.problem.properties
    tensors: dict[str, int] = {}

    def tensor(p: int, computed: int = 0) -> int:
        name = names[p].rpartition("|")[0] or names[p]
        return 1 << 2 * tensors.setdefault(name, len(tensors)) + computed

    sources = [s for s in theory.steps if not s.pre]
    loaded = {tensor(p) for s in sources for p in s.post}
    users = _users(theory, tensor) if computed_once else {}
    moves: list[Fused] = []
    consumed: set[int] = set()
    for step in theory.steps:
        if not step.pre:
            continue
        touched = 0
        if step.comm and once:
            for p in step.pre:
                touched |= tensor(p)
            if any(touched & bit for bit in loaded):
                continue
        elif computed_once:
            changed = {tensor(p) for p in step.post} & {tensor(p) for p in step.pre}
            for p in () if step.comm else step.post:
                # a change of form shares the communications' bit, a computation has one of its own
                touched |= tensor(p) if tensor(p) in changed else tensor(p, 1)
        used = 0
        if step.comm or all(tensor(p) in {tensor(q) for q in step.pre} for p in step.post):
            masks = [users.get(tensor(p), 0) for p in step.post]
            used = masks[0] if len(set(masks)) == 1 else 0
        for chosen in _choices(step, sources):
            consumed.update(s.index for s in chosen)
            given = frozenset().union(*(s.post for s in chosen))
            moves.append(
                Fused(
                    (*chosen, step), bits(step.pre - given), bits(step.post | given), touched, used
                )
            )
    # what no triple consumes whole (the goal itself, or only parts of several effects) stays on its
    # own
    needed = {p for step in theory.steps for p in step.pre}
    for step in sources:
        if (
            step.index not in consumed
            or theory.goal in step.post
            or not step.post <= needed
            or len(step.post) > 1
        ):
            moves.append(Fused((step,), 0, bits(step.post), 0))
    assert theory.goal is not None
    return FusedTheory(theory.problem, theory, tuple(moves), 1 << theory.goal)


def _users(theory: Theory, tensor: Callable[..., int]) -> dict[int, int]:
    """tensor bit -> bits of the tensors computed from it; tensors that the goal belongs to are left
    out."""
    found: dict[int, int] = {}
    for step in theory.steps:
        into = 0
        for p in step.post:
            if tensor(p) not in {tensor(q) for q in step.pre}:
                into |= tensor(p, 1)
        for q in step.pre:
            if not step.comm and into:
                found[tensor(q)] = found.get(tensor(q), 0) | into
    if theory.goal is not None:
        found.pop(tensor(theory.goal), None)
    return found


def _choices(step: Step, sources: list[Step]) -> list[tuple[Step, ...]]:
    """Every way to fuse producers without preconditions into `step`: one per needed property that
    has any."""
    ways: list[tuple[Step, ...]] = [()]
    for p in sorted(step.pre):
        producers = [s for s in sources if p in s.post and s.post <= step.pre]
        if not producers:
            continue
        grown = [
            way if any(p in s.post for s in way) else (*way, s) for way in ways for s in producers
        ]
        grown += ways  # the property may also be there already
        if len(grown) > MOST_FUSED:
            break
        ways = list(dict.fromkeys(grown))
    return ways


def bits(properties: frozenset[int]) -> int:
    """A set of property numbers as an integer."""
    value = 0
    for p in properties:
        value |= 1 << p
    return value


@dataclass
class _Partial:
    """A partial program: properties (known: without redundant ones; ever: all) and what was done
    once (told) as bits, time to the last synchronisation, seconds [K] since then, bytes [K] (None
    without memory), and how it came about. `alive`: still in the queue S of Fig. 10."""

    known: int
    ever: int
    told: int
    cost: float
    busy: Floats
    held: Floats | None
    move: Fused | None
    before: _Partial | None
    alive: bool = True


class _Search:
    """What the search looks up: consumers per property, times per move, distances to the goal."""

    def __init__(self, theory: FusedTheory, ratios: Floats) -> None:
        self.theory = theory
        self.problem = theory.problem
        self.ratios = ratios
        self.times = [self._time(move) for move in theory.moves]
        self.room = self.problem.capacity
        self.bytes = [self._bytes(move) for move in theory.moves] if self.room is not None else []
        self.by_pre: dict[int, list[int]] = {}
        self.sources: list[int] = []
        for n, move in enumerate(theory.moves):
            for p in members(move.pre):
                self.by_pre.setdefault(p, []).append(n)
            if not move.pre:
                self.sources.append(n)
        self.distance = self._distances()

    def _time(self, move: Fused) -> list[tuple[bool, float, Floats]]:
        """Per step: is it a communication, its seconds, its seconds [K] of computing."""
        told = []
        for step in move.steps:
            row = self.ratios[step.segment]
            if step.comm:
                told.append(
                    (True, step.fixed + step.shared * float(row.max()), np.zeros(self.problem.K))
                )
            else:
                told.append((False, 0.0, (step.fixed + step.shared * row) / self.problem.speeds))
        return told

    def _bytes(self, move: Fused) -> Floats:
        """[K]: what a move adds on one device of each type."""
        held = np.zeros(self.problem.K)
        for step in move.steps:
            held += step.fixed_bytes + step.shared_bytes * self.ratios[step.segment]
        return held

    def fits(self, partial: _Partial) -> bool:
        """Whether what a partial program holds fits in memory."""
        return partial.held is None or self.room is None or bool((partial.held <= self.room).all())

    def _distances(self) -> dict[int, float]:
        """property -> least computing, on the type that has least of it, on a way from it to the
        goal; key -1: from nothing at all."""
        work = [sum(float(b.min()) for comm, _, b in told if not comm) for told in self.times]
        by_post: dict[int, list[int]] = {}
        for n, move in enumerate(self.theory.moves):
            for p in members(move.post):
                by_post.setdefault(p, []).append(n)
        distance: dict[int, float] = {}
        heap = [(0.0, p) for p in members(self.theory.goal)]
        while heap:
            far, p = heapq.heappop(heap)
            if p in distance:
                continue
            distance[p] = far
            if p < 0:
                continue
            for n in by_post.get(p, ()):
                move = self.theory.moves[n]
                for q in members(move.pre) if move.pre else [-1]:
                    if q not in distance:
                        heapq.heappush(heap, (far + work[n], q))
        return distance

    def estimate(self, partial: _Partial) -> float:
        """ecost: the stage under way and the computing that is still to come at least."""
        rest = min(
            (self.distance[p] for p in [*members(partial.known), -1] if p in self.distance),
            default=0.0,
        )
        return float(partial.busy.max()) + rest

    def applicable(self, partial: _Partial) -> list[int]:
        """Moves whose precondition is met and that add a property (line 7), in a fixed order."""
        found = set(self.sources)
        for p in members(partial.known):
            found.update(self.by_pre.get(p, ()))
        moves = self.theory.moves
        return [
            n for n in sorted(found)
            if not moves[n].pre & ~partial.known and moves[n].post & ~partial.ever
            and moves[n].allowed(partial.told)
        ]  # fmt: skip

    def extended(self, partial: _Partial, n: int) -> _Partial:
        """The partial program with move n appended, its redundant properties removed (third
        pruning)."""
        move = self.theory.moves[n]
        cost, busy = partial.cost, partial.busy
        for comm, seconds, computing in self.times[n]:
            if comm:
                cost, busy = cost + float(busy.max()) + seconds, np.zeros(self.problem.K)
            else:
                busy = busy + computing
        known, ever = partial.known | move.post, partial.ever | move.post
        told = partial.told | move.tensor
        held = None if partial.held is None else partial.held + self.bytes[n]
        return _Partial(
            self._useful(known, ever, told), ever, told, cost, busy, held, move, partial
        )

    def _useful(self, known: int, ever: int, told: int) -> int:
        """Without the properties that only triples with nothing new to give, or no longer allowed,
        need."""
        kept = known & self.theory.goal
        for p in members(known):
            for n in self.by_pre.get(p, ()):
                move = self.theory.moves[n]
                if move.post & ~ever and move.allowed(told):
                    kept |= 1 << p
                    break
        return kept


@dataclass(frozen=True)
class Found:
    """program: triple numbers, None when there is none or the search was cut short before one (not
    `finished`); partial: in the latter case the triples of the partial programs that look best."""

    program: list[int] | None
    finished: bool
    partial: tuple[list[int], ...] = ()


# Partial programs that a search cut short hands over: of least estimated cost, and with most
# properties.
HANDED_OVER = 8


def search(theory: FusedTheory, ratios: Floats, run: Run, most: int | None = None) -> Found:
    """The program that Fig. 10 finds at ratios [g, K], extending at most `most` partial programs.

    Lines 9-14 compare costs up to the last synchronisation, as Section 4.3 defines the cost of a
    partial program; what differs since then is not seen. With memory, what does not fit is left
    out, and a partial program beats another only if it holds no more.
    """
    look = _Search(theory, ratios)
    held = None if look.room is None else np.zeros(theory.problem.K)
    empty = _Partial(0, 0, 0, 0.0, np.zeros(theory.problem.K), held, None, None)
    order = itertools.count()
    queue: list[tuple[float, int, _Partial]] = [(look.estimate(empty), next(order), empty)]
    same: dict[int, list[_Partial]] = {}
    best: _Partial | None = None
    least = np.inf
    extensions = 0
    while queue:
        if run.should_stop or extensions == most:
            told = None if best is None else theory.theory.program(_steps(best))
            return Found(told, False, _promising(queue))
        score, _, partial = heapq.heappop(queue)
        if score >= least:
            break
        if not partial.alive:
            continue
        partial.alive = False
        extensions += 1
        for n in look.applicable(partial):
            after = look.extended(partial, n)
            if not look.fits(after):
                continue
            total = after.cost + float(after.busy.max())
            if after.known & theory.goal:
                if total < least:
                    best, least = after, total
            elif not _beaten(after, same):
                same.setdefault(after.known, []).append(after)
                heapq.heappush(queue, (after.cost + look.estimate(after), next(order), after))
    return Found(None if best is None else theory.theory.program(_steps(best)), True)


def _promising(queue: list[tuple[float, int, _Partial]]) -> tuple[list[int], ...]:
    alive = [entry for entry in queue if entry[2].alive]
    cheapest = heapq.nsmallest(HANDED_OVER, alive)
    furthest = heapq.nsmallest(
        HANDED_OVER, alive, key=lambda e: (-e[2].ever.bit_count(), e[0], e[1])
    )
    return tuple(_steps(partial) for _, _, partial in [*cheapest, *furthest])


def _beaten(after: _Partial, same: dict[int, list[_Partial]]) -> bool:
    """Lines 9 to 14: whether another partial program has all its properties and costs no more;
    those that it beats itself leave the queue."""
    for known, others in list(same.items()):
        if known & after.known == after.known and any(
            o.alive and _no_dearer(o, after) for o in others
        ):
            return True
    for known, others in list(same.items()):
        if known & after.known == known:
            for other in others:
                if _no_dearer(after, other):
                    other.alive = False
        others[:] = [o for o in others if o.alive]
        if not others:
            del same[known]
    return False


def _no_dearer(one: _Partial, other: _Partial) -> bool:
    """Whether one costs and holds no more than the other."""
    if one.held is not None and other.held is not None and (one.held > other.held).any():
        return False
    return one.cost <= other.cost


def _steps(partial: _Partial) -> list[int]:
    steps: list[int] = []
    here: _Partial | None = partial
    while here is not None and here.move is not None:
        steps[:0] = [step.index for step in here.move.steps]
        here = here.before
    return steps


def members(bits: int) -> list[int]:
    """The numbers of the bits that are set, ascending."""
    found = []
    while bits:
        low = bits & -bits
        found.append(low.bit_length() - 1)
        bits ^= low
    return found
