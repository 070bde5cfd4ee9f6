"""`hetplan schema`: the JSON schema of each kind of file."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from hetplan.cli import completion
from hetplan.cli.options import JsonOption
from hetplan.cli.output import print_json
from hetplan.errors import InputError


class Kind(StrEnum):
    """Files that have a schema."""

    INSTANCE = "instance"
    DECISION = "decision"
    PLAN = "plan"
    CLUSTER = "cluster"
    PROFILE = "profile"
    MODEL = "model"


# Kind -> the pydantic model of its file.
MODELS = {
    Kind.PLAN: "hetplan.runtime.plan:Plan",
    Kind.CLUSTER: "hetplan.profiling.cluster:ClusterFile",
    Kind.PROFILE: "hetplan.profiling.profile:Profile",
    Kind.MODEL: "hetplan.profiling.described:ModelFile",
}


def schema(
    kind: Annotated[Kind, typer.Argument(help="Which file.")],
    problem: Annotated[
        str | None,
        typer.Option(
            "--problem",
            help="For instance and decision: of one problem only.",
            autocompletion=completion.problems,
        ),
    ] = None,
    json: JsonOption = False,
) -> int:
    """Print the JSON schema of a file (JSON with and without --json)."""
    if problem is not None and kind not in (Kind.INSTANCE, Kind.DECISION):
        raise InputError(
            f"--problem does not go with schema {kind}", expected="instance or decision"
        )
    print_json(schema_document(kind, problem))
    return 0


def schema_document(kind: Kind, problem: str | None = None) -> dict[str, Any]:
    """The schema as JSON types; raises InputError for an unknown problem."""
    from hetplan.solvers.registry import load

    if kind is Kind.INSTANCE:
        from hetplan.instances.envelope import instance_schema

        return instance_schema(problem)
    if kind is Kind.DECISION:
        from hetplan.formulations import family

        if problem is None:
            raise InputError("schema decision needs --problem")
        document: dict[str, Any] = family(problem).load_decision().model_json_schema()
    else:
        document = load(MODELS[kind]).model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **document}
