"""A described transformer's layers, timed one by one on a torch device: a measured profile.

Equal layers are measured once: embedding, one block, head. A tensor degree is one rank's part of
the layer (Megatron's split of heads, feed-forward width and vocabulary), run alone: its all-reduces
are priced elsewhere. torch is imported by the functions.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from hetplan.errors import InputError
from hetplan.profiling.architecture import Transformer
from hetplan.profiling.models import Model
from hetplan.runtime import chain
from hetplan.runtime.trial import out_of_memory

Tensor = Any  # torch.Tensor
KINDS = ("embedding", "block", "head")


@dataclass(frozen=True)
class LayerReading:
    """One layer and micro-batch: medians and spreads (slowest less fastest repeat) in seconds, and
    bytes.

    saved_bytes: what autograd keeps between the passes. peak_bytes: beside the parameters and what
    is kept, at the passes' peak; None on a CPU, where nothing keeps such books.
    """

    forward: float
    backward: float
    forward_spread: float
    backward_spread: float
    optimizer: float
    saved_bytes: float
    peak_bytes: float | None


@dataclass(frozen=True)
class Piece:
    """A layer on a device. run: (input, tokens) -> output; takes_tokens: input unused. shared:
    weights of others."""

    run: Callable[[Tensor, Tensor], Tensor]
    parameters: tuple[Tensor, ...]
    takes_tokens: bool
    shared: tuple[Tensor, ...] = ()


def shard(shape: Transformer, tensor: int) -> Transformer:
    """One rank's part of a shape; raises InputError where the degree divides heads or feed-forward
    unevenly."""
    if tensor == 1:
        return shape
    if shape.heads % tensor or shape.feed_forward % tensor:
        raise InputError("tensor degree does not divide heads and feed-forward size", got=tensor)
    return replace(
        shape,
        heads=shape.heads // tensor,
        kv_heads=max(shape.kv_heads // tensor, 1),
        feed_forward=shape.feed_forward // tensor,
        vocabulary=-(-shape.vocabulary // tensor),
    )


def build_pieces(model: Model, device: str, tensor: int) -> dict[str, Piece]:
    """One layer of each kind; raises UnsupportedError for what has no torch layers."""
    import torch

    whole, sequence = chain.shape_of(model)
    shape = shard(whole, tensor)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[model.precision]
    owned: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}

    def maker(kind: str) -> Callable[..., Tensor]:
        def make(*size: int) -> Tensor:
            made = (
                torch.empty(*size, device=device, dtype=dtype).normal_(0.0, 0.02).requires_grad_()
            )
            owned[kind].append(made)
            return made

        return make

    embed, table = chain.embedding(maker("embedding"), shape)
    block = chain.block(maker("block"), shape, sequence)
    loss = chain.head(maker("head"), shape, table)
    runs: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "embedding": lambda x, tokens: embed(tokens),
        "block": lambda x, tokens: block(x),
        "head": loss,
    }
    shared = {"head": (table,)} if shape.tied else {}
    return {
        kind: Piece(runs[kind], tuple(owned[kind]), kind == "embedding", shared.get(kind, ()))
        for kind in KINDS
    }


def measure_pieces(
    model: Model, device: str, tensor: int, batch: int, repeats: int, warm_up: int
) -> dict[str, LayerReading]:
    """Every kind of layer at one tensor degree and micro-batch; raises OutOfMemoryOnDevice where it
    does not fit."""
    import torch

    shape, sequence = chain.shape_of(model)
    with out_of_memory(batch):
        pieces = build_pieces(model, device, tensor)
        dtype = pieces["block"].parameters[0].dtype
        tokens = torch.randint(shard(shape, tensor).vocabulary, (batch, sequence), device=device)
        x = torch.randn(batch, sequence, shape.hidden, device=device, dtype=dtype)
        return {
            kind: _read(piece, x, tokens, device, repeats, warm_up)
            for kind, piece in pieces.items()
        }


def _read(
    piece: Piece, x: Tensor, tokens: Tensor, device: str, repeats: int, warm_up: int
) -> LayerReading:
    import torch

    x = x.detach().requires_grad_(not piece.takes_tokens)
    with _saved(piece.parameters + piece.shared) as kept:
        once = piece.run(x, tokens)
        saved = kept()
    gradient = torch.ones_like(once)
    once.backward(gradient)
    del once
    peak = None
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    times = []
    for i in range(warm_up + repeats):
        x.grad = None
        begun = now(device)
        out = piece.run(x, tokens)
        between = now(device)
        out.backward(gradient)
        done = now(device)
        del out
        if i >= warm_up:
            times.append((between - begun, done - between))
    if device != "cpu":
        peak = float(max(torch.cuda.max_memory_allocated(device) - before - saved, 0.0))
    forward, backward = zip(*times, strict=True)
    return LayerReading(
        forward=statistics.median(forward),
        backward=statistics.median(backward),
        forward_spread=max(forward) - min(forward),
        backward_spread=max(backward) - min(backward),
        optimizer=_optimizer_seconds(piece, device, repeats),
        saved_bytes=saved,
        peak_bytes=peak,
    )


def _optimizer_seconds(piece: Piece, device: str, repeats: int) -> float:
    """Median seconds of an AdamW step of the layer's own parameters."""
    import torch

    if not piece.parameters:
        return 0.0
    optimizer = torch.optim.AdamW(piece.parameters, lr=0.0)
    optimizer.step()  # makes the moments
    times = []
    for _ in range(repeats):
        begun = now(device)
        optimizer.step()
        times.append(now(device) - begun)
    return statistics.median(times)


def now(device: str) -> float:
    """Seconds on the host's clock when the device is done with what it was given."""
    if device != "cpu":
        import torch

        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextmanager
def _saved(parameters: tuple[Tensor, ...]) -> Iterator[Callable[[], float]]:
    """Count the distinct storages that autograd saves inside, those of parameters left out."""
    import torch

    own = {_storage(p) for p in parameters}
    sizes: dict[int, int] = {}
    alive = []  # a storage that is gone gives its address to the next one

    def pack(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in own:
            sizes[_storage(tensor)] = tensor.untyped_storage().nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield lambda: float(sum(sizes.values()))


def _storage(tensor: Tensor) -> int:
    """What tells storages apart, on the meta device too, where none has an address."""
    return int(tensor.untyped_storage()._cdata)


def saved_on_meta(model: Model, tensor: int = 1, batch: int = 1) -> dict[str, float]:
    """Bytes that autograd keeps of each kind of layer, counted on torch's meta device: nothing is
    allocated."""
    import torch

    shape, sequence = chain.shape_of(model)
    pieces = build_pieces(model, "meta", tensor)
    dtype = pieces["block"].parameters[0].dtype
    tokens = torch.zeros(batch, sequence, device="meta", dtype=torch.int64)
    found = {}
    for kind, piece in pieces.items():
        x = torch.empty(batch, sequence, shape.hidden, device="meta", dtype=dtype)
        with _saved(piece.parameters + piece.shared) as kept:
            out = piece.run(x.requires_grad_(not piece.takes_tokens), tokens)
            found[kind] = kept()
        del out
    return found
