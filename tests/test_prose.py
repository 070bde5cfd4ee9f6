"""The README and the tutorials are in plain language; each rule is seen to notice its fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from prose import SETTINGS, Prose, complaints, pages

LIMITS = SETTINGS["limits"]


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_pages_are_in_plain_language(page: Path) -> None:
    prose = Prose.of(page.name, page.read_text(encoding="utf-8"))
    assert len(prose.sentences) > 5
    assert prose.faults(LIMITS) == []
    pytest.importorskip("proselint", reason="proselint is not installed (extra `test`)")
    assert complaints(prose) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("The plan " + "and the plan " * 12 + "ends.", "words: The plan"),
        ("Of each file the last line counts.", "inverted"),
        ("Beside the plan stands the bound. It is short.", "inverted"),
        ("Never does the solver judge itself.", "inverted"),
        ("What each method does, Methods says.", "inverted"),
        ("The plan is replayed. The file is then written.", "100% of the sentences are passive"),
        ("We see and we see it here and there. " * 2 + "a b c d e f g " * 4 + "x.", "on average"),
    ],
)
def test_faults_are_noticed(text: str, fault: str) -> None:
    faults = Prose.of("page", text).faults(LIMITS)
    assert any(fault in line for line in faults), faults


def test_plain_sentences_pass() -> None:
    text = "hetplan replays the plan. In a node, devices share a card.\n\n```\nOf x the y.\n```\n"
    prose = Prose.of("page", text)
    assert prose.faults(LIMITS) == [] and len(prose.sentences) == 2


def test_proselint_is_asked() -> None:
    pytest.importorskip("proselint", reason="proselint is not installed (extra `test`)")
    assert complaints(Prose.of("page", "This is a very very unique plan."))
