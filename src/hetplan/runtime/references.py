"""Reference models: text transformers of every described shape without experts (GPT, Llama, BERT),
as chains of named layers. Their data and first weights follow from names, positions and the seed.

The layers have the same parameters as the layers of `profiling.models.transformer`. Symbols: B
samples, S tokens, H hidden size, V vocabulary. Every layer can be split over a tensor group:
attention by key-value heads, feed-forward by columns, embedding and head by the vocabulary.

`Reference` keeps the contract of `engine.chain`. A user's factory (`module:function`) may return
any other torch module.

Modules that can be split have two attributes: `shape`, the description of the transformer, and
`tensor`, the tensor group over which they are split. The runtime sets `tensor` before they run.
"""

import zlib
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hetplan.errors import require
from hetplan.plans.refusals import check_shape
from hetplan.profiling.models.transformer import Transformer
from hetplan.profiling.models.zoo import gpt2
from hetplan.programs.operators.attention import rotated
from hetplan.programs.operators.lookups import embed
from hetplan.programs.operators.operator import Place
from hetplan.runtime.engine.chain import ALONE, Cut, Part, cut
from hetplan.runtime.engine.position import Dropout, as_int64, key_of, splitmix64
from hetplan.runtime.tracing.layers import Called

DROPOUT = 0.1  # probability of dropout, in models that have it
IGNORED = -100  # a target without a loss; the value that torch's cross-entropy ignores


def norm(t: Transformer) -> nn.Module:
    """A norm over the hidden size: LayerNorm, RMSNorm or pixel norm, an RMSNorm without
    parameters."""
    if t.norm == "layer":
        return nn.LayerNorm(t.hidden)
    return nn.RMSNorm(t.hidden, eps=1e-6, elementwise_affine=t.norm == "rms")


def dropout(t: Transformer, site: str) -> Dropout:
    """Dropout at a named site; its probability is 0 where the model has no dropout."""
    return Dropout(DROPOUT if t.dropout else 0.0, site)


class Embedding(nn.Module):
    """Embedding of tokens: [B, S] -> [B, S, H], the sum of token, position and type vectors.

    The table of token vectors is split by the vocabulary; every tensor rank has all other vectors.
    """

    def __init__(self, t: Transformer, site: str) -> None:
        super().__init__()
        self.shape, self.tensor = t, ALONE
        width = t.embedding_width or t.hidden
        self.table = nn.Parameter(torch.empty(t.vocabulary, width))
        positions = t.positions + t.position_offset
        self.places = nn.Parameter(torch.empty(positions, t.hidden)) if positions else None
        self.types = nn.Parameter(torch.empty(t.types, t.hidden)) if t.types else None
        self.widen = nn.Linear(width, t.hidden, bias=False) if width != t.hidden else nn.Identity()
        self.norm = norm(t) if t.embedding_norm else nn.Identity()
        self.drop = dropout(t, site)

    def cuts(self, part: Part) -> dict[str, Cut]:
        """The table is cut by rows."""
        return {"table": cut(0, self.shape.vocabulary, part)}

    def forward(self, tokens: Tensor) -> Tensor:
        """The sum of the vectors, normed where the model does so, with dropout."""
        x = self.widen(self.tensor.leave(self.rows(tokens)))
        if self.places is not None:
            offset = self.shape.position_offset
            x = x + self.places[offset : offset + tokens.shape[1]]
        if self.types is not None:
            x = x + self.types[0]
        return self.drop(self.norm(x))

    def rows(self, tokens: Tensor) -> Tensor:
        """The vectors of the tokens in this tensor rank's part of the vocabulary, zeros for all
        other tokens."""
        first, _ = self.tensor.of(self.shape.vocabulary)
        shape = (*tokens.shape, self.table.shape[1])
        return embed((tokens, self.table), {}, Place(shape, (0, first), partial=True))


class Block(nn.Module):
    """A pre-norm block of attention and feed-forward, each with a residual connection:
    [B, S, H] -> [B, S, H]."""

    def __init__(self, t: Transformer, site: str) -> None:
        super().__init__()
        self.norm_1 = norm(t)
        self.attention = Attention(t, f"{site}.scores", DROPOUT)
        self.norm_2 = norm(t)
        self.feed_forward = FeedForward(t)
        self.drop_1 = dropout(t, f"{site}.attention")
        self.drop_2 = dropout(t, f"{site}.feed-forward")

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        x = x + self.drop_1(self.attention(self.norm_1(x)))
        return x + self.drop_2(self.feed_forward(self.norm_2(x)))


