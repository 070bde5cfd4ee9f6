"""AMP's problem for general solvers: one model per configuration, one incumbent for all of them.

A configuration fixes the degrees and the micro-batch. The search takes configurations in the order
of a quick lower bound, the bound of their single pipelines (rows.py). A configuration whose bound
reaches the threshold is closed. Every other configuration becomes a model, which accepts only
decisions that cost less than the incumbent. The configuration's bound is then the bound that the
solver proves, or the cut-off where the model is infeasible. The bound of the problem is the least
bound of all configurations.

The model of a configuration with degrees pp, dp, tp and gas micro-batches per pipeline:

Sets   c cells of interchangeable devices (n_c devices of type k_c)
       p = (j, i, r) positions: stage j, data rank (pipeline) i, tensor rank r
       n = [a, b) intervals of layers for stage j
       S profiles: sets of device types; a group that has all of them takes on each layer at least
       the seconds of the slowest of them
       λ levels: the distinct bandwidths B_λ, ascending; see `Tables` in layout.py
Vars   x[c,p] in {0,1}: position p holds a device of cell c
       y[j,n] in {0,1}: stage j is interval n
       v[j,l] in {0,1}: layer l is the first one behind stage j
       on[j,i,k] in {0,1}: tensor group (j, i) has a device of type k
       reach[..,λ] in {0,1}: some pair of devices in a tensor group, on a link, or in the data
       groups of a stage has a bandwidth of level λ or lower
       t_ij: one micro-batch on tensor group (j, i); e_ij: its message to stage j + 1; m_i: the
       slowest t_ij of pipeline i; sigma: the slowest synchronisation of any stage; T: the
       iteration; all in seconds, >= 0
min T  s.t.
(1) sum_c x[c,p] = 1,  sum_p x[c,p] = n_c
(2) sum_n y[0,n] = 1;  v[j,l] = sum of the y[j,n] with n = [a, l) = sum of the y[j+1,n] with
    n = [l, b)
(3) on[j,i,k] >= sum_{c of type k} x[c,p] for every position p of group (j, i)
(4) for every pair of positions p, q that exchange data (two ranks of a tensor group, equal tensor
    ranks of two consecutive stages, two ranks of a data group) and every cell c
    reach[λ] >= x[c,p] + sum_{c': bandwidth(c,c') <= B_λ} x[c',q] - 1;
    reach[λ] <= reach[λ + 1], and the last reach is 1
(5) t_ij, e_ij and the synchronisation are each the cost of two choices together. Computing depends
    on interval n and profile S: where on[j,i,k] = 1 for all types k of S, it takes at least
    sum_n cost[S,n] y[j,n]. The other costs have reach[λ] = 1 as their condition.
(6) m_i >= t_ij;  T >= (gas - 1) m_i + sum_j t_ij + sum_j e_ij + sigma for every i;
    sigma >= synchronisation of every stage j
(7) for every capacity κ, stage j and position p of it: sum_n y[j,n] + sum_c x[c,p] <= 1, over the
    intervals n that need more than κ and the cells c whose devices have at most κ
(8) Of equivalent placements only the lexicographically least remains. A placement is read as a word
    whose letters are the cells of its positions. Placements are equivalent when they differ by a
    permutation of interchangeable cells, of the data ranks, or of the tensor ranks of all groups
    alike. In the least word each of some interchangeable cells first appears after the one before
    it. The first letters of the data ranks ascend, and those of the tensor ranks.
Source AMP (NeurIPS 2022), Section 3, eq. 3-5.
"""

import contextlib
import math
from collections.abc import Callable
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
    Ints,
    Strategy,
    compile_problem,
    find_cells,
    place,
)
from hetplan.formulations.amp.rows import quick_seconds, root_bound, row_model
from hetplan.solvers import general
from hetplan.solvers.branch_and_bound import Expansion, Incumbent, search
from hetplan.solvers.expressions import Columns, Linear, total
from hetplan.solvers.model import Model, ModelAnswer, TooLarge, Totals
from hetplan.solvers.native import Sink
from hetplan.solvers.run import Outcome, Run, Stop, Stopped


