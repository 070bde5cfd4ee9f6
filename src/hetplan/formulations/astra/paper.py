"""Astra's own search of the segments: enumerate all (m_i) and, for each, all (n_i). Source: Astra,
Section 3.4.

The numbers of stages m_i run over all compositions of P, the layers n_i of the used types but the
last over everything that leaves the last one a whole number, O(P^(M-1) N^(M-1)). All stages of a
type hold n_i layers, so the enumeration is complete (and proves its answer) only where the instance
asks for equal layers per type.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from hetplan.formulations.astra.data import AstraData, AstraDecision
from hetplan.formulations.astra.problem import (
    AstraProblem,
    Floats,
    Ints,
    compile_problem,
    decision_of,
    infeasible_because,
)
from hetplan.solvers.native import stop_reason
from hetplan.solvers.result import Outcome, Stop
from hetplan.solvers.run import Run, Stopped

# Layers of several types are tried at once, at most about so many combinations (a hundredth of a
# second).
PIECE = 100_000


def solve(data: AstraData, run: Run, piece: int = PIECE) -> Outcome[AstraDecision]:
    """The best segments by complete enumeration; a bound only where the paper's restriction is the
    instance's."""
    problem = compile_problem(data)
    reason = infeasible_because(problem)
    if reason is not None:
        return Outcome(stop=Stop.INFEASIBLE, message=reason)
    search, message = Enumeration(problem, run, piece), ""
    try:
        for counts in stage_counts(problem.most_stages, problem.P):
            search.try_layers(counts)
        stop = Stop.OPTIMAL if problem.equal else Stop.DONE
        if not search.stages:
            message = "no numbers of layers, one per type, add up to all layers"
            stop = Stop.INFEASIBLE if problem.equal else Stop.DONE
    except Stopped:
        stop = stop_reason(run)
    return Outcome(
        stop=stop,
        decision=decision_of(problem, search.stages) if search.stages else None,
        bound=search.best if stop is Stop.OPTIMAL else None,
        message=message,
        details={"candidates": search.tried},
    )


def stage_counts(limit: Ints, total: int) -> Iterator[list[int]]:
    """All (m_i) with 0 <= m_i <= limit_i and sum `total`, in lexicographic order."""
    if len(limit) == 1:
        if total <= limit[0]:
            yield [total]
        return
    for m in range(min(int(limit[0]), total) + 1):
        for rest in stage_counts(limit[1:], total - m):
            yield [m, *rest]


@dataclass(frozen=True)
class Partial:
    """The layers [R, types so far] of the first used types in R ways: layers left [R], work [R] and
    slowest stage [R] in seconds."""

    layers: Ints
    left: Ints
    work: Floats
    slowest: Floats

    def part(self, chosen: slice) -> "Partial":
        """Those of the ways."""
        return Partial(
            self.layers[chosen], self.left[chosen], self.work[chosen], self.slowest[chosen]
        )


@dataclass
class Enumeration:
    """The best so far: `stages` as (type, layers), `best` seconds, `tried` candidates."""

    problem: AstraProblem
    run: Run
    piece: int
    best: float = np.inf
    tried: int = 0
    stages: list[tuple[int, int]] = field(default_factory=list)

    def try_layers(self, counts: list[int]) -> None:
        """All n for stage counts m. Raises `Stopped` where the run should stop."""
        used = [i for i, m in enumerate(counts) if m]
        one = Partial(
            np.zeros((1, 0), np.int64), np.array([self.problem.N]), np.zeros(1), np.zeros(1)
        )
        self._extend(used, counts, one)

    def _extend(self, used: list[int], counts: list[int], ways: Partial) -> None:
        """Give the next type its layers, in every way; the last type takes what is left."""
        self.run.check()
        p, at = self.problem, ways.layers.shape[1]
        i, m = used[at], counts[used[at]]
        if at == len(used) - 1:
            x = ways.left // m
            able = np.flatnonzero((ways.left % m == 0) & (x >= 1) & (x <= p.most_layers[i]))
            self._keep_best(used, counts, ways, able, x)
            return
        following = sum(counts[k] for k in used[at + 1 :])
        most = min(int(p.most_layers[i]), (p.N - following) // m)
        x = np.arange(1, most + 1)
        rows = max(1, self.piece // max(1, len(x)))
        for first in range(0, len(ways.left), rows):
            chunk = ways.part(slice(first, first + rows))
            way, number = np.nonzero(chunk.left[:, None] - m * x >= following)
            stage = p.stage_seconds[i, x[number]]
            longer = Partial(
                np.column_stack([chunk.layers[way], x[number]]),
                chunk.left[way] - m * x[number],
                chunk.work[way] + m * stage,
                np.maximum(chunk.slowest[way], stage),
            )
            self._extend(used, counts, longer)

    def _keep_best(
        self, used: list[int], counts: list[int], ways: Partial, able: Ints, x: Ints
    ) -> None:
        self.tried += len(able)
        if not len(able):
            return
        stage = self.problem.stage_seconds[used[-1], x[able]]
        total = ways.work[able] + counts[used[-1]] * stage
        total += (self.problem.K - 1) * np.maximum(ways.slowest[able], stage)
        least = int(np.argmin(total))
        if total[least] < self.best:
            self.best = float(total[least])
            layers = [*ways.layers[able[least]].tolist(), int(x[able[least]])]
            self.stages = [
                (i, n) for i, n in zip(used, layers, strict=True) for _ in range(counts[i])
            ]
