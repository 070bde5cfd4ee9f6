"""A user's own module, from the planner to ranks that train it: planned, run on two or three of
them, and compared with one process; operators without a rule are named where the plan is made."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="modules are torch's")

import hetplan as hp  # noqa: E402
from fakes import strangers  # noqa: E402
from fakes.workloads import cluster, cluster_document  # noqa: E402
from hetplan.errors import InputError, UnsupportedError  # noqa: E402
from hetplan.files import write_text  # noqa: E402
from hetplan.planner.hap import Hap, HapSettings  # noqa: E402
from hetplan.planner.workloads import traced  # noqa: E402
from hetplan.profiling.hardware.cluster import Cluster  # noqa: E402
from hetplan.profiling.workload import make_workload  # noqa: E402
from hetplan.runtime.job import Job  # noqa: E402
from hetplan.runtime.launch.local import launch  # noqa: E402
from hetplan.runtime.measured import Measured  # noqa: E402
from hetplan.runtime.tracing.layers import trace as trace_layers  # noqa: E402
from hetplan.runtime.tracing.program import plannable, trace_samples  # noqa: E402
from hetplan.solvers.run import Run  # noqa: E402
from quick import rest_wide  # noqa: E402

STEPS, RATE = 3, 0.05


def devices(slow: int) -> Cluster:
    """One V100, and so many T4."""
    links = {"intra_node_gbit_per_s": 80.0, "network_gbit_per_s": 100.0}
    fast = {"device": "V100-SXM2-16GB", "devices": 1, **links}
    return cluster(nodes=[fast, {"device": "T4", "devices": slow, **links}])


def alone(module: Any, batch: int) -> list[float]:
    """Losses of one process."""
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = module(*module.batch(step, 0, batch))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("make", "slow", "steps", "segments"),
    [
        pytest.param(strangers.resnet, 2, 1, 2, marks=pytest.mark.wide),
        pytest.param(strangers.vit, 1, 2, 1, marks=pytest.mark.wide),
        pytest.param(strangers.perceptron, 2, 1, 1, marks=pytest.mark.engine),
    ],
)
def test_a_module_is_planned_and_trains_as_on_one_process(
    make: Callable[[], Any], slow: int, steps: int, segments: int
) -> None:
    """Also where a batch norm's samples are spread over the ranks, unequally, and in segments."""
    planning = hp.plan(
        make(), devices(slow), global_batch=10, precision="fp32", strategies=["hap"], threads=1,
        time_limit=600.0,
        settings={"hap": {"seconds": 600.0, "steps": steps, "segments": segments}},
    )  # fmt: skip
    plans = {c.label: c.plan for c in planning.candidates if c.plan is not None}
    assert planning.best is not None and {"auto", "dp-proportional"} <= set(plans)
    plan = planning.best.plan if make is strangers.vit else plans["dp-proportional"]
    assert plan is not None and plan.program is not None and plan.world_size == 1 + slow
    assert len(plan.program.ratios) == segments
    name = f"fakes.strangers:{make.__name__}"
    job = Job(
        plan=plan, steps=STEPS, factory=name, optimizer="sgd", learning_rate=RATE, device="cpu",
        hang_seconds=300,
    )  # fmt: skip
    losses = Measured(job, launch(job)).losses
    # a batch norm's statistics are those of one run
    expected = alone(make(), 10) if steps == 1 else accumulated(make(), 10, steps)
    assert list(losses.values()) == pytest.approx(expected, rel=2e-5)


def accumulated(module: Any, batch: int, runs: int) -> list[float]:
    """Losses of one process that takes each batch in several runs."""
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    losses, each = [], batch // runs
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = [module(*module.batch(step, r * each, (r + 1) * each)) for r in range(runs)]
        (sum(parts) / runs).backward()
        optimizer.step()
        losses.append(sum(part.item() for part in parts) / runs)
    return losses


