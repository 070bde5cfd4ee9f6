"""Findings against rows made by hand; the page and the charts show them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from chromium import needs_chromium, rendered
from export.hostile import HARMLESS, PAYLOADS, Tags
from hetplan.instances.library import find
from hetplan.studies.findings import Study, cactus, interval, profile, row_size, shifted_mean
from hetplan.studies.page import document, in_words, markdown, page_lines
from hetplan.studies.rows import Row
from hetplan.text import percent_text
from html_pages import Page
from present import present
from studies import study_cases


def row(instance: str, method: str, **changes: Any) -> Row:
    """A row of problem ditto."""
    return study_cases.row("ditto", instance, method, **changes)


ROWS = [
    row("a", "exact", objective=2.0, bound=2.0, seconds=0.5),
    row("a", "milp", objective=2.1, bound=1.5, status="feasible", seconds=60.0),
    row("a", "greedy", objective=3.0),
    row("a", "paper", objective=2.0),
    row("b", "exact", objective=4.0, bound=4.0, seconds=2.0),
    row("b", "milp", objective=4.0, bound=4.0, seconds=1.0),
    row("b", "greedy", objective=4.4),
    row("b", "paper", status="unknown", message="nothing <b>found</b>", seconds=None),
    row("c", "exact", status="infeasible", seconds=0.1),
    row("c", "milp", status="infeasible", seconds=0.3),
]


# So many instances that pictures say something.
MANY = [
    one | {"instance": f"{one['instance']}{copy}", "key": f"{one['key']}-{copy}"}
    for copy in range(3)
    for one in ROWS
]


def test_summaries() -> None:
    found = {summary.method: summary for summary in Study(ROWS).summaries("ditto")}
    assert list(found) == ["exact", "milp", "greedy", "paper"]
    greedy = found["greedy"]
    assert (greedy.runs, greedy.solved, greedy.missed) == (2, 2, 1.0)
    assert greedy.worst_excess == pytest.approx(0.5) and greedy.worst is not None
    assert greedy.worst["instance"] == "a"
    assert greedy.median_excess == pytest.approx(0.3)
    assert greedy.mean_excess == pytest.approx((1.5 * 1.1) ** 0.5 - 1)
    assert (found["paper"].runs, found["paper"].solved, found["paper"].missed) == (2, 1, 0.0)
    assert (found["milp"].proven, found["exact"].proven) == (2, 3)
    assert found["milp"].worst_excess == pytest.approx(0.05)
    assert found["paper"].median_seconds == 1.0


def test_intervals_of_means() -> None:
    """They hold the mean, shrink with the number of runs, and there is none of four runs."""
    values = [0.0, 0.1, 0.2, 0.4, 0.8]
    (low, high), (near, far) = present(interval(values)), present(interval(values * 20))
    assert 0 < low < near < shifted_mean(values) < far < high < 0.8
    assert far - near < 0.3 * (high - low)
    assert interval(values[:4]) is None and interval([0.3] * 9) is None
    rows = [row(f"{v}", "greedy", objective=1 + v, best_known=1.0) for v in values]
    [summary] = Study(rows).summaries("ditto")
    assert summary.mean_interval == interval([r["objective"] - 1 for r in rows])
    assert f"[{percent_text(low)}, {percent_text(high)}]" in document("x", page_lines(Study(rows)))


def test_curves() -> None:
    assert cactus(r for r in ROWS if r["method"] == "exact") == [0.1, 0.5, 2.0]
    assert profile(Study(ROWS), "ditto", ["exact", "milp"]) == {
        "exact": [1.0, 1.0, 2.0],
        "milp": [1.0, pytest.approx(3.0)],
    }


def test_a_better_plan_is_a_miss_with_or_without_a_proof() -> None:
    rows = [
        row("a", "milp", objective=2.0, bound=1.0, status="feasible"),
        row("a", "greedy", objective=3.0),
    ]
    [milp, greedy] = Study(rows).summaries("ditto")
    assert (milp.missed, greedy.missed) == (0.0, 1.0)
    assert greedy.worst_excess == pytest.approx(0.5)


def test_the_library_counts_as_known() -> None:
    rows = [row("a", "greedy", objective=3.0, best_known=2.0, bound_known=2.0)]
    assert Study(rows).summaries("ditto")[0].missed == 1.0


def test_conflicts_are_found() -> None:
    assert Study(ROWS).conflicts() == []
    below = [*ROWS, row("a", "paper", objective=1.0, seed=1)]
    assert Study(below).conflicts() == ["a: objective 1 of paper is below bound 2 of exact"]
    wrong = [*ROWS, row("a", "milp", status="infeasible", seed=1)]
    assert Study(wrong).conflicts() == ["a: milp says infeasible, a decision is known"]


def test_rows_that_contradict_each_other_are_marked() -> None:
    exact = row("a", "exact", objective=2.0, bound=2.0)
    others = [row("a", "greedy", objective=3.0), row("b", "milp", objective=1.0, bound=1.0)]
    paper = row("a", "paper", objective=1.0)
    milp = row("b", "milp", status="infeasible", seed=1)
    study = Study([exact, *others, paper, milp])
    assert [each for each in study.rows if study.contradicted(each)] == [exact, paper, milp]
    assert "\n".join(page_lines(study)).count("<td>contradicted!") == 3
    assert "contradicted!" not in "\n".join(page_lines(Study([exact, *others])))


def test_worst_cases_come_worst_first() -> None:
    """Those at the optimum are none."""
    assert [(r["instance"], r["method"]) for _, r in Study(ROWS).worst_cases(9)] == [
        ("a", "greedy"),
        ("b", "greedy"),
    ]


# What the titles of the pictures speak of, in their order.
CHARTS = ("one dot per run", "Gaps", "Proofs", "profile", "size")


def test_page() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra `plots`)")
    times = [{**row, "begun": f"2026-01-0{i + 1}T10:30:0{i}+00:00"} for i, row in enumerate(ROWS)]
    between = "begun from 2026-01-01 10:30 to 2026-01-0"
    assert between in document("x", page_lines(Study(times[::-1])))
    text = document("Gap <study>", page_lines(Study(ROWS)))
    page = Page(text)
    ids, links = page.attributes("id"), [v for v in page.attributes("href") if v[0] == "#"]
    assert page.open == [] and not any(v.startswith("http") for v in page.attributes("src", "href"))
    worst = text[text.index('id="worst"') : text.index('id="instances"')]
    assert 'href="#instance-ditto-a"' in worst and 'href="#row-ditto-a-greedy-0"' in worst
    assert links and {link.removeprefix("#") for link in links} <= set(ids)
    runs = text[text.index('id="rows"') :]
    assert runs.count('<a href="#instance-ditto-a">a</a>') == sum(
        r["instance"] == "a" for r in ROWS
    )
    assert sum(name.startswith("instance-") for name in ids) == 3
    assert sum(name.startswith("row-") for name in ids) == len(ROWS)
    for expected in (
        "Gap &lt;study&gt;",
        "nothing &lt;b&gt;found",
        "cpu &lt;x&gt;",
        "50 %",
        "predicted iteration",
    ):
        assert expected in text
    assert "<script" not in text and "<svg" not in text  # three instances are not worth a picture
    assert document("Gap <study>", page_lines(Study(ROWS))) == text
    assert document("many", page_lines(Study(MANY))).count("<svg") == len(CHARTS)


def test_the_page_says_it_in_words() -> None:
    assert in_words(Study(ROWS), "ditto") == (
        "10 runs on 3 instances. exact ends 3 of its 3 runs with a proof. paper comes nearest of "
        "the heuristics: 0 % above the best known on average, 0 % at most, over 1 plan."
    )


@needs_chromium
def test_page_in_a_browser(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra `plots`)")
    page = tmp_path / "page.html"
    page.write_text(document("Gap <study>", page_lines(Study(MANY))), encoding="utf-8")
    seen = rendered(page, height=4200)
    assert seen.console == () and seen.dom.count("<svg") == len(CHARTS)
    assert seen.dom.count("<tr") == page.read_text().count("<tr"), "tables keep their rows"


def test_sizes_are_counted_where_rows_do_not_tell() -> None:
    [given] = [row("tiny-fast-slow", "exact", details_json="{}")]
    entry = present(find("ditto/tiny-fast-slow"))
    data = entry.load().data
    devices = sum(kind.nodes * kind.devices_per_node for kind in data.device_types)
    assert row_size(given) == devices * len(data.device_types[0].forward_seconds)
    assert row_size(row("no-such", "exact", details_json="{}")) is None
    assert row_size(row("a", "exact")) == 100 * ord("a")


def test_markdown() -> None:
    text = markdown(Study(ROWS), "Gap study")
    lines = [line for line in text.splitlines() if line.startswith("| greedy")]
    assert len(lines) == 1 and "50 %" in lines[0] and "100 %" in lines[0]


@pytest.mark.parametrize("text", PAYLOADS)
def test_names_of_instances_stay_texts(text: str) -> None:
    named, plain = (
        Study([row(name, "exact", objective=2.0, bound=2.0), row(name, "greedy", objective=3.0)])
        for name in (text, HARMLESS)
    )
    assert (
        Tags(document(text, page_lines(named))).seen == Tags(document("x", page_lines(plain))).seen
    )
    written, expected = markdown(named, text), markdown(plain, HARMLESS)
    assert len(written.splitlines()) == len(expected.splitlines())
    for one, other in zip(written.splitlines(), expected.splitlines(), strict=True):
        cells = [len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in (one, other)]
        assert cells[0] == cells[1] and "<script" not in one and one.isprintable()


def test_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra `plots`)")
    from hetplan.studies.charts import charts, write_pictures

    found = charts(Study(ROWS), "ditto")
    assert len(found) == len(CHARTS) and all(
        part in title for part, title in zip(CHARTS, found, strict=True)
    )
    write_pictures(tmp_path, {f"Chart {n}": made for n, made in enumerate(found.values())})
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == [f"chart-{n}.png" for n in range(len(found))]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)
