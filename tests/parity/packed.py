"""Samples of unequal length, packed into the rows of three unequal ranks and of a pipeline: weights
after each step, and how many samples each step took."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from fakes.hugging import TEXT, TOKENS, WORDS
from hetplan.plans.packed import packed_plan
from hetplan.plans.plan import Plan
from hetplan.runtime import distribute
from hetplan.runtime.engine.distributed import example_of
from hetplan.runtime.engine.layout import Layout
from hetplan.runtime.engine.packing import Packing
from parity.adapted import PIPELINE, UNEQUAL, exactly, planned

WORLDS = [3]
RATE, STEPS = 0.5, 2


def sample(number: int) -> Tensor:
    """A text of 1 to 2 TOKENS words."""
    length = 1 + (number * number * 5 + number) % (2 * TOKENS)
    return (torch.arange(length) * (3 + number % 4) + 7 * number) ** 2 % WORDS


def plans() -> dict[str, Plan]:
    """The last replicas' rows hold the longest samples just so."""
    made = [
        planned("5 to 2 to 2", [(stages, max(n, 2)) for stages, n in UNEQUAL], 1, rows=9),
        planned("a pipeline and a rank", PIPELINE, 0),
    ]
    return {plan.name: plan for plan in made}


def llama() -> Any:
    """A Llama with first weights, for rows of all widths."""
    import transformers as hf

    torch.manual_seed(5)
    sizes = TEXT | {"max_position_embeddings": 64}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_key_value_heads=1))


def work(rank: int, world: int, folder: Path) -> None:
    """Steps under each plan."""
    found: dict[str, list[dict[str, Tensor]]] = {}
    taken: dict[str, list[int]] = {}
    for name, plan in plans().items():
        rows, widths = packed_plan(plan)
        packing = Packing(sample, widths)
        with exactly():
            module = llama()
            module.batch = packing.batch
            place = rows.places[rank]
            first_row, _ = Layout(rows).micro_batches[place.replica][0]
            example = example_of(module, first_row)
            model: Any = distribute(module, rows, example=example, probe=False)
        optimizer = model.optimizer(torch.optim.SGD, lr=RATE)
        states = []
        for _ in range(STEPS):
            model.train_step()
            optimizer.step()
            optimizer.zero_grad()
            states.append(copy.deepcopy(model.gather().state_dict()))
        found[name], taken[name] = states, packing.begins
    if dist.get_rank() == 0:
        torch.save({"states": found, "begins": taken}, folder / "packed.pt")


def alone(begins: list[int]) -> list[dict[str, Tensor]]:
    """Weights of one process, which takes a sample at a time, after each step.

    begins: [step] the first sample of each step.
    """
    with exactly():
        module = llama()
        optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
        states = []
        for step in range(STEPS):
            samples = [sample(number) for number in range(begins[step], begins[step + 1])]
            labels = sum(len(tokens) - 1 for tokens in samples)
            for tokens in samples:
                if len(tokens) < 2:
                    continue
                logits = module(input_ids=tokens[None], use_cache=False).logits[0]
                (F.cross_entropy(logits[:-1], tokens[1:], reduction="sum") / labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            states.append(copy.deepcopy(module.state_dict()))
    return states
