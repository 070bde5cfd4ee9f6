"""The unit of CP-SAT's models: whole numbers of a fraction of a second."""

import math
from importlib.metadata import version

from hetplan.solvers.model import Totals

# Where coefficients are large, CP-SAT 9.15 reports wrong values as optimal and feasible models as
# infeasible: its presolve adds coefficients in 32 bits and drops enforcement literals
# (github.com/google/or-tools/issues/5293), and its detection of "greater than at least one of" errs
# too. With 9.15, both are switched off and totals are smaller; 9.12 to 9.14 are right.
UNSOUND = version("ortools").startswith("9.15.")
# The largest total of a model, in integers. Below it, products with small counts remain far from
# the limits of int64, and sums of floats are exact.
LARGEST_TOTAL = 2.0**31 if UNSOUND else 2.0**40


def integer_scale(least: float, largest: float, roundings: float, *, error: float = 5e-8) -> float:
    """The factor from the instance's unit to integers: the least power of two whose error of
    rounding is at most `error`.

    By a power of two products are exact, so that rounding down is the only error. The factor is
    smaller where totals would exceed LARGEST_TOTAL; the error is roundings / factor in any case.

    least: a positive lower bound on the objective. largest: an upper bound on every total of the
    model. Both are in the instance's unit. roundings: number of values, each rounded by less than
    1, that add up in one objective value. error: the error of rounding that the sum may have,
    relative to `least`.
    """
    if not (0 < least <= largest and math.isfinite(largest)):
        raise ValueError(
            f"integer_scale: least {least!r}, largest {largest!r}, expected 0 < least <= largest"
        )
    precise = math.ceil(math.log2(max(1.0, roundings) / (error * least)))
    most = math.floor(math.log2(LARGEST_TOTAL / largest))
    return 2.0 ** min(precise, most)


def ticks_per_second(totals: Totals) -> float:
    """The factor from seconds to integers of a model with these totals, see `integer_scale`."""
    if totals.largest <= 0:
        return 1.0  # all totals are 0, so that any factor will do
    # the totals may state no lower bound, or one that is far too low
    least = min(totals.largest, max(totals.least, totals.largest * 1e-6))
    return integer_scale(least, totals.largest, totals.roundings, error=totals.error)
