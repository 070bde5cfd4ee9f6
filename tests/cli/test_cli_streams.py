"""Standard streams that are full, closed or a folder: one line where anybody can read it, never a
code of a bug."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
from rich.console import Console

from fakes.cli import Call
from hetplan.cli import entry
from hetplan.cli.main import main
from hetplan.cli.output import GUTTER, pieces, print_tables
from hetplan.text import Table
from quick import rest_wide

FULL = Path("/dev/full")
# The first is printed before anything is loaded, the second at the end of a run.
PRINTING = (
    ("--version",),
    ("solve", "tiny-two-types", "-q"),
    ("instances", "list"),
    ("plan", "--help"),
    ("--help",),
    ("instances", "list", "--json"),
    ("schema", "instance"),
)


def run(redirections: str, *arguments: str, **environment: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `hetplan` with the redirections of a shell."""
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -m hetplan "$@" {redirections}', sys.executable, *arguments],
        env={k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", rest_wide(PRINTING, 2))
def test_full_standard_output(arguments: tuple[str, ...]) -> None:
    message = "hetplan: error: standard output cannot be written: No space left on device\n"
    assert run(f">{FULL}", *arguments) == (2, "", message)


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_full_standard_output_without_a_buffer() -> None:
    code, _, err = run(f">{FULL}", "--version", PYTHONUNBUFFERED="1")
    assert (code, err) == (
        2,
        "hetplan: error: standard output cannot be written: No space left on device\n",
    )


@pytest.mark.parametrize("arguments", rest_wide(PRINTING, 2))
def test_closed_standard_output(arguments: tuple[str, ...]) -> None:
    message = "hetplan: error: standard output cannot be written: Bad file descriptor\n"
    assert run(">&-", *arguments) == (2, "", message)


def test_what_is_written_to_a_file_is_whole_when_standard_output_is_closed(
    hetplan: Call, tmp_path: Path
) -> None:
    target = tmp_path / "answer.json"
    arguments = ("solve", "tiny-two-types")
    assert run(">&-", *arguments, "-o", str(target))[0] == 2
    assert hetplan("check", "tiny-two-types", target).code == 0


@pytest.mark.parametrize("redirection", ["2>&-", f"2>{FULL}"])
def test_nobody_hears_the_error(redirection: str) -> None:
    if redirection.endswith("full") and not FULL.exists():
        pytest.skip("needs /dev/full")
    assert run(redirection, "solve", "no-such-instance") == (2, "", "")
    assert run(redirection, "--version")[0] == 0


def test_closed_standard_input() -> None:
    assert run("<&-", "solve", "-") == (
        2,
        "",
        "hetplan: error: stdin: cannot be read: Bad file descriptor\n",
    )


def test_all_closed() -> None:
    assert run("<&- >&- 2>&-", "instances", "show", "tiny-mixed")[0] == 2


WIDE = Table(
    "a ranking",
    ("plan", "status", "seconds", "memory", "message"),
    (
        ("amp/auto", "optimal", "163.8 ms", "4.07 / 14.5 GiB", "x " * 60),
        ("dp", "feasible", "1 s", "-", ""),
    ),
    right=(2, 3),
)


@pytest.mark.parametrize("width", [24, 40, 60, 80, 200])
def test_every_column_is_printed_once_and_whole(width: int) -> None:
    found = pieces(WIDE, width)
    assert all(columns[0] == 0 for columns in found)
    assert sorted(i for columns in found for i in columns if i) == [1, 2, 3, 4]
    longest = [max(len(row[i]) for row in (WIDE.header, *WIDE.rows)) for i in range(4)]
    for columns in found:
        if 4 not in columns and len(columns) > 2:
            assert sum(longest[i] + GUTTER for i in columns) - GUTTER <= width
    stream = io.StringIO()
    print_tables([WIDE], Console(file=stream, width=width, highlight=False))
    text = stream.getvalue()
    if width >= 40:
        for whole in ("amp/auto", "optimal", "163.8 ms", "4.07 / 14.5 GiB", "feasible"):
            assert whole in text


def test_no_control_character_of_a_table_reaches_the_terminal() -> None:
    stream, text = io.StringIO(), "a\x1b[2Jb\x9bc\u2028d\re"
    table = Table(text, (text, text), ((text, text),), (text,))
    print_tables([table], Console(file=stream, width=200, highlight=False))
    assert all(c.isprintable() or c == "\n" for c in stream.getvalue())
    assert stream.getvalue().count(r"a\x1b[2Jb\x9bc\u2028d\re") == 6


def test_a_wide_terminal_has_one_table() -> None:
    assert pieces(WIDE, 100) == [[0, 1, 2, 3, 4]]


def test_ctrl_c_while_loading_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(types.ModuleType):
        def __getattr__(self, name: str) -> object:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "hetplan.cli.main", Interrupted("hetplan.cli.main"))
    assert entry.main() == 130
    assert capfd.readouterr() == ("", "hetplan: error: aborted\n")


def test_ctrl_c_outside_a_solver_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hetplan.cli.run.load_plan", interrupted)
    assert main(["run", "plan.json"]) == 130
    assert capfd.readouterr() == ("", "hetplan: error: aborted\n")


@pytest.mark.parametrize("option", rest_wide(["x=7", "solver=abc"], 1))
def test_what_highs_refuses_is_not_on_standard_output(option: str) -> None:
    """In a process of its own: HiGHS writes past Python."""
    command = [sys.executable, "-m", "hetplan", "solve", "tiny-mixed", "-m", "pyomo", "--json"]
    ran = subprocess.run(
        [*command, "--native", f"pyomo.{option}"], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout) == (2, "")
