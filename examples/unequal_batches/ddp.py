"""Plain DistributedDataParallel with a plan's unequal batches."""

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from hetplan.plans.plan import Plan
from hetplan.runtime.sampler import PlannedBatches


def train(
    plan: Plan, model: Any, data: Dataset[Any], optimizer: torch.optim.Optimizer, epochs: int
) -> None:
    """Samples of the data are keyword arguments of the model, labels included."""
    rows = PlannedBatches(plan, dist.get_rank(), len(data))
    loader: Any = DataLoader(data, batch_sampler=rows)
    wrapped = DistributedDataParallel(model)
    for epoch in range(epochs):
        rows.set_epoch(epoch)
        for number, batch in enumerate(loader, 1):
            last = number % len(rows.cuts) == 0  # of this rank's micro-batches in an iteration
            with nullcontext() if last else wrapped.no_sync():
                loss = wrapped(**batch).loss
                (loss * rows.weight(len(batch["input_ids"]))).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    from common import main

    main(train)
