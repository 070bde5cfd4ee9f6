"""The heuristic: longest processing time first, then local search.

The samples are placed in descending order of length, each into the micro-batch with which its
replica ends first. If a sample finds no room, all samples are placed anew by best fit decreasing:
each into the fullest micro-batch with room. The local search moves samples away from the slowest
replica, or exchanges them with others, as long as the slowest replica becomes faster. Sources:
Graham 1969 (longest processing time), Johnson 1974 (best fit).
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from hetplan.formulations.lengths.data import LengthsData, LengthsDecision
from hetplan.formulations.lengths.problem import Floats, Ints, LengthsProblem
from hetplan.solvers.run import Outcome, Run, Stop

SAME = 1e-12  # a relative difference below which seconds count as equal
MOST_CHANGES = 2000  # of the local search
SAMPLE_SECONDS = 1e-4  # counted towards the budget for pricing all changes of one sample
NO_ROOM = "found no micro-batches with room for all samples"


class Change(NamedTuple):
    """A move of a sample to another micro-batch, or its exchange with a sample there."""

    sample: int
    replica: int  # the target
    slot: int  # the target's micro-batch
    back: int | None  # the sample that takes the old place; None: a move


class Packing:
    """Samples in micro-batches, with the seconds of the replicas.

    Arrays [R, K] have a row for each replica and a column (`slot`) for each micro-batch. Columns
    beyond the number of micro-batches of a replica have no tokens.
    """

    def __init__(self, problem: LengthsProblem) -> None:
        self.problem = problem
        shape = (problem.replicas, int(problem.slots.max()))
        self.exists = np.arange(shape[1])[None, :] < problem.slots[:, None]
        self.tokens: Ints = np.zeros(shape, np.int64)
        self.seconds: Floats = np.zeros(shape)
        self.total: Floats = np.zeros(shape[0])  # [R] seconds of all micro-batches
        self.fill_seconds: Floats = np.zeros(shape)
        # [R, K] the largest fill seconds of the replica's other micro-batches
        self.others: Floats = np.zeros(shape)
        self.replica: Ints = np.full(
            problem.samples, -1
        )  # [n] replica of each sample; -1: not placed
        self.slot: Ints = np.full(problem.samples, -1)

    @property
    def replica_seconds(self) -> Floats:
        """[R] seconds of each replica."""
        return np.asarray(self.total + self.fill_seconds.max(axis=1))

    @property
    def objective(self) -> float:
        """Seconds of the slowest replica."""
        return float(self.replica_seconds.max())

    def place(self, sample: int, replica: int, slot: int) -> None:
        """Put a sample into a micro-batch, and take it out of its old one where it has one."""
        before = int(self.replica[sample])
        self.replica[sample], self.slot[sample] = replica, slot
        for changed in {before, replica} - {-1}:
            self.refresh(changed)

    def refresh(self, r: int) -> None:
        """Compute the rows of replica r from `replica` and `slot`."""
        p, here = self.problem, np.flatnonzero(self.replica == r)
        slots, columns = self.slot[here], self.tokens.shape[1]
        tokens = np.bincount(slots, p.tokens[here], minlength=columns)
        self.tokens[r] = tokens.astype(np.int64)
        added = np.bincount(slots, p.seconds[r, here], minlength=columns)
        self.seconds[r] = np.where(tokens > 0, added + p.overhead[r], 0.0)
        self.total[r] = self.seconds[r].sum()
        fill = np.bincount(slots, p.fill_seconds[r, here], minlength=columns)
        self.fill_seconds[r] = np.where(tokens > 0, fill + p.fill_overhead[r], 0.0)
        self.others[r] = longest_others(self.fill_seconds[r])

    def with_sample(self, sample: int) -> Floats:
        """[R, K] seconds of the replica after the sample joins the micro-batch; infinite where it
        has no room. The row of the sample's present replica has no meaning."""
        p, new = self.problem, self.tokens == 0
        added = p.seconds[:, sample][:, None] + np.where(new, p.overhead[:, None], 0.0)
        fill = self.fill_seconds + p.fill_seconds[:, sample][:, None]
        fill += np.where(new, p.fill_overhead[:, None], 0.0)
        seconds = self.total[:, None] + added + np.maximum(self.others, fill)
        room = self.tokens + p.tokens[sample] <= p.capacity[:, None]
        return np.where(room & self.exists, seconds, np.inf)

    def changes(self, sample: int) -> Iterator[tuple[float, Change]]:
        """(seconds, change) of the best move of the sample to another replica, of its best exchange
        with another replica, and of every change within its replica. The seconds are those of the
        slower replica of the change."""
        r = int(self.replica[sample])
        moved = np.maximum(self.with_sample(sample), self.without(sample))
        moved[r] = np.inf
        to = np.unravel_index(int(moved.argmin()), moved.shape)
        yield float(moved[to]), Change(sample, int(to[0]), int(to[1]), None)
        exchanged = self.exchanged(sample)
        back = int(exchanged.argmin())
        change = Change(sample, int(self.replica[back]), int(self.slot[back]), back)
        yield float(exchanged[back]), change
        yield from self.changes_within_replica(sample)

    def without(self, sample: int) -> float:
        """Seconds of the sample's replica without it."""
        p, r, k = self.problem, int(self.replica[sample]), int(self.slot[sample])
        if self.tokens[r, k] == p.tokens[sample]:
            return float(self.total[r] - self.seconds[r, k] + self.others[r, k])
        fill = max(self.others[r, k], self.fill_seconds[r, k] - p.fill_seconds[r, sample])
        return float(self.total[r] - p.seconds[r, sample] + fill)

    def exchanged(self, sample: int) -> Floats:
        """[n] seconds of the slower of two replicas after the sample and each other one are
        exchanged; infinite where there is no room, and for samples of the same replica or
        length."""
        p, r, k = self.problem, int(self.replica[sample]), int(self.slot[sample])
        others, slots = self.replica, self.slot  # [n] of each other sample
        every = np.arange(p.samples)
        seconds_here = self.total[r] - p.seconds[r, sample] + p.seconds[r]
        fill = self.fill_seconds[r, k] - p.fill_seconds[r, sample] + p.fill_seconds[r]
        seconds_here = seconds_here + np.maximum(self.others[r, k], fill)
        seconds_there = self.total[others] - p.seconds[others, every] + p.seconds[others, sample]
        fill = self.fill_seconds[others, slots] - p.fill_seconds[others, every]
        fill = fill + p.fill_seconds[others, sample]
        seconds_there = seconds_there + np.maximum(self.others[others, slots], fill)
        fits = self.tokens[r, k] - p.tokens[sample] + p.tokens <= p.capacity[r]
        fits &= self.tokens[others, slots] - p.tokens + p.tokens[sample] <= p.capacity[others]
        fits &= (others != r) & (p.tokens != p.tokens[sample])
        return np.where(fits, np.maximum(seconds_here, seconds_there), np.inf)

    def changes_within_replica(self, sample: int) -> Iterator[tuple[float, Change]]:
        """(seconds of the replica, change) of every move and exchange within the replica. There
        are none where neither the number of micro-batches nor their fill costs seconds."""
        p, r, k = self.problem, int(self.replica[sample]), int(self.slot[sample])
        if p.overhead[r] == 0 and p.fill_overhead[r] == 0 and not p.fill_seconds[r].any():
            return
        size = int(p.tokens[sample])
        mates = [j for j in np.flatnonzero(self.replica == r).tolist() if self.slot[j] != k]
        options: list[tuple[int, int | None]] = [(l, None) for l in range(int(p.slots[r]))]
        options += [(int(self.slot[j]), j) for j in mates]
        for l, back in options:
            size_back = 0 if back is None else int(p.tokens[back])
            fits = self.tokens[r, l] + size - size_back <= p.capacity[r]
            fits = fits and self.tokens[r, k] - size + size_back <= p.capacity[r]
            if l == k or not fits or size == size_back:
                continue
            change = Change(sample, r, l, back)
            yield self.seconds_after_change_within(change), change

    def seconds_after_change_within(self, change: Change) -> float:
        """Seconds of the replica after a change within it."""
        p, sample, r, l, back = self.problem, *change
        k = int(self.slot[sample])
        total, fill = float(self.total[r]), self.fill_seconds[r].copy()
        difference = float(p.fill_seconds[r, sample])
        if back is not None:
            difference -= float(p.fill_seconds[r, back])
        fill[l] += difference
        fill[k] -= difference
        if back is None and self.tokens[r, l] == 0:
            total += float(p.overhead[r])
            fill[l] += p.fill_overhead[r]
        if back is None and self.tokens[r, k] == p.tokens[sample]:
            total -= float(p.overhead[r])
            fill[k] = 0.0
        return total + float(fill.max())

    def make(self, change: Change) -> None:
        """Make a change."""
        r, k = int(self.replica[change.sample]), int(self.slot[change.sample])
        self.place(change.sample, change.replica, change.slot)
        if change.back is not None:
            self.place(change.back, r, k)

    def placed(self) -> list[list[list[int]]]:
        """[replica][micro-batch] samples."""
        lists: list[list[list[int]]] = [
            [[] for _ in range(slots)] for slots in self.problem.slots.tolist()
        ]
        for i, (r, k) in enumerate(zip(self.replica.tolist(), self.slot.tolist(), strict=True)):
            lists[r][k].append(i)
        return lists


