"""The program around the commands: help, version, library, schemas, doctor, signals, pipes, loading
times."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import pytest

import hetplan as package
from fakes.cli import Call, Write
from hetplan.cli.doctor import local_gpus, machine_report, report_tables
from hetplan.cli.output import Display
from hetplan.instances.library import find, library
from hetplan.planner.candidate import Candidate, StrategyMethod
from hetplan.plans.plan import Plan
from hetplan.solvers.run import Progress

COMMANDS = (
    "plan", "fits", "recommend", "solve", "check", "run", "launch", "show", "export", "profile",
    "cluster", "instances", "study", "doctor",
)  # fmt: skip
# `hetplan` with the fake problem registered, as a program of its own.
PROGRAM = (
    "import sys; from hetplan.formulations import FAMILIES; FAMILIES['fake'] = "
    "'fakes.family:FAMILY'; "
    "from hetplan.cli.main import main; sys.exit(main())"
)


def start(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    """The program as a process of its own, in its own process group."""
    tests = Path(__file__).parent.parent
    environment = os.environ | {"PYTHONPATH": str(tests)}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **options,
    )


def test_help_and_version(hetplan: Call) -> None:
    for arguments in ((), ("--help",), ("-h",)):
        ran = hetplan(*arguments)
        assert (ran.code, ran.err) == (0, "")
        listed = ran.out.partition("Commands:\n")[2].splitlines()
        assert [line.split()[0] for line in listed] == list(COMMANDS)
    assert hetplan("--version").out == f"hetplan {package.__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command(hetplan: Call, command: str) -> None:
    ran = hetplan(command, "--help")
    assert ran.code == 0
    assert f"hetplan {command}" in ran.out


def test_programs_of_others_find_the_schemas_where_they_were(hetplan: Call) -> None:
    texts = [hetplan(*words.split(), "--help").out for words in ("schema", "instances schema")]
    assert texts[0].partition("\n")[2] == texts[1].partition("\n")[2] != ""


@pytest.mark.parametrize(
    "name",
    ["what-if", "replan", "search", "simulate", "templates", "calibrate", "sensitivity", "validate",
     "import", "export-model", "layout", "report", "truth"],
)  # fmt: skip
def test_names_that_have_moved_are_no_commands(hetplan: Call, name: str) -> None:
    assert name in hetplan(name).error


@pytest.mark.parametrize(
    ("group", "usual"),
    [("plan", "what-if"), ("profile", "measure"), ("study", "run"), ("export", "layout")],
)
def test_help_of_a_group_is_its_usual_commands_and_the_others(
    hetplan: Call, group: str, usual: str
) -> None:
    options, commands = hetplan(group, "--help").out.split("\nCommands:\n")
    assert options.startswith(f"Usage: hetplan {group} [OPTIONS]") and "--output" in options
    assert usual in commands


def test_list(hetplan: Call) -> None:
    rows = hetplan("instances", "list", "--json").json["instances"]
    assert [(row["problem"], row["name"]) for row in rows] == [
        (e.problem, e.name) for e in library()
    ]
    tiny = next(row for row in rows if row["name"] == "tiny-mixed")
    assert (tiny["status"], tiny["gap"]) == ("optimal", 0.0)
    assert "tiny-mixed" in hetplan("instances", "list", "--problem", "amp").out
    assert hetplan("instances", "list", "--name", "no*", "--json").json == {"instances": []}


def test_list_filters_by_set_size_and_what_is_open(hetplan: Call) -> None:
    def names(*words: str) -> set[str]:
        rows = hetplan("instances", "list", *words, "--json").json["instances"]
        return {row["name"] for row in rows}

    every, smoke, unsolved = names(), names("smoke"), names("--open")
    assert "tiny-mixed" in smoke < every and "tiny-mixed" not in unsolved < every
    assert names("smoke", "--open") == smoke & unsolved
    small = names("smoke", "--largest", "16")
    assert small < smoke and "tiny-mixed" in names("smoke", "--largest", "100000")
    assert names("amp", "hap") == names("amp") | names("hap") and names("amp") < every


def test_show(hetplan: Call) -> None:
    entry = find("tiny-mixed")
    assert entry is not None
    assert hetplan("instances", "show", "tiny-mixed", "--json").json == json.loads(
        entry.file.read_text()
    )
    assert hetplan("instances", "show", "tiny-mixed", "--best").json == json.loads(
        entry.best_file.read_text()
    )
    text = hetplan("instances", "show", "tiny-mixed").out
    assert "Made up" in text and "0.40216 by enumeration" in text


def test_validate(hetplan: Call, numbers: Write, tmp_path: Path) -> None:
    good, wrong = numbers(1, 2), tmp_path / "wrong.json"
    wrong.write_text("{}")
    ran = hetplan("instances", "validate", good)
    assert (ran.code, ran.out) == (0, f"{good}: fake instance 'numbers', valid\n")
    ran = hetplan("instances", "validate", good, wrong, "--json")
    assert ran.code == 2
    assert [row["valid"] for row in ran.json["files"]] == [True, False]
    assert ran.err.startswith(f"hetplan: error: {wrong}: format:")


def test_validate_prices_the_record_beside_a_file(
    hetplan: Call, numbers: Write, tmp_path: Path
) -> None:
    path, record = numbers(3, 1), tmp_path / "numbers.best.json"
    figures = {"objective": 1.0, "bound": 1.0, "found_by": "me", "proved_by": "me"}
    names = {"format": "hetplan-best-known", "version": 1, "problem": "fake", "instance": "numbers"}
    record.write_text(json.dumps(names | figures | {"decision": {"index": 1}}))
    assert hetplan("instances", "validate", path).code == 0
    record.write_text(json.dumps(names | figures | {"decision": {"index": 0}}))
    for argument in (path, tmp_path):
        ran = hetplan("instances", "validate", argument, "--json")
        (line,) = ran.json["refused"]
        assert ran.code == 1 and "stated objective 1.0 is not the decision's (3.0)" in line
        assert ran.err == f"hetplan: error: {line}\n"


def test_validate_finds_answers_that_contradict_each_other(
    hetplan: Call, numbers: Write, tmp_path: Path
) -> None:
    path, (one, other) = numbers(3, 1), (tmp_path / "one.json", tmp_path / "other.json")
    hetplan("solve", path, "-m", "auto", "-q", "-o", one)
    ran = hetplan("instances", "validate", tmp_path, "--json")
    assert (ran.code, ran.json["runs"], ran.json["priced"]) == (0, 1, 1)
    hetplan("solve", path, "-m", "proud", "-q", "-o", other)
    ran = hetplan("instances", "validate", tmp_path, "--json")
    (line,) = ran.json["contradictions"]
    assert ran.code == 3 and "bound 3 of proud" in line and "above objective 1 of auto" in line
    assert [row["valid"] for row in ran.json["files"]] == [True]
    path.rename(tmp_path / "away")
    ran = hetplan("instances", "validate", tmp_path, "--json")
    assert (ran.code, ran.json["runs"], ran.json["priced"]) == (3, 2, 0)
    other.write_text(other.read_text()[:40])
    ran = hetplan("instances", "validate", tmp_path, "--json")
    assert ran.code == 2 and ran.json["faults"][0].startswith(f"{other}: ")


@pytest.mark.parametrize("kind", ["instance", "plan", "cluster", "profile"])
def test_schemas(hetplan: Call, kind: str) -> None:
    schema = hetplan("schema", kind).json
    assert schema["$schema"].startswith("https://json-schema.org/")


def test_schema_of_one_problem(hetplan: Call) -> None:
    schema = hetplan("schema", "instance", "--problem", "amp").json
    assert schema["properties"]["problem"]["const"] == "amp"
    decision = hetplan("schema", "decision", "--problem", "amp").json
    assert "placement" in decision["properties"]


def test_doctor(hetplan: Call) -> None:
    ran = hetplan("doctor", "--json")
    assert ran.code == 0, ran.out
    assert ran.json["hetplan"] == package.__version__
    assert ran.json["packages"]["ortools"]
    assert ran.json["cores"] >= 1
    assert all(check["ok"] for check in ran.json["checks"])


def test_doctor_tells_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetplan.cli.doctor.LOAD_BOTH", "")  # what `test_doctor` starts
    report = machine_report(("numpy", "no-such-package"))
    assert [check["ok"] for check in report["checks"]] == [True, False, True]
    checks = report_tables(report)[1].rows
    assert checks[1] == ("FAILED", "no-such-package is installed", "not found")


def test_gpus_by_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\necho 'Tesla T4, 15360, 535.104'\necho 'Odd, [N/A], 1'\necho rubbish\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    gpus, _ = local_gpus()
    assert gpus == [
        {"name": "Tesla T4", "memory_bytes": 15360 * 2**20, "driver": "535.104"},
        {"name": "Odd", "memory_bytes": None, "driver": "1"},
    ]


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (None, "no nvidia-smi"),
        (
            "#!/bin/sh\necho 'NVIDIA-SMI has failed because it could not\ncommunicate'\nexit 9\n",
            "nvidia-smi: failed with exit code 9: NVIDIA-SMI has",
        ),
        ("#!/bin/sh\nprintf 'caf\\351' >&2\nexit 1\n", "nvidia-smi: failed with exit code 1: caf"),
        ("#!/bin/sh\nexit 2\n", "nvidia-smi: failed with exit code 2"),
        ("#!/no/such/interpreter\n", "nvidia-smi: cannot be run: No such file or directory"),
        ("#!/bin/sh\nsleep 30\n", "nvidia-smi: no answer within 1 s"),
        ("#!/bin/sh\nexit 0\n", "none"),
    ],
)
def test_no_gpus_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str | None, reason: str
) -> None:
    path = tmp_path / "nvidia-smi"
    if program is not None:
        path.write_text(program)
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin")
    gpus, why = local_gpus(patience=1.0)
    assert gpus == ([] if reason == "none" else None)
    assert why.startswith(reason) and "\n" not in why


def wait_for(process: subprocess.Popen[str], seconds: float = 600) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


def interrupt(process: subprocess.Popen[str], marker: Path) -> None:
    """Ctrl-C, once the process is at work (it says so by writing `marker`)."""
    deadline = time.monotonic() + 600
    while not marker.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)


@pytest.fixture
def at_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that the fake methods touch when they begin."""
    marker = tmp_path / "at-work"
    monkeypatch.setenv("FAKE_MARKER", str(marker))
    return marker


