"""Problem `ditto` as a path in two phases, a linear model for CP-SAT, HiGHS and Pyomo.

k* is the slowest stage of a template: the first one if several are equally slow.
Sets   arcs q = (r, a, b): layers [a, b) as one stage under option r, a group of devices of kind i;
       peaks p = (q, j): arc q as the stage k*, with j stages behind it.
Data   t_q seconds of a stage; D_i devices of kind i; N_b micro-batches; S_max the largest number of
       stages that a template can have; alive_q the largest number of micro-batches in flight whose
       activations fit in the memory of arc q's group.
Vars   before_q, after_q in {0, 1}: arc q is a stage in front of k*, or behind it;
       peak_p in {0, 1}: for p = (q_p, j_p), arc q_p is k* and has j_p stages behind it;
       theta: seconds of k*.
Min    sum_q t_q before_q + 2 sum_q t_q after_q + sum_{p = (q, j)} (N_b - j) t_q peak_p   s.t.
(1) arcs form a path from layer 0 to layer L:  in front of k*, then k*, then behind it
(2) theta = sum_p t_p peak_p, for each layer l:  sum_{q covers l} t_q (before_q + after_q) <= theta
    (a stage behind k* may be longer by `TIE`; one row per layer, because one arc covers it)
(3) sum_p j_p peak_p = sum_q after_q
(4) for each kind i:  devices of the stages on i <= D_i
(5) number of stages <= N_b
(6) with memory, for each layer a where a stage q begins:  stages from q to the last <= alive_q
The objective is T = T1 + T2 + T3 (Lemma 1 of `intervals`). The model may choose any of several
equally slow stages as k*; the first of them gives the smallest T.

A first template of objective U excludes peaks and arcs: a peak (q, j) if (N_b - j) t_q and the
least seconds of the layers outside q together exceed U; then every arc that is slower than all
peaks that remain. A peak is excluded, too, if it is faster than the least theta for which stages
no slower than theta cover all layers on the devices of the instance.
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
from hetplan.solvers.general import Formulation, PriorResult
from hetplan.solvers.model import Model, ModelAnswer, Totals
from hetplan.solvers.run import Options, Outcome, Run, Stop

# With more variables than this, no general solver makes progress on the model.
MOST_VARIABLES = 1_000_000
# Objectives are compared with this relative allowance, since sums in another order round otherwise.
ALLOWANCE = 1e-9
# The rounding error of CP-SAT's integers, relative to the least objective. It is far below `TIE`:
# T jumps with the place of the slowest stage, so two stages that the evaluator tells apart must
# stay different in CP-SAT.
FINEST = 1e-11


@dataclass(frozen=True)
class Arcs:
    """The stages that can occur, as arrays over Q arcs and P peaks."""

    problem: DittoProblem
    option: Ints  # [Q] number of the option r
    first: Ints  # [Q] the first layer, a
    last: Ints  # [Q] the layer behind the last one, b
    seconds: Floats  # [Q] t_q
    devices: Ints  # [Q] the size of the group
    kind: Ints  # [Q] the group's kind of devices
    alive: Ints  # [Q] micro-batches in flight that fit in memory, at most S_max
    peak_arc: Ints  # [P] the peak's arc
    behind: Ints  # [P] the number of stages behind the peak
    start: Stages | None  # the first template; None: there is none
    price: float | None  # T of `start`, seconds

    def __len__(self) -> int:
        return len(self.option)

    def peaks_of(self, arcs: Ints) -> Ints:
        """The numbers of the peaks whose arc is among `arcs`."""
        return np.flatnonzero(np.isin(self.peak_arc, arcs))

    @property
    def totals(self) -> Totals:
        """Bounds on the objective, from which the solvers' writers of models choose units."""
        p = self.problem
        # A writer rounds each stage's seconds. The objective counts those of k* at most N_b times,
        # and those of every other stage at most twice.
        roundings = p.micro_batches + 2 * p.most_stages
        largest = roundings * float(self.seconds.max(initial=0.0))
        return Totals(least=least_objective(p), largest=largest, roundings=roundings, error=FINEST)

    def stages(self, answer: ModelAnswer) -> Stages:
        """The stages of the template in a solver's answer, in order."""
        used = answer.counts("before") + answer.counts("after")
        peaks = self.peak_arc[np.flatnonzero(answer.counts("peak"))]
        chosen = np.append(np.flatnonzero(used), peaks)
        ordered = sorted(chosen.tolist(), key=lambda q: int(self.first[q]))
        return [(int(self.first[q]), int(self.last[q]), int(self.option[q])) for q in ordered]


