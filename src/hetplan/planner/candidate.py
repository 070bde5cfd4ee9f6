"""Candidates: the answers of a strategy's methods. A candidate is one row of the ranking. It has a
plan with its figures, or the reason why there is no plan."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hetplan.planner.variants import PLAIN, Variant
from hetplan.plans.ladder import Rung
from hetplan.plans.making import with_inputs as plan_with_inputs
from hetplan.plans.plan import Plan
from hetplan.profiling.inputs.inputs import Inputs
from hetplan.profiling.workload import Workload
from hetplan.replays.chains import Replay
from hetplan.solvers.run import Result, relative_gap
from hetplan.text import percent_text, seconds_text


@dataclass(frozen=True)
class StrategyMethod:
    """One way to solve the problems that a strategy poses. Its `name` is mostly that of a method of
    the problem's family (`solvers.registry`)."""

    name: str
    exact: bool = False  # whether it proves its answers, given time
    quick: bool = False  # whether it answers at once, so that a complete ranking exists early
    paper: bool = False  # whether it is the paper's own procedure


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One row of the ranking. A figure that is not known is None.

    A strategy says how long an iteration of its plan takes by the objective of its problem
    (`closed_form_seconds`); `search.replay_candidate` adds the replayed seconds
    (`predicted_seconds`). Where a plan cannot be replayed, the objective stands in for the replay,
    and `closed_form_seconds` is None, so that no table compares the objective with itself.
    """

    strategy: str
    method: StrategyMethod
    status: str  # status of a solver's result for the strategy's problem: `optimal`, `feasible` …
    variant: Variant = PLAIN
    closed_form_seconds: float | None = None  # seconds of an iteration, by the objective
    predicted_seconds: float | None = None  # replayed seconds of an iteration
    measured: bool = False  # whether predicted_seconds are measured instead of replayed
    objective: float | None = None  # objective of the strategy's problem, in its unit
    bound: float | None = None  # lower bound of that objective; it bounds no other strategy's
    fits_memory: bool | None = None
    peak_bytes: tuple[float, ...] | None = None  # [D] largest use of each device of the cluster
    # Lower bound, by computing alone, on the seconds of all plans with or without context and
    # expert ranks (the bound of `joint` holds only without them); None: not computed.
    computing_alone: float | None = None
    ladder: tuple[Rung, ...] = ()  # bounds of classes of plans; only `joint` has one
    solve_seconds: float = 0.0
    # details from the evaluator, for people
    details: Mapping[str, object] = field(default_factory=dict)
    plan: Plan | None = None
    message: str = ""  # the reason where there is no plan; else notes for the user
    failed: bool = False  # whether a fault of hetplan is why there is no plan
    replay: Replay | None = field(default=None, repr=False, compare=False)  # replay of the plan

    @classmethod
    def of_result(cls, strategy: str, method: StrategyMethod, result: Result[Any]) -> "Candidate":
        """A candidate without a plan, with the status, bound and message of a result."""
        message = result.message
        if method.exact and result.status == "feasible" and not message:
            message = f"not proven within the {seconds_text(result.seconds)} that it had"
        return cls(
            strategy=strategy,
            method=method,
            status=result.status,
            bound=result.bound,
            solve_seconds=result.seconds,
            message=message,
        )

    def __str__(self) -> str:
        """The candidate on one line: `amp/auto 347 ms, 0 % from its own problem's bound`, with
        `does not fit` where that is so; or the reason why there is no plan."""
        if self.plan is None:
            return f"{self.name}: {self.message or self.status}"
        text = f"{self.name} {seconds_text(self.predicted_seconds)}"
        if self.gap is not None:
            text += f", {percent_text(self.gap)} from its own problem's bound"
        return text if self.fits_memory else f"{text}, does not fit"

    @property
    def label(self) -> str:
        """The method and the variant: `auto+full@T4`."""
        return self.method.name + self.variant.label

    @property
    def name(self) -> str:
        """The strategy, the method and the variant: `amp/auto+full@T4`."""
        return f"{self.strategy}/{self.label}"

    @property
    def optimism(self) -> float | None:
        """Replayed seconds divided by those of the objective; None where one is missing."""
        if self.predicted_seconds is None or not self.closed_form_seconds:
            return None
        return self.predicted_seconds / self.closed_form_seconds

    @property
    def gap(self) -> float | None:
        """(objective - bound) / objective; None when either is unknown."""
        return relative_gap(self.objective, self.bound)

    def tokens_per_second(self, workload: Workload) -> float | None:
        """Tokens, or for images samples, per second of training; None where seconds are missing."""
        seconds = self.predicted_seconds
        return workload.tokens_per_iteration / seconds if seconds else None

    def flops_per_device(self, workload: Workload) -> float | None:
        """FLOP/s of matrix products on each device in use, without those of recomputation."""
        if self.plan is None or not self.predicted_seconds:
            return None
        return workload.flops_per_iteration / self.predicted_seconds / len(self.plan.ranks)

    def utilisation(self, workload: Workload) -> float | None:
        """Model FLOPs utilisation of the devices in use; None where a peak is unknown."""
        if self.plan is None or not self.predicted_seconds:
            return None
        types = [self.plan.devices[device].type for device in self.plan.ranks]
        return workload.utilisation(self.predicted_seconds, types)

    def interval_seconds(self, workload: Workload) -> list[float] | None:
        """[low, high] seconds of an iteration, by the error interval of the predicted operators;
        None where the profile or the seconds are measured."""
        if self.plan is None or self.predicted_seconds is None or self.measured:
            return None
        factors = workload.interval(self.plan.devices[device].type for device in self.plan.ranks)
        if factors is None:
            return None
        return [factor * self.predicted_seconds for factor in factors]

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
        dollars_per_second = sum(known) / 3600
        seconds_per_token = self.predicted_seconds / workload.tokens_per_iteration
        return dollars_per_second * seconds_per_token * 1e6

    def document(self, workload: Workload, *, with_inputs: bool = False) -> Mapping[str, Any]:
        """The candidate as JSON types. with_inputs: whether the plan includes its inputs, which are
        most of a plan file and are equal for all plans of a workload."""
        left_out = set[str]() if with_inputs else {"inputs"}
        plan = None if self.plan is None else self.plan.model_dump(mode="json", exclude=left_out)
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
            "interval_seconds": self.interval_seconds(workload),
            "tokens_per_second": self.tokens_per_second(workload),
            "flops_per_device": self.flops_per_device(workload),
            "mfu": self.utilisation(workload),
            "money_per_million_tokens": self.money_per_million_tokens(workload),
            "solve_seconds": self.solve_seconds,
            "plan": plan,
            "message": self.message,
            "closed_form_seconds": self.closed_form_seconds,
            "replayed": self.replay is not None,
            "recomputation": None if self.plan is None else self.plan.recomputation,
            "precision": self.variant.precision or workload.precision,
            "details": dict(self.details),
        }


def joined(*texts: str) -> str:
    """The texts, separated by semicolons; empty ones are left out."""
    return "; ".join(filter(None, texts))


def with_inputs(candidate: Candidate, inputs: Inputs | None) -> Candidate:
    """The candidate with `inputs`, the workload that its plan was made for, in the plan."""
    if candidate.plan is None:
        return candidate
    return replace(candidate, plan=plan_with_inputs(candidate.plan, inputs))
