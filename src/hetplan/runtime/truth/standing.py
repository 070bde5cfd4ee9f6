"""All sets at once, beside what an earlier predictor said of them.

`before.json` holds the figures of the predictor of November 2026 before measured rates, software
stacks and overlapped gathers (roofline of datasheets, ring collectives, serial gathers), of the
same rows, posed in the same way.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetplan.errors import InputError
from hetplan.files import read_json
from hetplan.runtime.truth.compare import SETS, SOURCES, compare
from hetplan.runtime.truth.scores import summary

# Where the sets stand below one folder, and the parts by which one is told: files or GPU types.
FOLDERS = {"sailor": "sailor", "operators": "operators"}
PARTS = {"mosaicml": "kinds", "sailor": "kinds"}


@dataclass(frozen=True)
class Standing:
    """A part of a set: its figures, and those of the earlier predictor where there are some."""

    name: str
    part: str
    now: dict[str, Any]
    before: dict[str, Any]


def standings(folder: Path) -> Iterator[Standing]:
    """Every set below `folder` (truth, operators, sailor), part by part; raises InputError where
    none is there or a file is damaged."""
    places = {name: folder / FOLDERS.get(name, "truth") for name in SETS}
    present = {
        name: place
        for name, place in places.items()
        if any((place / file).exists() for file in SOURCES.get(name, ("validation",)))
    }
    if not present:
        raise InputError(
            "no set", where=str(folder), expected="a folder with truth, operators or sailor in it"
        )
    earlier = read_json(Path(__file__).with_name("before.json"))  # by `set/part`
    for name, place in present.items():
        whole = summary(compare(name, place))
        parts = whole.get(PARTS.get(name, "files")) or {"": whole}
        for part, figures in parts.items():
            yield Standing(name, part, figures, earlier.get(f"{name}/{part}", {}))
