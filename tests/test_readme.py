"""What the README shows is what happens: its commands run, its output is compared, its tables are
complete, and it stays short. `.ci/run` runs its two commands, and compares what the first one
prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hetplan.formulations import FAMILIES, family
from hetplan.planner import STRATEGIES
from hetplan.plans.plan import load_plan
from hetplan.profiling.hardware.cluster import example_cluster
from hetplan.profiling.workload import make_workload
from hetplan.replays.replay import replay
from markdown_pages import ROOT, Block, blocks
from page_commands import main, prepare, run_as_shown, same, shell
from present import present

README = ROOT / "README.md"
CONSOLE = blocks(README, "console")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the examples and with the files that the README has its reader write."""
    return prepare(README, tmp_path_factory.mktemp("readme"))


@pytest.mark.pages
@pytest.mark.parametrize("block", CONSOLE, ids=[block.commands()[0][0] for block in CONSOLE])
def test_console_blocks(block: Block, place: Path) -> None:
    run_as_shown(block, place)


def test_output_that_differs_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert same("a ...\nb\n", "a 1 s\nb\n")
    assert not same("a ...\nb 182 ms\n", "a 1 s\nb 183 ms\n")
    page, printed = tmp_path / "page.md", tmp_path / "printed.txt"
    page.write_text("```console\n$ hetplan solve x\nbest ... ms\n```\n")
    for text, code in (("best 3 ms\n", 0), ("best 3 s\n", 1)):
        printed.write_text(text)
        assert main([str(page), str(printed)]) == code
        assert capsys.readouterr().out.startswith("hetplan solve x prints") == bool(code)


def test_the_page_of_commands_shows_them() -> None:
    commands_page = blocks(ROOT / "docs" / "commands.md", "console")
    commands = [command for block in commands_page for command, _ in block.commands()]
    for name in ("plan", "plan search", "plan simulate", "run", "solve", "check", "instances"):
        assert any(command.startswith(f"hetplan {name} ") for command in commands), name


def setup_commands() -> dict[str, str]:
    """The README's two commands for a fresh machine, by mark."""
    return {block.mark: block.body.strip() for block in blocks(README, "sh")}


def test_setup_commands_are_complete() -> None:
    """`.ci/run` runs both as they stand; here only that they do all their own set-up, in one
    line."""
    found = setup_commands()
    assert list(found) == ["command:plan", "command:test"]
    for command in found.values():
        assert "\n" not in command
        assert command.startswith(
            "python3 -m venv .venv && .venv/bin/pip install -q -c constraints.txt "
        ), command
    assert found["command:test"].endswith(" -e '.[test]' && .venv/bin/pytest -n 2 --dist worksteal")
    shown = CONSOLE[0].commands()[0][0]
    assert found["command:plan"].endswith(f" . && .venv/bin/{shown}")


@pytest.mark.pages
def test_picture_is_of_the_plan_that_the_first_command_writes(place: Path) -> None:
    if not (place / "plan.json").exists():  # the test of the console blocks has written it
        ran = shell(CONSOLE[0].commands()[0][0], place)
        assert ran.returncode == 0, ran.stderr
    documents = place / "plan.json", ROOT / "docs" / "llama3-8b-two-generations.plan.json"
    cluster = example_cluster("two-generations")
    workload = make_workload("llama3-8b", cluster, 128, precision="bf16")
    written, shown = (load_plan(path) for path in documents)
    seconds = [replay(plan, workload).seconds for plan in (written, shown)]
    assert present(shown.prediction).strategy == present(written.prediction).strategy == "joint"
    assert present(shown.prediction).predicted_seconds == pytest.approx(seconds[1])
    # a busy machine cuts the search
    assert 0.85 < seconds[0] / seconds[1] < 1.6


def test_table_of_problems_is_complete() -> None:
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert {name for name, _ in rows} == set(FAMILIES)
    for name, row in rows:
        assert family(name).paper.partition(" (")[0].partition(",")[0] in row


def test_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150


def test_strategies_of_the_planner_are_named() -> None:
    text = " ".join(README.read_text(encoding="utf-8").split())
    sentence = re.search(r"`hetplan plan` uses the strategies ([^;.]*)", text)
    assert sentence is not None
    assert set(re.findall(r"`([^`]+)`", sentence[1])) == set(STRATEGIES)
