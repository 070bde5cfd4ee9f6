"""What becomes of plans when the profile is wrong: seconds, ranks and the winner, scenario by
scenario.

A profile is made wrong on purpose: times of a measured layer are off by half of its spread either
way; where none was measured, by a tenth.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np
from numpy.typing import NDArray

from hetplan.errors import require
from hetplan.plans.plan import Plan
from hetplan.profiling.profiles.profile import Profile, perturbed
from hetplan.profiling.workload import Workload
from hetplan.replays.chains import Settings
from hetplan.replays.replay import replay

Floats = NDArray[np.float64]

UNMEASURED = 0.1
LARGEST = 0.9  # a time cannot become 0


@dataclass(frozen=True)
class Scenario:
    """factors: by device type, of every layer's times [L]."""

    name: str
    factors: Mapping[str, Floats]


def relative_spread(profile: Profile, unmeasured: float = UNMEASURED) -> dict[str, Floats]:
    """By device type [L]: half the spread of a layer's times by their sum, the median over the
    device's tables."""
    spread_of = {}
    for device in profile.devices():
        rows = [
            np.array(spread) / 2 / np.maximum(np.array(table.layer_seconds()), 1e-15)
            for table in profile.tables
            if table.device == device and (spread := table.spread()) is not None
        ]
        spread_of[device] = (
            np.minimum(np.median(rows, axis=0), LARGEST)
            if rows
            else np.full(len(profile.layers), unmeasured)
        )
    return spread_of


def scenarios(
    profile: Profile, draws: int, seed: int, unmeasured: float = UNMEASURED
) -> list[Scenario]:
    """All layers of one device type slower, then faster, type by type; then `draws` in which each
    layer is off apart.

    Raises InputError where a share or a number is not usable.
    """
    require(
        0 < unmeasured <= LARGEST,
        "spread",
        got=unmeasured,
        expected=f"more than 0, at most {LARGEST}",
    )
    spread = relative_spread(profile, unmeasured)
    wrong = [
        Scenario(f"{device} {word}", {device: 1 + sign * share})
        for device, share in spread.items()
        for word, sign in (("slower", 1.0), ("faster", -1.0))
    ]
    random = Random(seed)
    drawn = [
        {
            device: np.array([1 + random.uniform(-1, 1) * s for s in share])
            for device, share in spread.items()
        }
        for _ in range(draws)
    ]
    return [*wrong, *(Scenario(f"draw {i}", factors) for i, factors in enumerate(drawn, 1))]


@dataclass(frozen=True)
class Outcome:
    """One scenario: seconds per iteration of every plan."""

    scenario: str
    seconds: tuple[float, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Place of every plan, from 1; plans of equal time share the better one."""
        return tuple(1 + sum(other < mine for other in self.seconds) for mine in self.seconds)

    @property
    def winner(self) -> int:
        """The fastest plan, the first of several."""
        return self.seconds.index(min(self.seconds))


@dataclass(frozen=True)
class Sensitivity:
    """nominal: with the profile as it is. outcomes: with it perturbed. measured: whether its own
    spread was used."""

    nominal: Outcome
    outcomes: tuple[Outcome, ...]
    measured: bool

    def figures(self, plan: int) -> dict[str, float]:
        """Seconds of a plan where it is fastest and slowest; in how many scenarios it wins; regret:
        the most by which it takes longer than the fastest one, as a share of that."""
        seconds = [outcome.seconds[plan] for outcome in self.outcomes]
        return {
            "lowest_seconds": min(seconds),
            "highest_seconds": max(seconds),
            "wins": sum(outcome.winner == plan for outcome in self.outcomes),
            "regret": max(o.seconds[plan] / min(o.seconds) - 1 for o in self.outcomes),
        }


def sensitivity(
    plans: Sequence[Plan],
    workload: Workload,
    *,
    draws: int = 20,
    seed: int = 0,
    unmeasured: float = UNMEASURED,
    settings: Settings | None = None,
) -> Sensitivity:
    """Replay every plan under every scenario of this module; raises InputError as
    `replay` does.

    draws: random scenarios beside the systematic ones. unmeasured: share by which times without a
    spread are off.
    """

    def outcome(name: str, held: Workload) -> Outcome:
        return Outcome(name, tuple(replay(plan, held, settings).seconds for plan in plans))

    outcomes = [
        outcome(one.name, replace(workload, profile=perturbed(workload.profile, one.factors)))
        for one in scenarios(workload.profile, draws, seed, unmeasured)
    ]
    return Sensitivity(
        nominal=outcome("as it is", workload),
        outcomes=tuple(outcomes),
        measured=any(table.readings is not None for table in workload.profile.tables),
    )
