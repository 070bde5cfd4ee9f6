"""Plans: from counts per group of equal devices to a decision that names every device; the least
under-utilisation of a given time; and a bound that needs no search.

Shares  A share of g samples in micro-batches of b takes w(g, b) = floor(g / b) t(b) + t(g mod b)
        seconds, added as the evaluator adds it, so that both agree to the bit;
        h(g) = min_b w(g, b).
Ties    Every exact method ends here: of the plans of its time (ZeRO 2, 3: of its steps' times) the
        one of least under-utilisation, eq. 4 (`fill`).
Bound   G / (sum of peak speeds) and C for each step that is needed at least (one for ZeRO 0 and 1):
        no device is ever faster than its peak p_k = max_b b / t_k(b).
Source: hetplan, for Poplar eq. 1 to 4 (AAAI 2025).

`fill` says which devices take less than their most, exactly: the sum of all loads has to be hit,
at the least loss. Given pools of equal devices and the loads that each may take, load every device
with its greatest admissible load and then take `deficit` samples away again where that loses least
(eq. 4 of the paper, in samples):

    min sum_k sum_j loss_k(d_kj)    s.t. sum_k sum_j d_kj = deficit,  0 <= d_kj <= D_k

loss_k(d) is inf where the load "most - d" is not admissible, so that the same routine decides
whether a total can be reached at all: curves that are not monotone leave holes in the admissible
loads. n equal devices: any 2c numbers of 0..D split into two halves of c whose sums differ by at
most D (sort them and deal them out alternately), so doubling looks at D splits of a sum, not at
all: O(deficit x D) per pool.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hetplan.formulations.poplar.data import PoplarDecision, Share, Step
from hetplan.formulations.poplar.problem import SAME_TIME, Floats, Group, Ints, PoplarProblem


@dataclass(frozen=True)
class Pool:
    """`copies` equal devices; loss [D + 1] of taking d less than the most, inf where not
    admissible."""

    copies: int
    loss: Floats

    @classmethod
    def of(cls, copies: int, worth: Floats, admissible: NDArray[np.bool_]) -> "Pool":
        """worth, admissible [loads] of the loads 0, 1, …; load 0 is admissible."""
        end = int(np.flatnonzero(admissible)[-1]) + 1
        loss = np.where(admissible[:end], worth[end - 1] - worth[:end], np.inf)
        return cls(copies, loss[::-1].copy())

    @property
    def most(self) -> int:
        """D, the greatest load of one device."""
        return len(self.loss) - 1


def merge(first: Floats, second: Floats, size: int) -> Floats:
    """out[s] = min_d first[s - d] + second[d] for s = 0..size (inf: no such s)."""
    if len(second) > len(first):
        first, second = second, first
    out = np.full(size + 1, np.inf)
    for d in np.flatnonzero(np.isfinite(second[: size + 1])).tolist():
        end = min(size + 1, d + len(first))
        np.minimum(out[d:end], first[: end - d] + second[d], out=out[d:end])
    return out


def double(table: Floats, width: int, size: int) -> Floats:
    """`merge` of `table` with itself over halves that differ by at most `width`."""
    out = np.full(size + 1, np.inf)
    for more in range(min(width, size, len(table) - 1) + 1):
        count = min(len(table) - more, (size - more) // 2 + 1)
        sums = out[more : more + 2 * count : 2]
        np.minimum(sums, table[:count] + table[more : more + count], out=sums)
    return out


class Folded:
    """Least loss of each total deficit 0..size of one pool, and how to attain it."""

    def __init__(self, pool: Pool, size: int) -> None:
        self.loss = pool.loss[: size + 1]
        # (devices, greatest deficit wanted)
        chain = [(pool.copies, min(size, pool.copies * pool.most))]
        while chain[-1][0] > 1:
            copies, wanted = chain[-1]
            fewer = copies // 2 if copies % 2 == 0 else copies - 1
            half = (wanted + pool.most) // 2 if copies % 2 == 0 else wanted
            chain.append((fewer, min(half, wanted, fewer * pool.most)))
        self.levels: list[tuple[int, Floats]] = [(1, self.loss[: chain[-1][1] + 1])]
        for copies, wanted in reversed(chain[:-1]):
            below, odd = self.levels[-1][1], copies % 2 == 1
            table = merge(below, self.loss, wanted) if odd else double(below, pool.most, wanted)
            self.levels.append((copies, table))

    @property
    def table(self) -> Floats:
        """Least loss per total deficit."""
        return self.levels[-1][1]

    def split(self, deficit: int) -> Counter[int]:
        """How many devices lose d samples each, for a deficit whose entry is finite."""
        lost: Counter[int] = Counter()
        wanted = Counter({deficit: 1})
        for (copies, _), (_, below) in zip(self.levels[:0:-1], self.levels[-2::-1], strict=True):
            parts: Counter[int] = Counter()
            # an odd number is one device more than the number below, an even one twice as many
            other, goes_on = (self.loss, lost) if copies % 2 else (below, parts)
            for total, times in wanted.items():
                one = best_split(below, other, total)
                goes_on[one] += times
                parts[total - one] += times
            wanted = parts
        lost.update(wanted)
        return lost


def best_split(first: Floats, second: Floats, total: int) -> int:
    """The d that minimises first[total - d] + second[d]."""
    low, high = max(0, total - len(first) + 1), min(total, len(second) - 1)
    return low + int(
        np.argmin(first[total - high : total - low + 1][::-1] + second[low : high + 1])
    )


def least_losses(pools: Sequence[Pool], size: int) -> Floats:
    """Least loss for each total deficit 0..size over all pools; inf where it cannot be hit."""
    return _stages([Folded(pool, size) for pool in pools], size)[-1]


def _stages(folded: Sequence[Folded], size: int) -> list[Floats]:
    tables = [folded[0].table]
    for pool in folded[1:]:
        tables.append(
            merge(tables[-1], pool.table, min(size, len(tables[-1]) + len(pool.table) - 2))
        )
    if len(tables[-1]) <= size:  # more than all devices together can lose
        tables[-1] = np.concatenate((tables[-1], np.full(size + 1 - len(tables[-1]), np.inf)))
    return tables


def capacity(pools: Sequence[Pool]) -> int:
    """What all devices take at most."""
    return sum(pool.copies * pool.most for pool in pools)


def fill(pools: Sequence[Pool], total: int) -> list[Counter[int]] | None:
    """[pools] how many devices take d less than the most, {d: devices}, at the least loss with
    which all take exactly `total`; None when they cannot."""
    deficit = capacity(pools) - total
    if deficit < 0:
        return None
    folded = [Folded(pool, deficit) for pool in pools]
    tables = _stages(folded, deficit)
    if not np.isfinite(tables[-1][deficit]):
        return None
    losses: list[Counter[int]] = []
    rest = deficit
    for k in range(len(pools) - 1, 0, -1):
        part = best_split(tables[k - 1], folded[k].table, rest)
        losses.append(folded[k].split(part))
        rest -= part
    losses.append(folded[0].split(rest))
    return losses[::-1]


# Bounds are computed in another order than the evaluator's sums.
ROUNDING = 1e-12

MicroBatch = Callable[[int, int], int]


def shares_decision(
    problem: PoplarProblem, loads: Sequence[Mapping[int, int]], micro_batch: MicroBatch
) -> PoplarDecision:
    """ZeRO 0 and 1. loads[k]: {samples: devices of group k}; micro_batch(k, samples) > 0 for
    samples > 0."""
    idle = Share(samples=0, micro_batch=0)
    shares = [idle] * problem.devices
    for k, (group, row) in enumerate(zip(problem.groups, loads, strict=True)):
        members = iter(group.members)
        for samples, times in sorted(row.items(), reverse=True):
            share = Share(samples=samples, micro_batch=micro_batch(k, samples)) if samples else idle
            for _ in range(times):
                shares[next(members)] = share
    return PoplarDecision(devices=shares)


def steps_decision(
    problem: PoplarProblem, rows: Sequence[tuple[int, Sequence[Mapping[int, int]]]]
) -> PoplarDecision:
    """ZeRO 2 and 3. rows: (steps, loads), loads[k] = {b: (device, step) pairs of group k}.

    The pairs of a group add up to steps x n_k. In descending order of b they fill one step after
    the other, so that only those differ in which some group's b changes; steps that stay empty are
    left out.
    """
    steps: list[Step] = []
    for count, loads in rows:
        sizes = [sorted((b for b, times in row.items() if times), reverse=True) for row in loads]
        ends = [np.cumsum([row[b] for b in own]) for own, row in zip(sizes, loads, strict=True)]
        changes = {0, count}
        for group, last in zip(problem.groups, ends, strict=True):
            changes |= {*(last // group.count).tolist(), *(-(-last // group.count)).tolist()}
        for here, after in pairwise(sorted(changes)):
            micro_batches = np.zeros(problem.devices, np.int64)
            for group, own, last in zip(problem.groups, sizes, ends, strict=True):
                pairs = here * group.count + np.arange(group.count)
                chosen = np.searchsorted(last, pairs, side="right")
                micro_batches[list(group.members)] = np.array(own)[chosen]
            if micro_batches.any():
                steps.append(Step(count=after - here, micro_batches=micro_batches.tolist()))
    return PoplarDecision(steps=steps)


def loads_of(most: int, losses: Counter[int]) -> Counter[int]:
    """{load: devices} from {samples less than the most: devices}."""
    return Counter({most - d: times for d, times in losses.items() if times})


def fluid_seconds(problem: PoplarProblem) -> float:
    """What every plan takes at least, seconds."""
    fullest = sum(group.count * group.largest for group in problem.groups)
    steps = -(-problem.total // fullest) if problem.stepwise else 1
    return (problem.total / problem.speed + steps * problem.comm) * (1 - ROUNDING)


def _by_micro_batch(seconds: Floats, most: int) -> Iterator[tuple[int, Floats]]:
    """(b, w(b..most, b)) for every micro-batch, the largest first; seconds [mbs + 1]: t."""
    for b in range(min(len(seconds) - 1, most), 0, -1):
        shares = np.arange(b, most + 1)
        yield b, shares // b * seconds[b] + seconds[shares % b]


def share_seconds(seconds: Floats, most: int) -> Floats:
    """h(g) for g = 0..most."""
    best = np.full(most + 1, np.inf)
    best[0] = 0.0
    for b, work in _by_micro_batch(seconds, most):
        np.minimum(best[b:], work, out=best[b:])
    return best


def busiest(seconds: Floats, most: int, limit: float) -> tuple[Floats, Ints]:
    """H(g) = max_b w(g, b) within limit for g = 0..most, and the largest b that attains it.

    -inf and 0 where no b keeps within the limit. Both comparisons allow SAME_TIME of the limit.
    """
    best, batch = np.full(most + 1, -np.inf), np.zeros(most + 1, np.int64)
    best[0], slack = 0.0, SAME_TIME * limit
    for b, work in _by_micro_batch(seconds, most):
        longer = (work <= limit + slack) & (work > best[b:] + slack)
        best[b:][longer] = work[longer]
        batch[b:][longer] = b
    return best, batch


def largest_shares(problem: PoplarProblem, limit: float) -> list[int]:
    """Per group a share that no device exceeds within `limit` seconds: h(g) >= g / p."""
    return [min(problem.total, int(limit * g.peak * (1 + 1e-12)) + 1) for g in problem.groups]


def shares_within(problem: PoplarProblem, limit: float) -> PoplarDecision:
    """ZeRO 0, 1: the plan of least under-utilisation within `limit` seconds, which some plan keeps
    to."""
    most = largest_shares(problem, limit)
    longest = [busiest(g.seconds, m, limit) for g, m in zip(problem.groups, most, strict=True)]
    pools = [
        Pool.of(group.count, group.peak * worth, np.isfinite(worth))
        for group, (worth, _) in zip(problem.groups, longest, strict=True)
    ]
    losses = fill(pools, problem.total)
    assert losses is not None, "some shares reach the sum within this time"
    loads = [loads_of(pool.most, row) for pool, row in zip(pools, losses, strict=True)]
    return shares_decision(problem, loads, lambda k, g: int(longest[k][1][g]))


def steps_within(problem: PoplarProblem, counts: Mapping[float, int]) -> PoplarDecision | None:
    """ZeRO 2, 3: the plan of least under-utilisation with so many steps of each time; None where
    they cannot take exactly G samples."""
    pools = [pool for limit, count in counts.items() for pool in pools_of(problem, limit, count)]
    losses = fill(pools, problem.total)
    if losses is None:
        return None
    loads = iter(loads_of(pool.most, row) for pool, row in zip(pools, losses, strict=True))
    return steps_decision(
        problem, [(count, [next(loads) for _ in problem.groups]) for count in counts.values()]
    )


def pools_of(problem: PoplarProblem, limit: float, count: int = 1) -> list[Pool]:
    """The admissible micro-batches of each group in `count` steps of time `limit`, worth busy time
    at peak speed."""

    def pool(group: Group) -> Pool:
        seconds = group.seconds[: problem.total + 1]
        within = seconds <= limit * (1 + SAME_TIME)
        return Pool.of(group.count * count, group.peak * seconds, within)

    return [pool(group) for group in problem.groups]