class Attention(nn.Module):
    """Self-attention: [B, S, H] -> [B, S, H].

    The rows of `qkv` are first those of all queries, then of all keys, then of all values. A tensor
    rank has whole key-value heads with their queries. Where there are fewer key-value heads than
    ranks, some ranks have none. Where `selective` is set, the backward pass computes the scores
    again (Korthikanti et al. 2022, Section 5).
    """

    def __init__(self, t: Transformer, site: str, probability: float) -> None:
        """site, probability: values of the `Dropout` on the scores."""
        super().__init__()
        self.shape, self.tensor, self.selective = t, ALONE, False
        width = t.query_width + 2 * t.kv_width
        self.qkv = nn.Parameter(torch.empty(width, t.hidden))
        self.qkv_bias = nn.Parameter(torch.empty(width)) if t.attention_bias else None
        self.out = nn.Parameter(torch.empty(t.hidden, t.query_width))
        self.out_bias = nn.Parameter(torch.empty(t.hidden)) if t.output_bias else None
        drops = t.dropout and t.attention == "standard"  # fused attention has no scores to drop
        self.drop = Dropout(probability if drops else 0.0, site)

    def cuts(self, part: Part) -> dict[str, Cut]:
        """A rank's heads [a, b) are rows of `qkv` and columns of `out`."""
        t = self.shape
        a, b = part.of(t.kv_heads)
        query_width = t.heads // t.kv_heads * t.head_dim  # width of one key-value head's queries
        first_key = t.query_width
        first_value = t.query_width + t.kv_width
        queries = (a * query_width, b * query_width)
        keys = (first_key + a * t.head_dim, first_key + b * t.head_dim)
        values = (first_value + a * t.head_dim, first_value + b * t.head_dim)
        rows = Cut(0, (queries, keys, values))
        cuts = {"qkv": rows, "out": Cut(1, (queries,))}
        return cuts if self.qkv_bias is None else cuts | {"qkv_bias": rows}

    def forward(self, x: Tensor) -> Tensor:
        """The output projection of the attention of this rank's heads, summed over the ranks."""
        t = self.shape
        samples, length, _ = x.shape
        a, b = self.tensor.of(t.kv_heads)
        kv_heads = b - a
        heads = kv_heads * (t.heads // t.kv_heads)
        query_width, kv_width = heads * t.head_dim, kv_heads * t.head_dim
        projected = F.linear(self.tensor.enter(x), self.qkv, self.qkv_bias)
        q, k, v = projected.split((query_width, kv_width, kv_width), dim=-1)
        q = q.view(samples, length, heads, t.head_dim).transpose(1, 2)
        k = k.view(samples, length, kv_heads, t.head_dim).transpose(1, 2)
        v = v.view(samples, length, kv_heads, t.head_dim).transpose(1, 2)
        if kv_heads == 0:
            attended = q  # empty, but part of the graph, so that this rank joins the collectives
        elif self.selective:
            attended = checkpoint(self.mix, q, k, v, a, use_reentrant=False)
        else:
            attended = self.mix(q, k, v, a)
        y = F.linear(attended.transpose(1, 2).reshape(samples, length, query_width), self.out)
        y = self.tensor.leave(y)
        return y if self.out_bias is None else y + self.out_bias

    def mix(self, q: Tensor, k: Tensor, v: Tensor, first: int) -> Tensor:
        """softmax(q k^T / sqrt(d)) v for some heads. first: the number, in the model, of the first
        key-value head; dropout draws by it."""
        t = self.shape
        heads_per_kv_head = t.heads // t.kv_heads
        if t.rotary:
            q, k = rotated(q), rotated(k)
        if heads_per_kv_head > 1:
            k = k.repeat_interleave(heads_per_kv_head, dim=1)
            v = v.repeat_interleave(heads_per_kv_head, dim=1)
        if t.attention == "fused" and not t.window:
            return F.scaled_dot_product_attention(q, k, v, is_causal=t.causal)
        mask = visible(q.shape[2], t.causal, t.window, q.device)
        if t.attention == "fused":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        scores = (q @ k.transpose(-2, -1)) / t.head_dim**0.5
        shares = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
        return self.drop(shares, first * heads_per_kv_head, t.heads) @ v


def visible(length: int, causal: bool, window: int | None, device: object) -> Tensor:
    """The attention mask [queries, keys]: True where the query attends to the key. window: the
    number of keys that a query reaches back to; None: all."""
    positions = torch.arange(length, device=device)
    distance = positions[:, None] - positions[None, :]  # how far the key lies before the query
    mask = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window:
        mask = mask & (distance < window)
    return mask


class FeedForward(nn.Module):
    """A feed-forward network of two matrices with GELU, or of three with SiLU where gated.

    `up` holds the first matrix, or gate and value, and is split by its outputs; `down` is split by
    its inputs.
    """

    def __init__(self, t: Transformer) -> None:
        super().__init__()
        self.shape, self.tensor = t, ALONE
        self.blocks = 2 if t.gated else 1  # matrices in `up`
        inner = self.blocks * t.feed_forward
        self.up = nn.Parameter(torch.empty(inner, t.hidden))
        self.up_bias = nn.Parameter(torch.empty(inner)) if t.feed_forward_bias else None
        self.down = nn.Parameter(torch.empty(t.hidden, t.feed_forward))
        self.down_bias = nn.Parameter(torch.empty(t.hidden)) if t.feed_forward_bias else None

    def cuts(self, part: Part) -> dict[str, Cut]:
        """A rank holds the same inner columns of each matrix in `up` and of `down`."""
        inner = self.shape.feed_forward
        up = cut(0, inner, part, self.blocks)
        cuts = {"up": up, "down": cut(1, inner, part)}
        return cuts if self.up_bias is None else cuts | {"up_bias": up}

    def forward(self, x: Tensor) -> Tensor:
        """down(activation(up(x))), summed over the ranks."""
        projected = F.linear(self.tensor.enter(x), self.up, self.up_bias)
        inner = activated(projected, gated=self.blocks == 2)
        y = self.tensor.leave(F.linear(inner, self.down))
        return y if self.down_bias is None else y + self.down_bias


def activated(x: Tensor, *, gated: bool) -> Tensor:
    """GELU of x; where gated, SiLU of the first half of x times the second half."""
    if not gated:
        return F.gelu(x)
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value


class Head(nn.Module):
    """The last layer: a norm and a language model's head with cross-entropy. BERT has two heads:
    one for masked tokens, after a transform, and one for the next sentence.

    ([B, S, H], targets [B, S]) -> the sum of the tokens' losses. Targets of `IGNORED` have no loss.
    The head is split by the vocabulary. BERT's next-sentence loss of a sample counts S times, once
    for each token of the sample; its label is the sample's first target modulo 2.
    """

    def __init__(self, t: Transformer, table: nn.Parameter | None) -> None:
        """table: the embedding's table where the model ties it to the head; None: the head has a
        table of its own."""
        super().__init__()
        self.shape, self.tensor = t, ALONE
        width = t.embedding_width or t.hidden
        self.norm = norm(t) if t.final_norm else nn.Identity()
        self.narrow = nn.Linear(t.hidden, width, bias=False) if width != t.hidden else nn.Identity()
        self.table = nn.Parameter(torch.empty(t.vocabulary, width)) if table is None else table
        self.bias = nn.Parameter(torch.empty(t.vocabulary)) if t.head == "bert" else None
        if t.head == "bert":
            self.pool = nn.Linear(t.hidden, t.hidden)
            self.follows = nn.Linear(t.hidden, 2)  # whether the second sentence follows the first
            self.transform = nn.Linear(t.hidden, t.hidden)
            self.after = norm(t)  # after the transform

    def cuts(self, part: Part) -> dict[str, Cut]:
        """The table is cut by rows, as the embedding's is, and the bias with it."""
        rows = cut(0, self.shape.vocabulary, part)
        return {"table": rows} if self.bias is None else {"table": rows, "bias": rows}

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """The sum of the losses."""
        x = self.narrow(self.norm(x))
        if self.shape.head != "bert":
            return self.tokens(x, targets)
        sentence_logits = at_least_fp32(self.follows(self.pool(x[:, 0]).tanh()))
        sentence_loss = F.cross_entropy(sentence_logits, targets[:, 0] % 2, reduction="sum")
        token_loss = self.tokens(self.after(F.gelu(self.transform(x))), targets)
        return token_loss + x.shape[1] * sentence_loss

    def tokens(self, x: Tensor, targets: Tensor) -> Tensor:
        """The sum of the tokens' cross-entropies.

        The cross-entropy of a token is the logarithm of the sum of its logits' exponentials, less
        the target's logit. This rank has the logits of the vocabulary's entries [first, last),
        which may be empty; sums over the tensor group make up the rest.
        """
        first, last = self.tensor.of(self.shape.vocabulary)
        logits = at_least_fp32(F.linear(self.tensor.enter(x), self.table, self.bias)).flatten(0, -2)
        targets = targets.flatten()
        if last > first:
            largest = logits.detach().amax(-1)
        else:  # `amax` refuses an empty dimension; -inf is the largest of no logits
            largest = torch.full_like(logits.sum(-1), -torch.inf)
        largest = self.tensor.largest(largest)
        total = self.tensor.leave((logits - largest.unsqueeze(-1)).exp().sum(-1))
        here = (targets >= first) & (targets < last)
        if last > first:
            rows = torch.arange(len(logits), device=logits.device)
            # indexing, since `gather` would keep the logits for its backward pass
            target_logit = logits[rows, (targets - first).clamp(0, last - first - 1)]
            target_logit = torch.where(here, target_logit, torch.zeros_like(target_logit))
        else:
            target_logit = logits.sum(-1)  # zeros, as a sum of no logits
        losses = total.log() + largest - self.tensor.leave(target_logit)
        return (losses * (targets != IGNORED)).sum()


def at_least_fp32(x: Tensor) -> Tensor:
    """x in fp32 where it is in half precision; else x itself."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


class Reference(nn.Module):
    """A chain of named layers, and synthetic texts as its data."""

    def __init__(
        self,
        layers: dict[str, nn.Module],
        *,
        vocabulary: int,
        sequence: int,
        seed: int = 0,
    ) -> None:
        """layers: name -> layer, with parameters that are set here unless they are on the meta
        device. sequence: tokens of a sample. seed: seed of parameters and texts."""
        super().__init__()
        self.layers = nn.ModuleDict(layers)
        self.vocabulary, self.sequence, self.seed = vocabulary, sequence, seed
        with torch.no_grad():
            for name, parameter in self.layers.named_parameters():
                if not parameter.is_meta:
                    parameter.copy_(self.initial(name, parameter))

    def initial(self, name: str, parameter: Tensor) -> Tensor:
        """A parameter's first values, which follow from its name and the seed: 1 for the scales of
        norms, 0 for biases, normal with standard deviation 0.02 for all others."""
        last = name.rpartition(".")[2]
        of_norm = "norm" in name or "after" in name  # `Head.after` is a norm
        if of_norm or last == "bias" or last.endswith("_bias"):
            value = 1.0 if of_norm and last == "weight" else 0.0
            return torch.full(parameter.shape, value, dtype=parameter.dtype)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))
        values = torch.empty(parameter.shape, dtype=torch.float32)
        values.normal_(0.0, 0.02, generator=generator)
        return values.to(parameter.dtype)

    def batch(self, step: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """(inputs, targets) of the global rows [first, last) of a step, texts that can be learnt.

        A text is an arithmetic sequence modulo the vocabulary, with a step of 1, 2 or 3. Up to two
        targets at its end have no loss. So texts differ in length, and a loss that weighs samples
        instead of tokens gives another result.
        """
        rows = torch.arange(first, last)
        key = as_int64(key_of(self.seed, step, "batch"))
        # [row] a random number in [0, 2^62)
        drawn = (splitmix64(rows * 2 + key) >> 1) & ((1 << 62) - 1)
        positions = torch.arange(self.sequence + 1)
        # one number gives the first token, the increment and the length; its quotients by 7 and 11
        # have remainders of their own
        increments = 1 + drawn // 7 % 3
        texts = (drawn[:, None] + positions * increments[:, None]) % self.vocabulary
        targets = texts[:, 1:].clone()
        if self.sequence > 2:
            lengths = self.sequence - drawn // 11 % 3
            targets[positions[None, :-1] >= lengths[:, None]] = IGNORED
        return texts[:, :-1].contiguous(), targets


def build(shape: Transformer, sequence: int, *, seed: int = 0) -> Reference:
    """The reference model of a shape, on torch's default device. sequence: tokens of a sample."""
    return Reference(text_layers(shape), vocabulary=shape.vocabulary, sequence=sequence, seed=seed)


def text_layers(shape: Transformer) -> dict[str, nn.Module]:
    """Name -> layer for the embedding, the blocks and the head; their parameters have no values
    yet. Raises UnsupportedError for a shape with parts that these layers do not have."""
    check_shape(shape)
    embedding = Embedding(shape, "embedding")
    return {
        "embedding": embedding,
        **{f"block-{i}": Block(shape, f"block-{i}") for i in range(shape.layers)},
        "head": Head(shape, embedding.table if shape.tied else None),
    }


def stand_in(names: Sequence[str], *, tensor: int = 1, seed: int = 0) -> Reference:
    """A narrow text model that stands in for a model with these layer names. The first layer is the
    embedding, the last layer the head, and all others are blocks. A single layer contains an
    embedding, a block and a head.

    tensor: number of ranks in the largest tensor group over which the model is split. Raises
    InputError where a name occurs twice.
    """
    require(len(set(names)) == len(names), "layer names stand twice", expected="different names")
    single, sequence = len(names) == 1, 8
    # at least one head, and below one entry of the vocabulary, for each tensor rank
    heads = max(2, tensor)
    blocks = 1 if single else len(names) - 2
    shape = replace(
        gpt2(blocks, 4 * heads, heads, vocabulary=max(32, tensor), positions=sequence),
        feed_forward=8 * heads, dropout=False, tied=not single,
    )  # fmt: skip
    if single:
        layers: list[nn.Module] = [Called(build(shape, sequence))]
    else:
        layers = list(text_layers(shape).values())
    return Reference(
        dict(zip(names, layers, strict=True)),
        vocabulary=shape.vocabulary,
        sequence=sequence,
        seed=seed,
    )
