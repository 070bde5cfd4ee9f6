"""`hetplan launch`: what a job file may say, the commands that follow from it, the files that are
written, and a job that trains."""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
from pathlib import Path

import pytest
import yaml

from export.by_hand import cut, plan_of
from export.hostile import ONE_LINE, SEVERAL_LINES, places_of_texts, with_text
from fakes.cli import Call
from hetplan.cli import run as launch
from hetplan.plans.plan import Plan, save_plan
from markdown_pages import ROOT

JOB = {
    "format": "hetplan-job", "version": 1, "model": "gpt2", "cluster": "amp-mixed",
    "global_batch": 32, "steps": 7, "launcher": {"kind": "slurm"},
}  # fmt: skip


def write(folder: Path, **changes: object) -> Path:
    """A job file; None leaves a key out."""
    path = folder / "My job.yaml"
    document = {key: value for key, value in {**JOB, **changes}.items() if value is not None}
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """Two nodes, with four ranks and with three."""
    path = tmp_path / "seven.json"
    save_plan(plan_of(cut(5, 4, 3), tensor=[2, 2, 3], types=["A100"] * 4 + ["T4"] * 3), path)
    return path


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"stepz": 1, "steps": None}, "stepz: unknown key; did you mean steps?"),
        ({"steps": "x"}, "steps: not usable (got 'x', expected a whole number)"),
        ({"global_batch": None}, "global_batch: required key is missing"),
        ({"launcher": None}, "launcher: required key is missing"),
        (
            {"launcher": {"kind": "slrum"}},
            "launcher.kind: not usable (got 'slrum', expected one of local, ssh, slurm, kubeflow",
        ),
        ({"launcher": {"hosts": []}}, "launcher.kind: required key is missing"),
        ({"launcher": {"kind": "slurm", "optoins": {}}}, "optoins: unknown key; did you mean opti"),
        ({"launcher": {"kind": "ray", "hosts": []}}, "launcher.ray.hosts: unknown key"),
        ({"launcher": {"kind": "kubeflow"}}, "launcher.kubeflow.image: required key is missing"),
        (
            {"launcher": {"kind": "slurm", "options": {"time": 720}}},
            "options.time: not usable",
        ),
        (
            {"launcher": {"kind": "slurm", "options": {"time": "1\n2"}}},
            "launcher.options.time: not usable (got '1\\n2', expected text of one line",
        ),
        ({"launcher": {"kind": "ssh", "hosts": ["-oProxyCommand=x"]}}, "hosts[0]: not usable (got"),
        ({"launcher": {"kind": "ray", "env": {"A B": "x"}}}, "string should match pattern"),
        ({"format": "hetplan-plan"}, "format: not a hetplan-job file"),
    ],
)
def test_a_wrong_job_file_is_one_line(
    hetplan: Call, tmp_path: Path, changes: dict[str, object], error: str
) -> None:
    said = hetplan("launch", write(tmp_path, **changes), "--dry-run").error
    assert "My job.yaml: " in said and error in said


def test_control_characters_anywhere_are_one_line(hetplan: Call, tmp_path: Path) -> None:
    launcher = {"kind": "slurm", "env": {"A": "b"}, "types": {"T4": {"constraint": "c"}}}
    document = {**JOB, "launcher": launcher, "strategies": ["amp", "dp"], "factory": "a:b"}
    path = tmp_path / "job.yaml"
    places = list(places_of_texts(document))
    assert len(places) == 9
    for place in places:
        for text in SEVERAL_LINES:
            path.write_text(yaml.safe_dump(with_text(document, place, text)))
            said = hetplan("launch", path, "--dry-run").error
            if place != ("format",):
                assert said.endswith("expected text of one line without control characters)")
                assert said.startswith(f"{path}: {place[0]}")
    path.write_text(yaml.safe_dump({**document, "launcher": {**launcher, "env": {"A\x1b": "b"}}}))
    assert "env: not usable (got 'A\\x1b', expected text of" in hetplan("launch", path).error


@pytest.mark.parametrize("text", ONE_LINE)
def test_texts_of_a_job_file_stay_words(
    hetplan: Call, tmp_path: Path, plan: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    # None of these texts names a model or a cluster.
    monkeypatch.setattr(launch, "check_inputs", lambda job_file, where: None)
    names = ("model", "cluster", "factory", "data", "checkpoint", "save", "profile")
    document = {**JOB, **dict.fromkeys(names, text), "strategies": [text], "every": 1}
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump({**document, "launcher": {"kind": "local"}}))
    first, last = hetplan("launch", path, "--dry-run").out.splitlines()
    assert shlex.split(first).count(text) == 4 and shlex.split(last).count(text) == 7
    path.write_text(yaml.safe_dump({**document, "launcher": {"kind": "ssh", "hosts": ["a", "b"]}}))
    assert hetplan("launch", path, "--plan", plan, "-o", "out").code == 0
    (start, _) = re.findall("^ssh .* &$", (tmp_path / "out" / "submit.sh").read_text(), re.M)
    assert shlex.split(shlex.split(start)[4]).count(text) == 5


