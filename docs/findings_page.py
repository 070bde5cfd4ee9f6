"""Writes findings.md from findings.template.txt and the kept rows: `python docs/findings_page.py
[--check]`.

The rows are those of docs/studies/*/rows. The template holds no number of its own: every figure is
a placeholder `{{name argument …}}`, computed here from the rows, or `{{claim name}}`, a figure that
a paper states, from `CLAIMS`.
With --check nothing is written and the exit code is 1 if the page is out of date.
"""

from __future__ import annotations

import fnmatch
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetplan.instances.library import in_set, library
from hetplan.studies.findings import SAME, Reference, Study
from hetplan.studies.page import pipes
from hetplan.studies.rows import Row, read_rows
from hetplan.text import percent_text, seconds_text

DOCS = Path(__file__).parent
PAGE, TEMPLATE, STUDIES = DOCS / "findings.md", DOCS / "findings.template.txt", DOCS / "studies"
PLACEHOLDER = re.compile(r"\{\{([^{}]+)\}\}")
SETS = ("papers", "real", "hard")
NONE = "–"
# All rows, those of ablations among them.
EVERY = "**"
# A method's name standing for the best objective known of an instance.
BEST = "best"


@dataclass(frozen=True)
class Claim:
    """What a paper states: the figure, as it is printed there, and where."""

    value: float
    text: str
    where: str


CLAIMS = {
    "amp-cluster": Claim(1.54, "1.54×", "AMP, abstract and Table 4"),
    "amp-model": Claim(1.77, "1.77×", "AMP, abstract and Table 5"),
    "ditto": Claim(0.08, "8 %", "Ditto, text on Figure 10"),
    "poplar-least": Claim(1.02, "1.02×", "Poplar, abstract"),
    "poplar-most": Claim(3.92, "3.92×", "Poplar, abstract and Figure 4(c)"),
    "hap": Claim(2.41, "2.41×", "HAP, abstract and Figure 13"),
}


class Kept:
    """The rows of all kept studies, and the figures that the page may quote."""

    def __init__(self, folder: Path) -> None:
        rows: dict[str, Row] = {}
        for rows_folder in sorted(folder.glob("*/rows")):
            rows |= {row["key"]: row for row in read_rows(rows_folder.parent)}
        self.study = Study(list(rows.values()))
        self.by_method: dict[tuple[str, str, str], float] = {}
        for row in self.study.rows:
            if row["objective"] is not None:
                key = row["problem"], row["instance"], row["method"]
                self.by_method[key] = min(
                    row["objective"], self.by_method.get(key, row["objective"])
                )

    def rows(self, problem: str = "*", sets: str = "*", name: str = "*") -> list[Row]:
        """Those of a problem, a set and instances whose name matches; ablations only where `sets`
        is EVERY."""
        return [
            row
            for row in self.study.rows
            if (sets == EVERY or row["set"] in SETS)
            and fnmatch.fnmatchcase(row["problem"], problem)
            and fnmatch.fnmatchcase(row["set"], sets)
            and fnmatch.fnmatchcase(row["instance"], name)
        ]

    def instances(
        self, problem: str = "*", sets: str = "*", name: str = "*"
    ) -> dict[str, Reference]:
        """Of those rows, with what is best known of each."""
        return {
            row["instance"]: self.study.reference(row) for row in self.rows(problem, sets, name)
        }

    def objective(self, problem: str, instance: str, methods: str) -> float | None:
        """The best of some methods (`a,b`), or the best known; None where there is none."""
        if methods == BEST:
            return self.study.references[problem, instance].objective
        found = [self.by_method.get((problem, instance, method)) for method in methods.split(",")]
        return min((value for value in found if value is not None), default=None)

    def ratios(
        self, problem: str, numerator: str, denominator: str, name: str = "*", sets: str = "*"
    ) -> dict[str, float]:
        """Objectives of one method over another's, on the instances where both have one."""
        found = {}
        for instance in self.instances(problem, sets, name):
            above = self.objective(problem, instance, numerator)
            below = self.objective(problem, instance, denominator)
            if above is not None and below:
                found[instance] = above / below
        return found

    def excesses(self, problem: str, method: str, sets: str = "*") -> dict[str, float]:
        """Relative distance to proven optima, by instance."""
        proven = {name for name, best in self.instances(problem, sets).items() if best.proven}
        found = self.ratios(problem, method, BEST, sets=sets)
        return {name: max(0.0, ratio - 1) for name, ratio in found.items() if name in proven}


