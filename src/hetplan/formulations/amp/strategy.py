"""A strategy in AMP's sense (§3.3): degrees, micro-batch, placement and cut; its exact price on
arrays; and Megatron's order, the placement by rule.

Pricing splits in two so that many cuts of one placement are cheap: `place` folds the placement into
seconds per layer, per activation byte and per parameter byte; `Placed.seconds` then prices a cut.
The evaluator (evaluate.py) does not use this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np

from hetplan.formulations.amp.data import AmpDecision
from hetplan.formulations.amp.problem import (
    MEMORY_TOLERANCE,
    AmpProblem,
    Configuration,
    Floats,
    Ints,
)


@dataclass(frozen=True)
class Strategy:
    """placement [pp, dp, tp] device numbers; cut [pp + 1]: stage j is layers cut[j] to cut[j + 1] -
    1."""

    configuration: Configuration
    placement: Ints
    cut: Ints

    def decision(self) -> AmpDecision:
        """As the file format writes it."""
        chosen = self.configuration
        return AmpDecision(
            pipeline=chosen.pipeline,
            data=chosen.data,
            tensor=chosen.tensor,
            micro_batch=chosen.micro_batch,
            placement=self.placement.tolist(),
            stages=list(pairwise(self.cut.tolist())),
        )


@dataclass(frozen=True)
class Placed:
    """A configuration on its devices, cut left open.

    placement [pp, dp, tp]. layer_seconds [dp, pp, L]: of each layer if that tensor group ran it,
    all-reduce included. link [dp, pp - 1]: seconds per activation byte (of one sample) behind each
    stage. sync [pp]: seconds per parameter byte of the stage, slowest data group. capacity [pp]:
    bytes of the smallest device.
    """

    problem: AmpProblem
    configuration: Configuration
    placement: Ints
    layer_seconds: Floats
    link: Floats
    sync: Floats
    capacity: Floats

    def seconds(self, cut: Ints) -> float:
        """T of eq. 4 and 5 for `cut` [pp + 1]."""
        stages = np.stack(
            [
                self.layer_seconds[:, j, first:last].sum(axis=1)
                for j, (first, last) in enumerate(pairwise(cut))
            ],
            axis=1,
        )
        links = self.link @ self.problem.activation[cut[1:-1] - 1]
        pipelines = (self.configuration.gas - 1) * stages.max(axis=1) + stages.sum(axis=1) + links
        return float(pipelines.max() + self.sync_seconds(cut))

    def sync_seconds(self, cut: Ints) -> float:
        """The slowest gradient all-reduce, max_d S_d."""
        return float((self.sync * np.add.reduceat(self.problem.params, cut[:-1])).max())

    def fits(self, cut: Ints) -> bool:
        """Whether every stage fits the memory of its smallest device."""
        room = self.capacity * (1 + MEMORY_TOLERANCE)
        return bool((stage_bytes(self.problem, self.configuration, cut) <= room).all())


def stage_bytes(problem: AmpProblem, configuration: Configuration, cut: Ints) -> Floats:
    """Bytes per device of each stage under 1F1B, [pp]."""
    pp, tp = configuration.pipeline, configuration.tensor
    alive = np.minimum(configuration.gas, pp - np.arange(pp)) * configuration.micro_batch
    state = problem.state_factor * np.add.reduceat(problem.params, cut[:-1])
    return np.asarray((state + alive * np.add.reduceat(problem.saved, cut[:-1])) / tp)


def ring_factor(ranks: int) -> float:
    """Bytes that a ring all-reduce moves over each link per byte of the message: 2 (n-1)/n (eq.
    3)."""
    return 2 * (ranks - 1) / ranks


def slowest_pair(problem: AmpProblem, groups: Ints) -> Floats:
    """Lowest bandwidth within each group; groups [..., n] -> [...], +inf for groups of one."""
    pairs = problem.bandwidth[groups[..., :, None], groups[..., None, :]]
    return np.asarray(pairs.min(axis=(-2, -1)))


def place(problem: AmpProblem, configuration: Configuration, placement: Ints) -> Placed:
    """Fold `placement` [pp, dp, tp] into the costs that a cut sees."""
    tp, dp, mbs = configuration.tensor, configuration.data, configuration.micro_batch
    by_rank = placement.transpose(1, 0, 2)  # [dp, pp, tp]
    reduce_seconds = ring_factor(tp) * mbs / slowest_pair(problem, by_rank)  # per byte, [dp, pp]
    here, after = by_rank[:, :-1], by_rank[:, 1:]
    return Placed(
        problem=problem,
        configuration=configuration,
        placement=placement,
        layer_seconds=slowest_table(problem, configuration, by_rank)
        + reduce_seconds[..., None] * problem.tensor,
        link=mbs / problem.bandwidth[here, after].min(axis=2),
        sync=ring_factor(dp) / tp / slowest_pair(problem, placement.transpose(0, 2, 1)).min(axis=1),
        capacity=problem.capacity[problem.device_type[placement]].min(axis=(1, 2)),
    )


def slowest_table(problem: AmpProblem, configuration: Configuration, groups: Ints) -> Floats:
    """Seconds of each layer at the pace of the group's slowest type; groups [..., tp] -> [...,
    L]."""
    seconds = problem.seconds[configuration.tensor, configuration.micro_batch]
    present = (problem.device_type[groups][..., None] == np.arange(len(problem.types))).any(axis=-2)
    kinds, which = np.unique(present.reshape(-1, len(problem.types)), axis=0, return_inverse=True)
    slowest = np.stack([seconds[kind].max(axis=0) for kind in kinds])
    return np.asarray(slowest[which.reshape(-1)].reshape(*groups.shape[:-1], problem.layers))


def by_node(nodes: Sequence[int]) -> list[list[int]]:
    """Device numbers of each node, nodes in ascending order; nodes [D]."""
    return [[d for d, own in enumerate(nodes) if own == node] for node in sorted(set(nodes))]


def megatron_placement(nodes: Sequence[int], configuration: Configuration) -> Ints:
    """Devices [pp, dp, tp] in Megatron's order; nodes [D] names the node of each device.

    Megatron numbers ranks tensor first, then data, then pipeline, and fills node after node (AMP
    §3.6, §4.1): tensor groups lie within nodes, and what is left of a node's links serves data
    groups next.
    Where the tensor degree does not divide a node's devices, whole groups come first, node after
    node, and the left-over devices then form groups across nodes.
    """
    tp = configuration.tensor
    members = by_node(nodes)
    whole = chain.from_iterable(node[: len(node) - len(node) % tp] for node in members)
    rest = chain.from_iterable(node[len(node) - len(node) % tp :] for node in members)
    order = np.array([*whole, *rest], dtype=np.int64)
    return order.reshape(configuration.pipeline, configuration.data, tp)
