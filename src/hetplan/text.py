"""Numbers, sets and tables as text for people; plain text, no terminal library."""

import html
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from hetplan.errors import one_line, printable

T = TypeVar("T")
K = TypeVar("K")


@dataclass(frozen=True)
class Column(Generic[T]):
    """A column of a table of items: its heading, the value that it shows of an item, and how the
    value reads. right: whether its cells are aligned at the right, as numbers are."""

    name: str
    value: Callable[[T], Any]
    text: Callable[[Any], str] = str
    right: bool = False

    def cell(self, item: T) -> str:
        """The column's text of an item."""
        return self.text(self.value(item))


@dataclass(frozen=True)
class Table:
    """A titled table of text cells; `notes` are lines under it. `right`: indices of right-aligned
    columns."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    right: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.header) for row in self.rows), self.title

    @classmethod
    def of(
        cls,
        title: str,
        items: Iterable[T],
        columns: Sequence[Column[T]],
        notes: Iterable[str] = (),
    ) -> "Table":
        """One row per item."""
        header = tuple(column.name for column in columns)
        rows = tuple(tuple(column.cell(item) for column in columns) for item in items)
        right = tuple(number for number, column in enumerate(columns) if column.right)
        return cls(title, header, rows, tuple(notes), right)


def visible(text: str) -> str:
    """`text` without control characters, which would reach the terminal; its lines stay lines."""
    return "\n".join(map(printable, text.split("\n")))


def comments(*lines: str) -> list[str]:
    """Comment lines of a script, a program or a configuration, one for each text whatever it
    holds."""
    return [f"# {one_line(line)}" for line in lines]


def html_text(text: str) -> str:
    """`text` for an HTML page, between tags or as an attribute's value."""
    return html.escape(visible(text))


def figure_text(text: str) -> str:
    """`text` for a figure of matplotlib, which takes what stands between dollars for
    mathematics."""
    return printable(text).replace("$", r"\$")


BINARY = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
DECIMAL = ((" T", 10**12), (" B", 10**9), (" M", 10**6), (" k", 10**3), ("", 1))
# Unit, from how many seconds on it is used, its seconds.
TIMES = (
    ("h", 36_000.0, 3600.0),
    ("min", 600.0, 60.0),
    ("s", 1.0, 1.0),
    ("ms", 1e-3, 1e-3),
    ("us", 0.0, 1e-6),
)


def seconds_text(value: float | None) -> str:
    """A time in the unit that reads best: `1.23 s`, `45.6 ms`, `7.89 us`, `2.1 h`; `-` for None."""
    if value is None:
        return "-"
    if value == 0:
        return "0 s"
    size = abs(value)
    unit, factor = next((u, f) for u, least, f in TIMES if size >= least)
    return f"{value / factor:.4g} {unit}"


def bytes_text(value: float | None) -> str:
    """A size in binary units: `1.5 GiB`; `-` for None."""
    if value is None:
        return "-"
    unit, factor = next(((u, f) for u, f in BINARY if value >= f), BINARY[-1])
    return f"{value / factor:.4g} {unit}"


def share_text(part: float, whole: float) -> str:
    """A size beside its limit, in the limit's unit: `3.59 / 14.5 GiB`."""
    unit, factor = next(((u, f) for u, f in BINARY if whole >= f), BINARY[-1])
    return f"{part / factor:.3g} / {whole / factor:.3g} {unit}"


def count_text(value: float | None) -> str:
    """A large count: `124.4 M`, `128.7 B`; `-` for None."""
    if value is None:
        return "-"
    unit, factor = next(((u, f) for u, f in DECIMAL if value >= f), DECIMAL[-1])
    return f"{value / factor:.4g}{unit}"


def number_text(value: float | None, digits: int = 6) -> str:
    """A plain number of `digits` significant digits; `-` for None."""
    return "-" if value is None else f"{value:.{digits}g}"


def digits(count: int) -> Callable[[float | None], str]:
    """`number_text` with so many significant digits, for a column."""
    return partial(number_text, digits=count)


def percent_text(value: float | None) -> str:
    """A ratio as percent, to three digits; what is only rounding (below 1e-12) is `0 %`; `-` for
    None."""
    if value is None:
        return "-"
    return "0 %" if abs(value) < 1e-12 else f"{100 * value:.3g} %"


def signed_percent_text(value: float | None) -> str:
    """A ratio as percent with its sign and one decimal: `+3.2 %`; `-` for None."""
    return "-" if value is None else f"{100 * value:+.1f} %"


def more_text(ratio: float) -> str:
    """An excess in words: `+65.2 %`, `-3 %`; `13x` from ten times more on."""
    if ratio >= 10:
        return f"{1 + ratio:.0f}x" if ratio < 1e6 else f"{1 + ratio:.2g}x"
    return percent_text(ratio) if ratio < 0 else f"+{percent_text(ratio)}"


def counted(number: int, thing: str) -> str:
    """`1 stage`, `2 stages`."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def ranges_text(values: Iterable[int]) -> str:
    """A set of whole numbers: `0-3,7,9-10`."""
    ends: list[list[int]] = []
    for value in sorted(set(values)):
        if ends and value == ends[-1][1] + 1:
            ends[-1][1] = value
        else:
            ends.append([value, value])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in ends)


def devices_counted(counts: Mapping[str, int]) -> str:
    """`12 V100-SXM2-16GB + 4 T4`."""
    return " + ".join(f"{count} {name}" for name, count in counts.items())


def names_text(names: Sequence[str]) -> str:
    """The first and the last name of a sequence: `embedding .. block7`; one where they agree."""
    return " .. ".join(dict.fromkeys([*names[:1], *names[-1:]])) or "-"


def grouped(pairs: Iterable[tuple[K, T]]) -> dict[K, list[T]]:
    """Key -> the values that stand beside it; keys and values in their order."""
    groups: dict[K, list[T]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def devices_text(places: Sequence[tuple[int, str]], devices: Iterable[int]) -> str:
    """Devices by node and type: `node 0: 2 V100 (0-1); node 3: 2 T4 (12-13)`; places: (node, type)
    of each device."""
    cells = grouped((places[device], device) for device in devices)
    by_type = Counter(name for _, name in cells)
    if len(cells) > 4:  # too many to list: say how many of each type
        return "; ".join(
            f"{sum(len(d) for (_, other), d in cells.items() if other == name)} {name} on "
            f"{nodes} nodes"
            for name, nodes in sorted(by_type.items())
        )
    return "; ".join(
        f"node {node}: {len(numbers)} {name} ({ranges_text(numbers)})"
        for (node, name), numbers in sorted(cells.items())
    )
