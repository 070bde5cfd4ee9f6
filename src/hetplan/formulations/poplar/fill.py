"""Loads of devices that sum to an exact total and have the greatest worth (Poplar, eq. 4, in
samples).

A pool k has equal devices, whose loads are admissible numbers of samples, D_k at most. A load has a
worth. Every device first gets its greatest load D_k. Then the devices give up `deficit` samples
together, so that the total is exact: device j of pool k gives up d_kj samples and loses the worth
loss_k(d_kj).

    min sum_k sum_j loss_k(d_kj)    s.t. sum_k sum_j d_kj = deficit,  0 <= d_kj <= D_k

loss_k(d) is inf where the load D_k - d is not admissible. Admissible loads have holes where a
device's curve of seconds is not monotone, so that some totals cannot be reached; their loss is inf.

A table has the least loss of each deficit of several equal devices. The table of 2c devices follows
from the table of c devices: any 2c numbers in 0..D split into two halves of c numbers whose sums
differ by at most D (sort the numbers and deal them out alternately). It is enough to look at D + 1
splits of each sum, so that a pool takes O(deficit x D) operations per doubling.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetplan.formulations.poplar.problem import Floats


@dataclass(frozen=True)
class Pool:
    """Equal devices, and the worth that each loses by giving up samples."""

    copies: int  # number of devices
    # [D + 1] worth that a device loses by giving up d samples of load D; inf where load D - d is
    # not admissible
    loss: Floats

    @classmethod
    def of(cls, copies: int, worth: Floats, admissible: NDArray[np.bool_]) -> "Pool":
        """The pool of devices whose loads 0, 1, … have these worths. worth, admissible: one entry
        for each load; load 0 is admissible."""
        most = int(np.flatnonzero(admissible)[-1])
        loss_of_load = worth[most] - worth[: most + 1]
        loss_of_load = np.where(admissible[: most + 1], loss_of_load, np.inf)
        return cls(copies, loss_of_load[::-1].copy())  # load D - d at index d

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
    """The (min, +) convolution of `table` with itself, only over splits of a sum into halves that
    differ by at most `width`."""
    out = np.full(size + 1, np.inf)
    for difference in range(min(width, size, len(table) - 1) + 1):
        # The smaller halves are 0, 1, …, and their sums are difference, difference + 2, …
        count = min(len(table) - difference, (size - difference) // 2 + 1)
        smaller, larger = table[:count], table[difference : difference + count]
        sums = out[difference : difference + 2 * count : 2]
        np.minimum(sums, smaller + larger, out=sums)
    return out


class DeficitTable:
    """The least loss of each deficit 0..size of one pool, and the devices' samples that attain it.

    The table of an even number of devices follows from that of half of the devices (`double`), the
    table of an odd number from that of one device less (`min_plus`).
    """

    def __init__(self, pool: Pool, size: int) -> None:
        self.loss = pool.loss[: size + 1]  # of one device
        # (devices, greatest deficit) of each table, the table of all devices first.
        sizes = [(pool.copies, min(size, pool.copies * pool.most))]
        while sizes[-1][0] > 1:
            copies, deficit = sizes[-1]
            sizes.append(next_smaller(copies, deficit, pool.most))
        _, deficit = sizes.pop()
        # (devices, table) for growing numbers of devices, from one device to all
        self.levels: list[tuple[int, Floats]] = [(1, self.loss[: deficit + 1])]
        for copies, deficit in reversed(sizes):
            _, smaller = self.levels[-1]
            if copies % 2:
                table = min_plus(smaller, self.loss, deficit)
            else:
                table = double(smaller, pool.most, deficit)
            self.levels.append((copies, table))

    @property
    def table(self) -> Floats:
        """[size + 1] least loss of each deficit of all devices; shorter where the devices together
        have fewer samples to give up."""
        _, table = self.levels[-1]
        return table

    def split(self, deficit: int) -> Counter[int]:
        """{d: number of devices that give up d samples each} at the least loss. The loss of
        `deficit` in the table is finite."""
        devices: Counter[int] = Counter()
        # Deficit -> groups of devices that give it up together. The groups shrink from all devices
        # to one, level by level.
        groups = Counter({deficit: 1})
        for level in range(len(self.levels) - 1, 0, -1):
            copies, _ = self.levels[level]
            _, smaller = self.levels[level - 1]
            smaller_groups: Counter[int] = Counter()
            for total, count in groups.items():
                if copies % 2:  # one device, and a group of the smaller number
                    part = best_split(smaller, self.loss, total)
                    devices[part] += count
                else:  # two groups of the smaller number
                    part = best_split(smaller, smaller, total)
                    smaller_groups[part] += count
                smaller_groups[total - part] += count
            groups = smaller_groups
        devices.update(groups)
        return devices


def next_smaller(copies: int, deficit: int, most: int) -> tuple[int, int]:
    """(devices, greatest deficit) of the table from which the table of `copies` devices follows.

    deficit: the greatest deficit of `copies` devices. most: the greatest load of one device, by
    which two halves differ at most.
    """
    if copies % 2:
        return copies - 1, min(deficit, (copies - 1) * most)
    half = copies // 2
    larger_half = (deficit + most) // 2
    return half, min(larger_half, deficit, half * most)


def best_split(first: Floats, second: Floats, total: int) -> int:
    """The d that minimises first[total - d] + second[d], the smallest of equal ones."""
    low, high = max(0, total - len(first) + 1), min(total, len(second) - 1)
    d = np.arange(low, high + 1)  # those with entries in both tables
    return low + int(np.argmin(first[total - d] + second[d]))


def least_losses(pools: Sequence[Pool], size: int) -> Floats:
    """[size + 1] least loss of each deficit of all pools together; inf where the pools cannot have
    it."""
    return tables_of_first_pools([DeficitTable(pool, size) for pool in pools], size)[-1]


def tables_of_first_pools(pools: Sequence[DeficitTable], size: int) -> list[Floats]:
    """[pools] tables of the least loss of each deficit, of the first pool, of the first two pools
    together, and so on. The last table has the deficits 0..size."""
    tables = [pools[0].table]
    for pool in pools[1:]:
        largest = min(size, len(tables[-1]) + len(pool.table) - 2)
        tables.append(min_plus(tables[-1], pool.table, largest))
    missing = size + 1 - len(tables[-1])  # deficits larger than all loads together
    if missing > 0:
        tables[-1] = np.append(tables[-1], np.full(missing, np.inf))
    return tables


def capacity(pools: Sequence[Pool]) -> int:
    """The sum of all devices' greatest loads, in samples."""
    return sum(pool.copies * pool.most for pool in pools)


def fill(pools: Sequence[Pool], total: int) -> list[Counter[int]] | None:
    """For each pool {d: number of devices that give up d samples of their greatest load}, so that
    all loads sum to `total` at the least loss; None where no loads do."""
    deficit = capacity(pools) - total
    if deficit < 0:
        return None
    pool_tables = [DeficitTable(pool, deficit) for pool in pools]
    tables = tables_of_first_pools(pool_tables, deficit)
    if not np.isfinite(tables[-1][deficit]):
        return None
    reductions: list[Counter[int]] = []  # the last pool comes first
    rest = deficit  # samples that the pools 0 to k give up together
    for k in range(len(pools) - 1, 0, -1):
        part = best_split(tables[k - 1], pool_tables[k].table, rest)
        reductions.append(pool_tables[k].split(part))
        rest -= part
    reductions.append(pool_tables[0].split(rest))
    return reductions[::-1]
