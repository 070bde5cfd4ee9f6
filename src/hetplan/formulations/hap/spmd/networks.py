"""The single-device programs of known networks, all written with the same blocks.

`model` gives the networks of HAP's Table 1, GPT-2 and a stack of Llama blocks: VGG19 (Simonyan and
Zisserman 2014) on CIFAR's images, whose last 1 x 1 map is repeated to the 7 x 7 that the dense
layers expect (as adaptive pooling does), ViT (Dosovitskiy et al. 2021) on unfolded patches with a
mean in place of the class token, BERT (Devlin et al. 2019) with its masked language model's loss on
every token, every second feed-forward network a mixture of experts where asked (GShard, Lepikhin et
al. 2020), GPT-2 (Radford et al. 2019), Llama (Touvron et al. 2023). No dropout. Each is written for
two sizes: as published, and `tiny`, the same operators on tensors small enough to be executed in a
test. Tokens and patches are marked `unsliced`: where samples can be sliced too, slicing tokens
saves nothing more.

`program_of` gives the planner's models, layer by layer as their profiles have them. Blocks are
written with norms first (after costs the same), without dropout, token types and pooler; a mixture
of experts is GShard's dispatch with an even load's places, as profiles assume. A class token is one
more patch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hetplan.errors import InputError, UnsupportedError
from hetplan.formulations.hap.spmd.program import SingleProgram, Writer
from hetplan.profiling.models import Model
from hetplan.profiling.transformer import Experts, Transformer
from hetplan.profiling.vision import VGG19


def shape(layers: int, hidden: int, heads: int, feed: int, **changes: Any) -> Transformer:
    """A transformer's shape; networks give vocabularies and positions themselves."""
    plain = Transformer(
        vocabulary=0, hidden=hidden, layers=layers, heads=heads, feed_forward=feed,
        kv_heads=heads, head_dim=hidden // heads,
    )  # fmt: skip
    return replace(plain, **changes)


def sizes(
    layers: int, tiny: bool, devices: int, hidden: int = 768, heads: int = 12, feed: int = 3072
) -> Transformer:
    """As published; or as small as dimensions that every device shall have a part of can be."""
    if not tiny:
        return shape(layers, hidden, heads, feed)
    heads, each = max(2, devices), devices + devices % 2
    return shape(layers, heads * each, heads, 2 * heads)


@dataclass(frozen=True)
class Names:
    """What a block's nodes are called; `{}` is the block. Instances and plan files have them."""

    attention: str = "{}.attention"
    scores: str = "{}.attention.heads"
    feed: str = "{}.ff"
    norms: tuple[str, str] = ("{}.norm1", "{}.norm2")
    sums: tuple[str, str] = ("{}.x", "{}.y")


