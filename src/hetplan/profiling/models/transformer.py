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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from hetplan.profiling.models.adapters import Adapters, Weights, adapted
from hetplan.profiling.models.function import Function
from hetplan.profiling.models.operators import (
    Attention,
    Elementwise,
    Layer,
    Matmul,
    Operator,
    Reduce,
    Saved,
)

Norm = Literal["layer", "scale", "rms", "pixel"]


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
    # One letter for each block: E where it has a mixture, - where it has none. Empty: `every` and
    # `dense` decide.
    blocks: str = ""
    # whether experts have no biases where other networks of the model have them
    bare: bool = False
    # parameters of a mixture beyond those of its products, such as a router's biases
    further: int = 0

    def in_block(self, index: int) -> bool:
        """Whether block `index`, counted from 0, has a mixture."""
        if self.blocks:
            return self.blocks[index] == "E"
        return (index + 1) % self.every == 0 and index >= self.dense

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
class Delta:
    """A layer of linear attention by the gated delta rule (Yang et al. 2025, Section 3)."""

    heads: int  # heads of values, each with a state of key_dim x value_dim numbers
    key_heads: int  # heads of queries and of keys
    key_dim: int
    value_dim: int
    kernel: int = 4  # tokens that the convolution reaches over
    chunk: int = 64  # tokens that the scan takes at once

    @property
    def inner(self) -> int:
        """Width of the values of all heads together."""
        return self.heads * self.value_dim

    @property
    def mixed(self) -> int:
        """Width of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.inner


@dataclass(frozen=True)
class Reaching:
    """The sizes of attention in blocks that reach all keys, where blocks with a window have others
    (Gemma 4)."""

    kv_heads: int
    head_dim: int
    shared: bool = False  # whether the values are the keys, so that there is one projection of both


@dataclass(frozen=True)
class Latent:
    """Latent attention (DeepSeek-V2, Section 2.1): queries, keys and values are projected from
    vectors of low rank."""

    query: int | None  # rank of the queries' vector; None: they come from the hidden state
    keys: int  # rank of the vector from which keys and values come
    rope: int  # the part of a key's width that is rotated and shared by all heads
    nope: int  # the part of a key's width that each head has for itself
    value: int  # width of one head's values
    # Sparse attention (DeepSeek-V3.2, Section 2.1): an indexer with heads of its own chooses the
    # keys to which a token attends; 0: there is none.
    index_heads: int = 0
    index_dim: int = 0  # width of the indexer's heads
    index_keys: int = 0  # number of keys that it chooses


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


# Product of a block -> the module for which it stands, where their names differ. `modules_of` has
# those of several modules.
MODULES: Mapping[str, str] = {
    "attention-output": "o",
    "experts-up": "up",
    "experts-down": "down",
    "q-down": "q_a",
    "q-up": "q_b",
    "kv-down": "kv_a",
    "kv-up": "kv_b",
    "mamba-in": "in_proj",
    "mamba-out": "out_proj",
    "delta-in": "in_proj",
    "delta-out": "out_proj",
}


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
    # LayerNorm, LayerNorm without biases, RMSNorm (scale only) or a norm without parameters
    norm: Norm = "layer"
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
    # gates of attention's outputs, computed from the block's input: one for each head, or one for
    # each number
    output_gate: Literal["none", "head", "all"] = "none"
    block_norms: int = 2  # number of norms in a block
    rotary: bool = False  # rotary positions
    embedding_norm: bool = False  # LayerNorm after the embedding (BERT)
    embedding_width: int | None = None  # a narrower embedding with projections (OPT-350m)
    final_norm: bool = True  # norm before the head
    head: Literal["lm", "bert"] = "lm"  # a language model's, or BERT's pre-training heads
    experts: Experts | None = None
    cut: Cut = Cut()  # the part of the model that one rank has
    # The kind of each block of a hybrid model, one letter each, as Megatron writes it: M Mamba-2,
    # * attention, - feed-forward network, E experts. Empty: attention and network in every block.
    pattern: str = ""
    # The mixer of each block that also has a network, one letter each: * attention to all keys, w
    # attention within the window, M Mamba-2, D the gated delta rule. Empty: attention in every
    # block, within the window but for every `full_every`-th block.
    mixers: str = ""
    mamba: Mamba | None = None  # sizes of the Mamba-2 blocks
    delta: Delta | None = None  # sizes of the blocks with the gated delta rule
    reaching: Reaching | None = None  # sizes of attention to all keys; None: those of all attention
    # The last blocks, of this number, attend to the keys and values of earlier blocks.
    kv_borrowers: int = 0
    borrower_feed_forward: int | None = None  # inner width of their networks; None: as elsewhere
    # whether each head has a learned score that no key has (attention sinks)
    sinks: bool = False
    # Parameters of each block beyond those of products, biases, norms and sinks, such as scales of
    # an activation. They are few, so that they count as bytes and not as work.
    block_params: int = 0
    head_bias: bool = False  # whether the language model's head has a bias
    # Width of the vector that each block gets for each token from a table of its own (Gemma 3n),
    # and the rows of that table; 0: there is none.
    layer_input: int = 0
    layer_vocabulary: int = 0
    # Versions of the hidden states that blocks pass on, of which each predicts and corrects all
    # (Baykal et al. 2023, AltUp), and the rank of the learned residual beside attention (Menghani
    # et al. 2024, LAuReL); 0: there is none.
    streams: int = 1
    laurel: int = 0
    adapters: Adapters | None = None  # beside frozen weights; None: all weights are trained
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
        return {"layer": 2, "scale": 1, "rms": 1, "pixel": 0}[self.norm] * self.hidden

    @property
    def rare_features(self) -> list[str]:
        """Names of features that hetplan's own torch layers and the arguments of Megatron-LM do not
        describe; empty for usual models."""
        latent, experts = self.latent, self.experts
        has_feature = {
            "adapters beside frozen weights": self.adapters is not None,
            "LayerNorm without biases": self.norm == "scale",
            "gates of attention's outputs": self.output_gate != "none",
            "blocks with different mixers": bool(self.mixers),
            "keys and values of earlier blocks": self.kv_borrowers > 0,
            "further parameters in a block": self.block_params > 0,
            "a bias of the head": self.head_bias,
            "inputs of single blocks": self.layer_input > 0,
            "several versions of the hidden states": self.streams > 1,
            "an indexer of keys": latent is not None and latent.index_heads > 0,
            "a list of blocks with experts": experts is not None and bool(experts.blocks),
        }
        return [name for name, present in has_feature.items() if present]

    def at(self, index: int) -> "Transformer":
        """The shape with the sizes of block `index`: its window, heads and feed-forward width."""
        changes: dict[str, Any] = {}
        if self.mixers:
            reaches_all = self.mixers[index] == "*"
        else:
            reaches_all = self.full_every > 0 and (index + 1) % self.full_every == 0
        if reaches_all:
            changes["window"] = None
            if self.reaching is not None:
                changes["kv_heads"] = self.reaching.kv_heads
                changes["head_dim"] = self.reaching.head_dim
        elif self.reaching is not None:
            changes["reaching"] = None
        borrows = index >= self.layers - self.kv_borrowers
        if borrows and self.borrower_feed_forward is not None:
            changes["feed_forward"] = self.borrower_feed_forward
        elif self.kv_borrowers and not borrows:
            changes["kv_borrowers"] = 0
        return replace(self, **changes) if changes else self

    def tensor_degree_fits(self, tensor: int) -> bool:
        """Whether `tensor` ranks evenly divide the heads, the key and value heads and the inner
        widths of the networks."""
        sizes = [self.heads, self.kv_heads, self.feed_forward]
        if self.experts:  # a width of None is the feed-forward size, and every degree divides 0
            sizes += (self.experts.width or 0, self.experts.shared)
        if self.mamba:
            sizes += (self.mamba.heads, self.mamba.groups)
        if self.delta:
            sizes += (self.delta.heads, self.delta.key_heads)
        if self.reaching:
            sizes.append(self.reaching.kv_heads)
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


def output_gate_width(t: Transformer) -> int:
    """Number of gates of attention's outputs for each token."""
    return {"none": 0, "head": t.heads, "all": t.heads * t.value_dim}[t.output_gate]


