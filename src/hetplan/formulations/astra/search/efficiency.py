"""Astra's efficiencies eta in (0, 1]: the share of the theoretical rate that an operator reaches
(eq. 25-26).

seconds = theta / (phi eta): theta FLOPs of a matrix product or bytes of anything else, phi the
datasheet's peak or bandwidth. A learned model implements `EfficiencyModel`; `Stated` gives the
profiling layer's constants, so that the search then prices an operator exactly as
`hetplan.profiling.times` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hetplan.errors import InputError
from hetplan.profiling.catalogue import DeviceSpec
from hetplan.profiling.operators import Shape
from hetplan.profiling.precision import Precision
from hetplan.profiling.times import DEFAULT_EFFICIENCY, Efficiency, tiled_flops

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Work:
    """Operators as arrays [n]: count products of m x k by k x n (all 0: memory-bound), flops, bytes
    moved."""

    device: str
    spec: DeviceSpec
    precision: Precision
    count: Floats
    m: Floats
    k: Floats
    n: Floats
    flops: Floats
    moved_bytes: Floats


@dataclass(frozen=True)
class Traffic:
    """Collectives or messages as arrays [n]: bytes per rank, ranks; `kind` names the collective."""

    device: str
    kind: str
    size: Floats
    ranks: Floats
    between_nodes: Floats


class EfficiencyModel(Protocol):
    """What the pricing asks. Both answers have the shape of the arrays given, values in (0, 1]."""

    @property
    def launch_seconds(self) -> float:
        """Floor of a kernel, seconds (0 where the efficiencies include it)."""
        ...

    def computation(self, work: Work) -> Floats:
        """Of the peak (matrix products) or of the memory bandwidth (the rest)."""
        ...

    def communication(self, traffic: Traffic) -> Floats:
        """Of the link's bandwidth."""
        ...


@dataclass(frozen=True)
class Stated:
    """The constants of `hetplan.profiling.times` and a stated share of the links' bandwidth.

    links: 1.0, since cluster files carry what links reach. launch_seconds: floor per kernel, as
    there.
    """

    efficiency: Efficiency = DEFAULT_EFFICIENCY
    links: float = 1.0

    @property
    def launch_seconds(self) -> float:
        """Seconds per kernel launch."""
        return self.efficiency.launch_seconds

    def computation(self, work: Work) -> Floats:
        """Tile quantisation and the roofline make a matrix product's share; elsewhere it is
        `memory`."""
        e = self.efficiency
        padded = np.array([
            tiled_flops(Shape(*(int(v) for v in shape)), e.tile)
            for shape in zip(work.count, work.m, work.k, work.n, strict=True)
        ])  # fmt: skip
        memory_seconds = work.moved_bytes / (work.spec.memory_bytes_per_s * e.memory)
        peak = work.spec.peak_flops(work.precision, name=work.device)
        seconds = np.maximum(padded / (peak * e.matmul(work.precision)), memory_seconds)
        share = work.flops / (peak * np.where(seconds > 0, seconds, 1.0))
        return np.where(work.flops > 0, share, e.memory)

    def communication(self, traffic: Traffic) -> Floats:
        """The same for every size."""
        return np.full(traffic.size.shape, self.links)


def checked(shares: Floats, what: str) -> Floats:
    """`shares`, or InputError where a model answers outside of (0, 1]."""
    if not ((shares > 0) & (shares <= 1 + 1e-12)).all():
        worst = shares[~((shares > 0) & (shares <= 1 + 1e-12))][0]
        raise InputError(f"efficiency of {what}", got=float(worst), expected="a share in (0, 1]")
    return shares


def compute_seconds(work: Work, model: EfficiencyModel) -> Floats:
    """theta / (phi eta) of every operator, one pass (eq. 25)."""
    eta = checked(model.computation(work), "computation")
    products = work.flops > 0
    rate = np.where(
        products,
        work.spec.peak_flops(work.precision, name=work.device),
        work.spec.memory_bytes_per_s,
    )
    return np.asarray(np.where(products, work.flops, work.moved_bytes) / (rate * eta))


def transfer_seconds(traffic: Traffic, bandwidth: Floats, model: EfficiencyModel) -> Floats:
    """size / (bandwidth eta) (eq. 26); the collective's own factor is already in `size`."""
    return np.asarray(
        traffic.size / (bandwidth * checked(model.communication(traffic), "communication"))
    )
