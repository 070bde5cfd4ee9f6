"""Method `oobleck`: divide and conquer over layers, stages and device vectors.

T(S, u, v, x): layers [u, v) in S stages on exactly the devices x is split into T(s, u, k, x') and
T(S - s, k, v, x - x') over all s, k and x'; of each state only the template of least T1 + T2 + T3
is kept. T does not decompose (T2 and T3 depend on where the slowest stage of the whole lies), so
this is not optimal in general. All devices are used, as printed. Of equally slow stages the first
counts, as in the objective. Intervals of the same layers give the same answers: a state belongs to
a class of intervals, which changes nothing but the time.
Source: Ditto, Section 3, eq. 1-3, its exhaustive baseline; Oobleck (SOSP 2023), Section 4.1.2.

What Ditto's algorithms share with it: folding, the virtual cluster, and how a heuristic ends.

A device is worth some number of devices of the weakest type (Section 5.3). The virtual cluster has
only such devices; Oobleck's divide and conquer makes templates for it (Sections 4 and 6).
"""

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


class NoTemplate(Exception):
    """Why an algorithm has no template."""


@dataclass(frozen=True)
class Template:
    """The stages that an algorithm found."""

    stages: Stages
    message: str = ""
    details: Mapping[str, object] = field(default_factory=dict)
    stop: Stop = Stop.DONE  # a limit, where more time might have found a better one


def conclude(
    data: DittoData, run: Run, algorithm: Callable[[DittoProblem], Template]
) -> Outcome[DittoDecision]:
    """Run an algorithm; no decision where its template breaks what Ditto and Oobleck ignore.

    The algorithm raises `NoTemplate`, or `Stopped` where the run should stop.
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
    """Device types as multiples of the weakest one."""

    weakest: DeviceType  # the type with the largest total
    factors: Mapping[str, int]  # d_i of each type that has nodes, by name
    nodes: int  # n = sum_i n_i d_i: of the virtual cluster, of M weakest devices each (eq. 5)

    @property
    def devices(self) -> int:
        """The number of devices of the virtual cluster."""
        return self.nodes * self.weakest.devices_per_node


def fold(data: DittoData, *, communication: bool = False) -> Folding:
    """The folding factors.

    Without communication d_i = round(weakest total / total) (Section 5.3.1); with it, the d from 1
    to that number whose p(d) comes closest to the type's total (Section 5.3.2). Halves are rounded
    up. Raises NoTemplate where a type costs nothing at all and others do: there is no ratio.
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
            far = [abs(virtual_seconds(weakest, d) - total) for d in range(1, factor + 1)]
            factor = 1 + far.index(min(far))
        factors[kind.name] = factor
    return Folding(weakest, factors, sum(kind.nodes * factors[kind.name] for kind in present))


def total_seconds(kind: DeviceType) -> float:
    """sum_l c_i(l): the whole model's forward and backward on one device."""
    return math.fsum(kind.forward_seconds) + math.fsum(kind.backward_seconds)


def virtual_seconds(weakest: DeviceType, d: int) -> float:
    """p(d) = total / d + c_in(d): the model on d weakest devices, n' full nodes and one of d'
    devices.

    c_across is left out: Oobleck's profile, hence the instance, has no transfers between nodes. An
    all-reduce of d' devices is taken as one of the next group size, since the profile has powers of
    two only.
    """
    layers, size = len(weakest.forward_seconds), weakest.devices_per_node
    full, rest = divmod(d, size)
    inside = rest / d * layers * mean_allreduce(weakest, rest)
    inside += full * size / d * layers * mean_allreduce(weakest, size if full else 0)
    return total_seconds(weakest) / d + inside


def mean_allreduce(kind: DeviceType, devices: int) -> float:
    """l_c.in[d]: mean over the layers of one all-reduce on `devices` devices; 0 for fewer than
    two."""
    if devices < 2:
        return 0.0
    row = kind.allreduce_seconds[str(1 << (devices - 1).bit_length())]
    return math.fsum(row) / len(row)


def virtual_cluster(data: DittoData, folding: Folding) -> DittoData:
    """n nodes of M weakest devices; memory is left out, as Ditto and Oobleck do."""
    kind = folding.weakest.model_copy(update={"nodes": folding.nodes})
    return DittoData(micro_batches=data.micro_batches, device_types=[kind])


def single_devices(data: DittoData, folding: Folding) -> DittoData:
    """The same devices without nodes, so that every stage has just one."""
    weakest = folding.weakest
    kind = DeviceType(
        name=weakest.name,
        nodes=folding.devices,
        devices_per_node=1,
        forward_seconds=weakest.forward_seconds,
        backward_seconds=weakest.backward_seconds,
    )
    # Oobleck would refuse more stages than micro-batches; the virtual stages are merged afterwards.
    return DittoData(micro_batches=max(data.micro_batches, kind.nodes), device_types=[kind])


MOST_BYTES = 3 * 2**29
BYTES_PER_STATE = 5 * 8 + 4 * 8
# Columns of a state's record: T, T1, seconds of its slowest stage, T3; and in whole numbers the
# place of the slowest stage, then the left part: its vector, stages and layers.
TOTAL, FIRST, SLOWEST, LAST = range(4)
PLACE, VECTOR, STAGES, LAYERS = range(4)


