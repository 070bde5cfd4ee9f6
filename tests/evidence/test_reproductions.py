"""evidence/speed/reproductions.py: its page is its own, its cells say what was proven, its quick
run ends with tables."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evidence.speed import reproductions as script
from hetplan.clock import CLOCK
from markdown_pages import ROOT

pytestmark = pytest.mark.evidence


def row(**changes: Any) -> dict[str, Any]:
    """A proven run of 12 ms."""
    return {
        "seconds": 0.012,
        "status": "optimal",
        "objective": 2.0,
        "gap": 0.0,
        "message": "",
        **changes,
    }


def test_cells_tell_proofs_from_finds() -> None:
    assert script.cell(row(), 2.0) == "12 ms, proven"
    assert script.cell(row(status="feasible", objective=2.2, gap=None), 2.0) == "12 ms, +10 %"
    assert script.cell(row(status="feasible", seconds=4.0, gap=0.25), 2.0) == "4 s, +0 %, gap 25 %"
    assert script.cell(row(status="unknown", objective=None), 2.0) == "12 ms, unknown"
    assert script.cell(row(status="refused", seconds=None, objective=None), 2.0) == "refused"


@pytest.mark.parametrize(("key", "case"), [("poplar", 2), ("segments", 3), ("ditto", 0)])
def test_a_slow_machine_changes_no_row(
    key: str, case: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that runs a million times as fast stands for a machine that is as slow."""
    table, real = script.TABLES[key], CLOCK.now
    for method, budget in table.methods:
        if method == "oobleck":
            continue  # takes half a minute
        if budget is not None:
            budget = min(budget, 0.2)
        rows = []
        for slower in (1.0, 1e6):
            monkeypatch.setattr(CLOCK, "now", lambda slower=slower: slower * real())
            row = script.run_one(table, table.cases[case], method, budget)
            rows.append({**row, "seconds": 1.0})
        assert rows[0] == rows[1]
        assert script.cell(rows[0], 1.0) == script.cell(rows[1], 1.0)
        proven = method == "exact" or (budget is not None and key != "ditto")
        assert rows[0]["status"] == ("optimal" if proven else "feasible")


def test_a_page_is_renewed_between_its_marks() -> None:
    mark = "<!-- generated: python -m evidence.speed reproductions -->"
    page = f"a\n{mark}\nold\n<!-- end -->\nb\n"
    assert script.written(page, "new\n") == page.replace("old", "new")
    with pytest.raises(ValueError, match="0 places"):
        script.written("a\n", "new\n")


def test_one_table_is_renewed_alone() -> None:
    tables = "\n**A**\n\n| 1 |\n\nof A\n\n**B**\n\n| 2 |\n\n- of B\n\n"
    block = tables + "date 1, all tables\n"
    renewed = script.with_tables(block, ["**A**\n\n| 3 |\n"], "date 2")
    assert renewed == (
        "\n**A**\n\n| 3 |\n\n**B**\n\n| 2 |\n\n- of B\n\ndate 1, all tables\n\n- A, again: date 2\n"
    )
    both = script.with_tables(renewed, ["\n**B**\n\n| 4 |\n", "\n**A**\n\n| 5 |\n"], "date 3")
    assert both == (
        "\n**A**\n\n| 5 |\n\n**B**\n\n| 4 |\n\ndate 1, all tables\n\n"
        "- B, again: date 3\n- A, again: date 3\n"
    )
    with pytest.raises(ValueError, match="table 'C' is not in the block"):
        script.with_tables(block, ["**C**\n"], "date 2")


def test_every_table_of_the_page_can_be_renewed_alone() -> None:
    """A run of one table leaves the other tables and the conditions as they are."""
    page = (ROOT / "docs" / "reproductions.md").read_text(encoding="utf-8")
    block = script.block_of(page)
    # a table that was renewed alone has a line that says when, which a new one replaces
    kept = [line for line in block.splitlines() if ", again: " not in line]
    block = "\n".join(kept).rstrip() + "\n"
    titles = script.TITLE.findall(block)
    assert len(titles) == 6
    for title in titles:
        renewed = script.with_tables(block, [f"**{title}**\n\nnew"], "date 2")
        assert script.TITLE.findall(renewed) == titles
        cut = block.index(f"**{title}**")
        assert renewed.startswith(block[:cut] + f"**{title}**\n\nnew\n\n")
        tail = (
            block[block.index("**", cut + len(title) + 4) :] if title != titles[-1] else "\ndate "
        )
        assert tail in renewed


def test_only_and_write_renew_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command, with a table that takes no time."""
    page = tmp_path / "page.md"
    page.write_text(f"a\n{script.MARK}\n**A**\n\nold\n\n**B**\n\nkept\n\ndate 1\n<!-- end -->\nb\n")
    monkeypatch.setattr(script, "table_rows", lambda key, quick: [])
    monkeypatch.setattr(script, "table_text", lambda key, rows: "**A**\n\nnew\n")
    monkeypatch.setattr(sys, "argv", ["reproductions", "--only", "amp", "--write", str(page)])
    script.main()
    text = page.read_text()
    assert "**A**\n\nnew\n\n**B**\n\nkept\n\ndate 1\n" in text
    assert "- A, again: date " in text and text.endswith("<!-- end -->\nb\n")


def test_the_page_has_every_case() -> None:
    page = (ROOT / "docs" / "reproductions.md").read_text(encoding="utf-8")
    for table in script.TABLES.values():
        assert f"**{table.title}**" in page
        for case in table.cases:
            line = re.search(rf"^\| {re.escape(case.label)} \|.*$", page, flags=re.MULTILINE)
            assert line is not None and (not table.published or case.published in line[0]), (
                case.label
            )
            assert line[0].count("|") == 2 + len(table.methods) + bool(table.published), case.label


def test_the_quick_run_ends_with_proofs(tmp_path: Path) -> None:
    script = [sys.executable, "-m", "evidence.speed", "reproductions"]
    command = [*script, "--quick", "-o", str(tmp_path / "rows.json")]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=1200)
    rows = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))["rows"]
    exact = [found for found in rows if found.get("method") == "exact"]
    assert len(exact) >= 8
    assert all(found["status"] == "optimal" for found in exact)
