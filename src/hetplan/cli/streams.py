"""The standard streams as a shell may leave them: closed, full, read by nobody, or of a narrow
encoding."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import TextIO

from hetplan.errors import HetplanError, one_line


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
