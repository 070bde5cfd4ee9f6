"""What the shells are offered: asked as they ask, through the environment; and how fast that can
be."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fakes.cli import Call
from hetplan.formulations import FAMILIES, family
from hetplan.instances.library import SETS, library
from hetplan.planner import STRATEGIES
from hetplan.profiling.hardware.cluster import catalogue, example_clusters
from hetplan.profiling.models.zoo import BUILT_IN


class Asked:
    """`asked("solve tiny")`: what a shell is offered for the last word of `hetplan solve tiny`."""

    def __init__(self, hetplan: Call, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hetplan, self.monkeypatch = hetplan, monkeypatch

    def __call__(self, line: str, shell: str = "bash") -> list[str]:
        words = f"hetplan {line}"
        environment = {"_HETPLAN_COMPLETE": f"complete_{shell}"}
        if shell == "bash":
            environment |= {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
        else:
            environment |= {
                "_TYPER_COMPLETE_ARGS": words,
                "_TYPER_COMPLETE_FISH_ACTION": "get-args",
            }
        for name, value in environment.items():
            self.monkeypatch.setenv(name, value)
        ran = self.hetplan()
        for name in environment:
            self.monkeypatch.delenv(name)
        assert (ran.code, ran.err) == (0, "")
        if shell == "zsh":
            return [word.split('"')[1] for word in ran.out.splitlines() if '"' in word]
        return [word.split("\t")[0] for word in ran.out.splitlines() if word]


@pytest.fixture
def asked(hetplan: Call, monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Ask as a shell does."""
    return Asked(hetplan, monkeypatch)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("sol", ["solve"]),
        ("solve tiny-m", ["tiny-mixed"]),
        ("check tiny-m", ["tiny-mixed"]),
        ("instances show tiny-m", ["tiny-mixed"]),
        ("solve tiny-mixed --method meg", ["megatron"]),
        ("solve tiny-mixed -m auto,meg", ["auto,megatron"]),
        ("solve tiny-mixed -m auto,aut", []),
        ("solve amp/tiny-mixed -m oob", []),
        ("solve -m oob", ["oobleck"]),
        ("plan --model gpt2-m", ["gpt2-medium"]),
        ("plan --cluster amp-m", ["amp-mixed"]),
        ("plan --precision b", ["bf16"]),
        ("plan --strategies amp,pop", ["amp,poplar"]),
        ("plan search --model glm-6", ["glm-67b"]),
        ("plan search --cluster amp-m", ["amp-mixed"]),
        ("plan search --mode he", ["heterogeneous"]),
        ("plan search --param pip", ["pipeline="]),
        ("instances list --problem am", ["amp"]),
        ("schema instance --problem pop", ["poplar"]),
        ("schema de", ["decision"]),
    ],
)
def test_values(asked: Asked, shell: str, line: str, expected: list[str]) -> None:
    assert asked(line, shell) == expected


def test_everything_is_offered_before_anything_is_typed(asked: Asked) -> None:
    assert set(asked("plan --model ")) == set(BUILT_IN)
    assert set(asked("plan --cluster ")) == set(example_clusters())
    assert set(asked("plan --strategies ")) == set(STRATEGIES)
    assert set(asked("solve ")) == {*SETS, *FAMILIES, *(entry.name for entry in library())}
    assert set(asked("plan search --gpus ")) == {f"{name}:" for name in catalogue()}
    assert set(asked("instances list --problem ")) == set(FAMILIES)
    assert set(asked("solve tiny-mixed -m ")) == {m.name for m in family("amp").methods} | {"all"}


@pytest.mark.parametrize(
    ("shell", "place"),
    [
        ("bash", ".bash_completions/hetplan.sh"),
        ("zsh", ".zfunc/_hetplan"),
        ("fish", ".config/fish/completions/hetplan.fish"),
    ],
)
def test_script_can_be_installed(
    hetplan: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shell: str, place: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("shellingham.detect_shell", lambda: (shell, f"/bin/{shell}"))
    ran = hetplan("--install-completion")
    assert (ran.code, ran.err) == (0, "")
    assert f"{shell} completion installed in {tmp_path / place}" in ran.out
    assert "_HETPLAN_COMPLETE=complete_" + shell in (tmp_path / place).read_text()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_itself_completes(tmp_path: Path) -> None:
    program = tmp_path / "hetplan"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m hetplan "$@"\n')
    program.chmod(0o755)
    script = (
        'eval "$(_HETPLAN_COMPLETE=source_bash hetplan)"; '
        "COMP_WORDS=(hetplan plan --model gpt2-m); COMP_CWORD=3; _hetplan_completion hetplan; "
        'echo "${COMPREPLY[@]}"'
    )
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("gpt2-medium\n", "")


LIGHT = (
    "solve tiny-m",
    "solve tiny-mixed -m meg",
    "plan --model gpt2-m",
    "plan --cluster amp",
    "plan --strategies a",
)


def test_nothing_heavy_loads_to_complete() -> None:
    """Every press of a key starts the program: kernels, solvers and torch would be felt."""
    code = (
        "import os, sys; from hetplan.cli.main import main\n"
        "heavy = {'ortools', 'highspy', 'pyomo', 'numba', 'scipy', 'torch', 'matplotlib'}\n"
        "for line in sys.argv[1:]:\n"
        "    os.environ |= {'COMP_WORDS': line, 'COMP_CWORD': str(len(line.split()) - 1)}\n"
        "    code = main([])\n"
        "    if code or heavy & set(sys.modules):\n"
        "        sys.exit(f'{line}: {code} {heavy & set(sys.modules)}')\n"
        "    print('of', line)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *(f"hetplan {line}" for line in LIGHT)],
        env=os.environ | {"_HETPLAN_COMPLETE": "complete_bash"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    answers = done.stdout.split("\n")
    for line in LIGHT:
        place = answers.index(f"of hetplan {line}")
        assert place > 0 and answers[place - 1].strip() and "of hetplan" not in answers[place - 1]
