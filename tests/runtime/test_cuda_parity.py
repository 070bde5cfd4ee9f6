"""The plans of the parity tests on GPUs: several ranks on one through the host's memory, or each on
its own by NCCL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is an extra of hetplan")

from hetplan.runtime.devices import gpus  # noqa: E402
from parity.asking import run_forked  # noqa: E402
from parity.cases import CASES, Case  # noqa: E402
from parity.curves import OPTIMIZERS, PLANS, STEPS  # noqa: E402
from parity.gradients import STAGED, assembled, single  # noqa: E402
from parity.halves import PRECISIONS, WORLDS, chosen  # noqa: E402

GPUS = gpus()
pytestmark = pytest.mark.skipif(GPUS == 0, reason="needs a GPU that torch can use")

TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
LOSS = {"bf16": 5e-3, "fp16": 5e-4}
GRADIENTS = {"bf16": 2e-2, "fp16": 2.5e-3}
WAYS = [
    pytest.param(("cuda", 8), id="one GPU, staged"),
    pytest.param(
        ("cuda each", min(GPUS, 8)),
        id="a GPU each, NCCL",
        marks=pytest.mark.skipif(GPUS < 2, reason="needs two GPUs"),
    ),
]
Found = dict[int, list[dict[Any, Any]]]


@pytest.fixture(scope="module", params=WAYS)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """World size -> [rank] -> case -> (loss, fragments)."""
    device, most = request.param
    folder = tmp_path_factory.mktemp("cuda")
    run_forked("parity.gradients", folder, PARITY_DEVICE=device, PARITY_RANKS=str(most))
    return {
        world: [torch.load(folder / f"found-{world}-{rank}.pt") for rank in range(world)]
        for world in sorted({case.world for case in CASES})
        if world <= most
    }


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_loss_and_gradients_are_those_of_one_cpu(case: Case, found: Found) -> None:
    """Every kind of plan, dropout included: masks are the same on every device."""
    if case.world not in found:
        pytest.skip(f"needs {case.world} GPUs")
    tolerance = TOLERANCE[case.dtype]
    losses = [rank[case.name][0] for rank in found[case.world]]
    fragments = [f for rank in found[case.world] for f in rank[case.name][1]]
    loss, gradients = single(case)
    assert len(set(losses)) == 1
    assert losses[0] == pytest.approx(loss, rel=tolerance)
    for name, gradient in assembled(gradients, fragments, tolerance).items():
        expected = gradients[name]
        error = float((gradient - expected).norm())
        assert error <= tolerance * max(float(expected.norm()), 1e-3), f"{name}: {error}"


@pytest.mark.parametrize("name", STAGED)
def test_the_ways_agree(name: str, found: Found) -> None:
    """Through the host's memory or not, with lanes or tags."""
    (case,) = [case for case in CASES if case.name == name]
    for rank in found.get(case.world, []):
        (loss, fragments), (again, staged) = rank[name], rank[f"staged: {name}"]
        tolerance = TOLERANCE[case.dtype]
        assert again == pytest.approx(loss, rel=tolerance)
        for one, other in zip(fragments, staged, strict=True):
            assert torch.allclose(one["values"], other["values"], rtol=tolerance, atol=tolerance)


def loaded(folder: Path, name: str) -> dict[tuple[str, str], list[float]]:
    """What the ranks of all world sizes found."""
    curves: dict[tuple[str, str], list[float]] = {}
    for file in folder.glob(f"{name}-*.pt"):
        curves |= torch.load(file)
    return curves


def test_training_on_gpus_goes_on_anywhere(tmp_path: Path) -> None:
    """Any two plans give one loss curve; checkpoints of GPUs are read under other plans, on GPUs
    and on CPUs."""
    run_forked("parity.curves", tmp_path, PARITY_DEVICE="cuda")
    whole = loaded(tmp_path, "curves")
    assert {plan for plan, _ in whole} == set(PLANS)
    for optimizer in OPTIMIZERS:
        first, *others = [curve for (_, used), curve in sorted(whole.items()) if used == optimizer]
        for curve in others:
            assert curve == pytest.approx(first, rel=1e-8)
    for device in ("cuda", "cpu"):
        run_forked("parity.resumed", tmp_path, PARITY_DEVICE=device)
        for key, losses in loaded(tmp_path, "resumed").items():
            assert losses == pytest.approx(whole[key][STEPS // 2 :], rel=1e-8), (device, key)


def test_half_precision_is_within_its_rounding(tmp_path: Path) -> None:
    run_forked("parity.halves", tmp_path, PARITY_DEVICE="cuda")
    for case in chosen():
        ranks = [
            torch.load(tmp_path / f"found-{case.world}-{rank}.pt") for rank in range(case.world)
        ]
        assert case.world in WORLDS
        loss, gradients = single(case)
        size = sum(float(g.norm()) ** 2 for g in gradients.values()) ** 0.5
        for precision in PRECISIONS:
            assert ranks[0][case.name, precision][0] == pytest.approx(loss, rel=LOSS[precision])
            parts = [f for rank in ranks for f in rank[case.name, precision][1]]
            got = assembled(gradients, parts, GRADIENTS[precision])
            error = sum(float((got[n] - g).norm()) ** 2 for n, g in gradients.items()) ** 0.5 / size
            assert error <= GRADIENTS[precision], (case.name, precision)
