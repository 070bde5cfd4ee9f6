"""Standard streams as a shell may leave them: JSON or tables on stdout, all else on stderr; and
long work on a thread of its own, so that the keyboard can stop it and somebody may watch.

Compiled kernels and solvers hold the thread that they run on: on the main thread Ctrl-C would wait
for them. The first Ctrl-C sets the run's `cancel`, upon which methods return what they have; the
second aborts."""

import contextlib
import io
import json as json_module
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
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

# Where stdout is no terminal: what most terminals show without folding lines.
PLAIN_WIDTH = 100
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
    for name, mode, direction in (
        ("stdin", "r", os.O_WRONLY),
        ("stdout", "w", os.O_RDONLY),
        ("stderr", "w", os.O_WRONLY),
    ):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, direction), mode, encoding="utf-8"))
    if type(sys.stdout) is io.TextIOWrapper:
        closed = sys.stdout
        sys.stdout = Output(
            closed.detach(),
            closed.encoding,
            "backslashreplace",  # a name that the terminal cannot show is no reason to fail
            line_buffering=closed.line_buffering,
            write_through=closed.write_through,
        )


def note(*lines: str) -> None:
    """Lines on standard error, control characters escaped; where that fails nobody can be told."""
    try:
        for line in lines:
            print(f"hetplan: {one_line(line)}", file=sys.stderr, flush=True)
    except OSError:
        drop(sys.stderr)


def drop(stream: TextIO) -> None:
    """Send what is left in a stream's buffer nowhere: flushed at exit it would fail once more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def emit(
    document: Any,
    tables: Iterable[Table],
    *,
    json: bool,
    output: Path | None = None,
    ok: bool = True,
) -> int:
    """A command's result: the document to a file, if one is named; to stdout with `json`, else the
    tables, which are not made before they are printed where `tables` is a generator.

    Returns the command's exit code: 0 where the result is `ok`, else 1.
    """
    write_document(output, document)
    if json:
        print_json(document)
    else:
        print_tables(tables)
    return 0 if ok else 1


def print_json(document: Any) -> None:
    """One JSON document on stdout (escaped where the terminal's encoding is not UTF-8)."""
    utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    sys.stdout.write(to_json(document) if utf8 else json_module.dumps(document, indent=1) + "\n")


def print_tables(tables: Iterable[Table], console: Console | None = None) -> None:
    """Tables for people, on stdout where no console is given."""
    if console is None:
        width = None if sys.stdout.isatty() else PLAIN_WIDTH
        console = Console(file=sys.stdout, width=width, highlight=False)
    for i, table in enumerate(tables):
        if i:
            console.print()
        if table.title:
            console.print(Text(visible(table.title), style="bold"), soft_wrap=True)
        for columns in pieces(table, console.width) if table.header else ():
            grid = RichTable(
                box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, show_header=any(table.header)
            )
            grid.collapse_padding = True
            for i in columns:
                justify: Any = "right" if i in table.right else "left"
                grid.add_column(Text(visible(table.header[i])), justify=justify, overflow="fold")
            for row in table.rows:
                grid.add_row(*(Text(visible(row[i])) for i in columns))
            console.print(grid)
        for line in table.notes:
            console.print(Text(visible(line)), soft_wrap=True)


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
    columns: list[list[int]] = [[0]]
    for i in range(1, len(widths)):
        taken = sum(widths[j] + GUTTER for j in columns[-1])
        if taken + widths[i] > width and len(columns[-1]) > 1:
            columns.append([0])
        columns[-1].append(i)
    return columns


def write_document(path: Path | None, document: Any) -> None:
    """The document as a JSON file, atomically; nothing without a path."""
    if path is not None:
        write_text(path, to_json(document))


T = TypeVar("T")
# Seconds: nothing is shown before QUIET; without a terminal a line at FIRST, then ever more rarely;
# on a terminal the state is renewed every TICK.
QUIET, FIRST, TICK = 1.0, 2.0, 0.2
# Candidates on a terminal.
SHOWN = 8


def progress_line(label: str, progress: Progress) -> str:
    """`exact: 12 s, incumbent 1.234, bound 1.2, gap 2.8 %, phase`."""
    known = {
        "incumbent": number_text(progress.incumbent),
        "bound": number_text(progress.bound),
        "gap": percent_text(progress.gap),
    }
    parts = [f"{word} {text}" for word, text in known.items() if text != "-"]
    note = [progress.note] if progress.note else []
    return ", ".join([f"{label}: {progress.seconds:.0f} s", *parts, *note])


class Display:
    """What standard error shows of work under way: the best candidates so far, and the state.

    On a terminal both change in place and go away at the end; elsewhere lines at 2 s, 4 s, 8 s or
    so, and as soon as there is a first candidate. `add` may be called from another thread.
    """

    def __init__(self, label: str) -> None:
        self.label, self.due = label, FIRST
        self.live = Live(console=Console(file=sys.stderr), transient=True, auto_refresh=False)
        self.candidates: list[Candidate] = []

    def add(self, candidate: "Candidate") -> None:
        """A candidate, replayed; those without a plan are not shown."""
        if candidate.plan is not None and candidate.predicted_seconds is not None:
            self.due = self.due if self.candidates else FIRST
            self.candidates = sorted(
                [*self.candidates, candidate],
                key=lambda c: (not c.fits_memory, c.predicted_seconds or 0.0),
            )

    def update(self, progress: Progress) -> None:
        """Show the state of things, where it is time to."""
        shown = [str(candidate) for candidate in self.candidates[:SHOWN]]
        lines = list(map(printable, [*shown, progress_line(self.label, progress)]))
        if sys.stderr.isatty():
            if progress.seconds >= QUIET:
                self.live.start()
                self.live.update(Text("\n".join(lines)), refresh=True)
        elif progress.seconds >= self.due:
            self.due = 2 * progress.seconds
            note(*lines)

    def close(self) -> None:
        """Take away what should not stay."""
        self.live.stop()


def watched(run: Run, work: Callable[[], T], display: Display, *, quiet: bool) -> T:
    """The value of `work()`, done on another thread while `run` is watched; raises what `work`
    raises."""
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
    """While inside, SIGINT sets `wish`; a second one ends the process with 130."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return

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
