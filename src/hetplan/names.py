"""Names that a user gets wrong: one error for all of them, with the nearest known names."""

import difflib
from collections.abc import Iterable

from hetplan.errors import InputError

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

    alike = [other for other in known if likeness(other) >= 1]
    return sorted(alike, key=lambda other: (-likeness(other), len(other)))[:most]


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