@dataclass(frozen=True)
class Question:
    """The question to one model: which decision of one configuration is the cheapest, up to a
    cut-off?"""

    tables: Tables
    lower: float  # seconds, a lower bound on every decision
    cutoff: float | None  # seconds that a decision may cost at most; None: there is no cut-off

    @property
    def upper(self) -> float:
        """An upper bound on T, in seconds: the cut-off, or T of the slowest decision where that is
        less. It is 1 where these are 0, since the writers of models choose no unit for 0."""
        seconds = self.tables.slowest_seconds
        if self.cutoff is not None:
            seconds = min(seconds, self.cutoff)
        if seconds == 0:
            return 1.0
        return seconds

    @property
    def totals(self) -> Totals:
        """Bounds on the objective, from which the solvers' writers of models choose units."""
        pp, gas = self.tables.configuration.pipeline, self.tables.configuration.gas
        # A writer rounds two terms of each t_ij down, and one term of each e_ij and of sigma.
        # m_i, a t_ij, counts gas - 1 times, and each of the pp stages once. The sum counts pp
        # links, one more than there are: it only has to be large enough.
        return Totals(
            least=min(self.lower, self.upper),  # rounding may put one above the other
            largest=self.upper,
            roundings=2 * (gas - 1) + 3 * pp + 1,
        )


class Programme:
    """The model of one configuration, with the variables of the module's docstring."""

    def __init__(self, question: Question, most_terms: float, run: Run | None = None) -> None:
        """Build the model. Raises `TooLarge` when it has more than `most_terms` terms."""
        self.tables = tables = question.tables
        self.upper = question.upper  # seconds, upper bound on T
        self.model = Model("amp", run, question.totals, most_terms=most_terms)
        self.stages, self.ranks, self.lanes = (range(n) for n in tables.shape)  # j, i, r
        self.groups = list(product(self.stages, self.ranks))  # (j, i)
        self.x = self.model.binary("x", (tables.cells.count, *tables.shape))  # [c, j, i, r]
        self.y: list[Columns] = []  # [stage][n]
        for j, intervals in enumerate(tables.stages):
            self.y.append(self.model.binary(f"y_{j}", len(intervals.first)))
        self.total = self.model.seconds("T", lower=question.totals.least, upper=self.upper)
        self.model.minimize(self.total)
        self.v: list[Columns] = []  # [stage but the last][number of l among the stage's ends]
        # (j, i) -> the terms whose sums are t_ij and e_ij
        self.stage: dict[tuple[int, int], list[Linear]] = {group: [] for group in self.groups}
        self.link: dict[tuple[int, int], list[Linear]] = {group: [] for group in self.groups}
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
    ) -> Linear:  # (5)
        """The cost in seconds of two choices together: the largest of the conditional costs whose
        conditions hold.

        first: columns of the first choice, exactly one of which is 1.
        conditions: for each row of `seconds`, the columns that are all 1 where the row counts. A
        single row always counts: it belongs to the highest level, whose reach[λ] is fixed to 1.
        seconds: [len(conditions), len(first)], the cost by condition and first choice.
        """
        # Costs beyond the upper bound on T exclude a decision, however large they are. Smaller ones
        # make tighter models. Twice the bound is beyond it by more than the solvers' tolerances.
        costs = np.minimum(seconds, 2 * self.upper)
        if len(conditions) == 1:
            unconditional: Floats = costs[0]
            return unconditional @ first
        time = self.model.seconds(f"t_{name}")
        for condition, cost in zip(conditions, costs, strict=True):
            # Equal to cost @ first. With the least cost as a constant, solvers' relaxations count
            # it before the first choice is made.
            least = cost.min()
            excess = (cost - least) @ first
            self.model.row(f"{name}_cost", time >= least + excess, when=condition)
        return time

    def strategy(self, answer: ModelAnswer) -> Strategy:
        """The placement and the cut of the answer's solution."""
        ends = []
        for intervals, y in zip(self.tables.stages, self.y, strict=True):
            chosen = answer.values(y).argmax()
            ends.append(int(intervals.last[chosen]))
        cell_of_position = answer.values(self.x).argmax(axis=0)
        return Strategy(
            self.tables.configuration,
            self.tables.cells.devices(cell_of_position),
            np.array([0, *ends]),
        )


