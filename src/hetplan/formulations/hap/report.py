"""Predicted iterations of HAP's experiments: joint optimum, alternation, data parallelism; measured
ones beside.

Ours are predictions of one cost model, the same for every method. The paper's are measured; its bar
charts carry no numbers, so that only what its text states is given.
Source of the measured figures: HAP (EuroSys 2024), Sections 7.2 and 7.6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from hetplan.formulations.hap.alternation import alternate
from hetplan.formulations.hap.experiments import Experiment, experiments
from hetplan.formulations.hap.family import FAMILY
from hetplan.solvers.options import Options
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Run
from hetplan.text import Table, percent_text, seconds_text

# For the joint search of one experiment, whose bound is kept, and for the paper's A*.
SECONDS, PAPER_SECONDS = 30.0, 4.0
MEASURED = (
    ("VGG19, V100 + P100 (Figure 13): over data parallelism", "up to 2.41 times (32 GPUs)"),
    ("ViT (Figure 13): over DP-CP", "about the same"),
    ("BERT-Base (Figure 13): over the baselines", "up to 1.28 times (64 GPUs)"),
    ("BERT-MoE (Figure 13): over data parallelism", "none: it runs out of memory there"),
    ("BERT-MoE, A100 + P100 (Figure 17): over DeepSpeed's padded experts", "up to 1.64 times"),
)
PREDICTED = (
    "predicted by hetplan, not measured: one cost model for every method; memory is not limited",
    "joint: programs and ratios together, within the gap told; method paper: HAP's A* and ratio "
    "programme in turn, which on these networks ends with what it completed in "
    f"{PAPER_SECONDS:g} s; alternation: the same with shortest paths for its A*; both above joint; "
    "speed-ups are those of joint",
)


@dataclass(frozen=True)
class Row:
    """One experiment: predicted seconds per iteration (None: nothing found), and the joint search's
    bound."""

    name: str
    figure: str
    joint: float | None
    bound: float | None
    paper: float | None
    alternation: float | None
    rounds: int
    exact_rounds: int
    even: float | None
    proportional: float | None

    @property
    def gap(self) -> float | None:
        """Of the joint search, relative."""
        if self.joint is None or self.bound is None:
            return None
        return max(0.0, 1 - self.bound / self.joint)

    def over(self, other: float | None) -> float | None:
        """How many times faster the joint plan is."""
        return None if other is None or self.joint is None else other / self.joint

    def document(self) -> dict[str, Any]:
        """As JSON types."""
        return {
            "experiment": self.name,
            "figure": self.figure,
            "predicted_seconds": {
                "joint": self.joint,
                "paper": self.paper,
                "alternation": self.alternation,
                "dp-even": self.even,
                "dp-proportional": self.proportional,
            },
            "bound": self.bound,
            "gap": self.gap,
            "alternation_rounds": self.rounds,
            "alternation_exact_rounds": self.exact_rounds,
        }


def row_of(case: Experiment, seconds: float = SECONDS) -> Row:
    """All methods on one experiment. The joint plan is the best of all: the search starts anew, and
    may find less."""
    data = case.data
    joint = solve(FAMILY, data, "auto", Run(Options(threads=1, time_limit=seconds)))
    found = alternate(data, Run(Options(threads=1)))
    paper = solve(
        FAMILY, data, "paper", Run(Options(threads=1, time_limit=PAPER_SECONDS))
    ).objective
    even, proportional = (
        solve(FAMILY, data, m, Run()).objective for m in ("dp-even", "dp-proportional")
    )
    alternation = found.seconds if found else None
    known = [x for x in (joint.objective, paper, alternation, even, proportional) if x is not None]
    return Row(
        case.name,
        case.figure,
        min(known, default=None),
        joint.bound,
        paper,
        alternation,
        found.rounds if found else 0,
        found.exact if found else 0,
        even,
        proportional,
    )


def report(
    name: str | None, tell: Callable[[str], None] | None = None
) -> tuple[list[Table], dict[str, Any]]:
    """Tables and JSON types for the experiments whose names match the shell pattern `name`; all
    without.

    rows: the experiments. measured: what the paper states.
    """
    rows = list(study(experiments(), name, tell))
    return as_tables(rows), {
        "rows": [row.document() for row in rows],
        "measured": [{"figure": figure, "speedup": text} for figure, text in MEASURED],
    }


def study(
    cases: Iterable[Experiment], name: str | None, tell: Callable[[str], None] | None
) -> Iterable[Row]:
    """The rows one after the other."""
    for case in cases:
        if name is None or fnmatchcase(case.name, name):
            if tell is not None:
                tell(case.name)
            yield row_of(case)


def as_tables(rows: Sequence[Row]) -> list[Table]:
    """Iterations and speed-ups, and what the paper measured."""
    cells = tuple(
        (
            row.name,
            row.figure or "-",
            seconds_text(row.joint),
            percent_text(row.gap),
            above(row.paper, row.joint),
            above(row.alternation, row.joint),
            f"{row.exact_rounds}/{row.rounds}",
            times(row.over(row.even)),
            times(row.over(row.proportional)),
        )
        for row in rows
    )
    header = (
        "experiment", "paper", "joint", "gap", "method paper", "alternation", "exact rounds",
        "over dp-even", "over dp-proportional",
    )  # fmt: skip
    predicted = Table(
        "Predicted iterations", header, cells, PREDICTED, right=tuple(range(2, len(header)))
    )
    return [predicted, Table("As the paper measured it", ("speed-up of HAP", "measured"), MEASURED)]


def above(seconds: float | None, best: float | None) -> str:
    """`+1.2 %` above the best."""
    if seconds is None or best is None:
        return "-"
    more = seconds / best - 1
    return "0 %" if more < 1e-9 else f"+{100 * more:.3g} %"


def times(ratio: float | None) -> str:
    """`2.41`."""
    return "-" if ratio is None else f"{ratio:.2f}"
