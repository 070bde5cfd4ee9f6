"""AMP's problem as a mixed-integer linear programme, one per configuration (pp, dp, tp, mbs), for
any MILP solver.

Source: AMP (NeurIPS 2022), Section 3, eq. 3-5.
Sets   c cells of interchangeable devices (n_c of them, of type k_c); p = (j, i, r) stage, data
       rank, tensor rank; n = [a, b) intervals of layers for stage j; S profiles, λ bandwidth levels
       (see tables.py).
Data   all seconds times a power of two that brings T to about 1000.
Vars   x[c,p] in {0,1}: position p holds a device of cell c.    y[j,n] in {0,1}: stage j is interval
       n. g[j,i,S], low[..,λ] in [0,1]: the profile of a tensor group; the level of a tensor group,
       of a link, of the data groups of a stage (reach[..,λ]: that level or a lower one). They are
       whole wherever x is, at no loss. z = (choice and choice) in [0,1]: both made, e.g. z[n,S] =
       y[j,n] g[j,i,S]; costs are sums over z, so that t_ij, e_ij and the synchronisation are linear
       and their convex hull exact for each pair of choices. m_i, sigma, T >= 0.
       min T  s.t.
(1) sum_c x[c,p] = 1,  sum_p x[c,p] = n_c            (2) sum_n y[0,n] = 1;  what ends before l
equals what begins at l
(3) sum_S g[S] = 1;  S covers k: sum_S g[S] >= sum_{c of type k} x[c,p] for every p of the group
(4) sum_λ low[λ] = 1,  reach[λ] = sum_{λ' <= λ} low[λ'];  for every pair of positions p, q that talk
    (in a tensor group, on a lane of a link, in a data group)  reach[λ] >= x[c,p] + sum_{c':
    bandwidth(c,c') <= B_λ} x[c',q] - 1
(5) sum_S z[n,S] = y[n],  sum_n z[n,S] = g[S];  likewise for levels
(6) m_i >= t_ij;  T >= (gas - 1) m_i + sum_j t_ij + sum_j e_ij + sigma for every i;  sigma >=
synchronisation of every j
(7) intervals beyond capacity κ, and cells of at most that capacity: sum_n y[j,n] + sum_c x[c,p] <=
1
(8) the least of all equivalent placements: equal cells come in order, data and tensor ranks begin
in order
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import combinations, pairwise, product

import numpy as np

from hetplan.formulations.amp.general.loop import Question, Reply
from hetplan.formulations.amp.general.tables import Tables
from hetplan.formulations.amp.problem import Floats, Ints
from hetplan.formulations.amp.strategy import Strategy
from hetplan.solvers.linear_model import SMALLEST, Columns, LinearModel, MilpAnswer
from hetplan.solvers.native import Scale, Sink, stopped
from hetplan.solvers.run import Run, Stopped

# A joint column z stands in two rows of (5) and in two of (6).
TERMS_PER_JOINT = 4
# (columns, values): a linear expression.
Terms = tuple[Columns, Floats]
Driver = Callable[[LinearModel, Run, Scale, Sink], MilpAnswer]


def ask(driver: Driver, question: Question, run: Run, report: Sink) -> Reply:
    """One configuration by a MILP solver: build, solve, read the strategy out of the incumbent."""
    begun = time.perf_counter()
    try:
        programme = Programme(question, LinearModel("amp", run))
        for constrain in CONSTRAINTS:
            constrain(programme)
    except Stopped:
        return Reply(stop=stopped(run), build_seconds=time.perf_counter() - begun)
    built = time.perf_counter()
    answer = driver(programme.model, run, Scale(per_unit=programme.unit), report)
    return Reply(
        stop=answer.stop,
        bound=answer.bound,
        strategy=programme.strategy(answer) if answer.has_solution else None,
        build_seconds=built - begun,
        message=answer.message,
    )


@dataclass
class Programme:
    """The programme under construction; names as in the module's docstring."""

    question: Question
    model: LinearModel

    def __post_init__(self) -> None:
        t = self.tables = self.question.tables
        self.stages, self.ranks, self.lanes = (range(n) for n in t.shape)
        self.groups = list(product(self.stages, self.ranks))
        upper = self.question.upper or 1.0
        self.unit = 2.0 ** (10 - np.ceil(np.log2(max(self.question.lower, upper * 1e-3))))
        self.top = upper * self.unit
        self.x = self.model.binary("x", (t.cells.count, *t.shape))
        self.y = [self.model.binary(f"y_{j}", len(n)) for j, n in enumerate(t.stages)]
        least = min(self.question.lower, upper) * self.unit
        self.total = self.model.continuous("T", lower=least, upper=self.top)
        self.model.minimize(self.total)
        # t_ij
        self.stage: dict[tuple[int, int], list[Terms]] = {group: [] for group in self.groups}
        self.link: dict[tuple[int, int], list[Terms]] = {group: [] for group in self.groups}  # e_ij

    def scaled(self, seconds: Floats) -> Floats:
        """In the programme's unit. What no solver tells from 0 becomes 0, what nobody can afford is
        capped."""
        costs = np.minimum(seconds * self.unit, 2 * self.top)
        return np.where(costs < SMALLEST, 0.0, costs)

    def both(self, name: str, first: Columns, second: Columns, seconds: Floats) -> Terms:  # (5)
        """The cost of two choices of one member each, seconds [len(second), len(first)], by joint
        columns z.

        The columns of each choice add up to 1.
        """
        costs = self.scaled(seconds)
        if len(second) == 1:
            return first, costs[0]
        joint = self.model.continuous(f"z_{name}", costs.shape, upper=1.0)
        for n, column in enumerate(first):
            self.model.equal(
                f"{name}_first", [*joint[:, n], column], [1.0] * len(second) + [-1.0], to=0.0
            )
        for s, column in enumerate(second):
            self.model.equal(
                f"{name}_second", [*joint[s], column], [1.0] * len(first) + [-1.0], to=0.0
            )
        return joint.ravel(), costs.ravel()

    def at_least(
        self, family: str, target: Columns, parts: Iterable[Terms], factor: float = 1.0
    ) -> None:
        """factor * target >= the sum of the parts."""
        columns, values = joined([(np.atleast_1d(target), np.array([-factor])), *parts])
        self.model.row(family, columns, values, upper=0.0)

    def strategy(self, answer: MilpAnswer) -> Strategy:
        """Placement and cut of the incumbent."""
        last = [
            int(n.last[answer.values(row).argmax()])
            for n, row in zip(self.tables.stages, self.y, strict=True)
        ]
        return self.tables.strategy(answer.values(self.x).argmax(axis=0), np.array([0, *last]))


