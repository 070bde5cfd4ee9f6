"""Standard streams that are full, closed or a folder: one line where anybody can read it, never a
code of a bug."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FULL = Path("/dev/full")
PRINTING = (
    ("--help",),
    ("--version",),
    ("instances", "list"),
    ("instances", "list", "--json"),
    ("schema", "instance"),
    ("solve", "tiny-mixed", "-m", "megatron"),
    ("plan", "--help"),
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
@pytest.mark.parametrize("arguments", PRINTING)
def test_full_standard_output(arguments: tuple[str, ...]) -> None:
    message = "hetplan: error: standard output cannot be written: No space left on device\n"
    assert run(f">{FULL}", *arguments) == (2, "", message)


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_full_standard_output_without_a_buffer() -> None:
    code, _, err = run(f">{FULL}", "instances", "list", PYTHONUNBUFFERED="1")
    assert (code, err) == (
        2,
        "hetplan: error: standard output cannot be written: No space left on device\n",
    )


@pytest.mark.parametrize("arguments", PRINTING)
def test_closed_standard_output(arguments: tuple[str, ...]) -> None:
    message = "hetplan: error: standard output cannot be written: Bad file descriptor\n"
    assert run(">&-", *arguments) == (2, "", message)


def test_what_is_written_to_a_file_is_whole_when_standard_output_is_closed(tmp_path: Path) -> None:
    target = tmp_path / "answer.json"
    arguments = ("solve", "tiny-mixed", "-m", "megatron")
    assert run(">&-", *arguments, "-o", str(target))[0] == 2
    assert run("", "check", "tiny-mixed", str(target))[0] == 0


@pytest.mark.parametrize("redirection", ["2>&-", f"2>{FULL}"])
def test_nobody_hears_the_error(redirection: str) -> None:
    if redirection.endswith("full") and not FULL.exists():
        pytest.skip("needs /dev/full")
    assert run(redirection, "solve", "no-such-instance") == (2, "", "")
    assert run(redirection, "instances", "list", "--problem", "amp")[0] == 0


def test_closed_standard_input() -> None:
    assert run("<&-", "solve", "-") == (
        2,
        "",
        "hetplan: error: stdin: cannot be read: Bad file descriptor\n",
    )


def test_all_closed() -> None:
    assert run("<&- >&- 2>&-", "instances", "list")[0] == 2
