"""The findings of a study's rows: how far each method's objectives are above the best known ones,
how often its runs end with a proof, and how fast.

The reference of an instance is the best objective known, from the rows and from the library. It is
proven where the best known bound meets it. The excess of a row is (objective - reference) /
reference. As the optimum is at most the reference, the excess over the optimum is no less; where
the reference is proven, it is the same. A row misses the optimum where its excess is more than
`SAME`. `shifted_mean` computes the means of excesses. All objectives are predicted iteration times
in seconds.
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

from hetplan.instances.library import Instance, find
from hetplan.instances.records import changes, entries_to_update
from hetplan.solvers.run import OPTIMAL_GAP, relative_gap
from hetplan.studies.cells import PROVEN
from hetplan.studies.rows import Row, findings_of_rows, made_on
from hetplan.text import grouped, number_text

# The largest excess that counts as the optimum: twice the gap at which proofs may stop.
SAME = 2 * OPTIMAL_GAP


@dataclass(frozen=True)
class Reference:
    """The best figures known of an instance; None: unknown."""

    objective: float | None  # the least
    bound: float | None  # the highest

    @property
    def proven(self) -> bool:
        """Whether the best objective is proven optimal."""
        gap = relative_gap(self.objective, self.bound)
        return gap is not None and gap <= SAME


@dataclass(frozen=True)
class Summary:
    """The runs of one method on one problem, summed up. A figure is None where no run has it."""

    problem: str
    method: str
    exact: bool  # whether the method proves optima
    runs: int
    solved: int  # runs whose excess is known, be it 0
    proven: int  # runs that ended with a proof (optimal or infeasible)
    missed: float | None  # share of the solved runs that miss the optimum, from 0 to 1
    median_excess: float | None
    mean_excess: float | None
    mean_interval: tuple[float, float] | None  # the 95 % interval of the mean; see `interval`
    worst_excess: float | None
    worst: Row | None  # the row of the worst excess
    median_seconds: float | None
    most_seconds: float | None
    most_bytes: int | None  # the largest peak memory


class Study:
    """The rows of a study, with the references of their instances."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = list(rows)
        self.references = references(self.rows)  # (problem, name of the instance) -> reference

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
        """The row's excess over the reference; None without an objective, and for more than 0
        seconds over a reference of 0 seconds."""
        best = self.reference(row).objective
        if row["objective"] is None or best is None:
            return None
        if best <= 0:
            return 0.0 if row["objective"] <= 0 else None
        return max(0.0, float(row["objective"]) / best - 1)

    def methods(self, problem: str, *, exact: bool) -> list[str]:
        """The exact methods of a problem's rows, or the heuristics (not exact)."""
        names = (row["method"] for row in self.of(problem) if row["exact"] is exact)
        return list(dict.fromkeys(names))

    def summaries(self, problem: str) -> list[Summary]:
        """The summary of each method on a problem, exact methods first."""
        rows_of_methods = grouped((row["method"], row) for row in self.of(problem)).values()
        exact_first = sorted(rows_of_methods, key=lambda rows: not rows[0]["exact"])
        return [self.summary(rows) for rows in exact_first]

    def summary(self, rows: Sequence[Row]) -> Summary:
        """The summary of the rows of one method on one problem."""
        solved = [(excess, row) for row in rows if (excess := self.excess(row)) is not None]
        excesses = [excess for excess, _ in solved]
        worst_excess, worst_row = max(solved, key=itemgetter(0), default=(None, None))
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
            worst_excess=worst_excess,
            worst=worst_row,
            median_seconds=over(statistics.median, seconds),
            most_seconds=max(seconds, default=None),
            most_bytes=max(peaks, default=None),
        )

    def worst_cases(self, count: int) -> list[tuple[float, Row]]:
        """(excess, row) of the `count` heuristic runs with the largest excesses, at most one run
        for each instance and method."""
        worst: dict[tuple[str, str, str], tuple[float, Row]] = {}  # by (problem, instance, method)
        for row in self.rows:
            excess = self.excess(row)
            if row["exact"] or excess is None or excess <= SAME:
                continue
            key = (*instance_of(row), row["method"])
            largest, _ = worst.get(key, (0.0, row))
            if excess > largest:
                worst[key] = (excess, row)
        return sorted(worst.values(), key=itemgetter(0), reverse=True)[:count]

    def conflicts(self) -> list[str]:
        """A line for each contradiction: first for objectives below a proven bound, then for proofs
        of infeasibility where a decision is known."""
        below_bound, not_infeasible = [], []
        for row in self.rows:
            name = row["instance"]
            method = row["method"]
            best = self.reference(row)
            objective, bound = row["objective"], best.bound
            if below(objective, bound):
                proven = f"bound {number_text(bound, 8)} of {self.prover(row)}"
                below_bound.append(
                    f"{name}: objective {number_text(objective, 8)} of {method} is below {proven}"
                )
            if row["status"] == "infeasible" and best.objective is not None:
                not_infeasible.append(f"{name}: {method} says infeasible, a decision is known")
        return below_bound + not_infeasible

    def contradicted(self, row: Row) -> bool:
        """Whether what is known of its instance contradicts the row, so that the row is wrong or
        the other one is."""
        best = self.reference(row)
        if row["status"] == "infeasible":
            return best.objective is not None
        return below(row["objective"], best.bound) or below(best.objective, row["bound"])

    def prover(self, row: Row) -> str:
        """What proves the best bound of the row's instance: a method, or the library's record."""
        bound = self.reference(row).bound
        for other in self.rows:
            if instance_of(other) == instance_of(row) and other["bound"] == bound:
                return str(other["method"])
        return "the library's record"


