"""Standard streams as a shell may leave them; JSON or tables on stdout, all else on stderr."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from hetplan.errors import HetplanError, one_line
from hetplan.files import to_json, write_text
from hetplan.text import Table

if TYPE_CHECKING:
    from rich.console import Console

# Where stdout is no terminal, nobody folds the lines: give tables room.
PLAIN_WIDTH = 160
# Between two columns; how wide a column of text is at most before it may be folded.
GUTTER, PROSE = 2, 32


class OutputError(HetplanError):
    """Standard output cannot be written: the disk is full, say, or it was closed."""

    exit_code = 2


class Output(io.TextIOWrapper):
    """Standard output whose failures say whose they are; that nobody reads stays a
    BrokenPipeError."""

    def write(self, text: str) -> int:
        """Like any text stream's; raises OutputError."""
        with self._named():
            return super().write(text)

    def flush(self) -> None:
        """Like any text stream's; raises OutputError."""
        with self._named():
            super().flush()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(f"standard output cannot be written: {error.strerror}") from None


def open_streams() -> None:
    """Open the streams that were closed, each in the direction in which using it fails.

    Their numbers would else go to the next files opened, and what a library prints would land in a
    plan. A closed standard error stays silent: there is nobody to tell.
    """
    if sys.stdin is None:
        sys.stdin = os.fdopen(os.open(os.devnull, os.O_WRONLY), "r", encoding="utf-8")
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w", encoding="utf-8")
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
    if type(sys.stdout) is io.TextIOWrapper:
        given = sys.stdout
        encoding, lines, through = given.encoding, given.line_buffering, given.write_through
        sys.stdout = Output(
            given.detach(),
            encoding,
            "backslashreplace",  # a name that the terminal cannot show is no reason to fail
            line_buffering=lines,
            write_through=through,
        )


def say(text: str) -> None:
    """A line on standard error; where that fails nobody can be told."""
    try:
        print(f"hetplan: {one_line(text)}", file=sys.stderr, flush=True)
    except OSError:
        drop(sys.stderr)


def drop(stream: TextIO) -> None:
    """Send what is left in a stream's buffer nowhere: flushed at exit it would fail once more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def emit(document: Any, tables: Iterable[Table], *, json: bool, output: Path | None = None) -> None:
    """A command's result: the document to a file, if one is named; to stdout with `json`, else the
    tables, which are not made before they are printed where `tables` is a generator."""
    write_document(output, document)
    if json:
        print_json(document)
    else:
        print_tables(tables)


def print_json(document: Any) -> None:
    """One JSON document on stdout (escaped where the terminal's encoding is not UTF-8)."""
    text = to_json(document)
    if (sys.stdout.encoding or "").lower().replace("-", "") != "utf8":
        text = "".join(c if ord(c) < 128 else _escaped(c) for c in text)
    sys.stdout.write(text)


def _escaped(character: str) -> str:
    units = character.encode("utf-16-be")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))


def print_tables(tables: Iterable[Table]) -> None:
    """Tables for people on stdout."""
    from rich.console import Console

    terminal = sys.stdout.isatty()
    console = Console(file=sys.stdout, width=None if terminal else PLAIN_WIDTH, highlight=False)
    for table in tables:
        _print_table(console, table)


def _print_table(console: Console, table: Table) -> None:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    headed = any(table.header)
    if table.title:
        console.print(Text(visible(table.title), style="bold"), soft_wrap=True)
    for columns in pieces(table, console.width) if table.header else ():
        grid = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, show_header=headed)
        grid.collapse_padding = True
        for i in columns:
            justify: Any = "right" if i in table.right else "left"
            grid.add_column(Text(table.header[i]), justify=justify, overflow="fold")
        for row in table.rows:
            grid.add_row(*(Text(visible(row[i])) for i in columns))
        console.print(grid)
    for note in table.notes:
        console.print(Text(visible(note)), soft_wrap=True)
    console.print()


def pieces(table: Table, width: int) -> list[list[int]]:
    """Columns of the tables to print, one below the other: all in one where they fit into `width`.

    Else each piece begins with the first column and takes on what fits beside it; only columns that
    are too wide even so are folded, as those of prose are.
    """
    widths = [
        max([len(name), *(max(map(len, visible(row[i]).split("\n"))) for row in table.rows)])
        for i, name in enumerate(table.header)
    ]
    widths = [
        min(one, PROSE) if i and i not in table.right else one for i, one in enumerate(widths)
    ]
    found: list[list[int]] = [[0]]
    taken = widths[0]
    for i in range(1, len(widths)):
        if taken + GUTTER + widths[i] > width and len(found[-1]) > 1:
            found.append([0])
            taken = widths[0]
        found[-1].append(i)
        taken += GUTTER + widths[i]
    return found


def visible(text: str) -> str:
    """`text` from a file without control characters, which would reach the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def note(text: str) -> None:
    """A line on stderr that is no error."""
    say(visible(text))


def write_document(path: Path | None, document: Any) -> None:
    """The document as a JSON file, atomically; nothing without a path."""
    if path is not None:
        write_text(path, to_json(document))
