"""The moves of HAP's A* search: the triples of a theory after the prunings that rewrite it.

Source: HAP, Section 4.5, whose first two prunings both concern placeholders and parameters. These
are the sources of a theory here: triples that need nothing and take no time. (An operator that
loads its data itself needs nothing either, but it computes, and its result may be communicated as
any other's.)

- The first pruning, fusion, merges a source into each triple that needs its effects.
- The second allows one communication per tensor, and none of the tensor of a source.

Two further rules come from elsewhere:

- A slice costs nothing and is made at once. A program that has it beats the same program without it
  by lines 9 to 14 of Fig. 10: it has more properties and costs the same.
- A tensor is computed once. The paper does not print this as a rule, but says of Fig. 11 that two
  tensors "will no longer be used" once others are computed from them. The authors' program has the
  rule: a triple of an operator spends the operator's mark (`unique_computation` in `hap.rs`).

A property is named `tensor|form`. A name `tensor~way|form` tells by which of several ways the
tensor is computed: it is the same tensor for the rule of one computation. For the second pruning it
is another one, so that the collective that synchronises the gradient of a parameter does not count
as the communication of the tensor. The authors count slices as communications, which this module
does not.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from hetplan.formulations.hap.problem import Step
from hetplan.formulations.hap.theory import ReducedTheory
from hetplan.text import grouped

# The most moves that fusion makes of one triple, whose number would else double with each property
# that it needs; sources of further properties stay moves apart.
MOST_FUSED = 64

Bits = int  # a set of numbers: bit n tells whether n is in it


def bits_of(numbers: Iterable[int]) -> Bits:
    """The set of these numbers."""
    bits = 0
    for number in numbers:
        bits |= 1 << number
    return bits


def numbers_in(bits: Bits) -> Iterator[int]:
    """The numbers of a set, ascending."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


@dataclass(frozen=True, slots=True)
class Move:
    """A triple with the sources before it and the slices behind it, as one instruction.

    Only the triple takes time. The tensors of properties are numbered by `Moves`.
    """

    number: int  # position in `Moves.listed`
    triple: Step
    steps: tuple[Step, ...]  # sources, the triple, slices; the triple alone may be a source
    pre: Bits  # properties that it needs
    post: Bits  # properties that it gives
    computes: Bits  # tensors of which it gives a property and needs none; no tensors of sources
    communicates: Bits  # tensors that it communicates where each may be communicated only once


@dataclass(frozen=True)
class Moves:
    """The moves of a theory."""

    listed: tuple[Move, ...]
    goal: int  # the goal property
    tensor_of: tuple[int, ...]  # property -> number of its tensor
    communicated_tensor_of: tuple[int, ...]  # property -> its tensor for the second pruning
    # Tensors that every program computes. (Where there is no program, these are all tensors.)
    required: Bits


