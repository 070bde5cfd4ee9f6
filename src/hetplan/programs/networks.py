"""The single-device programs of known networks, all written with the same blocks.

`vgg19`, `vit` and `bert` write the networks of HAP's Table 1, without dropout:
- VGG19 (Simonyan and Zisserman 2014) on CIFAR's images. The last 1 x 1 map is repeated to the 7 x 7
  that the dense layers expect, as adaptive pooling does.
- ViT (Dosovitskiy et al. 2021) on unfolded patches, with a mean in place of the class token.
- BERT (Devlin et al. 2019) with its masked language model's loss on every token. On request every
  second feed-forward network is a mixture of experts (GShard, Lepikhin et al. 2020).
Tokens and patches are marked `unsliced`: samples can be sliced instead, and slicing tokens would
save nothing more.

`program_of` writes the program of a model of the planner, with the layers of the model's profile.
Norms come first in blocks (norms behind the sums cost the same). There is no dropout, no token
types and no pooler. A mixture of experts is GShard's dispatch, with as many places at each expert
as an even load needs, which profiles assume, too. A class token is one more patch.

The tables `PUBLISHED` and `BY_LAYER` name the nodes. Instances and plan files contain these names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hetplan.errors import UnsupportedError, require
from hetplan.profiling.models.model import Model
from hetplan.profiling.models.operators import Matmul
from hetplan.profiling.models.transformer import Experts, Transformer
from hetplan.profiling.models.zoo import VGG19
from hetplan.programs.program import SingleProgram, Writer

# Part of a network -> name of its node. i: number of the block; layer: the block's layer in the
# profile.
PUBLISHED = {
    "attention": "b{i}.attention", "scores": "b{i}.attention.heads", "feed": "b{i}.ff",
    "experts": "b{i}.moe", "norm-1": "b{i}.norm1", "norm-2": "b{i}.norm2", "sum-1": "b{i}.x",
    "sum-2": "b{i}.y", "table": "table", "embedding-norm": "norm", "final-norm": "norm",
    "transform-norm": "transform.norm", "transform-gelu": "transform.gelu", "head": "head",
}  # fmt: skip
BY_LAYER = {
    "attention": "{layer}", "scores": "{layer}.attention", "feed": "{layer}", "experts": "{layer}",
    "norm-1": "{layer}.norm-1", "norm-2": "{layer}.norm-2", "sum-1": "{layer}.sum-1",
    "sum-2": "{layer}.sum-2", "table": "table", "embedding-norm": "embedding-norm",
    "final-norm": "final-norm", "transform-norm": "transform-norm",
    "transform-gelu": "transform-gelu", "head": "lm-head",
}  # fmt: skip


def published_layers(t: Transformer) -> list[str]:
    """The names of the layers in the networks of HAP's Table 1."""
    return ["embedding", *(f"block{i}" for i in range(t.layers)), "head"]


