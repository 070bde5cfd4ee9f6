"""The errors that a user sees: one line each, saying what, where, what was got and what was
expected.

Names that a user gets wrong: one error for all of them, with the nearest known names.
"""

import difflib
import importlib
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
LONGEST_KEY = 200


class HetplanError(Exception):
    """Anything hetplan raises on purpose. `exit_code` is what the command line returns for it."""

    exit_code = 1


class InputError(HetplanError, ValueError):
    """A file, an option or an argument that cannot be used.

    `str(error)` is one line: `where: what (got …, expected …)`; absent parts are left out.
    """

    exit_code = 2

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        got: object = None,
        expected: str | None = None,
    ) -> None:
        self.what, self.where, self.got, self.expected = what, where, got, expected
        parts = {"got": None if got is None else shorten(got), "expected": expected}
        details = ", ".join(f"{word} {part}" for word, part in parts.items() if part is not None)
        text = f"{where}: {what}" if where else what
        super().__init__(one_line(f"{text} ({details})" if details else text))


class UnsupportedError(InputError):
    """A well-formed request that the named method, format or back end cannot serve; says who
    can."""


def require(
    holds: object,
    what: str,
    *,
    where: str | None = None,
    got: object = None,
    expected: str | None = None,
    kind: type[InputError] = InputError,
) -> None:
    """Raise an InputError unless something holds."""
    if not holds:
        raise kind(what, where=where, got=got, expected=expected)


class DisagreementError(HetplanError):
    """The independent evaluator rejects or prices otherwise what a solver returned: a bug in
    hetplan."""

    exit_code = 3


def debugging() -> bool:
    """Whether HETPLAN_DEBUG asks for tracebacks and warnings."""
    return os.environ.get("HETPLAN_DEBUG", "") not in ("", "0")


def optional(module: str, what: str, extra: str, *, where: str | None = None) -> Any:
    """A module that one of hetplan's extras brings; raises InputError where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise InputError(what, where=where, expected=f"pip install 'hetplan[{extra}]'") from None


def printable(text: str) -> str:
    """`text` with every line break and control character written as Python escapes it.

    Every text from a file that goes into a generated file or to a terminal passes through this
    function: what it returns cannot leave its line, its comment or its cell.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def one_line(text: str) -> str:
    """`text` on a single line, blanks between words made one, control characters escaped."""
    return printable(" ".join(text.split()))


def kind_and_text(error: BaseException) -> str:
    """An error of somebody else's code in one line."""
    return f"{type(error).__name__}: {one_line(str(error))[:300]}"


def shorten(value: object, limit: int = 80) -> str:
    """`repr(value)` cut to `limit` characters: error messages never print a whole document."""
    if isinstance(value, str | bytes) and len(value) > limit:
        value = value[:limit]
    elif isinstance(value, list | tuple | dict):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    try:
        text = repr(value)
    except ValueError:  # an int too long for Python's conversion limit
        return f"a {type(value).__name__} of enormous size"
    return shortened(text, limit)


def json_path(location: Sequence[int | str]) -> str:
    """Keys and indices as a JSON path: `("data", "layers", 3, "name")` -> `data.layers[3].name`."""
    parts = (
        # a hostile key may be megabytes long
        f"[{part}]" if isinstance(part, int) else f".{shortened(part, LONGEST_KEY)}"
        for part in location
    )
    return "".join(parts).removeprefix(".")


def shortened(text: str, limit: int) -> str:
    """At most so many characters."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


# Where there are more names than this, an error lists the nearest only.
LISTED_WHOLE = 12
# Letters in common: of the whole names; of what was typed and as much of a longer name.
WHOLE, BEGINNING = 0.6, 0.75


def nearest(name: str, known: Iterable[str], most: int = 4) -> list[str]:
    """Known names like `name`, those most like it first, of equals the shortest: what has it
    inside, all its letters in order, most of them, or begins so."""
    wanted = name.lower()

    def likeness(other: str) -> float:
        """At least 1 where the names are alike."""
        lower = other.lower()
        if wanted and wanted in lower:
            return 2.0
        left = iter(lower)
        if len(wanted) >= 4 and all(letter in left for letter in wanted):
            return 1.9
        whole = difflib.SequenceMatcher(None, lower, wanted).ratio() / WHOLE
        beginning = difflib.SequenceMatcher(None, lower[: len(wanted)], wanted).ratio() / BEGINNING
        return max(whole, beginning if len(wanted) >= 3 else 0.0)

    return sorted(
        [other for other in known if likeness(other) >= 1],
        key=lambda other: (-likeness(other), len(other)),
    )[:most]


def suggestion(name: str, known: Iterable[str]) -> str:
    """`; did you mean A, B?`, or nothing where no known name is near."""
    near = nearest(name, known)
    return f"; did you mean {', '.join(near)}?" if near else ""


def unknown_name(
    what: str, name: str, known: Iterable[str], *, where: str | None = None, see: str | None = None
) -> InputError:
    """The error for a name that is not among `known`: with the nearest ones, and all where they are
    few.

    what: `unknown device`. see: where to look all of them up, told where they are many and none is
    near.
    """
    known = list(known)
    near = suggestion(name, known)
    expected = None if near else see
    if len(known) <= LISTED_WHOLE or not (near or see):
        expected = f"one of {', '.join(known)}"
    return InputError(f"{what} {name[:80]!r}{near}", where=where, expected=expected)


def check_name(
    what: str,
    name: str,
    known: Collection[str],
    *,
    where: str | None = None,
    see: str | None = None,
) -> None:
    """Raise `unknown_name`'s error for a name that is not among `known`."""
    if name not in known:
        raise unknown_name(what, name, known, where=where, see=see)


def look_up(
    what: str,
    name: str,
    known: Mapping[str, T],
    *,
    where: str | None = None,
    see: str | None = None,
) -> T:
    """The value of a name in a table; raises `unknown_name`'s error where the table lacks it."""
    check_name(what, name, known, where=where, see=see)
    return known[name]