STATISTICS: dict[str, Callable[[list[float]], float]] = {
    "least": min,
    "median": statistics.median,
    "mean": statistics.fmean,
    "most": max,
}


def factor(value: float | None) -> str:
    """`1.54×`."""
    return NONE if value is None else f"{value:.3g}×"


def ratio(
    kept: Kept, problem: str, numerator: str, denominator: str, which: str, name: str = "*"
) -> str:
    """A statistic of the ratios of two methods' objectives."""
    found = list(kept.ratios(problem, numerator, denominator, name).values())
    return factor(STATISTICS[which](found)) if found else NONE


def compared(kept: Kept, problem: str, numerator: str, denominator: str, name: str = "*") -> str:
    """On how many instances two methods can be compared."""
    return str(len(kept.ratios(problem, numerator, denominator, name)))


def faster(kept: Kept, problem: str, numerator: str, denominator: str, name: str = "*") -> str:
    """On how many instances the second method's objective is lower."""
    return str(
        sum(r > 1 + SAME for r in kept.ratios(problem, numerator, denominator, name).values())
    )


def reached(
    kept: Kept, problem: str, numerator: str, denominator: str, claim: str, name: str = "*"
) -> str:
    """Whether the largest ratio is the claim's at least."""
    found = kept.ratios(problem, numerator, denominator, name).values()
    if not found:
        return "cannot be told from these rows"
    return "is reached" if max(found) >= CLAIMS[claim].value else "is not reached"


def excess(kept: Kept, problem: str, method: str, which: str, sets: str = "*") -> str:
    """A statistic of the distances to proven optima."""
    found = list(kept.excesses(problem, method, sets).values())
    return percent_text(STATISTICS[which](found)) if found else NONE


def within(kept: Kept, problem: str, method: str, claim: str, sets: str = "*") -> str:
    """On how many instances a method is within the claimed distance of the proven optimum, of how
    many."""
    found = kept.excesses(problem, method, sets).values()
    return (
        f"{sum(value <= CLAIMS[claim].value for value in found)} of {len(found)}" if found else NONE
    )


def missed(kept: Kept, problem: str, method: str, sets: str = "*", name: str = "*") -> str:
    """How often a method misses a proven optimum."""
    every = kept.excesses(problem, method, sets)
    found = [value for instance, value in every.items() if fnmatch.fnmatchcase(instance, name)]
    return f"{sum(value > SAME for value in found)} of {len(found)}" if found else NONE


def plans(kept: Kept, problem: str, method: str, sets: str = "*") -> str:
    """On how many instances of those that have a plan a method gives one."""
    found = [
        name for name, best in kept.instances(problem, sets).items() if best.objective is not None
    ]
    given = sum(kept.objective(problem, name, method) is not None for name in found)
    return f"{given} of {len(found)}" if found else NONE


def proven(kept: Kept, problem: str = "*", sets: str = "*") -> str:
    """Of how many instances the optimum is proven."""
    found = {
        (row["problem"], row["instance"]): kept.study.reference(row)
        for row in kept.rows(problem, sets)
    }
    return f"{sum(best.proven for best in found.values())} of {len(found)}" if found else NONE


def solved(kept: Kept, problem: str, method: str, sets: str = "*") -> str:
    """How many runs of an exact method ended with a proof."""
    found = [row for row in kept.rows(problem, sets) if row["method"] == method]
    return (
        f"{sum(r['status'] in ('optimal', 'infeasible') for r in found)} of {len(found)}"
        if found
        else NONE
    )


