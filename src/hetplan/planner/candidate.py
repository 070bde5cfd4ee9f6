"""A candidate: what one method of one strategy proposes for a workload, or why it proposes
nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hetplan.profiling.workload import Workload
from hetplan.runtime.plan import Plan
from hetplan.runtime.replay import Replay
from hetplan.text import Table


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One row of the ranking; what is not known is None.

    status: as in results (`optimal`, `feasible`, `infeasible`, `unknown`), of the strategy's own
    problem. predicted_seconds: seconds per iteration; strategies give those of their closed form,
    which the ranking replaces by the simulator's and keeps as closed_form_seconds
    (`planner.simulated`). objective, bound: of the strategy's own problem; a bound of one strategy
    is none for another. peak_bytes: memory held by each device of the cluster [D]. fits_memory:
    None without a plan. message: the reason where nothing was found, or anything worth telling.
    tables: the plan for people. replayed: None where the plan was not replayed. details: what the
    strategy's own evaluator says beside the objective. precision: the one planned in.
    """

    strategy: str
    method: str
    status: str
    predicted_seconds: float | None = None
    objective: float | None = None
    bound: float | None = None
    fits_memory: bool | None = None
    peak_bytes: tuple[float, ...] | None = None
    solve_seconds: float = 0.0
    details: Mapping[str, object] = field(default_factory=dict)
    plan: Plan | None = None
    message: str = ""
    tables: tuple[Table, ...] = ()
    closed_form_seconds: float | None = None
    replayed: Replay | None = field(default=None, repr=False, compare=False)
    precision: str | None = None

    @property
    def name(self) -> str:
        """`strategy/method`."""
        return f"{self.strategy}/{self.method}"

    @property
    def optimism(self) -> float | None:
        """How many times longer the replay takes than the closed form says; None where one is
        missing."""
        if self.predicted_seconds is None or not self.closed_form_seconds:
            return None
        return self.predicted_seconds / self.closed_form_seconds

    @property
    def gap(self) -> float | None:
        """(objective - bound) / objective; None when either is unknown."""
        if self.objective is None or self.bound is None:
            return None
        return max(0.0, 1.0 - self.bound / self.objective) if self.objective > 0 else 0.0

    def tokens_per_second(self, workload: Workload) -> float | None:
        """Tokens (images) per second of training."""
        if not self.predicted_seconds:
            return None
        return workload.tokens_per_iteration / self.predicted_seconds

    def money_per_million_tokens(self, workload: Workload) -> float | None:
        """US dollars per million tokens for the devices that the plan uses; None where a price is
        unknown."""
        if self.plan is None or self.predicted_seconds is None:
            return None
        specs = workload.cluster.specs
        prices = [
            specs[self.plan.devices[device].type].price_per_hour for device in self.plan.ranks
        ]
        known = [price for price in prices if price is not None]
        if len(known) != len(prices):
            return None
        return sum(known) / 3600 * self.predicted_seconds / workload.tokens_per_iteration * 1e6

    def document(self, workload: Workload) -> Mapping[str, Any]:
        """As JSON types."""
        return {
            "strategy": self.strategy,
            "method": self.method,
            "status": self.status,
            "predicted_seconds": self.predicted_seconds,
            "objective": self.objective,
            "bound": self.bound,
            "gap": self.gap,
            "fits_memory": self.fits_memory,
            "peak_bytes": None if self.peak_bytes is None else list(self.peak_bytes),
            "tokens_per_second": self.tokens_per_second(workload),
            "money_per_million_tokens": self.money_per_million_tokens(workload),
            "solve_seconds": self.solve_seconds,
            "plan": None if self.plan is None else self.plan.model_dump(mode="json"),
            "message": self.message,
            "closed_form_seconds": self.closed_form_seconds,
            "replayed": self.replayed is not None,
            "recomputation": None if self.plan is None else self.plan.recomputation,
            "precision": self.precision,
            "details": dict(self.details),
        }
