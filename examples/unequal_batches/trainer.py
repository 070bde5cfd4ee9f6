"""Hugging Face's Trainer with a plan's unequal batches, equally many on every rank."""

from tempfile import mkdtemp
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.utils.data import DataLoader, Dataset

from hetplan.plans.plan import Plan
from hetplan.runtime.sampler import PlannedBatches


class PlannedTrainer(transformers.Trainer):
    """Takes its batches from a plan. Trainer itself divides the sum of the losses by the tokens of
    all ranks (average_tokens_across_devices), so that no other weight is needed."""

    rows: PlannedBatches

    def get_train_dataloader(self) -> Any:
        loader: Any = DataLoader(self.train_dataset, batch_sampler=self.rows)
        loader.set_epoch = self.rows.set_epoch
        return loader


def train(
    plan: Plan, model: Any, data: Dataset[Any], optimizer: torch.optim.Optimizer, epochs: int
) -> None:
    """Samples of the data are keyword arguments of the model, labels included."""
    rows = PlannedBatches(plan, dist.get_rank(), len(data))
    arguments = transformers.TrainingArguments(
        output_dir=mkdtemp(), num_train_epochs=epochs, average_tokens_across_devices=True,
        gradient_accumulation_steps=len(rows.cuts),
        max_grad_norm=0.0, lr_scheduler_type="constant", report_to=[], save_strategy="no",
        use_cpu=not torch.cuda.is_available(), disable_tqdm=True,
    )  # fmt: skip
    # GPT-2 does not name its loss; Trainer would count the first tokens, which have no loss
    model.loss_type = getattr(model, "loss_type", None) or "ForCausalLM"
    trainer = PlannedTrainer(
        model,
        arguments,
        train_dataset=data,
        optimizers=(optimizer, None),
    )
    trainer.rows = rows
    trainer.train()


if __name__ == "__main__":
    from common import main

    main(train)