def labelled(kept: Kept, problem: str, method: str, word: str) -> str:
    """Of how many rows of a method the message has a word."""
    found = [row for row in kept.rows(problem) if row["method"] == method]
    return f"{sum(word in row['message'] for row in found)} of {len(found)}"


def where_most(kept: Kept, problem: str, method: str, sets: str = "*") -> str:
    """The instance on which a method is furthest from a proven optimum."""
    found = kept.excesses(problem, method, sets)
    return f"`{max(found, key=lambda name: found[name])}`" if found else NONE


def claim(kept: Kept, name: str) -> str:
    """What the paper states, and where."""
    return f"{CLAIMS[name].text} ({CLAIMS[name].where})"


def rows(kept: Kept, sets: str = "*") -> str:
    """How many."""
    return str(len(kept.rows(sets=sets)))


def covered(kept: Kept, name: str) -> str:
    """Of how many instances of a set there are rows."""
    there = {(row["problem"], row["instance"]) for row in kept.rows()}
    found = [
        (entry.problem, entry.name) in there
        for entry in library()
        if in_set(entry.problem, entry.name, name)
    ]
    return f"{sum(found)} of {len(found)}"


def same(kept: Kept) -> str:
    """The relative distance up to which a plan counts as optimal."""
    return f"{SAME:g}"


def limit(kept: Kept, sets: str = "*") -> str:
    """The runs' time limits in seconds, as the command line takes them."""
    found = sorted(
        {row["time_limit"] for row in kept.rows(sets=sets) if row["time_limit"] is not None}
    )
    return ", ".join(f"{value:g}" for value in found) or NONE


def conditions(kept: Kept) -> str:
    """Machines and versions, a line each."""
    lines = []
    for column in ("machine_json", "versions_json"):
        for text in sorted({row[column] for row in kept.study.rows}):
            lines.append(
                "- " + ", ".join(f"{key} {value}" for key, value in json.loads(text).items())
            )
    begun = [row["begun"] for row in kept.study.rows]
    return "\n".join([*lines, f"- runs begun {min(begun)} to {max(begun)}"])


def overview(kept: Kept) -> str:
    """The papers' own algorithms, a line for each problem and set."""
    header = (
        "problem",
        "set",
        "instances",
        "optimum proven",
        "gives a plan",
        "misses the optimum",
        "median above",
        "mean above",
        "most above",
    )
    lines = []
    for problem in kept.study.problems:
        for name in SETS:
            count = len(kept.instances(problem, name))
            if count:
                figures = [
                    excess(kept, problem, "paper", which, name)
                    for which in ("median", "mean", "most")
                ]
                found = (plans(kept, problem, "paper", name), missed(kept, problem, "paper", name))
                lines.append(
                    (problem, name, str(count), proven(kept, problem, name), *found, *figures)
                )
    return "\n".join(pipes(header, lines))


def methods(kept: Kept, problem: str) -> str:
    """A problem's heuristics by set."""
    header = (
        "method",
        "set",
        "gives a plan",
        "misses the optimum",
        "median above",
        "mean above",
        "most above",
        "on",
    )
    lines = []
    for method in kept.study.methods(problem, exact=False):
        for name in SETS:
            if any(row["method"] == method for row in kept.rows(problem, name)):
                figures = [
                    excess(kept, problem, method, which, name)
                    for which in ("median", "mean", "most")
                ]
                found = (plans(kept, problem, method, name), missed(kept, problem, method, name))
                lines.append(
                    (f"`{method}`", name, *found, *figures, where_most(kept, problem, method, name))
                )
    return "\n".join(pipes(header, lines))


