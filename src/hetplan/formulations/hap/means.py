"""What bounds the stages of programs in a cell of ratios: means over device types, and prices of
bytes, together called multipliers.

A mean does not exceed a maximum. With weights w over types for a stage, weights u_k in place of the
largest ratio of segment k, and with memory a price l_d >= 0 of every byte of a device of type d,

    seconds(Q, B) >= sum over Q of (comm + sum_d w_d (F + S . B_d) / v_d)
                     + sum_d l_d (held_d(Q, B) - W_d),      comm = fixed + shared sum_d u_kd B_kd.

The right side is affine in all ratios together and adds up over triples. Good weights are the duals
of the ratio problem of a good program, restricted to the cell. They are found by cuts: at a point
of the cell each stage of the program is slowest on some type, and with these types fixed its cost
is bounded from below by an affine function, a cut. The least over the cell of the largest of
several cuts is the value of a matrix game. The optimal blend of cuts in this game gives each stage
a mean over types, and the bound with these means is exact for that program.

A cell holds a simplex of ratios for each segment, [g, K, K]: row i of a segment's simplex is its
vertex i, one ratio for a device of each type. Its V = K^g vertices are those of the product.

Prices of bytes for a cell are found by cutting planes. For any multipliers the least of the right
side over a cell is at a vertex, where the best program is a shortest path. Each path met bounds
from above what any multipliers can prove at every vertex. A linear programme finds those for which
the least of these bounds is largest. One mean serves for all stages here.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetplan.formulations.hap.graph import CLOSE, Graph, Work, path, shortest
from hetplan.formulations.hap.problem import CostOfRatios, Floats, HapProblem
from hetplan.solvers.general import minimise
from hetplan.solvers.highs import instance, loaded
from hetplan.solvers.model import SMALLEST, LinearArrays, Model, Totals
from hetplan.solvers.run import Options, Run

# Cuts for the best ratios of a program in a cell, and the relative gap at which there are enough.
CUTS, EXACT = 60, 1e-10
# Mixtures of work are the same when they agree to so many digits.
DIGITS = 9


def whole_cell(problem: HapProblem) -> Floats:
    """[g, K, K] the cell that holds an optimum.

    Any ratios of sum 1 are a simplex whose vertex d gives everything to type d. With one segment
    and without memory a smaller one holds an optimum. For fixed stage times T_s and a fixed largest
    ratio M the ratios are bounded by u_d = min(M, min_s (T_s v_d - F_s) / S_s), a concave
    nondecreasing function of the speed v_d, and scaling u to sum 1 keeps all bounds. So some
    optimum is concave and nondecreasing in speed. Those functions on K speeds are the cone spanned
    by 1 and by min(v, v_k) - v_1 for k > 1.
    """
    if problem.g > 1 or problem.capacity is not None:
        return np.tile(np.diag(1.0 / problem.counts), (problem.g, 1, 1))
    v = problem.speeds
    rows = np.vstack([np.ones(problem.K), *(np.minimum(v, top) - v[0] for top in v[1:])])
    return np.asarray(rows / (rows @ problem.counts)[:, None])[None]


def vertices(cell: Floats) -> Floats:
    """[V, g, K]; the vertex of the last segment varies fastest."""
    picks = itertools.product(range(cell.shape[1]), repeat=len(cell))
    return np.array([[cell[k, v] for k, v in enumerate(pick)] for pick in picks])


def halves(cell: Floats, counts: Floats) -> tuple[Floats, Floats]:
    """Two cells that share the cut through the middle of the longest edge."""
    edges = [
        (float(np.abs(cell[k, i] - cell[k, j]) @ counts), k, i, j)
        for k in range(len(cell))
        for i, j in itertools.combinations(range(cell.shape[1]), 2)
    ]
    _, k, i, j = max(edges)
    one, other = cell.copy(), cell.copy()
    one[k, i] = other[k, j] = (cell[k, i] + cell[k, j]) / 2
    return one, other


def game(P: Floats, options: Options) -> tuple[float, Floats, Floats]:
    """(Value, mu [V], theta [C]) of the game min over mu in the simplex of max_c P[c] mu [C, V].

    The value is what theta guarantees, a lower bound in any case. HiGHS maximises it; mu are the
    duals. Where it finds no theta, by the user's own options perhaps, all count alike.
    """
    (C, V), low, high = P.shape, float(P.min()), float(P.max())
    if not (np.isfinite(high) and high > low):
        return low, np.full(V, 1.0 / V), np.eye(C)[0]
    shares = (P.T - low) / (high - low)
    shares = np.where(shares < SMALLEST, 0.0, shares)  # HiGHS warns of smaller ones
    rows = np.vstack([np.column_stack([shares, -np.ones(V)]), np.ones(C + 1)])
    rows[V, C] = 0.0
    programme = LinearArrays(
        cost=-np.eye(C + 1)[C],
        constant=0.0,
        lower=np.zeros(C + 1),
        upper=np.full(C + 1, np.inf),
        integer=np.zeros(C + 1, dtype=np.bool_),
        starts=np.arange(0, rows.size + 1, C + 1),
        columns=np.tile(np.arange(C + 1), V + 1),
        values=rows.ravel(),
        row_lower=np.eye(V + 1)[V],
        row_upper=np.append(np.full(V, np.inf), 1.0),
    )
    highs = loaded(programme, instance(options))
    highs.run()
    theta = _shares(highs.getSolution().col_value[:C], C)
    mu = _shares(highs.getSolution().row_dual[:V], V)
    return float((theta @ P).min()), mu, theta


def _shares(values: Sequence[float], count: int) -> Floats:
    """The values as shares of their sum, without what is negative by rounding; equal shares where
    nothing is left."""
    kept = np.maximum(values, 0.0)
    return kept / kept.sum() if kept.sum() > 0 else np.full(count, 1.0 / count)


def game_value(P: Floats, options: Options) -> float:
    """A lower bound of min over mu in the simplex of max_c P[c] mu [C, V], mostly the value itself;
    rows may be infinite."""
    return max(float(P.min(axis=1).max()), game(P, options)[0])


def best_in_cell(
    F: Floats,
    S: Floats,
    comm: Floats,
    held: Floats,
    x: Floats,
    slow: Floats,
    start: Floats,
    options: Options,
) -> tuple[Floats, Floats, Floats]:
    """(mu [V], stage_weights [s, K], top_weights [g, K], rows of sum 1): the best ratios mu x of
    stages F [s], S [s, g] and largest ratios that cost comm [g] over the vertices x [V, g, K], and
    the means whose bound shows that they are best.

    slow [K]: seconds per unit of work on each type. held [V]: what bytes cost at the vertices.
    start [V]: where the first cut is made. All points are barycentric (mu).
    """
    V, g, K = x.shape
    mu = best = start
    least, cuts, slowest, largest = np.inf, [], [], []
    theta = np.ones(1)
    stages, segments = np.arange(len(F)), np.arange(g)
    for _ in range(CUTS):
        point = np.tensordot(mu, x, 1)
        busy = (F[:, None] + S @ point) * slow
        types, top = busy.argmax(axis=1), point.argmax(axis=1)
        cost = float(busy[stages, types].sum() + comm @ point[segments, top] + held @ mu)
        if cost < least:
            least, best = cost, mu
        slowest.append(types)
        largest.append(top)
        work = np.zeros((g, K))
        np.add.at(work.T, types, S * slow[types, None])
        np.add.at(work, (segments, top), comm)
        cuts.append(held + float(F @ slow[types]) + x.reshape(V, -1) @ work.ravel())
        value, mu, theta = game(np.array(cuts), options)
        if least - value <= EXACT * least:
            break
    stage_weights, top_weights = np.zeros((len(F), K)), np.zeros((g, K))
    for share, types, top in zip(theta, slowest, largest, strict=True):
        stage_weights[stages, types] += share
        top_weights[segments, top] += share
    return best, stage_weights, top_weights


@dataclass(frozen=True)
class Multipliers:
    """type_weights [K] over types, top_weights [g, K] in place of the largest ratio: rows of sum 1.
    byte_prices [K]: seconds per byte of one device of each type."""

    type_weights: Floats
    top_weights: Floats
    byte_prices: Floats


class Means:
    """Good multipliers for one cell, and what they make triples and stages cost. options: those of
    the run, for HiGHS."""

    def __init__(self, problem: HapProblem, cell: Floats, options: Options) -> None:
        self.problem, self.options = problem, options
        self.x = vertices(cell)  # [V, g, K]
        self._slow = problem.speeds[-1] / problem.speeds
        V, _, K = self.x.shape
        self.mu = np.full(V, 1.0 / V)  # the reference point, barycentric
        self.top_weights = np.eye(K)[self.point.argmax(axis=1)]
        self.byte_prices = np.zeros(K)
        # [L, K], rows of sum 1; each is a mean for all stages: weights found for the cell, all
        # types alike, each type alone.
        self.weights = np.vstack([np.full((1, K), 1.0 / K), np.eye(K)])
        self._stage_of_mixture: dict[bytes, int] = {}
        self._stage_weights = np.zeros((0, K))

    @property
    def point(self) -> Floats:
        """[g, K]: the reference point, where means are compared."""
        return np.asarray(np.tensordot(self.mu, self.x, 1))

    def set_from_program(self, cost: CostOfRatios) -> None:
        """Take the point and the means from a program's best ratios in the cell."""
        unit = self.problem.speeds[-1]
        F, S = cost.F / unit, cost.S / unit
        held = (
            cost.fixed_bytes * self.byte_prices.sum()
            + self.x @ self.byte_prices @ cost.shared_bytes
        )
        self.mu, self._stage_weights, top_weights = best_in_cell(
            F, S, cost.comm, held, self.x, self._slow, self.mu, self.options
        )
        paid = cost.comm > 0
        self.top_weights[paid] = top_weights[paid]
        self._stage_of_mixture = {row.tobytes(): s for s, row in enumerate(_mixtures(F, S))}

    def set_multipliers(self, multipliers: Multipliers) -> None:
        """Take multipliers found for the cell; the means of single stages stay."""
        self.weights = np.vstack([multipliers.type_weights, self.weights[-1 - self.problem.K :]])
        self.top_weights, self.byte_prices = multipliers.top_weights.copy(), multipliers.byte_prices

    @property
    def memory_seconds(self) -> float:
        """Seconds that all memory costs at its prices, to be taken off every sum: sum_d l_d W_d."""
        capacity = self.problem.capacity
        return 0.0 if capacity is None else float(self.byte_prices @ capacity)

    def costs(self, work: Work, weights: Floats | None = None) -> Floats:
        """[A, L, V]: seconds that work costs at the vertices by each of the weights [L, K],
        or of `weights`."""
        fixed, shared = self._units(self.weights if weights is None else weights)
        V, g = self.x.shape[:2]
        by_vertex = (work.shared_seconds @ shared.reshape(-1, g).T).reshape(-1, len(fixed), V)
        cost = work.fixed_seconds[:, None, None] * fixed[:, None] + by_vertex
        return self._completed(cost, work)

    def costs_per_stage(self, work: Work) -> Floats:
        """[A, 1, V]: the same where each row is a whole stage with a mean of its own: the one with
        the largest value at the point, and of equal ones that of its mixture of work."""
        L = len(self.weights)
        fixed, shared = self._units(np.vstack([self.weights, self._stage_weights]))
        rows = _mixtures(work.fixed_seconds, work.shared_seconds)
        which = L + np.array(
            [self._stage_of_mixture.get(row.tobytes(), -L) for row in rows], dtype=np.int64
        )
        point = np.tensordot(shared, self.mu, (1, 0))
        score = np.outer(work.fixed_seconds, fixed[:L]) + work.shared_seconds @ point[:L].T
        mine = fixed[which] * work.fixed_seconds + np.einsum(
            "ag,ag->a", point[which], work.shared_seconds
        )
        most = np.maximum(score.max(axis=1), mine) * (1 - CLOSE)
        best = np.where(mine >= most, which, (score >= most[:, None]).argmax(axis=1))
        cost = (work.fixed_seconds * fixed[best])[:, None]
        cost = cost + np.einsum("ag,avg->av", work.shared_seconds, shared[best])
        return self._completed(cost[:, None], work)

    def at_point(self, graph: Graph) -> Floats:
        """[A]: what arcs cost at the point: whole stages exactly, other arcs by the first mean."""
        point, work = self.point, graph.work
        busy = (work.fixed_seconds[:, None] + work.shared_seconds @ point) * self._slow
        cost = busy.max(axis=1) if graph.arcs_are_stages else busy @ self.weights[0]
        paid = work.fixed_seconds + work.shared_seconds @ point.max(axis=1)
        held = work.fixed_bytes * self.byte_prices.sum() + work.shared_bytes @ (
            point @ self.byte_prices
        )
        return np.asarray(np.where(work.comm, paid, cost) + held)

    def _units(self, weights: Floats) -> tuple[Floats, Floats]:
        """Seconds of a unit of fixed [M] and of shared [M, V, g] work by means [M, K]."""
        rows = weights * self._slow
        return rows.sum(axis=1), np.einsum("md,vgd->mvg", rows, self.x)

    def _completed(self, cost: Floats, work: Work) -> Floats:
        """Costs of computing [A, M, V] with those of collectives put in, and of bytes added."""
        top = np.einsum("gd,vgd->gv", self.top_weights, self.x)
        cost[work.comm] = (
            work.fixed_seconds[work.comm, None] + work.shared_seconds[work.comm] @ top
        )[:, None]
        if self.byte_prices.any():
            held = work.fixed_bytes[:, None] * self.byte_prices.sum()
            cost += (held + work.shared_bytes @ (self.x @ self.byte_prices).T)[:, None]
        return cost


