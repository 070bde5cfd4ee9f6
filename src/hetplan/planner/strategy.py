"""Strategies: the interface that they implement, and how they are made by name.

A strategy poses problems of a workload. Each of its methods answers each problem with a candidate:
a plan that it proposes, or the reason why it proposes none.

To add a strategy, write a class in a file of its own and add a line to
`hetplan.planner.STRATEGIES`. `DataParallel` in `planner/amp.py` is the shortest example.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol

from hetplan.errors import look_up, require
from hetplan.planner import ALL, STRATEGIES
from hetplan.planner.candidate import Candidate, StrategyMethod
from hetplan.plans.plan import Plan, Stage
from hetplan.profiling.workload import Workload
from hetplan.schema import StrictModel, parse
from hetplan.solvers.registry import load
from hetplan.solvers.run import Run

# Strategy -> name -> value, as JSON types.
Settings = Mapping[str, Mapping[str, object]]


class Problem(Protocol):
    """One problem posed of a workload, which the methods of its strategy solve."""

    def as_listed(self, method: StrategyMethod) -> StrategyMethod:
        """The method as the ranking lists it beside its candidates of this problem.

        A strategy that poses several problems tells their candidates apart by it (`auto-zero2`),
        and takes back what the method does not do for this problem, such as proving its answers.
        """
        return method

    def solve(self, method: StrategyMethod, run: Run) -> Candidate | None:
        """The method's candidate, with the seconds of the problem's objective; None where another
        method says all that this one would say of the problem.

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
    # Whether it is asked again under recomputation where its plans do not fit.
    recomputes: ClassVar[bool] = False
    slow: ClassVar[bool] = False  # asked after the others, since it may take all its time

    def pose(self, workload: Workload, run: Run) -> Sequence[Problem]:
        """The problems of the workload, which is already that of a variant: under recomputation its
        backward passes take longer and its layers keep less (`variants.with_recomputation`), and a
        part of the cluster is the whole cluster here.

        Raises NoPlan where there are no problems, and InputError only for what makes the whole
        workload unusable.
        """
        ...

    def within_replay(self, workload: Workload, run: Run, bound: float | None) -> Candidate | None:
        """The best plan within the memory that the replay counts, asked for where the problem
        counts less and its best plan does not fit when replayed.

        workload: as in `pose`. bound: of the problem, which holds for these plans, too. Returns
        None where no such plan is found, and a candidate `infeasible` where it is proven that there
        is none.
        """
        return None

    def beginning_with(self, plans: Iterable[Plan]) -> "Strategy":
        """The strategy with plans of other strategies to begin its search with; itself where it
        uses none."""
        return self


class NoPlan(Exception):
    """There is no plan. status: `infeasible` where that is proven, else `unknown`. seconds: spent
    on finding that out."""

    def __init__(self, status: str, reason: str, seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.status, self.reason, self.seconds = status, reason, seconds


def make_strategies(
    names: str | Sequence[str] | None = None, settings: Settings | None = None
) -> list[Strategy]:
    """The strategies of these names, made with their settings, each once; all strategies for `all`
    or without names. A text holds one name, or several separated by commas.

    Raises InputError for unknown names, and for settings that are not usable.
    """
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
    names = list(STRATEGIES) if names is None or ALL in names else list(dict.fromkeys(names))
    settings = settings or {}
    require(names, "no strategy named", expected=f"some of {', '.join(STRATEGIES)}")
    kinds: dict[str, Any] = {
        name: load(look_up("unknown strategy", name, STRATEGIES)) for name in names
    }
    known = [f"{n}.{key}" for n, kind in kinds.items() for key in kind.Settings.model_fields]
    for setting in (f"{name}.{key}" for name, values in settings.items() for key in values):
        require(
            setting in known,
            "no such setting",
            got=setting,
            expected=f"one of {', '.join(known)}" if known else "none: these strategies have none",
        )
    strategies = []
    for name, kind in kinds.items():
        values = dict(settings.get(name, {}))
        if values:
            strategies.append(kind(parse(kind.Settings, values, where=f"setting {name}")))
        else:
            strategies.append(kind())
    return strategies


def begin_run(run: Run, label: str) -> Run:
    """A run with the time that is left of `run`, whose progress shows in `run` under `label`.

    The incumbent and bound that `run` shows are cleared, for those of different problems do not
    compare.
    """
    run.incumbent = run.bound = None
    run.report(note=label)
    return replace(run.share(1, label), hopeless=run.hopeless)


def tensor_stage(layers: Sequence[tuple[int, int]], group: Sequence[int]) -> Stage:
    """A stage whose devices take equal parts of every weight."""
    return Stage(layers=list(layers), devices=[list(group)], tensor_shares=[1.0] * len(group))
