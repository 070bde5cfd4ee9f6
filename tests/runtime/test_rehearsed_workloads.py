"""The documented list: one workload of each family planned, then rehearsed on virtual devices."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is an extra of hetplan")

from hetplan.formulations import FAMILIES  # noqa: E402
from hetplan.runtime.plan import load_plan  # noqa: E402
from markdown_pages import ROOT, blocks  # noqa: E402
from parity.asking import Answers, request, served  # noqa: E402

(LISTED,) = [
    block.body
    for block in blocks(ROOT / "docs" / "runtime.md", "bash")
    if block.mark == "rehearsals"
]


def commands(folder: Path, steps: int, seconds: float) -> dict[str, list[str]]:
    """Strategy -> the two commands of its line, with files in the folder and so many seconds for a
    method."""
    found = {}
    for line in LISTED.strip().splitlines():
        words = [word for word in shlex.split(line) if word != "hetplan"]
        family = words[words.index("--strategies") + 1]
        words = [str(folder / word) if word.endswith(".json") else word for word in words]
        assert words[words.index("--steps") + 1] == "20"
        words[words.index("--steps") + 1] = str(steps)
        found[family] = [words[0], "--time-limit", str(seconds), *words[1:], "--json"]
    return found


def rehearsed(folder: Path, steps: int, seconds: float, width: int) -> Answers:
    """What the lines print."""
    lines = commands(folder, steps, seconds)
    return served([request(family, *words) for family, words in lines.items()], folder, width)


def check(answers: Answers, folder: Path, steps: int) -> dict[str, Any]:
    """All ran what they should; the documents by family."""
    documents = {}
    for family, answer in answers.items():
        assert answer["code"] == 0, f"{family}: {answer['err']}"
        found = json.loads(answer["out"][answer["out"].index('{\n "plan"') :])
        plan = load_plan(folder / f"{family}.json")
        assert plan.prediction is not None and plan.prediction.strategy == family
        assert (found["plan"], found["virtual"], len(found["ranks"])) == (
            plan.name,
            True,
            plan.world_size,
        )
        assert [step["step"] for step in found["steps"]] == list(range(steps))
        assert found["time_scale"] * plan.prediction.predicted_seconds == pytest.approx(
            found["predicted_seconds"]
        )
        assert found["measured_seconds"] > 0.98 * found["predicted_seconds"]
        documents[family] = found
    return documents


def test_every_family_has_a_line() -> None:
    assert [
        line.split()[line.split().index("--strategies") + 1] for line in LISTED.splitlines()
    ] == list(FAMILIES)


def test_one_workload_of_each_family_is_planned_and_rehearsed(tmp_path: Path) -> None:
    """A machine under load may be late, but never early."""
    check(rehearsed(tmp_path, 2, 3.0, 4), tmp_path, 2)


@pytest.mark.slow
def test_what_is_measured_is_what_was_predicted(tmp_path: Path) -> None:
    """Needs a machine without other load."""
    for family, found in check(rehearsed(tmp_path, 20, 60.0, 1), tmp_path, 20).items():
        print(
            f"{family}: {found['predicted_seconds']:.4f} s predicted, "
            f"{found['measured_seconds']:.4f} s measured"
        )
        assert abs(found["error"]) < 0.1, family
