"""Pictures of plans: everything that the replay has is in them, pages are whole and fetch nothing,
files open."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from chromium import needs_chromium, rendered
from export.hostile import HARMLESS, PAYLOADS, Tags
from fakes.workloads import cluster_document, small
from hetplan.errors import InputError
from hetplan.planner.pictures.html import KINDS, cells as figures_of, page
from hetplan.planner.pictures.scene import (
    BINS,
    ChangeDocument,
    Offer,
    Scene,
    Span,
    read,
    sampled,
    scene,
)
from hetplan.planner.pictures.terminal import COLUMNS, drawn, tables
from hetplan.planner.planning import Planning
from hetplan.planner.ranking import make_plans
from hetplan.planner.strategy import make_strategies
from hetplan.solvers.run import Options, Run
from html_pages import Page


@cache
def planning() -> Planning:
    """gpt2 on two fast and two slow devices."""
    return make_plans(
        small(), make_strategies(["amp", "dp"]), Run(Options(time_limit=600, threads=1))
    )


@cache
def picture() -> Scene:
    """Of its winner, with all candidates."""
    best = planning().best
    assert best is not None and best.plan is not None and best.replay is not None
    _, document = read(planning().document(), "x.json")
    return scene(best.plan, best.replay, planning().workload, document)


def data_of(text: str) -> dict[str, Any]:
    """What the page's script draws."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text)
    assert found is not None
    return dict(json.loads(found[1]))


def test_the_timeline_is_the_replay() -> None:
    """Of like pipelines the first is drawn; each row stands for as many as it says."""
    best = planning().best
    assert best is not None and best.replay is not None
    found, timeline = picture(), best.replay.timeline
    assert found.seconds == best.predicted_seconds
    assert sum(row.alike for row in found.rows) == len(best.replay.owners) and found.more == 0
    first = [min(d.device for d in found.used if d.row == i) for i in range(len(found.rows))]
    units = [next(u for u, own in enumerate(best.replay.devices) if d in own) for d in first]
    for unit, row in zip(units, found.rows, strict=True):
        computing = sum(span.end - span.start for span in row.computes)
        assert computing == pytest.approx(timeline.busy[unit])
        assert row.busy >= timeline.busy[unit] / found.seconds * (1 - 1e-12)
        for before, after in zip(row.computes[:-1], row.computes[1:], strict=True):
            assert before.end <= after.start + 1e-12
        events = [e for e in timeline.events() if e["unit"] == unit]
        assert len(row.computes) + len(row.communicates) == len(events)


def test_like_pipelines_share_a_row() -> None:
    """Plain data parallelism on four equal devices: one row of four."""
    workload = small(nodes=[{**cluster_document()["nodes"][0], "devices": 4}])
    best = make_plans(workload, make_strategies(["dp"]), Run(Options(threads=1))).best
    assert best is not None and best.plan is not None and best.replay is not None
    drawn = scene(best.plan, best.replay, workload)
    assert [(row.title, row.alike) for row in drawn.rows] == [("stage 0 (x4)", 4)]
    assert [d.row for d in drawn.devices] == [0] * 4


def test_memory_and_places_are_of_every_device() -> None:
    best, found = planning().best, picture()
    assert best is not None and best.plan is not None and best.replay is not None
    assert tuple(d.peak_bytes for d in found.devices) == best.replay.peak_bytes
    assert {d.device for d in found.devices if d.row is not None} == set(best.plan.ranks)


def test_sampling_keeps_shares() -> None:
    lane = [Span("forward", i / 1e4, (i + 0.9) / 1e4) for i in range(6000)] + [
        Span("backward", 0.7, 0.9)
    ]
    found = sampled(lane, 1.0)
    assert len(found) < 20 and all(span.end > span.start for span in found)
    spent = {k: sum(s.end - s.start for s in found if s.kind == k) for k in ("forward", "backward")}
    assert spent["forward"] == pytest.approx(0.6, abs=2 / BINS)
    assert spent["backward"] == pytest.approx(0.2, abs=2 / BINS)
    assert sampled([], 1.0) == ()


