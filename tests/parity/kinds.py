"""Every kind of plan of two ranks on models with learned biases of attention, with noise, and with
what a trace drops: the loss and every gradient of a step, and the same in one process. What a model
draws is that of one rank with the same micro-batches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F

from fakes.hugging import NAMES, TOKENS, WORDS, blocks, pictures, tokens, with_data
from fakes.research import Reversed
from hetplan.errors import HetplanError
from hetplan.plans.passes import FOLDED
from hetplan.plans.plan import Plan
from hetplan.runtime import distribute
from hetplan.runtime.engine import chain
from hetplan.runtime.engine.distributed import example_of
from hetplan.runtime.tracing.layers import Called, paired
from hetplan.runtime.tracing.split import Split
from parity.biases import HEADS, WIDTH, Block, Bucketed, Given, pairs, t5
from parity.device import default_type, doubled
from parity.divided import ROWS, planned


def whisper() -> nn.Module:
    """Whisper with four heads, on spectra made of pictures."""
    config = hf.WhisperConfig(
        vocab_size=WORDS, num_mel_bins=8, d_model=WIDTH, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=HEADS, decoder_attention_heads=HEADS, encoder_ffn_dim=24,
        decoder_ffn_dim=24, max_source_positions=12, max_target_positions=16, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip

    def batch(step: int, first: int, last: int) -> dict[str, Tensor]:
        drawn = pictures(step, first, last)[0]["pixel_values"].flatten(1)
        return {
            "input_features": drawn.view(-1, 8, 24),
            "labels": tokens(step, first, last, 3),
        }

    return with_data(hf.WhisperForConditionalGeneration(config), batch)


class Two(nn.Module):
    """Two blocks of attention with biases: one for all heads, and a table with one for each."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(Given(1, 1, TOKENS, TOKENS)), Block(Bucketed(HEADS))])
        self.lm_head = nn.Linear(WIDTH, WORDS)

    def between(self, x: Tensor) -> Tensor:
        """What passes from one block to the other."""
        return x

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        x = self.blocks[1](self.between(self.blocks[0](self.embedding(words))))
        return F.cross_entropy(self.lm_head(x).flatten(0, 1), labels.flatten())


class Noisy(Two):
    """Noise and dropout between the blocks."""

    def between(self, x: Tensor) -> Tensor:
        return F.dropout(x + 0.3 * torch.randn_like(x), 0.2, self.training)


