"""Makes the data of a step the same on all ranks that read the same rows, and compares them.

Every rank calls the user's code for the rows that it reads: the first stage for their inputs, the
last stage for their labels. So this code must draw the same random numbers on every rank. The
generators of Python, numpy and torch are seeded before the user's module is imported, before its
function is called, and again for each batch of a step.

No seed reaches random numbers from other sources: the operating system, a generator without a seed,
the rank's number, or an iterator that ranks advance differently. Therefore ranks compare checksums
of the data that they read. They do so in every step, since their data may begin to differ later, at
the end of an epoch, say. A comparison is one all-reduce of two numbers for each range of rows that
several ranks read. Where no two ranks of a plan read the same rows, nothing is compared.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetplan.errors import InputError, require
from hetplan.runtime.engine.position import key_of, splitmix64
from hetplan.runtime.engine.transport import gather_objects, host_least
from hetplan.schema import Range

LIMIT = 1 << 62  # checksums are smaller, so that their negatives are 64-bit numbers, too
WORD_BYTES = 8
LOW = (1 << 32) - 1  # mask of a word's low half
SHOWN = 4  # largest number of keys, of ranks, and of groups of ranks in an error
CHUNK = 1 << 16  # words that are multiplied at once: they fit into the cache of a core
HASHED_BYTES = 1 << 16  # size of the largest tensor whose bytes are hashed
# Types whose values have the same `repr` in every process.
SIMPLE = (bool, int, float, complex, str, bytes, type(None))


def seed_generators(seed: int, site: str) -> None:
    """Seed the global generators of Python, numpy and torch. site: a name for the code that draws
    next."""
    key = key_of(seed, 0, site)
    random.seed(key)
    # numpy's seeds have 32 bits
    np.random.seed(key % (1 << 32))  # noqa: NPY002 (users draw from the generator that numpy has)
    torch.manual_seed(key)


def used_gpus() -> list[int]:
    """The GPU whose generator of random numbers the user's code may draw from; none on a CPU."""
    return [torch.cuda.current_device()] if torch.cuda.is_initialized() else []


_keeps = False  # whether a context restores the generators: there is one set of them in a process


@contextmanager
def keeping_generators() -> Iterator[None]:
    """A context after which the global generators of Python, numpy and torch have their earlier
    states. Within another such context it does nothing, since to read and to write these states
    takes longer than to seed them."""
    global _keeps  # noqa: PLW0603 (as the generators)
    if _keeps:
        yield
        return
    python_state = random.getstate()
    numpy_state = np.random.get_state()  # noqa: NPY002 (as above)
    _keeps = True
    # `fork_rng` restores the CPU's generator and those of the GPUs
    with torch.random.fork_rng(used_gpus()):
        try:
            yield
        finally:
            _keeps = False
            random.setstate(python_state)
            np.random.set_state(numpy_state)  # noqa: NPY002


@contextmanager
def drawing_data(seed: int, step: int, first: int) -> Iterator[None]:
    """A context in which the global generators of Python, numpy and torch are seeded by seed, step
    and first row. After it, or after the `keeping_generators` around it, they have their earlier
    states."""
    key = key_of(seed, step, f"data {first}")
    with keeping_generators():
        random.seed(key)
        np.random.seed(key % (1 << 32))  # noqa: NPY002
        # `torch.manual_seed` would seed the generators of other GPUs, too
        torch.default_generator.manual_seed(key)
        if used_gpus():
            torch.cuda.manual_seed(key)
        yield


@dataclass(frozen=True)
class Reading:
    """A range of rows that several ranks read."""

    rows: Range  # [first, last) of the global batch
    ranks: tuple[int, ...]
    where: str  # a text for errors


def check_alike(
    step: int, readings: Sequence[Reading], rank: int, data: Callable[[int, int], Any]
) -> None:
    """Raise InputError on every rank where two ranks have different data of the same rows. All
    ranks call this together, with the same readings.

    data: (first, last) -> (inputs, targets) of these rows; called for the readings of this rank.
    """
    own: dict[Range, dict[str, int]] = {}  # rows -> this rank's checksums
    for reading in readings:
        if rank in reading.ranks:
            own[reading.rows] = checksums(data(*reading.rows))
    # [0] checksums, [1] their negatives: one minimum over the ranks gives the least and the largest
    totals = torch.full((2, len(readings)), LIMIT, dtype=torch.int64)
    for k, reading in enumerate(readings):
        if reading.rows in own:
            total = short_hash(repr(sorted(own[reading.rows].items())))
            totals[0, k], totals[1, k] = total, -total
    least, negative_most = host_least(totals)
    differences = least + negative_most
    # a difference of 0: all ranks that read these rows have the same checksum
    unequal = differences.nonzero().flatten().tolist()
    different = [readings[k] for k in unequal]
    if different:
        of_ranks = gather_objects(own.get(different[0].rows))
        readers = different[0].ranks
        raise difference(step, different[0], {reader: of_ranks[reader] for reader in readers})


def numbers_of_batch(
    step: int, paths: Sequence[str], read: Mapping[str, Iterable[float]]
) -> list[float]:
    """The numbers that the data give for the whole batch. All ranks call this together, with the
    same paths. Raises InputError on every rank where one differs from rows to rows.

    paths: paths of the numbers. read: path -> the values that this rank has read.
    """
    smallest = [min(read.get(path, ()), default=inf) for path in paths]
    negative_largest = [-max(read.get(path, ()), default=-inf) for path in paths]
    least, negative_most = host_least(torch.tensor([smallest, negative_largest]).double())
    for path, low, high in zip(paths, least.tolist(), (-negative_most).tolist(), strict=True):
        require(
            low >= high,
            "a number for the whole batch differs from rows to rows",
            where=f"step {step}, {path}",
            got=f"{low:g} and {high:g}",
            expected="one number for all rows of the step, those of other ranks included",
        )
    return [float(low) for low in least]


