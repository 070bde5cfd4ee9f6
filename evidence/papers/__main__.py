"""The five papers' tables and figures, each beside hetplan's.

    python -m evidence.papers amp|astra|ditto|hap|poplar [--name PATTERN] [--full] …

`docs/howto-papers.md` lists them, `docs/reproductions.md` says what they show.
"""

import sys
from collections.abc import Sequence

from hetplan.cli.commands import CommandEntry, Group, make
from hetplan.cli.main import run_program


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    report = make("report", CommandEntry("command:report"), "evidence.papers")
    program = Group(
        "papers", "Set a paper's figures beside hetplan's.", {"report": report}, default="report"
    )
    return run_program(program, "python -m evidence.papers", arguments)


if __name__ == "__main__":
    sys.exit(main())