def down_projections(t: Transformer, s: int) -> list[Matmul]:
    """The products of latent attention that project hidden states to low ranks; without latent
    attention there are none."""
    if t.latent is None:
        return []
    downs = [Matmul("kv-down", s, t.hidden, t.latent.keys + t.latent.rope)]
    if t.latent.query is not None:
        downs.append(Matmul("q-down", s, t.hidden, t.latent.query))
    return downs


def projections(t: Transformer, s: int) -> list[Matmul]:
    """The products that project hidden states to queries, keys and values, and to the gates of
    attention's outputs.

    Latent attention first projects down to its low ranks, and then up to keys with values and to
    queries. An indexer has queries, keys and weights of its own.
    """
    gates = []
    if t.output_gate != "none":
        gates.append(Matmul("output-gate", s, t.hidden, output_gate_width(t), split="n"))
    latent = t.latent
    if latent is None:
        width = t.query_width + kv_projections(t) * t.kv_width
        return [Matmul("qkv", s, t.hidden, width, split="n"), *gates]
    kv_up = Matmul("kv-up", s, latent.keys, t.heads * (latent.nope + latent.value), split="n")
    q_up = Matmul("q-up", s, latent.query or t.hidden, t.query_width, split="n")
    index = []
    if latent.index_heads:
        index_width = latent.index_heads * latent.index_dim
        index = [
            Matmul("index-queries", s, latent.query or t.hidden, index_width),
            Matmul("index-keys", s, t.hidden, latent.index_dim),
            Matmul("index-weights", s, t.hidden, latent.index_heads),
        ]
    return [*down_projections(t, s), kv_up, q_up, *index, *gates]


