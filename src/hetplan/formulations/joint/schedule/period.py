"""A repeated pattern of passes for many alike micro-batches: warm-up, period, drain.

Source of the idea: Lin et al. 2024, "Tessel: Boosting Distributed Execution of Large DNN Models via
Flexible Schedule Search", HPCA. Here the pattern is a cyclic schedule: micro-batch m does every
pass T seconds after micro-batch m - 1 does, so that a period of T seconds has every pass once.

Sets    passes i of one micro-batch; stages s; ports p.
Data    T ticks of the period; ticks of passes and messages, bytes, room (data.py).
Vars    phase_i in [0, T), turn_i a whole number;  begin_i = phase_i + T turn_i.
Min     the ticks of one micro-batch, that is of warm-up and drain  s.t.
(1) a pass begins after the one that it needs and its message                 `follow_the_model`
(2) passes of one stage do not overlap in the period, nor with its next one   `use_stages_in_turn`
(3) messages of one port do not overlap in the period, nor with its next one  `use_ports_in_turn`
(4) bytes kept at the same time, of all micro-batches, fit in the room        `fit_all_micros`

No period is shorter than the work of any stage or port (`least_period`). Where this period exists,
it is proven best; else the least period is sought by bisection. The order of all micro-batches
follows by repeating the pattern; the evaluator prices it. Kept bytes are rounded down, so that no
period is left out; a pattern that keeps too much for that reason is left to the evaluator.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from ortools.sat.python.cp_model import IntervalVar, IntVar, LinearExpr

from hetplan.formulations.joint.schedule.bounds import rank, work
from hetplan.formulations.joint.schedule.cp import label
from hetplan.formulations.joint.schedule.data import Order, Pass, PassProblem, sender
from hetplan.solvers.constraint_model import ConstraintModel
from hetplan.solvers.general import minimise
from hetplan.solvers.model import ModelAnswer, Totals
from hetplan.solvers.run import Run, Stopped

HALVINGS = 5  # steps of the bisection
BYTE_STEPS = 2**20  # the room of a stage in units of bytes
PERIOD_STEPS = 2**20  # ticks of a period, about


@dataclass(frozen=True)
class Period:
    """A pattern: the seconds between two micro-batches, and when a micro-batch does each pass."""

    seconds: float
    begin: dict[Pass, float]  # seconds, of the passes of micro-batch 0


def least_period(problem: PassProblem) -> float:
    """Seconds that no period is shorter than: the most work of a stage or port."""
    of_stage, of_port = defaultdict[int, float](float), defaultdict[int, float](float)
    for one in first_passes(problem):
        of_stage[problem.place[one.virtual]] += work(problem, one)
        message = problem.message(one)
        for port, share in message.ports:
            of_port[port] += share * message.seconds
    return max([*of_stage.values(), *of_port.values()])


def first_passes(problem: PassProblem) -> list[Pass]:
    """The passes of micro-batch 0, along its way."""
    passes = [one for one in problem.passes if one.micro == 0]
    return sorted(passes, key=lambda one: rank(problem, one))


def best_period(problem: PassProblem, run: Run) -> Order | None:
    """The order that repeats the shortest period found; None where none is found."""
    period = shortest_period(problem, run)
    return None if period is None else unrolled(problem, period)


def shortest_period(problem: PassProblem, run: Run) -> Period | None:
    """The shortest period found in the time of a run; None where none is."""
    low = least_period(problem)
    high = sum(work(problem, one) + problem.message(one).lasts for one in first_passes(problem))
    if low <= 0:
        return None
    best = period_of(problem, low, run)
    for _ in range(HALVINGS):
        if run.should_stop or (best is not None and best.seconds <= low * (1 + 1e-9)):
            break
        # first one micro-batch after the other, then between what is known to be too short and long
        middle = (low + high) / 2 if best is not None else high
        found = period_of(problem, middle, run)
        if found is not None:
            best, high = found, middle
        elif best is None:
            break
        else:
            low = middle
    return best


def period_of(problem: PassProblem, seconds: float, run: Run) -> Period | None:
    """The pattern of a given period whose micro-batches take the least time; None where there is
    none or time runs out."""
    try:
        v = build(problem, seconds, run.part(time_limit=run.remaining / 2))
        answer = minimise("cp-sat", v.model, run.part(time_limit=run.remaining / 2))
    except Stopped:
        return None
    return read(v, answer) if answer.has_solution else None


class Variables:
    """The variables of the docstring."""

    def __init__(self, model: ConstraintModel, problem: PassProblem, period: int) -> None:
        self.model, self.problem, self.period = model, problem, period
        self.passes = first_passes(problem)
        most = len(self.passes) + 1  # turns
        self.phase: dict[Pass, IntVar] = {}
        self.begin: dict[Pass, IntVar] = {}
        for one in self.passes:
            name = label(one)
            phase = model.cp.new_int_var(0, period - 1, f"phase_{name}")
            turn = model.cp.new_int_var(0, most, f"turn_{name}")
            begin = model.cp.new_int_var(0, (most + 1) * period, f"begin_{name}")
            model.cp.add(begin == phase + period * turn)
            self.phase[one], self.begin[one] = phase, begin
        self.span = model.cp.new_int_var(0, (most + 2) * period, "span")

    def ticks(self, one: Pass) -> int:
        """Ticks of a pass's work on its stage."""
        return self.model.tick(work(self.problem, one))

    def twice(self, one: Pass, ticks: int, name: str) -> list[IntervalVar]:
        """The time of some work in the period and in the next one."""
        cp, phase = self.model.cp, self.phase[one]
        return [
            cp.new_fixed_size_interval_var(phase + again, ticks, f"{name}_{again}")
            for again in (0, self.period)
        ]