class Blocks:
    """Writes blocks of a shape. g groups of r query heads share keys and values."""

    def __init__(self, w: Writer, t: Transformer, names: Names, *, causal: bool) -> None:
        self.w, self.t, self.names, self.causal = w, t, names, causal

    def norm(self, name: str, x: str) -> str:
        """The shape's kind of norm."""
        w, width = self.w, (self.t.hidden,)
        scale = w.parameter(f"{name}.scale", width)
        if self.t.norm == "rms":
            return w.apply("rms-norm", name, x, scale)
        return w.apply("layer-norm", name, x, scale, w.parameter(f"{name}.shift", width))

    def attention(self, block: str, x: str) -> str:
        """Projections to heads, attention, projection back."""
        w, t, name = self.w, self.t, self.names.attention.format(block)
        g, r = t.kv_heads, t.heads // t.kv_heads
        weight, bias = (g, (r + 2) * t.head_dim, t.hidden), "gd" if t.attention_bias else None
        x = w.linear(f"{name}.qkv", x, "bsh,gdh->bgsd", weight, bias)
        scores = self.names.scores.format(block)
        x = w.apply("attention", scores, x, causal=self.causal, rotary=t.rotary, queries=r)
        weight, bias = (t.hidden, g, r * t.head_dim), "h" if t.output_bias else None
        return w.linear(f"{name}.out", x, "bgsd,hgd->bsh", weight, bias)

    def feed_forward(self, block: str, x: str) -> str:
        """Up, activation, down."""
        w, t, name = self.w, self.t, self.names.feed.format(block)
        up, down = (t.feed_forward, t.hidden), (t.hidden, t.feed_forward)
        biased = t.feed_forward_bias
        if t.gated:
            both = (t.feed_forward, 2, t.hidden)
            x = w.linear(f"{name}.up", x, "bsh,fuh->bsfu", both, "fu" if biased else None)
            x = w.apply("gated", f"{name}.gated", x)
        else:
            x = w.linear(f"{name}.up", x, "bsh,fh->bsf", up, "f" if biased else None)
            x = w.apply("gelu", f"{name}.gelu", x)
        return w.linear(f"{name}.down", x, "bsf,hf->bsh", down, "h" if biased else None)

    def experts(self, name: str, x: str, mixture: Experts, places: int) -> str:
        """Router, dispatch, experts, combination; one group of tokens per sample (GShard)."""
        w, t, e = self.w, self.t, mixture.count
        gates = w.linear(f"{name}.router", x, "bsh,eh->bse", (e, t.hidden))
        gates = w.apply("softmax", f"{name}.gates", gates)
        weights = w.apply("route", f"{name}.route", gates, active=mixture.active, capacity=places)
        where = w.apply("positive", f"{name}.where", weights)
        x = w.apply("contract", f"{name}.dispatch", where, x, equation="bsec,bsh->bech")
        if t.gated:
            x = w.linear(f"{name}.up", x, "bech,efuh->becfu", (e, t.feed_forward, 2, t.hidden))
            x = w.apply("gated", f"{name}.gated", x)
        else:
            x = w.linear(f"{name}.up", x, "bech,efh->becf", (e, t.feed_forward, t.hidden))
            x = w.apply("gelu", f"{name}.gelu", x)
        x = w.linear(f"{name}.down", x, "becf,ehf->bech", (e, t.hidden, t.feed_forward))
        return w.apply("contract", f"{name}.combine", weights, x, equation="bsec,bech->bsh")

    def block(self, block: str, x: str, feed: Callable[[str, str], str] | None = None) -> str:
        """Norm, attention, sum, norm, feed-forward network (or `feed`), sum."""
        w, names = self.w, self.names
        norms, sums = ([name.format(block) for name in pair] for pair in (names.norms, names.sums))
        x = w.apply("add", sums[0], x, self.attention(block, self.norm(norms[0], x)))
        y = (feed or self.feed_forward)(block, self.norm(norms[1], x))
        return w.apply("add", sums[1], x, y)

    def stack(self, x: str) -> str:
        """All blocks alike."""
        for i in range(self.t.layers):
            self.w.layer = f"block{i}"
            x = self.block(f"b{i}", x)
        return x


