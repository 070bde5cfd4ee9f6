"""The samples of a data-parallel plan for a user's own training loop under plain DDP, accelerate or
Lightning: `PlannedBatches` is a `batch_sampler` of a torch DataLoader with unequal micro-batches.
"""

from collections.abc import Iterator
from itertools import accumulate, pairwise

import numpy as np

from hetplan.errors import require
from hetplan.plans.plan import Plan


class PlannedBatches:
    """The dataset's indices of one rank, micro-batch by micro-batch, iteration by iteration.

    Every iteration takes the next global batch of a permutation that all ranks draw alike. The
    samples left over at an epoch's end are dropped. A resumed run calls `set_epoch`.

    length: number of samples in the dataset. seed: seed of the permutation; None: the dataset's
    order. rank: the rank's number, as in `plan.ranks`. Raises InputError unless the rank is the
    only one of a replica, and this replica has samples.
    """

    def __init__(self, plan: Plan, rank: int, length: int, *, seed: int | None = 0) -> None:
        sizes: list[int] = []  # samples of each micro-batch of the rank
        begin = 0  # position of the rank's first sample in the global batch
        for replica in plan.replicas:
            devices = [device for stage in replica.stages for device in stage.all_devices]
            if [plan.ranks[device] for device in devices] == [rank]:
                for micro_batches in replica.micro_batches:
                    if micro_batches.samples:
                        sizes += [micro_batches.samples] * micro_batches.count
                break
            begin += replica.samples
        require(
            sizes,
            f"rank {rank} has no samples of its own",
            where=plan.name,
            expected="a replica on one device, with samples",
        )
        # positions [first, last) in the global batch, for each micro-batch
        self.cuts = list(pairwise(accumulate(sizes, initial=begin)))
        self.plan, self.length, self.seed = plan, length, seed
        self.iterations = length // plan.workload.global_batch  # iterations of an epoch
        self.sampler = self  # where frameworks look for `set_epoch`
        self.set_epoch(0)

    def set_epoch(self, epoch: int, done: int = 0) -> None:
        """Begin with iteration number `done` of an epoch; a checkpoint says both numbers."""
        self.epoch, self.done = epoch, done

    def weight(self, samples: int) -> float:
        """The factor for the mean loss of a micro-batch with `samples` samples.

        Each rank sums the scaled losses of its micro-batches, and DDP averages over the ranks. With
        this factor the result is the mean loss over the global batch.
        """
        return samples * self.plan.world_size / self.plan.workload.global_batch

    def __len__(self) -> int:
        """Number of micro-batches left in this epoch."""
        return (self.iterations - self.done) * len(self.cuts)

    def __iter__(self) -> Iterator[list[int]]:
        order = np.arange(self.length)
        if self.seed is not None:
            order = np.random.default_rng((self.seed, self.epoch)).permutation(self.length)
        for iteration in range(self.done, self.iterations):
            batch = order[iteration * self.plan.workload.global_batch :]
            for first, last in self.cuts:
                yield batch[first:last].tolist()
