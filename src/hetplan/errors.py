"""The errors that a user sees: one line each, saying what, where, what was got and what was
expected."""

from collections.abc import Sequence

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
        details = []
        if got is not None:
            details.append(f"got {shorten(got)}")
        if expected is not None:
            details.append(f"expected {expected}")
        text = f"{where}: {what}" if where else what
        super().__init__(one_line(f"{text} ({', '.join(details)})" if details else text))


class UnsupportedError(InputError):
    """A well-formed request that the named method, format or back end cannot serve; says who
    can."""


class DisagreementError(HetplanError):
    """The independent evaluator rejects or prices otherwise what a solver returned: a bug in
    hetplan."""

    exit_code = 3


def one_line(text: str) -> str:
    """`text` on a single line, control characters escaped, so that one error stays one line."""
    joined = " ".join(text.split())
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in joined)


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
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:  # a hostile key may be megabytes long
            path += ("." if path else "") + shortened(part, LONGEST_KEY)
    return path


def shortened(text: str, limit: int) -> str:
    """At most so many characters."""
    return text if len(text) <= limit else text[: limit - 1] + "…"