def place_every_device(m: Programme) -> None:  # (1)
    """sum_c x[c,p] = 1 for every position, sum_p x[c,p] = n_c for every cell."""
    cells = m.tables.cells
    m.model.row("position", m.x.sum(axis=0) == 1)
    m.model.row("cell", m.x.reshape(cells.count, -1).sum(axis=1) == cells.size)


def cut_into_stages(m: Programme) -> None:  # (2)
    """Each stage is one interval, and begins where the stage before it ends."""
    m.model.row("first_stage", m.y[0].sum() == 1)
    for j, (intervals, next_intervals) in enumerate(pairwise(m.tables.stages)):
        ends = np.unique(intervals.last)
        v = m.model.binary(f"v_{j}", len(ends))
        m.v.append(v)
        for l, cut_at_l in zip(ends, v, strict=True):
            ending = intervals.last == l
            beginning = next_intervals.first == l
            m.model.row("boundary", m.y[j][ending].sum() == cut_at_l)
            m.model.row("boundary", m.y[j + 1][beginning].sum() == cut_at_l)


def price_compute(m: Programme) -> None:  # (3) (5)
    """Each tensor group computes at the speed of its slowest device type, layer by layer."""
    profiles, cells = m.tables.profiles, m.tables.cells
    for j, i in m.groups:
        on = m.model.binary(f"on_{j}_{i}", len(m.tables.problem.types))
        if len(profiles) > 1:
            for k in range(len(on)):
                of_type = m.x[cells.type == k, j, i]  # [cell, lane]
                m.model.row("held", on[k] >= of_type.sum(axis=0))
        # No group is faster than the fastest type on each layer. This first row always counts: its
        # condition has no columns. Every type is a profile, so a single profile means that there is
        # a single type. The first row then has this type's costs, and the values of `on` may stay
        # free.
        fastest = m.tables.stages[j].sums(m.tables.seconds.min(axis=0))
        costs = np.vstack([fastest, m.tables.compute(j)])
        always = on[:0]
        conditions = [always, *(on[list(types)] for types in profiles)]
        m.stage[j, i].append(m.both(f"compute_{j}_{i}", m.y[j], conditions, costs))


def price_reduce(m: Programme) -> None:  # (4) (5)
    """A tensor group all-reduces at the lowest bandwidth between two of its devices."""
    bandwidths = m.tables.tensor_levels
    if not len(bandwidths):  # nothing is all-reduced
        return
    for j, i in m.groups:
        pairs = [(m.x[:, j, i, r], m.x[:, j, i, s]) for r, s in combinations(m.lanes, 2)]
        reach = levels(m, f"tensor_{j}_{i}", bandwidths, pairs)
        m.stage[j, i].append(m.both(f"reduce_{j}_{i}", m.y[j], reach, m.tables.reduce(j)))


def price_links(m: Programme) -> None:  # (4) (5)
    """A micro-batch goes to the next stage at the lowest bandwidth between equal tensor ranks."""
    bandwidths = m.tables.link_levels
    if not len(bandwidths):  # nothing is sent
        return
    for j, i in product(m.stages[:-1], m.ranks):
        pairs = [(m.x[:, j, i, r], m.x[:, j + 1, i, r]) for r in m.lanes]
        reach = levels(m, f"link_{j}_{i}", bandwidths, pairs)
        m.link[j, i].append(m.both(f"send_{j}_{i}", m.v[j], reach, m.tables.link(j)))


def price_synchronisation(m: Programme) -> Linear:  # (4) (5) (6)
    """The variable sigma, seconds; 0 where nothing is synchronised.

    A stage synchronises at the lowest bandwidth between two devices of one of its data groups.
    """
    bandwidths = m.tables.sync_levels
    if not len(bandwidths):
        nothing: Linear = total([])
        return nothing
    sigma = m.model.seconds("sigma", upper=m.upper)
    for j in m.stages:
        ranks = product(m.lanes, combinations(m.ranks, 2))
        pairs = [(m.x[:, j, i, r], m.x[:, j, h, r]) for r, (i, h) in ranks]
        reach = levels(m, f"sync_{j}", bandwidths, pairs)
        seconds = m.both(f"sync_{j}", m.y[j], reach, m.tables.sync(j))
        m.model.row("synchronisation", sigma >= seconds)
    return sigma


