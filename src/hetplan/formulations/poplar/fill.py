"""Which devices take less than their most, exactly: the sum of all loads has to be hit, at the
least loss.

Given pools of equal devices and the loads that each may take, load every device with its greatest
admissible load and then take `deficit` samples away again where that loses least (eq. 4 of the
paper, in samples):

    min sum_k sum_j loss_k(d_kj)    s.t. sum_k sum_j d_kj = deficit,  0 <= d_kj <= D_k

loss_k(d) is inf where the load "most - d" is not admissible, so that the same routine decides
whether a total can be reached at all: curves that are not monotone leave holes in the admissible
loads. n equal devices: any 2c numbers of 0..D split into two halves of c whose sums differ by at
most D (sort them and deal them out alternately), so doubling looks at D splits of a sum, not at
all: O(deficit x D) per pool.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetplan.formulations.poplar.problem import Floats


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
