"""The best fee per stage of an interval: a concave function of the fee, maximised by cutting
planes.

A path of S stages that costs C without fees bounds the interval, for a fee f, by C + f (S - N_b): a
line that rises where the path has too many stages and falls where it has fewer than it may.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from hetplan.formulations.ditto.exact.counted import Relaxed

# A fee carries over to intervals at most this ratio away.
NEAR = 1.3


@dataclass
class Ascent:
    """Fees of one interval. over, under: the last lines (stages, cost without fees) of too many and
    of few stages."""

    most: int
    over: tuple[int, float] | None = None
    under: tuple[int, float] | None = None

    def next(self, relaxed: Relaxed, limit: float) -> float | None:
        """The fee to try after that of `relaxed`; None where no fee lifts the bound to `limit`.

        It is where two lines meet; with one line, the fee at which that one reaches `limit`.
        """
        stages = len(relaxed.template)
        line = stages, relaxed.cost - relaxed.fee * stages
        if stages > self.most:
            self.over = line
        else:
            self.under = line
        if (
            not math.isfinite(limit)
            or stages == self.most
            or (stages < self.most and relaxed.fee == 0)
        ):
            return None
        if self.over is None or self.under is None:
            fee = max(0.0, (limit - line[1]) / (stages - self.most))
        else:
            fee = max(0.0, (self.under[1] - self.over[1]) / (self.over[0] - self.under[0]))
            if self.over[1] + fee * (self.over[0] - self.most) < limit:
                return None
        return None if abs(fee - relaxed.fee) <= 1e-9 * max(fee, relaxed.fee) else fee


@dataclass
class Known:
    """The best fees so far, by the lower ends of their intervals."""

    fees: dict[float, float] = field(default_factory=dict)

    def likely(self, low: float) -> float | None:
        """The fee between those of the neighbours, None without any.

        Where devices are priced as well, the best fee may be far off; neighbours' fees are those of
        true paths.
        """
        near = sorted(at for at in self.fees if low / NEAR <= at <= low * NEAR)
        return float(np.interp(low, near, [self.fees[at] for at in near])) if near else None
