"""What the examples share: a plan, a model of Hugging Face with random weights, texts."""

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.utils.data import Dataset

from hetplan.plans.plan import load_plan


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Sequences that can be learnt: the next token is the last one plus a step of its own."""

    def __init__(self, samples: int, tokens: int, vocabulary: int) -> None:
        starts = torch.arange(samples)[:, None]
        self.rows = (starts + torch.arange(tokens) * (1 + starts % 3)) % vocabulary

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[row], "labels": self.rows[row]}


def main(train: Callable[..., None]) -> None:
    """`torchrun --nproc-per-node N FILE plan.json config.json`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("plan")
    parser.add_argument("config", help="Hugging Face's config.json of the model")
    parser.add_argument("--epochs", type=int, default=1)
    arguments = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(arguments.config)
    model = transformers.AutoModelForCausalLM.from_config(config)
    plan = load_plan(arguments.plan)
    data: Any = Texts(4 * plan.workload.global_batch, 64, config.vocab_size)
    train(plan, model, data, torch.optim.AdamW(model.parameters(), lr=1e-3), arguments.epochs)
    if dist.get_rank() == 0:
        with torch.no_grad():
            print(f"loss {float(model(**torch.utils.data.default_collate([data[0]])).loss):.4f}")
    dist.destroy_process_group()
