"""Sailor's fits of link bandwidths: GB/s as a parabola over log2 of the message in MB, with a cap
in bytes/s.

{GPU type: {GPUs: [[a, b, c], cap]}}, within a node (a ring over that many GPUs) and between two
nodes (that many pairs at once, all together). A fit only holds where it was made: beyond the
parabola's top nothing is taken from it, and messages below one MB go at the speed of one. All ranks
of a node share its cards, so more pairs never get less than fewer do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from hetplan.errors import InputError
from hetplan.profiling.foreign import Foreign, key_number, read_foreign
from hetplan.profiling.sailor.data import NotPricedError

MB = 1e6
GB = 1e9


@dataclass(frozen=True)
class Fit:
    """GB/s = a x^2 + b x + c with x = log2(MB), at most `cap` bytes/s."""

    a: float
    b: float
    c: float
    cap: float

    def bandwidth(self, size: float) -> float:
        """Bytes/s of messages of `size` bytes."""
        x = max(math.log2(max(size, 1.0) / MB), 0.0)
        if self.a < 0:
            x = min(x, -self.b / (2 * self.a))
        value = (self.a * x * x + self.b * x + self.c) * GB
        return min(value, self.cap) if value > 0 else self.cap


# GPU type -> GPUs -> fit
Fits = dict[str, dict[int, Fit]]


@dataclass(frozen=True)
class Links:
    """Fits between nodes and within one."""

    between: Fits
    within: Fits

    def network(self, kind: str, pairs: int, size: float) -> float:
        """Bytes/s of `pairs` GPUs of one node together, `size` bytes in all, to another node."""
        fits = self._of(self.between, kind, "between nodes")
        usable = [count for count in fits if count <= pairs] or [min(fits)]
        return max(fits[count].bandwidth(size / count) for count in usable)

    def local(self, kind: str, ranks: int, size: float) -> float:
        """Bytes/s of each of `ranks` GPUs within a node; a network's where nothing was measured
        within."""
        if kind not in self.within:
            return self.network(kind, ranks, size) / max(ranks, 1)
        fits = self.within[kind]
        above = [count for count in fits if count >= ranks]
        return fits[min(above) if above else max(fits)].bandwidth(size)

    def _of(self, fits: Fits, kind: str, what: str) -> dict[int, Fit]:
        if kind not in fits:
            known = ", ".join(sorted(fits))
            raise NotPricedError(
                f"no bandwidth {what}", where="network_coeffs", got=kind, expected=known
            )
        return fits[kind]


def load_links(folder: Path) -> Links:
    """From `network_coeffs*.json` (with "inter" and "intra") and `*bandwidth*.json` (within nodes)
    of a folder."""
    between: Fits = {}
    within: Fits = {}
    network = sorted(folder.glob("network_coeffs*.json"))
    if not network:
        raise InputError("no file network_coeffs*.json", where=str(folder))
    for path in sorted(folder.glob("*bandwidth*.json")):
        within |= _fits(read_foreign(path))
    for path in network:
        document = read_foreign(path)
        if document.get("inter") is None and document.get("intra") is None:
            raise document.error("not usable", 'an object with "inter" or "intra"')
        for key, into in (("inter", between), ("intra", within)):
            entry = document.get(key)
            if entry is not None:
                into |= _fits(entry)
    return Links(between, within)


def _fits(by_type: Foreign) -> Fits:
    found: Fits = {}
    for kind, by_count in by_type.items():
        found[kind] = {
            key_number(count, entry, 1): _fit(entry) for count, entry in by_count.items()
        }
        if not found[kind]:
            raise by_count.error("no fit", "{GPUs: [[a, b, c], cap]}")
    return found


def _fit(entry: Foreign) -> Fit:
    factors, cap = entry.entries(length=2)
    a, b, c = (factor.number(-1e9, 1e9) for factor in factors.entries(length=3))
    return Fit(a, b, c, cap.number(1e-6))
