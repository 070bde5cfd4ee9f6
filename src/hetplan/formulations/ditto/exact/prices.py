"""Lagrangian bound of the exact search: device limits are priced, what remains is a path over
layers alone.

For any prices λ >= 0 per device, and one per stage where micro-batches limit their number: T >= min
over unlimited templates of (cost + λ · what they use) - λ · what there is. The path's costs from
the front also bound what a partial template still has to pay.
"""

from __future__ import annotations

import numpy as np

from hetplan.formulations.ditto.exact.paths import prefix_costs, prefix_devices
from hetplan.formulations.ditto.exact.space import Charge, Space, Windows
from hetplan.formulations.ditto.problem import Floats, Ints
from hetplan.solvers.run import Run


class Prices:
    """Prices λ [K + 1], seconds per device of each kind and per stage.

    Improved by Polyak's subgradient steps and kept between intervals.
    """

    def __init__(self, space: Space, run: Run) -> None:
        self.space, self.run = space, run
        p = space.problem
        self.limited = min(p.layers, int(space.devices.sum())) > p.micro_batches
        # Prices of stages and of devices pull against each other: more and smaller steps, still
        # cheaper than a path.
        self.patience, self.least_pace, self.more = (10, 0.001, 5) if self.limited else (5, 0.01, 1)
        self.budget = np.append(space.devices, p.micro_batches)
        self.value: Floats = np.zeros(len(self.budget))
        self.togo = np.empty((2, space.problem.layers + 1))

    def bound(
        self, windows: Windows, charge: Charge, limit: float, steps: int, fee: float | None = None
    ) -> float:
        """The best bound of at most `steps` steps (stops at `limit`); `value` and `togo` belong to
        the best.

        fee: the price of a stage, which else is sought with the others. +inf where no template has
        its slowest stage in the interval.
        """
        current = self._start(windows, charge) if fee is None else np.append(self.value[:-1], fee)
        best, best_value = -np.inf, current
        used = np.empty(len(current), dtype=np.int64)
        target = limit if np.isfinite(limit) else None
        pace, stale = 1.0, 0
        for _ in range(steps * self.more):
            self.run.check()
            bound = self._evaluate(current, windows, charge)
            if bound > best:
                best, best_value, stale = bound, current, 0
            else:
                stale += 1
                if stale >= self.patience:
                    pace, stale, current = pace / 2, 0, best_value
                    continue
            if bound >= limit or pace < self.least_pace:
                break
            self._devices(current, windows, charge, used)
            slope = used - self.budget
            if not self.limited or fee is not None:
                slope[-1] = 0
            # A price at zero does not fall further.
            slope = np.where((current <= 0) & (slope < 0), 0, slope)
            norm = float(slope @ slope)
            if norm == 0:
                break
            aim = target if target is not None else bound + 0.02 * abs(bound)
            current = np.maximum(
                0.0, current + pace * max(aim - bound, 1e-4 * abs(aim)) / norm * slope
            )
        self.value = best_value
        self._evaluate(best_value, windows, charge)
        return best

    def _start(self, windows: Windows, charge: Charge) -> Floats:
        """The prices so far, or the same with a stage at the credit that it earns, whichever bounds
        better.

        A short stage behind k* costs less than nothing; from prices of smaller θ steps would hardly
        get there.
        """
        if not self.limited:
            return self.value
        earned = self.value.copy()
        earned[-1] = charge.credit
        return max((earned, self.value), key=lambda value: self._evaluate(value, windows, charge))

    @property
    def fee(self) -> float:
        """The price of a stage."""
        return float(self.value[-1])

    def rent(self) -> Floats:
        """[U] -λ · (what is left at u): turns `togo` into a bound for a partial template.

        Where stages are not counted their whole budget is taken off: the partial template has paid
        its fees.
        """
        space = self.space
        kinds = len(space.devices)
        rent: Floats = (space.coords[:, :kinds] - space.devices) @ self.value[:kinds]
        stages = space.stages if space.counted else 0
        return rent - self.fee * (space.problem.micro_batches - stages)

    def _price(self, value: Floats) -> Floats:
        price: Floats = value[self.space.kind] * self.space.size + value[-1]
        return price

    def _evaluate(self, value: Floats, windows: Windows, charge: Charge) -> float:
        space = self.space
        price = self._price(value)
        prefix_costs(
            space.problem.time, price, charge.credit, windows.after[0], windows.before[0], windows.peak_first,
            charge.peak, self.togo,
        )  # fmt: skip
        return float(self.togo[0, -1] - value @ self.budget)

    def _devices(self, value: Floats, windows: Windows, charge: Charge, used: Ints) -> None:
        space = self.space
        price = self._price(value)
        prefix_devices(
            space.problem.time, price, charge.credit, windows.after[0], windows.before[0], windows.peak_first,
            charge.peak, self.togo, space.size, space.kind, used,
        )  # fmt: skip