def provers(kept: Kept, problem: str) -> str:
    """A problem's exact methods: proofs and seconds."""
    header = ("method", "proofs", "median time", "longest")
    lines = []
    for method in kept.study.methods(problem, exact=True):
        found = [row for row in kept.rows(problem) if row["method"] == method]
        times = [row["seconds"] for row in found if row["seconds"] is not None]
        shown = (
            (seconds_text(statistics.median(times)), seconds_text(max(times)))
            if times
            else (NONE, NONE)
        )
        lines.append((f"`{method}`", solved(kept, problem, method), *shown))
    return "\n".join(pipes(header, lines))


# What each part costs: problem, label, with the part's own restriction, without it.
PARTS = (
    ("ditto", "folding and the template: `merge` against the optimum", "merge", BEST),
    ("ditto", "recovery: `paper` against `merge`", "paper", "merge"),
    ("ditto", "folding with communication: `paper-communication` "
              "against `paper`", "paper-communication", "paper"),
    ("amp", "Megatron's order of devices, cut optimally: `megatron-order` against "
            "the optimum", "megatron-order", BEST),
    ("amp", "stages of equally many layers: `even-cut`, the optimum's placement", "even-cut", BEST),
    ("amp", "averaged types: `paper` against `megatron-order`", "paper", "megatron-order"),
    ("astra", "equal layers per type: `equal-layers` against the optimum of free "
              "instances", "equal-layers", BEST),
    ("poplar", "ZeRO below two, every device at its largest "
               "micro-batch", "largest-micro-batch", BEST),
    ("poplar", "ZeRO from two on, equal accumulation steps", "equal-steps", BEST),
    ("hap", "alternation: `paper` against the joint optimum", "paper", BEST),
)  # fmt: skip


def parts(kept: Kept) -> str:
    """The ablations as a table."""
    header = (
        "problem",
        "what is held fixed",
        "instances",
        "costs on",
        "median",
        "mean",
        "most",
        "on",
    )
    lines = []
    for problem, label, restricted, free in PARTS:
        found = kept.ratios(problem, restricted, free, sets=EVERY)
        if not found:
            lines.append((problem, label, "0", *[NONE] * 5))
            continue
        values = [value - 1 for value in found.values()]
        figures = [percent_text(STATISTICS[which](values)) for which in ("median", "mean", "most")]
        most = max(found, key=lambda name: found[name])
        costs = str(sum(value > SAME for value in values))
        lines.append((problem, label, str(len(found)), costs, *figures, f"`{most}`"))
    return "\n".join(pipes(header, lines))


FIGURES: dict[str, Callable[..., str]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        ratio, compared, faster, reached, labelled, excess, within, missed, plans, proven, solved,
        where_most, claim, rows,
        covered, same, limit, conditions, overview, methods, provers, parts,
    )
}  # fmt: skip


def filled(template: str, kept: Kept) -> str:
    """The page; raises KeyError for a figure that there is not."""

    def put(match: re.Match[str]) -> str:
        name, *arguments = match.group(1).split()
        return FIGURES[name](kept, *arguments)

    return PLACEHOLDER.sub(put, template)


def own_numbers(template: str) -> Iterator[str]:
    """Words with digits that the template says itself: outside placeholders, code and links there
    may be none."""
    text = re.sub(r"```.*?```", " ", PLACEHOLDER.sub(" ", template), flags=re.DOTALL)
    text = re.sub(r"`[^`]*`|\]\([^)]*\)", " ", text)
    yield from (word for word in text.split() if any(c.isdigit() for c in word))


def main(arguments: list[str]) -> int:
    """Write the page, or check it."""
    template = TEMPLATE.read_text(encoding="utf-8")
    new = filled(template, Kept(STUDIES))
    stray: list[Any] = list(own_numbers(template))
    if stray:
        print(f"{TEMPLATE}: numbers that no row tells: {', '.join(stray)}", file=sys.stderr)
        return 1
    if "--check" in arguments:
        old = PAGE.read_text(encoding="utf-8")
        if new != old:
            print(f"{PAGE} is out of date: run python docs/findings_page.py", file=sys.stderr)
        return int(new != old)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
