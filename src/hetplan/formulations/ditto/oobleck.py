"""Method `oobleck`: divide and conquer over layers, stages and device vectors. Ditto's algorithms
(`paper`) use the parts of this module, too.

A state (S, u, v, x) stands for the layers [u, v) in S stages on exactly the devices x, a vector by
kind. It is split into (s, u, k, x') and (S - s, k, v, x - x') for all s, k and x', and keeps the
template of least T = T1 + T2 + T3. T does not decompose, because T2 and T3 depend on the place of
the slowest stage of the whole template. So the method is not optimal in general. All devices are
used, as printed. Of equally slow stages the first counts as the slowest, as in the objective.
Intervals [u, v) with the same layers have the same templates. They form a class, and states are
computed once per class, which saves time and changes no template.

Folding replaces each device by a number of devices of the weakest type (Ditto, Section 5.3). The
virtual cluster has these devices, and Oobleck's divide and conquer makes templates for it (Ditto,
Sections 4 and 6).

Source: Ditto, Section 3, eq. 1-3, its exhaustive baseline; Oobleck (SOSP 2023), Section 4.1.2.
"""

import bisect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from hetplan.compiled import kernel
from hetplan.errors import UnsupportedError, require
from hetplan.formulations.ditto.data import DeviceType, DittoData, DittoDecision
from hetplan.formulations.ditto.problem import (
    TIE,
    DittoProblem,
    Floats,
    Ints,
    Stages,
    compile_problem,
    infeasible_because,
)
from hetplan.solvers.run import Outcome, Run, Stop, Stopped, stop_reason

# Seconds that a pair of states counts towards the budget of a run.
STATE_SECONDS = 1e-4


class NoTemplate(Exception):
    """An algorithm has no template; the text says why."""


@dataclass(frozen=True)
class Template:
    """The result of an algorithm."""

    stages: Stages
    message: str = ""  # message for the outcome
    details: Mapping[str, object] = field(default_factory=dict)  # details for the outcome
    stop: Stop = Stop.DONE  # a limit, where more time might give a better template


def conclude(
    data: DittoData, run: Run, algorithm: Callable[[DittoProblem], Template]
) -> Outcome[DittoDecision]:
    """The outcome of an algorithm.

    It has no decision where the template breaks a constraint that Ditto and Oobleck ignore: memory,
    or the number of micro-batches. The algorithm may raise `NoTemplate`, and `Stopped` where the
    run should stop. Without a template the stop is `done`, because an algorithm proves nothing.
    """
    problem = compile_problem(data)
    try:
        reason = infeasible_because(problem)
        if reason is not None:
            raise NoTemplate(reason)
        template = algorithm(problem)
        if len(template.stages) > problem.micro_batches:
            count = f"{len(template.stages)} stages for {problem.micro_batches} micro-batches"
            raise NoTemplate(f"the template found has {count}")
        if not problem.fits(template.stages):
            raise NoTemplate(
                "the template found does not fit in memory, which the algorithm ignores"
            )
    except NoTemplate as why:
        return Outcome(stop=Stop.DONE, message=str(why))
    except Stopped:
        return Outcome(stop=stop_reason(run), message="out of time")
    return Outcome(
        stop=template.stop,
        decision=problem.decision(template.stages),
        message=template.message,
        details=template.details,
    )


@dataclass(frozen=True)
class Folding:
    """Devices of each type as numbers of virtual devices, which are devices of the weakest type."""

    weakest: DeviceType  # the type on which the whole model takes longest
    factors: Mapping[str, int]  # type -> d_i, virtual devices per device; only types with nodes
    # n = sum_i n_i d_i, the nodes of the virtual cluster, each of M virtual devices (eq. 5)
    nodes: int

    @property
    def devices(self) -> int:
        """The number of devices of the virtual cluster."""
        return self.nodes * self.weakest.devices_per_node


