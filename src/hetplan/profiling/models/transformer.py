"""Transformers: their shape, and their layers as a chain of embedding, blocks and head.

The shape holds the sizes and variants in which GPT-2, BERT, Llama, OPT, Mixtral and GLM differ.
Symbols (Korthikanti et al. 2022): s tokens, h hidden size, a heads.

A block is norm - attention - residual - norm - feed-forward network - residual; pre-norm and
post-norm blocks cost the same. Attention scores are counted in full, also where a mask hides half
of them. Saved activations follow Korthikanti et al. 2022, Section 4: a GPT block in 16 bit with
dropout keeps s h (34 + 5 a s / h) bytes per sample. Other variants are sums over the same tensors.

Tensor parallelism is Megatron's (Shoeybi et al. 2019, Section 3): attention is divided by heads,
the feed-forward network by columns, then by rows. So a block has two all-reduces of s h numbers in
the forward and two in the backward pass. Embedding and head are divided by the vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from hetplan.profiling.models.function import Function
from hetplan.profiling.models.operators import (
    BLOCKS,
    Attention,
    Elementwise,
    Layer,
    Matmul,
    Operator,
    Reduce,
    Saved,
)

Norm = Literal["layer", "rms", "pixel"]


@dataclass(frozen=True)
class Experts:
    """A mixture of experts, in place of the feed-forward network of some blocks."""

    count: int  # experts of a block
    active: int  # experts that a token visits
    every: int = 1  # a mixture is in every `every`-th block, counted from 1
    dense: int = 0  # number of blocks at the beginning without a mixture
    width: int | None = None  # inner width of one expert; None: the feed-forward size
    shared: int = 0  # inner width of the shared expert that every token visits as well
    # The width to which tokens are projected before they travel to experts (Nemotron 3's
    # LatentMoE); None: the hidden size.
    latent: int | None = None
    # Whether the gates' weights are applied between an expert's two products; its outputs are then
    # not kept (Megatron Core, transformer/moe/experts.py).
    early: bool = False
    # The capacity factor: every expert computes the tokens of an even load times this factor, after
    # dropping or padding (Lepikhin et al. 2021, GShard, Section 2.2). None: every expert computes
    # the tokens that visit it.
    capacity: float | None = None

    def rows(self, tokens: int) -> int:
        """The rows that all experts together compute for `tokens` tokens; a token has one row at
        each expert that it visits."""
        return math.ceil(tokens * self.active * (self.capacity or 1))


@dataclass(frozen=True)
class Mamba:
    """A Mamba-2 layer (Dao and Gu 2024, Section 6)."""

    heads: int
    head_dim: int
    groups: int  # groups of heads that share the vectors B and C
    state: int  # length of B and C
    kernel: int = 4  # tokens that the convolution reaches over
    chunk: int = 128  # tokens that the scan takes at once

    @property
    def inner(self) -> int:
        """Width of all heads together."""
        return self.heads * self.head_dim

    @property
    def mixed(self) -> int:
        """Width of the convolution: the heads' inputs, B and C."""
        return self.inner + 2 * self.groups * self.state


@dataclass(frozen=True)
class Latent:
    """Latent attention (DeepSeek-V2, Section 2.1): queries, keys and values are projected from
    vectors of low rank."""

    query: int | None  # rank of the queries' vector; None: they come from the hidden state
    keys: int  # rank of the vector from which keys and values come
    rope: int  # the part of a key's width that is rotated and shared by all heads
    nope: int  # the part of a key's width that each head has for itself
    value: int  # width of one head's values


@dataclass(frozen=True)
class Cut:
    """The degrees of context, expert and expert-tensor parallelism, which divide every block over
    ranks."""

    # ranks that share a sample's tokens evenly, each with the keys of all (ring attention, Liu et
    # al. 2023)
    context: int = 1
    # ranks over which a block's experts are spread, visited by the tokens of all these ranks
    expert: int = 1
    # tensor ranks that hold the same columns of experts and divide the experts' tokens: the tensor
    # degree over Megatron Core's expert-tensor degree
    whole: int = 1