@pytest.mark.engine
def test_the_commands_take_a_factory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plan and run; then what has no rule, by name and place, and what does not go together. HAP's
    A*, which takes seconds, is left out."""
    from hetplan.cli.main import main

    monkeypatch.setattr(Hap, "methods", [m for m in Hap.methods if not m.paper])
    document = cluster_document()
    for node in document["nodes"]:
        node["devices"] = 1
    write_text(tmp_path / "cluster.yaml", json.dumps(document))
    on = ["--cluster", str(tmp_path / "cluster.yaml"), "--global-batch", "12", "--json", "-q"]
    limits = ["--set", "hap.seconds=600", "--time-limit", "600"]
    plan = ["plan", *on, "--strategies", "hap", *limits, "--precision"]
    file = str(tmp_path / "plan.json")
    made = ["fp32", "--factory", "fakes.strangers:perceptron", "-o", file]
    assert main([*plan, *made]) == 0
    assert json.loads(capsys.readouterr().out)["workload"]["model"] == "fakes.strangers:perceptron"
    run = ["run", file, "--steps", "1", "--json", "-q", "--device", "cpu", "--factory"]
    assert main([*run, "fakes.strangers:perceptron"]) == 0
    loss = json.loads(capsys.readouterr().out)["steps"][0]["loss"]
    module = strangers.perceptron()
    assert loss == pytest.approx(module(*module.batch(0, 0, 12)).item(), rel=1e-5)
    assert main([*run, "fakes.strangers:strange"]) == 2
    assert "aten.softplus in network.activation: no rule" in capsys.readouterr().err
    assert main([*plan, "fp32", "--factory", "fakes.strangers:strange"]) == 1
    for candidate in json.loads(capsys.readouterr().out)["candidates"]:
        assert candidate["plan"] is None
        said = "1 operator without a rule: aten.softplus in network.activation"
        assert said in candidate["message"]
    for more, words in (
        (["fp16,fp32", "--factory", "fakes.strangers:strange"], "planned in one precision"),
        (["fp32"], "missing option '--model'"),
    ):
        assert main([*plan, *more]) == 2
        assert words in capsys.readouterr().err


def test_modules_have_one_precision_and_data() -> None:
    with pytest.raises(InputError, match="planned in one precision"):
        hp.plan(strangers.vit(), devices(1), global_batch=4, precision="auto")
    with pytest.raises(InputError, match="module has no data"):
        hp.plan(torch.nn.Linear(2, 2), devices(1), global_batch=4, precision="fp32")


def test_several_runs_that_would_train_otherwise_are_not_planned() -> None:
    """One run counts right what a mask leaves, and is planned."""
    on = make_workload(traced(strangers.masked(), "fp32"), devices(1), 4)
    with pytest.raises(UnsupportedError, match="not the mean of those of its parts, which several"):
        Hap(settings=HapSettings(steps=2)).pose(on, Run())
    (problem,) = Hap(settings=HapSettings(steps=1)).pose(on, Run())
    assert problem.posed.runs == 1


def regression() -> Any:
    """A mean of squared errors of labels that count."""

    def loss(y: Any, labels: Any) -> Any:
        counted = labels > 0
        return ((y - labels).square() * counted).sum() / counted.sum().item()

    return strangers.Regression(loss)


def test_a_number_that_item_takes_is_traced_and_a_branch_on_it_refused() -> None:
    same = trace_layers(strangers.masked(), name="mine", precision="fp32")
    found = trace_layers(regression(), name="mine", precision="fp32")
    assert found.layers[0].params == same.layers[0].params == 21
    branching = strangers.Regression(lambda y, x: y.mean() if x.sum().item() > 0 else y.sum())
    with pytest.raises(UnsupportedError, match=r"values of the data, at test_hap_modules.py:\d+"):
        trace_layers(branching, name="mine", precision="fp32")


@pytest.mark.parametrize(
    "make", rest_wide([strangers.perceptron, strangers.vit, strangers.resnet, strangers.chain], 1)
)
def test_programs_have_the_layers_of_the_profile(make: Callable[[], Any]) -> None:
    """Operators between submodules count to the layer that ran last, those before the first to
    it; all parameters are in."""
    module = make()
    traced = trace_layers(module, name="mine", precision="fp32")
    model = plannable(module, traced)
    assert model.spec.program is not None
    program = model.spec.program(6)
    assert program is model.spec.program(6) and program.samples == 6
    layers = [layer.name for layer in model.layers]
    own = list(dict.fromkeys(node.layer for node in program.computations))
    assert own == [name for name in layers if name in own] and len(own) >= len(layers) - 2
    assert sum(p.elements for p in program.parameters) == model.params


def test_a_chains_loss_is_the_mean_over_its_targets() -> None:
    """Its last layer gives the sum."""
    from fakes.simulated import reference

    module = strangers.chain().double()
    x, targets = module.batch(0, 0, 5)
    traced = trace_samples(Doubled(module), 5)
    loss = reference(traced.program, traced.values(Doubled(module), (x.double(), targets))).loss
    whole = torch.nn.functional.cross_entropy(
        torch.nn.functional.linear(module[1](module[0](x.double())), *module[2].parameters()),
        targets,
    )
    assert loss == pytest.approx(whole.item(), rel=1e-12)


class Doubled(torch.nn.Sequential):
    """A chain whose inputs are in double precision."""

    def __init__(self, chain: Any) -> None:
        super().__init__(*chain)
        self.chain = [chain]

    def batch(self, step: int, first: int, last: int) -> tuple[Any, Any]:
        """These rows."""
        x, targets = self.chain[0].batch(step, first, last)
        return x.double(), targets
