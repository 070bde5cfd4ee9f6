"""One run of a method: its options, its progress, its outcome and its result.

Every method takes the same typed options. The native block among them has options of single back
ends. A run has the options, a clock, the progress and the wish to stop. A method returns an
outcome. The registry has the outcome judged by the evaluator and makes a result of it.
"""

import math
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Generic, TypeVar

from hetplan.clock import CLOCK
from hetplan.errors import InputError, require

NativeValue = bool | int | float | str
# Back end -> its options that would repeat a common one -> the common one, the only place for it.
RESERVED: Mapping[str, Mapping[str, str]] = {
    "cp-sat": {
        "max_time_in_seconds": "time_limit",
        "relative_gap_limit": "gap",
        "num_workers": "threads",
        "num_search_workers": "threads",
        "random_seed": "seed",
    },
    "highs": {
        "time_limit": "time_limit",
        "mip_rel_gap": "gap",
        "threads": "threads",
        "random_seed": "seed",
    },
    "pyomo": {},
}


CUT = "cut by the time limit"  # begins the message that says where a time limit cut a method
HIGHS = "highs"  # the name of HiGHS as a solver behind Pyomo


def engine(name: str) -> str:
    """The solver behind one of Pyomo's interface names: `gurobi_direct_v2`, `appsi_gurobi` ->
    `gurobi`."""
    base = name.removeprefix("appsi_").removesuffix("_v2")
    for suffix in ("_direct", "_persistent"):
        base = base.removesuffix(suffix)
    return base


# Back ends start all threads, needed or not. More threads than a machine has cores only take memory
# and minutes.
MOST_THREADS = 512


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options that a caller may set for any method."""

    time_limit: float | None = None  # seconds for one method on one instance; None: no limit
    gap: float = 1e-6  # relative gap at which a proof may stop; 1e-6 counts as optimal
    # worker threads of general solvers, 1 to MOST_THREADS
    threads: int = field(default_factory=lambda: min(os.cpu_count() or 1, MOST_THREADS))
    seed: int = 0  # seed of all random numbers; CP-SAT and HiGHS take 31 bits
    pyomo_solver: str = "highs"  # Pyomo's name of the solver behind the method `pyomo`
    # back end ("cp-sat", "highs", "pyomo") -> names and values of its own options
    native: Mapping[str, Mapping[str, NativeValue]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(
            self.time_limit is None or (self.time_limit > 0 and math.isfinite(self.time_limit)),
            "time limit",
            got=self.time_limit,
            expected="seconds greater than 0",
        )
        require(0 <= self.gap < 1, "gap", got=self.gap, expected="a relative gap from 0 to 1")
        require(
            1 <= self.threads <= MOST_THREADS,
            "threads",
            got=self.threads,
            expected=f"1 to {MOST_THREADS}",
        )
        require(0 <= self.seed < 2**31, "seed", got=self.seed, expected="0 to 2147483647")
        for backend, entries in self.native.items():
            require(
                backend in RESERVED,
                "native options of an unknown back end",
                got=backend,
                expected=", ".join(RESERVED),
            )
            for name in entries:
                if name in RESERVED[backend]:
                    common = RESERVED[backend][name]
                    raise InputError(
                        f"native option {backend}.{name} repeats the common option {common}"
                    )

    def as_dict(self) -> dict[str, object]:
        """The options as given, in JSON types, for results and study rows."""
        return {
            "time_limit": self.time_limit,
            "gap": self.gap,
            "threads": self.threads,
            "seed": self.seed,
            "pyomo_solver": self.pyomo_solver,
            "native": {backend: dict(entries) for backend, entries in self.native.items()},
        }


@dataclass(frozen=True)
class Progress:
    """The progress of a run at one moment, which the run's watcher receives."""

    seconds: float  # since the run began
    incumbent: float | None  # the best objective so far
    bound: float | None  # the best proven bound so far
    note: str = ""  # the phase of the method

    @property
    def gap(self) -> float | None:
        """Relative gap of incumbent and bound; None when either is unknown."""
        return relative_gap(self.incumbent, self.bound)


Watcher = Callable[[Progress], None]


