"""The instance as arrays, for the solvers (the evaluator does not use this module)."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetplan.formulations.astra.data import AstraData, AstraDecision, AstraStage

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class AstraProblem:
    """Arrays of an AstraData; `compile_problem` makes it.

    It has the M types that can carry a stage, sorted by seconds per layer and then by seconds of a
    transfer. M, N, P and K are the symbols of data.py.
    """

    names: tuple[str, ...]  # [M]
    c: Floats  # [M] seconds of a layer
    h: Floats  # [M] seconds of a transfer
    most_stages: Ints  # [M] most stages on the type, at least 1: min(P, max_devices // (D T))
    # [M] most layers of a stage, at least 1: min(max_layers, N - P + 1), since all other stages
    # need a layer
    most_layers: Ints
    N: int  # layers
    P: int  # stages
    K: int  # micro-batches
    equal: bool  # whether all stages of a type hold the same number of layers

    @property
    def M(self) -> int:
        """Number of usable types."""
        return len(self.names)

    @cached_property
    def stage_seconds(self) -> Floats:
        """[M, N + 1]: c x + h of a stage with x layers (column 0 is never used)."""
        seconds: Floats = self.c[:, None] * np.arange(self.N + 1) + self.h[:, None]
        return seconds

    @cached_property
    def thresholds(self) -> Floats:
        """The distinct times, ascending, that the slowest stage can have."""
        times = []
        for row, most in zip(self.stage_seconds, self.most_layers, strict=True):
            times.append(row[1 : most + 1])
        return np.unique(np.concatenate(times))


class UsableType(NamedTuple):
    """A device type that can carry a stage."""

    c: float  # seconds of a layer
    h: float  # seconds of a transfer
    name: str
    stages: int  # most stages
    layers: int  # most layers of a stage


def compile_problem(data: AstraData) -> AstraProblem:
    """`data` as arrays, without the types that cannot carry a single stage."""
    stage_devices = data.data_parallel * data.tensor_parallel
    most_layers = max(data.layers - data.stages + 1, 0)  # the other stages have one layer each
    types = []
    for kind in data.device_types:
        stages = min(data.stages, kind.max_devices // stage_devices)
        layers = most_layers if kind.max_layers is None else min(most_layers, kind.max_layers)
        if stages >= 1 and layers >= 1:
            usable = UsableType(kind.layer_seconds, kind.p2p_seconds, kind.name, stages, layers)
            types.append(usable)
    types.sort(key=lambda usable: (usable.c, usable.h))
    return AstraProblem(
        names=tuple(usable.name for usable in types),
        c=np.array([usable.c for usable in types], dtype=np.float64),
        h=np.array([usable.h for usable in types], dtype=np.float64),
        most_stages=np.array([usable.stages for usable in types], dtype=np.int64),
        most_layers=np.array([usable.layers for usable in types], dtype=np.int64),
        N=data.layers,
        P=data.stages,
        K=data.micro_batches,
        equal=data.equal_layers_per_type,
    )


def infeasible_because(problem: AstraProblem) -> str | None:
    """The reason why no decision exists, as far as counting stages and layers tells; None where
    counting finds no reason.

    Where stages of one type may differ, None means that a decision exists: any number of layers
    between P and the sum over the P largest possible stages can be reached. With equal layers per
    type there may be no decision even so.
    """
    if problem.P > problem.N:
        return f"{problem.P} stages need at least one layer each, there are {problem.N}"
    available = int(problem.most_stages.sum())
    if available < problem.P:
        return f"the devices (and max_layers) allow {available} stages, {problem.P} are asked for"
    most_layers = np.repeat(problem.most_layers, problem.most_stages)  # of every possible stage
    room = int(np.sort(most_layers)[::-1][: problem.P].sum())
    if room < problem.N:
        return (
            f"max_layers leaves room for {room} layers in {problem.P} stages, there are {problem.N}"
        )
    return None


def stage_counts(total: int, room: Ints) -> Iterator[Ints]:
    """All vectors m of stages per type with 0 <= m <= room and sum `total`, in lexicographic order.

    They come in blocks [V, types], one for each value of the first type.
    room: [types] most stages.
    """
    behind = room[::-1].cumsum()[::-1] - room  # most stages on all types after each one
    for first in range(max(0, total - int(behind[0])), min(total, int(room[0])) + 1):
        # rows of the block have values for the types so far, and `left` stages for the others
        block, left = np.array([[first]]), np.array([total - first])
        for i in range(1, len(room)):
            least = np.maximum(0, left - behind[i])
            choices = np.minimum(left, room[i]) - least + 1  # number of values of type i, by row
            row = np.repeat(np.arange(len(left)), choices)
            choices_before = choices.cumsum() - choices
            value = least[row] + np.arange(len(row)) - choices_before[row]
            block = np.column_stack([block[row], value])
            left = left[row] - value
        yield block


def even_stages(problem: AstraProblem) -> list[tuple[int, int]] | None:
    """The even decision as (type, layers) of each stage: the fastest types carry the stages, whose
    numbers of layers differ by at most one. None where it breaks a constraint: equal layers per
    type, or the most layers of a stage. `infeasible_because` is None for the problem."""
    kinds = np.repeat(np.arange(problem.M), problem.most_stages)[: problem.P]
    base, more = divmod(problem.N, problem.P)
    layers = np.full(problem.P, base)
    layers[:more] += 1
    if problem.equal and any(len(set(layers[kinds == i])) > 1 for i in range(problem.M)):
        return None
    if (layers > problem.most_layers[kinds]).any():
        return None
    return list(zip(kinds.tolist(), layers.tolist(), strict=True))


def even_objective(problem: AstraProblem) -> float | None:
    """The objective of the even decision (`even_stages`) in seconds; None where there is no such
    decision."""
    stages = even_stages(problem)
    if stages is None:
        return None
    kinds, layers = np.array(stages).T
    seconds = problem.stage_seconds[kinds, layers]
    return float(seconds.sum() + (problem.K - 1) * seconds.max())


def least_work(problem: AstraProblem) -> float:
    """A lower bound on the seconds that all stages of a decision take together for one
    micro-batch."""
    return problem.N * float(problem.c.min()) + problem.P * float(problem.h.min())


def least_total(problem: AstraProblem) -> float:
    """A lower bound on every decision's objective, in seconds. The slowest stage takes at least an
    even share of the least work."""
    work = least_work(problem)
    slowest = max(float(problem.thresholds[0]), work / problem.P)
    return work + (problem.K - 1) * slowest


def decision_of(problem: AstraProblem, stages: list[tuple[int, int]]) -> AstraDecision:
    """The decision with the given stages in the order of Section 3.4: the stages of a type side by
    side, those with more layers first. stages: (number of the type, layers)."""
    in_order = sorted(stages, key=lambda stage: (stage[0], -stage[1]))
    return AstraDecision(
        stages=[AstraStage(type=problem.names[i], layers=int(layers)) for i, layers in in_order]
    )
