"""The planner's models as single-device programs, layer by layer as their profiles have them.

Blocks are written with norms first (after costs the same), without dropout, token types and pooler;
a mixture of experts is GShard's dispatch with an even load's places, as profiles assume. A class
token is one more patch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from hetplan.errors import UnsupportedError
from hetplan.formulations.hap.spmd.networks import Blocks, Names, words
from hetplan.formulations.hap.spmd.program import SingleProgram, Writer
from hetplan.profiling.models import Model
from hetplan.profiling.transformer import Transformer
from hetplan.profiling.vision import VGG19

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
        return vgg19(model, batch)
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


def vgg19(model: Model, batch: int) -> SingleProgram:
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
