"""Named sets of packaged instances, each a list of name patterns."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hetplan.instances.library import Entry

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


def in_set(entry: Entry, name: str) -> bool:
    """Whether `entry` belongs to the set, problem or pattern called `name`."""
    if name == entry.problem:
        return True
    full = f"{entry.problem}/{entry.name}"
    if name in SETS:
        return any(fnmatch.fnmatchcase(full, pattern) for pattern in SETS[name][1])
    return fnmatch.fnmatchcase(entry.name, name) or fnmatch.fnmatchcase(full, name)