def longest_others(seconds: Floats) -> Floats:
    """[K] for each entry the largest of the other entries; 0 where there is no other."""
    if len(seconds) == 1:
        return np.zeros(1)
    first, second = np.argsort(-seconds, kind="stable")[:2]
    others = np.full(len(seconds), seconds[first])
    others[first] = seconds[second]
    return others


def packed(problem: LengthsProblem, *, by_room: bool) -> Packing | None:
    """The packing that places the longest sample first; None where a sample finds no room.

    by_room: whether each sample joins the fullest micro-batch with room for it. Otherwise it joins
    the one with which its replica ends first, of equal ones the fullest.
    """
    packing = Packing(problem)
    for i in range(problem.samples):
        seconds = packing.with_sample(i)
        if not np.isfinite(seconds).any():
            return None
        left = problem.capacity[:, None] - packing.tokens
        allowed = np.isfinite(seconds)
        if not by_room:
            allowed = seconds <= seconds.min() * (1 + SAME)
        at = np.unravel_index(int(np.where(allowed, left, np.inf).argmin()), left.shape)
        packing.place(i, int(at[0]), int(at[1]))
    return packing


def improve(packing: Packing, run: Run) -> None:
    """Local search: change places of samples of the slowest replica while it becomes faster."""
    for _ in range(MOST_CHANGES):
        seconds = packing.replica_seconds
        slowest = int(seconds.argmax())
        limit = float(seconds[slowest]) * (1 - SAME)
        improvement = None
        for sample in np.flatnonzero(packing.replica == slowest).tolist():
            run.count(SAMPLE_SECONDS)
            if run.should_stop:
                return
            value, change = min(packing.changes(sample), key=lambda pair: pair[0])
            if value < limit:
                improvement = change
                break
        if improvement is None:
            return
        packing.make(improvement)


def best_packing(problem: LengthsProblem, run: Run) -> Packing | None:
    """The packing of the heuristic; None where it finds none."""
    packing = packed(problem, by_room=False)
    if packing is None:
        packing = packed(problem, by_room=True)
    if packing is not None:
        improve(packing, run)
    return packing


def solve(data: LengthsData, run: Run) -> Outcome[LengthsDecision]:
    """A decision without a bound."""
    problem = LengthsProblem(data)
    reason = problem.infeasible_because()
    if reason is not None:
        return Outcome(stop=Stop.INFEASIBLE, message=reason)
    packing = best_packing(problem, run)
    if packing is None:
        return Outcome(stop=Stop.DONE, message=NO_ROOM)
    return Outcome(stop=Stop.DONE, decision=problem.decision(packing.placed()))
