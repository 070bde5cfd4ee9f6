"""Says in one line why torch.export finds no graph of a module."""

import logging
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
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


# (class, its method) -> what a user writes that calls it for a number of rows
FIXING = {
    (Tensor, "__len__"): "len(x)",
    (Tensor, "__iter__"): "a loop over the rows",
    (torch.SymInt, "__int__"): "int(n)",
    (torch.SymInt, "__index__"): "range(n), math.log(n) or the like",
}


@contextmanager
def noting(calls: Mapping[tuple[Any, str], str]) -> Iterator[list[tuple[str, str, Any]]]:
    """A context with a list of what the user's code calls there: ("FILE:LINE", the text of the
    call, its first argument, or of a tensor the first size).

    calls: (class or module, name in it of a function) -> text.
    """
    noted: list[tuple[str, str, Any]] = []
    functions = {(owner, name): getattr(owner, name) for owner, name in calls}

    def noting_function(text: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which also adds to the list."""

        def called(*arguments: Any, **named: Any) -> Any:
            frame = sys._getframe(1)
            path = Path(frame.f_code.co_filename)
            if is_users(path):
                first = next(iter(arguments), None)
                sizes = first.shape if isinstance(first, Tensor) else (first,)
                noted.append((f"{path.name}:{frame.f_lineno}", text, next(iter(sizes), None)))
            return function(*arguments, **named)

        return called

    for (owner, name), function in functions.items():
        setattr(owner, name, noting_function(calls[owner, name], function))
    try:
        yield noted
    finally:
        for (owner, name), function in functions.items():
            setattr(owner, name, function)


def with_number(
    noted: Iterable[tuple[str, str, Any]], is_wanted: Callable[[Any], bool]
) -> list[str]:
    """The notes whose number is wanted, one for each line of code: "len(x) at FILE:LINE"."""
    text_at: dict[str, str] = {}
    for place, text, number in noted:
        if is_wanted(number):
            text_at.setdefault(place, text)
    return [f"{text} at {place}" for place, text in text_at.items()]


@contextmanager
def exporting(where: str) -> Iterator[None]:
    """A context for torch.export, which prints nothing there: before an exception, torch prints the
    graph that it has made so far, pages of it.

    Any exception of torch or of the module becomes an UnsupportedError with its cause. where: the
    module's name, for the error.
    """
    logger = logging.getLogger(TALKATIVE)
    level = logger.level
    printed = StringIO()
    logger.setLevel(logging.ERROR)
    with noting(FIXING) as noted:
        try:
            with redirect_stderr(printed):
                yield
        except Exception as error:  # any exception of torch or of the module
            cause = cause_of(error, with_number(noted, is_symbolic))
            raise UnsupportedError(cause, where=where) from error
        finally:
            logger.setLevel(level)


def cause_of(error: Exception, places: list[str]) -> str:
    """The cause of an exception of torch.export as a text for errors. places: of what fixes the
    number of rows."""
    text = str(error)
    if "Constraints violated" in text and "rows" in text:
        seen = ", ".join(places) or "an `if` on it or a loop over the rows"
        return f"forward fixes the number of rows by {seen}; x.shape[0] leaves it open"
    if "Cannot create Dim with inconsistent" in text:
        return "forward takes several rows together, as a view of rows in pairs does"
    kind = type(error).__name__
    if kind == "GuardOnDataDependentSymNode":
        return (
            "torch.export finds no graph: control flow or a size depends on values of the data"
            f"{place_of(error)}"
        )
    if "fake tensor in the exported program" in text:
        return (
            "torch.export finds no graph: forward computes gradients itself (torch.autograd.grad)"
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
