"""Device types by the names that drivers and labels of nodes give them.

A driver's name is compared word by word. Words that say nothing of the product (`NVIDIA`,
`GeForce`) are left out, and words of memory (`80GB`) are compared as sizes. Every other word
counts: a `3090 Ti`, an `H200 NVL` and a slice of an A100 are other products than the device whose
name they contain. A name with a word that the catalogue does not know is refused with the nearest
types.
"""

import re
from collections.abc import Iterator
from functools import cache

from hetplan.errors import InputError, nearest
from hetplan.profiling.hardware.cluster import GIB, catalogue, catalogue_file

# A device's memory may differ from the nominal one by less than this share: drivers keep some.
TOLERANCE = 0.1
WORD = re.compile(r"[a-z0-9]+(?:\.[a-z0-9]+)?")
MEMORY_WORD = re.compile(r"(\d+)(?:gb|gib|g)")
# Words that say nothing of the product.
EMPTY_WORDS = frozenset(
    (
        *("amd", "intel", "nvidia", "corporation"),
        *("geforce", "instinct", "tesla"),
        *("accelerator", "edition", "generation", "gpu", "graphics"),
    )
)
SLICE = re.compile(r"\bmig\b|(?<![a-z0-9])\d+g\.\d+gb\b")
# What parts of a name say of a device that is none of the catalogue's.
SPECIAL = (
    (SLICE, "a slice (MIG) of a device"),
    (re.compile(r"-\d+[qcab]\b|\bgrid\b|\bvgpu\b"), "a virtual GPU, a share of a device"),
    (re.compile(r"-shared\b"), "a device that several containers share"),
    (re.compile(r"\blaptop\b|\bmobile\b|max-q"), "a device held to fewer watts"),
)


def catalogued(name: str, memory_bytes: float | None) -> str | None:
    """The catalogue's name of the device that its driver calls `name`; None where none matches, and
    where several do.

    An entry matches where all words but those of memory are the same, and where the memory is that
    of the entry. The memory is `memory_bytes`, where they are known. A size among the words of the
    name has to be right as well, unless the catalogue has the name with this size. memory_bytes:
    bytes that the driver reports; None where it is not known.
    """
    matches = matching(name, memory_bytes)
    return matches[0] if len(matches) == 1 else None


def matching(name: str, memory_bytes: float | None) -> list[str]:
    """The catalogue's names of all devices that `catalogued` describes as matching.

    Where the memory is not known, a whole name of the catalogue counts before names that differ in
    words of memory.
    """
    words = significant_words(name)
    as_a_whole: list[str] = []
    without_sizes: list[str] = []
    for entry, known in known_names():
        if words == known:
            if memory_bytes is None or has_memory(entry, [memory_bytes / GIB]):
                as_a_whole.append(entry)
        elif product_words(words) == product_words(known):
            sizes = memory_sizes(words)
            if memory_bytes is not None:
                sizes.append(memory_bytes / GIB)
            if has_memory(entry, sizes):
                without_sizes.append(entry)
    matches = [*as_a_whole, *without_sizes]
    if memory_bytes is None and as_a_whole:
        matches = as_a_whole
    return list(dict.fromkeys(matches))


def has_memory(entry: str, sizes: list[float]) -> bool:
    """Whether all sizes, in GiB, are the memory of the catalogue's entry."""
    nominal = catalogue()[entry].memory_gib
    return all(abs(size / nominal - 1) < TOLERANCE for size in sizes)


def unrecognised(name: str, memory_bytes: float | None, *, where: str) -> InputError:
    """The error for a driver's name that `catalogued` does not resolve: it says why, and which
    types of the catalogue are near. where: the file or host that the message is about."""
    matches = matching(name, memory_bytes)
    if matches:
        what = "several devices of the catalogue have that name"
        return InputError(what, where=where, got=name, expected=f"one of {', '.join(matches)}")
    what = "the catalogue has no such device"
    meanings = [meaning for pattern, meaning in SPECIAL if pattern.search(name.lower())]
    if meanings:
        what = f"{what}: this is {meanings[0]}"
    elif same_product(name):
        what = f"{what}: it has other memory than {', '.join(same_product(name))}"
    got = name
    if memory_bytes is not None:
        got = f"{name}, {memory_bytes / GIB:.4g} GiB"
    near = near_types(name)
    expected = "--device NAME, or of several types '--device NAME=TYPE,…' with the name got here"
    if near:
        expected += f"; near, but other products, are {', '.join(near)}"
    return InputError(what, where=where, got=got, expected=expected)


def is_slice(name: str) -> bool:
    """Whether a name is that of a slice (MIG) of a device."""
    return SLICE.search(name.lower()) is not None


def same_product(name: str) -> list[str]:
    """The types of the catalogue that have the driver's name but for memory."""
    product = product_words(significant_words(name))
    return list(
        dict.fromkeys(entry for entry, known in known_names() if product_words(known) == product)
    )


def near_types(name: str, most: int = 4) -> list[str]:
    """The types of the catalogue that are near to a driver's name, the nearest first: those whose
    words stand in it, or else those that share a word with digits, or those with the most similar
    names."""
    words = significant_words(name).split()
    product = product_words(" ".join(words))
    contained: dict[str, int] = {}  # type -> letters of the longest of its names
    related: list[str] = []
    for entry, known in known_names():
        known_words = [word for word in known.split() if not MEMORY_WORD.fullmatch(word)]
        letters = len("".join(known_words))
        if set(known_words) <= set(words) or begins(product, "".join(known_words)):
            contained[entry] = max(contained.get(entry, 0), letters)
        numbered = {word for word in known_words if any(map(str.isdigit, word))}
        if numbered & set(words):
            related.append(entry)
    if contained:
        longest = max(contained.values())
        return [entry for entry, letters in contained.items() if letters == longest][:most]
    return list(dict.fromkeys(related))[:most] or nearest(product, catalogue(), most)


def begins(product: str, known: str) -> bool:
    """Whether a product's name begins with a known one that is whole there: `t4g` with `t4`, but
    not `a100x` with `a10`."""
    rest = product.removeprefix(known)
    return rest != product and not rest[:1].isdecimal()


@cache
def known_names() -> tuple[tuple[str, str], ...]:
    """(type, significant words of a name of it) for the catalogue's own and its further names."""
    return tuple(_known_names())


def is_known(name: str) -> bool:
    """Whether some entry of the catalogue has this name but for words of memory."""
    return product_words(significant_words(name)) in _known_products()


@cache
def _known_products() -> frozenset[str]:
    return frozenset(product_words(known) for _, known in known_names())


def _known_names() -> Iterator[tuple[str, str]]:
    further = catalogue_file().driver_names
    for entry in catalogue():
        for name in (entry, *further.get(entry, ())):
            yield entry, significant_words(name)


def significant_words(name: str) -> str:
    """The words of a name that say something of the product, with one blank between them."""
    words = WORD.findall(name.lower())
    return " ".join(word for word in words if word not in EMPTY_WORDS)


def product_words(words: str) -> str:
    """The words that are no words of memory, written as one: drivers, labels and hetplan divide
    some names differently (`RTX 2080 Ti`, `RTX-2080Ti`, `rtx2080ti`)."""
    return "".join(word for word in words.split() if not MEMORY_WORD.fullmatch(word))


def memory_sizes(words: str) -> list[float]:
    """The sizes of memory that stand among the words, in GiB. Names say GB for them; where GB are
    meant, the difference is within `TOLERANCE`."""
    matches = (MEMORY_WORD.fullmatch(word) for word in words.split())
    return [float(match[1]) for match in matches if match]
