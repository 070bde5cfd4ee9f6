"""Modules as research code writes them are trained as one process trains them, or refused in one
line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is an extra of hetplan")

from fakes.research import LAYERS, MODULES, NOISY, RIGHT, made  # noqa: E402
from hetplan.errors import UnsupportedError  # noqa: E402
from hetplan.runtime.engine.chain import describe  # noqa: E402
from hetplan.runtime.engine.distributed import example_of  # noqa: E402
from hetplan.runtime.engine.probe import check_probe, probe  # noqa: E402
from hetplan.runtime.tracing.module_state import ModuleState  # noqa: E402
from parity.asking import run_forked  # noqa: E402
from parity.device import default_type  # noqa: E402

EXACT = 1e-9
# One of each kind, for the default layer.
QUICK = ("mixup", "masked gradient", "reentrant", "annealed", "diffusion", "python noise")


def cases() -> list[Any]:
    """All modules; those that are not quick are of the layer `engine`."""
    return [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.engine) for name in MODULES
    ]


def verdict(name: str, dtype: str) -> str:
    """What hetplan says of a module: `RIGHT`, or its one line."""
    with default_type(dtype):
        module = made(name)
        example = example_of(module)
        try:
            assert check_probe(module, describe(module, LAYERS, example), example) is None
        except UnsupportedError as error:
            assert "\n" not in str(error)
            return str(error)
    return RIGHT


@pytest.mark.parametrize("name", cases())
def test_modules_are_right_or_refused(name: str) -> None:
    _, expected = MODULES[name]
    found = verdict(name, "float32")
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
