"""The papers' planning-time results side by side in one run: their algorithm, general solvers,
ours.

    python -m evidence.speed reproductions [--quick] [--only TABLE] [--write PAGE.md]
        [--note TEXT] [-o FILE.md|FILE.json]

AMP's Table 2, Astra's Table 1, HAP's Figure 19, Ditto's Figures 9 and 10, Poplar's analysis phase.
`paper` is the paper's algorithm as printed, implemented here and compiled where its loops matter;
its own figures stand beside. Every run has a process of its own, which solves the table's first
case once before anything is timed, so that kernels are compiled and back ends loaded. One thread.
Limits in seconds of the clock would make answers depend on the machine's load: general solvers stop
after counted work, all others end by themselves. Seconds are those of the processor, on which other
work tells little. HiGHS does not count what it does within one linear programme, so that general
solvers are cut after CUT seconds of the processor as well, and their messages say so.

--write puts the tables between `<!-- generated: python -m evidence.speed reproductions -->` and
`<!-- end -->` of a page; with --only it renews those tables there, and leaves the others.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evidence.papers.hap import GBIT, mixed, shape, theory_on
from evidence.speed import amp as amp_benchmark, astra as astra_benchmark
from evidence.speed.harness import machine, markdown, measured, peak_resident_bytes, save
from hetplan.clock import CLOCK
from hetplan.errors import UnsupportedError
from hetplan.files import write_text
from hetplan.formulations import family
from hetplan.instances.library import load_from_library
from hetplan.programs.networks import vit
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Options, Run

Row = dict[str, Any]
MIB = 2**20
# Counted seconds of a general solver for each case (`solvers.run.Work`). QUICK: at most with
# --quick. LOADED: of the first solve, which only loads the solver.
GENERAL, QUICK, LOADED = 4.0, 2.0, 0.1
CUT = 60.0  # seconds of the processor after which a general solver is stopped, whatever it counts
ENDS = None  # the budget of a method that ends by itself
# Objectives that differ by less are the same.
SAME = 1e-6


@dataclass(frozen=True)
class Case:
    """One line of a table: what it is called, what the paper says of it, how its data is made."""

    label: str
    published: str
    make: Callable[[], Any]


@dataclass(frozen=True)
class Table:
    """One reproduction. methods: (name, budget in counted seconds or ENDS), ours last; the first
    `quick` cases are the quick ones.

    published: title of the paper's column. note: what the paper's figures are, and what is
    compared.
    """

    title: str
    problem: str
    published: str
    methods: tuple[tuple[str, float | None], ...]
    quick: int
    cases: tuple[Case, ...]
    note: str


def amp_case(nodes: int, published: str) -> Case:
    """As many nodes as devices per node, the first half V100, the others T4; GPT-2, batch 32."""

    def make() -> Any:
        kinds = ((nodes // 2, "V100-SXM2-16GB", 170.0), (nodes - nodes // 2, "T4", 50.0))
        entries = [
            {
                "count": count,
                "devices": nodes,
                "device": device,
                "intra_node_gbit_per_s": inside,
                "network_gbit_per_s": 10.0,
            }
            for count, device, inside in kinds
        ]
        return amp_benchmark.posed(f"{nodes}x{nodes}", "gpt2-amp", entries, 32)

    return Case(f"{nodes} x {nodes}", published, make)


def named(name: str, label: str, published: str) -> Case:
    """An instance of the library."""
    return Case(label, published, lambda: load_from_library(name).data)


def poplar_case(name: str, stage: int, spent: Mapping[str, Sequence[int]]) -> Case:
    """Llama 0.5B on one of the paper's clusters; spent: seconds on each of its devices that the "
    "appendix names."""
    said = ", ".join(f"{device} {seconds[stage]} s" for device, seconds in spent.items())
    return named(f"{name}-zero{stage}", f"{name.partition('-llama')[0]}, ZeRO {stage}", said)


def vit_case(layers: int, gpus: int, published: str) -> Case:
    """ViT of that many layers on V100 and P100 at 10.4 Gbit/s, 64 samples per device."""

    def make() -> Any:
        program = vit(64 * gpus, shape(layers), 196, 768, 10)
        return theory_on(program, mixed(gpus), GBIT, 8).data

    return Case(f"{layers} layers, {gpus} GPUs", published, make)


