"""`hetplan report`: a paper's exhibits on the terminal, as a document, a page and pictures."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes.cli import Call


def test_a_report_and_its_files(hetplan: Call, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra `plots`)")
    page, pictures = tmp_path / "page.html", tmp_path / "png"
    ran = hetplan("report", "hap", "--name", "Figure 4", "--html", page, "--png", pictures)
    assert ran.code == 0 and "Figure 4: 0.25" in ran.err
    assert "the paper: §2.5.1" in ran.out and "why ours differs: rings" in ran.out
    assert [path.name for path in pictures.iterdir()] == ["figure-4.png"]
    text = page.read_text(encoding="utf-8")
    assert "<svg" in text and "Grouped-Broadcast" in text and text.endswith("</body></html>\n")
    document = hetplan("report", "hap", "--name", "Figure 4", "-q", "--json").json
    assert document["paper"] == "hap" and len(document["exhibits"][0]["rows"]) == 8
