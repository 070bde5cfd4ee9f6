"""The cluster files that come with hetplan, by name; nothing is read here."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).with_name("clusters")


def example_clusters() -> tuple[str, ...]:
    """Names of the clusters that come with hetplan."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))