def add_up(m: Programme) -> None:  # (6)
    """T covers every pipeline and the slowest synchronisation of any stage."""
    sigma = price_synchronisation(m)
    gas = m.tables.configuration.gas
    for i in m.ranks:
        slowest = m.model.seconds(f"m_{i}", upper=m.upper)
        for j in m.stages:
            m.model.row("slowest_stage", slowest >= total(m.stage[j, i]))
        stages = total(total(m.stage[j, i]) for j in m.stages)
        links = total(total(m.link[j, i]) for j in m.stages)
        m.model.row("pipeline", m.total >= (gas - 1) * slowest + stages + links + sigma)


def fit_memory(m: Programme) -> None:  # (7)
    """A stage has no device with less memory than its layers need."""
    capacity = m.tables.capacity[m.tables.cells.type]  # [c]
    for j, intervals in enumerate(m.tables.stages):
        for room in np.unique(capacity):
            too_large = m.y[j][intervals.bytes > room]
            if len(too_large):
                too_small = m.x[capacity <= room, j]  # [cell, i, r]
                m.model.row("memory", too_large.sum() + too_small.sum(axis=0) <= 1)


def order_equals(m: Programme) -> None:  # (8)
    """Among equivalent placements only the lexicographically least one remains."""
    kinds, (_, dp, tp) = m.tables.cells.cell_class, m.tables.shape
    # each cell that is interchangeable with the cell before it
    equal = np.flatnonzero(kinds[1:] == kinds[:-1]) + 1
    for c in equal.tolist():
        in_cell, in_cell_before = m.x[c].reshape(-1), m.x[c - 1].reshape(-1)  # by position
        for position in range(len(in_cell)):
            before = in_cell_before[:position].sum()
            m.model.row("equal_cells", in_cell[position] <= before)
    first_of_data_ranks = [(0, i, 0) for i in range(dp)]
    first_of_tensor_ranks = [(0, 0, r) for r in range(tp)]
    for positions in (first_of_data_ranks, first_of_tensor_ranks):
        for p, q in pairwise(positions):
            for c in range(1, len(kinds)):
                # where p has cell c or a later one, q has one of these, too
                here, after = m.x[c:, *p], m.x[c:, *q]
                m.model.row("equal_ranks", here.sum() <= after.sum())


def levels(
    m: Programme, name: str, bandwidths: Floats, pairs: list[tuple[Columns, Columns]]
) -> Columns:  # (4)
    """The columns reach[λ]: 1 where some pair of positions has a bandwidth of level λ or lower.

    bandwidths: [λ] bytes/s, ascending. pairs: the columns of x [c] of both positions of each pair.
    """
    reach = m.model.binary(f"reach_{name}", len(bandwidths))
    m.model.fix(reach[-1:], 1)
    m.model.row(f"{name}_reach", reach[1:] >= reach[:-1])
    # (c, λ, cells whose bandwidth to c is B_λ or lower), for each level λ that occurs between c and
    # some cell. The highest level is left out, since its column is fixed to 1.
    slow: list[tuple[int, int, Ints]] = []
    highest = len(bandwidths) - 1
    for c, level_to in enumerate(m.tables.crossing(bandwidths)):
        linked = level_to >= 0  # -1: a cell of one device has no bandwidth to itself
        for level in np.unique(level_to[linked & (level_to < highest)]).tolist():
            slow.append((c, level, np.flatnonzero(linked & (level_to <= level))))
    for p, q in pairs:
        for c, level, slow_cells in slow:
            m.model.row(f"{name}_lowest", reach[level] >= p[c] + q[slow_cells].sum() - 1)
    return reach


TOO_LARGE = "more than {} terms in its model; the method exact has no such limit"


@dataclass(frozen=True)
class Parameters:
    """Limits and shares of the search over configurations."""

    # A model looks for decisions that beat the incumbent by this share of the user's gap.
    worth: float = 0.5
    # Models that are written to files accept decisions that are worse than the incumbent by this
    # share of its objective, so that the incumbent itself is a solution of them.
    exported: float = 1e-4
    # Share of the time limit for first incumbents and row bounds, before the first model.
    first_share: float = 0.3
    # A model with more terms is given up while it is built, since general solvers do not solve it.
    most_terms: int = 500_000


