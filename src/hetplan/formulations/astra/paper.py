"""Astra's own search for segments: a complete enumeration. Source: Astra, Section 3.4.

M types i, P stages, N layers. A candidate has m_i stages on type i, and n_i layers on each of these
stages. The enumeration goes through all (m_i) with sum P. For each it goes through all n_i of the
types in use but the last; the last type takes the remaining layers where they divide evenly among
its stages. That is O(P^(M-1) N^(M-1)) candidates. All stages of a type have n_i layers, so the
enumeration is complete, and its result proven, only where the instance asks for equal layers per
type.
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

# Seconds that a piece of combinations counts towards the budget of a run.
PIECE_SECONDS = 1e-3

# Combinations of numbers of layers that are computed at once, in about a hundredth of a second.
PIECE = 100_000


def solve(data: AstraData, run: Run, piece: int = PIECE) -> Outcome[AstraDecision]:
    """The best segments with equal layers per type. The result has a bound only where the instance
    asks for equal layers per type. piece: combinations that are computed at once."""
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
    """The state of the enumeration: the best candidate so far."""

    problem: AstraProblem
    run: Run
    piece: int  # combinations that are computed at once
    best: float = np.inf  # seconds of the best candidate
    tried: int = 0  # number of candidates so far
    stages: list[tuple[int, int]] = field(default_factory=list)  # (type, layers) of the best

    def try_layers(self, counts: list[int]) -> None:
        """Try all candidates with the stage counts m_i. Raises `Stopped` where the run should stop.

        counts: m_i of every type.
        """
        p = self.problem
        used = [i for i, m in enumerate(counts) if m]
        m = np.array(counts)[used]
        # The most layers n of a stage. All m stages of the type have n, all others at least one:
        # m n + P - m <= N.
        most = np.minimum(p.most_layers[used], (p.N - p.P) // m + 1)
        # All combinations of n_i for the types but the last. A leading axis of length 1 makes an
        # index array even where a single type is in use. Its zeros become the first column below,
        # which is dropped.
        shape = (1, *most[:-1].tolist())
        for begin in range(0, math.prod(shape), self.piece):
            self.run.check(PIECE_SECONDS)
            numbers = np.arange(begin, min(begin + self.piece, math.prod(shape)))
            indices = np.stack(np.unravel_index(numbers, shape), axis=1)  # [R, used types]
            n = indices[:, 1:] + 1  # [R, used types - 1]
            left = p.N - n @ m[:-1]
            n_last = left // m[-1]
            possible = (left % m[-1] == 0) & (n_last >= 1) & (n_last <= most[-1])
            self.keep_best(used, m, np.column_stack([n, n_last])[possible])

    def keep_best(self, used: list[int], m: Ints, n: Ints) -> None:
        """Keep the best of R candidates where it is better than the best so far.

        used: the types in use. m: [used types] number of stages. n: [R, used types] layers of a
        stage.
        """
        self.tried += len(n)
        if not len(n):
            return
        seconds = self.problem.stage_seconds[used, n]
        total = seconds @ m + (self.problem.K - 1) * seconds.max(axis=1)
        least = int(np.argmin(total))
        if total[least] < self.best:
            self.best = float(total[least])
            self.stages = []
            for i, stages, layers in zip(used, m.tolist(), n[least].tolist(), strict=True):
                self.stages += [(i, layers)] * stages
