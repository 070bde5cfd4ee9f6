"""Loss and every gradient of a plan equal those of one process, for all plan shapes of
`parity.cases`; in half precision within the rounding of the type."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is an extra of hetplan")

from hetplan.files import read_json  # noqa: E402
from parity.asking import run_forked  # noqa: E402
from parity.cases import CASES, Case  # noqa: E402 (needs torch)
from parity.curves import OPTIMIZERS, PLANS, STEPS  # noqa: E402
from parity.frozen import alone  # noqa: E402
from parity.gradients import STAGED, assembled, single  # noqa: E402
from parity.halves import CURVE, PRECISIONS, WORLDS, chosen  # noqa: E402

TOLERANCE = {"float64": 1e-10, "float32": 1e-5}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """World size -> [rank] -> case -> (loss, fragments)."""
    folder = tmp_path_factory.mktemp("parity")
    run_forked("parity.gradients", folder)
    return {
        world: [torch.load(folder / f"found-{world}-{rank}.pt") for rank in range(world)]
        for world in sorted({case.world for case in CASES})
    }


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_loss_and_gradients_equal_one_process(
    case: Case, found: dict[int, list[dict[str, Any]]]
) -> None:
    losses = [rank[case.name][0] for rank in found[case.world]]
    fragments = [f for rank in found[case.world] for f in rank[case.name][1]]
    loss, gradients = single(case)
    tolerance = TOLERANCE[case.dtype]
    assert len(set(losses)) == 1
    assert losses[0] == pytest.approx(loss, rel=tolerance)
    for name, gradient in assembled(gradients, fragments).items():
        expected = gradients[name]
        error = float((gradient - expected).norm())
        assert error <= tolerance * max(float(expected.norm()), 1e-3), f"{name}: {error}"
    assert any(float(g.norm()) > 1e-6 for g in gradients.values())


@pytest.mark.parametrize("name", STAGED)
def test_staging_and_lanes_change_nothing(
    name: str, found: dict[int, list[dict[str, Any]]]
) -> None:
    """Copies to other buffers and back, and no tags: the same numbers, bit by bit."""
    (case,) = [case for case in CASES if case.name == name]
    for rank in found[case.world]:
        (loss, fragments), (again, staged) = rank[name], rank[f"staged: {name}"]
        assert loss == again and len(fragments) == len(staged)
        for one, other in zip(fragments, staged, strict=True):
            assert {**one, "values": None} == {**other, "values": None}
            assert torch.equal(one["values"], other["values"])


def test_there_are_enough_shapes() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 60
    assert {case.world for case in CASES} == set(range(2, 9))


@pytest.fixture(scope="module")
def curves(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, dict[tuple[str, str], list[float]]]:
    """The folder with checkpoints, and (plan, optimizer) -> losses."""
    folder = tmp_path_factory.mktemp("curves")
    run_forked("parity.curves", folder)
    return folder, loaded(folder, "curves")


def loaded(folder: Path, name: str) -> dict[tuple[str, str], list[float]]:
    """What the ranks of all world sizes found."""
    found: dict[tuple[str, str], list[float]] = {}
    for file in folder.glob(f"{name}-*.pt"):
        found |= torch.load(file)
    assert {plan for plan, _ in found} == set(PLANS)
    return found


Curves = tuple[Path, dict[tuple[str, str], list[float]]]


def test_any_two_plans_give_the_same_loss_curve(curves: Curves) -> None:
    """Ten steps, with momentum and with AdamW; the model learns, so the curves are not flat."""
    for optimizer in OPTIMIZERS:
        first, *others = [
            curve for (_, used), curve in sorted(curves[1].items()) if used == optimizer
        ]
        assert first[-1] < 0.97 * first[0]
        for curve in others:
            assert curve == pytest.approx(first, rel=1e-8)


def test_a_checkpoint_goes_on_under_another_plan(curves: Curves) -> None:
    """Other cuts, widths, shares, ZeRO levels and numbers of ranks: the second half of the same
    curve."""
    folder, whole = curves
    run_forked("parity.resumed", folder)
    for key, losses in loaded(folder, "resumed").items():
        assert losses == pytest.approx(whole[key][STEPS // 2 :], rel=1e-8), key


def test_frozen_parameters_stay_as_they_are(tmp_path: Path) -> None:
    """Whatever the ZeRO level and the optimizer, and across checkpoints."""
    run_forked("parity.frozen", tmp_path)
    found, kept = torch.load(tmp_path / "frozen.pt")
    for name in OPTIMIZERS:
        losses, expected = alone(name)
        assert found[name] == pytest.approx(losses, rel=1e-9)
        assert losses[-1] < 0.9 * losses[0]
        held = [values for key, values in kept.items() if key.startswith(name)]
        assert sum(map(len, held)) >= 8
        for values in held:
            assert all(torch.equal(value, expected[key]) for key, value in values.items())


def test_a_checkpoint_has_the_unsplit_names(curves: Curves) -> None:
    """What is stored can be read without hetplan's plans: every tensor once, whole."""
    dcp: Any = pytest.importorskip("torch.distributed.checkpoint")
    folder = curves[0] / "ZeRO 3-adamw" / f"step-{STEPS // 2}"
    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    shapes = read_json(folder / "hetplan.json")["shapes"]
    assert {f"model.{name}" for name in shapes} == {
        key for key in stored if key.startswith("model.")
    }
    for name, shape in shapes.items():
        for key in (f"model.{name}", f"optimizer.{name}.exp_avg", f"optimizer.{name}.exp_avg_sq"):
            ends = sorted((c.offsets[0], c.offsets[0] + c.sizes[0]) for c in stored[key].chunks)
            assert [0, *(end for _, end in ends)] == [*(begin for begin, _ in ends), prod(shape)]


