"""Problem `hap` for CP-SAT: triples at positions of a program, stages as intervals that take turns.

Sets   i triples that can help (c the collectives, e the computations among them); p properties;
       s stages: one for each collective, which begins it, and the first one, which none begins;
       k segments; d groups of devices of equal speed and memory, m devices in all.
Data   pre_i, post_i; F_e, S_e FLOP; fixed_c, shared_c seconds; v_d FLOP/s and n_d devices of a
       group; V = sum_d n_d v_d; with memory P_i, A_i bytes and W_d bytes of one device.
       G steps per unit of a ratio.
Vars   used_i in {0,1};  at_i position of triple i in the program;
       gives_ip in {0,1}: i is the first to establish p;  known_p in {0,1};  since_p a position;
       end_s the position at which stage s ends;  inside_es in {0,1}: computation e is in stage s;
       b_kd steps of the ratio of one device of group d;  top_k the largest of them;
       fixed_sd, shared_skd ticks that the stage's work F and S take on group d at ratio 1;
       t_s ticks of computing in stage s;  r_c ticks that collective c takes for the largest ratio.
Min    sum_s t_s + sum_c (fixed_c used_c + r_c),  s.t.
(1) known_goal; known_p = sum_i gives_ip; gives_ip => used_i              `establish_the_goal`
(2) used_i => known_p for p in pre_i                                      `need_what_is_known`
(3) gives_ip => since_p >= at_i; used_i => at_i > since_p for p in pre_i  `derive_in_order`
(4) used_e = sum_s inside_es; inside_es => used_s, at_s < at_e < end_s    `compute_in_one_stage`
(5) the intervals [at_s, end_s) of used stages do not overlap             `take_turns`
(6) G - m < sum_d n_d b_kd <= G                                           `share_out`
(7) top_k = max_d b_kd                                  maximum           `find_the_largest_ratio`
(8) fixed_sd = sum_e F_e / v_d inside_es, shared_skd = sum_e S_e / v_d inside_es `add_up_work`
(9) G (t_s - fixed_sd) + G > sum_k shared_skd b_kd      products          `wait_for_the_slowest`
(10) used_c => G r_c + G > shared_c top_k               under a condition `pay_for_the_largest`
(11) sum_i used_i P_i + sum_k (sum_i used_i A_i) b_kd / G <= W_d products `fit_memory`
(12) used_i => sum_p gives_ip >= 1; known_p => p is the goal or some used_i needs it
                                                        dominance         `waste_nothing`
(13) t_s >= sum_e (m F_e + S_e) / V inside_es, r_c >= shared_c / m used_c
                                                        implied           `outlast_the_average`
(14) with memory  m sum_i used_i P_i + sum_i used_i A_i <= sum_d n_d W_d
                                                        implied           `fit_all_memory`
(15) the triples of a program that fits with no ratios are not all used   `forbid`
Devices of one group have equal ratios, since costs are convex in them. (12) loses nothing: without
a triple that gives nothing new a program costs no more.

Ratios and seconds are rounded down, and (9), (10) round their left sides up, so that the model
prices no decision too high and its bound holds. The ratios of the program in its answer are
optimised again by a linear programme, so that rounding remains as a gap, of about m / G.
Source HAP, Section 3.2, 4.2, 5.2.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from ortools.sat.python.cp_model import IntVar

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
from hetplan.formulations.hap.problem import compile_problem
from hetplan.formulations.hap.ratios import best_ratios
from hetplan.solvers.constraint_model import ConstraintModel
from hetplan.solvers.general import Formulation, PriorResult, solve_with
from hetplan.solvers.highs import check_native
from hetplan.solvers.model import ModelAnswer, Totals
from hetplan.solvers.run import OPTIMAL_GAP, Outcome, Run, Stop

FIRST = -1  # the number of the stage that no collective begins
# Pairs of a computation and a stage beyond which no model is built: CP-SAT would not get far.
MOST_PAIRS = 60_000
# The most steps of a ratio, and the largest product of a work and a ratio that CP-SAT is given.
MOST_STEPS, LARGEST_PRODUCT = 2**24, 2.0**58
MEMORY_STEPS = 2.0**28  # whole numbers per memory of a device
MEMORY_TOLERANCE = 1e-9  # the share of a memory by which rounding may exceed it
# Memories of this share of all memory, and smaller ones, have the same unit.
MOST_MEMORIES = 2.0**10
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

    @property
    def computations(self) -> dict[int, Compute]:
        """Triple number -> computation."""
        return {i: t for i, t in self.triples.items() if isinstance(t, Compute)}

    @property
    def collectives(self) -> dict[int, Communication]:
        """Triple number -> collective."""
        return {i: t for i, t in self.triples.items() if isinstance(t, Communication)}

    @property
    def properties(self) -> list[str]:
        """The properties that matter: those that some triple needs, and the goal."""
        needed = dict.fromkeys(p for t in self.triples.values() for p in t.pre)
        return list({self.data.goal: None} | needed)

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
    at: dict[int, IntVar]  # of triples, and of stage FIRST
    end: dict[int, IntVar]
    gives: dict[tuple[int, str], IntVar]
    known: dict[str, IntVar]
    since: dict[str, IntVar]
    inside: dict[tuple[int, int], IntVar]
    ratio: dict[tuple[int, int], IntVar]
    largest: dict[int, IntVar]
    fixed: dict[tuple[int, int], IntVar]
    shared: dict[tuple[int, int, int], IntVar]
    computing: dict[int, IntVar]
    for_ratio: dict[int, IntVar]


def make_variables(model: ConstraintModel, theory: Theory) -> Variables:
    """The variables of the docstring."""
    cp, segments = model.cp, range(theory.data.segments)
    triples, properties = theory.triples, theory.properties
    collectives = theory.collectives
    stages, groups = [FIRST, *collectives], range(len(theory.groups))
    positions = min(len(triples), len(properties)) + 1  # each triple gives a property, by (12)

    def position(name: str) -> IntVar:
        return cp.new_int_var(0, positions, name)

    def most_work(d: int) -> float:
        """Seconds of the shared work of a stage on one device of group d, at ratio 1."""
        return theory.largest * theory.speed / theory.groups[d].speed

    at = {i: position(f"at_{i}") for i in triples}
    at[FIRST] = cp.new_constant(0)
    return Variables(
        used={i: cp.new_bool_var(f"used_{i}") for i in triples},
        at=at,
        end={s: cp.new_int_var(1, positions + 1, f"end_{s}") for s in stages},
        gives={
            (i, p): cp.new_bool_var(f"gives_{i}_{n}")
            for n, p in enumerate(properties)
            for i, triple in triples.items()
            if p in triple.post and p not in triple.pre
        },
        known={p: cp.new_bool_var(f"known_{n}") for n, p in enumerate(properties)},
        since={p: position(f"since_{n}") for n, p in enumerate(properties)},
        inside={
            (e, s): cp.new_bool_var(f"inside_{e}_{s}") for e in theory.computations for s in stages
        },
        ratio={
            (k, d): cp.new_int_var(0, theory.steps // theory.groups[d].count, f"ratio_{k}_{d}")
            for k in segments
            for d in groups
        },
        largest={k: cp.new_int_var(0, theory.steps, f"largest_{k}") for k in segments},
        fixed={(s, d): model.time(f"fixed_{s}_{d}") for s in stages for d in groups},
        shared={
            (s, k, d): model.time(f"shared_{s}_{k}_{d}", most_work(d))
            for s in stages
            for k in segments
            for d in groups
        },
        computing={s: model.time(f"computing_{s}") for s in stages},
        for_ratio={c: model.time(f"for_ratio_{c}") for c in collectives},
    )


def establish_the_goal(model: ConstraintModel, theory: Theory, v: Variables) -> None:  # (1)
    """The goal is known, and each known property has one triple that is the first to give it."""
    model.cp.add(v.known[theory.data.goal] == 1)
    for p in v.known:
        givers = [v.gives[i, q] for i, q in v.gives if q == p]
        model.cp.add(sum(givers) == v.known[p])
    for (i, _), gives in v.gives.items():
        model.cp.add_implication(gives, v.used[i])


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
    """The ratios of all devices sum to 1, where each is rounded down by less than a step."""
    for k in v.largest:
        total = sum(group.count * v.ratio[k, d] for d, group in enumerate(theory.groups))
        model.cp.add_linear_constraint(total, theory.steps - theory.devices + 1, theory.steps)


def find_the_largest_ratio(model: ConstraintModel, theory: Theory, v: Variables) -> None:  # (7)
    """The largest ratio of each segment."""
    for k, largest in v.largest.items():
        ratios = [v.ratio[k, d] for d in range(len(theory.groups))]
        model.cp.add_max_equality(largest, ratios)


def add_up_work(model: ConstraintModel, theory: Theory, v: Variables) -> None:  # (8)
    """The work of a stage on each group, in ticks at ratio 1."""
    computations = theory.computations
    for s in v.end:
        for d, group in enumerate(theory.groups):
            fixed = sum(
                model.tick(triple.fixed_flops / group.speed) * v.inside[e, s]
                for e, triple in computations.items()
            )
            model.cp.add(v.fixed[s, d] == fixed)
            for k in v.largest:
                shared = sum(
                    model.tick(triple.shared_flops / group.speed) * v.inside[e, s]
                    for e, triple in computations.items()
                    if triple.segment == k
                )
                model.cp.add(v.shared[s, k, d] == shared)


def wait_for_the_slowest(model: ConstraintModel, theory: Theory, v: Variables) -> None:  # (9)
    """A stage takes as long as its slowest group computes, less a tick at most."""
    cp, G = model.cp, theory.steps
    most = G * (model.most_ticks + 1)
    for s, computing in v.computing.items():
        model.check()
        for d in range(len(theory.groups)):
            products = []
            for k in v.largest:
                products.append(cp.new_int_var(0, most, f"product_{s}_{k}_{d}"))
                cp.add_multiplication_equality(products[-1], [v.shared[s, k, d], v.ratio[k, d]])
            cp.add(G * (computing - v.fixed[s, d]) + G - 1 >= sum(products))


def pay_for_the_largest(model: ConstraintModel, theory: Theory, v: Variables) -> None:  # (10)
    """A collective takes its shared seconds times the largest ratio, less a tick at most."""
    G = theory.steps
    for c, triple in theory.collectives.items():
        shared = model.tick(triple.shared_seconds)
        paid = G * v.for_ratio[c] + G - 1 >= shared * v.largest[triple.segment]
        model.cp.add(paid).only_enforce_if(v.used[c])


def fit_memory(model: ConstraintModel, theory: Theory, v: Variables) -> None:  # (11)
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
        for k in v.largest:
            shared = cp.new_int_var(0, most, f"shared_bytes_{k}_{d}")
            held = [
                in_steps(t.shared_bytes, unit) * v.used[i]
                for i, t in theory.triples.items()
                if t.segment == k
            ]
            cp.add(shared == sum(held))
            products.append(cp.new_int_var(0, G * room, f"bytes_{k}_{d}"))
            cp.add_multiplication_equality(products[-1], [shared, v.ratio[k, d]])
        cp.add(sum(products) <= G * (room - fixed))


def in_steps(size: float | None, unit: float, *, up: bool = False) -> int:
    """Bytes as a whole number of parts of `unit` bytes, rounded down; up: a memory, rounded up
    with the tolerance. What exceeds twice all memory is as good as that."""
    steps = min((size or 0.0) / unit, 2 * MOST_MEMORIES) * MEMORY_STEPS
    return math.ceil(steps * (1 + MEMORY_TOLERANCE)) if up else math.floor(steps)


def waste_nothing(model: ConstraintModel, theory: Theory, v: Variables) -> None:  # (12)
    """Dominance: each triple gives something new, each known property is needed."""
    for i, used in v.used.items():
        model.cp.add_bool_or(~used, *(v.gives[j, p] for j, p in v.gives if j == i))
    for p, known in v.known.items():
        if p != theory.data.goal:
            users = [v.used[i] for i, triple in theory.triples.items() if p in triple.pre]
            model.cp.add_bool_or(~known, *users)


def outlast_the_average(model: ConstraintModel, theory: Theory, v: Variables) -> None:  # (13)
    """Implied: a stage lasts as long as if the devices shared all its work by speed, and the
    largest ratio is no smaller than the average."""
    for s, computing in v.computing.items():
        shares = [
            model.tick(average_seconds(theory.data, triple)) * v.inside[e, s]
            for e, triple in theory.computations.items()
        ]
        model.cp.add(computing >= sum(shares))
    for c, triple in theory.collectives.items():
        average = model.tick(triple.shared_seconds / theory.devices)
        model.cp.add(v.for_ratio[c] >= average * v.used[c])


def fit_all_memory(model: ConstraintModel, theory: Theory, v: Variables) -> None:  # (14)
    """Implied: all devices together hold the bytes of a program."""
    if theory.data.memory is None:
        return
    unit = theory.memory or 1.0
    held = []
    for i, triple in theory.triples.items():
        size = theory.devices * (triple.fixed_bytes or 0.0) + (triple.shared_bytes or 0.0)
        held.append(in_steps(size, unit) * v.used[i])
    model.cp.add(sum(held) <= in_steps(theory.memory, unit, up=True))


def forbid(model: ConstraintModel, v: Variables, program: Sequence[int]) -> None:  # (15)
    """Not all triples of a program that no ratios fit in memory are used again."""
    model.cp.add_bool_or(*(~v.used[i] for i in program))


CONSTRAINTS = (
    establish_the_goal,
    need_what_is_known,
    derive_in_order,
    compute_in_one_stage,
    take_turns,
    share_out,
    find_the_largest_ratio,
    add_up_work,
    wait_for_the_slowest,
    pay_for_the_largest,
    fit_memory,
    waste_nothing,
    outlast_the_average,
    fit_all_memory,
)


def theory_of(data: HapData, least: float, known: Known | None) -> Theory:
    """The part of an instance that the model is about.

    least: seconds, a lower bound on every program. known: a program that fits in memory. Without
    one, no program takes longer than all triples on the slowest device with all of the work.
    """
    triples = useful_triples(data)
    memory = [0.0] * len(data.devices) if data.memory is None else data.memory.device_bytes
    speeds = [device.flops_per_second for device in data.devices]
    counts = Counter(zip(speeds, memory, strict=True))
    groups = [Group(speed, size, count) for (speed, size), count in counts.items()]
    if known is not None:
        largest = known.seconds
    else:
        largest = math.fsum(most_seconds(triple, min(speeds)) for triple in triples.values())
    return Theory(data, triples, groups, MOST_STEPS, least, largest)


def most_seconds(triple: Triple, speed: float) -> float:
    """Seconds of a triple on a device of some speed that has all of the work."""
    if isinstance(triple, Communication):
        return triple.fixed_seconds + triple.shared_seconds
    return (triple.fixed_flops + triple.shared_flops) / speed


def build(
    theory: Theory, unfit: Sequence[Sequence[int]], run: Run
) -> tuple[ConstraintModel, Variables]:
    """The model and its variables. unfit: programs that fit in memory with no ratios."""
    # A triple has a fixed and a shared part that are rounded down, and (9) or (10) rounds their sum.
    roundings = 3 * (len(theory.triples) + 1)
    totals = Totals(least=theory.least, largest=theory.largest, roundings=roundings)
    model = ConstraintModel("hap", run, totals)
    theory = replace(theory, steps=steps_of_a_ratio(theory, model.most_ticks))
    # all ratios together are rounded down by less than m / G
    by_ratios = theory.largest * theory.devices / theory.steps
    model.scale = replace(model.scale, under=model.scale.under + by_ratios)
    v = make_variables(model, theory)
    for constrain in CONSTRAINTS:
        constrain(model, theory, v)
    for program in unfit:
        forbid(model, v, program)
    seconds = sum(
        model.tick(triple.fixed_seconds) * v.used[c] + v.for_ratio[c]
        for c, triple in theory.collectives.items()
    )
    cost = sum(v.computing.values()) + seconds
    model.cp.add(cost <= model.most_ticks)
    model.cp.minimize(cost)
    return model, v


def steps_of_a_ratio(theory: Theory, most_ticks: int) -> int:
    """G, the largest power of two up to MOST_STEPS that keeps products of work and ratio small.

    The shared work of a stage takes the time of all devices together, `theory.largest` at most.
    """
    largest_work = max(theory.speed / (group.speed * group.count) for group in theory.groups)
    most = LARGEST_PRODUCT / (max(1, most_ticks) * largest_work)
    if theory.data.memory is not None:
        most = min(most, LARGEST_PRODUCT / (MOST_MEMORIES * MEMORY_STEPS))
    return int(min(MOST_STEPS, 2.0 ** math.floor(math.log2(most))))


def formulate(
    unfit: list[list[int]], data: HapData, run: Run
) -> Formulation[HapDecision | None] | Outcome[HapDecision | None]:
    """The model of an instance, or the outcome where the answer follows without it.

    unfit: programs that fit in memory with no ratios. `read` adds the program of an answer that
    turns out to be one, and returns the decision that was known before.
    """
    reason = reason_against(data)
    if reason:
        return Outcome(stop=Stop.INFEASIBLE, message=reason)
    problem = compile_problem(data)  # for the linear programme of ratios alone
    if data.program is not None:
        return ratios_only(problem, data.program, run)
    bound = least_seconds(data)
    known = first_program(data, problem, run)
    if known is not None and known.seconds <= bound * (1 + OPTIMAL_GAP):
        return Outcome(stop=Stop.OPTIMAL, decision=known.decision, bound=min(bound, known.seconds))
    theory = theory_of(data, bound, known)
    prior = PriorResult[HapDecision | None](bound=bound)
    if known is not None:
        prior = replace(prior, decision=known.decision, objective=known.seconds)
    pairs = len(theory.computations) * len(theory.collectives)
    if pairs > MOST_PAIRS:
        return Outcome(
            stop=Stop.LIMIT, decision=prior.decision, bound=bound, message=TOO_WIDE
        )
    made: list[Variables] = []  # by `build`, for `read`

    def build_model() -> ConstraintModel:
        model, variables = build(theory, unfit, run)
        made.append(variables)
        return model

    def read(answer: ModelAnswer) -> HapDecision | None:
        v = made[-1]
        program = [i for i, used in v.used.items() if answer.value(used)]
        program.sort(key=lambda i: answer.value(v.at[i]))
        priced = best_ratios(problem, problem.cost_of(program), run)
        if priced.proven_unfit:
            unfit.append(program)
        if not priced.fits or (known is not None and known.seconds < priced.seconds):
            return prior.decision
        return problem.decision(program, priced.ratios)

    return Formulation(build=build_model, read=read, infeasible=NONE_FITS, prior=prior)


def solve_by(method: str, data: HapData, run: Run) -> Outcome[HapDecision | None]:
    """The outcome of CP-SAT on the model. It is solved again as long as the program of its answer
    turns out to fit in memory with no ratios: by rounding it seemed to fit."""
    check_native(run.options)
    unfit: list[list[int]] = []
    while True:
        before = len(unfit)
        outcome = solve_with(method, partial(formulate, unfit), data, run)
        if len(unfit) == before or outcome.stop is not Stop.OPTIMAL:
            return outcome
