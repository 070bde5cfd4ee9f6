"""Lengths of samples: from a file with one whole number per line, or from a published histogram."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetplan.errors import check_name, one_line, require
from hetplan.files import read_foreign_text, read_yaml
from hetplan.formulations.lengths.data import MOST_TOKENS
from hetplan.profiling.models.model import find_model
from hetplan.profiling.models.zoo import LONGEST_SEQUENCE

Ints = NDArray[np.int64]

# Number of lengths that stand for a histogram, each with the same share of the samples. Lengths
# that are rarer than one in SPREAD samples are left out.
SPREAD = 10_000


@dataclass(frozen=True)
class Lengths:
    """Lengths of samples, from which iterations draw theirs."""

    name: str  # file or name
    source: str
    tokens: Ints  # [n] ascending, of equal shares
    cut: float = 0.0  # the share of samples that were longer and are cut at the longest

    @property
    def mean(self) -> float:
        """Tokens of a sample in the mean."""
        return float(self.tokens.mean())

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return int(self.tokens[-1])

    def quantile(self, share: float) -> int:
        """The tokens that this share of the samples do not exceed."""
        return int(np.quantile(self.tokens, share, method="inverted_cdf"))

    def cut_at(self, most: int) -> "Lengths":
        """The lengths with those of longer samples cut to `most` tokens."""
        longer = float((self.tokens > most).mean())
        return replace(self, tokens=np.minimum(self.tokens, most), cut=max(self.cut, longer))

    def draw(self, count: int, seed: Sequence[int]) -> list[int]:
        """Tokens of `count` samples, drawn independently."""
        drawn: list[int] = np.random.default_rng(seed).choice(self.tokens, count).tolist()
        return drawn


@cache
def published() -> dict[str, Lengths]:
    """The published lengths, by name."""
    entries: dict[str, Any] = read_yaml(Path(__file__).with_name("published.yaml"))
    return {
        name: Lengths(name, entry["source"], spread(entry["edges"], entry["counts"]))
        for name, entry in entries.items()
    }


def spread(edges: Sequence[int], counts: Sequence[int]) -> Ints:
    """[SPREAD] lengths that stand for a histogram: within a bin they are evenly spread. The lengths
    of a bin are above its first edge, and reach its second one."""
    share = np.concatenate([[0.0], np.cumsum(counts) / sum(counts)])
    middles = (np.arange(SPREAD) + 0.5) / SPREAD
    return np.ceil(np.interp(middles, share, edges)).astype(np.int64)


def open_lengths(source: str) -> Lengths:
    """The lengths of a file, or published ones. A text without suffix and folder is a name where no
    file has that path. Raises InputError."""
    is_name = Path(source).name == source and not Path(source).suffix
    if is_name and not os.path.exists(source):
        check_name("neither a file nor published lengths:", source, published())
        return published()[source]
    return read_lengths(source)


def stated_lengths(numbers: Sequence[int]) -> Lengths:
    """The lengths of a list. Raises InputError for a number that is no length."""
    require(len(numbers) > 0, "there are no lengths", expected="one number of tokens per sample")
    for place, number in enumerate(numbers):
        require(
            isinstance(number, (int, np.integer)) and 1 <= number <= MOST_TOKENS,
            "is no length",
            where=f"lengths[{place}]",
            got=number,
            expected=f"a whole number of tokens from 1 to {MOST_TOKENS}",
        )
    return Lengths("a list", "a list", np.sort(np.array(numbers, np.int64)))


def lengths_for(model: str, lengths: Lengths, sequence: int | None) -> Lengths:
    """The lengths cut at `sequence`, or where that is None at the positions that the model has
    learned. Raises InputError for a model of images, and for samples beyond these positions.

    model: a built-in name or a config.json. sequence: tokens.
    """
    spec = find_model(model)
    require(spec.sequence is not None, "images have no lengths in tokens", where=spec.name)
    require(
        sequence is None or sequence > 0,
        "not usable",
        where="--sequence",
        got=sequence,
        expected="1 or more",
    )
    positions = 0 if spec.shape is None else spec.shape.positions
    usable = lengths.cut_at(sequence or positions or LONGEST_SEQUENCE)
    require(
        not positions or usable.longest <= positions,
        "samples are longer than the learned positions",
        where=spec.name,
        got=usable.longest,
        expected=f"at most {positions}, as --sequence {positions} cuts them",
    )
    return usable


def read_lengths(path: str) -> Lengths:
    """The lengths in a file: a whole number of tokens per line; empty lines are passed over. Raises
    InputError with the line of the first text that is none."""
    text = read_foreign_text(path)
    numbers = []
    for line, content in enumerate(text.splitlines(), 1):
        word = content.strip()
        if not word:
            continue
        usable = word.isascii() and word.isdecimal() and len(word) <= len(str(MOST_TOKENS))
        require(
            usable and 1 <= int(word) <= MOST_TOKENS,
            "is no length",
            where=f"{path}: line {line}",
            got=one_line(word)[:40],
            expected=f"a whole number of tokens from 1 to {MOST_TOKENS}",
        )
        numbers.append(int(word))
    require(numbers, "has no lengths", where=path, expected="one whole number per line")
    return Lengths(path, path, np.sort(np.array(numbers, np.int64)))
