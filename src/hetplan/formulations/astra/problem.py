"""The instance as arrays, for the solvers (the evaluator does not use this module)."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hetplan.formulations.astra.data import AstraData, AstraDecision, AstraStage

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class AstraProblem:
    """Arrays of an AstraData: only types that can carry a stage, fastest layer first (ties: cheaper
    transfer).

    names [M]; c, h [M] seconds; most_stages [M] = min(P, max_devices // (D T)) >= 1;
    most_layers [M] = min(max_layers, N - P + 1) >= 1: what one stage can take when all others take
    one layer.
    N layers, P stages, K micro-batches; equal: one number of layers per type.
    """

    names: tuple[str, ...]
    c: Floats
    h: Floats
    most_stages: Ints
    most_layers: Ints
    N: int
    P: int
    K: int
    equal: bool

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
        """Sorted distinct times that the slowest stage can have."""
        return np.unique(
            np.concatenate(
                [
                    row[1 : most + 1]
                    for row, most in zip(self.stage_seconds, self.most_layers, strict=True)
                ]
            )
        )


def compile_problem(data: AstraData) -> AstraProblem:
    """`data` as arrays; types that cannot carry a single stage are left out."""
    group = data.data_parallel * data.tensor_parallel
    widest = max(data.layers - data.stages + 1, 0)
    rows = []
    for kind in data.device_types:
        stages = min(data.stages, kind.max_devices // group)
        layers = widest if kind.max_layers is None else min(widest, kind.max_layers)
        if stages >= 1 and layers >= 1:
            rows.append((kind.layer_seconds, kind.p2p_seconds, kind.name, stages, layers))
    rows.sort(key=lambda row: row[:2])
    return AstraProblem(
        names=tuple(row[2] for row in rows),
        c=np.array([row[0] for row in rows], dtype=np.float64),
        h=np.array([row[1] for row in rows], dtype=np.float64),
        most_stages=np.array([row[3] for row in rows], dtype=np.int64),
        most_layers=np.array([row[4] for row in rows], dtype=np.int64),
        N=data.layers,
        P=data.stages,
        K=data.micro_batches,
        equal=data.equal_layers_per_type,
    )


def infeasible_because(problem: AstraProblem) -> str | None:
    """Why no decision exists, from counting alone; None when counting finds no reason.

    Complete when stages of one type may differ: any number of layers between P and the sum of the P
    widest stages can be reached. With equal layers per type the numbers may still not divide.
    """
    if problem.P > problem.N:
        return f"{problem.P} stages need at least one layer each, there are {problem.N}"
    available = int(problem.most_stages.sum())
    if available < problem.P:
        return f"the devices (and max_layers) allow {available} stages, {problem.P} are asked for"
    room = int(
        np.sort(np.repeat(problem.most_layers, problem.most_stages))[::-1][: problem.P].sum()
    )
    return (
        f"max_layers leaves room for {room} layers in {problem.P} stages, there are {problem.N}"
        if room < problem.N
        else None
    )


def stage_counts(total: int, room: Ints) -> Iterator[Ints]:
    """Blocks [V, types] of all vectors 0 <= m <= room that add up to `total`, one for each value of
    the first type, in lexicographic order."""
    behind = room[::-1].cumsum()[::-1] - room  # what the types after each one can take
    for first in range(max(0, total - int(behind[0])), min(total, int(room[0])) + 1):
        block, left = np.array([[first]]), np.array([total - first])
        for i in range(1, len(room)):
            least = np.maximum(0, left - behind[i])
            choices = np.minimum(left, room[i]) - least + 1
            of = np.repeat(np.arange(len(left)), choices)
            value = np.arange(len(of)) - (choices.cumsum() - choices)[of] + least[of]
            block, left = np.column_stack([block[of], value]), left[of] - value
        yield block


def even_stages(problem: AstraProblem) -> list[tuple[int, int]] | None:
    """The simplest decision as stages (type, layers): fastest types first, layers as even as they
    go; None where it breaks a limit."""
    kinds = np.repeat(np.arange(problem.M), problem.most_stages)[: problem.P]
    base, more = divmod(problem.N, problem.P)
    layers = np.full(problem.P, base)
    layers[:more] += 1
    uneven = problem.equal and any(len(set(layers[kinds == i])) > 1 for i in range(problem.M))
    return (
        None
        if uneven or (layers > problem.most_layers[kinds]).any()
        else list(zip(kinds.tolist(), layers.tolist(), strict=True))
    )


def even_decision(problem: AstraProblem) -> float | None:
    """Objective of the simplest decision (`even_stages`); None where it breaks a limit."""
    stages = even_stages(problem)
    if stages is None:
        return None
    kinds, layers = np.array(stages).T
    seconds = problem.stage_seconds[kinds, layers]
    return float(seconds.sum() + (problem.K - 1) * seconds.max())


def least_work(problem: AstraProblem) -> float:
    """Seconds that the stages of any decision take together, at least."""
    return problem.N * float(problem.c.min()) + problem.P * float(problem.h.min())


def least_total(problem: AstraProblem) -> float:
    """A bound of every decision's objective: the least work, and its even share for the slowest
    stage."""
    work = least_work(problem)
    return work + (problem.K - 1) * max(float(problem.thresholds[0]), work / problem.P)


def decision_of(problem: AstraProblem, stages: list[tuple[int, int]]) -> AstraDecision:
    """The decision with stages (type index, layers), equal ones side by side as in Section 3.4."""
    return AstraDecision(
        stages=[
            AstraStage(type=problem.names[i], layers=int(x))
            for i, x in sorted(stages, key=lambda s: (s[0], -s[1]))
        ]
    )