class Hooked(Two):
    """A hook that changes a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head.weight.register_hook(lambda gradient: 2 * gradient)


class Reversing(Two):
    """Backward code of its own."""

    def between(self, x: Tensor) -> Tensor:
        return Reversed.apply(x)


class Centred(Two):
    """Statistics of the batch."""

    def between(self, x: Tensor) -> Tensor:
        return x - x.mean((0, 1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "t5": t5,
    "whisper": whisper,
    "biases": lambda: with_data(Two(), pairs),
    "noise": lambda: with_data(Noisy(), pairs),
}
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "hook": (lambda: with_data(Hooked(), pairs), "backward pass has code that a trace drops"),
    "function": (lambda: with_data(Reversing(), pairs), "backward pass has code that a trace"),
    "statistics": (lambda: with_data(Centred(), pairs), "samples influence each other"),
}
OWN = ["embedding", "block-0", "block-1", "head"]
LAYERS = {
    "t5": NAMES["t5"],
    "whisper": [
        "model.encoder.conv1", "model.encoder.conv2", *blocks("model.encoder.layers", 2),
        "model.encoder.layer_norm", "model.decoder.embed_tokens",
        "model.decoder.embed_positions", *blocks("model.decoder.layers", 2),
        "model.decoder.layer_norm", "proj_out",
    ],
}  # fmt: skip
SINGLE = [1, 1, 1, 1]  # samples of the micro-batches, which all plans have alike
# The order of the passes of two stages: the second one takes the micro-batches backwards in pairs.
ORDERS = [
    ["F0", "F1", "F2", "F3", "B1", "D0", "B3", "D2", "W3", "W1"],
    ["F1", "F0", "D1", "B0", "F3", "F2", "W0", "D3", "D2"],
]


def stage(layers: list[list[int]], *groups: list[int]) -> dict[str, Any]:
    """A stage of row groups of equal ranks."""
    return {
        "layers": layers,
        "devices": list(groups),
        "row_shares": [1.0] * len(groups),
        "tensor_shares": [1.0] * len(groups[0]),
    }


def plans_of(model: str) -> dict[str, Plan]:
    """Kind -> a plan of two ranks for a model, and one of a single rank."""
    names = LAYERS.get(model, OWN)
    n = len(names)
    a, b, c = max(1, n // 4), n // 2, -(-3 * n // 4)
    whole, flat = [[0, n]], [stage([[0, b]], [0]), stage([[b, n]], [1])]
    on_a_v = [stage([[0, a], [c, n]], [0]), stage([[a, b], [b, c]], [1])]
    in_turn = [stage([[0, a], [b, c]], [0]), stage([[a, b], [c, n]], [1])]
    replicas = [([stage(whole, [rank])], [1, 1]) for rank in (0, 1)]
    kinds: dict[str, tuple[list[Any], dict[str, Any]]] = {
        "one": ([([stage(whole, [0])], SINGLE)], {}),
        **{
            f"data, ZeRO {level}": (replicas, {"zero": level}) for level in (0, 1, 2, 3)
        },
        "tensor": ([([stage(whole, [0, 1])], SINGLE)], {}),
        "sequence parallel": (
            [([stage(whole, [0, 1])], SINGLE)], {"degrees": {"sequence_parallel": True}},
        ),
        **{
            exchange: (
                [([stage(whole, [0], [1])], SINGLE)],
                {"degrees": {"context": 2, "exchange": exchange}},
            )
            for exchange in ("all-to-all", "ring")
        },
        **{
            name: ([(flat, SINGLE)], {"schedule": name})
            for name in ("gpipe", "1f1b", "zb-h1", "zb-h2")
        },
        **{name: ([(on_a_v, SINGLE)], {"schedule": name}) for name in FOLDED},
        "interleaved": ([(in_turn, SINGLE)], {"schedule": "interleaved-1f1b"}),
        "explicit": ([(flat, SINGLE)], {"schedule": "explicit", "passes": [ORDERS]}),
        "recomputed": ([(flat, SINGLE)], {"recomputation": "full"}),
    }  # fmt: skip
    return {
        kind: planned(kind, 1 if kind == "one" else 2, of_kind, names, **options)
        for kind, (of_kind, options) in kinds.items()
    }


KINDS = [kind for kind in plans_of("noise") if kind != "one"]
WORLDS = [1, 2]
PREPARED: dict[str, tuple[Any, Split]] = {}


def made(name: str) -> Any:
    """A model with its first weights."""
    torch.manual_seed(3)
    return MODELS[name]() if name in MODELS else REFUSED[name][0]()


def prepare() -> None:
    """Splits the models before there are ranks."""
    for name in MODELS:
        with default_type("float64"), doubled():
            module = made(name)
            data = example_of(module)
            PREPARED[name] = module, Split(module, LAYERS.get(name, OWN), data, None, None, "cpu")


def trained(name: str, plan: Plan) -> Any:
    """(loss, [parts of gradients that this rank answers for]) of a step, or the text of a
    refusal."""
    module, split = PREPARED[name]
    own = copy.copy(split)
    own.layers = copy.deepcopy(split.layers)
    with default_type("float64"):
        try:
            with patch.object(chain, "Split", lambda *_, own=own, **__: own):
                model: Any = distribute(module, plan, probe=False)
        except HetplanError as error:
            return str(error)
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
    return loss, parts


def work(rank: int, world: int, folder: Path) -> None:
    """A step of all models under all plans of this size, and what is said of the others."""
    told: dict[Any, Any] = {}
    for name in MODELS:
        for kind, plan in plans_of(name).items():
            if plan.world_size == world:
                told[name, kind] = trained(name, plan)
    if world == 2:
        for name in REFUSED:
            told[name] = refused(made(name), plans_of(name)["tensor"])
    torch.save(told, folder / f"told-{world}-{rank}.pt")


def refused(module: Any, plan: Plan) -> str:
    """The text with which a module is refused; empty where it is not."""
    try:
        distribute(module, plan)
    except HetplanError as error:
        return str(error)
    return ""


@cache
def alone(name: str) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one process."""
    with default_type("float64"), doubled():
        module = made(name)
        loss = Called(module)(*paired(module.batch(0, 0, ROWS)))
        loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in module.named_parameters()}
