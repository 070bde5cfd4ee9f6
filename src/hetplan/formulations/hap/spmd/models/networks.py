"""The networks themselves.

VGG19 (Simonyan and Zisserman 2014) on CIFAR's images, whose last 1 x 1 map is repeated to the 7 x 7
that the dense layers expect (as adaptive pooling does), ViT (Dosovitskiy et
al. 2021) on unfolded patches with a mean in place of the class token, BERT (Devlin et al. 2019)
with its masked language model's loss on every token, every second feed-forward network a mixture of
experts where asked (GShard, Lepikhin et al. 2020), GPT-2 (Radford et al. 2019), Llama (Touvron et
al. 2023). No dropout.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetplan.formulations.hap.spmd.program import SingleProgram, Writer

# (channels / 64, convolutions) before each pooling
VGG19 = ((1, 2), (2, 2), (4, 4), (8, 4), (8, 4))


@dataclass(frozen=True)
class Sizes:
    """Of a transformer: feed is the feed-forward width."""

    layers: int
    hidden: int
    heads: int
    feed: int

    @property
    def head(self) -> int:
        """Entries of one head."""
        return self.hidden // self.heads


def sizes(
    layers: int, tiny: bool, devices: int, hidden: int = 768, heads: int = 12, feed: int = 3072
) -> Sizes:
    """As published; or as small as dimensions that every device shall have a part of can be."""
    if not tiny:
        return Sizes(layers, hidden, heads, feed)
    heads, each = max(2, devices), devices + devices % 2
    return Sizes(layers, heads * each, heads, 2 * heads)


def vgg19(batch: int, width: int, pooled: int, classes: int, dense: int) -> SingleProgram:
    """16 convolutions in 5 groups, 3 dense layers, for images of 32 x 32."""
    w = Writer("vgg19")
    x = w.placeholder("images", (batch, 3, 32, 32))
    labels = w.placeholder("labels", (batch,), below=classes)
    channels = 3
    for group, (times, count) in enumerate(VGG19):
        for i in range(count):
            w.layer = name = f"conv{group + 1}.{i + 1}"
            weight = w.parameter(f"{name}.weight", (times * width, channels, 3, 3))
            bias = w.parameter(f"{name}.bias", (times * width,))
            x = w.apply("convolve", name, x, weight, bias, padding=1)
            x = w.apply("relu", f"{name}.relu", x)
            channels = times * width
        x = w.apply("max-pool", f"pool{group + 1}", x, window=2)
    w.layer = "head"
    x = w.apply("repeat", "pooled", x, shape=(batch, channels, pooled, pooled))
    x = w.apply("reshape", "flat", x, shape=(batch, channels * pooled**2))
    for i in range(2):
        w.layer = name = f"fc{i + 1}"
        x = w.linear(name, x, "bi,oi->bo", (dense, w.shape(x)[1]), "o")
        x = w.apply("relu", f"{name}.relu", x)
    w.layer = "fc3"
    x = w.linear("fc3", x, "bi,oi->bo", (classes, dense), "o")
    w.apply("cross-entropy", "loss", x, labels, count=batch)
    return w.finish()


def norm(w: Writer, name: str, x: str) -> str:
    """Layer normalisation with its parameters."""
    width = w.shape(x)[-1]
    scale, shift = w.parameter(f"{name}.scale", (width,)), w.parameter(f"{name}.shift", (width,))
    return w.apply("layer-norm", name, x, scale, shift)


def self_attention(w: Writer, name: str, x: str, s: Sizes, *, causal: bool = False) -> str:
    """Projections to heads, attention, projection back."""
    x = w.linear(f"{name}.qkv", x, "bsh,ndh->bnsd", (s.heads, 3 * s.head, s.hidden), "nd")
    x = w.apply("attention", f"{name}.heads", x, causal=causal)
    return w.linear(f"{name}.out", x, "bnsd,hnd->bsh", (s.hidden, s.heads, s.head), "h")


def feed_forward(w: Writer, name: str, x: str, s: Sizes) -> str:
    """Up, activation, down."""
    x = w.linear(f"{name}.up", x, "bsh,fh->bsf", (s.feed, s.hidden), "f")
    x = w.apply("gelu", f"{name}.gelu", x)
    return w.linear(f"{name}.down", x, "bsf,hf->bsh", (s.hidden, s.feed), "h")


def expert_feed_forward(w: Writer, name: str, x: str, s: Sizes, experts: int) -> str:
    """Two experts of all per token, twice the places that an even load needs, one group per
    sample."""
    tokens = w.shape(x)[1]
    gates = w.linear(f"{name}.router", x, "bsh,eh->bse", (experts, s.hidden))
    gates = w.apply("softmax", f"{name}.gates", gates)
    active = min(2, experts)
    capacity = max(1, -(-2 * active * tokens // experts))
    weights = w.apply(
        "route", f"{name}.route", gates, active=active, capacity=min(capacity, tokens)
    )
    where = w.apply("positive", f"{name}.where", weights)
    x = w.apply("contract", f"{name}.dispatch", where, x, equation="bsec,bsh->bech")
    x = w.linear(f"{name}.up", x, "bech,efh->becf", (experts, s.feed, s.hidden))
    x = w.apply("gelu", f"{name}.gelu", x)
    x = w.linear(f"{name}.down", x, "becf,ehf->bech", (experts, s.hidden, s.feed))
    return w.apply("contract", f"{name}.combine", weights, x, equation="bsec,bech->bsh")


def vit(batch: int, s: Sizes, patches: int, pixels: int, classes: int) -> SingleProgram:
    """Norm first."""
    w = Writer("vit")
    x = w.placeholder("patches", (batch, patches, pixels), unsliced=(1,))
    labels = w.placeholder("labels", (batch,), below=classes)
    w.layer = "embedding"
    x = w.linear("embed", x, "bsp,hp->bsh", (s.hidden, pixels), "h")
    x = w.apply("add", "placed", x, w.parameter("positions", (patches, s.hidden)))
    for i in range(s.layers):
        w.layer = f"block{i}"
        y = self_attention(w, f"b{i}.attention", norm(w, f"b{i}.norm1", x), s)
        x = w.apply("add", f"b{i}.x", x, y)
        y = feed_forward(w, f"b{i}.ff", norm(w, f"b{i}.norm2", x), s)
        x = w.apply("add", f"b{i}.y", x, y)
    w.layer = "head"
    x = w.apply("mean", "mean", norm(w, "norm", x), dimension=1, length=patches)
    x = w.linear("classify", x, "bh,ch->bc", (classes, s.hidden), "c")
    w.apply("cross-entropy", "loss", x, labels, count=batch)
    return w.finish()


def bert(
    batch: int, s: Sizes, tokens: int, vocabulary: int, experts: int | None = None
) -> SingleProgram:
    """Norm last; with `experts`, every second block has them."""
    w = Writer("bert" if experts is None else "bert-moe")
    ids = w.placeholder("tokens", (batch, tokens), below=vocabulary, unsliced=(1,))
    labels = w.placeholder("labels", (batch, tokens), below=vocabulary)
    w.layer = "embedding"
    x = w.apply("embed", "words", ids, w.parameter("words.table", (vocabulary, s.hidden)))
    x = w.apply("add", "placed", x, w.parameter("positions", (tokens, s.hidden)))
    x = norm(w, "norm", x)
    for i in range(s.layers):
        w.layer = f"block{i}"
        y = self_attention(w, f"b{i}.attention", x, s)
        x = norm(w, f"b{i}.norm1", w.apply("add", f"b{i}.x", x, y))
        if experts is not None and i % 2 == 1:
            y = expert_feed_forward(w, f"b{i}.moe", x, s, experts)
        else:
            y = feed_forward(w, f"b{i}.ff", x, s)
        x = norm(w, f"b{i}.norm2", w.apply("add", f"b{i}.y", x, y))
    w.layer = "head"
    x = w.linear("transform", x, "bsh,gh->bsg", (s.hidden, s.hidden), "g")
    x = norm(w, "transform.norm", w.apply("gelu", "transform.gelu", x))
    x = w.linear("decode", x, "bsh,vh->bsv", (vocabulary, s.hidden), "v")
    w.apply("cross-entropy", "loss", x, labels, count=batch * tokens)
    return w.finish()


def gpt2(batch: int, s: Sizes, tokens: int, vocabulary: int) -> SingleProgram:
    """Norm first, causal, the head tied to the embedding."""
    w = Writer("gpt2")
    ids = w.placeholder("tokens", (batch, tokens), below=vocabulary, unsliced=(1,))
    labels = w.placeholder("labels", (batch, tokens), below=vocabulary)
    w.layer = "embedding"
    table = w.parameter("table", (vocabulary, s.hidden))
    x = w.apply("embed", "words", ids, table)
    x = w.apply("add", "placed", x, w.parameter("positions", (tokens, s.hidden)))
    for i in range(s.layers):
        w.layer = f"block{i}"
        y = self_attention(w, f"b{i}.attention", norm(w, f"b{i}.norm1", x), s, causal=True)
        x = w.apply("add", f"b{i}.x", x, y)
        y = feed_forward(w, f"b{i}.ff", norm(w, f"b{i}.norm2", x), s)
        x = w.apply("add", f"b{i}.y", x, y)
    w.layer = "head"
    x = w.apply("contract", "head", norm(w, "norm", x), table, equation="bsh,vh->bsv")
    w.apply("cross-entropy", "loss", x, labels, count=batch * tokens)
    return w.finish()


def llama(batch: int, s: Sizes, tokens: int) -> SingleProgram:
    """Blocks alone, on embedded tokens, with a loss over 16 classes behind them in place of the
    head."""
    w = Writer("llama-blocks")
    x = w.placeholder("embedded", (batch, tokens, s.hidden), unsliced=(1,))
    labels = w.placeholder("labels", (batch, tokens), below=16)
    for i in range(s.layers):
        w.layer, b = f"block{i}", f"b{i}"
        y = w.apply("rms-norm", f"{b}.norm1", x, w.parameter(f"{b}.norm1.scale", (s.hidden,)))
        y = w.linear(f"{b}.qkv", y, "bsh,ndh->bnsd", (s.heads, 3 * s.head, s.hidden))
        y = w.apply("attention", f"{b}.heads", y, causal=True, rotary=True)
        y = w.linear(f"{b}.out", y, "bnsd,hnd->bsh", (s.hidden, s.heads, s.head))
        x = w.apply("add", f"{b}.x", x, y)
        y = w.apply("rms-norm", f"{b}.norm2", x, w.parameter(f"{b}.norm2.scale", (s.hidden,)))
        y = w.linear(f"{b}.up", y, "bsh,fuh->bsfu", (s.feed, 2, s.hidden))
        y = w.linear(
            f"{b}.down", w.apply("gated", f"{b}.gated", y), "bsf,hf->bsh", (s.hidden, s.feed)
        )
        x = w.apply("add", f"{b}.y", x, y)
    w.layer = "head"
    x = w.linear("classify", x, "bsh,ch->bsc", (16, s.hidden))
    w.apply("cross-entropy", "loss", x, labels, count=batch * tokens)
    return w.finish()
