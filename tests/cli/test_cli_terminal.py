"""Narrow terminals, early Ctrl-C, a standard output that carries nothing but the answer."""

from __future__ import annotations

import io
import subprocess
import sys
import types

import pytest
from rich.console import Console

from fakes.cli import Call
from hetplan.cli import entry
from hetplan.cli.main import main
from hetplan.cli.output import GUTTER, _print_table, pieces
from hetplan.text import Table

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
    _print_table(Console(file=stream, width=width, highlight=False), WIDE)
    text = stream.getvalue()
    if width >= 40:
        for whole in ("amp/auto", "optimal", "163.8 ms", "4.07 / 14.5 GiB", "feasible"):
            assert whole in text


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


@pytest.mark.parametrize("option", ["x=7", "solver=abc"])
def test_what_highs_refuses_is_not_on_standard_output(option: str) -> None:
    """In a process of its own: HiGHS writes past Python."""
    command = [sys.executable, "-m", "hetplan", "solve", "tiny-mixed", "-m", "pyomo", "--json"]
    ran = subprocess.run(
        [*command, "--native", f"pyomo.{option}"], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout) == (2, "")


def test_the_time_limit_has_one_place(hetplan: Call) -> None:
    ran = hetplan("solve", "tiny-mixed", "-m", "pyomo", "--native", "pyomo.time_limit=1")
    assert "repeats the common option time_limit" in ran.error


@pytest.mark.parametrize("threads", ["0", "513", "99999999999999999999"])
def test_threads_have_limits(hetplan: Call, threads: str) -> None:
    assert "expected 1 to 512" in hetplan("solve", "tiny-mixed", "--threads", threads).error