def test_first_interrupt_prints_what_is_found(
    numbers: Write, at_work: Path, tmp_path: Path
) -> None:
    target = tmp_path / "out.json"
    process = start("solve", numbers(3, 1), "-m", "patient,first", "--json", "-o", target)
    interrupt(process, at_work)
    code, out, err = wait_for(process)
    assert "stopping with what is found so far" in err
    patient, first = json.loads(out)["results"]
    assert (patient["status"], patient["objective"], patient["bound"]) == ("feasible", 3.0, 0.5)
    assert patient["stop"] == "interrupted"
    assert (first["status"], first["message"]) == (
        "unknown",
        "not begun: stopped from the keyboard",
    )
    assert code == 1
    assert json.loads(target.read_text()) == json.loads(out)


def test_second_interrupt_aborts(numbers: Write, at_work: Path) -> None:
    process = start("solve", numbers(3, 1), "-m", "deaf", "--json")
    interrupt(process, at_work)
    assert process.stderr is not None
    while "stopping" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    code, out, err = wait_for(process)
    assert (code, out) == (130, "")
    assert err.endswith("hetplan: error: aborted\n")


def test_broken_pipe(tmp_path: Path) -> None:
    process = start("instances", "show", "tiny-mixed", "--json", bufsize=0)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.wait(timeout=600) == 141
    assert process.stderr.read() == ""


