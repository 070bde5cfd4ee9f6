"""Transformers: their shape, and their layers as a chain of embedding, blocks and head.

The shape holds what distinguishes GPT-2, BERT, Llama, OPT, Mixtral and GLM. Symbols (Korthikanti et
al. 2022): s tokens, h hidden size, a heads, f feed-forward size, V vocabulary.

One block: norm - attention - residual - norm - feed-forward - residual; pre- and post-norm cost the
same. Attention scores are counted in full also where a mask hides half of them. Saved activations
follow Korthikanti et al. 2022, Section 4: s h (34 + 5 a s / h) bytes per sample for a GPT block in
16 bit with dropout; other variants are summed from the same tensors.

Tensor parallelism is Megatron's (Shoeybi et al. 2019, Section 3): attention by heads, feed-forward
by columns, then rows, so two all-reduces of s h forward and two backward per block; vocabulary
split in embedding and head.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

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
    every: int = 1  # every how many blocks there is a mixture, counted from 1
    dense: int = 0  # the first blocks, which have none
    width: int | None = None  # inner width of one expert; None: the feed-forward size
    shared: int = 0  # inner width of the shared expert that every token visits as well
    # The width to which tokens are projected before they travel to experts (Nemotron 3's
    # LatentMoE); None: the hidden size.
    latent: int | None = None
    # Whether gates act between an expert's products, whose outputs are then not kept (Megatron
    # Core, transformer/moe/experts.py).
    early: bool = False
    # The tokens that every expert gets, over those of an even load, padded (Lepikhin et al. 2021,
    # GShard, Section 2.2); None: the tokens that come, none dropped and none padded.
    capacity: float | None = None

    def rows(self, tokens: int) -> int:
        """The rows that all experts together compute for a number of tokens."""
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
        """Width of all heads."""
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
    # tensor ranks that hold the same columns of experts and divide the experts' tokens; the tensor
    # degree over this number is Megatron Core's expert-tensor degree
    whole: int = 1


@dataclass(frozen=True)
class Transformer:
    """A transformer's shape."""

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
    window: int | None = None  # keys that attention reaches back to; None: all
    full_every: int = 0  # every how many blocks attention reaches all keys in spite of the window
    latent: Latent | None = None
    qk_norm: Literal["none", "head", "all"] = "none"  # norms of queries and keys: per head, or one
    block_norms: int = 2  # norms of a block
    rotary: bool = False  # rotary positions
    embedding_norm: bool = False  # LayerNorm behind the embedding (BERT)
    embedding_width: int | None = None  # a narrower embedding with projections (OPT-350m)
    final_norm: bool = True  # norm before the head
    head: Literal["lm", "bert"] = "lm"  # a language model's, or BERT's pre-training heads
    experts: Experts | None = None
    cut: Cut = Cut()
    # Of a hybrid model the kind of each block, as Megatron writes it: M Mamba-2, * attention, -
    # feed-forward network, E experts. Empty: attention and network in every block.
    pattern: str = ""
    mamba: Mamba | None = None
    adapter: int = 0  # rank of adapters beside frozen weights (Hu et al. 2021, LoRA)
    # Bytes of an element of a product's input that is kept for the weight's gradient: 1 where
    # Transformer Engine multiplies 8-bit numbers (pytorch/module/layernorm_linear.py); None: those
    # of the training precision.
    input_bytes: int | None = None

    def keys(self, s: int) -> int:
        """Keys that each of a rank's `s` tokens attends to."""
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
        """Whether Megatron's split works: heads, key-value heads and feed-forward size divide
        evenly."""
        sizes = [self.heads, self.kv_heads, self.feed_forward]
        if self.experts:
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
        """Add one part behind those before it."""
        self.params += params
        self.operators += tuple(operators)
        self.saved += tuple(saved)


def transformer(
    layers: int, hidden: int, heads: int, feed_forward: int, **others: Any
) -> Transformer:
    """A shape whose heads share the hidden size, each with a key and a value of its own.

    others: further fields of the shape; they may also replace kv_heads and head_dim.
    """
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
    """The products that project hidden states to queries, keys and values."""
    if t.latent is None:
        return [Matmul("qkv", s, t.hidden, t.query_width + 2 * t.kv_width, split="n")]
    ranks, rows = t.latent, t.heads * (t.latent.nope + t.latent.value)
    downs = [Matmul("kv-down", s, t.hidden, ranks.keys + ranks.rope)]
    ups = [Matmul("kv-up", s, ranks.keys, rows, split="n")]
    if ranks.query is not None:
        downs.append(Matmul("q-down", s, t.hidden, ranks.query))
    return [*downs, *ups, Matmul("q-up", s, ranks.query or t.hidden, t.query_width, split="n")]


