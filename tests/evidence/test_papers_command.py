"""`python -m evidence.papers`: a paper's exhibits on the terminal, as a document, a page
and pictures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evidence.papers.__main__ import main

pytestmark = pytest.mark.evidence


def test_a_report_and_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra `plots`)")
    page, pictures = tmp_path / "page.html", tmp_path / "png"
    exhibit = ["hap", "--name", "Figure 4"]
    assert main([*exhibit, "--html", str(page), "--png", str(pictures)]) == 0
    ran = capsys.readouterr()
    assert "Figure 4: 0.25" in ran.err
    assert "the paper: §2.5.1" in ran.out and "why ours differs: rings" in ran.out
    assert [path.name for path in pictures.iterdir()] == ["figure-4.png"]
    text = page.read_text(encoding="utf-8")
    assert "<svg" in text and "Grouped-Broadcast" in text and text.endswith("</body></html>\n")
    assert main([*exhibit, "-q", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["paper"] == "hap" and len(document["exhibits"][0]["rows"]) == 8


REFUSED = {
    ("hap", "--name", "x*"): "--name: no exhibit matches (got 'x*')",
    ("megatron",): "unknown paper 'megatron' (expected one of amp, astra, ditto, hap, poplar)",
    ("ditto", "--name", "Figure 8", "--png", "file"): "dir 'file' is a file",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_what_cannot_be_reported_is_one_line(
    arguments: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert main(list(arguments)) == 2
    captured = capsys.readouterr()
    assert REFUSED[arguments] in captured.err and captured.err.count("\n") == 1
    assert captured.out == ""
