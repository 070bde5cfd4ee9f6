"""Text transformers of every described shape without experts (GPT, Llama, BERT) as chains of named
layers, with data and weights that follow from names and positions alone.

Parameter by parameter the layers are those of `profiling.transformer`. Symbols: B samples, S
tokens, H hidden size, V vocabulary. All can be split over a tensor group: attention by key-value
heads, feed-forward by columns, embedding and head by the vocabulary.

`Reference` keeps the contract of `engine.chain`: a user's own factory (`module:factory`) returns
anything that does.
"""

import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

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

DROPOUT = 0.1


def norm(t: Transformer) -> nn.Module:
    """LayerNorm, RMSNorm or pixel norm (no parameters)."""
    return (
        nn.LayerNorm(t.hidden)
        if t.norm == "layer"
        else nn.RMSNorm(t.hidden, eps=1e-6, elementwise_affine=t.norm == "rms")
    )


def dropout(t: Transformer, site: str) -> Dropout:
    """Dropout where the model has it."""
    return Dropout(DROPOUT if t.dropout else 0.0, site)


class Embedding(nn.Module):
    """tokens [B, S] -> [B, S, H]: token, position and type vectors; the table is split by the
    vocabulary."""

    def __init__(self, t: Transformer, site: str) -> None:
        super().__init__()
        self.shape, self.tensor = t, ALONE
        width = t.embedding_width or t.hidden
        self.table = nn.Parameter(torch.empty(t.vocabulary, width))
        places = t.positions + t.position_offset
        self.places = nn.Parameter(torch.empty(places, t.hidden)) if places else None
        self.types = nn.Parameter(torch.empty(t.types, t.hidden)) if t.types else None
        self.widen = nn.Linear(width, t.hidden, bias=False) if width != t.hidden else nn.Identity()
        self.norm = norm(t) if t.embedding_norm else nn.Identity()
        self.drop = dropout(t, site)

    def cuts(self, part: Part) -> dict[str, Cut]:
        """The table's rows."""
        return {"table": cut(0, self.shape.vocabulary, part)}

    def forward(self, tokens: Tensor) -> Tensor:
        """Sum, norm, dropout."""
        x = self.widen(self.tensor.leave(self.rows(tokens)))
        if self.places is not None:
            offset = self.shape.position_offset
            x = x + self.places[offset : offset + tokens.shape[1]]
        if self.types is not None:
            x = x + self.types[0]
        return self.drop(self.norm(x))

    def rows(self, tokens: Tensor) -> Tensor:
        """The table's rows that are here, zeros for other tokens."""
        first, _ = self.tensor.of(self.shape.vocabulary)
        shape = (*tokens.shape, self.table.shape[1])
        return embed((tokens, self.table), {}, Place(shape, (0, first), partial=True))


