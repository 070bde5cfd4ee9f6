"""Lightning with a plan's unequal batches, equally many on every rank."""

import os
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader, Dataset

from hetplan.plans.plan import Plan
from hetplan.runtime.sampler import PlannedBatches


class Module(lightning.LightningModule):
    """A model whose loss is weighted by the plan."""

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer, rows: PlannedBatches) -> None:
        super().__init__()
        self.model, self.optimizer, self.rows = model, optimizer, rows

    def training_step(self, batch: dict[str, torch.Tensor], number: int) -> Any:
        # Lightning divides by accumulate_grad_batches
        weight = len(self.rows.cuts) * self.rows.weight(len(batch["input_ids"]))
        return self.model(**batch).loss * weight

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer


def train(
    plan: Plan, model: Any, data: Dataset[Any], optimizer: torch.optim.Optimizer, epochs: int
) -> None:
    """Samples of the data are keyword arguments of the model, labels included."""
    rows = PlannedBatches(plan, int(os.environ["RANK"]), len(data))
    trainer = lightning.Trainer(
        max_epochs=epochs, use_distributed_sampler=False, accumulate_grad_batches=len(rows.cuts),
        strategy="ddp", devices=int(os.environ["LOCAL_WORLD_SIZE"]), enable_checkpointing=False,
        logger=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(model, optimizer, rows), DataLoader(data, batch_sampler=rows))


if __name__ == "__main__":
    from common import main

    main(train)