def fold(data: DittoData, *, communication: bool = False) -> Folding:
    """The folding of a cluster.

    A type's total is the time of the whole model on one of its devices. Without communication, d_i
    = round(weakest type's total / total), halves rounded up (Section 5.3.1). With it, d_i is the d
    from 1 to that number whose p(d), see `virtual_seconds`, is closest to the total (Section
    5.3.2). Raises NoTemplate where a type's total is 0 and the weakest type's is not, so that there
    is no ratio, and where the ratio is beyond 1e9, of which no table could be made.
    """
    present = [kind for kind in data.device_types if kind.nodes]
    weakest = max(present, key=total_seconds)
    most = total_seconds(weakest)
    factors = {}
    for kind in present:
        total = total_seconds(kind)
        if total <= 0 < most or (total > 0 and most / total > 1e9):
            raise NoTemplate("no folding: a device type computes the model in no time")
        factor = math.floor(most / total + 0.5) if total > 0 else 1
        if communication:
            factor = closest_factor(weakest, factor, total)
        factors[kind.name] = factor
    nodes = sum(kind.nodes * factors[kind.name] for kind in present)
    return Folding(weakest, factors, nodes)


def closest_factor(weakest: DeviceType, most: int, total: float) -> int:
    """The d from 1 to `most` whose p(d) is closest to `total`, the least of several.

    The d that have d mod M in common have p(d) = a + b / d, which only rises or only falls with d.
    So the closest one of them is the first, the last, or beside the place where p(d) crosses
    `total`, which bisection finds.
    """
    size = weakest.devices_per_node
    candidates = set()
    for first in range(1, min(size, most) + 1):
        alike = range(first, most + 1, size)
        rises = virtual_seconds(weakest, alike[-1]) > virtual_seconds(weakest, first)
        crossing = bisect.bisect_left(
            alike, True, key=lambda d: (virtual_seconds(weakest, d) >= total) == rises
        )
        candidates |= {first, alike[-1], *alike[max(0, crossing - 1) : crossing + 1]}
    closest: int = min(candidates, key=lambda d: (abs(virtual_seconds(weakest, d) - total), d))
    return closest


def total_seconds(kind: DeviceType) -> float:
    """Seconds of the whole model's forward and backward on one device: sum_l c_i(l)."""
    return math.fsum(kind.forward_seconds) + math.fsum(kind.backward_seconds)


def virtual_seconds(weakest: DeviceType, d: int) -> float:
    """Seconds of the whole model on d weakest devices: p(d) = total / d + c_in(d).

    The devices are n' full nodes and one node of d' devices. c_in is the mean of their all-reduces,
    weighted by devices. c_across is left out, because Oobleck's profile, and so the instance, has
    no transfers between nodes. An all-reduce of d' devices is taken as one of the next power of
    two, because the profile has no others; it is at most M, which is a power of two and above d'.
    """
    layers = len(weakest.forward_seconds)
    size = weakest.devices_per_node
    full_nodes, rest = divmod(d, size)
    inside = rest / d * layers * mean_allreduce(weakest, rest)
    if full_nodes:
        inside += full_nodes * size / d * layers * mean_allreduce(weakest, size)
    return total_seconds(weakest) / d + inside


