"""What the checker knows of one problem, and how tiny instances draw their numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from random import Random
from typing import Any

Data = dict[str, Any]  # `data` of an instance, as it stands in the file
Decision = dict[str, Any]  # `decision` of a result, as it stands in the answer document


class Broken(Exception):
    """A decision breaks a rule of its problem; the text says which."""


def demand(holds: bool, rule: str) -> None:
    """Raise `Broken` where a rule does not hold."""
    if not holds:
        raise Broken(rule)


@dataclass(frozen=True)
class Problem:
    """One problem as its prose states it: drawn, priced and enumerated without hetplan's
    formulations."""

    name: str
    draw: Callable[[Random], Data]
    # the seconds of a decision; raises `Broken` for a decision that breaks a rule
    price: Callable[[Data, Decision], float]
    # the least seconds of all decisions; None where no decision keeps the rules
    optimum: Callable[[Data], float | None]
    # the same decision with one rule broken
    spoil: Callable[[Data, Decision], Decision]
    # complaints that only this problem has, of one result whose decision holds
    more: Callable[[Data, dict[str, Any], float], list[str]] = lambda data, result, best: []


def amount(rng: Random, scale: float, *, zero: float = 0.1) -> float:
    """A number around `scale`: nothing, a small whole multiple (for ties), any number, or one of
    another magnitude. zero: the probability of nothing."""
    if rng.random() < zero:
        return 0.0
    way = rng.random()
    if way < 0.4:
        return scale * rng.randint(1, 3)
    if way < 0.9:
        return scale * rng.uniform(0.2, 5)
    return float(scale * 10 ** rng.uniform(-3, 3))


def magnitude(rng: Random) -> float:
    """The unit in which an instance counts, mostly 1."""
    return float(10 ** rng.choice((0, 0, 0, -3, -6, 4)))


def cuts(length: int, parts: int) -> Iterator[list[tuple[int, int]]]:
    """All ways to cut a chain into so many nonempty ranges."""
    for inner in combinations(range(1, length), parts - 1):
        ends = [0, *inner, length]
        yield [(ends[i], ends[i + 1]) for i in range(parts)]


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to add up so many whole numbers of 0 or more to a total."""
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in compositions(total - first, parts - 1):
            yield (first, *rest)


def demand_chain(ranges: Sequence[Sequence[int]], length: int) -> None:
    """The ranges are nonempty and follow one another from 0 to `length`."""
    at = 0
    for first, last in ranges:
        demand(first == at, f"a stage begins at layer {first}, not {at}")
        demand(last > first, f"the stage [{first}, {last}) is empty")
        at = last
    demand(at == length, f"the stages end at layer {at}, not {length}")
