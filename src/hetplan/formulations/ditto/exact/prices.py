"""Lagrangian bound of the exact search: device limits are priced, what remains is a path over layers alone.

For any prices λ >= 0 per device: T >= min over unlimited templates of (cost + λ · devices used) - λ · devices
there are. The path's costs from the front also bound what a partial template still has to pay.
"""

from __future__ import annotations

import numpy as np

from hetplan.formulations.ditto.exact.paths import prefix_costs, prefix_devices
from hetplan.formulations.ditto.exact.space import Space, Windows
from hetplan.formulations.ditto.problem import Floats, Ints


class Prices:
    """Prices λ [K] seconds per device, improved by Polyak's subgradient steps and kept between intervals."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.value: Floats = np.zeros(len(space.devices))
        self.togo = np.empty((2, space.problem.layers + 1))

    def bound(self, windows: Windows, charge: tuple[float, float], limit: float, steps: int) -> float:
        """The best bound of at most `steps` steps (stops at `limit`); `value` and `togo` belong to the best.

        +inf where no template has its slowest stage in the interval.
        """
        best, best_value, current = -np.inf, self.value, self.value
        used = np.empty(len(current), dtype=np.int64)
        target = limit if np.isfinite(limit) else None
        pace, stale = 1.0, 0
        for _ in range(steps):
            bound = self._evaluate(current, windows, charge)
            if bound > best:
                best, best_value, stale = bound, current, 0
            else:
                stale += 1
                if stale >= 5:
                    pace, stale, current = pace / 2, 0, best_value
                    continue
            if bound >= limit or pace < 0.01:
                break
            self._devices(current, windows, charge, used)
            slope = used - self.space.devices
            # A price at zero does not fall further.
            slope = np.where((current <= 0) & (slope < 0), 0, slope)
            norm = float(slope @ slope)
            if norm == 0:
                break
            aim = target if target is not None else bound + 0.02 * abs(bound)
            current = np.maximum(0.0, current + pace * max(aim - bound, 1e-4 * abs(aim)) / norm * slope)
        self.value = best_value
        self._evaluate(best_value, windows, charge)
        return best

    def rent(self) -> Floats:
        """[U] -λ · (devices left at u): what turns `togo` into a bound for a partial template."""
        kinds = len(self.space.devices)
        return (self.space.coords[:, :kinds] - self.space.devices) @ self.value

    def _evaluate(self, value: Floats, windows: Windows, charge: tuple[float, float]) -> float:
        space = self.space
        price = value[space.kind] * space.size
        prefix_costs(
            space.problem.time, price, windows.low, windows.after[0], windows.before[0], windows.peak_first,
            charge, self.togo,
        )  # fmt: skip
        return float(self.togo[0, -1] - value @ space.devices)

    def _devices(self, value: Floats, windows: Windows, charge: tuple[float, float], used: Ints) -> None:
        space = self.space
        price = value[space.kind] * space.size
        prefix_devices(
            space.problem.time, price, windows.low, windows.after[0], windows.before[0], windows.peak_first,
            charge, self.togo, space.size, space.kind, used,
        )  # fmt: skip