def test_the_page_is_whole_and_fetches_nothing() -> None:
    text = page(picture())
    found = Page(text)
    assert found.open == []
    links = [value for value in found.attributes("src", "href") if not value.startswith("#")]
    assert all(value.startswith("data:") for value in links)
    anchors = {value[1:] for value in found.attributes("href") if value.startswith("#")}
    assert anchors <= set(found.attributes("id")) and "one-iteration" in anchors
    assert "http" not in text and "@import" not in text and "url(" not in text
    words = " ".join(found.text)
    for expected in (
        "One iteration",
        "Why it takes that long",
        "Stages and memory",
        "Where everything is",
        "Price of each paradigm",
        "Plans and their bounds",
        "Money against time",
    ):
        assert expected in words
    assert "What a change would bring" not in words  # nobody asked
    for candidate in planning().candidates:
        assert candidate.name in words
    for kind in KINDS:
        assert f"--{kind}:" in text
    data = data_of(text)
    assert data["seconds"] == picture().seconds and data["kinds"] == list(KINDS)
    for row, drawn_row in zip(picture().rows, data["rows"], strict=True):
        for lane, drawn_lane in zip(
            (row.computes, row.communicates), drawn_row["lanes"], strict=True
        ):
            shares = [(s.start / data["seconds"], s.end / data["seconds"]) for s in lane]
            assert [(begin / 1e6, end / 1e6) for _, begin, end, _ in drawn_lane] == [
                pytest.approx(share, abs=1e-6) for share in shares
            ]


def test_the_page_obeys_the_keyboard_and_speaks() -> None:
    """What a screen reader and a keyboard need: names, headings, a live region, table headers."""
    found = Page(page(picture()))
    own = {a["id"]: a for _, a in found.tags if a.get("id")}
    assert own["timeline"]["tabindex"] == "0" and own["timeline"]["aria-label"]
    assert own["said"]["role"] == "status" and own["timeline"]["aria-describedby"] == "keys"
    tags = Counter(tag for tag, _ in found.tags)
    assert tags["h1"] == 1 and tags["main"] == 1 and tags["noscript"] == 1
    assert all(a.get("scope") for tag, a in found.tags if tag == "th")
    assert all(a.get("aria-label") for tag, a in found.tags if tag in ("svg", "nav"))


def test_a_page_says_what_changes_bring() -> None:
    best = Offer(strategy="amp", method="auto", predicted_seconds=0.5, fits_memory=True)
    asked = (
        ChangeDocument(change="as it is", best=best),
        ChangeDocument(change="add 2xT4", seconds_saved=0.25, best=best),
        ChangeDocument(change="remove node1"),
        ChangeDocument(change="add 1xT4", seconds_saved=0.01, within_precision=True, best=best),
    )
    words = Page(page(replace(picture(), changes=asked))).text
    assert {
        "add 2xT4",
        "250 ms",
        "nothing fits",
        "nothing beyond the search's precision",
    } <= set(words)


def test_a_formula_is_no_replay() -> None:
    """Optimal is said of the replay for `joint` alone."""
    offer = Offer(strategy="amp", method="auto", status="optimal", fits_memory=True)
    assert figures_of(offer)[:2] == ("amp/auto", "optimal for its formula")
    assert figures_of(offer.model_copy(update={"strategy": "joint"}))[1] == "optimal"
    assert figures_of(offer.model_copy(update={"status": "feasible"}))[1] == "feasible"


def test_names_cannot_break_out() -> None:
    evil = replace(picture(), title="<script>alert(1)</script>", subtitle="a & b < c")
    found = Page(page(evil))
    assert sum(tag == "script" for tag, _ in found.tags) == 2  # the page's own data and script
    assert "<script>alert(1)</script>" in "".join(found.text)
    row = replace(picture().rows[0], title="</script><script>alert(1)</script>")
    text = page(replace(picture(), rows=(row, *picture().rows[1:])))
    assert text.count("<script") == 2 and data_of(text)["rows"][0]["title"] == row.title


def test_the_terminal_shows_the_same() -> None:
    timeline, why, memory, candidates = tables(picture())
    assert len(timeline.rows) == len(picture().rows)
    kinds = {(d.kind, d.place, d.peak_bytes, d.limit) for d in picture().used}
    assert len(memory.rows) == len(kinds)  # devices that hold the same share a line
    assert [line[0] for line in why.rows] == [*picture().why]
    for row, cells in zip(picture().rows, timeline.rows, strict=True):
        letters = cells[3]
        assert letters == drawn(row, picture().seconds) and len(letters) == COLUMNS
        computes = sum(letter in "FBU" for letter in letters) / COLUMNS
        assert computes == pytest.approx(row.busy, abs=0.15)
    assert len(candidates.rows) == len(planning().candidates)
    assert candidates.rows[0][0].endswith(" *")


