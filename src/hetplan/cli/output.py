"""Output of commands, and the display of long work.

Results go to stdout, as JSON or as tables; everything else goes to stderr. The streams may be
closed, or nobody may read them.

Long work runs on its own thread. Compiled kernels and solvers occupy the thread that they run on,
so that on the main thread Ctrl-C would have to wait for them. The first Ctrl-C sets the run's
`cancel`, and methods then return their incumbent; the second Ctrl-C aborts the program.
"""

import contextlib
import io
import json as json_module
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table as RichTable
from rich.text import Text

from hetplan.errors import HetplanError, one_line, printable
from hetplan.files import to_json, write_text
from hetplan.solvers.native import begin, over
from hetplan.solvers.run import Progress, Run
from hetplan.text import Table, number_text, percent_text, visible

if TYPE_CHECKING:
    from hetplan.planner.candidate import Candidate

PLAIN_WIDTH = 100  # characters of a line where stdout is no terminal
GUTTER = 2  # characters between two columns
# Characters: a column of text that is wider may be folded, so that three of them fit into a line.
PROSE = 32


class OutputError(HetplanError):
    """Standard output cannot be written: the disk is full, say, or it was closed."""

    exit_code = 2


class Output(io.TextIOWrapper):
    """Standard output that raises OutputError where it cannot be written. Where nobody reads it, it
    raises BrokenPipeError as any pipe does."""

    def write(self, text: str) -> int:
        """Write as any text stream does; raises OutputError."""
        with self._named():
            return super().write(text)

    def flush(self) -> None:
        """Flush as any text stream does; raises OutputError."""
        with self._named():
            super().flush()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Turn an operating system's error inside into an OutputError, except a broken pipe."""
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(f"standard output cannot be written: {error.strerror}") from None


def open_streams() -> None:
    """Open the standard streams that the shell closed, each so that its use fails.

    Otherwise the next files opened would get the streams' numbers, and text that a library prints
    would end up in a plan. Messages to a closed standard error are lost without an error. Standard
    output becomes an `Output`.
    """
    for name, mode, direction in (
        ("stdin", "r", os.O_WRONLY),
        ("stdout", "w", os.O_RDONLY),
        ("stderr", "w", os.O_WRONLY),
    ):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, direction), mode, encoding="utf-8"))
    if type(sys.stdout) is io.TextIOWrapper:  # not a stream that a test or a notebook put there
        closed = sys.stdout
        sys.stdout = Output(
            closed.detach(),
            closed.encoding,
            "backslashreplace",  # a name that the terminal cannot show is no reason to fail
            line_buffering=closed.line_buffering,
            write_through=closed.write_through,
        )


def note(*lines: str) -> None:
    """Print lines on standard error, with control characters escaped. A stream that cannot be
    written is ignored from then on."""
    try:
        for line in lines:
            print(f"hetplan: {one_line(line)}", file=sys.stderr, flush=True)
    except OSError:
        drop(sys.stderr)


MOST_LINES = 8  # of one kind of message


def few_lines(lines: Sequence[str]) -> list[str]:
    """The first lines of many messages of one kind, and how many there are beside them."""
    if len(lines) <= MOST_LINES:
        return list(lines)
    return [*lines[:MOST_LINES], f"and {len(lines) - MOST_LINES} more of this kind"]


def drop(stream: TextIO) -> None:
    """Send the rest of a stream's buffer to the null device. The flush at exit would otherwise fail
    once more."""
    null_device = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null_device, stream.fileno())
    os.close(null_device)


def emit(
    document: Any,
    tables: Iterable[Table],
    *,
    json: bool,
    output: Path | None = None,
    ok: bool = True,
) -> int:
    """Write a command's result and return its exit code: 0 where the result is `ok`, else 1.

    The document goes to the file `output`, if there is one. stdout gets the document with `json`,
    else the tables. A generator of tables is only run where they are printed.
    """
    write_document(output, document)
    if json:
        print_json(document)
    else:
        print_tables(tables)
    return 0 if ok else 1


def print_json(document: Any) -> None:
    """Print one JSON document on stdout, in ASCII where the stream's encoding is not UTF-8."""
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    if encoding == "utf8":
        sys.stdout.write(to_json(document))
    else:
        sys.stdout.write(json_module.dumps(document, indent=1) + "\n")


def print_tables(tables: Iterable[Table], console: Console | None = None) -> None:
    """Print tables for people, with a blank line between them. console: None stands for stdout."""
    if console is None:
        width = None if sys.stdout.isatty() else PLAIN_WIDTH
        console = Console(file=sys.stdout, width=width, highlight=False)
    for number, table in enumerate(tables):
        if number > 0:
            console.print()
        if table.title:
            console.print(Text(visible(table.title), style="bold"), soft_wrap=True)
        if table.header:
            for columns in pieces(table, console.width):
                console.print(rich_table(table, columns))
        for line in table.notes:
            console.print(Text(visible(line)), soft_wrap=True)


def rich_table(table: Table, columns: Sequence[int]) -> RichTable:
    """Some columns of a table, as a table of the library rich."""
    grid = RichTable(
        box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, show_header=any(table.header)
    )
    grid.collapse_padding = True  # columns are GUTTER apart
    for i in columns:
        justify: Any = "right" if i in table.right else "left"
        grid.add_column(Text(visible(table.header[i])), justify=justify, overflow="fold")
    for row in table.rows:
        grid.add_row(*(Text(visible(row[i])) for i in columns))
    return grid


