"""The built-in models: published shapes, each with its source, by lower-case name.

A `ModelSpec` is a model without a sequence length; `chain` gives its layers for one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hetplan.errors import InputError
from hetplan.names import unknown_name
from hetplan.profiling.architecture import Experts, Transformer
from hetplan.profiling.operators import Layer
from hetplan.profiling.transformer import transformer_layers
from hetplan.profiling.vision import encoder, transgan_layers, vgg_layers, vit_layers

# Far beyond any context; the squares in attention stay within what files may carry.
LONGEST_SEQUENCE = 10**8

POPLAR = "size named in Poplar (AAAI 2025); shape chosen by hetplan"


@dataclass(frozen=True)
class ModelSpec:
    """A model's shape. sequence: the default number of tokens, None for images, whose size is fixed.

    build: sequence -> layers (images: ignores it). fits: whether a tensor-parallel degree divides it.
    """

    name: str
    source: str
    sequence: int | None
    build: Callable[[int], tuple[Layer, ...]]
    fits: Callable[[int], bool]

    def chain(self, sequence: int | None = None) -> tuple[int | None, tuple[Layer, ...]]:
        """The sequence length in force and the layers; raises InputError for a sequence on an image model."""
        if self.sequence is None:
            if sequence is not None:
                raise InputError(
                    "this model takes images and has no sequence length", where=self.name, got=sequence
                )
            return None, self.build(0)
        chosen = self.sequence if sequence is None else sequence
        if not 1 <= chosen <= LONGEST_SEQUENCE:
            expected = f"1 to {LONGEST_SEQUENCE}"
            raise InputError("sequence length is not usable", where=self.name, got=chosen, expected=expected)
        return chosen, self.build(chosen)


def text_model(name: str, source: str, sequence: int, shape: Transformer) -> ModelSpec:
    """A language model as a ModelSpec."""
    return ModelSpec(name, source, sequence, lambda s: transformer_layers(shape, s), shape.tensor_degree_fits)


def gpt2(layers: int, hidden: int, heads: int, **changes: Any) -> Transformer:
    """GPT-2 (Radford et al. 2019): learned positions, biases, tied head, dropout."""
    shape = Transformer(
        vocabulary=50257, hidden=hidden, layers=layers, heads=heads, feed_forward=4 * hidden,
        kv_heads=heads, head_dim=hidden // heads, positions=1024,
    )  # fmt: skip
    return replace(shape, **changes)


def llama(layers: int, hidden: int, heads: int, feed_forward: int, **changes: Any) -> Transformer:
    """Llama (Touvron et al. 2023): RMSNorm, SwiGLU, rotary positions, no biases, untied head."""
    shape = Transformer(
        vocabulary=32000, hidden=hidden, layers=layers, heads=heads, feed_forward=feed_forward,
        kv_heads=heads, head_dim=hidden // heads, rotary=True, gated=True, norm="rms", attention_bias=False,
        output_bias=False, feed_forward_bias=False, tied=False, dropout=False, attention="fused",
    )  # fmt: skip
    return replace(shape, **changes)


def bert(layers: int, hidden: int, heads: int, feed_forward: int, **changes: Any) -> Transformer:
    """BERT with its pre-training heads (Devlin et al. 2019)."""
    shape = Transformer(
        vocabulary=30522, hidden=hidden, layers=layers, heads=heads, feed_forward=feed_forward,
        kv_heads=heads, head_dim=hidden // heads, positions=512, types=2, embedding_norm=True,
        final_norm=False, head="bert",
    )  # fmt: skip
    return replace(shape, **changes)


def glm(layers: int, hidden: int, heads: int, feed_forward: int) -> Transformer:
    """GLM-130B's kind (Zeng et al. 2023): DeepNorm, GeGLU, rotary positions, biases, tied head."""
    return Transformer(
        vocabulary=150528, hidden=hidden, layers=layers, heads=heads, feed_forward=feed_forward,
        kv_heads=heads, head_dim=hidden // heads, rotary=True, gated=True, dropout=False, attention="fused",
    )  # fmt: skip


def transgan() -> ModelSpec:
    """AMP's heterogeneous model: 12 blocks of 1024, 12 of 16."""
    plain = {"norm": "pixel", "attention_bias": False}
    wide = encoder(1024, 12, 4, 4096, **plain)
    narrow = encoder(16, 12, 4, 64, window=256, **plain)
    source = "AMP (NeurIPS 2022), Section 4.1, after TransGAN (Jiang et al. 2021)"
    return ModelSpec(
        "transgan-amp", source, None, lambda _: transgan_layers(wide, narrow), lambda tp: 4 % tp == 0
    )


