"""`hetplan study` and `hetplan study report DIR` on a tiny study."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes.cli import Call
from hetplan.studies.rows import kept_rows, write_rows

pytest.importorskip("pyarrow", reason="pyarrow is not installed (extra `study`)")
ARGUMENTS = ("study", "run", "tiny-fast-slow", "-m", "exact,greedy-joined", "-t", "600", "-q")


def test_a_study_and_its_report(hetplan: Call, tmp_path: Path) -> None:
    folder = tmp_path / "study"
    first = hetplan(*ARGUMENTS, "-o", folder, "--json").json
    assert (first["runs"], first["done"]) == (2, 2) and first["counts"] == {
        "optimal": 1,
        "feasible": 1,
    }
    again = hetplan(*ARGUMENTS, "-o", folder)
    assert again.code == 0 and "2 of 2 runs: 2 from before" in again.out
    page, text = tmp_path / "page.html", tmp_path / "page.md"
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra `plots`)")
    ran = hetplan(
        "study", "report", folder, "-o", page, "--markdown", text, "--png", tmp_path / "png"
    )
    assert ran.code == 0 and "greedy-joined" in ran.out
    assert (
        page.read_text().startswith("<!DOCTYPE html>") and "| greedy-joined |" in text.read_text()
    )
    assert len(list((tmp_path / "png").glob("ditto-*.png"))) >= 2
    found = hetplan("study", "report", folder, "--json").json
    assert found["conflicts"] == []
    assert [summary["method"] for summary in found["problems"]["ditto"]] == [
        "exact",
        "greedy-joined",
    ]
    raise_a_bound(folder / "rows")
    ran = hetplan(*ARGUMENTS, "-o", folder, "--json")
    (line,) = ran.json["contradictions"]
    assert ran.code == 3 and "of exact is below bound" in line and line in ran.err
    reported = hetplan("study", "report", folder, "--json")
    assert reported.code == 3 and line in reported.json["conflicts"]
    assert len(reported.json["contradicted"]) == 1
    checked = hetplan("instances", "validate", folder, "--json")
    assert checked.code == 3 and checked.json["contradictions"] == [line]


def raise_a_bound(folder: Path) -> None:
    """Raise the bound of the row of `exact` above its objective, but not above the other row's."""
    rows = kept_rows(folder.parent).rows
    (exact,) = (row for row in rows if row["method"] == "exact")
    exact["bound"] = exact["objective"] * (1 + 1e-4)
    for file in folder.iterdir():
        file.unlink()
    write_rows(folder / "all.parquet", rows)


def test_a_study_without_a_folder_has_one_of_its_name(
    hetplan: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        hetplan(
            "study", "run", "ditto/tiny-fast-slow", "-m", "greedy-joined", "-t", "600", "-q"
        ).code
        == 0
    )
    assert len(list((tmp_path / "study-ditto-tiny-fast-slow" / "rows").iterdir())) == 1


def test_a_study_goes_on_without_damaged_rows(hetplan: Call, tmp_path: Path) -> None:
    folder = tmp_path / "study"
    assert hetplan(*ARGUMENTS, "-o", folder, "-q").code == 0
    rows = sorted((folder / "rows").iterdir())
    rows[0].write_bytes(b"PAR1 nonsense")
    (folder / "rows" / "all.parquet").write_bytes(b"")
    reported = hetplan("study", "report", folder, "--json")
    assert reported.code == 0 and len(reported.json["damaged"]) == 2
    assert rows[0].name in reported.err and "all.parquet" in reported.err
    again = hetplan(*ARGUMENTS, "-o", folder, "-q", "--json")
    assert again.code == 0 and again.json["done"] == 2
    assert f"{rows[0].name}: cannot be read" in again.err and "made again" in again.err
    assert sum(again.json["counts"].values()) == 1


def test_a_folder_is_tried_before_the_first_run(hetplan: Call, tmp_path: Path) -> None:
    ran = hetplan(*ARGUMENTS, "-o", "/proc/none", "-q")
    assert ran.code == 2 and "/proc/none/rows: folder cannot be made" in ran.error


@pytest.mark.parametrize("gib", ["nan", "inf", "0", "-1"])
def test_limits_of_memory(hetplan: Call, gib: str) -> None:
    assert "--memory-gib: not usable" in hetplan(*ARGUMENTS, "--memory-gib", gib).error


def test_a_limit_beyond_the_process_s_own_is_refused(
    hetplan: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda kind: (8 * 2**30, 8 * 2**30))
    ran = hetplan(*ARGUMENTS, "-o", tmp_path / "study", "-q", "--memory-gib", "9")
    assert ran.code == 2 and "beyond the limit of this process" in ran.error
