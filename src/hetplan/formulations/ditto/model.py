"""Problem `ditto` as a path in two phases, for the general solvers (CP-SAT, HiGHS, Pyomo).

Sets   arcs q = (r, a, b): layers [a, b) as one stage under option r (a kind i and its x devices);
       peaks p = (q, j): arc q as k*, with j stages behind it.
Data   t_q seconds of a stage; D_i devices of kind i; N_b micro-batches; S_max the most stages
       possible; alive_q the most micro-batches in flight whose memory the group of arc q holds.
Vars   before_q, after_q in {0, 1}: arc q is a stage in front of k*, or behind it;
       peak_p in {0, 1}: p is k* with its number of stages behind;  theta: seconds of k*.
Min    sum_q t_q before_q + 2 sum_q t_q after_q + sum_{p = (q, j)} (N_b - j) t_q peak_p   s.t.
(1) arcs form a path from layer 0 to layer L:  in front of k*, then k*, then behind it
(2) theta = sum_p t_p peak_p, for each layer l:  sum_{q covers l} t_q (before_q + after_q) <= theta
    (a stage behind k* may be longer by the tie; one row per layer, because one arc covers it)
(3) sum_p j_p peak_p = sum_q after_q
(4) for each kind i:  devices of the stages on i <= D_i
(5) number of stages <= N_b
(6) with memory, for each layer a:  stages that begin at a or later <= alive_q of the one that
    begins at a
The objective is T = T1 + T2 + T3 written with theta (Lemma 1 of `intervals`). Of equally
slow stages k* may be any: the first makes T least. A template known beforehand of price U leaves
out what costs more on its own: a peak (q, j) if (N_b - j) t_q and the least time of the layers
outside q exceed U, and arcs slower than every peak left. Peaks faster than the least theta under
which stages reach from the first layer to the last on the devices that there are hold no template.
Source: hetplan, for Ditto's problem (Section 3) with Oobleck's cost (SOSP 2023, Section 4.1.2).
"""

from dataclasses import dataclass

import numpy as np

from hetplan.errors import UnsupportedError, require
from hetplan.formulations.ditto.data import DittoData, DittoDecision
from hetplan.formulations.ditto.exact import first_template
from hetplan.formulations.ditto.intervals import Space
from hetplan.formulations.ditto.problem import (
    MEMORY_TOLERANCE,
    TIE,
    DittoProblem,
    Floats,
    Ints,
    Stages,
    compile_problem,
    infeasible_because,
)
from hetplan.solvers.expressions import Columns, Expression
from hetplan.solvers.general import Formulation, Known
from hetplan.solvers.model import Model, ModelAnswer, Totals
from hetplan.solvers.run import Options, Outcome, Run, Stop

# Beyond this many variables no general solver makes sense of the model.
MOST_VARIABLES = 1_000_000
# Prices are compared with this relative allowance, for the rounding of sums in another order.
ALLOWANCE = 1e-9
# Two stages that the evaluator tells apart must stay apart in CP-SAT, since T jumps with the place
# of the slowest: rounding errors, relative to the least objective, far below the evaluator's tie.
FINEST = 1e-11


@dataclass(frozen=True)
class Arcs:
    """The stages that can occur, as arrays.

    option, first, last, seconds, devices, kind [Q]; alive [Q]: at most S_max.
    peak_arc, behind [P]: arc and number of stages behind it, of each peak.
    start: the template known beforehand, None without one; price: its T.
    """

    problem: DittoProblem
    option: Ints
    first: Ints
    last: Ints
    seconds: Floats
    devices: Ints
    kind: Ints
    alive: Ints
    peak_arc: Ints
    behind: Ints
    start: Stages | None
    price: float | None

    def __len__(self) -> int:
        return len(self.option)

    def peaks_of(self, arcs: Ints) -> Ints:
        """Peaks whose arc is among `arcs`."""
        return np.flatnonzero(np.isin(self.peak_arc, arcs))

    @property
    def totals(self) -> Totals:
        """Bounds on the optimum and on the objective of any template among the arcs."""
        p = self.problem
        roundings = p.micro_batches + 2 * p.most_stages
        largest = roundings * float(self.seconds.max(initial=0.0))
        return Totals(least=least_objective(p), largest=largest, roundings=roundings, error=FINEST)

    def stages(self, answer: ModelAnswer) -> Stages:
        """The template of a solver's answer, in order."""
        used = answer.counts("before") + answer.counts("after")
        peaks = self.peak_arc[np.flatnonzero(answer.counts("peak"))]
        chosen = np.append(np.flatnonzero(used), peaks)
        ordered = sorted(chosen.tolist(), key=lambda q: int(self.first[q]))
        return [(int(self.first[q]), int(self.last[q]), int(self.option[q])) for q in ordered]