def follow_the_model(v: Variables) -> None:  # (1)
    """A pass begins after the one that it needs and its message; the span ends after all."""
    for one in v.passes:
        source, end = sender(v.problem, one), v.begin[one] + v.ticks(one)
        tail = v.model.tick(v.problem.tail(v.problem.place[one.virtual]))
        v.model.cp.add(v.span >= end + tail)
        if source is not None:
            lasts = 0
            if not v.problem.receiver_waits:
                lasts = v.model.tick(v.problem.message(one).lasts)
            v.model.cp.add(v.begin[one] >= v.begin[source] + v.ticks(source) + lasts)


def use_stages_in_turn(v: Variables) -> None:  # (2)
    """A stage does one pass at a time."""
    for s in range(v.problem.stages):
        intervals: list[IntervalVar] = []
        for one in v.passes:
            if v.problem.place[one.virtual] == s:
                intervals += v.twice(one, v.ticks(one), label(one))
        v.model.cp.add_no_overlap(intervals)


def use_ports_in_turn(v: Variables) -> None:  # (3)
    """A port carries one message at a time. Where receivers do not wait, a message ends with the
    pass that needs it at the latest; it is taken to be sent just before."""
    held: dict[int, list[IntervalVar]] = defaultdict(list)
    if v.problem.receiver_waits:
        for one in v.passes:
            message = v.problem.message(one)
            for port, share in message.ports:
                ticks = v.model.tick(share * message.seconds)
                held[port] += v.twice(one, ticks, f"port_{port}_{label(one)}")
    for intervals in held.values():
        v.model.cp.add_no_overlap(intervals)


def fit_all_micros(v: Variables) -> None:  # (4)
    """The bytes of all micro-batches that a stage keeps at the same time fit in its room. Bytes
    kept for `whole` periods and a `part` of one are kept `whole` times, and once more for the
    part."""
    problem, cp, period = v.problem, v.model.cp, v.period
    if problem.room is None or not problem.kept:
        return
    for s, room in enumerate(problem.room):
        unit = max(room, 1.0) / BYTE_STEPS
        intervals: list[IntervalVar] = []
        demands: list[int] = []
        always: list[tuple[IntVar, int]] = []
        for at in problem.chunks[s]:
            forward, back = Pass("F", at, 0), Pass(problem.kinds_of_passes[1], at, 0)
            end = v.begin[back] + v.ticks(back)
            kept = problem.bytes_before_backward(at, 0)
            # (pass, ticks from its begin to that of keeping, begin, end, bytes)
            spans: list[tuple[Pass, int, LinearExpr, LinearExpr, float]] = []
            spans.append((forward, 0, v.begin[forward], end, kept))
            if problem.weight:
                weight, kept = Pass("W", at, 0), problem.bytes_before_weight(at, 0)
                until = v.begin[weight] + v.ticks(weight)
                spans.append((back, v.ticks(back), end, until, kept))
            for first, later, begin, until, kept in spans:
                name = f"{s}_{len(demands)}"
                whole = cp.new_int_var(0, len(v.passes) + 2, f"whole_{name}")
                part = cp.new_int_var(0, period - 1, f"part_{name}")
                cp.add(until - begin == period * whole + part)
                demand = min(math.floor(kept / unit), BYTE_STEPS + 1)
                always.append((whole, demand))
                start = cp.new_int_var(0, period - 1, f"start_{name}")
                wraps = cp.new_bool_var(f"wraps_{name}")
                cp.add(start == v.phase[first] + later - period * wraps)
                stop = cp.new_int_var(0, 2 * period, f"stop_{name}")
                for again in (0, period):
                    intervals.append(
                        cp.new_interval_var(
                            start + again, part, stop + again, f"keeps_{name}_{again}"
                        )
                    )
                    demands.append(demand)
        capacity = cp.new_int_var(0, BYTE_STEPS, f"room_{s}")
        cp.add(capacity == BYTE_STEPS - sum(whole * demand for whole, demand in always))
        cp.add_cumulative(intervals, demands, capacity)


CONSTRAINTS: tuple[Callable[[Variables], None], ...] = (
    follow_the_model,
    use_stages_in_turn,
    use_ports_in_turn,
    fit_all_micros,
)


def build(problem: PassProblem, seconds: float, run: Run) -> Variables:
    """The model of the patterns of a given period."""
    largest = seconds * (len(first_passes(problem)) + 3)
    totals = Totals(least=seconds, largest=largest, roundings=PERIOD_STEPS * 1e-7, error=1e-7)
    model = ConstraintModel("period", run, totals)
    v = Variables(model, problem, max(1, model.tick(seconds)))
    for constrain in CONSTRAINTS:
        model.check()
        constrain(v)
    model.cp.minimize(v.span)
    return v


def read(v: Variables, answer: ModelAnswer) -> Period:
    """The pattern of an answer."""
    second = 1 / v.model.scale.per_unit
    begin = {one: answer.value(v.begin[one]) * second for one in v.passes}
    return Period(v.period * second, begin)


def unrolled(problem: PassProblem, period: Period) -> Order:
    """The order in which micro-batch m does every pass m periods after micro-batch 0."""

    def key(one: Pass) -> tuple[float, int]:
        begin = period.begin[one._replace(micro=0)] + one.micro * period.seconds
        return begin, rank(problem, one)

    order = []
    for s in range(problem.stages):
        of_stage = [one for one in problem.passes if problem.place[one.virtual] == s]
        order.append(sorted(of_stage, key=key))
    return order
