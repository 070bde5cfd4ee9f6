"""The interface of a strategy, and the construction of strategies by name.

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
from hetplan.plans.plan import PassSchedule, Plan, Stage
from hetplan.profiling.workload import Workload
from hetplan.schema import StrictModel, parse
from hetplan.solvers.registry import load
from hetplan.solvers.run import Run

# Strategy -> name of a setting -> value, as JSON types.
Settings = Mapping[str, Mapping[str, object]]


class Problem(Protocol):
    """One problem that a strategy poses of a workload, and that the strategy's methods solve."""

    def as_listed(self, method: StrategyMethod) -> StrategyMethod:
        """The method with the name and the flags by which the ranking lists its candidate for this
        problem.

        A strategy that poses several problems gives their methods different names (`auto-zero2`).
        It clears flags that do not hold for this problem, such as `exact`.
        """
        return method

    def solve(self, method: StrategyMethod, run: Run) -> Candidate | None:
        """The method's candidate, with the seconds of the problem's objective; None if the method
        does not apply to the problem, or has nothing to say beyond other methods.

        The `origin` of the candidate's plan is the text that follows the method's name in the plan
        file, and mostly empty. Raises NoPlan or UnsupportedError with the reason where there is no
        plan.
        """
        ...


class Strategy(Protocol):
    """A strategy: it poses a paper's problem of a workload, has methods that solve it, and makes
    plans of the solutions. It is constructed without arguments, or with an instance of `Settings`.
    """

    name: ClassVar[str]
    methods: ClassVar[tuple[StrategyMethod, ...]]  # the best first
    Settings: ClassVar[type[StrictModel]] = StrictModel  # model of the settings of this strategy
    # Whether it is asked again under recomputation if its plans do not fit.
    recomputes: ClassVar[bool] = False
    # Whether it may take all its time, so that it is asked after the others.
    slow: ClassVar[bool] = False

    def pose(self, workload: Workload, run: Run) -> Sequence[Problem]:
        """The problems of a workload.

        The workload is already that of a variant. Under recomputation its backward passes take
        longer and its layers keep less (`variants.with_recomputation`); on a part of the cluster
        its cluster is that part. Raises NoPlan where there are no problems. Raises InputError only
        where the whole workload is unusable.
        """
        ...

    def within_replay(self, workload: Workload, run: Run, bound: float | None) -> Candidate | None:
        """The best candidate within the memory that the replay counts. It is asked for if the
        problem counts less memory, and its best plan does not fit when replayed.

        workload: see `pose`. bound: lower bound of the problem, which holds for these plans, too.
        Returns None if no such plan is found, and a candidate with status `infeasible` if it is
        proven that there is none.
        """
        return None

    def beginning_with(self, plans: Iterable[Plan]) -> "Strategy":
        """The strategy with plans of other strategies with which its search begins. A strategy that
        does not use such plans returns itself."""
        return self

    def within_levels(self, levels: Sequence[int]) -> "Strategy":
        """The strategy that poses only problems of these ZeRO levels. A strategy whose problems are
        not of one level each returns itself; its plans of other levels cannot win."""
        return self

    def within_schedules(self, schedules: Sequence[PassSchedule]) -> "Strategy":
        """The strategy that chooses among these schedules. A strategy whose plans have a schedule
        of their own returns itself; its plans under other schedules cannot win."""
        return self


class NoPlan(Exception):
    """Raised where a strategy or a method has no plan."""

    def __init__(self, status: str, reason: str, seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.status = status  # `infeasible` if it is proven that there is no plan; else `unknown`
        self.reason = reason  # for the user
        self.seconds = seconds  # spent on the problem


def make_strategies(
    names: str | Sequence[str] | None = None, settings: Settings | None = None
) -> list[Strategy]:
    """The strategies of the given names, each once, with their settings.

    names: a list, or one text with commas between the names; None, or `all` among them: all
    strategies. settings: None: the defaults. Raises InputError for unknown names, and for settings
    that are not usable.
    """
    if isinstance(names, str):
        names = [name.strip() for name in names.split(",")]
    names = list(STRATEGIES) if names is None or ALL in names else list(dict.fromkeys(names))
    settings = settings or {}
    require(names, "no strategy named", expected=f"some of {', '.join(STRATEGIES)}")
    classes: dict[str, Any] = {
        name: load(look_up("unknown strategy", name, STRATEGIES)) for name in names
    }
    known = [f"{n}.{key}" for n, cls in classes.items() for key in cls.Settings.model_fields]
    expected = f"one of {', '.join(known)}" if known else "none: these strategies have none"
    for name, values in settings.items():
        for key in values:
            setting = f"{name}.{key}"
            require(setting in known, "no such setting", got=setting, expected=expected)
    strategies = []
    for name, cls in classes.items():
        values = dict(settings.get(name, {}))
        if values:
            strategies.append(cls(parse(cls.Settings, values, where=f"setting {name}")))
        else:
            strategies.append(cls())
    return strategies


def begin_run(run: Run, label: str) -> Run:
    """A run with the time that is left of `run`, which reports its progress to `run` under `label`.

    The incumbent and the bound of `run` are cleared, because those of different problems cannot be
    compared.
    """
    run.incumbent = run.bound = None
    run.report(note=label)
    return replace(run.share(1, label), hopeless=run.hopeless)


def tensor_stage(layers: Sequence[tuple[int, int]], group: Sequence[int]) -> Stage:
    """A stage of one row group whose devices have equal parts of every weight. layers: the layers
    [first, last) of each chunk. group: the devices."""
    return Stage(layers=list(layers), devices=[list(group)], tensor_shares=[1.0] * len(group))
