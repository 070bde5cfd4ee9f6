"""The order of passes for CP-SAT: passes and messages are intervals, whose order is a decision.

Sets    passes i of a pipeline, each of one stage, virtual stage v and micro-batch m; ports p.
Data    ticks of passes and messages, bytes, room (data.py).
Vars    begin_i, end_i of the time in which pass i keeps its stage from other passes: of its
        message, where receivers wait, and its own;  sent_i, when its message begins.
Min     T  s.t.
(1) end_i = begin_i + work_i; passes of one stage do not overlap              `use_stages_once`
(2) a message goes from the pass that makes it to the pass that needs it:
    sent_i >= end_j;  begin_i = sent_i or, where receivers do not wait,
    begin_i >= sent_i + message_i                                             `send_messages`
(3) messages at one port do not overlap                                       `hold_ports`
(4) bytes kept at the same time fit in the room of the stage     cumulative   `fit_in_memory`
(5) T >= end_i + tail_s                                                       `outlast_passes`
(6) alike micro-batches pass in their order                       symmetry    `keep_micros_in_order`
(7) alike micro-batches that do not fit together take turns        implied    `take_turns_in_memory`
(8) T is no less than the bound from one stage at a time           implied    `respect_the_bound`

(6) loses nothing. Take the passes of one kind and virtual stage of alike micro-batches, and number
them anew by their times. Every pass then still begins after the one with its number that it needs,
since the k-th of the later ones comes after k of the earlier ones, and as many bytes are kept at
every moment as before.

Seconds and kept bytes are rounded down and the room is rounded up, so that the optimum is a lower
bound on all orders. The evaluator prices the order that the model answers with.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise

from ortools.sat.python.cp_model import IntervalVar, IntVar

from hetplan.formulations.joint.schedule.bounds import lower_bound, rank, work
from hetplan.formulations.joint.schedule.data import Order, Pass, PassProblem, sender
from hetplan.formulations.joint.schedule.evaluate import Verdict
from hetplan.solvers.constraint_model import ConstraintModel
from hetplan.solvers.model import ModelAnswer, Totals
from hetplan.solvers.run import Run

BYTE_STEPS = 2**30  # the room of a stage in units of bytes


class Variables:
    """The variables of the docstring and the data of a problem."""

    def __init__(self, model: ConstraintModel, problem: PassProblem, least: float) -> None:
        self.model, self.problem, self.least = model, problem, least
        self.total = model.time("total")
        self.begin = {one: model.time(f"begin_{label(one)}") for one in problem.passes}
        self.end = {one: model.time(f"end_{label(one)}") for one in problem.passes}
        self.sent: dict[Pass, IntVar] = {}
        for one in problem.passes:
            if problem.receiver_waits:
                self.sent[one] = self.begin[one]
            elif sender(problem, one) is not None:
                self.sent[one] = model.time(f"sent_{label(one)}")

    def of_stage(self, stage: int) -> list[Pass]:
        """The passes of a stage."""
        return [one for one in self.problem.passes if self.problem.place[one.virtual] == stage]

    def ticks(self, one: Pass) -> int:
        """Ticks of a pass's work on its stage."""
        return self.model.tick(work(self.problem, one))

    @property
    def back(self) -> str:
        """The kind of pass that sends gradients."""
        return self.problem.kinds_of_passes[1]


def label(one: Pass) -> str:
    """A pass in the name of a variable."""
    return f"{one.kind}_{one.virtual}_{one.micro}"


def use_stages_once(v: Variables) -> None:  # (1)
    """Every pass takes the time of its work, and a stage does one pass at a time."""
    for s in range(v.problem.stages):
        v.model.cp.add_no_overlap(
            v.model.cp.new_interval_var(v.begin[one], v.ticks(one), v.end[one], label(one))
            for one in v.of_stage(s)
        )


def send_messages(v: Variables) -> None:  # (2)
    """A message goes from the pass that makes it to the pass that needs it."""
    cp = v.model.cp
    for one in v.problem.passes:
        source = sender(v.problem, one)
        if source is None:
            continue
        cp.add(v.sent[one] >= v.end[source])
        if not v.problem.receiver_waits:
            lasts = v.model.tick(v.problem.message(one).lasts)
            cp.add(v.begin[one] >= v.sent[one] + lasts)


def hold_ports(v: Variables) -> None:  # (3)
    """A port carries one message at a time."""
    held: dict[int, list[IntervalVar]] = defaultdict(list)
    for one in v.problem.passes:
        message = v.problem.message(one)
        for port, share in message.ports:
            ticks = v.model.tick(share * message.seconds)
            name = f"port_{port}_{label(one)}"
            held[port].append(v.model.cp.new_fixed_size_interval_var(v.sent[one], ticks, name))
    for intervals in held.values():
        v.model.cp.add_no_overlap(intervals)


def fit_in_memory(v: Variables) -> None:  # (4)
    """The bytes that a stage keeps at the same time fit in its room."""
    problem, cp = v.problem, v.model.cp
    if problem.room is None or not problem.kept:
        return
    for s, room in enumerate(problem.room):
        unit = max(room, 1.0) / BYTE_STEPS
        intervals: list[IntervalVar] = []
        demands: list[int] = []
        for forward in v.of_stage(s):
            if forward.kind != "F":
                continue
            _, at, m = forward
            back = Pass(v.back, at, m)  # type: ignore[arg-type]
            spans = [(v.begin[forward], v.end[back], problem.bytes_before_backward(at, m))]
            if problem.weight:
                end = v.end[Pass("W", at, m)]
                spans.append((v.end[back], end, problem.bytes_before_weight(at, m)))
            for begin, until, kept in spans:
                length = v.model.time(f"kept_{len(intervals)}_{s}")
                name = f"keeps_{len(intervals)}_{s}"
                intervals.append(cp.new_interval_var(begin, length, until, name))
                demands.append(min(math.floor(kept / unit), BYTE_STEPS + 2))
        cp.add_cumulative(intervals, demands, max(0, math.ceil(room / unit)))


