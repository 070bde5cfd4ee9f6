"""Files of the working folder are executed only where the user names them: not in the place of a
module of Python's or of an installed one that has the same name."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

pytest.importorskip("torch", reason="torch is an extra of hetplan")

from fakes.cli import Call
from fakes.rehearsals import plan as rehearsal_plan
from fakes.workloads import cluster_document, small
from hetplan.adapters.exports import export
from hetplan.errors import InputError
from hetplan.formulations import add_plugins
from hetplan.interpreter import make_importable, own_command, safe_path, working_folder_last
from hetplan.plans.plan import Plan, save_plan
from hetplan.plans.templates import ReadyTemplates, TemplateStage
from hetplan.profiling.models.operators import DEFAULT_STACK
from markdown_pages import ROOT
from parity.cases import Case, R, even

# What the environment of a test has of its own on the path.
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"}
MARK = "import os\nopen(os.path.join({folder!r}, 'ran-' + __name__.split('.')[0]), 'w').close()\n"
FACTORY = "import beside\nfrom parity.cases import two as build\n\nassert beside.DONE\n"


@cache
def names() -> list[str]:
    """Of every module that Python or an installed distribution has here."""
    installed = {"hetplan", *filter(str.isidentifier, packages_distributions())}
    # of these Python does not look for a file, or there is none
    others = {*sys.builtin_module_names, "sitecustomize", "usercustomize", "distutils"}
    return sorted(
        name for name in {*sys.stdlib_module_names, *installed} - others if find_spec(name)
    )


def plan_of_two() -> Plan:
    """For two ranks."""
    return Case("two", "two", [R(even([0, 1, 2]), [(2, 2)])]).plan


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder with a file for each name, a plan, and a factory beside a module of its
    own."""
    folder = tmp_path / "work"
    folder.mkdir()
    for name in names():
        (folder / f"{name}.py").write_text(MARK.format(folder=str(tmp_path)))
    (folder / "models.py").write_text(FACTORY)
    (folder / "beside.py").write_text(MARK.format(folder=str(tmp_path)) + "DONE = True\n")
    save_plan(plan_of_two(), folder / "plan.json")
    return folder


def four_stages(folder: Path) -> None:
    """A plan of four ranks on two nodes, with a template for one of them, its cluster, and a
    factory."""
    stages = [
        TemplateStage(first=a, last=b, type="V100-SXM2-16GB", devices=1)
        for a, b in ((0, 6), (6, 14))
    ]
    ready = ReadyTemplates(failures=0, samples=1, pipelines=[stages])
    plan = rehearsal_plan("four stages, even", small(stack=DEFAULT_STACK))
    save_plan(plan.model_copy(update={"templates": ready}), folder / "plan.json")
    (folder / "cluster.yaml").write_text(yaml.safe_dump(cluster_document()))
    (folder / "models.py").write_text("import beside\nfrom parity.faulty import unlucky\n")


Start = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def start(folder: Path) -> Start:
    """Call hetplan in that folder as its installed program does."""
    program = folder.parent / "program"
    program.write_text("import sys\nfrom hetplan.cli.entry import main\nsys.exit(main())\n")

    def start(*words: object, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(program), *map(str, words)],
            cwd=folder, env=ENVIRONMENT | more, capture_output=True, text=True, check=False,
        )  # fmt: skip

    return start


def ran(folder: Path) -> set[str]:
    """The files of the folder that were executed."""
    return {path.name.removeprefix("ran-") for path in folder.parent.glob("ran-*")}


def test_the_folder_is_a_trap(folder: Path) -> None:
    """Without what is tested here, Python executes the files."""
    assert {"random", "types", "queue", "json", "logging", "numpy", "typer"} <= set(names())
    subprocess.run(
        [sys.executable, "-m", "hetplan", "--version"], cwd=folder, env=ENVIRONMENT, check=False,
        capture_output=True,
    )  # fmt: skip
    assert ran(folder)


@pytest.mark.wide
def test_a_local_job_executes_its_factory_alone(folder: Path, start: Start) -> None:
    four_stages(folder)
    job = {"format": "hetplan-job", "version": 1, "cluster": "cluster.yaml", "global_batch": 4,
           "factory": "models:unlucky", "steps": 1, "launcher": {"kind": "local"}}  # fmt: skip
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    done = start("launch", "job.yaml", "--plan", "plan.json", KILL_AT="-1:0")
    assert done.returncode == 0, done.stderr
    assert "iteration" in done.stdout and ran(folder) == {"beside"}


@pytest.mark.wide
def test_planning_with_run_executes_no_file(folder: Path, start: Start) -> None:
    for name in ("config.json", "cluster.yaml"):
        shutil.copy(ROOT / "examples" / "job" / name, folder)
    words = ("--model", "config.json", "--cluster", "cluster.yaml", "--global-batch", 28,
             "--precision", "fp32", "--strategies", "poplar", "--time-limit", 10)  # fmt: skip
    done = start("plan", *words, "-o", "made.json", "--run", 1)
    assert done.returncode == 0, done.stderr
    assert "iteration" in done.stdout and ran(folder) == set()