def joined(parts: Iterable[Terms]) -> Terms:
    """The sum of expressions."""
    columns, values = zip(*parts, strict=True)
    return np.concatenate(columns), np.concatenate(values)


def place_every_device(m: Programme) -> None:  # (1)
    """sum_c x[c,p] = 1 for every position, sum_p x[c,p] = n_c for every cell."""
    for position in np.ndindex(m.tables.shape):
        m.model.equal("position", m.x[(slice(None), *position)], to=1.0)
    for c, size in enumerate(m.tables.cells.size.tolist()):
        m.model.equal("cell", m.x[c].ravel(), to=float(size))


def cut_into_stages(m: Programme) -> None:  # (2)
    """A path of intervals from layer 0 to L: what ends before layer l equals what begins at l."""
    m.model.equal("first_stage", m.y[0], to=1.0)
    for j, ends in enumerate(m.tables.boundaries):
        here, after = m.tables.stages[j], m.tables.stages[j + 1]
        for l in ends:
            out, into = m.y[j][here.last == l], m.y[j + 1][after.first == l]
            m.model.equal("boundary", [*out, *into], [1.0] * len(out) + [-1.0] * len(into), to=0.0)


def price_compute(m: Programme) -> None:  # (3)
    """Each group runs at a profile that covers every type it holds."""
    profiles, cells = m.tables.profiles, m.tables.cells
    for j, i in m.groups:
        chosen = m.model.continuous(f"g_{j}_{i}", len(profiles), upper=1.0)
        m.model.equal("profile", chosen, to=1.0)
        for k in range(len(m.tables.problem.types)) if len(profiles) > 1 else []:
            covering = chosen[[k in profile.covers for profile in profiles]]
            for r in m.lanes:
                held = m.x[cells.type == k, j, i, r]
                m.model.row(
                    "covered",
                    [*covering, *held],
                    [1.0] * len(covering) + [-1.0] * len(held),
                    lower=0.0,
                )
        m.stage[j, i].append(m.both(f"compute_{j}_{i}", m.y[j], chosen, m.tables.compute(j)))


def price_reduce(m: Programme) -> None:  # (4)
    """A tensor group all-reduces at the lowest bandwidth between two of its devices."""
    for j, i in m.groups if len(m.tables.tensor_levels) else []:
        pairs = [(m.x[:, j, i, r], m.x[:, j, i, s]) for r, s in combinations(m.lanes, 2)]
        low = levels(m, f"tensor_{j}_{i}", m.tables.tensor_levels, pairs)
        m.stage[j, i].append(m.both(f"reduce_{j}_{i}", m.y[j], low, m.tables.reduce(j)))


def price_links(m: Programme) -> None:  # (4)
    """A micro-batch goes to the next stage over the slowest of the group's lanes."""
    for j, i in m.groups if m.tables.has_links else []:
        if j == len(m.stages) - 1:
            continue
        pairs = [(m.x[:, j, i, r], m.x[:, j + 1, i, r]) for r in m.lanes]
        low = levels(m, f"link_{j}_{i}", m.tables.link_levels, pairs)
        m.link[j, i].append(
            m.both(f"send_{j}_{i}", m.y[j], low, m.tables.link(m.tables.stages[j].last))
        )


