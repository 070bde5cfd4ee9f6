"""Random numbers by global position, so that one process and every plan draw the same numbers.

`Dropout` draws each element of its masks as a hash of (seed, step, site, global row, place within
the row). Ranks that compute other rows, other heads, or a pass for the second time draw the same
mask.

Layers of the user's own draw from torch's generators. `seeded_layer` seeds these for each pass of a
layer by seed, step, layer and first row. A recomputed pass, the tensor ranks of a stage, and a run
that goes on from a checkpoint therefore draw the same under all plans with the same micro-batches.
"""

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

TWO_64 = 1 << 64
GOLDEN_RATIO = 0x9E3779B97F4A7C15  # SplitMix64's step between states
SPLITMIX64_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
LOWBIAS32_FACTORS = (0x7FEB352D, 0x846CA68B - (1 << 32))  # the second as signed, for int32
KEY_FACTORS = (0x2545F4914F6CDD1D, 0xD6E8FEB86659FD93)  # odd, of a key's seed and step


@dataclass(frozen=True)
class Position:
    """The position of a pass, by which its layers draw random numbers."""

    seed: int = 0
    step: int = 0
    first_row: int = 0
    """Global number of the first row of the pass."""
    autocast: Any = None
    """Type that torch.autocast gives the passes; None outside of it."""


_now: Position | None = None  # the position of the pass that runs; None outside of passes


@contextmanager
def at(position: Position) -> Iterator[None]:
    """A context whose passes have this position."""
    global _now  # noqa: PLW0603 (one engine per process, and layers have no other way to know)
    before, _now = _now, position
    try:
        yield
    finally:
        _now = before


@contextmanager
def seeded_layer(layer: int, device: torch.device) -> Iterator[None]:
    """A context for a layer's pass, in which torch's generators are seeded by position. After it
    they have their earlier states."""
    assert _now is not None, "passes have a position"
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(gpus):
        key = key_of(_now.seed, _now.step, f"{layer} {_now.first_row}")
        torch.default_generator.manual_seed(key)  # torch.manual_seed asks every backend, for 70 us
        if gpus:
            torch.cuda.manual_seed(key)
        yield


def as_int64(value: int) -> int:
    """The signed number that has the low 64 bits of `value`, as torch stores them."""
    value %= TWO_64
    return value - TWO_64 if value >= TWO_64 // 2 else value


def splitmix64(value: Tensor) -> Tensor:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014) on int64. Products wrap around."""
    first, second = map(as_int64, SPLITMIX64_FACTORS)
    value = (value ^ shifted(value, 30)) * first
    value = (value ^ shifted(value, 27)) * second
    return value ^ shifted(value, 31)


def shifted(value: Tensor, bits: int) -> Tensor:
    """int64 shifted right as unsigned numbers: zeros come in at the top."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def words(
    key: int, sizes: Sequence[int], begins: Sequence[int], totals: Sequence[int], device: object
) -> Tensor:
    """Random int32 [sizes], uniform over all 32 bits, for a part of a global array.

    sizes, begins: size and first index of the part in each dimension. totals: sizes of the
    global array; that of dimension 0, the rows, does not matter.

    SplitMix64 hashes each row's number once, and each place within a row once. One round of
    lowbias32 (Wellons 2018) joins both hashes, for five operations per element.
    """
    row_numbers = torch.arange(begins[0], begins[0] + sizes[0], device=device)
    places = torch.zeros((), dtype=torch.int64, device=device)  # index in a flattened global row
    for dim in range(1, len(sizes)):
        stride = prod(totals[dim + 1 :])
        steps = torch.arange(begins[dim], begins[dim] + sizes[dim], device=device) * stride
        places = places + along(dim, steps, len(sizes))
    step = as_int64(GOLDEN_RATIO)
    row_hash = splitmix64(row_numbers * step + as_int64(key)).to(torch.int32)
    # ~key: a row and a place with the same number have different hashes
    place_hash = splitmix64(places * step + as_int64(~key)).to(torch.int32)
    word = along(0, row_hash, len(sizes)) ^ place_hash
    word = word.mul_(LOWBIAS32_FACTORS[0])
    word ^= word >> 15
    return word.mul_(LOWBIAS32_FACTORS[1])


def along(dim: int, values: Tensor, dimensions: int) -> Tensor:
    """One-dimensional values along axis `dim` of an array with `dimensions` axes of size 1."""
    return values.view(*[1] * dim, -1, *[1] * (dimensions - dim - 1))


def uniform(
    key: int, sizes: Sequence[int], begins: Sequence[int], totals: Sequence[int], device: object
) -> Tensor:
    """Random float64 [sizes] in [0, 1) from `words` with the same arguments."""
    return words(key, sizes, begins, totals, device).double() * 2.0**-32 + 0.5


def key_of(seed: int, step: int, site: str) -> int:
    """A 64-bit key of random numbers, for a site in a step. site: a name that tells what draws."""
    seed_factor, step_factor = KEY_FACTORS
    value = (seed * seed_factor + step * step_factor + zlib.crc32(site.encode())) % TWO_64
    return ((value * SPLITMIX64_FACTORS[0]) ^ (value >> 32)) % TWO_64


class Dropout(nn.Module):
    """Dropout whose masks follow from the global position."""

    def __init__(self, probability: float, site: str) -> None:
        """site: a name that no other dropout of the model has."""
        super().__init__()
        self.probability, self.site = probability, site

    def forward(self, x: Tensor, begin: int = 0, total: int | None = None) -> Tensor:
        """Drop elements of x [rows, …]. begin, total: the first index and the global size of
        dimension 1 where x has a part of it, as tensor ranks have some of the heads."""
        if _now is None or x.is_meta:  # outside of the engine's passes
            return F.dropout(x, self.probability, self.training)
        if not self.training or self.probability == 0.0:
            return x
        begins = [_now.first_row, begin, *[0] * (x.dim() - 2)]
        totals = [0, x.shape[1] if total is None else total, *x.shape[2:]]
        drawn = words(key_of(_now.seed, _now.step, self.site), x.shape, begins, totals, x.device)
        # as `uniform` < probability, without numbers in float64
        dropped = drawn < int((self.probability - 0.5) * 2.0**32)
        return x.masked_fill(dropped, 0.0) / (1.0 - self.probability)
