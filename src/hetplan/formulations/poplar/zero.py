"""Seconds of the collectives of the ZeRO stages.

Under stages 1 to 3 every device of the cluster takes part, because each one holds shards, whether
it gets samples or not. Under stage 0 the devices take part on which the states and one sample fit;
the others are of no use.
With W bytes of trained weights and W bytes of gradients, the stages communicate
stage 0:     an all-reduce, 2 W;
stages 1, 2: a reduce-scatter of gradients and an all-gather of weights, W each;
stage 3:     two all-gathers of weights and a reduce-scatter of gradients, 3 W together.
Source: Rajbhandari et al. 2020 (ZeRO), Sections 3.1, 5 and 7; Poplar (AAAI 2025), appendix "Details
about ZeRO".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hetplan.errors import require
from hetplan.formulations.poplar.problem import Floats
from hetplan.profiling.hardware.cluster import Cluster
from hetplan.profiling.profiles.measured_collectives import Collectives
from hetplan.replays.collectives import collective_seconds
from hetplan.replays.model_states import States, check_stage

# The sizes of the devices' shards, see `parts`.
Shards = Literal["equal", "memory"]


def parts(memory: Sequence[float], shards: Shards) -> Floats:
    """[n] the part of the model states that each device holds as its shard.

    memory: [n] bytes of each device. shards: "equal" parts, or parts in proportion to "memory".
    """
    if shards == "equal":
        return np.full(len(memory), 1.0 / len(memory))
    require(shards == "memory", "shards", got=shards, expected="equal or memory")
    sizes = np.array(memory, dtype=float)
    require(
        sizes.sum() > 0, "shards by memory, but no device has any", expected="memory on some device"
    )
    return np.asarray(sizes / sizes.sum())


@dataclass(frozen=True)
class Communication:
    """Seconds of the collectives."""

    per_step: float  # in every accumulation step
    per_iteration: float  # once per iteration


def communication(
    states: States,
    stage: int,
    cluster: Cluster,
    held: Floats,
    members: Sequence[int] | None = None,
    sharers: Sequence[int] | None = None,
    measured: Collectives | None = None,
) -> Communication:
    """Seconds of the collectives of a ZeRO stage, over a ring of devices in the cluster's order, at
    its slowest link.

    Stage 3 gathers layer by layer, with a latency for each layer.

    held: [n] the part of the model states that each sharer holds. members: the devices that take
    part under stage 0; None: all. sharers: [n] the devices that hold shards, which take part under
    stages 1 to 3; None: all. measured: measured collectives in place of the cluster's links.
    """

    def link(operation: str, ranks: Sequence[int]) -> tuple[float, float]:
        """(bytes per second, seconds per message) of a collective over these devices."""
        return ring(cluster, ranks) if measured is None else measured.ring(operation)

    check_stage(stage)
    if stage == 0:
        ranks = range(len(held)) if members is None else members
        if not ranks:
            return Communication(per_step=0.0, per_iteration=0.0)
        equal_parts = np.full(len(ranks), 1.0 / len(ranks))
        # an all-reduce is a reduce-scatter and an all-gather, which take the same seconds
        half = collective_seconds(states.gradients, equal_parts, *link("all-reduce", ranks))
        return Communication(per_step=0.0, per_iteration=2.0 * half)
    ranks = range(len(held)) if sharers is None else sharers
    messages = states.layers if stage == 3 else 1
    reduce_scatter = collective_seconds(
        states.gradients, held, *link("reduce-scatter", ranks), messages=messages
    )
    gathered = states.weights
    if stage == 3:  # shards of frozen weights are gathered for the passes, too
        gathered += states.frozen
    all_gather = collective_seconds(gathered, held, *link("all-gather", ranks), messages=messages)
    if stage == 3:
        return Communication(per_step=2.0 * all_gather + reduce_scatter, per_iteration=0.0)
    if stage == 1:
        return Communication(per_step=0.0, per_iteration=reduce_scatter + all_gather)
    return Communication(per_step=reduce_scatter, per_iteration=all_gather)


def ring(cluster: Cluster, members: Sequence[int]) -> tuple[float, float]:
    """(bytes per second, seconds per message) of the slowest link of the ring through `members`."""
    senders = np.asarray(members, dtype=np.int64)
    receivers = np.roll(senders, -1)
    bandwidth = cluster.bandwidth()[senders, receivers]
    latency = cluster.latency()[senders, receivers]
    return float(bandwidth.min()), float(latency.max())
