"""The heuristic: the longest sample first, to the micro-batch with which its replica ends first;
then samples move away from the slowest replica, or change places with others, while that helps.

If the longest first leaves a sample without room, the fullest micro-batch with room takes each
sample instead (best fit decreasing), and the same improvement follows. Sources: Graham 1969 for the
longest first; Johnson 1974 for best fit.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from hetplan.formulations.lengths.data import LengthsData, LengthsDecision
from hetplan.formulations.lengths.problem import Floats, Ints, LengthsProblem
from hetplan.solvers.run import Outcome, Run, Stop

SAME = 1e-12  # a relative difference below which seconds count as equal
MOST_CHANGES = 2000  # of the improvement
LOOK_SECONDS = 1e-4  # that a look at all changes of one sample counts towards the budget
NO_ROOM = "found no micro-batches with room for all samples"


class Change(NamedTuple):
    """A sample that goes to another micro-batch, and the sample that comes in its place."""

    sample: int
    replica: int  # where the sample goes
    slot: int
    back: int | None  # None: nothing comes back


class Packing:
    """The micro-batches so far. Arrays have a row for each replica and a column for each
    micro-batch; columns that a replica does not have hold no tokens."""

    def __init__(self, problem: LengthsProblem) -> None:
        self.problem = problem
        shape = (problem.replicas, int(problem.slots.max()))
        self.exists = np.arange(shape[1])[None, :] < problem.slots[:, None]
        self.tokens: Ints = np.zeros(shape, np.int64)
        self.seconds: Floats = np.zeros(shape)
        self.total: Floats = np.zeros(shape[0])  # [R] seconds of all micro-batches
        self.around: Floats = np.zeros(shape)  # seconds of the micro-batch elsewhere
        # the longest way of the other micro-batches of the replica
        self.others: Floats = np.zeros(shape)
        self.replica: Ints = np.full(problem.samples, -1)  # [n] where each sample is
        self.slot: Ints = np.full(problem.samples, -1)

    @property
    def replica_seconds(self) -> Floats:
        """[R] seconds of each replica."""
        return np.asarray(self.total + self.around.max(axis=1))

    @property
    def objective(self) -> float:
        """Seconds of the slowest replica."""
        return float(self.replica_seconds.max())

    def place(self, sample: int, replica: int, slot: int) -> None:
        """Put a sample, which may be elsewhere, into a micro-batch."""
        before = int(self.replica[sample])
        self.replica[sample], self.slot[sample] = replica, slot
        for changed in {before, replica} - {-1}:
            self.refresh(changed)

    def refresh(self, r: int) -> None:
        """Compute a replica's rows anew from where the samples are."""
        p, here = self.problem, np.flatnonzero(self.replica == r)
        slots, columns = self.slot[here], self.tokens.shape[1]
        tokens = np.bincount(slots, p.tokens[here], minlength=columns)
        self.tokens[r] = tokens.astype(np.int64)
        added = np.bincount(slots, p.seconds[r, here], minlength=columns)
        self.seconds[r] = np.where(tokens > 0, added + p.overhead[r], 0.0)
        self.total[r] = self.seconds[r].sum()
        around = np.bincount(slots, p.around[r, here], minlength=columns)
        self.around[r] = np.where(tokens > 0, around + p.around_overhead[r], 0.0)
        self.others[r] = longest_others(self.around[r])

    def with_sample(self, sample: int) -> Floats:
        """[R, K] seconds of the replica after the sample, which is nowhere in it, joins each
        micro-batch; infinite where it has no room."""
        p, new = self.problem, self.tokens == 0
        added = p.seconds[:, sample][:, None] + np.where(new, p.overhead[:, None], 0.0)
        around = self.around + p.around[:, sample][:, None]
        around += np.where(new, p.around_overhead[:, None], 0.0)
        seconds = self.total[:, None] + added + np.maximum(self.others, around)
        room = self.tokens + p.tokens[sample] <= p.capacity[:, None]
        return np.where(room & self.exists, seconds, np.inf)

    def changes(self, sample: int) -> Iterator[tuple[float, Change]]:
        """(seconds of the slower of the replicas that it changes, change) of the best move of the
        sample to another replica, of its best exchange, and of every change at home."""
        r = int(self.replica[sample])
        moved = np.maximum(self.with_sample(sample), self.without(sample))
        moved[r] = np.inf
        to = np.unravel_index(int(moved.argmin()), moved.shape)
        yield float(moved[to]), Change(sample, int(to[0]), int(to[1]), None)
        exchanged = self.exchanged(sample)
        back = int(exchanged.argmin())
        change = Change(sample, int(self.replica[back]), int(self.slot[back]), back)
        yield float(exchanged[back]), change
        yield from self.changes_at_home(sample)

    def without(self, sample: int) -> float:
        """Seconds of the sample's replica without it."""
        p, r, k = self.problem, int(self.replica[sample]), int(self.slot[sample])
        if self.tokens[r, k] == p.tokens[sample]:
            return float(self.total[r] - self.seconds[r, k] + self.others[r, k])
        around = max(self.others[r, k], self.around[r, k] - p.around[r, sample])
        return float(self.total[r] - p.seconds[r, sample] + around)

    def exchanged(self, sample: int) -> Floats:
        """[n] seconds of the slower of two replicas after the sample and another one change places;
        infinite where there is no room, and within the replica."""
        p, r, k = self.problem, int(self.replica[sample]), int(self.slot[sample])
        s, l = self.replica, self.slot
        every = np.arange(p.samples)
        of_this = self.total[r] - p.seconds[r, sample] + p.seconds[r]
        around = self.around[r, k] - p.around[r, sample] + p.around[r]
        of_this = of_this + np.maximum(self.others[r, k], around)
        of_that = self.total[s] - p.seconds[s, every] + p.seconds[s, sample]
        around = self.around[s, l] - p.around[s, every] + p.around[s, sample]
        of_that = of_that + np.maximum(self.others[s, l], around)
        fits = self.tokens[r, k] - p.tokens[sample] + p.tokens <= p.capacity[r]
        fits &= self.tokens[s, l] - p.tokens + p.tokens[sample] <= p.capacity[s]
        fits &= (s != r) & (p.tokens != p.tokens[sample])
        return np.where(fits, np.maximum(of_this, of_that), np.inf)

    def changes_at_home(self, sample: int) -> Iterator[tuple[float, Change]]:
        """(seconds of the replica, change) of every move and exchange within the replica. They
        matter where the longest way or the number of micro-batches costs seconds."""
        p, r, k = self.problem, int(self.replica[sample]), int(self.slot[sample])
        if p.overhead[r] == 0 and p.around_overhead[r] == 0 and not p.around[r].any():
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
            yield self.seconds_at_home(change), change

    def seconds_at_home(self, change: Change) -> float:
        """Seconds of the replica after a change within it."""
        p, sample, r, l, back = self.problem, *change
        k = int(self.slot[sample])
        total, around = float(self.total[r]), self.around[r].copy()
        way = float(p.around[r, sample])
        if back is not None:
            way -= float(p.around[r, back])
        around[l] += way
        around[k] -= way
        if back is None and self.tokens[r, l] == 0:
            total += float(p.overhead[r])
            around[l] += p.around_overhead[r]
        if back is None and self.tokens[r, k] == p.tokens[sample]:
            total -= float(p.overhead[r])
            around[k] = 0.0
        return total + float(around.max())

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
    """[K] the largest of the other values."""
    if len(seconds) == 1:
        return np.zeros(1)
    first, second = np.argsort(-seconds, kind="stable")[:2]
    others = np.full(len(seconds), seconds[first])
    others[first] = seconds[second]
    return others


def packed(problem: LengthsProblem, *, by_room: bool) -> Packing | None:
    """The packing of the samples one after the other, the longest first; None where one finds no
    room.

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
    """Change the places of samples of the slowest replica while that makes it faster."""
    for _ in range(MOST_CHANGES):
        seconds = packing.replica_seconds
        slowest = int(seconds.argmax())
        limit = float(seconds[slowest]) * (1 - SAME)
        better = None
        for sample in np.flatnonzero(packing.replica == slowest).tolist():
            run.count(LOOK_SECONDS)
            if run.should_stop:
                return
            value, change = min(packing.changes(sample), key=lambda pair: pair[0])
            if value < limit:
                better = change
                break
        if better is None:
            return
        packing.make(better)


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
