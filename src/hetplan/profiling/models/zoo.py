"""The built-in models by name: published shapes and parameter counts, each with its source.

A `ModelSpec` is a model without a sequence length; its method `chain` gives the layers for one.
Image models (ViT, VGG, and TransGAN's generator as the AMP authors changed it) have a fixed size of
samples, and no sequence length.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from hetplan.errors import UnsupportedError, look_up, require
from hetplan.files import read_yaml
from hetplan.profiling.models.adapters import Adapters, check_modules
from hetplan.profiling.models.encoders import vit_layers
from hetplan.profiling.models.function import Function, Rope
from hetplan.profiling.models.operators import Attention, Elementwise, Layer, Matmul, Saved
from hetplan.profiling.models.transformer import (
    Experts,
    Transformer,
    block,
    modules_of,
    transformer,
    transformer_layers,
)
from hetplan.profiling.source_files import SourceFile

# Widths of VGG-19's 3x3 convolutions; 0: pooling.
VGG19 = (
    *(64, 64, 0),
    *(128, 128, 0),
    *(256, 256, 256, 256, 0),
    *(512, 512, 512, 512, 0),
    *(512, 512, 512, 512, 0),
)
# Longer than the context of any model. Attention has tensors of this number squared; the square is
# still within the limits of numbers in files (`schema`).
LONGEST_SEQUENCE = 10**8


@dataclass(frozen=True)
class Published:
    """The published size of a model. The parameters that hetplan counts are within 0.5 % of it."""

    params: float  # number of parameters
    source: str


@dataclass(frozen=True)
class ModelSpec:
    """A model at any sequence length."""

    name: str
    source: str  # where the shape was published
    sequence: int | None  # default tokens per sample; None for images, whose size is fixed
    build: Callable[[int], tuple[Layer, ...]]  # sequence -> layers; image models ignore it
    fits: Callable[[int], bool]  # tensor degree -> whether it divides the model evenly
    published: Published | None = None  # None where no size was published
    notes: tuple[str, ...] = ()  # sentences for the user, such as the keys that were assumed
    shape: Transformer | None = None  # the shape of a text model
    encoder: Transformer | None = None  # the shape of a vision transformer
    # samples -> the `SingleProgram` (`programs`) of one step, for a user's torch module
    program: Callable[[int], Any] | None = None
    # rows of a global batch -> nothing; raises UnsupportedError where several runs of a program in
    # an iteration train the user's module otherwise than one process does
    check_runs: Callable[[int], None] | None = None
    file: SourceFile | None = None  # the user's file that describes the model
    kind: str = ""  # Hugging Face's `model_type`; empty: unknown, or that of the shape's function

    @property
    def model_type(self) -> str:
        """Hugging Face's `model_type`; empty where it is unknown."""
        if not self.kind and self.shape is not None and self.shape.function is not None:
            return self.shape.function.kind
        return self.kind

    def with_attention(self, attention: Attention) -> "ModelSpec":
        """The model with another attention where it is a text model, else the same model."""
        if self.shape is None:
            return self
        shape = replace(self.shape, attention=attention)
        return replace(self, shape=shape, build=lambda s: transformer_layers(shape, s))

    def with_adapters(self, adapters: Adapters) -> "ModelSpec":
        """The model with frozen weights and adapters beside them. Raises UnsupportedError for a
        model that is no language model of known sizes, InputError for modules that it lacks."""
        shape = self.shape
        if shape is None:
            raise UnsupportedError(
                "adapters are for language models of known sizes",
                where=self.name,
                got="a model of images, of several texts, or a traced module",
                expected="a built-in language model, or a config.json of one",
            )
        shape = replace(shape, adapters=adapters.beside(self.model_type))
        products = [
            modules_of(shape.at(index), op.name, int(op.n))
            for index in range(shape.layers)
            for op in block(shape, 1, index).operators
            if isinstance(op, Matmul) and op.weight
        ]
        check_modules(adapters, list(dict.fromkeys(products)), where=self.name)
        layers = transformer_layers(shape, 1)  # parameters do not depend on the sequence length
        trained = sum(layer.trained for layer in layers)
        return replace(
            self,
            shape=shape,
            build=lambda s: transformer_layers(shape, s),
            notes=(*self.notes, f"{adapters.text}: {trained:,} parameters are trained"),
        )

    def chain(self, sequence: int | None = None) -> tuple[int | None, tuple[Layer, ...]]:
        """(sequence length, layers) for a sequence length, or for the default one.

        Raises InputError for an image model with a sequence length, and for a length out of range.
        """
        if self.sequence is None:
            require(
                sequence is None,
                "this model takes images and has no sequence length",
                where=self.name,
                got=sequence,
            )
            return None, self.build(0)
        chosen = self.sequence if sequence is None else sequence
        require(
            1 <= chosen <= LONGEST_SEQUENCE,
            "sequence length is not usable",
            where=self.name,
            got=chosen,
            expected=f"1 to {LONGEST_SEQUENCE}",
        )
        positions = 0 if self.shape is None else self.shape.positions
        require(
            not positions or chosen <= positions,
            "sequence is longer than the learned positions",
            where=self.name,
            got=chosen,
            expected=f"at most {positions}",
        )
        return chosen, self.build(chosen)


