"""The scripts of this folder, by name.

    python -m evidence.speed            lists them
    python -m evidence.speed NAME …     runs one, with its own arguments

A script runs in a process of its own, since several measure their own start and peak memory.
"""

import ast
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

USAGE = 2


def scripts() -> dict[str, str]:
    """Every script of this folder by name, with the first sentence of its docstring."""
    described = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        source = path.read_text(encoding="utf-8")
        if not path.name.startswith("_") and '__name__ == "__main__"' in source:
            described[path.stem] = first_paragraph(source)
    return described


def first_paragraph(source: str) -> str:
    """The first paragraph of a module's docstring, as one line."""
    docstring = ast.get_docstring(ast.parse(source)) or ""
    return " ".join(docstring.partition("\n\n")[0].split())


def listing(described: dict[str, str]) -> str:
    """One line for each script: its name, and what it does."""
    width = max(map(len, described))
    return "\n".join(f"{name:{width}}  {text}" for name, text in described.items())


def main(arguments: Sequence[str]) -> int:
    """List the scripts, or run the one that is named; returns the exit code."""
    described = scripts()
    if not arguments or arguments[0] in ("-h", "--help"):
        print(listing(described))
        return 0
    name, *rest = arguments
    if name not in described:
        names = ", ".join(described)
        print(f"evidence.speed: unknown script (got {name!r}, expected {names})", file=sys.stderr)
        return USAGE
    return subprocess.call([sys.executable, "-m", f"evidence.speed.{name}", *rest])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
