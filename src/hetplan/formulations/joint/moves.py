"""Random changes of a design, small ones and large ones. A move returns None where it does not
apply.

A move that changes one replica changes all that are like it (with stages of the same types, row
groups and tensor ranks) as often as the search asks, so that equal replicas can stay equal. A move
that changes the order of stages gives the replica new cuts half of the time, and one that changes
their number always does.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise, zip_longest

from hetplan.formulations.joint.design import SCHEDULES, Design, Group, Pipeline, with_pipelines
from hetplan.formulations.joint.space import Space

Regroup = Callable[[Sequence[Group]], list[Group] | None]


class Moves:
    """Draws neighbours of designs of one space."""

    def __init__(self, space: Space, rng: random.Random) -> None:
        self.space, self.rng = space, rng
        self.together = 0.5  # how often a change of one replica changes all that are like it

    def draw(self, name: str, design: Design) -> Design | None:
        """The named move: a neighbour that keeps the rules of the plan file, or None."""
        changed: Design | None = getattr(self, name)(design)
        if changed is None:
            return None
        repaired = self.space.repaired(changed)
        return None if repaired == design else repaired

    def _chance(self, probability: float = 0.5) -> bool:
        """True with this probability."""
        return self.rng.random() < probability

    def _replica(self, design: Design) -> int:
        """The number of a replica."""
        return self._replica_and_stage(design)[0]

    def _replica_and_stage(self, design: Design) -> tuple[int, int]:
        """Numbers of a replica and of one of its stages."""
        i = self.rng.randrange(len(design.pipelines))
        return i, self.rng.randrange(len(design.pipelines[i].groups))

    def _one_or_alike(
        self, design: Design, i: int, change: Callable[[Pipeline], Pipeline | None]
    ) -> Design | None:
        """The design with replica i changed, and at times all that are like it."""
        shapes = self.space.shapes(design.pipelines[i].groups)
        together = self._chance(self.together)
        pipelines: list[Pipeline | None] = []
        for j, pipeline in enumerate(design.pipelines):
            alike = together and self.space.shapes(pipeline.groups) == shapes
            pipelines.append(change(pipeline) if j == i or alike else pipeline)
        return with_pipelines(design, pipelines)

    def _regrouped(self, design: Design, i: int, regroup: Regroup) -> Design | None:
        """The design with other stages of replica i, and at times of all that are like it."""
        new_cuts = self._chance()

        def changed(pipeline: Pipeline) -> Pipeline | None:
            groups = regroup(pipeline.groups)
            if not groups:
                return None
            keeps_cuts = not new_cuts and len(groups) == len(pipeline.groups)
            cuts = pipeline.cuts if keeps_cuts else ()
            return self._cut(design, replace(pipeline, groups=tuple(groups), cuts=cuts))

        return self._one_or_alike(design, i, changed)

    def _cut(self, design: Design, pipeline: Pipeline) -> Pipeline | None:
        """The replica, with even cuts where it has none."""
        if pipeline.cuts:
            return pipeline
        return self.space.with_even_cuts(pipeline, design.chunks, design.recomputation)

    def cut(self, design: Design) -> Design | None:
        """A cut moves by one or two layers; or several do, and layers wander through stages."""
        first, last = sorted((self.rng.random(), self.rng.random()))
        if not self._chance():
            last = first
        step = self.rng.choice((-2, -1, -1, 1, 1, 2))

        def changed(pipeline: Pipeline) -> Pipeline | None:
            if len(pipeline.groups) == 1:  # where the chunks of one stage begin does not matter
                return None
            number = len(pipeline.cuts)
            moved = range(int(first * number), int(last * number) + 1)
            cuts = tuple(cut + step if j in moved else cut for j, cut in enumerate(pipeline.cuts))
            rising = all(a < b for a, b in pairwise((0, *cuts, self.space.layers)))
            return replace(pipeline, cuts=cuts) if rising else None

        return self._one_or_alike(design, self._replica(design), changed)

    def order(self, design: Design) -> Design | None:
        """A stage, or a run of stages, goes to another place."""
        i, begin = self._replica_and_stage(design)
        count = len(design.pipelines[i].groups)
        end = begin + 1
        if self.rng.randrange(2):
            end = self.rng.randrange(begin, count) + 1
        place = self.rng.randrange(count)

        def regroup(groups: Sequence[Group]) -> list[Group]:
            rest = [*groups[:begin], *groups[end:]]
            return [*rest[:place], *groups[begin:end], *rest[place:]]

        return self._regrouped(design, i, regroup)

    def swap(self, design: Design) -> Design | None:
        """Two stages exchange their devices, also between replicas."""
        (i, a), (j, b) = self._replica_and_stage(design), self._replica_and_stage(design)
        if i == j:

            def regroup(groups: Sequence[Group]) -> list[Group]:
                swapped = list(groups)
                swapped[a], swapped[b] = groups[b], groups[a]
                return swapped

            return self._regrouped(design, i, regroup)
        here, there = list(design.pipelines[i].groups), list(design.pipelines[j].groups)
        here[a], there[b] = there[b], here[a]
        pipelines = list(design.pipelines)
        pipelines[i] = replace(pipelines[i], groups=tuple(here))
        pipelines[j] = replace(pipelines[j], groups=tuple(there))
        return replace(design, pipelines=tuple(pipelines))

    def merge(self, design: Design) -> Design | None:
        """A stage goes; its devices join a neighbour as rows or tensor ranks, or stay idle."""
        i, a = self._replica_and_stage(design)
        joins_as = self.rng.choice(("idle", "rows", "tensor ranks"))
        count = len(design.pipelines[i].groups)
        if count < 2:
            return None
        joins_the_one_before = a > 0 and (self.rng.randrange(2) or a + 1 == count)
        b = a - 1 if joins_the_one_before else a + 1

        def regroup(groups: Sequence[Group]) -> list[Group] | None:
            joined, gone = groups[b], groups[a]
            if joins_as == "rows":
                joined = joined + gone
            elif joins_as == "tensor ranks":
                if len(joined) != len(gone):
                    return None
                joined = tuple(row + more for row, more in zip(joined, gone, strict=True))
            if not self.space.can_be_stage(joined):
                return None
            merged = list(groups)
            merged[b] = joined
            del merged[a]
            return merged

        return self._regrouped(design, i, regroup)

    def split(self, design: Design) -> Design | None:
        """A stage becomes two: each with half of its rows or tensor ranks, or an idle device
        takes one."""
        i, a = self._replica_and_stage(design)
        devices = {*range(len(self.space.kind))}
        idle = sorted(devices - design.used, key=lambda _: self.rng.random())

        def regroup(groups: Sequence[Group]) -> list[Group] | None:
            group = groups[a]
            half_rows, half_ranks = len(group) // 2, len(group[0]) // 2
            parts: list[Group]
            if half_rows:
                parts = [group[:half_rows], group[half_rows:]]
            elif half_ranks:
                parts = [(group[0][:half_ranks],), (group[0][half_ranks:],)]
            elif idle:
                parts = [group, ((idle.pop(),),)]
            else:
                return None
            if not all(map(self.space.can_be_stage, parts)):
                return None
            return [*groups[:a], *parts, *groups[a + 1 :]]

        return self._regrouped(design, i, regroup)

    def pair(self, design: Design) -> Design | None:
        """Rows become tensor ranks, or the reverse, of one stage or of all like it."""
        (i, a), width = self._replica_and_stage(design), self.rng.choice(self.space.tensor_degrees)
        all_alike = self._chance()

        def regroup(groups: Sequence[Group]) -> list[Group] | None:
            shapes, changed = self.space.shapes(groups), []
            for s, group in enumerate(groups):
                if s == a or (all_alike and shapes[s] == shapes[a]):
                    devices = tuple(device for row in group for device in row)
                    begins = range(0, len(devices), width)
                    group = tuple(devices[begin : begin + width] for begin in begins)
                changed.append(group)
            return changed if all(map(self.space.can_be_stage, changed)) else None

        return self._regrouped(design, i, regroup)

    def unite(self, design: Design) -> Design | None:
        """Two replicas become one, or all do by twos: the stages of the two take turns, or they
        join as rows of one stage."""
        if len(design.pipelines) < 2:
            return None
        as_rows = self._chance()
        shuffled = self.rng.sample(design.pipelines, len(design.pipelines))
        only_two = self._chance() and self.together < 1
        united = 2 if only_two else len(shuffled) // 2 * 2
        pipelines: list[Pipeline | None] = list(shuffled[united:])
        for one, other in zip(shuffled[:united:2], shuffled[1:united:2], strict=True):
            if as_rows and len(one.groups) != len(other.groups):
                return None
            pairs = list(zip_longest(one.groups, other.groups, fillvalue=()))
            if as_rows:
                groups = tuple(a + b for a, b in pairs)
            else:
                groups = tuple(group for pair in pairs for group in pair if group)
            if not all(map(self.space.can_be_stage, groups)):
                return None
            cuts, samples = one.cuts if as_rows else (), one.samples + other.samples
            pipelines.append(self._cut(design, Pipeline(groups, cuts, one.micro_batch, samples)))
        return with_pipelines(design, pipelines)

    def divide(self, design: Design) -> Design | None:
        """A replica, or every one, becomes two: each takes every other stage, or every other row of
        all stages."""
        by_rows, divides_all = self._chance(), self._chance() or self.together == 1
        one = self.rng.randrange(len(design.pipelines))
        pipelines = list[Pipeline | None]()
        for i, pipeline in enumerate(design.pipelines):
            if not divides_all and i != one:
                pipelines.append(pipeline)
                continue
            for k in (0, 1):
                if by_rows:
                    groups, cuts = tuple(group[k::2] for group in pipeline.groups), pipeline.cuts
                else:
                    groups, cuts = pipeline.groups[k::2], ()
                samples = (pipeline.samples + k) // 2
                if not samples or not groups or not all(groups):
                    return None
                micro_batch = min(pipeline.micro_batch, samples)
                half = Pipeline(groups, cuts, micro_batch, samples)
                pipelines.append(self._cut(design, half))
        return with_pipelines(design, pipelines)

    def samples(self, design: Design) -> Design | None:
        """Samples go from one replica to another."""
        i, j = self._replica(design), self._replica(design)
        micro_batch = design.pipelines[i].micro_batch
        moved = self.rng.choice((1, micro_batch, 2 * micro_batch))
        if i == j:
            return None
        pipelines = list(design.pipelines)
        pipelines[i] = replace(pipelines[i], samples=pipelines[i].samples - moved)
        pipelines[j] = replace(pipelines[j], samples=pipelines[j].samples + moved)
        return replace(design, pipelines=tuple(pipelines))

    def micro(self, design: Design) -> Design | None:
        """Another micro-batch size, of one replica or of all."""
        i = self._replica(design)
        now, of_all = design.pipelines[i].micro_batch, self._chance(0.7) or self.together == 1
        size = max(self.rng.choice((now - 1, now + 1, now // 2, 2 * now)), 1)
        pipelines = list(design.pipelines)
        for j, pipeline in enumerate(pipelines):
            if of_all or j == i:
                pipelines[j] = replace(pipeline, micro_batch=min(size, pipeline.samples))
        return replace(design, pipelines=tuple(pipelines))

    def schedule(self, design: Design) -> Design | None:
        """Another schedule, or number of chunks."""
        return self.space.with_schedule(design, *self.rng.choice(SCHEDULES))

    def zero(self, design: Design) -> Design | None:
        """Another ZeRO level."""
        return replace(design, zero=self.rng.choice((0, 1, 1, 2, 3)))

    def mode(self, design: Design) -> Design | None:
        """Another recomputation."""
        return replace(design, recomputation=self.rng.choice(self.space.modes))

    def further(self, design: Design) -> Design | None:
        """Another expert or expert-tensor degree, exchange in attention, or sequence parallelism
        switched; of a design with such degrees."""
        if design.degrees is None:
            return None
        now, tensor = design.degrees, len(design.pipelines[0].groups[0][0])
        changes: tuple[dict[str, object], ...] = (
            {"expert": 2 * now.expert},
            {"expert": max(now.expert // 2, 1)},
            {"expert_tensor": tensor if now.expert_tensor == 1 else 1},
            {"sequence_parallel": not now.sequence_parallel},
            {"exchange": "all-to-all" if now.exchange == "ring" else "ring"},
        )
        degrees = now.model_copy(update=self.rng.choice(changes))
        return replace(design, degrees=degrees)
