"""Facts about an instance that module `cp` has without a search: why there is no program, a lower
bound on every program, and a first program.

All of it comes from cheapest derivations: each property is derived by the triple that does so at
the least price. The preconditions of a triple cost their sum or their maximum. With the maximum,
the cost of the goal is the cost of a chain of triples that no program can do without.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from hetplan.formulations.hap.data import Communication, HapData, HapDecision, Triple
from hetplan.formulations.hap.problem import HapProblem
from hetplan.formulations.hap.ratios import best_ratios
from hetplan.solvers.run import OPTIMAL_GAP, Outcome, Run, Stop, stop_reason

Price = Callable[[Triple], float]
Combine = Callable[[Iterable[float]], float]
NO_RATIOS = "no ratios fit the given program in memory"
# What all memory together costs in the derivations that are tried, in multiples of the cheapest
# program.
PRICES_OF_MEMORY = (0.0, 1.0, 10.0, 1000.0)
ROUNDING = 1e-12  # of sums of thousands of terms, as a share


@dataclass(frozen=True)
class Derivations:
    """The cheapest derivation of each property that can be derived, for given prices of triples."""

    # the triples that can apply; each stands behind the triples that give its preconditions
    order: list[int]
    cost: dict[str, float]  # property -> cost of its cheapest derivation
    giver: dict[str, int]  # property -> the triple that gives it at that cost


def derive(data: HapData, price: Price, combine: Combine) -> Derivations:
    """The cheapest derivations, where `combine` adds up the costs of a triple's preconditions.

    Triples are taken from a queue in the order of their costs, as in Dijkstra's algorithm.
    """
    found = Derivations([], {}, {})
    missing = [set(triple.pre) for triple in data.triples]
    users: dict[str, list[int]] = {}
    for i, properties in enumerate(missing):
        for p in properties:
            users.setdefault(p, []).append(i)
    queue = [(price(data.triples[i]), i) for i, properties in enumerate(missing) if not properties]
    heapq.heapify(queue)
    while queue:
        cost, i = heapq.heappop(queue)
        found.order.append(i)
        for p in data.triples[i].post:
            if p in found.cost:
                continue
            found.cost[p], found.giver[p] = cost, i
            for j in users.get(p, ()):
                missing[j].remove(p)
                if not missing[j]:
                    before = combine(found.cost[q] for q in data.triples[j].pre)
                    heapq.heappush(queue, (before + price(data.triples[j]), j))
    return found


def dearest(costs: Iterable[float]) -> float:
    """The largest of some costs; 0 where there are none."""
    return max(costs, default=0.0)


def average_seconds(data: HapData, triple: Triple) -> float:
    """A triple's seconds in a mean over devices, a lower bound on its share of any program.

    Devices count by their speed. Ratios sum to 1, so that the largest is no smaller than the mean.
    """
    devices = len(data.devices)
    if isinstance(triple, Communication):
        return triple.fixed_seconds + triple.shared_seconds / devices
    speed = math.fsum(device.flops_per_second for device in data.devices)
    return (devices * triple.fixed_flops + triple.shared_flops) / speed


def least_seconds(data: HapData) -> float:
    """A lower bound in seconds of every program."""
    found = derive(data, lambda triple: average_seconds(data, triple), dearest)
    return found.cost[data.goal] * (1 - ROUNDING)


def useful_triples(data: HapData) -> dict[int, Triple]:
    """Triple number -> triple, for the triples that can apply and can help to derive the goal."""
    applicable = set(derive(data, lambda triple: 0.0, dearest).order)
    givers: dict[str, list[int]] = {}
    for i in applicable:
        for p in data.triples[i].post:
            givers.setdefault(p, []).append(i)
    useful: set[int] = set()
    wanted = [data.goal]
    while wanted:
        for i in givers.get(wanted.pop(), ()):
            if i not in useful:
                useful.add(i)
                wanted += data.triples[i].pre
    return {i: data.triples[i] for i in sorted(useful)}


@dataclass(frozen=True)
class Known:
    """A program that fits in memory, with its best ratios."""

    decision: HapDecision
    seconds: float


def first_program(data: HapData, problem: HapProblem, run: Run) -> Known | None:
    """The fastest of some cheapest derivations; None where none of them fits in memory."""
    room = math.fsum(data.memory.device_bytes) if data.memory is not None else 0.0
    cheapest = derive(data, lambda triple: average_seconds(data, triple), sum).cost[data.goal]
    best: Known | None = None
    for multiple, combine in product(PRICES_OF_MEMORY if room > 0 else (0.0,), (sum, dearest)):
        per_byte = multiple * cheapest / room if room > 0 else 0.0

        def price(triple: Triple, per_byte: float = per_byte) -> float:
            held = len(data.devices) * (triple.fixed_bytes or 0.0) + (triple.shared_bytes or 0.0)
            return average_seconds(data, triple) + per_byte * held

        program = goal_program(data, derive(data, price, combine))
        ratios = best_ratios(problem, problem.cost_of(program), run)
        if ratios.fits and (best is None or ratios.seconds < best.seconds):
            best = Known(problem.decision(program, ratios.ratios), ratios.seconds)
        if best is not None and run.should_stop:
            break
    return best


def goal_program(data: HapData, found: Derivations) -> list[int]:
    """The triples of the derivation of the goal, in order."""
    chosen: set[int] = set()
    wanted = [data.goal]
    while wanted:
        i = found.giver[wanted.pop()]
        if i not in chosen:
            chosen.add(i)
            wanted += data.triples[i].pre
    return [i for i in found.order if i in chosen]


def reason_against(data: HapData) -> str:
    """Why there is no program, whatever the memory; "" where there is one."""
    if data.program is not None:
        return reason_against_program(data, data.program)
    known = derive(data, lambda triple: 0.0, dearest).cost
    if data.goal in known:
        return ""
    givers = [triple for triple in data.triples if data.goal in triple.post]
    if not givers:
        return f"no triple establishes the goal {data.goal!r}"
    missing = next(p for p in givers[0].pre if p not in known)
    return (
        f"the goal {data.goal!r} cannot be derived: {givers[0].instruction} needs {missing!r}, "
        "which no applicable triple establishes"
    )


def reason_against_program(data: HapData, program: Sequence[int]) -> str:
    """The first fault of a program; "" where it has none."""
    known: set[str] = set()
    used: set[int] = set()
    for position, i in enumerate(program):
        if i in used:
            return f"program[{position}] repeats triple {i}"
        missing = [p for p in data.triples[i].pre if p not in known]
        if missing:
            return f"program[{position}] needs {missing[0]!r}, which nothing before it gives"
        known.update(data.triples[i].post)
        used.add(i)
    return "" if data.goal in known else f"the program does not establish the goal {data.goal!r}"


def ratios_only(problem: HapProblem, program: Sequence[int], run: Run) -> Outcome[HapDecision]:
    """The outcome of a given program: its best ratios, a linear programme."""
    best = best_ratios(problem, problem.cost_of(program), run)
    if best.proven_unfit:
        return Outcome(stop=Stop.INFEASIBLE, message=NO_RATIOS)
    if not best.fits:
        return Outcome(stop=stop_reason(run), message="no ratios found that fit")
    proven = best.bound is not None and best.bound >= best.seconds * (1 - OPTIMAL_GAP)
    return Outcome(
        stop=Stop.OPTIMAL if proven else stop_reason(run),
        decision=problem.decision(program, best.ratios),
        bound=best.bound,
    )