LARGEST = (
    ("llama2-7b-a800-h100-1024-pp8", "Llama-2-7B, 1024"),
    ("llama2-13b-a800-h100-1024-pp8", "Llama-2-13B, 1024"),
    ("llama2-70b-a800-h100-1024-pp16", "Llama-2-70B, 1024"),
    ("glm-67b-a800-h100-h800-4096-pp32", "GLM-67B, 4096, three types"),
    ("glm-130b-a800-h100-h800-4096-pp32", "GLM-130B, 4096, three types"),
)
DITTO = (
    ("ex1", "≤ 5 min"),
    ("ex2", "≤ 5 min"),
    ("ex5", "≤ 5 min"),
    ("ex4", "≤ 5 min"),
    ("ex3", "10 min / 10 h"),
)
# The appendix's table: seconds on a GPU of each of those types, by ZeRO stage.
POPLAR = (
    ("poplar-b-llama-0.5b", {"T4": (67, 137, 138, 174), "V100": (11, 19, 27, 31)}),
    ("poplar-c-llama-0.5b", {"A800": (106, 143, 70, 71)}),
)

TABLES = {
    "amp": Table(
        "AMP, Table 2: nodes x GPUs per node",
        "amp",
        "AMP, s",
        (
            ("paper", ENDS),
            ("cp-sat-linear", 2 * GENERAL),
            ("milp", 2 * GENERAL),
            ("exact", ENDS),
        ),
        2,
        tuple(amp_case(n, s) for n, s in ((2, "58.0"), (4, "325.6"), (8, "890.3"), (16, "1627.4"))),
        "24-layer GPT-2, global batch 32, as in the paper, which does not say which devices: here"
        " half of the nodes V100, half T4. "
        "The paper's seconds are of its Python implementation; `paper` is the same procedure, its"
        " O(k L⁴) programme compiled. "
        "It does not decide the placement, `exact` and the general solvers do.",
    ),
    "segments": Table(
        "Astra, §3.4: layers and types of the stages",
        "astra",
        "",
        (("paper", ENDS), ("cp-sat-linear", GENERAL), ("milp", GENERAL), ("exact", ENDS)),
        2,
        tuple(named(name, label, "–") for name, label in LARGEST),
        "The decision inside the search for mixed pools, stages of one type free to differ; the "
        "paper gives no seconds for it alone.",
    ),
    "hap": Table(
        "HAP, Figure 19: ViT by layers, and by devices",
        "hap",
        "HAP",
        (("paper", ENDS), ("milp", GENERAL), ("exact", ENDS)),
        1,
        tuple(vit_case(n, 8, "a few s" if n == 24 else "–") for n in (2, 4, 8, 12, 16, 24))
        + tuple(vit_case(12, gpus, "constant") for gpus in (16, 32, 64)),
        'Figure 19 is a picture; its text: "super-linearly", "a few seconds" for 24 layers, '
        'constant in the number of devices (§7.8). '
        "`paper`: the alternation of A* (here in Python; the authors' is compiled) and ratios; "
        "A* ends on all of them. `exact` optimises programs and ratios together and proves it.",
    ),
    "ditto": Table(
        "Ditto, Figures 9 and 10: GPT-2 XL on Figure 8's clusters, 32 micro-batches",
        "ditto",
        "folding / exhaustive (text)",
        (
            ("paper", ENDS),
            ("oobleck", ENDS),
            ("cp-sat-linear", GENERAL),
            ("milp", GENERAL),
            ("exact", ENDS),
        ),
        2,
        tuple(named(f"ditto-{name}-nb32-head", name, said) for name, said in DITTO),
        "`paper` is the folding with its recovery programme, `oobleck` the exhaustive search that"
        " Ditto compares with, both compiled "
        "(§7: 10 minutes and 10 hours on ex3, 5 minutes on the smaller ones). Figure 10's claim "
        "is a loss of at most 8 %.",
    ),
    "poplar": Table(
        "Poplar, appendix: analysis phase, Llama 0.5B",
        "poplar",
        "all phases on",
        (("paper", ENDS), ("cp-sat-linear", GENERAL), ("milp", GENERAL), ("exact", ENDS)),
        2,
        tuple(
            poplar_case(name, stage, spent)
            for name, spent in POPLAR
            for stage in range(4)
        ),
        "The paper's seconds are for all phases, most of them profiling on a live GPU; of the "
        "analysis it says \"minimal\". "
        "Here: the analysis on predicted curves (`hetplan profile batch-curve` is the "
        "other phase).",
    ),
}  # fmt: skip


def solve_case(key: str, number: int, method: str, budget: float | None) -> Row:
    """One case of a table by one method, in this process, which is the run's own. The table's first
    case is solved once before."""
    CLOCK.count_the_processor()
    table = TABLES[key]
    first_budget = None if budget is None else min(budget, LOADED)
    cut = None if budget is None else CUT
    run_one(table, table.cases[0], method, first_budget, cut)
    row = run_one(table, table.cases[number], method, budget, cut)
    return {"table": key, **row, "peak_mib": peak_resident_bytes() / MIB}


