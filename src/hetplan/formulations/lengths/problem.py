"""Problem `lengths` as arrays for its solvers, with a lower bound by prices.

In every decision the seconds of replica r are at least (1 + f_r / K_r) (a'_r L + b_r Q), where L
are the tokens and Q the squared tokens of its samples and a'_r = a_r + c_r / C_r: it has L / C_r
micro-batches or more, and the longest of at most K_r is no shorter than their mean. So a sample
costs replica r at least u_ri = (1 + f_r / K_r) (a'_r l_i + b_r l_i^2). Prices y_r >= 0 with sum 1
turn this into a bound. The slowest replica takes at least the mean of all by y, hence at least
sum_i min_r y_r u_ri. `prices` raises this sum step by step; every step's bound holds.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hetplan.formulations.lengths.data import LengthsData, LengthsDecision

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Share by which sums in another order than the evaluator's may differ.
ROUNDING = 1e-12
STEPS = 200  # of the ascent of prices; more raise the bound by less than 1e-4 of it


@dataclass(frozen=True)
class Prices:
    """Prices of the replicas and their bound."""

    of_replica: Floats  # [R] y_r
    bound: float  # seconds


class LengthsProblem:
    """An instance as arrays over R replicas and n samples, the longest sample first."""

    def __init__(self, data: LengthsData) -> None:
        self.data, replicas = data, data.replicas
        tokens = np.array(data.samples, np.int64)
        # [n] the number in the data of each sample; equal lengths keep their order
        self.order: Ints = np.argsort(-tokens, kind="stable")
        self.tokens: Ints = tokens[self.order]
        squares = self.tokens.astype(float) ** 2
        self.overhead: Floats = np.array([r.micro_batch_seconds for r in replicas])
        self.fill: Floats = np.array([r.fill for r in replicas])
        self.capacity: Ints = np.array([r.tokens for r in replicas])
        self.slots: Ints = np.array([r.micro_batches for r in replicas])
        linear = np.array([r.token_seconds for r in replicas])
        quadratic = np.array([r.squared_token_seconds for r in replicas])
        # [R, n] seconds that a sample adds to its micro-batch
        self.seconds: Floats = np.outer(linear, self.tokens) + np.outer(quadratic, squares)
        with_overhead = linear + self.overhead / self.capacity
        of_sample = np.outer(with_overhead, self.tokens) + np.outer(quadratic, squares)
        # [R, n] u_ri
        self.least_seconds: Floats = (1 + self.fill / self.slots)[:, None] * of_sample

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(self.tokens)

    @property
    def replicas(self) -> int:
        """Number of replicas."""
        return len(self.fill)

    @cached_property
    def alike(self) -> list[int]:
        """[R] the first replica that equals each one in everything but its name."""
        first: dict[object, int] = {}
        numbers = []
        for r, replica in enumerate(self.data.replicas):
            key = tuple(replica.model_dump(exclude={"name"}).values())
            numbers.append(first.setdefault(key, r))
        return numbers

    def infeasible_because(self) -> str | None:
        """The reason that counting finds why there is no decision; None where it finds none."""
        longest, largest = int(self.tokens[0]), int(self.capacity.max())
        if longest > largest:
            return f"a sample has {longest} tokens, the largest micro-batch holds {largest}"
        room, total = int((self.capacity * self.slots).sum()), int(self.tokens.sum())
        if total > room:
            return f"the samples have {total} tokens, all micro-batches hold {room}"
        return None

    @cached_property
    def prices(self) -> Prices:
        """The prices of the best bound that the ascent finds."""
        costs = self.least_seconds.sum(axis=1)
        # A replica that costs nothing can take everything: no prices give a bound above 0.
        if costs.min() <= 0:
            return Prices(np.full(self.replicas, 1 / self.replicas), 0.0)
        y = 1 / costs
        y /= y.sum()
        best = Prices(y, 0.0)
        columns = np.arange(self.samples)
        for step in range(1, STEPS + 1):
            priced = y[:, None] * self.least_seconds
            cheapest = priced.argmin(axis=0)
            bound = float(priced[cheapest, columns].sum())
            if bound > best.bound:
                best = Prices(y, bound)
            # The seconds that each replica would take are the slope of the bound in its price.
            load = np.bincount(
                cheapest, self.least_seconds[cheapest, columns], minlength=self.replicas
            )
            y = y * np.exp(np.clip(load / load.mean() - 1, -2, 2) / (2 * step))
            y = y / y.sum()
        return best

    @cached_property
    def bound(self) -> float:
        """A lower bound on the objective: that of the prices, and the longest sample alone."""
        alone = (1 + self.fill) * (self.overhead + self.seconds[:, 0])
        fits = self.capacity >= self.tokens[0]
        longest = float(alone[fits].min()) if fits.any() else 0.0
        return max(self.prices.bound, longest) * (1 - ROUNDING)

    def decision(self, placed: list[list[list[int]]]) -> LengthsDecision:
        """The decision with the samples in each micro-batch. placed: [replica][micro-batch] samples
        by their place in `tokens`."""
        micro_batches = [
            [sorted(int(self.order[i]) for i in batch) for batch in replica if batch]
            for replica in placed
        ]
        return LengthsDecision(micro_batches=micro_batches)
