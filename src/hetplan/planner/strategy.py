"""Strategies: the interface that they implement, how they are asked, and what they answer with.

A strategy poses problems of a workload. Each of its methods answers each problem with a candidate:
a plan that it proposes, or the reason why it proposes none.

To add a strategy, write a class in a file of its own and add a line to
`hetplan.planner.STRATEGIES`. `DataParallel` in `planner/amp.py` is the shortest example.

A variant: the choices that are made outside a strategy, namely recomputation, precision and part
of the cluster. What is solved and replayed is a strategy in a variant.

A strategy knows nothing of variants: it poses whatever workload it is given. For recomputation it
is given a profile whose backward passes include what is computed again and whose layers keep less,
so that what it decides and proves holds for recomputation. For a part of the cluster it is given
that part as a cluster. Its plans then leave the other devices idle, and only devices in use are
paid for.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, ClassVar, Protocol

from hetplan.errors import (
    InputError,
    UnsupportedError,
    debugging,
    look_up,
    require,
)
from hetplan.planner import ALL, STRATEGIES
from hetplan.planner.faults import fault_text
from hetplan.plans.making import with_inputs
from hetplan.plans.plan import Plan, PlanDevice, Recomputation, Stage
from hetplan.profiling.inputs.inputs import Inputs
from hetplan.profiling.models.operators import Precision
from hetplan.profiling.profiles.profile import Profile
from hetplan.profiling.workload import Workload
from hetplan.replays.chains import Replay
from hetplan.replays.costs import Costs
from hetplan.replays.pose import kept_of, pose
from hetplan.schema import StrictModel, derived, parse
from hetplan.solvers.registry import load
from hetplan.solvers.run import Result, Run, Stopped, relative_gap
from hetplan.text import percent_text, seconds_text

MODES: tuple[Recomputation, ...] = ("selective", "full")
# Of more device types the parts are too many to solve each.
MOST_TYPES = 6


@dataclass(frozen=True)
class Part:
    """Some nodes of a cluster. name: stands behind `@` in the names of its plans."""

    name: str
    nodes: tuple[int, ...]


@dataclass(frozen=True)
class Variant:
    """One choice for each axis that all strategies share; every axis is plain by default."""

    recomputation: Recomputation = "none"  # what backward passes compute again
    precision: Precision | None = None  # where several are ranked together; None: the only one
    part: Part | None = None  # where the plan runs; None: on the whole cluster

    @property
    def label(self) -> str:
        """What it adds to a method's name: `+full+bf16@T4`; nothing where it is plain."""
        mode = None if self.recomputation == "none" else self.recomputation
        axes = "".join(f"+{axis}" for axis in (mode, self.precision) if axis)
        return f"{axes}@{self.part.name}" if self.part and self.part.name else axes

    def marked(self, plan: Plan) -> Plan:
        """The plan of a strategy that posed the workload in this variant."""
        if self.recomputation == "none":
            return plan
        return plan.model_copy(
            update={
                "recomputation": self.recomputation,
                "origin": f"{plan.origin}+{self.recomputation}",
            }
        )


PLAIN = Variant()


def parts_of_cluster(workload: Workload) -> Iterator[Part]:
    """Every part of the cluster by device types but the whole, smaller ones first.

    Every subset of at most six types; of more types one, two, or all but one.
    """
    types, nodes = workload.cluster.types, workload.cluster.nodes
    few = len(types) <= MOST_TYPES
    for size in range(1, len(types)) if few else (1, 2, len(types) - 1):
        for names in combinations(types, size):
            kept = tuple(n for n, node in enumerate(nodes) if node.device in names)
            yield Part("+".join(names), kept)


def on_part(workload: Workload, part: Part | None) -> Workload:
    """The workload on a part alone."""
    if part is None:
        return workload
    whole = workload.cluster
    return replace(workload, cluster=whole.part(part.nodes, f"{whole.name}: {part.name}"[:200]))