@kernel
def divide(
    x: int, parts: Ints, fewest: Ints, most: Ints, members: Ints, interval: Ints,
    micro_batches: int, seconds: Floats, left_part: Ints,
) -> None:  # fmt: skip
    """Fill the states of vector x from those of smaller ones; single stages are entered already.

    parts: the vectors y with 0 < y < x. fewest, most [X]: numbers of stages that use up a vector.
    members [C, 2]: an interval of each class; interval [L + 1, L + 1] classes. seconds, left_part
    [X, S + 1, C, 4]: the records.
    """
    for y in parts:
        z = x - y
        for stages in range(max(2, fewest[x]), min(most[x], seconds.shape[1] - 1) + 1):
            for s in range(max(fewest[y], stages - most[z]), min(most[y], stages - fewest[z]) + 1):
                r = stages - s
                for c in range(len(members)):
                    begin, end = members[c, 0], members[c, 1]
                    for cut in range(begin + s, end - r + 1):
                        a, b = interval[begin, cut], interval[cut, end]
                        left, right = seconds[y, s, a, SLOWEST], seconds[z, r, b, SLOWEST]
                        if left >= right * (1 - TIE):
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
    """The best template that the table holds."""
    division = Division(problem, run)
    ranked = division.ranked()
    if not ranked:
        raise NoTemplate("no template uses all devices: too few layers or micro-batches")
    return Template(division.template(ranked[0][1]), details={"states": division.states})


class Division:
    """The table of all states of a problem's cluster.

    Raises UnsupportedError where it would be too large, `Stopped` where the run should stop.
    """

    def __init__(self, problem: DittoProblem, run: Run) -> None:
        self.problem = p = problem
        sizes = [int(d) + 1 for d in p.devices]
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
        self.coords = np.indices(sizes).reshape(len(sizes), -1).T
        self.strides = np.array([math.prod(sizes[i + 1 :]) for i in range(len(sizes))])
        self.seconds = np.full(shape, np.inf)
        self.left_part = np.zeros(shape, dtype=np.int64)
        self._enter_single_stages()
        fewest = (-(-self.coords // int(p.option_devices.max()))).sum(axis=1)
        most = self.coords.sum(axis=1)
        for x in range(1, len(self.coords)):
            run.check()
            below = np.array(list(product(*(range(int(d) + 1) for d in self.coords[x]))))
            divide(
                x, (below @ self.strides)[1:-1], fewest, most, self.members, self.interval,
                p.micro_batches, self.seconds, self.left_part,
            )  # fmt: skip

    def _enter_single_stages(self) -> None:
        p, (begins, ends) = self.problem, self.members.T
        for r, (kind, size) in enumerate(zip(p.option_kind, p.option_devices, strict=True)):
            if size <= p.devices[kind]:
                here = self.seconds[size * self.strides[kind], 1]
                here[:] = p.time[r, begins, ends][:, None]
                here[:, TOTAL] *= p.micro_batches  # T2 of one stage alone is (N_b - 2) t

    def ranked(self) -> list[tuple[float, int]]:
        """(T, S) of the templates that use all devices, best first; S > N_b is left out."""
        row = self.seconds[-1, :, self.interval[0, self.problem.layers], TOTAL]
        allowed = range(1, min(self.most_stages, self.problem.micro_batches) + 1)
        return sorted((float(row[s]), s) for s in allowed if np.isfinite(row[s]))

    def template(self, stages: int) -> Stages:
        """The stages of the state (all devices, `stages`, all layers)."""
        return self._expanded(len(self.coords) - 1, stages, 0, self.problem.layers)

    def _expanded(self, x: int, stages: int, first: int, last: int) -> Stages:
        p = self.problem
        if stages == 1:
            kind = int(np.flatnonzero(self.coords[x])[0])
            fits = (p.option_kind == kind) & (p.option_devices == self.coords[x, kind])
            return [(first, last, int(np.flatnonzero(fits)[0]))]
        split = self.left_part[x, stages, self.interval[first, last]]
        y, s, cut = int(split[VECTOR]), int(split[STAGES]), first + int(split[LAYERS])
        return self._expanded(y, s, first, cut) + self._expanded(x - y, stages - s, cut, last)


def interval_classes(weight: Floats) -> tuple[Ints, Ints]:
    """Intervals with the same layers in the same order share a class.

    weight [R, L]. Returns classes [L + 1, L + 1] (-1 unless a < b), and a member of each [C, 2].
    """
    layers = weight.shape[1]
    _, alike = np.unique(weight, axis=1, return_inverse=True)
    kinds = alike.ravel().tolist()
    interval = np.full((layers + 1, layers + 1), -1, dtype=np.int64)
    known: dict[tuple[int, int], int] = {}  # (class without the last layer, last layer) -> class
    members = []
    for a in range(layers):
        at = -1
        for b in range(a + 1, layers + 1):
            key = (at, kinds[b - 1])
            if key not in known:
                known[key] = len(known)
                members.append((a, b))
            at = interval[a, b] = known[key]
    return interval, np.array(members, dtype=np.int64)