def kv_projections(t: Transformer) -> int:
    """Number of projections to the width of keys: 2 of keys and values, 1 where the values are the
    keys, 0 where a block takes those of an earlier one. t: the shape at one block."""
    if t.kv_borrowers:
        return 0
    return 1 if t.reaching is not None and t.reaching.shared else 2


def attention_params(t: Transformer) -> int:
    """Parameters of attention: query, key, value and output projections, and the norms of queries,
    keys and latent vectors."""
    products = sum(int(product.k) * int(product.n) for product in projections(t, 1))
    # a flag counts as 1 or 0
    if t.latent:  # of the projections to low ranks alone
        biased_width = sum(int(down.n) for down in down_projections(t, 1))
    else:
        biased_width = t.query_width + kv_projections(t) * t.kv_width
    biases = biased_width * t.attention_bias + t.hidden * t.output_bias
    # A norm over a head's width is of the block's kind; one over all heads has scales alone.
    of_head = (2 if t.norm == "layer" else 1) * t.head_dim
    key_norms = 0 if t.kv_borrowers else 1
    norms = {
        "none": 0,
        "head": (1 + key_norms) * of_head,
        "all": t.query_width + key_norms * t.kv_width,
    }[t.qk_norm]
    sinks = t.heads * t.sinks  # the flag counts as 1 or 0
    if t.latent:
        norms += t.latent.keys + (t.latent.query or 0)
        norms += 2 * t.latent.index_dim  # the indexer's LayerNorm of keys
    return products + t.heads * t.value_dim * t.hidden + biases + norms + sinks


def feed_forward_params(t: Transformer) -> int:
    """Parameters of one feed-forward network: two matrices, three if gated."""
    up = 2 if t.gated else 1  # matrices before the activation
    matrices = (up + 1) * t.hidden * t.feed_forward
    biases = up * t.feed_forward + t.hidden
    return matrices + biases * t.feed_forward_bias  # the flag counts as 1 or 0


