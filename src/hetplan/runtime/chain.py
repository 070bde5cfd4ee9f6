"""A described transformer as a real chain of torch layers: embedding, blocks, head with loss.

The layers are those of `profiling.transformer`, parameter by parameter, with random weights: what a
step costs and holds does not depend on their values. Shapes: B samples of S tokens, hidden size H,
vocabulary V. torch is imported by the functions, not by the module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hetplan.errors import UnsupportedError
from hetplan.profiling.architecture import Transformer
from hetplan.profiling.models import Model

Tensor = Any  # torch.Tensor
Function = Callable[[Tensor], Tensor]
Make = Callable[..., Tensor]
DROPOUT = 0.1


@dataclass(frozen=True)
class Chain:
    """embed: tokens [B, S] -> [B, S, H]; blocks: [B, S, H] -> the same; loss: ([B, S, H], tokens)
    -> scalar.

    parameters: by layer (embedding, blocks, head), those that the layer owns.
    """

    embed: Function
    blocks: tuple[Function, ...]
    loss: Callable[[Tensor, Tensor], Tensor]
    parameters: tuple[tuple[Tensor, ...], ...]

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of one micro-batch."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.loss(x, tokens)


def build_chain(model: Model, device: str) -> Chain:
    """`model` on a torch device, parameters in its precision; raises UnsupportedError for what has
    no torch layer."""
    shape, sequence = shape_of(model)
    owned: list[list[Tensor]] = []

    def layer(build: Callable[..., Any], *arguments: Any) -> Any:
        owned.append([])
        return build(_maker(owned[-1], device, model.precision), shape, *arguments)

    embed, table = layer(embedding)
    blocks = tuple(layer(block, sequence) for _ in range(shape.layers))
    loss = layer(head, table)
    return Chain(embed, blocks, loss, tuple(map(tuple, owned)))


def shape_of(model: Model) -> tuple[Transformer, int]:
    """Shape and sequence of a text model without experts; raises UnsupportedError for others."""
    shape = model.spec.shape
    if shape is None or model.sequence is None:
        raise UnsupportedError(f"{model.name} has no torch layers here; text transformers have")
    if shape.experts is not None:
        raise UnsupportedError(f"{model.name}: mixtures of experts have no torch layers here")
    return shape, model.sequence


def _maker(owned: list[Tensor], device: str, precision: str) -> Make:
    """A function that makes a parameter of a size, normally distributed, and keeps it in
    `owned`."""
    import torch

    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[precision]

    def make(*size: int) -> Tensor:
        tensor = torch.empty(*size, device=device, dtype=dtype).normal_(0.0, 0.02).requires_grad_()
        owned.append(tensor)
        return tensor

    return make


def linear(make: Make, inputs: int, outputs: int, *, bias: bool) -> Function:
    """x W^T + b."""
    from torch.nn import functional as F

    weight, offset = make(outputs, inputs), make(outputs) if bias else None
    return lambda x: F.linear(x, weight, offset)


def norm(make: Make, t: Transformer) -> Function:
    """LayerNorm, RMSNorm (scale only) or pixel norm (no parameters)."""
    from torch.nn import functional as F

    size = (t.hidden,)
    if t.norm == "pixel":
        return lambda x: F.rms_norm(x, size)
    scale = make(t.hidden)
    if t.norm == "rms":
        return lambda x: F.rms_norm(x, size, scale)
    offset = make(t.hidden)
    return lambda x: F.layer_norm(x, size, scale, offset)


def dropped(t: Transformer) -> Function:
    """Dropout where the model has it."""
    from torch.nn import functional as F

    return (lambda x: F.dropout(x, DROPOUT)) if t.dropout else (lambda x: x)


def embedding(make: Make, t: Transformer) -> tuple[Function, Tensor]:
    """The embedding and its table [V, width], which a tied head shares."""
    import torch
    from torch.nn import functional as F

    width = t.embedding_width or t.hidden
    table = make(t.vocabulary, width)
    places = (
        make(t.positions + t.position_offset, t.hidden) if t.positions + t.position_offset else None
    )
    types = make(t.types, t.hidden) if t.types else None
    widen = linear(make, width, t.hidden, bias=False) if width != t.hidden else (lambda x: x)
    normalise = norm(make, t) if t.embedding_norm else (lambda x: x)
    drop = dropped(t)

    def run(tokens: Tensor) -> Tensor:
        x = widen(F.embedding(tokens, table))
        if places is not None:
            x = x + F.embedding(
                torch.arange(tokens.shape[1], device=tokens.device) + t.position_offset, places
            )
        if types is not None:
            x = x + F.embedding(torch.zeros_like(tokens), types)
        return drop(normalise(x))

    return run, table


def block(make: Make, t: Transformer, sequence: int) -> Function:
    """Norm, attention, residual, norm, feed-forward, residual."""
    first, attend = norm(make, t), attention(make, t, sequence)
    second, feed = norm(make, t), feed_forward(make, t)
    drop = dropped(t)

    def run(x: Tensor) -> Tensor:
        x = x + drop(attend(first(x)))
        return x + drop(feed(second(x)))

    return run


def attention(make: Make, t: Transformer, sequence: int) -> Function:
    """Grouped queries, rotary positions and a window where the model has them; masked but for
    BERT."""
    qkv = linear(make, t.hidden, t.query_width + 2 * t.kv_width, bias=t.attention_bias)
    out = linear(make, t.query_width, t.hidden, bias=t.output_bias)
    groups = t.heads // t.kv_heads

    def run(x: Tensor) -> Tensor:
        samples, length, _ = x.shape
        q, k, v = qkv(x).split((t.query_width, t.kv_width, t.kv_width), dim=-1)
        q, k, v = (y.view(samples, length, -1, t.head_dim).transpose(1, 2) for y in (q, k, v))
        if t.rotary:
            q, k = rotated(q), rotated(k)
        if groups > 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        mixed = scored(t, q, k, v)
        return out(mixed.transpose(1, 2).reshape(samples, length, t.query_width))

    return run


def scored(t: Transformer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d)) v, fused or with the scores in memory."""
    import torch
    from torch.nn import functional as F

    length, masked = q.shape[2], t.head != "bert"
    if t.attention == "fused" and not t.window:
        return F.scaled_dot_product_attention(q, k, v, is_causal=masked)
    ahead = torch.arange(length, device=q.device)
    gap = ahead[:, None] - ahead[None, :]  # keys back from each query
    seen = (gap >= 0) if masked else torch.ones_like(gap, dtype=torch.bool)
    if t.window:
        seen = seen & (gap < t.window)
    if t.attention == "fused":
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    scores = (q @ k.transpose(-2, -1)) / t.head_dim**0.5
    return dropped(t)(scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)) @ v


