"""Lower bounds on the seconds of any order, from one stage at a time.

A stage does all its passes one after the other. Where receivers wait, the message of a pass keeps
its stage busy, too, and counts as a part of the pass's work. Every pass has a head and a tail, the
seconds of the longest chains of passes and messages before it and behind it: the stage does not
begin with the pass before its head is over, and the iteration does not end before the tail of the
pass has followed it. So a stage is one machine whose jobs have heads and tails. Its least end is
that of a machine which may interrupt a job at no cost, and which always works on the ready job with
the longest tail. Source: Carlier 1982, "The one-machine sequencing problem" (Jackson's preemptive
schedule).
"""

import heapq

from hetplan.formulations.joint.schedule.data import Pass, PassProblem, sender


def heads_and_tails(problem: PassProblem) -> tuple[dict[Pass, float], dict[Pass, float]]:
    """(head, tail) of every pass. The head is the least seconds before its stage begins with the
    `work` of the pass, the tail the least seconds between the end of the pass and that of the
    iteration."""
    head: dict[Pass, float] = {}
    tail = {one: problem.tail(problem.place[one.virtual]) for one in problem.passes}
    in_order = sorted(problem.passes, key=lambda one: rank(problem, one))
    for one in in_order:
        source = sender(problem, one)
        head[one] = 0.0 if source is None else head[source] + work(problem, source)
        if source is not None and not problem.receiver_waits:
            head[one] += problem.message(one).lasts
    for one in reversed(in_order):
        source = sender(problem, one)
        if source is not None:
            way = problem.message(one).lasts + problem.seconds(one) + tail[one]
            tail[source] = max(tail[source], way)
    return head, tail


def rank(problem: PassProblem, one: Pass) -> int:
    """The place of a pass on the way of its micro-batch through the pipeline."""
    V = len(problem.place)
    if one.kind == "F":
        return one.virtual
    if one.kind == "W":
        return 2 * V
    return 2 * V - 1 - one.virtual


def work(problem: PassProblem, one: Pass) -> float:
    """Seconds for which a pass keeps its stage from other passes: those of the pass itself, and,
    where receivers wait, those of the message that it needs."""
    waiting = problem.message(one).lasts if problem.receiver_waits else 0.0
    return waiting + problem.seconds(one)


def lower_bound(problem: PassProblem) -> float:
    """Seconds that no order is below."""
    head, tail = heads_and_tails(problem)
    bound = 0.0
    for s in range(problem.stages):
        of_stage = [one for one in problem.passes if problem.place[one.virtual] == s]
        jobs = [(head[one], work(problem, one), tail[one]) for one in of_stage]
        bound = max(bound, one_machine(jobs))
    return bound


def one_machine(jobs: list[tuple[float, float, float]]) -> float:
    """The least end of jobs (head, work, tail) on one machine that may interrupt them."""
    waiting = sorted(jobs)
    ready: list[tuple[float, float]] = []  # (-tail, work that is left), the longest tail first
    moment = end = 0.0
    i = 0
    while i < len(waiting) or ready:
        if not ready:
            moment = max(moment, waiting[i][0])
        while i < len(waiting) and waiting[i][0] <= moment:
            heapq.heappush(ready, (-waiting[i][2], waiting[i][1]))
            i += 1
        minus_tail, left = heapq.heappop(ready)
        if i < len(waiting) and moment + left > waiting[i][0]:  # another job interrupts it
            left -= waiting[i][0] - moment
            moment = waiting[i][0]
            heapq.heappush(ready, (minus_tail, left))
            continue
        moment += left
        end = max(end, moment - minus_tail)
    return end
