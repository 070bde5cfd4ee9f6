"""What `hetplan run` refuses before a process starts: factories that fail, options that do not go together."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is an extra of hetplan")

from hetplan.cli.main import main  # noqa: E402
from hetplan.runtime.__main__ import main as rank  # noqa: E402
from hetplan.runtime.execution.checkpoint import check_same  # noqa: E402
from hetplan.runtime.plan import save_plan  # noqa: E402
from parity.asking import ENVIRONMENT  # noqa: E402
from parity.cases import Case, R, even  # noqa: E402


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Two stages of the model `parity.cases:two`."""
    found = tmp_path / "plan.json"
    save_plan(Case("options", "two", [R(even([0, 1, 2]), [(2, 2)])]).plan, found)
    return found


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line of a command that ends with exit code 2."""
    assert main(list(map(str, arguments))) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1
    return told.err


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("boom", "def make(plan):\n    raise ValueError('my config\\nis broken')", "ValueError: my config is broken"),
        ("signature", "def make():\n    pass", "TypeError: make() takes 0 positional arguments"),
        ("syntax", "def make(plan:\n", "SyntaxError: "),
        ("at_import", "1 / 0", "ZeroDivisionError: division by zero"),
    ],
)  # fmt: skip
def test_errors_of_a_factory_are_its_authors(
    name: str, source: str, message: str, file: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / f"theirs_{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    told = refused(capsys, "run", file, "--factory", f"theirs_{name}:make")
    assert message in told and f"theirs_{name}:make" in told


def test_another_optimizer_or_seed_does_not_go_on(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "kept"
    common = ("run", file, "--factory", "parity.cases:two", "--steps", "1", "--checkpoint", folder)
    first = subprocess.run(
        [sys.executable, "-m", "hetplan", *map(str, common)],
        check=False,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert first.returncode == 0, first.stderr
    told = refused(capsys, *common, "--resume", "--optimizer", "sgd")
    assert "another --optimizer (got 'sgd', expected adamw, as it was written with)" in told
    told = refused(capsys, *common, "--resume", "--seed", "3")
    assert "another --seed (got 3, expected 0, as it was written with)" in told
    record = folder / "step-1" / "hetplan.json"
    record.write_text("{}")  # as of a version that recorded less
    check_same(str(folder), optimizer="sgd", seed=3)


@pytest.mark.parametrize("option", [("--every", 2), ("--resume",)])
def test_checkpoints_need_a_folder(
    option: tuple[object, ...], file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = f"{option[0]} needs --checkpoint with a folder\n"
    assert refused(capsys, "run", file, *option).endswith(expected)
    assert rank([str(file), *map(str, option)]) == 2
    assert capsys.readouterr().err.endswith(expected)
