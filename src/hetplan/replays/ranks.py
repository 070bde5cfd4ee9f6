"""Degrees of parallelism, and the ranks that hold the same."""

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from hetplan.replays.arrays import Floats, Ints, Numbers

Degree = TypeVar("Degree", int, Ints)


@dataclass(frozen=True)
class Ranks(Generic[Degree]):
    """How many ranks divide what: numbers of one plan, or arrays over many strategies.

    tensor: ranks that divide each product of a block. context: ranks that divide the tokens of a
    sample. data: replicas. expert: ranks over which a block's experts are spread. expert_tensor:
    ranks that divide each expert's products. shard_groups: groups of ranks that each hold all
    shards of the model states (HSDP).

    Ranks are numbered tensor first, then context and data, as Megatron-LM does (Narayanan et al.
    2021 (SC), Section 3): those that hold the same dense weights are `tensor` apart, those that
    hold the same experts are `expert_ranks` apart.
    """

    tensor: Degree
    context: Degree
    data: Degree
    expert: Degree
    expert_tensor: Degree
    shard_groups: Degree

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
    """What one rank has of model states that are divided evenly: dense / sharing +
    experts / expert_sharing, in the unit of dense and experts (Rajbhandari et al. 2020 (ZeRO),
    Section 5.1).

    dense, experts: states of a rank's part of the model. sharing, expert_sharing: ranks that divide
    them.
    """
    return np.asarray(dense / sharing + experts / expert_sharing)
