"""What becomes of plans when the profile is wrong: seconds, ranks and the winner, scenario by
scenario."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetplan.profiling.perturb import UNMEASURED, perturbed, scenarios
from hetplan.profiling.workload import Workload
from hetplan.runtime.plan import Plan
from hetplan.runtime.replay import Settings, replay


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

    def lowest(self, plan: int) -> float:
        """Seconds of a plan where it is fastest."""
        return min(outcome.seconds[plan] for outcome in self.outcomes)

    def highest(self, plan: int) -> float:
        """Seconds of a plan where it is slowest."""
        return max(outcome.seconds[plan] for outcome in self.outcomes)

    def wins(self, plan: int) -> int:
        """In how many scenarios the plan is the fastest."""
        return sum(outcome.winner == plan for outcome in self.outcomes)

    def regret(self, plan: int) -> float:
        """The most by which the plan takes longer than the fastest one, as a share of that."""
        return max(outcome.seconds[plan] / min(outcome.seconds) - 1 for outcome in self.outcomes)


def sensitivity(
    plans: Sequence[Plan],
    workload: Workload,
    *,
    draws: int = 20,
    seed: int = 0,
    unmeasured: float = UNMEASURED,
    settings: Settings | None = None,
) -> Sensitivity:
    """Replay every plan under every scenario of `hetplan.profiling.perturb`; raises InputError as
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
    measured = any(table.readings is not None for table in workload.profile.tables)
    return Sensitivity(outcome("as it is", workload), tuple(outcomes), measured)