def test_progress_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """At 2 s, 4 s, 8 s … of a run, whenever the display is next told."""
    display = Display("numbers: patient")
    shown = []
    for seconds in (1.9, 3.0, 3.9, 7.0, 7.9):
        display.update(Progress(seconds, 3.0, 0.5, "waiting"))
        shown.append(capsys.readouterr().err)
    line = "hetplan: numbers: patient: 3 s, incumbent 3, bound 0.5, gap 83.3 %, waiting\n"
    assert shown == ["", line, "", line.replace("3 s", "7 s"), ""]
    for seconds, name in ((8.0, "first"), (8.2, "second")):
        method, construct = StrategyMethod(name), cast("Any", Plan.model_construct)
        display.add(Candidate(strategy="dp", method=method, status="", plan=construct(),
                              predicted_seconds=2.0, fits_memory=True))  # fmt: skip
        display.update(Progress(seconds, None, None))
        first = "hetplan: dp/first 2 s\nhetplan: numbers: patient: 8 s\n"
        assert capsys.readouterr().err == (first if name == "first" else "")


def on_a_terminal(*arguments: object, program: str = PROGRAM) -> tuple[int, str, str]:
    """Exit code, stdout, and what the program wrote to stderr while that was a terminal."""
    ours, theirs = pty.openpty()
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(
            [sys.executable, "-c", program, *map(str, arguments)],
            stdout=out,
            stderr=theirs,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent), "TERM": "xterm"},
        )
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # Linux reports the end of a terminal as an error
            while chunk := os.read(ours, 65536):
                shown += chunk
        os.close(ours)
        code = process.wait(timeout=600)
        out.seek(0)
        return code, out.read().decode(), shown.decode()


