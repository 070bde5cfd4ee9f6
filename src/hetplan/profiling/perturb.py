"""A profile made wrong on purpose: how far each layer's times may be off, and profiles that are.

Times of a measured layer are off by half of its spread either way; where none was measured, by a
tenth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray

from hetplan.errors import InputError
from hetplan.profiling.profile import Profile

Floats = NDArray[np.float64]

UNMEASURED = 0.1
MOST = 0.9  # a time cannot become 0


@dataclass(frozen=True)
class Scenario:
    """factors: by device type, of every layer's times [L]."""

    name: str
    factors: Mapping[str, Floats]


def relative_spread(profile: Profile, unmeasured: float = UNMEASURED) -> dict[str, Floats]:
    """By device type [L]: half the spread of a layer's times by their sum, the median over the
    device's tables."""
    found = {}
    for device in profile.devices():
        tables = [table for table in profile.tables if table.device == device]
        rows = [
            np.array(spread) / 2 / np.maximum(np.array(table.seconds()), 1e-15)
            for table in tables
            if (spread := table.spread()) is not None
        ]
        size = len(profile.layers)
        found[device] = (
            np.minimum(np.median(rows, axis=0), MOST) if rows else np.full(size, unmeasured)
        )
    return found


def perturbed(profile: Profile, factors: Mapping[str, Sequence[float] | Floats]) -> Profile:
    """The profile with every layer's forward and backward seconds times the factor of its device
    type."""
    tables = []
    for table in profile.tables:
        row = np.asarray(factors.get(table.device, np.ones(len(profile.layers))), float)
        changes = {
            key: [float(v) for v in np.array(getattr(table, key)) * row]
            for key in ("forward_seconds", "backward_seconds")
        }
        tables.append(table.model_copy(update=changes))
    return Profile(
        **{**{key: getattr(profile, key) for key in Profile.model_fields}, "tables": tables}
    )


def scenarios(
    profile: Profile, draws: int, seed: int, unmeasured: float = UNMEASURED
) -> list[Scenario]:
    """All layers of one device type slower, then faster, type by type; then `draws` in which each
    layer is off apart.

    Raises InputError where a share or a number is not usable.
    """
    if not 0 < unmeasured <= MOST:
        raise InputError("spread", got=unmeasured, expected=f"more than 0, at most {MOST}")
    if draws < 0:
        raise InputError("draws", got=draws, expected="at least 0")
    spread = relative_spread(profile, unmeasured)
    found = [
        Scenario(f"{device} {word}", {device: 1 + sign * share})
        for device, share in spread.items()
        for word, sign in (("slower", 1.0), ("faster", -1.0))
    ]
    random = Random(seed)
    for i in range(draws):
        factors = {
            device: np.array([1 + random.uniform(-1, 1) * s for s in share])
            for device, share in spread.items()
        }
        found.append(Scenario(f"draw {i + 1}", factors))
    return found
