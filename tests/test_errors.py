"""The place of an exception in a user's own module."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from hetplan.errors import place_outside


def place_of_error(code: str, path: Path) -> str | None:
    """The place of the exception that Python raises when it runs a file with this code."""
    path.write_text(code)
    with pytest.raises((ZeroDivisionError, SyntaxError)) as caught:
        runpy.run_path(str(path))
    return place_outside(caught.value)


def test_code_without_a_file_is_no_place(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    assert place_of_error("x = 1\nexec('x / 0')\n", own) == f"{own}, line 2"


def test_a_line_that_is_no_python_is_the_place(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    assert place_of_error("x = 1\nx = =\n", own) == f"{own}, line 2"
