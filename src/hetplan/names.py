"""Names that a user gets wrong: one error for all of them, with the nearest known names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from hetplan.errors import InputError

# Where there are more names than this, an error lists the nearest only.
LISTED_WHOLE = 12
# Three letters of four; three of five anywhere in a name; all but a letter or two.
ALIKE, NEAR, SLIP = 0.75, 0.6, 0.85


def nearest(name: str, known: Iterable[str], most: int = 4) -> list[str]:
    """Known names like `name`: a slip of the pen, then what goes on from it or it from, the
    nearest, others."""
    lower = {other.lower(): other for other in known}
    wanted = name.lower()
    near = difflib.get_close_matches(wanted, lower, n=1, cutoff=SLIP)
    near += sorted(
        (n for n in lower if n not in near and (_goes_on(n, wanted) or _goes_on(wanted, n))),
        key=len,
    )
    near += [n for n in difflib.get_close_matches(wanted, lower, n=3, cutoff=NEAR) if n not in near]
    near += [n for n in lower if wanted and wanted in n and n not in near]
    near += [n for n in lower if n not in near and _begins_like(n, wanted)]
    return [lower[n] for n in near[:most]]


def _goes_on(longer: str, shorter: str) -> bool:
    """Whether a name is another one with more behind: `gpt2-small` of `gpt2`, `a100-sxm4-40gb` of
    `a100`."""
    return (
        bool(shorter)
        and longer.startswith(shorter)
        and not longer[len(shorter) : len(shorter) + 1].isalnum()
    )


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
