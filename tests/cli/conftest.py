"""The command line in-process, with a fake problem beside the real ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fakes.cli import Call, Ran, Write
from hetplan.cli.main import main
from hetplan.formulations import FAMILIES


@pytest.fixture
def hetplan(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Call `hetplan` as the installed program does; the problem `fake` is registered."""
    monkeypatch.setitem(FAMILIES, "fake", "fakes.family:FAMILY")
    monkeypatch.delenv("HETPLAN_DEBUG", raising=False)

    def call(*arguments: object) -> Ran:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return call


@pytest.fixture
def numbers(tmp_path: Path) -> Write:
    """Write an instance of the fake problem."""

    def write(*values: float, name: str = "numbers") -> Path:
        document = {"format": "hetplan-instance", "version": 1, "problem": "fake", "name": name}
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(document | {"origin": "test", "data": {"numbers": values}}))
        return path

    return write
