"""Predicted speeds of DeepSpeed, Whale, Poplar and the optimum by ZeRO stage, beside the measured ones.

Ours are predictions: equal curves go into every method, and each plan is priced by the same evaluator, plus what
ZeRO 2 pays once per iteration. The paper's are measured training throughputs on its own clusters, of which its text
states only the ranges below; its bar charts carry no figures.
Source of the measured figures: Poplar (AAAI 2025), abstract and "Different models".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from hetplan.formulations.poplar.experiments import Experiment, experiments
from hetplan.formulations.poplar.family import FAMILY
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Run
from hetplan.text import Table

METHODS = ("deepspeed", "whale", "paper", "exact")
COMPARED = (("paper", "deepspeed"), ("paper", "whale"), ("exact", "paper"))
NAMES = {"deepspeed": "DeepSpeed", "whale": "Whale", "paper": "Poplar", "exact": "optimum"}
MEASURED = (
    ("Poplar over other systems, all experiments", "1.02 to 3.92"),
    ("Poplar over DeepSpeed, Llama 1.1B (Figure 4b)", "up to 2.27"),
    ("Poplar over Whale, Llama 1.1B (Figure 4b)", "up to 1.14"),
    ("Poplar over DeepSpeed, BERT 1.1B (Figure 4c)", "up to 3.92"),
    ("Poplar over Whale, BERT 1.1B (Figure 4c)", "up to 1.98"),
)
PREDICTED = (
    "predicted by hetplan, not measured: analytical curves, the same for every method; "
    "Whale, Poplar and optimum are speeds relative to DeepSpeed (1.00)"
)
RANGES_ONLY = (
    "the paper states ranges over experiments only, none per ZeRO stage; its bar charts carry no numbers"
)


@dataclass(frozen=True)
class SpeedRow:
    """One experiment: predicted seconds per iteration by method (None: no plan). unfit: why there is none at all."""

    name: str
    zero_stage: int
    seconds: Mapping[str, float | None]
    unfit: str | None = None

    def speedup(self, method: str, over: str) -> float | None:
        """How many times faster `method` is than `over`; None where either has no plan."""
        fast, slow = self.seconds[method], self.seconds[over]
        return None if fast is None or slow is None else slow / fast

    def document(self) -> dict[str, Any]:
        """As JSON types."""
        return {
            "experiment": self.name,
            "zero_stage": self.zero_stage,
            "predicted_seconds": dict(self.seconds),
            "message": self.unfit or "",
        }


def speeds_by_stage(cases: Iterable[Experiment], tell: Callable[[str], None] | None = None) -> list[SpeedRow]:
    """Every method of METHODS on every experiment, in order of ZeRO stage, then name. tell: a line per experiment."""
    rows = []
    for case in cases:
        if tell is not None:
            tell(case.name)
        posed = case.posed
        seconds: dict[str, float | None] = dict.fromkeys(METHODS)
        for method in METHODS if posed.unfit is None else ():
            found = solve(FAMILY, posed.data, method, Run()).objective
            seconds[method] = None if found is None else found + posed.once_seconds
        rows.append(SpeedRow(case.name, posed.data.zero_stage, seconds, posed.unfit))
    return sorted(rows, key=lambda row: (row.zero_stage, row.name))


def report(
    name: str | None, tell: Callable[[str], None] | None = None
) -> tuple[list[Table], list[dict[str, Any]]]:
    """Tables and rows (JSON types) for the experiments whose names match the shell pattern `name`; all without."""
    cases = [case for case in experiments() if name is None or fnmatchcase(case.name, name)]
    rows = speeds_by_stage(cases, tell)
    return as_tables(rows), [row.document() for row in rows]


def as_tables(rows: Sequence[SpeedRow]) -> list[Table]:
    """Speeds by experiment, their ranges per ZeRO stage beside the paper's, and what the paper measured."""
    cells = tuple(
        (
            str(row.zero_stage),
            row.name,
            _cell(row.seconds["deepspeed"], 4),
            *(_cell(row.speedup(method, "deepspeed"), 2) for method in METHODS[1:]),
            _cell(row.speedup("exact", "paper"), 4),
        )
        for row in rows
    )
    unfit = tuple(f"{row.name}: {row.unfit}" for row in rows if row.unfit)
    header = ("ZeRO", "experiment", "DeepSpeed s", "Whale", "Poplar", "optimum", "optimum / Poplar")
    speeds = Table(
        "Predicted speeds on Poplar's experiments",
        header,
        cells,
        (PREDICTED, *unfit),
        right=(0, 2, 3, 4, 5, 6),
    )
    stages = sorted({row.zero_stage for row in rows})
    ranges = Table(
        "Ranges of the predicted ratios",
        ("ZeRO", *(f"{NAMES[fast]} over {NAMES[slow]}" for fast, slow in COMPARED)),
        tuple((str(stage), *(_range(rows, stage, *pair) for pair in COMPARED)) for stage in stages),
        ("predicted",),
        right=(0,),
    )
    measured = Table("As the paper measured it", ("ratio of speeds", "measured"), MEASURED, (RANGES_ONLY,))
    return [speeds, ranges, measured]


def _range(rows: Sequence[SpeedRow], stage: int, fast: str, slow: str) -> str:
    found = [row.speedup(fast, slow) for row in rows if row.zero_stage == stage]
    known = [ratio for ratio in found if ratio is not None]
    return f"{min(known):.3f} to {max(known):.3f} ({len(known)} experiments)" if known else "-"


def _cell(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
