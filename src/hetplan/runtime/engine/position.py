"""Dropout that does not depend on who computes what: masks are a hash of the seed and the global
position.

Every element's draw is a function of (seed, step, site, global row, place within the row), so that
one process and any plan drop the same ones, also when a pass is computed again.

torch's own generators, which other layers draw from, are seeded for every pass of a layer by seed,
step, layer and first row: so that a pass that is computed again, the ranks of a tensor group, and a
run that goes on from a checkpoint draw the same, under any plan with the same micro-batches.
"""

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WORD = 1 << 64


@dataclass(frozen=True)
class Position:
    """Where the layers that run now are: `first_row` is the global number of their first sample.
    autocast: type of the passes by torch.autocast, where the user's loop is inside of it."""

    seed: int = 0
    step: int = 0
    first_row: int = 0
    autocast: Any = None


_now: Position | None = None


@contextmanager
def at(position: Position) -> Iterator[None]:
    """Layers inside run at this position."""
    global _now  # noqa: PLW0603 (one engine per process, and layers have no other way to know)
    before, _now = _now, position
    try:
        yield
    finally:
        _now = before


@contextmanager
def drawing(layer: int, device: torch.device) -> Iterator[None]:
    """A layer's pass inside draws from torch's generators by position; behind it they are what they
    were."""
    assert _now is not None, "passes have a position"
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(gpus):
        key = key_of(_now.seed, _now.step, f"{layer} {_now.first_row}")
        torch.default_generator.manual_seed(key)  # torch.manual_seed asks every backend, for 70 us
        if gpus:
            torch.cuda.manual_seed(key)
        yield


def signed(value: int) -> int:
    """The 64 bits of `value` as a signed number, as torch holds them."""
    value %= WORD
    return value - WORD if value >= WORD // 2 else value


def mixed(value: Tensor) -> Tensor:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014) on int64, overflow wrapping."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ ((value >> shift) & ((1 << (64 - shift)) - 1))) * signed(factor)
    return value ^ ((value >> 31) & ((1 << 33) - 1))


def words(
    key: int, sizes: Sequence[int], begins: Sequence[int], totals: Sequence[int], device: object
) -> Tensor:
    """[sizes] int32, uniform over all 32 bits: those of the box that begins at `begins` in an array
    of `totals` elements.

    A row's number and a place within the rows are hashed once each, in 64 bits. What every element
    costs is the five operations that join both: a round of lowbias32 (Wellons 2018).
    """
    index = torch.zeros((), dtype=torch.int64, device=device)
    stride = 1
    for dim in reversed(range(1, len(sizes))):
        places = torch.arange(begins[dim], begins[dim] + sizes[dim], device=device) * stride
        index = index + places.view(-1, *[1] * (len(sizes) - dim - 1))
        stride *= totals[dim]
    rows = torch.arange(begins[0], begins[0] + sizes[0], device=device)
    of_row = mixed(rows * signed(0x9E3779B97F4A7C15) + signed(key)).to(torch.int32)
    of_place = mixed(index * signed(0x9E3779B97F4A7C15) + signed(~key)).to(torch.int32)
    word = (of_row.view(-1, *[1] * (len(sizes) - 1)) ^ of_place).mul_(0x7FEB352D)
    word ^= word >> 15
    return word.mul_(0x846CA68B - (1 << 32))


def uniform(
    key: int, sizes: Sequence[int], begins: Sequence[int], totals: Sequence[int], device: object
) -> Tensor:
    """[sizes] numbers in [0, 1), of the same box."""
    return words(key, sizes, begins, totals, device).double() * 2.0**-32 + 0.5


def key_of(seed: int, step: int, site: str) -> int:
    """A 64-bit key."""
    value = (
        seed * 0x2545F4914F6CDD1D + step * 0xD6E8FEB86659FD93 + zlib.crc32(site.encode())
    ) % WORD
    return (value * 0xBF58476D1CE4E5B9 ^ (value >> 32)) % WORD


class Dropout(nn.Module):
    """Dropout by global position. site: a name that no other one of the model has."""

    def __init__(self, probability: float, site: str) -> None:
        super().__init__()
        self.probability, self.site = probability, site

    def forward(self, x: Tensor, begin: int = 0, total: int | None = None) -> Tensor:
        """x [rows, …]; begin, total: where dimension 1 is a part [begin, …) of `total` (heads)."""
        if _now is None or x.is_meta:  # no run: torch's own
            return F.dropout(x, self.probability, self.training)
        if not self.training or self.probability == 0.0:
            return x
        begins = [_now.first_row, begin, *[0] * (x.dim() - 2)]
        totals = [0, x.shape[1] if total is None else total, *x.shape[2:]]
        drawn = words(key_of(_now.seed, _now.step, self.site), x.shape, begins, totals, x.device)
        dropped = drawn < int((self.probability - 0.5) * 2.0**32)
        return x.masked_fill(dropped, 0.0) / (1.0 - self.probability)
