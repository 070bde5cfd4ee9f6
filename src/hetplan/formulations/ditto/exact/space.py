"""What every interval of the exact search shares: vectors of devices, options, candidates for θ,
windows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hetplan.errors import UnsupportedError
from hetplan.formulations.ditto.exact.paths import reach_back, reach_forward
from hetplan.formulations.ditto.problem import DittoProblem, Floats, Ints, tie

# Tables over vectors of devices must stay well under 2 GB.
MOST_VECTORS = 4_000_000


@dataclass(frozen=True)
class Windows:
    """Where stages may begin and end when θ lies in [low, high].

    after, before [C, R, L + 1]: the last layer of a stage that begins at a, behind k* (as long as
    `high`, ties included) or in front of it. back [C, R, L + 1]: the first layer of a stage behind
    k* that ends at b. peak_first [R, L + 1]: the least last layer that makes a stage beginning at a
    last `low` at least.
    """

    low: float
    high: float
    after: Ints
    before: Ints
    back: Ints
    peak_first: Ints


@dataclass(frozen=True)
class Charge:
    """What the relaxation of an interval [low, high] charges: 2 t - credit behind k*, base + rate t
    for k* itself.

    peak: (base, rate). Truly it is 2 t - θ for each of the stages behind, at most A = S_max - 1 of
    them, and N_b θ with θ = t. Credit `low` charges each of them θ - low too much, A (θ - low) at
    most, which k* is charged less:
    (N_b - A) t + A low. Credit `high` charges them no more than their due, so that k* pays all of
    it: N_b t. Both sums are at most T, and both are T where low = high.
    """

    credit: float
    peak: tuple[float, float]


@dataclass(frozen=True)
class States:
    """The states of an interval, ragged: of vector u the layers first[u] .. last[u], at offset[u];
    `total` of them."""

    first: Ints
    last: Ints
    offset: Ints
    total: int


class Space:
    """Vectors of devices used, mixed radix over the kinds; `counted`: a last coordinate counts the
    stages.

    Stages are counted where their number matters: memory (a stage holds as many micro-batches as
    there are stages behind it, itself included) or fewer micro-batches than stages would be
    possible.
    """

    def __init__(self, problem: DittoProblem, *, counted: bool | None = None) -> None:
        self.problem = p = problem
        needed = p.has_memory or min(p.layers, int(p.devices.sum())) > p.micro_batches
        self.counted = needed if counted is None else counted
        # Whether single values of θ are solved exactly, or only relaxed for want of a count.
        self.exact = self.counted or not needed
        # A stage takes at most the largest group, so more devices than layers times that are of no
        # use.
        most = p.layers * (int(p.option_devices.max()) if p.options else 0)
        self.devices = np.minimum(p.devices, most)
        sizes = [int(d) + 1 for d in self.devices] + ([p.most_stages + 1] if self.counted else [])
        self.vectors = int(np.prod(np.array(sizes, dtype=object))) if sizes else 1
        if self.vectors > MOST_VECTORS:
            raise UnsupportedError(
                f"{self.vectors} vectors of devices are too many for method exact",
                expected=f"at most {MOST_VECTORS} (cp-sat and milp have no such limit)",
            )
        self.coords = np.indices(sizes).reshape(len(sizes), -1).T.astype(np.int64).copy()
        self.strides = np.array(
            [int(np.prod(sizes[i + 1 :])) for i in range(len(sizes))], dtype=np.int64
        )
        self.kind = np.ascontiguousarray(p.option_kind, dtype=np.int64)
        self.size = np.ascontiguousarray(p.option_devices, dtype=np.int64)
        self.stages = self._stages()
        self.delta = self.size * self.strides[self.kind] + (1 if self.counted else 0)

    def _stages(self) -> Ints:
        """[U] the stages so far, or without a count the least number that uses u up (0 where nobody
        asks)."""
        p = self.problem
        if self.counted:
            return np.ascontiguousarray(self.coords[:, -1])
        if not p.has_memory:
            return np.zeros(self.vectors, dtype=np.int64)
        largest = int(p.option_devices.max())
        least: Ints = (-(-self.coords // largest)).sum(axis=1)
        return np.minimum(least, p.most_stages)

    def charges(self, low: float, high: float) -> list[Charge]:
        """The two ways of charging an interval; for a single value there is one."""
        p = self.problem
        behind = p.most_stages - 1
        first = Charge(low, (behind * low, float(p.micro_batches - behind)))
        return [first] if low == high else [first, Charge(high, (0.0, float(p.micro_batches)))]

    @cached_property
    def candidates(self) -> Floats:
        """All stage times, ascending and distinct: θ is one of them."""
        return np.unique(self.problem.time[np.isfinite(self.problem.time)])

    @cached_property
    def memory_last(self) -> Ints:
        """[C, R, L + 1] the last layer that memory allows a stage from a on, with c stages behind
        it."""
        p = self.problem
        behind = range(int(self.stages.max()) + 1)
        return np.array([p.last_in_memory(c + 1) for c in behind])

    @cached_property
    def memory_back(self) -> Ints:
        """[C, R, L + 1] the first layer that memory allows a stage that ends at b."""
        ends = np.arange(self.problem.layers + 1)
        # last is non-decreasing in a: the first a with last[a] >= b.
        return np.array(
            [[np.searchsorted(row, ends) for row in table] for table in self.memory_last]
        )

    @cached_property
    def mirrored_time(self) -> Floats:
        """[R, L + 1, L + 1] stage times of the layers in reverse order."""
        return np.ascontiguousarray(self.problem.time.transpose(0, 2, 1)[:, ::-1, ::-1])

    @cached_property
    def counted_last(self) -> Ints:
        """`memory_last` for every number of stages behind, one row where there is no memory."""
        p = self.problem
        return np.array(
            [p.last_in_memory(c + 1) for c in range(p.most_stages if p.has_memory else 1)]
        )

    def counted_windows(self, windows: Windows) -> tuple[Ints, Ints]:
        """(after, before) [C, R, L + 1] as in `Windows`, by the true number of stages behind."""
        after, before = self._lasts(windows.high)
        return np.minimum(self.counted_last, after), np.minimum(self.counted_last, before)

    def _lasts(self, high: float) -> tuple[Ints, Ints]:
        """[R, L + 1] the last layers of stages behind k* and ahead of it that last `high` at
        most."""
        time, starts = self.problem.time, np.arange(self.problem.layers + 1)
        return starts + (time <= high + tie(high)).sum(axis=2), starts + (time <= high).sum(axis=2)

    def windows(self, low: float, high: float) -> Windows:
        """The windows of an interval."""
        time, layers = self.problem.time, self.problem.layers
        starts = np.arange(layers + 1)
        back = starts - (time <= high + tie(high)).sum(axis=1)
        after, before = self._lasts(high)
        return Windows(
            low,
            high,
            np.minimum(self.memory_last, after),
            np.minimum(self.memory_last, before),
            np.maximum(self.memory_back, back),
            starts + 1 + (time < low).sum(axis=2),
        )

    def reach_back(self, windows: Windows) -> Ints:
        """[U] the first layer that stages from the end can reach with at most u."""
        reach = np.empty(self.vectors, dtype=np.int64)
        reach_back(
            self.coords,
            self.strides,
            self.kind,
            self.size,
            self.delta,
            self.stages,
            self.counted,
            windows.back,
            reach,
        )
        return reach

    def reach_forward(self, windows: Windows) -> Ints:
        """[U] the last layer that stages from the front can reach with at most u (memory at its
        least)."""
        reach = np.empty(self.vectors, dtype=np.int64)
        reach_forward(
            self.coords,
            self.strides,
            self.kind,
            self.size,
            self.delta,
            self.stages,
            self.counted,
            windows.after,
            reach,
        )
        return reach

    def states(self, windows: Windows) -> States | None:
        """States from which both ends can be reached; None where no stages within the windows cover
        the layers."""
        first = self.reach_back(windows)
        if first[-1] > 0:
            return None
        last = self.reach_forward(windows)[::-1].copy()
        sizes = np.maximum(last - first + 1, 0)
        return States(first, last, np.cumsum(sizes) - sizes - first, int(sizes.sum()))

    def least_theta(self) -> float | None:
        """The least candidate under which some template fits (ties granted); None: not even without
        a limit.

        A lower limit of θ in every template; without counted stages one is attained there.
        """
        values = self.candidates
        first, last = 0, len(values) - 1
        if last < 0 or self.reach_back(self.windows(0.0, values[last]))[-1] > 0:
            return None
        while first < last:
            middle = (first + last) // 2
            if self.reach_back(self.windows(0.0, values[middle]))[-1] == 0:
                last = middle
            else:
                first = middle + 1
        return float(values[first])
