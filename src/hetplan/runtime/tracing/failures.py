"""Says in one line why torch.export finds no graph of a module."""

import logging
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hetplan.errors import UnsupportedError, one_line
from hetplan.runtime.tracing.losses import is_symbolic

TORCH, HETPLAN = Path(torch.__file__).parent, Path(__file__).parents[2]
TALKATIVE = "torch.fx.experimental.symbolic_shapes"  # torch's logger of hints for its developers


@contextmanager
def exporting(where: str) -> Iterator[None]:
    """A context for torch.export, which prints nothing there: before an exception, torch prints the
    graph that it has made so far, pages of it.

    Any exception of torch or of the module becomes an UnsupportedError with its cause. where: the
    module's name, for the error.
    """
    places: list[str] = []  # of calls of len(x) for a tensor with rows, which fix their number
    length, logger = Tensor.__len__, logging.getLogger(TALKATIVE)
    level = logger.level

    def noted(x: Any) -> int:
        frame = sys._getframe(1)
        path = Path(frame.f_code.co_filename)
        if is_users(path) and any(map(is_symbolic, x.shape[:1])):
            places.append(f"{path.name}:{frame.f_lineno}")
        return int(length(x))

    printed = StringIO()
    Tensor.__len__ = noted
    logger.setLevel(logging.ERROR)
    try:
        with redirect_stderr(printed):
            yield
    except Exception as error:  # any exception of torch or of the module
        raise UnsupportedError(cause_of(error, places), where=where) from error
    finally:
        Tensor.__len__ = length
        logger.setLevel(level)


def cause_of(error: Exception, places: list[str]) -> str:
    """The cause of an exception of torch.export as a text for errors. places: of calls of
    len(x)."""
    text = str(error)
    if "Constraints violated" in text and "rows" in text:
        seen = "int(x.shape[0]), a loop over the rows or an `if` on their number"
        if places:
            seen = f"len(x) at {', '.join(dict.fromkeys(places))}"
        return f"forward fixes the number of rows by {seen}; x.shape[0] leaves it open"
    kind = type(error).__name__
    if kind == "GuardOnDataDependentSymNode":
        return (
            "torch.export finds no graph: control flow or a size depends on values of the data"
            f"{place_of(error)}"
        )
    first = next((line for line in text.splitlines() if line.strip()), "no message")
    return f"torch.export finds no graph: {kind}: {one_line(first.strip())[:300]}{place_of(error)}"


def place_of(error: Exception) -> str:
    """The text ", at FILE:LINE" of the user's innermost line that an exception passed; empty where
    there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_file() and is_users(path):
            return f", at {path.name}:{frame.lineno}"
    return ""


def is_users(path: Path) -> bool:
    """Whether a file of Python is neither torch's nor hetplan's."""
    return not {TORCH, HETPLAN} & set(path.parents)
