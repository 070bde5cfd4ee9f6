"""`hetplan export`: a plan file in the words of Megatron-LM, DeepSpeed, torchtitan, FlagScale or
torchrun."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from hetplan.cli import completion
from hetplan.cli.output import check_target


def export(
    plan: Annotated[
        Path, typer.Argument(metavar="PLAN", help="A plan file, as `hetplan plan -o` writes it.")
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="megatron|deepspeed|torchtitan|flagscale|torchrun",
            help="Who is to run it.",
            autocompletion=completion.frameworks,
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to a file instead.")
    ] = None,
) -> int:
    """Print a plan as flags or configuration of a framework; what it cannot express is refused by
    name."""
    from hetplan.files import write_text
    from hetplan.runtime.export import export as written
    from hetplan.runtime.plan import load_plan

    check_target(output)
    text = written(load_plan(plan), to)
    if output is None:
        sys.stdout.write(text)
    else:
        write_text(output, text)
    return 0
