"""Lower bounds of problem `hap` with memory over cells of ratios, by prices of bytes and means over
types.

A cell is a simplex of ratios for each segment; x are the vertices of their product. Any mean w over
types bounds what stages compute, any mean u_k what a largest ratio is, and any prices l >= 0 of
bytes bound the program that fits:

    seconds(Q, B) >= sum over Q of (comm + F sum_d w_d / v_d + S sum_d w_d B_kd / v_d) + sum_d l_d
    (held_d - W_d), comm = fixed + shared sum_d u_kd B_kd.

The right side is affine in B, so its least over the cell is at a vertex, where the best Q is a
shortest path in the canonical graph of needs. w, u, l are improved by cutting planes, one for each
path and vertex met. One w prices all stages: where the slowest type changes from stage to stage, a
gap remains however small the cells.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetplan.formulations.hap.graph_kernels import shortest_paths
from hetplan.formulations.hap.problem import Floats, HapProblem, Ints
from hetplan.formulations.hap.states import Graph
from hetplan.solvers.linear_model import SMALLEST, LinearModel
from hetplan.solvers.run import Run

# All memory of a device costs at most so many times what everything costs at most.
DEAREST = 1e5
# Cutting planes per cell; what a further one must still promise, as a share of the bound.
ROUNDS, PROMISE = 40, 1e-7
# Rounding in sums of thousands of terms.
ROUNDING = 1e-12
MOST_VERTICES = 64
# Crossings of two paths that are worth pricing.
FEW = 4


@dataclass(frozen=True)
class Prices:
    """w [K] and u [g, K], rows of sum 1; bytes [K] seconds per byte of one device of each type."""

    w: Floats
    u: Floats
    bytes: Floats


@dataclass(frozen=True)
class Path:
    """What a program adds up to: seconds of collectives, fixed and per largest ratio [g]; FLOP F, S
    [g]; bytes, fixed and shared [g]; its arcs from the goal on, and its triples' numbers in order
    of execution."""

    alone: float
    top: Floats
    F: float
    S: Floats
    fixed_bytes: float
    shared_bytes: Floats
    arcs: Ints
    program: tuple[int, ...]


@dataclass(frozen=True)
class Cell:
    """simplices [g, K, K]: the vertices (rows) of each segment's ratios."""

    simplices: Floats

    @property
    def vertices(self) -> Floats:
        """[V, g, K] of their product."""
        g, K, _ = self.simplices.shape
        return np.array(
            [
                [self.simplices[k, v] for k, v in enumerate(pick)]
                for pick in itertools.product(range(K), repeat=g)
            ]
        )


@dataclass(frozen=True)
class Bounded:
    """bound in seconds (infinite: nothing fits); point [g, K]: the mixture of the vertices that it
    comes from, None where the bound was reached; prices: the best; cuts: (path, vertex [g, K]) that
    bind."""

    bound: float
    point: Floats | None
    prices: Prices
    cuts: tuple[tuple[Path, Floats], ...]


def whole_cell(problem: HapProblem) -> Cell:
    """All ratios: type d has everything at its vertex."""
    return Cell(np.tile(np.diag(1.0 / problem.counts), (problem.g, 1, 1)))


def first_prices(problem: HapProblem) -> Prices:
    """Means in which no ratio matters; bytes cost nothing."""
    w = problem.speeds * problem.counts
    u = problem.counts / problem.counts.sum()
    return Prices(w / w.sum(), np.tile(u, (problem.g, 1)), np.zeros(problem.K))


