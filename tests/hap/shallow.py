"""The networks of `evidence.speed.hap_theories` with fewer blocks than were published: a block of a
kind and the next one have all that twelve have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from evidence.speed import hap_theories

PUBLISHED = 99  # blocks, more than any network has


@contextmanager
def shallow(blocks: int = 2) -> Iterator[None]:
    """Graphs and torch modules that are made inside have at most so many blocks."""
    published = hap_theories.sizes

    def sizes(layers: int, *more: Any) -> Any:
        return published(min(layers, blocks), *more)

    with patch.object(hap_theories, "sizes", sizes):
        yield