def places_of(numbers: Sequence[int], count: int) -> list[int]:
    """Of each of `count` devices its place in `numbers`, -1 where it is not there."""
    places = dict(zip(numbers, range(len(numbers)), strict=True))
    return [places.get(number, -1) for number in range(count)]


def renumbered(plan: Plan, workload: Workload, numbers: Sequence[int]) -> Plan:
    """The plan with the devices of the workload's cluster.

    numbers: of each of the plan's devices its number there, below 0 for one that is not there and
    that the plan does not use. The inputs that the plan was made for are not the workload's, so
    that they are left out.
    """
    shares = None
    if plan.zero_shares is not None:
        shares = [0.0] * len(workload.cluster.devices)
        for number, share in zip(numbers, plan.zero_shares, strict=True):
            if number >= 0:
                shares[number] = share
    replicas = [
        replica.model_copy(
            update={
                "stages": [
                    stage.model_copy(
                        update={"devices": [[numbers[d] for d in group] for group in stage.devices]}
                    )
                    for stage in replica.stages
                ]
            }
        )
        for replica in plan.replicas
    ]
    return plan.model_copy(
        update={
            "name": f"{workload.model.name} on {workload.cluster.name}"[:200],
            "workload": plan.workload.model_copy(update={"cluster": workload.cluster.name}),
            "devices": [PlanDevice(type=d.type, node=d.node) for d in workload.cluster.devices],
            "zero_shares": shares,
            "replicas": replicas,
            "inputs": None,
        }
    )


def carrying(candidate: "Candidate", inputs: Inputs | None) -> "Candidate":
    """The candidate with a plan that carries the inputs that it was made for."""
    if candidate.plan is None:
        return candidate
    return replace(candidate, plan=with_inputs(candidate.plan, inputs))


def recomputed(workload: Workload, mode: Recomputation) -> Workload:
    """The workload with `mode` in its layers' times and in what they keep, and with the memory of
    the layer at work."""
    if mode == "none":
        return workload
    profile, data = workload.profile, pose(workload, ("none", mode))
    layers = [
        layer.model_copy(
            update={
                "saved_bytes": posed.kept[mode].saved_bytes,
                "replicated_saved_bytes": posed.kept[mode].replicated_saved_bytes,
            }
        )
        for layer, posed in zip(profile.layers, data.layers, strict=True)
    ]
    tables = []
    before = (table for table in profile.tables if table.device in data.types)
    for at, table in zip(data.tables, before, strict=True):
        passes = zip(at.backward_seconds, at.repeated[mode], at.forward_seconds, strict=True)
        backward = [back + share * forward for back, share, forward in passes]
        tables.append(table.model_copy(update={"backward_seconds": backward}))
    costs, every = Costs(data, mode), (0, len(layers))
    working = {t: costs.working_bytes(every, t) for t in {1, *(table.tensor for table in tables)}}
    changed = {**dict(profile), "layers": layers, "tables": tables}
    return replace(workload, profile=Profile(**changed), working_bytes=working)