def next_power_of_two(count: int) -> int:
    """The least power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def mean_allreduce(kind: DeviceType, devices: int) -> float:
    """Mean seconds of one all-reduce of a layer on `devices` devices, l_c.in[d]; 0 for fewer than
    two devices."""
    if devices < 2:
        return 0.0
    row = kind.allreduce_seconds[str(next_power_of_two(devices))]
    return math.fsum(row) / len(row)


def virtual_cluster(data: DittoData, folding: Folding) -> DittoData:
    """The instance of the virtual cluster: n nodes of M weakest devices. Memory is left out, as
    Ditto and Oobleck do."""
    kind = folding.weakest.model_copy(update={"nodes": folding.nodes})
    return DittoData(micro_batches=data.micro_batches, device_types=[kind])


def single_devices(data: DittoData, folding: Folding) -> DittoData:
    """The instance of the virtual devices without nodes, in which every stage has one device."""
    weakest = folding.weakest
    kind = DeviceType(
        name=weakest.name,
        nodes=folding.devices,
        devices_per_node=1,
        forward_seconds=weakest.forward_seconds,
        backward_seconds=weakest.backward_seconds,
    )
    # Oobleck refuses more stages than micro-batches. Virtual stages are merged afterwards, so that
    # enough micro-batches are given.
    return DittoData(micro_batches=max(data.micro_batches, kind.nodes), device_types=[kind])


MOST_BYTES = 3 * 2**29  # of the table of states
BYTES_PER_STATE = 4 * 8 + 4 * 8  # of `seconds` and of `left_part`
# Columns of `seconds`, a state's record in seconds: T, T1, the slowest stage's time, T3.
TOTAL, FIRST, SLOWEST, LAST = range(4)
# Columns of `left_part`, a state's record in whole numbers: the place of the slowest stage, and the
# vector, the stages and the layers of the left part into which the state is split.
PLACE, VECTOR, STAGES, LAYERS = range(4)


@kernel
def divide(
    x: int, parts: Ints, fewest: Ints, most: Ints, members: Ints, interval: Ints,
    micro_batches: int, seconds: Floats, left_part: Ints,
) -> None:  # fmt: skip
    """Fill the records of the states of vector x, from those of smaller vectors.

    The records of single stages are there already. A vector is given by its number. parts: the
    vectors, except 0 and x itself, that have no more devices of any kind than x. fewest, most: [X]
    the fewest and the most stages that use all devices of a vector. members: [C, 2] an interval of
    each class. interval: [L + 1, L + 1] the class of each interval. seconds, left_part: [X, S + 1,
    C, 4] the records.
    """
    for y in parts:
        z = x - y  # numbers are linear in the devices, and subtract as the vectors do
        for stages in range(max(2, fewest[x]), min(most[x], seconds.shape[1] - 1) + 1):
            for s in range(max(fewest[y], stages - most[z]), min(most[y], stages - fewest[z]) + 1):
                r = stages - s
                for c in range(len(members)):
                    begin, end = members[c, 0], members[c, 1]
                    for cut in range(begin + s, end - r + 1):
                        a, b = interval[begin, cut], interval[cut, end]
                        left, right = seconds[y, s, a, SLOWEST], seconds[z, r, b, SLOWEST]
                        if left >= right * (1 - TIE):  # of equally slow stages the first counts
                            place, slowest = left_part[y, s, a, PLACE], left
                            last = seconds[y, s, a, LAST] + seconds[z, r, b, FIRST]
                        else:
                            place, slowest = s + left_part[z, r, b, PLACE], right
                            last = seconds[z, r, b, LAST]
                        work = seconds[y, s, a, FIRST] + seconds[z, r, b, FIRST]
                        total = work + (micro_batches - stages + place - 1) * slowest + last
                        if total < seconds[x, stages, c, TOTAL]:
                            seconds[x, stages, c, TOTAL] = total
                            seconds[x, stages, c, FIRST] = work
                            seconds[x, stages, c, SLOWEST] = slowest
                            seconds[x, stages, c, LAST] = last
                            left_part[x, stages, c, PLACE] = place
                            left_part[x, stages, c, VECTOR] = y
                            left_part[x, stages, c, STAGES] = s
                            left_part[x, stages, c, LAYERS] = cut - begin


def solve(data: DittoData, run: Run) -> Outcome[DittoDecision]:
    """The template of least T among the states (S, all layers, all devices)."""
    return conclude(data, run, lambda problem: cheapest(problem, run))


def cheapest(problem: DittoProblem, run: Run) -> Template:
    """The template of least T in the table of states."""
    division = Division(problem, run)
    ranked = division.ranked()
    if not ranked:
        raise NoTemplate("no template uses all devices: too few layers or micro-batches")
    return Template(division.template(ranked[0][1]), details={"states": division.states})


class Division:
    """The table of all states of a problem.

    Making it raises UnsupportedError where it would be too large, `Stopped` where the run should
    stop.
    """

    def __init__(self, problem: DittoProblem, run: Run) -> None:
        self.problem = p = problem
        sizes = [int(d) + 1 for d in p.devices]
        # the class of each interval of layers, and an interval of each class
        self.interval, self.members = interval_classes(p.weight)
        self.most_stages = min(p.layers, int(p.devices.sum()))
        shape = (math.prod(sizes), self.most_stages + 1, len(self.members), 4)
        self.states = math.prod(shape[:3])
        require(
            self.states * BYTES_PER_STATE <= MOST_BYTES,
            f"Oobleck's divide and conquer has {self.states} states here",
            expected=f"at most {MOST_BYTES // BYTES_PER_STATE} (method exact needs no table)",
            kind=UnsupportedError,
        )
        # [X, K] devices of each vector; a vector's number is its devices @ strides
        self.coords = np.indices(sizes).reshape(len(sizes), -1).T
        self.strides = np.array([math.prod(sizes[i + 1 :]) for i in range(len(sizes))])
        # [X, S + 1, C, 4] the records of the states (vector, stages, class of intervals)
        self.seconds = np.full(shape, np.inf)
        self.left_part = np.zeros(shape, dtype=np.int64)
        self._enter_single_stages()
        largest_group = int(p.option_devices.max())
        fewest = (-(-self.coords // largest_group)).sum(axis=1)
        most = self.coords.sum(axis=1)
        for x in range(1, len(self.coords)):
            run.check(STATE_SECONDS * float(math.prod(int(d) + 1 for d in self.coords[x])))
            below = np.array(list(product(*(range(int(d) + 1) for d in self.coords[x]))))
            parts = (below @ self.strides)[1:-1]  # without 0 and x
            divide(
                x, parts, fewest, most, self.members, self.interval, p.micro_batches,
                self.seconds, self.left_part,
            )  # fmt: skip

    def _enter_single_stages(self) -> None:
        """Enter the records of the states of one stage."""
        p, (begins, ends) = self.problem, self.members.T
        for r, (kind, size) in enumerate(zip(p.option_kind, p.option_devices, strict=True)):
            if size <= p.devices[kind]:
                records = self.seconds[size * self.strides[kind], 1]
                records[:] = p.time[r, begins, ends][:, None]  # t in all four columns
                # T1 and T3 of a single stage are t, T2 is (N_b - 2) t
                records[:, TOTAL] *= p.micro_batches

    def ranked(self) -> list[tuple[float, int]]:
        """(T, S) of the templates that use all devices in S <= N_b stages, the least T first."""
        all_layers = self.interval[0, self.problem.layers]
        totals = self.seconds[-1, :, all_layers, TOTAL]  # [S + 1]
        allowed = range(1, min(self.most_stages, self.problem.micro_batches) + 1)
        return sorted((float(totals[s]), s) for s in allowed if np.isfinite(totals[s]))

    def template(self, stages: int) -> Stages:
        """The stages of the template of all layers on all devices in this number of stages."""
        return self._expanded(len(self.coords) - 1, stages, 0, self.problem.layers)

    def _expanded(self, x: int, stages: int, first: int, last: int) -> Stages:
        """The stages of the template of layers [first, last) on the devices of vector x."""
        p = self.problem
        if stages == 1:
            kind = int(np.flatnonzero(self.coords[x])[0])
            fits = (p.option_kind == kind) & (p.option_devices == self.coords[x, kind])
            return [(first, last, int(np.flatnonzero(fits)[0]))]
        split = self.left_part[x, stages, self.interval[first, last]]
        y = int(split[VECTOR])
        s = int(split[STAGES])
        cut = first + int(split[LAYERS])
        return self._expanded(y, s, first, cut) + self._expanded(x - y, stages - s, cut, last)


def interval_classes(weight: Floats) -> tuple[Ints, Ints]:
    """([L + 1, L + 1] the class of each interval [a, b) or -1 unless a < b, [C, 2] an interval of
    each class).

    Intervals with equal layers in the same order share a class. weight: [R, L] seconds of each
    layer under each option; layers with equal columns are equal.
    """
    layers = weight.shape[1]
    _, column_of = np.unique(weight, axis=1, return_inverse=True)
    distinct = column_of.ravel().tolist()  # [L] the number of each layer among the different ones
    interval = np.full((layers + 1, layers + 1), -1, dtype=np.int64)
    classes: dict[tuple[int, int], int] = {}  # (class without the last layer, last layer) -> class
    members = []
    for a in range(layers):
        class_so_far = -1  # the class of [a, b - 1); -1 of the empty interval
        for b in range(a + 1, layers + 1):
            key = (class_so_far, distinct[b - 1])
            if key not in classes:
                classes[key] = len(classes)
                members.append((a, b))
            class_so_far = interval[a, b] = classes[key]
    return interval, np.array(members, dtype=np.int64)
