"""Problem `poplar` for CP-SAT: groups of equal devices are crews with tables of seconds (`crews`).

ZeRO 0 and 1: the samples of an iteration are divided among the groups.
Sets   k groups; y in 0..G samples.
Data   R_k(y) seconds in which group k takes y samples, a share per device; C; G samples.
Vars   y_k samples of group k;  r_k its ticks;  theta ticks of the slowest group.
Min    theta + C,  s.t.
(1) sum_k y_k = G                                                `add_up_to_the_batch`
(2) (y_k, r_k) is one of the pairs (y, R_k(y))        table      `take_time`
(3) theta = max_k r_k                                 maximum    `wait_for_the_slowest`
(4) theta >= L                                        implied    `last_as_long_as_capacity_asks`
L is the least time within which all devices can take G samples or more. Pairs of more than U
seconds are left out, the time of a known plan.

ZeRO 2 and 3: all devices are one crew, and its steps of equal numbers of samples are counted.
Sets   B in 1..(sum of the largest micro-batches) samples of a step.
Data   a_B = R(B) + C seconds of a step of B samples, a micro-batch per device; G samples.
Vars   n_B >= 0 steps of B samples.
Min    sum_B a_B n_B,  s.t.
(5) sum_B B n_B = G                                              `cover_the_batch`
With the peak rate p = max_B B / a_B a plan takes G / p seconds and, for each of its steps,
a_B - B / p more. Sizes whose one step takes more than U - G / p more are left out.

The tables have the best division of each number of samples among equal devices, so that nothing is
symmetric. The model does not choose among plans of the least time (eq. 4 of the paper).
Source hetplan, for Poplar eq. 1 and Algorithm 2.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from ortools.sat.python.cp_model import IntVar

from hetplan.formulations.poplar.crews import (
    ROUNDING,
    Capacity,
    Check,
    Crew,
    Floats,
    Group,
    all_together,
    crew_of,
    groups_of,
    micro_batch,
    share_seconds,
)
from hetplan.formulations.poplar.data import PoplarData, PoplarDecision, Share, Step
from hetplan.solvers.constraint_model import ConstraintModel
from hetplan.solvers.general import Formulation, PriorResult, constraint_formulation
from hetplan.solvers.model import ModelAnswer, Totals
from hetplan.solvers.run import Outcome, Run, Stop

Read = Callable[[ModelAnswer], PoplarDecision]  # the decision of an answer

NOTHING_FITS = "no device holds even one sample"
# Tables of more additions and comparisons than this take minutes, and those of more seconds for
# single devices fill the memory.
MOST_OPERATIONS = 1e9
MOST_SECONDS = 1e7
TOO_LARGE = "tables too large for CP-SAT's own constraints; the method exact does not need them"


# ZeRO 0 and 1.


@dataclass(frozen=True)
class Groups:
    """The tables of the groups, and bounds on the least time without C."""

    crews: list[Crew]
    lower: float  # L, seconds
    upper: float  # U, seconds


@dataclass(frozen=True)
class GroupVariables:
    """The variables of ZeRO 0 and 1."""

    samples: list[IntVar]  # y_k
    ticks: list[IntVar]  # r_k
    slowest: IntVar  # theta


def tabulate_groups(data: PoplarData, groups: list[Group], check: Check) -> Groups:
    """The crews of the groups for loads within the time of a known plan."""
    total = data.global_batch
    shares = [share_seconds(group.seconds, total, check) for group in groups]
    capacity = Capacity(groups, shares)
    lower = capacity.least_time(total)
    upper = capacity.time_of_a_plan(total, lower)
    crews = []
    for k, group in enumerate(groups):
        of_one = shares[k][: capacity.of_one(k, upper) + 1]
        within = np.where(of_one <= upper, of_one, np.inf)
        crews.append(crew_of(within, len(group.devices), total, check))
    return Groups(crews, lower, upper)


def add_up_to_the_batch(model: ConstraintModel, data: PoplarData, v: GroupVariables) -> None:  # (1)
    """The groups take all samples of an iteration."""
    model.cp.add(sum(v.samples) == data.global_batch)


def take_time(model: ConstraintModel, tables: Groups, v: GroupVariables) -> None:  # (2)
    """A group takes the ticks of its samples."""
    for crew, samples, ticks in zip(tables.crews, v.samples, v.ticks, strict=True):
        useful = np.flatnonzero(crew.seconds <= tables.upper)
        pairs = list(zip(useful.tolist(), model.ticks(crew.seconds[useful]), strict=True))
        model.cp.add_allowed_assignments([samples, ticks], pairs)


def wait_for_the_slowest(model: ConstraintModel, v: GroupVariables) -> None:  # (3)
    """theta is the time of the slowest group."""
    model.cp.add_max_equality(v.slowest, v.ticks)


def last_as_long_as_capacity_asks(
    model: ConstraintModel, tables: Groups, v: GroupVariables
) -> None:  # (4)
    """Implied: in less time the devices cannot take as many samples."""
    model.cp.add(v.slowest >= model.tick(tables.lower))


def build_for_shares(
    data: PoplarData, groups: list[Group], run: Run
) -> tuple[ConstraintModel, Read]:
    """The model of ZeRO 0 and 1, and what reads its answers."""
    tables = tabulate_groups(data, groups, run.check)
    totals = Totals(least=tables.lower, largest=tables.upper, roundings=1, offset=data.comm_seconds)
    model = ConstraintModel("poplar", run, totals)
    samples, ticks = [], []
    for k, crew in enumerate(tables.crews):
        samples.append(model.cp.new_int_var(0, crew.most, f"samples_{k}"))
        ticks.append(model.time(f"ticks_{k}"))
    v = GroupVariables(samples, ticks, model.time("slowest"))
    add_up_to_the_batch(model, data, v)
    take_time(model, tables, v)
    wait_for_the_slowest(model, v)
    last_as_long_as_capacity_asks(model, tables, v)
    model.cp.minimize(v.slowest)

    def read(answer: ModelAnswer) -> PoplarDecision:
        shares = [Share(samples=0, micro_batch=0)] * len(data.devices)
        for group, crew, variable in zip(groups, tables.crews, v.samples, strict=True):
            loads = crew.loads(answer.value(variable))
            for device, load in zip(group.devices, loads, strict=True):
                shares[device] = Share(samples=load, micro_batch=micro_batch(group.seconds, load))
        return PoplarDecision(devices=shares)

    return model, read


# ZeRO 2 and 3.


@dataclass(frozen=True)
class Sizes:
    """The sizes of steps that plans of the least time may have, and bounds on this time."""

    crew: Crew  # all devices, those of a group side by side
    seconds: dict[int, float]  # samples B of a step -> a_B
    lower: float  # G / p, seconds
    upper: float  # U, seconds


def tabulate_steps(data: PoplarData, groups: list[Group], check: Check) -> Sizes:
    """The sizes of steps. The known plan repeats one step and ends with a smaller one."""
    total, crews = data.global_batch, []
    for group in groups:
        of_one = group.seconds[: total + 1]
        crews.append(crew_of(of_one, len(group.devices), total, check))
    crew = all_together(crews, total, check)
    seconds: Floats = crew.seconds + data.comm_seconds
    seconds[0] = 0.0  # no step

    sizes = np.arange(1, len(seconds))
    plans = total // sizes * seconds[sizes] + seconds[total % sizes]
    upper = float(plans.min())
    per_sample = float((seconds[sizes] / sizes).min())  # 1 / p
    lower = total * per_sample * (1 - ROUNDING)
    more = seconds[sizes] - sizes * per_sample  # than at the peak rate
    useful = sizes[more <= upper * (1 + ROUNDING) - lower]
    return Sizes(
        crew=crew,
        seconds=dict(zip(useful.tolist(), seconds[useful].tolist(), strict=True)),
        lower=lower,
        upper=upper,
    )


def cover_the_batch(
    model: ConstraintModel, data: PoplarData, count: dict[int, IntVar]
) -> None:  # (5)
    """The steps take all samples of an iteration."""
    model.cp.add(sum(size * steps for size, steps in count.items()) == data.global_batch)


def build_for_steps(
    data: PoplarData, groups: list[Group], run: Run
) -> tuple[ConstraintModel, Read]:
    """The model of ZeRO 2 and 3, and what reads its answers."""
    tables = tabulate_steps(data, groups, run.check)
    most_steps = math.ceil(tables.upper / min(tables.seconds.values()))
    totals = Totals(least=tables.lower, largest=tables.upper, roundings=most_steps)
    model = ConstraintModel("poplar", run, totals)
    count = {}
    for size in tables.seconds:
        most = min(most_steps, data.global_batch // size)
        count[size] = model.cp.new_int_var(0, most, f"steps_{size}")
    cover_the_batch(model, data, count)
    model.cp.minimize(
        sum(model.tick(tables.seconds[size]) * steps for size, steps in count.items())
    )

    def read(answer: ModelAnswer) -> PoplarDecision:
        devices = [device for group in groups for device in group.devices]
        steps = []
        for size, variable in reversed(count.items()):
            if answer.value(variable) > 0:
                micro_batches = [0] * len(data.devices)
                for device, load in zip(devices, tables.crew.loads(size), strict=True):
                    micro_batches[device] = load
                steps.append(Step(count=answer.value(variable), micro_batches=micro_batches))
        return PoplarDecision(steps=steps)

    return model, read


def too_large(data: PoplarData, groups: list[Group]) -> bool:
    """Whether the tables of an instance take too long or too much memory."""
    total = data.global_batch
    if data.stepwise:
        capacity = sum(len(group.devices) * (group.most) for group in groups)
        return min(total, capacity) ** 2 > MOST_OPERATIONS
    additions = total * sum(len(group.seconds) for group in groups)
    return additions + total**2 > MOST_OPERATIONS or total * len(groups) > MOST_SECONDS


def formulate(data: PoplarData, run: Run) -> Formulation[PoplarDecision] | Outcome[PoplarDecision]:
    """The model of an instance with the bound of peak speeds; the outcome where no sample fits or
    the tables would be too large."""
    groups = groups_of(data)
    if not groups:
        return Outcome(stop=Stop.INFEASIBLE, message=NOTHING_FITS)
    speed = math.fsum(len(group.devices) * group.peak for group in groups)
    bound = (data.global_batch / speed + data.comm_seconds) * (1 - ROUNDING)
    if too_large(data, groups):
        return Outcome(stop=Stop.LIMIT, bound=bound, message=TOO_LARGE)
    build = build_for_steps if data.stepwise else build_for_shares
    return constraint_formulation(
        lambda: build(data, groups, run),
        infeasible="proven by CP-SAT: no loads add up to the batch",
        prior=PriorResult(bound=bound),
    )