@dataclass(frozen=True)
class Transformer:
    """The shape of a transformer: the sizes and variants from which its layers follow."""

    vocabulary: int  # 0: no language model
    hidden: int
    layers: int  # blocks
    heads: int  # query heads
    feed_forward: int  # inner width of the feed-forward network
    kv_heads: int  # key and value heads; fewer than heads with grouped queries
    head_dim: int  # usually hidden / heads; with latent attention rope + nope
    positions: int = 0  # learned position vectors
    position_offset: int = 0  # further position vectors that no token uses (OPT)
    types: int = 0  # token types (BERT)
    gated: bool = False  # SwiGLU or GeGLU: three matrices in the feed-forward network
    norm: Norm = "layer"  # LayerNorm, RMSNorm (scale only) or pixel norm (no parameters)
    attention_bias: bool = True
    output_bias: bool = True
    feed_forward_bias: bool = True
    tied: bool = True  # whether the head shares the embedding's weights
    dropout: bool = True
    # "standard" writes the s x s scores to memory and keeps them; "fused" (FlashAttention, Dao et
    # al. 2022) does neither
    attention: Attention = "fused"
    window: int | None = None  # number of last keys that a token attends to; None: all
    # in every `full_every`-th block, attention reaches all keys in spite of the window; 0: in none
    full_every: int = 0
    latent: Latent | None = None
    # norms of queries and keys: one for each head's width, or one for the width of all heads
    qk_norm: Literal["none", "head", "all"] = "none"
    block_norms: int = 2  # number of norms in a block
    rotary: bool = False  # rotary positions
    embedding_norm: bool = False  # LayerNorm after the embedding (BERT)
    embedding_width: int | None = None  # a narrower embedding with projections (OPT-350m)
    final_norm: bool = True  # norm before the head
    head: Literal["lm", "bert"] = "lm"  # a language model's, or BERT's pre-training heads
    experts: Experts | None = None
    cut: Cut = Cut()  # of one rank
    # The kind of each block of a hybrid model, one letter each, as Megatron writes it: M Mamba-2,
    # * attention, - feed-forward network, E experts. Empty: attention and network in every block.
    pattern: str = ""
    mamba: Mamba | None = None  # sizes of the Mamba-2 blocks
    adapter: int = 0  # rank of adapters beside frozen weights (Hu et al. 2021, LoRA)
    # What the model computes beyond these sizes; None: unknown. Neither seconds nor bytes depend on
    # it.
    function: Function | None = None
    # Bytes of each number in a product's input that is kept for the weight's gradient: 1 where
    # Transformer Engine multiplies 8-bit numbers (pytorch/module/layernorm_linear.py); None: those
    # of the training precision.
    input_bytes: int | None = None

    def keys(self, s: int) -> int:
        """The number of keys that each of a rank's `s` tokens attends to."""
        tokens = s * self.cut.context
        return min(tokens, self.window or tokens)

    @property
    def causal(self) -> bool:
        """Whether a token attends only to tokens before it: language models that write text."""
        return self.head == "lm" and self.vocabulary > 0

    @property
    def query_width(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key (or value) heads."""
        return self.kv_heads * self.head_dim

    @property
    def value_dim(self) -> int:
        """Width of one head's values."""
        return self.latent.value if self.latent else self.head_dim

    @property
    def norm_params(self) -> int:
        """Parameters of one norm over the hidden size."""
        return {"layer": 2, "rms": 1, "pixel": 0}[self.norm] * self.hidden

    def tensor_degree_fits(self, tensor: int) -> bool:
        """Whether `tensor` ranks evenly divide the heads, the key and value heads and the inner
        widths of the networks."""
        sizes = [self.heads, self.kv_heads, self.feed_forward]
        if self.experts:  # a width of None is the feed-forward size, and every degree divides 0
            sizes += (self.experts.width or 0, self.experts.shared)
        if self.mamba:
            sizes += (self.mamba.heads, self.mamba.groups)
        return all(size % tensor == 0 for size in sizes)


@dataclass
class LayerParts:
    """The parameters, operators and kept tensors of a layer, collected part by part."""

    params: int = 0
    operators: tuple[Operator, ...] = ()
    saved: tuple[Saved, ...] = ()

    def add(
        self, params: int = 0, operators: Sequence[Operator] = (), saved: Sequence[Saved] = ()
    ) -> None:
        """Append one part of the layer."""
        self.params += params
        self.operators += tuple(operators)
        self.saved += tuple(saved)


def transformer(
    layers: int, hidden: int, heads: int, feed_forward: int, **others: Any
) -> Transformer:
    """A shape with hidden / heads as the width of a head, and with a key and a value head for each
    query head. others: further fields of the shape; they may replace kv_heads and head_dim."""
    fields = {"kv_heads": heads, "head_dim": hidden // heads} | others
    return Transformer(
        layers=layers, hidden=hidden, heads=heads, feed_forward=feed_forward, **fields
    )


def bert_head_params(t: Transformer) -> int:
    """Parameters of BERT's heads: pooler, next-sentence classifier, MLM transform with norm,
    vocabulary bias (Devlin et al. 2019)."""
    dense = t.hidden * t.hidden + t.hidden
    pooler, classifier = dense, 2 * t.hidden + 2
    transform = dense + 2 * t.hidden
    return pooler + classifier + transform + t.vocabulary


def projections(t: Transformer, s: int) -> list[Matmul]:
    """The products that project hidden states to queries, keys and values.

    Latent attention first projects down to its low ranks, and last up to keys with values and to
    queries.
    """
    if t.latent is None:
        return [Matmul("qkv", s, t.hidden, t.query_width + 2 * t.kv_width, split="n")]
    latent = t.latent
    downs = [Matmul("kv-down", s, t.hidden, latent.keys + latent.rope)]
    if latent.query is not None:
        downs.append(Matmul("q-down", s, t.hidden, latent.query))
    kv_up = Matmul("kv-up", s, latent.keys, t.heads * (latent.nope + latent.value), split="n")
    q_up = Matmul("q-up", s, latent.query or t.hidden, t.query_width, split="n")
    return [*downs, kv_up, q_up]


def attention_params(t: Transformer) -> int:
    """Parameters of attention: query, key, value and output projections, and the norms of queries,
    keys and latent vectors."""
    products = sum(int(product.k) * int(product.n) for product in projections(t, 1))
    # a flag counts as 1 or 0
    biases = (t.query_width + 2 * t.kv_width) * t.attention_bias + t.hidden * t.output_bias
    norms = {"none": 0, "head": 2 * t.head_dim, "all": t.query_width + t.kv_width}[t.qk_norm]
    if t.latent:
        norms += t.latent.keys + (t.latent.query or 0)
    return products + t.heads * t.value_dim * t.hidden + biases + norms


def feed_forward_params(t: Transformer) -> int:
    """Parameters of one feed-forward network: two matrices, three if gated."""
    up = 2 if t.gated else 1  # matrices before the activation
    matrices = (up + 1) * t.hidden * t.feed_forward
    biases = up * t.feed_forward + t.hidden
    return matrices + biases * t.feed_forward_bias  # the flag counts as 1 or 0


def attention_operators(t: Transformer, s: int) -> tuple[Operator, ...]:
    """Operators of attention: projections, scores, softmax, weighted sum, output projection."""
    keys = t.keys(s)
    fused = t.attention == "fused"
    core: Any = "fused-causal" if fused and t.causal else t.attention
    rotary: tuple[Operator, ...] = ()
    if t.rotary:
        rotated = 2 * s * (t.query_width + t.kv_width)  # queries and keys, read and written
        rotary = (Elementwise("rotary", rotated, rotated, split=True),)
    softmax: tuple[Operator, ...] = ()
    if not fused:
        # Scale, mask and softmax are one kernel, dropout is a second one. Either reads and writes
        # the scores; backward it reads them and a gradient, and writes a gradient.
        kernels = 2 if t.dropout else 1
        scores = s * keys * t.heads
        forward, backward = 2 * kernels * scores, 3 * kernels * scores
        softmax = (Elementwise("softmax", forward, backward, split=True, kind="softmax"),)
    return (
        *projections(t, s),
        *rotary,
        Matmul(
            "scores",
            s,
            t.head_dim,
            keys,
            t.heads,
            weight=False,
            split="count",
            out=0 if fused else None,
            attention=core,
        ),
        *softmax,
        Matmul(
            "context",
            s,
            keys,
            t.value_dim,
            t.heads,
            weight=False,
            split="count",
            left=0 if fused else None,
            attention=core,
        ),
        Matmul("attention-output", s, t.heads * t.value_dim, t.hidden, split="k"),
    )


def feed_forward_operators(t: Transformer, s: int) -> tuple[Operator, ...]:
    """Operators of a feed-forward network: up (and gate), activation, down."""
    up = 2 if t.gated else 1
    return (
        Matmul("up", s, t.hidden, up * t.feed_forward, split="n"),
        activation(up, s * t.feed_forward),
        Matmul("down", s, t.feed_forward, t.hidden, split="k"),
    )


def activation(up: int, inner: int) -> Elementwise:
    """The activation function of a network, whose `up` projections give `inner` numbers each.

    The forward pass reads the projections and writes the activation. The backward pass reads the
    projections and the gradient, and writes the projections' gradients.
    """
    forward, backward = (up + 1) * inner, (2 * up + 1) * inner
    return Elementwise("activation", forward, backward, split=True, kind="activation")


def expert_operators(t: Transformer, s: int, mixture: Experts) -> tuple[Operator, ...]:
    """Operators of a mixture of experts on one rank: router, dispatch, the rank's experts, combine.

    All experts have an even load, rounded up to whole rows. t: the shape with the width of one
    expert as its feed-forward size.
    """
    up = 2 if t.gated else 1
    experts = -(-mixture.count // t.cut.expert)  # experts of this rank
    sent = mixture.rows(s)  # rows that this rank's tokens have at all experts
    # Rows of one expert, rounded up. The rows of all expert ranks go to `mixture.count` experts.
    # Tensor ranks that hold the same columns of an expert divide its rows.
    rows = -(-sent * t.cut.expert // (mixture.count * t.cut.whole))
    # All tensor ranks divide the columns of a product (`split`), but only tensor / whole of them
    # divide those of an expert. So the product is given `whole` times an expert's columns.
    width, columns = mixture.latent or t.hidden, t.cut.whole * t.feed_forward
    copied = (s + sent) * width  # tokens read and rows written, or the reverse
    operators: tuple[Operator, ...] = (
        Elementwise("dispatch", copied, copied, kind="copy"),
        Matmul("experts-up", rows, width, up * columns, experts, split="n"),
        activation(up, sent * t.feed_forward),
        Matmul("experts-down", rows, columns, width, experts, split="k"),
        Elementwise("combine", copied, 2 * copied, kind="copy"),
    )
    if mixture.latent:
        operators = (
            Matmul("latent-down", s, t.hidden, width),
            *operators,
            Matmul("latent-up", s, width, t.hidden),
        )
    return (Matmul("router", s, t.hidden, mixture.count), *operators)


def add_mamba(parts: LayerParts, t: Transformer, s: int, m: Mamba) -> None:
    """Add a Mamba-2 layer with its norm.

    The scan takes the tokens in chunks: products within the chunks, and the states between them.
    Its backward pass computes the convolution again (mamba_ssm, ssd_combined.py).
    """
    size, chunks = s * t.hidden, -(-s // m.chunk)
    in_width = m.inner + m.mixed + m.heads  # numbers of a token that the first product gives
    n, p, q = m.state, m.head_dim, m.chunk
    projection_params = t.hidden * (in_width + m.inner)
    convolution_params = (m.kernel + 1) * m.mixed  # with a bias
    # of each head a decay, a step's bias and a skip weight; the scales of the gated norm
    head_and_norm_params = 3 * m.heads + m.inner
    params = projection_params + convolution_params + head_and_norm_params + t.norm_params
    scan: Any = {"weight": False, "split": "count", "left": 0, "out": 0}
    operators: tuple[Operator, ...] = (
        norm("norm-1", size),
        Matmul("mamba-in", s, t.hidden, in_width, split="n"),
        Elementwise("convolution", 2 * s * m.mixed, 3 * s * m.mixed, split=True, kind="activation"),
        # within a chunk, scores of its tokens and their sums over inputs; then the states that each
        # chunk leaves, and the outputs from the states before it (hence 2)
        Matmul("scan-scores", q, n, q, m.groups * chunks, **scan),
        Matmul("scan-inside", q, q, p, m.heads * chunks, **scan),
        Matmul("scan-states", n, q, p, 2 * m.heads * chunks, **scan),
        Elementwise("gated-norm", 3 * s * m.inner, 5 * s * m.inner, split=True, kind="norm"),
        Matmul("mamba-out", s, m.inner, t.hidden, split="k"),
        residual("residual-1", size, t.dropout),
    )
    saved = (
        Saved("norm-1 input", size, split=False),
        Saved("mamba-in input", size, split=False, element_bytes=t.input_bytes),
        Saved("mamba-in output", s * in_width, split=True),
        Saved("scan output", s * m.inner, split=True),
        Saved("mamba-out input", s * m.inner, split=True, element_bytes=t.input_bytes),
        Saved("states", chunks * m.inner * n, split=True),
    )
    parts.add(params, operators, saved)


def norm(name: str, size: int) -> Elementwise:
    """A norm over `size` numbers. Its forward pass reads the input and writes the output; its
    backward pass reads the input and a gradient, and writes a gradient."""
    return Elementwise(name, 2 * size, 3 * size, kind="norm")


def residual(name: str, size: int, dropout: bool) -> Elementwise:
    """Bias, dropout and addition of `size` numbers in one kernel. Its backward pass reads and
    writes the gradient, and reads the dropout's mask."""
    return Elementwise(name, 3 * size, 3 * size if dropout else 2 * size)


def dropout_mask(t: Transformer, name: str, size: int, *, split: bool = False) -> tuple[Saved, ...]:
    """The mask of a dropout, a byte per element; () where the model has no dropout."""
    if not t.dropout:
        return ()
    return (Saved(f"{name} dropout mask", size, split, element_bytes=1),)


def attention_saved(t: Transformer, s: int) -> tuple[Saved, ...]:
    """The tensors that attention and its norm keep: Korthikanti et al. 2022, Section 4.1
    (11 s b h + 5 a s^2 b)."""
    size = s * t.hidden
    scores = s * t.keys(s) * t.heads
    core: tuple[Saved, ...] = (Saved("softmax output", scores, split=True),)
    if t.attention == "fused":
        core = (Saved("log-sum-exp", s * t.heads, split=True, element_bytes=4),)
    elif t.dropout:
        core += (Saved("scores after dropout", scores, split=True),)
        core += dropout_mask(t, "scores", scores, split=True)
    return (
        Saved("norm-1 input", size, split=False),
        Saved("qkv input", size, split=False, element_bytes=t.input_bytes),
        Saved("queries", s * t.query_width, split=True),
        Saved("keys and values", s * (t.kv_width + t.kv_heads * t.value_dim), split=True),
        Saved("attention output", s * t.heads * t.value_dim, split=True),
        # of latent attention, the outputs of the projections to low ranks: all projections but the
        # last two, which lead up; without latent attention there is one projection, and so none
        *(Saved(f"{p.name} output", s * int(p.n), split=False) for p in projections(t, s)[:-2]),
        *core,
        *dropout_mask(t, "residual-1", size),
    )


def feed_forward_saved(t: Transformer, s: int, mixture: Experts | None) -> tuple[Saved, ...]:
    """The tensors that the feed-forward network and its norm keep (19 s b h for a GPT block)."""
    size = s * t.hidden
    up = 2 if t.gated else 1
    rows, width = s, t.hidden
    routing: tuple[Saved, ...] = ()
    if mixture:
        rows, width = mixture.rows(s), mixture.latent or t.hidden
        routing = (Saved("router input and weights", size + s * mixture.count, split=False),)
        if not mixture.early:
            routing += (Saved("expert outputs", rows * width, split=False),)
    return (
        Saved("norm-2 input", size, split=False),
        Saved("up input", rows * width, split=False, element_bytes=t.input_bytes),
        Saved("activation input", rows * up * t.feed_forward, split=True),
        Saved("down input", rows * t.feed_forward, split=True, element_bytes=t.input_bytes),
        *routing,
        *dropout_mask(t, "residual-2", size),
    )


def transformer_layers(t: Transformer, sequence: int) -> tuple[Layer, ...]:
    """The embedding, the blocks and the head of one rank of the shape's cut, for samples of
    `sequence` tokens. Their parameters are those of all ranks. `sequence` is at most the number of
    learned positions."""
    s = -(-sequence // t.cut.context)  # tokens of one rank
    blocks = [block(t, s, index) for index in range(t.layers)]
    chain = (embedding(t, s), *blocks, head(t, s))
    if t.adapter:
        return tuple(adapted(layer, t.adapter) for layer in chain)
    return chain


def adapted(layer: Layer, rank: int) -> Layer:
    """The layer with frozen weights, and in a block with an adapter of rank `rank` beside each
    product but the router's."""
    operators: list[Operator] = []
    adapter_params = 0
    for op in layer.operators:
        if not (isinstance(op, Matmul) and op.weight):
            operators.append(op)
            continue
        operators.append(replace(op, frozen=True))
        if layer.kind in BLOCKS and op.name != "router":
            # An adapter is two products, k x rank and rank x n. Tensor ranks divide its k and n as
            # those of the product beside it, and never the rank.
            adapter_params += op.count * rank * (op.k + op.n)
            operators += [
                replace(op, n=rank, split="k" if op.split == "k" else "none"),
                replace(op, k=rank, split="n" if op.split == "n" else "none"),
            ]
    return replace(
        layer,
        operators=tuple(operators),
        params=layer.params + adapter_params,
        frozen=layer.params,
    )


def embedding(t: Transformer, s: int) -> Layer:
    """The embedding layer: the sum of token, position and type vectors, with the projection, norm
    and dropout that the model has."""
    width, size = t.embedding_width or t.hidden, s * t.hidden
    vectors = t.vocabulary * width + (t.positions + t.position_offset + t.types) * t.hidden
    # a token's vector read, the sum written, and where there are such, position and type read
    moved = (2 + bool(t.positions) + bool(t.types)) * s * width
    parts = LayerParts()
    parts.add(vectors, [Elementwise("lookup", moved, moved, kind="lookup")])
    if width != t.hidden:
        parts.add(
            width * t.hidden,
            [Matmul("project-in", s, width, t.hidden)],
            [Saved("project-in input", s * width, split=False)],
        )
    if t.embedding_norm:
        saved = Saved("embedding norm input", size, split=False)
        parts.add(t.norm_params, [norm("embedding-norm", size)], [saved])
    if t.dropout:
        dropout = Elementwise("dropout", 2 * size, 2 * size)
        parts.add(0, [dropout], dropout_mask(t, "embedding", size))
    return Layer(
        name="embedding",
        kind="embedding",
        params=parts.params,
        operators=parts.operators,
        output=size,
        saved=parts.saved,
        reduces=(Reduce(s * width, backward=False),),  # ranks hold parts of the vocabulary
    )


def mixture_of(t: Transformer, index: int) -> Experts | None:
    """The mixture of experts of block `index`; None where the block has none."""
    mixture, kind = t.experts, t.pattern[index : index + 1]  # kind "" without a pattern
    if mixture is None or (index + 1) % mixture.every != 0 or index < mixture.dense:
        return None
    return mixture if kind in ("", "E") else None


def feed_forward_part(t: Transformer, s: int, mixture: Experts | None) -> LayerParts:
    """The feed-forward network of a block, or the mixture of experts in its place."""
    if mixture is None:
        return LayerParts(
            feed_forward_params(t), feed_forward_operators(t, s), feed_forward_saved(t, s, None)
        )
    inner = replace(t, feed_forward=mixture.width or t.feed_forward)
    width = mixture.latent or t.hidden
    expert_params = feed_forward_params(replace(inner, hidden=width))
    router_params = mixture.count * t.hidden
    latent_params = 2 * t.hidden * (mixture.latent or 0)
    parts = LayerParts(
        mixture.count * expert_params + router_params + latent_params,
        expert_operators(inner, s, mixture),
        feed_forward_saved(inner, s, mixture),
    )
    if mixture.shared:
        shared = replace(t, feed_forward=mixture.shared)
        # the inputs of the activation and of the second product; the network's own input is kept
        # already
        saved = feed_forward_saved(shared, s, None)[2:4]
        parts.add(feed_forward_params(shared), feed_forward_operators(shared, s), saved)
    return parts


def block(t: Transformer, s: int, index: int) -> Layer:
    """Block `index`: attention and feed-forward network with norms and residuals. A block of a
    hybrid model has only one of attention, network, mixture of experts and Mamba-2, by the
    pattern."""
    if t.full_every and (index + 1) % t.full_every == 0:
        t = replace(t, window=None)
    kind, size = t.pattern[index : index + 1], s * t.hidden  # kind "" without a pattern
    mixture = mixture_of(t, index)
    parts = LayerParts()
    if kind in ("", "*"):
        operators = (
            norm("norm-1", size),
            *attention_operators(t, s),
            residual("residual-1", size, t.dropout),
        )
        parts.add(attention_params(t), operators, attention_saved(t, s))
    if kind in ("", "E", "-"):
        network = feed_forward_part(t, s, mixture)
        operators = (
            norm("norm-2", size),
            *network.operators,
            residual("residual-2", size, t.dropout),
        )
        parts.add(network.params, operators, network.saved)
    if kind != "M":
        norms = 1 if kind else t.block_norms
        parts.add(norms * t.norm_params)
    # norms beyond the first two, as after attention and after the network (Gemma)
    parts.add(operators=[norm(f"norm-{i}", size) for i in range(3, t.block_norms + 1)])
    if kind == "M" and t.mamba:
        add_mamba(parts, t, s, t.mamba)
    # Attention and network each have one all-reduce in the forward and one in the backward pass. A
    # block with a kind has one part alone.
    parts_with_reduces = 1 if kind else 2
    forward_reduces = (Reduce(size, backward=False),) * parts_with_reduces
    backward_reduces = (Reduce(size, backward=True),) * parts_with_reduces
    return Layer(
        name=f"block-{index}",
        kind="moe-block" if mixture else "block",
        params=parts.params,
        operators=parts.operators,
        output=size,
        saved=parts.saved,
        reduces=forward_reduces + backward_reduces,
    )


def head(t: Transformer, s: int) -> Layer:
    """The head layer: final norm, language-model head (BERT: transform, MLM and NSP heads) and
    loss."""
    h, v = t.hidden, t.vocabulary
    width, size = t.embedding_width or h, s * h
    parts = LayerParts()
    weights = 0 if t.tied else v * width
    parts.add(weights, saved=[Saved("head input", s * width, split=False)])
    if t.final_norm:
        saved = Saved("final norm input", size, split=False)
        parts.add(t.norm_params, [norm("final-norm", size)], [saved])
    if width != h:
        saved = Saved("project-out input", size, split=False)
        parts.add(h * width, [Matmul("project-out", s, h, width)], [saved])
    if t.head == "bert":
        operators = (
            Matmul("pooler", 1, h, h),
            Matmul("transform", s, h, h),
            Elementwise("transform-gelu", 2 * size, 3 * size),
            norm("transform-norm", size),
        )
        kept = ("transform input", "transform activation", "transform norm")
        parts.add(bert_head_params(t), operators, [Saved(name, size, split=False) for name in kept])
    product = Matmul("lm-head", s, width, v, split="n")
    # The loss reads 16-bit logits and writes fp32 ones, which it reads for maximum, sum and
    # gradient; an fp32 number counts as two.
    loss = Elementwise("cross-entropy", 6 * s * v, 3 * s * v, split=True, kind="loss")
    logits = Saved("logits", s * v, split=True, element_bytes=4)
    parts.add(operators=[product, loss], saved=[logits])
    # Tensor ranks reduce the input's gradient in the backward pass, and in the forward pass three
    # fp32 numbers of each token: the maximum, the target's logit and the sum of exponentials.
    reduces = (Reduce(s * width, backward=True), Reduce(3 * s, backward=False, element_bytes=4))
    return Layer(
        name="head",
        kind="head",
        params=parts.params,
        operators=parts.operators,
        output=0,
        saved=parts.saved,
        reduces=reduces,
        tied_params=v * width if t.tied else 0,
    )
