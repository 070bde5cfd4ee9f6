"""The first two prunings of HAP's search, as a rewriting of the theory (Section 4.5).

Fusion: a triple without preconditions is merged into each triple that needs its effects. One
communication per tensor: communications of a tensor exclude each other, and tensors that triples
without preconditions produce
(placeholders, parameters) are not communicated at all. A property's tensor is what precedes its
last `|`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hetplan.formulations.hap.problem import HapProblem, Step
from hetplan.formulations.hap.theory import Theory

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
