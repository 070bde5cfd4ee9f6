"""Degrees of parallelism, and the ranks over which model states are spread."""

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from hetplan.replays.arrays import Floats, Ints, Numbers

Degree = TypeVar("Degree", int, Ints)


@dataclass(frozen=True)
class Ranks(Generic[Degree]):
    """The degrees by which ranks divide a model: numbers of one plan, or arrays over many
    strategies.

    Ranks are numbered tensor first, then context and data, as Megatron-LM does (Narayanan et al.
    2021 (SC), Section 3). So ranks that hold the same dense weights are `tensor` apart, and ranks
    that hold the same experts are `expert_ranks` apart. Plans and strategies have only degrees that
    divide each other where a property divides them.
    """

    tensor: Degree  # ranks that divide each product of a block
    context: Degree  # ranks that divide the tokens of a sample
    data: Degree  # replicas
    expert: Degree  # ranks over which a block's experts are spread
    expert_tensor: Degree  # ranks that divide each expert's products
    shard_groups: Degree  # groups of ranks that each hold all shards of the model states (HSDP)

    @property
    def sharing(self) -> Degree:
        """Ranks over which the shards of dense weights are spread."""
        return self.data * self.context // self.shard_groups

    @property
    def expert_ranks(self) -> Degree:
        """Ranks over which a block's experts are divided."""
        return self.expert * self.expert_tensor

    @property
    def expert_sharing(self) -> Degree:
        """Ranks over which the shards of experts are spread."""
        return self.tensor * self.sharing // self.expert_ranks


def own_shards(
    dense: Numbers, experts: Numbers, sharing: Numbers, expert_sharing: Numbers
) -> Floats:
    """The part of evenly divided model states that one rank holds:
    dense / sharing + experts / expert_sharing (Rajbhandari et al. 2020 (ZeRO), Section 5.1).

    dense, experts: states of a rank's part of the model, in any one unit. sharing, expert_sharing:
    ranks that divide the states of dense weights, and of experts.
    """
    return np.asarray(dense / sharing + experts / expert_sharing)
