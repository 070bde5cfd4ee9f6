"""SPMD plans on ranks: losses and gradients of one device; `hetplan run` with local ranks and
virtual devices, and what does not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fakes.programs import NETWORKS, UNEVEN, drawn_program, every_rule, plan_of
from fakes.workloads import cluster, small, small_model
from hetplan.errors import InputError, UnsupportedError
from hetplan.files import read_json
from hetplan.formulations import family
from hetplan.formulations.hap.data import HapDecision
from hetplan.formulations.hap.pose import pose
from hetplan.planner.hap import SpmdProblem
from hetplan.plans.plan import Plan, save_plan
from hetplan.profiling.workload import Workload, make_workload
from hetplan.replays.programs import SpmdCosts
from hetplan.replays.replay import replay
from hetplan.replays.simulator.pipeline import simulate_stages
from hetplan.replays.trace import trace
from hetplan.runtime.execution.choice import engine_of
from hetplan.runtime.job import Job
from hetplan.runtime.launch.rehearsal import Rehearsal
from hetplan.solvers.registry import solve
from hetplan.solvers.run import Run

torch: Any = pytest.importorskip("torch", reason="torch is an extra of hetplan")

from fakes import strangers  # noqa: E402
from fakes.simulated import Outcome, agree, joined  # noqa: E402
from hetplan.runtime import distribute  # noqa: E402
from hetplan.runtime.engine.worker import check_job  # noqa: E402
from hetplan.runtime.launch.devices import gpus  # noqa: E402
from hetplan.runtime.launch.local import launch  # noqa: E402
from hetplan.runtime.measured import Measured  # noqa: E402
from hetplan.runtime.spmd.models import synthetic_batch, synthetic_initial  # noqa: E402
from hetplan.runtime.spmd.runs import check_runs  # noqa: E402
from hetplan.runtime.tracing.program import trace_samples  # noqa: E402
from parity.asking import run_forked  # noqa: E402
from parity.gradients import TOLERANCE  # noqa: E402
from parity.program_curves import gpt2, plan_on  # noqa: E402
from parity.programs import CASES, STAGED, WORLDS, Case, kinds_used  # noqa: E402


@cache
def small_workload() -> Workload:
    """A model of one block in fp16 on two V100 and two T4."""
    return make_workload(small_model(layers=1), cluster(), 8)


def planned(workload: Workload, method: str, steps: int) -> Plan:
    """A plan of the strategy `hap`."""
    posed = pose(workload, steps)
    result = solve(family("hap"), posed.theory.data, method, Run())
    assert isinstance(result.decision, HapDecision)
    return SpmdProblem(posed, posed, 1.0, 0.0).to_plan(result.decision)


def test_stages_by_hand() -> None:
    """Two devices: 3 and 1 s, a collective of 2 s, 1 and 4 s without one, 1 and 1 s, updates of 1
    and 2 s."""
    compute = np.array([[3.0, 1.0], [1.0, 4.0], [1.0, 1.0]])
    found = simulate_stages(
        compute, [2.0, 0.0, 0.0], backward=[False, True, True], updates=[1.0, 2.0]
    )
    assert found.seconds == 3 + 2 + 4 + 1 + 2
    assert list(found.busy) == [6.0, 8.0]
    assert (
        simulate_stages(compute, [2.0, 0.0, 3.0], updates=[1.0, 2.0]).seconds == 3 + 2 + 5 + 3 + 2
    )


def test_what_is_slept_is_what_the_simulator_predicts() -> None:
    workload = small_workload()
    for method, steps in (("dp-even", 1), ("dp-proportional", 2)):
        plan = planned(workload, method, steps)
        found = replay(plan, workload)
        rehearsal = Rehearsal.of(plan, workload, engine_of(plan), 3.0)
        assert rehearsal.seconds == pytest.approx(3 * found.seconds)
        assert [rehearsal.busy(rank) for rank in range(4)] == pytest.approx(
            3 * (found.timeline.busy - SpmdCosts.of(plan, workload).updates())
        )
        rows = {event["tid"] for event in trace(found)["traceEvents"] if "tid" in event}
        assert rows == set(range(8))


def test_a_program_is_rehearsed(tmp_path: Path) -> None:
    """A machine under load may be late, but never early; collectives are real."""
    workload = small_workload()
    plan = planned(workload, "dp-proportional", 2)
    rehearsal = Rehearsal.of(plan, workload, engine_of(plan), 10.0)
    job = Job(plan=plan, steps=2, rehearsal=rehearsal, virtual=True)
    found = Measured(job, launch(job))
    assert found.predicted is not None and found.seconds > 0.98 * found.predicted
    document = found.document()
    assert [step["loss"] for step in document["steps"]] == [None, None]
    assert "nothing is trained" in found.table().notes[-1]
    assert {event["cat"] for event in found.trace()["traceEvents"] if event["ph"] == "X"} >= {
        "collective",
        "backward",
    }
    with pytest.raises(InputError, match=r"train nothing .got '--checkpoint'"):
        check_job(replace(job, checkpoint=str(tmp_path)))


def test_the_command_runs_a_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two steps, a document, a trace, a checkpoint; then one line for a factory that returns a
    module with operators that have no rule."""
    from hetplan.cli.main import main

    save_plan(plan_on(2), tmp_path / "plan.json")
    command = ["run", str(tmp_path / "plan.json"), "--steps", "2"]
    more = [
        "--json",
        "--quiet",
        "--trace",
        str(tmp_path / "trace.json"),
        "--checkpoint",
        str(tmp_path / "kept"),
    ]
    assert main([*command, *more, "--factory", "parity.program_curves:gpt2"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["measured_seconds"] > 0 and document["predicted_seconds"] is None
    assert all(step["loss"] > 0 for step in document["steps"]) and len(document["ranks"]) == 2
    events = read_json(tmp_path / "trace.json")["traceEvents"]
    assert {"forward 0", "backward 0", "collective", "optimizer"} <= {
        event["name"] for event in events
    }
    assert (tmp_path / "kept" / "step-2" / "hetplan.json").is_file()
    assert main([*command, "--factory", "parity.cases:two"]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert told.startswith("hetplan: error: gpt2: 12 operators without a rule: aten.ge in layers.")


def test_what_does_not_fit_is_one_line() -> None:
    plan = plan_on(2)
    with pytest.raises(
        InputError, match=r"program is not for the plan's runs: tokens .got 'shape \(12, 6\)'"
    ):
        check_job(Job(plan=plan_on(3), factory="parity.program_curves:whole_batch"))
    with pytest.raises(UnsupportedError, match=r"without a rule: aten\.ge in layers\.first"):
        check_job(Job(plan=plan, factory="parity.cases:two"))
    named = plan.model_copy(update={"workload": plan.workload.model_copy(update={"model": "gpt2"})})
    with pytest.raises(
        InputError, match=r"gpt2: model does not match the plan: layer 1 .got 'block-0'"
    ):
        check_job(Job(plan=named))
    half = small()
    assert half.precision == "fp16"
    with pytest.raises(UnsupportedError, match="SPMD programs are computed in fp32"):
        check_job(Job(plan=planned(half, "dp-even", 4)))


def told(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that was written to stderr."""
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    return line


def test_distribute_takes_what_the_plan_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Programs, and modules that can be traced, for SPMD plans; modules for plans of stages."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        program = NETWORKS["gpt2"](4, 2)
        alone = HapDecision(program=drawn_program(every_rule(program, 1), 0), ratios=[[1.0]])
        plan = plan_of(every_rule(program, 1), alone)
        with pytest.raises(InputError, match="SPMD plans run single-device programs"):
            distribute(torch.nn.Linear(2, 2), plan)
        model = distribute(program, plan)
        first = model.train_step()
        optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
        optimizer.step()
        model.step = 0
        assert model.train_step() < first
        with pytest.raises(InputError, match=r"data of a run: |tokens: data of a run"):
            model.train_step(
                lambda a, b: {"tokens": np.zeros((1, 4), int), "labels": np.zeros((4, 4), int)}
            )
        stages = plan.model_copy(update={"schedule": "1f1b", "program": None})
        with pytest.raises(InputError, match=r"plans of stages run torch modules .got 'SinglePro"):
            distribute(program, stages)
        with pytest.raises(UnsupportedError, match=r"stock torch has no engine .*got 'programs'"):
            distribute(program, plan, backend="torch")
        module = strangers.perceptron()
        traced = trace_samples(module, 4).program
        alone = HapDecision(program=drawn_program(every_rule(traced, 1), 0), ratios=[[1.0]])
        loss = module(*module.batch(0, 0, 4)).item()
        own = distribute(module, plan_of(every_rule(traced, 1), alone))
        assert own.train_step() == pytest.approx(loss, rel=1e-5)
        assert "(it cannot be split: " in told(capsys)  # batch statistics
    finally:
        torch.distributed.destroy_process_group()


def test_a_modules_training_is_compared_first(capsys: pytest.CaptureFixture[str]) -> None:
    """By `distribute` and by the check of a job."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        theory = every_rule(trace_samples(strangers.Regression(), 4).program, 1)
        alone = HapDecision(program=drawn_program(theory, 0), ratios=[[1.0]])
        plan = plan_of(theory, alone)
        assert distribute(strangers.Regression(), plan).train_step() > 0
        assert capsys.readouterr().err == ""  # it was compared, and is right
        lost = "backward pass has code that a trace drops"
        with pytest.raises(UnsupportedError, match=lost):
            distribute(strangers.hooked(), plan)
        assert distribute(strangers.hooked(), plan, probe=False).train_step() > 0
        assert "is not compared with one process's (as asked for)" in told(capsys)
        job = Job(plan=plan, factory="fakes.strangers:hooked")
        with pytest.raises(UnsupportedError, match=lost):
            check_job(job)
        check_job(replace(job, probe=False))
        assert "is not compared with one process's (as asked for)" in told(capsys)
    finally:
        torch.distributed.destroy_process_group()


def in_runs(plan: Plan, runs: int) -> Plan:
    """A plan of one run with several."""
    (replica,) = plan.replicas
    (batch,) = replica.micro_batches
    batches = (batch.model_copy(update={"count": runs}),)
    rows = {"global_batch": runs * batch.samples}
    return plan.model_copy(
        update={
            "replicas": (replica.model_copy(update={"micro_batches": batches}),),
            "workload": plan.workload.model_copy(update=rows),
        }
    )


def test_several_runs_train_a_mean_over_samples_alone() -> None:
    """One run counts right what a mask leaves."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        theory = every_rule(trace_samples(strangers.masked(), 4).program, 1)
        alone = HapDecision(program=drawn_program(theory, 0), ratios=[[1.0]])
        one = plan_of(theory, alone)
        module: Any = strangers.masked()
        loss = float(module(*module.batch(0, 0, 4)).detach())
        assert distribute(strangers.masked(), one).train_step() == pytest.approx(loss)
        unequal = "its loss of a batch is not the mean of those of its parts"
        with pytest.raises(UnsupportedError, match=unequal):
            distribute(strangers.masked(), in_runs(one, 2))
        with pytest.raises(UnsupportedError, match=unequal):
            check_job(Job(plan=in_runs(one, 2), factory="fakes.strangers:masked"))
    finally:
        torch.distributed.destroy_process_group()


def weighed(y: Any, labels: Any) -> Any:
    """A mean by weights that the data say."""
    weights = labels[:, 1].square()
    return ((y - labels).square().sum(1) * weights).sum() / weights.sum()


@pytest.mark.parametrize(
    ("loss", "equal"),
    [
        (lambda y, labels: (y - labels).square().sum() / y.shape[0], True),
        (lambda y, labels: ((y - labels).square() * (labels > 0)).mean(), True),
        (lambda y, labels: (y - labels).square().sum(), False),
        (lambda y, labels: (y - labels).square().mean().sqrt(), False),
        (lambda y, labels: (y - labels)[labels > 0].square().mean(), False),
        (lambda y, labels: (y - y.mean(0) - labels).square().mean(), False),
        (weighed, False),
    ],
)
def test_a_loss_is_the_mean_of_those_of_its_parts_or_is_refused(loss: Any, *, equal: bool) -> None:
    torch.manual_seed(0)
    module = strangers.Regression(loss)
    if equal:
        assert check_runs(module, 8, None) is None
        return
    with pytest.raises(UnsupportedError, match="not the mean of those of its parts") as caught:
        check_runs(module, 8, None)
    assert "\n" not in str(caught.value)
    assert check_runs(module, 8, wanted=False) is not None


def test_synthetic_data_do_not_depend_on_the_runs() -> None:
    batch = synthetic_batch(gpt2(plan_on(2)), 3)
    whole, halves = batch(5, 0, 4), [batch(5, 0, 2), batch(5, 2, 4)]
    for name, value in whole.items():
        assert np.array_equal(value, np.concatenate([half[name] for half in halves]))
    assert np.array_equal(whole["tokens"][:, 1:], whole["labels"][:, :-1])
    assert not np.array_equal(whole["tokens"], batch(6, 0, 4)["tokens"])
    initial = synthetic_initial(3)
    assert (
        initial("a.scale", (4,)).tolist() == [1.0] * 4
        and initial("a.bias", (2, 2)).tolist() == [[0.0] * 2] * 2
    )
    assert UNEVEN and initial("w", (50, 400)).std() == pytest.approx(0.05, rel=0.1)


DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(gpus() == 0, reason="needs a GPU that torch can use")
    ),
]


@pytest.fixture(scope="module", params=DEVICES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the ranks left; on a GPU that they share, where there is one."""
    made = tmp_path_factory.mktemp("programs")
    run_forked("parity.programs", made, PARITY_DEVICE=request.param)
    return made


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """[world][rank] what each case gave."""
    return {
        w: [torch.load(folder / f"programs-{w}-{rank}.pt") for rank in range(w)] for w in WORLDS
    }


@pytest.fixture(scope="module", params=DEVICES)
def found_by_two(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, list[dict[str, Any]]]:
    """What each case of two ranks gave."""
    made = tmp_path_factory.mktemp("two")
    run_forked("parity.programs:quick", made, PARITY_DEVICE=request.param, PARITY_RANKS="2")
    return {2: [torch.load(made / f"programs-2-{rank}.pt") for rank in range(2)]}


TWO = [case for case in CASES if case.world == 2]


@pytest.mark.parametrize("case", TWO, ids=lambda case: case.name)
def test_programs_on_two_ranks_equal_one_device(
    case: Case, found_by_two: dict[int, list[dict[str, Any]]]
) -> None:
    check_case(case, found_by_two)


@pytest.mark.engine
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_programs_on_ranks_equal_one_device(
    case: Case, found: dict[int, list[dict[str, Any]]]
) -> None:
    check_case(case, found)


def check_case(case: Case, found: dict[int, list[dict[str, Any]]]) -> None:
    """The loss and every gradient are those of one device."""
    ranks, expected = [rank[case.name] for rank in found[case.world]], case.expected
    assert len({loss for loss, _ in ranks}) == 1
    assert all(set(parts) == set(expected.gradients) for _, parts in ranks)
    gradients = {
        name: joined(ranks[0][1][name][0], [parts[name][1] for _, parts in ranks])
        for name in expected.gradients
    }
    agree(Outcome(ranks[0][0], gradients), expected, TOLERANCE[case.dtype])


@pytest.mark.engine
@pytest.mark.parametrize("name", STAGED)
def test_staging_changes_nothing(name: str, found: dict[int, list[dict[str, Any]]]) -> None:
    """Copies to other buffers and back: the same numbers, bit by bit."""
    (case,) = [case for case in CASES if case.name == name]
    for rank in found[case.world]:
        (loss, parts), (again, staged) = rank[name], rank[f"staged: {name}"]
        assert loss == again and parts.keys() == staged.keys()
        for key, (dimension, values) in parts.items():
            assert dimension == staged[key][0] and torch.equal(values, staged[key][1])


@pytest.mark.engine
def test_the_cases_use_every_instruction() -> None:
    assert kinds_used() >= {
        "Run", "reduction", "All-Reduce", "Reduce-Scatter", "All-Gather", "Grouped-Broadcast",
        "All-To-All", "Slice", "Share", "Repartition", "All-Reduce gradient",
        "All-Gather factors", "Grouped-Broadcast factors",
    }  # fmt: skip
    assert {case.network for case in CASES} == {
        "vgg19",
        "vit",
        "bert",
        "bert-moe",
        "gpt2",
        "llama-blocks",
        "llama on machines",
    }
    assert any(0.0 in row for case in CASES for row in case.ratios)


@pytest.mark.engine
def test_parameters_are_sliced_where_the_program_slices_them(
    found: dict[int, list[dict[str, Any]]],
) -> None:
    """Unequal parts, none included: less is held than one copy per rank."""
    sizes = [
        [part.numel() for dimension, part in rank[case.name][1].values() if dimension is not None]
        for case in CASES
        for rank in found[case.world]
    ]
    assert any(sizes) and any(0 in row for row in sizes)


@pytest.mark.engine
def test_a_checkpoint_goes_on_under_another_program(folder: Path) -> None:
    """Other ratios, shards, ranks and runs: the second half of the same curve, which is not
    flat."""
    whole, resumed = (torch.load(folder / f"curves-{world}.pt") for world in (2, 3))
    for name, losses in whole.items():
        assert losses[-1] < 0.97 * losses[0]
        assert resumed[name] == pytest.approx(losses[len(losses) // 2 :], rel=1e-8), name
    assert set(whole) == {"sgd", "adamw"}