def test_keys_are_the_options_of_the_two_commands(hetplan: Call) -> None:
    for command, known in (("plan", launch.PLAN), ("run", launch.RUN)):
        shown = set(re.findall(r"^  (?:-\w, )?--([a-z-]+)", hetplan(command, "--help").out, re.M))
        named = {key.replace("_", "-") for key in known}
        assert all(key.isidentifier() for key in known)
        assert named <= shown <= named | {*launch.LEFT_OUT, "help"}
    schema = hetplan("instances", "schema", "job").json
    assert {"launcher", "cluster", "steps"} <= schema["properties"].keys()


def test_a_dry_run_prints_the_commands(
    hetplan: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    more = {"seed": 0, "resume": True, "elastic": False, "strategies": ["amp", "dp"],
            "factory": "my_models:build", "money_limit": 0.5, "device": "cpu"}  # fmt: skip
    ran = hetplan("launch", write(tmp_path, **more), "--dry-run")
    folder, (first, last) = "My job-launch", ran.out.splitlines()
    planning = "hetplan plan --cluster amp-mixed --global-batch 32 --model gpt2 --money-limit 0.5"
    options = f"--seed 0 --strategies amp --strategies dp --output '{folder}/plan.json'"
    assert sorted(shlex.split(first)) == sorted(shlex.split(f"{planning} {options}"))
    assert shlex.split(last) == ["sbatch", f"{folder}/job.sbatch"]
    assert not (tmp_path / folder).exists()
    here = write(tmp_path, launcher={"kind": "local"}, **more)
    _, last = hetplan("launch", here, "--dry-run", "-o", "x").out.splitlines()
    running = "hetplan run x/plan.json --cluster amp-mixed --device cpu --model gpt2 --resume"
    options = "--factory my_models:build --seed 0 --steps 7"
    assert sorted(shlex.split(last)) == sorted(f"{running} {options}".split())
    ran = hetplan("launch", write(tmp_path, model=None, factory="a:b"), "--dry-run")
    assert "--factory a:b" in ran.out.splitlines()[0]


@pytest.mark.parametrize(
    ("launcher", "files"),
    [
        (
            {"kind": "ssh", "hosts": ["a", "b"], "env": {"X": "y z"}},
            ["submit.sh", "attended.sh", "hostfile"],
        ),
        ({"kind": "slurm", "env": {"X": "y z"}}, ["job.sbatch"]),
        ({"kind": "jobset", "image": "i"}, ["job.yaml"]),
        ({"kind": "kubeflow", "image": "i"}, ["job.yaml"]),
        ({"kind": "ray"}, ["train.py"]),
    ],
)
def test_files_are_written_for_a_plan(
    hetplan: Call, tmp_path: Path, plan: Path, monkeypatch: pytest.MonkeyPatch,
    launcher: dict[str, object], files: list[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    ran = hetplan("launch", write(tmp_path, launcher=launcher, device="cpu"), "--plan", plan)
    assert (ran.code, ran.err) == (0, "")
    folder = tmp_path / "My job-launch"
    first, last = ran.out.splitlines()
    assert first == f"written to My job-launch: plan.json, {', '.join(['node.sh', *files])}"
    assert f"My job-launch/{files[0]}" in shlex.split(last)
    names = {path.name for path in folder.iterdir()}
    assert names == {"plan.json", "node.sh", *files}
    assert Plan.load(folder / "plan.json") == Plan.load(plan)
    text = (folder / files[0]).read_text()
    assert "--steps" in text and "gpus-per-node" not in text and "nvidia.com/gpu:" not in text
    assert ("hetplan-my-job" in text) == (launcher["kind"] not in ("ssh", "ray"))
    assert ("export X='y z'" in (folder / "node.sh").read_text()) == ("env" in launcher)


def test_a_launcher_that_is_not_installed_is_one_line(
    hetplan: Call, tmp_path: Path, plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    said = hetplan("launch", write(tmp_path), "--plan", plan, "--submit").error
    assert said == "sbatch is not installed here"
    assert not (tmp_path / "My job-launch").exists()


def test_submit_calls_the_launcher(
    hetplan: Call, tmp_path: Path, plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "sbatch"
    fake.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/called\nexit 7\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    ran = hetplan("launch", write(tmp_path), "--plan", plan, "--submit", "-o", "files")
    assert ran.code == 7 and (tmp_path / "called").read_text() == "files/job.sbatch\n"


def test_what_no_rank_would_run_is_refused(hetplan: Call, tmp_path: Path, plan: Path) -> None:
    document = json.loads(plan.read_text()) | {"refused": "some reason"}
    plan.write_text(json.dumps(document))
    assert hetplan("launch", write(tmp_path), "--plan", plan).error.endswith("yaml: some reason")
    assert hetplan("launch", write(tmp_path, factory="a:b"), "--plan", plan).code == 0
    folder = tmp_path.parent / "elsewhere"
    ray = write(tmp_path, launcher={"kind": "ray"}, factory="a:b")
    said = hetplan("launch", ray, "--plan", plan, "-o", folder).error
    assert said.startswith("the folder is not in the working directory, which Ray takes")


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"model": "no/such.json"}, "no/such.json: no such file"),
        ({"model": "gpt22"}, "unknown model 'gpt22'"),
        ({"model": None}, "missing option '--model'"),
        ({"cluster": "no/such.yaml"}, "no/such.yaml: no such file"),
        ({"cluster": "amp-mixt"}, "'amp-mixt'; did you mean amp-mixed"),
        ({"strategies": ["dq"]}, "unknown strategy 'dq'"),
    ],
)
@pytest.mark.parametrize("dry_run", [True, False])
def test_a_job_whose_inputs_are_missing_is_refused_before_anything_else(
    hetplan: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, object], error: str, dry_run: bool,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    options = ["--dry-run"] if dry_run else []
    said = hetplan("launch", write(tmp_path, **changes), *options).error
    assert "My job.yaml: " in said and error in said
    assert [path.name for path in tmp_path.iterdir()] == ["My job.yaml"]


def test_a_planning_that_fails_leaves_no_empty_folder(
    hetplan: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that was there stays, and so does one with files."""
    monkeypatch.chdir(tmp_path)
    job = write(tmp_path, profile="no/such.json")
    assert hetplan("launch", job).code == 2
    assert not (tmp_path / "My job-launch").exists()
    (tmp_path / "mine").mkdir()
    assert hetplan("launch", job, "-o", "mine").code == 2 and (tmp_path / "mine").is_dir()
    assert "no such file" in hetplan("launch", job, "--plan", "none.json", "--dry-run").error


def test_every_option_keeps_its_default() -> None:
    values = inspect.signature(launch.JobFile).parameters
    assert values["steps"].default == 10 and values["cluster"].default is inspect.Parameter.empty


def test_the_page_shows_the_example() -> None:
    page = (ROOT / "docs" / "howto-launch.md").read_text(encoding="utf-8")
    assert (ROOT / "examples" / "job" / "job.yaml").read_text(encoding="utf-8") in page


@pytest.mark.parametrize("folder", ["file", "file/below", "/proc/none", "l" * 300, "link"])
def test_a_folder_that_cannot_be_made_is_one_line(
    hetplan: Call, tmp_path: Path, plan: Path, folder: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere/at/all")
    ran = hetplan("launch", write(tmp_path), "--plan", plan, "-o", tmp_path / folder)
    assert ran.code == 2 and "bug" not in ran.error


def test_the_default_folder_may_be_a_file(hetplan: Call, tmp_path: Path, plan: Path) -> None:
    (tmp_path / "My job-launch").touch()
    ran = hetplan("launch", write(tmp_path), "--plan", plan)
    assert ran.code == 2 and "folder cannot be made" in ran.error


@pytest.mark.parametrize("kind", [{"kind": "slurm"}, {"kind": "ssh", "hosts": ["a", "b"]}])
def test_a_folder_whose_name_is_no_text_stands_in_no_script(
    hetplan: Call, tmp_path: Path, plan: Path, kind: dict[str, object]
) -> None:
    target = os.fsdecode(os.fsencode(tmp_path) + b"/d\xff")
    ran = hetplan("launch", write(tmp_path, launcher=kind), "--plan", plan, "-o", target)
    assert ran.code == 2 and "name is not UTF-8" in ran.error


@pytest.mark.parametrize(("kind", "passed"), [("local", True), ("slurm", False)])
def test_ranks_elsewhere_take_the_model_from_the_plan(
    hetplan: Call, tmp_path: Path, kind: str, passed: bool
) -> None:
    """The file of a model is on this machine alone."""
    job = write(tmp_path, launcher={"kind": kind})
    ran = hetplan("launch", job, "--dry-run")
    assert ("--model gpt2" in ran.out.splitlines()[1]) is passed
