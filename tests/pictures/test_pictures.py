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

import pytest

from chromium import needs_chromium, rendered
from fakes.workloads import small
from hetplan.errors import InputError, UnsupportedError
from hetplan.planner.pictures.html import KINDS, cells as figures_of, page
from hetplan.planner.pictures.scene import BINS, Offer, Scene, Span, read, sampled, scene
from hetplan.planner.pictures.terminal import COLUMNS, drawn, tables
from hetplan.planner.ranking import Planning, make_plans
from hetplan.planner.strategy import make_strategies
from hetplan.solvers.run import Options, Run
from html_pages import Page


@cache
def planning() -> Planning:
    """gpt2 on two fast and two slow devices."""
    return make_plans(
        small(), make_strategies(["amp", "dp"]), Run(Options(time_limit=30, threads=1))
    )


@cache
def picture() -> Scene:
    """Of its winner, with all candidates."""
    best = planning().best
    assert best is not None and best.plan is not None and best.replay is not None
    _, offers, winner = read(planning().document(), "x.json")
    return scene(best.plan, best.replay, planning().workload, offers, winner)


def test_the_timeline_is_the_replay() -> None:
    best = planning().best
    assert best is not None and best.replay is not None
    found, timeline = picture(), best.replay.timeline
    assert found.seconds == best.predicted_seconds and len(found.rows) == found.units == len(
        best.replay.owners
    )
    for unit, row in enumerate(found.rows):
        computing = sum(span.end - span.start for span in row.computes)
        assert computing == pytest.approx(timeline.busy[unit])
        assert row.busy == pytest.approx(timeline.busy[unit] / found.seconds)
        for before, after in zip(row.computes[:-1], row.computes[1:], strict=True):
            assert before.end <= after.start + 1e-12
    drawn_events = sum(len(row.computes) + len(row.communicates) for row in found.rows)
    assert drawn_events == len(timeline.events())


def test_memory_and_places_are_of_every_device() -> None:
    best, found = planning().best, picture()
    assert best is not None and best.plan is not None and best.replay is not None
    assert tuple(d.held for d in found.devices) == best.replay.peak_bytes
    assert {d.device for d in found.devices if d.unit is not None} == set(best.plan.ranks)


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
    assert found.open == [] and "script" not in {tag for tag, _ in found.tags}
    assert all(value.startswith("data:") for value in found.attributes("src", "href"))
    assert "http" not in text and "@import" not in text and "url(" not in text
    words = " ".join(found.text)
    for expected in (
        "One iteration",
        "Memory of each device",
        "Where everything is",
        "What else there was",
    ):
        assert expected in words
    for candidate in planning().candidates:
        assert candidate.name in words
    for kind in KINDS:
        assert f"--{kind}:" in text
    bars = [
        a
        for tag, a in found.tags
        if tag == "rect" and (a.get("fill") or "").startswith("var(--forward")
    ]
    assert len(bars) >= sum(s.kind == "forward" for row in picture().rows for s in row.computes)


def test_a_formula_is_no_replay() -> None:
    """Optimal is said of the replay for `joint` alone."""
    offer = Offer(strategy="amp", method="auto", status="optimal", fits_memory=True)
    assert figures_of(offer)[:2] == ("amp/auto", "optimal for its formula")
    assert figures_of(offer.model_copy(update={"strategy": "joint"}))[1] == "optimal"
    assert figures_of(offer.model_copy(update={"status": "feasible"}))[1] == "feasible"


def test_names_cannot_break_out() -> None:
    evil = replace(picture(), title="<script>alert(1)</script>", subtitle="a & b < c")
    found = Page(page(evil))
    assert not any(tag == "script" for tag, _ in found.tags)
    assert "<script>alert(1)</script>" in "".join(found.text)


def test_the_terminal_shows_the_same() -> None:
    timeline, memory, candidates = tables(picture())
    assert len(timeline.rows) == picture().units and len(memory.rows) == 4
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


def test_without_matplotlib_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from hetplan.planner.pictures.figure import figure

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'hetplan\[plots\]', or --html"):
        figure(picture(), "png")


def test_documents_of_a_planning_are_read() -> None:
    document = json.loads(json.dumps(planning().document()))
    plan, offers, winner = read(document, "x.json")
    best = planning().best
    assert best is not None and plan == best.plan
    assert [(o.name, o.predicted_seconds) for o in offers] == [
        (c.name, c.predicted_seconds) for c in planning().candidates
    ]
    assert winner == planning().winner
    assert read(document["candidates"][0]["plan"], "x.json") == (plan, [], None)


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
    tags = re.compile(r"<([a-z][a-z0-9]*)")  # elements all arrive
    there, written = (Counter(tags.findall(text)) for text in (shown.dom, page(picture())))
    assert there == written and there["rect"] > 50


@needs_chromium
def test_complaints_of_a_browser_are_seen(tmp_path: Path) -> None:
    file = tmp_path / "bad.html"
    script = "console.error('not well'); nothing()"
    file.write_text(f"<!doctype html><title>x</title><img src='none.png'><script>{script}</script>")
    told = " ".join(rendered(file, width=300, height=200).console)
    assert "not well" in told and "nothing is not defined" in told
