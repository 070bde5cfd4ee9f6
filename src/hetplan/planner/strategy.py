"""What a strategy has to offer, and how it is asked.

Adding one is a file with a class, and a line in `hetplan.planner.STRATEGIES`.
`planner/data_parallel.py` is the shortest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol

from hetplan.errors import InputError, UnsupportedError
from hetplan.names import unknown_name
from hetplan.planner import ALL, STRATEGIES
from hetplan.planner.candidate import Candidate, Method
from hetplan.profiling.workload import Workload
from hetplan.runtime.plan import Plan, PlanDevice, PlanWorkload, Replica, Stage
from hetplan.schema import StrictModel, derived, parse
from hetplan.solvers.registry import load
from hetplan.solvers.run import Progress, Run

# Strategy -> name -> value, as JSON types.
Settings = Mapping[str, Mapping[str, object]]


class Problem(Protocol):
    """One problem posed of a workload, which the methods of its strategy solve."""

    def method(self, asked: Method) -> Method:
        """The method under the name that it has on this problem."""
        return asked

    def solve(self, method: Method, run: Run) -> Candidate | None:
        """The method's candidate, priced by the closed form; None where another's says it all.

        The plan's origin is what is to stand behind the method's name. Raises NoPlan or
        UnsupportedError with the reason where there is no plan.
        """
        ...


class Strategy(Protocol):
    """A way to plan a workload: a paper's problem, posed, solved, and read back as a plan.

    Made without arguments, or with a model of `Settings`.
    """

    name: ClassVar[str]
    methods: ClassVar[tuple[Method, ...]]  # the best first
    Settings: ClassVar[type[StrictModel]] = StrictModel  # what only its user can set
    recomputes: ClassVar[bool] = False  # whether recomputation is chosen around it
    slow: ClassVar[bool] = False  # goes behind the others: it takes the time that it is given

    def pose(self, workload: Workload, run: Run) -> Sequence[Problem]:
        """The problems of the workload; raises NoPlan where there are none, and InputError only for
        what makes the whole workload unusable."""
        ...

    def within_replay(self, workload: Workload, run: Run, bound: float | None) -> Candidate | None:
        """The best plan within the memory that the replay counts, where the problem cannot say it.

        bound: one that holds anyway. None: no such plan is known; `infeasible`: there is none.
        """
        return None

    def rearrangements(self, workload: Workload, candidate: Candidate) -> Iterable[Candidate]:
        """Decisions of nearly the price of an exact method's, which the replay may tell apart."""
        return ()


class NoPlan(Exception):
    """There is no plan. status: `infeasible` where that is proven, else `unknown`."""

    def __init__(self, status: str, reason: str, seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.status, self.reason, self.seconds = status, reason, seconds

    def candidate(self, strategy: str, method: Method) -> Candidate:
        """The row of the ranking that says so."""
        return Candidate(
            strategy=strategy,
            method=method,
            status=self.status,
            message=self.reason,
            solve_seconds=self.seconds,
        )


def chosen(names: Sequence[str] | None = None, settings: Settings | None = None) -> list[Strategy]:
    """The strategies named, each once; all of them for `all` or without names. settings: theirs.

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
    known = [f"{n}.{field}" for n, kind in kinds.items() for field in kind.Settings.model_fields]
    for setting in (f"{name}.{field}" for name, values in settings.items() for field in values):
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
    strategy: Strategy, workload: Workload, run: Run, methods: Sequence[Method] | None = None
) -> list[Candidate]:
    """One candidate per problem and method (all by default), with a plan or the reason why there is
    none. The run's time limit is for each method."""
    methods = strategy.methods if methods is None else methods
    with derived(f"{workload.model.name} on {workload.cluster.name} as {strategy.name}"):
        try:
            problems = strategy.pose(workload, run)
        except NoPlan as refusal:
            return [refusal.candidate(strategy.name, method) for method in methods]
        every = [
            attempt(strategy, problem, method, run) for problem in problems for method in methods
        ]
        return [candidate for candidate in every if candidate is not None]


def attempt(strategy: Strategy, problem: Problem, method: Method, run: Run) -> Candidate | None:
    """One method on one problem; one after an interruption says that it has not begun."""
    named = problem.method(method)
    try:
        if run.cancelled:
            raise NoPlan("unknown", "not begun: stopped from the keyboard")
        candidate = problem.solve(method, labelled(run, f"{strategy.name}/{named.name}"))
    except NoPlan as refusal:
        return refusal.candidate(strategy.name, named)
    except UnsupportedError as error:
        return NoPlan("unknown", str(error)).candidate(strategy.name, named)
    return None if candidate is None else replace(candidate, method=named)


def labelled(run: Run, label: str) -> Run:
    """A run for one method with the whole time limit, whose progress shows in `run` under
    `label`."""
    run.incumbent = run.bound = None  # bounds of different problems do not compare
    run.report(note=label)

    def forward(progress: Progress) -> None:
        note = f"{label} {progress.note}".strip()
        run.report(incumbent=progress.incumbent, bound=progress.bound, note=note)

    return Run(run.options, forward, run.cancel)


def new_plan(workload: Workload, replicas: list[Replica], **more: Any) -> Plan:
    """A plan for the workload. more: other fields of the plan file."""
    return Plan(
        name=f"{workload.model.name} on {workload.cluster.name}"[:200],
        workload=PlanWorkload(
            model=workload.model.name,
            cluster=workload.cluster.name,
            global_batch=workload.global_batch,
            sequence=workload.sequence,
            precision=workload.precision,
            layers=[layer.name for layer in workload.profile.layers],
        ),
        devices=[
            PlanDevice(type=device.type, node=device.node) for device in workload.cluster.devices
        ],
        replicas=replicas,
        **more,
    )


def tensor_stage(layers: Sequence[tuple[int, int]], group: Sequence[int]) -> Stage:
    """A stage whose devices take equal parts of every weight."""
    return Stage(layers=list(layers), devices=[list(group)], tensor_shares=[1.0] * len(group))
