"""Pools of GPUs, as in Astra's three search modes (Section 3.2, eq. 1-3)."""

from dataclasses import dataclass, replace
from typing import Literal

from hetplan.errors import require
from hetplan.replays.offers import Offer

Mode = Literal["homogeneous", "heterogeneous", "cost"]


@dataclass(frozen=True)
class Pool:
    """The GPUs that a search may use."""

    mode: Mode
    offers: tuple[Offer, ...]  # device types, with the most devices of each
    sizes: tuple[int, ...]  # numbers of GPUs to try; a heterogeneous pool has one

    def __post_init__(self) -> None:
        require(
            self.offers and self.sizes,
            "the GPU pool is empty",
            expected="at least one type and one number of GPUs",
        )
        names = [offer.name for offer in self.offers]
        require(
            len(set(names)) == len(names),
            "the GPU pool names a type twice",
            got=", ".join(names),
        )
        for size in self.sizes:
            require(1 <= size <= 10**6, "number of GPUs", got=size, expected="1 to 1000000")
        if self.mode == "heterogeneous":
            total = sum(offer.most for offer in self.offers)
            require(
                total >= self.sizes[0],
                "the types together have too few GPUs",
                got=total,
                expected=f"{self.sizes[0]}",
            )


def homogeneous(offer: Offer) -> Pool:
    """The pool of mode 1 (eq. 1): one type, with all of its devices."""
    return Pool("homogeneous", (offer,), (offer.most,))


def heterogeneous(total: int, offers: tuple[Offer, ...]) -> Pool:
    """The pool of mode 2 (eq. 2): `total` devices of several types, at most `most` of each."""
    return Pool("heterogeneous", offers, (total,))


def cost(offers: tuple[Offer, ...], most: int) -> Pool:
    """The pool of mode 3 (eq. 3): 2, 4, 8, … and `most` devices of one type at a time."""
    require(most >= 2, "the largest number of GPUs", got=most, expected="at least 2")
    powers_of_two = {2**e for e in range(1, most.bit_length())}  # up to `most`
    sizes = sorted(powers_of_two | {most})
    return Pool("cost", tuple(replace(offer, most=most) for offer in offers), tuple(sizes))
