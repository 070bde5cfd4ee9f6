"""What runs refuse before a process starts: factories that fail, options that do not go together,
checkpoints that are damaged or somebody else's; and torchrun."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is an extra of hetplan")

from hetplan.cli.main import main  # noqa: E402
from hetplan.errors import InputError  # noqa: E402
from hetplan.files import read_json, to_json  # noqa: E402
from hetplan.plans.plan import load_plan, save_plan  # noqa: E402
from hetplan.runtime.engine.models import make_module  # noqa: E402
from hetplan.runtime.engine.worker import check_job  # noqa: E402
from hetplan.runtime.job import Job  # noqa: E402
from hetplan.text import Table  # noqa: E402
from parity.asking import ENVIRONMENT, refused, request, served  # noqa: E402
from parity.cases import Case, R, even  # noqa: E402


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Two stages of the model `parity.cases:two`."""
    path = tmp_path / "plan.json"
    save_plan(Case("options", "two", [R(even([0, 1, 2]), [(2, 2)])]).plan, path)
    return path


DATA = """import torch
from parity.cases import two
def make(plan):
    made = two(plan)
    made.batch = batch
    return made
def batch(step, first, last):
    """


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
        (
            "data",
            DATA + "raise OSError('my data is\\nmissing')",
            "the model's `batch` raises OSError: my data is missing",
        ),
        (
            "tensor",
            DATA + "return torch.zeros(1, 2)",
            "`batch` returned something else (got 'Tensor', expected (inputs, targets), or a dict",
        ),
    ],
)
def test_errors_of_a_factory_and_its_data_are_their_authors(
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
    assert message in refused(capsys, "run", file, "--factory", f"theirs_{name}:make")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--steps", 0), "--steps (got 0, expected "),
        (("--every", 0), "--every (got 0, expected "),
        (("--learning-rate", "nan"), "--learning-rate (got nan, expected "),
        (("--hang-after", -1.0), "--hang-after (got -1.0, expected "),
        (("--every", 2), "--every needs --checkpoint with a folder\n"),
        (("--resume",), "--resume needs --checkpoint with a folder\n"),
    ],
)
def test_options_out_of_range_are_refused(
    option: tuple[object, ...], message: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, "run", file, *option)


def test_a_model_of_ones_own_needs_no_prediction(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Even where the plan's cluster is a known one and its model is not."""
    document = read_json(file)
    document["workload"] |= {"cluster": "poplar-b", "model": "mine"}
    path = tmp_path / "named.json"
    path.write_text(to_json(document))
    asked: list[Job] = []
    monkeypatch.setattr("hetplan.cli.run.launch_ranks", lambda job, tell: asked.append(job))
    measured = "hetplan.runtime.measured.Measured"
    monkeypatch.setattr(f"{measured}.table", lambda own: Table("", ("rank",), ()))
    monkeypatch.setattr(f"{measured}.document", lambda own: {})
    assert main(["run", str(path), "--factory", "parity.cases:two"]) == 0
    assert [job.rehearsal for job in asked] == [None]
    note = "hetplan: no prediction: "
    wanted = "give the model 'mine' with --model"
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith(note) and line.endswith(wanted)]
    assert wanted in refused(capsys, "run", path, "--virtual", "--factory", "parity.cases:two")


def ranks(*arguments: object, **environment: str) -> list[subprocess.Popen[str]]:
    """Both ranks of the plan, as torchrun starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    torchrun = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, "-m", "hetplan", "run", *map(str, arguments)]
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


@pytest.mark.engine
def test_an_error_of_a_rank_under_torchrun_is_one_line_with_its_place(file: Path) -> None:
    first, second = ranks(file, "--factory", "parity.faulty:wrong")
    line, failed = (process.communicate(timeout=600)[1] for process in (first, second))
    assert (first.returncode, second.returncode) == (1, 1)
    place = "rank 1 (replica 0, stage 1, row group 0, tensor rank 0; device 1, A on node 0)"
    assert failed == f"hetplan: {place}: KeyError: 'no such key'\n"
    assert line.count("\n") == 1 and "hetplan: rank 0 (replica 0, stage 0" in line


@pytest.mark.engine
def test_a_stopped_rank_under_torchrun_is_noticed_by_another(file: Path) -> None:
    first, stopped = ranks(file, "--factory", "parity.faulty:stopped", "--hang-after", 2)
    line = first.communicate(timeout=600)[1]
    stopped.kill()
    stopped.communicate()
    place = "rank 1 (replica 0, stage 1, row group 0, tensor rank 0; device 1, A on node 0)"
    assert (first.returncode, line.count("\n")) == (1, 1), line
    assert line.startswith(f"hetplan: {place}: hangs; no sign of life for ")


@pytest.mark.engine
def test_sigterm_under_torchrun_ends_all_ranks_behind_a_checkpoint(
    file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "kept"
    more = ("--steps", 10**9, "--every", 10**8, "--checkpoint", folder)
    running = ranks(
        file, "--factory", "parity.faulty:unharmed", *more, FAULT=str(tmp_path / "begun")
    )
    deadline = time.monotonic() + 600
    while not (tmp_path / "begun").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    running[0].send_signal(signal.SIGTERM)
    line = [process.communicate(timeout=600)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], line
    assert len(list(folder.glob("step-*"))) == 1


Damage = Callable[[Path], None]
RUN = ("--factory", "parity.cases:two", "--steps", 1, "--checkpoint")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A plan file, and a folder with a checkpoint of one step."""
    folder = tmp_path_factory.mktemp("written")
    save_plan(Case("kept", "two", [R(even([0, 1, 2]), [(2, 2)])]).plan, folder / "plan.json")
    command = request("written", "run", folder / "plan.json", *RUN, folder / "kept")
    answer = served([command], folder, 1)["written"]
    assert answer["code"] == 0, answer["err"]
    return folder / "plan.json", folder / "kept"


