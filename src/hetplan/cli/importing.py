"""`hetplan profile import`: others' profiles, models and systems as hetplan's files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetplan.cli.options import JsonOption, require, target
from hetplan.cli.output import emit, note
from hetplan.cli.profile import checked
from hetplan.files import to_json, write_text
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
    output: Annotated[Path | None, target("--output", "-o", help="Write hetplan's file.")] = None,
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
    from hetplan.profiling.importers import import_file
    from hetplan.profiling.importers.common import Settings

    known = None if precision is None else checked(precision)
    for option, text in (("--model", model), ("--device-type", device_type)):
        require(text is None or 1 <= len(text) <= 200, option, text, "1 to 200 characters")
    for option, number in (
        ("--sequence", sequence),
        ("--micro-batch", micro_batch),
        ("--nodes", nodes),
    ):
        require(number is None or 1 <= number <= LARGEST, option, number, f"1 to {LARGEST}")
    settings = Settings(model, device_type, known, sequence, micro_batch, nodes)
    imported = import_file(kind, path, settings)
    if output is not None:
        write(imported, output)
    for line in imported.notes:
        note(line)
    emit(imported.document, [summary(imported, output)], json=json)
    return 0


def write(imported: Imported, path: Path) -> None:
    """JSON, or YAML for a cluster (JSON is YAML, but people edit these)."""
    if imported.kind != "cluster":
        write_text(path, to_json(imported.document))
        return
    import yaml

    write_text(path, yaml.safe_dump(imported.document, sort_keys=False))


def summary(imported: Imported, path: Path | None) -> Table:
    """What was read: tables of a profile, or the entries of the others."""
    where = "" if path is None else f", written to {path}"
    document = imported.document
    if imported.kind != "profile":
        entries = tuple((key, str(value)) for key, value in plain(document).items())
        return Table(f"{imported.kind}{where}", ("key", "value"), entries)
    params = bytes_text(sum(layer["param_bytes"] for layer in document["layers"]))
    return Table.of(
        f"profile of {document['model']}, {len(document['layers'])} layers, {params} of "
        f"parameters{where}",
        document["tables"],
        {
            "device": lambda table: table["device"],
            "tensor": lambda table: str(table["tensor"]),
            "micro-batch": lambda table: str(table["micro_batch"]),
            "forward": lambda table: seconds_text(sum(table["forward_seconds"])),
            "backward": lambda table: seconds_text(sum(table["backward_seconds"])),
        },
        right=(1, 2, 3, 4),
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
