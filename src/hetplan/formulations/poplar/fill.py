"""Loads whose sum is hit exactly, at the least loss.

Given pools of equal devices and the loads that each device may take, load every device with its
greatest admissible load and then take `deficit` samples away again where that loses least (eq. 4 of
the paper, in samples):

    min sum_k sum_j loss_k(d_kj)    s.t. sum_k sum_j d_kj = deficit,  0 <= d_kj <= D_k

loss_k(d) is inf where the load "most - d" is not admissible, so that the same routine decides
whether a total can be reached at all: curves that are not monotone leave holes in the admissible
loads.

n equal devices: any 2c numbers of 0..D split into two halves of c whose sums differ by at most D
(sort them and deal them out alternately). Doubling a table therefore looks at D splits of a sum,
not at all: O(deficit x D) per pool.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetplan.formulations.poplar.problem import Floats


@dataclass(frozen=True)
class Pool:
    """Equal devices, and what each loses by taking less than the most."""

    copies: int  # number of devices
    loss: Floats  # [D + 1] of taking d samples less than the most; inf where not admissible

    @classmethod
    def of(cls, copies: int, worth: Floats, admissible: NDArray[np.bool_]) -> "Pool":
        """A pool by the worth of loads. worth, admissible [loads]: of the loads 0, 1, …; load 0 is
        admissible."""
        end = int(np.flatnonzero(admissible)[-1]) + 1
        loss = np.where(admissible[:end], worth[end - 1] - worth[:end], np.inf)
        return cls(copies, loss[::-1].copy())

    @property
    def most(self) -> int:
        """D, the greatest admissible load of one device."""
        return len(self.loss) - 1


def min_plus(first: Floats, second: Floats, size: int) -> Floats:
    """The (min, +) convolution: out[s] = min_d first[s - d] + second[d] for s = 0..size, inf where
    no d is possible."""
    if len(second) > len(first):
        first, second = second, first
    out = np.full(size + 1, np.inf)
    for d in np.flatnonzero(np.isfinite(second[: size + 1])).tolist():
        end = min(size + 1, d + len(first))
        np.minimum(out[d:end], first[: end - d] + second[d], out=out[d:end])
    return out


def double(table: Floats, width: int, size: int) -> Floats:
    """`min_plus` of `table` with itself over halves that differ by at most `width`."""
    out = np.full(size + 1, np.inf)
    for difference in range(min(width, size, len(table) - 1) + 1):
        # The smaller halves are 0, 1, …; the sums are difference, difference + 2, …
        count = min(len(table) - difference, (size - difference) // 2 + 1)
        smaller, larger = table[:count], table[difference : difference + count]
        sums = out[difference : difference + 2 * count : 2]
        np.minimum(sums, smaller + larger, out=sums)
    return out


class DeficitTable:
    """Least loss of each total deficit 0..size of one pool, and how to attain it.

    `levels` are tables of growing numbers of devices, the last one of all: an even number is twice
    a smaller one (`double`), an odd one has one device more (`min_plus`).
    """

    def __init__(self, pool: Pool, size: int) -> None:
        self.loss = pool.loss[: size + 1]
        numbers = [(pool.copies, min(size, pool.copies * pool.most))]  # devices, greatest deficit
        while numbers[-1][0] > 1:
            numbers.append(next_smaller(*numbers[-1], pool.most))
        _, deficit = numbers.pop()
        self.levels: list[tuple[int, Floats]] = [(1, self.loss[: deficit + 1])]
        for copies, deficit in reversed(numbers):
            _, smaller = self.levels[-1]
            if copies % 2:
                table = min_plus(smaller, self.loss, deficit)
            else:
                table = double(smaller, pool.most, deficit)
            self.levels.append((copies, table))

    @property
    def table(self) -> Floats:
        """[size + 1] least loss of each total deficit, shorter where all devices lose less."""
        return self.levels[-1][1]

    def split(self, deficit: int) -> Counter[int]:
        """{d: devices that lose d samples each}, for a deficit whose entry is finite."""
        lost: Counter[int] = Counter()
        wanted = Counter({deficit: 1})  # deficit -> groups of devices that lose it together
        for level in range(len(self.levels) - 1, 0, -1):
            copies, _ = self.levels[level]
            _, smaller = self.levels[level - 1]
            smaller_groups: Counter[int] = Counter()
            for total, times in wanted.items():
                if copies % 2:  # one device, and a group of the smaller number
                    one = best_split(smaller, self.loss, total)
                    lost[one] += times
                else:  # two groups of the smaller number
                    one = best_split(smaller, smaller, total)
                    smaller_groups[one] += times
                smaller_groups[total - one] += times
            wanted = smaller_groups
        lost.update(wanted)
        return lost


def next_smaller(copies: int, deficit: int, most: int) -> tuple[int, int]:
    """(devices, greatest deficit) of the table from which that of `copies` devices is made. Halves
    differ by at most `most`, the greatest load of one device."""
    if copies % 2:
        return copies - 1, min(deficit, (copies - 1) * most)
    return copies // 2, min((deficit + most) // 2, deficit, copies // 2 * most)


def best_split(first: Floats, second: Floats, total: int) -> int:
    """The d that minimises first[total - d] + second[d]."""
    low, high = max(0, total - len(first) + 1), min(total, len(second) - 1)
    rest = first[total - high : total - low + 1][::-1]  # first[total - d] for d = low..high
    return low + int(np.argmin(rest + second[low : high + 1]))


def least_losses(pools: Sequence[Pool], size: int) -> Floats:
    """[size + 1] least loss of each total deficit over all pools; inf where it cannot be hit."""
    return tables_of_first_pools([DeficitTable(pool, size) for pool in pools], size)[-1]


def tables_of_first_pools(pools: Sequence[DeficitTable], size: int) -> list[Floats]:
    """[pools] least losses of each total deficit of the first pool, of the first two, …; the last
    one for 0..size."""
    tables = [pools[0].table]
    for pool in pools[1:]:
        largest = min(size, len(tables[-1]) + len(pool.table) - 2)
        tables.append(min_plus(tables[-1], pool.table, largest))
    missing = size + 1 - len(tables[-1])  # deficits that all devices together cannot have
    if missing > 0:
        tables[-1] = np.append(tables[-1], np.full(missing, np.inf))
    return tables


def capacity(pools: Sequence[Pool]) -> int:
    """The samples that all devices take at most."""
    return sum(pool.copies * pool.most for pool in pools)


def fill(pools: Sequence[Pool], total: int) -> list[Counter[int]] | None:
    """[pools] how many devices take d less than the most, {d: devices}, at the least loss with
    which all take exactly `total`; None when they cannot."""
    deficit = capacity(pools) - total
    if deficit < 0:
        return None
    of_pool = [DeficitTable(pool, deficit) for pool in pools]
    tables = tables_of_first_pools(of_pool, deficit)
    if not np.isfinite(tables[-1][deficit]):
        return None
    losses: list[Counter[int]] = []  # of the last pool first
    rest = deficit
    for k in range(len(pools) - 1, 0, -1):
        part = best_split(tables[k - 1], of_pool[k].table, rest)
        losses.append(of_pool[k].split(part))
        rest -= part
    losses.append(of_pool[0].split(rest))
    return losses[::-1]
