"""AMP's problem, one CP-SAT model per configuration (pp, dp, tp, mbs). Source: AMP (NeurIPS 2022),
Section 3, eq. 3-5.

Sets   c cells of interchangeable devices (n_c of them, of type k_c); p = (j, i, r) stage, data
       rank, tensor rank; n = [a, b) intervals of layers for stage j; S profiles, λ bandwidth levels
       (see general/tables.py).
Data   all seconds times a power of two, rounded down: no decision is priced too high, so the bound
holds as it is.
Vars   x[c,p] in {0,1}: position p holds a device of cell c.    y[j,n] in {0,1}: stage j is interval
       n. v[j,l] in {0,1}: stage j ends before layer l.            on[k,j,i] in {0,1}: group (j,i)
       has a device of type k. low[λ] in {0,1} per tensor group, link and stage: some bandwidth
       there is at most B_λ. compute_ij, reduce_ij, e_ij, m_i, sigma, T integers, scaled seconds;
       t_ij = compute_ij + reduce_ij. min T  s.t.
(1) sum_c x[c,p] = 1,  sum_p x[c,p] = n_c            (2) y[j,[a,b)] <=> v[j-1,a] and v[j,b];  sum_n
y[j,n] = 1
(3) x[c,(j,i,r)] => on[k_c,j,i];  all types of S on (j,i) => compute_ij >= sum_n compute[S,n] y[j,n]
(4) cells of bandwidth <= B_λ in tensor group (j,i) => low[λ];  low[λ] => reduce_ij >= sum_n
reduce[λ,n] y[j,n]
(5) cells of bandwidth <= B_λ on a lane of link (j,i) => low[λ];  low[λ] => e_ij >= sum_l link[λ,l]
v[j,l]
(6) cells of bandwidth <= B_λ in a data group of j => low[λ];  low[λ] => sigma >= sum_n sync[λ,n]
y[j,n]
(7) m_i >= t_ij;  T >= (gas - 1) m_i + sum_j t_ij + sum_j e_ij + sigma for every data rank i
(8) an interval that does not fit a device of cell c keeps that cell from its stage
(9) the least of all equivalent placements: equal cells come in order, data and tensor ranks begin
in order
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, combinations, pairwise, product
from typing import Any

import numpy as np
from ortools.sat.python import cp_model

from hetplan.formulations.amp.data import AmpData, AmpDecision
from hetplan.formulations.amp.general.loop import Question, Reply, solve_each
from hetplan.formulations.amp.problem import Floats, Ints
from hetplan.formulations.amp.strategy import Strategy
from hetplan.solvers import cpsat
from hetplan.solvers.native import Scale, Sink, stopped
from hetplan.solvers.result import Outcome
from hetplan.solvers.run import Run, Stopped


def solve(data: AmpData, run: Run) -> Outcome[AmpDecision]:
    """The best decision over all configurations and a proven bound; see general/loop.py."""
    return solve_each(data, run, solve_configuration, cpsat.SOLVER)


def solve_configuration(question: Question, run: Run, report: Sink) -> Reply:
    """One configuration: build, solve, read the strategy out of the incumbent."""
    begun = time.perf_counter()
    try:
        model = Model(question, cpsat.Model(run))
        for constrain in CONSTRAINTS:
            constrain(model)
    except Stopped:
        return Reply(stop=stopped(run), build_seconds=time.perf_counter() - begun)
    model.cp.minimize(model.total)
    built = time.perf_counter()
    answer = cpsat.solve(
        model.cp, run, Scale(per_unit=model.scale, under=model.roundings / model.scale), report
    )
    return Reply(
        stop=answer.stop,
        bound=answer.bound,
        strategy=model.strategy(answer) if answer.has_solution else None,
        build_seconds=built - begun,
        message=answer.message,
    )


@dataclass
class Model:
    """The CP-SAT model under construction; names as in the module's docstring."""

    question: Question
    cp: cpsat.Model

    def __post_init__(self) -> None:
        t = self.tables = self.question.tables
        self.stages, self.ranks, self.lanes = (range(n) for n in t.shape)
        self.groups = list(product(self.stages, self.ranks))
        self.gas = t.configuration.gas
        self.roundings = (
            2 * (self.gas - 1) + 3 * t.shape[0] + 1
        )  # two in each t_ij, one in each e_ij, one in sigma
        upper = self.question.upper or 1.0
        self.scale = cpsat.integer_scale(
            min(upper, max(self.question.lower, upper * 1e-6)), upper, self.roundings
        )
        self.top = int(np.floor(upper * self.scale))
        self.x = np.empty((t.cells.count, *t.shape), dtype=object)
        for c, j, i, r in np.ndindex(self.x.shape):
            self.x[c, j, i, r] = self.cp.new_bool_var(f"x[{c},{j},{i},{r}]")
        self.y = [self.literals(f"y[{j}]", n.first) for j, n in enumerate(t.stages)]
        self.v = [
            dict(zip(ends, self.literals(f"v[{j}]", ends), strict=True))
            for j, ends in enumerate(t.boundaries)
        ]
        self.compute = {g: self.seconds(f"compute{g}") for g in self.groups}
        self.reduce = {g: [self.seconds(f"reduce{g}")] for g in self.groups if len(t.tensor_levels)}
        self.link = {
            (j, i): self.seconds(f"link{j, i}")
            for j, i in self.groups
            if t.has_links and j + 1 in self.stages
        }
        self.sigma = [self.seconds("sigma")] if len(t.sync_levels) else []
        self.total = self.seconds("T")

    def literals(self, name: str, members: Sequence[Any] | Ints | Floats) -> list[Any]:
        """One Boolean per member."""
        return [self.cp.new_bool_var(f"{name}[{n}]") for n in range(len(members))]

    def seconds(self, name: str) -> Any:
        """An integer of scaled seconds, at most what a decision worth having can cost."""
        return self.cp.new_int_var(0, self.top, name)

    def at_least(
        self, target: Any, seconds: Floats, chosen: Sequence[Any], enforced: Sequence[Any] = ()
    ) -> None:
        """target >= the seconds (rounded down) of the one member chosen, if all of `enforced` hold.

        The least of the seconds stands apart, so that it counts before a member is chosen.
        """
        costs = np.minimum(
            cpsat.rounded_down(seconds, self.scale), self.top + 1
        )  # beyond the top all is alike
        least = int(costs.min())
        more = cp_model.LinearExpr.weighted_sum(list(chosen), (costs - least).tolist())
        self.cp.add(target >= more + least).only_enforce_if(*enforced)

    def strategy(self, answer: cpsat.CpAnswer) -> Strategy:
        """Placement and cut of the incumbent."""
        held = np.array([answer.value(literal) for literal in self.x.ravel()]).reshape(self.x.shape)
        last = [
            int(n.last[answer.chosen(row)[0]])
            for n, row in zip(self.tables.stages, self.y, strict=True)
        ]
        return self.tables.strategy(held.argmax(axis=0), np.array([0, *last]))


