"""What stands behind an argument: a file, standard input (`-`), or a name in the packaged library."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetplan.errors import InputError

if TYPE_CHECKING:
    from hetplan.instances.envelope import Instance


def read_document(argument: str) -> tuple[Any, str]:
    """Parsed JSON of a file or of standard input, and the name to use in errors; raises InputError."""
    from hetplan.files import MAX_BYTES, parse_json, read_json

    if argument != "-":
        return read_json(argument), argument
    content = sys.stdin.buffer.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise InputError("too large", where="stdin", expected=f"at most {MAX_BYTES} bytes")
    return parse_json(content, where="stdin"), "stdin"


def open_instance(argument: str) -> Instance:
    """The instance in a file, on standard input or in the library; raises InputError."""
    from hetplan.instances.envelope import parse_instance
    from hetplan.instances.library import find

    if argument != "-" and not Path(argument).exists():
        entry = find(argument)
        if entry is not None:
            return entry.load()
        if Path(argument).suffix not in (".json", ".gz"):
            raise InputError(
                f"neither a file nor an instance of the library{suggestion(argument)}", got=argument
            )
    value, where = read_document(argument)
    return parse_instance(value, where=where)


def suggestion(name: str) -> str:
    """The library's nearest name in words, or where to see them all."""
    import difflib

    from hetplan.instances.library import library

    near = difflib.get_close_matches(name, [entry.name for entry in library()], n=1)
    return f"; did you mean {near[0]}?" if near else "; `hetplan instances list` shows the names"


def complete_instance(incomplete: str) -> list[str]:
    """Names of the library that begin so, for shell completion."""
    from hetplan.instances.library import library

    return [entry.name for entry in library() if entry.name.startswith(incomplete)]
