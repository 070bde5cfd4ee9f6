"""AMP's problem by general solvers: one model per configuration, cheap bounds first, one incumbent
for all.

A configuration fixes the degrees and the micro-batch. The bound of its single pipelines (rows.py)
orders and prunes; each survivor becomes a model (below) that looks only for decisions cheaper
than the incumbent. The whole problem's bound is the least of the configurations' bounds: proven by
a model, the cut-off where a model found nothing below it, or still the cheap one.

The model of a configuration (pp, dp, tp, mbs):

Source: AMP (NeurIPS 2022), Section 3, eq. 3-5.
Sets   c cells of interchangeable devices (n_c of them, of type k_c); p = (j, i, r) stage, data
       rank, tensor rank; n = [a, b) intervals of layers for stage j; S profiles, λ bandwidth levels
       (see `Tables` in layout.py).
Vars   x[c,p] in {0,1}: position p holds a device of cell c.    y[j,n] in {0,1}: stage j is interval
       n. v[j,l] in {0,1}: stage j ends before layer l. reach[..,λ]: a tensor group, a link, the
       data groups of a stage have a bandwidth of level λ or lower somewhere.
       on[j,i,k]: a tensor group has a device of type k.
       t_ij, e_ij, m_i, sigma, T >= 0 seconds.
       min T  s.t.
(1) sum_c x[c,p] = 1,  sum_p x[c,p] = n_c
(2) sum_n y[0,n] = 1;  v[j,l] = sum of the y[j,n] that end before l = sum of the y[j+1,n] that begin
    at l
(3) on[k] >= sum_{c of type k} x[c,p] for every p of the group
(4) for every pair of positions p, q that talk (in a tensor group, on a lane of a link, in a data
    group)  reach[λ] >= x[c,p] + sum_{c': bandwidth(c,c') <= B_λ} x[c',q] - 1;  reach[λ] <= reach[λ
    + 1], the last is 1
(5) t_ij, e_ij and synchronisation cost what two choices cost together, say interval n and profile
    S: where on[k] for all types k of S (or reach[λ]), t >= sum_n cost[S,n] y[n]
(6) m_i >= t_ij;  T >= (gas - 1) m_i + sum_j t_ij + sum_j e_ij + sigma for every i;  sigma >=
synchronisation of every j
(7) intervals beyond capacity κ, and cells of at most that capacity: sum_n y[j,n] + sum_c x[c,p] <=
1
(8) the least of all equivalent placements, read as a word of cells, position by position. They are
    equivalent if they differ by a permutation of equal cells, of the data ranks, or of the tensor
    ranks of all groups alike. In the least word each of a class of equal cells first appears after
    the one before it, and the first letters of the data ranks, and of the tensor ranks, ascend.
"""

import contextlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, product

import numpy as np

from hetplan.clock import CLOCK
from hetplan.formulations.amp.cuts import find_first
from hetplan.formulations.amp.data import AmpData, AmpDecision
from hetplan.formulations.amp.layout import Tables, lay_out
from hetplan.formulations.amp.problem import (
    NO_CONFIGURATION,
    NO_ROOM,
    Floats,
    Strategy,
    compile_problem,
    find_cells,
    place,
)
from hetplan.formulations.amp.rows import quick_seconds, root_bound, row_model
from hetplan.solvers import general
from hetplan.solvers.branch_and_bound import Expansion, Incumbent, search
from hetplan.solvers.model import Columns, Model, ModelAnswer, TooLarge, Totals
from hetplan.solvers.native import Sink
from hetplan.solvers.run import Outcome, Run, Stop, Stopped

# (columns, values): a linear expression.
Terms = tuple[Columns, Floats]


@dataclass(frozen=True)
class Question:
    """What a model is asked: the cheapest decision of one configuration that costs at most `cutoff`
    seconds (None: any); it costs at least `lower`."""

    tables: Tables
    lower: float
    cutoff: float | None

    @property
    def upper(self) -> float:
        """The cut-off, or what no decision of the configuration exceeds; 1 where all is free."""
        worst = self.tables.slowest_seconds
        return (worst if self.cutoff is None else min(worst, self.cutoff)) or 1.0

    @property
    def totals(self) -> Totals:
        """For the writers. Rounded down are two values in each t_ij, one in each e_ij and in
        sigma."""
        pp, gas = self.tables.configuration.pipeline, self.tables.configuration.gas
        return Totals(
            least=min(self.lower, self.upper),
            largest=self.upper,
            roundings=2 * (gas - 1) + 3 * pp + 1,
        )


