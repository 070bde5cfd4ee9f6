"""Nothing from a file is executed: texts of plan files and job files stay texts in every file that
is generated from them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from export.by_hand import cut, plan_of
from export.hostile import (
    HARMLESS,
    ONE_LINE,
    PAYLOADS,
    SEVERAL_LINES,
    Place,
    places_of_texts,
    structure,
    with_text,
)
from export.test_launchers import CODES, KEYS
from hetplan.adapters.exports import EXPORTERS, export
from hetplan.adapters.exports.launchers.kinds import LAUNCHERS
from hetplan.adapters.exports.launchers.start import Start
from hetplan.adapters.exports.scripts import torchrun
from hetplan.errors import InputError, UnsupportedError
from hetplan.plans.plan import Plan

PREDICTION = {"strategy": "joint", "method": "auto", "predicted_seconds": 0.5}
MORE: dict[str, Any] = {
    "origin": "by hand",
    "prediction": PREDICTION,
    "types": ["A100", "A100", "T4", "T4"],
    "per_node": 2,
    "blocks": 4,
}
TWO_STAGES = cut(2, 2, blocks=4)
# Of each framework a plan that it can say, with every text that a plan file may have.
PLANS = {
    "megatron": plan_of(TWO_STAGES, tensor=2, **MORE),
    "bridge": plan_of(TWO_STAGES, tensor=2, **MORE),
    "deepspeed": plan_of([[(0, 6)]], data=4, **MORE),
    "torchtitan": plan_of(TWO_STAGES, data=2, zero=3, **MORE),
    "flagscale": plan_of(TWO_STAGES, tensor=2, **MORE),
    "device-map": plan_of(cut(6, 6), **{**MORE, "blocks": 12}, model="gpt2"),
    "accelerate": plan_of([[(0, 6)]], data=4, zero=3, **MORE),
    "torchrun": plan_of(TWO_STAGES, tensor=2, refused="a reason", **MORE),
}
GPU = {"types": {"T4": {"gpu": "t4"}}}
OPTIONS: dict[str, dict[str, Any]] = {
    "ssh": {},
    "slurm": {"options": {"comment": "a"}, "types": {"T4": {"constraint": "b"}}},
    "kubeflow": GPU,
    "jobset": GPU,
    "ray": GPU,
}


def free_places(plan: Plan) -> list[Place]:
    """Places of a plan file where any text may stand."""
    document = plan.model_dump(mode="json")

    def accepted(place: Place) -> bool:
        try:
            Plan.model_validate(with_text(document, place, HARMLESS))
        except ValidationError:
            return False
        return True

    return [place for place in places_of_texts(document) if accepted(place)]


FREE = {to: free_places(plan) for to, plan in PLANS.items()}


def everywhere(to: str, payload: str) -> Plan:
    """The framework's plan with the payload at every free place but the names of layers, which
    exporters look at."""
    plan = PLANS[to]
    for place in FREE[to]:
        if "layers" not in place:
            plan = with_text(plan, place, payload)
    return plan


def written(plan: Plan, kind: str, text: str, root: Path | None = None) -> dict[str, str]:
    """All files of a launcher: its own, and the script of every node. text: at every free place
    outside of the plan. root: where ranks start."""
    given = {**KEYS[kind], **OPTIONS[kind], "kind": kind, "env": {"X": HARMLESS}}
    launcher = CODES[kind].model_validate(given)
    for place in places_of_texts(launcher.model_dump(mode="json")):
        if place[0] in ("env", "options", "types"):
            launcher = with_text(launcher, place, text)
    words = ["--checkpoint", text, "--factory", text]
    start = Start(
        plan=plan,
        launcher=launcher,
        name="job",
        root=str(root or f"/a/{text}"),
        folder="out",
        run_options=words,
    )
    files = LAUNCHERS[kind][2](start)
    return {"node.sh": torchrun(plan, variables=launcher.env), **files}


def test_there_are_free_places() -> None:
    names = {".".join(map(str, place)) for place in FREE["torchrun"]}
    assert {"name", "origin", "refused", "workload.model", "workload.cluster", "workload.layers.3",
            "devices.3.type", "prediction.strategy", "prediction.method"} <= names  # fmt: skip
    assert not names & {"format", "schedule", "workload.precision"}


@pytest.mark.parametrize("to", EXPORTERS)
def test_every_text_of_a_plan_stays_in_its_place_in_exports(to: str) -> None:
    plan = PLANS[to]
    changes = {".".join(map(str, place)): partial(with_text, plan, place) for place in FREE[to]}
    changes["everywhere"] = partial(everywhere, to)
    for place, changed in changes.items():
        try:
            harmless = structure(to, export(changed(HARMLESS), to), HARMLESS)
        except UnsupportedError:  # names of the first and the last layer; one type of a stage's two
            of_model = to == "device-map" and place in ("workload.model", "everywhere")
            assert "layers" in place or (to == "flagscale" and "devices" in place) or of_model
            continue
        for payload in PAYLOADS:
            text = export(changed(payload), to)
            assert structure(to, text, payload) == harmless, (place, payload)
            assert all(c.isprintable() or c == "\n" for c in text), (place, payload)


@pytest.mark.parametrize("kind", KEYS)
def test_every_text_stays_in_its_place_in_launchers_files(kind: str) -> None:
    def structures(plan: Plan, text: str) -> dict[str, Any]:
        files = written(plan, kind, text)
        return {name: structure(name, content, text) for name, content in files.items()}

    harmless = structures(everywhere("torchrun", HARMLESS), HARMLESS)
    for payload in PAYLOADS:
        assert structures(everywhere("torchrun", payload), payload) == harmless, payload


STUBS: Mapping[str, str] = {
    **dict.fromkeys(("torchrun", "python"), 'echo "$0" >> started'),
    "ssh": 'bash -c "${@: -1}"',
    "scontrol": "echo host",
    "srun": 'shift; SLURM_PROCID=0 "$@"',
}


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder of programs that only note that they were started, or start what they are given."""
    folder = tmp_path / "programs"
    folder.mkdir()
    for name, line in STUBS.items():
        (folder / name).write_text(f"#!/bin/bash\n{line}\n")
        (folder / name).chmod(0o755)
    return folder


