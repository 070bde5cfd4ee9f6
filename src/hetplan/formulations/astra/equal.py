"""Least total work under a limit on the slowest stage, when all stages of a type hold the same
number.
Compiled.

F(p, n) over a set of types is the least work of p stages with n layers together: type after type, m
stages of x <= cap layers each add m (c x + h). Two tables over half of the types each meet in f =
min F'(p, n) + F''(P
- p, N - n):
the first type of a half reaches few states, so halves are much cheaper than one chain.
"""

from __future__ import annotations

import numpy as np

from hetplan.compiled import kernel
from hetplan.formulations.astra.problem import AstraProblem, Floats, Ints, portions
from hetplan.solvers.run import Run


@kernel
def fill(
    c: Floats,
    h: Floats,
    limit: Ints,
    cap: Ints,
    first: int,
    P: int,
    N: int,
    table: Floats,
    begin: int,
    end: int,
) -> None:
    """Fill table [types + 1, P + 1, N + 1], whose first row is given, for the types first, first +
    1, …; N - n >= P - p is kept throughout.

    A step takes one p of one type; those from `begin` to `end` are taken, after all before.
    """
    for step in range(begin, end):
        k, p = step // (P + 1), step % (P + 1)
        i = first + k
        if p == 0:
            for q in range(P + 1):
                for n in range(N + 1):
                    table[k + 1, q, n] = table[k, q, n]
        if p == P:
            continue
        for n in range(N):
            base = table[k, p, n]
            if base == np.inf:
                continue
            for m in range(1, min(limit[i], P - p) + 1):
                room = ((N - n) - (P - p - m)) // m
                for x in range(1, min(cap[i], room) + 1):
                    cost = base + m * (c[i] * x + h[i])
                    table[k + 1, p + m, n + m * x] = min(table[k + 1, p + m, n + m * x], cost)


@kernel
def meet(left: Floats, right: Floats, P: int, N: int, at: Ints) -> float:
    """min over (p, n) of left + right; `at` [2] receives (p, n) of the left half."""
    best = np.inf
    for p in range(P + 1):
        for n in range(N + 1):
            cost = left[p, n] + right[P - p, N - n]
            if cost < best:
                best = cost
                at[0], at[1] = p, n
    return best


class Halves:
    """The two tables of a problem; `least_work(cap)` fills and joins them, `stages_behind` traces
    back."""

    def __init__(self, problem: AstraProblem) -> None:
        self.problem = problem
        self.middle = problem.M // 2
        sizes = (self.middle, problem.M - self.middle)
        self.tables = [np.empty((size + 1, problem.P + 1, problem.N + 1)) for size in sizes]
        self.at = np.zeros(2, np.int64)

    def least_work(self, cap: Ints, run: Run) -> float:
        """f for the given caps [M]; +inf when no exact division exists. Raises `Stopped` where the
        run should stop."""
        p = self.problem
        # layers before, times layers of m stages, at most
        each = p.N * p.N * (1 + p.P.bit_length())
        for table, first in zip(self.tables, (0, self.middle), strict=True):
            table[0] = np.inf
            table[0, 0, 0] = 0.0
            for begin, end in portions((len(table) - 1) * (p.P + 1), each):
                run.check()
                fill(p.c, p.h, p.most_stages, cap, first, p.P, p.N, table, begin, end)
        return float(meet(self.tables[0][-1], self.tables[1][-1], p.P, p.N, self.at))

    def stages_behind(self, cap: Ints) -> list[tuple[int, int]]:
        """The stages (type, layers) of the last `least_work`."""
        p, n = int(self.at[0]), int(self.at[1])
        ends = ((p, n), (self.problem.P - p, self.problem.N - n))
        stages: list[tuple[int, int]] = []
        for table, first, (stages_left, layers_left) in zip(
            self.tables, (0, self.middle), ends, strict=True
        ):
            for k in range(table.shape[0] - 2, -1, -1):
                count, x = self._step(table, k, first + k, cap, stages_left, layers_left)
                stages += [(first + k, x)] * count
                stages_left, layers_left = stages_left - count, layers_left - count * x
        return stages

    def _step(self, table: Floats, k: int, i: int, cap: Ints, p: int, n: int) -> tuple[int, int]:
        """How many stages of how many layers type i contributed to table[k + 1, p, n]."""
        problem, best, step = self.problem, table[k, p, n], (0, 0)
        for count in range(1, min(int(problem.most_stages[i]), p) + 1):
            for x in range(1, min(int(cap[i]), n // count) + 1):
                cost = table[k, p - count, n - count * x] + count * (
                    problem.c[i] * x + problem.h[i]
                )
                if cost < best:
                    best, step = cost, (count, x)
        return step