def vgg19(batch: int, width: int, pooled: int, classes: int, dense: int) -> SingleProgram:
    """16 convolutions in 5 groups, 3 dense layers, for images of 32 x 32."""
    w, group, place = Writer("vgg19"), 1, 1
    x = w.placeholder("images", (batch, 3, 32, 32))
    labels = w.placeholder("labels", (batch,), below=classes)
    for channels in VGG19:
        if channels:
            w.layer = f"conv{group}.{place}"
            x = w.convolution(w.layer, x, channels // 64 * width)
            place += 1
        else:
            x = w.apply("max-pool", f"pool{group}", x, window=2)
            group, place = group + 1, 1
    w.layer = "head"
    last = w.shape(x)[1]
    x = w.apply("repeat", "pooled", x, shape=(batch, last, pooled, pooled))
    x = w.apply("reshape", "flat", x, shape=(batch, last * pooled**2))
    return w.classifier(x, labels, {"fc1": dense, "fc2": dense, "fc3": classes})


def vit(batch: int, t: Transformer, patches: int, pixels: int, classes: int) -> SingleProgram:
    """Norm first."""
    w = Writer("vit")
    blocks = Blocks(w, t, Names(), causal=False)
    x = w.placeholder("patches", (batch, patches, pixels), unsliced=(1,))
    labels = w.placeholder("labels", (batch,), below=classes)
    w.layer = "embedding"
    x = w.linear("embed", x, "bsp,hp->bsh", (t.hidden, pixels), "h")
    x = w.apply("add", "placed", x, w.parameter("positions", (patches, t.hidden)))
    x = blocks.stack(x)
    w.layer = "head"
    x = w.apply("mean", "mean", blocks.norm("norm", x), dimension=1, length=patches)
    x = w.linear("classify", x, "bh,ch->bc", (classes, t.hidden), "c")
    return w.loss(x, labels)


def words(w: Writer, batch: int, tokens: int, vocabulary: int) -> tuple[str, str]:
    """Tokens and labels of a language model."""
    ids = w.placeholder("tokens", (batch, tokens), below=vocabulary, unsliced=(1,))
    return ids, w.placeholder("labels", (batch, tokens), below=vocabulary)


def bert(
    batch: int, t: Transformer, tokens: int, vocabulary: int, experts: int | None = None
) -> SingleProgram:
    """Norm last; with `experts`, every second block has them."""
    w = Writer("bert" if experts is None else "bert-moe")
    blocks = Blocks(w, t, Names(), causal=False)
    ids, labels = words(w, batch, tokens, vocabulary)
    w.layer = "embedding"
    x = w.apply("embed", "words", ids, w.parameter("words.table", (vocabulary, t.hidden)))
    x = w.apply("add", "placed", x, w.parameter("positions", (tokens, t.hidden)))
    x = blocks.norm("norm", x)
    for i in range(t.layers):
        w.layer, b = f"block{i}", f"b{i}"
        x = blocks.norm(f"{b}.norm1", w.apply("add", f"{b}.x", x, blocks.attention(b, x)))
        if experts is not None and i % 2 == 1:
            # twice the places that an even load needs
            mixture = Experts(experts, min(2, experts))
            places = max(1, -(-2 * mixture.active * tokens // experts))
            y = blocks.experts(f"{b}.moe", x, mixture, min(places, tokens))
        else:
            y = blocks.feed_forward(b, x)
        x = blocks.norm(f"{b}.norm2", w.apply("add", f"{b}.y", x, y))
    w.layer = "head"
    x = w.linear("transform", x, "bsh,gh->bsg", (t.hidden, t.hidden), "g")
    x = blocks.norm("transform.norm", w.apply("gelu", "transform.gelu", x))
    x = w.linear("decode", x, "bsh,vh->bsv", (vocabulary, t.hidden), "v")
    return w.loss(x, labels)


def gpt2(batch: int, t: Transformer, tokens: int, vocabulary: int) -> SingleProgram:
    """Norm first, causal, the head tied to the embedding."""
    w = Writer("gpt2")
    blocks = Blocks(w, t, Names(), causal=True)
    ids, labels = words(w, batch, tokens, vocabulary)
    w.layer = "embedding"
    table = w.parameter("table", (vocabulary, t.hidden))
    x = w.apply("embed", "words", ids, table)
    x = w.apply("add", "placed", x, w.parameter("positions", (tokens, t.hidden)))
    x = blocks.stack(x)
    w.layer = "head"
    x = w.apply("contract", "head", blocks.norm("norm", x), table, equation="bsh,vh->bsv")
    return w.loss(x, labels)


def llama(batch: int, t: Transformer, tokens: int) -> SingleProgram:
    """Blocks alone, on embedded tokens, with a loss over 16 classes behind them in place of the
    head."""
    w = Writer("llama-blocks")
    t = replace(
        t, gated=True, norm="rms", rotary=True, attention_bias=False, output_bias=False,
        feed_forward_bias=False,
    )  # fmt: skip
    blocks = Blocks(w, t, Names(attention="{}", scores="{}.heads", feed="{}"), causal=True)
    x = w.placeholder("embedded", (batch, tokens, t.hidden), unsliced=(1,))
    labels = w.placeholder("labels", (batch, tokens), below=16)
    x = blocks.stack(x)
    w.layer = "head"
    return w.loss(w.linear("classify", x, "bsh,ch->bsc", (16, t.hidden)), labels)


# (global batch, devices, tiny) -> program
Maker = Callable[[int, int, bool], SingleProgram]


def _tokens(published: int, tiny: bool, devices: int) -> int:
    return 2 * devices if tiny else published


MAKERS: dict[str, Maker] = {
    "vgg19": lambda b, m, t: vgg19(b, m if t else 64, 7, 10, m if t else 4096),
    "vit": lambda b, m, t: vit(b, sizes(12, t, m), _tokens(196, t, m), 768, 10),
    "vit-24": lambda b, m, t: vit(b, sizes(24, t, m), _tokens(196, t, m), 768, 10),
    "bert-base": lambda b, m, t: bert(
        b, sizes(12, t, m), _tokens(128, t, m), 6 * m if t else 30522
    ),
    "bert-moe": lambda b, m, t: bert(
        b, sizes(12, t, m), _tokens(128, t, m), 6 * m if t else 30522, m
    ),
    "gpt2": lambda b, m, t: gpt2(b, sizes(12, t, m), _tokens(1024, t, m), 6 * m if t else 50257),
    "llama-blocks": lambda b, m, t: llama(b, sizes(4, t, m, 4096, 32, 11008), _tokens(2048, t, m)),
}


def model(name: str, batch: int, devices: int, *, tiny: bool = False) -> SingleProgram:
    """The built-in program `name` for a global batch; the experts of BERT-MoE are as many as
    devices."""
    if name not in MAKERS:
        raise InputError("unknown program", got=name, expected=f"one of {', '.join(MAKERS)}")
    if batch < 1 or devices < 1:
        got = (batch, devices)
        raise InputError("batch and devices", where=name, got=got, expected="at least 1 each")
    return MAKERS[name](batch, devices, tiny)


IMAGE, PATCH, CLASSES = 224, 16, 1000
NAMES = Names(
    "{}", "{}.attention", "{}", ("{}.norm-1", "{}.norm-2"), ("{}.sum-1", "{}.sum-2")
)  # fmt: skip


def program_of(model: Model, batch: int) -> SingleProgram:
    """The program of one step of `batch` samples; its layers are the model's, by name.

    Raises UnsupportedError for a model that some operator has no rule for.
    """
    spec = model.spec
    if spec.shape is not None and model.sequence is not None:
        return _Text(model, batch, spec.shape, model.sequence).program()
    if spec.encoder is not None:
        return _Text(model, batch, spec.encoder, 1 + (IMAGE // PATCH) ** 2).image_program()
    if model.name == "vgg19":
        return imagenet_vgg19(model, batch)
    raise UnsupportedError("no single-device program of this model", where="hap", got=model.name)


class _Text:
    """A transformer's layers: b samples, s tokens, h hidden size."""

    def __init__(self, model: Model, batch: int, shape: Transformer, tokens: int) -> None:
        if shape.window is not None and shape.window < tokens:
            raise UnsupportedError("no rule for attention in a window", where="hap", got=model.name)
        if shape.norm == "pixel":
            raise UnsupportedError("no rule for pixel norms", where="hap", got=model.name)
        self.t, self.b, self.s, self.w = shape, batch, tokens, Writer(model.name)
        self.layers = [layer.name for layer in model.layers]
        causal = shape.vocabulary > 0 and shape.head == "lm"
        self.blocks = Blocks(self.w, shape, NAMES, causal=causal)

    def program(self) -> SingleProgram:
        """Embedding, blocks, head of a language model."""
        w, t, norm = self.w, self.t, self.blocks.norm
        ids, labels = words(w, self.b, self.s, t.vocabulary)
        w.layer = self.layers[0]
        width = t.embedding_width or t.hidden
        table = w.parameter("table", (t.vocabulary, width))
        x = w.apply("embed", "words", ids, table)
        if width != t.hidden:
            x = w.linear("project-in", x, "bse,he->bsh", (t.hidden, width))
        if t.positions:
            x = w.apply("add", "placed", x, self.positions(t.positions))
        if t.embedding_norm:
            x = norm("embedding-norm", x)
        x = self.stack(x)
        if t.final_norm:
            x = norm("final-norm", x)
        if t.head == "bert":
            x = w.linear("transform", x, "bsh,gh->bsg", (t.hidden, t.hidden), "g")
            x = norm("transform-norm", w.apply("gelu", "transform-gelu", x))
        if width != t.hidden:
            x = w.linear("project-out", x, "bsh,eh->bse", (width, t.hidden))
        if t.tied:
            x = w.apply("contract", "lm-head", x, table, equation="bsh,vh->bsv")
        else:
            x = w.linear("lm-head", x, "bsh,vh->bsv", (t.vocabulary, width))
        return w.loss(x, labels)

    def image_program(self) -> SingleProgram:
        """Patches, blocks, classifier of a vision transformer."""
        w, t, pixels = self.w, self.t, 3 * PATCH * PATCH
        x = w.placeholder("image", (self.b, self.s, pixels), unsliced=(1,))
        labels = w.placeholder("labels", (self.b,), below=CLASSES)
        w.layer = self.layers[0]
        x = w.linear("patches", x, "bsp,hp->bsh", (t.hidden, pixels), "h")
        x = w.apply("add", "placed", x, self.positions(self.s))
        x = self.blocks.norm("final-norm", self.stack(x))
        x = w.apply("select", "class-token", x, dimension=1, start=0, stop=1)
        x = w.apply("reshape", "features", x, shape=(self.b, t.hidden))
        x = w.linear("classifier", x, "bh,ch->bc", (CLASSES, t.hidden), "c")
        return w.loss(x, labels)

    def positions(self, learned: int) -> str:
        """The vectors of the positions in use."""
        table = self.w.parameter("positions", (learned, self.t.hidden))
        if learned == self.s:
            return table
        return self.w.apply("select", "positions-used", table, dimension=0, start=0, stop=self.s)

    def stack(self, x: str) -> str:
        """All blocks; what follows belongs to the last layer."""
        for i in range(self.t.layers):
            self.w.layer = self.layers[1 + i]
            x = self.blocks.block(self.layers[1 + i], x, self.feed(i))
        self.w.layer = self.layers[-1]
        return x

    def feed(self, i: int) -> Callable[[str, str], str] | None:
        """The experts of a block that has them, with an even load's places."""
        mixture = self.t.experts
        if mixture is None or (i + 1) % mixture.every:
            return None
        places = -(-self.s * mixture.active // mixture.count)
        return partial(self.blocks.experts, mixture=mixture, places=places)


def imagenet_vgg19(model: Model, batch: int) -> SingleProgram:
    """Convolutions with their pooling, three dense layers, on images of 224 x 224."""
    w, names = Writer(model.name), iter([layer.name for layer in model.layers])
    x = w.placeholder("image", (batch, 3, IMAGE, IMAGE))
    labels = w.placeholder("labels", (batch,), below=CLASSES)
    for width in VGG19:
        if width:
            w.layer = next(names)
            x = w.convolution(w.layer, x, width)
        else:
            x = w.apply("max-pool", f"{w.layer}.pool", x, window=2)
    x = w.apply("reshape", "features", x, shape=(batch, w.shape(x)[1] * 49))
    return w.classifier(x, labels, dict(zip(names, (4096, 4096, CLASSES), strict=True)))
