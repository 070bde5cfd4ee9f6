"""Numbers, sets and tables as plain text for people."""

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
    """A column of a table with one item per row; `Table.of` writes the cells."""

    name: str  # heading
    value: Callable[[T], Any]  # item -> the value that the column shows of it
    text: Callable[[Any], str] = str  # value -> text of the cell
    right: bool = False  # whether cells are aligned at the right, as numbers are

    def cell(self, item: T) -> str:
        """The text of the column's cell in the row of an item."""
        return self.text(self.value(item))


@dataclass(frozen=True)
class Table:
    """A table of text cells. The command line and the reports print it."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]  # [row][column]
    notes: tuple[str, ...] = ()  # lines under the table
    right: tuple[int, ...] = ()  # indices of the columns that are aligned at the right

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
        """A table with one row for each of `items`."""
        header = tuple(column.name for column in columns)
        rows = tuple(tuple(column.cell(item) for column in columns) for item in items)
        right = tuple(number for number, column in enumerate(columns) if column.right)
        return cls(title, header, rows, tuple(notes), right)


def visible(text: str) -> str:
    """`text` with control characters escaped, which would steer the terminal; its lines stay."""
    return "\n".join(map(printable, text.split("\n")))


def comments(*lines: str) -> list[str]:
    """The texts as comment lines of a script, a program or a configuration. Each text gives exactly
    one line, even if it contains line breaks."""
    return [f"# {one_line(line)}" for line in lines]


def html_text(text: str) -> str:
    """`text` escaped for an HTML page, between tags or as an attribute's value."""
    return html.escape(visible(text))


def figure_text(text: str) -> str:
    """`text` escaped for a figure of matplotlib, which typesets text between dollar signs as
    mathematics."""
    return printable(text).replace("$", r"\$")


# (Unit, its size), the largest unit first.
BINARY = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
DECIMAL = ((" T", 10**12), (" B", 10**9), (" M", 10**6), (" k", 10**3), ("", 1))
# (Unit, least time in seconds that is written in it, its length in seconds). Times below 10 min are
# in seconds, and times below 10 h in minutes.
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
    """Bytes beside their limit, in the limit's unit: `3.59 / 14.5 GiB`."""
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
    """`number_text` with `count` significant digits, as the `text` of a column."""
    return partial(number_text, digits=count)


def percent_text(value: float | None) -> str:
    """A ratio as percent, to three digits: `12.3 %`; `-` for None. A ratio below 1e-12 is an error
    of rounding and reads `0 %`."""
    if value is None:
        return "-"
    return "0 %" if abs(value) < 1e-12 else f"{100 * value:.3g} %"


def signed_percent_text(value: float | None) -> str:
    """A ratio as percent with its sign and one decimal: `+3.2 %`; `-` for None."""
    return "-" if value is None else f"{100 * value:+.1f} %"


def more_text(ratio: float) -> str:
    """A relative change: `+65.2 %`, `-3 %`; from a ratio of 10 on as a factor, `13x`, and from a
    million on to two digits, `1.3e+06x`."""
    if ratio >= 1e6:
        return f"{1 + ratio:.2g}x"
    if ratio >= 10:
        return f"{1 + ratio:.0f}x"
    return percent_text(ratio) if ratio < 0 else f"+{percent_text(ratio)}"


def counted(number: int, thing: str) -> str:
    """The number with its noun in singular or plural: `1 stage`, `2 stages`."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def ranges_text(values: Iterable[int]) -> str:
    """A set of whole numbers as ranges: `0-3,7,9-10`."""
    ranges: list[list[int]] = []  # [first, last] of each run of consecutive numbers
    for value in sorted(set(values)):
        if ranges and value == ranges[-1][1] + 1:
            ranges[-1][1] = value
        else:
            ranges.append([value, value])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    return ",".join(texts)


def devices_counted(counts: Mapping[str, int]) -> str:
    """Device type -> count as text: `12 V100-SXM2-16GB + 4 T4`."""
    return " + ".join(f"{count} {name}" for name, count in counts.items())


def names_text(names: Sequence[str]) -> str:
    """The first and the last name of a sequence: `embedding .. block7`. One name where both are
    equal; `-` for an empty sequence."""
    return " .. ".join(dict.fromkeys([*names[:1], *names[-1:]])) or "-"


def grouped(pairs: Iterable[tuple[K, T]]) -> dict[K, list[T]]:
    """Key -> the values of all pairs with this key. Keys and values keep the order of the pairs."""
    groups: dict[K, list[T]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def devices_text(places: Sequence[tuple[int, str]], devices: Iterable[int]) -> str:
    """Devices by node and type: `node 0: 2 V100 (0-1); node 3: 2 T4 (12-13)`. On more than four
    nodes only the devices and nodes of each type are counted: `16 V100 on 8 nodes`.

    places: (node, type) of each device of the cluster. devices: the numbers of the devices.
    """
    on_node = grouped((places[device], device) for device in devices)
    if len(on_node) <= 4:
        return "; ".join(
            f"node {node}: {len(numbers)} {name} ({ranges_text(numbers)})"
            for (node, name), numbers in sorted(on_node.items())
        )
    devices_of, nodes_of = Counter[str](), Counter[str]()
    for (_, name), numbers in on_node.items():
        devices_of[name] += len(numbers)
        nodes_of[name] += 1
    return "; ".join(
        f"{devices_of[name]} {name} on {nodes} nodes" for name, nodes in sorted(nodes_of.items())
    )
