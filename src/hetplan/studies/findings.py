"""What a study's rows say: how far each method is from what is best known, how often and how fast
proofs end.

reference: of an instance, the best objective known (of the rows and of the library); `proven` where
the best bound meets it. excess: (objective - reference) / reference of a row: how far it is above
the optimum at least, and exactly where the reference is proven. A row misses the optimum where its
excess is more than `SAME`. The mean of excesses is that of `shifted_mean`. All objectives are
predicted iteration times in seconds.
"""

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from typing import Any

import numpy as np

from hetplan.instances.answers import changes, shelf
from hetplan.instances.library import Instance, find
from hetplan.solvers.run import OPTIMAL_GAP, relative_gap
from hetplan.studies.rows import Row, findings_of_rows, made_on
from hetplan.text import grouped

# Excess up to this is called the optimum: the gap at which proofs may stop.
SAME = 2 * OPTIMAL_GAP
PROVEN = ("optimal", "infeasible")


@dataclass(frozen=True)
class Reference:
    """What is best known of an instance; None where nothing is."""

    objective: float | None
    bound: float | None

    @property
    def proven(self) -> bool:
        """Whether the best objective is proven optimal."""
        gap = relative_gap(self.objective, self.bound)
        return gap is not None and gap <= SAME


@dataclass(frozen=True)
class Summary:
    """One method on one problem. Shares from 0 to 1; excesses and seconds None where no run has
    any."""

    problem: str
    method: str
    exact: bool
    runs: int
    solved: int  # runs with a decision
    proven: int  # runs that ended with a proof (optimal or infeasible)
    missed: float | None  # share of the solved on whose instances a better decision is known
    median_excess: float | None
    mean_excess: float | None
    mean_interval: tuple[float, float] | None  # of the mean, 95 %; see `interval`
    worst_excess: float | None
    worst: Row | None  # the one of that excess
    median_seconds: float | None
    most_seconds: float | None
    most_bytes: int | None


class Study:
    """Rows with their references."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = list(rows)
        self.references = references(self.rows)

    @property
    def problems(self) -> list[str]:
        """Those with rows."""
        return list(dict.fromkeys(row["problem"] for row in self.rows))

    def of(self, problem: str) -> list[Row]:
        """The rows of a problem."""
        return [row for row in self.rows if row["problem"] == problem]

    def reference(self, row: Row) -> Reference:
        """Of the row's instance."""
        return self.references[instance_of(row)]

    def excess(self, row: Row) -> float | None:
        """Relative, against the best known; None without an objective."""
        best = self.reference(row).objective
        if row["objective"] is None or best is None:
            return None
        if best <= 0:
            return 0.0 if row["objective"] <= 0 else None
        return max(0.0, float(row["objective"]) / best - 1)

    def methods(self, problem: str, *, exact: bool) -> list[str]:
        """Of a problem's rows: those that prove optima, or those that do not."""
        wanted = (row["method"] for row in self.of(problem) if row["exact"] is exact)
        return list(dict.fromkeys(wanted))

    def summaries(self, problem: str) -> list[Summary]:
        """One per method, exact ones first."""
        runs = grouped((row["method"], row) for row in self.of(problem)).values()
        return [self.summary(rows) for rows in sorted(runs, key=lambda rows: not rows[0]["exact"])]

    def summary(self, rows: Sequence[Row]) -> Summary:
        """Of the rows of one method on one problem."""
        solved = [(excess, row) for row in rows if (excess := self.excess(row)) is not None]
        excesses = [excess for excess, _ in solved]
        worst = max(solved, key=itemgetter(0), default=None)
        seconds = [row["seconds"] for row in rows if row["seconds"] is not None]
        return Summary(
            problem=rows[0]["problem"],
            method=rows[0]["method"],
            exact=rows[0]["exact"],
            runs=len(rows),
            solved=len(solved),
            proven=sum(row["status"] in PROVEN for row in rows),
            missed=over(lambda values: sum(v > SAME for v in values) / len(values), excesses),
            median_excess=over(statistics.median, excesses),
            mean_excess=over(shifted_mean, excesses),
            mean_interval=interval(excesses),
            worst_excess=None if worst is None else worst[0],
            worst=None if worst is None else worst[1],
            median_seconds=over(statistics.median, seconds),
            most_seconds=max(seconds, default=None),
            most_bytes=max(filter(None, (row["peak_bytes"] for row in rows)), default=None),
        )

    def worst_cases(self, count: int) -> list[tuple[float, Row]]:
        """The largest excesses of heuristics, one per instance and method."""
        worst: dict[tuple[str, str, str], tuple[float, Row]] = {}
        for row in self.rows:
            excess = self.excess(row)
            if excess is not None and excess > SAME and not row["exact"]:
                key = (*instance_of(row), row["method"])
                worst[key] = max(worst.get(key, (excess, row)), (excess, row), key=itemgetter(0))
        return sorted(worst.values(), key=itemgetter(0), reverse=True)[:count]

    def conflicts(self) -> list[str]:
        """What no study may show: objectives below a proven bound, proofs of infeasibility beside a
        decision."""
        pairs = [(row, self.reference(row)) for row in self.rows]
        below = [
            f"{row['instance']}: {row['method']} is below a proven bound"
            for row, best in pairs
            if None not in (row["objective"], best.bound)
            and row["objective"] < (best.bound or 0.0) * (1 - SAME)
        ]
        return below + [
            f"{row['instance']}: {row['method']} says infeasible, a decision is known"
            for row, best in pairs
            if row["status"] == "infeasible" and best.objective is not None
        ]


