"""Oobleck's divide and conquer over layers, stages and device vectors, as Ditto extends it (eq.
1-3).

T(S, u, v, x): layers [u, v) in S stages on exactly the devices x is split into T(s, u, k, x') and
T(S - s, k, v, x - x') over all s, k and x'; of each state only the template of least T1 + T2 + T3
is kept. T does not decompose (T2 and T3 depend on where the slowest stage of the whole lies), so
this is not optimal in general.
Intervals of the same layers give the same answers: a state belongs to a class of intervals, which
changes nothing but the time. Of equally slow stages the first counts, as in the objective.
"""

from __future__ import annotations

import math
from itertools import product

import numpy as np

from hetplan.errors import UnsupportedError
from hetplan.formulations.ditto.division_kernel import divide
from hetplan.formulations.ditto.problem import DittoProblem, Floats, Ints, Stages
from hetplan.solvers.run import Run

MOST_BYTES = 3 * 2**29
BYTES_PER_STATE = 5 * 8 + 3 * 8


class Division:
    """The table of all states of a problem's cluster; `fill` it first."""

    def __init__(self, problem: DittoProblem) -> None:
        self.problem = p = problem
        sizes = [int(d) + 1 for d in p.devices]
        group = int(p.option_devices.max())
        self.interval, self.begins, self.ends = interval_classes(p.weight)
        vectors, classes = math.prod(sizes), len(self.begins)
        self.most_stages = min(p.layers, int(p.devices.sum()))
        states = vectors * (self.most_stages + 1) * classes
        if states * BYTES_PER_STATE > MOST_BYTES:
            raise UnsupportedError(
                f"Oobleck's divide and conquer has {states} states here",
                expected=f"at most {MOST_BYTES // BYTES_PER_STATE} (method exact needs no such table)",
            )
        self.coords = np.array(list(product(*map(range, sizes))), dtype=np.int64)
        self.strides = np.array(
            [math.prod(sizes[i + 1 :]) for i in range(len(sizes))], dtype=np.int64
        )
        self.fewest = (-(-self.coords // group)).sum(axis=1)
        self.most = self.coords.sum(axis=1)
        shape = (vectors, self.most_stages + 1, classes)
        self.total, self.slowest = np.full(shape, np.inf), np.full(shape, np.inf)
        self.t1, self.t3 = np.full(shape, np.inf), np.full(shape, np.inf)
        self.position = np.zeros(shape, dtype=np.int64)
        self.split = np.zeros((*shape, 3), dtype=np.int64)

    @property
    def full(self) -> int:
        """The vector of all devices."""
        return len(self.coords) - 1

    def fill(self, run: Run) -> bool:
        """All states, smaller vectors first; False when `run` wants to stop before the end."""
        self._enter_single_stages()
        for x in range(1, len(self.coords)):
            if run.should_stop:
                return False
            below = [range(int(d) + 1) for d in self.coords[x]]
            parts = np.array(
                [int(y @ self.strides) for y in np.array(list(product(*below)))][1:-1],
                dtype=np.int64,
            )
            divide(
                x, parts, self.fewest, self.most, self.begins, self.ends, self.interval,
                self.problem.micro_batches, self.total, self.t1, self.slowest, self.position, self.t3, self.split,
            )  # fmt: skip
        return True

    def _enter_single_stages(self) -> None:
        p = self.problem
        for r in range(p.options):
            kind, size = int(p.option_kind[r]), int(p.option_devices[r])
            if size > p.devices[kind]:
                continue
            x = size * int(self.strides[kind])
            t = p.time[r, self.begins, self.ends]
            self.t1[x, 1] = self.slowest[x, 1] = self.t3[x, 1] = t
            # T2 of one stage alone is (N_b - 2) t.
            self.total[x, 1] = p.micro_batches * t

    def ranked(self) -> list[tuple[float, int]]:
        """(T, S) of the templates that use all devices, best first; S > N_b is left out."""
        whole = int(self.interval[0, self.problem.layers])
        row = self.total[self.full, :, whole]
        allowed = range(1, min(self.most_stages, self.problem.micro_batches) + 1)
        return sorted((float(row[s]), s) for s in allowed if np.isfinite(row[s]))

    def template(self, stages: int) -> Stages:
        """The stages of the state (all devices, `stages`, all layers)."""
        return self._expand(self.full, stages, 0, self.problem.layers)

    def _expand(self, x: int, stages: int, first: int, last: int) -> Stages:
        if stages == 1:
            coords = self.coords[x]
            kind = int(np.flatnonzero(coords)[0])
            fits = (self.problem.option_kind == kind) & (
                self.problem.option_devices == coords[kind]
            )
            return [(first, last, int(np.flatnonzero(fits)[0]))]
        y, s, offset = (int(v) for v in self.split[x, stages, self.interval[first, last]])
        cut = first + offset
        return self._expand(y, s, first, cut) + self._expand(x - y, stages - s, cut, last)


def interval_classes(weight: Floats) -> tuple[Ints, Ints, Ints]:
    """Intervals with the same layers in the same order share a class.

    weight [R, L]. Returns classes [L + 1, L + 1] (-1 unless a < b), and first and last layer of a
    member of each.
    """
    layers = weight.shape[1]
    _, alike = np.unique(weight, axis=1, return_inverse=True)
    kinds = [int(k) for k in alike.ravel()]
    interval = np.full((layers + 1, layers + 1), -1, dtype=np.int64)
    known: dict[tuple[int, int], int] = {}
    begins, ends = [], []
    for a in range(layers):
        at = -1
        for b in range(a + 1, layers + 1):
            key = (at, kinds[b - 1])
            if key not in known:
                known[key] = len(known)
                begins.append(a)
                ends.append(b)
            at = interval[a, b] = known[key]
    return interval, np.array(begins, dtype=np.int64), np.array(ends, dtype=np.int64)