def outlast_passes(v: Variables) -> None:  # (5)
    """The iteration ends after every pass and the work behind the last one."""
    for s in range(v.problem.stages):
        tail = v.model.tick(v.problem.tail(s))
        for one in v.of_stage(s):
            v.model.cp.add(v.total >= v.end[one] + tail)


def keep_micros_in_order(v: Variables) -> None:  # (6)
    """Alike micro-batches pass in their order."""
    problem = v.problem
    for kind in dict.fromkeys(problem.kind(m) for m in range(problem.micros)):
        micros = [m for m in range(problem.micros) if problem.kind(m) == kind]
        for of_pass in problem.kinds_of_passes:
            for at in range(len(problem.place)):
                for m, after in pairwise(micros):
                    earlier, later = Pass(of_pass, at, m), Pass(of_pass, at, after)
                    v.model.cp.add(v.end[earlier] <= v.begin[later])


def take_turns_in_memory(v: Variables) -> None:  # (7)
    """Where K alike micro-batches fit at the same time, the forward pass of micro-batch m + K comes
    after the pass that frees what micro-batch m keeps."""
    problem = v.problem
    if problem.room is None or not problem.kept:
        return
    for at, stage in enumerate(problem.place):
        room = problem.room[stage]
        for kind in dict.fromkeys(problem.kind(m) for m in range(problem.micros)):
            micros = [m for m in range(problem.micros) if problem.kind(m) == kind]
            ends = [(v.back, problem.bytes_before_backward(at, micros[0]))]
            if problem.weight:
                until_weight = problem.bytes_before_weight(at, micros[0])
                ends.append(("W", min(until_weight, ends[0][1])))
            for of_pass, kept in ends:
                if kept <= 0:
                    continue
                together = math.floor(room / kept * (1 + 1e-6))
                for m, after in zip(micros, micros[together:], strict=False):
                    frees = v.end[Pass(of_pass, at, m)]  # type: ignore[arg-type]
                    v.model.cp.add(v.begin[Pass("F", at, after)] >= frees)


def respect_the_bound(v: Variables) -> None:  # (8)
    """The iteration is no shorter than the bound from one stage at a time, less its rounding."""
    ticks = v.model.tick(v.least) - 2 * len(v.problem.passes)
    v.model.cp.add(v.total >= max(0, ticks))


Constraint = Callable[[Variables], None]  # adds one numbered constraint to the model
CONSTRAINTS: tuple[Constraint, ...] = (
    use_stages_once,
    send_messages,
    hold_ports,
    fit_in_memory,
    outlast_passes,
    keep_micros_in_order,
    take_turns_in_memory,
    respect_the_bound,
)


def build(
    problem: PassProblem,
    run: Run,
    most: float,
    least: float | None = None,
    constraints: Sequence[Constraint] = CONSTRAINTS,
) -> Variables:
    """The model and its variables. most: seconds that an order of interest does not exceed. least:
    a lower bound; None: that of `bounds`. constraints: those that the model has."""
    least = lower_bound(problem) if least is None else least
    totals = Totals(least=least, largest=most, roundings=2 * len(problem.passes) + 1, error=1e-7)
    model = ConstraintModel("schedule", run, totals)
    v = Variables(model, problem, least)
    for constrain in constraints:
        model.check()
        constrain(v)
    model.cp.minimize(v.total)
    return v


def hint(v: Variables, order: Order, verdict: Verdict) -> None:
    """Tell CP-SAT a known order, with the ticks at which its passes begin."""
    problem, model = v.problem, v.model
    free = [0] * problem.stages
    port_free: dict[int, int] = defaultdict(int)
    end: dict[Pass, int] = {}
    place = {one: (verdict.begin[one], i) for passes in order for i, one in enumerate(passes)}
    for one in sorted(problem.passes, key=lambda one: (*place[one], rank(problem, one))):
        stage, source = problem.place[one.virtual], sender(problem, one)
        message = problem.message(one)
        sent = 0 if source is None else end[source]
        if problem.receiver_waits:
            sent = max(sent, free[stage])
        sent = max([sent, *(port_free[port] for port, _ in message.ports)])
        for port, share in message.ports:
            port_free[port] = sent + model.tick(share * message.seconds)
        begin = sent
        if not problem.receiver_waits:
            begin = max(free[stage], sent + model.tick(message.lasts))
        end[one] = free[stage] = begin + v.ticks(one)
        model.cp.add_hint(v.begin[one], begin)
        model.cp.add_hint(v.end[one], end[one])
        if source is not None and not problem.receiver_waits:
            model.cp.add_hint(v.sent[one], sent)
    last = max(free[s] + model.tick(problem.tail(s)) for s in range(problem.stages))
    model.cp.add_hint(v.total, last)


def read(v: Variables, answer: ModelAnswer) -> Order:
    """The order of an answer."""

    def key(one: Pass) -> tuple[int, int, int]:
        return answer.value(v.begin[one]), answer.value(v.end[one]), rank(v.problem, one)

    return [sorted(v.of_stage(s), key=key) for s in range(v.problem.stages)]
