"""Predictions held against measurements that others published.

    python -m evidence.truth SET DIR [--json] [--rank]     compares a set with its predictions
    python -m evidence.truth known                         runs whose whole configuration is public
    python -m evidence.truth table DIR                     the figures of every set
    python -m evidence.truth calibrate SET DIR             constants from some rows, for the others
    python -m evidence.truth sensitivity PLAN…             plans under profiles that are wrong

`docs/howto-truth.md` describes the sets and their files.
"""

import sys
from collections.abc import Sequence

from hetplan.cli.commands import CommandEntry, Group, make
from hetplan.cli.main import run_program

COMMANDS = {
    "compare": CommandEntry("command:compare_set"),
    "known": CommandEntry(
        "command:known", "Utilisation of well-known runs, published and predicted."
    ),
    "table": CommandEntry("command:table", "The figures of every published set at once."),
    "calibrate": CommandEntry(
        "calibrated:calibrate_rows", "Predict a set with constants of some of its rows."
    ),
    "sensitivity": CommandEntry(
        "sensitivity_command:sensitivity", "How plans fare when the profile is wrong."
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    commands = {name: make(name, entry, "evidence.truth") for name, entry in COMMANDS.items()}
    program = Group(
        "truth", "Hold predictions against what others measured.", commands, default="compare"
    )
    return run_program(program, "python -m evidence.truth", arguments)


if __name__ == "__main__":
    sys.exit(main())
