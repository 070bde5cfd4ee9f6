"""`python -m evidence.papers`: a paper's exhibits on the terminal, as a document, a page
and pictures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evidence.papers.__main__ import main


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


def test_an_unknown_paper_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["amq"]) == 2
    assert "unknown paper" in capsys.readouterr().err
