"""The page of findings says nothing but what the kept rows say: the page, its template, and figures
by hand."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hetplan.errors import HetplanError
from hetplan.instances.library import library, load_from_library
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Options, Run
from hetplan.studies.page import origin
from hetplan.studies.rows import FOLDER, PACKED, Row, of_older_code, write_rows
from studies.study_cases import row

pytest.importorskip("pyarrow", reason="pyarrow is not installed (extra `study`)")
pytest.importorskip("scipy", reason="scipy is not installed")
pytestmark = pytest.mark.evidence
DOCS = Path(__file__).parents[2] / "docs"


def load() -> ModuleType:
    """docs/findings_page.py, which is no part of the package."""
    spec = importlib.util.spec_from_file_location("findings_page", DOCS / "findings_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their module up
    spec.loader.exec_module(module)
    return module


script = load()


ROWS = [
    row("ditto", "a", "exact", objective=2.0, bound=2.0),
    row("ditto", "a", "paper", objective=2.1),
    row("ditto", "a", "merge", objective=2.05),
    row("ditto", "b", "exact", objective=4.0, bound=4.0),
    row("ditto", "b", "paper", objective=5.0),
    row("ditto", "c", "exact", objective=8.0, bound=8.0),
    row("ditto", "c", "paper", objective=None, status="unknown"),
    row("ditto", "d", "exact", objective=1.0, bound=0.5, status="feasible"),
    row("ditto", "d", "paper", objective=3.0),
    row("amp", "amp-mixed-cluster", "exact", objective=1.0, bound=1.0),
    row("amp", "amp-mixed-cluster", "paper", objective=1.2),
    row("amp", "amp-mixed-cluster", "megatron", objective=2.4),
    row("amp", "amp-mixed-cluster", "megatron-order", objective=1.1, set="ablations"),
]


@pytest.fixture
def kept(tmp_path: Path) -> Any:
    """The rows, as a kept study."""
    return kept_in(tmp_path, ROWS)


def kept_in(folder: Path, rows: Sequence[Row]) -> Any:
    """Rows kept in a folder as docs/studies keeps them."""
    write_rows(folder / "papers" / FOLDER / PACKED, list(rows))
    return script.Kept(folder)


@pytest.mark.parametrize(
    ("figure", "expected"),
    [
        ("missed ditto paper", "3 of 3"),
        ("missed ditto merge papers", "1 of 1"),
        ("missed ditto paper real", "–"),
        ("missed ditto paper papers b", "1 of 1"),
        ("excess ditto paper least", "5 %"),
        ("excess ditto paper most papers", "200 %"),
        ("excess ditto paper mean", "57.9 %"),
        ("within ditto paper ditto", "1 of 3"),
        ("where-most ditto paper", "`d`"),
        ("plans ditto paper", "3 of 4"),
        ("proven ditto", "3 of 4"),
        ("proven", "4 of 5"),
        ("solved ditto exact", "3 of 4"),
        ("ratio amp megatron paper most", "2×"),
        ("ratio amp megatron best most amp-mixed-cluster*", "2.4×"),
        ("ratio amp megatron,paper best most", "1.2×"),
        ("ratio hap dp-even paper most", "–"),
        ("reached amp megatron paper amp-cluster", "is reached"),
        ("reached amp paper best amp-cluster", "is not reached"),
        ("reached amp megatron paper amp-cluster amp-other*", "cannot be told from these rows"),
        ("faster amp megatron paper", "1"),
        ("compared ditto paper merge", "1"),
        ("claim amp-cluster", "1.54× (AMP, abstract and Table 4)"),
        ("rows", "12"),
        ("limit", "60"),
    ],
)
def test_figures(kept: Any, figure: str, expected: str) -> None:
    assert script.filled(f"{{{{{figure}}}}}", kept) == expected


def cells(kept: Any, figure: str, first: str) -> list[list[str]]:
    """Of the lines of a table that begin so."""
    lines = script.filled(f"{{{{{figure}}}}}", kept).splitlines()
    return [line.strip("| ").split(" | ") for line in lines if line.startswith(f"| {first}")]


def test_tables(kept: Any) -> None:
    (line,) = cells(kept, "overview papers", "amp")
    assert line[1:7] == ["1 of 1", "1", "1 of 1", "1 of 1", "20 %", "20 %"]
    (line,) = cells(kept, "methods ditto", "`paper`")
    mean = f"{100 * ((1.05 * 1.25 * 3) ** (1 / 3) - 1):.1f} %"
    assert line[1:] == ["papers", "4", "3 of 4", "3 of 3", mean, "25 %", "200 %", "`d`"]
    assert not cells(kept, "methods amp", "`megatron-order`"), "variants have a table of their own"
    assert not cells(kept, "paired amp", "`megatron-order`")
    (line,) = cells(kept, "paired amp", "`megatron`")
    assert line[1:] == ["1", "1", "0", "100 %"]
    (line,) = cells(kept, "quality ditto", "`paper`")
    assert line[1:] == ["4", "0 %", "0 %", "25 %", "50 %", "50 %"]
    (line,) = cells(kept, "parts", "amp | Megatron's order")
    assert line[2:] == ["1", "1", "10 %", "10 %", "10 %", "`amp-mixed-cluster`"]
    (line,) = cells(kept, "parts", "ditto | recovery")
    assert line[2:5] == ["1", "1", "2.44 %"]


def test_hard_instances_stand_apart(tmp_path: Path) -> None:
    rows = [row("ditto", "h", "exact", objective=1.0, bound=1.0, set="hard")]
    rows += [row("ditto", "h", "paper", objective=9.0, set="hard")]
    kept = kept_in(tmp_path, [*ROWS, *rows])
    (line,) = cells(kept, "hard", "ditto | `paper`")
    assert line[2:6] == ["1", "1 of 1", "1 of 1", "800 %"]
    assert cells(kept, "methods ditto", "`paper`")[0][1] == "papers"
    assert cells(kept, "quality ditto", "`paper`")[0][1] == "4"


def test_searches_that_were_cut_off_are_labelled(tmp_path: Path) -> None:
    present = '{"hetplan":"0","method":2}'
    rows = [row("hap", name, "paper", objective=1.0, message=text, versions_json=present)
            for name, text in (("a", "HAP's A*, cut off at 384 states"), ("b", ""))]  # fmt: skip
    assert cells(kept_in(tmp_path, rows), "methods hap", "`paper` (A* cut off, 1 of 2)")


def test_intervals() -> None:
    """Of many the mean lies in its interval, which shrinks with their number; of few there is
    none."""
    values = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    ends = [re.findall(r"[\d.]+", script.interval(values * n)) for n in (1, 9)]
    (low, high), (near, far) = ([float(x) for x in pair] for pair in ends)
    assert low < near < 100 * script.shifted_mean(values) < far < high
    assert script.interval(values[:4]) == "" == script.interval([0.1] * 9)
    assert script.estimated([-0.5, -0.5]) == "-50 %"


def paradigm(workload: str, method: str, objective: float | None, **details: Any) -> Row:
    """A row of the study of paradigms."""
    about = {"closed_form_seconds": None, "exact": False, "steps": 7, **details}
    return row("joint", workload, method, objective=objective, set="paradigms", exact=False,
               details_json=json.dumps(about))  # fmt: skip


PARADIGMS = [
    # its formula prefers 4 s, its space has 2 s, all plans 1 s
    paradigm("w", "amp/auto", 4.0, exact=True, closed_form_seconds=2.0),
    paradigm("w", "amp/paper", 3.0, closed_form_seconds=2.5),
    paradigm("w", "within amp", 2.0),
    paradigm("w", "without nothing", 1.0),
    paradigm("w", "without ZeRO", 1.5),
    paradigm("w", "bound", None) | {"bound": 0.5},
    # a plan that does not fit is none
    paradigm("v", "amp/auto", None, exact=True, closed_form_seconds=1.0),
    paradigm("v", "amp/auto+full", 6.0, exact=True, closed_form_seconds=2.0),
    paradigm("v", "within amp", 6.0),
    paradigm("v", "without nothing", 5.0),
    paradigm("v", "without ZeRO", 4.0),
]


def test_paradigms(tmp_path: Path) -> None:
    kept = kept_in(tmp_path, [*ROWS, *PARADIGMS])
    (line,) = cells(kept, "prices", "amp")
    assert line[1] == "2 of 2" and line[4:6] == ["100 %", "`w`"]
    assert line[2] == script.estimated([1.0, 0.5]) and line[6] == "145 % (2)"  # 4 of 1, 6 of 4
    assert line[7] == "200 % (1)"
    (line,) = cells(kept, "freedoms", "ZeRO")
    assert line[1:] == ["2", script.estimated([0.5, -0.2]), "1", "1", "50 %", "`w`"]
    (line,) = cells(kept, "currencies", "amp `paper`")
    assert line[1:] == ["1", "25 %", "-25 %", "1", "2×"]
    assert script.filled("{{workloads}}", kept) == "2"
    assert script.filled("{{workload-gap}}", kept) == "50 %"
    assert script.filled("{{rows}}", kept) == "12", "no solver's runs"


def test_a_figure_that_there_is_not(kept: Any) -> None:
    with pytest.raises(KeyError):
        script.filled("{{guess amp}}", kept)


def test_rows_of_older_code_are_told(tmp_path: Path) -> None:
    """Annealing is at version 2; a row without a version is of version 1."""
    versions = {"a": '{"hetplan":"0"}', "b": '{"hetplan":"0","method":2}'}
    annealed = [
        row("amp", name, "annealing", objective=1.0, versions_json=text)
        for name, text in versions.items()
    ]
    kept = kept_in(tmp_path, [*annealed, row("amp", "a", "exact", objective=1.0, bound=1.0)])
    assert script.filled("{{older}}", kept) == "1 of 3"
    ((name, *_),) = cells(kept, "methods amp", "`annealing`")
    assert name == "`annealing` (of older code, 1 of 2)"
    assert script.filled("{{conditions}}", kept).count("hetplan 0") == 1
    assert "of an older version of the method's code: amp annealing, 1 run" in origin(annealed)


# Rows of each heuristic that are solved again: those that took the least time.
SOLVED_AGAIN = 5


def quickest_rows() -> list[Row]:
    """Kept rows of heuristics on packaged instances, the quickest of each method. HAP's depend on
    where its search is cut off by time."""
    packaged = {entry.name for entry in library()}
    rows: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for each in script.Kept(script.STUDIES).rows():
        if not each["exact"] and each["problem"] != "hap" and each["instance"] in packaged:
            rows[each["problem"], each["method"]].append(each)
    return [
        quick
        for of_method in rows.values()
        for quick in sorted(of_method, key=itemgetter("seconds"))[:SOLVED_AGAIN]
    ]


def test_a_method_whose_results_change_has_another_version() -> None:
    """A kept row of the present version is what the method gives today. Where this fails, raise the
    method's `version` and take its rows again."""
    for each in quickest_rows():
        if of_older_code(each):
            continue
        instance = load_from_library(each["instance"])
        options = Options(**json.loads(each["options_json"]))
        known, found = each["objective"], None
        with suppress(HetplanError):  # a refusal is a row without an objective
            found = solve(instance.family, instance.data, each["method"], Run(options)).objective
        same = found == (known if known is None else pytest.approx(known, rel=1e-9))
        assert same, (each["problem"], each["method"], each["instance"], found, known)


def test_the_template_has_no_numbers_of_its_own() -> None:
    template = script.TEMPLATE.read_text(encoding="utf-8")
    assert list(script.own_numbers(template)) == []
    assert list(
        script.own_numbers(template + "\nDitto misses it by 9.3 %, `not 4`, {{rows}}.")
    ) == ["9.3"]


def test_the_page_is_what_the_kept_rows_say() -> None:
    page = script.PAGE.read_text(encoding="utf-8")
    assert page == script.filled(
        script.TEMPLATE.read_text(encoding="utf-8"), script.Kept(script.STUDIES)
    )


def test_another_row_is_another_page(tmp_path: Path) -> None:
    template = script.TEMPLATE.read_text(encoding="utf-8")
    changed = [{**r, "objective": 2.2} if r["key"] == "ditto-a-paper-0" else r for r in ROWS]
    assert script.filled(template, kept_in(tmp_path / "1", ROWS)) != script.filled(
        template, kept_in(tmp_path / "2", changed)
    )
