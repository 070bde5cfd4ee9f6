"""Plan a workload by several strategies and rank what they propose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hetplan.errors import InputError
from hetplan.planner.candidate import Candidate
from hetplan.planner.candidates import Search, Tell
from hetplan.planner.explain import explain
from hetplan.planner.parts import MOST_TYPES, on_parts, pareto
from hetplan.planner.parts import cheapest_within as cheapest_within_of
from hetplan.planner.relax import Relaxation, relaxations
from hetplan.planner.settings import Settings, check_settings
from hetplan.planner.strategies import Strategy, chosen
from hetplan.profiling.workload import Workload
from hetplan.schema import derived
from hetplan.solvers.run import Run
from hetplan.text import number_text


@dataclass(frozen=True)
class Planning:
    """Candidates best first. winner: index of the best one that fits (and costs no more than the
    limit).

    workload: in the winner's precision. notes: what was tried in vain. relaxations: where no plan
    fits in memory, what would make one fit. precisions: all that were planned. money_limit: dollars
    per million tokens. cheapest_within: percent, where not the fastest wins but the cheapest that
    is at most so much slower.
    """

    workload: Workload
    candidates: tuple[Candidate, ...]
    winner: int | None
    notes: tuple[str, ...] = ()
    relaxations: tuple[Relaxation, ...] = ()
    precisions: tuple[str, ...] = ()
    money_limit: float | None = None
    cheapest_within: float | None = None

    @property
    def best(self) -> Candidate | None:
        """The winner itself."""
        return None if self.winner is None else self.candidates[self.winner]

    def document(self) -> dict[str, Any]:
        """As JSON types."""
        return {
            "workload": {**workload_document(self.workload), "precisions": list(self.precisions)},
            "candidates": [candidate.document(self.workload) for candidate in self.candidates],
            "winner": self.winner,
            "pareto": pareto(self.candidates, self.workload),
            "notes": list(self.notes),
            "relaxations": [relaxation.document() for relaxation in self.relaxations],
            "explanation": None if self.winner is None else explain(self).document(),
        }


def make_plans(
    workload: Workload | Sequence[Workload],
    strategies: Sequence[str] | None = None,
    run: Run | None = None,
    *,
    money_limit: float | None = None,
    settings: Settings | None = None,
    found_one: Tell | None = None,
    parts: bool = False,
    cheapest_within: float | None = None,
    notes: Sequence[str] = (),
) -> Planning:
    """Solve `workload` by each strategy (all by default), replay the plans, rank them by seconds,
    then money.

    Several workloads, the same in different precisions (`planner.precisions`), are ranked together.
    A plan that does not fit in memory, or costs more than `money_limit` dollars per million tokens,
    never wins. The run's time limit is for each method of a strategy. settings: strategy -> name ->
    value, what a strategy has to set of its own. found_one: called with every candidate as it is
    found. parts: plan on every part of the cluster by device type, too
    (`planner.parts`). cheapest_within: percent; not the fastest wins but the cheapest that is at
    most so much slower. notes: to stand before those of the planning. Raises InputError for unknown
    strategies or settings, a money limit without prices, or a workload that cannot be posed.
    """
    every = (workload,) if isinstance(workload, Workload) else tuple(workload)
    run, settings, first = run or Run(), settings or {}, every[0]
    picked = picked_strategies(first, strategies, money_limit=money_limit, settings=settings)
    check_percent(first, cheapest_within)
    several = len(every) > 1
    searches = [
        Search(s, w, run, settings.get(s.name), found_one, precision_named=several)
        for s in picked
        for w in every
    ]
    found, tried = searched(searches)
    told = [*notes, *tried]
    if parts:
        on_some = [c for w in every for c in on_parts(w, picked, run, settings, found_one, several)]
        found, left_out = undominated(found, on_some, first)
        told += left_out
        if (types := len(first.cluster.types)) > MOST_TYPES:
            told.append(
                f"parts of {types} device types: of one, of two, and of all but one (not every combination)"
            )
    judged = [over_budget(c, first, money_limit) for c in found]
    ranked = sorted(judged, key=lambda pair: rank(pair[0], first, pair[1]))
    candidates = tuple(candidate for candidate, _ in ranked)
    won = 0 if ranked and eligible(*ranked[0]) else None
    if won is not None and cheapest_within is not None:
        allowed = [candidate for candidate, over in ranked if eligible(candidate, over)]
        won = cheapest(allowed, first, cheapest_within)
    relaxed: tuple[Relaxation, ...] = ()
    if not any(candidate.fits_memory for candidate in candidates) and not run.cancelled:
        relaxed = what_would_fit(every, run, picked)
    winning = first if won is None else of_precision(every, candidates[won].precision)
    precisions = tuple(w.precision for w in every)
    return Planning(
        winning, candidates, won, tuple(told), relaxed, precisions, money_limit, cheapest_within
    )


def searched(searches: Sequence[Search]) -> tuple[list[Candidate], list[str]]:
    """All candidates, strategy by strategy, and notes on what was tried in vain.

    What answers at once comes first, so that a complete ranking stands early, then what proves; the
    other heuristics are for comparison. Strategies that end soon go before those that may take all
    their time.
    """
    order = sorted(range(len(searches)), key=lambda i: searches[i].strategy.slow)
    first = {i: searches[i].first_ones() for i in order}
    found: dict[int, list[Candidate]] = {}
    tried: dict[str, list[str]] = {}
    for i in order:
        found[i] = searches[i].exact_ones()
    for i in order:
        more, told = searches[i].with_recomputation(found[i])
        found[i] += more
        for text in told:
            tried.setdefault(text, []).append(searches[i].name)
    for i in order:
        found[i] += [*searches[i].other_ones(but=searches[i].strategy.first), *first[i]]
    notes = [f"{', '.join(names)}: {text}" for text, names in tried.items()]
    return [candidate for i in range(len(searches)) for candidate in found[i]], notes


def what_would_fit(
    workloads: Sequence[Workload], run: Run, strategies: Sequence[Strategy]
) -> tuple[Relaxation, ...]:
    """The relaxations of the workload whose layers keep least."""
    least = min(workloads, key=lambda w: sum(layer.saved_bytes for layer in w.profile.layers))
    with derived(f"{least.model.name} on {least.cluster.name} with more memory"):
        return tuple(relaxations(least, run, strategies))


def of_precision(workloads: Sequence[Workload], precision: str | None) -> Workload:
    """The one in that precision."""
    return next((w for w in workloads if w.precision == precision), workloads[0])


def undominated(
    found: list[Candidate], more: Sequence[Candidate], workload: Workload
) -> tuple[list[Candidate], list[str]]:
    """All of `found`, and those of `more` that nothing beats in both time and money; a note on the
    others."""
    together = [*found, *more]
    front = [together[i] for i in pareto(together, workload)]
    kept = [c for c in more if any(c is other for other in front)]
    if len(kept) == len(more):
        return [*found, *kept], []
    text = f"{len(more) - len(kept)} plans on parts of the cluster are beaten in time and money, and left out"
    return [*found, *kept], [text]


def cheapest(allowed: Sequence[Candidate], workload: Workload, percent: float) -> int:
    """Index of the cheapest within `percent` of the fastest; the allowed stand first in the
    ranking, in this order."""
    at = cheapest_within_of(allowed, workload, percent)
    return 0 if at is None else at


def picked_strategies(
    workload: Workload,
    strategies: Sequence[str] | None = None,
    *,
    money_limit: float | None = None,
    settings: Settings | None = None,
) -> list[Strategy]:
    """The strategies that `make_plans` would try with these arguments, which are checked; raises
    InputError."""
    picked = chosen(strategies)
    if settings:
        check_settings(settings, {strategy.name: strategy.settings_model() for strategy in picked})
    check_money_limit(workload, money_limit)
    return picked


def check_percent(workload: Workload, percent: float | None) -> None:
    """Refuse a share that is none, or prices that are unknown."""
    if percent is None:
        return
    if not (percent >= 0 and math.isfinite(percent)):
        raise InputError(
            "percent that a cheaper plan may be slower", got=percent, expected="a number from 0 on"
        )
    check_prices(workload, "cheapest plan")


def check_money_limit(workload: Workload, limit: float | None) -> None:
    """Refuse a limit that is no amount, or that cannot be compared with anything."""
    if limit is None:
        return
    if not (limit > 0 and math.isfinite(limit)):
        raise InputError(
            "money limit", got=limit, expected="dollars per million tokens greater than 0"
        )
    check_prices(workload, "money limit")


def check_prices(workload: Workload, what: str) -> None:
    """Refuse what compares money where a price is unknown."""
    for name in workload.cluster.types:
        if workload.cluster.specs[name].price_per_hour is None:
            raise InputError(
                f"{what}, but device {name!r} has no price",
                where=f"cluster {workload.cluster.name}",
                expected="price_per_hour of every device",
            )


def over_budget(
    candidate: Candidate, workload: Workload, limit: float | None
) -> tuple[Candidate, bool]:
    """The candidate and whether it exceeds the limit; its message then says so."""
    money = candidate.money_per_million_tokens(workload)
    if limit is None or money is None or money <= limit:
        return candidate, False
    text = (
        f"costs {number_text(money, 4)} per million tokens, above the limit {number_text(limit, 4)}"
    )
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
