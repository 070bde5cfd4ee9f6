"""Divides rows or columns into whole numbers, in proportion to shares."""

from collections.abc import Sequence
from itertools import accumulate, pairwise


def split(length: int, shares: Sequence[float]) -> list[tuple[int, int]]:
    """The part [first, last) of each share in `length` rows or columns.

    Each size is rounded to the nearest whole number and is within 1 of its exact value. While rows
    are missing, the sizes that were rounded down most get one more each; while there are too many,
    the sizes that were rounded up most get one less each. Of equal sizes the earlier goes first.
    Raises ValueError unless shares are > 0.
    """
    if not shares or min(shares) <= 0:
        raise ValueError(f"shares are {shares!r}, expected positive numbers")
    total = sum(shares)
    exact = [length * share / total for share in shares]
    sizes = [round(size) for size in exact]
    missing = length - sum(sizes)  # fewer than there are shares: each is rounded by 0.5 at most
    sign = 1 if missing > 0 else -1
    most_wrong_first = sorted(range(len(shares)), key=lambda i: sign * (sizes[i] - exact[i]))
    for i in most_wrong_first[: abs(missing)]:
        sizes[i] += sign
    return list(pairwise(accumulate(sizes, initial=0)))
