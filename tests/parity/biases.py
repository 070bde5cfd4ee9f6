"""Models whose attention adds biases that are learned, on tensor ranks and context ranks: the loss
and every gradient of a step under a plan that divides their layers, and the same in one process."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F

from fakes.hugging import NAMES, TOKENS, WORDS, text, tokens, with_data
from hetplan.runtime import distribute
from hetplan.runtime.engine import chain
from hetplan.runtime.engine.distributed import example_of
from hetplan.runtime.tracing.layers import Called
from hetplan.runtime.tracing.split import Split
from parity.device import default_type, doubled
from parity.divided import ROWS, Case

HEADS, WIDTH, BUCKETS, SLOTS = 4, 16, 5, 5
DISTANCES = torch.arange(TOKENS)[None, :] - torch.arange(TOKENS)[:, None]


class Given(nn.Module):
    """A bias that is a parameter of this shape."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.values


class Bucketed(nn.Module):
    """T5's: a vector for each bucket of distances, with a value for each head or one for all."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.table = nn.Embedding(BUCKETS, heads)

    def forward(self, x: Tensor) -> Tensor:
        buckets = (DISTANCES + TOKENS) * BUCKETS // (2 * TOKENS)
        made: Tensor = self.table(buckets).permute(2, 0, 1).unsqueeze(0)
        return made


class Slopes(nn.Module):
    """ALiBi's, learned: a head's slope times the distance."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes = nn.Parameter(torch.randn(HEADS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return -self.slopes.exp() * DISTANCES.abs()


class OfKeys(nn.Module):
    """A value of each sample's keys: for each head, or one for all."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.score = nn.Linear(WIDTH, heads)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.score(x).transpose(1, 2).unsqueeze(2)
        return made


class OfPairs(nn.Module):
    """A value of each sample's pairs of tokens, the same for all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return (self.left(x) @ self.right(x).mT).unsqueeze(1)


BIASES: dict[str, Callable[[], nn.Module]] = {
    "heads": lambda: Given(1, HEADS, TOKENS, TOKENS),
    "shared": lambda: Given(1, 1, TOKENS, TOKENS),
    "heads without samples": lambda: Given(HEADS, TOKENS, TOKENS),
    "one of each head": lambda: Given(HEADS, 1, 1),
    "keys of each head": lambda: Given(HEADS, 1, TOKENS),
    "pairs": lambda: Given(TOKENS, TOKENS),
    "keys": lambda: Given(TOKENS),
    "buckets of each head": lambda: Bucketed(HEADS),
    "buckets": lambda: Bucketed(1),
    "slopes": Slopes,
    "keys of each sample": lambda: OfKeys(1),
    "keys of each sample and head": lambda: OfKeys(HEADS),
    "pairs of each sample": OfPairs,
}


