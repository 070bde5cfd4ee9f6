"""Writes the table of workloads.md by planning its workloads: `python docs/workloads_table.py
[--time-limit S]`.

Minutes on an idle machine. Each row is planned as its command says; figures are predicted, plans
replayed. The table stands between `<!-- generated: python docs/workloads_table.py … -->` and
`<!-- end -->`.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from hetplan.planner.candidate import Candidate
from hetplan.planner.joint import Joint
from hetplan.planner.library import plan
from hetplan.planner.planning import Planning
from hetplan.solvers.run import relative_gap
from hetplan.text import more_text, percent_text, seconds_text

PAGE = Path(__file__).with_name("workloads.md")
TIME_LIMIT = 20.0
HEADER = (
    *(
        "workload",
        "command: `hetplan plan …`",
        "winner",
        "replayed",
        "no plan is faster than",
        "gap",
    ),
    *("best of the other strategies", "by its formula", "best paper's own procedure"),
)


@dataclass(frozen=True)
class Row:
    """A workload of the page."""

    title: str
    model: str
    cluster: str
    batch: int

    @property
    def command(self) -> str:
        """What plans it."""
        return f"`--model {self.model} --cluster {self.cluster} --global-batch {self.batch}`"


ROWS = (
    Row("AMP", "gpt2-medium", "amp-mixed", 32),
    Row("Astra", "llama2-7b", "astra-64", 512),
    Row("HAP", "bert-base", "hap-64", 256),
    Row("Poplar", "llama-0.5b", "poplar-b", 64),
    Row("Ditto", "gpt2-medium", "ditto-ex1", 32),
    Row("at home: 2 RTX 3090, 1 RTX 4090", "llama-1.1b", "home", 32),
    Row("in a department: 8 A100, 8 V100", "llama2-7b", "department", 64),
    Row("in a company: 32 H100, 64 A100", "llama2-13b", "company", 512),
)


def line(row: Row, planning: Planning) -> str:
    """The row with what was found."""
    best = planning.best
    if best is None:
        return f"| {row.title} | {row.command} | nothing fits |" + " |" * (len(HEADER) - 3)
    others = [c for c in planning.candidates if c.strategy != Joint.name and c.fits_memory]
    papers = [c for c in others if c.method.paper]
    formula = others[0].closed_form_seconds if others else None
    proven = " (optimal for it)" if others and others[0].status == "optimal" else ""
    cells = (
        row.title, row.command, best.name, seconds_text(best.predicted_seconds),
        seconds_text(planning.bound),
        percent_text(relative_gap(best.predicted_seconds, planning.bound)),
        named(others, best), f"{seconds_text(formula)}{proven}", named(papers, best),
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def named(candidates: list[Candidate], best: Candidate) -> str:
    """The first, which is the best, and how much longer it takes than the winner."""
    if not candidates:
        return "–"
    first = candidates[0].predicted_seconds or 0.0
    more = more_text(first / (best.predicted_seconds or first) - 1)
    return f"{candidates[0].name} {seconds_text(first)} ({more})"


def filled(page: str, lines: list[str]) -> str:
    """The page with its table renewed."""
    rule = "|" + " --- |" * len(HEADER)
    content = "\n".join(["| " + " | ".join(HEADER) + " |", rule, *lines]).replace("\\", r"\\")
    found, count = re.subn(
        r"(<!-- generated: [^\n]* -->\n).*?(<!-- end -->)",
        rf"\1{content}\n\2",
        page,
        flags=re.DOTALL,
    )
    if count != 1:
        raise ValueError(f"{PAGE.name}: {count} places for the table, expected 1")
    return found


def main(arguments: list[str]) -> int:
    """Plan all of them and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT)
    given = parser.parse_args(arguments)
    lines = []
    for row in ROWS:
        lines.append(
            line(
                row,
                plan(row.model, row.cluster, global_batch=row.batch, time_limit=given.time_limit),
            )
        )
        print(lines[-1], flush=True)
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