def add_up(m: Programme) -> None:  # (4) (6)
    """T covers every pipeline and the slowest synchronisation of any stage."""
    sync = []
    if len(m.tables.sync_levels):
        sigma = m.model.continuous("sigma")
        sync = [(np.atleast_1d(sigma), np.ones(1))]
        for j in m.stages:
            pairs = [
                (m.x[:, j, i, r], m.x[:, j, h, r])
                for r in m.lanes
                for i, h in combinations(m.ranks, 2)
            ]
            low = levels(m, f"sync_{j}", m.tables.sync_levels, pairs)
            m.at_least(
                "synchronisation", sigma, [m.both(f"sync_{j}", m.y[j], low, m.tables.sync(j))]
            )
    for i in m.ranks:
        slowest = m.model.continuous(f"m_{i}")
        for j in m.stages:
            m.at_least("slowest_stage", slowest, m.stage[j, i])
        wait = (np.atleast_1d(slowest), np.array([m.tables.configuration.gas - 1.0]))
        once = [terms for j in m.stages for terms in (*m.stage[j, i], *m.link[j, i])]
        m.at_least("pipeline", m.total, [wait, *once, *sync])


def fit_memory(m: Programme) -> None:  # (7)
    """No device of a stage whose layers need more than it has."""
    capacity = m.tables.capacity[m.tables.cells.type]
    for j, n in enumerate(m.tables.stages):
        for room in np.unique(capacity):
            beyond = m.y[j][n.bytes > room]
            for i, r in product(m.ranks, m.lanes) if len(beyond) else []:
                m.model.row("memory", [*beyond, *m.x[capacity <= room, j, i, r]], upper=1.0)


def order_equals(m: Programme) -> None:  # (8)
    """The least word of cells, position by position, among those that symmetry makes equivalent
    (see cpsat.py)."""
    cells, (_, dp, tp) = m.tables.cells, m.tables.shape
    for c, before in m.tables.equal_before:
        mine, other = m.x[c].ravel(), m.x[before].ravel()
        for at in range(len(mine)):
            m.model.row("equal_cells", [mine[at], *other[:at]], [1.0] + [-1.0] * at, upper=0.0)
    for line in ([(0, i, 0) for i in range(dp)], [(0, 0, r) for r in range(tp)]):
        for p, q in pairwise(line):
            for c in range(1, cells.count):
                here, after = m.x[(slice(c, None), *p)], m.x[(slice(c, None), *q)]
                m.model.row(
                    "equal_ranks",
                    [*here, *after],
                    [1.0] * len(here) + [-1.0] * len(after),
                    upper=0.0,
                )


CONSTRAINTS = (
    place_every_device,
    cut_into_stages,
    price_compute,
    price_reduce,
    price_links,
    add_up,
    fit_memory,
    order_equals,
)


def levels(
    m: Programme, name: str, bandwidths: Floats, pairs: list[tuple[Columns, Columns]]
) -> Columns:  # (4)
    """low[λ]: the lowest bandwidth over the pairs of positions, each given by its columns [K]."""
    low = m.model.continuous(f"low_{name}", len(bandwidths), upper=1.0)
    m.model.equal(f"{name}_level", low, to=1.0)
    reach = np.append(low[:1], m.model.continuous(f"reach_{name}", len(low) - 1, upper=1.0))
    for here, above, step in zip(reach, reach[1:], low[1:], strict=False):
        m.model.equal(f"{name}_reach", [above, here, step], [1.0, -1.0, -1.0], to=0.0)
    slow = slow_partners(m.tables.crossing(bandwidths), len(low) - 1)
    for p, q in pairs:
        for c, level, others in slow:
            columns = [reach[level], p[c], *q[others]]
            m.model.row(f"{name}_lowest", columns, [1.0] + [-1.0] * (1 + len(others)), lower=-1.0)
    return low


def slow_partners(crossing: Ints, top: int) -> list[tuple[int, int, Ints]]:
    """(c, λ, cells at B_λ or less from c) for each level below the top that some cell has to c."""
    found = []
    for c, row in enumerate(crossing):
        for level in np.unique(row[(row >= 0) & (row < top)]).tolist():
            found.append((c, level, np.flatnonzero((row >= 0) & (row <= level))))
    return found


def size(tables: Tables) -> int:
    """About how many terms the programme of a configuration has; it is not built for that."""
    pp, dp, tp = tables.shape
    each = (len(tables.profiles), len(tables.tensor_levels), len(tables.link_levels))
    joint = dp * sum(count for count in each if count > 1) + len(tables.sync_levels)
    placing = 2 * tables.cells.count * pp * dp * tp + tables.talking * tables.cells.slow_terms
    return placing + TERMS_PER_JOINT * tables.intervals * joint
