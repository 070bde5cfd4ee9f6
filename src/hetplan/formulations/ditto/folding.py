"""Node folding: how many devices of the weakest type each device is worth (Ditto, Section 5.3)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hetplan.formulations.ditto.data import DeviceType, DittoData


@dataclass(frozen=True)
class Folding:
    """weakest: the type with the largest total. factors: d_i of each type that has nodes, by
    name."""

    weakest: DeviceType
    factors: Mapping[str, int]
    devices_per_node: int

    def nodes(self, data: DittoData) -> int:
        """n = sum_i n_i d_i: nodes of the virtual cluster of M weakest devices each (eq. 5)."""
        return sum(kind.nodes * self.factors[kind.name] for kind in data.device_types if kind.nodes)


def total_seconds(kind: DeviceType) -> float:
    """sum_l c_i(l): the whole model's forward and backward on one device."""
    return math.fsum(kind.forward_seconds) + math.fsum(kind.backward_seconds)


def fold(data: DittoData, *, communication: bool = False) -> Folding | None:
    """The folding factors; None where a type costs nothing at all and the others do (no ratio
    exists).

    Without communication d_i = round(weakest total / total) (Section 5.3.1); with it, the d from 1
    to that number whose p(d) comes closest to the type's total (Section 5.3.2). Halves are rounded
    up.
    """
    present = [kind for kind in data.device_types if kind.nodes]
    weakest = max(present, key=total_seconds)
    most = total_seconds(weakest)
    factors = {}
    for kind in present:
        total = total_seconds(kind)
        if total <= 0 < most or (total > 0 and most / total > 1e9):
            return None
        factor = math.floor(most / total + 0.5) if total > 0 else 1
        if communication:
            factor = min(
                range(1, factor + 1),
                key=lambda d: abs(virtual_seconds(weakest, d) - total_seconds(kind)),
            )
        factors[kind.name] = factor
    return Folding(weakest, factors, data.devices_per_node)


def virtual_seconds(weakest: DeviceType, d: int) -> float:
    """p(d) = total / d + c_in(d): the model on d weakest devices, n' full nodes and one of d'
    devices.

    c_across is left out: Oobleck's profile, hence the instance, has no transfers between nodes. An
    all-reduce of d' devices is taken as one of the next group size, since the profile has powers of
    two only.
    """
    layers, size = len(weakest.forward_seconds), weakest.devices_per_node
    full, rest = divmod(d, size)
    inside = rest / d * layers * mean_allreduce(weakest, rest)
    inside += full * size / d * layers * mean_allreduce(weakest, size if full else 0)
    return total_seconds(weakest) / d + inside


def mean_allreduce(kind: DeviceType, devices: int) -> float:
    """l_c.in[d]: mean over the layers of one all-reduce on `devices` devices; 0 for fewer than
    two."""
    if devices < 2:
        return 0.0
    row = kind.allreduce_seconds[str(1 << (devices - 1).bit_length())]
    return math.fsum(row) / len(row)
