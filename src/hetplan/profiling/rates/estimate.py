"""What every figure of measured rates carries: seconds, an interval, and where it comes from."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """Seconds of an operator or a collective.

    low, high: eight in ten measurements lay between them where shapes like this one were left out
    of what was learned; wider where nothing of the kind was measured. source: what it comes from.
    """

    seconds: float
    low: float
    high: float
    source: str
