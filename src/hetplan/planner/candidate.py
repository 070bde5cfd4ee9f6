"""A candidate: what one method of one strategy proposes for a workload, or why it proposes nothing;
and what its plan takes on the simulator, the figure that plans of different strategies compare by.

A strategy's closed form prices what its paper prices. The replay counts the rest: network cards
that the ranks of a node share, gradients sent back, tied weights, the optimizer's step,
recomputation's working memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hetplan.errors import UnsupportedError
from hetplan.planner.variant import PLAIN, Variant, renumbered
from hetplan.profiling.workload import Workload
from hetplan.runtime.plan import Plan, Prediction
from hetplan.runtime.replay import Replay, replay
from hetplan.solvers.result import Result, relative_gap
from hetplan.text import Table, share_text

MOST_PASSES = 1_000_000  # micro-batches times stages of all replicas


@dataclass(frozen=True)
class Method:
    """One way to solve what a strategy poses."""

    name: str
    exact: bool = False  # proves its answers, given time
    quick: bool = False  # answers at once, so that a complete ranking stands early
    paper: bool = False  # the paper's own procedure


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One row of the ranking; what is not known is None."""

    strategy: str
    method: Method
    status: str  # as in results (`optimal`, `feasible` …), of the strategy's own problem
    variant: Variant = PLAIN
    predicted_seconds: float | None = None  # of an iteration: by the replay, before by the formula
    closed_form_seconds: float | None = None  # by the strategy's formula, once replayed
    objective: float | None = None  # of the strategy's own problem
    bound: float | None = None  # of the same; a bound of one strategy is none for another
    fits_memory: bool | None = None
    peak_bytes: tuple[float, ...] | None = None  # [D] held by each device of the cluster
    solve_seconds: float = 0.0
    details: Mapping[str, object] = field(default_factory=dict)  # the evaluator's, for people
    plan: Plan | None = None
    message: str = ""  # the reason where there is no plan, or anything worth telling
    tables: tuple[Table, ...] = ()  # the plan, for people
    replayed: Replay | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of_result(cls, strategy: str, method: Method, result: Result[Any]) -> Candidate:
        """What a result says beside its decision."""
        return cls(
            strategy=strategy,
            method=method,
            status=result.status,
            bound=result.bound,
            solve_seconds=result.seconds,
            message=result.message,
        )

    @property
    def label(self) -> str:
        """The method and the variant: `auto+full@T4`."""
        return self.method.name + self.variant.label

    @property
    def name(self) -> str:
        """`amp/auto+full@T4`."""
        return f"{self.strategy}/{self.label}"

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
        return relative_gap(self.objective, self.bound)

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
        types = [self.plan.devices[device].type for device in self.plan.ranks]
        prices = [workload.cluster.specs[name].price_per_hour for name in types]
        known = [price for price in prices if price is not None]
        if len(known) < len(prices):
            return None
        return sum(known) / 3600 * self.predicted_seconds / workload.tokens_per_iteration * 1e6

    def document(self, workload: Workload) -> Mapping[str, Any]:
        """As JSON types."""
        return {
            "strategy": self.strategy,
            "method": self.label,
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
            "precision": self.variant.precision or workload.precision,
            "details": dict(self.details),
        }


def joined(*texts: str) -> str:
    """Messages behind each other; empty ones are left out."""
    return "; ".join(filter(None, texts))


def shortest(candidates: Iterable[Candidate]) -> Candidate | None:
    """The one with the shortest predicted iteration, the first of equals."""
    timed = [c for c in candidates if c.predicted_seconds is not None]
    return min(timed, key=lambda c: c.predicted_seconds or 0.0, default=None)


def simulated(candidate: Candidate, workload: Workload) -> Candidate:
    """The candidate with the replay's seconds and memory; one that cannot be replayed keeps its own
    and says so. Its plan says what is predicted of it."""
    plan = candidate.plan
    if plan is None:
        return candidate
    try:
        passes = sum(r.steps * len(r.stages) * len(r.stages[0].layers) for r in plan.replicas)
        if passes > MOST_PASSES:
            raise UnsupportedError(
                "too many micro-batches to replay",
                where=plan.name,
                got=passes,
                expected=f"{MOST_PASSES} passes",
            )
        own = replay(plan, workload)
    except UnsupportedError as error:
        text = f"not replayed, the iteration is that of the closed form: {error}"
        candidate = replace(candidate, message=joined(candidate.message, text))
    else:
        excess = misfit(candidate, own, workload)
        candidate = replace(
            candidate,
            predicted_seconds=own.seconds,
            closed_form_seconds=candidate.predicted_seconds,
            fits_memory=candidate.fits_memory is True and not excess,
            peak_bytes=own.peak_bytes,
            replayed=own,
            message=joined(candidate.message, excess),
        )
    prediction = Prediction(
        strategy=candidate.strategy,
        method=candidate.label,
        predicted_seconds=candidate.predicted_seconds,
        closed_form_seconds=candidate.closed_form_seconds,
        objective=candidate.objective,
        bound=candidate.bound,
    )
    return replace(candidate, plan=plan.model_copy(update={"prediction": prediction}))


def misfit(candidate: Candidate, own: Replay, workload: Workload) -> str:
    """Why the replayed plan does not fit where its strategy says that it does; nothing where it
    fits.

    Devices that the strategy itself lets exceed their limit have been tried with that batch, which
    is more than a prediction.
    """
    if candidate.fits_memory is not True or candidate.peak_bytes is None:
        return ""
    sizes = zip(own.peak_bytes, own.limit_bytes, candidate.peak_bytes, strict=True)
    excess = [held - limit if held > limit >= said else 0.0 for held, limit, said in sizes]
    if not any(excess):
        return ""
    device = excess.index(max(excess))
    return (
        f"does not fit when replayed: device {device} ({workload.cluster.devices[device].type}) "
        f"holds {share_text(own.peak_bytes[device], own.limit_bytes[device])}"
    )


def moved(candidate: Candidate, workload: Workload, numbers: Sequence[int]) -> Candidate:
    """A candidate of another cluster on devices of the workload's, replayed there.

    numbers: as in `renumbered`. What is not replayed at first is not replayed here either.
    """
    assert candidate.plan is not None
    plan = renumbered(candidate.plan, workload, numbers)
    if candidate.replayed is not None:
        own = replay(plan, workload)
        return replace(
            candidate,
            plan=plan,
            predicted_seconds=own.seconds,
            peak_bytes=own.peak_bytes,
            replayed=own,
        )
    peaks = [0.0] * len(workload.cluster.devices)
    for number, held in zip(numbers, candidate.peak_bytes or (), strict=True):
        if number >= 0:
            peaks[number] = held
    return replace(candidate, plan=plan, peak_bytes=tuple(peaks))
