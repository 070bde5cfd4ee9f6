"""Reads and writes instance files, and lists the library of instances that come with hetplan.

The instance files of all problems share one envelope, whose `data` has the schema of the problem's
family:

    {"format": "hetplan-instance", "version": 1, "problem": "amp",
     "name": …, "origin": …, "data": {…}}

All numbers are SI (seconds, bytes, bytes per second, FLOP, FLOP per second); layers, devices and
stages count from 0; ranges are half open. `origin` says where the numbers come from: a paper's
table, a profile …

A packaged instance is two files in `library/<problem>/`, both named after the instance:

    <name>.json or <name>.json.gz   the instance file
    <name>.best.json                the best-known record: a decision, its objective, a proven
                                    bound, and the methods that found them

To add an instance, add these two files; nothing else lists them. The tests check every pair:
the instance validates, and the independent evaluator prices the stored decision as the record says.
"""

import fnmatch
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import as_file, files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

from hetplan.errors import unknown_name
from hetplan.files import read_json, to_json, write_text
from hetplan.formulations import FAMILIES, family
from hetplan.schema import Document, Name, NonNegative, StrictModel, check_header, parse
from hetplan.solvers.registry import Family
from hetplan.solvers.run import OPTIMAL_GAP, relative_gap

FORMAT, VERSION = "hetplan-instance", 1
BEST = ".best.json"  # the ending of the name of a best-known record
INSTANCE = (".json.gz", ".json")  # the endings of names of instance files
# The name of a set -> (its description, patterns of "problem/name").
SETS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "smoke": (
        "a tiny instance or two per problem: a study in a minute",
        (
            "[!j]*/tiny-*",  # of all problems but joint, whose tiny ones are many
            "joint/tiny-joint-gpt2-1",
            "poplar/poplar-b-llama-0.5b-zero[03]",
            "hap/hap-chain-2x2",
        ),
    ),
    "real": ("from measured profiles, others' and hetplan's own", ("*/real-*",)),
    "hard": (
        "small ones on which general solvers fail or heuristics are worst",
        ("*/hard-*",),
    ),
    "random": ("drawn from catalogued devices, published models, usual networks", ("*/random-*",)),
    "scaling": ("one axis at a time: layers, devices, types, batch", ("*/scaling-*",)),
    "joint": ("least replayed seconds: tiny, documented and large workloads", ("joint/*",)),
    "papers": (
        "the experiments of the five papers that can be posed",
        (
            *("amp/amp-*", "astra/*-a800-*", "ditto/ditto-ex*", "poplar/poplar-*"),
            *("hap/hap-vgg19-*", "hap/hap-vit-*", "hap/hap-bert-*"),
        ),
    ),
}


class InstanceFile(StrictModel):
    """The envelope of an instance file."""

    format: Literal["hetplan-instance"]
    version: Literal[1]
    problem: Name
    name: Name
    origin: str = Field(max_length=10_000)
    """The source of the numbers."""
    data: dict[str, Any]
    """`parse_instance` checks it by the schema of the problem's family."""


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A checked instance of a problem."""

    problem: str
    name: str
    origin: str  # where the numbers come from
    data: Any  # a model of the family's data schema
    where: str = "instance"  # the instance's source, for messages

    @property
    def family(self) -> Family:
        """The family of the problem: its schemas, evaluator and methods."""
        return family(self.problem)

    def document(self) -> dict[str, Any]:
        """The content of the instance's file, as JSON types."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "problem": self.problem,
            "name": self.name,
            "origin": self.origin,
            "data": plain(self.data),
        }


def plain(model: BaseModel) -> dict[str, Any]:
    """A pydantic model as JSON types, without the fields that are None."""
    return model.model_dump(mode="json", exclude_none=True)


def load_instance(path: str | os.PathLike[str]) -> Instance:
    """The instance in a JSON file, which may be packed (`.gz`). Raises InputError with file, place,
    got and expected."""
    return parse_instance(read_json(path), where=os.fspath(path))


def parse_instance(value: Any, *, where: str) -> Instance:
    """An instance from parsed JSON. where: the source's name in errors. Raises InputError."""
    check_header(value, FORMAT, VERSION, where=where)  # raises for what is no dictionary
    if isinstance(value.get("problem"), str):
        family(value["problem"], where=f"{where}: problem")  # raises for an unknown problem
    envelope = parse(InstanceFile, value, where=where)
    schema = family(envelope.problem).load_data()
    return Instance(
        problem=envelope.problem,
        name=envelope.name,
        origin=envelope.origin,
        data=parse(schema, envelope.data, where=where, prefix=("data",)),
        where=where,
    )


def save_instance(instance: Instance, path: str | os.PathLike[str]) -> None:
    """Write an instance file, packed where the name ends with `.gz`. The write is atomic: an
    existing file stays until the new one is complete."""
    write_text(path, to_json(instance.document()))