def test_progress_on_a_terminal_changes_in_place_and_goes_away(numbers: Write) -> None:
    at_once = "import hetplan.cli.output as output; output.QUIET = 0.0; "
    arguments = ("solve", numbers(3, 1), "-m", "patient", "-t", "1", "--json")
    code, out, err = on_a_terminal(*arguments, program=at_once + PROGRAM)
    assert code == 0
    assert json.loads(out)["results"][0]["stop"] == "limit"
    shown = r"numbers: patient: \d s, incumbent 3, bound 0.5, gap 83.3 %, waiting"
    assert re.search(shown, err) is not None
    assert err.rstrip().endswith("\x1b[1A\x1b[2K"), "the line is erased at the end"


def test_nothing_is_shown_of_what_takes_no_time(numbers: Write) -> None:
    patience = "import hetplan.cli.output as output; output.QUIET = 600.0; "
    shown = on_a_terminal("solve", numbers(3, 1), "--json", program=patience + PROGRAM)[2]
    assert shown == ""


def test_warnings_of_libraries_are_for_developers(
    numbers: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = wait_for(start("solve", numbers(1), "-m", "first", "--json", "-q"))
    assert (code, err) == (0, "")
    monkeypatch.setenv("HETPLAN_DEBUG", "1")
    assert "only developers" in wait_for(start("solve", numbers(1), "-m", "first", "--json"))[2]


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_any_encoding_of_standard_output(numbers: Write, encoding: str, tmp_path: Path) -> None:
    path = numbers(3, name="n")
    path.write_text(path.read_text().replace('"name": "n"', '"name": "né \\ud83d\\ude00 中"'))
    solve = ["solve", str(path), "-q"]
    twice = f"main({[*solve, '--json']!r}) or main({solve!r})"  # for programs, then for people
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("main()", twice)],
        env=os.environ
        | {"PYTHONIOENCODING": encoding, "PYTHONPATH": str(Path(__file__).parent.parent)},
        capture_output=True,
        check=False,
    )
    assert (process.returncode, process.stderr) == (0, b"")
    document, end = json.JSONDecoder().raw_decode(process.stdout.decode(encoding))
    assert document["instance"] == "né 😀 中"
    assert "optimal" in process.stdout.decode(encoding)[end:]


@pytest.mark.parametrize(
    "arguments",
    [
        ("solve", "x" * 300),
        ("solve", "x" * 300 + ".json"),
        ("plan", "--model", "gpt2", "--global-batch", "8", "--cluster", "x" * 300),
        ("solve", "tiny-mixed", "--output", "x" * 300),
    ],
    ids=lambda arguments: arguments[0],
)
def test_names_that_no_file_system_takes_are_one_line(
    hetplan: Call, arguments: tuple[str, ...]
) -> None:
    ran = hetplan(*arguments)
    assert ran.code == 2
    assert "error: " in ran.err and "xxx" in ran.err
    assert "Traceback" not in ran.err
