"""Random changes of a design, small ones and large ones. Each returns None where it does not apply.

What changes one replica changes all that are like it (the same types, rows and tensor ranks in
every stage) half of the time, so that equal replicas can stay equal. What changes the order of
stages gives the replica new cuts half of the time, and what changes their number always does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from hetplan.formulations.joint.design import SCHEDULES, Design, Group, Pipe, Space, with_pipes

Change = Callable[[Pipe], Pipe | None]
MOST_MICRO = 64  # samples of a micro-batch


class Moves:
    """Draws neighbours of designs of one space; `rng` decides them all."""

    def __init__(self, space: Space, rng: random.Random) -> None:
        self.space, self.rng = space, rng

    def draw(self, name: str, design: Design) -> Design | None:
        """The named move: a neighbour that keeps the rules of the plan file, or None."""
        changed: Design | None = getattr(self, name)(design)
        changed = None if changed is None else self.space.repaired(changed)
        return None if changed == design else changed

    def form(self, pipe: Pipe) -> tuple[object, ...]:
        """What is the same of like replicas."""
        return tuple((self.space.kind[g[0][0]], len(g), len(g[0])) for g in pipe.groups)

    def _one_or_alike(self, design: Design, i: int, change: Change) -> Design | None:
        pipes, form = list(design.pipes), self.form(design.pipes[i])
        together = self.rng.random() < 0.5
        for j, pipe in enumerate(pipes):
            if j == i or (together and self.form(pipe) == form):
                changed = change(pipe)
                if changed is None:
                    return None
                pipes[j] = changed
        return replace(design, pipes=tuple(pipes))

    def _any_pipe(self, design: Design) -> tuple[int, int]:
        """A replica's number and its number of stages."""
        i = self.rng.randrange(len(design.pipes))
        return i, len(design.pipes[i].groups)

    def _regrouped(
        self, design: Design, i: int, change: Callable[[Sequence[Group]], list[Group] | None]
    ) -> Design | None:
        """Other groups of stages."""
        refit = self.rng.random() < 0.5

        def changed(pipe: Pipe) -> Pipe | None:
            groups = change(pipe.groups)
            if not groups:
                return None
            new = len(groups) != len(pipe.groups)
            pipe = replace(pipe, groups=tuple(groups))
            return self.space.fitted(pipe, design.chunks, design.mode) if refit or new else pipe

        return self._one_or_alike(design, i, changed)

    def _cut(self, design: Design, pipe: Pipe) -> Pipe | None:
        """With new cuts where it has none."""
        return pipe if pipe.cuts else self.space.fitted(pipe, design.chunks, design.mode)

    # Layers

    def cut(self, design: Design) -> Design | None:
        """A cut moves by one or two layers."""
        i, _ = self._any_pipe(design)
        place, step = self.rng.random(), self.rng.choice((-2, -1, -1, 1, 1, 2))
        return self._one_or_alike(design, i, lambda pipe: self._shifted(pipe, place, place, step))

    def shift(self, design: Design) -> Design | None:
        """A layer wanders from one virtual stage to another, through all between."""
        i, _ = self._any_pipe(design)
        first, last = sorted((self.rng.random(), self.rng.random()))
        step = self.rng.choice((-1, 1))
        return self._one_or_alike(design, i, lambda pipe: self._shifted(pipe, first, last, step))

    def _shifted(self, pipe: Pipe, first: float, last: float, step: int) -> Pipe | None:
        cuts, n = list(pipe.cuts), len(pipe.cuts)
        for j in range(int(first * n), int(last * n) + 1 if n else 0):
            cuts[j] += step
        rising = all(a < b for a, b in pairwise((0, *cuts, self.space.layers)))
        return replace(pipe, cuts=tuple(cuts)) if rising else None

    # Who holds which stage

    def order(self, design: Design) -> Design | None:
        """A stage, or all neighbours of it on its node, goes to another place."""
        i, count = self._any_pipe(design)
        a, b, block = self.rng.randrange(count), self.rng.randrange(count), self.rng.random() < 0.5

        def change(groups: Sequence[Group]) -> list[Group]:
            first, last = a, a + 1
            here = [self.space.node[g[0][0]] for g in groups]
            while block and first and here[first - 1] == here[a]:
                first -= 1
            while block and last < count and here[last] == here[a]:
                last += 1
            rest = [*groups[:first], *groups[last:]]
            return [*rest[:b], *groups[first:last], *rest[b:]]

        return self._regrouped(design, i, change)

    def rotate(self, design: Design) -> Design | None:
        """The last stages come first, or the order turns round."""
        i, count = self._any_pipe(design)
        by = self.rng.randrange(count)
        return self._regrouped(design, i, lambda g: [*g[by:], *g[:by]] if by else [*g[::-1]])

    def swap(self, design: Design) -> Design | None:
        """Two stages exchange their devices, also between replicas."""
        i, count = self._any_pipe(design)
        j, there = self._any_pipe(design)
        a, b = self.rng.randrange(count), self.rng.randrange(there)
        if i == j:

            def change(groups: Sequence[Group]) -> list[Group]:
                changed = list(groups)
                changed[a], changed[b] = groups[b], groups[a]
                return changed

            return self._regrouped(design, i, change)
        pipes, here, other = list(design.pipes), design.pipes[i].groups, design.pipes[j].groups
        pipes[i] = replace(pipes[i], groups=(*here[:a], other[b], *here[a + 1 :]))
        pipes[j] = replace(pipes[j], groups=(*other[:b], here[a], *other[b + 1 :]))
        return replace(design, pipes=tuple(pipes))

    def exchange(self, design: Design) -> Design | None:
        """Two devices of one type, or two nodes with equally many of them, change places."""
        space, every = self.space, range(len(self.space.kind))
        x, y = self.rng.choices(every, k=2)
        if space.kind[x] != space.kind[y]:
            return None
        ours, theirs = [x], [y]
        if self.rng.random() < 0.3:
            ours, theirs = ([e for e in every if space.node[e] == space.node[z]] for z in (x, y))
        if len(ours) != len(theirs):
            return None
        other = dict(zip([*ours, *theirs], [*theirs, *ours], strict=True))
        pipes = []
        for pipe in design.pipes:
            groups = [
                tuple(tuple(other.get(e, e) for e in row) for row in group) for group in pipe.groups
            ]
            if not all(map(self._in_nodes, groups)):
                return None
            pipes.append(replace(pipe, groups=tuple(groups)))
        return replace(design, pipes=tuple(pipes))

    def _in_nodes(self, group: Group) -> bool:
        return all(len({self.space.node[e] for e in row}) == 1 for row in group)

    # Shapes of stages

    def merge(self, design: Design) -> Design | None:
        """A stage goes; its devices join a neighbour as rows or tensor ranks, or stay idle."""
        i, count = self._any_pipe(design)
        if count < 2:
            return None
        a, way, side = self.rng.randrange(count), self.rng.randrange(3), self.rng.randrange(2)
        a, b = (a, a - 1) if a == count - 1 or (side and a) else (a, a + 1)

        def change(groups: Sequence[Group]) -> list[Group] | None:
            joined = (groups[b], groups[b] + groups[a], self._tensor_joined(groups[b], groups[a]))
            group = joined[way]
            if group is None or not self._legal(group):
                return None
            changed = [*groups]
            changed[b] = group
            return changed[:a] + changed[a + 1 :]

        return self._regrouped(design, i, change)

    @staticmethod
    def _tensor_joined(one: Group, other: Group) -> Group | None:
        if len(one) != len(other):
            return None
        return tuple(row + more for row, more in zip(one, other, strict=True))

    def _legal(self, group: Group) -> bool:
        """Rows alike, of one type, in nodes, of a usable tensor degree."""
        widths = {len(row) for row in group}
        kinds = {self.space.kind[e] for row in group for e in row}
        usable = next(iter(widths)) in self.space.degrees
        return len(widths) == len(kinds) == 1 and usable and self._in_nodes(group)

    def split(self, design: Design) -> Design | None:
        """A stage becomes two: each with half of its rows or tensor ranks, or an idle device
        takes one."""
        i, count = self._any_pipe(design)
        a, idle = self.rng.randrange(count), self._idle(design)

        def change(groups: Sequence[Group]) -> list[Group] | None:
            group, rows, ranks = groups[a], len(groups[a]) // 2, len(groups[a][0]) // 2
            if rows:
                parts = [group[:rows], group[rows:]]
            elif ranks:
                parts = [(group[0][:ranks],), (group[0][ranks:],)]
            elif idle:
                parts = [group, ((idle.pop(),),)]
            else:
                return None
            return [*groups[:a], *parts, *groups[a + 1 :]] if all(map(self._legal, parts)) else None

        return self._regrouped(design, i, change)

    def _idle(self, design: Design) -> list[int]:
        """Devices not in use, shuffled."""
        used = design.used
        idle = [e for e in range(len(self.space.kind)) if e not in used]
        self.rng.shuffle(idle)
        return idle

    def pair(self, design: Design) -> Design | None:
        """Rows become tensor ranks, or the reverse, by a factor; of one stage or of all like it."""
        i, count = self._any_pipe(design)
        a, both, up = self.rng.randrange(count), self.rng.random() < 0.5, self.rng.random() < 0.5

        def turned(group: Group) -> Group | None:
            flat, width = [e for row in group for e in row], len(group[0])
            widths = [w for w in self.space.degrees if (w > width) == up and w != width]
            widths = [w for w in widths if len(flat) % w == 0 and len(flat) >= w]
            if not widths:
                return None
            width = min(widths) if up else max(widths)
            rows = tuple(tuple(flat[k : k + width]) for k in range(0, len(flat), width))
            return rows if self._legal(rows) else None

        def change(groups: Sequence[Group]) -> list[Group] | None:
            like = (self.space.kind[groups[a][0][0]], len(groups[a]), len(groups[a][0]))
            changed = list(groups)
            for j, g in enumerate(groups):
                if j == a or (both and (self.space.kind[g[0][0]], len(g), len(g[0])) == like):
                    group = turned(g)
                    if group is None:
                        return None
                    changed[j] = group
            return changed

        return self._regrouped(design, i, change)

    def row(self, design: Design) -> Design | None:
        """A row leaves a stage for another one of its type and degree, or an idle device comes
        in."""
        i, count = self._any_pipe(design)
        j, there = self._any_pipe(design)
        a, b = self.rng.randrange(count), self.rng.randrange(there)
        groups = [list(pipe.groups) for pipe in design.pipes]
        target = groups[j][b]
        if (i, a) == (j, b):
            kind, width = self.space.kind[target[0][0]], len(target[0])
            idle = [e for e in self._idle(design) if self.space.kind[e] == kind]
            groups[j][b] = (*target, tuple(sorted(idle[:width])))
        elif len(groups[i][a]) > 1:
            groups[j][b] = (*target, groups[i][a][-1])
            groups[i][a] = groups[i][a][:-1]
        else:
            return None
        if not self._legal(groups[j][b]):
            return None
        pipes = [replace(p, groups=tuple(g)) for p, g in zip(design.pipes, groups, strict=True)]
        return replace(design, pipes=tuple(pipes))

    # Replicas

    def unite(self, design: Design) -> Design | None:
        """Replicas become one, all by twos or two of them: the stages of one behind or between the
        other's, or rows of its stages where they are alike."""
        count = len(design.pipes)
        if count < 2:
            return None
        way, order = self.rng.randrange(3), self.rng.sample(range(count), count)
        if self.rng.random() < 0.5:
            order, rest = order[:2], order[2:]
        else:
            order, rest = sorted(order)[: count // 2 * 2], sorted(order)[count // 2 * 2 :]
        pipes: list[Pipe | None] = []
        for one, other in zip(order[::2], order[1::2], strict=True):
            here, there = design.pipes[one], design.pipes[other]
            if way == 2:
                if self.form(here) != self.form(there):
                    return None
                groups = [a + b for a, b in zip(here.groups, there.groups, strict=True)]
                cuts = here.cuts
            elif way == 1 and len(here.groups) == len(there.groups):
                groups = [g for both in zip(here.groups, there.groups, strict=True) for g in both]
                cuts = ()
            else:
                groups, cuts = [*here.groups, *there.groups], ()
            pipe = Pipe(tuple(groups), cuts, here.micro, here.samples + there.samples)
            pipes.append(self._cut(design, pipe))
        return with_pipes(design, [*pipes, *(design.pipes[k] for k in rest)])

    def divide(self, design: Design) -> Design | None:
        """A replica, or all, becomes two: half of its stages each, every other one, or rows."""
        way, one = self.rng.randrange(3), self.rng.randrange(len(design.pipes))
        every = self.rng.random() < 0.5
        pipes: list[Pipe | None] = []
        for i, pipe in enumerate(design.pipes):
            groups, half = pipe.groups, len(pipe.groups) // 2
            if not every and i != one:
                pipes.append(pipe)
                continue
            if way == 2:
                if any(len(g) % 2 for g in groups):
                    return None
                parts = [tuple(g[k::2] for g in groups) for k in (0, 1)]
            else:
                parts = [groups[:half], groups[half:]] if way else [groups[::2], groups[1::2]]
            if not all(parts) or pipe.samples < 2:
                return None
            cuts = pipe.cuts if way == 2 else ()
            some = pipe.samples // 2
            for part, samples in zip(parts, (some, pipe.samples - some), strict=True):
                made = Pipe(part, cuts, min(pipe.micro, samples), samples)
                pipes.append(self._cut(design, made))
        return with_pipes(design, pipes)

    def samples(self, design: Design) -> Design | None:
        """Samples go from one replica to another."""
        if len(design.pipes) < 2:
            return None
        i, j = self.rng.sample(range(len(design.pipes)), 2)
        pipes = list(design.pipes)
        moved = self.rng.choice((1, pipes[i].micro, 2 * pipes[i].micro))
        if pipes[i].samples < moved:
            return None
        pipes[i] = replace(pipes[i], samples=pipes[i].samples - moved)
        pipes[j] = replace(pipes[j], samples=pipes[j].samples + moved)
        return replace(design, pipes=tuple(pipe for pipe in pipes if pipe.samples))

    def micro(self, design: Design) -> Design | None:
        """Another micro-batch size, of one replica or of all."""
        i, _ = self._any_pipe(design)
        now, every = design.pipes[i].micro, self.rng.random() < 0.7
        size = self.rng.choice((now - 1, now + 1, now // 2, 2 * now))
        if not 0 < size <= MOST_MICRO:
            return None
        pipes = [
            replace(p, micro=min(size, p.samples)) if every or j == i else p
            for j, p in enumerate(design.pipes)
        ]
        return replace(design, pipes=tuple(pipes))

    # What all replicas share

    def schedule(self, design: Design) -> Design | None:
        """Another schedule, or number of chunks."""
        return self.space.scheduled(design, *self.rng.choice(SCHEDULES))

    def zero(self, design: Design) -> Design | None:
        """Another ZeRO level."""
        return replace(design, zero=self.rng.choice((0, 1, 1, 2, 3)))

    def mode(self, design: Design) -> Design | None:
        """Another recomputation."""
        return replace(design, mode=self.rng.choice(self.space.modes))
