"""`hetplan import`: others' profiles, models and systems as hetplan's files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetplan.cli.options import JsonOption
from hetplan.cli.output import check_target, note, print_json, print_tables
from hetplan.errors import InputError
from hetplan.text import Table, bytes_text, seconds_text

if TYPE_CHECKING:
    from hetplan.profiling.importers.common import Imported

LARGEST = 10**6


def import_(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND",
            help="sailor, pipedream, piper, dnn-partitioning, metis, calculon or deepspeed.",
        ),
    ],
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="The file (of some kinds: the folder) to read.")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write hetplan's file.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="NAME", help="The model's (of systems: the cluster's) name."
        ),
    ] = None,
    device_type: Annotated[
        str | None,
        typer.Option("--device-type", metavar="NAME", help="The device's name in cluster files."),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option("--precision", metavar="fp16|bf16|fp32", help="In which it was measured."),
    ] = None,
    sequence: Annotated[
        int | None, typer.Option("--sequence", metavar="N", help="Tokens per sample.")
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option("--micro-batch", metavar="N", help="Samples of one measured pass.")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", metavar="N", help="Nodes, of a system; default 1.")
    ] = None,
    json: JsonOption = False,
) -> int:
    """Turn what another planner or profiler wrote into a profile, a model or a cluster file.

    What a file does not tell has options; what is assumed instead is told.
    """
    from hetplan.names import unknown_name
    from hetplan.profiling.importers import import_file
    from hetplan.profiling.importers.common import Settings
    from hetplan.profiling.precision import PRECISIONS

    check_target(output)
    if precision is not None and precision not in PRECISIONS:
        raise unknown_name("unknown precision", precision, PRECISIONS, where="--precision")
    for option, text in (("--model", model), ("--device-type", device_type)):
        if text is not None and not 1 <= len(text) <= 200:
            raise InputError("not usable", where=option, got=text, expected="1 to 200 characters")
    for option, number in (
        ("--sequence", sequence),
        ("--micro-batch", micro_batch),
        ("--nodes", nodes),
    ):
        if number is not None and not 1 <= number <= LARGEST:
            raise InputError("not usable", where=option, got=number, expected=f"1 to {LARGEST}")
    found = import_file(
        kind,
        path,
        Settings(model, device_type, precision, sequence, micro_batch, nodes),
    )
    if output is not None:
        write(found, output)
    for line in found.notes:
        note(line)
    if json:
        print_json(found.document)
    else:
        print_tables([summary(found, output)])
    return 0


def write(found: Imported, path: Path) -> None:
    """JSON, or YAML for a cluster (JSON is YAML, but people edit these)."""
    from hetplan.files import to_json, write_text

    if found.kind != "cluster":
        write_text(path, to_json(found.document))
        return
    import yaml

    write_text(path, yaml.safe_dump(found.document, sort_keys=False))


def summary(found: Imported, path: Path | None) -> Table:
    """What was read: tables of a profile, or the entries of the others."""
    where = "" if path is None else f", written to {path}"
    document = found.document
    if found.kind != "profile":
        entries = tuple((key, str(value)) for key, value in plain(document).items())
        return Table(f"{found.kind}{where}", ("key", "value"), entries)
    rows = tuple(
        (
            table["device"],
            str(table["tensor"]),
            str(table["micro_batch"]),
            seconds_text(sum(table["forward_seconds"])),
            seconds_text(sum(table["backward_seconds"])),
        )
        for table in document["tables"]
    )
    params = bytes_text(sum(layer["param_bytes"] for layer in document["layers"]))
    title = f"profile of {document['model']}, {len(document['layers'])} layers, {params} of parameters{where}"
    return Table(
        title, ("device", "tensor", "micro-batch", "forward", "backward"), rows, right=(1, 2, 3, 4)
    )


def plain(document: dict[str, Any]) -> dict[str, Any]:
    """The document with the entries of its one list of objects beside its own."""
    flat: dict[str, Any] = {}
    for key, value in document.items():
        if isinstance(value, list) and len(value) == 1:
            flat |= {f"{key}[0].{inner}": entry for inner, entry in value[0].items()}
        else:
            flat[key] = value
    return flat