# Relative errors of the loss, of all gradients together, and of the losses of ten steps:
# docs/runtime.md has them.
LOSS = {"bf16": 5e-3, "fp16": 5e-4}


GRADIENTS = {"bf16": 2e-2, "fp16": 2.5e-3}


LOSSES = {"bf16": 5e-3, "fp16": 1e-3}


@pytest.fixture(scope="module")
def found_in_halves(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[int, list[dict[Any, Any]]]:
    """World size -> [rank] -> (case, precision) -> (loss, fragments)."""
    folder: Path = tmp_path_factory.mktemp("halves")
    run_forked("parity.halves", folder)
    return {
        world: [torch.load(folder / f"found-{world}-{rank}.pt") for rank in range(world)]
        for world in WORLDS
    }


@pytest.mark.parametrize("case", chosen(), ids=[case.name for case in chosen()])
def test_loss_and_gradients_are_those_of_one_process(
    case: Case, found_in_halves: dict[int, list[dict[Any, Any]]]
) -> None:
    loss, gradients = single(case)
    size = sum(float(g.norm()) ** 2 for g in gradients.values()) ** 0.5
    errors = {}
    for precision in PRECISIONS:
        ranks = [rank[case.name, precision] for rank in found_in_halves[case.world]]
        assert ranks[0][0] == pytest.approx(loss, rel=LOSS[precision])
        whole = assembled(gradients, [fragment for rank in ranks for fragment in rank[1]])
        assert {g.dtype for g in whole.values()} == {next(iter(gradients.values())).dtype}
        errors[precision] = (
            sum(float((whole[n] - g).norm()) ** 2 for n, g in gradients.items()) ** 0.5 / size
        )
        assert errors[precision] <= GRADIENTS[precision]
    # it was rounded, as either type does
    assert errors["fp16"] < errors["bf16"] and errors["fp16"] > 1e-5


def test_training_has_the_curve_of_fp32(
    found_in_halves: dict[int, list[dict[Any, Any]]],
) -> None:
    curves = found_in_halves[PLANS[CURVE].world_size][0]["curves"]
    assert curves["fp32"][-1] < 0.8 * curves["fp32"][0]
    for precision in PRECISIONS:
        assert curves[precision] == pytest.approx(curves["fp32"], rel=LOSSES[precision])
        assert curves[precision] != curves["fp32"]