@dataclass
class Work:
    """Work that a run and all its parts have done, in counted seconds.

    A method counts its steps, states or nodes, each with the seconds that one takes on a slow core.
    The count is the same on every machine, idle or busy.
    """

    seconds: float = 0.0


class Stopped(Exception):
    """Work was given up because the run should stop (`Run.check`). The method that began the work
    catches this and returns the best decision and bound so far."""


@dataclass
class Run:
    """A run of a method. The method calls `report` now and then, and returns its best decision so
    far when `should_stop` is true or `check` raises."""

    options: Options = field(default_factory=Options)
    watch: Watcher | None = None  # called with each report, from the method's thread
    # set from outside, by Ctrl-C or a planner that needs no more
    cancel: threading.Event = field(default_factory=threading.Event)
    started: float = field(default_factory=CLOCK.seconds)
    incumbent: float | None = None  # the best objective reported so far
    bound: float | None = None  # the best bound reported so far
    note: str = ""  # the phase of the method, as reported last
    # Takes each model (`solvers.model.Model`) with integer columns in place of the general solver,
    # which is then not run.
    tap: Callable[[Any], None] | None = None
    # A bound above this objective ends the run, because no decision would be of use. Parts do not
    # inherit it, because their bounds may be of other problems.
    hopeless: float = float("inf")
    # Counted seconds after which the run ends. None: work is counted, but limits nothing.
    budget: float | None = None
    work: Work = field(default_factory=Work)  # shared with the run that this one is a part of

    def __post_init__(self) -> None:
        self.work_before = self.work.seconds  # done before this run began

    @property
    def elapsed(self) -> float:
        """Seconds since the run began, without those in which kernels were compiled."""
        return CLOCK.seconds() - self.started

    @property
    def seconds_left(self) -> float:
        """Seconds of the clock left of the time limit, never below 0; infinite without a limit."""
        if self.options.time_limit is None:
            return float("inf")
        return max(0.0, self.options.time_limit - self.elapsed)

    @property
    def spent(self) -> float:
        """Counted seconds of this run and its parts."""
        return self.work.seconds - self.work_before

    @property
    def remaining(self) -> float:
        """Counted seconds left of the budget; seconds of the clock where the run has no budget.
        Never below 0; infinite without any limit."""
        if self.budget is None:
            return self.seconds_left
        return max(0.0, self.budget - self.spent)

    @property
    def out_of_time(self) -> bool:
        """Whether the budget or the time limit is used up."""
        return self.remaining <= 0.0 or self.seconds_left <= 0.0

    @property
    def cut(self) -> bool:
        """Whether the time limit ended the run before its budget was used up."""
        return self.budget is not None and self.seconds_left <= 0.0 < self.remaining

    def count(self, seconds: float) -> None:
        """Count work that takes `seconds` on a slow core."""
        self.work.seconds += seconds

    @property
    def cancelled(self) -> bool:
        """Whether the user asked to stop."""
        return self.cancel.is_set()

    @property
    def should_stop(self) -> bool:
        """Whether the method should return now: cancelled, out of time, or hopeless."""
        return self.cancelled or self.out_of_time or (self.bound or 0.0) > self.hopeless

    def check(self, counted: float = 0.0) -> None:
        """Raise `Stopped` where the run should stop. counted: seconds of work that are counted
        first.

        This is for work of which a part is of no use, such as building a model. It takes less than
        a microsecond, so that builders call it with every row and every column.
        """
        self.count(counted)
        if self.should_stop:
            raise Stopped

    def report(
        self, *, incumbent: float | None = None, bound: float | None = None, note: str | None = None
    ) -> None:
        """Keep a better incumbent, a better bound and the note of another phase, and call the
        watcher. Worse incumbents and bounds are ignored."""
        if incumbent is not None and (self.incumbent is None or incumbent < self.incumbent):
            self.incumbent = incumbent
        if bound is not None and (self.bound is None or bound > self.bound):
            self.bound = bound
        if note is not None:
            self.note = note
        if self.watch is not None:
            self.watch(Progress(self.elapsed, self.incumbent, self.bound, self.note))

    def part(
        self,
        *,
        seconds: float | None = None,
        share: float = 1.0,
        time_limit: float | None = None,
        quiet: bool = True,
    ) -> "Run":
        """A run inside this one, with the same options and the same wish to stop.

        seconds: the budget of the part, if less is not left here; None: what is left of the budget
        here. share: the share that it may take of the budget and of the time that are left here.
        time_limit: the part's seconds of the clock, if less are not left here. quiet: whether the
        watcher hears nothing of it.
        """
        budget = None if self.budget is None else share * self.remaining
        if seconds is not None:
            budget = seconds if budget is None else min(budget, seconds)
        limit = share * self.seconds_left
        if time_limit is not None:
            limit = min(limit, time_limit)
        # `Options` takes no limit of 0 seconds
        finite_limit = None if limit == float("inf") else max(limit, 1e-3)
        options = replace(self.options, time_limit=finite_limit)
        watch = None if quiet else self.watch
        return Run(options, watch, self.cancel, tap=self.tap, budget=budget, work=self.work)

    def share(self, count: float, label: str = "") -> "Run":
        """A run inside this one with a `count`-th of the budget and of the time that are left. This
        run reports the progress of that one as its own, with `label` in front of its notes."""

        def show(progress: Progress) -> None:
            self.incumbent, self.bound = progress.incumbent, progress.bound
            self.report(note=f"{label} {progress.note}".strip())

        part = self.part(share=1 / count)
        part.watch = show
        return part


