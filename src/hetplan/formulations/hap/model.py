"""Problem `hap` for general solvers, over the graph of needs in all orders (module `needs`).

Paths read a program backwards, from its last triple to its first.

Sets   arcs a of the graph, K device types d of n_d devices, segments k.
Data   of arc a's triple: F, S FLOP of a computation, fixed, shared seconds of a collective, and
       fixed_bytes, shared_bytes, as in module `problem`; v_d FLOP/s of type d; device_bytes_d of
       one device of type d; U seconds that some program does not exceed.
Vars   z_a in {0,1}: the program runs arc a's triple; B_kd ratios; w_akd = z_a B_kd;
       l_ad seconds that type d computes on the path between the last collective before arc a and
       arc a;
       t_a seconds of computing of the stage whose path ends with arc a (a collective, or a
       computation into the empty set);  m_a = z_a max_d B_kd.
Min    sum_a t_a + sum over collectives a of (fixed z_a + shared m_a)   s.t.
(1) z is a path from {goal} to the empty set through no node twice
(2) w is a flow along z: as much leaves a node as enters it, and B enters {goal}
(3) sum_d n_d w_akd = z_a
(4) l is a flow that gains (F z_a + S w_akd) / v_d on a computation and is 0 after a collective
(5) l_ad <= U z_a
(6) t_a >= l_ad + the seconds that type d computes on arc a
(7) m_a >= w_akd
(8) with memory  sum_a (fixed_bytes z_a + shared_bytes w_akd) <= device_bytes_d, k the segment of a
(9) the triples of a program that turned out to fit with no ratios are not all chosen again (the
    program seemed to fit within a solver's tolerances)
Where z is whole, (1)-(3) make w = z B exact, because B does not change along the path. A path that
runs a triple twice adds no fewer bytes than the program without the repetition.

CP-SAT takes ratios on a grid. Every rounding lowers the cost, so that its bound holds. The ratios
of the program in its answer are optimised again, and the rounding remains as a small gap.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hetplan.clock import CLOCK
from hetplan.formulations.hap.chain_bound import chain_bound
from hetplan.formulations.hap.data import HapData, HapDecision
from hetplan.formulations.hap.first_programs import fitting_program
from hetplan.formulations.hap.graph import Flags, Graph
from hetplan.formulations.hap.needs import graph_of_needs
from hetplan.formulations.hap.outcomes import NONE_FITS, outcome_of, reduced_or_answered
from hetplan.formulations.hap.problem import Floats, HapProblem, Ints
from hetplan.formulations.hap.ratios import best_ratios
from hetplan.formulations.hap.theory import ReducedTheory
from hetplan.solvers.expressions import Columns, Expression
from hetplan.solvers.general import UNBUILT, label, minimise
from hetplan.solvers.model import SMALLEST, Model, Totals
from hetplan.solvers.run import Outcome, Run, Stop, Stopped, stop_reason

# Nodes of the graph beyond which the model is not built: no general solver gets far there.
STATES = 8_000
# CP-SAT's ratios are multiples of 1 / GRID. With memory the grid is coarser, so that more digits
# are left for bytes.
GRID, MEMORY_GRID = 2**20, 2**16
# The error of all roundings of CP-SAT together, relative to the cost. A smaller one makes its
# search crawl.
GRID_ROUNDING = 2e-5
# Coefficients are capped at this multiple of U, or of a device's memory. A cap only lowers costs
# and sums of bytes, so that the bound holds. A ratio above 1 / MOST_TIMES is still too much.
MOST_TIMES = 4096.0
# The model grants this share of the memory, and of U, on top, so that a solver's tolerance, 1e-9,
# cuts nothing off.
# The best ratios of a program are computed exactly later.
SLACK = 1e-8


@dataclass(frozen=True)
class ArcColumns:
    """The A arcs of the graph with their costs and their columns in the model."""

    problem: HapProblem
    graph: Graph
    upper: float  # U: seconds that some program does not exceed
    fixed: Floats  # [A, K] seconds on each type that do not depend on the ratios
    shared: Floats  # [A, K] seconds on each type per ratio of the arc's segment
    z: Columns  # [A] whether the program runs the arc's triple
    w: Columns  # [A, g, K] the ratios of each segment on a chosen arc, 0 on the others
    w_of_segment: Columns  # [A, K] the columns w of each arc's own segment

    @property
    def comm(self) -> Flags:
        """[A] whether each arc is a collective."""
        return self.graph.work.comm

    def computing(self, arcs: Ints) -> Expression:
        """[arcs, K] seconds that each type computes on these arcs; 0 on collectives."""
        fixed, shared = self.fixed[arcs], self.shared[arcs]
        chosen, ratios = self.z[arcs][:, None], self.w_of_segment[arcs]
        computes = ~self.comm[arcs][:, None]
        return computes * (fixed * chosen + shared * ratios)


def arc_columns(model: Model, graph: Graph, upper: float) -> ArcColumns:
    """The arcs of the graph, with the columns z and w added to the model."""
    problem, work = graph.theory.problem, graph.work
    # [A, K] seconds on each type per second on the fastest one; a collective takes the same on all
    slow = np.where(work.comm[:, None], 1.0, problem.speeds[-1] / problem.speeds)
    segment = np.array([graph.theory.steps[s].segment for s in graph.action], dtype=np.int64)
    count = len(graph.head)
    most = MOST_TIMES * upper
    arcs = np.arange(count)
    shared_seconds = work.shared_seconds[arcs, segment]  # [A] per ratio of the arc's segment
    z = model.binary("z", count)
    w = model.continuous("w", (count, problem.g, problem.K), 0.0, 1.0, grid=_grid(problem))
    return ArcColumns(
        problem=problem,
        graph=graph,
        upper=upper,
        fixed=np.minimum(work.fixed_seconds[:, None] * slow, most),
        shared=np.minimum(shared_seconds[:, None] * slow, most),
        z=z,
        w=w,
        w_of_segment=w[arcs, segment],
    )


def _grid(problem: HapProblem) -> int:
    """The values of a ratio per unit for CP-SAT."""
    return GRID if problem.capacity is None else MEMORY_GRID


def follow_a_path(model: Model, s: ArcColumns) -> None:  # (1)
    """One unit from {goal} to the empty set; each node is left at most once."""
    for u in range(s.graph.n - 1):  # all but the empty set, the last node
        out = s.z[s.graph.tail == u].sum()
        into = s.z[s.graph.head == u].sum()
        begins = int(u == s.graph.start)
        model.row("path", out == into + begins)
        model.row("once", out <= 1)


def carry_the_ratios(model: Model, s: ArcColumns) -> None:  # (2)
    """The ratios that enter a node leave it. The ratios B enter {goal}."""
    ratio = model.continuous("ratio", (s.problem.g, s.problem.K), 0.0, 1.0, grid=_grid(s.problem))
    model.row("whole", ratio @ s.problem.counts == 1)
    for u in range(s.graph.n - 1):
        out = s.w[s.graph.tail == u].sum(axis=0)  # [g, K]
        into = s.w[s.graph.head == u].sum(axis=0)
        if u == s.graph.start:
            into = into + ratio
        model.row("carry", out == into)


def share_out(model: Model, s: ArcColumns) -> None:  # (3)
    """On a chosen arc the ratios of all devices sum to 1; on any other arc they are 0."""
    model.row("share", s.w @ s.problem.counts == s.z[:, None])


def pay_for_stages(model: Model, s: ArcColumns) -> None:  # (4), (5), (6)
    """A stage costs the seconds of its slowest type, which add up along the path."""
    load = model.seconds("load", (len(s.z), s.problem.K), upper=s.upper)
    ends = np.flatnonzero(s.comm | (s.graph.head == s.graph.n - 1))
    stage = model.seconds("stage", len(ends), upper=s.upper)
    model.minimize(stage.sum())
    model.row("only", load <= s.upper * s.z[:, None])  # (5)
    model.row("slowest", stage[:, None] >= load[ends] + s.computing(ends))  # (6)
    for u in range(s.graph.n - 1):  # (4)
        out = np.flatnonzero(s.graph.tail == u)
        into = np.flatnonzero((s.graph.head == u) & ~s.comm)
        arriving = load[into] + s.computing(into)  # [into, K]
        # equal at the optimum: a larger load only costs
        model.row("load", load[out].sum(axis=0) >= arriving.sum(axis=0))


def pay_for_communication(model: Model, s: ArcColumns) -> None:  # (7)
    """A collective costs fixed z + shared max_d w."""
    comm = np.flatnonzero(s.comm)
    # type 0 stands for all: a collective takes the same seconds on each
    paying = comm[s.shared[comm, 0] > 0]
    largest = model.continuous("largest", len(paying), 0.0, 1.0, grid=_grid(s.problem))
    model.minimize(s.fixed[comm, 0] @ s.z[comm] + s.shared[paying, 0] @ largest)
    model.row("largest", largest[:, None] >= s.w_of_segment[paying])


def fit_memory(model: Model, s: ArcColumns) -> None:  # (8)
    """No type's bytes exceed its memory.

    Bytes are in units of the type's memory, or in bytes where it has none. Coefficients that are
    too small for a solver become 0. A triple whose fixed bytes exceed the memory is in no program.
    """
    if s.problem.capacity is None:
        return
    steps = [s.graph.theory.steps[n] for n in s.graph.action]
    fixed, shared = np.array([(step.fixed_bytes, step.shared_bytes) for step in steps]).T
    for d, room in enumerate(s.problem.capacity.tolist()):
        unit = room if room > 0 else 1.0
        model.fix(s.z[fixed > room], 0.0)
        # beyond `room` the triple is excluded above, so that any cap above 1 will do
        fixed_parts = kept_parts(np.minimum(fixed, 2.0 * unit) / unit)
        shared_parts = kept_parts(shared / unit)
        needed = fixed_parts @ s.z + shared_parts @ s.w_of_segment[:, d]
        model.row("memory", needed <= room / unit * (1 + SLACK))


def kept_parts(parts: Floats) -> Floats:
    """The coefficients as a solver takes them: 0 for very small ones, at most `MOST_TIMES`."""
    return np.minimum(np.where(parts < SMALLEST, 0.0, parts), MOST_TIMES)


def forbid(model: Model, s: ArcColumns, program: Sequence[int]) -> None:  # (9)
    """Not all triples of a program (triple numbers) are chosen again.

    No ratios make them fit in memory together, nor with more triples.
    """
    chosen, steps = set(program), s.graph.theory.steps
    positions = [n for n, step in enumerate(steps) if step.index in chosen]
    of_program = np.isin(s.graph.action, positions)
    model.row("forbidden", s.z[of_program].sum() <= len(positions) - 1)


def build(
    graph: Graph, least: float, upper: float, run: Run | None = None
) -> tuple[Model, ArcColumns]:
    """(The model of the programs that cost at most `upper` seconds, its columns).

    least: seconds, a lower bound on the cost of every program.
    """
    totals = Totals(
        least=least,
        largest=upper,
        # Each of at most n - 1 arcs of a path has a cost per step of a ratio that is rounded down,
        # and a ratio is at most `_grid` steps.
        roundings=graph.n * _grid(graph.theory.problem),
        error=GRID_ROUNDING,
    )
    model = Model("hap", run, totals)
    s = arc_columns(model, graph, upper)
    # a triple that alone takes longer than `upper` is in none of these programs
    model.fix(s.z[s.fixed.max(axis=1) > upper * (1 + SLACK)], 0.0)
    follow_a_path(model, s)
    carry_the_ratios(model, s)
    share_out(model, s)
    pay_for_communication(model, s)
    fit_memory(model, s)
    pay_for_stages(model, s)
    return model, s


def solve_by(method: str, data: HapData, run: Run) -> Outcome[HapDecision]:
    """The optimum up to the rounding of the ratios; when time runs out, the best decision so far
    and a proven bound."""
    theory = reduced_or_answered(data, run)
    return theory if isinstance(theory, Outcome) else solve_reduced(method, theory, run)


def solve_reduced(
    method: str,
    theory: ReducedTheory,
    run: Run,
    *,
    known: Sequence[int] | None = None,
    floor: float = 0.0,
    details: Mapping[str, object] | None = None,
) -> Outcome[HapDecision]:
    """The outcome of a general solver on the model of a reduced theory.

    The ratios of the program in the solver's answer are optimised again.

    method: cp-sat-linear, milp or pyomo. known: a program (triple numbers) that fits in memory;
    None: one is derived here. floor: a lower bound in seconds. details: further details of the
    outcome.
    """
    problem = theory.problem
    solver = label(method, run.options)
    clock_begun = CLOCK.seconds()
    if known is None:
        program, seconds = fitting_program(theory, run)
    else:
        program = list(known)
        seconds = best_ratios(problem, problem.cost_of(program), run).seconds
    floor = max(floor, chain_bound(theory))
    run.report(incumbent=seconds if np.isfinite(seconds) else None, bound=floor)

    def best_so_far(stop: Stop, message: str) -> Outcome[HapDecision]:
        return outcome_of(
            theory, program, run=run, stop=stop, bound=floor, solver=solver,
            message=message, details=details,
        )  # fmt: skip

    if seconds <= 0:  # no program costs less than nothing
        return best_so_far(Stop.OPTIMAL, "")
    upper = seconds
    if not np.isfinite(seconds):  # no program that fits is known
        upper = problem.seconds_of_all or 1.0  # units need more than 0 seconds
    try:
        graph = graph_of_needs(theory, STATES, run)
        if graph is None:
            return best_so_far(Stop.LIMIT, "the theory is too wide for this method")
        model, s = build(graph, floor, upper, run)
    except Stopped:
        return best_so_far(stop_reason(run), UNBUILT)
    build_seconds = CLOCK.seconds() - clock_begun
    while True:
        answer = minimise(method, model, run)
        if not answer.has_solution:
            break
        candidate = theory.program(walked(graph, answer.values(s.z)))
        ratios = best_ratios(problem, problem.cost_of(candidate), run)
        if ratios.seconds <= seconds:
            program, seconds = candidate, ratios.seconds
        if answer.stop is not Stop.OPTIMAL or not ratios.proven_unfit:
            break  # out of time, or the answer is no program to forbid
        forbid(model, s, candidate)
    stop, message = answer.stop, answer.message
    if stop is Stop.INFEASIBLE:
        if problem.capacity is not None and not np.isfinite(seconds):
            return outcome_of(
                theory, None, run=run, stop=stop, bound=None, build_seconds=build_seconds,
                solver=answer.solver, message=NONE_FITS,
            )  # fmt: skip
        stop = Stop.ERROR  # a program is known that the model holds
    if method == "cp-sat-linear":
        message = message or f"ratios rounded down to 1/{_grid(problem)} in the model"
    counts = {"states": graph.n, "arcs": len(graph.head)}
    return outcome_of(
        theory, program, run=run, stop=stop, bound=max(floor, answer.bound or 0.0),
        build_seconds=build_seconds, solver=answer.solver, message=message,
        details={**(details or {}), **answer.statistics, **counts},
    )  # fmt: skip


def walked(graph: Graph, chosen: Floats) -> list[int]:
    """The program (triple numbers) of a path. chosen: [A] 1 for the path's arcs, else about 0."""
    arcs: list[int] = []
    u, seen = graph.start, set()  # `seen`: an answer that is no path may lead round in a circle
    while u < graph.n - 1 and u not in seen:
        seen.add(u)
        out = np.arange(graph.first[u], graph.first[u + 1])
        arcs.append(int(out[np.argmax(chosen[out])]))
        u = int(graph.head[arcs[-1]])
    return graph.program(arcs)
