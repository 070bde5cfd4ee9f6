"""The loops of `examples/unequal_batches` on three ranks that take 5, 2 and 1 samples, and the same
in one process."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch.utils.data import default_collate

from parity.cases import Case, R, S

WORLDS = [3]
FOLDER = Path(__file__).parent.parent.parent / "examples" / "unequal_batches"
WORDS, TOKENS, EPOCHS = 32, 6, 2
ONE = Case("5 to 2 to 1", "perceptron", [R([S((0, 4))], [(1, n)]) for n in (5, 2, 1)]).plan
SEVERAL = Case(
    "in micro-batches", "perceptron",
    [R([S((0, 4))], batches) for batches in ([(2, 2), (1, 1)], [(2, 1)], [(1, 1)])],
).plan  # fmt: skip
EQUAL = Case(
    "in two micro-batches each", "perceptron",
    [R([S((0, 4))], batches) for batches in ([(1, 2), (1, 1)], [(1, 2), (1, 1)], [(2, 1)])],
).plan  # fmt: skip
PLANS = (ONE, SEVERAL, EQUAL)
NEEDED = {"ddp": "torch", "accelerated": "accelerate", "lit": "lightning", "trainer": "accelerate"}
LOOPS = [name for name, package in NEEDED.items() if importlib.util.find_spec(package)]
CASES = [
    (loop, model, number)
    for loop in LOOPS
    for model in ("gpt2", "llama")
    for number in ((0, 1) if loop in ("ddp", "accelerated") else (0, 2))
]


def model_of(name: str) -> Any:
    """With its first weights."""
    torch.manual_seed(5)
    if name == "gpt2":
        quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        kept = {"bos_token_id": 0, "eos_token_id": 0, "vocab_size": WORDS, "n_positions": TOKENS}
        return hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=16, n_layer=2, n_head=2, **quiet, **kept))
    config = hf.LlamaConfig(
        vocab_size=WORDS, hidden_size=16, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=24, num_hidden_layers=2,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config)


def example(name: str) -> Any:
    """A module of the folder."""
    sys.path.insert(0, str(FOLDER))
    return importlib.import_module(name)


def texts() -> Any:
    """Two global batches, and what is left over."""
    return example("common").Texts(19, TOKENS, WORDS)


def updated(model: Any) -> Any:
    """By SGD at rate 1 an update is a gradient."""
    return torch.optim.SGD(model.parameters(), lr=1.0)


def work(rank: int, world: int, folder: Path) -> None:
    """All loops."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": "3"}
    weights = {}
    for loop, name, number in CASES:
        model = model_of(name)
        example(loop).train(PLANS[number], model, texts(), updated(model), EPOCHS)
        weights[loop, name, number] = model.state_dict()
    torch.save(weights, folder / f"weights-{rank}.pt")


def alone(name: str) -> dict[str, torch.Tensor]:
    """Last weights of one process; the samples are those of the plan's permutation."""
    from hetplan.runtime.sampler import PlannedBatches

    model, data = model_of(name), texts()
    optimizer = updated(model)
    ranks = [PlannedBatches(ONE, rank, len(data)) for rank in range(3)]
    for epoch in range(EPOCHS):
        for rows in ranks:
            rows.set_epoch(epoch)
        for parts in zip(*ranks, strict=True):
            batch = default_collate([data[i] for part in parts for i in part])
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    state: dict[str, torch.Tensor] = model.state_dict()
    return state