def useful_modes(workload: Workload) -> tuple[Recomputation, ...]:
    """The modes under which this model keeps less than it does without (fused attention has no core
    to repeat)."""
    least = sum(layer.saved_bytes for layer in workload.profile.layers)
    useful: list[Recomputation] = []
    for mode in MODES:
        layers = range(len(workload.profile.layers))
        kept = sum(kept_of(workload, l, mode).saved_bytes for l in layers)
        if kept < least * (1 - 1e-9):
            useful.append(mode)
            least = kept
    return tuple(useful)


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
    # of all plans with further degrees that were searched, None: none were
    computing_alone: float | None = None
    solve_seconds: float = 0.0
    details: Mapping[str, object] = field(default_factory=dict)  # the evaluator's, for people
    plan: Plan | None = None
    message: str = ""  # the reason where there is no plan, or anything worth telling
    failed: bool = False  # whether a fault of hetplan cost the plan; the message has its facts
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

    def __str__(self) -> str:
        """`amp/auto 347 ms, 0 % from its own problem's bound`; whether it fits; why there is no
        plan."""
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
        """`amp/auto+full@T4`."""
        return f"{self.strategy}/{self.label}"

    @property
    def optimism(self) -> float | None:
        """How many times longer the replay takes than the closed form says; None where one is
        missing."""
        return (
            None
            if self.predicted_seconds is None or not self.closed_form_seconds
            else self.predicted_seconds / self.closed_form_seconds
        )

    @property
    def gap(self) -> float | None:
        """(objective - bound) / objective; None when either is unknown."""
        return relative_gap(self.objective, self.bound)

    def tokens_per_second(self, workload: Workload) -> float | None:
        """Tokens (images) per second of training."""
        seconds = self.predicted_seconds
        return workload.tokens_per_iteration / seconds if seconds else None

    def flops_per_device(self, workload: Workload) -> float | None:
        """FLOP/s of matrix products on each device in use, nothing computed again."""
        return (
            None
            if self.plan is None or not self.predicted_seconds
            else workload.flops_per_iteration / self.predicted_seconds / len(self.plan.ranks)
        )

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
        return (
            None
            if len(known) < len(prices)
            else sum(known) / 3600 * self.predicted_seconds / workload.tokens_per_iteration * 1e6
        )

    def document(self, workload: Workload, *, with_inputs: bool = False) -> Mapping[str, Any]:
        """As JSON types. with_inputs: whether the plan has its inputs, which are most of a plan
        file and are equal for all plans of a workload."""
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
    hopeless: float = math.inf,
) -> list[Candidate]:
    """One candidate per problem and method (all by default), with a plan or the reason why there is
    none. Each method gets an equal share of the time that is left, and ends when its bound is above
    `hopeless` seconds.

    A fault of hetplan costs the candidates of the problem, or of the method, in which it shows.
    """
    methods = strategy.methods if methods is None else methods
    with derived(f"{workload.model.name} on {workload.cluster.name} as {strategy.name}"):
        try:
            problems = strategy.pose(workload, run)
        except (NoPlan, UnsupportedError) as error:
            return [refused(strategy, method, error) for method in methods]
        except Exception as error:  # noqa: BLE001 - a fault costs this strategy's rows alone
            return [fault_of(strategy.name, method, error) for method in methods]
        calls = [(problem, method) for problem in problems for method in methods]
        every = [
            attempt(strategy, *call, replace(run.share(len(calls) - i), hopeless=hopeless))
            for i, call in enumerate(calls)
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
    except (NoPlan, UnsupportedError, Stopped) as error:
        return refused(strategy, named, error)
    except Exception as error:  # noqa: BLE001 - a fault costs this method's row alone
        return fault_of(strategy.name, named, error)
    return None if candidate is None else replace(candidate, method=named)


def refused(
    strategy: Strategy, method: StrategyMethod, error: NoPlan | UnsupportedError | Stopped
) -> Candidate:
    """The row of the ranking that says why there is no plan."""
    text = str(error) or "stopped before it had a plan"
    reason = error if isinstance(error, NoPlan) else NoPlan("unknown", text)
    return Candidate(
        strategy=strategy.name,
        method=method,
        status=reason.status,
        message=reason.reason,
        solve_seconds=reason.seconds,
    )


def fault_of(strategy: str, method: StrategyMethod, error: Exception) -> Candidate:
    """The row of a method that failed by a fault of hetplan.

    Raises the error again where it is the user's to mend, and where HETPLAN_DEBUG asks for it.
    """
    if isinstance(error, InputError) or debugging():
        raise error
    return Candidate(
        strategy=strategy,
        method=method,
        status="unknown",
        message=f"failed: {fault_text(error)}",
        failed=True,
    )


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