class Programme:
    """The model under construction; names as in the module's docstring."""

    def __init__(self, question: Question, most_terms: float, run: Run | None = None) -> None:
        """Raises `TooLarge` beyond `most_terms` terms."""
        t = self.tables = question.tables
        self.upper = question.upper
        self.model = Model("amp", run, question.totals, most_terms=most_terms)
        self.stages, self.ranks, self.lanes = (range(n) for n in t.shape)
        self.groups = list(product(self.stages, self.ranks))
        self.x = self.model.binary("x", (t.cells.count, *t.shape))
        self.y = [self.model.binary(f"y_{j}", len(n.first)) for j, n in enumerate(t.stages)]
        self.total = self.model.seconds("T", lower=question.totals.least, upper=self.upper)
        self.model.minimize(self.total)
        self.v: list[Columns] = []
        # t_ij, e_ij
        self.stage: dict[tuple[int, int], list[Terms]] = {group: [] for group in self.groups}
        self.link: dict[tuple[int, int], list[Terms]] = {group: [] for group in self.groups}
        place_every_device(self)
        cut_into_stages(self)
        price_compute(self)
        price_reduce(self)
        price_links(self)
        add_up(self)
        fit_memory(self)
        order_equals(self)

    def both(
        self, name: str, first: Columns, conditions: Columns | list[Columns], seconds: Floats
    ) -> Terms:  # (5)
        """The cost of two choices together, seconds [len(conditions), len(first)].

        first: columns of which one is 1; conditions: for each row of the costs, the columns that
        have to be 1 for it to count.
        """
        costs = np.minimum(seconds, 2 * self.upper)  # what nobody can afford is alike
        if len(conditions) == 1:
            return first, costs[0]
        time = self.model.seconds(f"t_{name}")
        for condition, row in zip(conditions, costs, strict=True):
            # the least stands apart, so that it counts before a member is chosen
            columns, values = np.append(first, time), np.append(row.min() - row, 1.0)
            self.model.row(f"{name}_cost", columns, values, lower=row.min(), when=condition)
        return np.atleast_1d(time), np.ones(1)

    def at_least(self, family: str, target: Columns, parts: Iterable[Terms]) -> None:
        """target >= the sum of the parts."""
        columns, values = zip(*parts, strict=True)
        self.model.row(
            family, np.append(np.concatenate(columns), target),
            np.append(-np.concatenate(values), 1.0), lower=0.0,
        )  # fmt: skip

    def strategy(self, answer: ModelAnswer) -> Strategy:
        """Placement and cut of the incumbent."""
        t = self.tables
        chosen = [answer.values(row).argmax() for row in self.y]
        last = [int(n.last[k]) for n, k in zip(t.stages, chosen, strict=True)]
        return Strategy(
            t.configuration,
            t.cells.devices(answer.values(self.x).argmax(axis=0)),
            np.array([0, *last]),
        )


def place_every_device(m: Programme) -> None:  # (1)
    """sum_c x[c,p] = 1 for every position, sum_p x[c,p] = n_c for every cell."""
    for position in np.ndindex(m.tables.shape):
        m.model.equal("position", m.x[(slice(None), *position)], to=1.0)
    for c, size in enumerate(m.tables.cells.size.tolist()):
        m.model.equal("cell", m.x[c].ravel(), to=float(size))


def cut_into_stages(m: Programme) -> None:  # (2)
    """A path of intervals from layer 0 to L."""
    m.model.equal("first_stage", m.y[0], to=1.0)
    for j, (here, after) in enumerate(pairwise(m.tables.stages)):
        ends = np.unique(here.last)
        v = m.model.binary(f"v_{j}", len(ends))
        m.v.append(v)
        for l, end in zip(ends, v, strict=True):
            for part in (m.y[j][here.last == l], m.y[j + 1][after.first == l]):
                m.model.equal("boundary", [*part, end], [1.0] * len(part) + [-1.0], to=0.0)


def price_compute(m: Programme) -> None:  # (3)
    """Each group runs at the slowest of its types; whatever these are, no faster than the
    fastest."""
    profiles, cells = m.tables.profiles, m.tables.cells
    for j, i in m.groups:
        on = m.model.binary(f"on_{j}_{i}", len(m.tables.problem.types))
        for (k, column), r in product(enumerate(on), m.lanes) if len(profiles) > 1 else []:
            held = m.x[cells.type == k, j, i, r]
            m.model.row("held", [column, *held], [1.0] + [-1.0] * len(held), lower=0.0)
        conditions = [on[:0], *(on[list(types)] for types in profiles)]
        # the least that any group needs for the intervals of a stage
        least = m.tables.stages[j].sums(m.tables.seconds.min(axis=0))
        m.stage[j, i].append(
            m.both(f"compute_{j}_{i}", m.y[j], conditions, np.vstack([least, m.tables.compute(j)]))
        )