def list_arcs(problem: DittoProblem, options: Options) -> Arcs:
    """Arcs and peaks of a problem; raises UnsupportedError where they are too many for a general
    solver."""
    p, space = problem, Space(problem)
    start, least = first_template(p, options), space.least_theta()
    price = None if start is None else p.price(start)
    fits = p.option_devices <= p.devices[p.option_kind]
    option, first, last = np.nonzero(np.isfinite(p.time) & fits[:, None, None])
    seconds, alive = p.time[option, first, last], micro_batches_held(p, option, first, last)
    layer = np.concatenate([[0.0], np.cumsum(p.weight.min(axis=0))])
    outside = layer[-1] - (layer[last] - layer[first])
    behind = np.arange(p.most_stages)
    alone = (p.micro_batches - behind)[None, :] * seconds[:, None] + outside[:, None]
    most = np.inf if price is None else price * (1 + ALLOWANCE)
    possible = alone <= most
    # Any stage behind needs a layer of its own, and memory for as many micro-batches.
    possible &= alive[:, None] > behind[None, :]
    possible &= (p.layers - last)[:, None] >= behind[None, :]
    if least is not None:  # no template's slowest stage is faster
        possible &= (seconds >= space.candidates[least])[:, None]
    slowest = float(seconds[possible.any(axis=1)].max(initial=0.0))
    kept = (alive >= 1) & (seconds <= slowest * (1 + TIE))
    peak_arc, which = np.nonzero(possible[kept])
    variables = 2 * int(kept.sum()) + len(peak_arc)
    require(
        variables <= MOST_VARIABLES,
        f"a model of {variables} variables is too large for a general solver",
        expected=f"at most {MOST_VARIABLES} (method exact takes more)",
        kind=UnsupportedError,
    )
    option, first, last = option[kept], first[kept], last[kept]
    return Arcs(
        problem=p,
        option=option,
        first=first,
        last=last,
        seconds=seconds[kept],
        devices=p.option_devices[option],
        kind=p.option_kind[option],
        alive=alive[kept],
        peak_arc=peak_arc,
        behind=behind[which],
        start=start,
        price=price,
    )


def micro_batches_held(p: DittoProblem, option: Ints, first: Ints, last: Ints) -> Ints:
    """[Q] how many micro-batches in flight the group's memory holds beside the states, at most
    S_max."""
    each = p.activation[last] - p.activation[first]
    room = p.capacity[option] * (1 + MEMORY_TOLERANCE) - (p.state[last] - p.state[first])
    with np.errstate(divide="ignore", invalid="ignore"):
        held = np.where(each > 0, np.floor(room / each), p.most_stages)
    held = np.where(room < 0, 0.0, held)
    return np.minimum(held, p.most_stages).astype(np.int64)


def least_objective(problem: DittoProblem) -> float:
    """A simple lower bound on T (0 when layers are free): W + (N_b - S_max) theta, every layer on
    its best option.

    T = sum_k t_k + (N_b - S + k* - 1) theta + sum_{k >= k*} t_k >= sum_k t_k + (N_b - S) theta,
    with sum_k t_k >= W, the work of all layers; the slowest stage theta takes no less than any
    layer, nor than W / S, but for the tie.
    """
    layers = problem.weight.min(axis=0)
    work, stages = float(layers.sum()), problem.most_stages
    theta = max(float(layers.max(initial=0.0)), work / stages) * (1 - TIE)
    return (work + (problem.micro_batches - stages) * theta) * (1 - ALLOWANCE)


@dataclass(frozen=True)
class Variables:
    """The columns: before, after [Q], peak [P], theta; `arcs` says what they stand for."""

    arcs: Arcs
    before: Columns
    after: Columns
    peak: Columns
    theta: Columns

    def every(self, chosen: Ints, values: Ints) -> Expression:
        """The sum over some arcs of their values [Q], for each arc that is a stage in any role."""
        peaks = self.arcs.peaks_of(chosen)
        of_arcs, of_peaks = values[chosen], values[self.arcs.peak_arc[peaks]]
        beside_peak = of_arcs @ self.before[chosen] + of_arcs @ self.after[chosen]
        return beside_peak + of_peaks @ self.peak[peaks]