# (method, model, run of this model, receiver of incumbents and bounds) -> the solver's answer
Minimise = Callable[[str, Model, Run, Sink], ModelAnswer]


@dataclass(frozen=True)
class Case:
    """A node of the search: one configuration."""

    tables: Tables
    bound: float  # seconds, proven so far; +inf where the configuration has no decision


@dataclass
class Sweep:
    """Solves the models of configurations, one after the other. Each model may take all the time
    that is left."""

    run: Run
    incumbent: Incumbent[Strategy]  # shared by all configurations
    method: str  # name of the general solver
    most_terms: float  # the most terms that a model may have
    minimise: Minimise
    # seconds of the preparation, and those in which all models so far were built
    build_seconds: float = 0.0
    models: int = 0  # number of models so far
    message: str = ""  # about the last model that was too large or met an error
    failed: bool = False  # whether a solver met an error

    def expand(self, case: Case, threshold: float) -> Expansion[Case]:
        """Solve the model of a configuration with `threshold` seconds as its cut-off, and offer its
        solution as the incumbent. The node has no children; its bound is the solver's."""
        chosen = case.tables.configuration
        self.run.report(note=str(chosen))
        self.models += 1
        cutoff = None if math.isinf(threshold) else threshold
        question = Question(case.tables, case.bound, cutoff)
        begun = CLOCK.seconds()
        part = self.run.part()
        try:
            programme = Programme(question, self.most_terms, part)
        except TooLarge:
            self.message = f"{chosen}: {TOO_LARGE.format(self.most_terms)}"
            return Expansion(dropped_bound=case.bound)
        finally:
            self.build_seconds += CLOCK.seconds() - begun
        answer = self.minimise(
            self.method, programme.model, part,
            # the bound is that of one configuration, and none of the problem
            lambda incumbent, bound: self.run.report(incumbent=incumbent),
        )  # fmt: skip
        if answer.has_solution:
            strategy = programme.strategy(answer)
            placed = place(case.tables.problem, strategy.configuration, strategy.placement)
            self.incumbent.offer(placed.seconds(strategy.cut), strategy)
        if answer.stop is Stop.INFEASIBLE:
            return Expansion(dropped_bound=threshold)  # the model's cut-off
        if answer.stop is Stop.ERROR:
            self.failed = True
            self.message = f"{chosen}: {answer.message}"
        # the model holds only decisions that cost less than the threshold, so it proves no more
        proven = min(answer.bound or 0.0, threshold)
        return Expansion(dropped_bound=max(case.bound, proven))


def solve_by(
    method: str,
    data: AmpData,
    run: Run,
    minimise: Minimise = general.minimise,
    parameters: Parameters = Parameters(),
) -> Outcome[AmpDecision]:
    """The best decision over all configurations, and the least of their proven bounds.

    method: name of the general solver. minimise: the function that solves a model by it.
    """
    begun = CLOCK.seconds()
    solver = general.label(method, run.options)
    problem = compile_problem(data)
    cells = find_cells(problem)
    gap = parameters.worth * run.options.gap
    if run.tap is not None:  # the models are written to files
        gap = -parameters.exported  # below 0: the cut-off is above the incumbent
    incumbent = Incumbent[Strategy](run, gap)
    cases = [
        Case(Tables(problem, config, cells), quick_seconds(problem, config))
        for config in problem.configurations()
    ]
    part = run.part(share=parameters.first_share)
    find_first(problem, cells, incumbent, part)
    cases.sort(key=lambda case: case.bound)
    # when time runs out, the remaining configurations keep their quick bounds
    with contextlib.suppress(Stopped):
        for at, case in enumerate(cases):
            groups = lay_out(problem, cells, case.tables.configuration)
            bound = root_bound(row_model(groups), part.check)
            cases[at] = replace(case, bound=max(case.bound, bound))
    preparation = CLOCK.seconds() - begun
    sweep = Sweep(
        run, incumbent, method, parameters.most_terms, minimise, build_seconds=preparation
    )
    proof = search([(case.bound, case) for case in cases], sweep.expand, incumbent, run)
    stop, message = proof.verdict(run, NO_ROOM if cases else NO_CONFIGURATION)
    if not proof.proven:
        if sweep.failed and not run.should_stop:
            stop = Stop.ERROR
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
