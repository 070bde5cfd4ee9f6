"""Predicted speeds of DeepSpeed, Whale, Poplar and the optimum by ZeRO stage, beside the measured ones.

Ours are predictions: equal curves go into every method, and each plan is priced by the same evaluator. The
paper's are measured training throughputs on its own clusters, of which its text states only the figures
below.
Source of the measured figures: Poplar (AAAI 2025), abstract and "Different models".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hetplan.formulations.poplar.data import PoplarData
from hetplan.formulations.poplar.family import FAMILY
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Run

METHODS = ("deepspeed", "whale", "paper", "exact")
MEASURED = (
    ("all experiments, over DeepSpeed and Whale", "1.02 to 3.92"),
    ("Llama 1.1B (Figure 4b), over DeepSpeed", "up to 2.27"),
    ("Llama 1.1B (Figure 4b), over Whale", "up to 1.14"),
    ("BERT 1.1B (Figure 4c), over DeepSpeed", "up to 3.92"),
    ("BERT 1.1B (Figure 4c), over Whale", "up to 1.98"),
)
PREDICTED = (
    "Speeds below are predicted, from hetplan's analytical curves; the paper's are measured. "
    "1.00 is DeepSpeed; a method without a plan shows a dash."
)


@dataclass(frozen=True)
class SpeedRow:
    """One instance: predicted seconds per iteration by method (None: no plan)."""

    name: str
    zero_stage: int
    seconds: Mapping[str, float | None]

    def speedup(self, method: str, over: str) -> float | None:
        """How many times faster `method` is than `over`; None where either has no plan."""
        fast, slow = self.seconds[method], self.seconds[over]
        return None if fast is None or slow is None else slow / fast


def speeds_by_stage(cases: Iterable[tuple[str, PoplarData]]) -> list[SpeedRow]:
    """Every method of METHODS on every (name, instance), in order of ZeRO stage, then name."""
    rows = []
    for name, data in cases:
        seconds = {method: solve(FAMILY, data, method, Run()).objective for method in METHODS}
        rows.append(SpeedRow(name, data.zero_stage, seconds))
    return sorted(rows, key=lambda row: (row.zero_stage, row.name))


def as_markdown(rows: Iterable[SpeedRow]) -> str:
    """The table, the ranges over it, and the paper's figures, as Markdown."""
    rows = list(rows)
    lines = [PREDICTED, "", "| ZeRO | instance | DeepSpeed s | Whale | Poplar | optimum | optimum / Poplar |"]
    lines.append("|---|---|---|---|---|---|---|")
    for row in rows:
        slowest = row.seconds["deepspeed"]
        cells = [
            str(row.zero_stage),
            row.name,
            "–" if slowest is None else f"{slowest:.3f}",
            *(_cell(row.speedup(method, "deepspeed")) for method in METHODS[1:]),
            _cell(row.speedup("exact", "paper"), digits=4),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| ratio of speeds | ZeRO | predicted here |", "|---|---|---|"]
    for stage in sorted({row.zero_stage for row in rows}):
        for fast, slow in (("paper", "deepspeed"), ("paper", "whale"), ("exact", "paper")):
            lines.append(f"| {fast} over {slow} | {stage} | {_range(rows, stage, fast, slow)} |")
    lines += ["", "| Poplar, as the paper measured it | speedup |", "|---|---|"]
    lines += [f"| {what} | {figure} |" for what, figure in MEASURED]
    return "\n".join(lines) + "\n"


def _range(rows: list[SpeedRow], stage: int, fast: str, slow: str) -> str:
    found = [row.speedup(fast, slow) for row in rows if row.zero_stage == stage]
    known = [ratio for ratio in found if ratio is not None]
    return f"{min(known):.3f} to {max(known):.3f} ({len(known)} instances)" if known else "–"


def _cell(ratio: float | None, digits: int = 2) -> str:
    return "–" if ratio is None else f"{ratio:.{digits}f}"
