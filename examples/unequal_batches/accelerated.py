"""Hugging Face accelerate with a plan's unequal batches."""

from contextlib import nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset

from hetplan.plans.plan import Plan
from hetplan.runtime.sampler import PlannedBatches


def train(
    plan: Plan, model: Any, data: Dataset[Any], optimizer: torch.optim.Optimizer, epochs: int
) -> None:
    """Samples of the data are keyword arguments of the model, labels included."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model, optimizer = accelerator.prepare(model, optimizer)
    rows = PlannedBatches(plan, accelerator.process_index, len(data))
    loader: Any = DataLoader(data, batch_sampler=rows)  # not prepared: rows are divided already
    for epoch in range(epochs):
        rows.set_epoch(epoch)
        for number, batch in enumerate(loader, 1):
            last = number % len(rows.cuts) == 0  # of this rank's micro-batches in an iteration
            here = {name: value.to(accelerator.device) for name, value in batch.items()}
            with nullcontext() if last else accelerator.no_sync(model):
                loss = model(**here).loss
                accelerator.backward(loss * rows.weight(len(batch["input_ids"])))
            if last:
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    from common import main

    main(train)
