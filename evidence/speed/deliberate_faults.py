"""Deliberate faults: each breaks one line of one source file, and the tests named beside it must
fail.

    python -m evidence.speed deliberate_faults [--only PART-OF-A-PATH] [--jobs N]

The faults stand in `deliberate_faults.json`: the file, the text to replace (it must occur exactly
once), what replaces it, why a user would mind, and the tests that are run: those of the default
layer, or of the layer that the entry names. Every fault is put into a fresh copy of the tracked
files; the checkout itself is not touched. A fault that no test notices is printed, and the exit
code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FAULTS = Path(__file__).with_suffix(".json")
SOURCE = Path("src", "hetplan")
PYTEST_TESTS_FAILED = 1


@dataclass(frozen=True)
class Fault:
    """One line broken on purpose.

    file: relative to src/hetplan, or to the root where it begins with `evidence/`. before: text
    that occurs once in it. after: what replaces it. why: what a user would suffer. tests: paths (or
    node ids) that pytest is given. layer: the marker of the tests that must notice it, "" for the
    default layer.
    """

    file: str
    before: str
    after: str
    why: str
    tests: list[str]
    layer: str = ""

    def path(self, root: Path) -> Path:
        """The file to break, in a checkout."""
        return root / self.file if self.file.startswith("evidence/") else root / SOURCE / self.file


def read_faults() -> list[Fault]:
    """All faults of `deliberate_faults.json`."""
    return [Fault(**row) for row in json.loads(FAULTS.read_text(encoding="utf-8"))]


def copy_of_the_checkout(folder: Path) -> None:
    """What git tracks, and the links at the root, in `folder`."""
    files = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    packed = subprocess.run(
        ["tar", "--null", "-T", "-", "-cf", "-"],
        cwd=ROOT,
        input=files,
        capture_output=True,
        check=True,
    )
    subprocess.run(["tar", "-xf", "-"], cwd=folder, input=packed.stdout, check=True)


def verdict(fault: Fault) -> str:
    """`caught`, or what went wrong."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_of_the_checkout(folder)
        path = fault.path(folder)
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if text.count(fault.before) != 1:
            return (
                f"stale: the text to break occurs {text.count(fault.before)} times, expected once"
            )
        path.write_text(text.replace(fault.before, fault.after), encoding="utf-8")
        layer = ["-m", fault.layer] if fault.layer else []
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, *layer, *fault.tests],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(folder / "src")},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode == PYTEST_TESTS_FAILED:
        return "caught"
    return f"NOT CAUGHT (pytest exit code {done.returncode}): {done.stdout.strip()[-200:]}"


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="faults whose file contains this text")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    faults = [fault for fault in read_faults() if arguments.only in fault.file]
    caught = 0
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for fault, said in zip(faults, pool.map(verdict, faults), strict=True):
            print(f"{fault.file}: {said}\n    {fault.why}", flush=True)
            caught += said == "caught"
    print(f"{caught} of {len(faults)} faults caught")
    return int(caught < len(faults))


if __name__ == "__main__":
    sys.exit(main())