def record(**changed: Any) -> Damage:
    """hetplan.json with other entries; None: without."""

    def damage(step: Path) -> None:
        document = read_json(step / "hetplan.json") | changed
        (step / "hetplan.json").write_text(
            to_json({k: v for k, v in document.items() if v is not None})
        )

    return damage


def text(name: str, content: str | bytes | None) -> Damage:
    """A file with another content, or without one."""

    def damage(step: Path) -> None:
        if content is None:
            (step / name).unlink()
        else:
            (step / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (text("hetplan.json", "[]"), "hetplan.json: not usable"),
        (text("hetplan.json", "{}"), "hetplan.json: step"),
        (text("hetplan.json", "{"), "hetplan.json"),
        (record(step=-3), "hetplan.json: step"),
        (record(step=5), "hetplan.json: checkpoint is not what was written"),
        (record(states={}), "hetplan.json: checkpoint is not what was written"),
        (record(shapes=None), "hetplan.json: shapes"),
        (record(optimizer=None), "hetplan.json: optimizer"),
    ],
)
def test_damaged_checkpoints_are_refused(
    damage: Damage, message: str, written: tuple[Path, Path], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    plan, kept = written
    shutil.copytree(kept, tmp_path / "kept")
    damage(tmp_path / "kept" / "step-1")
    line = refused(capsys, "run", plan, *RUN, tmp_path / "kept", "--resume")
    assert message in line and str(tmp_path / "kept") in line


def test_another_optimizer_or_seed_does_not_go_on(
    written: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    resumed = ("run", written[0], *RUN, written[1], "--resume")
    line = refused(capsys, *resumed, "--optimizer", "sgd")
    assert "another --optimizer (got 'sgd', expected adamw, as it was written with)" in line
    line = refused(capsys, *resumed, "--seed", "3")
    assert "another --seed (got 3, expected 0, as it was written with)" in line


def test_folders_that_cannot_hold_checkpoints(
    written: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is no checkpoint is left alone."""
    file, own = tmp_path / "a file", tmp_path / "own" / "step-1" / "notes.txt"
    own.parent.mkdir(parents=True)
    for path in (file, own):
        path.write_text("mine")
    for folder, more, message in (
        (file, (), "cannot write checkpoints: File exists"),
        (tmp_path / ("x" * 300), (), "cannot write checkpoints: File name too long"),
        (tmp_path / "new", ("--resume",), "no complete checkpoint"),
        (tmp_path / "own", (), "something else under a checkpoint's name (got 'step-1')"),
    ):
        assert message in refused(capsys, "run", written[0], *RUN, folder, *more)
    assert own.read_text() == "mine"


TINY = {
    "model_type": "gpt2", "vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 4,
    "n_positions": 16,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "strategy", "message"),
    [
        ("vgg19", "poplar", "no torch layers here; name your own by --factory module:function"),
        ("bert-moe", "poplar", "no experts: run the module itself by --factory"),
        ("tiny", "hap", "computed in fp32 (got 'fp16', expected --virtual, a plan for fp32, or"),
        ("gpt2", "poplar", None),
    ],
)
def test_plans_say_what_runs_refuse(
    model: str, strategy: str, message: str | None, tmp_path: Path, capsys: Any
) -> None:
    """In the plan's file, in the same words; nothing where the run is not refused."""
    file, on = tmp_path / "plan.json", ["--cluster", "home", "--global-batch", "8", "-q"]
    if model == "tiny":
        model = str(tmp_path / "tiny.json")
        Path(model).write_text(to_json(TINY))
    made = ["plan", "--model", model, *on, "--strategies", strategy, "--time-limit", "20"]
    assert main([*made, "-o", str(file)]) == 0
    told = capsys.readouterr().out
    plan = load_plan(file)
    if message is None:
        assert plan.refused is None and "hetplan run" not in told
        check_job(Job(plan=plan))
        return
    assert plan.refused is not None and message in plan.refused
    assert "`hetplan run`" in told
    assert refused(capsys, "run", file, "--quiet") == f"hetplan: error: {plan.refused}\n"


def test_data_of_a_run_are_the_functions(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "def rows(step, first, last): pass\ndef make(plan):\n    return rows\n"
    (tmp_path / "own_data.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    job = Job(plan=load_plan(file), factory="parity.cases:two", data="own_data:make")
    assert make_module(job).batch.__name__ == "rows"
    for text, message in (
        ("own_data", "--data is not usable (got 'own_data', expected MODULE:FUNCTION)"),
        ("own_data:nothing", "--data cannot be imported: AttributeError"),
    ):
        with pytest.raises(InputError, match=re.escape(message)):
            check_job(replace(job, data=text))
    with pytest.raises(InputError, match="--virtual devices have a model and data of their own"):
        check_job(replace(job, factory=None, virtual=True))
    program = job.plan.model_copy(update={"schedule": "spmd"})
    with pytest.raises(InputError, match="SPMD programs take their data from --factory"):
        check_job(replace(job, plan=program))