def place_every_device(m: Model) -> None:  # (1)
    """sum_c x[c,p] = 1 for every position, sum_p x[c,p] = n_c for every cell."""
    for position in np.ndindex(m.tables.shape):
        m.cp.add_exactly_one(m.x[(slice(None), *position)])
    for c, size in enumerate(m.tables.cells.size.tolist()):
        m.cp.add(cp_model.LinearExpr.sum(list(m.x[c].ravel())) == size)


def cut_into_stages(m: Model) -> None:  # (2)
    """Stage j is [a, b) exactly when the one before ends before layer a and it ends before layer
    b."""
    for j, (n, row) in enumerate(zip(m.tables.stages, m.y, strict=True)):
        m.cp.add_exactly_one(row)
        for chosen, a, b in zip(row, n.first.tolist(), n.last.tolist(), strict=True):
            ends = [m.v[at][l] for at, l in ((j - 1, a), (j, b)) if 0 <= at < len(m.v)]
            for end in ends:
                m.cp.add_implication(chosen, end)
            m.cp.add_bool_or([~end for end in ends] + [chosen])
    for literals in m.v:
        m.cp.add_exactly_one(literals.values())


def bound_compute(m: Model) -> None:  # (3)
    """A group takes as long as any profile whose types it all has; at least the fastest table of
    each layer."""
    held = {
        (k, j, i): [x for c in np.flatnonzero(m.tables.cells.type == k) for x in m.x[c, j, i]]
        for k in range(len(m.tables.problem.types))
        for j, i in m.groups
    }
    on = {key: any_of(m, f"on{key}", literals) for key, literals in held.items()}
    for j, i in m.groups:
        m.at_least(m.compute[j, i], m.tables.least_compute(j), m.y[j])
        for profile, seconds in zip(m.tables.profiles, m.tables.compute(j), strict=True):
            m.at_least(m.compute[j, i], seconds, m.y[j], [on[k, j, i] for k in profile.types])


def bound_reduce(m: Model) -> None:  # (4)
    """A tensor group all-reduces at the lowest bandwidth between two of its devices."""
    for (j, i), (total,) in m.reduce.items():
        low = levels(m, f"tensor{j, i}", m.tables.tensor_levels)
        lowest_within(m, low, m.x[:, j, i, :], m.tables.tensor_levels)
        for literal, seconds in zip(low, m.tables.reduce(j), strict=True):
            m.at_least(total, seconds, m.y[j], [literal])


