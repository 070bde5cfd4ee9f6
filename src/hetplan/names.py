"""Names that a user gets wrong: one error for all of them, with the nearest known names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from hetplan.errors import InputError

# Where there are more names than this, an error lists the nearest only.
FEW = 12
# Three letters of four.
ALIKE = 0.75


def nearest(name: str, known: Iterable[str], most: int = 4) -> list[str]:
    """Known names that resemble `name`, the nearest first, then those that contain it or begin much like it."""
    lower = {other.lower(): other for other in known}
    wanted = name.lower()
    near = difflib.get_close_matches(wanted, lower, n=3, cutoff=0.5)
    near += [n for n in lower if wanted and wanted in n and n not in near]
    near += [n for n in lower if n not in near and _begins_like(n, wanted)]
    return [lower[n] for n in near[:most]]


def _begins_like(name: str, wanted: str) -> bool:
    """Whether a longer name begins with nearly these letters: `a800-sxm4-80gb` like `a801`."""
    if not 3 <= len(wanted) < len(name):
        return False
    return difflib.SequenceMatcher(None, name[: len(wanted)], wanted).ratio() >= ALIKE


def suggestion(name: str, known: Iterable[str]) -> str:
    """`; did you mean A, B?`, or nothing where no known name is near."""
    near = nearest(name, known)
    return f"; did you mean {', '.join(near)}?" if near else ""


def unknown_name(
    what: str, name: str, known: Iterable[str], *, where: str | None = None, see: str | None = None
) -> InputError:
    """The error for a name that is not among `known`: with the nearest ones, and all where they are few.

    what: `unknown device`. see: where to look all of them up, told where they are many and none is near.
    """
    known = list(known)
    near = suggestion(name, known)
    expected = None if near else see
    if len(known) <= FEW or not (near or see):
        expected = f"one of {', '.join(known)}"
    return InputError(f"{what} {name[:80]!r}{near}", where=where, expected=expected)
