"""Instance files, and the library of those that come with hetplan.

An instance file is one envelope for every problem, with the family's own schema inside it:

    {"format": "hetplan-instance", "version": 1, "problem": "amp", "name": …, "origin": …, "data":
    {…}}

All numbers are SI (seconds, bytes, bytes per second, FLOP, FLOP per second); layers, devices and
stages count from 0; ranges are half open. `origin` says where the numbers come from: a paper's
table, a profile …

A packaged instance is two files in `library/<problem>/`, both named after the instance:

    <name>.json or <name>.json.gz      the instance file itself
    <name>.best.json                   the best decision known, its objective, the proven bound, who
    found it

Adding an instance is adding these two files; nothing else lists them. The tests check every pair:
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
BEST = ".best.json"
INSTANCE = (".json.gz", ".json")
# set -> (what it is, patterns of "problem/name").
SETS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "smoke": (
        "a tiny instance or two per problem: a study in a minute",
        (
            "[!j]*/tiny-*",
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
    """The envelope; `data` is checked against the schema of `problem` afterwards."""

    format: Literal["hetplan-instance"]
    version: Literal[1]
    problem: Name
    name: Name
    origin: str = Field(max_length=10_000)
    data: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A checked instance. `data`: a model of the family's data schema. `where`: its source, for
    messages."""

    problem: str
    name: str
    origin: str
    data: Any
    where: str = "instance"

    @property
    def family(self) -> Family:
        """The problem's schemas, evaluator and methods."""
        return family(self.problem)

    def document(self) -> dict[str, Any]:
        """The instance as it stands in a file (JSON types only)."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "problem": self.problem,
            "name": self.name,
            "origin": self.origin,
            "data": plain(self.data),
        }


def plain(model: BaseModel) -> dict[str, Any]:
    """A model as JSON types; optional parts that are absent stay absent."""
    return model.model_dump(mode="json", exclude_none=True)


def load_instance(path: str | os.PathLike[str]) -> Instance:
    """The instance in a JSON file (`.gz`: unpacked). Raises InputError naming file, place, got,
    expected."""
    return parse_instance(read_json(path), where=os.fspath(path))


def parse_instance(value: Any, *, where: str) -> Instance:
    """An instance from parsed JSON; `where` names its source in errors. Raises InputError."""
    check_header(value, FORMAT, VERSION, where=where)
    if isinstance(value.get("problem"), str):
        family(value["problem"], where=f"{where}: problem")
    envelope = parse(InstanceFile, value, where=where)
    return Instance(
        problem=envelope.problem,
        name=envelope.name,
        origin=envelope.origin,
        data=parse(
            family(envelope.problem).load_data(), envelope.data, where=where, prefix=("data",)
        ),
        where=where,
    )


def save_instance(instance: Instance, path: str | os.PathLike[str]) -> None:
    """Write `instance` atomically (`.gz`: packed); what stands there stays until the new file is
    whole."""
    write_text(path, to_json(instance.document()))


def instance_schema(problem: str | None = None) -> dict[str, Any]:
    """JSON schema of instance files: of one problem, or of all, told apart by `problem`."""
    names = [problem] if problem is not None else list(FAMILIES)
    envelopes, definitions = [], {}
    for name in names:
        own = family(name)
        envelope = InstanceFile.model_json_schema()
        envelope["title"] = f"{FORMAT} of problem {name}: {own.title}"
        envelope["properties"]["problem"] = {"const": name, "type": "string"}
        envelope["properties"]["data"] = {"$ref": f"#/$defs/{name}"}
        envelopes.append(envelope)
        reference = f"#/$defs/{name}/$defs/{{model}}"
        definitions[name] = own.load_data().model_json_schema(ref_template=reference)
    body = envelopes[0] if problem is not None else {"title": FORMAT, "oneOf": envelopes}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **body, "$defs": definitions}


BEST_FORMAT = "hetplan-best-known"


class BestKnown(Document):
    """The best-known record of one instance."""

    format: Literal["hetplan-best-known"] = "hetplan-best-known"
    version: Literal[1] = 1
    problem: Name
    instance: Name
    objective: NonNegative  # of the best decision
    bound: NonNegative | None = None  # the best proven lower bound
    found_by: Name  # method and version that gave the decision
    proved_by: Name | None = None  # and the bound
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
        return BestKnown.parsed(
            _read(self.best_file), where=f"{self.problem}/{self.best_file.name}"
        )


def library(problem: str | None = None, name: str | None = None) -> list[Entry]:
    """The packaged instances, sorted by problem and name; nothing is read yet.

    problem: only this one. name: only names that match this shell pattern.
    """
    return [
        entry
        for entry in _entries()
        if problem in (None, entry.problem) and fnmatch.fnmatchcase(entry.name, name or "*")
    ]


def _entries() -> Iterator[Entry]:
    """Every packaged instance; the record beside it need not exist."""
    top = files("hetplan.instances") / "library"
    for folder in sorted((f for f in top.iterdir() if f.is_dir()), key=lambda f: f.name):
        for file in sorted(folder.iterdir(), key=lambda f: f.name):
            record = record_name(file.name)
            if record is not None:
                yield Entry(folder.name, record.removesuffix(BEST), file, folder / record)


def entries_in(folder: Path) -> list[Entry]:
    """The instance files in a folder and below; other JSON may lie beside them."""
    named = [path for path in sorted(folder.rglob("*.json*")) if record_name(path.name) is not None]
    return [
        entry_of(path)
        for path, value in ((path, read_json(path)) for path in named)
        if isinstance(value, dict) and value.get("format") == FORMAT
    ]


def entry_of(path: Path) -> Entry:
    """The instance in a file, and the record beside it; raises InputError."""
    instance = load_instance(path)
    record = path.with_name(record_name(path.name) or f"{path.name}{BEST}")
    return Entry(instance.problem, instance.name, path, record)


def find(name: str) -> Entry | None:
    """The packaged instance called `name` or `problem/name`; None where there is none of that
    name."""
    return next((e for e in library() if name in (e.name, f"{e.problem}/{e.name}")), None)


def load_from_library(name: str, unknown: str = "no such instance in the library:") -> Instance:
    """The packaged instance called `name` or `problem/name`; raises InputError, which begins with
    `unknown`, where there is none."""
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


def _read(resource: Traversable) -> Any:
    with as_file(resource) as path:
        return read_json(path)
