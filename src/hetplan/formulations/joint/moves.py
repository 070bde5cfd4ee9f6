"""Random changes of a design, small ones and large ones. Each returns None where it does not apply.

What changes one replica changes all that are like it (the same types, rows and tensor ranks in
every stage) as often as the search asks, so that equal replicas can stay equal. What changes the
order of stages gives the replica new cuts half of the time, and what changes their number always
does.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise, zip_longest

from hetplan.formulations.joint.design import SCHEDULES, Design, Group, Pipe, Space, with_pipes

Regroup = Callable[[Sequence[Group]], list[Group] | None]


class Moves:
    """Draws neighbours of designs of one space; `rng` decides them all. together: how often what
    changes one replica changes all that are like it."""

    def __init__(self, space: Space, rng: random.Random) -> None:
        self.space, self.rng, self.together = space, rng, 0.5

    def draw(self, name: str, design: Design) -> Design | None:
        """The named move: a neighbour that keeps the rules of the plan file, or None."""
        changed: Design | None = getattr(self, name)(design)
        changed = None if changed is None else self.space.repaired(changed)
        return None if changed == design else changed

    def _one_or_alike(
        self, design: Design, i: int, change: Callable[[Pipe], Pipe | None]
    ) -> Design | None:
        form, together = self.space.form(design.pipes[i].groups), self.rng.random() < self.together
        return with_pipes(
            design,
            [
                change(pipe)
                if j == i or (together and self.space.form(pipe.groups) == form)
                else pipe
                for j, pipe in enumerate(design.pipes)
            ],
        )

    def _regrouped(self, design: Design, i: int, change: Regroup) -> Design | None:
        """Other groups of stages."""
        refit = self.rng.random() < 0.5

        def changed(pipe: Pipe) -> Pipe | None:
            groups = change(pipe.groups)
            if not groups:
                return None
            return self._cut(
                design,
                replace(
                    pipe,
                    groups=tuple(groups),
                    cuts=() if refit or len(groups) != len(pipe.groups) else pipe.cuts,
                ),
            )

        return self._one_or_alike(design, i, changed)

    def _cut(self, design: Design, pipe: Pipe) -> Pipe | None:
        """With new cuts where it has none."""
        return pipe if pipe.cuts else self.space.fitted(pipe, design.chunks, design.mode)

    def _any_stage(self, design: Design) -> tuple[int, int]:
        """Numbers of a replica and of one of its stages."""
        i = self.rng.randrange(len(design.pipes))
        return i, self.rng.randrange(len(design.pipes[i].groups))

    def cut(self, design: Design) -> Design | None:
        """A cut moves by one or two layers; or several do, and layers wander through stages."""
        first, last = sorted((self.rng.random(), self.rng.random()))
        last = last if self.rng.random() < 0.5 else first
        step = self.rng.choice((-2, -1, -1, 1, 1, 2))

        def changed(pipe: Pipe) -> Pipe | None:
            n = len(pipe.cuts)
            moved = range(int(first * n), int(last * n) + 1)
            cuts = tuple(cut + step * (j in moved) for j, cut in enumerate(pipe.cuts))
            rising = all(a < b for a, b in pairwise((0, *cuts, self.space.layers)))
            # Of a single stage it does not matter where its chunks begin.
            return replace(pipe, cuts=cuts) if rising and len(pipe.groups) > 1 else None

        return self._one_or_alike(design, self._any_stage(design)[0], changed)

    def order(self, design: Design) -> Design | None:
        """A stage, or a run of stages, goes to another place."""
        (i, a), draw = self._any_stage(design), self.rng.randrange
        count = len(design.pipes[i].groups)
        end, place = draw(a, count) + 1 if draw(2) else a + 1, draw(count)

        def change(groups: Sequence[Group]) -> list[Group]:
            rest = [*groups[:a], *groups[end:]]
            return [*rest[:place], *groups[a:end], *rest[place:]]

        return self._regrouped(design, i, change)

    def swap(self, design: Design) -> Design | None:
        """Two stages exchange their devices, also between replicas."""
        (i, a), (j, b) = self._any_stage(design), self._any_stage(design)
        if i == j:

            def change(groups: Sequence[Group]) -> list[Group]:
                at = {a: groups[b], b: groups[a]}
                return [at.get(s, group) for s, group in enumerate(groups)]

            return self._regrouped(design, i, change)
        pipes, here, there = list(design.pipes), design.pipes[i].groups, design.pipes[j].groups
        pipes[i] = replace(pipes[i], groups=(*here[:a], there[b], *here[a + 1 :]))
        pipes[j] = replace(pipes[j], groups=(*there[:b], here[a], *there[b + 1 :]))
        return replace(design, pipes=tuple(pipes))

    def merge(self, design: Design) -> Design | None:
        """A stage goes; its devices join a neighbour as rows or tensor ranks, or stay idle."""
        (i, a), way = self._any_stage(design), self.rng.randrange(3)
        if len(design.pipes[i].groups) < 2:
            return None
        b = (
            a - 1
            if a and (self.rng.randrange(2) or a + 1 == len(design.pipes[i].groups))
            else a + 1
        )

        def change(groups: Sequence[Group]) -> list[Group] | None:
            here, gone = groups[b], groups[a]
            ranks = tuple(row + more for row, more in zip(here, gone, strict=False))
            group = (here, here + gone, ranks if len(here) == len(gone) else ())[way]
            changed = [group if s == b else g for s, g in enumerate(groups) if s != a]
            return changed if self.space.legal(group) else None

        return self._regrouped(design, i, change)

    def split(self, design: Design) -> Design | None:
        """A stage becomes two: each with half of its rows or tensor ranks, or an idle device
        takes one."""
        i, a = self._any_stage(design)
        idle = sorted({*range(len(self.space.kind))} - design.used, key=lambda _: self.rng.random())

        def change(groups: Sequence[Group]) -> list[Group] | None:
            group, rows, ranks = groups[a], len(groups[a]) // 2, len(groups[a][0]) // 2
            parts: list[Group] = []
            if rows:
                parts = [group[:rows], group[rows:]]
            elif ranks:
                parts = [(group[0][:ranks],), (group[0][ranks:],)]
            elif idle:
                parts = [group, ((idle.pop(),),)]
            legal = parts and all(map(self.space.legal, parts))
            return [*groups[:a], *parts, *groups[a + 1 :]] if legal else None

        return self._regrouped(design, i, change)

    def pair(self, design: Design) -> Design | None:
        """Rows become tensor ranks, or the reverse, of one stage or of all like it."""
        (i, a), width = self._any_stage(design), self.rng.choice(self.space.degrees)
        every = self.rng.random() < 0.5

        def change(groups: Sequence[Group]) -> list[Group] | None:
            forms, changed = self.space.form(groups), []
            for s, group in enumerate(groups):
                if s == a or (every and forms[s] == forms[a]):
                    flat = tuple(e for row in group for e in row)
                    group = tuple(flat[k : k + width] for k in range(0, len(flat), width))
                changed.append(group)
            return changed if all(map(self.space.legal, changed)) else None

        return self._regrouped(design, i, change)

    def unite(self, design: Design) -> Design | None:
        """Replicas become one, two of them or all by twos: the stages of both by turns, or as rows
        of stages that are alike."""
        if len(design.pipes) < 2:
            return None
        as_rows, pipes = self.rng.random() < 0.5, self.rng.sample(design.pipes, len(design.pipes))
        some = 2 if self.rng.random() < 0.5 and self.together < 1 else len(pipes) // 2 * 2
        made: list[Pipe | None] = list(pipes[some:])
        for one, other in zip(pipes[:some:2], pipes[1:some:2], strict=True):
            pairs = zip_longest(one.groups, other.groups, fillvalue=())
            groups = tuple(group for pair in pairs for group in pair if group)
            if as_rows:
                if len(one.groups) != len(other.groups):
                    return None
                groups = tuple(a + b for a, b in zip(one.groups, other.groups, strict=True))
            if not all(map(self.space.legal, groups)):
                return None
            pipe = Pipe(groups, one.cuts if as_rows else (), one.micro, one.samples + other.samples)
            made.append(self._cut(design, pipe))
        return with_pipes(design, made)

    def divide(self, design: Design) -> Design | None:
        """A replica, or every one, becomes two: every other stage, or every other row of all."""
        by_rows, every = self.rng.random() < 0.5, self.rng.random() < 0.5 or self.together == 1
        made, one = list[Pipe | None](), self.rng.randrange(len(design.pipes))
        for i, pipe in enumerate(design.pipes):
            if not every and i != one:
                made.append(pipe)
                continue
            for k in (0, 1):
                groups = tuple(g[k::2] for g in pipe.groups) if by_rows else pipe.groups[k::2]
                samples, cuts = (pipe.samples + k) // 2, pipe.cuts if by_rows else ()
                if not samples or not groups or not all(groups):
                    return None
                made.append(
                    self._cut(design, Pipe(groups, cuts, min(pipe.micro, samples), samples))
                )
        return with_pipes(design, made)

    def samples(self, design: Design) -> Design | None:
        """Samples go from one replica to another."""
        (i, _), (j, _) = self._any_stage(design), self._any_stage(design)
        moved = self.rng.choice((1, design.pipes[i].micro, 2 * design.pipes[i].micro))
        gains = {i: -moved, j: moved} if i != j else {}
        pipes = [
            replace(p, samples=p.samples + gains.get(k, 0)) for k, p in enumerate(design.pipes)
        ]
        return replace(design, pipes=tuple(pipes))

    def micro(self, design: Design) -> Design | None:
        """Another micro-batch size, of one replica or of all."""
        i, _ = self._any_stage(design)
        now, every = design.pipes[i].micro, self.rng.random() < 0.7 or self.together == 1
        size = max(self.rng.choice((now - 1, now + 1, now // 2, 2 * now)), 1)
        pipes = [
            replace(pipe, micro=min(size, pipe.samples)) if every or j == i else pipe
            for j, pipe in enumerate(design.pipes)
        ]
        return replace(design, pipes=tuple(pipes))

    def schedule(self, design: Design) -> Design | None:
        """Another schedule, or number of chunks."""
        return self.space.scheduled(design, *self.rng.choice(SCHEDULES))

    def zero(self, design: Design) -> Design | None:
        """Another ZeRO level."""
        return replace(design, zero=self.rng.choice((0, 1, 1, 2, 3)))

    def mode(self, design: Design) -> Design | None:
        """Another recomputation."""
        return replace(design, mode=self.rng.choice(self.space.modes))

    def further(self, design: Design) -> Design | None:
        """Another expert or expert-tensor degree, exchange in attention, or sequence parallelism or
        none; of a design with such degrees."""
        if design.degrees is None:
            return None
        now, tensor = design.degrees, len(design.pipes[0].groups[0][0])
        changes: tuple[dict[str, object], ...] = (
            {"expert": 2 * now.expert},
            {"expert": max(now.expert // 2, 1)},
            {"expert_tensor": tensor if now.expert_tensor == 1 else 1},
            {"sequence_parallel": not now.sequence_parallel},
            {"exchange": "all-to-all" if now.exchange == "ring" else "ring"},
        )
        degrees = now.model_copy(update=self.rng.choice(changes))
        return replace(design, degrees=degrees)