D = TypeVar("D")
# A gap up to this counts as optimal (the file contract's definition of `optimal`).
OPTIMAL_GAP = 1e-6


def relative_gap(objective: float | None, bound: float | None) -> float | None:
    """(objective - bound) / objective, never below 0; None when either side is unknown."""
    if objective is None or bound is None:
        return None
    if objective <= 0:  # only where everything costs nothing
        return 0.0
    return max(0.0, (objective - bound) / objective)


class Stop(StrEnum):
    """Why a run ended; whether it has a decision is a separate question."""

    OPTIMAL = "optimal"  # the search space is exhausted down to the gap asked for
    INFEASIBLE = "infeasible"  # proven: no decision exists
    LIMIT = "limit"  # the time limit (or a stated memory limit) was reached
    INTERRUPTED = "interrupted"  # the user asked to stop
    DONE = "done"  # a heuristic finished: no claim of optimality
    ERROR = "error"  # the back end failed; the message says how


def stop_reason(run: Run) -> Stop:
    """The `Stop` of a back end that ended without a proof: by the user's wish, or by a limit."""
    return Stop.INTERRUPTED if run.cancelled else Stop.LIMIT


@dataclass(frozen=True, kw_only=True)
class Outcome(Generic[D]):
    """The claim of a method. It has no objective, which the independent evaluator computes."""

    stop: Stop
    decision: D | None = None
    # proven lower bound in the instance's unit, also when time runs out; None: nothing is proven
    bound: float | None = None
    # seconds to build models of general solvers; all other time is solving
    build_seconds: float = 0.0
    solver: str = "hetplan"  # name and version of a back end, or hetplan
    message: str = ""
    # counts of the method (nodes, labels, configurations pruned …), in JSON types
    details: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Result(Generic[D]):
    """The result of one method on one instance. Objectives are minimised.

    An unknown objective or bound is None, and never 0, inf or nan.
    """

    method: str
    stop: Stop
    decision: D | None
    objective: float | None  # of `decision`, by the independent evaluator; None without a decision
    bound: float | None  # proven lower bound; None: nothing is proven
    build_seconds: float
    solve_seconds: float
    solver: str
    options: Mapping[str, object]
    seed: int
    message: str = ""
    details: Mapping[str, object] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Building and solving together."""
        return self.build_seconds + self.solve_seconds

    @property
    def gap(self) -> float | None:
        """(objective - bound) / objective, never below 0; None when either side is unknown."""
        return relative_gap(self.objective, self.bound)

    @property
    def status(self) -> str:
        """`optimal` (gap <= 1e-6), `feasible`, `infeasible` (proven) or `unknown`, as the file
        contract says."""
        if self.objective is not None:
            return "optimal" if self.gap is not None and self.gap <= OPTIMAL_GAP else "feasible"
        return "infeasible" if self.stop is Stop.INFEASIBLE else "unknown"