def rotated(x: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021) on [B, heads, S, d], halves paired."""
    import torch

    length, half = x.shape[2], x.shape[3] // 2
    steps = torch.arange(half, device=x.device, dtype=torch.float32)
    turns = torch.arange(length, device=x.device, dtype=torch.float32)[:, None] * 10_000.0 ** (
        -steps / half
    )
    cosine, sine = turns.cos().to(x.dtype), turns.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half : 2 * half]
    return torch.cat((a * cosine - b * sine, a * sine + b * cosine, x[..., 2 * half :]), dim=-1)


def feed_forward(make: Make, t: Transformer) -> Function:
    """Two matrices with GELU, or three with SiLU where gated."""
    from torch.nn import functional as F

    up = linear(make, t.hidden, (2 if t.gated else 1) * t.feed_forward, bias=t.feed_forward_bias)
    down = linear(make, t.feed_forward, t.hidden, bias=t.feed_forward_bias)
    if not t.gated:
        return lambda x: down(F.gelu(up(x)))

    def run(x: Tensor) -> Tensor:
        gate, value = up(x).chunk(2, dim=-1)
        return down(F.silu(gate) * value)

    return run


def head(make: Make, t: Transformer, table: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Final norm, language-model head and cross-entropy in fp32; BERT's transform, MLM and NSP
    heads."""
    from torch.nn import functional as F

    width = t.embedding_width or t.hidden
    weight = table if t.tied else make(t.vocabulary, width)
    normalise = norm(make, t) if t.final_norm else (lambda x: x)
    narrow = linear(make, t.hidden, width, bias=False) if width != t.hidden else (lambda x: x)
    if t.head != "bert":

        def run(x: Tensor, tokens: Tensor) -> Tensor:
            logits = F.linear(narrow(normalise(x)), weight)
            return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())

        return run
    pool = linear(make, t.hidden, t.hidden, bias=True)
    follows = linear(make, t.hidden, 2, bias=True)
    transform, after = linear(make, t.hidden, t.hidden, bias=True), norm(make, t)
    offset = make(t.vocabulary)

    def run_bert(x: Tensor, tokens: Tensor) -> Tensor:
        pairs = follows(pool(x[:, 0]).tanh())
        logits = F.linear(after(F.gelu(transform(x))), weight, offset)
        words = F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
        return words + F.cross_entropy(pairs.float(), tokens[:, 0] % 2)

    return run_bert
