"""The packaged instances and what is known about each.

One instance is two files in `library/<problem>/`, both named after the instance:

    <name>.json or <name>.json.gz      the instance file itself
    <name>.best.json                   the best decision known, its objective, the proven bound, who
    found it

Adding an instance is adding these two files; nothing else lists them. The tests check every pair:
the instance validates, and the independent evaluator prices the stored decision as the record says.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from importlib.resources import as_file
from importlib.resources.abc import Traversable
from typing import Any, Final, Literal

from hetplan.files import read_json
from hetplan.instances.envelope import Instance, parse_instance
from hetplan.instances.shelf import shelved
from hetplan.names import unknown_name
from hetplan.schema import Name, NonNegative, StrictModel, check_header, parse
from hetplan.solvers.result import OPTIMAL_GAP, relative_gap

BEST_FORMAT: Final = "hetplan-best-known"
BEST_VERSION: Final = 1


class BestKnown(StrictModel):
    """What is known about one instance: the best decision and the best proven lower bound (None:
    none known).

    found_by, proved_by: method and version that gave the decision and the bound.
    """

    format: Literal["hetplan-best-known"]
    version: Literal[1]
    problem: Name
    instance: Name
    objective: NonNegative
    bound: NonNegative | None = None
    found_by: Name
    proved_by: Name | None = None
    note: str = ""
    decision: dict[str, Any]

    @property
    def gap(self) -> float | None:
        """(objective - bound) / objective; None without a bound."""
        return relative_gap(self.objective, self.bound)

    @property
    def status(self) -> str:
        """`optimal` where the bound proves it (gap <= 1e-6), else `feasible`."""
        return "optimal" if self.gap is not None and self.gap <= OPTIMAL_GAP else "feasible"


@dataclass(frozen=True)
class Entry:
    """One packaged instance, not yet read. `file` and `best_file` are resources of the package."""

    problem: str
    name: str
    file: Traversable
    best_file: Traversable

    def load(self) -> Instance:
        """The instance, checked; raises InputError."""
        return parse_instance(_read(self.file), where=f"{self.problem}/{self.file.name}")

    def best_known(self) -> BestKnown | None:
        """The record beside the instance, None where there is none; raises InputError."""
        if not self.best_file.is_file():
            return None
        where = f"{self.problem}/{self.best_file.name}"
        return parse_best_known(_read(self.best_file), where=where)


def parse_best_known(value: Any, *, where: str) -> BestKnown:
    """A best-known record from parsed JSON; raises InputError naming `where` and the place in
    it."""
    check_header(value, BEST_FORMAT, BEST_VERSION, where=where)
    return parse(BestKnown, value, where=where)


def library(
    problem: str | None = None, name: str | None = None, *, root: Traversable | None = None
) -> list[Entry]:
    """The packaged instances, sorted by problem and name; nothing is read yet.

    problem: only this one. name: only names that match this shell pattern. root: another library
    folder.
    """
    return [
        entry
        for entry in (Entry(*row) for row in shelved(root))
        if problem in (None, entry.problem)
        and (name is None or fnmatch.fnmatchcase(entry.name, name))
    ]


def find(name: str, *, root: Traversable | None = None) -> Entry | None:
    """The packaged instance called `name` or `problem/name`; None where there is none of that
    name."""
    for entry in library(root=root):
        if name in (entry.name, f"{entry.problem}/{entry.name}"):
            return entry
    return None


def load_from_library(name: str, *, root: Traversable | None = None) -> Instance:
    """The packaged instance called `name` or `problem/name`; raises InputError where there is
    none."""
    entry = find(name, root=root)
    if entry is None:
        names = [entry.name for entry in library(root=root)]
        raise unknown_name(
            "no such instance in the library:",
            name,
            names,
            see="a name from `hetplan instances list`",
        )
    return entry.load()


def _read(resource: Traversable) -> Any:
    with as_file(resource) as path:
        return read_json(path)
