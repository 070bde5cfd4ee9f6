"""The rows of a data-parallel plan for a training loop of one's own: unequal micro-batches as the
`batch_sampler` of a torch DataLoader, under plain DDP, accelerate or Lightning.
"""

from collections.abc import Iterator
from itertools import accumulate, pairwise

import numpy as np

from hetplan.errors import require
from hetplan.plans.plan import Plan


class PlannedBatches:
    """The dataset's indices of one rank, micro-batch by micro-batch, iteration by iteration.

    Every iteration takes the next global batch of a permutation that all ranks draw alike; what is
    left over at an epoch's end is dropped. length: samples in the dataset. seed: None for the
    dataset's own order. rank: as in `plan.ranks`. Raises InputError where the rank is not the only
    one of a replica with samples.
    """

    def __init__(self, plan: Plan, rank: int, length: int, *, seed: int | None = 0) -> None:
        held = [[plan.ranks[d] for s in r.stages for d in s.all_devices] for r in plan.replicas]
        require(
            [rank] in held and plan.replicas[held.index([rank])].samples,
            f"rank {rank} has no rows of its own",
            where=plan.name,
            expected="a replica on one device, with samples",
        )
        place = held.index([rank])
        sizes = [
            one.samples
            for one in plan.replicas[place].micro_batches
            for _ in range(one.count)
            if one.samples
        ]
        before = sum(replica.samples for replica in plan.replicas[:place])
        self.cuts = list(pairwise(accumulate(sizes, initial=before)))
        self.plan, self.length, self.seed = plan, length, seed
        self.iterations = length // plan.workload.global_batch
        self.sampler = self  # where frameworks look for `set_epoch`
        self.set_epoch(0)

    def set_epoch(self, epoch: int, done: int = 0) -> None:
        """Go on in this epoch behind `done` iterations, as a checkpoint says."""
        self.epoch, self.done = epoch, done

    def weight(self, samples: int) -> float:
        """What the mean loss of a micro-batch is multiplied by, so that DDP's average over the
        ranks of the sums over their micro-batches is the mean over the global batch."""
        return samples * self.plan.world_size / self.plan.workload.global_batch

    def __len__(self) -> int:
        """Micro-batches to come."""
        return (self.iterations - self.done) * len(self.cuts)

    def __iter__(self) -> Iterator[list[int]]:
        order = (
            np.arange(self.length)
            if self.seed is None
            else np.random.default_rng((self.seed, self.epoch)).permutation(self.length)
        )
        for iteration in range(self.done, self.iterations):
            rows = order[iteration * self.plan.workload.global_batch :]
            yield from (rows[first:last].tolist() for first, last in self.cuts)
