"""`python -m evidence.speed`: the list of scripts, one of them run, and what nobody can run."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import pytest

from evidence.speed.__main__ import first_paragraph, main, scripts
from markdown_pages import ROOT

pytestmark = pytest.mark.evidence

IMPORTED_ONLY = {"hap_theories", "harness", "packaging", "real_workloads", "restricted"}


def test_every_script_is_listed_with_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    listed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    files = {path.stem for path in (ROOT / "evidence" / "speed").glob("[a-z]*.py")}
    assert set(listed) == files - IMPORTED_ONLY
    assert all(text.endswith(".") and len(text) > 20 for text in listed.values())


@pytest.mark.parametrize("name", scripts())
def test_a_script_says_how_it_is_called(name: str) -> None:
    source = (ROOT / "evidence" / "speed" / f"{name}.py").read_text(encoding="utf-8")
    assert f"python -m evidence.speed {name}" in source.partition("\n\nfrom ")[0]
    assert "python -m" not in first_paragraph(source)


def test_a_script_runs_by_its_name() -> None:
    command = [sys.executable, "-m", "evidence.speed", "deliberate_faults", "--only", "no such"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "0 of 0 faults caught\n"), done.stderr


@pytest.mark.parametrize("name", ["nothing", "harness"])
def test_what_is_no_script_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"evidence.speed: unknown script (got {name!r}, expected ablations, ")
    assert error.count("\n") == 1


def test_evidence_is_in_the_sources_and_not_in_the_wheel() -> None:
    targets = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]
    build = targets["build"]["targets"]
    assert build["wheel"]["packages"] == ["src/hetplan"]
    assert "force-include" not in build["wheel"]
    assert "/evidence" in build["sdist"]["include"]