def instance_of(row: Row) -> tuple[str, str]:
    """Problem and name."""
    return row["problem"], row["instance"]


def repriced(rows: Sequence[Row]) -> list[str]:
    """What is wrong with rows of packaged instances whose decisions are priced again, a line
    each."""
    entries = {key: find("/".join(key)) for key in map(instance_of, rows)}
    known = {key: entry.load() for key, entry in entries.items() if entry is not None}
    own = [r for r in rows if instance_of(r) in known and made_on(r, known[instance_of(r)])]
    return [line for c in changes(shelf(None), findings_of_rows(own, "rows")) for line in c.refused]


def references(rows: Iterable[Row]) -> dict[tuple[str, str], Reference]:
    """Of every instance in the rows."""
    return {
        key: Reference(
            min(
                (v for r in own for v in (r["objective"], r["best_known"]) if v is not None),
                default=None,
            ),
            max(
                (v for r in own for v in (r["bound"], r["bound_known"]) if v is not None),
                default=None,
            ),
        )
        for key, own in grouped((instance_of(row), row) for row in rows).items()
    }


def over(function: Callable[[Sequence[float]], float], values: Sequence[float]) -> float | None:
    """The function of the values, None of none."""
    return function(values) if values else None


def shifted_mean(values: Sequence[float], shift: float = 1.0) -> float:
    """Shifted geometric mean. Of excesses, with a shift of 1, it is the geometric mean of ratios to
    what is best known, less 1; of seconds, those far below the shift hardly count."""
    return statistics.geometric_mean(value + shift for value in values) - shift


def interval(values: Sequence[float], resamples: int = 9999) -> tuple[float, float] | None:
    """The 95 % percentile bootstrap interval of the `shifted_mean` over runs (Efron and Tibshirani
    1993, Section 13.3); None of fewer than five values, or where all are equal."""
    if len(values) < 5 or max(values) - min(values) <= SAME:
        return None
    drawn = np.random.default_rng(0).choice(np.log1p(values), (resamples, len(values)))
    low, high = np.expm1(np.quantile(drawn.mean(axis=1), (0.025, 0.975)))
    return float(low), float(high)


def cactus(rows: Iterable[Row]) -> list[float]:
    """Seconds of the runs that ended with a proof, ascending: the k-th is when k instances are
    proven."""
    return sorted(row["seconds"] for row in rows if row["status"] in PROVEN)


def profile(study: Study, problem: str, methods: Sequence[str]) -> dict[str, list[float]]:
    """Performance profile (Dolan and Moré 2002): per method the ratios of its seconds to the
    fastest's, ascending.

    Of runs with a proof; each instance and seed counts once, those that no method proves are left
    out.
    """
    seconds: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    for row in study.of(problem):
        if row["method"] in methods and row["status"] in PROVEN:
            seconds[row["instance"], row["seed"]][row["method"]] = max(row["seconds"], 1e-6)
    ratios: dict[str, list[float]] = {method: [] for method in methods}
    for times in seconds.values():
        fastest = min(times.values())
        for method, value in times.items():
            ratios[method].append(value / fastest)
    return {method: sorted(values) for method, values in ratios.items()}


def instances_of(study: Study) -> list[tuple[str, str, str]]:
    """(set, problem, instance) of the rows, each instance once."""
    sets = {instance_of(row): row["set"] for row in study.rows}
    return [(name, *instance) for instance, name in sets.items()]


# Where a row's details say how large its instance is.
SIZE_KEY = "instance_size"
# Problem -> what is counted, and how, of the instance's data.
SIZES: Mapping[str, tuple[str, Callable[[Any], int]]] = {
    "amp": ("devices × layers", lambda data: len(data.devices) * len(data.layers)),
    "astra": (
        "stages × layers × types",
        lambda data: data.stages * data.layers * len(data.device_types),
    ),
    "hap": ("triples × devices", lambda data: len(data.triples) * len(data.devices)),
    "poplar": (
        "devices × largest micro-batch",
        lambda data: sum(len(d.step_seconds) for d in data.devices),
    ),
    "ditto": (
        "devices × layers",
        lambda data: (
            sum(kind.nodes * kind.devices_per_node for kind in data.device_types)
            * len(data.device_types[0].forward_seconds)
        ),
    ),
}


def size_of(instance: Instance) -> int | None:
    """How large an instance is; None for a problem without a measure."""
    measure = SIZES.get(instance.problem)
    return None if measure is None else measure[1](instance.data)


def row_size(row: Row) -> int | None:
    """Of a row's instance: as its details say, else of the library's instance of that name; None
    where unknown."""
    size = json.loads(row["details_json"] or "{}").get(SIZE_KEY)
    return int(size) if size is not None else library_size(row["problem"], row["instance"])


@cache
def library_size(problem: str, name: str) -> int | None:
    """Of a packaged instance; None where there is none of that name."""
    entry = find(f"{problem}/{name}")
    return None if entry is None else size_of(entry.load())