def price_reduce(m: Programme) -> None:  # (4)
    """A tensor group all-reduces at the lowest bandwidth between two of its devices."""
    for j, i in m.groups if len(m.tables.tensor_levels) else []:
        pairs = [(m.x[:, j, i, r], m.x[:, j, i, s]) for r, s in combinations(m.lanes, 2)]
        m.stage[j, i].append(
            m.both(
                f"reduce_{j}_{i}",
                m.y[j],
                levels(m, f"tensor_{j}_{i}", m.tables.tensor_levels, pairs),
                m.tables.reduce(j),
            )
        )


def price_links(m: Programme) -> None:  # (4)
    """A micro-batch goes to the next stage over the slowest of the group's lanes."""
    for j, i in product(m.stages[:-1], m.ranks) if len(m.tables.link_levels) else []:
        low = levels(
            m,
            f"link_{j}_{i}",
            m.tables.link_levels,
            [(m.x[:, j, i, r], m.x[:, j + 1, i, r]) for r in m.lanes],
        )
        m.link[j, i].append(m.both(f"send_{j}_{i}", m.v[j], low, m.tables.link(j)))


def add_up(m: Programme) -> None:  # (4) (6)
    """T covers every pipeline and the slowest synchronisation of any stage."""
    sync: list[Terms] = []
    if len(m.tables.sync_levels):
        sigma = m.model.seconds("sigma", upper=m.upper)
        sync = [(np.atleast_1d(sigma), np.ones(1))]
        for j in m.stages:
            pairs = [
                (m.x[:, j, i, r], m.x[:, j, h, r])
                for r in m.lanes
                for i, h in combinations(m.ranks, 2)
            ]
            cost = m.both(
                f"sync_{j}",
                m.y[j],
                levels(m, f"sync_{j}", m.tables.sync_levels, pairs),
                m.tables.sync(j),
            )
            m.at_least("synchronisation", sigma, [cost])
    for i in m.ranks:
        slowest = m.model.seconds(f"m_{i}", upper=m.upper)
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
    """The least word of cells among those that symmetry makes equivalent."""
    kinds, (_, dp, tp) = m.tables.cells.kind, m.tables.shape
    equal = np.flatnonzero(kinds[1:] == kinds[:-1]) + 1  # equal cells lie side by side
    for c in equal.tolist():
        mine, other = m.x[c].ravel(), m.x[c - 1].ravel()
        for at in range(len(mine)):
            m.model.row("equal_cells", [mine[at], *other[:at]], [1.0] + [-1.0] * at, upper=0.0)
    for line in ([(0, i, 0) for i in range(dp)], [(0, 0, r) for r in range(tp)]):
        for p, q in pairwise(line):
            for c in range(1, len(kinds)):
                here, after = m.x[(slice(c, None), *p)], m.x[(slice(c, None), *q)]
                values = [1.0] * len(here) + [-1.0] * len(after)
                m.model.row("equal_ranks", [*here, *after], values, upper=0.0)


def levels(
    m: Programme, name: str, bandwidths: Floats, pairs: list[tuple[Columns, Columns]]
) -> Columns:  # (4)
    """reach[λ] over the pairs of positions, each given by its columns [K]."""
    reach = m.model.binary(f"reach_{name}", len(bandwidths))
    m.model.fix(reach[-1:], 1)
    for here, above in pairwise(reach):
        m.model.row(f"{name}_reach", [above, here], [1.0, -1.0], lower=0.0)
    # (c, λ, cells at B_λ or less from c) for each level below the top that some cell has to c
    slow = [
        (c, level, np.flatnonzero((row >= 0) & (row <= level)))
        for c, row in enumerate(m.tables.crossing(bandwidths))
        for level in np.unique(row[(row >= 0) & (row < len(bandwidths) - 1)]).tolist()
    ]
    for p, q in pairs:
        for c, level, others in slow:
            m.model.row(
                f"{name}_lowest",
                [reach[level], p[c], *q[others]],
                [1.0] + [-1.0] * (1 + len(others)),
                lower=-1.0,
            )
    return reach


TOO_LARGE = "more than {} terms in its model; the method exact has no such limit"