class Block(nn.Module):
    """Attention with a bias, and what follows. slots: keys and values of so many learned vectors
    in place of the tokens'. plain: scores and their softmax one by one."""

    def __init__(self, bias: nn.Module, *, slots: int = 0, plain: bool = False) -> None:
        super().__init__()
        self.bias, self.plain = bias, plain
        self.norm = nn.LayerNorm(WIDTH)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, nn.Linear(WIDTH, WIDTH))
        self.fc1, self.fc2 = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.slots = nn.Parameter(torch.randn(slots, WIDTH)) if slots else None

    def forward(self, x: Tensor) -> Tensor:
        here = self.norm(x)
        read = here if self.slots is None else self.slots.expand(x.shape[0], -1, -1)
        q, k, v = (
            product(y).view(*y.shape[:2], HEADS, -1).transpose(1, 2)
            for product, y in ((self.q_proj, here), (self.k_proj, read), (self.v_proj, read))
        )
        bias = self.bias(here)
        if self.plain:
            mixed = (q @ k.mT / math.sqrt(q.shape[-1]) + bias).softmax(-1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        x = x + self.o_proj(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.fc2(F.gelu(self.fc1(x)))


class Added(nn.Module):
    """A block for every kind of bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(make()) for make in BIASES.values()])
        self.blocks.append(Block(Given(HEADS, 1, SLOTS), slots=SLOTS))
        self.blocks.append(Block(Bucketed(HEADS), plain=True))
        self.lm_head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.lm_head(x).flatten(0, 1), labels.flatten())


def pairs(step: int, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Words and others to predict."""
    return tokens(step, first, last, 0), tokens(step, first, last, 5)


def t5() -> nn.Module:
    """T5 with four heads: relative biases of encoder and decoder, which all of their layers
    share."""
    config = hf.T5Config(
        vocab_size=WORDS, d_model=WIDTH, d_kv=4, d_ff=24, num_layers=2, num_heads=HEADS,
        dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    return with_data(hf.T5ForConditionalGeneration(config), text)


MODELS: dict[str, Callable[[], nn.Module]] = {"added": lambda: with_data(Added(), pairs), "t5": t5}
LAYERS = {
    "added": ["embedding", *(f"block-{k}" for k in range(len(BIASES) + 2)), "head"],
    "t5": NAMES["t5"],
}


def cases_of(model: str) -> list[Case]:
    """Every way in which ranks share a layer, and pipelines of some."""
    end = len(LAYERS[model])
    one, two = ((0, end),), ((0, end // 2), (end // 2, end))
    ring: dict[str, Any] = {"exchange": "ring"}
    cases = [
        Case("tensor", model, one, tensor=2),
        Case("sequence parallel", model, one, tensor=2, sequence_parallel=True),
        Case("all-to-all", model, one, context=2),
        Case("ring", model, one, context=2, **ring),
        Case("three in a ring", model, one, context=3, **ring),
        Case("all-to-all, tensor", model, one, context=2, tensor=2),
        Case("ring, tensor", model, one, context=2, tensor=2, **ring),
        Case("four ranks", model, one, tensor=4),
        Case("pipeline of tensor ranks", model, two, tensor=2),
        Case("pipeline of rings", model, two, context=2, **ring),
        Case("ZeRO 3", model, one, context=2, **ring, options={"zero": 3}),
        Case("recomputed", model, one, context=2, **ring, options={"recomputation": "full"}),
    ]
    return [replace(case, layers=tuple(LAYERS[model])) for case in cases]


CASES = [case for model in MODELS for case in cases_of(model)]
QUICK = [case for model in MODELS for case in cases_of(model)[:4]]
WORLDS = sorted({case.world for case in CASES})
PREPARED: dict[str, tuple[Any, Split]] = {}


def made(name: str) -> Any:
    """A model with its first weights."""
    torch.manual_seed(3)
    return MODELS[name]()


def prepare() -> None:
    """Splits the models before there are ranks."""
    for name in MODELS:
        with default_type("float64"), doubled():
            module = made(name)
            names, data = LAYERS[name], example_of(module)
            PREPARED[name] = module, Split(module, names, data, None, None, "cpu")


def quick(rank: int, world: int, folder: Path) -> None:
    """Some cases of two ranks."""
    work(rank, world, folder, QUICK)


def work(rank: int, world: int, folder: Path, cases: Sequence[Case] = CASES) -> None:
    """A step of all cases of this size: its loss, and the parts of gradients that this rank answers
    for."""
    told: dict[Any, Any] = {}
    for case in (case for case in cases if case.world == world):
        module, split = PREPARED[case.model]
        own = copy.copy(split)
        own.layers = copy.deepcopy(split.layers)
        with default_type("float64"):
            with patch.object(chain, "Split", lambda *_, own=own, **__: own):
                model: Any = distribute(module, case.plan, probe=False)
            loss = model.train_step()
        gradients = {id(p): p.grad for _, p in model.updated()}
        parts = [
            (
                box.name,
                model.chain.parameters[box.name].dim,
                box.offsets[0],
                box.values.reshape(-1).clone(),
            )
            for box in model.boxes(gradients, deduplicated=True)
        ]
        told[case.name, case.model] = loss, parts
    torch.save(told, folder / f"told-{world}-{rank}.pt")


@cache
def alone(name: str) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one process."""
    with default_type("float64"), doubled():
        module = made(name)
        loss = Called(module)(*module.batch(0, 0, ROWS))
        loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in module.named_parameters()}
