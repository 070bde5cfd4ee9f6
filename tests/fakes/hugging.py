"""Small Hugging Face models with random weights, and two of other kinds, with data; factories take
a plan and ignore it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F

logging.getLogger("transformers").setLevel(logging.ERROR)

TOKENS, WORDS = 6, 40
NARROW = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
TEXT = {"vocab_size": WORDS, "num_hidden_layers": 3, "max_position_embeddings": 12, **NARROW}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def tokens(step: int, first: int, last: int, site: int) -> Tensor:
    """[rows, TOKENS] words of some rows of a step."""
    rows = torch.arange(first, last)[:, None] * 31 + step * 17 + site
    return (rows + torch.arange(TOKENS) * (3 + rows % 5)) ** 2 % WORDS


def text(step: int, first: int, last: int) -> tuple[dict[str, Tensor], Tensor]:
    """Texts of different lengths, padded: their masks, and labels where they count."""
    words = tokens(step, first, last, 0)
    lengths = 3 + torch.arange(first, last)[:, None] % (TOKENS - 2)
    mask = (torch.arange(TOKENS) < lengths).long()
    return {"input_ids": words, "attention_mask": mask}, words.masked_fill(mask == 0, -100)


def pictures(step: int, first: int, last: int) -> tuple[dict[str, Tensor], Tensor]:
    """Pictures [rows, 3, 8, 8] and classes."""
    rows = torch.arange(first, last, dtype=torch.get_default_dtype())
    places = torch.arange(192, dtype=torch.get_default_dtype())
    drawn = torch.sin((rows[:, None] + step) * (1 + places)).view(-1, 3, 8, 8)
    return {"pixel_values": drawn}, torch.arange(first, last) % 5


def gpt2(plan: object = None) -> nn.Module:
    """GPT-2, tied."""
    config = hf.GPT2Config(
        vocab_size=WORDS, n_embd=16, n_layer=3, n_head=2, n_positions=12,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return with_data(hf.GPT2LMHeadModel(config), text)


def llama(plan: object = None) -> nn.Module:
    """Llama with grouped heads and rotary embeddings."""
    return with_data(hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT, num_key_value_heads=1)), text)


def mixtral(plan: object = None) -> nn.Module:
    """Mixtral, four experts of which two work."""
    config = hf.MixtralConfig(**TEXT, num_key_value_heads=1, num_local_experts=4)
    return with_data(hf.MixtralForCausalLM(config), text)


def qwen(plan: object = None) -> nn.Module:
    """Qwen3's mixture, six experts of which two work, after a dense layer."""
    config = hf.Qwen3MoeConfig(
        **TEXT, num_key_value_heads=1, head_dim=8, num_experts=6, num_experts_per_tok=2,
        moe_intermediate_size=8, mlp_only_layers=[0],
    )  # fmt: skip
    return with_data(hf.Qwen3MoeForCausalLM(config), text)


def bert(plan: object = None) -> nn.Module:
    """BERT for masked words, tied."""
    return with_data(hf.BertForMaskedLM(hf.BertConfig(**TEXT, **QUIET)), text)


def t5(plan: object = None) -> nn.Module:
    """T5: encoder and decoder, relative biases of all layers, tied."""
    config = hf.T5Config(
        vocab_size=WORDS, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2,
        dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    return with_data(hf.T5ForConditionalGeneration(config), text)


def vit(plan: object = None) -> nn.Module:
    """ViT for classes."""
    config = hf.ViTConfig(
        **NARROW, **QUIET, num_hidden_layers=3, image_size=8, patch_size=4, num_labels=5
    )
    return with_data(hf.ViTForImageClassification(config), pictures)


class UNet(nn.Module):
    """Two steps down, two up, what was on the way down beside what is on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 3, 2, 1)])
        self.norm = nn.GroupNorm(2, 8)
        self.up = nn.ModuleList([nn.ConvTranspose2d(8, 4, 2, 2), nn.Conv2d(8, 3, 3, padding=1)])

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """The mean squared error of what takes the picture back."""
        high = F.relu(self.down[0](x), inplace=True)
        low = self.norm(F.relu(self.down[1](high), inplace=True))
        both = torch.cat([self.up[0](low), high], dim=1)
        return F.mse_loss(self.up[1](both), targets)


class Towers(nn.Module):
    """Users and things, a tower each; how well both go together."""

    def __init__(self) -> None:
        super().__init__()
        for name, inputs in (("user", 7), ("thing", 5)):
            self.add_module(name, nn.Sequential(nn.Linear(inputs, 12), nn.GELU(), nn.Linear(12, 6)))

    def forward(self, users: Tensor, things: Tensor) -> Tensor:
        """[rows] scores."""
        return (self.user(users) * self.thing(things)).sum(-1)


def unet(plan: object = None) -> nn.Module:
    """A U-Net."""

    def batch(step: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        x = pictures(step, first, last)[0]["pixel_values"]
        return x, x.flip(-1)

    return with_data(UNet(), batch)


def towers(plan: object = None) -> nn.Module:
    """Two towers whose loss is given apart."""

    def batch(step: int, first: int, last: int) -> tuple[dict[str, Tensor], Tensor]:
        x = pictures(step, first, last)[0]["pixel_values"].flatten(1)
        return {"users": x[:, :7], "things": x[:, 7:12]}, (x[:, 20] > 0).to(x.dtype)

    return with_data(Towers(), batch)


def with_data(module: nn.Module, batch: Callable[[int, int, int], Any]) -> nn.Module:
    """A module with what `hetplan run` asks it for."""
    module.batch = batch
    return module


LOSSES = {"towers": F.binary_cross_entropy_with_logits}
FACTORIES = {f.__name__: f for f in (gpt2, llama, bert, t5, vit, mixtral, unet, towers)}


def blocks(path: str, count: int = 3) -> list[str]:
    """Numbered layers."""
    return [f"{path}.{i}" for i in range(count)]


# the layers of each, as a trace names them, or as plans of a config.json do
CONFIGURED = ["embedding", "block-0", "block-1", "block-2", "head"]
NAMES = {
    "gpt2": ["transformer.wte", "transformer.wpe", "transformer.drop",
             *blocks("transformer.h"), "transformer.ln_f", "lm_head"],
    "llama": CONFIGURED,
    "mixtral": CONFIGURED,
    "bert": CONFIGURED,
    "t5": ["encoder.embed_tokens", "encoder.dropout", *blocks("encoder.block", 2),
           "encoder.final_layer_norm", "encoder.dropout#2", "decoder.embed_tokens",
           "decoder.dropout", *blocks("decoder.block", 2), "decoder.final_layer_norm",
           "decoder.dropout#2", "lm_head"],
    "vit": ["vit.embeddings", *blocks("vit.layers"), "vit.layernorm", "classifier"],
    "unet": ["down.0", "down.1", "norm", "up.0", "up.1"],
    "towers": [*blocks("user"), *blocks("thing")],
}  # fmt: skip
