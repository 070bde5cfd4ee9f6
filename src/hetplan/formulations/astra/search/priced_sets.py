"""Sets of priced strategies: strategies on one type of device at a time, strategies on segments of
several types, and the union of both sets. The search chooses the best strategies from them.

A set numbers its strategies from 0 and has their seconds and money as arrays. It makes a
`Candidate` only for single numbers, on demand.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hetplan.formulations.astra.data import AstraData
from hetplan.formulations.astra.search.memory import offload_share, stage_peaks
from hetplan.formulations.astra.search.pool import Pool
from hetplan.formulations.astra.search.pricing import Priced, iteration_parts
from hetplan.formulations.astra.search.result import (
    Candidate,
    Job,
    Parts,
    ranking,
)
from hetplan.formulations.astra.search.rules import Rule
from hetplan.formulations.astra.search.segments import (
    Point,
    SegmentSearch,
    after_layers,
    segment_figures,
    segment_instance,
    segment_space,
)
from hetplan.formulations.astra.search.space import Space, strategies
from hetplan.formulations.astra.search.table import Strategies, joined, nothing
from hetplan.replays.arrays import Floats, Ints
from hetplan.replays.assumptions import Assumptions
from hetplan.replays.facts import ModelFacts
from hetplan.solvers.run import Run

# The columns whose product is the number of devices of a stage.
DEGREES_OF_A_STAGE = ("tensor_model_parallel_size", "context_parallel_size", "data_parallel_size")


@dataclass(frozen=True)
class Task:
    """The inputs of a search; see `engine.search`."""

    job: Job
    pool: Pool
    facts: ModelFacts  # facts of the job's model
    space: Space
    rules: Sequence[Rule]
    assumed: Assumptions  # assumptions of pricing and memory
    top: int  # number of the fastest candidates to list

    def candidate(
        self,
        table: Strategies,
        r: int,
        parts: Parts,
        money: float,
        offloaded: float,
        stages: tuple[tuple[str, int], ...],
        *,
        segments: bool,
    ) -> Candidate:
        """The candidate of row r of a table.

        parts, offloaded, stages: see `Candidate`. money: dollars, NaN where no price is known.
        segments: whether the strategy is one on segments.
        """
        offers = {offer.name: offer for offer in self.pool.offers}
        devices_per_stage = math.prod(int(table.columns[name][r]) for name in DEGREES_OF_A_STAGE)
        stages_on = Counter(name for name, _ in stages)
        layers_on = Counter[str]()
        for name, layers in stages:
            layers_on[name] += layers
        used = [name for name in offers if stages_on[name]]
        all_segments = tuple((name, stages_on[name], layers_on[name]) for name in used)
        stages_on_offers = [(offers[name], layers) for name, layers in stages]
        peaks = stage_peaks(self.facts, table, r, stages_on_offers, offloaded, self.assumed)
        seconds = sum(parts)
        return Candidate(
            seconds=seconds,
            parts=parts,
            tokens_per_second=self.job.tokens_per_iteration / seconds,
            money=None if np.isnan(money) else money,
            devices={name: count * devices_per_stage for name, count in stages_on.items()},
            strategy=table.row(r),
            offloaded=offloaded,
            stages=stages,
            stage_bytes=peaks,
            segments=all_segments if segments else (),
        )


class PricedSet(Protocol):
    """A set of priced strategies, numbered from 0."""

    seconds: Floats  # [n] seconds of an iteration
    money: Floats  # [n] dollars for the job, NaN where no price is known

    def candidate(self, number: int) -> Candidate:
        """The candidate of one strategy."""
        ...


class OnOneType:
    """All strategies with equal stages that fit in memory, on one type of device at a time."""

    table: Strategies  # R rows
    parts: Floats  # [3, R] seconds of pipeline, reduction and optimizer
    seconds: Floats  # [R] seconds of an iteration
    money: Floats  # [R] dollars for the job, NaN where the type has no price
    offloaded: Floats  # [R] share of the optimizer states on the host
    counts: Ints  # [3] strategies generated, after rules, in memory

    def __init__(self, task: Task) -> None:
        self.task = task
        tables = [nothing()]
        parts = [np.zeros((3, 0))]
        offloaded = [np.zeros(0)]
        after_rules = 0
        for number, offer in enumerate(task.pool.offers):
            for size in task.pool.sizes:
                if size > offer.most:
                    continue
                table = strategies(
                    task.facts,
                    task.space,
                    task.rules,
                    gpus=size,
                    global_batch=task.job.global_batch,
                    gpu_type=number,
                    whole_stages=not task.space.uneven,
                )
                after_rules += table.rows
                shares = offload_share(Priced(task.facts, table, offer, task.assumed))
                most_offloaded = 1.0 if task.space.offload else 0.0
                fits = np.flatnonzero(shares <= most_offloaded)
                fitting, shares = table.take(fits), shares[fits]
                priced = Priced(task.facts, fitting, offer, task.assumed)
                tables.append(fitting)
                offloaded.append(shares)
                parts.append(np.stack(iteration_parts(priced, shares)))
        self.table = joined(tables)
        self.parts = np.concatenate(parts, axis=1)
        self.offloaded = np.concatenate(offloaded)
        self.seconds = self.parts.sum(axis=0)
        # dollars per second of a device by type; None becomes NaN
        prices = np.array([offer.price_per_second for offer in task.pool.offers], dtype=np.float64)
        price_of_device = prices[self.table.columns["gpu_type"]]
        price_of_all = self.table.columns["num_gpus"] * price_of_device
        self.money = self.seconds * task.job.iterations * price_of_all
        self.counts = np.array([self.table.generated, after_rules, self.table.rows])

    def candidate(self, number: int) -> Candidate:
        """The candidate of a row of the table. Where the number of stages does not divide the
        layers, the first stages have one layer more."""
        task, columns = self.task, self.table.columns
        name = task.pool.offers[int(columns["gpu_type"][number])].name
        P = int(columns["pipeline_model_parallel_size"][number])
        # the stages differ by at most one layer, and the sum is the number of all layers
        layers_of_stages = [(task.facts.layers + i) // P for i in reversed(range(P))]
        pipeline, reduction, optimizer = self.parts[:, number].tolist()
        return task.candidate(
            self.table,
            number,
            parts=(pipeline, reduction, optimizer),
            money=float(self.money[number]),
            offloaded=float(self.offloaded[number]),
            stages=tuple((name, layers) for layers in layers_of_stages),
            segments=False,
        )

    def fastest(self, count: int) -> list[Candidate]:
        """The first `count` candidates in the order of throughput, then of money, without
        `twins`."""
        order = ranking(self.task.job.tokens_per_iteration / self.seconds, self.money)
        order = order[~twins(self.table, self.offloaded)[order]]
        return [self.candidate(number) for number in order[:count].tolist()]


class OnSegments:
    """The Pareto set of all strategies on segments of several types."""

    table: Strategies  # the strategies for which enough stages fit in memory
    points: Sequence[Point]  # [n] the Pareto set
    seconds: Floats  # [n] seconds of an iteration
    money: Floats  # [n] dollars for the job, NaN where a type has no price
    counts: Ints  # [3] strategies generated, after rules, in memory

    def __init__(self, task: Task, run: Run) -> None:
        self.task = task
        offers = task.pool.offers
        space = segment_space(task.space)
        table = strategies(
            task.facts,
            space,
            task.rules,
            gpus=task.pool.sizes[0],  # a heterogeneous pool has one size
            global_batch=task.job.global_batch,
            whole_stages=False,
        )
        figures = segment_figures(task.facts, table, offers, task.assumed, offload=space.offload)
        holds_a_layer = figures.cap.max(axis=0) >= 1  # [types, R] whether some stage can
        most_stages = np.where(holds_a_layer, figures.most, 0).sum(axis=0)
        in_memory = most_stages >= table.columns["pipeline_model_parallel_size"]
        kept = np.flatnonzero(in_memory & ~twins(table, figures.offloaded))
        self.counts = np.array([table.generated, table.rows, in_memory.sum()])
        self.table = table.take(kept)
        self.figures = figures.take(kept)
        self.search = SegmentSearch(task.facts.layers, self.table, self.figures, run, task.top)
        self.points = self.search.front.points
        self.seconds = np.array([point.seconds for point in self.points])
        self.money = np.array([self.money_of(point) for point in self.points])

    def money_of(self, point: Point) -> float:
        """Dollars for the job; NaN where a type has no price."""
        priceless = any(offer.price_per_second is None for offer in self.task.pool.offers)
        return np.nan if priceless else point.money * self.task.job.iterations

    def candidate(self, number: int) -> Candidate:
        """The candidate of one point of the Pareto set."""
        return self.candidate_of(self.points[number])

    def fastest(self) -> list[Candidate]:
        """The candidates of the fastest strategies, each on its fastest segments."""
        return [self.candidate_of(point) for point in self.search.top()]

    def candidate_of(self, point: Point) -> Candidate:
        """The candidate of a strategy on segments."""
        task, offers = self.task, self.task.pool.offers
        offloaded = float(self.figures.offloaded[point.strategy])
        reduction, optimizer = self.seconds_behind(point, offloaded)
        pipeline = point.seconds - reduction - optimizer
        stages = tuple((offers[part.type].name, n) for part in point.stages for n in part.each)
        return task.candidate(
            self.table,
            point.strategy,
            parts=(pipeline, reduction, optimizer),
            money=self.money_of(point),
            offloaded=offloaded,
            stages=stages,
            segments=True,
        )

    def seconds_behind(self, point: Point, offloaded: float) -> tuple[float, float]:
        """(reduction, optimizer) seconds of the stage on which the two together take longest."""
        task = self.task
        row = self.table.take(np.array([point.strategy]))
        of_stages = []
        for part in point.stages:
            offer = task.pool.offers[part.type]
            priced = Priced(task.facts, row, offer, task.assumed)
            reduction, optimizer = after_layers(priced, 0, offloaded)
            for n in set(part.each):
                reduction_seconds = float(reduction[part.kind, n - 1])
                optimizer_seconds = float(optimizer[part.kind, n - 1])
                of_stages.append((reduction_seconds, optimizer_seconds))
        return max(of_stages, key=sum)

    def instance(self, number: int) -> AstraData:
        """The instance of problem `astra` whose optimum is this point of the Pareto set."""
        point, offers = self.points[number], self.task.pool.offers
        return segment_instance(self.table, offers, self.figures, point.strategy, point.stages)


class Union:
    """Several sets of priced strategies as one, numbered set by set."""

    def __init__(self, sets: Sequence[PricedSet]) -> None:
        self.sets = sets
        self.seconds = np.concatenate([one.seconds for one in sets])
        self.money = np.concatenate([one.money for one in sets])

    def located(self, number: int) -> tuple[PricedSet, int]:
        """(the set of a strategy, the number of the strategy in that set)."""
        for subset in self.sets:
            if number < len(subset.seconds):
                return subset, number
            number -= len(subset.seconds)
        raise IndexError("no such strategy")

    def candidate(self, number: int) -> Candidate:
        """The candidate of one strategy."""
        subset, number_in_subset = self.located(number)
        return subset.candidate(number_in_subset)


def twins(table: Strategies, share: Floats) -> NDArray[np.bool_]:
    """[R] whether a strategy has the same cost as the one before, because they differ only in the
    overlap of offloading and neither of them offloads. Such strategies are neighbours, since this
    overlap is the last option in the order of the table.

    share: [R] share of the optimizer states on the host.
    """
    same = np.ones(table.rows, bool)
    same[:1] = False
    for name, column in table.columns.items():
        if name != "no_overlap_offload_optimizer":
            same[1:] &= column[1:] == column[:-1]
    same[1:] &= (share[1:] == 0.0) & (share[:-1] == 0.0)
    return same
