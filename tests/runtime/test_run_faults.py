"""What happens when a rank dies, hangs or fails: one line that names it, no process left, an exit
code."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

torch: Any = pytest.importorskip("torch", reason="torch is an extra of hetplan")

from fakes.rehearsals import plan as rehearsal_plan  # noqa: E402
from fakes.workloads import cluster_document, small  # noqa: E402
from hetplan.plans.plan import load_plan, save_plan  # noqa: E402
from hetplan.plans.templates import ReadyTemplates, TemplateStage  # noqa: E402
from hetplan.profiling.models.operators import DEFAULT_STACK  # noqa: E402
from hetplan.runtime.engine.models import called  # noqa: E402
from parity.asking import ENVIRONMENT, Answers, latest, losses, request, served  # noqa: E402
from parity.cases import Case, R, S  # noqa: E402
from parity.faulty import PLACE, PLAN  # noqa: E402


def test_a_factory_may_lie_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a shell calls `hetplan`, whose script lies elsewhere."""
    (tmp_path / "factory_at_hand.py").write_text("def build(plan):\n    return 'made'\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    assert called("factory_at_hand:build", None) == "made"


BAD = {
    "killed": "was killed by SIGKILL",
    "stopped": "hangs; no sign of life for ",
    "stuck": "hangs; at forward of chunk 0, micro-batch 0 for ",
    "frozen": "hangs; no sign of life for ",
    "asleep": "hangs; at forward of chunk 0, micro-batch 0 for ",
    "hungry": "out of memory",
    "wrong": "KeyError: 'no such key'",
}


def elastic(folder: Path, cluster: Path) -> list[dict[str, Any]]:
    """Two nodes, of which one is lost at the third step, with a template for the other; and the
    same run without a loss."""
    file, halves = folder / "four.json", ((0, 6), (6, 14))
    stages = [TemplateStage(first=a, last=b, type="V100-SXM2-16GB", devices=1) for a, b in halves]
    ready = ReadyTemplates(failures=0, samples=1, pipelines=[stages])
    plan = rehearsal_plan("four stages, even", small(stack=DEFAULT_STACK))
    save_plan(plan.model_copy(update={"templates": ready}), file)
    (folder / "killed already").touch()
    common = ("run", file, "--factory", "parity.faulty:unlucky", "--steps", 5, "--cluster", cluster)
    kept = ("--elastic", "--every", 2, "--json", "--checkpoint")
    return [
        request(name, *common, *kept, folder / name,
                environment={"KILL_AT": "2:80", "KILLED": str(folder / killed)})
        for name, killed in (("whole", "killed already"), ("elastic", "killed now"))
    ]  # fmt: skip


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """One run for every fault, all at the same time: what hangs waits, it does not compute."""
    folder = tmp_path_factory.mktemp("faults")
    names = ("plan.json", "two.json", "single.json", "cluster.yaml", "old")
    file, two, single, cluster, old = (folder / name for name in names)
    save_plan(PLAN, file)
    save_plan(rehearsal_plan("data parallel, shares by speed", small(stack=DEFAULT_STACK)), two)
    save_plan(Case("single", "two", [R([S((0, 2))], [(1, 2)])]).plan, single)
    cluster.write_text(yaml.safe_dump(cluster_document()))
    (old / "step-4").mkdir(parents=True)
    (old / "step-4" / "hetplan.json").write_text("{}")
    model = (file, "--factory", "parity.cases:two")
    busy = ("--hang-after", 2, "--steps", 1)
    endless = ("--steps", 100000, "--checkpoint")
    virtual = ("--cluster", cluster, "--virtual", "--steps", 3)
    asked = [
        *(
            request(fault, "run", file, "--factory", f"parity.faulty:{fault}", "--quiet")
            for fault in BAD
        ),
        *(
            request(name, "run", file, "--factory", f"parity.faulty:{name}")
            for name in ("short", "nothing")
        ),
        *(
            request(sent.name, "run", *model, *endless, folder / sent.name, signal=int(sent))
            for sent in (signal.SIGINT, signal.SIGTERM)
        ),
        request("laborious", "run", file, "--factory", "parity.faulty:laborious", *busy),
        request("slow", "run", two, "--factory", "parity.faulty:slow", *virtual),
        request("mixed", "run", *model, "--checkpoint", old),
        *elastic(folder, cluster),
    ]
    torchrun = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        alone = (single, "--factory", "parity.faulty:alone", "--hang-after", 1)
        for name, arguments, changed in (
            ("port", model, {"MASTER_PORT": port}),
            ("world", model, {"WORLD_SIZE": "3", "MASTER_PORT": port}),
            ("alone", alone, {"WORLD_SIZE": "1", "MASTER_PORT": "0"}),
        ):
            environment = torchrun | changed
            asked.append(request(name, "run", *arguments, environment=environment))
        answers_by_name = served(asked, folder, width=len(asked))
    return answers_by_name | {"folder": {"path": str(folder)}, "port at": {"port": port}}


@pytest.mark.engine
@pytest.mark.parametrize("fault", BAD)
def test_a_rank_that_ends_badly_is_named_and_nothing_is_left(fault: str, answers: Answers) -> None:
    answer = answers[fault]
    assert (answer["code"], answer["left"]) == (1, False)
    assert answer["err"].startswith(f"hetplan: error: {PLACE}: ") and BAD[fault] in answer["err"]
    assert answer["err"].count("\n") == 1


@pytest.mark.engine
def test_a_first_pass_that_computes_for_long_is_no_fault(answers: Answers) -> None:
    assert answers["laborious"]["code"] == 0, answers["laborious"]["err"]


@pytest.mark.engine
def test_a_run_goes_on_without_a_lost_node(answers: Answers) -> None:
    """Replanned, resumed, and the losses of a run that lost nothing."""
    answer, whole = answers["elastic"], json.loads(answers["whole"]["out"])
    assert (answer["code"], answers["whole"]["code"]) == (0, 0), answer["err"]
    answers_by_name = json.loads(answer["out"])
    (lost,) = answers_by_name["lost_nodes"]
    assert (lost["node"], lost["step"], whole["lost_nodes"]) == (1, 2, [])
    assert (
        lost["error"].startswith("rank 2 (replica 0, stage 2,")
        and "was killed by SIGKILL" in lost["error"]
    )
    folder = Path(answers["folder"]["path"]) / "elastic"
    again = load_plan(folder / "plan-without-node1.json")
    assert set(again.ranks) == {0, 1} and len(answers_by_name["ranks"]) == 2
    assert again.origin == "ditto/templates" and again.templates is not None
    assert [s.layers for r in again.replicas for s in r.stages] == [[(0, 6)], [(6, 14)]]
    assert [step["step"] for step in answers_by_name["steps"]] == list(range(5)) and latest(
        folder
    ) == 5
    expected = [step["loss"] for step in whole["steps"]]
    assert [step["loss"] for step in answers_by_name["steps"]] == pytest.approx(expected, rel=1e-4)
    assert "hetplan: lost node1: planning without\n" in answer["err"]
    assert "going on from step 2 with" in answer["err"]


@pytest.mark.engine
def test_a_slow_rank_is_no_fault_and_is_named(answers: Answers) -> None:
    answer = answers["slow"]
    assert answer["code"] == 0, answer["err"]
    place = (
        "rank 1 (replica 1, stage 0, row group 0, tensor rank 0; device 1, V100-SXM2-16GB "
        "on node 0)"
    )
    assert f"slow: {place} took" in answer["out"]


@pytest.mark.engine
def test_a_model_that_does_not_match_is_told_before_anything_starts(answers: Answers) -> None:
    assert answers["short"]["err"].startswith("hetplan: error: model does not match the plan")
    assert "--factory cannot be imported" in answers["nothing"]["err"]
    assert {answers[name]["code"] for name in ("short", "nothing")} == {2}


@pytest.mark.engine
def test_checkpoints_of_two_runs_do_not_mix(answers: Answers) -> None:
    assert answers["mixed"]["code"] == 2
    assert (
        "folder holds checkpoints (got 'step-4', expected an empty one, or --resume"
        in answers["mixed"]["err"]
    )


@pytest.mark.engine
def test_a_port_in_use_and_another_world_size_are_one_line(answers: Answers) -> None:
    assert {answers[name]["code"] for name in ("port", "world")} == {2}
    place = f"127.0.0.1:{answers['port at']['port']}"
    assert (
        answers["port"]["err"]
        .splitlines()[-1]
        .startswith(f"hetplan: rank 0: cannot meet at {place}: ")
    )
    line = "hetplan: rank 0: faults: number of processes (got 3, expected 4, one per device)\n"
    assert answers["world"]["err"] == line


@pytest.mark.engine
def test_a_rank_that_torchrun_started_notices_that_it_hangs(answers: Answers) -> None:
    answer = answers["alone"]
    assert answer["code"] == 1
    place = "rank 0 (replica 0, stage 0, row group 0, tensor rank 0; device 0, A on node 0)"
    assert answer["err"].startswith(
        f"hetplan: {place}: hangs; at forward of chunk 0, micro-batch 0 for "
    )
    assert answer["err"].count("\n") == 1


@pytest.mark.engine
def test_the_keyboard_and_sigterm_end_a_run(answers: Answers) -> None:
    """Ctrl-C at once; SIGTERM behind the step, with a checkpoint."""
    folder = Path(answers["folder"]["path"])
    assert (answers["SIGINT"]["code"], answers["SIGTERM"]["code"]) == (130, 0)
    assert not list((folder / "SIGINT").glob("step-*"))
    assert len(list((folder / "SIGTERM").glob("step-*"))) == 1


def interrupted(seeds: range, folder: Path, width: int) -> tuple[dict[int, float], list[Answers]]:
    """Losses of a whole run; and by seed one with a rank killed at a random moment, and one that
    goes on from there."""
    file = folder / "plan.json"
    save_plan(PLAN, file)
    common = ("run", file, "--factory", "parity.faulty:unlucky")
    kept = {seed: ("--checkpoint", folder / f"kept-{seed}", "--every", 2) for seed in seeds}
    nobody = {"KILL_AT": "0:0"}
    first = [request("whole", *common, "--steps", 6, environment=nobody)]
    for seed in seeds:
        rng = Random(seed)
        at = {"KILL_AT": f"{rng.randint(0, 3)}:{rng.randint(3, 8)}"}
        first.append(request(f"before {seed}", *common, "--steps", 6, *kept[seed], environment=at))
    answers_by_name = served(first, folder, width)
    second = []
    for seed in seeds:
        saved = latest(folder / f"kept-{seed}")
        more = (*kept[seed], "--steps", 6 - saved, *(["--resume"] if saved else []))
        second.append(request(f"after {seed}", *common, *more, environment=nobody))
    answers_by_name |= served(second, folder, width)
    pairs = [
        {"before": answers_by_name[f"before {seed}"], "after": answers_by_name[f"after {seed}"]}
        for seed in seeds
    ]
    return losses(answers_by_name["whole"]), pairs


@pytest.mark.parametrize(
    "count",
    [pytest.param(5, marks=pytest.mark.engine), pytest.param(30, marks=pytest.mark.wide)],
)
def test_only_the_steps_since_the_last_checkpoint_are_lost(count: int, tmp_path: Path) -> None:
    """What goes on has the losses of the whole run."""
    whole, pairs = interrupted(range(count), tmp_path, 2)
    assert sorted(whole) == list(range(6))
    for pair in pairs:
        before, after = losses(pair["before"]), losses(pair["after"])
        assert (pair["before"]["code"], pair["after"]["code"]) == (1, 0), pair
        assert min(after) >= max(before, default=-1) // 2 * 2 - 2 and max(after) == 5
        for step, loss in [*before.items(), *after.items()]:
            assert loss == pytest.approx(whole[step], rel=1e-4), step


@pytest.mark.engine
def test_no_rank_survives_whoever_started_it(tmp_path: Path) -> None:
    """The parent is killed outright: its ranks notice that nobody listens."""
    save_plan(PLAN, tmp_path / "plan.json")
    more = ("--factory", "parity.faulty:stuck", "--hang-after", "100", "--steps", "1000")
    running = subprocess.Popen(
        [sys.executable, "-m", "hetplan", "run", str(tmp_path / "plan.json"), *more],
        env=ENVIRONMENT, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert running.stderr is not None
    assert running.stderr.readline().startswith("hetplan: step 0")
    running.kill()
    running.wait()
    for _ in range(6000):
        try:
            os.killpg(running.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("ranks are left")
