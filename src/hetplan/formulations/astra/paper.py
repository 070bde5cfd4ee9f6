"""Astra's own search of the segments: enumerate all (m_i) and, for each, all (n_i). Source: Astra,
Section 3.4.

The numbers of stages m_i run over all compositions of P, the layers n_i of the used types but the
last over everything that leaves the last one a whole number, O(P^(M-1) N^(M-1)). All stages of a
type hold n_i layers, so the enumeration is complete (and proves its answer) only where the instance
asks for equal layers per type.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from hetplan.formulations.astra.data import AstraData, AstraDecision
from hetplan.formulations.astra.problem import (
    AstraProblem,
    Ints,
    compile_problem,
    decision_of,
    infeasible_because,
    stage_counts,
)
from hetplan.solvers.run import Outcome, Run, Stop, Stopped, stop_reason

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
        for block in stage_counts(problem.P, problem.most_stages):
            for counts in block.tolist():
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
        """All n for stage counts m: of every used type but the last all numbers, `piece`
        combinations at once; the last takes what is left. Raises `Stopped` where the run should
        stop."""
        p, used = self.problem, [i for i, m in enumerate(counts) if m]
        m = np.array(counts)[used]
        most = np.minimum(p.most_layers[used], (p.N - p.P) // m + 1)
        shape = (1, *most[:-1].tolist())
        for begin in range(0, math.prod(shape), self.piece):
            self.run.check()
            numbers = np.arange(begin, min(begin + self.piece, math.prod(shape)))
            _, *firsts = np.unravel_index(numbers, shape)
            x = np.stack([numbers, *firsts], axis=1)[:, 1:] + 1
            left = p.N - x @ m[:-1]
            last = left // m[-1]
            able = (left % m[-1] == 0) & (last >= 1) & (last <= most[-1])
            self.keep_best(used, m, np.column_stack([x, last])[able])

    def keep_best(self, used: list[int], m: Ints, x: Ints) -> None:
        """Compare layers [R, used types] with the best."""
        self.tried += len(x)
        if not len(x):
            return
        seconds = self.problem.stage_seconds[used, x]
        total = seconds @ m + (self.problem.K - 1) * seconds.max(axis=1)
        least = int(np.argmin(total))
        if total[least] < self.best:
            self.best = float(total[least])
            self.stages = [
                (i, int(n)) for i, n, c in zip(used, x[least], m, strict=True) for _ in range(c)
            ]