def run_one(
    table: Table, case: Case, method: str, budget: float | None, cut: float | None = None
) -> Row:
    """One solve; a refusal is a row with its reason.

    cut: seconds of the clock after which the run is stopped; None: never. Only `seconds` depend on
    the clock, unless the run is cut, which its message says.
    """
    row: Row = {"instance": case.label, "method": method, "budget": budget}
    try:
        run = Run(Options(threads=1, time_limit=cut), budget=budget)
        result = solve(family(table.problem), case.make(), method, run)
    except UnsupportedError as error:
        none = dict.fromkeys(("objective", "bound", "gap", "seconds"))
        return {**row, **none, "status": "refused", "message": str(error)}
    return {
        **row,
        "status": result.status,
        "objective": result.objective,
        "bound": result.bound,
        "gap": result.gap,
        "seconds": result.seconds,
        "message": f"cut after {cut:g} s of the processor" if run.cut else result.message,
    }


def table_rows(key: str, quick: bool) -> list[Row]:
    """Every method on every case of a table, each time in a fresh process."""
    table = TABLES[key]
    count = table.quick if quick else len(table.cases)
    rows = []
    for method, budget in table.methods:
        if quick and budget is not None:
            budget = min(budget, QUICK)
        for number in range(count):
            rows.append(measured(solve_case, key, number, method, budget).value)
    return rows


def cell(row: Row, best: float | None) -> str:
    """`12.3 ms`; with `, proven`, or the excess over the best known and the gap that is left."""
    if row["seconds"] is None:
        return "refused"
    text = f"{row['seconds'] * 1e3:.3g} ms" if row["seconds"] < 1 else f"{row['seconds']:.3g} s"
    if row["objective"] is None:
        return f"{text}, {row['status']}"
    if row["status"] == "optimal":
        return f"{text}, proven"
    excess = 0.0 if best is None else row["objective"] / best - 1
    above = f", +{100 * excess if excess > SAME else 0:.2g} %"
    left = "" if row["gap"] is None else f", gap {100 * row['gap']:.2g} %"
    return text + above + left


def table_text(key: str, rows: Sequence[Row]) -> str:
    """One line per case, a column per method."""
    table = TABLES[key]
    published = {case.label: case.published for case in table.cases}
    lines: dict[str, dict[str, Row]] = {}
    for row in rows:
        lines.setdefault(row["instance"], {})[row["method"]] = row
    cells = []
    for label, found in lines.items():
        known = [row["objective"] for row in found.values() if row["objective"] is not None]
        best = min(known, default=None)
        own = [] if not table.published else [published[label]]
        cells.append((label, *own, *(cell(found[method], best) for method, _ in table.methods)))
    most = {
        method: max(row["peak_mib"] for row in rows if row["method"] == method)
        for method, _ in table.methods
    }
    peaks = ", ".join(f"`{method}` {value:.0f}" for method, value in most.items())
    limits = ", ".join(
        f"`{method}` {row['budget']:g}"
        for method, row in next(iter(lines.values())).items()
        if row["budget"] is not None
    )
    head = [
        "instance",
        *([table.published] if table.published else []),
        *(f"`{m}`" for m, _ in table.methods),
    ]
    told = f"\n{table.note} Limits, counted seconds: {limits}. Peak memory, MiB: {peaks}.\n"
    said = [f"- `{method}`: {message}" for method, message in messages(rows)]
    return (
        markdown(table.title, head, cells) + told + ("\n" + "\n".join(said) + "\n" if said else "")
    )


