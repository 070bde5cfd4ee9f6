"""The errors that a user sees. The message of each is one line that says what is wrong, where it
is, what was got and what was expected.

An unknown name has the same error everywhere (`unknown_name`), which suggests the nearest known
names.
"""

import difflib
import importlib
import os
import traceback
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
LONGEST_KEY = 200  # characters of a key that a message shows


class HetplanError(Exception):
    """The base class of all errors that hetplan raises on purpose."""

    exit_code = 1  # the exit code of the command that ends with this error


class InputError(HetplanError, ValueError):
    """The error for a file, an option or an argument that cannot be used.

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
        details: list[str] = []
        if got is not None:
            details.append(f"got {short_repr(got)}")
        if expected is not None:
            details.append(f"expected {expected}")
        text = f"{where}: {what}" if where else what
        if details:
            text += f" ({', '.join(details)})"
        super().__init__(one_line(text))


class UnsupportedError(InputError):
    """The error for a well-formed request that the named method, format or back end cannot serve.
    `expected` names one that can."""


def require(
    holds: object,
    what: str,
    *,
    where: str | None = None,
    got: object = None,
    expected: str | None = None,
    kind: type[InputError] = InputError,
) -> None:
    """Raise an error of class `kind`, with the other arguments, unless `holds` is true."""
    if not holds:
        raise kind(what, where=where, got=got, expected=expected)


class DisagreementError(HetplanError):
    """The error for a bug in hetplan: the independent evaluator rejects a solver's decision, or
    computes another objective for it."""

    exit_code = 3


def debugging() -> bool:
    """Whether HETPLAN_DEBUG asks for tracebacks and warnings."""
    return os.environ.get("HETPLAN_DEBUG", "") not in ("", "0")


def import_optional(module: str, what: str, extra: str, *, where: str | None = None) -> Any:
    """The imported module `module`, which the extra `extra` of hetplan installs. Raises InputError
    with the message `what` where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise InputError(what, where=where, expected=f"pip install 'hetplan[{extra}]'") from None


def printable(text: str) -> str:
    """`text` with every line break and control character written as Python escapes it.

    Every text from a file that goes into a generated file or to a terminal passes through this
    function, so that the text cannot leave its line, its comment or its cell.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def one_line(text: str) -> str:
    """`text` on a single line: one blank between words, and control characters escaped."""
    return printable(" ".join(text.split()))


def place_outside(error: BaseException) -> str | None:
    """`FILE, line N`: the place in a user's own module at which an exception was raised.

    It is the innermost line outside of hetplan, of Python and of installed packages that the
    exception passed through; of a SyntaxError it is the line that is not valid Python. None where
    the exception passed through no such line.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    hetplan_folder = os.path.dirname(os.path.abspath(__file__))
    python_folder = os.path.dirname(os.__file__)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        # Code without a file has a name such as `<string>` or `<frozen importlib._bootstrap>`.
        if "<" in frame.filename or "site-packages" in frame.filename:
            continue
        if not frame.filename.startswith((hetplan_folder, python_folder)):
            return f"{frame.filename}, line {frame.lineno}"
    return None


def kind_and_text(error: BaseException) -> str:
    """The class and the message of an exception that other libraries raised, on one line."""
    return f"{type(error).__name__}: {one_line(str(error))[:300]}"


def short_repr(value: object, limit: int = 80) -> str:
    """`repr(value)`, at most `limit` characters long. Of a list or an object only the number of
    entries is shown, so that no message prints a whole document."""
    if isinstance(value, str | bytes) and len(value) > limit:
        value = value[:limit]  # before `repr`, which would copy megabytes
    elif isinstance(value, dict):
        return f"an object of {len(value)}"
    elif isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    try:
        text = repr(value)
    except ValueError:  # an int too long for Python's conversion limit
        return f"a {type(value).__name__} of enormous size"
    return shortened(text, limit)


def json_path(location: Sequence[int | str]) -> str:
    """Keys and indices as a JSON path: `("data", "layers", 3, "name")` -> `data.layers[3].name`."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:  # a hostile key may be megabytes long
            path += f".{shortened(part, LONGEST_KEY)}"
    return path.removeprefix(".")


def shortened(text: str, limit: int) -> str:
    """`text`, cut to at most `limit` characters."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


# An error for an unknown name lists all known names where they are at most this many.
LISTED_WHOLE = 12
# Least `difflib` ratios at which two names are alike: of the whole names, and of a typed name with
# the equally long beginning of a longer one. 0.6 is also what difflib itself takes as alike.
WHOLE_RATIO, BEGINNING_RATIO = 0.6, 0.75
# Likeness of a known name that contains the typed name, and of one that contains all its letters in
# order. Both are larger than every likeness by a ratio, which is at most 1 / WHOLE_RATIO = 1.67.
CONTAINS_NAME, CONTAINS_LETTERS = 2.0, 1.9


def nearest(name: str, known: Iterable[str], most: int = 4) -> list[str]:
    """The known names that are alike to `name`, at most `most` of them.

    A known name is alike if it contains `name`, if it contains all letters of `name` in order, or
    if the whole name or its beginning has most letters in common with `name`. The most alike come
    first; of equally alike ones the shortest.
    """
    wanted = name.lower()

    def likeness(other: str) -> float:
        """At least 1 where the names are alike; the larger, the more alike the names are."""
        lower = other.lower()
        if wanted and wanted in lower:
            return CONTAINS_NAME
        letters = iter(lower)
        # `in` consumes the iterator up to the letter, so that the letters must come in order. Too
        # many names contain fewer than four letters in order.
        if len(wanted) >= 4 and all(letter in letters for letter in wanted):
            return CONTAINS_LETTERS
        whole = difflib.SequenceMatcher(None, lower, wanted).ratio() / WHOLE_RATIO
        # The beginning of a name that does not contain two typed letters has one of them at most.
        if len(wanted) < 3:
            return whole
        beginning = difflib.SequenceMatcher(None, lower[: len(wanted)], wanted).ratio()
        return max(whole, beginning / BEGINNING_RATIO)

    alike: list[tuple[float, int, str]] = []
    for other in known:
        value = likeness(other)
        if value >= 1:
            alike.append((-value, len(other), other))
    alike.sort(key=lambda entry: entry[:2])  # stable: equally alike and long names keep their order
    return [other for _, _, other in alike[:most]]


def suggestion(name: str, known: Iterable[str]) -> str:
    """`; did you mean A, B?`, or nothing where no known name is near."""
    near = nearest(name, known)
    return f"; did you mean {', '.join(near)}?" if near else ""


def unknown_name(
    what: str, name: str, known: Iterable[str], *, where: str | None = None, see: str | None = None
) -> InputError:
    """The error for a name that is not among `known`. It suggests the nearest known names, and
    lists all where they are few.

    what: what is unknown, such as `unknown device`. see: where all known names can be looked up;
    the error says so where the names are many and none is near.
    """
    known = list(known)
    did_you_mean = suggestion(name, known)
    expected = see
    if len(known) <= LISTED_WHOLE or not (did_you_mean or see):
        expected = f"one of {', '.join(known)}"
    elif did_you_mean:
        expected = None
    return InputError(f"{what} {name[:80]!r}{did_you_mean}", where=where, expected=expected)


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
