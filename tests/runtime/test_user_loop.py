"""Clipping, groups of parameters, schedulers, accumulation, averages of weights and dropout are
those of one process under plans of every kind, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is an extra of hetplan")

from parity.asking import run_forked  # noqa: E402
from parity.cases import Case  # noqa: E402 (needs torch)
from parity.gradients import Written, assembled, read, whole  # noqa: E402
from parity.loops import CASES, DROPPING, WORLDS, alone  # noqa: E402
from parity.overflows import OVERFLOWS, PLANS  # noqa: E402

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """World size -> [rank] -> case -> (losses and norms, parts of the averages)."""
    folder = tmp_path_factory.mktemp("loops")
    run_forked("parity.loops", folder)
    return read(folder, WORLDS)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_users_loop_is_that_of_one_process(case: Case, written: Written) -> None:
    steps, averages = alone(case)
    ranks = [rank[case.name] for rank in written[case.world]]
    for ours, _, _ in ranks:
        assert [loss for loss, _ in ours] == pytest.approx([loss for loss, _ in steps], rel=1e-9)
        assert [norm for _, norm in ours] == pytest.approx([norm for _, norm in steps], rel=1e-9)
    for name, kept in assembled(averages, [f for rank in ranks for f in rank[1]], 1e-12).items():
        assert torch.allclose(kept, averages[name], rtol=1e-9, atol=1e-12), name


def test_optimizers_that_need_more_than_elements_are_refused_where_they_lack_it(
    written: Written,
) -> None:
    divided = {"data parallel": [], "pipeline with tied ends": ["LBFGS"]}
    for case in CASES:
        expected = divided.get(case.name, ["LBFGS", "Adafactor"])
        for rank in written[case.world]:
            assert rank[case.name][2] == expected, case.name


def test_compiled_layers_compute_the_same(tmp_path: Path) -> None:
    run_forked("parity.loops:compiled", tmp_path)


@pytest.mark.parametrize("case", DROPPING[1:], ids=[case.name for case in DROPPING[1:]])
def test_torchs_dropout_draws_the_same_masks_again(case: Case, written: Written) -> None:
    """In a pass that is computed again, on every tensor rank, and wherever the rows pass."""
    _, shapes = whole(case)
    (expected, of_one), *_ = [rank[DROPPING[0].name] for rank in written[1]]
    ranks = [rank[case.name] for rank in written[case.world]]
    assert [loss for loss, _ in ranks] == pytest.approx([expected] * case.world, rel=1e-12)
    gradients, plain = (
        assembled(shapes, parts, 1e-12) for parts in ([f for _, fs in ranks for f in fs], of_one)
    )
    for name, gradient in plain.items():
        assert torch.allclose(gradients[name], gradient, rtol=1e-9, atol=1e-12), name
        assert float(gradient.norm()) > 1e-6


def test_changed_checkpoints_and_full_disks_are_named(tmp_path: Path) -> None:
    """On all ranks, whichever has the trouble."""
    run_forked("parity.spoiled", tmp_path)
    for rank in range(2):
        told = torch.load(tmp_path / f"told-{rank}.pt")
        assert told["none"] == ""
        for name, file in (("flip", "rank-1.pt"), ("lost", "rank-0.pt"), ("more", "rank-7.pt")):
            place = tmp_path / name / "step-1"
            alone = "; no other checkpoint beside it is whole"
            assert told[name] == f"{place}: checkpoint is not what was written: {file}{alone}"
        assert told["harm"].startswith(
            "checkpoint cannot be read: rank 0: ValueError: rank-1.pt is no file"
        )
        assert not (tmp_path / "harm" / "harm").exists()
        full = f"checkpoint cannot be written: rank 1: the disk is full ({tmp_path})"
        assert told["full"] == full
        beside = "; step-1 beside it is whole: move step-2 away to go on from it"
        assert told["beside"].endswith(f"checkpoint is not what was written: rank-1.pt{beside}")


def test_a_step_whose_gradients_overflow_is_skipped_on_all_ranks(tmp_path: Path) -> None:
    """As torch.amp.GradScaler has it: the scale halves, and doubles behind two good steps."""
    run_forked("parity.overflows", tmp_path)
    for rank in range(2):
        told = torch.load(tmp_path / f"told-{rank}.pt")
        assert set(told) == set(PLANS)
        for name, (steps, kept) in told.items():
            assert [scale for scale, _, _ in steps] == [1.0, 0.5, 0.5, 1.0, 0.5, 0.5], name
            assert [moved for _, moved, _ in steps] == [not over for over in OVERFLOWS], name
            assert [has for _, _, has in steps] == [{not over} for over in OVERFLOWS], name
            assert kept


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What rank 0 and one process have, see `parity.keeping`."""
    folder = tmp_path_factory.mktemp("keeping")
    run_forked("parity.keeping", folder)
    return torch.load(folder / "told.pt")


@pytest.mark.parametrize("plan", ["dp", "pp"])
def test_saving_loading_and_evaluating_are_those_of_one_process(plan: str, kept: Any) -> None:
    told, expected = kept[plan], kept["alone"]
    for name in ("evaluated", "losses", "evaluated behind"):
        assert told[name] == pytest.approx(expected[name], rel=1e-9), name
    assert told["step"] == 4 and told["state of rank 1"] == {}
    assert told["state"].keys() == expected["state"].keys()
    for name, value in expected["state"].items():
        assert torch.allclose(told["state"][name], value, rtol=1e-9, atol=1e-12), name


def test_what_evaluation_cannot_say_is_refused(kept: Any) -> None:
    assert "computes something else in evaluation" in kept["other"]
    assert "this engine only trains" in kept["stock"]