def bound_links(m: Model) -> None:  # (5)
    """A micro-batch goes to the next stage over the slowest of the group's lanes."""
    crossing = m.tables.crossing(m.tables.link_levels)
    for (j, i), seconds in m.link.items():
        low = levels(m, f"link{j, i}", m.tables.link_levels)
        for r, (c, d) in product(m.lanes, np.argwhere(crossing >= 0)):
            m.cp.add_bool_or(~m.x[c, j, i, r], ~m.x[d, j + 1, i, r], low[crossing[c, d]])
        ends = m.tables.boundaries[j]
        for literal, cost in zip(low, m.tables.link(ends), strict=True):
            m.at_least(seconds, cost, [m.v[j][l] for l in ends], [literal])


def bound_sync(m: Model) -> None:  # (6)
    """A stage's gradients are all-reduced at the lowest bandwidth within any of its data groups."""
    for j, (sigma,) in product(m.stages, [m.sigma] if m.sigma else []):
        low = levels(m, f"sync[{j}]", m.tables.sync_levels)
        for r in m.lanes:
            lowest_within(m, low, m.x[:, j, :, r], m.tables.sync_levels)
        for literal, seconds in zip(low, m.tables.sync(j), strict=True):
            m.at_least(sigma, seconds, m.y[j], [literal])


def add_up(m: Model) -> None:  # (7)
    """T covers every pipeline: its slowest stage for all micro-batches but one, one pass, and the
    synchronisation."""
    for i in m.ranks:
        stages = [[m.compute[j, i], *m.reduce.get((j, i), [])] for j in m.stages]
        slowest = m.seconds(f"m[{i}]")
        for stage in stages:
            m.cp.add(slowest >= cp_model.LinearExpr.sum(stage))
        once = [
            *chain(*stages),
            *(seconds for (_, rank), seconds in m.link.items() if rank == i),
            *m.sigma,
        ]
        m.cp.add(
            m.total
            >= cp_model.LinearExpr.weighted_sum([slowest, *once], [m.gas - 1] + [1] * len(once))
        )
    m.cp.add(m.total >= int(np.floor(m.question.lower * m.scale) - m.roundings))


def fit_memory(m: Model) -> None:  # (8)
    """No device of a stage whose layers need more than it has."""
    capacity = m.tables.capacity[m.tables.cells.type]
    for j, n in enumerate(m.tables.stages):
        for c, room in enumerate(capacity):
            for chosen in np.flatnonzero(n.bytes > room):
                for x in m.x[c, j].ravel():
                    m.cp.add_bool_or(~m.y[j][chosen], ~x)


def order_equals(m: Model) -> None:  # (9)
    """Read the cells of all positions, stage by stage, as a word: only the least of equivalent
    words is kept.

    Equivalent: after permuting equal cells, the data ranks, or the tensor ranks of all groups
    alike. In the least word each of a class of equal cells first appears after the one before it,
    and the first letters of the data ranks, and of the tensor ranks, ascend.
    """
    shape = m.tables.shape
    for c, before in m.tables.equal_before:
        mine, other = m.x[c].ravel(), m.x[before].ravel()
        for at, x in enumerate(mine):
            m.cp.add_bool_or([~x, *other[:at]])
    starts = [[(0, i, 0) for i in range(shape[1])], [(0, 0, r) for r in range(shape[2])]]
    for line in starts:
        for p, q in pairwise(line):
            for c in range(1, m.tables.cells.count):
                m.cp.add_bool_or([~m.x[(c, *p)], *m.x[(slice(c, None), *q)]])


CONSTRAINTS = (
    place_every_device,
    cut_into_stages,
    bound_compute,
    bound_reduce,
    bound_links,
    bound_sync,
    add_up,
    fit_memory,
    order_equals,
)


def any_of(m: Model, name: str, literals: Sequence[Any]) -> Any:
    """A literal that holds exactly when one of `literals` does."""
    if len(literals) == 1:
        return literals[0]
    found = m.cp.new_bool_var(name)
    m.cp.add_max_equality(found, literals)
    return found


def levels(m: Model, name: str, bandwidths: Floats) -> list[Any]:
    """low[λ], one per level: lower ones imply higher ones, the highest always holds."""
    low = m.literals(f"low[{name}]", bandwidths)
    for here, above in pairwise(low):
        m.cp.add_implication(here, above)
    m.cp.add_bool_or([low[-1]])
    return low


def lowest_within(m: Model, low: Sequence[Any], members: Any, bandwidths: Floats) -> None:
    """low[λ] wherever two devices of the group talk at B_λ; members [K, ranks]: literals of one
    group."""
    crossing = m.tables.crossing(bandwidths)
    present = [any_of(m, f"in[{c}]", list(row)) for c, row in enumerate(members)]
    for c, d in combinations(range(len(present)), 2):
        m.cp.add_bool_or(~present[c], ~present[d], low[crossing[c, d]])
    for c, row in enumerate(members):
        if crossing[c, c] >= 0 and members.shape[1] > 1:
            inside = low[crossing[c, c]]
            m.cp.add(cp_model.LinearExpr.sum(list(row)) <= 1).only_enforce_if(~inside)
