"""What runs refuse before a process starts (factories that fail, options that do not go together),
and torchrun."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is an extra of hetplan")

from hetplan.cli.main import main  # noqa: E402
from hetplan.files import read_json, to_json  # noqa: E402
from hetplan.runtime.__main__ import main as rank  # noqa: E402
from hetplan.runtime.job import Job  # noqa: E402
from hetplan.runtime.plan import save_plan  # noqa: E402
from hetplan.text import Table  # noqa: E402
from parity.asking import ENVIRONMENT, refused  # noqa: E402
from parity.cases import Case, R, even  # noqa: E402


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Two stages of the model `parity.cases:two`."""
    found = tmp_path / "plan.json"
    save_plan(Case("options", "two", [R(even([0, 1, 2]), [(2, 2)])]).plan, found)
    return found


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        (
            "boom",
            "def make(plan):\n    raise ValueError('my config\\nis broken')",
            "ValueError: my config is broken",
        ),
        ("signature", "def make():\n    pass", "TypeError: make() takes 0 positional arguments"),
        ("syntax", "def make(plan:\n", "SyntaxError: "),
        ("at_import", "1 / 0", "ZeroDivisionError: division by zero"),
        ("leaves", "import sys\ndef make(plan):\n    sys.exit(0)", "SystemExit: 0"),
    ],
)
def test_errors_of_a_factory_are_its_authors(
    name: str,
    source: str,
    message: str,
    file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
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


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "raise OSError('my data is\\nmissing')",
            "the model's `batch` raises OSError: my data is missing",
        ),
        (
            "return torch.zeros(1, 2)",
            "`batch` returned something else (got 'Tensor', expected (inputs, targets))",
        ),
    ],
)
def test_errors_of_the_data_are_its_authors(
    body: str, message: str, file: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    name = f"data_{len(body)}"
    (tmp_path / f"{name}.py").write_text(
        "import torch\nfrom parity.cases import two\n"
        f"def batch(step, first, last):\n    {body}\n"
        "def make(plan):\n    made = two(plan)\n    made.batch = batch\n    return made\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert message in refused(capsys, "run", file, "--factory", f"{name}:make")


@pytest.mark.parametrize(
    "option", [("--steps", 0), ("--every", 0), ("--learning-rate", "nan"), ("--hang-after", -1.0)]
)
def test_numbers_out_of_range_are_refused_by_both_commands(
    option: tuple[object, ...], file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"{option[0]} (got {option[1]}, expected " in refused(capsys, "run", file, *option)
    assert rank([str(file), *map(str, option)]) == 2
    assert f"{option[0]} (got {option[1]}, expected " in capsys.readouterr().err


def test_a_model_of_ones_own_needs_no_prediction(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Even where the plan's cluster is a known one and its model is not."""
    document = read_json(file)
    document["workload"] |= {"cluster": "poplar-b", "model": "mine"}
    path = tmp_path / "named.json"
    path.write_text(to_json(document))
    asked: list[Job] = []
    monkeypatch.setattr("hetplan.runtime.launch.launch", lambda job, tell: asked.append(job))
    measured = "hetplan.runtime.measured.Measured"
    monkeypatch.setattr(f"{measured}.table", lambda own: Table("", ("rank",), ()))
    monkeypatch.setattr(f"{measured}.document", lambda own: {})
    assert main(["run", str(path), "--factory", "parity.cases:two"]) == 0
    assert [job.rehearsal for job in asked] == [None]
    assert "hetplan: no prediction: unknown model 'mine'" in capsys.readouterr().err
    assert "unknown model 'mine'" in refused(
        capsys, "run", path, "--virtual", "--factory", "parity.cases:two"
    )


@pytest.mark.parametrize("option", [("--every", 2), ("--resume",)])
def test_checkpoints_need_a_folder(
    option: tuple[object, ...], file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = f"{option[0]} needs --checkpoint with a folder\n"
    assert refused(capsys, "run", file, *option).endswith(expected)
    assert rank([str(file), *map(str, option)]) == 2
    assert capsys.readouterr().err.endswith(expected)


def ranks(*arguments: object, **environment: str) -> list[subprocess.Popen[str]]:
    """Both ranks of the plan, as torchrun starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    torchrun = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, "-m", "hetplan.runtime", *map(str, arguments)]
    return [
        subprocess.Popen(
            command,
            env=ENVIRONMENT | torchrun | environment | {"RANK": number},
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for number in ("0", "1")
    ]


def test_an_error_of_a_rank_under_torchrun_is_one_line_with_its_place(file: Path) -> None:
    first, second = ranks(file, "--factory", "parity.faulty:wrong")
    told, failed = (process.communicate(timeout=120)[1] for process in (first, second))
    assert (first.returncode, second.returncode) == (1, 1)
    place = "rank 1 (replica 0, stage 1, row group 0, tensor rank 0; device 1, A on node 0)"
    assert failed == f"hetplan: {place}: KeyError: 'no such key'\n"
    assert told.count("\n") == 1 and "hetplan: rank 0 (replica 0, stage 0" in told


def test_sigterm_under_torchrun_ends_all_ranks_behind_a_checkpoint(
    file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "kept"
    more = ("--steps", 10**9, "--every", 10**8, "--checkpoint", folder)
    running = ranks(
        file, "--factory", "parity.faulty:unharmed", *more, FAULT=str(tmp_path / "begun")
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "begun").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    running[0].send_signal(signal.SIGTERM)
    told = [process.communicate(timeout=120)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], told
    assert len(list(folder.glob("step-*"))) == 1