def run(files: Mapping[str, str], first: str, folder: Path, programs: Path) -> None:
    """Run a script of the files in a folder; it starts torchrun or python, and nothing else."""
    (folder / "out").mkdir(parents=True)
    for name, text in files.items():
        (folder / "out" / name).write_text(text)
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "NODE": "0", "MASTER_ADDR": "host",
                   "SLURM_JOB_NODELIST": "host", "SLURM_JOB_ID": "1"}  # fmt: skip
    command = ["bash", f"out/{first}", "entry.py"]
    ran = subprocess.run(
        command, cwd=folder, env=environment, check=False, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    started = (folder / "started").read_text().split("\n")
    assert {os.path.basename(line) for line in started[:-1]} <= {"torchrun", "python"}
    assert "pwned" not in {path.name for path in programs.parent.rglob("*")}


@pytest.mark.parametrize("to", ["megatron", "torchrun"])
def test_exported_scripts_run_nothing_else(to: str, tmp_path: Path, programs: Path) -> None:
    for number, payload in enumerate(PAYLOADS):
        files = {to: export(everywhere(to, payload), to)}
        run(files, to, tmp_path / str(number), programs)


@pytest.mark.parametrize(("kind", "first"), [("ssh", "submit.sh"), ("slurm", "job.sbatch")])
def test_launchers_scripts_run_nothing_else(
    kind: str, first: str, tmp_path: Path, programs: Path
) -> None:
    for number, payload in enumerate(PAYLOADS):
        if "\0" not in payload:  # which no folder's name holds
            root = tmp_path / str(number) / payload
            files = written(everywhere("torchrun", payload), kind, payload, root)
            run(files, first, root, programs)


def test_a_plan_file_with_a_control_character_is_refused() -> None:
    document = PLANS["torchrun"].model_dump(mode="json")
    for place in FREE["torchrun"]:
        for payload in SEVERAL_LINES:
            with pytest.raises(InputError) as caught:
                Plan.parsed(with_text(document, place, payload), where="plan.json")
            said = str(caught.value)
            name = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in place)[1:]
            assert said.startswith(f"plan.json: {name}: not usable (got '"), said
            assert said.endswith("expected text of one line without control characters)"), said
            assert said.isprintable()
        for payload in ONE_LINE:
            Plan.parsed(with_text(document, place, payload), where="plan.json")
