"""Plans on virtual devices: real processes and messages, predicted times slept."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from evidence.truth.tables import spearman
from fakes.workloads import cluster_document, small
from hetplan.files import read_json
from hetplan.plans.plan import save_plan
from hetplan.profiling.models.model import load_model
from hetplan.profiling.models.operators import DEFAULT_STACK
from hetplan.replays.replay import replay
from hetplan.runtime.execution.choice import engine_of
from hetplan.runtime.job import Job, StepReport
from hetplan.runtime.launch.rehearsal import Rehearsal
from hetplan.runtime.measured import Measured

torch: Any = pytest.importorskip("torch", reason="torch is an extra of hetplan")

from fakes import rehearsals  # noqa: E402
from fakes.rehearsals import PLANS, plan  # noqa: E402
from hetplan.formulations import FAMILIES  # noqa: E402
from hetplan.plans.plan import load_plan  # noqa: E402
from markdown_pages import ROOT  # noqa: E402
from parity.asking import request, served  # noqa: E402
from parity.cases import Case, R, S, even  # noqa: E402


def rehearsed(folder: Path, *names: str) -> dict[str, Any]:
    """Documents of plans, run one after the other, 2 s here for each there."""
    cluster = folder / "cluster.yaml"
    cluster.write_text(yaml.safe_dump(cluster_document()))
    options = ("--cluster", cluster, "--virtual", "--time-scale", 2, "--steps", 3, "--json")
    asked = []
    for name in names:
        save_plan(plan(name, small(stack=DEFAULT_STACK)), folder / f"{name}.json")
        asked.append(request(name, "run", folder / f"{name}.json", *options, "--quiet"))
    answers = served(asked, folder, 1)
    assert {answer["code"] for answer in answers.values()} == {0}, answers
    return {name: json.loads(answer["out"]) for name, answer in answers.items()}


@pytest.mark.parametrize("name", PLANS)
def test_what_is_slept_is_what_the_simulator_predicts(name: str) -> None:
    made = plan(name, small())
    assert Rehearsal.of(made, small(), engine_of(made), 3.0).seconds == pytest.approx(
        3 * replay(made, small()).seconds
    )


def test_the_work_of_every_rank_fits_into_its_passes() -> None:
    """The rank with the least passes may have the most work for its time."""
    made = plan("four stages, uneven", small())
    busy = [Rehearsal.of(made, small(), engine_of(made), 1.0).busy(rank) for rank in range(4)]
    idle = busy.index(min(busy))
    assert min(busy) < max(busy)
    engine: Any = SimpleNamespace(
        real_seconds=lambda plan, timeline, place: 30.0 if place.rank == idle else 0.001
    )
    rehearsal = Rehearsal.of(made, small(), engine, cores=1000)
    assert rehearsal.busy(idle) >= 30.0 * (1 - 1e-9)


@pytest.mark.engine
def test_virtual_devices_take_their_time(tmp_path: Path) -> None:
    """A machine under load may be late, but never early."""
    names = ("unequal micro-batches", "data parallel, ZeRO 2")
    for name, document in rehearsed(tmp_path, *names).items():
        assert document["measured_seconds"] > 0.98 * document["predicted_seconds"], name
        assert [step["step"] for step in document["steps"]] == [0, 1, 2]
        assert all(rank["busy_seconds"] > 0 for rank in document["ranks"])


@pytest.mark.evidence
def test_predictions_are_within_a_tenth_and_in_the_order_measured(tmp_path: Path) -> None:
    """Needs a machine without other load."""
    documents = rehearsed(tmp_path, *PLANS)
    assert len(documents) >= 10
    for name, one in documents.items():
        assert abs(one["error"]) < 0.1, name
        for rank in one["ranks"]:
            # less what began late
            assert rank["busy_seconds"] > 0.8 * rank["predicted_busy_seconds"]
    by_prediction = sorted(documents, key=lambda name: documents[name]["predicted_seconds"])
    assert by_prediction == sorted(documents, key=lambda name: documents[name]["measured_seconds"])


@pytest.mark.engine
def test_the_command_prints_a_document_and_a_trace(tmp_path: Path) -> None:
    case = Case(
        "two by two", "two", [R(even([0, 1, 2]), [(2, 2)]), R([S((0, 2), tensor=(1, 1))], [(1, 2)])]
    )
    save_plan(case.plan, tmp_path / "plan.json")
    options = ("--factory", "parity.cases:two", "--steps", 3, "--json")
    trace = tmp_path / "trace.json"
    asked = request("two", "run", tmp_path / "plan.json", *options, "--trace", trace)
    answer = served([asked], tmp_path, 1)["two"]
    assert answer["code"] == 0, answer["err"]
    lines = [line.split(":")[1] for line in answer["err"].splitlines()]
    assert lines == [" step 0", " step 1", " step 2"]
    document = json.loads(answer["out"])
    assert document["predicted_seconds"] is None and document["measured_seconds"] > 0
    assert [rank["tensor_rank"] for rank in document["ranks"]] == [0, 0, 0, 1]
    events = read_json(trace)["traceEvents"]
    names = {event["name"] for event in events}
    assert {"forward 0", "backward 1", "receive 0", "synchronise", "optimizer"} <= names
    assert {event["tid"] for event in events if event["ph"] == "X"} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("end", "busy", "late", "slow"),
    [
        (1.001, 1.7, False, False),
        (1.05, 1.0, False, False),
        (1.3, 1.7, True, True),
        (2.0, 1.0, True, False),
    ],
)
def test_a_late_rehearsal_says_what_to_do_and_names_slow_ranks(
    end: float, busy: float, late: bool, slow: bool
) -> None:
    """end: of the iterations, and busy: of rank 1, as shares of what was predicted."""
    made = plan("data parallel, shares by speed", small())
    rehearsal = Rehearsal.of(made, small(), engine_of(made), 2.0)
    job = Job(plan=made, steps=2, rehearsal=rehearsal, virtual=True)
    half = [rehearsal.busy(rank) / 2 * (busy if rank == 1 else 1.0) for rank in range(4)]
    ends = end * rehearsal.seconds
    reports = [[StepReport(s, 1.0, 0.0, ends, h, h, 0.0, 1) for s in range(2)] for h in half]
    notes = Measured(job, reports).table().notes
    assert late == any(
        note.startswith("late: this machine did not keep up with the ranks' work and messages; ")
        for note in notes
    )
    assert end != 2.0 or any(note.endswith("--time-scale 4.8 may do") for note in notes)
    lines = [note for note in notes if note.startswith("slow")]
    assert len(lines) == slow and all(
        "slow: rank 1 (" in n and "took 1.7 times" in n for n in lines
    )


@pytest.mark.evidence
def test_uneven_plans_take_what_the_simulator_predicts() -> None:
    """All of them, on a profile measured here: within a tenth, and in the predicted order."""
    from hetplan.runtime.measuring.layers import measure_profile

    model = load_model(rehearsals.MODEL, sequence=rehearsals.SEQUENCE, precision="fp32")
    measured = measure_profile(model, "cpu", micro_batches=(1, 2, 4), repeats=3)
    workload = rehearsals.workload_here(model, measured)
    plans = rehearsals.rehearse_all(workload, cores=len(os.sched_getaffinity(0)))
    assert all(abs(plan.error) <= 0.1 for plan in plans)
    rank = spearman([plan.predicted for plan in plans], [plan.measured for plan in plans])
    assert rank is not None and rank >= 0.97


SCRIPT = (ROOT / "examples" / "rehearsals.sh").read_text(encoding="utf-8")
LISTED = "\n".join(line for line in SCRIPT.splitlines() if line.startswith("hetplan "))


LIMITS = {"hap": ("--set", "hap.seconds=30"), "joint": ("--set", "joint.seconds=3")}


def commands(folder: Path) -> dict[str, list[str]]:
    """Strategy -> the two commands of its line, with files in the folder and two steps. Methods
    end by themselves but for those of LIMITS."""
    by_family = {}
    for line in LISTED.strip().splitlines():
        words = [word for word in shlex.split(line) if word != "hetplan"]
        family = words[words.index("--strategies") + 1]
        words = [str(folder / word) if word.endswith(".json") else word for word in words]
        words[words.index("--steps") + 1] = "2"
        limits = ["--time-limit", "600", *LIMITS.get(family, ())]
        by_family[family] = [words[0], *limits, *words[1:], "--json"]
    return by_family


def test_every_family_has_a_line() -> None:
    assert [
        line.split()[line.split().index("--strategies") + 1] for line in LISTED.splitlines()
    ] == list(FAMILIES)


@pytest.mark.engine
def test_one_workload_of_each_family_is_planned_and_rehearsed(tmp_path: Path) -> None:
    """A machine under load may be late, but never early."""
    lines = commands(tmp_path)
    answers = served([request(family, *words) for family, words in lines.items()], tmp_path, 4)
    for family, answer in answers.items():
        assert answer["code"] == 0, f"{family}: {answer['err']}"
        document = json.loads(answer["out"][answer["out"].index('{\n "plan"') :])
        plan = load_plan(tmp_path / f"{family}.json")
        assert plan.prediction is not None and plan.prediction.strategy == family
        ran = document["plan"], document["virtual"], len(document["ranks"])
        assert ran == (plan.name, True, plan.world_size)
        assert [step["step"] for step in document["steps"]] == [0, 1]
        assert document["time_scale"] * plan.prediction.predicted_seconds == pytest.approx(
            document["predicted_seconds"]
        )
        assert document["measured_seconds"] > 0.98 * document["predicted_seconds"]
