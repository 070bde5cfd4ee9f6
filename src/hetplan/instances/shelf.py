"""Where the packaged instances lie, and the named sets of them, without reading or importing what
reads them."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable

BEST = ".best.json"
INSTANCE = (".json.gz", ".json")
# set -> (what it is, patterns of "problem/name").
SETS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "smoke": (
        "a tiny instance or two per problem: a study in a minute",
        ("*/tiny-*", "poplar/poplar-b-llama-0.5b-zero[03]", "hap/hap-chain-2x2"),
    ),
    "real": ("from measured profiles, others' and hetplan's own", ("*/real-*",)),
    "hard": (
        "small ones on which general solvers fail or heuristics are worst",
        ("*/hard-*",),
    ),
    "random": ("drawn from catalogued devices, published models, usual networks", ("*/random-*",)),
    "scaling": ("one axis at a time: layers, devices, types, batch", ("*/scaling-*",)),
    "papers": (
        "the experiments of the five papers that can be posed",
        (
            *("amp/amp-*", "astra/*-a800-*", "ditto/ditto-ex*", "poplar/poplar-*"),
            *("hap/hap-vgg19-*", "hap/hap-vit-*", "hap/hap-bert-*"),
        ),
    ),
}


def shelved() -> Iterator[tuple[str, str, Traversable, Traversable]]:
    """(problem, name, instance file, best-known record) of each instance, sorted by problem and
    file name.

    The record need not exist.
    """
    top = files("hetplan.instances") / "library"
    for folder in sorted((f for f in top.iterdir() if f.is_dir()), key=lambda f: f.name):
        for file in sorted(folder.iterdir(), key=lambda f: f.name):
            record = record_name(file.name)
            if record is not None:
                yield folder.name, record.removesuffix(BEST), file, folder / record


def record_name(file: str) -> str | None:
    """The name of the record beside an instance file; None for what is not named as one."""
    ending = next((e for e in INSTANCE if file.endswith(e)), None)
    return None if ending is None or file.endswith(BEST) else file.removesuffix(ending) + BEST


def in_set(problem: str, instance: str, word: str) -> bool:
    """Whether an instance belongs to the set, problem or pattern called `word`."""
    full = f"{problem}/{instance}"
    if word == problem or fnmatch.fnmatchcase(instance, word):
        return True
    patterns = SETS[word][1] if word in SETS else (word,)
    return any(fnmatch.fnmatchcase(full, pattern) for pattern in patterns)
