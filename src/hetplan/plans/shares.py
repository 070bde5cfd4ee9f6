"""Whole rows and columns for shares of them."""

from collections.abc import Sequence
from itertools import accumulate, pairwise


def split(length: int, shares: Sequence[float]) -> list[tuple[int, int]]:
    """[first, last) of each share of `length` rows or columns: nearest whole numbers, then
    corrected.

    Each part is within 1 of its exact size: units missing go to those rounded down most, surplus
    ones are taken from those rounded up most, the earlier of equals first. Raises ValueError unless
    shares are > 0.
    """
    if not shares or min(shares) <= 0:
        raise ValueError(f"shares are {shares!r}, expected positive numbers")
    total = sum(shares)
    exact = [length * share / total for share in shares]
    sizes = [round(size) for size in exact]
    missing = length - sum(sizes)
    sign = 1 if missing > 0 else -1
    order = sorted(range(len(shares)), key=lambda i: sign * (sizes[i] - exact[i]))
    for i in order[: abs(missing)]:
        sizes[i] += sign
    return list(pairwise(accumulate(sizes, initial=0)))