def pieces(table: Table, width: int) -> list[list[int]]:
    """The columns of each table to print, where a table that is too wide for `width` is divided
    into several, one below the other.

    Each piece begins with the first column and takes the next columns as long as they fit. A column
    that fits into no piece is folded, and so is a column of text wider than PROSE.
    """
    widths = []
    for i in range(len(table.header)):
        width_of_column = column_width(table, i)
        if i > 0 and i not in table.right:
            width_of_column = min(width_of_column, PROSE)
        widths.append(width_of_column)
    columns_of_pieces: list[list[int]] = [[0]]
    for i in range(1, len(widths)):
        piece = columns_of_pieces[-1]
        taken = sum(widths[j] + GUTTER for j in piece)
        # A piece needs a column beside the first one, even if that is too wide.
        if taken + widths[i] > width and len(piece) > 1:
            piece = [0]
            columns_of_pieces.append(piece)
        piece.append(i)
    return columns_of_pieces


def column_width(table: Table, column: int) -> int:
    """The number of characters of a column's longest line, the heading included."""
    width = len(table.header[column])
    for row in table.rows:
        lines = visible(row[column]).split("\n")
        width = max(width, *map(len, lines))
    return width


def write_document(path: Path | None, document: Any) -> None:
    """Write the document as a JSON file, atomically; without a path, write nothing."""
    if path is not None:
        write_text(path, to_json(document))


T = TypeVar("T")
QUIET = 1.0  # seconds of work before a terminal shows anything
TICK = 0.2  # seconds between two updates on a terminal
FIRST = 2.0  # seconds of work before the first line where stderr is no terminal
SHOWN = 8  # the most candidates that are shown


def progress_line(label: str, progress: Progress) -> str:
    """A run's state as one line: `exact: 12 s, incumbent 1.234, bound 1.2, gap 2.8 %, phase`.

    Unknown figures are left out.
    """
    figures = {
        "incumbent": number_text(progress.incumbent),
        "bound": number_text(progress.bound),
        "gap": percent_text(progress.gap),
    }
    parts = [f"{label}: {progress.seconds:.0f} s"]
    parts += [f"{name} {text}" for name, text in figures.items() if text != "-"]
    if progress.note:
        parts.append(progress.note)
    return ", ".join(parts)


class Display:
    """The display of work under way on stderr: the best candidates so far, and the run's state.

    A terminal shows them in place and clears them at the end. Elsewhere lines are printed after
    about 2 s, 4 s, 8 s and so on, and as soon as there is a first candidate. `add` may be called
    from another thread.
    """

    def __init__(self, label: str) -> None:
        self.label = label  # the name of the work, at the beginning of the state's line
        self.due = FIRST  # where stderr is no terminal: seconds of work before the next lines
        self.live = Live(console=Console(file=sys.stderr), transient=True, auto_refresh=False)
        self.candidates: list[Candidate] = []  # the best first

    def add(self, candidate: "Candidate") -> None:
        """Add a replayed candidate to the display; one without a plan is ignored."""
        if candidate.plan is not None and candidate.predicted_seconds is not None:
            if not self.candidates:
                self.due = FIRST  # the time may have doubled beyond it: show the first one soon
            self.candidates = sorted(
                [*self.candidates, candidate],
                key=lambda c: (not c.fits_memory, c.predicted_seconds or 0.0),
            )

    def update(self, progress: Progress) -> None:
        """Show the candidates and the state, unless it is too early for it."""
        shown = [str(candidate) for candidate in self.candidates[:SHOWN]]
        state = progress_line(self.label, progress)
        lines = [printable(line) for line in [*shown, state]]
        if sys.stderr.isatty():
            if progress.seconds >= QUIET:
                self.live.start()
                self.live.update(Text("\n".join(lines)), refresh=True)
        elif progress.seconds >= self.due:
            self.due = 2 * progress.seconds
            note(*lines)

    def close(self) -> None:
        """Clear the terminal of the display."""
        self.live.stop()


def watched(run: Run, work: Callable[[], T], display: Display, *, quiet: bool) -> T:
    """The value of `work()`, which runs on another thread while `display` shows the state of `run`.

    quiet: show nothing. Raises the exception that `work` raises.
    """
    with stopping(run.cancel):
        answer = begin(work)
        try:
            while not over(answer, TICK):
                if not quiet:
                    display.update(Progress(run.elapsed, run.incumbent, run.bound, run.note))
        finally:
            display.close()
    return answer.result()


@contextlib.contextmanager
def stopping(wish: threading.Event) -> Iterator[None]:
    """A context in which the first SIGINT sets `wish`, and a second one ends the process with exit
    code 130."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return

    # It writes with `os.write`: the signal may come while Python's own stream is being written.
    def handler(number: int, frame: FrameType | None) -> None:
        if wish.is_set():
            # The work may sit in native code for long: there is no gentle way to end its thread.
            os.write(2, b"\nhetplan: error: aborted\n")
            os._exit(130)
        wish.set()
        os.write(2, b"\nhetplan: stopping with what is found so far (once more to abort)\n")

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