class Pricing:
    """Shortest paths in a canonical graph under prices."""

    def __init__(self, problem: HapProblem, graph: Graph) -> None:
        assert problem.capacity is not None, "memory is given"
        self.problem, self.graph, self.capacity = problem, graph, problem.capacity
        self.most = problem.most_seconds or 1.0
        steps = [graph.theory.steps[s] for s in graph.step]
        self._comm = np.array([s.comm for s in steps], dtype=np.bool_)
        self._segment = np.array([s.segment for s in steps], dtype=np.int64)
        rows = np.array(
            [(s.fixed, s.shared, s.fixed_bytes, s.shared_bytes) for s in steps]
        ).reshape(-1, 4)
        self._fixed, self._shared, self._fixed_bytes, self._shared_bytes = rows.T
        self._paths: dict[bytes, Path] = {}

    def shortest(self, prices: Prices, vertices: Floats) -> tuple[float, list[Path]]:
        """(The bound at these prices over the vertices [V, g, K], the shortest path for each
        vertex)."""
        problem, k = self.problem, self._segment
        each = np.where(self._comm, 1.0, (prices.w / problem.speeds).sum())
        byte = vertices @ prices.bytes
        work = np.where(
            self._comm[:, None],
            np.einsum("vkd,kd->kv", vertices, prices.u)[k],
            (vertices @ (prices.w / problem.speeds)).T[k],
        )
        cost = (self._fixed * each + self._fixed_bytes * prices.bytes.sum())[:, None]
        cost = cost + self._shared[:, None] * work + self._shared_bytes[:, None] * byte.T[k]
        graph = self.graph
        length, arc = shortest_paths(graph.first, graph.head, graph.component, cost)
        at_start = length[graph.start]
        if not np.isfinite(at_start).all():  # no path: the goal cannot be had
            return float(np.inf), []
        room = float(prices.bytes @ self.capacity)
        least = float(at_start.min())
        bound = least - room - ROUNDING * (least + room)
        return bound, [self._read(arc[:, v]) for v in range(len(vertices))]

    def _read(self, arc: Ints) -> Path:
        arcs, node = [], self.graph.start
        while node < self.graph.n - 1:
            arcs.append(int(arc[node]))
            node = int(self.graph.head[arcs[-1]])
        taken = np.array(arcs, dtype=np.int64)
        key = taken.tobytes()
        if key not in self._paths:
            self._paths[key] = self._summed(taken)
        return self._paths[key]

    def _summed(self, arcs: Ints) -> Path:
        g, comm, k = self.problem.g, self._comm[arcs], self._segment[arcs]
        fixed, shared = self._fixed[arcs], self._shared[arcs]
        steps = self.graph.theory.steps

        def by_segment(rows: NDArray[np.bool_], values: Floats) -> Floats:
            return np.bincount(k[rows], values[rows], g).astype(np.float64)

        return Path(
            alone=float(fixed[comm].sum()),
            top=by_segment(comm, shared),
            F=float(fixed[~comm].sum()),
            S=by_segment(~comm, shared),
            fixed_bytes=float(self._fixed_bytes[arcs].sum()),
            shared_bytes=by_segment(np.ones(len(arcs), dtype=np.bool_), self._shared_bytes[arcs]),
            arcs=arcs,
            program=tuple(steps[s].index for s in self.graph.step[arcs])[::-1],
        )

    def crossed(self, one: Path, other: Path, point: Floats) -> list[Path]:
        """What follows one path to a node that both have, and the other from there: the FEW that at
        ratios [g, K] fit and take least, or exceed memory least. Under prices at which both are
        shortest paths, so are these."""
        head, start = self.graph.head, self.graph.start
        nodes = [[start, *(int(h) for h in head[path.arcs])] for path in (one, other)]
        at = {node: i for i, node in enumerate(nodes[1])}
        found: dict[bytes, Path] = {}
        for i, node in enumerate(nodes[0][1:-1], start=1):
            if node not in at:
                continue
            for arcs in (
                np.concatenate([one.arcs[:i], other.arcs[at[node] :]]),
                np.concatenate([other.arcs[: at[node]], one.arcs[i:]]),
            ):
                if (key := arcs.tobytes()) not in self._paths:
                    found.setdefault(key, self._summed(arcs))

        def rank(path: Path) -> tuple[float, float]:
            held = path.fixed_bytes + path.shared_bytes @ point
            busy = (path.F + path.S @ point) / self.problem.speeds
            over = float((held - self.capacity).max())
            return max(0.0, over), path.alone + float(path.top @ point.max(axis=1)) + float(
                busy.max()
            )

        return sorted(found.values(), key=rank)[:FEW]

    def bounded(
        self,
        cell: Floats,
        start: Prices,
        cuts: Sequence[tuple[Path, Floats]],
        enough: float,
        run: Run,
    ) -> tuple[Bounded, list[Path]]:
        """The bound of a cell with vertices `cell` [V, g, K], up to `enough`, from `start` on; and
        the paths met."""
        kept, met = list(cuts), []
        best, prices, chosen = -np.inf, start, start
        point: Floats | None = None
        for _ in range(ROUNDS):
            value, paths = self.shortest(prices, cell)
            if value > best:
                best, chosen = value, prices
            met += paths
            if best >= enough or run.should_stop:
                return Bounded(best, point, chosen, tuple(kept)), met
            kept += list(zip(paths, cell, strict=True))
            found = self._master(kept, run)
            if found is None:
                break
            hoped, prices, shares = found
            point = np.tensordot(shares, np.array([x for _, x in kept]), 1)
            binding = [cut for cut, share in zip(kept, shares, strict=True) if share > 0]
            if hoped - best <= PROMISE * max(abs(hoped), SMALLEST * self.most):
                kept = binding
                break
        return Bounded(best, point, chosen, tuple(kept)), met

    def _master(
        self, cuts: Sequence[tuple[Path, Floats]], run: Run
    ) -> tuple[float, Prices, Floats] | None:
        """(What no prices exceed as far as the cuts tell, prices that reach it, the cuts'
        shares)."""
        from hetplan.solvers import highs

        problem, unit = self.problem, 1e3 / self.most
        room = np.where(self.capacity > 0, self.capacity, 1.0)
        model = LinearModel("hap-prices")
        level = model.continuous("level", lower=None)
        w = model.continuous("w", problem.K)
        u = model.continuous("u", (problem.g, problem.K))
        # of a device's memory, in self.most
        price = model.continuous("price", problem.K, 0.0, DEAREST)
        model.minimize(level, -1.0)
        model.equal("mean", w, to=1.0)
        for k in range(problem.g):
            model.equal("mean", u[k], to=1.0)
        columns = np.concatenate([[level], w, u.ravel(), price])
        for path, x in cuts:
            busy = (path.F + path.S @ x) / problem.speeds * unit
            top = (path.top[:, None] * x).ravel() * unit
            over = (path.fixed_bytes + path.shared_bytes @ x - self.capacity) / room * 1e3
            values = np.concatenate([[1.0], -busy, -top, -over])
            values = np.where(np.abs(values) < SMALLEST, 0.0, np.clip(values, -1e12, 1e12))
            model.row("cut", columns, values, upper=path.alone * unit)
        answer = highs.solve(model, run.part(), report=lambda i, b: None)
        if answer.x is None or answer.row_dual is None or answer.objective is None:
            return None
        shares = np.abs(answer.row_dual[-len(cuts) :])
        mean, tops = np.maximum(answer.values(w), 0.0), np.maximum(answer.values(u), 0.0)
        prices = Prices(
            mean / mean.sum(),
            tops / tops.sum(axis=1, keepdims=True),
            np.maximum(answer.values(price), 0.0) * self.most / room,
        )
        return -answer.objective / unit, prices, shares / shares.sum()