def _mixtures(F: Floats, S: Floats) -> Floats:
    """[s, 1 + g]: rows of work scaled to sum 1 and rounded, to be compared."""
    rows = np.column_stack([F, S])
    total = rows.sum(axis=1, keepdims=True)
    return np.asarray(
        np.round(np.divide(rows, total, out=np.zeros_like(rows), where=total > 0), DIGITS) + 0.0
    )  # no negative zeros


# All memory of a device costs at most so many times the seconds of all triples.
DEAREST = 1e5
# Cutting planes per cell; what a further one must still promise, as a share of the bound.
ROUNDS, PROMISE = 40, 1e-7
# Rounding in sums of thousands of terms.
CUT_ROUNDING = 1e-12


@dataclass(frozen=True)
class ProgramTotals:
    """What a program, a path of the graph, adds up to."""

    program: tuple[int, ...]  # triple numbers in order of execution
    fixed_comm: float  # seconds of collectives
    shared_comm: Floats  # [g] and per largest ratio
    fixed_computing: Floats  # [K] seconds of computing fixed work on each type
    shared_computing: Floats  # [g, K] and per ratio
    fixed_bytes: float
    shared_bytes: Floats  # [g]


def first_multipliers(problem: HapProblem) -> Multipliers:
    """Means that make every ratio cost the same; bytes cost nothing."""
    w = problem.speeds * problem.counts
    return Multipliers(
        w / w.sum(),
        np.tile(problem.counts / problem.counts.sum(), (problem.g, 1)),
        np.zeros(problem.K),
    )


