"""Moves of the local search: random changes of a design, small and large.

Two replicas are alike when their stages have, in order, the same device types, numbers of row
groups and tensor degrees. A move that changes one replica changes all replicas like it with
probability `Moves.alike_probability`, so that equal replicas can stay equal. A move that changes
the order of a replica's stages replaces its cuts by even cuts half of the time; a move that changes
the number of stages always does.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, pairwise, zip_longest

from hetplan.formulations.joint.design import Design, Group, Pipeline, with_pipelines
from hetplan.formulations.joint.space import Space

# Devices of a replica's stages -> devices of its new stages; None where the move does not apply.
Regroup = Callable[[Sequence[Group]], list[Group] | None]


class Moves:
    """Draws neighbours of designs. Each public method but `draw` is a move, known by its name: it
    returns the changed design, or None where the move does not apply."""

    def __init__(self, space: Space, rng: random.Random) -> None:
        self.space, self.rng = space, rng
        # probability that a move of one replica changes all replicas like it
        self.alike_probability = 0.5

    def draw(self, name: str, design: Design) -> Design | None:
        """The neighbour that the move `name` makes, repaired to keep the rules of plan files.

        None where the move does not apply, no repair exists or the design does not change.
        """
        changed: Design | None = getattr(self, name)(design)
        if changed is None:
            return None
        repaired = self.space.repaired(changed)
        return None if repaired == design else repaired

    def _chance(self, probability: float = 0.5) -> bool:
        """True with the given probability, else False."""
        return self.rng.random() < probability

    def _random_replica(self, design: Design) -> int:
        """The number of a replica, drawn at random."""
        return self._random_stage(design)[0]

    def _random_stage(self, design: Design) -> tuple[int, int]:
        """(number of a replica, number of one of its stages), drawn at random."""
        i = self.rng.randrange(len(design.pipelines))
        return i, self.rng.randrange(len(design.pipelines[i].groups))

    def _one_or_alike(
        self, design: Design, i: int, change: Callable[[Pipeline], Pipeline | None]
    ) -> Design | None:
        """The design with replica i changed and, with probability `alike_probability`, all replicas
        like it."""
        shapes = self.space.shapes(design.pipelines[i].groups)
        changes_all_alike = self._chance(self.alike_probability)
        pipelines: list[Pipeline | None] = []
        for j, pipeline in enumerate(design.pipelines):
            alike = changes_all_alike and self.space.shapes(pipeline.groups) == shapes
            pipelines.append(change(pipeline) if j == i or alike else pipeline)
        return with_pipelines(design, pipelines)

    def _regrouped(self, design: Design, i: int, regroup: Regroup) -> Design | None:
        """The design with other stages in replica i and, with probability `alike_probability`, in
        all replicas like it."""
        new_cuts = self._chance()

        def change(pipeline: Pipeline) -> Pipeline | None:
            groups = regroup(pipeline.groups)
            if not groups:
                return None
            same_number = len(groups) == len(pipeline.groups)
            cuts = pipeline.cuts
            if new_cuts or not same_number:
                cuts = ()
            return self._cut(design, replace(pipeline, groups=tuple(groups), cuts=cuts))

        return self._one_or_alike(design, i, change)

    def _cut(self, design: Design, pipeline: Pipeline) -> Pipeline | None:
        """The replica, with even cuts where it has no cuts; None where there are fewer layers than
        virtual stages."""
        if pipeline.cuts:
            return pipeline
        return self.space.with_even_cuts(
            pipeline, design.chunks, design.recomputation, folded=design.folded
        )

    def cut(self, design: Design) -> Design | None:
        """One cut, or several cuts in a row, move by one or two layers in the same direction."""
        # the first and the last cut that move, as shares of the number of cuts
        first, last = sorted((self.rng.random(), self.rng.random()))
        only_one = not self._chance()
        if only_one:
            last = first
        step = self.rng.choice((-2, -1, -1, 1, 1, 2))  # mostly by one, the smaller change

        def change(pipeline: Pipeline) -> Pipeline | None:
            if len(pipeline.groups) == 1:  # one stage computes all its chunks, wherever they begin
                return None
            number = len(pipeline.cuts)
            cuts = list(pipeline.cuts)
            for j in range(int(first * number), int(last * number) + 1):
                cuts[j] += step
            rising = all(a < b for a, b in pairwise((0, *cuts, self.space.layers)))
            return replace(pipeline, cuts=tuple(cuts)) if rising else None

        return self._one_or_alike(design, self._random_replica(design), change)

    def order(self, design: Design) -> Design | None:
        """A stage, or several consecutive stages, move to another place in their replica."""
        i, begin = self._random_stage(design)
        count = len(design.pipelines[i].groups)
        end = begin + 1
        if self.rng.randrange(2):
            end = self.rng.randrange(begin, count) + 1
        place = self.rng.randrange(count)  # among the stages that do not move

        def regroup(groups: Sequence[Group]) -> list[Group]:
            rest = [*groups[:begin], *groups[end:]]
            return [*rest[:place], *groups[begin:end], *rest[place:]]

        return self._regrouped(design, i, regroup)

    def swap(self, design: Design) -> Design | None:
        """Two stages of one replica or of two exchange their devices."""
        i, a = self._random_stage(design)
        j, b = self._random_stage(design)
        if i == j:

            def regroup(groups: Sequence[Group]) -> list[Group]:
                swapped = list(groups)
                swapped[a], swapped[b] = groups[b], groups[a]
                return swapped

            return self._regrouped(design, i, regroup)
        pipelines = list(design.pipelines)
        groups_i, groups_j = list(pipelines[i].groups), list(pipelines[j].groups)
        groups_i[a], groups_j[b] = groups_j[b], groups_i[a]
        pipelines[i] = replace(pipelines[i], groups=tuple(groups_i))
        pipelines[j] = replace(pipelines[j], groups=tuple(groups_j))
        return replace(design, pipelines=tuple(pipelines))

    def merge(self, design: Design) -> Design | None:
        """A stage is removed; its devices join a neighbouring stage as row groups or as tensor
        ranks, or become idle."""
        i, a = self._random_stage(design)
        joins_as = self.rng.choice(("idle", "rows", "tensor ranks"))
        count = len(design.pipelines[i].groups)
        if count < 2:
            return None
        neighbour = a + 1
        is_last = a + 1 == count
        if a > 0 and (self.rng.randrange(2) or is_last):
            neighbour = a - 1

        def regroup(groups: Sequence[Group]) -> list[Group] | None:
            merged, removed = groups[neighbour], groups[a]
            if joins_as == "rows":
                merged = merged + removed
            elif joins_as == "tensor ranks":
                if len(merged) != len(removed):
                    return None
                merged = tuple(row + more for row, more in zip(merged, removed, strict=True))
            if not self.space.can_be_stage(merged):
                return None
            remaining = list(groups)
            remaining[neighbour] = merged
            del remaining[a]
            return remaining

        return self._regrouped(design, i, regroup)

    def split(self, design: Design) -> Design | None:
        """A stage becomes two: each has half of its row groups or tensor ranks. A stage of one
        device keeps it, and an idle device becomes the second stage."""
        i, a = self._random_stage(design)
        devices = {*range(len(self.space.device_types))}
        # in random order
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
                # every replica that the move changes takes another idle device
                parts = [group, ((idle.pop(),),)]
            else:
                return None
            if not all(map(self.space.can_be_stage, parts)):
                return None
            return [*groups[:a], *parts, *groups[a + 1 :]]

        return self._regrouped(design, i, regroup)

    def pair(self, design: Design) -> Design | None:
        """The devices of one stage, or of all stages of its shape, form row groups of another
        tensor degree."""
        i, a = self._random_stage(design)
        width = self.rng.choice(self.space.tensor_degrees)
        all_alike = self._chance()

        def regroup(groups: Sequence[Group]) -> list[Group] | None:
            shapes = self.space.shapes(groups)
            regrouped = list(groups)
            for s, group in enumerate(groups):
                changes = s == a or (all_alike and shapes[s] == shapes[a])
                if changes:
                    devices = [device for row in group for device in row]
                    first_devices = range(0, len(devices), width)
                    regrouped[s] = tuple(tuple(devices[d : d + width]) for d in first_devices)
            return regrouped if all(map(self.space.can_be_stage, regrouped)) else None

        return self._regrouped(design, i, regroup)

    def unite(self, design: Design) -> Design | None:
        """Two replicas become one, or all replicas unite in pairs.

        The stages of the two alternate, or the s-th stages of both become one stage with the row
        groups of both.
        """
        if len(design.pipelines) < 2:
            return None
        as_rows = self._chance()
        shuffled = self.rng.sample(design.pipelines, len(design.pipelines))
        # with `alike_probability` = 1 equal replicas have to stay equal
        only_two = self._chance() and self.alike_probability < 1
        number_united = 2 if only_two else len(shuffled) // 2 * 2
        united, others = shuffled[:number_united], shuffled[number_united:]
        pipelines: list[Pipeline | None] = list(others)
        for one, other in zip(united[::2], united[1::2], strict=True):
            if as_rows and len(one.groups) != len(other.groups):
                return None
            pairs = list(zip_longest(one.groups, other.groups, fillvalue=()))
            if as_rows:
                groups = tuple(a + b for a, b in pairs)
            else:
                alternating = chain.from_iterable(pairs)
                groups = tuple(group for group in alternating if group)
            if not all(map(self.space.can_be_stage, groups)):
                return None
            cuts = one.cuts if as_rows else ()
            samples = one.samples + other.samples
            pipelines.append(self._cut(design, Pipeline(groups, cuts, one.micro_batch, samples)))
        return with_pipelines(design, pipelines)

    def divide(self, design: Design) -> Design | None:
        """One replica, or every replica, becomes two: each half takes every other stage, or every
        other row group of all stages."""
        by_rows = self._chance()
        # with `alike_probability` = 1 equal replicas have to stay equal
        divides_all = self._chance() or self.alike_probability == 1
        chosen = self.rng.randrange(len(design.pipelines))
        pipelines = list[Pipeline | None]()
        for i, pipeline in enumerate(design.pipelines):
            if not divides_all and i != chosen:
                pipelines.append(pipeline)
                continue
            for k in (0, 1):
                if by_rows:
                    groups = tuple(group[k::2] for group in pipeline.groups)
                    cuts = pipeline.cuts
                else:
                    groups = pipeline.groups[k::2]
                    cuts = ()
                samples = (pipeline.samples + k) // 2  # the second half takes an odd sample
                if not samples or not groups or not all(groups):
                    return None
                micro_batch = min(pipeline.micro_batch, samples)
                half = Pipeline(groups, cuts, micro_batch, samples)
                pipelines.append(self._cut(design, half))
        return with_pipelines(design, pipelines)

    def samples(self, design: Design) -> Design | None:
        """One sample, or the samples of one or two micro-batches, go from one replica to
        another. `Space.repaired` rejects the design where too few samples remain."""
        i, j = self._random_replica(design), self._random_replica(design)
        micro_batch = design.pipelines[i].micro_batch
        moved = self.rng.choice((1, micro_batch, 2 * micro_batch))
        if i == j:
            return None
        pipelines = list(design.pipelines)
        pipelines[i] = replace(pipelines[i], samples=pipelines[i].samples - moved)
        pipelines[j] = replace(pipelines[j], samples=pipelines[j].samples + moved)
        return replace(design, pipelines=tuple(pipelines))

    def micro(self, design: Design) -> Design | None:
        """One replica, or every replica, gets another micro-batch size."""
        i = self._random_replica(design)
        current = design.pipelines[i].micro_batch
        # with `alike_probability` = 1 equal replicas have to stay equal
        changes_all = self._chance(0.7) or self.alike_probability == 1
        neighbours = (current - 1, current + 1, current // 2, 2 * current)
        size = max(self.rng.choice(neighbours), 1)
        pipelines = list(design.pipelines)
        for j, pipeline in enumerate(pipelines):
            if changes_all or j == i:
                pipelines[j] = replace(pipeline, micro_batch=min(size, pipeline.samples))
        return replace(design, pipelines=tuple(pipelines))

    def schedule(self, design: Design) -> Design | None:
        """The design gets a random schedule and number of chunks."""
        return self.space.with_schedule(design, *self.rng.choice(self.space.schedules))

    def zero(self, design: Design) -> Design | None:
        """The design gets a random ZeRO level, level 1 twice as often as any other."""
        levels = [zero for zero in (0, 1, 1, 2, 3) if zero in self.space.zero_levels]
        return replace(design, zero=self.rng.choice(levels))

    def mode(self, design: Design) -> Design | None:
        """The design gets a random mode of recomputation."""
        return replace(design, recomputation=self.rng.choice(self.space.modes))

    def further(self, design: Design) -> Design | None:
        """One of the further degrees changes: the expert or the expert-tensor degree, the exchange
        in attention, or sequence parallelism. None for a design without further degrees."""
        if design.degrees is None:
            return None
        current = design.degrees
        first_stage = design.pipelines[0].groups[0]
        tensor = len(first_stage[0])
        changes: tuple[dict[str, object], ...] = (
            {"expert": 2 * current.expert},
            {"expert": max(current.expert // 2, 1)},
            {"expert_tensor": tensor if current.expert_tensor == 1 else 1},
            {"sequence_parallel": not current.sequence_parallel},
            {"exchange": "all-to-all" if current.exchange == "ring" else "ring"},
        )
        degrees = current.model_copy(update=self.rng.choice(changes))
        return replace(design, degrees=degrees)
