"""What a run of a method returns: first the method's own outcome, then the result as judged from
outside."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

D = TypeVar("D")
# A gap up to this counts as optimal (the file contract's definition of `optimal`).
OPTIMAL_GAP = 1e-6


def relative_gap(objective: float | None, bound: float | None) -> float | None:
    """(objective - bound) / objective, never below 0; None when either side is unknown."""
    if objective is None or bound is None:
        return None
    if objective <= 0:  # only possible when everything costs nothing
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


@dataclass(frozen=True, kw_only=True)
class Outcome(Generic[D]):
    """What a method claims. It carries no objective: the independent evaluator computes that.

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
