"""Strategies: the interface that they implement, how they are asked, and what they answer with.

A strategy poses problems of a workload. Each of its methods answers each problem with a candidate:
a plan that it proposes, or the reason why it proposes none.

To add a strategy, write a class in a file of its own and add a line to
`hetplan.planner.STRATEGIES`. `DataParallel` in `planner/amp.py` is the shortest example.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

from hetplan.errors import InputError, UnsupportedError
from hetplan.formulations.joint.plan import Plan, Stage
from hetplan.names import unknown_name
from hetplan.planner import ALL, STRATEGIES
from hetplan.planner.variant import PLAIN, Variant
from hetplan.profiling.workload import Workload
from hetplan.runtime.replay import Replay
from hetplan.schema import StrictModel, derived, parse
from hetplan.solvers.registry import load
from hetplan.solvers.result import Result, relative_gap
from hetplan.solvers.run import Progress, Run
from hetplan.text import seconds_text

# Strategy -> name -> value, as JSON types.
Settings = Mapping[str, Mapping[str, object]]


@dataclass(frozen=True)
class StrategyMethod:
    """One way to solve the problems that a strategy poses. (A family's methods are those of
    `solvers.registry`.)"""

    name: str
    exact: bool = False  # proves its answers, given time
    quick: bool = False  # answers at once, so that a complete ranking stands early
    paper: bool = False  # the paper's own procedure


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One row of the ranking; what is not known is None.

    A strategy sets `closed_form_seconds`; `search.replay_candidate` adds `predicted_seconds`. Where
    a plan cannot be replayed, its closed form stands in for the prediction, and
    `closed_form_seconds` is None, so that no table compares the formula with itself.
    """

    strategy: str
    method: StrategyMethod
    status: str  # as in results (`optimal`, `feasible` …), of the strategy's own problem
    variant: Variant = PLAIN
    closed_form_seconds: float | None = None  # of an iteration, by the strategy's own formula
    predicted_seconds: float | None = None  # of an iteration, by the replay
    measured: bool = False  # whether measurements say the predicted seconds, and no replay does
    objective: float | None = None  # of the strategy's own problem
    bound: float | None = None  # of the same problem; it bounds no other strategy's
    fits_memory: bool | None = None
    peak_bytes: tuple[float, ...] | None = None  # [D] held by each device of the cluster
    solve_seconds: float = 0.0
    details: Mapping[str, object] = field(default_factory=dict)  # the evaluator's, for people
    plan: Plan | None = None
    message: str = ""  # the reason where there is no plan, or anything worth telling
    replay: Replay | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of_result(cls, strategy: str, method: StrategyMethod, result: Result[Any]) -> "Candidate":
        """What a result says beside its decision."""
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

    def flops_per_device(self, workload: Workload) -> float | None:
        """FLOP/s of matrix products on each device in use, nothing computed again."""
        if self.plan is None or not self.predicted_seconds:
            return None
        return workload.flops_per_iteration / self.predicted_seconds / len(self.plan.ranks)

    def utilisation(self, workload: Workload) -> float | None:
        """Model FLOPs utilisation of the devices in use; None where a peak is unknown."""
        if self.plan is None or not self.predicted_seconds:
            return None
        types = [self.plan.devices[one].type for one in self.plan.ranks]
        return workload.utilisation(self.predicted_seconds, types)

    def interval_seconds(self, workload: Workload) -> list[float] | None:
        """[low, high] of an iteration, by the interval of the predicted operators; None of measured
        profiles and seconds."""
        if self.plan is None or self.predicted_seconds is None or self.measured:
            return None
        ends = workload.interval(self.plan.devices[device].type for device in self.plan.ranks)
        return None if ends is None else [end * self.predicted_seconds for end in ends]

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
            "interval_seconds": self.interval_seconds(workload),
            "tokens_per_second": self.tokens_per_second(workload),
            "flops_per_device": self.flops_per_device(workload),
            "mfu": self.utilisation(workload),
            "money_per_million_tokens": self.money_per_million_tokens(workload),
            "solve_seconds": self.solve_seconds,
            "plan": None if self.plan is None else self.plan.model_dump(mode="json"),
            "message": self.message,
            "closed_form_seconds": self.closed_form_seconds,
            "replayed": self.replay is not None,
            "recomputation": None if self.plan is None else self.plan.recomputation,
            "precision": self.variant.precision or workload.precision,
            "details": dict(self.details),
        }


def joined(*texts: str) -> str:
    """Messages behind each other; empty ones are left out."""
    return "; ".join(filter(None, texts))


class Problem(Protocol):
    """One problem posed of a workload, which the methods of its strategy solve."""

    def renamed(self, method: StrategyMethod) -> StrategyMethod:
        """The method under the name that its candidates of this problem bear."""
        return method

    def solve(self, method: StrategyMethod, run: Run) -> Candidate | None:
        """The method's candidate, with the closed form's seconds; None where the method has nothing
        to add to what another one says of this problem.

        The plan's `origin` is text that follows the method's name in the plan file; mostly it is
        empty. Raises NoPlan or UnsupportedError with the reason where there is no plan.
        """
        ...


