"""`hetplan study report`: predicted figures, said to be so, beside the paper's ranges."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fakes.cli import Call


def test_report(hetplan: Call, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    ran = hetplan("study", "report", "poplar", "--name", "poplar-a-llama-0.5b-*", "-q", "-o", path)
    assert (ran.code, ran.err) == (0, "")
    for expected in (
        "predicted by hetplan, not measured",
        "poplar-a-llama-0.5b-zero3",
        "As the paper measured it",
        "1.02 to 3.92",
        "none per ZeRO stage",
    ):
        assert expected in ran.out
    document = json.loads(path.read_text())
    assert document["predicted"] is True and len(document["rows"]) == 4
    assert {(row["low"], row["high"]) for row in document["measured"]} >= {
        (1.02, 3.92),
        (None, 2.27),
    }
    assert len(document["predicted_ranges"]) == 4
    assert (
        hetplan("study", "report", "poplar", "--name", "poplar-a-llama-0.5b-*", "-q", "--json").json
        == document
    )


def test_report_of_hap(hetplan: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetplan.formulations.hap.experiments.SECONDS", 2.0)
    monkeypatch.setattr("hetplan.formulations.hap.experiments.PAPER_SECONDS", 0.5)
    path = tmp_path / "report.json"
    ran = hetplan("study", "report", "hap", "--name", "vgg19-8gpu", "-q", "-o", path)
    assert (ran.code, ran.err) == (0, "")
    for expected in ("Predicted iterations", "vgg19-8gpu", "not measured", "up to 2.41 times"):
        assert expected in ran.out
    document = json.loads(path.read_text())
    (row,) = document["rows"]
    assert (document["problem"], document["predicted"], row["experiment"]) == (
        "hap",
        True,
        "vgg19-8gpu",
    )
    assert 0 < row["bound"] <= row["predicted_seconds"]["joint"] * (1 + 1e-9)
    assert "no experiment matches" in hetplan("study", "report", "hap", "--name", "x*").error


def test_what_cannot_be_reported(hetplan: Call) -> None:
    assert (
        "problem has no report (got 'amp', expected hap or poplar)"
        in hetplan("study", "report", "amp").error
    )
    assert "no experiment matches" in hetplan("study", "report", "poplar", "--name", "x*").error
    assert "unknown problem" in hetplan("study", "report", "tsp").error
