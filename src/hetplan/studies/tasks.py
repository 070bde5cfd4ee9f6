"""What a study has to do: one task per instance, method and seed, each with a key that names its
row."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetplan.errors import InputError
from hetplan.instances.envelope import Instance, load_instance
from hetplan.instances.library import Entry, find, library
from hetplan.instances.shelf import SETS, in_set, record_name
from hetplan.names import unknown_name
from hetplan.solvers.options import Options

ALL = "all"
HEURISTICS, EXACT = "heuristics", "exact-methods"


@dataclass(frozen=True)
class Subject:
    """An instance of the study."""

    instance: Instance
    best: float | None = None  # what the library knows of it, None where it is not the library's
    bound: float | None = None

    @property
    def digest(self) -> str:
        """Of problem, name and data: another file of the same name is another instance."""
        text = json.dumps(self.instance.document(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Task:
    """One solve, of JSON types: it travels to other processes and machines."""

    key: str
    set: str
    document: dict[str, Any]  # the instance file's content
    method: str
    options: dict[str, Any]  # as `Options.as_dict`
    best_known: float | None
    bound_known: float | None

    @property
    def name(self) -> str:
        """Of the instance."""
        return str(self.document["name"])

    @property
    def problem(self) -> str:
        """Of the instance."""
        return str(self.document["problem"])

    @property
    def time_limit(self) -> float | None:
        """Seconds for the solve."""
        limit = self.options["time_limit"]
        return None if limit is None else float(limit)


def subjects(names: Sequence[str]) -> Iterator[tuple[str, Subject]]:
    """(set, instance) of each name: a set of the library, a problem, an instance, a pattern, a
    file, a folder.

    Each instance once, under the first name that brings it. Raises InputError for a name that
    brings none.
    """
    seen: set[str] = set()
    for name in names:
        for subject in named(name):
            if subject.digest not in seen:
                seen.add(subject.digest)
                yield name, subject


def named(name: str) -> Iterator[Subject]:
    """The instances behind one name."""
    if os.path.isdir(name):
        files = sorted(p for p in Path(name).rglob("*.json*") if record_name(p.name) is not None)
        if not files:
            raise InputError("holds no instance files", where=name)
        yield from map(of_file, files)
        return
    if os.path.isfile(name):
        yield of_file(Path(name))
        return
    entry = find(name)
    entries = (
        [entry] if entry is not None else [e for e in library() if in_set(e.problem, e.name, name)]
    )
    if not entries:
        known = [*SETS, *dict.fromkeys(e.problem for e in library())]
        raise unknown_name(
            "neither a set, a problem, an instance, a pattern nor a file:", name, known
        )
    for one in entries:
        yield of_entry(one)


def of_entry(entry: Entry) -> Subject:
    """The instance with what its record says, if it has one."""
    best = entry.best_known()
    return (
        Subject(entry.load()) if best is None else Subject(entry.load(), best.objective, best.bound)
    )


def of_file(path: Path) -> Subject:
    """A file with the record beside it."""
    instance, record = load_instance(path), record_name(path.name)
    if record is None:
        return Subject(instance)
    return of_entry(Entry(instance.problem, instance.name, path, path.with_name(record)))


def tasks(
    names: Sequence[str], methods: Sequence[str], seeds: Sequence[int], options: Options
) -> Iterator[Task]:
    """One task per instance, method that its problem has, and seed; raises InputError for a method
    no problem has."""
    wanted = list(dict.fromkeys(methods))
    used: set[str] = set()
    for set_name, subject in subjects(names):
        chosen = chosen_methods(subject.instance, wanted)
        used.update(chosen, {word for word in wanted if word in (ALL, HEURISTICS, EXACT)})
        for method in chosen:
            for seed in seeds:
                own = {**options.as_dict(), "seed": seed}
                yield Task(
                    task_key(subject.digest, method, own),
                    set_name,
                    subject.instance.document(),
                    method,
                    own,
                    subject.best,
                    subject.bound,
                )
    for word in wanted:
        if word not in used:
            raise unknown_name(
                "no instance of the study has the method", word, sorted(used), where="--methods"
            )


def chosen_methods(instance: Instance, wanted: Sequence[str]) -> list[str]:
    """The family's methods among those wanted, in the family's order."""
    return [
        method.name
        for method in instance.family.methods
        if method.name in wanted
        or ALL in wanted
        or (EXACT if method.exact else HEURISTICS) in wanted
    ]


def task_key(digest: str, method: str, options: dict[str, Any]) -> str:
    """The same for the same solve, whatever else the study does: the name of its row."""
    text = json.dumps([digest, method, options], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]