def _totals(problem: HapProblem, graph: Graph, arcs: list[int]) -> ProgramTotals:
    work = graph.work[np.array(arcs, dtype=np.int64)]
    comm, slow = work.comm, problem.speeds[-1] / problem.speeds
    return ProgramTotals(
        program=tuple(graph.program(arcs)),
        fixed_comm=float(work.fixed_seconds[comm].sum()),
        shared_comm=work.shared_seconds[comm].sum(axis=0),
        fixed_computing=work.fixed_seconds[~comm].sum() * slow,
        shared_computing=work.shared_seconds[~comm].sum(axis=0)[:, None] * slow,
        fixed_bytes=float(work.fixed_bytes.sum()),
        shared_bytes=work.shared_bytes.sum(axis=0),
    )


def best_multipliers(
    graph: Graph,
    means: Means,
    start: Multipliers,
    threshold: float,
    run: Run,
) -> tuple[float, Multipliers, list[ProgramTotals]]:
    """(Bound of the cell, the multipliers that prove it, the paths met). It begins with multipliers
    of a larger cell, and ends at the threshold."""
    problem, multipliers = means.problem, start
    paths: dict[tuple[int, ...], ProgramTotals] = {}
    best, chosen = -np.inf, start
    for _ in range(ROUNDS):
        means.set_multipliers(multipliers)
        cost = means.costs(graph.work, multipliers.type_weights[None])[:, 0]
        length, arc = shortest(graph, cost)
        least = float(length[graph.start].min())
        value = least - means.memory_seconds - CUT_ROUNDING * (least + means.memory_seconds)
        if value > best:
            best, chosen = value, multipliers
        if best >= threshold or run.should_stop:
            break
        for v in range(len(means.x)):
            totals = _totals(problem, graph, path(graph, arc[:, v]))
            paths[totals.program] = totals
        answer = _best_by_cuts(problem, means.x, list(paths.values()), run)
        if answer is None:
            break
        hoped, multipliers = answer
        if hoped - best <= PROMISE * max(abs(hoped), SMALLEST * problem.seconds_of_all):
            break
    means.set_multipliers(chosen)
    return best, chosen, list(paths.values())