def messages(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """What methods said of their answers, each once, with the number of cases."""
    counts: dict[tuple[str, str], int] = {}
    for row in rows:
        if row["message"]:
            key = row["method"], row["message"]
            counts[key] = counts.get(key, 0) + 1
    return [
        (method, f"{message} ({count} case{'s' if count > 1 else ''})")
        for (method, message), count in counts.items()
    ]


def search_rows(quick: bool) -> list[Row]:
    """Astra's whole search on the models of its Appendix C."""
    return [
        row
        for model in ("llama2-7b", "llama2-13b", "llama2-70b")[: 1 if quick else 3]
        for row in measured(searches, model, 1 if quick else 4).value
    ]


def searches(model: str, count: int) -> list[Row]:
    """One model with 64 to 4096 GPUs, in this process, which is the model's own."""
    CLOCK.count_the_processor()
    astra_benchmark.run_search("gpt2", "homogeneous", 8, ("A800",), 64)
    rows = []
    for gpus in astra_benchmark.SIZES[:count]:
        clock = Run()
        found = astra_benchmark.run_search(model, "homogeneous", gpus, ("A800",), 1024)
        rows.append(
            {
                "table": "search",
                **found,
                "seconds": clock.elapsed,
                "peak_mib": peak_resident_bytes() / MIB,
            }
        )
    return rows


# Table 1: search seconds of the models above with 64, 256, 1024 and 4096 GPUs; its other columns
# are in `astra.py`.
SEARCH_SECONDS = {
    "llama2-7b": (0.06, 0.05, 0.04, 0.03),
    "llama2-13b": (0.05, 0.03, 0.02, 0.02),
    "llama2-70b": (0.1, 0.06, 0.05, 0.04),
}


def search_text(rows: Sequence[Row]) -> str:
    """Seconds and strategies beside the paper's."""
    cells = []
    for row in rows:
        at = astra_benchmark.SIZES.index(row["gpus"])
        strategies, whole = astra_benchmark.TABLE_1[row["model"]][at]
        counts, seconds = row["counts"], SEARCH_SECONDS[row["model"]][at]
        ours = (f"{counts['generated']:,}", f"{counts['priced']:,}", f"{row['seconds']:.3f}")
        cells.append((row["model"], row["gpus"], f"{strategies:,}", seconds, whole, *ours))
    header = ("model", "GPUs", "Astra: strategies", "search, s", "search + simulation, s",
              "generated", "priced", "all of it, s")  # fmt: skip
    note = (
        "\nThe whole search (generate, filter by rules and memory, price, sort), global batch "
        "1024. The paper's first seconds are for "
        "generating and filtering, its second for pricing too; `all of it` is both. Why the "
        "counts differ: `python -m evidence.speed astra` says.\n"
    )
    return markdown("Astra, Table 1: the search", header, cells) + note


MARK = "<!-- generated: python -m evidence.speed reproductions -->"
TITLE = re.compile(r"^\*\*(.+)\*\*$", flags=re.MULTILINE)  # the first line of a table


def written(page: str, text: str) -> str:
    """The page with its block renewed; raises ValueError where it has none."""
    return page.replace(block_of(page), text)


def block_of(page: str) -> str:
    """What a page has between its marks; raises ValueError where it has none."""
    blocks = re.findall(rf"{MARK}\n(.*?)<!-- end -->", page, flags=re.DOTALL)
    if len(blocks) != 1:
        raise ValueError(f"{len(blocks)} places for the tables, expected 1")
    return str(blocks[0])


def with_tables(block: str, tables: Sequence[str], conditions: str) -> str:
    """A page's block with these tables alone renewed, and a line that says when that was.

    conditions: of the tables' run. Raises ValueError where the block lacks one of the tables.
    """
    for table in tables:
        title = title_of(table)
        starts = {found[1]: found.start() for found in TITLE.finditer(block)}
        if title not in starts:
            raise ValueError(f"table {title!r} is not in the block, expected one of {list(starts)}")
        later = [start for start in starts.values() if start > starts[title]]
        # behind the last table stand the conditions of the whole run
        end = min(later, default=block.rindex("\ndate ") + 1)
        block = block[: starts[title]] + table.strip() + "\n\n" + block[end:]
        again = f"- {title}, again: "
        kept = [line for line in block.splitlines() if not line.startswith(again)]
        if not kept[-1].startswith("- "):
            kept.append("")  # begins the list
        block = "\n".join([*kept, again + conditions]) + "\n"
    return block


def title_of(table: str) -> str:
    """The title of a table's text."""
    found = TITLE.search(table)
    assert found is not None, "every table has a title"
    return found[1]


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("amp", "search", "segments", "hap", "ditto", "poplar")
    parser.add_argument("--quick", action="store_true", help="the smallest cases, in a minute")
    parser.add_argument(
        "--only", choices=parts, action="append", help="these tables alone; may repeat"
    )
    parser.add_argument("--write", type=Path, metavar="PAGE", help="renew the block of a page")
    parser.add_argument("--note", default="", help="conditions to state, as `under load`")
    parser.add_argument("-o", "--output", help=".md or .json")
    given = parser.parse_args()
    clock = Run()
    rows: list[Row] = []
    tables: list[str] = []
    for part in given.only or parts:
        made = search_rows(given.quick) if part == "search" else table_rows(part, given.quick)
        tables.append(search_text(made) if part == "search" else table_text(part, made))
        rows += made
    told = ", ".join(f"{key} {value}" for key, value in machine().items())
    spent = f"{told}; {clock.elapsed:.0f} s in all" + (f"; {given.note}" if given.note else "")
    save(given.output, [*tables, spent], rows)
    if given.write is not None:
        page = given.write.read_text(encoding="utf-8")
        if given.only:
            block = with_tables(block_of(page), tables, spent)
        else:
            block = "\n" + "\n".join([*tables, spent]) + "\n"
        write_text(given.write, written(page, block))


if __name__ == "__main__":
    main()
