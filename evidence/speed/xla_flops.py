"""FLOP of GPT-2 XL's block and head by XLA's cost analysis (jax, CPU) beside hetplan's counter.

    pip install jax && python -m evidence.speed xla_flops

Ditto (§5.2) lowers a PyTorch layer through StableHLO to XLA and takes FLOP and bytes from XLA's
cost model; hetplan counts the operators of its model descriptions instead. One sample of 1024
tokens, fp32, forward alone and forward with backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hetplan.profiling.models.model import load_model

HIDDEN, HEADS, TOKENS, VOCABULARY, INNER = 1600, 25, 1024, 50257, 6400
Parameters = dict[str, Any]


def normed(x: Any, weight: Any, bias: Any) -> Any:
    """Layer normalisation."""
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * weight + bias


def block(p: Parameters, x: Any) -> Any:
    """One transformer block with standard attention."""
    qkv = normed(x, p["a"], p["b"]) @ p["qkv"] + p["qkv_bias"]
    parts = qkv.reshape(1, TOKENS, 3, HEADS, HIDDEN // HEADS)
    q, k, v = (parts[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
    scores = q @ k.transpose(0, 1, 3, 2) / (HIDDEN // HEADS) ** 0.5
    scores = jnp.where(jnp.tril(jnp.ones((TOKENS, TOKENS), bool)), scores, -jnp.inf)
    context = (jax.nn.softmax(scores, -1) @ v).transpose(0, 2, 1, 3).reshape(1, TOKENS, HIDDEN)
    x = x + context @ p["out"] + p["out_bias"]
    inner = jax.nn.gelu(normed(x, p["c"], p["d"]) @ p["up"] + p["up_bias"])
    return x + inner @ p["down"] + p["down_bias"]


def head(p: Parameters, x: Any) -> Any:
    """The last norm, the logits and the loss."""
    logits = normed(x, p["a"], p["b"]) @ p["logits"]
    return -jax.nn.log_softmax(logits)[:, :, 0].mean()


def array(*shape: int) -> Any:
    """The shape of an array of single precision."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def cost(function: Callable[..., Any], *arguments: Any) -> dict[str, float]:
    """XLA's analysis of the compiled function."""
    found = jax.jit(function).lower(*arguments).compile().cost_analysis()
    analysis: dict[str, float] = found[0] if isinstance(found, list) else found
    return analysis


def main() -> None:
    """See the module's docstring."""
    norm = {name: array(HIDDEN) for name in "abcd"}
    sizes = {"qkv": (HIDDEN, 3 * HIDDEN), "out": (HIDDEN, HIDDEN), "up": (HIDDEN, INNER)}
    sizes["down"] = (INNER, HIDDEN)
    weights = {name: array(*size) for name, size in sizes.items()}
    biases = {f"{name}_bias": array(size[1]) for name, size in sizes.items()}
    x, layers = array(1, TOKENS, HIDDEN), load_model("gpt2-xl").layers
    for part, layer, parameters in (
        (block, layers[1], norm | weights | biases),
        (head, layers[-1], norm | {"logits": array(HIDDEN, VOCABULARY)}),
    ):

        def both(p: Parameters, x: Any, part: Callable[..., Any] = part) -> Any:
            y, back = jax.vjp(part, p, x)
            return y, back(jnp.ones_like(y))

        once, twice = cost(part, parameters, x), cost(both, parameters, x)
        ours = layer.forward_flops(), layer.forward_flops() + layer.backward_flops()
        for passes, theirs, own in zip(("forward", "both"), (once, twice), ours, strict=True):
            flops, moved = theirs["flops"], theirs["bytes accessed"]
            counted = f"XLA {flops / 1e9:.2f} GFLOP, hetplan {own / 1e9:.2f}"
            off = f"{100 * (own / flops - 1):+.1f} %"
            print(f"{part.__name__}, {passes}: {counted} ({off}), XLA {moved / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
