"""Where the packaged instances lie: their names and files, without reading or importing what reads them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable

BEST = ".best.json"
INSTANCE = (".json.gz", ".json")


def shelved(root: Traversable | None = None) -> Iterator[tuple[str, str, Traversable, Traversable]]:
    """(problem, name, instance file, best-known record) of each instance, sorted by problem and file name.

    root: another library folder. The record need not exist.
    """
    top = root if root is not None else files("hetplan.instances") / "library"
    for folder in sorted((f for f in top.iterdir() if f.is_dir()), key=lambda f: f.name):
        for file in sorted(folder.iterdir(), key=lambda f: f.name):
            ending = next((e for e in INSTANCE if file.name.endswith(e)), None)
            if ending is not None and not file.name.endswith(BEST):
                name = file.name.removesuffix(ending)
                yield folder.name, name, file, folder / f"{name}{BEST}"
