"""Transformers as layer chains: embedding, blocks, head.

One block: norm - attention - residual - norm - feed-forward - residual; pre- and post-norm cost the
same.
Tensor parallelism is Megatron's (Shoeybi et al. 2019, Section 3): attention by heads, feed-forward
by columns, then rows, so two all-reduces of s h forward and two backward per block; vocabulary
split in embedding and head.
"""

from __future__ import annotations

from hetplan.profiling.architecture import (
    Transformer,
    attention_params,
    bert_head_params,
    feed_forward_params,
)
from hetplan.profiling.blocks import (
    attention_operators,
    attention_saved,
    expert_operators,
    feed_forward_operators,
    feed_forward_saved,
    norm,
    residual,
)
from hetplan.profiling.operators import Elementwise, Layer, Matmul, Operator, Reduce, Saved


def transformer_layers(t: Transformer, sequence: int) -> tuple[Layer, ...]:
    """Embedding, blocks and head for samples of `sequence` tokens, no more than the learned
    positions."""
    blocks = [block(t, sequence, index) for index in range(t.layers)]
    return (embedding(t, sequence), *blocks, head(t, sequence))


def embedding(t: Transformer, s: int) -> Layer:
    """Token, position and type vectors, summed; normalised and projected where the model does
    so."""
    width = t.embedding_width or t.hidden
    params = t.vocabulary * width + (t.positions + t.position_offset + t.types) * t.hidden
    tables = 1 + bool(t.positions) + bool(t.types)
    operators: list[Operator] = [
        Elementwise("lookup", (1 + tables) * s * width, (1 + tables) * s * width)
    ]
    saved: list[Saved] = []
    if width != t.hidden:
        params += width * t.hidden
        operators.append(Matmul("project-in", s, width, t.hidden))
        saved.append(Saved("project-in input", s * width, split=False))
    if t.embedding_norm:
        params += t.norm_params
        operators.append(norm("embedding-norm", s * t.hidden))
        saved.append(Saved("embedding norm input", s * t.hidden, split=False))
    if t.dropout:
        operators.append(Elementwise("dropout", 2 * s * t.hidden, 2 * s * t.hidden))
        saved.append(Saved("embedding dropout mask", s * t.hidden, split=False, element_bytes=1))
    reduces = (Reduce(s * width, backward=False),)  # ranks hold parts of the vocabulary
    return Layer(
        "embedding", "embedding", params, tuple(operators), s * t.hidden, tuple(saved), reduces
    )


def block(t: Transformer, s: int, index: int) -> Layer:
    """Block `index`: attention and (mixture-of-experts) feed-forward with norms and residuals."""
    mixture = t.experts if t.experts and (index + 1) % t.experts.every == 0 else None
    size = s * t.hidden
    operators = (
        norm("norm-1", size),
        *attention_operators(t, s),
        residual("residual-1", size, t.dropout),
        norm("norm-2", size),
        *(expert_operators(t, s, mixture) if mixture else feed_forward_operators(t, s)),
        residual("residual-2", size, t.dropout),
    )
    saved = (*attention_saved(t, s), *feed_forward_saved(t, s, mixture))
    feed_forward = feed_forward_params(t)
    if mixture:
        feed_forward = mixture.count * feed_forward + t.hidden * mixture.count
    params = attention_params(t) + feed_forward + 2 * t.norm_params
    reduces = tuple(Reduce(size, backward) for backward in (False, False, True, True))
    return Layer(
        f"block-{index}",
        "moe-block" if mixture else "block",
        params,
        operators,
        size,
        saved,
        reduces,
    )


def head(t: Transformer, s: int) -> Layer:
    """Final norm, language-model head (BERT: transform, MLM and NSP heads) and loss."""
    h, v = t.hidden, t.vocabulary
    width = t.embedding_width or h
    size = s * h
    params = 0 if t.tied else v * width
    operators: list[Operator] = []
    saved = [Saved("head input", s * width, split=False)]
    if t.final_norm:
        params += t.norm_params
        operators.append(norm("final-norm", size))
        saved.append(Saved("final norm input", size, split=False))
    if width != h:
        params += h * width
        operators.append(Matmul("project-out", s, h, width))
        saved.append(Saved("project-out input", size, split=False))
    if t.head == "bert":
        params += bert_head_params(t)
        operators += [Matmul("pooler", 1, h, h), Matmul("transform", s, h, h)]
        operators += [
            Elementwise("transform-gelu", 2 * size, 3 * size),
            norm("transform-norm", size),
        ]
        saved += [
            Saved(f"transform {what}", size, split=False)
            for what in ("input", "activation", "norm")
        ]
    operators.append(Matmul("lm-head", s, width, v, split="n"))
    # The loss reads 16-bit logits, writes fp32 ones, and reads those for maximum, sum and gradient.
    operators.append(Elementwise("cross-entropy", 6 * s * v, 3 * s * v, split=True))
    saved.append(Saved("logits", s * v, split=True, element_bytes=4))
    # Backward: the input's gradient. Forward: maximum, target logit and sum of exponentials, fp32.
    reduces = (Reduce(s * width, backward=True), Reduce(3 * s, backward=False, element_bytes=4))
    tied = v * width if t.tied else 0
    return Layer(
        "head", "head", params, tuple(operators), 0, tuple(saved), reduces, tied_params=tied
    )