@pytest.mark.engine
def test_the_server_of_tasks_executes_no_file(folder: Path) -> None:
    """It forks the processes of a study; `multiprocessing` starts it by `python -c`."""
    program = folder.parent / "program.py"
    program.write_text(
        "from hetplan.studies.workers import run_tasks\n"
        "print(list(run_tasks([], 1, preload=(), stop=lambda: False)))\n"
    )
    done = subprocess.run(
        [sys.executable, str(program)], cwd=folder, env=ENVIRONMENT, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("[]\n", "") and ran(folder) == set()


@pytest.mark.wide
def test_studies_execute_no_file(folder: Path, start: Start) -> None:
    words = ("ditto/tiny-fast-slow", "-m", "greedy-joined", "-t", 600, "-q", "-o", "rows")
    done = start("study", "run", *words)
    assert done.returncode == 0, done.stderr
    assert (folder / "rows").is_dir() and ran(folder) == set()


def test_the_doctor_executes_no_file(folder: Path, start: Start) -> None:
    done = start("doctor")
    assert "load in one process" in done.stdout and ran(folder) == set()


@pytest.mark.engine
def test_a_node_script_executes_no_file(folder: Path) -> None:
    """torchrun starts its command by `python -m`, in the folder where it is called."""
    programs = folder.parent / "programs"
    programs.mkdir()
    torchrun = programs / "torchrun"
    torchrun.write_text(
        '#!/bin/bash\nwhile [ "$1" != -m ]; do shift; done\n'
        f'exec {shlex.quote(sys.executable)} -u "$@" --help\n'
    )
    torchrun.chmod(0o755)
    (folder / "node.sh").write_text(export(plan_of_two(), "torchrun"))
    more = {"PATH": f"{programs}:{os.environ['PATH']}", "NODE": "0", "MASTER_ADDR": "host"}
    done = subprocess.run(
        ["bash", "node.sh", "plan.json"], cwd=folder, env=ENVIRONMENT | more, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "--factory MODULE:FUNCTION" in done.stdout and ran(folder) == set()


def test_what_hetplan_starts_of_itself_executes_no_file(folder: Path) -> None:
    done = subprocess.run(
        own_command("--version"), cwd=folder, env=ENVIRONMENT, check=False, capture_output=True
    )
    assert done.stdout.startswith(b"hetplan ") and ran(folder) == set()
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")]
    starts = [found for text in sources for found in re.findall(r"sys\.executable,.*", text)]
    assert len(starts) == 4 and all(one.startswith('sys.executable, "-P",') for one in starts)


@pytest.mark.wide
def test_an_elastic_run_executes_no_file(folder: Path, start: Start) -> None:
    four_stages(folder)
    environment = {"KILL_AT": "2:80", "KILLED": str(folder / "killed")}
    words = ("plan.json", "--factory", "models:unlucky", "--steps", 5, "--cluster", "cluster.yaml",
             "--elastic", "--every", 2, "--checkpoint", "kept")  # fmt: skip
    done = start("run", *words, **environment)
    assert done.returncode == 0, done.stderr
    assert "lost node1: planning without" in done.stderr and (folder / "killed").exists()
    assert (folder / "kept" / "plan-without-node1.json").exists()
    assert ran(folder) == {"beside"}


def test_python_m_hetplan_looks_into_the_folder_last(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python itself has imported some modules before hetplan is asked."""
    for name in sys.stdlib_module_names:
        (folder / f"{name}.py").unlink(missing_ok=True)
    (folder / "hetplan.py").unlink()
    done = subprocess.run(
        [sys.executable, "-m", "hetplan", "instances", "list", "tiny-mixed"], cwd=folder,
        env=ENVIRONMENT, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert "tiny-mixed" in done.stdout and ran(folder) == set()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [str(folder), "a"])
    working_folder_last()
    working_folder_last()
    assert sys.path == ["a", str(folder)]


@pytest.mark.parametrize(
    ("name", "hiding"),
    [
        ("random", r"/.*random\.py"),
        ("time", "Python's own"),
        ("hetplan", r"/.*hetplan/__init__\.py"),
        ("yaml.own", r"/.*yaml/__init__\.py"),
    ],
)
def test_a_factory_with_the_name_of_another_module_is_refused(
    hetplan: Call, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, hiding: str
) -> None:
    monkeypatch.chdir(folder)
    (folder / "time.py").write_text(FACTORY)
    (folder / "yaml").mkdir()
    (folder / "yaml" / "own.py").write_text(FACTORY)
    said = hetplan("run", "plan.json", "--factory", f"{name}:build", "--steps", 1).error
    top = name.partition(".")[0]
    assert re.fullmatch(
        "--factory names a module of the working folder that another one hides "
        rf"\(got '{name}', expected another name than {top}, which is {hiding}\)",
        said,
    )
    with pytest.raises(InputError, match="--plugin names a module of the working folder that"):
        add_plugins([name])
    assert ran(folder) == set()


def test_modules_of_the_folder_and_installed_ones_are_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", ["a"])
    (folder / "spread").mkdir()
    (folder / "spread" / "own.py").touch()
    for name in ("models", "spread.own", "no_such_module", "os.path"):
        make_importable(name, "--factory")
        make_importable(name, "--factory")
    assert sys.path == ["a", ""]


def test_the_environment_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for before in (None, "x"):
        if before is not None:
            monkeypatch.setenv("PYTHONSAFEPATH", before)
        with safe_path():
            assert os.environ["PYTHONSAFEPATH"] == "1"
        assert os.environ.get("PYTHONSAFEPATH") == before