@dataclass(frozen=True)
class Parameters:
    """What the loop trades."""

    # Share of the gap by which a decision must beat the incumbent to be worth a model's while.
    worth: float = 0.5
    # By how much decisions in a model that is written to a file may be worse than the best known.
    exported: float = 1e-4
    # Share of the time limit for first decisions and cheap bounds, before the first model.
    first_share: float = 0.3
    # Models of more terms are given up while they are built: general solvers get nowhere with them.
    most_terms: int = 500_000


# (method, model, run for it, where incumbents and bounds go) -> what a solver says of the model
Minimise = Callable[[str, Model, Run, Sink], ModelAnswer]


@dataclass(frozen=True)
class Case:
    """One configuration."""

    tables: Tables
    bound: float  # proven so far, +inf when it has no decision at all


@dataclass
class Sweep:
    """The search over the configurations, of the least bound first; each model may take all the
    time that is left."""

    run: Run
    incumbent: Incumbent[Strategy]
    method: str
    most_terms: float
    minimise: Minimise
    build_seconds: float = 0.0
    models: int = 0
    message: str = ""
    failed: bool = False

    def expand(self, case: Case, threshold: float) -> Expansion[Case]:
        """One model, which looks only for decisions below the threshold."""
        chosen = case.tables.configuration
        self.run.report(note=str(chosen))
        self.models += 1
        cutoff = None if math.isinf(threshold) else threshold
        begun, part = CLOCK.seconds(), self.run.part()
        try:
            programme = Programme(Question(case.tables, case.bound, cutoff), self.most_terms, part)
        except TooLarge:
            self.message = f"{chosen}: {TOO_LARGE.format(self.most_terms)}"
            return Expansion(dropped_bound=case.bound)
        finally:
            self.build_seconds += CLOCK.seconds() - begun
        answer = self.minimise(
            self.method, programme.model, part,
            lambda incumbent, bound: self.run.report(incumbent=incumbent),
        )  # fmt: skip
        if answer.has_solution:
            strategy = programme.strategy(answer)
            placed = place(case.tables.problem, strategy.configuration, strategy.placement)
            self.incumbent.offer(placed.seconds(strategy.cut), strategy)
        if answer.stop is Stop.INFEASIBLE:
            return Expansion(dropped_bound=threshold)
        if answer.stop is Stop.ERROR:
            self.failed = True
            self.message = f"{chosen}: {answer.message}"
        return Expansion(dropped_bound=max(case.bound, min(answer.bound or 0.0, threshold)))


def solve_by(
    method: str,
    data: AmpData,
    run: Run,
    minimise: Minimise = general.minimise,
    parameters: Parameters = Parameters(),
) -> Outcome[AmpDecision]:
    """The best decision over all configurations, with the bound that the solver behind `method`
    proves; minimise: another way to have a model solved."""
    begun, solver = CLOCK.seconds(), general.label(method, run.options)
    problem = compile_problem(data)
    cells = find_cells(problem)
    gap = parameters.worth * run.options.gap if run.tap is None else -parameters.exported
    incumbent = Incumbent[Strategy](run, gap)
    cases = [
        Case(Tables(problem, config, cells), quick_seconds(problem, config))
        for config in problem.configurations()
    ]
    left = run.remaining
    part = run.part(time_limit=parameters.first_share * left if math.isfinite(left) else None)
    find_first(problem, cells, incumbent, part)
    cases.sort(key=lambda case: case.bound)
    with contextlib.suppress(Stopped):  # the bounds that take no time stand
        for at, case in enumerate(cases):
            cases[at] = replace(
                case,
                bound=max(
                    case.bound,
                    root_bound(
                        row_model(lay_out(problem, cells, case.tables.configuration)),
                        part.check,
                    ),
                ),
            )
    sweep = Sweep(run, incumbent, method, parameters.most_terms, minimise, CLOCK.seconds() - begun)
    proof = search([(case.bound, case) for case in cases], sweep.expand, incumbent, run)
    stop, message = proof.verdict(run, NO_ROOM if cases else NO_CONFIGURATION)
    if not proof.proven:
        stop = Stop.ERROR if sweep.failed and not run.should_stop else stop
        message = sweep.message
    return Outcome(
        stop=stop,
        decision=None if incumbent.decision is None else incumbent.decision.decision(),
        bound=proof.bound,
        build_seconds=sweep.build_seconds,
        solver=solver,
        message=message,
        details={"configurations": len(cases), "models": sweep.models},
    )
