"""Modules as research code writes them are trained as one process trains them, or refused in one
line."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is an extra of hetplan")

from torch.nn import functional as F  # noqa: E402

from fakes.research import LAYERS, MODULES, NOISY, RIGHT, made  # noqa: E402
from hetplan.cli.main import main  # noqa: E402
from hetplan.errors import InputError, UnsupportedError  # noqa: E402
from hetplan.runtime import distribute  # noqa: E402
from hetplan.runtime.engine.chain import describe  # noqa: E402
from hetplan.runtime.engine.distributed import example_of  # noqa: E402
from hetplan.runtime.engine.probe import check_probe  # noqa: E402
from hetplan.runtime.tracing.draws import Alike, draws, may_draw  # noqa: E402
from hetplan.runtime.tracing.split import LAYER  # noqa: E402
from parity.asking import refused, run_forked  # noqa: E402

EXACT = 1e-9
# One of each kind, for the default layer.
QUICK = ("masked gradient", "normed", "reentrant", "annealed", "diffusion")


def cases() -> list[Any]:
    """All modules; those that are not quick are of the layer `engine`."""
    return [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.engine) for name in MODULES
    ]


def verdict(module: Any, chain: Any, example: Any) -> str:
    """What hetplan says of a module: `RIGHT`, or its one line."""
    try:
        note = check_probe(module, chain, example)
    except UnsupportedError as error:
        return str(error)
    return note or RIGHT


@pytest.mark.parametrize("name", cases())
def test_modules_are_right_or_refused(name: str) -> None:
    _, expected = MODULES[name]
    module = made(name)
    example = example_of(module)
    try:
        chain: Any = describe(module, LAYERS, example)
    except UnsupportedError as error:
        found = str(error)
    else:
        found = verdict(module, chain, example)
        drawing = [node for node in chain.source.nodes if draws(node)]
        # numbers that every rank read as data would be others on each
        assert all(chain.source.kinds[node] == LAYER for node in drawing)
        refused_for_more = name in ("drawn mixup", "seeded")
        assert bool(drawing) == (expected == NOISY) or refused_for_more
        # ranks seed the generators for these layers alone
        assert any(chain.drawing) == bool(drawing)
    assert "\n" not in found
    assert found == RIGHT if expected in (RIGHT, NOISY) else re.search(expected, found), found


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], list[Any]]:
    """Name of a module and of a plan -> [rank] the loss and the gradients that it told."""
    folder: Path = tmp_path_factory.mktemp("research")
    run_forked("parity.research", folder)
    told: dict[tuple[str, str], list[Any]] = {}
    for file in sorted(folder.glob("told-*.pt")):
        for key, value in torch.load(file).items():
            told.setdefault(key, []).append(value)
    return told


def gathered(ranks: list[Any]) -> tuple[float, dict[str, Any]]:
    """Loss and gradients of all ranks."""
    losses = {loss for loss, _ in ranks}
    assert len(losses) == 1
    parts = [part for _, of_rank in ranks for part in of_rank]
    return losses.pop(), dict(parts)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        (name, plan)
        for name, (_, kind) in MODULES.items()
        for plan in ("replicas", "pipeline")
        if kind == RIGHT or (kind == NOISY and plan == "pipeline")
    ],
)
def test_ranks_have_the_gradients_of_one_process(name: str, plan: str, told: Any) -> None:
    """Of one rank with the same micro-batches, where the module draws numbers."""
    from parity.research import alone

    loss, gradients = gathered(told[name, plan])
    _, kind = MODULES[name]
    expected, expected_gradients = alone(name) if kind == RIGHT else gathered(told[name, "one"])
    assert loss == pytest.approx(expected, rel=EXACT)
    for parameter, gradient in expected_gradients.items():
        got = gradients.get(parameter, torch.zeros_like(gradient))
        limit = EXACT * float(gradient.abs().max()) + 1e-14
        assert float((got - gradient).abs().max()) <= limit, parameter


def test_code_that_is_not_known_may_draw() -> None:
    graph = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.ReLU()))
    assert may_draw(graph)  # it calls a module, which is not a graph
    assert may_draw(torch.nn.ReLU()) and not may_draw(torch.nn.ModuleList())


def test_the_module_is_as_before() -> None:
    module: Any = made("cached")
    module.blocks[0].eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    example = example_of(module)
    chain = describe(module, LAYERS, example)
    generators = random.getstate(), torch.get_rng_state()
    assert check_probe(module, chain, example) is None
    assert random.getstate() == generators[0]
    assert torch.equal(torch.get_rng_state(), generators[1])
    assert torch.get_default_dtype() == torch.float32
    assert module.positions == {} and module.training and not module.blocks[0].training
    for name, value in module.state_dict().items():
        assert value.dtype == before[name].dtype and torch.equal(value, before[name])
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.equal(chain.layers[0].get_parameter("embed.weight"), before["embed.weight"])


def test_what_is_not_compared_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    module = made("mixup")
    example = example_of(module)
    chain = describe(module, LAYERS, example)
    note = check_probe(module, chain, example, wanted=False)
    assert note is not None and "(as asked for)" in note and "not known" in note
    monkeypatch.setattr("hetplan.runtime.engine.probe.LARGE", 10)
    note = check_probe(module, chain, example)
    assert note is not None and "parameters" in note and "\n" not in note
    with pytest.raises(UnsupportedError, match="samples influence each other"):
        check_probe(module, chain, example, wanted=True)


DRAWING: dict[str, Callable[[int], Any]] = {
    "uniform": lambda rows: torch.rand(rows, 3),
    "like": lambda rows: torch.randn_like(torch.ones(rows, 3)),
    "second dimension": lambda rows: torch.rand(2, rows, 3).movedim(1, 0),
    "whole": lambda rows: torch.randint(0, 10, (rows,)),
    "in place": lambda rows: torch.ones(rows, 5).bernoulli_(0.6),
    "events": lambda rows: torch.bernoulli(torch.full((rows, 4), 0.3)),
    "dropout": lambda rows: F.dropout(torch.ones(rows, 6), 0.3),
    "gumbel": lambda rows: F.gumbel_softmax(torch.ones(rows, 3)),
    "beta": lambda rows: torch.distributions.Beta(torch.ones(rows), 2.0).sample(),
    "choices": lambda rows: torch.multinomial(torch.rand(rows, 5), 2),
    "poisson": lambda rows: torch.poisson(torch.full((rows, 2), 5.0)),
    "log normal": lambda rows: torch.empty(rows, 2).log_normal_(),
    "attention": lambda rows: F.scaled_dot_product_attention(
        *[torch.ones(rows, 2, 3, 4)] * 3, dropout_p=0.5
    ),
}


@pytest.mark.parametrize("name", DRAWING)
def test_rows_get_the_same_numbers_however_many_are_drawn(name: str) -> None:
    with Alike():
        alone, beside = DRAWING[name](1), DRAWING[name](3)
    assert all(torch.equal(alone[0], row) for row in beside)


@pytest.fixture
def single(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_the_modules_own_parameters_are_not_stepped(single: None) -> None:
    from parity.research import PLANS

    module = made("plain")
    before = torch.optim.AdamW(module.parameters(), lr=0.1)
    model: Any = distribute(module, PLANS["one"])
    behind = torch.optim.SGD(module.parameters(), lr=0.1)
    own = model.optimizer(torch.optim.AdamW, lr=0.1)
    model.train_step()
    model.state_dict()  # a copy: the module's own parameters do not train behind it either
    for optimizer in (before, behind):
        with pytest.raises(InputError, match=r"embed.weight: the optimizer has the module's own"):
            optimizer.step()
    own.step()
    module.head.requires_grad_(False)
    with pytest.raises(InputError, match=r"head.weight: a parameter is frozen or unfrozen behind"):
        model.train_step()
    module.head.requires_grad_(True)
    model.train_step()
    model.gather()
    behind.step()  # the module has its trained weights


def test_a_loss_that_depends_on_the_ranks_is_refused(single: None) -> None:
    from parity.research import PLANS

    for ask in ("get_world_size", "get_rank"):
        module = made("plain")
        loss = module.loss
        module.loss = lambda x, y, loss=loss, ask=ask: (
            loss(x, y) * (1 + getattr(torch.distributed, ask)())
        )
        with pytest.raises(UnsupportedError, match=rf"{ask}\(\) at test_probe.py:\d+: its forward"):
            distribute(module, PLANS["one"])


@pytest.mark.parametrize(("name", "alone"), [("RANK", "0"), ("SLURM_NTASKS", "1")])
def test_a_loss_that_depends_on_the_environments_ranks_is_refused(name: str, alone: str) -> None:
    module = made("plain")
    loss = module.loss
    module.loss = lambda x, y: loss(x, y) * (1 + int(os.environ.get(name, alone)))
    example = example_of(module)
    before = os.environ.get(name)
    refusal = verdict(module, describe(module, LAYERS, example), example)
    assert "another loss where the environment tells another rank" in refusal
    assert "\n" not in refusal
    assert os.environ.get(name) == before


@pytest.mark.engine
def test_plans_are_refused_for_what_would_train_otherwise(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["plan", "--factory", "fakes.research:mixup", "--cluster", "home", "--global-batch", 8]
    words += ["--precision", "fp32", "--strategies", "poplar", "-q", "-o", tmp_path / "plan.json"]
    line = refused(capsys, *words)
    assert "Mixup, loss: samples influence each other" in line and "--no-probe" in line
    assert main(list(map(str, [*words, "--no-probe"]))) == 0
    capsys.readouterr()
    run = ["run", tmp_path / "plan.json", "--factory", "fakes.research:mixup", "--device", "cpu"]
    assert "samples influence each other" in refused(capsys, *run, "--steps", 1, "-q")