class Strategy(Protocol):
    """A way to plan a workload: a paper's problem, posed, solved, and read back as a plan.

    Made without arguments, or with a model of `Settings`.
    """

    name: ClassVar[str]
    methods: ClassVar[tuple[StrategyMethod, ...]]  # the best first
    Settings: ClassVar[type[StrictModel]] = StrictModel  # what only its user can set
    recomputes: ClassVar[bool] = False  # whether it is searched with recomputation, too
    slow: ClassVar[bool] = False  # searched after the others, for it may take all its time

    def pose(self, workload: Workload, run: Run) -> Sequence[Problem]:
        """The problems of the workload; raises NoPlan where there are none, and InputError only for
        what makes the whole workload unusable."""
        ...

    def within_replay(self, workload: Workload, run: Run, bound: float | None) -> Candidate | None:
        """The best plan within the memory that the replay counts, where the problem cannot say it.

        bound: one that is known to hold for these plans, too. Returns None where no such plan is
        found, a candidate `infeasible` where it is proven that there is none.
        """
        return None

    def beginning_with(self, plans: Iterable[Plan]) -> "Strategy":
        """The strategy with plans of others to begin with, where it is one that can use them."""
        return self


class NoPlan(Exception):
    """There is no plan. status: `infeasible` where that is proven, else `unknown`. seconds: what it
    took to find that out."""

    def __init__(self, status: str, reason: str, seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.status, self.reason, self.seconds = status, reason, seconds


def make_strategies(
    names: Sequence[str] | None = None, settings: Settings | None = None
) -> list[Strategy]:
    """The strategies of these names, made with their settings, each once; all strategies for `all`
    or without names.

    Raises InputError for unknown names, and for settings that are not usable.
    """
    names = list(STRATEGIES) if names is None or ALL in names else list(dict.fromkeys(names))
    settings = settings or {}
    if not names:
        raise InputError("no strategy named", expected=f"some of {', '.join(STRATEGIES)}")
    for name in names:
        if name not in STRATEGIES:
            raise unknown_name("unknown strategy", name, STRATEGIES)
    kinds: dict[str, Any] = {name: load(STRATEGIES[name]) for name in names}
    known = [f"{n}.{key}" for n, kind in kinds.items() for key in kind.Settings.model_fields]
    for setting in (f"{name}.{key}" for name, values in settings.items() for key in values):
        if setting not in known:
            expected = f"one of {', '.join(known)}" if known else "none: these strategies have none"
            raise InputError("no such setting", got=setting, expected=expected)
    return [
        kind(parse(kind.Settings, dict(settings[name]), where=f"setting {name}"))
        if settings.get(name)
        else kind()
        for name, kind in kinds.items()
    ]


def propose(
    strategy: Strategy,
    workload: Workload,
    run: Run,
    methods: Sequence[StrategyMethod] | None = None,
) -> list[Candidate]:
    """One candidate per problem and method (all by default), with a plan or the reason why there is
    none. Each method gets an equal share of the time that is left."""
    methods = strategy.methods if methods is None else methods
    with derived(f"{workload.model.name} on {workload.cluster.name} as {strategy.name}"):
        try:
            problems = strategy.pose(workload, run)
        except (NoPlan, UnsupportedError) as error:
            return [refused(strategy, method, error) for method in methods]
        calls = [(problem, method) for problem in problems for method in methods]
        every = [
            attempt(strategy, *call, run.share(len(calls) - i)) for i, call in enumerate(calls)
        ]
        return [candidate for candidate in every if candidate is not None]


def attempt(
    strategy: Strategy, problem: Problem, method: StrategyMethod, run: Run
) -> Candidate | None:
    """One method on one problem. After an interruption, the candidate says that it never began."""
    named = problem.renamed(method)
    try:
        if run.cancelled:
            raise NoPlan("unknown", "not begun: stopped from the keyboard")
        candidate = problem.solve(method, begin_run(run, f"{strategy.name}/{named.name}"))
    except (NoPlan, UnsupportedError) as error:
        return refused(strategy, named, error)
    return None if candidate is None else replace(candidate, method=named)


def refused(
    strategy: Strategy, method: StrategyMethod, error: NoPlan | UnsupportedError
) -> Candidate:
    """The row of the ranking that says why there is no plan."""
    reason = error if isinstance(error, NoPlan) else NoPlan("unknown", str(error))
    return Candidate(
        strategy=strategy.name,
        method=method,
        status=reason.status,
        message=reason.reason,
        solve_seconds=reason.seconds,
    )


def begin_run(run: Run, label: str) -> Run:
    """A run with the time that is left of `run`, whose progress shows in `run` under `label`.

    The incumbent and bound that `run` shows are cleared, for those of different problems do not
    compare.
    """
    run.incumbent = run.bound = None
    run.report(note=label)

    def forward(progress: Progress) -> None:
        note = f"{label} {progress.note}".strip()
        run.report(incumbent=progress.incumbent, bound=progress.bound, note=note)

    return replace(run.part(), watch=forward)


def tensor_stage(layers: Sequence[tuple[int, int]], group: Sequence[int]) -> Stage:
    """A stage whose devices take equal parts of every weight."""
    return Stage(layers=list(layers), devices=[list(group)], tensor_shares=[1.0] * len(group))