def follow_a_path(model: Model, v: Variables) -> None:  # (1)
    """Stages in front of k* lead from layer 0 up to it, stages behind it from there to layer L."""
    arcs, layers = v.arcs, v.arcs.problem.layers
    for at in range(layers + 1):
        ends, begins = np.flatnonzero(arcs.last == at), np.flatnonzero(arcs.first == at)
        enters, leaves = int(at == 0), int(at == layers)
        peak_begins = v.peak[arcs.peaks_of(begins)].sum()
        peak_ends = v.peak[arcs.peaks_of(ends)].sum()
        model.row(
            "path_in_front", enters + v.before[ends].sum() == v.before[begins].sum() + peak_begins
        )
        model.row("path_behind", v.after[ends].sum() + peak_ends == v.after[begins].sum() + leaves)


def keep_below_the_slowest(model: Model, v: Variables) -> None:  # (2)
    """No stage in front of k* is slower than it, none behind it by more than the tie."""
    arcs = v.arcs
    model.row("theta", arcs.seconds[arcs.peak_arc] @ v.peak == v.theta)
    behind = arcs.seconds * (1 - TIE)
    for layer in range(arcs.problem.layers):
        q = np.flatnonzero((arcs.first <= layer) & (layer < arcs.last))
        model.row("slowest", arcs.seconds[q] @ v.before[q] + behind[q] @ v.after[q] <= v.theta)


def count_stages_behind(model: Model, v: Variables) -> None:  # (3)
    """k* knows how many stages lie behind it."""
    model.row("count", v.arcs.behind @ v.peak == v.after.sum())


def keep_to_devices(model: Model, v: Variables) -> None:  # (4)
    """Each kind gives what it has."""
    for i, available in enumerate(v.arcs.problem.devices.tolist()):
        on_kind = np.flatnonzero(v.arcs.kind == i)
        model.row("devices", v.every(on_kind, v.arcs.devices) <= available)


def keep_to_micro_batches(model: Model, v: Variables) -> None:  # (5)
    """No more stages than micro-batches."""
    stages = v.before.sum() + v.after.sum() + v.peak.sum()
    model.row("stages", stages <= v.arcs.problem.micro_batches)


def fit_memory(model: Model, v: Variables) -> None:  # (6)
    """A stage holds as many micro-batches as there are stages from it on."""
    arcs = v.arcs
    if not arcs.problem.has_memory:
        return
    most = arcs.problem.most_stages
    for a in range(arcs.problem.layers):
        # most - alive for the stage that begins here, and one for each stage from it on
        taken = np.where(arcs.first == a, most - arcs.alive, 0) + 1
        from_here = np.flatnonzero(arcs.first >= a)
        model.row("memory", v.every(from_here, taken) <= most)


def minimise_time(model: Model, v: Variables) -> None:
    """T, written with theta."""
    arcs = v.arcs
    passes = arcs.problem.micro_batches - arcs.behind
    at_peak = passes * arcs.seconds[arcs.peak_arc]
    model.minimize(arcs.seconds @ v.before + 2 * arcs.seconds @ v.after + at_peak @ v.peak)


def build(arcs: Arcs, run: Run | None = None) -> Model:
    """The whole model."""
    model = Model("ditto", run, arcs.totals)
    v = Variables(
        arcs,
        before=model.binary("before", len(arcs)),
        after=model.binary("after", len(arcs)),
        peak=model.binary("peak", len(arcs.peak_arc)),
        theta=model.seconds("theta"),
    )
    follow_a_path(model, v)
    keep_below_the_slowest(model, v)
    count_stages_behind(model, v)
    keep_to_devices(model, v)
    keep_to_micro_batches(model, v)
    fit_memory(model, v)
    minimise_time(model, v)
    return model


def formulate(data: DittoData, run: Run) -> Formulation[DittoDecision] | Outcome[DittoDecision]:
    """The model, with a simple bound and the first template of `exact`."""
    problem = compile_problem(data)
    reason = infeasible_because(problem)
    if reason is not None:
        return Outcome(stop=Stop.INFEASIBLE, message=reason)
    arcs = list_arcs(problem, run.options)
    return Formulation(
        build=lambda: build(arcs, run),
        read=lambda answer: problem.decision(arcs.stages(answer)),
        infeasible="proven by the solver: no template fits in memory",
        known=Known(
            bound=least_objective(problem),
            decision=None if arcs.start is None else problem.decision(arcs.start),
            objective=arcs.price,
        ),
    )