def list_arcs(problem: DittoProblem, options: Options) -> Arcs:
    """The arcs and peaks of a problem. Raises UnsupportedError where they are too many for a
    general solver."""
    p = problem
    space = Space(p)
    start = first_template(p, options)
    price = None if start is None else p.price(start)
    enough_devices = p.option_devices <= p.devices[p.option_kind]
    option, first, last = np.nonzero(np.isfinite(p.time) & enough_devices[:, None, None])
    seconds = p.time[option, first, last]
    alive = micro_batches_held(p, option, first, last)
    least_up_to_layer = np.concatenate([[0.0], np.cumsum(p.weight.min(axis=0))])
    least_outside = least_up_to_layer[-1] - (least_up_to_layer[last] - least_up_to_layer[first])
    behind = np.arange(p.most_stages)
    # [Q, S_max] a lower bound on T for every arc as k* with every number of stages behind it
    least_objectives = (p.micro_batches - behind)[None, :] * seconds[:, None]
    least_objectives = least_objectives + least_outside[:, None]
    most = np.inf if price is None else price * (1 + ALLOWANCE)
    possible = least_objectives <= most
    # A peak with j stages behind it keeps j + 1 micro-batches in flight, and at least j layers are
    # behind it.
    possible &= alive[:, None] > behind[None, :]
    possible &= (p.layers - last)[:, None] >= behind[None, :]
    least_candidate = space.least_theta()
    if least_candidate is not None:  # no template's slowest stage is faster
        possible &= (seconds >= space.candidates[least_candidate])[:, None]
    slowest = float(seconds[possible.any(axis=1)].max(initial=0.0))
    kept = (alive >= 1) & (seconds <= slowest * (1 + TIE))
    peak_arc, peak_behind = np.nonzero(possible[kept])
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
        behind=peak_behind,
        start=start,
        price=price,
    )


def micro_batches_held(p: DittoProblem, option: Ints, first: Ints, last: Ints) -> Ints:
    """[Q] the number of micro-batches in flight that fit beside the states in the group's memory,
    at most S_max."""
    micro_batch_bytes = p.activation[last] - p.activation[first]
    state_bytes = p.state[last] - p.state[first]
    room = p.capacity[option] * (1 + MEMORY_TOLERANCE) - state_bytes
    # quotients by 0 bytes are replaced below
    with np.errstate(divide="ignore", invalid="ignore"):
        fitting = np.floor(room / micro_batch_bytes)
    fitting = np.where(micro_batch_bytes > 0, fitting, p.most_stages)
    fitting = np.where(room < 0, 0.0, fitting)
    return np.minimum(fitting, p.most_stages).astype(np.int64)


def least_objective(problem: DittoProblem) -> float:
    """A lower bound on T: W + (N_b - S_max) theta, where every layer runs on its fastest option.
    It is 0 where layers take no time.

    With stages k = 0 to S - 1, T = sum_k t_k + (N_b - S + k* - 1) theta + sum_{k >= k*} t_k. Since
    k* >= 0, and the last sum has t_k* = theta, T >= sum_k t_k + (N_b - S) theta.
    sum_k t_k is at least W, the seconds of all layers. theta is at least the seconds of the slowest
    layer and at least W / S_max, each less `TIE`.
    """
    layers = problem.weight.min(axis=0)
    work, stages = float(layers.sum()), problem.most_stages
    theta = max(float(layers.max(initial=0.0)), work / stages) * (1 - TIE)
    return (work + (problem.micro_batches - stages) * theta) * (1 - ALLOWANCE)


@dataclass(frozen=True)
class Variables:
    """The model's columns, over Q arcs and P peaks."""

    arcs: Arcs
    before: Columns  # [Q] whether the arc is a stage in front of k*
    after: Columns  # [Q] whether the arc is a stage behind k*
    peak: Columns  # [P] whether the peak's arc is k*
    theta: Columns  # seconds of k*

    def every(self, chosen: Ints, values: Ints) -> Expression:
        """The sum of `values` over those of the `chosen` arcs that are stages of the template.

        values: [Q] one value for each arc.
        """
        peaks = self.arcs.peaks_of(chosen)
        arc_values = values[chosen]
        peak_values = values[self.arcs.peak_arc[peaks]]
        other_stages = arc_values @ self.before[chosen] + arc_values @ self.after[chosen]
        return other_stages + peak_values @ self.peak[peaks]


