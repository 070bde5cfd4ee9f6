"""The five papers' tables and figures, each beside what hetplan makes of it.

A paper is a YAML file of this folder: its exhibits with the figures that it prints, what its text
says of them, and why ours differ. What is ours, a function works out row by row. Predictions are
hetplan's, of its own layer times; the papers measured on their own machines.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from importlib.resources import files
from itertools import product
from typing import Any

import yaml

from hetplan.formulations import family
from hetplan.instances.library import load_from_library
from hetplan.solvers.registry import load, solve
from hetplan.solvers.run import Options, Result, Run
from hetplan.studies.charts import COLOURS, figure
from hetplan.text import Table, grouped, number_text

Row = dict[str, Any]
PAPERS = ("amp", "astra", "ditto", "hap", "poplar")
AGAIN = 20.0  # seconds
MARKS = ("o-", "s--", "^:", "D-.")  # of groups, in charts


@dataclass(frozen=True, kw_only=True)
class Exhibit:
    """A table or a figure.

    name: the paper's. said: what its text says, and where. reason: why ours differ. make:
    "module:function" of this package, (fixed, row) -> the row's own figures. rows: what the paper
    prints, or the cases of a picture; each: further columns, the rows are the product; full: longer
    lists in their place, which take minutes. x, y, by: columns of the chart, and those
    whose values are lines of their own.
    """

    name: str
    title: str
    said: str
    make: str
    reason: str = ""
    fixed: Row = field(default_factory=dict)
    rows: Sequence[Row] = ({},)
    each: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    full: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    x: str = ""
    y: Sequence[str] = ()
    by: Sequence[str] = ()

    def cases(self, full: bool) -> Iterator[Row]:
        """Every row before anything is worked out; `full: true` marks those that take long."""
        each = {**self.each, **(self.full if full else {})}
        for values in product(*each.values()):
            for row in self.rows:
                if full or not row.get("full"):
                    whole = dict(zip(each, values, strict=True)) | row
                    yield {key: value for key, value in whole.items() if key != "full"}

    def table(self, notes: Sequence[str]) -> Table:
        """For people; every column that some row has."""
        columns = list(dict.fromkeys(key for row in self.rows for key in row))
        cells = [tuple(cell(row.get(key)) for key in columns) for row in self.rows]
        numbers = [i for i, key in enumerate(columns) if not any_text(self.rows, key)]
        texts = (
            f"the paper: {self.said}",
            f"why ours differs: {self.reason}" if self.reason else "",
            *notes,
        )
        title = f"{self.name}: {self.title}"
        return Table(
            title, tuple(columns), tuple(cells), tuple(filter(None, texts)), tuple(numbers)
        )

    def group(self, row: Row) -> str:
        """Which lines of the chart a row belongs to."""
        pairs = ((key, row[key]) for key in self.by)
        return ", ".join(v if isinstance(v, str) else f"{key} {v}" for key, v in pairs)

    def chart(self) -> Any | None:
        """The figure by matplotlib; None for a table without one."""
        if not self.x:
            return None
        words, many = any_text(self.rows, self.x), len(self.y) > 1
        places = [row[self.x] for row in self.rows]
        places = list(dict.fromkeys(places if words else sorted(places)))
        groups = grouped((self.group(row), row) for row in self.rows)
        made, axes = figure(max(3.4, 0.2 * len(groups) * len(self.y)))  # as high as the legend
        for number, (name, rows) in enumerate(groups.items()):
            marks = MARKS[(number if many else number // len(COLOURS)) % len(MARKS)]
            for at, column in enumerate(self.y):
                drawn = [row for row in rows if row.get(column) is not None]
                points = [(places.index(row[self.x]), row[column]) for row in drawn]
                axes.plot(
                    *zip(*points, strict=False),
                    marks[: 1 if words else None],
                    color=COLOURS[(at if many else number) % len(COLOURS)],
                    label=": ".join(filter(None, (name, column))),
                )
        axes.set_xticks(range(len(places)), [cell(place) for place in places])
        axes.set(xlabel=self.x, ylim=(0, None))
        axes.set_title(self.title, fontsize=8, wrap=True)
        axes.tick_params(axis="x", rotation=30 if words else 0)
        made.legend(frameon=False, fontsize=8, loc="outside right upper")
        return made


def any_text(rows: Sequence[Row], column: str) -> bool:
    """Whether a column has words."""
    return any(isinstance(row.get(column), str) for row in rows)


def cell(value: Any) -> str:
    """A cell as text."""
    if isinstance(value, str):
        return value
    large = value is not None and abs(value) >= 10_000
    return f"{value:,.0f}" if large else number_text(value, 4)


def exhibits(
    paper: str, name: str | None, *, full: bool, tell: Callable[[str], None]
) -> tuple[list[Exhibit], list[str]]:
    """The exhibits whose names match the shell pattern, with ours in their rows, and what holds of
    all of them. Rows are told as they begin."""
    document = yaml.safe_load(files(__name__).joinpath(f"{paper}.yaml").read_text("utf-8"))
    made = []
    for entry in document["exhibits"]:
        exhibit = Exhibit(**entry)
        if not fnmatchcase(exhibit.name, name or "*"):
            continue
        place, _, function = exhibit.make.rpartition(":")
        make, rows = load(f"{'.'.join(filter(None, (__name__, place)))}:{function}"), list[Row]()
        for row in exhibit.cases(full):
            tell(f"{exhibit.name}: {', '.join(map(cell, row.values()))}")
            rows.append(compared(row | make(exhibit.fixed, row)))
        made.append(replace(exhibit, rows=rows))
    return made, document["notes"]


def compared(row: Row) -> Row:
    """The row with ours over the paper's, where both are numbers."""
    pairs = {key: row.get(f"ours{key.removeprefix('paper')}") for key in row if "paper" in key}
    return row | {
        f"ours / {key}": ours / row[key]
        for key, ours in pairs.items()
        if ours is not None and isinstance(row[key], int | float)
    }


def planning(fixed: Row, row: Row) -> Row:
    """A packaged instance by `fixed["methods"]`."""
    instance = load_from_library(row["instance"])
    return timed(instance.problem, instance.data, fixed["methods"])


def timed(problem: str, data: Any, methods: Sequence[str]) -> Row:
    """Seconds of methods, and how far above the best of them their answers are. What takes little
    is done again, once its kernels are compiled.

    The methods run to their end: a limit in seconds would make answers depend on the machine's
    load.
    """

    def run(method: str) -> Result[Any]:
        return solve(family(problem), data, method, Run(Options(threads=1)))

    results = {method: run(method) for method in methods}
    results |= {method: run(method) for method, r in results.items() if r.seconds < AGAIN}
    best = min((r.objective for r in results.values() if r.objective is not None), default=None)
    above: Row = {
        method: round(100 * (r.objective / best - 1), 9)
        for method, r in results.items()
        if r.objective is not None and best
    }
    above |= {method: "proven" for method, r in results.items() if r.status == "optimal"}
    notes = {f"`{method}`: note": r.message for method, r in results.items() if r.message}
    seconds: Row = {f"`{method}`, s": r.seconds for method, r in results.items()}
    return seconds | {f"`{method}`, % above": value for method, value in above.items()} | notes