def below(objective: float | None, bound: float | None) -> bool:
    """Whether an objective is below a bound, which proves one of the two wrong."""
    return objective is not None and bound is not None and objective < bound * (1 - SAME)


def instance_of(row: Row) -> tuple[str, str]:
    """The problem and the name of a row's instance."""
    return row["problem"], row["instance"]


def repriced(rows: Sequence[Row]) -> list[str]:
    """Price the decisions of packaged instances again, and check the bounds against their
    objectives. Returns a line for each complaint about a row or a best-known record."""
    entries = {key: find("/".join(key)) for key in map(instance_of, rows)}
    packaged = {key: entry.load() for key, entry in entries.items() if entry is not None}
    checkable = []
    for row in rows:
        instance = packaged.get(instance_of(row))
        if instance is not None and made_on(row, instance):
            checkable.append(row)
    library = entries_to_update(None)
    complaints: list[str] = []
    # `changes` prices the findings as if the records of the library were to be updated by them.
    for change in changes(library, findings_of_rows(checkable, "rows")):
        complaints += change.refused
    return complaints


def references(rows: Iterable[Row]) -> dict[tuple[str, str], Reference]:
    """(problem, name of the instance) -> its reference, for every instance of the rows."""

    def values(rows: Iterable[Row], *keys: str) -> list[float]:
        return [row[key] for row in rows for key in keys if row[key] is not None]

    reference_of = {}
    for instance, instance_rows in grouped((instance_of(row), row) for row in rows).items():
        objective = min(values(instance_rows, "objective", "best_known"), default=None)
        bound = max(values(instance_rows, "bound", "bound_known"), default=None)
        reference_of[instance] = Reference(objective, bound)
    return reference_of


def over(function: Callable[[Sequence[float]], float], values: Sequence[float]) -> float | None:
    """The function of the values, such as their median; None where there are no values."""
    return function(values) if values else None


def share_above_optimum(excesses: Sequence[float]) -> float:
    """The share of excesses that miss the optimum."""
    return sum(excess > SAME for excess in excesses) / len(excesses)


def shifted_mean(values: Sequence[float], shift: float = 1.0) -> float:
    """The shifted geometric mean of values. For excesses and a shift of 1, it is the geometric mean
    of the ratios to the reference, less 1."""
    return statistics.geometric_mean(value + shift for value in values) - shift


def interval(values: Sequence[float], resamples: int = 9999) -> tuple[float, float] | None:
    """The 95 % percentile bootstrap interval of the `shifted_mean` over runs (Efron and Tibshirani
    1993, Section 13.3). None: there are fewer than five values, or all are equal."""
    if len(values) < 5 or max(values) - min(values) <= SAME:
        return None
    drawn = np.random.default_rng(0).choice(np.log1p(values), (resamples, len(values)))
    low, high = np.expm1(np.quantile(drawn.mean(axis=1), (0.025, 0.975)))
    return float(low), float(high)


def cactus(rows: Iterable[Row]) -> list[float]:
    """The seconds of the runs that ended with a proof, ascending: k runs end within the k-th
    value."""
    return sorted(row["seconds"] for row in rows if row["status"] in PROVEN)


def profile(study: Study, problem: str, methods: Sequence[str]) -> dict[str, list[float]]:
    """The performance profile of methods (Dolan and Moré 2002): method -> the ratios of its seconds
    to those of the fastest method, ascending.

    Only runs with a proof count. Each pair of instance and seed gives one ratio of each method that
    proves it.
    """
    # (instance, seed) -> method -> seconds of the proof
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
    """(set, problem, name) of each instance of the rows."""
    sets = {instance_of(row): row["set"] for row in study.rows}
    return [(name, *instance) for instance, name in sets.items()]


# The key in a row's details for the size of its instance.
SIZE_KEY = "instance_size"
# Problem -> (the name of its measure of size, the function that measures an instance's data).
SIZES: Mapping[str, tuple[str, Callable[[Any], int]]] = {
    "amp": ("devices × layers", lambda data: len(data.devices) * len(data.layers)),
    "astra": (
        "stages × layers × types",
        lambda data: data.stages * data.layers * len(data.device_types),
    ),
    "hap": ("triples × devices", lambda data: len(data.triples) * len(data.devices)),
    "poplar": (
        "devices × largest micro-batch",
        lambda data: sum(len(device.step_seconds) for device in data.devices),
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
    """The size of a row's instance, from the row's details, else from the packaged instance of the
    same name; None: unknown."""
    size = json.loads(row["details_json"] or "{}").get(SIZE_KEY)
    if size is None:
        return library_size(row["problem"], row["instance"])
    return int(size)


@cache
def library_size(problem: str, name: str) -> int | None:
    """The size of a packaged instance; None where the library has no such instance, or its problem
    no measure of size."""
    entry = find(f"{problem}/{name}")
    return None if entry is None else size_of(entry.load())
