"""Plan a workload by several strategies and rank what they propose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hetplan.errors import InputError
from hetplan.planner.candidate import Candidate
from hetplan.planner.settings import Settings, check_settings
from hetplan.planner.strategies import Strategy, chosen
from hetplan.profiling.workload import Workload
from hetplan.solvers.run import Run
from hetplan.text import number_text


@dataclass(frozen=True)
class Planning:
    """Candidates best first. winner: index of the best one that fits (and costs no more than the limit)."""

    workload: Workload
    candidates: tuple[Candidate, ...]
    winner: int | None

    @property
    def best(self) -> Candidate | None:
        """The winner itself."""
        return None if self.winner is None else self.candidates[self.winner]

    def document(self) -> dict[str, Any]:
        """As JSON types."""
        return {
            "workload": workload_document(self.workload),
            "candidates": [candidate.document(self.workload) for candidate in self.candidates],
            "winner": self.winner,
        }


def make_plans(
    workload: Workload,
    strategies: Sequence[str] | None = None,
    run: Run | None = None,
    *,
    money_limit: float | None = None,
    settings: Settings | None = None,
) -> Planning:
    """Solve `workload` by each strategy (all by default) and rank the candidates by seconds, then money.

    A plan that does not fit in memory, or costs more than `money_limit` dollars per million tokens, never
    wins. The run's time limit is for each method of a strategy. settings: strategy -> name -> value, what a
    strategy has to set of its own. Raises InputError for unknown strategies or settings, a money limit without
    prices, or a workload that cannot be posed.
    """
    run, settings = run or Run(), settings or {}
    picked = picked_strategies(workload, strategies, money_limit=money_limit, settings=settings)
    found = [c for strategy in picked for c in strategy.propose(workload, run, settings.get(strategy.name))]
    judged = [over_budget(c, workload, money_limit) for c in found]
    ranked = sorted(judged, key=lambda pair: rank(pair[0], workload, pair[1]))
    won = bool(ranked) and eligible(ranked[0][0], ranked[0][1])
    return Planning(workload, tuple(candidate for candidate, _ in ranked), 0 if won else None)


def picked_strategies(
    workload: Workload,
    strategies: Sequence[str] | None = None,
    *,
    money_limit: float | None = None,
    settings: Settings | None = None,
) -> list[Strategy]:
    """The strategies that `make_plans` would try with these arguments, which are checked; raises InputError."""
    picked = chosen(strategies)
    if settings:
        check_settings(settings, {strategy.name: strategy.settings_model() for strategy in picked})
    check_money_limit(workload, money_limit)
    return picked


def check_money_limit(workload: Workload, limit: float | None) -> None:
    """Refuse a limit that is no amount, or that cannot be compared with anything."""
    if limit is None:
        return
    if not (limit > 0 and math.isfinite(limit)):
        raise InputError("money limit", got=limit, expected="dollars per million tokens greater than 0")
    for name in workload.cluster.types:
        if workload.cluster.specs[name].price_per_hour is None:
            raise InputError(
                f"money limit, but device {name!r} has no price",
                where=f"cluster {workload.cluster.name}",
                expected="price_per_hour of every device",
            )


def over_budget(candidate: Candidate, workload: Workload, limit: float | None) -> tuple[Candidate, bool]:
    """The candidate and whether it exceeds the limit; its message then says so."""
    money = candidate.money_per_million_tokens(workload)
    if limit is None or money is None or money <= limit:
        return candidate, False
    text = f"costs {number_text(money, 4)} per million tokens, above the limit {number_text(limit, 4)}"
    return replace(candidate, message="; ".join(filter(None, (candidate.message, text)))), True


def eligible(candidate: Candidate, over: bool) -> bool:
    """Whether the candidate may win."""
    return candidate.plan is not None and candidate.fits_memory is True and not over


def rank(candidate: Candidate, workload: Workload, over: bool) -> tuple[bool, float, float]:
    """Sort key: those that may win first, then seconds per iteration, then money."""
    seconds, money = candidate.predicted_seconds, candidate.money_per_million_tokens(workload)
    unknown = math.inf
    return (
        not eligible(candidate, over),
        unknown if seconds is None else seconds,
        unknown if money is None else money,
    )


def workload_document(workload: Workload) -> dict[str, Any]:
    """What was planned, as JSON types."""
    profile = workload.profile
    return {
        "model": workload.model.name,
        "parameters": workload.model.params,
        "layers": len(profile.layers),
        "cluster": workload.cluster.name,
        "devices": workload.cluster.counts(),
        "global_batch": workload.global_batch,
        "sequence": workload.sequence,
        "precision": workload.precision,
        "tokens_per_iteration": workload.tokens_per_iteration,
        "state_bytes": workload.state_bytes,
        "usable_bytes": workload.device_bytes(),
        "price_per_hour": workload.cluster.price_per_hour(),
        "profile": profile.provenance.model_dump(mode="json"),
    }
