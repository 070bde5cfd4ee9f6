"""Where the packaged instances lie: their names and files, without reading or importing what reads
them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable

BEST = ".best.json"
INSTANCE = (".json.gz", ".json")


def shelved(root: Traversable | None = None) -> Iterator[tuple[str, str, Traversable, Traversable]]:
    """(problem, name, instance file, best-known record) of each instance, sorted by problem and
    file name.

    root: another library folder. The record need not exist.
    """
    top = root if root is not None else files("hetplan.instances") / "library"
    for folder in sorted((f for f in top.iterdir() if f.is_dir()), key=lambda f: f.name):
        for file in sorted(folder.iterdir(), key=lambda f: f.name):
            record = record_name(file.name)
            if record is not None:
                yield folder.name, record.removesuffix(BEST), file, folder / record


def record_name(file: str) -> str | None:
    """The name of the record beside an instance file; None for what is not named as one."""
    ending = next((e for e in INSTANCE if file.endswith(e)), None)
    return None if ending is None or file.endswith(BEST) else file.removesuffix(ending) + BEST