def attention_params(t: Transformer) -> int:
    """Parameters of attention: query, key, value and output projections, and the norms of queries,
    keys and latent vectors."""
    products = sum(int(product.k) * int(product.n) for product in projections(t, 1))
    biases = (t.query_width + 2 * t.kv_width) * t.attention_bias + t.hidden * t.output_bias
    norms = {"none": 0, "head": 2 * t.head_dim, "all": t.query_width + t.kv_width}[t.qk_norm]
    if t.latent:
        norms += t.latent.keys + (t.latent.query or 0)
    return products + t.heads * t.value_dim * t.hidden + biases + norms


def feed_forward_params(t: Transformer) -> int:
    """Parameters of one feed-forward network: two matrices, three if gated."""
    up = 2 if t.gated else 1
    matrices = (up + 1) * t.hidden * t.feed_forward
    biases = up * t.feed_forward + t.hidden
    return matrices + biases * t.feed_forward_bias


def attention_operators(t: Transformer, s: int) -> tuple[Operator, ...]:
    """Operators of attention: projections, scores, softmax, weighted sum, output projection."""
    keys = t.keys(s)
    scores, rotated = s * keys * t.heads, 2 * s * (t.query_width + t.kv_width)
    fused = t.attention == "fused"
    core: Any = t.attention if not (fused and t.causal) else "fused-causal"
    rotary = (Elementwise("rotary", rotated, rotated, split=True),) if t.rotary else ()
    # scale, mask and softmax in one kernel; dropout in a second
    moved = (4 * scores, 6 * scores) if t.dropout else (2 * scores, 3 * scores)
    softmax = () if fused else (Elementwise("softmax", *moved, split=True, kind="softmax"),)
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
    inner = s * t.feed_forward
    return (
        Matmul("up", s, t.hidden, up * t.feed_forward, split="n"),
        Elementwise("activation", (up + 1) * inner, (2 * up + 1) * inner, True, "activation"),
        Matmul("down", s, t.feed_forward, t.hidden, split="k"),
    )