def text_model(
    name: str,
    source: str,
    sequence: int,
    shape: Transformer,
    published: Published | None = None,
    *,
    notes: tuple[str, ...] = (),
) -> ModelSpec:
    """The language model of a shape."""
    return ModelSpec(
        name,
        source,
        sequence,
        build=lambda s: transformer_layers(shape, s),
        fits=shape.tensor_degree_fits,
        published=published,
        notes=notes,
        shape=shape,
    )


# The fields in which each family of models differs from the defaults of `Transformer`.

# GPT-2 (Radford et al. 2019): learned positions, biases, tied head, dropout.
GPT2: dict[str, Any] = {
    "vocabulary": 50257,
    "positions": 1024,
    "function": Function("gpt2", "gelu_new", 1e-5, attention_dropout=0.1, hidden_dropout=0.1),
}
# Llama (Touvron et al. 2023): RMSNorm, SwiGLU, rotary positions, no biases.
LLAMA: dict[str, Any] = {
    "rotary": True,
    "gated": True,
    "norm": "rms",
    "dropout": False,
    "attention_bias": False,
    "output_bias": False,
    "feed_forward_bias": False,
}
# BERT with its pre-training heads (Devlin et al. 2019).
BERT: dict[str, Any] = {
    "embedding_norm": True,
    "final_norm": False,
    "head": "bert",
    "function": Function(
        "bert",
        "gelu",
        1e-12,
        norms="behind",
        attention_dropout=0.1,
        hidden_dropout=0.1,
        others="attention to both sides, BERT's heads",
    ),
}
# GLM-130B (Zeng et al. 2023): DeepNorm, GeGLU, rotary positions, biases, tied head.
GLM: dict[str, Any] = {
    "vocabulary": 150528,
    "rotary": True,
    "gated": True,
    "dropout": False,
    "function": Function(
        "glm",
        "gelu",
        1e-5,
        norms="behind",
        rope=Rope(10000.0),
        others="scaled residuals (DeepNorm)",
    ),
}


def llama_function(theta: float) -> Function:
    """The function of a Llama. theta: the base of its rotary positions."""
    return Function("llama", "silu", 1e-5, rope=Rope(theta))


def gpt2(layers: int, hidden: int, heads: int, **changes: Any) -> Transformer:
    """The shape of a model of the GPT-2 family."""
    return transformer(layers, hidden, heads, 4 * hidden, **{**GPT2, **changes})


def llama(layers: int, hidden: int, heads: int, feed_forward: int, **changes: Any) -> Transformer:
    """The shape of a model of the Llama family, whose head does not share the embedding."""
    return transformer(
        layers,
        hidden,
        heads,
        feed_forward,
        **{
            **LLAMA,
            "vocabulary": 32000,
            "tied": False,
            "function": llama_function(10000.0),
            **changes,
        },
    )


def bert(layers: int, hidden: int, heads: int, feed_forward: int, **changes: Any) -> Transformer:
    """The shape of a model of the BERT family."""
    return transformer(
        layers,
        hidden,
        heads,
        feed_forward,
        **{**BERT, "vocabulary": 30522, "positions": 512, "types": 2, **changes},
    )


def checkpoint(params: int, repository: str) -> Published:
    """The exact number of parameters of a checkpoint on the Hugging Face hub."""
    return Published(params, f"Hugging Face hub, {repository}")


def torchvision(params: int, name: str) -> Published:
    """The exact number of parameters in torchvision's table of weights."""
    return Published(params, f"torchvision {name}, IMAGENET1K_V1")


def encoder(hidden: int, layers: int, heads: int, feed_forward: int, **changes: Any) -> Transformer:
    """The shape of a transformer encoder without vocabulary or dropout."""
    return transformer(
        layers, hidden, heads, feed_forward, **{"vocabulary": 0, "dropout": False, **changes}
    )


