"""Small pipelines for the tests of the order of passes, and all orders of the tiniest ones."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

from hetplan.formulations.joint.schedule.data import Message, Pass, PassProblem
from hetplan.formulations.joint.schedule.evaluate import DeadLock, evaluate


def drawn(seed: int, *, stages: int = 2, micros: int = 2, split: bool = True) -> PassProblem:
    """A random pipeline: messages, little room, chunks, unlike micro-batches."""
    draw = random.Random(seed)
    place = tuple(range(stages))
    if micros == 2 and stages == 2 and not split and seed % 8 == 7:
        place = (0, 1, 1, 0)  # two chunks in the form of a V

    def table(low: int, high: int) -> list[list[float]]:
        return [[float(draw.randint(low, high))] * micros for _ in place]

    kept = table(1, 2)
    alike = seed % 3 > 0
    forward = table(1, 4)
    if not alike:
        forward = [[*row[:-1], row[-1] + 1.0] for row in forward]
    hops: list[list[list[Message]]] = [[], []]
    if seed % 2:
        for side, v in product(range(2), range(len(place) - 1)):
            local = place[v] == place[v + 1]
            message = Message() if local else Message(1.0, 0.25, ((2 * v + side, 1.0),))
            hops[side].append([message] * micros)
    return PassProblem(
        place=place,
        forward=forward,
        backward=table(1, 5),
        weight=table(1, 3) if split else (),
        kept=kept,
        kept_for_weight=kept if split else (),
        room=tuple(float(draw.randint(1, 5)) for _ in range(stages)),
        activations=hops[0],
        gradients=hops[1],
        tails=tuple(float(draw.randint(0, 2)) for _ in range(stages)),
        kinds=() if alike else (*[0] * (micros - 1), 1),
        receiver_waits=seed % 5 > 0,
    )


def sequences(problem: PassProblem, stage: int) -> Iterator[list[Pass]]:
    """All orders of a stage's passes in which no pass comes before another one of its micro-batch
    and stage that it needs."""
    of_stage = [one for one in problem.passes if problem.place[one.virtual] == stage]

    def before(one: Pass, other: Pass) -> bool:
        if one.micro != other.micro or one == other:
            return False
        if one.virtual == other.virtual:
            return "FBDW".index(one.kind) < "FBDW".index(other.kind)
        if one.kind == other.kind == "F":
            return one.virtual < other.virtual
        return one.kind == other.kind != "W" and one.virtual > other.virtual

    def extended(done: list[Pass]) -> Iterator[list[Pass]]:
        if len(done) == len(of_stage):
            yield done
        for one in of_stage:
            if one not in done and all(b in done for b in of_stage if before(b, one)):
                yield from extended([*done, one])

    return extended([])


def least_seconds(problem: PassProblem) -> float | None:
    """The least seconds of all orders that fit; None where none does."""
    found = []
    for order in product(*(sequences(problem, s) for s in range(problem.stages))):
        try:
            verdict = evaluate(problem, order)
        except DeadLock:
            continue
        if not verdict.violations:
            found.append(verdict.seconds)
    return min(found, default=None)
