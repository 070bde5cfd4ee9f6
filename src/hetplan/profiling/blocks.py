"""The operators of a transformer block and the tensors that it keeps for the backward pass.

Attention scores are counted in full also where a mask hides half of them. Saved activations follow
Korthikanti et al. 2022, Section 4: s h (34 + 5 a s / h) bytes per sample for a GPT block in 16 bit
with dropout; other variants are summed from the same tensors.
"""

from __future__ import annotations

from hetplan.profiling.architecture import Experts, Transformer
from hetplan.profiling.operators import Elementwise, Matmul, Operator, Saved


def attention_operators(t: Transformer, s: int) -> tuple[Operator, ...]:
    """Projections, scores, softmax, weighted sum, output projection."""
    keys = min(s, t.window) if t.window else s
    q, scores = s * t.query_width, s * keys * t.heads
    fused = t.attention == "fused"
    operators: list[Operator] = [
        Matmul("qkv", s, t.hidden, t.query_width + 2 * t.kv_width, split="n")
    ]
    if t.rotary:
        rotated = 2 * (q + s * t.kv_width)
        operators.append(Elementwise("rotary", rotated, rotated, split=True))
    operators.append(
        Matmul(
            "scores",
            s,
            t.head_dim,
            keys,
            t.heads,
            weight=False,
            split="count",
            out=0 if fused else None,
        )
    )
    if not fused:  # scale, mask and softmax in one kernel; dropout in a second
        moves = (4, 6) if t.dropout else (2, 3)
        operators.append(Elementwise("softmax", moves[0] * scores, moves[1] * scores, split=True))
    operators.append(
        Matmul(
            "context",
            s,
            keys,
            t.head_dim,
            t.heads,
            weight=False,
            split="count",
            left=0 if fused else None,
        )
    )
    operators.append(Matmul("attention-output", s, t.query_width, t.hidden, split="k"))
    return tuple(operators)


def feed_forward_operators(t: Transformer, s: int) -> tuple[Operator, ...]:
    """Up (and gate), activation, down."""
    up = 2 if t.gated else 1
    inner = s * t.feed_forward
    return (
        Matmul("up", s, t.hidden, up * t.feed_forward, split="n"),
        Elementwise("activation", (up + 1) * inner, (2 * up + 1) * inner, split=True),
        Matmul("down", s, t.feed_forward, t.hidden, split="k"),
    )


def expert_operators(t: Transformer, s: int, mixture: Experts) -> tuple[Operator, ...]:
    """Router, dispatch, the experts at even load (each pads its rows up to a whole token),
    combine."""
    up = 2 if t.gated else 1
    rows = -(-s * mixture.active // mixture.count)
    inner = s * mixture.active * t.feed_forward
    spread = (1 + mixture.active) * s * t.hidden
    return (
        Matmul("router", s, t.hidden, mixture.count),
        Elementwise("dispatch", spread, spread),
        Matmul("experts-up", rows, t.hidden, up * t.feed_forward, mixture.count, split="n"),
        Elementwise("activation", (up + 1) * inner, (2 * up + 1) * inner, split=True),
        Matmul("experts-down", rows, t.feed_forward, t.hidden, mixture.count, split="k"),
        Elementwise("combine", spread, 2 * spread),
    )


def norm(name: str, size: int) -> Elementwise:
    """A norm: reads and writes its input; backward reads input and gradient and writes a
    gradient."""
    return Elementwise(name, 2 * size, 3 * size)


def residual(name: str, size: int, dropout: bool) -> Elementwise:
    """Bias, dropout and addition in one kernel; backward passes the gradient on (through the
    mask)."""
    return Elementwise(name, 3 * size, 3 * size if dropout else 2 * size)


def attention_saved(t: Transformer, s: int) -> tuple[Saved, ...]:
    """What attention keeps: Korthikanti et al. 2022, Section 4.1 (11 s b h + 5 a s^2 b), with its
    norm."""
    size = s * t.hidden
    scores = s * (min(s, t.window) if t.window else s) * t.heads
    saved = [
        Saved("norm-1 input", size, split=False),
        Saved("qkv input", size, split=False),
        Saved("queries", s * t.query_width, split=True),
        Saved("keys and values", 2 * s * t.kv_width, split=True),
        Saved("attention output", s * t.query_width, split=True),
    ]
    if t.attention == "fused":
        saved.append(Saved("log-sum-exp", s * t.heads, split=True, element_bytes=4))
    else:
        saved.append(Saved("softmax output", scores, split=True))
        if t.dropout:
            saved.append(Saved("scores after dropout", scores, split=True))
            saved.append(Saved("scores dropout mask", scores, split=True, element_bytes=1))
    if t.dropout:
        saved.append(Saved("residual-1 dropout mask", size, split=False, element_bytes=1))
    return tuple(saved)


def feed_forward_saved(t: Transformer, s: int, mixture: Experts | None) -> tuple[Saved, ...]:
    """What the feed-forward network keeps (19 s b h for a GPT block), with its norm."""
    size = s * t.hidden
    active = mixture.active if mixture else 1
    up = 2 if t.gated else 1
    saved = [
        Saved("norm-2 input", size, split=False),
        Saved("up input", active * size, split=False),
        Saved("activation input", active * up * s * t.feed_forward, split=True),
        Saved("down input", active * s * t.feed_forward, split=True),
    ]
    if mixture:
        saved.append(Saved("router input and weights", size + s * mixture.count, split=False))
        saved.append(Saved("expert outputs", active * size, split=False))
    if t.dropout:
        saved.append(Saved("residual-2 dropout mask", size, split=False, element_bytes=1))
    return tuple(saved)
