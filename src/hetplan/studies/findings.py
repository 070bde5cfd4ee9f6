"""The findings of a study's rows: how far each method's objectives are above the best known ones,
how often its runs end with a proof, and how fast.

The reference of an instance is the best objective known, from the rows and from the library; it is
proven where the best bound meets it. The excess of a row is (objective - reference) / reference:
the least distance from the optimum, and the exact one where the reference is proven. A row misses
the optimum where its excess is more than `SAME`. The mean of excesses is that of `shifted_mean`.
All objectives are predicted iteration times in seconds.
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
    """The best objective and the best bound known of an instance; None where none is known."""

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
        """The problems that have rows."""
        return list(dict.fromkeys(row["problem"] for row in self.rows))

    def of(self, problem: str) -> list[Row]:
        """The rows of a problem."""
        return [row for row in self.rows if row["problem"] == problem]

    def reference(self, row: Row) -> Reference:
        """The reference of the row's instance."""
        return self.references[instance_of(row)]

    def excess(self, row: Row) -> float | None:
        """The row's excess over the reference; None without an objective."""
        best = self.reference(row).objective
        if row["objective"] is None or best is None:
            return None
        if best <= 0:
            return 0.0 if row["objective"] <= 0 else None
        return max(0.0, float(row["objective"]) / best - 1)

    def methods(self, problem: str, *, exact: bool) -> list[str]:
        """The methods of a problem's rows that prove optima (exact), or those that do not."""
        wanted = (row["method"] for row in self.of(problem) if row["exact"] is exact)
        return list(dict.fromkeys(wanted))

    def summaries(self, problem: str) -> list[Summary]:
        """One per method, exact ones first."""
        runs = grouped((row["method"], row) for row in self.of(problem)).values()
        return [self.summary(rows) for rows in sorted(runs, key=lambda rows: not rows[0]["exact"])]

    def summary(self, rows: Sequence[Row]) -> Summary:
        """The summary of the rows of one method on one problem."""
        solved = [(excess, row) for row in rows if (excess := self.excess(row)) is not None]
        excesses = [excess for excess, _ in solved]
        worst = max(solved, key=itemgetter(0), default=None)
        seconds = [row["seconds"] for row in rows if row["seconds"] is not None]
        peaks = [row["peak_bytes"] for row in rows if row["peak_bytes"]]
        return Summary(
            problem=rows[0]["problem"],
            method=rows[0]["method"],
            exact=rows[0]["exact"],
            runs=len(rows),
            solved=len(solved),
            proven=sum(row["status"] in PROVEN for row in rows),
            missed=over(share_above_optimum, excesses),
            median_excess=over(statistics.median, excesses),
            mean_excess=over(shifted_mean, excesses),
            mean_interval=interval(excesses),
            worst_excess=None if worst is None else worst[0],
            worst=None if worst is None else worst[1],
            median_seconds=over(statistics.median, seconds),
            most_seconds=max(seconds, default=None),
            most_bytes=max(peaks, default=None),
        )

    def worst_cases(self, count: int) -> list[tuple[float, Row]]:
        """The largest excesses of heuristics, one per instance and method."""
        worst: dict[tuple[str, str, str], tuple[float, Row]] = {}
        for row in self.rows:
            excess = self.excess(row)
            if row["exact"] or excess is None or excess <= SAME:
                continue
            key = (*instance_of(row), row["method"])
            if key not in worst or excess > worst[key][0]:
                worst[key] = (excess, row)
        return sorted(worst.values(), key=itemgetter(0), reverse=True)[:count]

    def conflicts(self) -> list[str]:
        """Contradictions, a line each: an objective below a proven bound, and a proof of
        infeasibility where a decision is known."""
        below, beside = [], []
        for row in self.rows:
            name, method, best = row["instance"], row["method"], self.reference(row)
            objective, bound = row["objective"], best.bound
            if objective is not None and bound is not None and objective < bound * (1 - SAME):
                below.append(f"{name}: {method} is below a proven bound")
            if row["status"] == "infeasible" and best.objective is not None:
                beside.append(f"{name}: {method} says infeasible, a decision is known")
        return below + beside


def instance_of(row: Row) -> tuple[str, str]:
    """The problem and the name of a row's instance."""
    return row["problem"], row["instance"]


def repriced(rows: Sequence[Row]) -> list[str]:
    """Price the decisions of packaged instances again; returns a line for each wrong row."""
    entries = {key: find("/".join(key)) for key in map(instance_of, rows)}
    packaged = {key: entry.load() for key, entry in entries.items() if entry is not None}
    checkable = []
    for row in rows:
        instance = packaged.get(instance_of(row))
        if instance is not None and made_on(row, instance):
            checkable.append(row)
    priced = changes(shelf(None), findings_of_rows(checkable, "rows"))
    return [line for change in priced for line in change.refused]


def references(rows: Iterable[Row]) -> dict[tuple[str, str], Reference]:
    """The reference of every instance in the rows."""

    def values(rows: Iterable[Row], *keys: str) -> list[float]:
        return [row[key] for row in rows for key in keys if row[key] is not None]

    known = {}
    for instance, own in grouped((instance_of(row), row) for row in rows).items():
        objective = min(values(own, "objective", "best_known"), default=None)
        bound = max(values(own, "bound", "bound_known"), default=None)
        known[instance] = Reference(objective, bound)
    return known


def over(function: Callable[[Sequence[float]], float], values: Sequence[float]) -> float | None:
    """The function of the values; None where there are none."""
    return function(values) if values else None


def share_above_optimum(excesses: Sequence[float]) -> float:
    """The share of excesses that miss the optimum."""
    return sum(excess > SAME for excess in excesses) / len(excesses)


def shifted_mean(values: Sequence[float], shift: float = 1.0) -> float:
    """The shifted geometric mean. Of excesses, with a shift of 1, it is the geometric mean of the
    ratios to the reference, less 1; of seconds, numbers far below the shift hardly count."""
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
    """Seconds of the runs that ended with a proof, ascending: after the k-th, k instances are
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


# The key of a row's details that holds its instance's size.
SIZE_KEY = "instance_size"
# Problem -> the name of the measure of size, and its function of the instance's data.
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
    """The size of an instance; None for a problem without a measure."""
    if instance.problem not in SIZES:
        return None
    _, measure = SIZES[instance.problem]
    return measure(instance.data)


def row_size(row: Row) -> int | None:
    """The size of a row's instance, from its details, else from the library's instance of that
    name; None where unknown."""
    size = json.loads(row["details_json"] or "{}").get(SIZE_KEY)
    if size is None:
        return library_size(row["problem"], row["instance"])
    return int(size)


@cache
def library_size(problem: str, name: str) -> int | None:
    """The size of a packaged instance; None where there is none of that name."""
    entry = find(f"{problem}/{name}")
    return None if entry is None else size_of(entry.load())