def attention_operators(t: Transformer, s: int) -> tuple[Operator, ...]:
    """Operators of attention: projections, scores, softmax, weighted sum, output projection."""
    keys, index = t.keys(s), index_operators(t, s)
    if index and t.latent is not None:
        keys = min(keys, t.latent.index_keys)
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
        *index,
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


def index_operators(t: Transformer, s: int) -> tuple[Operator, ...]:
    """Operators of an indexer that chooses keys: the scores of all keys by each of its heads, and
    their weighted sum. Empty where attention has no indexer."""
    latent = t.latent
    if latent is None or not latent.index_heads:
        return ()
    heads, keys = latent.index_heads, t.keys(s)
    scores = Matmul("index-scores", s, latent.index_dim, keys, heads, weight=False)
    return (scores, Elementwise("index-sum", s * keys * heads, 2 * s * keys * heads))


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
    return (Matmul("router", s, t.hidden, mixture.count, narrow=False), *operators)


def add_mamba(parts: LayerParts, t: Transformer, s: int, m: Mamba) -> None:
    """Add a Mamba-2 layer, without the parameters of the norm before it.

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
    params = projection_params + convolution_params + head_and_norm_params
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


def add_delta(parts: LayerParts, t: Transformer, s: int, d: Delta) -> None:
    """Add linear attention by the gated delta rule, without the parameters of the norm before it.

    The scan takes the tokens in chunks of q (Yang et al. 2024, Section 3.2: the WY form): within a
    chunk the products of keys with keys and of queries with keys, the inverse of a triangle, and
    its products with keys and values; between chunks the states that it reads and writes.
    """
    size, chunks, q = s * t.hidden, -(-s // d.chunk), d.chunk
    in_width = d.mixed + d.inner + 2 * d.heads  # queries, keys, values, gates, decays and steps
    projection_params = t.hidden * (in_width + d.inner)
    convolution_params = d.kernel * d.mixed  # without a bias
    # of each head a decay and a step's bias; the scale of the gated norm of one head
    head_and_norm_params = 2 * d.heads + d.value_dim
    params = projection_params + convolution_params + head_and_norm_params
    scan: Any = {"weight": False, "split": "count", "left": 0, "out": 0}
    count = d.heads * chunks
    operators: tuple[Operator, ...] = (
        norm("norm-1", size),
        Matmul("delta-in", s, t.hidden, in_width, split="n"),
        Elementwise("convolution", 2 * s * d.mixed, 3 * s * d.mixed, split=True, kind="activation"),
        Matmul("scan-scores", q, d.key_dim, q, 2 * count, **scan),
        Matmul("scan-inverse", q, q, q, count, **scan),
        Matmul("scan-keys", q, q, d.key_dim, count, **scan),
        Matmul("scan-values", q, q, d.value_dim, 2 * count, **scan),
        Matmul("scan-states", q, d.key_dim, d.value_dim, 3 * count, **scan),
        Elementwise("gated-norm", 3 * s * d.inner, 5 * s * d.inner, split=True, kind="norm"),
        Matmul("delta-out", s, d.inner, t.hidden, split="k"),
        residual("residual-1", size, t.dropout),
    )
    saved = (
        Saved("norm-1 input", size, split=False),
        Saved("delta-in input", size, split=False, element_bytes=t.input_bytes),
        Saved("delta-in output", s * in_width, split=True),
        Saved("scan output", s * d.inner, split=True),
        Saved("delta-out input", s * d.inner, split=True, element_bytes=t.input_bytes),
        Saved("states", chunks * d.inner * d.key_dim, split=True),
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
    gate: tuple[Saved, ...] = ()
    if t.output_gate != "none":  # the gate, and the outputs that it multiplies
        gate_width = output_gate_width(t)
        gate = (Saved("output gate", s * (gate_width + t.heads * t.value_dim), split=True),)
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
        # of latent attention, the outputs of the projections to low ranks
        *(Saved(f"{p.name} output", s * int(p.n), split=False) for p in down_projections(t, s)),
        *gate,
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
    if t.adapters is None:
        return chain
    shapes = [t, *(t.at(index) for index in range(t.layers)), t]  # of each layer
    return tuple(
        adapted(layer, t.adapters, partial(weights_of, shape))
        for layer, shape in zip(chain, shapes, strict=True)
    )


def weights_of(t: Transformer, op: Matmul) -> Weights:
    """The weights of a product of a block in the whole layer. t: the shape at the block.

    A cut shape computes some of the experts, and where tensor ranks hold whole experts it counts
    their columns once for each of these ranks (`expert_operators`).
    """
    count, rows, columns = op.count, op.k, op.n
    if op.name in ("experts-up", "experts-down") and t.experts is not None:
        count = t.experts.count
        if op.name == "experts-up":
            columns //= t.cut.whole
        else:
            rows //= t.cut.whole
    return Weights(count, rows, columns, modules_of(t, op.name, columns))


def modules_of(t: Transformer, name: str, columns: int) -> tuple[tuple[str, int], ...]:
    """(name, columns) of the modules of Hugging Face's model for which a product of a block stands.

    t: the shape at the block. name, columns: of the product.
    """
    joint = () if t.adapters is None else t.adapters.joint_names
    if name == "qkv" and "qkv" not in joint:
        keys = [(key, t.kv_width) for key in ("k", "v")[: kv_projections(t)]]
        return (("q", columns - len(keys) * t.kv_width), *keys)
    if name in ("up", "experts-up") and t.gated:
        if "gate_up" in joint:
            return (("gate_up", columns),)
        return (("gate", columns // 2), ("up", columns // 2))
    if name == "q-up" and t.latent is not None and t.latent.query is None:
        return (("q", columns),)
    return ((MODULES.get(name, name), columns),)


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
    if t.layer_input:
        add_layer_inputs(parts, t, s)
    add_stream_projections(parts, t, s, "streams-in")
    if t.dropout:
        dropout = Elementwise("dropout", 2 * size, 2 * size)
        parts.add(0, [dropout], dropout_mask(t, "embedding", size))
    return Layer(
        name="embedding",
        kind="embedding",
        params=parts.params,
        operators=parts.operators,
        output=size * t.streams,
        saved=parts.saved,
        reduces=(Reduce(s * width, backward=False),),  # ranks hold parts of the vocabulary
    )


def add_layer_inputs(parts: LayerParts, t: Transformer, s: int) -> None:
    """Add to the embedding the vectors that all blocks get for a token: rows of a second table, and
    a projection of the embedding with a norm (Gemma 3n)."""
    width = t.layers * t.layer_input  # of all blocks together
    params = t.layer_vocabulary * width + t.hidden * width + t.layer_input
    operators = (
        Elementwise("layer-lookup", 2 * s * width, 2 * s * width, kind="lookup"),
        Matmul("layer-projection", s, t.hidden, width),
        norm("layer-norm", s * width),
    )
    parts.add(params, operators, [Saved("layer inputs", 2 * s * width, split=False)])


def add_stream_projections(parts: LayerParts, t: Transformer, s: int, name: str) -> None:
    """Add the products between the hidden state and its further versions, one for each version."""
    further = t.streams - 1
    if further:
        product = Matmul(name, s, t.hidden, t.hidden, further)
        saved = Saved(f"{name} input", further * s * t.hidden, split=False)
        parts.add(further * t.hidden * t.hidden, [product], [saved])


def add_streams(parts: LayerParts, t: Transformer, s: int) -> None:
    """Add to a block the prediction and the correction of the versions of its hidden states, and
    the learned residual of low rank beside attention."""
    size, n, rank = s * t.hidden, t.streams, t.laurel
    coefficient_params = n * n + n**3  # of the correction and of the prediction
    router_params = n * t.hidden + t.norm_params
    scale_params = t.hidden  # of the corrected version
    laurel_params = 2 * t.hidden * rank + t.norm_params
    operators = (
        norm("router-norm", 2 * size),
        Matmul("streams-router", 2 * s, t.hidden, n),
        Elementwise("predict", 2 * n * size, 3 * n * size),
        Elementwise("correct", 3 * n * size, 4 * n * size),
        Matmul("laurel-down", s, t.hidden, rank),
        Matmul("laurel-up", s, rank, t.hidden),
        norm("laurel-norm", size),
    )
    saved = Saved("versions of hidden states", (n + 3) * size, split=False)
    parts.add(coefficient_params + router_params + scale_params + laurel_params, operators, [saved])


def mixture_of(t: Transformer, index: int) -> Experts | None:
    """The mixture of experts of block `index`; None where the block has none."""
    mixture, kind = t.experts, t.pattern[index : index + 1]  # kind "" without a pattern
    if mixture is None or not mixture.in_block(index):
        return None
    return mixture if kind in ("", "E") else None


def feed_forward_part(t: Transformer, s: int, mixture: Experts | None) -> LayerParts:
    """The feed-forward network of a block, or the mixture of experts in its place."""
    if mixture is None:
        return LayerParts(
            feed_forward_params(t), feed_forward_operators(t, s), feed_forward_saved(t, s, None)
        )
    inner = replace(
        t,
        feed_forward=mixture.width or t.feed_forward,
        feed_forward_bias=t.feed_forward_bias and not mixture.bare,
    )
    width = mixture.latent or t.hidden
    expert_params = feed_forward_params(replace(inner, hidden=width))
    router_params = mixture.count * t.hidden
    latent_params = 2 * t.hidden * (mixture.latent or 0)
    parts = LayerParts(
        mixture.count * expert_params + router_params + latent_params + mixture.further,
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
    hybrid model has another mixer than attention, by `mixers`, or only one of attention, network,
    mixture of experts and Mamba-2, by `pattern`."""
    t = t.at(index)
    kind, size = t.pattern[index : index + 1], s * t.hidden  # kind "" without a pattern
    mixer = t.mixers[index : index + 1] or "*"
    mixture = mixture_of(t, index)
    parts = LayerParts(t.block_params)
    if "M" in (kind, mixer) and t.mamba:
        add_mamba(parts, t, s, t.mamba)
    elif mixer == "D" and t.delta:
        add_delta(parts, t, s, t.delta)
    elif kind in ("", "*"):
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
    norms = 1 if kind else t.block_norms
    parts.add(norms * t.norm_params)
    # norms beyond the first two, as after attention and after the network (Gemma)
    parts.add(operators=[norm(f"norm-{i}", size) for i in range(3, t.block_norms + 1)])
    if t.streams > 1:
        add_streams(parts, t, s)
    if t.layer_input:  # the gate of the block's own input, its projection, and a norm
        width = t.layer_input
        products = (
            Matmul("layer-gate", s, t.hidden, width),
            activation(2, s * width),
            Matmul("layer-up", s, width, t.hidden),
            norm("layer-input-norm", size),
        )
        saved = (Saved("layer input", 3 * s * width + size, split=False),)
        parts.add(2 * t.hidden * width + t.norm_params, products, saved)
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
        output=size * t.streams,
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
    parts.add(weights + v * t.head_bias, saved=[Saved("head input", s * width, split=False)])
    add_stream_projections(parts, t, s, "streams-out")
    if t.final_norm:
        saved = Saved("final norm input", size, split=False)
        parts.add(t.norm_params, [norm("final-norm", size)], [saved])
    if width != h:
        saved = Saved("project-out input", size, split=False)
        parts.add(h * width, [Matmul("project-out", s, h, width)], [saved])
    if t.head == "bert":
        operators = (
            Matmul("pooler", 1, h, h, narrow=False),
            Matmul("transform", s, h, h, narrow=False),
            Elementwise("transform-gelu", 2 * size, 3 * size),
            norm("transform-norm", size),
        )
        kept = ("transform input", "transform activation", "transform norm")
        parts.add(bert_head_params(t), operators, [Saved(name, size, split=False) for name in kept])
    product = Matmul("lm-head", s, width, v, split="n", narrow=False)
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
