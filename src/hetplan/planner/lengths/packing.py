"""Three ways to put the samples of an iteration into micro-batches.

`padded`   Every replica takes its planned number of samples, in the order drawn. Each micro-batch
           has the planned number of them, padded to the longest of them; where that is too large
           for its memory, fewer.
`packed`   As before, but without padding: the replica's samples, one after the other, are cut into
           as many micro-batches as planned, of about equally many tokens; into more where they are
           too large for its memory.
`balanced` All samples are divided among all micro-batches of all replicas such that the slowest
           replica ends as early as possible (problem `lengths`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetplan.formulations.lengths.data import LengthsDecision
from hetplan.formulations.lengths.family import FAMILY
from hetplan.planner.lengths.costs import Batch, PlanCosts
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Result, Run, relative_gap

# As many micro-batches as planned, times at most this. Micro-batches hold as many tokens as planned
# or more, so that a draw of twice the mean is beyond any that occurs.
MOST_TIMES = 4
SEARCH_SECONDS = 0.5  # counted seconds of the search for one balance


@dataclass(frozen=True)
class Packed:
    """Samples in micro-batches."""

    batches: list[list[Batch]]  # [replica][micro-batch] with samples
    gap: float | None = None  # of a balance: how far its bound is below it, as a share

    @property
    def tokens(self) -> int:
        """Tokens of all micro-batches, with padding."""
        return sum(batch.tokens for row in self.batches for batch in row)


def in_shares(costs: PlanCosts, samples: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """(replica, its samples): the planned number of each replica, in the order drawn."""
    first = 0
    for r, replica in enumerate(costs.plan.replicas):
        yield r, list(samples[first : first + replica.samples])
        first += replica.samples


def padded(costs: PlanCosts, samples: Sequence[int]) -> Packed | None:
    """The micro-batches of padded samples; None where one sample is too large for its replica."""
    batches = []
    for r, own in in_shares(costs, samples):
        most, capacity = costs.rows[r], costs.capacities[r]
        row: list[list[int]] = [[]]
        for length in own:
            joined = [*row[-1], length]
            if len(joined) > most or len(joined) * max(joined) > capacity:
                row.append([length])
            else:
                row[-1] = joined
        if any(length > capacity for length in own):
            return None
        batches.append([padded_batch(lengths) for lengths in row if lengths])
    return Packed(batches)


def padded_batch(lengths: Sequence[int]) -> Batch:
    """The micro-batch of samples that are padded to the longest of them."""
    longest = max(lengths)
    return Batch(len(lengths) * longest, len(lengths) * longest**2)


def packed(costs: PlanCosts, samples: Sequence[int]) -> Packed | None:
    """The micro-batches of samples in the order drawn, without padding; None where one sample is
    too large for its replica."""
    batches = []
    for r, own in in_shares(costs, samples):
        capacity, steps = costs.capacities[r], costs.plan.replicas[r].steps
        row: list[list[int]] = []
        part, before, total = -1, 0, sum(own)  # part: of the micro-batches planned
        for length in own:
            # the part in which the middle of the sample lies
            part_of_this = (2 * before + length) * steps // (2 * total)
            if part_of_this != part or sum(row[-1]) + length > capacity:
                row.append([])
            row[-1].append(length)
            part, before = part_of_this, before + length
        if any(length > capacity for length in own):
            return None
        batches.append([packed_batch(lengths) for lengths in row])
    return Packed(batches)


def packed_batch(lengths: Sequence[int]) -> Batch:
    """The micro-batch of samples one after the other, none of which attends to another."""
    return Batch(sum(lengths), sum(length**2 for length in lengths))


def balanced(costs: PlanCosts, samples: Sequence[int], run: Run) -> Packed | None:
    """The balanced micro-batches; None where none are found that hold all samples."""
    result = balance(costs, samples, run)
    if result is None or result.decision is None:
        return None
    batches = [
        [packed_batch([samples[i] for i in batch]) for batch in row if batch]
        for row in result.decision.micro_batches
    ]
    return Packed(batches, relative_gap(result.objective, result.bound))


def balance(costs: PlanCosts, samples: Sequence[int], run: Run) -> Result[LengthsDecision] | None:
    """The result of a counted search, with the fewest multiple of the planned micro-batches that
    holds all samples; None where none does."""
    most = 1 if costs.plan.schedule == "explicit" else MOST_TIMES
    for times in range(1, most + 1):
        data = costs.data(samples, times)
        if data is None:
            return None
        result = solve(FAMILY, data, "auto", run.part(seconds=SEARCH_SECONDS))
        if result.decision is not None:
            return result
    return None