@cache
def layers_in_file(network: str) -> tuple[Layer, ...]:
    """The layers of a network in `networks.yaml`.

    For VGG-19 they are all layers; for TransGAN's generator the first, the last, and the layer
    between its two groups of blocks.
    """
    layers = []
    for row in read_yaml(Path(__file__).with_name("networks.yaml"))[network]:
        operators: list[Matmul | Elementwise] = []
        for values in row["operators"]:
            if "m" in values:  # a matrix product has the sizes m, k and n
                operators.append(Matmul(**values))
            else:
                operators.append(Elementwise(**values))
        saved = [Saved(**tensor) for tensor in row["saved"]]
        fields = {**row, "operators": tuple(operators), "saved": tuple(saved)}
        layers.append(Layer(**fields))
    return tuple(layers)


def transgan_layers(
    wide: Transformer, narrow: Transformer, *, bottom: int = 9
) -> tuple[Layer, ...]:
    """The layers of TransGAN's generator (Jiang et al. 2021) as AMP uses it: blocks at two of its
    six resolutions.

    Source: AMP (NeurIPS 2022), Section 4.1 and its released configuration (bottom 9).

    wide: blocks with h = 1024 on bottom x bottom tokens, the first resolution. narrow: blocks with
    h = 16 on (32 bottom)^2 tokens, whose attention has windows of 16 x 16.
    """
    first, upsample, last = layers_in_file("transgan-amp")
    before = [block(wide, bottom**2, i) for i in range(wide.layers)]
    after = [block(narrow, (32 * bottom) ** 2, wide.layers + i) for i in range(narrow.layers)]
    return (first, *before, upsample, *after, last)


def vit(name: str, shape: Transformer, published: Published) -> ModelSpec:
    """ViT with patches of 16 x 16 pixels on images of 224 x 224 pixels, and 1000 classes."""
    return ModelSpec(
        name,
        "Dosovitskiy et al. 2021, Table 1",
        sequence=None,
        build=lambda _: vit_layers(shape),
        fits=shape.tensor_degree_fits,
        published=published,
        encoder=shape,
    )


def transgan() -> ModelSpec:
    """AMP's heterogeneous model: 12 blocks with hidden size 1024, 12 blocks with hidden size 16."""
    heads = 4
    plain = {"norm": "pixel", "attention_bias": False}
    wide = encoder(1024, 12, heads, 4096, **plain)
    narrow = encoder(16, 12, heads, 64, window=256, **plain)
    return ModelSpec(
        "transgan-amp",
        "AMP (NeurIPS 2022), Section 4.1, after TransGAN (Jiang et al. 2021)",
        sequence=None,
        build=lambda _: transgan_layers(wide, narrow),
        fits=lambda tensor: heads % tensor == 0,
    )


AMP = "AMP (NeurIPS 2022), Section 4.1: L = 24, H = 1024; vocabulary padded as in its release"
ASTRA = "size named in Astra; shape chosen by hetplan"
DEVLIN = "Devlin et al. 2019, Section 3"
HAP = "HAP (EuroSys 2024), Section 7: BERT-base, top-2 experts in every second block; 8 experts"
LLAMA_2 = "Touvron et al. 2023 (Llama 2), Appendix A.2"
LLAMA_3 = "Grattafiori et al. 2024 (Llama 3), Table 3"
POPLAR = "size named in Poplar (AAAI 2025); shape chosen by hetplan"
RADFORD = "Radford et al. 2019, Table 2"

NAMED_BY_POPLAR = "the name, in Poplar's experiments"
# grouped queries and a larger vocabulary
LLAMA_3_SHAPE: dict[str, Any] = {
    "kv_heads": 8,
    "vocabulary": 128256,
    "function": llama_function(500000.0),
}
GPT2_MEDIUM_PARAMS, BERT_BASE_PARAMS = 354_823_168, 110_106_428
# HAP's Table 1 (84 + 36 m million parameters on m devices) is of a narrower BERT whose width the
# paper does not state; here it is BERT-base, and 8 experts in six of its blocks.
BERT_MOE = bert(12, 768, 12, 3072, experts=Experts(count=8, active=2, every=2))