def moves_of(theory: ReducedTheory, *, forms: bool, once: bool) -> Moves:
    """The moves of a theory.

    Sources that hold no bytes are in no move: the reduced theory has their effects for nothing.

    forms: whether names of properties tell tensors and their forms; otherwise every property is a
    tensor of its own. once: whether a tensor is communicated only once (second pruning).
    """
    names = theory.problem.properties
    tensor_of = _numbered(names, _computed_tensor if forms else str)
    communicated_tensor_of = _numbered(names, _communicated_tensor if forms else str)
    unreduced = theory.problem.steps  # the triples with all their preconditions
    sources = [step for step in theory.steps if _is_source(theory, step)]
    free_sources = [step for step in theory.for_nothing if _is_source(theory, step)]
    loaded: set[int] = set()  # properties that sources give
    for step in [*sources, *free_sources]:
        loaded |= step.post
    loaded_tensors = bits_of(tensor_of[p] for p in loaded)
    never_communicated = bits_of(communicated_tensor_of[p] for p in loaded)

    def computes(step: Step) -> Bits:
        needed = bits_of(tensor_of[p] for p in unreduced[step.index].pre)
        given = bits_of(tensor_of[p] for p in step.post)
        return given & ~needed & ~loaded_tensors

    slices = [s for s in theory.steps if s.costless and len(s.pre) == 1 and not computes(s)]
    slices_of = grouped((p, step) for step in slices for p in step.pre)
    made_at_once = {step.index for step in slices}
    listed: list[Move] = []

    def add(step: Step, fused: tuple[Step, ...], communicates: Bits) -> None:
        """Append the move of a triple and of the sources that are fused into it."""
        given = step.post.union(*(source.post for source in fused))
        needed = step.pre.difference(*(source.post for source in fused))
        sliced = _slices_made_at_once(given, slices_of)
        listed.append(
            Move(
                number=len(listed),
                triple=step,
                steps=(*fused, step, *sliced),
                pre=bits_of(needed),
                post=bits_of(given.union(*(s.post for s in sliced))),
                computes=computes(step),
                communicates=communicates,
            )
        )

    consumed: set[int] = set()  # sources that are fused into some triple
    for step in theory.steps:
        if _is_source(theory, step):
            continue
        communicates = 0
        if step.comm and once:
            communicates = bits_of(communicated_tensor_of[p] for p in unreduced[step.index].pre)
        if communicates & never_communicated:
            continue
        for fused in _producers(step, sources):
            if step.index in made_at_once and not fused:
                continue
            consumed.update(source.index for source in fused)
            add(step, fused, communicates)
    # A source is also a move of its own unless other moves consume its only effect: it may give the
    # goal itself, or several effects of which a triple needs a part.
    for step in sources:
        only_fused = step.index in consumed and len(step.post) == 1
        if not only_fused or theory.goal in step.post:
            add(step, (), communicates=0)
    return Moves(
        listed=tuple(listed),
        goal=theory.goal,
        tensor_of=tensor_of,
        communicated_tensor_of=communicated_tensor_of,
        required=_required(listed, theory.goal, bits_of(tensor_of)),
    )


def _communicated_tensor(name: str) -> str:
    """The part of a property's name before the last `|`."""
    return name.rpartition("|")[0] or name


def _computed_tensor(name: str) -> str:
    """The part of a property's name before the last `|`, up to a `~`."""
    return _communicated_tensor(name).partition("~")[0]


def _numbered(names: Iterable[str], tensor: Callable[[str], str]) -> tuple[int, ...]:
    """The number of the tensor of each property."""
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(tensor(name), len(numbers)) for name in names)


def _is_source(theory: ReducedTheory, step: Step) -> bool:
    """Whether a triple needs nothing and takes no time."""
    # a collective ends a stage, even one of 0 seconds
    takes_time = step.comm or step.fixed or step.shared
    return not theory.problem.steps[step.index].pre and not takes_time


def _slices_made_at_once(
    given: frozenset[int], slices_of: dict[int, list[Step]]
) -> tuple[Step, ...]:
    """The slices of properties, of their slices, and so on, each once."""
    made: list[Step] = []
    known = set(given)
    pending = sorted(given)
    for p in pending:  # the loop appends to the list
        for step in slices_of.get(p, ()):
            if not step.post <= known:
                made.append(step)
                pending += sorted(step.post - known)
                known |= step.post
    return tuple(made)


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


def _required(moves: list[Move], goal: int, tensors: Bits) -> Bits:
    """The tensors that every program computes.

    `of[p]` is the greatest solution of: the intersection, over all moves that give p, of the
    tensors that the move computes together with those required by the properties that it needs. By
    induction over the length of a derivation, each derivation of p computes all tensors of `of[p]`.
    """
    of: dict[int, Bits] = {}
    changed = True
    while changed:
        changed = False
        for move in moves:
            by_move = move.computes
            for p in numbers_in(move.pre):
                by_move |= of.get(p, tensors)
            for p in numbers_in(move.post & ~move.pre):
                before = of.get(p, tensors)
                if before & by_move != before:
                    of[p] = before & by_move
                    changed = True
    return of.get(goal, tensors)
