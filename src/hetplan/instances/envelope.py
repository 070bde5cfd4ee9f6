"""The instance file: one envelope for every problem, the family's own schema inside it.

    {"format": "hetplan-instance", "version": 1, "problem": "amp", "name": …, "origin": …, "data":
    {…}}

All numbers are SI (seconds, bytes, bytes per second, FLOP, FLOP per second); layers, devices and
stages count from 0; ranges are half open. `origin` says where the numbers come from: a paper's
table, a profile …
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, Field

from hetplan.files import read_json, to_json, write_text
from hetplan.formulations import FAMILIES, family
from hetplan.schema import Name, StrictModel, check_header, parse
from hetplan.solvers.registry import Family

FORMAT = "hetplan-instance"
VERSION = 1


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
    data = parse(family(envelope.problem).load_data(), envelope.data, where=where, prefix=("data",))
    return Instance(
        problem=envelope.problem, name=envelope.name, origin=envelope.origin, data=data, where=where
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