MODELS = (
    text_model("gpt2", RADFORD, 1024, gpt2(12, 768, 12), checkpoint(124_439_808, "gpt2")),
    text_model(
        "gpt2-medium",
        RADFORD,
        1024,
        gpt2(24, 1024, 16),
        checkpoint(GPT2_MEDIUM_PARAMS, "gpt2-medium"),
    ),
    text_model(
        "gpt2-large", RADFORD, 1024, gpt2(36, 1280, 20), checkpoint(774_030_080, "gpt2-large")
    ),
    text_model("gpt2-xl", RADFORD, 1024, gpt2(48, 1600, 25), checkpoint(1_557_611_200, "gpt2-xl")),
    text_model(
        "gpt2-amp",
        AMP,
        1024,
        gpt2(24, 1024, 16, vocabulary=52256),
        Published(
            GPT2_MEDIUM_PARAMS + 1999 * 1024,
            "gpt2-medium and the rows that pad its 50257 tokens to 52256",
        ),
    ),
    text_model(
        "glm-67b",
        ASTRA,
        2048,
        transformer(80, 8192, 64, 22528, **GLM),
        Published(67e9, "the name, in Astra's tables; no such model is released"),
    ),
    # The released GLM-130B has 128.7e9 parameters, because its head shares the embedding. The 130e9
    # of its name are reached within 0.5 % only by counting the embedding twice: the first and the
    # last pipeline stage both hold it.
    text_model(
        "glm-130b",
        "Zeng et al. 2023 (GLM-130B), Section 2; release, configs/model_glm_130b.sh",
        2048,
        transformer(70, 12288, 96, 32768, **GLM),
        Published(240 * 2**30 / 2, "released fp16 checkpoint: 240 GiB (zai-org/GLM-130B#80)"),
    ),
    text_model(
        "llama-0.5b",
        POPLAR,
        2048,
        llama(21, 1280, 20, 3456),
        Published(0.5e9, NAMED_BY_POPLAR),
    ),
    text_model(
        "llama-1.1b",
        "TinyLlama (Zhang et al. 2024), Table 1",
        2048,
        llama(22, 2048, 32, 5632, kv_heads=4),
        checkpoint(1_100_048_384, "TinyLlama/TinyLlama_v1.1"),
    ),
    text_model(
        "llama2-7b",
        LLAMA_2,
        4096,
        llama(32, 4096, 32, 11008),
        checkpoint(6_738_415_616, "meta-llama/Llama-2-7b-hf"),
    ),
    text_model(
        "llama2-13b",
        LLAMA_2,
        4096,
        llama(40, 5120, 40, 13824),
        checkpoint(13_015_864_320, "meta-llama/Llama-2-13b-hf"),
    ),
    text_model(
        "llama2-70b",
        LLAMA_2,
        4096,
        llama(80, 8192, 64, 28672, kv_heads=8),
        checkpoint(68_976_648_192, "meta-llama/Llama-2-70b-hf"),
    ),
    text_model(
        "llama3-8b",
        LLAMA_3,
        8192,
        llama(32, 4096, 32, 14336, **LLAMA_3_SHAPE),
        checkpoint(8_030_261_248, "meta-llama/Meta-Llama-3-8B"),
    ),
    text_model(
        "llama3-70b",
        LLAMA_3,
        8192,
        llama(80, 8192, 64, 28672, **LLAMA_3_SHAPE),
        checkpoint(70_553_706_496, "meta-llama/Meta-Llama-3-70B"),
    ),
    text_model(
        "bert-base",
        DEVLIN,
        512,
        bert(12, 768, 12, 3072),
        checkpoint(BERT_BASE_PARAMS, "google-bert/bert-base-uncased with both heads"),
    ),
    text_model(
        "bert-large",
        DEVLIN,
        512,
        bert(24, 1024, 16, 4096),
        checkpoint(336_226_108, "google-bert/bert-large-uncased with both heads"),
    ),
    text_model(
        "bert-1.1b", POPLAR, 512, bert(20, 2048, 32, 8448), Published(1.1e9, NAMED_BY_POPLAR)
    ),
    text_model(
        "bert-moe",
        HAP,
        512,
        BERT_MOE,
        Published(
            BERT_BASE_PARAMS + 6 * (7 * (2 * 768 * 3072 + 3072 + 768) + 8 * 768),
            "bert-base with the experts and routers that are added to it",
        ),
    ),
    vit("vit-base", encoder(768, 12, 12, 3072), torchvision(86_567_656, "vit_b_16")),
    vit("vit-large", encoder(1024, 24, 16, 4096), torchvision(304_326_632, "vit_l_16")),
    ModelSpec(
        "vgg19",
        "Simonyan and Zisserman 2015, Table 1 (E)",
        sequence=None,
        build=lambda _: layers_in_file("vgg19"),
        fits=lambda tensor: tensor == 1,
        published=torchvision(143_667_240, "vgg19"),
    ),
    transgan(),
)
BUILT_IN = {model.name: model for model in MODELS}


def built_in(name: str) -> ModelSpec:
    """The built-in model called `name`. Raises InputError that suggests the nearest names."""
    return look_up("unknown model", name, BUILT_IN)
