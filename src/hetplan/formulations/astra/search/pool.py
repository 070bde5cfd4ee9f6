"""Pools of GPUs, as in Astra's three search modes (Section 3.2, eq. 1-3)."""

from dataclasses import dataclass, replace
from typing import Literal

from hetplan.errors import require
from hetplan.replays.offers import Offer

Mode = Literal["homogeneous", "heterogeneous", "cost"]


@dataclass(frozen=True)
class Pool:
    """What may be used. sizes: the numbers of GPUs to try, each with every offer (or all offers
    mixed)."""

    mode: Mode
    offers: tuple[Offer, ...]
    sizes: tuple[int, ...]

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
    """Mode 1 (eq. 1): one type, all of its devices."""
    return Pool("homogeneous", (offer,), (offer.most,))


def heterogeneous(total: int, offers: tuple[Offer, ...]) -> Pool:
    """Mode 2 (eq. 2): `total` devices, of each type at most what it offers."""
    return Pool("heterogeneous", offers, (total,))


def cost(offers: tuple[Offer, ...], most: int) -> Pool:
    """Mode 3 (eq. 3): 2, 4, 8, … up to `most` devices of one type at a time (and `most` itself)."""
    require(most >= 2, "the largest number of GPUs", got=most, expected="at least 2")
    sizes = {2**e for e in range(1, most.bit_length()) if 2**e <= most} | {most}
    return Pool("cost", tuple(replace(offer, most=most) for offer in offers), tuple(sorted(sizes)))