def expert_operators(t: Transformer, s: int, mixture: Experts) -> tuple[Operator, ...]:
    """Operators of a mixture of experts: router, dispatch, this rank's experts at even load (each
    pads its rows up to a whole token), combine."""
    up, held = 2 if t.gated else 1, -(-mixture.count // t.cut.expert)
    sent = mixture.rows(s)
    rows = -(-sent * t.cut.expert // (mixture.count * t.cut.whole))
    inner = sent * t.feed_forward
    width, columns = mixture.latent or t.hidden, t.cut.whole * t.feed_forward
    spread = (s + sent) * width
    moved: tuple[Operator, ...] = (
        Elementwise("dispatch", spread, spread, kind="copy"),
        Matmul("experts-up", rows, width, up * columns, held, split="n"),
        Elementwise("activation", (up + 1) * inner, (2 * up + 1) * inner, True, "activation"),
        Matmul("experts-down", rows, columns, width, held, split="k"),
        Elementwise("combine", spread, 2 * spread, kind="copy"),
    )
    if mixture.latent:
        moved = (
            Matmul("latent-down", s, t.hidden, width),
            *moved,
            Matmul("latent-up", s, width, t.hidden),
        )
    return (Matmul("router", s, t.hidden, mixture.count), *moved)


def add_mamba(parts: LayerParts, t: Transformer, s: int, m: Mamba) -> None:
    """Add a Mamba-2 layer with its norm.

    The scan is that of chunks: products within them, and their states; its backward pass computes
    the convolution again (mamba_ssm, ssd_combined.py).
    """
    size, tall, chunks = s * t.hidden, m.inner + m.mixed + m.heads, -(-s // m.chunk)
    n, p, q = m.state, m.head_dim, m.chunk
    projections, convolution = t.hidden * (tall + m.inner), (m.kernel + 1) * m.mixed
    params = projections + convolution + 3 * m.heads + m.inner + t.norm_params
    scan: Any = {"weight": False, "split": "count", "left": 0, "out": 0}
    operators: tuple[Operator, ...] = (
        norm("norm-1", size),
        Matmul("mamba-in", s, t.hidden, tall, split="n"),
        Elementwise("convolution", 2 * s * m.mixed, 3 * s * m.mixed, True, "activation"),
        Matmul("scan-scores", q, n, q, m.groups * chunks, **scan),
        Matmul("scan-inside", q, q, p, m.heads * chunks, **scan),
        Matmul("scan-states", n, q, p, 2 * m.heads * chunks, **scan),
        Elementwise("gated-norm", 3 * s * m.inner, 5 * s * m.inner, True, "norm"),
        Matmul("mamba-out", s, m.inner, t.hidden, split="k"),
        residual("residual-1", size, t.dropout),
    )
    saved = (
        Saved("norm-1 input", size, split=False),
        Saved("mamba-in input", size, split=False, element_bytes=t.input_bytes),
        Saved("mamba-in output", s * tall, split=True),
        Saved("scan output", s * m.inner, split=True),
        Saved("mamba-out input", s * m.inner, split=True, element_bytes=t.input_bytes),
        Saved("states", chunks * m.inner * n, split=True),
    )
    parts.add(params, operators, saved)


def norm(name: str, size: int) -> Elementwise:
    """A norm: reads and writes its input; backward reads input and gradient and writes a
    gradient."""
    return Elementwise(name, 2 * size, 3 * size, kind="norm")


def residual(name: str, size: int, dropout: bool) -> Elementwise:
    """Bias, dropout and addition in one kernel; backward passes the gradient on (through the
    mask)."""
    return Elementwise(name, 3 * size, 3 * size if dropout else 2 * size)


def dropout_mask(t: Transformer, name: str, size: int, *, split: bool = False) -> tuple[Saved, ...]:
    """The mask of a dropout, a byte per element; nothing where the model has no dropout."""
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
        Saved("down input", rows * t.feed_forward, True, t.input_bytes),
        *routing,
        *dropout_mask(t, "residual-2", size),
    )


def transformer_layers(t: Transformer, sequence: int) -> tuple[Layer, ...]:
    """Embedding, blocks and head for samples of `sequence` tokens, no more than the learned
    positions, as one rank of the shape's cut has them; parameters are those of all ranks."""
    s = -(-sequence // t.cut.context)
    blocks = [block(t, s, index) for index in range(t.layers)]
    chain = (embedding(t, s), *blocks, head(t, s))
    if t.adapter:
        return tuple(adapted(layer, t.adapter) for layer in chain)
    return chain


def adapted(layer: Layer, rank: int) -> Layer:
    """The layer with frozen weights, and adapters of that rank beside the products of a block."""
    operators: list[Operator] = []
    own = 0
    for op in layer.operators:
        if not (isinstance(op, Matmul) and op.weight):
            operators.append(op)
            continue
        operators.append(replace(op, frozen=True))
        if layer.kind in BLOCKS and op.name != "router":
            own += op.count * rank * (op.k + op.n)
            operators += [
                replace(op, n=rank, split="k" if op.split == "k" else "none"),
                replace(op, k=rank, split="n" if op.split == "n" else "none"),
            ]
    return replace(
        layer, operators=tuple(operators), params=layer.params + own, frozen=layer.params
    )


def embedding(t: Transformer, s: int) -> Layer:
    """The sum of token, position and type vectors; normalised and projected where the model does
    so."""
    width, size = t.embedding_width or t.hidden, s * t.hidden
    vectors = t.vocabulary * width + (t.positions + t.position_offset + t.types) * t.hidden
    read = (2 + bool(t.positions) + bool(t.types)) * s * width
    parts = LayerParts()
    parts.add(vectors, [Elementwise("lookup", read, read, kind="lookup")])
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
        "embedding",
        "embedding",
        parts.params,
        parts.operators,
        size,
        parts.saved,
        (Reduce(s * width, backward=False),),  # ranks hold parts of the vocabulary
    )


def mixture_of(t: Transformer, index: int) -> Experts | None:
    """The mixture of experts of block `index`; None where the block has none."""
    mixture, kind = t.experts, t.pattern[index : index + 1]
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
        inside = feed_forward_saved(shared, s, None)[2:4]  # its inputs are kept already
        parts.add(feed_forward_params(shared), feed_forward_operators(shared, s), inside)
    return parts


def block(t: Transformer, s: int, index: int) -> Layer:
    """Block `index`: attention and feed-forward network with norms and residuals. Of a hybrid
    model: attention, network, mixture of experts or Mamba-2, as the pattern says."""
    if t.full_every and (index + 1) % t.full_every == 0:
        t = replace(t, window=None)
    kind, size = t.pattern[index : index + 1], s * t.hidden
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
    parts.add(operators=[norm(f"norm-{i}", size) for i in range(3, t.block_norms + 1)])
    if kind == "M" and t.mamba:
        add_mamba(parts, t, s, t.mamba)
    # attention and network each join one tensor forward and one backward
    passes = (False, True) if kind else (False, False, True, True)
    return Layer(
        f"block-{index}",
        "moe-block" if mixture else "block",
        parts.params,
        parts.operators,
        size,
        parts.saved,
        tuple(Reduce(size, backward) for backward in passes),
    )


def head(t: Transformer, s: int) -> Layer:
    """Final norm, language-model head (BERT: transform, MLM and NSP heads) and loss."""
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
    # The loss reads 16-bit logits, writes fp32 ones, and reads those for maximum, sum and gradient.
    loss = Elementwise("cross-entropy", 6 * s * v, 3 * s * v, True, "loss")
    logits = Saved("logits", s * v, split=True, element_bytes=4)
    parts.add(operators=[product, loss], saved=[logits])
    # Backward: the input's gradient. Forward: maximum, target logit and sum of exponentials, fp32.
    reduces = (Reduce(s * width, backward=True), Reduce(3 * s, backward=False, element_bytes=4))
    return Layer(
        "head",
        "head",
        parts.params,
        parts.operators,
        0,
        parts.saved,
        reduces,
        tied_params=v * width if t.tied else 0,
    )
