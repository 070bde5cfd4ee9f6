"""The planner's models as single-device programs, layer by layer as their profiles have them.

Blocks are written with norms first (after costs the same), without dropout, token types and pooler;
a mixture of experts is GShard's dispatch with an even load's places, as profiles assume. A class
token is one more patch.
"""

from __future__ import annotations

from hetplan.errors import UnsupportedError
from hetplan.formulations.hap.spmd.program import SingleProgram, Writer
from hetplan.profiling.architecture import Experts, Transformer
from hetplan.profiling.models import Model
from hetplan.profiling.vision import VGG19

IMAGE, PATCH, CLASSES = 224, 16, 1000


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
        return vgg19(model, batch)
    raise UnsupportedError("no single-device program of this model", where="hap", got=model.name)


class _Text:
    """A transformer's layers: b samples, s tokens, h hidden size, g groups of r query heads of
    width d."""

    def __init__(self, model: Model, batch: int, shape: Transformer, tokens: int) -> None:
        if shape.window is not None and shape.window < tokens:
            raise UnsupportedError("no rule for attention in a window", where="hap", got=model.name)
        if shape.norm == "pixel":
            raise UnsupportedError("no rule for pixel norms", where="hap", got=model.name)
        self.t, self.b, self.s = shape, batch, tokens
        self.causal = shape.vocabulary > 0 and shape.head == "lm"
        self.layers = [layer.name for layer in model.layers]
        self.w = Writer(model.name)

    def program(self) -> SingleProgram:
        """Embedding, blocks, head of a language model."""
        w, t, b, s = self.w, self.t, self.b, self.s
        ids = w.placeholder("tokens", (b, s), below=t.vocabulary, unsliced=(1,))
        labels = w.placeholder("labels", (b, s), below=t.vocabulary)
        w.layer = self.layers[0]
        width = t.embedding_width or t.hidden
        table = w.parameter("table", (t.vocabulary, width))
        x = w.apply("embed", "words", ids, table)
        if width != t.hidden:
            x = w.linear("project-in", x, "bse,he->bsh", (t.hidden, width))
        if t.positions:
            x = w.apply("add", "placed", x, self.positions(t.positions))
        if t.embedding_norm:
            x = self.norm("embedding-norm", x)
        for i in range(t.layers):
            x = self.block(i, x)
        w.layer = self.layers[-1]
        if t.final_norm:
            x = self.norm("final-norm", x)
        if t.head == "bert":
            x = w.linear("transform", x, "bsh,gh->bsg", (t.hidden, t.hidden), "g")
            x = self.norm("transform-norm", w.apply("gelu", "transform-gelu", x))
        if width != t.hidden:
            x = w.linear("project-out", x, "bsh,eh->bse", (width, t.hidden))
        if t.tied:
            x = w.apply("contract", "lm-head", x, table, equation="bsh,vh->bsv")
        else:
            x = w.linear("lm-head", x, "bsh,vh->bsv", (t.vocabulary, width))
        w.apply("cross-entropy", "loss", x, labels, count=b * s)
        return w.finish()

    def image_program(self) -> SingleProgram:
        """Patches, blocks, classifier of a vision transformer."""
        w, t, b, s = self.w, self.t, self.b, self.s
        pixels = 3 * PATCH * PATCH
        x = w.placeholder("image", (b, s, pixels), unsliced=(1,))
        labels = w.placeholder("labels", (b,), below=CLASSES)
        w.layer = self.layers[0]
        x = w.linear("patches", x, "bsp,hp->bsh", (t.hidden, pixels), "h")
        x = w.apply("add", "placed", x, self.positions(s))
        for i in range(t.layers):
            x = self.block(i, x)
        w.layer = self.layers[-1]
        x = w.apply(
            "select", "class-token", self.norm("final-norm", x), dimension=1, start=0, stop=1
        )
        x = w.apply("reshape", "features", x, shape=(b, t.hidden))
        x = w.linear("classifier", x, "bh,ch->bc", (CLASSES, t.hidden), "c")
        w.apply("cross-entropy", "loss", x, labels, count=b)
        return w.finish()

    def positions(self, learned: int) -> str:
        """The vectors of the positions in use."""
        table = self.w.parameter("positions", (learned, self.t.hidden))
        if learned == self.s:
            return table
        return self.w.apply("select", "positions-used", table, dimension=0, start=0, stop=self.s)

    def norm(self, name: str, x: str) -> str:
        """The model's kind of norm."""
        scale = self.w.parameter(f"{name}.scale", (self.t.hidden,))
        if self.t.norm == "rms":
            return self.w.apply("rms-norm", name, x, scale)
        return self.w.apply(
            "layer-norm", name, x, scale, self.w.parameter(f"{name}.shift", (self.t.hidden,))
        )

    def block(self, i: int, x: str) -> str:
        """Attention and feed-forward network, each with norm and sum."""
        w, t = self.w, self.t
        w.layer = name = self.layers[1 + i]
        g, r = t.kv_heads, t.heads // t.kv_heads
        y = w.linear(
            f"{name}.qkv", self.norm(f"{name}.norm-1", x), "bsh,gdh->bgsd",
            (g, (r + 2) * t.head_dim, t.hidden), "gd" if t.attention_bias else None,
        )  # fmt: skip
        y = w.apply(
            "attention", f"{name}.attention", y, causal=self.causal, rotary=t.rotary, queries=r
        )
        y = w.linear(
            f"{name}.out",
            y,
            "bgsd,hgd->bsh",
            (t.hidden, g, r * t.head_dim),
            "h" if t.output_bias else None,
        )
        x = w.apply("add", f"{name}.sum-1", x, y)
        y = self.norm(f"{name}.norm-2", x)
        mixture = t.experts if t.experts and (i + 1) % t.experts.every == 0 else None
        y = self.experts(name, y, mixture) if mixture else self.feed_forward(name, y)
        return w.apply("add", f"{name}.sum-2", x, y)

    def feed_forward(self, name: str, x: str) -> str:
        """Up, activation, down."""
        w, t = self.w, self.t
        if t.gated:
            bias = "fu" if t.feed_forward_bias else None
            x = w.linear(f"{name}.up", x, "bsh,fuh->bsfu", (t.feed_forward, 2, t.hidden), bias)
            x = w.apply("gated", f"{name}.gated", x)
        else:
            bias = "f" if t.feed_forward_bias else None
            x = w.linear(f"{name}.up", x, "bsh,fh->bsf", (t.feed_forward, t.hidden), bias)
            x = w.apply("gelu", f"{name}.gelu", x)
        bias = "h" if t.feed_forward_bias else None
        return w.linear(f"{name}.down", x, "bsf,hf->bsh", (t.hidden, t.feed_forward), bias)

    def experts(self, name: str, x: str, mixture: Experts) -> str:
        """Router, dispatch, experts, combination."""
        w, t, e = self.w, self.t, mixture.count
        gates = w.linear(f"{name}.router", x, "bsh,eh->bse", (e, t.hidden))
        gates = w.apply("softmax", f"{name}.gates", gates)
        places = -(-self.s * mixture.active // e)
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


def vgg19(model: Model, batch: int) -> SingleProgram:
    """Convolutions with their pooling, three dense layers, on images of 224 x 224."""
    w, names = Writer(model.name), [layer.name for layer in model.layers]
    x = w.placeholder("image", (batch, 3, IMAGE, IMAGE))
    labels = w.placeholder("labels", (batch,), below=CLASSES)
    channels, i = 3, 0
    for width in VGG19:
        if not width:
            x = w.apply("max-pool", f"{w.layer}.pool", x, window=2)
            continue
        w.layer = name = names[i]
        weight = w.parameter(f"{name}.weight", (width, channels, 3, 3))
        x = w.apply("convolve", name, x, weight, w.parameter(f"{name}.bias", (width,)), padding=1)
        x = w.apply("relu", f"{name}.relu", x)
        channels, i = width, i + 1
    x = w.apply("reshape", "features", x, shape=(batch, channels * 49))
    for name, width in zip(names[i:], (4096, 4096, CLASSES), strict=True):
        w.layer = name
        x = w.linear(name, x, "bi,oi->bo", (width, w.shape(x)[1]), "o")
        if width != CLASSES:
            x = w.apply("relu", f"{name}.relu", x)
    w.apply("cross-entropy", "loss", x, labels, count=batch)
    return w.finish()