class Block(nn.Module):
    """Norm, attention, residual, norm, feed-forward, residual: [B, S, H] -> the same."""

    def __init__(self, t: Transformer, site: str) -> None:
        super().__init__()
        self.norm_1, self.attention = norm(t), Attention(t, f"{site}.scores", DROPOUT)
        self.norm_2 = norm(t)
        self.feed_forward = FeedForward(t)
        self.drop_1, self.drop_2 = (
            dropout(t, f"{site}.attention"),
            dropout(t, f"{site}.feed-forward"),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Pre-norm."""
        x = x + self.drop_1(self.attention(self.norm_1(x)))
        return x + self.drop_2(self.feed_forward(self.norm_2(x)))


class Attention(nn.Module):
    """[B, S, H] -> the same. qkv: queries, keys and values under each other.

    A tensor rank holds whole key-value heads with their queries, none where there are fewer than
    ranks. selective: the scores are computed again in the backward pass (Korthikanti et al. 2022,
    Section 5).
    """

    def __init__(self, t: Transformer, site: str, probability: float) -> None:
        super().__init__()
        self.shape, self.tensor, self.selective = t, ALONE, False
        width = t.query_width + 2 * t.kv_width
        self.qkv = nn.Parameter(torch.empty(width, t.hidden))
        self.qkv_bias = nn.Parameter(torch.empty(width)) if t.attention_bias else None
        self.out = nn.Parameter(torch.empty(t.hidden, t.query_width))
        self.out_bias = nn.Parameter(torch.empty(t.hidden)) if t.output_bias else None
        self.drop = Dropout(probability if t.dropout and t.attention == "standard" else 0.0, site)

    def cuts(self, part: Part) -> dict[str, Cut]:
        """Heads: rows of qkv, columns of out."""
        t = self.shape
        groups, (a, b) = t.heads // t.kv_heads, part.of(t.kv_heads)
        queries = (a * groups * t.head_dim, b * groups * t.head_dim)
        keys = (t.query_width + a * t.head_dim, t.query_width + b * t.head_dim)
        rows = Cut(0, (queries, keys, (keys[0] + t.kv_width, keys[1] + t.kv_width)))
        cuts = {"qkv": rows, "out": Cut(1, (queries,))}
        return cuts if self.qkv_bias is None else cuts | {"qkv_bias": rows}

    def forward(self, x: Tensor) -> Tensor:
        """Projections, attention of the heads that are here, projection."""
        t = self.shape
        samples, length, _ = x.shape
        a, b = self.tensor.of(t.kv_heads)
        groups = t.heads // t.kv_heads
        widths = ((b - a) * groups * t.head_dim, (b - a) * t.head_dim, (b - a) * t.head_dim)
        parts = F.linear(self.tensor.enter(x), self.qkv, self.qkv_bias).split(widths, dim=-1)
        q, k, v = (
            y.view(samples, length, n, t.head_dim).transpose(1, 2)
            for y, n in zip(parts, ((b - a) * groups, b - a, b - a), strict=True)
        )
        again = partial(checkpoint, self.mix, use_reentrant=False)
        mixed = (again if self.selective else self.mix)(q, k, v, a) if b > a else q
        y = F.linear(mixed.transpose(1, 2).reshape(samples, length, widths[0]), self.out)
        y = self.tensor.leave(y)
        return y if self.out_bias is None else y + self.out_bias

    def mix(self, q: Tensor, k: Tensor, v: Tensor, first: int) -> Tensor:
        """softmax(q k^T / sqrt(d)) v of key-value heads [first, …)."""
        t = self.shape
        groups = t.heads // t.kv_heads
        if t.rotary:
            q, k = rotated(q), rotated(k)
        if groups > 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        causal = t.head != "bert" and t.vocabulary > 0
        if t.attention == "fused" and not t.window:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        seen = visible(q.shape[2], causal, t.window, q.device)
        if t.attention == "fused":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        scores = (q @ k.transpose(-2, -1)) / t.head_dim**0.5
        shares = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
        return self.drop(shares, first * groups, t.heads) @ v


def visible(length: int, causal: bool, window: int | None, device: object) -> Tensor:
    """[S, S] which keys a query sees."""
    places = torch.arange(length, device=device)
    back = places[:, None] - places[None, :]
    seen = back >= 0 if causal else torch.ones_like(back, dtype=torch.bool)
    return seen & (back < window) if window else seen


class FeedForward(nn.Module):
    """Two matrices with GELU, or three with SiLU where gated; split by columns, then rows."""

    def __init__(self, t: Transformer) -> None:
        super().__init__()
        self.shape, self.tensor = t, ALONE
        self.blocks = 2 if t.gated else 1
        inner = self.blocks * t.feed_forward
        self.up = nn.Parameter(torch.empty(inner, t.hidden))
        self.up_bias = nn.Parameter(torch.empty(inner)) if t.feed_forward_bias else None
        self.down = nn.Parameter(torch.empty(t.hidden, t.feed_forward))
        self.down_bias = nn.Parameter(torch.empty(t.hidden)) if t.feed_forward_bias else None

    def cuts(self, part: Part) -> dict[str, Cut]:
        """Columns of `up` (of gate and value alike), rows of `down`."""
        inner = self.shape.feed_forward
        columns = cut(0, inner, part, self.blocks)
        cuts = {"up": columns, "down": cut(1, inner, part)}
        return cuts if self.up_bias is None else cuts | {"up_bias": columns}

    def forward(self, x: Tensor) -> Tensor:
        """down(act(up(x)))."""
        inner = activated(
            F.linear(self.tensor.enter(x), self.up, self.up_bias), gated=self.blocks == 2
        )
        y = self.tensor.leave(F.linear(inner, self.down))
        return y if self.down_bias is None else y + self.down_bias


def activated(x: Tensor, *, gated: bool) -> Tensor:
    """GELU, or SiLU of the first half times the second."""
    if not gated:
        return F.gelu(x)
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value


class Head(nn.Module):
    """Norm, language-model head and cross-entropy; BERT: transform, MLM and next-sentence heads.

    ([B, S, H], targets [B, S]) -> the sum of the tokens' losses; targets of -100 do not count.
    Split by the vocabulary. BERT's next-sentence loss of a sample weighs as much as its S tokens.
    """

    def __init__(self, t: Transformer, table: nn.Parameter | None) -> None:
        super().__init__()
        self.shape, self.tensor = t, ALONE
        width = t.embedding_width or t.hidden
        self.norm = norm(t) if t.final_norm else nn.Identity()
        self.narrow = nn.Linear(t.hidden, width, bias=False) if width != t.hidden else nn.Identity()
        self.table = nn.Parameter(torch.empty(t.vocabulary, width)) if table is None else table
        self.bias = nn.Parameter(torch.empty(t.vocabulary)) if t.head == "bert" else None
        if t.head == "bert":
            self.pool, self.follows = nn.Linear(t.hidden, t.hidden), nn.Linear(t.hidden, 2)
            self.transform, self.after = nn.Linear(t.hidden, t.hidden), norm(t)

    def cuts(self, part: Part) -> dict[str, Cut]:
        """The table's rows, as the embedding's."""
        rows = cut(0, self.shape.vocabulary, part)
        return {"table": rows} if self.bias is None else {"table": rows, "bias": rows}

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """The sum of losses."""
        x = self.narrow(self.norm(x))
        if self.shape.head != "bert":
            return self.tokens(x, targets)
        pairs = F.cross_entropy(
            at_least_fp32(self.follows(self.pool(x[:, 0]).tanh())),
            targets[:, 0] % 2,
            reduction="sum",
        )
        return self.tokens(self.after(F.gelu(self.transform(x))), targets) + x.shape[1] * pairs

    def tokens(self, x: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy over a vocabulary in parts: log of the sum of exponentials less the
        target's logit."""
        first, last = self.tensor.of(self.shape.vocabulary)
        logits = at_least_fp32(F.linear(self.tensor.enter(x), self.table, self.bias)).flatten(0, -2)
        targets = targets.flatten()
        ceiling = (
            logits.detach().amax(-1)
            if last > first
            else torch.full_like(logits[:, :0].sum(-1), -torch.inf)
        )
        ceiling = self.tensor.largest(ceiling)
        total = self.tensor.leave((logits - ceiling.unsqueeze(-1)).exp().sum(-1))
        here = (targets >= first) & (targets < last)
        if last > first:
            rows = torch.arange(len(logits), device=logits.device)
            # by index: `gather` would keep the logits for its backward pass
            hit = logits[rows, (targets - first).clamp(0, last - first - 1)]
            hit = torch.where(here, hit, torch.zeros_like(hit))
        else:
            hit = logits.sum(-1)  # of nothing: zeros
        losses = total.log() + ceiling - self.tensor.leave(hit)
        return (losses * (targets != IGNORED)).sum()


IGNORED = -100


def at_least_fp32(x: Tensor) -> Tensor:
    """Half precision widened."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


class Reference(nn.Module):
    """A chain of named layers with synthetic texts."""

    def __init__(
        self,
        layers: dict[str, nn.Module],
        *,
        vocabulary: int,
        sequence: int,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)
        self.vocabulary, self.sequence, self.seed = vocabulary, sequence, seed
        with torch.no_grad():
            for name, parameter in self.layers.named_parameters():
                if not parameter.is_meta:
                    parameter.copy_(self.initial(name, parameter))

    def initial(self, name: str, parameter: Tensor) -> Tensor:
        """A parameter's first values, from its name: norms' scales 1, biases 0, others normal with
        deviation 0.02."""
        last = name.rpartition(".")[2]
        norm = "norm" in name or "after" in name
        if norm or last == "bias" or last.endswith("_bias"):
            return torch.full(
                parameter.shape, float(norm and last == "weight"), dtype=parameter.dtype
            )
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))
        drawn = torch.empty(parameter.shape, dtype=torch.float32).normal_(
            0.0, 0.02, generator=generator
        )
        return drawn.to(parameter.dtype)

    def batch(self, step: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """(inputs, targets) of the global rows [first, last) of a step: tokens that can be learnt.

        A text is an arithmetic sequence modulo the vocabulary; its last tokens do not count where
        its row says so.
        """
        rows = torch.arange(first, last)
        key = as_int64(key_of(self.seed, step, "batch"))
        drawn = (splitmix64(rows * 2 + key) >> 1) & ((1 << 62) - 1)
        places = torch.arange(self.sequence + 1)
        texts = (drawn[:, None] + places * (1 + drawn[:, None] // 7 % 3)) % self.vocabulary
        targets = texts[:, 1:].clone()
        if self.sequence > 2:
            cut = drawn // 11 % 3  # texts of different lengths: tokens are weighed, not samples
            targets[places[None, :-1] >= self.sequence - cut[:, None]] = IGNORED
        return texts[:, :-1].contiguous(), targets


def build(shape: Transformer, sequence: int, *, seed: int = 0) -> Reference:
    """Embedding, blocks and head of a text model, on the current default device."""
    return Reference(text_layers(shape), vocabulary=shape.vocabulary, sequence=sequence, seed=seed)


def text_layers(shape: Transformer) -> dict[str, nn.Module]:
    """Embedding, blocks and head by name, with torch's own first values; raises UnsupportedError
    for what these layers do not compute."""
    check_shape(shape)
    embedding = Embedding(shape, "embedding")
    return {
        "embedding": embedding,
        **{f"block-{i}": Block(shape, f"block-{i}") for i in range(shape.layers)},
        "head": Head(shape, embedding.table if shape.tied else None),
    }


def stand_in(names: Sequence[str], *, tensor: int = 1, seed: int = 0) -> Reference:
    """A narrow chain of real layers under any names: the first embeds, the last has the loss,
    blocks between.

    tensor: the widest tensor group that it must split over. Raises InputError for names that stand
    twice.
    """
    require(len(set(names)) == len(names), "layer names stand twice", expected="different names")
    heads, blocks = max(2, tensor), len(names) - 2 if len(names) > 1 else 1
    shape = replace(
        gpt2(blocks, 4 * heads, heads, vocabulary=max(32, tensor), positions=8),
        feed_forward=8 * heads, dropout=False, tied=len(names) > 1,
    )  # fmt: skip
    layers = [Called(build(shape, 8))] if len(names) == 1 else list(text_layers(shape).values())
    return Reference(
        dict(zip(names, layers, strict=True)), vocabulary=shape.vocabulary, sequence=8, seed=seed
    )
