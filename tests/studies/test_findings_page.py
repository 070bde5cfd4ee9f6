"""The page of findings says nothing but what the kept rows say: the page, its template, and figures
by hand."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hetplan.studies.rows import FOLDER, PACKED, Row, write_rows
from studies.study_cases import row

pytest.importorskip("pyarrow", reason="pyarrow is not installed (extra `study`)")
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
        ("missed ditto paper", "2 of 2"),
        ("missed ditto merge papers", "1 of 1"),
        ("missed ditto paper real", "–"),
        ("missed ditto paper papers b", "1 of 1"),
        ("excess ditto paper least", "5 %"),
        ("excess ditto paper most papers", "25 %"),
        ("excess ditto paper mean", "15 %"),
        ("within ditto paper ditto", "1 of 2"),
        ("where-most ditto paper", "`b`"),
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


def test_tables(kept: Any) -> None:
    lines = script.filled("{{overview}}", kept).splitlines()
    assert lines[2] == "| amp | papers | 1 | 1 of 1 | 1 of 1 | 1 of 1 | 20 % | 20 % | 20 % |"
    assert "| `paper` | papers | 3 of 4 | 2 of 2 | 15 % | 15 % | 25 % | `b` |" in script.filled(
        "{{methods ditto}}", kept
    )
    assert "megatron-order" not in script.filled("{{methods amp}}", kept), (
        "variants have a table of their own"
    )
    parts = script.filled("{{parts}}", kept)
    assert re.search(
        r"Megatron's order .*\| 1 \| 1 \| 10 % \| 10 % \| 10 % \| `amp-mixed-cluster` \|", parts
    )
    assert re.search(r"recovery.*\| 1 \| 1 \| 2\.44 % ", parts)


def test_a_figure_that_there_is_not(kept: Any) -> None:
    with pytest.raises(KeyError):
        script.filled("{{guess amp}}", kept)


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
