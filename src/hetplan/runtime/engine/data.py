"""The data of a step, the same on all ranks that read the same rows.

Every rank calls the user's code for the rows that it reads: the first stage for their inputs, the
last one for their labels. So what that code draws has to be the same on every rank. Python's,
numpy's and torch's own generators are seeded before the user's module is imported, before its
function is called, and again for each of a step's batches. What is drawn elsewhere (from the
operating system, by a generator without a seed, by the rank's number, from an iterator that ranks
advance differently) no seed reaches: a checksum of what each rank reads is compared in every step,
since ranks may agree in the first ones and part later, as at the end of an epoch. A comparison is
one all-reduce of two numbers for each set of rows that several ranks read; plans in which no two
ranks read the same rows compare nothing.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetplan.errors import InputError
from hetplan.runtime.engine.position import key_of, splitmix64
from hetplan.runtime.engine.transport import gather_objects, host_least
from hetplan.schema import Range

LIMIT = 1 << 62  # of checksums: their negatives are 64-bit numbers, too
WORD_BYTES = 8
LOW = (1 << 32) - 1
SHOWN = 4  # keys, ranks, and groups of ranks in an error
CHUNK = 1 << 16  # words that are multiplied at once: they fit into a core's own cache
SIMPLE = (bool, int, float, complex, str, bytes, type(None))  # their texts are the same everywhere


def seed_generators(seed: int, site: str) -> None:
    """Seed Python's, numpy's and torch's own generators. site: what draws next."""
    key = key_of(seed, 0, site)
    random.seed(key)
    np.random.seed(key % (1 << 32))  # noqa: NPY002 (users draw from the generator that numpy has)
    torch.manual_seed(key)


@contextmanager
def drawing_data(seed: int, step: int, first: int) -> Iterator[None]:
    """What is drawn inside from Python's, numpy's and torch's own generators follows from seed,
    step and first row; behind it the generators are what they were."""
    key = key_of(seed, step, f"data {first}")
    python, arrays = random.getstate(), np.random.get_state()  # noqa: NPY002 (as above)
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(gpus):
        random.seed(key)
        np.random.seed(key % (1 << 32))  # noqa: NPY002
        torch.default_generator.manual_seed(key)
        if gpus:
            torch.cuda.manual_seed(key)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)  # noqa: NPY002


@dataclass(frozen=True)
class Reading:
    """Rows [first, last) of the global batch that several ranks read. where: for people."""

    rows: Range
    ranks: tuple[int, ...]
    where: str


def check_alike(
    step: int, readings: Sequence[Reading], rank: int, data: Callable[[int, int], Any]
) -> None:
    """Raise InputError on every rank where one has other data of some rows than another. All ranks
    together, with the same readings; each reads those of its own alone."""
    own = {one.rows: checksums(data(*one.rows)) for one in readings if rank in one.ranks}
    both = torch.full((2, len(readings)), LIMIT, dtype=torch.int64)
    for k, reading in enumerate(readings):
        if reading.rows in own:
            total = short_digest(repr(sorted(own[reading.rows].items())))
            both[0, k], both[1, k] = total, -total
    least, negative_most = host_least(both)
    different = [one for one, k in zip(readings, least + negative_most, strict=True) if k]
    if different:
        told = gather_objects(own.get(different[0].rows))
        raise difference(step, different[0], {rank: told[rank] for rank in different[0].ranks})


def difference(step: int, reading: Reading, told: Mapping[int, Mapping[str, int]]) -> InputError:
    """The error of ranks that read different data. told: rank -> its checksums, which differ."""
    keys = sorted({key for checksums in told.values() for key in checksums})
    unequal = [key for key in keys if len({own.get(key) for own in told.values()}) > 1]
    alike: dict[int | None, list[int]] = defaultdict(list)
    for rank, own in told.items():
        alike[own.get(unequal[0])].append(rank)
    groups = " other than on ".join(ranks_text(ranks) for ranks in list(alike.values())[:SHOWN])
    first, last = reading.rows
    return InputError(
        "ranks that read the same rows have different data: "
        f"{', '.join(unequal[:SHOWN])} on {groups}",
        where=f"step {step}, {reading.where}, rows {first} to {last}",
        expected="the same on all; is something drawn without a seed, or by rank?",
    )


def ranks_text(ranks: Sequence[int]) -> str:
    """For people; of many the first ones."""
    shown = ", ".join(map(str, ranks[:SHOWN]))
    more = ", …" if len(ranks) > SHOWN else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"


def checksums(data: Any) -> dict[str, int]:
    """Path of a leaf -> a number that says which values it has."""
    inputs, targets = data
    found = dict(leaf_checksums(inputs, "" if isinstance(inputs, Mapping) else "inputs"))
    return found if targets is None else found | dict(leaf_checksums(targets, "labels"))


def leaf_checksums(value: Any, path: str) -> Iterator[tuple[str, int]]:
    """Of nested data. Of what is neither tensor, array nor number or text, only the type counts: it
    may be written differently by every process."""
    if isinstance(value, Mapping):
        for key in value:
            yield from leaf_checksums(value[key], f"{path}.{key}".lstrip("."))
    elif isinstance(value, (tuple, list)):
        for number, one in enumerate(value):
            yield from leaf_checksums(one, f"{path}[{number}]")
    elif isinstance(value, Tensor):
        yield path, tensor_checksum(value)
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        yield path, tensor_checksum(torch.from_numpy(np.array(value)))
    elif isinstance(value, np.generic):
        yield path, short_digest(repr(value.item()))
    else:
        yield path, short_digest(repr(value) if isinstance(value, SIMPLE) else kind_of(value))


def kind_of(value: object) -> str:
    """The name of a value's type."""
    return type(value).__qualname__


def short_digest(text: str) -> int:
    """A number below `LIMIT` from a text."""
    return int.from_bytes(blake2b(text.encode(), digest_size=WORD_BYTES).digest()) % LIMIT


def tensor_checksum(x: Tensor) -> int:
    """Of shape, type and every bit: the sum of all words, each times an odd number of its place, in
    64 bits. Products lose a word's high bits, the only ones of round floating-point numbers: they
    are added to the low ones before."""
    shown = f"{tuple(x.shape)} {x.dtype}"
    if x.layout != torch.strided:
        x = x.to_dense()
    flat = x.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    whole = len(flat) // WORD_BYTES * WORD_BYTES
    total = 0
    if whole:
        aligned = flat.storage_offset() % WORD_BYTES == 0
        words = (flat if aligned else flat.clone())[:whole].view(torch.int64)
        factors = place_factors(str(x.device))
        folded = (part ^ ((part >> 32) & LOW) for part in words.split(CHUNK))
        sums = [(part * factors[: len(part)]).sum() for part in folded]
        total = int((torch.stack(sums) * factors[: len(sums)]).sum())
    return short_digest(f"{shown} {total} {flat[whole:].tolist()}")


@cache
def place_factors(device: str) -> Tensor:
    """[CHUNK] odd numbers, as if drawn."""
    return splitmix64(torch.arange(CHUNK, device=device)) | 1
