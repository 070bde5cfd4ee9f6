"""One run of a method: what it is given, its progress, and what it returns.

Every method takes the same typed options; a native block passes a back end's own ones through. The
run has them, a clock, progress reports and the wish to stop. A method returns an outcome, which is
then judged from outside and becomes a result.
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
# Native options that would repeat a common one: the common field is the only place for them.
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


HIGHS = "highs"


def engine(name: str) -> str:
    """The solver behind one of Pyomo's interface names: `gurobi_direct_v2`, `appsi_gurobi` ->
    `gurobi`."""
    base = name.removeprefix("appsi_").removesuffix("_v2")
    for suffix in ("_direct", "_persistent"):
        base = base.removesuffix(suffix)
    return base


# Back ends start them all, needed or not; more than any machine's cores only take memory and
# minutes.
MOST_THREADS = 512


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options that a caller may set for any method.

    time_limit: seconds for one method on one instance, None for none.
    gap: relative gap at which a proof may stop; 1e-6 counts as optimal.
    threads: worker threads of general solvers (1 to 512). seed: of everything random.
    pyomo_solver: the solver name behind the `pyomo` method.
    native: back end ("cp-sat", "highs", "pyomo") -> its own option names and values.
    """

    time_limit: float | None = None
    gap: float = 1e-6
    threads: int = field(default_factory=lambda: min(os.cpu_count() or 1, MOST_THREADS))
    seed: int = 0
    pyomo_solver: str = "highs"
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
        """As given, for results and study rows (JSON types only)."""
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
    """A snapshot for whoever watches: seconds since the start, best objective and proven bound so
    far."""

    seconds: float
    incumbent: float | None
    bound: float | None
    note: str = ""

    @property
    def gap(self) -> float | None:
        """Relative gap of incumbent and bound; None when either is unknown."""
        return relative_gap(self.incumbent, self.bound)


Watcher = Callable[[Progress], None]


class Stopped(Exception):
    """Out of something that cannot be finished in time (`Run.check`); whoever began it says what is
    known instead."""


@dataclass
class Run:
    """Handed to every method. Methods call `report` now and then and stop when `should_stop` or
    `check` says so.

    cancel: set from outside (Ctrl-C, a planner that has seen enough); methods then return what they
    have. watch: called with each report, from the method's thread.
    tap: takes each discrete model that a general solver would be given; the solver is then not
    asked.
    """

    options: Options = field(default_factory=Options)
    watch: Watcher | None = None
    cancel: threading.Event = field(default_factory=threading.Event)
    started: float = field(default_factory=CLOCK.seconds)
    incumbent: float | None = None
    bound: float | None = None
    note: str = ""
    tap: Callable[[Any], None] | None = None  # takes a `solvers.model.Model`
    # A bound above it ends the run: whatever comes would be of no use. Parts do not inherit it, for
    # their bounds may be of other problems.
    hopeless: float = float("inf")

    @property
    def elapsed(self) -> float:
        """Seconds since the run began, without those in which kernels were compiled."""
        return CLOCK.seconds() - self.started

    @property
    def remaining(self) -> float:
        """Seconds left of the time limit, never below 0; infinite without a limit."""
        return (
            float("inf")
            if self.options.time_limit is None
            else max(0.0, self.options.time_limit - self.elapsed)
        )

    @property
    def cancelled(self) -> bool:
        """Whether the user asked to stop."""
        return self.cancel.is_set()

    @property
    def should_stop(self) -> bool:
        """Whether to return now: cancelled, out of time, or without hope."""
        return self.cancelled or self.remaining <= 0.0 or (self.bound or 0.0) > self.hopeless

    def check(self) -> None:
        """Raise `Stopped` where it is time to return: for work that leaves nothing of use behind,
        as building a model.

        Costs less than a microsecond; builders call it with every row and every variable that they
        add.
        """
        if self.should_stop:
            raise Stopped

    def report(
        self, *, incumbent: float | None = None, bound: float | None = None, note: str | None = None
    ) -> None:
        """Tell the watcher about a better incumbent, a better bound or another phase (worse ones
        are ignored)."""
        if incumbent is not None and (self.incumbent is None or incumbent < self.incumbent):
            self.incumbent = incumbent
        if bound is not None and (self.bound is None or bound > self.bound):
            self.bound = bound
        if note is not None:
            self.note = note
        if self.watch is not None:
            self.watch(Progress(self.elapsed, self.incumbent, self.bound, self.note))

    def part(self, *, time_limit: float | None = None, quiet: bool = True) -> "Run":
        """A run inside this one: the same wish to stop, at most `time_limit` seconds and what is
        left here."""
        left = self.remaining
        limit = left if time_limit is None else min(left, time_limit)
        options = replace(
            self.options, time_limit=None if limit == float("inf") else max(limit, 1e-3)
        )
        return Run(options, None if quiet else self.watch, self.cancel, tap=self.tap)

    def share(self, count: float, label: str = "") -> "Run":
        """A run inside this one with a `count`-th of the time that is left, whose progress this one
        shows as its own, its notes behind `label`."""

        def show(progress: Progress) -> None:
            self.incumbent, self.bound = progress.incumbent, progress.bound
            self.report(note=f"{label} {progress.note}".strip())

        return replace(self.part(time_limit=self.remaining / count), watch=show)


D = TypeVar("D")
# A gap up to this counts as optimal (the file contract's definition of `optimal`).
OPTIMAL_GAP = 1e-6


def relative_gap(objective: float | None, bound: float | None) -> float | None:
    """(objective - bound) / objective, never below 0; None when either side is unknown."""
    if objective is None or bound is None:
        return None
    # 0 is only possible when everything costs nothing
    return max(0.0, (objective - bound) / objective) if objective > 0 else 0.0


class Stop(StrEnum):
    """Why a run ended; whether it has a decision is a separate question."""

    OPTIMAL = "optimal"  # the search space is exhausted down to the gap asked for
    INFEASIBLE = "infeasible"  # proven: no decision exists
    LIMIT = "limit"  # the time limit (or a stated memory limit) was reached
    INTERRUPTED = "interrupted"  # the user asked to stop
    DONE = "done"  # a heuristic finished: no claim of optimality
    ERROR = "error"  # the back end failed; the message says how


def stop_reason(run: Run) -> Stop:
    """Why a back end ended without a proof: by the user's wish, or by a limit."""
    return Stop.INTERRUPTED if run.cancelled else Stop.LIMIT


@dataclass(frozen=True, kw_only=True)
class Outcome(Generic[D]):
    """The claim of a method. It carries no objective: the independent evaluator computes that.

    bound: proven lower bound in the instance's unit, None when nothing is proven; kept when time
    runs out. details: counts worth telling (nodes, labels, configurations pruned …), JSON types
    only.
    """

    stop: Stop
    decision: D | None = None
    bound: float | None = None
    build_seconds: float = 0.0  # of general solvers' models; all other time is solving
    solver: str = "hetplan"
    message: str = ""
    details: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Result(Generic[D]):
    """One run of one method on one instance; minimisation.

    objective: of `decision`, from the independent evaluator; None without a decision.
    bound: proven lower bound or None. Neither is ever 0, inf or nan in place of "unknown".
    """

    method: str
    stop: Stop
    decision: D | None
    objective: float | None
    bound: float | None
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