class Blocks:
    """Writes the blocks of a transformer: each method adds nodes and returns the name of its output
    tensor.

    Letters of equations: b samples, s tokens, h hidden size, f width of the feed-forward network
    and u its 2 products if it is gated, e experts, c places at an expert. Attention has g
    key-value heads with r query heads each; d entries of a group's queries, key and value.
    """

    def __init__(
        self,
        w: Writer,
        t: Transformer,
        names: Mapping[str, str],
        *,
        causal: bool,
        norm_first: bool = True,
        places: int = 1,
    ) -> None:
        """The arguments are the attributes."""
        self.w = w  # writes the nodes
        self.t = t  # the transformer's sizes and kinds of layers
        self.names = names  # part of a block -> name of its node
        self.causal = causal  # whether attention hides later tokens
        # Whether norms come before attention and feed-forward network; else behind the sums.
        self.norm_first = norm_first
        # Places at the experts, as a multiple of those that an even load needs.
        self.places = places

    def norm(self, name: str, x: str) -> str:
        """A norm of the transformer's kind."""
        w, width = self.w, (self.t.hidden,)
        scale = w.parameter(f"{name}.scale", width)
        if self.t.norm == "rms":
            return w.apply("rms-norm", name, x, scale)
        return w.apply("layer-norm", name, x, scale, w.parameter(f"{name}.shift", width))

    def attention(self, name: str, scores: str, x: str) -> str:
        """The projection to queries, keys and values, the attention itself, and the projection
        back."""
        w, t = self.w, self.t
        g, r = t.kv_heads, t.heads // t.kv_heads
        weight = (g, (r + 2) * t.head_dim, t.hidden)
        bias = "gd" if t.attention_bias else None
        x = w.linear(f"{name}.qkv", x, "bsh,gdh->bgsd", weight, bias)
        x = w.apply("attention", scores, x, causal=self.causal, rotary=t.rotary, queries=r)
        weight = (t.hidden, g, r * t.head_dim)
        bias = "h" if t.output_bias else None
        return w.linear(f"{name}.out", x, "bgsd,hgd->bsh", weight, bias)

    def feed_forward(self, name: str, x: str) -> str:
        """The product to the inner width, the activation, and the product back."""
        w, t = self.w, self.t
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

    def experts(self, name: str, x: str, mixture: Experts) -> str:
        """The router, the dispatch of tokens, the experts, and the combination of their outputs.
        The tokens of one sample compete for places (GShard)."""
        w, t, e, tokens = self.w, self.t, mixture.count, self.w.shape(x)[1]
        wanted = self.places * mixture.active * tokens
        places = -(-wanted // e)  # rounded up
        places = min(places, tokens)  # a token visits an expert once at most
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

    def block(self, x: str, i: int, layer: str) -> str:
        """Attention, and a feed-forward network or experts, each with its norm and sum. i: number
        of the block. layer: its layer in the profile."""
        names = {key: name.format(i=i, layer=layer) for key, name in self.names.items()}
        mixture = self.t.experts
        for part in ("1", "2"):
            y = self.norm(names[f"norm-{part}"], x) if self.norm_first else x
            if part == "1":
                y = self.attention(names["attention"], names["scores"], y)
            elif mixture is not None and (i + 1) % mixture.every == 0:
                y = self.experts(names["experts"], y, mixture)
            else:
                y = self.feed_forward(names["feed"], y)
            x = self.w.apply("add", names[f"sum-{part}"], x, y)
            if not self.norm_first:
                x = self.norm(names[f"norm-{part}"], x)
        return x

    def stack(self, x: str, layers: Sequence[str]) -> str:
        """The blocks, one for each layer but the first and the last. The nodes that are written
        next belong to the last layer."""
        for i, layer in enumerate(layers[1:-1]):
            self.w.layer = layer
            x = self.block(x, i, layer)
        self.w.layer = layers[-1]
        return x

    def placed(self, x: str, learned: int) -> str:
        """The sum of `x` and position vectors. learned: the number of position vectors that the
        model has, at least that of tokens."""
        tokens = self.w.shape(x)[1]
        table = self.w.parameter("positions", (learned, self.t.hidden))
        if learned != tokens:
            table = self.w.apply(
                "select", "positions-used", table, dimension=0, start=0, stop=tokens
            )
        return self.w.apply("add", "placed", x, table)


def language_model(
    blocks: Blocks, batch: int, tokens: int, layers: Sequence[str], *, head_bias: bool = False
) -> SingleProgram:
    """The program of a language model: embedding, blocks and head.

    layers: names of the embedding, of each block and of the head. head_bias: whether the last
    product has a bias. Letters of equations: b samples, s tokens, h and g hidden size, e width of
    the embedding, v vocabulary.
    """
    w, t, names = blocks.w, blocks.t, blocks.names
    ids = w.placeholder("tokens", (batch, tokens), below=t.vocabulary, unsliced=(1,))
    labels = w.placeholder("labels", (batch, tokens), below=t.vocabulary)
    w.layer = layers[0]
    width = t.embedding_width or t.hidden
    table = w.parameter(names["table"], (t.vocabulary, width))
    x = w.apply("embed", "words", ids, table)
    if width != t.hidden:
        x = w.linear("project-in", x, "bse,he->bsh", (t.hidden, width))
    if t.positions:
        x = blocks.placed(x, t.positions)
    if t.embedding_norm:
        x = blocks.norm(names["embedding-norm"], x)
    x = blocks.stack(x, layers)
    if t.final_norm:
        x = blocks.norm(names["final-norm"], x)
    if t.head == "bert":
        x = w.linear("transform", x, "bsh,gh->bsg", (t.hidden, t.hidden), "g")
        x = w.apply("gelu", names["transform-gelu"], x)
        x = blocks.norm(names["transform-norm"], x)
    if width != t.hidden:
        x = w.linear("project-out", x, "bsh,eh->bse", (width, t.hidden))
    if t.tied:
        x = w.apply("contract", names["head"], x, table, equation="bsh,vh->bsv")
    else:
        bias = "v" if head_bias else None
        x = w.linear(names["head"], x, "bsh,vh->bsv", (t.vocabulary, width), bias)
    return w.loss(x, labels)


def vgg19(batch: int, width: int, pooled: int, classes: int, dense: int) -> SingleProgram:
    """VGG19 for images of 32 x 32: 16 convolutions in 5 groups, and 3 dense layers.

    width: channels of the first group. pooled: side of the map that the dense layers read. dense:
    width of the dense layers.
    """
    w, group, place = Writer("vgg19"), 1, 1
    x = w.placeholder("images", (batch, 3, 32, 32))
    labels = w.placeholder("labels", (batch,), below=classes)
    for channels in VGG19:
        if channels:
            w.layer = f"conv{group}.{place}"
            x = w.convolution(w.layer, x, channels // 64 * width)  # 64: VGG19's first group
            place += 1
        else:  # 0 stands for pooling
            x = w.apply("max-pool", f"pool{group}", x, window=2)
            group, place = group + 1, 1
    w.layer = "head"
    last = w.shape(x)[1]
    x = w.apply("repeat", "pooled", x, shape=(batch, last, pooled, pooled))
    x = w.apply("reshape", "flat", x, shape=(batch, last * pooled**2))
    return w.classifier(x, labels, {"fc1": dense, "fc2": dense, "fc3": classes})


def vit(batch: int, t: Transformer, patches: int, pixels: int, classes: int) -> SingleProgram:
    """The vision transformer, with norms first. pixels: entries of an unfolded patch."""
    w = Writer("vit")
    blocks = Blocks(w, t, PUBLISHED, causal=False)
    x = w.placeholder("patches", (batch, patches, pixels), unsliced=(1,))
    labels = w.placeholder("labels", (batch,), below=classes)
    w.layer = "embedding"
    x = blocks.placed(w.linear("embed", x, "bsp,hp->bsh", (t.hidden, pixels), "h"), patches)
    x = blocks.norm("norm", blocks.stack(x, published_layers(t)))
    x = w.apply("mean", "mean", x, dimension=1, length=patches)
    x = w.linear("classify", x, "bh,ch->bc", (classes, t.hidden), "c")
    return w.loss(x, labels)


def bert(
    batch: int, t: Transformer, tokens: int, vocabulary: int, experts: int | None = None
) -> SingleProgram:
    """BERT, with norms behind the sums. experts: number of experts in every second block, which
    have twice the places that an even load needs; None: no experts."""
    mixture = None if experts is None else Experts(experts, min(2, experts), every=2)
    t = replace(
        t, vocabulary=vocabulary, positions=tokens, embedding_norm=True, final_norm=False,
        head="bert", tied=False, experts=mixture,
    )  # fmt: skip
    names = PUBLISHED | {"table": "words.table", "head": "decode"}
    w = Writer("bert" if experts is None else "bert-moe")
    blocks = Blocks(w, t, names, causal=False, norm_first=False, places=2)
    return language_model(blocks, batch, tokens, published_layers(t), head_bias=True)


IMAGE, CLASSES = 224, 1000  # side of an image and number of classes, for VGG-19 on ImageNet


def program_of(model: Model, batch: int) -> SingleProgram:
    """The program of one step of the model on `batch` samples. Its nodes bear the names of the
    model's layers.

    Raises UnsupportedError for a model with an operator that has no sharding rules.
    """
    spec = model.spec
    layers = [layer.name for layer in model.layers]
    if spec.program is not None:
        traced: SingleProgram = spec.program(batch)
        return traced
    if model.name == "vgg19":
        return imagenet_vgg19(model, batch)
    if spec.shape is not None and model.sequence is not None:
        t, tokens = spec.shape, model.sequence
    elif spec.encoder is not None:
        # the first layer, the embedding, gives `hidden` entries for each token
        t = spec.encoder
        tokens = model.layers[0].output // spec.encoder.hidden
    else:
        raise UnsupportedError(
            "no single-device program of this model", where="hap", got=model.name
        )
    # a window of all tokens hides nothing
    require(
        t.window is None or t.window >= tokens,
        "no rule for attention in a window",
        where="hap",
        got=model.name,
        kind=UnsupportedError,
    )
    require(
        t.norm != "pixel",
        "no rule for pixel norms",
        where="hap",
        got=model.name,
        kind=UnsupportedError,
    )
    require(
        not t.rare_features,
        f"no rule for {', '.join(t.rare_features)}",
        where="hap",
        got=model.name,
        kind=UnsupportedError,
    )
    blocks = Blocks(Writer(model.name), t, BY_LAYER, causal=t.vocabulary > 0 and t.head == "lm")
    if t is spec.encoder:
        return vision_model(blocks, batch, tokens, model)
    return language_model(blocks, batch, tokens, layers)


def vision_model(blocks: Blocks, batch: int, tokens: int, model: Model) -> SingleProgram:
    """The program of a vision transformer: patches, blocks, and a classifier of the class token."""
    w = blocks.w
    t = blocks.t
    layers = [layer.name for layer in model.layers]
    products = [op for layer in model.layers for op in layer.operators if isinstance(op, Matmul)]
    # the first product embeds a patch, the last one classifies
    pixels, classes = int(products[0].k), int(products[-1].n)
    x = w.placeholder("image", (batch, tokens, pixels), unsliced=(1,))
    labels = w.placeholder("labels", (batch,), below=classes)
    w.layer = layers[0]
    x = blocks.placed(w.linear("patches", x, "bsp,hp->bsh", (t.hidden, pixels), "h"), tokens)
    x = blocks.norm("final-norm", blocks.stack(x, layers))
    x = w.apply("select", "class-token", x, dimension=1, start=0, stop=1)
    x = w.apply("reshape", "features", x, shape=(batch, t.hidden))
    x = w.linear("classifier", x, "bh,ch->bc", (classes, t.hidden), "c")
    return w.loss(x, labels)


def imagenet_vgg19(model: Model, batch: int) -> SingleProgram:
    """The program of VGG-19 on images of 224 x 224: convolutions with their pooling, and three
    dense layers."""
    w = Writer(model.name)
    names = iter([layer.name for layer in model.layers])
    x = w.placeholder("image", (batch, 3, IMAGE, IMAGE))
    labels = w.placeholder("labels", (batch,), below=CLASSES)
    for width in VGG19:
        if width:
            w.layer = next(names)
            x = w.convolution(w.layer, x, width)
        else:  # 0 stands for pooling
            x = w.apply("max-pool", f"{w.layer}.pool", x, window=2)
    _, channels, height, columns = w.shape(x)
    x = w.apply("reshape", "features", x, shape=(batch, channels * height * columns))
    dense_names = list(names)  # those that the convolutions leave
    return w.classifier(x, labels, dict(zip(dense_names, (4096, 4096, CLASSES), strict=True)))
