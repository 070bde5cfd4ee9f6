"""Problem `hap` for CP-SAT: triples at positions of a program, stages as intervals that take turns.

Sets   i triples that can help (c the collectives, e the computations among them); p properties;
       s stages: one for each collective, which begins it, and the first one, which none begins;
       k segments; d groups of devices of equal speed and memory, m devices in all.
Data   pre_i, post_i; F_e, S_e FLOP; fixed_c, shared_c seconds; v_d FLOP/s and n_d devices of a
       group; V = sum_d n_d v_d; with memory P_i, A_i bytes and W_d bytes of one device.
       G steps in which ratios are counted.
Vars   used_i in {0,1};  at_i position of triple i in the program;
       gives_ip in {0,1}: i is the first to establish p;  known_p in {0,1};  since_p a position;
       end_s the position at which stage s ends;  inside_es in {0,1}: computation e is in stage s;
       y_kd steps that all devices of group d have together, so that one has the ratio y / (n_d G);
       t_s ticks of computing in stage s;  r_k ticks of collectives for the largest ratio.
Min    sum_s t_s + sum_c fixed_c used_c + sum_k r_k,  s.t.
(1) known_goal; known_p = sum_i gives_ip; gives_ip => used_i              `establish_the_goal`
(2) used_i => known_p for p in pre_i                                      `need_what_is_known`
(3) gives_ip => since_p >= at_i; used_i => at_i > since_p for p in pre_i  `derive_in_order`
(4) used_e = sum_s inside_es; inside_es => used_s, at_s < at_e < end_s    `compute_in_one_stage`
(5) the intervals [at_s, end_s) of used stages do not overlap             `take_turns`
(6) G - D < sum_d y_kd <= G, D the number of groups                       `share_out`
(7) G (t_s - fixed_sd) + G > sum_k shared_skd y_kd for all d    products  `wait_for_the_slowest`
    fixed_sd = sum_e F_e / v_d inside_es, shared_skd = sum_e S_e / (v_d n_d) inside_es
(8) G r_k + G > (sum_c shared_c / n_d used_c) y_kd for all d    products  `pay_for_the_largest`
(9) sum_i P_i used_i + sum_k (sum_i A_i used_i) y_kd / (n_d G) <= W_d     `fit_memory`
(10) used_i => sum_p gives_ip >= 1; known_p => p is the goal or some used_i needs it
                                                             dominance    `waste_nothing`
(11) t_s >= sum_e (m F_e + S_e) / V inside_es                implied      `outlast_the_average`
(12) r_k >= sum_c shared_c / m used_c                        implied      `exceed_the_average`
(13) sum_i (m P_i + A_i) used_i <= sum_d n_d W_d             implied      `fit_all_memory`
(14) the triples of a program that fits with no ratios are not all used   `forbid`
Computations without work fit into any stage, and are not counted as computations e. Devices of one
group have equal ratios, since costs are convex in them. (10) loses nothing: without a triple that
gives nothing new, or nothing that is needed, a program costs no more.

Shares and seconds are rounded down, and the left sides of (7) and (8) up, so that the model prices
no decision too high and its bound holds. The ratios of the program in its answer are optimised
again by a linear programme, so that rounding remains as a gap, of about D / G. A coarse grid is
solved first. It leaves the fine one a short interval for the optimum, without which CP-SAT crawls
through the ratios.
Source HAP, Section 3.2, 4.2, 5.2.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from ortools.sat.python.cp_model import IntVar, LinearExprT

from hetplan.formulations.hap.cp_programs import (
    Known,
    average_seconds,
    first_program,
    least_seconds,
    ratios_only,
    reason_against,
    useful_triples,
)
from hetplan.formulations.hap.data import Communication, Compute, HapData, HapDecision, Triple
from hetplan.formulations.hap.problem import HapProblem, compile_problem
from hetplan.formulations.hap.ratios import best_ratios
from hetplan.solvers.constraint_model import ConstraintModel
from hetplan.solvers.general import Formulation, PriorResult, constraint_formulation, solve_with
from hetplan.solvers.highs import check_native
from hetplan.solvers.model import ModelAnswer, Totals
from hetplan.solvers.run import OPTIMAL_GAP, Outcome, Run, Stop, relative_gap

FIRST = -1  # the number of the stage that no collective begins
# Pairs of a computation and a stage beyond which no model is built: CP-SAT would not get far.
MOST_PAIRS = 30_000
# G of the coarse and of the fine grid, and the largest product of a work and a share.
GRIDS, LARGEST_PRODUCT = (2**12, 2**22), 2.0**58
MEMORY_STEPS = 2.0**26  # whole numbers per memory of a device
MEMORY_TOLERANCE = 1e-9  # the share of a memory by which rounding may exceed it
# Memories of this share of all memory, and smaller ones, have the same unit.
MOST_MEMORIES = 2.0**8
NONE_FITS = "no program fits in memory"
TOO_WIDE = "the theory has too many computations and collectives for this method"


@dataclass(frozen=True)
class Group:
    """The devices of equal speed and memory."""

    speed: float  # FLOP/s of one device
    memory: float  # bytes of one device; 0 without memory
    count: int


@dataclass(frozen=True)
class Theory:
    """The part of an instance that the model is about."""

    data: HapData
    triples: dict[int, Triple]  # triple number -> triple that can help
    groups: list[Group]
    steps: int  # G
    least: float  # seconds, a lower bound on every program
    largest: float  # seconds that the best program does not exceed

    @cached_property
    def computations(self) -> dict[int, Compute]:
        """Triple number -> computation that takes time. Others fit into any stage."""
        return {
            i: t
            for i, t in self.triples.items()
            if isinstance(t, Compute) and (t.fixed_flops or t.shared_flops)
        }

    @cached_property
    def collectives(self) -> dict[int, Communication]:
        """Triple number -> collective."""
        return {i: t for i, t in self.triples.items() if isinstance(t, Communication)}

    @cached_property
    def users(self) -> dict[str, list[int]]:
        """Property that matters, the goal or one that is needed -> the triples that need it."""
        users: dict[str, list[int]] = {self.data.goal: []}
        for i, triple in self.triples.items():
            for p in dict.fromkeys(triple.pre):
                users.setdefault(p, []).append(i)
        return users

    @cached_property
    def gifts(self) -> dict[int, list[str]]:
        """Triple number -> the properties that matter of which it can be the first giver."""
        return {
            i: [p for p in dict.fromkeys(t.post) if p in self.users and p not in t.pre]
            for i, t in self.triples.items()
        }

    @property
    def devices(self) -> int:
        """m."""
        return len(self.data.devices)

    @property
    def memory(self) -> float:
        """Bytes of all devices; 0 without memory."""
        return math.fsum(group.count * group.memory for group in self.groups)

    @property
    def speed(self) -> float:
        """V, FLOP/s of all devices."""
        return math.fsum(device.flops_per_second for device in self.data.devices)


@dataclass(frozen=True)
class Variables:
    """The variables of the docstring, by their indices."""

    used: dict[int, IntVar]
    at: dict[int, IntVar]  # variables of triples, and one of stage FIRST
    end: dict[int, IntVar]
    gives: dict[tuple[int, str], IntVar]
    known: dict[str, IntVar]
    since: dict[str, IntVar]
    inside: dict[tuple[int, int], IntVar]
    share: dict[tuple[int, int], IntVar]
    computing: dict[int, IntVar]
    for_ratio: dict[int, IntVar]


def make_variables(model: ConstraintModel, theory: Theory) -> Variables:
    """The variables of the docstring."""
    cp, segments = model.cp, range(theory.data.segments)
    triples, properties = theory.triples, theory.users
    stages = [FIRST, *theory.collectives]
    groups = range(len(theory.groups))
    number = {p: n for n, p in enumerate(properties)}
    positions = min(len(triples), len(properties)) + 1  # each triple gives a property, by (10)

    def position(name: str) -> IntVar:
        return cp.new_int_var(0, positions, name)

    at = {i: position(f"at_{i}") for i in triples}
    at[FIRST] = cp.new_constant(0)
    return Variables(
        used={i: cp.new_bool_var(f"used_{i}") for i in triples},
        at=at,
        end={s: cp.new_int_var(1, positions + 1, f"end_{s}") for s in stages},
        gives={
            (i, p): cp.new_bool_var(f"gives_{i}_{number[p]}")
            for i, gifts in theory.gifts.items()
            for p in gifts
        },
        known={p: cp.new_bool_var(f"known_{n}") for p, n in number.items()},
        since={p: position(f"since_{n}") for p, n in number.items()},
        inside={
            (e, s): cp.new_bool_var(f"inside_{e}_{s}") for e in theory.computations for s in stages
        },
        share={
            (k, d): cp.new_int_var(0, theory.steps, f"share_{k}_{d}")
            for k in segments
            for d in groups
        },
        computing={s: model.time(f"computing_{s}") for s in stages},
        for_ratio={k: model.time(f"for_ratio_{k}") for k in segments},
    )


def establish_the_goal(model: ConstraintModel, theory: Theory, v: Variables) -> None:  # (1)
    """The goal is known, and each known property has one triple that is the first to give it."""
    model.cp.add(v.known[theory.data.goal] == 1)
    givers: dict[str, list[IntVar]] = {p: [] for p in v.known}
    for (i, p), gives in v.gives.items():
        givers[p].append(gives)
        model.cp.add_implication(gives, v.used[i])
    for p, known in v.known.items():
        model.cp.add(sum(givers[p]) == known)


def need_what_is_known(model: ConstraintModel, theory: Theory, v: Variables) -> None:  # (2)
    """All that a used triple needs becomes known."""
    for i, triple in theory.triples.items():
        for p in triple.pre:
            model.cp.add_implication(v.used[i], v.known[p])


def derive_in_order(model: ConstraintModel, theory: Theory, v: Variables) -> None:  # (3)
    """A property is known from the position of the triple that gives it, and a triple comes after
    all that it needs, so that no derivation is circular."""
    for (i, p), gives in v.gives.items():
        model.cp.add(v.since[p] >= v.at[i]).only_enforce_if(gives)
    for i, triple in theory.triples.items():
        for p in triple.pre:
            model.cp.add(v.at[i] > v.since[p]).only_enforce_if(v.used[i])


def compute_in_one_stage(model: ConstraintModel, theory: Theory, v: Variables) -> None:  # (4)
    """A computation is between the collective that begins its stage and the end of the stage."""
    for e in theory.computations:
        model.cp.add(sum(v.inside[e, s] for s in v.end) == v.used[e])
    for (e, s), inside in v.inside.items():
        model.check()
        if s != FIRST:
            model.cp.add_implication(inside, v.used[s])
            model.cp.add(v.at[s] < v.at[e]).only_enforce_if(inside)
        model.cp.add(v.at[e] < v.end[s]).only_enforce_if(inside)


def take_turns(model: ConstraintModel, theory: Theory, v: Variables) -> None:  # (5)
    """The stages of a program follow each other."""
    cp = model.cp
    stages = [cp.new_interval_var(0, v.end[FIRST], v.end[FIRST], "stage_first")]
    for c in theory.collectives:
        length = cp.new_int_var(1, len(theory.triples) + 1, f"length_{c}")
        stages.append(
            cp.new_optional_interval_var(v.at[c], length, v.end[c], v.used[c], f"stage_{c}")
        )
    cp.add_no_overlap(stages)


def share_out(model: ConstraintModel, theory: Theory, v: Variables) -> None:  # (6)
    """The shares of all groups sum to 1, where each is rounded down by less than a step."""
    G, groups = theory.steps, range(len(theory.groups))
    for k in v.for_ratio:
        total = sum(v.share[k, d] for d in groups)
        model.cp.add_linear_constraint(total, G - len(groups) + 1, G)


def wait_for_the_slowest(model: ConstraintModel, theory: Theory, v: Variables) -> None:  # (7)
    """A stage takes as long as its slowest group computes, less a tick at most."""
    G = theory.steps
    fixed_ticks: dict[int, dict[int, int]] = {}  # group -> computation -> ticks on the group
    shared_ticks: dict[tuple[int, int], dict[int, int]] = {}  # (segment, group) -> likewise
    for d, group in enumerate(theory.groups):
        fixed_ticks[d] = {
            e: model.tick(t.fixed_flops / group.speed)
            for e, t in theory.computations.items()
            if t.fixed_flops
        }
        for k in v.for_ratio:
            shared_ticks[k, d] = {
                e: model.tick(t.shared_flops / (group.speed * group.count))
                for e, t in theory.computations.items()
                if t.shared_flops and t.segment == k
            }
    for s, computing in v.computing.items():
        model.check()
        for d, group in enumerate(theory.groups):
            fixed = model.time(f"fixed_{s}_{d}")
            parts = [ticks * v.inside[e, s] for e, ticks in fixed_ticks[d].items()]
            model.cp.add(fixed == sum(parts))
            products = []
            for k in v.for_ratio:
                # all devices together need no longer than the stage
                most = theory.largest * theory.speed / (group.speed * group.count)
                work = sum(ticks * v.inside[e, s] for e, ticks in shared_ticks[k, d].items())
                name = f"shared_{s}_{k}_{d}"
                products.append(product_of(model, theory, name, work, most, v.share[k, d]))
            model.cp.add(G * (computing - fixed) + G - 1 >= sum(products))


def product_of(
    model: ConstraintModel,
    theory: Theory,
    name: str,
    work: LinearExprT,
    most: float,
    share: IntVar,
) -> IntVar:
    """A variable for the product of some shared work, in ticks, and the share of a group. most:
    seconds that the work does not exceed."""
    largest = (math.ceil(most * model.scale.per_unit), theory.steps)
    longest = theory.steps * (model.most_ticks + 1)
    return model.product(name, (work, share), largest, longest)


def pay_for_the_largest(model: ConstraintModel, theory: Theory, v: Variables) -> None:  # (8)
    """Collectives take their shared seconds times the largest ratio, less a tick at most."""
    G = theory.steps
    for k, for_ratio in v.for_ratio.items():
        for d, group in enumerate(theory.groups):
            # the largest ratio is no smaller than the average one
            most = theory.largest * theory.devices / group.count
            work = sum(
                model.tick(triple.shared_seconds / group.count) * v.used[c]
                for c, triple in theory.collectives.items()
                if triple.segment == k
            )
            name = f"shared_comm_{k}_{d}"
            paid = product_of(model, theory, name, work, most, v.share[k, d])
            model.cp.add(G * for_ratio + G - 1 >= paid)


def fit_memory(model: ConstraintModel, theory: Theory, v: Variables) -> None:  # (9)
    """The bytes of a program fit in the memory of each group."""
    if theory.data.memory is None:
        return
    cp, G, total = model.cp, theory.steps, theory.memory
    for d, group in enumerate(theory.groups):
        unit = max(group.memory, total / MOST_MEMORIES) or 1.0
        room, most = in_steps(group.memory, unit, up=True), in_steps(total, unit, up=True)
        fixed = cp.new_int_var(0, room, f"fixed_bytes_{d}")
        held = [in_steps(t.fixed_bytes, unit) * v.used[i] for i, t in theory.triples.items()]
        cp.add(fixed == sum(held))
        products = []
        for k in v.for_ratio:
            held_by_share = sum(
                in_steps((t.shared_bytes or 0.0) / group.count, unit) * v.used[i]
                for i, t in theory.triples.items()
                if t.segment == k
            )
            factors = (held_by_share, v.share[k, d])
            largest = (most, G)
            products.append(model.product(f"bytes_{k}_{d}", factors, largest, G * room))
        cp.add(sum(products) <= G * (room - fixed))


def in_steps(size: float | None, unit: float, *, up: bool = False) -> int:
    """Bytes as a whole number of parts of `unit` bytes, rounded down; up: a memory, rounded up
    with the tolerance. What exceeds twice all memory is as good as that."""
    steps = min((size or 0.0) / unit, 2 * MOST_MEMORIES) * MEMORY_STEPS
    return math.ceil(steps * (1 + MEMORY_TOLERANCE)) if up else math.floor(steps)


def waste_nothing(model: ConstraintModel, theory: Theory, v: Variables) -> None:  # (10)
    """Dominance: each triple gives something new, each known property is needed."""
    for i, used in v.used.items():
        model.cp.add_bool_or(~used, *(v.gives[i, p] for p in theory.gifts[i]))
    for p, known in v.known.items():
        if p != theory.data.goal:
            model.cp.add_bool_or(~known, *(v.used[i] for i in theory.users[p]))


def outlast_the_average(model: ConstraintModel, theory: Theory, v: Variables) -> None:  # (11)
    """Implied: a stage lasts as long as if the devices shared all its work by speed."""
    average = {
        e: model.tick(average_seconds(theory.data, t)) for e, t in theory.computations.items()
    }
    for s, computing in v.computing.items():
        model.cp.add(computing >= sum(ticks * v.inside[e, s] for e, ticks in average.items()))


def exceed_the_average(model: ConstraintModel, theory: Theory, v: Variables) -> None:  # (12)
    """Implied: the largest ratio is no smaller than the average."""
    for k, for_ratio in v.for_ratio.items():
        shares = [
            model.tick(triple.shared_seconds / theory.devices) * v.used[c]
            for c, triple in theory.collectives.items()
            if triple.segment == k
        ]
        model.cp.add(for_ratio >= sum(shares))


def fit_all_memory(model: ConstraintModel, theory: Theory, v: Variables) -> None:  # (13)
    """Implied: all devices together hold the bytes of a program."""
    if theory.data.memory is None:
        return
    unit = theory.memory or 1.0
    held = []
    for i, triple in theory.triples.items():
        size = theory.devices * (triple.fixed_bytes or 0.0) + (triple.shared_bytes or 0.0)
        held.append(in_steps(size, unit) * v.used[i])
    model.cp.add(sum(held) <= in_steps(theory.memory, unit, up=True))


def forbid(model: ConstraintModel, v: Variables, program: Sequence[int]) -> None:  # (14)
    """Not all triples of a program that no ratios fit in memory are used again."""
    model.cp.add_bool_or(*(~v.used[i] for i in program))


CONSTRAINTS = (
    establish_the_goal,
    need_what_is_known,
    derive_in_order,
    compute_in_one_stage,
    take_turns,
    share_out,
    wait_for_the_slowest,
    pay_for_the_largest,
    fit_memory,
    waste_nothing,
    outlast_the_average,
    exceed_the_average,
    fit_all_memory,
)


def build(
    theory: Theory, unfit: Sequence[Sequence[int]], run: Run
) -> tuple[ConstraintModel, Variables]:
    """The model and its variables. unfit: programs that fit in memory with no ratios."""
    # each triple has two parts, and each stage and segment has a sum, that are rounded down
    roundings = 3 * (len(theory.triples) + 1) + theory.data.segments
    totals = Totals(least=theory.least, largest=theory.largest, roundings=roundings)
    model = ConstraintModel("hap", run, totals)
    theory = replace(theory, steps=affordable_steps(theory, model.most_ticks))
    # the share of a cost that rounding the ratios takes off
    by_shares = len(theory.groups) / theory.steps
    model.totals = replace(totals, error=totals.error + by_shares)
    model.scale = replace(model.scale, under=model.scale.under + by_shares * theory.largest)
    v = make_variables(model, theory)
    for constrain in CONSTRAINTS:
        constrain(model, theory, v)
    for program in unfit:
        forbid(model, v, program)
    fixed = [
        model.tick(triple.fixed_seconds) * v.used[c] for c, triple in theory.collectives.items()
    ]
    cost = sum(v.computing.values()) + sum(v.for_ratio.values()) + sum(fixed)
    model.cp.add_linear_constraint(cost, model.tick(theory.least), model.most_ticks)
    model.cp.minimize(cost)
    return model, v


def affordable_steps(theory: Theory, most_ticks: int) -> int:
    """G: see `theory`, or less where products of a work and a share would be too large."""
    work = max(theory.speed / (group.speed * group.count) for group in theory.groups)
    largest = max(1, most_ticks) * max(work, theory.devices)
    if theory.data.memory is not None:
        largest = max(largest, MOST_MEMORIES * MEMORY_STEPS)
    return int(min(theory.steps, 2.0 ** math.floor(math.log2(LARGEST_PRODUCT / largest))))


@dataclass(frozen=True)
class Search:
    """An instance with what is known of its optimum so far."""

    theory: Theory
    problem: HapProblem  # the instance as arrays, for the linear programme of ratios alone
    known: Known | None
    unfit: list[list[int]]  # programs that fit in memory with no ratios; `read` adds to it


def begin(data: HapData, run: Run) -> Search | Outcome[HapDecision]:
    """The search, or the outcome where the answer follows without one."""
    reason = reason_against(data)
    if reason:
        return Outcome(stop=Stop.INFEASIBLE, message=reason)
    problem = compile_problem(data)
    if data.program is not None:
        return ratios_only(problem, data.program, run)
    least = least_seconds(data)
    known = first_program(data, problem, run)
    if known is not None and known.seconds <= least * (1 + OPTIMAL_GAP):
        return Outcome(stop=Stop.OPTIMAL, decision=known.decision, bound=known.seconds)
    theory = Theory(data, useful_triples(data), groups_of(data), GRIDS[0], least, math.inf)
    if len(theory.computations) * len(theory.collectives) > MOST_PAIRS:
        decision = None if known is None else known.decision
        return Outcome(stop=Stop.LIMIT, decision=decision, bound=least, message=TOO_WIDE)
    # without a known program, no program takes longer than all triples do in turn
    theory = replace(theory, largest=seconds_of_all(theory))
    return Search(theory, problem, known, [])


def groups_of(data: HapData) -> list[Group]:
    """The groups of devices of equal speed and memory."""
    memory = [0.0] * len(data.devices) if data.memory is None else data.memory.device_bytes
    speeds = [device.flops_per_second for device in data.devices]
    counts = Counter(zip(speeds, memory, strict=True))
    return [Group(speed, size, count) for (speed, size), count in counts.items()]


def seconds_of_all(theory: Theory) -> float:
    """Seconds of all triples one after the other, with all work on one of the slowest devices."""
    slowest = min(group.speed for group in theory.groups)
    collectives = sum(t.fixed_seconds + t.shared_seconds for t in theory.collectives.values())
    flops = sum(t.fixed_flops + t.shared_flops for t in theory.computations.values())
    return collectives + flops / slowest


def formulate(search: Search, data: HapData, run: Run) -> Formulation[Known | None]:
    """The model of the programs of an instance that cost no more than the one that is known."""
    known, problem, theory = search.known, search.problem, search.theory
    prior = PriorResult[Known | None](bound=theory.least)
    if known is not None:
        theory = replace(theory, largest=known.seconds)
        prior = replace(prior, decision=known, objective=known.seconds)

    def read(v: Variables, answer: ModelAnswer) -> Known | None:
        program = [i for i, used in v.used.items() if answer.value(used)]
        program.sort(key=lambda i: answer.value(v.at[i]))
        best = best_ratios(problem, problem.cost_of(program), run)
        if best.proven_unfit:
            search.unfit.append(program)
        if not best.fits or (known is not None and known.seconds <= best.seconds):
            return known
        return Known(problem.decision(program, best.ratios), best.seconds)

    def build_model() -> tuple[ConstraintModel, Callable[[ModelAnswer], Known | None]]:
        model, variables = build(theory, search.unfit, run)
        return model, partial(read, variables)

    return constraint_formulation(build_model, infeasible=NONE_FITS, prior=prior)


def solve_by(method: str, data: HapData, run: Run) -> Outcome[HapDecision]:
    """The outcome of CP-SAT on the model, first on a coarse grid and then on a fine one.

    The model is solved again where the program of its answer turns out to fit in memory with no
    ratios: by rounding it seemed to fit.
    """
    check_native(run.options)
    search = begin(data, run)
    if isinstance(search, Outcome):
        return search
    grids = list(GRIDS)
    if run.tap is not None:  # the model that is handed over is the fine one
        grids = grids[-1:]
    build_seconds = 0.0
    while True:
        search = replace(search, theory=replace(search.theory, steps=grids[0]))
        unfit = len(search.unfit)
        outcome = solve_with(method, partial(formulate, search), data, run)
        build_seconds += outcome.build_seconds
        search = improved(search, outcome)
        is_last = len(grids) == 1 and len(search.unfit) == unfit
        if is_last or outcome.stop is not Stop.OPTIMAL or is_proven(search, run):
            return Outcome(
                stop=outcome.stop,
                decision=None if search.known is None else search.known.decision,
                bound=outcome.bound,
                build_seconds=build_seconds,
                solver=outcome.solver,
                message=outcome.message,
                details=outcome.details,
            )
        grids = grids[1:] or grids


def improved(search: Search, outcome: Outcome[Known | None]) -> Search:
    """The search with the bound and the program of an outcome."""
    least = max(search.theory.least, outcome.bound or 0.0)
    theory = replace(search.theory, least=least)
    return replace(search, theory=theory, known=outcome.decision or search.known)


def is_proven(search: Search, run: Run) -> bool:
    """Whether the known program is within the gap asked for of the bound."""
    seconds = None if search.known is None else search.known.seconds
    gap = relative_gap(seconds, search.theory.least)
    return gap is not None and gap <= run.options.gap
