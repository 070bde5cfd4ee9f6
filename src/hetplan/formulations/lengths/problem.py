"""Problem `lengths` as arrays for its solvers, with a lower bound by prices.

Room   s_ri = a_r l_i + b_r l_i^2 is the work of sample i on replica r. Its fill seconds are
       s'_ri = a'_r l_i + b'_r l_i^2 >= f_r s_ri for f_r = min_i s'_ri / s_ri. With m micro-batches
       replica r ends within T seconds only if its work W satisfies
       m c_r + W + c'_r + f_r W / m <= T, because the longest fill is no shorter than the mean; and
       W <= m v_r, where v_r is the most work of C_r tokens in samples no longer than the longest.
       Let W_r(T) be the most work over m in 1..K_r; it grows with T.
Prices For any z_r >= 0, all samples end within T only if sum_i min_r z_r s_ri <= sum_r z_r W_r(T),
       since the left side is no more than the priced work of any decision. The least such T is a
       lower bound. `prices` looks for prices with a high one; every step's bound holds.
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
STEPS = 60  # of the ascent of prices; further steps raise the bound by less than 0.1 %
HALVINGS = 40  # of the interval in which the least T lies


@dataclass(frozen=True)
class Prices:
    """Prices of the replicas and their bound."""

    of_replica: Floats  # [R] z_r
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
        self.fill_overhead: Floats = np.array([r.fill_micro_batch_seconds for r in replicas])
        self.capacity: Ints = np.array([r.tokens for r in replicas])
        self.slots: Ints = np.array([r.micro_batches for r in replicas])
        linear = np.array([r.token_seconds for r in replicas])
        quadratic = np.array([r.squared_token_seconds for r in replicas])
        # [R, n] s_ri: seconds that a sample adds to its micro-batch
        self.seconds: Floats = np.outer(linear, self.tokens) + np.outer(quadratic, squares)
        fill_linear = np.array([r.fill_token_seconds for r in replicas])
        fill_quadratic = np.array([r.fill_squared_token_seconds for r in replicas])
        # [R, n] s'_ri: fill seconds that a sample adds to its micro-batch
        self.fill_seconds: Floats = np.outer(fill_linear, self.tokens)
        self.fill_seconds += np.outer(fill_quadratic, squares)
        # [R] v_r
        longest = np.minimum(self.capacity, self.tokens[0])
        self.most_work: Floats = (linear + quadratic * longest) * self.capacity

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(self.tokens)

    @property
    def replicas(self) -> int:
        """Number of replicas."""
        return len(self.overhead)

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

    def room(self, seconds: float) -> Floats:
        """[R] W_r(T): the most work that each replica ends within T = `seconds`."""
        m = np.arange(1, int(min(self.slots.max(), self.samples)) + 1)
        within = seconds - self.overhead[:, None] * m - self.fill_overhead[:, None]
        work = np.minimum(within / (1 + self.ratio[:, None] / m), self.most_work[:, None] * m)
        work = np.where(m <= self.slots[:, None], work, 0.0)
        return np.asarray(np.maximum(work, 0.0).max(axis=1))

    @cached_property
    def ratio(self) -> Floats:
        """[R] f_r, rounded down; 0 where a replica has samples without work."""
        work = np.where(self.seconds > 0, self.seconds, np.inf)
        return np.asarray((self.fill_seconds / work).min(axis=1) * (1 - ROUNDING))

    def least_seconds(self, prices: Floats, work: float, low: float) -> float:
        """The least T >= low with sum_r z_r W_r(T) >= work, rounded down. prices: [R] z_r."""
        if prices @ self.room(low) >= work:
            return low
        high = self.longest_seconds
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            if prices @ self.room(middle) < work:
                low = middle
            else:
                high = middle
        return low

    @cached_property
    def longest_seconds(self) -> float:
        """Seconds that no replica exceeds under any decision."""
        most = self.seconds.sum(axis=1) + self.overhead * np.minimum(self.slots, self.samples)
        return float((most + self.fill_seconds.sum(axis=1) + self.fill_overhead).max())

    @cached_property
    def prices(self) -> Prices:
        """The prices of the best bound that the ascent finds."""
        work = self.seconds.sum(axis=1)
        # A replica without work for any sample can take everything: no prices bound that.
        if work.min() <= 0:
            return Prices(np.zeros(self.replicas), 0.0)
        z = 1 / work
        best = Prices(z / z.sum(), 0.0)
        columns = np.arange(self.samples)
        for step in range(1, STEPS + 1):
            z = z / z.sum()
            priced = z[:, None] * self.seconds
            cheapest = priced.argmin(axis=0)
            least_work = float(priced[cheapest, columns].sum()) * (1 - ROUNDING)
            bound = self.least_seconds(z, least_work, best.bound)
            if bound > best.bound:
                best = Prices(z, bound)
            # A replica that would take more work than it has room for becomes dearer.
            load = np.bincount(cheapest, self.seconds[cheapest, columns], minlength=self.replicas)
            excess = load / np.maximum(self.room(bound), ROUNDING * load.max()) - 1
            z = z * np.exp(np.clip(excess, -2, 2) / (2 * step))
        return best

    @cached_property
    def bound(self) -> float:
        """A lower bound on the objective: that of the prices, and the longest sample alone."""
        alone = self.overhead + self.fill_overhead + self.seconds[:, 0] + self.fill_seconds[:, 0]
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