@pytest.mark.parametrize(("kind", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_files_by_matplotlib(kind: str, magic: bytes) -> None:
    pytest.importorskip("matplotlib")
    from hetplan.planner.pictures.figure import figure

    found = figure(picture(), kind)
    assert found.startswith(magic) and len(found) > 10_000


def hostile(text: str) -> Scene:
    """The picture of a plan whose file has the text everywhere."""
    found = picture()
    return replace(
        found,
        title=text,
        subtitle=text,
        rows=tuple(replace(row, title=text, devices=text, layers=text) for row in found.rows),
        devices=tuple(replace(one, kind=text, place=one.place and text) for one in found.devices),
        nodes=(text,) * len(found.nodes),
        why={text: text},
        offers=tuple(
            offer.model_copy(update=dict.fromkeys(("strategy", "method", "status"), text))
            for offer in found.offers
        ),
    )


@pytest.mark.parametrize("text", PAYLOADS)
def test_texts_of_a_plan_stay_texts_in_pictures(text: str) -> None:
    drawn, plain = page(hostile(text)), page(hostile(HARMLESS))
    assert Tags(drawn).seen == Tags(plain).seen
    assert all(c.isprintable() or c == "\n" for c in drawn)
    rows = data_of(drawn)["rows"]
    assert all(row["title"] == text for row in rows)


@cache
def tags_of_a_harmless_figure() -> set[str]:
    """Of its SVG."""
    from hetplan.planner.pictures.figure import figure

    plain = ElementTree.fromstring(figure(hostile(HARMLESS), "svg"))
    return {one.tag for one in plain.iter()}


@pytest.mark.parametrize("text", ["one $ two $\\frac{", "a\x1b[2Jb\0", "</text><script>"])
def test_texts_of_a_plan_stay_texts_in_figures(text: str) -> None:
    pytest.importorskip("matplotlib")
    from hetplan.planner.pictures.figure import figure

    root = ElementTree.fromstring(figure(hostile(text), "svg"))
    assert {one.tag for one in root.iter()} == tags_of_a_harmless_figure()


def test_without_matplotlib_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from hetplan.planner.pictures.figure import figure

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(
        InputError, match=r"; --html does not \(expected pip install 'hetplan\[plots\]'"
    ):
        figure(picture(), "png")


def test_documents_of_a_planning_are_read() -> None:
    document = json.loads(json.dumps(planning().document()))
    plan, whole = read(document, "x.json")
    best = planning().best
    assert best is not None and plan == best.plan and whole is not None
    assert [(o.name, o.predicted_seconds) for o in whole.candidates] == [
        (c.name, c.predicted_seconds) for c in planning().candidates
    ]
    assert (whole.winner, whole.bound) == (planning().winner, planning().bound)
    assert read(document["candidates"][0]["plan"], "x.json") == (plan, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"winner": None}, "x.json: winner: no winner to show"),
        ({"winner": 99}, "x.json: winner: no winner to show (got 99"),
        ({"candidates": {}}, "x.json: candidates: not usable"),
        ({"candidates": [3]}, "x.json: candidates[0]: not usable"),
        ({"candidates": [{"bound": "a"}]}, "x.json: candidates[0].bound: not usable (got 'a'"),
        ({"candidates": [{"bound": -1}]}, "candidates[0].bound: not usable"),
        ({"candidates": [{"plan": None}]}, "x.json: candidates[0].plan"),
    ],
)
def test_damaged_documents_are_one_line(change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        read({"winner": 0, "candidates": []} | change, "x.json")
    assert message in str(caught.value)


@needs_chromium
def test_a_browser_shows_it_without_complaint(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(page(picture()), encoding="utf-8")
    shown = rendered(file)
    assert shown.console == ()
    assert shown.png.startswith(b"\x89PNG") and len(shown.png) > 30_000
    spans = sum(len(row.computes) + len(row.communicates) for row in picture().rows)
    bars = re.compile(r'data-e="\d')
    assert len(bars.findall(shown.dom)) == spans  # the script has drawn them all
    press = (
        'for (const key of ["+", "+", "ArrowRight"]) document.getElementById("timeline")'
        '.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));'
    )
    file.write_text(f"{page(picture())}<script>{press}</script>", encoding="utf-8")
    zoomed = rendered(file)
    assert zoomed.console == () and 0 < len(bars.findall(zoomed.dom)) < spans
    first = picture().rows[0].computes[0]
    chosen = f"{picture().rows[0].title}: {first.kind} of micro-batch {first.batch}, "
    assert chosen in zoomed.dom and 'class="chosen"' in zoomed.dom


@needs_chromium
def test_complaints_of_a_browser_are_seen(tmp_path: Path) -> None:
    file = tmp_path / "bad.html"
    script = "console.error('not well'); nothing()"
    file.write_text(f"<!doctype html><title>x</title><img src='none.png'><script>{script}</script>")
    told = " ".join(rendered(file, width=300, height=200).console)
    assert "not well" in told and "nothing is not defined" in told
