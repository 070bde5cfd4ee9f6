"""`hetplan show`: decisions in full, from files, answers and the library."""

from __future__ import annotations

from pathlib import Path

from fakes.cli import Call


def test_the_librarys_best_program(hetplan: Call) -> None:
    ran = hetplan("show", "hap-chain-2x2")
    assert (ran.code, ran.err) == (0, "")
    for expected in (
        "sharding ratios",
        "Reduce-Scatter e4",
        "e4|All-Reduce",
        "slowest takes",
        "takes",
    ):
        assert expected in ran.out
    document = hetplan("show", "hap-chain-2x2", "--json").json
    (shown,) = document["decisions"]
    assert document["problem"] == "hap" and len(shown["instructions"]) == len(shown["stages"]) + 11
    assert abs(shown["seconds"] - shown["objective"]) < 1e-9


def test_an_answer(hetplan: Call, tmp_path: Path) -> None:
    path = tmp_path / "answer.json"
    assert hetplan("solve", "hap-chain-2x2", "--method", "auto,dp-even", "-q", "-o", path).code == 0
    shown = hetplan("show", "hap-chain-2x2", path, "--json").json["decisions"]
    assert [d["source"] for d in shown] == ["auto", "dp-even"]


def test_other_families_are_described(hetplan: Call) -> None:
    ran = hetplan("show", "tiny-mixed")
    assert ran.code == 0 and "stage" in ran.out
    assert "decision" in hetplan("show", "tiny-mixed", "--json").json["decisions"][0]


def test_what_cannot_be_shown(hetplan: Call, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text('{"program": [0], "ratios": [[1, 0, 0, 0, 0, 0, 0, 0]]}')
    assert "decision breaks a constraint" in hetplan("show", "hap-chain-2x2", path).error
    source = Path(__file__).parents[2] / "src/hetplan/instances/library/hap/hap-chain-2x2.json"
    copy = tmp_path / "mine.json"
    copy.write_text(source.read_text())
    assert "no best-known decision of this instance" in hetplan("show", copy).error
    assert "neither a file nor an instance" in hetplan("show", "hap-chain").error
