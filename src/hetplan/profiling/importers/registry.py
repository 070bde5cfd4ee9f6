"""Kinds of files that can be imported, and where their readers are."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from hetplan.names import unknown_name
from hetplan.profiling.importers.common import Imported, Settings

Reader = Callable[[str, Settings], Imported]


@dataclass(frozen=True)
class Source:
    """target: module:function of the reader. what: what PATH is, in words."""

    target: str
    what: str


PACKAGE = "hetplan.profiling.importers"
SOURCES = {
    "sailor": Source(
        f"{PACKAGE}.sailor:read", "profile.json, its folder, or a model's folder of such"
    ),
    "pipedream": Source(f"{PACKAGE}.pipedream:read", "graph.txt"),
    "piper": Source(f"{PACKAGE}.piper:read", "JSON graph with times per tensor degree"),
    "dnn-partitioning": Source(
        f"{PACKAGE}.dnn_partitioning:read", "JSON graph of operators or layers"
    ),
    "metis": Source(f"{PACKAGE}.metis:read", "DeviceType.*_tp*_bs*.json, or a folder of such"),
    "calculon": Source(f"{PACKAGE}.calculon:read", "a model's or a system's JSON"),
    "deepspeed": Source(f"{PACKAGE}.deepspeed:read", "printed output of the flops profiler"),
}
KINDS = tuple(SOURCES)


def import_file(kind: str, path: str | os.PathLike[str], settings: Settings) -> Imported:
    """Read `path` as a file of that kind; raises InputError with file, place, got and expected."""
    if kind not in SOURCES:
        raise unknown_name("unknown kind of file", kind, KINDS)
    module, _, name = SOURCES[kind].target.partition(":")
    reader: Reader = getattr(import_module(module), name)
    return reader(os.fspath(path), settings)
