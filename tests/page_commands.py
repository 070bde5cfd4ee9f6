"""Runs what a page's console blocks show, as a reader would, and compares what is printed.

`python tests/page_commands.py PAGE FILE` compares what a file holds with what the page's first
command prints.
"""

from __future__ import annotations

import doctest
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from markdown_pages import ROOT, Block, blocks

_LOOSE = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def prepare(page: Path, folder: Path) -> Path:
    """`folder` with the examples and with the files that the page has its reader write (`<!--
    file:NAME -->`)."""
    shutil.copytree(ROOT / "examples", folder / "examples")
    for block in blocks(page):
        kind, _, name = block.mark.partition(":")
        if kind == "file":
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(block.body, encoding="utf-8")
    return folder


def shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in `folder`, `hetplan` and `python` being this environment's; `evidence` is
    found there as at the root of the checkout."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    modules = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=os.environ | {"PATH": path, "PYTHONPATH": modules, "COLUMNS": "160"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def plain(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in `folder`. One of hetplan's that needs no shell is a fork of the process that
    serves the runs (`parity.served`), where torch is installed: it need not load hetplan again."""
    words = shlex.split(command, comments=True)
    if words[0] != "hetplan" or set(command) & set("&|;<>$") or find_spec("torch") is None:
        return shell(command, folder)
    from parity.asking import request, served

    more: dict[str, Any] = {"folder": str(folder), "environment": {"COLUMNS": "160"}}
    with TemporaryDirectory() as files:
        answer = served([request("page", *words[1:], **more)], Path(files), 1)["page"]
    return subprocess.CompletedProcess(words, answer["code"], answer["out"], answer["err"])


def same(shown: str, printed: str) -> bool:
    """Whether a page's text stands for what was printed: `...` for anything, blanks for blanks."""
    return doctest.OutputChecker().check_output(shown, printed, _LOOSE)


def run_as_shown(block: Block, folder: Path) -> None:
    """Every command of a console block ends well and prints what the page shows."""
    for command, shown in block.commands():
        ran = plain(command, folder)
        assert ran.returncode == 0, f"{command}\n{ran.stderr}"
        assert same(shown, ran.stdout), f"{command} prints\n{ran.stdout}\nbut the page\n{shown}"


def main(arguments: Sequence[str]) -> int:
    """0 where the file holds what the page's first command prints, else 1, and both texts."""
    page, printed = map(Path, arguments)
    command, shown = blocks(page, "console")[0].commands()[0]
    text = printed.read_text(encoding="utf-8")
    if same(shown, text):
        return 0
    print(f"{command} prints\n{text}\nbut {page} shows\n{shown}")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