def vit(name: str, shape: Transformer) -> ModelSpec:
    """ViT with patches of 16 on 224 x 224 images, 1000 classes."""
    source = "Dosovitskiy et al. 2021, Table 1"
    return ModelSpec(name, source, None, lambda _: vit_layers(shape), shape.tensor_degree_fits)


def gpt_models() -> list[ModelSpec]:
    """GPT-2 in its four sizes and as AMP trains it, GLM."""
    radford = "Radford et al. 2019, Table 2"
    amp = "AMP (NeurIPS 2022), Section 4.1: L = 24, H = 1024; vocabulary padded as in its release"
    named = "size named in Astra; shape chosen by hetplan"
    return [
        text_model("gpt2", radford, 1024, gpt2(12, 768, 12)),
        text_model("gpt2-medium", radford, 1024, gpt2(24, 1024, 16)),
        text_model("gpt2-large", radford, 1024, gpt2(36, 1280, 20)),
        text_model("gpt2-xl", radford, 1024, gpt2(48, 1600, 25)),
        text_model("gpt2-amp", amp, 1024, gpt2(24, 1024, 16, vocabulary=52256)),
        text_model("glm-67b", named, 2048, glm(80, 8192, 64, 22528)),
        text_model("glm-130b", "Zeng et al. 2023 (GLM-130B), appendix", 2048, glm(70, 12288, 96, 32768)),
    ]


def llama_models() -> list[ModelSpec]:
    """Llama 2, Llama 3, TinyLlama, and Poplar's small one."""
    llama2 = "Touvron et al. 2023 (Llama 2), Appendix A.2"
    llama3 = "Grattafiori et al. 2024 (Llama 3), Table 3"
    tiny = "TinyLlama (Zhang et al. 2024), Table 1"
    wide = {"kv_heads": 8, "vocabulary": 128256}
    return [
        text_model("llama-0.5b", POPLAR, 2048, llama(21, 1280, 20, 3456)),
        text_model("llama-1.1b", tiny, 2048, llama(22, 2048, 32, 5632, kv_heads=4)),
        text_model("llama2-7b", llama2, 4096, llama(32, 4096, 32, 11008)),
        text_model("llama2-13b", llama2, 4096, llama(40, 5120, 40, 13824)),
        text_model("llama2-70b", llama2, 4096, llama(80, 8192, 64, 28672, kv_heads=8)),
        text_model("llama3-8b", llama3, 8192, llama(32, 4096, 32, 14336, **wide)),
        text_model("llama3-70b", llama3, 8192, llama(80, 8192, 64, 28672, **wide)),
    ]


def bert_models() -> list[ModelSpec]:
    """BERT, Poplar's larger one, and HAP's mixture of experts."""
    devlin = "Devlin et al. 2019, Section 3"
    hap = "HAP (EuroSys 2024), Section 7: BERT-base, top-2 experts in every second block; 8 experts"
    moe = Experts(count=8, active=2, every=2)
    return [
        text_model("bert-base", devlin, 512, bert(12, 768, 12, 3072)),
        text_model("bert-large", devlin, 512, bert(24, 1024, 16, 4096)),
        text_model("bert-1.1b", POPLAR, 512, bert(20, 2048, 32, 8448)),
        text_model("bert-moe", hap, 512, bert(12, 768, 12, 3072, experts=moe)),
    ]


def image_models() -> list[ModelSpec]:
    """ViT, VGG and AMP's generator."""
    simonyan = "Simonyan and Zisserman 2015, Table 1 (E)"
    return [
        vit("vit-base", encoder(768, 12, 12, 3072)),
        vit("vit-large", encoder(1024, 24, 16, 4096)),
        ModelSpec("vgg19", simonyan, None, lambda _: vgg_layers(), lambda tensor: tensor == 1),
        transgan(),
    ]


BUILT_IN: dict[str, ModelSpec] = {
    model.name: model
    for models in (gpt_models, llama_models, bert_models, image_models)
    for model in models()
}


def built_in(name: str) -> ModelSpec:
    """The built-in model `name`; raises InputError that suggests the nearest names."""
    if name not in BUILT_IN:
        raise unknown_name("unknown model", name, BUILT_IN)
    return BUILT_IN[name]