def follow_a_path(model: Model, v: Variables) -> None:  # (1)
    """Stages in front of k* lead from layer 0 to k*, stages behind it from there to layer L."""
    arcs = v.arcs
    layers = arcs.problem.layers
    for layer in range(layers + 1):
        ending = np.flatnonzero(arcs.last == layer)
        beginning = np.flatnonzero(arcs.first == layer)
        source, sink = int(layer == 0), int(layer == layers)
        before_in, before_out = v.before[ending].sum(), v.before[beginning].sum()
        after_in, after_out = v.after[ending].sum(), v.after[beginning].sum()
        peak_in = v.peak[arcs.peaks_of(ending)].sum()
        peak_out = v.peak[arcs.peaks_of(beginning)].sum()
        model.row("path_in_front", source + before_in == before_out + peak_out)
        model.row("path_behind", after_in + peak_in == after_out + sink)


def keep_below_the_slowest(model: Model, v: Variables) -> None:  # (2)
    """No stage in front of k* is slower than k*, and no stage behind it is slower by more than
    `TIE`."""
    arcs = v.arcs
    model.row("theta", arcs.seconds[arcs.peak_arc] @ v.peak == v.theta)
    least_theta = arcs.seconds * (1 - TIE)  # [Q] theta when the arc is a stage behind k*
    for layer in range(arcs.problem.layers):
        q = np.flatnonzero((arcs.first <= layer) & (layer < arcs.last))
        model.row("slowest", arcs.seconds[q] @ v.before[q] + least_theta[q] @ v.after[q] <= v.theta)


def count_stages_behind(model: Model, v: Variables) -> None:  # (3)
    """The chosen peak's number of stages behind it is the number of those stages."""
    model.row("count", v.arcs.behind @ v.peak == v.after.sum())


def keep_to_devices(model: Model, v: Variables) -> None:  # (4)
    """The stages on a kind use no more devices than there are of it."""
    for i, available in enumerate(v.arcs.problem.devices.tolist()):
        on_kind = np.flatnonzero(v.arcs.kind == i)
        model.row("devices", v.every(on_kind, v.arcs.devices) <= available)


def keep_to_micro_batches(model: Model, v: Variables) -> None:  # (5)
    """A template has no more stages than micro-batches."""
    stages = v.before.sum() + v.after.sum() + v.peak.sum()
    model.row("stages", stages <= v.arcs.problem.micro_batches)


def fit_memory(model: Model, v: Variables) -> None:  # (6)
    """A stage has one micro-batch in flight for itself and one for each stage behind it; they fit
    in its memory."""
    arcs = v.arcs
    if not arcs.problem.has_memory:
        return
    most = arcs.problem.most_stages
    for a in range(arcs.problem.layers):
        # stages from a on <= alive of the stage that begins at a, or <= S_max where none does:
        # every stage counts 1, the stage that begins at a another S_max - alive
        counted = np.where(arcs.first == a, most - arcs.alive, 0) + 1
        from_a = np.flatnonzero(arcs.first >= a)
        model.row("memory", v.every(from_a, counted) <= most)


def minimise_time(model: Model, v: Variables) -> None:
    """Minimise T. It counts a stage in front of k* once, a stage behind it twice, and k* once per
    micro-batch less the number of stages behind it."""
    arcs = v.arcs
    times_counted = arcs.problem.micro_batches - arcs.behind
    peak_seconds = times_counted * arcs.seconds[arcs.peak_arc]
    model.minimize(arcs.seconds @ v.before + 2 * arcs.seconds @ v.after + peak_seconds @ v.peak)


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
    """The model of an instance, with `least_objective` and the first template of `exact`; or the
    outcome of an instance that has no template."""
    problem = compile_problem(data)
    reason = infeasible_because(problem)
    if reason is not None:
        return Outcome(stop=Stop.INFEASIBLE, message=reason)
    arcs = list_arcs(problem, run.options)
    return Formulation(
        build=lambda: build(arcs, run),
        read=lambda answer: problem.decision(arcs.stages(answer)),
        infeasible="proven by the solver: no template fits in memory",
        prior=PriorResult(
            bound=least_objective(problem),
            decision=None if arcs.start is None else problem.decision(arcs.start),
            objective=arcs.price,
        ),
    )