def _best_by_cuts(
    problem: HapProblem, x: Floats, paths: Sequence[ProgramTotals], run: Run
) -> tuple[float, Multipliers] | None:
    """(An upper bound of what any multipliers can prove, as far as the paths met limit it; the
    multipliers that reach it)."""
    assert problem.capacity is not None
    most = problem.seconds_of_all or 1.0
    room = np.where(problem.capacity > 0, problem.capacity, 1.0)
    model = Model("hap-prices", totals=Totals(least=most, largest=most))
    level = model.seconds("level", lower=None)
    w = model.continuous("w", problem.K)
    u = model.continuous("u", (problem.g, problem.K))
    # of the whole memory of a device, in units of `most`
    price = model.continuous("price", problem.K, 0.0, DEAREST)
    model.minimize(level, -1.0)
    model.equal("mean", w, to=1.0)
    for k in range(problem.g):
        model.equal("mean", u[k], to=1.0)
    columns = np.concatenate([[level], w, u.ravel(), price])
    for p in paths:
        for at in x:
            busy = p.fixed_computing + (p.shared_computing * at).sum(axis=0)
            top = (p.shared_comm[:, None] * at).ravel()
            over = (p.fixed_bytes + p.shared_bytes @ at - problem.capacity) / room * most
            values = np.concatenate([-busy, -top, np.clip(-over, -1e9 * most, 1e9 * most)])
            model.row("cut", columns, np.append(1.0, values), upper=p.fixed_comm)
    answer = minimise("milp", model, run.part(), report=lambda i, b: None)
    if answer.x is None or answer.objective is None:
        return None
    mean, top_weights = np.maximum(answer.values(w), 0.0), np.maximum(answer.values(u), 0.0)
    multipliers = Multipliers(
        mean / mean.sum(),
        top_weights / top_weights.sum(axis=1, keepdims=True),
        np.maximum(answer.values(price), 0.0) * most / room,
    )
    return -answer.objective, multipliers
