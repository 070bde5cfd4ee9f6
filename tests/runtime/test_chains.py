"""What a model must offer: chains that keep the contract, and what is told of those that do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hetplan.errors import InputError, UnsupportedError

torch: Any = pytest.importorskip("torch", reason="torch is an extra of hetplan")

from torch import nn  # noqa: E402

from hetplan.runtime.engine.chain import describe, run_layer  # noqa: E402
from hetplan.runtime.engine.position import Dropout, Position, at, uniform  # noqa: E402
from parity.cases import MODELS, names_of  # noqa: E402
from parity.faulty import Pair, Picky  # noqa: E402

ROW = torch.zeros(1, 6)


def chain_of(*layers: nn.Module) -> nn.Module:
    """A ModuleDict of layers a, b, …"""
    module = nn.Module()
    module.layers = nn.ModuleDict(dict(zip("abcdef", layers, strict=False)))
    return module


@pytest.mark.parametrize(
    ("module", "names", "message"),
    [
        (lambda: chain_of(nn.Tanh(), nn.Tanh()), ["a", "c"], "layer 1 (got 'b', expected c)"),
        (
            lambda: chain_of(nn.Tanh()),
            ["a", "b"],
            "model does not match the plan (got '1 layers', expected 2)",
        ),
        (
            lambda: nn.Linear(6, 6),
            ["a"],
            "the model's loss is not one number (got 'linear of sizes [rows, ",
        ),
        (
            lambda: chain_of(Pair(), nn.Tanh(), nn.Tanh()),
            ["a", "b", "c"],
            "layer b: does not run on the meta device",
        ),
        (
            lambda: chain_of(nn.Linear(5, 5), nn.Tanh()),
            ["a", "b"],
            "layer a: does not run on the meta device",
        ),
        (
            lambda: chain_of(Picky(), nn.Tanh()),
            ["a", "b"],
            "layer a: does not run on the meta device",
        ),
    ],
)
def test_what_is_no_chain_for_the_plan_is_told(
    module: Callable[[], Any], names: list[str], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        describe(module(), names, (ROW, ROW))
    assert message in str(caught.value)


@pytest.mark.parametrize("model", MODELS)
def test_reference_models_are_chains(model: str) -> None:
    """Real and on the meta device alike; parameters shared by layers have one name."""
    made = MODELS[model]()
    batch: Any = made.batch
    chain = describe(made, names_of(model), batch(0, 0, 1))
    with torch.device("meta"):
        ghost = MODELS[model]()
    again = describe(ghost, names_of(model), batch(0, 0, 1))
    assert chain.parameters == again.parameters and chain.outputs == again.outputs
    assert len(chain.parameters) == len(list(made.parameters()))
    tied = [p.layers for p in chain.parameters.values() if len(p.layers) > 1]
    assert tied == (
        [(0, len(chain.names) - 1)]
        if model in ("gpt", "gpt-no-dropout", "narrow", "bert", "moe", "two")
        else []
    )


def test_dropout_depends_on_the_position_only() -> None:
    drop = Dropout(0.3, "here")
    x = torch.ones(6, 4, 5)
    with at(Position(seed=1, step=2, first_row=10)):
        whole = drop(x)
    with at(Position(seed=1, step=2, first_row=13)):
        assert torch.equal(drop(x[3:]), whole[3:])
        assert torch.equal(drop(x[3:, 1:3], 1, 4), whole[3:, 1:3])
    others = (Position(2, 2, 10), Position(1, 3, 10), Position(1, 2, 11))
    for other in others:
        with at(other):
            assert not torch.equal(drop(x), whole)
    assert torch.equal(drop.eval()(x), x)


def test_the_hash_is_uniform() -> None:
    """Mean, variance and neighbours of many draws."""
    drawn = uniform(12345, (400, 500), (7, 0), (0, 500), "cpu")
    assert float(drawn.min()) >= 0 and float(drawn.max()) < 1
    assert abs(float(drawn.mean()) - 0.5) < 0.003
    assert abs(float(drawn.var()) - 1 / 12) < 0.001
    a, b = drawn[:, 1:].flatten(), drawn[:, :-1].flatten()
    assert abs(float(torch.corrcoef(torch.stack((a, b)))[0, 1])) < 0.01


def test_half_precision_keeps_no_copy_of_the_weights_for_each_pass() -> None:
    """A backward pass rounds what it reads: it sees weights that were changed behind the forward
    pass, of which torch's own graph would have kept a copy for every micro-batch."""
    layer, x = torch.nn.Linear(4, 3), torch.ones(2, 4, requires_grad=True)
    passes = [run_layer(layer, torch.bfloat16, (x,)) for _ in range(2)]
    expected = 4 * layer.weight.detach().bfloat16().float().sum(0)
    layer.weight.data.mul_(2.0)
    for y in passes:
        y.sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad[0], expected, rtol=2e-2, atol=1e-2)
    assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_packed_weights_are_refused(dtype: Any) -> None:
    module = nn.Sequential(nn.Linear(6, 6))
    module[0].weight = nn.Parameter(torch.zeros(18, 1, dtype=dtype), requires_grad=False)
    with pytest.raises(UnsupportedError, match=r"0\.weight: its weights are packed in fewer bits"):
        describe(module, ["a"], (ROW, None))