def difference(
    step: int, reading: Reading, of_ranks: Mapping[int, Mapping[str, int]]
) -> InputError:
    """The error of ranks that read different data. of_ranks: rank -> its checksums; they differ."""
    keys = sorted({key for checksums in of_ranks.values() for key in checksums})
    unequal = [key for key in keys if len({own.get(key) for own in of_ranks.values()}) > 1]
    ranks_with: dict[int | None, list[int]] = defaultdict(list)  # first unequal checksum -> ranks
    for rank, own in of_ranks.items():
        ranks_with[own.get(unequal[0])].append(rank)
    texts = [ranks_text(ranks) for ranks in list(ranks_with.values())[:SHOWN]]
    groups = " other than on ".join(texts)
    first, last = reading.rows
    return InputError(
        "ranks that read the same rows have different data: "
        f"{', '.join(unequal[:SHOWN])} on {groups}",
        where=f"step {step}, {reading.where}, rows {first} to {last}",
        expected="the same on all; is something drawn without a seed, or by rank?",
    )


def ranks_text(ranks: Sequence[int]) -> str:
    """The numbers of ranks as a text, "ranks 0, 1"; of many ranks the first ones."""
    shown = ", ".join(map(str, ranks[:SHOWN]))
    more = ", …" if len(ranks) > SHOWN else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"


def checksums(data: Any) -> dict[str, int]:
    """Path of a leaf of the data -> its checksum."""
    inputs, targets = data
    of_leaves = dict(leaf_checksums(inputs, "" if isinstance(inputs, Mapping) else "inputs"))
    if targets is not None:
        of_leaves |= dict(leaf_checksums(targets, "labels"))
    return of_leaves


def leaf_checksums(value: Any, path: str) -> Iterator[tuple[str, int]]:
    """(path, checksum) for each leaf of nested data. A leaf that is no tensor, array, number or
    text counts by its type alone, since its `repr` may differ from process to process."""
    if isinstance(value, Mapping):
        for key in value:
            yield from leaf_checksums(value[key], f"{path}.{key}".lstrip("."))
    elif isinstance(value, (tuple, list)):
        for number, item in enumerate(value):
            yield from leaf_checksums(item, f"{path}[{number}]")
    elif isinstance(value, Tensor):
        yield path, tensor_checksum(value)
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        yield path, tensor_checksum(torch.from_numpy(np.array(value)))
    elif isinstance(value, np.generic):
        yield path, short_hash(repr(value.item()))
    else:
        yield path, short_hash(repr(value) if isinstance(value, SIMPLE) else kind_of(value))


def kind_of(value: object) -> str:
    """The name of a value's type."""
    return type(value).__qualname__


def short_hash(text: str) -> int:
    """A hash of a text, below `LIMIT`."""
    return int.from_bytes(blake2b(text.encode(), digest_size=WORD_BYTES).digest()) % LIMIT


def tensor_checksum(x: Tensor) -> int:
    """A checksum of shape, type and every bit of a tensor.

    The bytes of a small tensor, such as a micro-batch of words, are hashed on the host. For a large
    one that would take longer than the sum below, which takes at least as long as ten small hashes.

    The checksum of a large tensor is the sum modulo 2^64 of all words of 8 bytes, each times an odd
    factor for its place. The factor is that of the place in a chunk of CHUNK words times that of
    the chunk. Sums of more than CHUNK chunks are added up in the same way again. Each level has
    factors of its own: with the same ones, the second word of the first chunk and the first word of
    the second would be alike.

    Modulo 2^64, the high bits of a word reach only the high bits of its product. A round
    floating-point number has zeros in all low bits, so the low bits of a sum of such words would be
    0 whatever the numbers. Therefore exclusive or first puts the high half of a word into its low
    half, too.
    """
    shape_and_type = f"{tuple(x.shape)} {x.dtype}"
    if x.layout != torch.strided:
        x = x.to_dense()
    flat = x.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if len(flat) <= HASHED_BYTES:
        digest = blake2b(flat.cpu().numpy(), digest_size=WORD_BYTES).hexdigest()
        return short_hash(f"{shape_and_type} {digest}")
    bytes_in_words = len(flat) // WORD_BYTES * WORD_BYTES
    total = 0
    if bytes_in_words:
        is_aligned = flat.storage_offset() % WORD_BYTES == 0
        words = (flat if is_aligned else flat.clone())[:bytes_in_words].view(torch.int64)
        level, device = 0, str(x.device)
        factors = place_factors(device, level)
        folded = (part ^ ((part >> 32) & LOW) for part in words.split(CHUNK))
        sums = torch.stack([(part * factors[: len(part)]).sum() for part in folded])
        while len(sums) > 1:
            level += 1
            factors = place_factors(device, level)
            parts = sums.split(CHUNK)
            sums = torch.stack([(part * factors[: len(part)]).sum() for part in parts])
        total = int(sums)
    return short_hash(f"{shape_and_type} {total} {flat[bytes_in_words:].tolist()}")


@cache
def place_factors(device: str, level: int = 0) -> Tensor:
    """[CHUNK] odd pseudo-random numbers, one for each place of a word, or of a sum of a level."""
    first = level * CHUNK
    return splitmix64(torch.arange(first, first + CHUNK, device=device)) | 1
