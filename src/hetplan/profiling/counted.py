"""One operator as a trace of a module counted it: sizes that grow in straight lines with the
samples of a micro-batch.

Units: elements of the training precision moved to and from memory (an int64 counts as so many of
them), FLOPs of matrix products. A traced operator belongs to one pass, and tensor parallelism
leaves it whole.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Growth:
    """fixed + each * samples."""

    fixed: float
    each: float

    def at(self, samples: int) -> float:
        """For a micro-batch."""
        return self.fixed + self.each * samples


NOTHING = Growth(0.0, 0.0)


@dataclass(frozen=True)
class Sizes:
    """`count` products of an m x k with a k x n matrix."""

    count: Growth
    m: Growth
    k: Growth
    n: Growth

    def at(self, samples: int) -> tuple[float, float, float, float]:
        """(count, m, k, n) of a micro-batch."""
        return self.count.at(samples), self.m.at(samples), self.k.at(samples), self.n.at(samples)


@dataclass(frozen=True)
class Counted:
    """An operator of one pass. read, written: elements. product: None for what only moves memory.

    ruled: False where no rule says what the operator does; it then counts as the memory that it
    reads and writes.
    """

    name: str
    backward: bool
    read: Growth
    written: Growth
    product: Sizes | None = None
    ruled: bool = True

    def flops(self, samples: int = 1) -> float:
        """2 count m k n; 0 for what is no product."""
        if self.product is None:
            return 0.0
        count, m, k, n = self.product.at(samples)
        return 2.0 * count * m * k * n

    def all_moved(self, samples: int = 1) -> float:
        """Elements read and written, in whichever pass it is."""
        return self.read.at(samples) + self.written.at(samples)

    def moved(self, micro_batch: int = 1, tensor: int = 1) -> float:
        """Elements moved in the forward pass."""
        return 0.0 if self.backward else self.all_moved(micro_batch)

    def moved_back(self, micro_batch: int = 1, tensor: int = 1) -> float:
        """Elements moved in the backward pass."""
        return self.all_moved(micro_batch) if self.backward else 0.0