def instance_schema(problem: str | None = None) -> dict[str, Any]:
    """The JSON schema of a problem's instance files; None: of the instance files of all
    problems."""
    names = [problem] if problem is not None else list(FAMILIES)
    envelopes, definitions = [], {}
    for name in names:
        problem_family = family(name)
        envelope = InstanceFile.model_json_schema()
        envelope["title"] = f"{FORMAT} of problem {name}: {problem_family.title}"
        envelope["properties"]["problem"] = {"const": name, "type": "string"}
        envelope["properties"]["data"] = {"$ref": f"#/$defs/{name}"}
        envelopes.append(envelope)
        reference = f"#/$defs/{name}/$defs/{{model}}"
        data_schema = problem_family.load_data()
        definitions[name] = data_schema.model_json_schema(ref_template=reference)
    body = envelopes[0] if problem is not None else {"title": FORMAT, "oneOf": envelopes}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **body, "$defs": definitions}


BEST_FORMAT = "hetplan-best-known"


class BestKnown(Document):
    """The best-known record of one instance: the content of its `.best.json` file."""

    format: Literal["hetplan-best-known"] = "hetplan-best-known"
    version: Literal[1] = 1
    problem: Name
    instance: Name
    objective: NonNegative
    """The objective of `decision`."""
    bound: NonNegative | None = None
    """The best proven lower bound."""
    found_by: Name
    """Method and version that found the decision."""
    proved_by: Name | None = None
    """Method and version that proved the bound."""
    note: str = ""
    decision: dict[str, Any]
    """The best decision, in the schema of the problem's family."""

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
    """An instance file, of the package or of a folder, and the best-known record beside it."""

    problem: str
    name: str
    file: Traversable  # the instance file
    best_file: Traversable  # the best-known record, which need not exist

    def load(self) -> Instance:
        """The instance, read and checked. Raises InputError."""
        return parse_instance(_read(self.file), where=f"{self.problem}/{self.file.name}")

    def best_known(self) -> BestKnown | None:
        """The best-known record; None where there is none. Raises InputError."""
        if not self.best_file.is_file():
            return None
        return BestKnown.parsed(
            _read(self.best_file), where=f"{self.problem}/{self.best_file.name}"
        )


def library(problem: str | None = None, name: str | None = None) -> list[Entry]:
    """The packaged instances, sorted by problem and name; their files are not read.

    problem: only instances of this problem. name: only instances whose names match this shell
    pattern.
    """
    return [
        entry
        for entry in _entries()
        if (problem is None or problem == entry.problem)
        and fnmatch.fnmatchcase(entry.name, name or "*")
    ]


def _entries() -> Iterator[Entry]:
    """Every packaged instance, sorted by problem and file name."""
    top = files("hetplan.instances") / "library"
    folders = [entry for entry in top.iterdir() if entry.is_dir()]
    for folder in sorted(folders, key=lambda folder: folder.name):
        for file in sorted(folder.iterdir(), key=lambda file: file.name):
            record = record_name(file.name)
            if record is not None:
                yield Entry(folder.name, record.removesuffix(BEST), file, folder / record)


def entries_in(folder: Path) -> list[Entry]:
    """The instance files in a folder and its subfolders; other JSON files are skipped."""
    entries = []
    for path in sorted(folder.rglob("*.json*")):
        if record_name(path.name) is None:
            continue
        value = read_json(path)
        if isinstance(value, dict) and value.get("format") == FORMAT:
            entries.append(entry_of(path))
    return entries


def entry_of(path: Path) -> Entry:
    """The entry of an instance file, with the record beside it. Raises InputError for a file that
    is no valid instance."""
    instance = load_instance(path)
    # A user may name any file, even one whose name does not end as those of instance files do.
    record = path.with_name(record_name(path.name) or f"{path.name}{BEST}")
    return Entry(instance.problem, instance.name, path, record)


def find(name: str) -> Entry | None:
    """The packaged instance called `name` or `problem/name`; None where the library has no such
    instance."""
    for entry in library():
        if name in (entry.name, f"{entry.problem}/{entry.name}"):
            return entry
    return None


def load_from_library(name: str, unknown: str = "no such instance in the library:") -> Instance:
    """The packaged instance called `name` or `problem/name`, read and checked.

    Raises InputError where the library has no such instance. unknown: the beginning of its message.
    """
    entry = find(name)
    if entry is None:
        raise unknown_name(
            unknown,
            name,
            [entry.name for entry in library()],
            see="a name from `hetplan instances list`",
        )
    return entry.load()


def record_name(file: str) -> str | None:
    """The name of the best-known record beside an instance file; None for a file whose name is not
    that of an instance file."""
    if file.endswith(BEST):
        return None
    for ending in INSTANCE:
        if file.endswith(ending):
            return file.removesuffix(ending) + BEST
    return None


def in_set(problem: str, instance: str, word: str) -> bool:
    """Whether an instance belongs to the set, problem or pattern called `word`."""
    full_name = f"{problem}/{instance}"
    if word == problem or fnmatch.fnmatchcase(instance, word):
        return True
    patterns: tuple[str, ...] = (word,)
    if word in SETS:
        _, patterns = SETS[word]
    return any(fnmatch.fnmatchcase(full_name, pattern) for pattern in patterns)


def _read(resource: Traversable) -> Any:
    """The parsed JSON of a file, of the package or of a folder."""
    with as_file(resource) as path:
        return read_json(path)
