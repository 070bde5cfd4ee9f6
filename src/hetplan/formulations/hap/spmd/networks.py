"""Built-in single-device programs: the networks of HAP's Table 1, GPT-2 and a stack of Llama
blocks; and the blocks that all transformers are written with.

VGG19 (Simonyan and Zisserman 2014) on CIFAR's images, whose last 1 x 1 map is repeated to the 7 x 7
that the dense layers expect (as adaptive pooling does), ViT (Dosovitskiy et al. 2021) on unfolded
patches with a mean in place of the class token, BERT (Devlin et al. 2019) with its masked language
model's loss on every token, every second feed-forward network a mixture of experts where asked
(GShard, Lepikhin et al. 2020), GPT-2 (Radford et al. 2019), Llama (Touvron et al. 2023). No
dropout.

Every network is written for two sizes: as published, and `tiny`, the same operators on tensors
small enough to be executed in a test. Tokens and patches are marked `unsliced`: where samples can
be sliced too, slicing tokens saves nothing more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hetplan.errors import InputError
from hetplan.formulations.hap.spmd.program import SingleProgram, Writer
from hetplan.profiling.transformer import Experts, Transformer

# (channels / 64, convolutions) before each pooling
VGG19 = ((1, 2), (2, 2), (4, 4), (8, 4), (8, 4))


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


def vgg19(batch: int, width: int, pooled: int, classes: int, dense: int) -> SingleProgram:
    """16 convolutions in 5 groups, 3 dense layers, for images of 32 x 32."""
    w = Writer("vgg19")
    x = w.placeholder("images", (batch, 3, 32, 32))
    labels = w.placeholder("labels", (batch,), below=classes)
    for group, (times, count) in enumerate(VGG19):
        for i in range(count):
            w.layer = name = f"conv{group + 1}.{i + 1}"
            x = w.convolution(name, x, times * width)
        x = w.apply("max-pool", f"pool{group + 1}", x, window=2)
    w.layer = "head"
    channels = w.shape(x)[1]
    x = w.apply("repeat", "pooled", x, shape=(batch, channels, pooled, pooled))
    x = w.apply("reshape", "flat", x, shape=(batch, channels * pooled**2))
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
    for i in range(t.layers):
        w.layer = f"block{i}"
        x = blocks.block(f"b{i}", x)
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
    for i in range(t.layers):
        w.layer = f"block{i}"
        x = blocks.block(f"b{i}", x)
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
    for i in range(t.layers):
        w.layer = f"block{i}"
        x = blocks.block(f"b{i}", x)
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
