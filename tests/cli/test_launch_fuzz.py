"""Damaged job files and plans of `hetplan launch`, and things that are no files in their places:
always an answer or one line of error, never a traceback and never without an end."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from cli.test_cli_fuzz import check
from export.by_hand import cut, plan_of
from fakes.cli import Call
from fuzzing.mutations import as_json, damage, mutate
from hetplan.plans.plan import save_plan

COMMON: dict[str, Any] = {
    "format": "hetplan-job", "version": 1, "model": "gpt2", "cluster": "amp-mixed",
    "global_batch": 32, "steps": 7, "precision": "fp16", "strategies": ["dp"], "seed": 3,
    "checkpoint": "kept", "every": 2, "set": ["poplar.zero=1"], "learning_rate": 0.01,
}  # fmt: skip
ENVIRONMENT = {"env": {"NCCL_DEBUG": "INFO"}}
LAUNCHERS: tuple[dict[str, Any], ...] = (
    {"kind": "local"},
    {"kind": "slurm", "options": {"partition": "gpu", "time": "1:00:00"}, **ENVIRONMENT},
    {"kind": "ssh", "hosts": ["a", "ann@b:2222"], **ENVIRONMENT},
    {"kind": "kubeflow", "image": "train:1"},
    {"kind": "jobset", "image": "train:1"},
    {"kind": "ray"},
)
FILES = 5  # damaged ones of a kind, a launcher and a seed


def job(rng: Random, launchers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A job file, some keys of which are left out."""
    kept = {key: value for key, value in COMMON.items() if rng.random() < 0.8}
    return {**kept, "format": "hetplan-job", "version": 1, "launcher": rng.choice(launchers)}


def edited(rng: Random, document: Any) -> bytes:
    return as_json(mutate(rng, document))


def edited_yaml(rng: Random, document: Any) -> bytes:
    return yaml.safe_dump(mutate(rng, document)).encode("utf-8", "surrogatepass")


def damaged(rng: Random, document: Any) -> bytes:
    return damage(rng, yaml.safe_dump(document).encode())


def encoded_otherwise(rng: Random, document: Any) -> bytes:
    """In another encoding, compressed with damage, or nested deeply."""
    text = json.dumps(document)
    deep = rng.choice(("[", '{"a":', "- ", "? ", "&a [*a, "))
    return rng.choice(
        (
            text.encode("utf-16"),
            text.encode("utf-32-be"),
            b"\xef\xbb\xbf" + text.encode(),
            text.encode("cp037"),
            b"\x1f\x8b\x08\x00" + text.encode(),
            (deep * rng.choice((10, 300, 100_000))).encode(),
            b"a: &a [x, x]\n" + b"".join(b"b%d: [*a, *a]\n" % i for i in range(50)),
        )
    )


KINDS = (edited, edited_yaml, damaged, encoded_otherwise)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(s, marks=pytest.mark.wide) for s in range(1, 40))]
)
@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_damaged_job_files(
    hetplan: Call,
    tmp_path: Path,
    make: Callable[[Random, Any], bytes],
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = tmp_path / "plan.json"
    save_plan(plan_of(cut(5, 4, 3), tensor=[2, 2, 3], types=["A100"] * 4 + ["T4"] * 3), plan)
    whole = plan.read_bytes()
    codes = []
    for number in range(FILES):
        rng = Random(f"{make.__name__} {seed} {number}")
        path = tmp_path / f"{number}.yaml"
        path.write_bytes(make(rng, job(rng, LAUNCHERS)))
        codes.append(checked(hetplan("launch", path, "--dry-run")))
        # Without --dry-run a local job would train.
        path.write_bytes(make(rng, job(rng, LAUNCHERS[1:])))
        codes.append(checked(hetplan("launch", path, "--plan", plan, "-o", tmp_path / "out")))
        # and a whole job with a damaged plan
        path.write_text(yaml.safe_dump({**COMMON, "launcher": rng.choice(LAUNCHERS[1:])}))
        plan.write_bytes(make(rng, json.loads(whole)))
        codes.append(checked(hetplan("launch", path, "--plan", plan, "-o", tmp_path / "out")))
        plan.write_bytes(whole)
    assert codes.count(2) > len(codes) / 3


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher["kind"])
def test_whole_job_files_are_taken(hetplan: Call, tmp_path: Path, launcher: dict[str, Any]) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump({**COMMON, "launcher": launcher}))
    ran = hetplan("launch", path, "--dry-run")
    assert ran.code == 0, ran.err


def checked(ran: Any) -> int:
    check(ran)
    return int(ran.code)


@pytest.mark.parametrize("kind", ["pipe", "folder", "loop", "nowhere", "null"])
def test_what_is_no_file(
    hetplan: Call, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetplan.files.PIPE_SECONDS", 0)
    odd, whole, plan = tmp_path / "odd", tmp_path / "job.yaml", tmp_path / "plan.json"
    whole.write_text(yaml.safe_dump({**COMMON, "launcher": {"kind": "slurm"}}))
    save_plan(plan_of(cut(5, 4, 3), tensor=[2, 2, 3], types=["A100"] * 4 + ["T4"] * 3), plan)
    if kind == "pipe":
        os.mkfifo(odd)
    elif kind == "folder":
        odd.mkdir()
    else:
        targets = {"loop": str(odd), "nowhere": "/nowhere/at/all", "null": "/dev/null"}
        odd.symlink_to(targets[kind])
    for words in (
        ("launch", odd, "--dry-run"),
        ("launch", whole, "--plan", odd, "-o", tmp_path / "a"),
    ):
        assert checked(hetplan(*words)) == 2
    into = hetplan("launch", whole, "--plan", plan, "-o", odd)
    assert checked(into) == (0 if kind == "folder" else 2)
