"""Communication of the ZeRO stages: their collectives, and who takes part.

Who takes part: under stages 1 to 3 every device of the cluster, since each holds shards, whether it
gets samples or not; under stage 0 the devices on which the states and one sample fit, the others
being of no use.
Volumes: all-reduce 2 W (stage 0); reduce-scatter W + all-gather W (1, 2); two all-gathers and a
reduce-scatter, 3 W (3).
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

Shards = Literal["equal", "memory"]


def parts(memory: Sequence[float], shards: Shards) -> Floats:
    """[n] the part of the shards on each device: equal, or in proportion to its memory (bytes)."""
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
    """Seconds of the collectives: in every accumulation step, and once per iteration."""

    per_step: float
    per_iteration: float


def communication(
    states: States,
    stage: int,
    cluster: Cluster,
    held: Floats,
    members: Sequence[int] | None = None,
    sharers: Sequence[int] | None = None,
    measured: Collectives | None = None,
) -> Communication:
    """Collectives over the members in the cluster's order, at the slowest link of the ring through
    them.

    Stage 3 gathers layer by layer and pays the latency once per layer. held [n]: parts of the
    shards. members: who takes part under stage 0, default all devices; later stages need everyone
    who holds shards. sharers [n]: whose parts `held` are, default all devices of the cluster.
    measured: collectives that take the place of the cluster's links.
    """

    def link(operation: str, taking: Sequence[int]) -> tuple[float, float]:
        return ring(cluster, taking) if measured is None else measured.ring(operation)

    check_stage(stage)
    if stage == 0:
        taking = range(len(held)) if members is None else members
        if not taking:
            return Communication(0.0, 0.0)
        equal_parts = np.full(len(taking), 1.0 / len(taking))
        half = collective_seconds(states.gradients, equal_parts, *link("all-reduce", taking))
        return Communication(0.0, 2.0 * half)
    all_of_them = range(len(held)) if sharers is None else sharers
    messages = states.layers if stage == 3 else 1
    reduce = collective_seconds(
        states.gradients, held, *link("reduce-scatter", all_of_them), messages=messages
    )
    gather = collective_seconds(
        states.weights, held, *link("all-gather", all_of_them), messages=messages
    )
    if stage == 3:
        return Communication(2.0 * gather + reduce, 0.0)
    if stage == 1:
        return Communication(0.0, reduce + gather)
    return Communication(reduce, gather)


def ring(cluster: Cluster, members: Sequence[int]) -> tuple[float, float]:
    """(bytes per second, seconds per message) of the slowest link of the ring through `members`."""
    here = np.asarray(members, dtype=np.int64)
    after = np.roll(here, -1)
    bandwidth, latency = cluster.bandwidth()[here, after], cluster.latency()[here, after]
    return float(bandwidth.min()), float(latency.max())
