"""Figures as they read."""

from __future__ import annotations

import json

import pytest

from hetplan.files import to_json
from hetplan.text import comments, counted, more_text, names_text, seconds_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0 s"),
        (2.5e-4, "250 us"),
        (0.0546, "54.6 ms"),
        (12.0, "12 s"),
        (-0.0546, "-54.6 ms"),
    ],
)
def test_seconds_read_in_their_unit(value: float | None, text: str) -> None:
    assert seconds_text(value) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (more_text(0.652), "+65.2 %"),
        (more_text(-0.03), "-3 %"),
        (more_text(82.3), "83x"),
        (names_text(["V100", "V100"]), "V100"),
        (names_text(["embedding", "block1", "head"]), "embedding .. head"),
        (names_text([]), "-"),
        (counted(1, "stage"), "1 stage"),
        (counted(0, "layer"), "0 layers"),
    ],
)
def test_amounts_and_names(text: str, expected: str) -> None:
    assert text == expected


def test_a_text_is_one_comment_whatever_it_holds() -> None:
    every = "".join(map(chr, range(0x3000)))
    (line,) = comments(f"a{every}b")
    assert line.startswith("# a") and line.endswith("b") and line.isprintable()


def test_json_steers_no_terminal() -> None:
    every = {"a\x9b": ["\x1b\x7f\x80\u2028\u202e\u2066\ufeff\ud800", "é\u00a0日😀"]}
    text = to_json(every)
    assert json.loads(text) == every
    assert text.replace("\u00a0", "").removesuffix("\n").isprintable() and "é\u00a0日😀" in text
