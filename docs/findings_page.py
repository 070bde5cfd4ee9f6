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
import math
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import bootstrap

from hetplan.instances.library import in_set, library
from hetplan.solvers.run import relative_gap
from hetplan.studies.findings import SAME, Reference, Study, profile, shifted_mean
from hetplan.studies.page import pipes
from hetplan.studies.rows import Row, of_older_code, package_versions, read_rows
from hetplan.text import percent_text, seconds_text

DOCS = Path(__file__).parent
PAGE, TEMPLATE, STUDIES = DOCS / "findings.md", DOCS / "findings.template.txt", DOCS / "studies"
PLACEHOLDER = re.compile(r"\{\{([^{}]+)\}\}")
# Instances that nobody chose, others' own, and those that were chosen for being hard, told apart.
SETS, HARD = ("random", "papers", "real"), "hard"
NONE = "–"
# All rows, those of ablations among them.
EVERY = "**"
# Of the study of paradigms (evidence/speed/paradigms.py).
JOINT, WITHIN, WITHOUT, NOTHING = "joint", "within ", "without ", "without nothing"
FAMILIES = ("amp", "astra", "poplar", "ditto", "hap")
RESAMPLES, LEVEL = 9999, 0.95  # of bootstrap intervals
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
        for row in rows.values():  # patterns name parts of the set
            row["set"] = "random" if row["set"].startswith("random-") else row["set"]
        self.study = Study(list(rows.values()))
        self.rows_of: dict[str, dict[str, Row]] = defaultdict(dict)  # of paradigms, by workload
        self.by_method: dict[tuple[str, str, str], float] = {}
        for row in self.study.rows:
            if row["objective"] is not None:
                key = row["problem"], row["instance"], row["method"]
                self.by_method[key] = min(
                    row["objective"], self.by_method.get(key, row["objective"])
                )
            if row["set"] == "paradigms":
                self.rows_of[row["instance"]][row["method"]] = row

    def rows(self, problem: str = "*", sets: str = "*", name: str = "*") -> list[Row]:
        """Those of a problem, a set and instances whose name matches; ablations only where `sets`
        is EVERY."""
        return [
            row
            for row in self.study.rows
            if (sets == EVERY or row["set"] in (*SETS, HARD))
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
        """Relative distance to what is best known, by instance."""
        ratios = self.ratios(problem, method, BEST, sets=sets)
        return {name: max(0.0, ratio - 1) for name, ratio in ratios.items()}

    def replayed(self, workload: str, method: str) -> float | None:
        """Replayed seconds of a workload's row of the study of paradigms."""
        row = self.rows_of[workload].get(method)
        return None if row is None else row["objective"]

    def best(self, workload: str) -> float:
        """The least replayed seconds of all that is known of a workload."""
        return self.study.references[JOINT, workload].objective or math.nan

    def within(self, workload: str, family: str) -> float | None:
        """The least replayed seconds in a family's own space."""
        own = [
            row["objective"]
            for method, row in self.rows_of[workload].items()
            if method == WITHIN + family or method.startswith(f"{family}/")
        ]
        return min((seconds for seconds in own if seconds is not None), default=None)

    def choice(self, workload: str, family: str, method: str = "") -> Row | None:
        """The plan that a family's own formula prefers, of its exact methods (or of those that
        begin so); of plans that fit when replayed."""
        rows = [
            (row, json.loads(row["details_json"]))
            for name, row in self.rows_of[workload].items()
            if name.startswith(f"{family}/{method}") and row["objective"] is not None
        ]
        priced = [
            (about["closed_form_seconds"], row["method"], row)
            for row, about in rows
            if about["closed_form_seconds"] and (method or about["exact"])
        ]
        return min(priced, key=itemgetter(0))[2] if priced else None


STATISTICS: dict[str, Callable[[list[float]], float]] = {
    "least": min,
    "median": statistics.median,
    "mean": shifted_mean,
    "most": max,
}


def closed_form(row: Row) -> float:
    """What the row's family prices its plan at, in seconds."""
    return float(json.loads(row["details_json"])["closed_form_seconds"])


def interval(values: Sequence[float]) -> str:
    """The bootstrap interval of the shifted mean over instances; empty of few."""
    if len(values) < 5 or max(values) - min(values) <= SAME:
        return ""

    def mean(sample: Any, axis: int) -> Any:
        return np.expm1(np.log1p(sample).mean(axis=axis))

    ends = bootstrap(
        (np.array(values),), mean, n_resamples=RESAMPLES, confidence_level=LEVEL,
        method="percentile", rng=np.random.default_rng(0),
    ).confidence_interval  # fmt: skip
    return f" [{signed(ends.low)}, {signed(ends.high)}]"


def signed(value: float) -> str:
    """As a percentage, to three digits; below zero as well."""
    return f"-{percent_text(-value)}" if value < -SAME else percent_text(max(value, 0.0))


def estimated(values: Sequence[float]) -> str:
    """`7.3 % [5.1 %, 9.9 %]`: the shifted mean and its interval."""
    return signed(shifted_mean(values)) + interval(values) if values else NONE


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
    """A statistic of the distances to what is best known."""
    found = list(kept.excesses(problem, method, sets).values())
    return percent_text(STATISTICS[which](found)) if found else NONE


def within(kept: Kept, problem: str, method: str, claim: str, sets: str = "*") -> str:
    """On how many instances a method is within the claimed distance of the best known, of how
    many."""
    found = kept.excesses(problem, method, sets).values()
    return (
        f"{sum(value <= CLAIMS[claim].value for value in found)} of {len(found)}" if found else NONE
    )


def missed(kept: Kept, problem: str, method: str, sets: str = "*", name: str = "*") -> str:
    """How often a method misses the optimum: a better plan is known."""
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
    """The instance on which a method is furthest from what is best known."""
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
    machines = [json.loads(row["machine_json"]) for row in kept.study.rows]
    lines = []
    for entries in (machines, map(package_versions, kept.study.rows)):
        texts = {", ".join(f"{key} {value}" for key, value in each.items()) for each in entries}
        lines += [f"- {text}" for text in sorted(texts)]
    begun = [row["begun"] for row in kept.study.rows]
    return "\n".join([*lines, f"- runs begun {min(begun)} to {max(begun)}"])


def labelled_name(kept: Kept, problem: str, method: str) -> str:
    """The method; how many of its rows are of a search that was cut off, and how many are of an
    older version of its code."""
    rows = [row for row in kept.rows(problem) if row["method"] == method]
    counts = {
        "A* cut off": sum("cut off" in (row["message"] or "") for row in rows),
        "of older code": sum(map(of_older_code, rows)),
    }
    remarks = [f"{text}, {count} of {len(rows)}" for text, count in counts.items() if count]
    return f"`{method}`" + (f" ({'; '.join(remarks)})" if remarks else "")


def older(kept: Kept) -> str:
    """How many rows are of an older version of their method's code."""
    return f"{sum(map(of_older_code, kept.rows()))} of {len(kept.rows())}"


ABOVE = ("instances", "gives a plan", "misses the optimum", "mean above", "median", "most", "on")


def above(kept: Kept, problem: str, method: str, sets: str) -> tuple[str, ...]:
    """The figures of a method on a set; the interval only of instances that nobody chose."""
    values = list(kept.excesses(problem, method, sets).values())
    mean = estimated(values) if sets == "random" else excess(kept, problem, method, "mean", sets)
    return (
        str(len(kept.instances(problem, sets))),
        plans(kept, problem, method, sets),
        missed(kept, problem, method, sets),
        mean,
        excess(kept, problem, method, "median", sets),
        excess(kept, problem, method, "most", sets),
        where_most(kept, problem, method, sets),
    )


def overview(kept: Kept, sets: str) -> str:
    """The papers' own algorithms on a set, a line for each problem."""
    lines = [
        (problem, proven(kept, problem, sets), *above(kept, problem, "paper", sets))
        for problem in FAMILIES
        if kept.instances(problem, sets)
    ]
    return "\n".join(pipes(("problem", "optimum proven", *ABOVE), lines))


def methods(kept: Kept, problem: str) -> str:
    """A problem's heuristics by set."""
    lines = [
        (labelled_name(kept, problem, method), name, *above(kept, problem, method, name))
        for method in kept.study.methods(problem, exact=False)
        for name in SETS
        if any(row["method"] == method for row in kept.rows(problem, name))
    ]
    return "\n".join(pipes(("method", "set", *ABOVE), lines))


def hard(kept: Kept) -> str:
    """All heuristics on the instances that were chosen for being hard."""
    lines = [
        (problem, labelled_name(kept, problem, method), *above(kept, problem, method, HARD))
        for problem in FAMILIES
        for method in kept.study.methods(problem, exact=False)
        if any(row["method"] == method for row in kept.rows(problem, HARD))
    ]
    return "\n".join(pipes(("problem", "method", *ABOVE), lines))


def paired(kept: Kept, problem: str) -> str:
    """Other heuristics against the paper's own algorithm, instance by instance; hard ones apart."""
    lines = []
    for method in dict.fromkeys(row["method"] for row in kept.rows(problem) if not row["exact"]):
        ratios: dict[str, float] = {}
        for name in SETS:
            ratios |= kept.ratios(problem, method, "paper", sets=name)
        if method != "paper" and ratios:
            values = [ratio - 1 for ratio in ratios.values()]
            slower, faster = sum(v > SAME for v in values), sum(v < -SAME for v in values)
            counts = (str(len(values)), str(slower), str(faster))
            lines.append((f"`{method}`", *counts, estimated(values)))
    header = ("against `paper`", "instances", "slower on", "faster on", "slower by, mean")
    return "\n".join(pipes(header, lines))


WITHIN_OF_BEST = (SAME, 0.01, 0.05, 0.25, 1.0)
TIMES_OF_FASTEST = (1.0, 2.0, 10.0, 100.0)


def quality(kept: Kept, problem: str) -> str:
    """Performance profile of plans: on what share of instances a heuristic is at most so far above
    the best known; without a plan it never is. Hard ones apart."""
    lines = []
    for method in kept.study.methods(problem, exact=False):
        values: dict[str, float] = {}
        total = 0
        for name in SETS:
            if any(row["method"] == method for row in kept.rows(problem, name)):
                values |= kept.excesses(problem, method, name)
                total += len(kept.instances(problem, name))
        if total:
            shares = [
                sum(v <= most + 1e-9 for v in values.values()) / total for most in WITHIN_OF_BEST
            ]
            lines.append((f"`{method}`", str(total), *map(percent_text, shares)))
    ends = ["optimum", *(f"at most {percent_text(most)} above" for most in WITHIN_OF_BEST[1:])]
    return "\n".join(pipes(("method", "instances", *ends), lines))


def provers(kept: Kept, problem: str) -> str:
    """A problem's exact methods: proofs, seconds (a run without a proof counts as it took), and the
    performance profile of Dolan and Moré."""
    names = kept.study.methods(problem, exact=True)
    ratios = profile(kept.study, problem, names)
    counts = {name: sum(row["method"] == name for row in kept.study.of(problem)) for name in names}
    lines = []
    for method in names:
        rows = [row for row in kept.rows(problem) if row["method"] == method]
        times = [row["seconds"] for row in rows if row["seconds"] is not None]
        shares = [
            percent_text(sum(value <= most for value in ratios[method]) / counts[method])
            for most in TIMES_OF_FASTEST
        ]
        shown = (seconds_text(shifted_mean(times)), seconds_text(max(times)))
        lines.append((f"`{method}`", solved(kept, problem, method), *shown, *shares))
    ends = ["fastest", *(f"at most {most:g}×" for most in TIMES_OF_FASTEST[1:])]
    return "\n".join(pipes(("method", "proofs", "mean time", "longest", *ends), lines))


# What is compared with the optimum of a family's formula, in both currencies.
PROCEDURES = (
    ("amp", "paper"), ("amp", "megatron"), ("poplar", "paper"), ("ditto", "paper"),
    ("ditto", "greedy-joined"), ("hap", "paper"), ("hap", "dp-even"), ("hap", "dp-proportional"),
)  # fmt: skip


def currencies(kept: Kept) -> str:
    """Heuristics above the optimum of their formula: priced by the formula, and replayed."""
    lines = []
    for family, method in PROCEDURES:
        pairs = [
            (kept.choice(workload, family, method), kept.choice(workload, family))
            for workload in kept.rows_of
        ]
        both = [(one, other) for one, other in pairs if one is not None and other is not None]
        priced = [closed_form(one) / closed_form(other) - 1 for one, other in both]
        seen = [one["objective"] / other["objective"] - 1 for one, other in both]
        turned = sum(p > SAME and s < -SAME for p, s in zip(priced, seen, strict=True))
        ratios = [other["objective"] / closed_form(other) - 1 for _, other in both]
        lines.append(
            (
                f"{family} `{method}`", str(len(both)), estimated(priced), estimated(seen),
                str(turned), f"{1 + shifted_mean(ratios):.3g}×" if ratios else NONE,
            )
        )  # fmt: skip
    header = (
        *("procedure", "workloads", "above, by the formula", "above, replayed"),
        *("worse by the formula, faster replayed", "replay over formula, optimum"),
    )
    return "\n".join(pipes(header, lines))


def prices(kept: Kept) -> str:
    """What each paradigm costs: its best plans over the best at all, replayed."""
    lines = []
    for family in FAMILIES:
        spaces, choices, papers = dict[str, float](), list[float](), list[float]()
        for workload in kept.rows_of:
            best, own = kept.best(workload), kept.within(workload, family)
            if own is not None:
                spaces[workload] = own / best - 1
            chosen = kept.choice(workload, family)
            paper = kept.choice(workload, family, "paper")
            choices += [chosen["objective"] / best - 1] if chosen else []
            papers += [paper["objective"] / best - 1] if paper else []
        if not spaces:
            continue
        most = max(spaces, key=lambda name: spaces[name])
        lines.append(
            (
                family, f"{len(spaces)} of {len(kept.rows_of)}", estimated(list(spaces.values())),
                percent_text(statistics.median(spaces.values())), percent_text(spaces[most]),
                f"`{most}`", f"{estimated(choices)} ({len(choices)})",
                f"{estimated(papers)} ({len(papers)})" if papers else NONE,
            )
        )  # fmt: skip
    header = (
        *("paradigm", "has a plan", "best in its space, mean", "median", "most", "on"),
        *("optimum of its formula", "paper's own procedure"),
    )
    return "\n".join(pipes(header, lines))


def freedoms(kept: Kept) -> str:
    """What a search loses that has one freedom less, against the same search with all."""
    names = [
        method.removeprefix(WITHOUT)
        for method in next(iter(kept.rows_of.values()), {})
        if method.startswith(WITHOUT) and method != NOTHING
    ]
    lines = []
    for name in names:
        losses = {}
        for workload in kept.rows_of:
            less = kept.replayed(workload, WITHOUT + name)
            whole = kept.replayed(workload, NOTHING)
            if less is not None and whole is not None:
                losses[workload] = less / whole - 1
        if not losses:
            continue
        most = max(losses, key=lambda one: losses[one])
        lines.append((estimated(list(losses.values())), name, losses, most))
    lines.sort(key=lambda line: -shifted_mean(list(line[2].values())))
    header = ("without", "workloads", "slower by, mean", "slower on", "faster on", "most", "on")
    return "\n".join(
        pipes(
            header,
            [
                (
                    name, str(len(losses)), mean, str(sum(v > SAME for v in losses.values())),
                    str(sum(v < -SAME for v in losses.values())), percent_text(losses[most]),
                    f"`{most}`",
                )
                for mean, name, losses, most in lines
            ],
        )
    )  # fmt: skip


def searched(kept: Kept) -> str:
    """How far the search with all freedoms is above what all searches together know."""
    ratios = [
        whole / kept.best(workload) - 1
        for workload in kept.rows_of
        if (whole := kept.replayed(workload, NOTHING)) is not None
    ]
    return estimated(ratios)


def workload_gap(kept: Kept) -> str:
    """The median gap of the best known plans to the bound on all plans."""
    references = [kept.study.references[JOINT, workload] for workload in kept.rows_of]
    gaps = [relative_gap(best.objective, best.bound) for best in references]
    known = [gap for gap in gaps if gap is not None]
    return percent_text(statistics.median(known)) if known else NONE


def workloads(kept: Kept) -> str:
    """How many the study of paradigms has."""
    return str(len(kept.rows_of))


def most_devices(kept: Kept) -> str:
    """Of the clusters of the study of paradigms."""
    rows = (row for rows in kept.rows_of.values() for row in rows.values())
    counts = [json.loads(row["details_json"]).get("devices", {}) for row in rows]
    return str(max(sum(each.values()) for each in counts)) if counts else NONE


def effort(kept: Kept) -> str:
    """Moves and seconds of a search of the study of paradigms."""
    rows = [row for rows in kept.rows_of.values() for row in rows.values()]
    every = [row for row in rows if row["method"].startswith((WITHIN, WITHOUT))]
    steps = [json.loads(row["details_json"])["steps"] for row in every]
    if not steps:
        return NONE
    seconds = seconds_text(statistics.median(row["seconds"] for row in every))
    return f"{statistics.median(steps):,.0f} steps in the median, at most {max(steps):,}; {seconds}"


def resamples(kept: Kept) -> str:
    """How the intervals are made."""
    return f"percentile, {LEVEL:.0%}, {RESAMPLES:,} resamples"


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
        where_most, claim, rows, covered, same, limit, conditions, overview, methods, provers,
        parts, hard, paired, quality, currencies, prices, freedoms, searched, workload_gap,
        workloads, effort, most_devices, resamples, older,
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
